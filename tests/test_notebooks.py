"""The committed notebooks read well as they are: executed in order, no noise, every section there.

That they run is nbmake's part: `pytest --nbmake notebooks`.
"""

import copy
import pathlib
import re
import symtable

import nbformat
import pytest

FOLDER = pathlib.Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
SECTIONS = [
    "The problem in numbers",
    "By hand",
    "Native",
    "Proof",
    "Cost",
    "Break it",
    "Exercises",
    "On real GPUs",
    "Lift it",
]
MAX_BYTES = 300_000
# a path from the root, as a tool or a traceback would print it: /home/..., /root/..., /tmp/..., C:\...
ABSOLUTE_PATH = re.compile(r"(?<![\w.:/~<])/(?:home|root|work|tmp|usr|opt|var|Users|mnt|private)/[\w.]|\b[A-Z]:\\\\?\w")


def faults(notebook: nbformat.NotebookNode, size: int) -> list[str]:
    """What a reader would trip over, one sentence each."""
    found = []
    if size > MAX_BYTES:
        found.append(f"{size:,} bytes, more than {MAX_BYTES:,}")
    if "widgets" in notebook.metadata:
        found.append("widget state in the metadata")
    code = [c for c in notebook.cells if c.cell_type == "code" and c.source.strip()]
    for k, cell in enumerate(code):
        if ".observe(" in cell.source:
            lost = _used_by_functions(cell.source) & set().union(*(_set_at_the_top(c.source) for c in code[k + 1 :]))
            found += [f"a later cell sets {name}, which a widget's function reads when it is turned" for name in lost]
    counts = [c.execution_count for c in code]
    if counts != list(range(1, len(counts) + 1)):
        found.append(f"cells out of order: {counts}")
    for cell in notebook.cells:
        if ABSOLUTE_PATH.search(cell.source):
            found.append(f"absolute path in a cell: {cell.source[:80]!r}")
        if cell.cell_type != "code":
            continue
        if re.search(r"^\s*!", cell.source, re.M):
            found.append(f"a bare ! in a cell: {cell.source[:80]!r}")
        tags = cell.metadata.get("tags", [])
        for output in cell.outputs:
            if output.output_type == "stream" and output.name == "stderr":
                found.append(f"stderr in an output: {output.text[:80]!r}")
            if output.output_type == "error" and "raises-exception" not in tags:
                found.append(f"an error without the tag raises-exception: {output.evalue[:80]!r}")
            data = output.get("data", {})
            if "image/png" in data and data.get("text/plain", "").startswith("<Figure size"):
                found.append(f"a figure without a description, alt of draw.Drawing: {cell.source[:80]!r}")
            told = "\n".join(output.get("traceback", [])) + str(output.get("text", ""))
            told += "".join(str(v) for k, v in data.items() if k.startswith("text/"))
            if match := ABSOLUTE_PATH.search(told):
                found.append(f"absolute path in an output: {told[match.start() : match.start() + 80]!r}")
    return found


def _used_by_functions(source: str) -> set[str]:
    """Names of the notebook that functions of a cell read, when they are called."""
    names, tables = set(), symtable.symtable(source, "cell", "exec").get_children()
    while tables:
        table = tables.pop()
        tables += table.get_children()
        names |= {s.get_name() for s in table.get_symbols() if s.is_global() and not s.is_assigned()}
    return names


def _set_at_the_top(source: str) -> set[str]:
    symbols = symtable.symtable(source, "cell", "exec").get_symbols()
    return {s.get_name() for s in symbols if s.is_assigned()}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_reads_well(path):
    assert not faults(nbformat.read(path, as_version=4), path.stat().st_size)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_has_every_section(path):
    notebook = nbformat.read(path, as_version=4)
    title = notebook.cells[0].source.splitlines()[0]
    assert title.startswith("# ") and title.rstrip().endswith("?"), f"the title is a question: {title!r}"
    headings = re.findall(r"^## (?:\d+\. )?(.*)$", "\n".join(c.source for c in notebook.cells), re.M)
    present = [s for s in SECTIONS if any(h.startswith(s) for h in headings)]
    assert present == SECTIONS, f"missing: {set(SECTIONS) - set(present)}; has {headings}"
    solutions = [c for c in notebook.cells if "solution" in c.metadata.get("tags", [])]
    assert 2 <= len(solutions) <= 4
    assert all(c.metadata.jupyter.source_hidden for c in solutions)


def sound() -> nbformat.NotebookNode:
    cell = nbformat.v4.new_code_cell("print(1)", execution_count=1)
    cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text="1\n")]
    return nbformat.v4.new_notebook(cells=[cell])


def test_a_sound_notebook_has_no_faults():
    assert faults(sound(), 100) == []


def _stderr(nb):
    nb.cells[0].outputs[0].name = "stderr"


def _path(nb):
    nb.cells[0].outputs[0].text = "saved to /home/somebody/x.png"


def _path_in_html(nb):
    nb.cells[0].outputs = [nbformat.v4.new_output("display_data", data={"text/html": "<b>/tmp/ipykernel_3/4.py</b>"})]


def _widgets(nb):
    nb.metadata["widgets"] = {"state": {}}


def _order(nb):
    nb.cells[0].execution_count = 2


def _unexecuted(nb):
    nb.cells[0].execution_count = None


def _bang(nb):
    nb.cells[0].source = "x = 1\n!ls"


def _error(nb):
    nb.cells[0].outputs = [nbformat.v4.new_output("error", ename="E", evalue="e", traceback=["E: e"])]


def _slider_loses_its_name(nb):
    nb.cells[0].source = "def redraw(_):\n    print(name)\n\n\nslider.observe(redraw)"
    nb.cells.append(nbformat.v4.new_code_cell("for name in range(3):\n    print(name)", execution_count=2))


def _no_words(nb):
    data = {"image/png": "iVBORw0KGgo=", "text/plain": "<Figure size 700x320 with 1 Axes>"}
    nb.cells[0].outputs = [nbformat.v4.new_output("display_data", data=data)]


SPOILS = [
    _no_words,
    _stderr,
    _path,
    _path_in_html,
    _widgets,
    _order,
    _unexecuted,
    _bang,
    _error,
    _slider_loses_its_name,
]


@pytest.mark.parametrize("spoil", SPOILS)
def test_each_fault_is_found(spoil):
    notebook = copy.deepcopy(sound())
    spoil(notebook)
    assert len(faults(notebook, 100)) == 1


def test_oversize_is_found():
    assert len(faults(sound(), MAX_BYTES + 1)) == 1


def test_an_error_with_the_tag_is_allowed():
    notebook = sound()
    _error(notebook)
    notebook.cells[0].metadata["tags"] = ["raises-exception"]
    assert faults(notebook, 100) == []
