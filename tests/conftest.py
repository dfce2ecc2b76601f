"""Markers, and the promise that the tests leave no process behind."""

import os

import psutil
import pytest
import torch

# Small models: threads that wait for each other cost more than they bring. On a busy machine they cost most: one second
# of tiny operators in notebook 03 took two minutes beside others. Kernels and all other children inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)


FIRST_NOTEBOOKS = ("00", "01", "02", "06")


def pytest_configure(config):
    config.addinivalue_line("markers", "full: a whole matrix, or minutes; runs with --full, as .ci/run does")


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="also run the whole matrices, and all notebooks (minutes)")


@pytest.hookimpl(tryfirst=True)  # before -m full is looked at
def pytest_collection_modifyitems(config, items):
    for item in items:
        if item.path.suffix == ".ipynb" and item.path.name[:2] not in FIRST_NOTEBOOKS:
            item.add_marker(pytest.mark.full)
    if not config.getoption("--full"):
        for item in items:
            if "full" in item.keywords:
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
