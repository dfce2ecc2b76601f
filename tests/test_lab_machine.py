"""lab.machine: sentences, not tracebacks, for what a first run may lack; from plain data."""

import ast
import dataclasses
import pathlib
import subprocess
import sys
import tomllib

import pytest

from minititan.lab import machine
from minititan.lab.machine import Machine, Notebook, NotReady, look, notebooks_here, report, tell

ROOT = pathlib.Path(__file__).parent.parent
PACKAGES = machine.CORE + machine.NOTEBOOK + machine.EXTRA
WHOLE = Machine(
    python=(3, 12, 1),
    cores=8,
    load=0.3,
    memory=16 * 10**9,
    free=12 * 10**9,
    shm=8 << 30,
    versions=dict.fromkeys(PACKAGES, "1.0") | {"torch": "2.13.0+cpu"},
)
NOTEBOOKS = [
    Notebook("00", 8),
    *(Notebook(f"0{i}", 4) for i in (2, 3, 4)),
    Notebook("13", 4, ("torchao",)),
    Notebook("20", 0),
]


def but(**changes) -> Machine:
    return dataclasses.replace(WHOLE, **changes)


def without(*names) -> Machine:
    return but(versions={k: v for k, v in WHOLE.versions.items() if k not in names})


def test_a_machine_with_everything_gets_its_numbers_and_no_warning():
    assert tell(WHOLE, NOTEBOOKS).splitlines() == [
        "8 cores · 16 GB memory, 12 GB free · 0 GPUs · Python 3.12.1 · torch 2.13.0+cpu",
        "Notebooks 02-04 and 13: 4 ranks on the CPU, a core each.",
        "Notebook 00: 8 ranks on the CPU, a core each.",
        "Notebook 20: in this process, without ranks.",
        "Their sections 'On real GPUs': the same calls on the CPU, for there is no GPU.",
    ]


@pytest.mark.parametrize(
    ("here", "words"),
    [
        (but(cores=2), "8 ranks on the CPU, sharing 2 cores"),
        (but(gpus=["H200"]), "1 GPU (H200)"),
        (but(gpus=["H200"]), "the same calls on the CPU, for one GPU is no group"),
        (but(gpus=["H200"] * 4), "on up to 4 GPUs, with NCCL"),
        (without("torchao"), "Notebook 13 will ask for torchao, which is missing: run pip install torch==2.13.0"),
        (but(free=9 * 10**8), "Only 0.9 GB of memory are free; 8 ranks want 1.3 GB. Close something"),
        (but(load=19.9, cores=2), "busy: 19.9 processes want its 2 cores. Results will be right; times"),
        (but(gpus=["H200"] * 2, shm=64 << 20), "/dev/shm has 0.1 GB, and NCCL"),
        (but(gpus=["H200"] * 2, shm=None), "/dev/shm is not there, and NCCL"),
        (but(system="Darwin"), "On Darwin each rank is a new interpreter"),
        (but(system="Windows"), "use WSL"),
    ],
)
def test_what_is_less_than_it_could_be_is_said_in_a_sentence(here, words):
    assert words in tell(here, NOTEBOOKS)


@pytest.mark.parametrize(
    "here",
    [
        without("transformers"),  # which none of these notebooks asks for
        but(shm=None),  # ranks on the CPU do without
        but(load=None, memory=None, free=None, shm=None),  # what cannot be told
    ],
)
def test_what_does_not_matter_here_is_not_said(here):
    assert machine.warnings(here, NOTEBOOKS) == []


@pytest.mark.parametrize(
    ("here", "words"),
    [
        (but(python=(3, 9, 18)), "This notebook's kernel is Python 3.9.18; 3.11 or newer is needed"),
        (but(python=(3, 9, 18), versions={}), "Python 3.9.18"),
        (without("torch"), "Python 3.12.1, has no torch. Is it the environment that the README makes?"),
        (without("torch", "tqdm", "numpy"), "has no torch, tqdm and numpy."),
        (but(versions=WHOLE.versions | {"torch": "2.9.1"}), "torch 2.9.1 is too old, 2.11 is needed"),
    ],
)
def test_when_nothing_would_run_the_cell_stops_with_a_sentence(here, words):
    with pytest.raises(NotReady) as caught:
        tell(here, NOTEBOOKS)
    (shown,) = caught.value._render_traceback_()
    assert words in shown and "\n" not in shown and ("pip install" in shown or "README" in shown)


def test_this_machine_and_these_notebooks():
    here = look()
    assert here.cores >= 1 and here.python[:2] == sys.version_info[:2] and here.versions["torch"]
    notebooks = {n.number: n for n in notebooks_here()}
    assert notebooks["00"].ranks == 8 and notebooks["20"].ranks == 0
    assert notebooks["13"].packages == ("torchao",) and "tensorboard" in notebooks["18"].packages
    assert report().count("torch ") >= 1


def test_the_packages_are_those_of_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    every = [*project["dependencies"], *(d for extra in project["optional-dependencies"].values() for d in extra)]
    names = {d.split(">")[0].split("=")[0] for d in every}
    assert set(PACKAGES) <= names
    assert set(machine.CORE) == {d.split(">")[0] for d in project["dependencies"]}
    assert machine.INSTALL in (ROOT / "README.md").read_text()
    assert project["requires-python"] == ">=" + ".".join(map(str, machine.OLDEST_PYTHON))


def test_it_can_speak_in_an_old_python_and_where_nothing_is_installed():
    for name in ("minititan/__init__.py", "minititan/lab/__init__.py", "minititan/lab/machine.py"):
        ast.parse((ROOT / name).read_text(), feature_version=(3, 8))
    code = f"import sys; sys.path[:0] = [{str(ROOT)!r}]; from minititan.lab import machine\n"
    code += "print(*machine.why_not(machine.look())); print({'torch', 'numpy', 'cloudpickle'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-S", "-I", "-c", code], capture_output=True, text=True, timeout=60)
    assert "has no torch, cloudpickle, tyro, tqdm" in done.stdout, done.stderr
    assert done.stdout.endswith("set()\n")
