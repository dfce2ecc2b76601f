"""Show the package's own code in a notebook, so that no notebook keeps a copy of it; and what a GPU has measured.

    show.source(apply_fsdp)                     # highlighted in Jupyter, plain text elsewhere
    show.source(Block, Block.forward, docstring=False)
    print(show.gpu_figures("throughput"))       # of figures/gpu.json, which tests/gpu/run.sh writes

The colours are mid-tones on no background: they read on a light page and on a dark one.
"""

import ast
import html
import inspect
import json
import os
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

from pygments.lexers import PythonLexer
from pygments.token import Comment, Keyword, Name, Number, Operator, String

# Each has a contrast of about 4:1 on white and on #111111.
_COLOURS = {
    Keyword: "#a65fc0",
    Operator.Word: "#a65fc0",
    String: "#4e8a3a",
    Comment: "#7f7f7f",
    Number: "#b06a26",
    Name.Function: "#3a80c9",
    Name.Class: "#3a80c9",
    Name.Decorator: "#b06a26",
}
_PRE = "margin:0;padding:.4em .8em;border-left:3px solid #7f7f7f;line-height:1.35;overflow-x:auto;white-space:pre"


@dataclass(frozen=True)
class Source:
    """Pieces of code, each with the title it is shown under."""

    pieces: tuple[tuple[str, str], ...]

    def __repr__(self) -> str:
        return "\n\n".join(f"# {title}\n{code}" for title, code in self.pieces)

    def _repr_html_(self) -> str:
        return "\n".join(
            f'<div style="margin:.3em 0"><b>{html.escape(title)}</b><pre style="{_PRE}">{_highlight(code)}</pre></div>'
            for title, code in self.pieces
        )


def source(*objects, docstring: bool = True) -> Source:
    """The code of functions, classes, methods or modules, as they stand in their files.

    docstring=False leaves out their docstrings (in a class also its methods'), where the text has just said the same.
    ValueError when an object has no Python source, such as one from C++.
    """
    if not objects:
        raise ValueError("source() needs at least one function, class or module to show")
    return Source(tuple((_title(o), _code(o, docstring)) for o in objects))


def _unwrapped(thing):
    thing = thing.fget if isinstance(thing, property) else thing
    return inspect.unwrap(thing) if callable(thing) else thing


def _title(thing) -> str:
    thing = _unwrapped(thing)
    module = thing if inspect.ismodule(thing) else sys.modules.get(getattr(thing, "__module__", ""))
    place = getattr(module, "__name__", "")
    path = "this notebook" if place in ("__main__", "") else place.replace(".", "/") + ".py"
    return path if inspect.ismodule(thing) else f"{path} · {thing.__qualname__.replace('<locals>.', '')}"


def _code(thing, docstring: bool) -> str:
    try:
        code = textwrap.dedent(inspect.getsource(_unwrapped(thing))).rstrip()
    except (TypeError, OSError) as error:
        raise ValueError(f"{thing!r} has no Python source to show ({error})") from None
    return code if docstring else _without_docstrings(code)


def _without_docstrings(code: str) -> str:
    lines = code.splitlines()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(getattr(first.value, "value", None), str):
                rest = lines[first.end_lineno - 1].encode()[first.end_col_offset :].decode()
                end = first.end_lineno
                while len(node.body) > 1 and not rest and end < len(lines) and not lines[end].strip():
                    end += 1  # the blank lines that set it apart
                keep = " " * first.col_offset + "..." if len(node.body) == 1 else None
                lines[first.lineno - 1 : end] = [keep] + [None] * (end - first.lineno)
    return "\n".join(line for line in lines if line is not None).strip("\n")


def _highlight(code: str) -> str:
    out, colour, run = [], None, ""
    for token, text in [*PythonLexer(stripnl=False, ensurenl=False).get_tokens(code), (None, "")]:
        new = next((c for kind, c in _COLOURS.items() if token and token in kind), None)
        if (new == colour or not text.strip()) and token is not None:
            run += text  # neighbours of one colour, and blanks, share a tag
            continue
        out.append(
            f'<span style="color:{colour}">{html.escape(run, quote=False)}</span>' if colour else html.escape(run)
        )
        colour, run = new, text
    return "".join(out)


# ---- what a GPU has measured ----------------------------------------------------------------------------------

_GPU_FIGURES = Path(__file__).parents[2] / "figures" / "gpu.json"
_COLUMNS = {
    "smoke": ("technique", "ok", "error", "seconds"),
    "throughput": ("recipe", "batch", "tokens_per_s", "mfu", "ratio"),
    "compile": ("how", "seconds_cold", "tokens_per_s"),
    "checkpoint": ("mode", "peak_bytes", "predicted_bytes", "step_s"),
    "allocator": ("what", "value"),
}


def gpu_figures(section: str, path: str | os.PathLike | None = None) -> str:
    """A section of figures/gpu.json as an aligned table under a line that names the GPU; or a sentence that it is not there.

    section: smoke, throughput, compile, checkpoint or allocator. path: another file of tests/gpu/run.sh.
    """
    if section not in _COLUMNS:
        raise ValueError(f"section={section!r} is none of the {len(_COLUMNS)} there are: {', '.join(_COLUMNS)}")
    path = _GPU_FIGURES if path is None else Path(path)
    if not path.exists():
        return (
            f"No GPU figures are recorded yet: tests/gpu/run.sh on a GPU writes {path.name}, which belongs in figures/."
        )
    report = json.loads(path.read_text(encoding="utf-8"))
    machine, outcome = report["machine"], report["sections"].get(section, {"ok": False, "why": "it was not run"})
    rows = report.get(section) or []
    if isinstance(rows, dict):
        rows = [{"what": name, "value": _worded(name, value)} for name, value in rows.items()]
    lines = [f"{machine['gpu'] or 'toy size, on a CPU'}, torch {machine['torch']}, {machine['date']}"]
    if rows:
        columns = [name for name in _COLUMNS[section] if any(name in row for row in rows)]
        table = [columns, *([_worded(name, row.get(name)) for name in columns] for row in rows)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        for row in table:
            cells = [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]
            lines.append("  ".join(cells).rstrip())
    if not outcome["ok"]:
        lines.append(f"{'not whole' if rows else 'no figures'}: {outcome['why']}"[:300])
    return "\n".join(lines)


def _worded(name: str, value) -> str:
    if value is None or isinstance(value, str | bool):
        return {None: "-", True: "ok", False: "failed"}.get(value, value)
    if isinstance(value, dict):
        return ", ".join(f"{key} {_worded(name, part)}" for key, part in value.items())
    if name.endswith("_bytes"):
        return f"{value / 1e9:,.2f} GB"
    if name.startswith("mfu"):
        return f"{value:.1%}"
    if name == "error":
        return f"{value:.1e}"
    return f"{value:,.0f}" if isinstance(value, int) or value >= 100 else f"{value:.3g}"
