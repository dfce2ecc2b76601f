"""A technique is one file: it imports torch and the standard library, and runs when copied alone into an empty folder."""

import ast
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

PACKAGE = pathlib.Path(__file__).parent.parent / "minititan"
TECHNIQUES = sorted(p for p in PACKAGE.glob("*.py") if p.stem not in ("__init__", "train", "dry_run"))
ALSO_ALLOWED = {
    "float8": {"torchao"},
    "fault_tolerance": {"torchft"},
    "planner": {"tyro"},
    "checkpoint": {"safetensors"},
    "metrics": {"wandb"},
}
WITH_DEMO = [p for p in TECHNIQUES if "\ndef demo(" in p.read_text()]


def roots_imported(path: pathlib.Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add("." if node.level else node.module.split(".")[0])
    return found


@pytest.mark.parametrize("path", TECHNIQUES, ids=lambda p: p.stem)
def test_imports_torch_and_the_standard_library_only(path):
    allowed = set(sys.stdlib_module_names) | {"torch"} | ALSO_ALLOWED.get(path.stem, set())
    assert roots_imported(path) <= allowed


def test_each_file_has_its_tests():
    tests = {p.name for p in pathlib.Path(__file__).parent.glob("test_*.py")}
    assert {f"test_{p.stem}.py" for p in (*TECHNIQUES, PACKAGE / "train.py", PACKAGE / "dry_run.py")} <= tests


def test_every_file_imports_alone(tmp_path):
    for path in TECHNIQUES:
        shutil.copy(path, tmp_path)
    names = [p.stem for p in TECHNIQUES]
    code = f"import sys; sys.path = [p for p in sys.path if {str(PACKAGE.parent)!r} != p]\n"
    code += "".join(f"import {name}\n" for name in names) + "print([m for m in sys.modules if 'minititan' in m])"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert "'minititan'" not in done.stdout


@pytest.mark.full
@pytest.mark.parametrize("path", WITH_DEMO, ids=lambda p: p.stem)
def test_a_lone_copy_proves_itself_under_torchrun(path, tmp_path):
    shutil.copy(path, tmp_path)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", path.name]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    exact = "\n".join(
        line for line in done.stdout.splitlines() if "bf" not in line
    )  # what bf16 costs is told, not proven
    errors = [float(e) for e in re.findall(r"\d\.\d+e[-+]\d+", exact)]
    errors += [int(n) for n in re.findall(r"(\d+) (?:of \d+ \w+|groups) differ", exact)]
    assert errors and max(errors) < 1e-10, done.stdout
