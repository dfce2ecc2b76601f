"""One list of dependencies, and commands in the README, CI and environment.yml that agree with it."""

import pathlib
import re
import shlex
import tomllib

import yaml

ROOT = pathlib.Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
INSTALL = ["torch==2.13.0", "-e", ".[workbook]"]


def pip_arguments(text: str) -> list[list[str]]:
    """The arguments of every `pip install` in a text."""
    lines = re.findall(r"pip install ([^&;\n]*)", text)
    return [shlex.split(line) for line in lines]


def test_environment_yml_is_python_pip_and_the_same_install():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    python, pip, through_pip = environment["dependencies"]
    assert python.startswith("python=3.") and pip == "pip"
    assert [word for line in through_pip["pip"] for word in line.split()] == INSTALL


def test_readme_and_ci_install_the_same():
    for name in ("README.md", ".ci/run"):
        installs = [[w for w in a if w != "-q"] for a in pip_arguments((ROOT / name).read_text()) if "-e" in a]
        assert installs and installs[0] == INSTALL, name
        # what CI installs afterwards is an extra of this package, never a list of its own
        assert all(words in (INSTALL, ["-e", ".[browser]"]) for words in installs), name


def test_ci_runs_the_test_command_of_the_readme():
    command = ".venv/bin/pytest"
    assert command in (ROOT / "README.md").read_text().split("```")[3]
    assert command in (ROOT / ".ci/run").read_text()


def test_the_pinned_torch_satisfies_the_package():
    (torch,) = [d for d in PROJECT["dependencies"] if d.startswith("torch")]
    assert torch == "torch>=2.11"


def test_workbook_has_every_extra():
    """But for the browser's, which is no use without the system's Chromium."""
    extras = PROJECT["optional-dependencies"]
    (whole,) = [d for d in extras["workbook"] if d.startswith("minititan[")]
    assert set(whole[len("minititan[") : -1].split(",")) == set(extras) - {"workbook", "browser"}
