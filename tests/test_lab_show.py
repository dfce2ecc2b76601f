"""lab.show: the code as it stands in the file, under its relative name, readable on light and dark."""

import functools
import html
import inspect
import json
import re

import pytest

from minititan.lab import show, trace


class Example:
    """A class.

    Of two lines.
    """

    size = "a # no comment, and <b>no tag</b>"

    def method(self):
        """One line."""
        return self.size

    def only_docstring(self):
        """Nothing else."""

    @property
    def double(self):
        # a comment
        return self.size * 2


def without_tags(text: str) -> str:
    return html.unescape(re.sub(r"<[^>]*>", "", text))


def test_source_is_the_files_own_text():
    shown = show.source(trace.traffic)
    title, code = shown.pieces[0]
    assert title == "minititan/lab/trace.py · traffic"
    assert code == inspect.getsource(trace.traffic).rstrip()
    assert repr(shown) == f"# {title}\n{code}"
    assert code in without_tags(shown._repr_html_())


def test_html_escapes_and_keeps_every_character():
    shown = show.source(Example)
    page = shown._repr_html_()
    assert shown.pieces[0][1] in without_tags(page) and "<b>no tag" not in page


def test_docstrings_can_be_left_out():
    code = show.source(Example, docstring=False).pieces[0][1]
    assert '"""' not in code and "Of two lines" not in code
    assert code.startswith('class Example:\n    size = "a # no')
    assert "    def method(self):\n        return self.size\n" in code
    assert "    def only_docstring(self):\n        ...\n" in code
    namespace = {}
    exec(code, namespace)
    assert namespace["Example"]().method() == Example().method()


def test_methods_properties_wrappers_and_modules():
    shown = show.source(Example.method, Example.double, trace.span, trace)
    titles = [title for title, _ in shown.pieces]
    assert titles[0].endswith("· Example.method") and titles[1].endswith("· Example.double")
    assert titles[2:] == ["minititan/lab/trace.py · span", "minititan/lab/trace.py"]
    assert shown.pieces[0][1].startswith("def method(self):"), "no indentation is left"

    @functools.wraps(trace.traffic)
    def wrapper(*args):
        return trace.traffic(*args)

    assert show.source(wrapper).pieces[0][1].startswith("def traffic("), "what is wrapped, not the wrapper"
    nested = show.source(show._title).pieces[0][0]
    assert "<locals>" not in nested


def test_no_absolute_path_is_shown():
    shown = show.source(trace, show.source)
    assert "/root" not in repr(shown) and "/home" not in repr(shown) and "site-packages" not in shown._repr_html_()


def test_what_has_no_source_is_explained():
    with pytest.raises(ValueError, match=r"<built-in function len> has no Python source to show"):
        show.source(len)
    with pytest.raises(ValueError, match="at least one"):
        show.source()


def test_colours_read_on_light_and_on_dark():
    def luminance(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        parts = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    for colour in show._COLOURS.values():
        light = 1.05 / (luminance(colour) + 0.05)
        dark = (luminance(colour) + 0.05) / (luminance("#111111") + 0.05)
        assert min(light, dark) >= 3.9, (colour, light, dark)
    page = show.source(trace.traffic)._repr_html_()
    assert "background" not in page and "class=" not in page
    assert len(page) < 2.2 * len(repr(show.source(trace.traffic)))


def test_in_a_notebook_kernel(tmp_path):
    import nbformat
    from nbclient import NotebookClient

    cells = [
        "from minititan.lab import show, trace, exercises",
        "show.source(trace.span)",
        "def mine(x):\n    return x + 1\nshow.source(mine)",
        "exercises.exercise('99.n', exercises.close(12), hint='count')\nexercises.check('99.n', None)",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    NotebookClient(notebook, timeout=60, resources={"metadata": {"path": str(tmp_path)}}).execute()
    _, package, cell, verdict = ([o.data for o in c.outputs] for c in notebook.cells)
    assert set(package[0]) == {"text/html", "text/plain"} and "minititan/lab/trace.py" in package[0]["text/html"]
    assert cell[0]["text/plain"] == "# this notebook · mine\ndef mine(x):\n    return x + 1"
    assert "not solved yet" in verdict[0]["text/plain"] and "Hint: count" in verdict[0]["text/html"]


def test_gpu_figures_as_a_table_or_a_sentence(tmp_path):
    path = tmp_path / "gpu.json"
    assert show.gpu_figures("throughput", path).startswith("No GPU figures are recorded yet: tests/gpu/run.sh")
    with pytest.raises(ValueError, match="'speed' is none of the 5 there are: smoke, throughput"):
        show.gpu_figures("speed", path)
    rows = [{"recipe": "bf16", "batch": 4, "tokens_per_s": 41234.5, "mfu": 0.4412, "ratio": 1.0, "tries": {"8": "no"}}]
    rows += [{"recipe": "float8 rowwise", "batch": 4, "tokens_per_s": 50001.0, "mfu": 0.268, "ratio": 1.2126}]
    report = {
        "machine": {"gpu": "NVIDIA H200", "torch": "2.11.0", "date": "2026-12-03"},
        "throughput": rows,
        "smoke": [{"technique": "fsdp", "ok": False, "error": None, "seconds": 0.5}],
        "allocator": {"batch": 2, "ledger_peak_bytes": 35_000_000_000, "ledger_ratio": 0.98765, "snapshot": None},
        "sections": {
            "throughput": {"ok": True, "seconds": 120.0, "why": ""},
            "smoke": {"ok": False, "seconds": 3.0, "why": "fsdp: RuntimeError: no"},
            "allocator": {"ok": True, "seconds": 9.0, "why": ""},
        },
    }
    path.write_text(json.dumps(report))
    assert show.gpu_figures("throughput", path).splitlines() == [
        "NVIDIA H200, torch 2.11.0, 2026-12-03",
        "recipe          batch  tokens_per_s    mfu  ratio",
        "bf16                4        41,234  44.1%      1",
        "float8 rowwise      4        50,001  26.8%   1.21",
    ]
    smoke = show.gpu_figures("smoke", path).splitlines()
    assert smoke[2].split() == ["fsdp", "failed", "-", "0.5"] and smoke[3] == "not whole: fsdp: RuntimeError: no"
    allocator = show.gpu_figures("allocator", path)
    assert "35.00 GB" in allocator and "0.988" in allocator and re.search(r"snapshot +-", allocator)
    assert show.gpu_figures("compile", path).splitlines()[1] == "no figures: it was not run"
