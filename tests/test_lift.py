"""Each module file, copied alone into an empty folder, trains `transformers`' Llama (or a plain model) as one process does.

The recipes are those that a reader sees: the cells of notebooks/21_lift.ipynb that are tagged "project" (somebody's model and
loop) and "lift" (at most ten lines for one file), taken from the notebook as they stand. How they are isolated, run and
compared is this file's own. README.md's example is run as it stands there, too.
"""

import ast
import functools
import inspect
import linecache
import logging
import os
import pathlib
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import NamedTuple

import cloudpickle
import nbformat
import pytest
import torch
import torch.distributed as dist
from test_standalone import PACKAGE, TECHNIQUES

from minititan.lab.launch import launch, preload

pytest.importorskip("transformers")

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # or each rank would import this file, and all that it does
ROOT = PACKAGE.parent
HEAVY = (
    *("transformers.models.llama.modeling_llama", "torch.distributed.pipelining", "torch.distributed.checkpoint"),
    *("torchao.float8", "torch._inductor.custom_graph_pass"),
)


class Lift(NamedTuple):
    recipe: Callable
    ranks: int
    truth: Callable | None
    tolerance: float


def cells(*tags: str) -> list[str]:
    notebook = nbformat.read(ROOT / "notebooks" / "21_lift.ipynb", as_version=4)
    return [c.source for c in notebook.cells if set(tags) & set(c.metadata.get("tags", []))]


def read_lifts() -> tuple[dict, dict[str, Lift]]:
    """What the notebook's project defines, and its lifts by name. Nothing runs: `lift` only takes note."""
    lifts = {}

    def lift(recipe, ranks, truth=None, tolerance=1e-10):
        assert recipe.__name__ not in lifts
        lifts[recipe.__name__] = Lift(recipe, ranks, truth, tolerance)

    project = {"__name__": "a_project", "lift": lift}
    for i, source in enumerate(cells("project", "lift")):
        name = f"<cell {i} of the lifts>"
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        exec(compile(source, name, "exec"), project)
    return project, lifts


PROJECT, LIFTS = read_lifts()


def lines_of(function: Callable) -> int:
    """Lines of a function's body on which there is code."""
    (definition,) = ast.parse(inspect.getsource(function)).body
    first, last = definition.body[0].lineno, definition.end_lineno
    lines = inspect.getsource(function).splitlines()[first - 1 : last]
    return sum(bool(line.strip()) and not line.strip().startswith("#") for line in lines)


class _Refuse:
    """Finds nothing, and refuses what a stranger's project does not have."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "minititan":
            raise ImportError(f"a lifted file asks for {name}")


def _enter(folder: str) -> None:
    """On a rank: the launcher's own modules are forgotten, the folder is all there is."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "minititan"]:
        del sys.modules[name]
    for lone in TECHNIQUES:
        assert lone.stem not in sys.modules
    sys.meta_path.insert(0, _Refuse())
    warnings.simplefilter(
        "default", UserWarning
    )  # torch's tracer hides some by not showing them; the rest fail on stderr
    os.chdir(folder)
    sys.path[:] = [folder, *(p for p in sys.path if not os.path.isdir(os.path.join(p, "minititan")))]


def _run(recipe: Callable, name: str, folder: str) -> dict:
    _enter(folder)
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # whole tensors from two axes: two gathers
    model, losses = recipe()
    state = model if isinstance(model, dict) else dict(model.named_parameters())
    whole = {key: p.full_tensor() if hasattr(p, "full_tensor") else p for key, p in state.items()}
    losses = torch.stack([torch.as_tensor(loss, dtype=torch.float64).detach() for loss in losses])
    dist.all_reduce(losses)
    assert not [m for m in sys.modules if m.partition(".")[0] == "minititan"]
    return {
        "parameters": {
            key.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", ""): p.detach().clone()
            for key, p in whole.items()
        },
        "losses": losses / dist.get_world_size(),
        "file": getattr(sys.modules.get(name), "__file__", None),
    }


def _one_process(build, train):
    model = build()
    return model, train(model)


@functools.cache
def reference() -> dict:
    """The project alone, in one process, with no file of ours beside it."""
    return train_alone(functools.partial(_one_process, PROJECT["build"], PROJECT["train"]), "", "/")


def train_alone(truth: Callable, name: str, folder: str) -> dict:
    preload(*HEAVY)
    (found,) = launch(_run, truth, name, folder, ranks=1, device="cpu", timeout=120)
    assert len(found["losses"]) >= 3 and found["losses"][-1] < found["losses"][0], found["losses"]
    return found


def distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    assert ours.shape == theirs.shape
    return ((ours - theirs).norm() / theirs.norm()).item()


def worst(parts: list[dict], truth: dict) -> float:
    """Largest error of the losses and of each parameter on each rank; all parameters must be there."""
    assert {key for part in parts for key in part["parameters"]} == set(truth["parameters"])
    errors = [distance(part["losses"], truth["losses"]) for part in parts]
    errors += [distance(p, truth["parameters"][key]) for part in parts for key, p in part["parameters"].items()]
    return max(errors)


def lifted(name: str, folder: pathlib.Path, recipe: Callable | None = None) -> float:
    """Copy, run, compare -> the largest error."""
    lift = LIFTS[name]
    shutil.copy(PACKAGE / f"{name}.py", folder)
    assert os.listdir(folder) == [f"{name}.py"]
    truth = train_alone(lift.truth, name, str(folder)) if lift.truth else reference()
    preload(*HEAVY)
    parts = launch(_run, recipe or lift.recipe, name, str(folder), ranks=lift.ranks, device="cpu", timeout=200)
    assert {part["file"] for part in parts} == {str(folder / f"{name}.py")}, "the lone copy was not what was used"
    return worst(parts, truth)


# --- the recipes themselves ----------------------------------------------------------------------------------------


def test_every_module_is_lifted():
    assert set(LIFTS) == {path.stem for path in TECHNIQUES}


@pytest.mark.parametrize("name", LIFTS)
def test_a_recipe_is_short_and_needs_its_one_file_only(name):
    lift = LIFTS[name]
    assert (
        lines_of(lift.recipe) <= 10 and 2 <= lift.ranks <= 4 and lift.tolerance <= (1e-6 if name == "float8" else 1e-10)
    )
    tree = ast.parse(inspect.getsource(lift.recipe))
    found = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    found += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    assert found == [name]


def test_the_project_is_a_strangers():
    source = "\n".join(cells("project"))
    assert "minititan" not in source
    files = {path.stem for path in TECHNIQUES}
    for node in ast.walk(ast.parse(source)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) else []
        assert not files & {name.partition(".")[0] for name in names}


# --- each of them, on ranks ------------------------------------------------------------------------------------------


IN_A_HURRY = {
    "data_parallel",
    "fsdp",
    "tensor_parallel",
    "pipeline_parallel",
    "context_parallel",
    "checkpoint",
    "model",
}


@pytest.mark.parametrize(
    "name", [name if name in IN_A_HURRY else pytest.param(name, marks=pytest.mark.full) for name in LIFTS]
)
def test_lifted(name, tmp_path, capfd):
    error = lifted(name, tmp_path)
    assert error < LIFTS[name].tolerance, error
    assert capfd.readouterr().err == ""


def test_a_mistake_in_a_lift_is_seen(tmp_path):
    """Every rank reads the first one's rows: it trains, and is wrong."""
    build, train, line = (PROJECT[name] for name in ("build", "train", "line"))

    def same_rows():
        from fsdp import apply_fsdp

        mesh, _, n = line()
        model = apply_fsdp(build(), mesh)
        return model, train(model, 0, n)

    assert lifted("fsdp", tmp_path, same_rows) > 1e-2


def test_a_file_that_asks_for_the_package_is_refused(tmp_path):
    (tmp_path / "asks.py").write_text("from minititan import fsdp\n")

    def asks():
        _enter(str(tmp_path))
        try:
            import asks
        except ImportError as error:
            return str(error)
        return asks

    assert launch(asks, ranks=1, device="cpu") == ["a lifted file asks for minititan"]


@pytest.mark.full
def test_inductor_compiles_the_blocks_of_transformers(tmp_path):
    """The notebook's recipe traces and does not compile, as inductor takes half a minute on a busy machine."""
    build, train, line, shard = (PROJECT[name] for name in ("build", "train", "line", "shard"))

    def compiled():
        from regional_compile import compile_blocks

        warnings.simplefilter("ignore", DeprecationWarning)  # inductor's own import
        mesh, rank, n = line()
        model = shard(compile_blocks(build()), mesh)
        return model, train(model, rank, n)

    assert lifted("regional_compile", tmp_path, compiled) < 1e-10


# --- README ------------------------------------------------------------------------------------------------------


def readme_script() -> str:
    section = (ROOT / "README.md").read_text().partition("## Lift a file")[2].partition("\n## ")[0]
    (script,) = re.findall(r"```python\n(.*?)```", section, re.S)
    return script


def one_process_of(script: str) -> list[float]:
    """The losses of the same script without the lift: on all rows, and the model as it is."""
    plain = script.replace("from fsdp import apply_fsdp\n", "apply_fsdp = lambda model, mesh: model\n")
    assert plain != script

    def alone():
        names = {}
        exec(compile(plain, "train.py", "exec"), names)
        return names["losses"]

    return launch(alone, ranks=1, device="cpu")[0]


def test_the_readmes_script_as_it_stands(tmp_path):
    preload(*HEAVY)
    script = readme_script()
    shutil.copy(PACKAGE / "fsdp.py", tmp_path)
    lift = [line for line in script.splitlines() if "fsdp" in line]
    assert 0 < len(lift) <= 10

    def on_rank():
        _enter(str(tmp_path))
        names = {}
        exec(compile(script, "train.py", "exec"), names)
        return names["losses"], sys.modules["fsdp"].__file__

    truth = torch.tensor(one_process_of(script))
    found = launch(on_rank, ranks=2, device="cpu")
    assert {file for _, file in found} == {str(tmp_path / "fsdp.py")}
    losses = torch.tensor([losses for losses, _ in found]).mean(0)
    assert truth[-1] < truth[0] and distance(losses, truth) < 1e-6, (losses, truth)


@pytest.mark.full
def test_the_readmes_commands_under_torchrun(tmp_path):
    shutil.copy(PACKAGE / "fsdp.py", tmp_path)
    (tmp_path / "train.py").write_text(readme_script())
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py"]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    losses = [eval(line) for line in re.findall(r"^\[.*\]$", done.stdout, re.M)]
    assert len(losses) == 2, done.stdout + done.stderr
    preload(*HEAVY)
    truth = torch.tensor(one_process_of(readme_script()))
    assert distance(torch.tensor(losses).mean(0), truth) < 1e-6
