"""Markers, and the promise that the tests leave no process behind."""

import psutil
import pytest
import torch

torch.set_num_threads(
    1
)  # small models: threads that wait for each other cost more than they bring, on a busy machine most


FIRST_NOTEBOOKS = ("00", "01", "02", "04", "06")


def pytest_configure(config):
    config.addinivalue_line("markers", "full: a whole matrix, or minutes; runs with --full, as .ci/run does")


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="also run the whole matrices, and all notebooks (minutes)")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--full"):
        for item in items:
            late_notebook = item.path.suffix == ".ipynb" and item.path.name[:2] not in FIRST_NOTEBOOKS
            if "full" in item.keywords or late_notebook:
                item.add_marker(pytest.mark.skip(reason="runs with --full, which keeps the default below 8 minutes"))


@pytest.fixture(scope="session", autouse=True)
def no_process_left():
    """After the last test, this process has no child but the launcher's fork server, and that has none."""
    yield
    from minititan.lab._start import ForkServer

    server = ForkServer._current
    expected = {server.process.pid} if server is not None else set()
    left = [p for p in psutil.Process().children(recursive=True) if p.pid not in expected]
    assert not left, f"processes left by the tests: {left}"
