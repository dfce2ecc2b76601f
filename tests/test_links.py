"""Every link, anchor, path and module that the README and the notebooks' text name is there.

External addresses are only looked at, not fetched: nothing here needs a network.
"""

import ast
import functools
import json
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
README = ROOT / "README.md"
WRITTEN_LATER = {"figures/gpu.json"}  # by tests/gpu/run.sh, on a GPU
FOLDERS = "tests|minititan|figures|notebooks|[.]ci"
# a path of this repository in running text; <placeholders>, globs and "NN_name" are not paths
PATH = re.compile(rf"(?<![\w./-])(?:{FOLDERS})/[\w./-]*\w(?![\w<*{{])")
MODULE = re.compile(r"(?:-m|\bfrom|\bimport) (minititan(?:\.[a-z]\w*)+)")
IMPORT = re.compile(r"^from (?:minititan\.)?([\w.]+) import (\w+(?: as \w+)?(?:, \w+(?: as \w+)?)*)", re.M)
EXTERNAL = re.compile(r"https://[\w-]+(\.[\w-]+)+(?::\d+)?(?:[/#][^\s<>]*)?")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)


def texts(path: pathlib.Path) -> list[str]:
    """What is Markdown in a file: all of it, or a notebook's cells."""
    if path.suffix != ".ipynb":
        return [path.read_text(encoding="utf-8")]
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]


def headings(text: str) -> list[str]:
    return [h.strip() for h in re.findall(r"^#{1,6} (.*)$", FENCE.sub("", text), re.M)]


@functools.cache
def anchors(path: pathlib.Path) -> frozenset[str]:
    """The anchors of a file's headings: GitHub's rule in Markdown; in a notebook JupyterLab's, where it is read."""
    found: list[str] = []
    for heading in headings("\n\n".join(texts(path))):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)|[`*]", r"\1", heading)
        if path.suffix == ".ipynb":
            found.append(plain.replace(" ", "-"))
            continue
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        n = sum(re.fullmatch(re.escape(slug) + r"(-\d+)?", other) is not None for other in found)
        found.append(f"{slug}-{n}" if n else slug)
    return frozenset(found)


@functools.cache
def names_in(module: str) -> frozenset[str] | None:
    """What can be imported from a module of this package; None when there is no such module."""
    file = ROOT / "minititan" / (module.replace(".", "/") + ".py")
    if not file.exists():
        return None
    found = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        targets = node.targets if isinstance(node, ast.Assign) else [node]
        for target in targets:
            name = getattr(target, "name", getattr(target, "id", getattr(getattr(target, "target", None), "id", None)))
            found |= {name} if name else {alias.asname or alias.name for alias in getattr(target, "names", [])}
    return frozenset(found)


def faults(text: str, source: pathlib.Path) -> list[str]:
    """What is named in a Markdown text of the file `source` and is not there, one sentence each."""
    found = []
    fenced = FENCE.findall(text)
    prose = FENCE.sub("", text)
    ticks = re.findall(r"`([^`\n]+)`", prose)
    plain = re.sub(r"`[^`\n]+`", "code", prose)
    links = re.findall(r"(!?)\[((?:[^][]|\[[^][]*\])*)\]\(([^)]*)\)", prose)
    for image, label, target in links:
        if "://" in target or target.startswith("mailto:"):
            if not EXTERNAL.fullmatch(target):
                found.append(f"not an https address: {target!r}")
            continue
        if image and not label.strip():
            found.append(f"an image without a text in its place: {target!r}")
        path, _, anchor = target.partition("#")
        file = (source.parent / path).resolve() if path else source
        if not file.exists() or (path and not file.is_relative_to(ROOT)):
            found.append(f"no file {path!r}")
        elif anchor and anchor not in anchors(file):
            found.append(f"no heading {anchor!r} in {file.name}; there are {sorted(anchors(file))}")
        number, named = re.match(r"\d\d\b", label), re.match(r"(\d\d)_", file.name)
        if number and named and number[0] != named[1]:
            found.append(f"{label!r} leads to {file.name}")
    for address in re.findall(r"(?<![\w(])https?://[^\s)>\]]+", plain):
        if not EXTERNAL.fullmatch(address.rstrip(".,;:")):
            found.append(f"not an https address: {address!r}")
    for words in [*ticks, *(body for _, body in fenced)]:
        for path in PATH.findall(words):
            if path not in WRITTEN_LATER and not (ROOT / path).exists():
                found.append(f"no {path}")
        for module in MODULE.findall(words):
            inside = ROOT / module.replace(".", "/")
            if not inside.is_dir() and not inside.with_suffix(".py").exists():
                found.append(f"no module {module}")
    for _, body in fenced:
        for module, names in IMPORT.findall(body):
            known = names_in(module)
            for name in re.findall(r"(\w+)(?: as \w+)?", names) if known is not None else ():
                if name not in known:
                    found.append(f"no {name} in minititan/{module}.py")
    numbers = {p.name[:2] for p in (ROOT / "notebooks").glob("*.ipynb")}
    for number in re.findall(r"\b[Nn]otebooks? \[?(\d\d)\b", plain):
        if number not in numbers:
            found.append(f"no notebook {number}")
    for number in re.findall(r"(?:\*\*before this\*\*|\bnext:)\s*(\d\d)\b", plain):
        found.append(f"notebook {number} is named before or after this one without a link")
    return found


@pytest.mark.parametrize("path", [README, *NOTEBOOKS], ids=lambda p: p.stem)
def test_what_is_named_is_there(path):
    assert [fault for text in texts(path) for fault in faults(text, path)] == []


def test_the_readme_shows_every_notebook_under_its_question():
    rows = dict(re.findall(r"^\| \[[^]]*\]\(notebooks/([^)]*)\) \| ([^|]*\?) \|", README.read_text(), re.M))
    titles = {p.name: texts(p)[0].splitlines()[0].removeprefix("# ") for p in NOTEBOOKS}
    assert rows.keys() == titles.keys()
    assert list(rows) == sorted(rows)


@pytest.mark.parametrize("path", NOTEBOOKS[:-1], ids=lambda p: p.stem)
def test_a_notebook_ends_with_a_link_to_a_later_one(path):
    (later,) = re.findall(r"\bnext:\s*\[[^]]*\]\((\d\d_\w+\.ipynb)\)", texts(path)[-1])
    assert later > path.name


SOUND = """# A title, with `code` & more
See [this](../README.md), [that part](#A-title,-with-code-&-more), ![one step](../figures/fsdp_timeline.svg) and
[01, a mesh](01_mesh_and_dtensor.ipynb) in notebook 04, `torchrun --nproc-per-node 4 minititan/fsdp.py`,
`tests/test_<module>.py`, `python -m minititan.planner`, [a paper](https://arxiv.org/abs/1910.02054), `L / s`, `T/n`.
```python
from fsdp import apply_fsdp
from minititan.lab.launch import launch   # and a comment
from transformers import anything
```
**before this** [00, ranks](00_ranks_and_collectives.ipynb) · next: [01, a mesh](01_mesh_and_dtensor.ipynb)
"""


def test_a_sound_text_has_no_faults():
    source = ROOT / "notebooks/99_sound.ipynb"
    text = SOUND.replace("(#A-title,-with-code-&-more)", "(00_ranks_and_collectives.ipynb#Break-it)")
    assert faults(text, source) == []


@pytest.mark.parametrize(
    ("sound", "spoiled", "words"),
    [
        ("../README.md", "../READMEE.md", "no file '../READMEE.md'"),
        ("../README.md", "../../elsewhere.md", "no file"),
        ("../README.md", "../README.md#no-such-part", "no heading 'no-such-part' in README.md"),
        ("../figures/fsdp_timeline.svg", "../figures/gone.svg", "no file '../figures/gone.svg'"),
        ("![one step]", "![]", "an image without a text in its place"),
        ("[01, a mesh](01_", "[02, a mesh](01_", "'02, a mesh' leads to 01_mesh_and_dtensor.ipynb"),
        ("notebook 04", "notebook 98", "no notebook 98"),
        ("minititan/fsdp.py", "minititan/fdsp.py", "no minititan/fdsp.py"),
        ("minititan.planner", "minititan.plan", "no module minititan.plan"),
        ("minititan.lab.launch", "minititan.launch", "no module minititan.launch"),
        ("import apply_fsdp", "import apply_fspd", "no apply_fspd in minititan/fsdp.py"),
        ("import launch", "import start", "no start in minititan/lab.launch.py"),
        ("https://arxiv.org/abs", "http://arxiv.org/abs", "not an https address"),
        ("https://arxiv.org/abs", "https://arxiv.org/a bs", "not an https address"),
        ("https://arxiv.org/abs", "https://localhost/abs", "not an https address"),
        ("[00, ranks](00_ranks_and_collectives.ipynb)", "00, ranks", "notebook 00 is named before or after this one"),
        ("next: [01, a mesh](01_mesh_and_dtensor.ipynb)", "next:\n01, a mesh", "notebook 01 is named before or after"),
    ],
)
def test_each_fault_is_found(sound, spoiled, words):
    text = SOUND.replace("(#A-title,-with-code-&-more)", "(00_ranks_and_collectives.ipynb#Break-it)")
    assert sound in text
    (fault,) = set(faults(text.replace(sound, spoiled), ROOT / "notebooks/99_spoiled.ipynb"))
    assert words in fault


def test_anchors_follow_github_in_markdown_and_jupyter_in_notebooks(tmp_path):
    page, notebook = tmp_path / "page.md", tmp_path / "page.ipynb"
    text = "# A title, with `code` & more\n```\n# no heading\n```\n## See\n## See\n"
    page.write_text(text)
    notebook.write_text(json.dumps({"cells": [{"cell_type": "markdown", "source": [text]}]}))
    assert anchors(page) == {"a-title-with-code--more", "see", "see-1"}
    assert anchors(notebook) == {"A-title,-with-code-&-more", "See"}
