"""README's "Add a technique", enforced: what each module of the package has, or the reason why not.

That it stands alone and has its tests is tests/test_standalone.py's part, that links resolve tests/test_links.py's.
"""

import ast
import functools
import json
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
MODULES = sorted(p.stem for p in (ROOT / "minititan").glob("*.py") if p.stem not in ("__init__", "train", "dry_run"))
NO_HAND = {
    "parallel_dims": "names ranks, moves nothing",
    "model": "what the techniques are applied to",
    "data": "what the techniques are fed",
    "meta_init": "is by hand: torch has no initial values that do not depend on the layout",
    "async_tensor_parallel": "all_gather_matmul and matmul_reduce_scatter are by hand: torch has them on CUDA only",
    "metrics": "counts and writes, changes nothing",
    "planner": "is arithmetic",
}
NO_DEMO = {"planner": "its command line is one: python -m minititan.planner"}
NO_REFERENCES = {"data": "nothing in it is from elsewhere"}
NO_PICTURE = {"grad_clip": "one number", "optimizer": "two averages and a rate"}


def table(heading: str) -> dict[str, list[str]]:
    """The cells of the README's table under a heading, by the module in the first cell."""
    part = README.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [row.strip("|").split(" | ") for row in re.findall(r"^\| \[`.*\|$", part, re.M)]
    return {re.search(r"`(\w+)`", row[0])[1]: [cell.strip(" |") for cell in row] for row in rows}


@functools.cache
def source(module: str) -> str:
    return (ROOT / f"minititan/{module}.py").read_text(encoding="utf-8")


@functools.cache
def notebooks() -> dict[str, str]:
    found = {}
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        found[path.name] = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code")
    return found


def names(text: str) -> set[str]:
    tree = ast.parse(text)
    return {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}


def importers(module: str) -> list[str]:
    line = re.compile(rf"^\s*(?:from minititan\.{module} import|import minititan\.{module}|"
                      rf"from minititan import (?:\w+, )*{module}\b)", re.M)  # fmt: skip
    return sorted(name for name, code in notebooks().items() if line.search(code))


def missing(module: str) -> list[str]:
    """What the checklist asks of a module and is not there, one sentence each."""
    text, said = source(module), []
    doc = ast.get_docstring(ast.parse(text)) or ""
    if len(doc.splitlines()) < 15:
        said.append(f"a docstring of {len(doc.splitlines())} lines is not yet a lesson")
    by_hand = {name for name in names(text) if re.search(r"[a-z]_by_hand$|ByHand$", name)}
    for what, there, excuse in (
        ("References", re.search(r"^References\b", doc, re.M), NO_REFERENCES),
        ("a demo()", "\ndef demo(" in text and '\nif __name__ == "__main__":' in text, NO_DEMO),
        ("a name that ends in _by_hand or ByHand", by_hand, NO_HAND),
    ):
        if bool(there) == (module in excuse):
            said.append(f"{what} is {'there, and excused' if there else 'not there, and no reason is stated'}")
    rows = table("The modules")
    if module not in rows:
        return [*said, "no row in README's modules"]
    users, linked = importers(module), re.findall(r"notebooks/([^)]*)", rows[module][2])
    if not users:
        said.append("no notebook imports it")
    if not set(linked) <= set(users) and set(linked) & set(users) == set():
        said.append(f"README says {linked}, which do not import it; {users} do")
    return said


@pytest.mark.parametrize("module", MODULES)
def test_a_module_has_all_that_the_checklist_asks_for(module):
    assert missing(module) == []


def test_every_mechanism_has_a_row_whose_names_and_picture_are_there():
    rows = table("By hand, native, proven")
    have_hands = {m for m in MODULES if m not in NO_HAND} | {"meta_init", "async_tensor_parallel"}
    assert rows.keys() == have_hands
    for module, (_, by_hand, native, proven, picture, cpu, gpu) in rows.items():
        there = names(source(module))
        named = re.findall(r"`(\w+)`", f"{by_hand} {native}")
        assert named and set(named) <= there, f"{module}: no {set(named) - there}"
        assert proven and cpu and gpu, module
        assert (picture == "–") == (module in NO_PICTURE), f"{module}: a picture, or a reason in NO_PICTURE"
        if picture != "–":
            file = re.search(r"figures/(\w+)\.svg", picture)[1]
            assert any(file in code for code in notebooks().values()), f"{module}: no notebook saves {file}"


def test_the_gpu_column_is_what_the_gpu_script_runs():
    tree = ast.parse((ROOT / "tests/gpu/measure.py").read_text(encoding="utf-8"))
    (techniques,) = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Techniques"]
    run = [n.name for n in techniques.body if isinstance(n, ast.FunctionDef)]
    for module, row in table("By hand, native, proven").items():
        assert (row[-1] != "–") == any(name.startswith(module) for name in run), module


@pytest.mark.parametrize("section", ["throughput", "compile", "checkpoint"])
def test_a_notebook_shows_what_the_gpu_script_measured(section):
    assert any(f'show.gpu_figures("{section}")' in code for code in notebooks().values())


def test_every_module_and_notebook_has_its_row():
    assert {*MODULES, "train", "dry_run"} == table("The modules").keys()
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        (row,) = re.findall(rf"^\| \[[^]]*\]\(notebooks/{path.name}\) \|(.*)\|$", README, re.M)
        question, techniques, needs, minutes = (cell.strip() for cell in row.split("|"))
        title = "".join(json.loads(path.read_text(encoding="utf-8"))["cells"][0]["source"])
        assert title.splitlines()[0] == f"# {question}", path.name
        assert f"**Time** {minutes} minutes" in title, path.name
        assert techniques and needs


def test_what_is_missing_is_found(monkeypatch):
    monkeypatch.setitem(globals(), "source", lambda module: '"""Short."""\n\n\ndef demo():\n    pass\n')
    assert missing("fsdp") == [
        "a docstring of 1 lines is not yet a lesson",
        "References is not there, and no reason is stated",
        "a demo() is not there, and no reason is stated",
        "a name that ends in _by_hand or ByHand is not there, and no reason is stated",
    ]
    assert missing("unheard_of")[-1] == "no row in README's modules"
    monkeypatch.setitem(globals(), "source", lambda module: source_of_planner)
    assert "a demo() is there, and excused" in missing("planner")
    monkeypatch.setitem(globals(), "importers", lambda module: [])
    assert "no notebook imports it" in missing("fsdp")


source_of_planner = '"""..."""\n\n\ndef demo():\n    pass\n\n\nif __name__ == "__main__":\n    demo()\n'
