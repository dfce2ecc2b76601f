"""lab.draw: what stands in each figure, its size and bytes, no global state, and once in a real kernel."""

import functools
import itertools
import pathlib
import re
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from minititan.lab import _canvas, _theme, draw
from minititan.lab.trace import Event, MemorySample, traffic

ROOT = pathlib.Path(__file__).parent.parent


def texts(figure) -> list[str]:
    found = [t.get_text() for ax in figure.axes for t in ax.texts if t.get_text()]
    return found


def legend_of(figure) -> list[str]:
    return [t.get_text() for legend in figure.legends for t in legend.get_texts()]


def patches_of(ax, colour) -> list:
    return [p for p in ax.patches if to_hex(p.get_facecolor()) == colour.lower()]


def step_events(n_ranks=4):
    """Forward 10 ms, a gap of 10 ms, backward 20 ms; two gathers that overlap; seconds."""
    events = []
    for rank in range(n_ranks):
        events.append([
            Event(rank, "compute", "layers.0", 1.0, 1.010, phase="forward"),
            Event(rank, "compute", "layers.0", 1.020, 1.040, phase="backward"),
            Event(rank, "communication", "all_gather", 1.0, 1.015, 64, "gather", tuple(range(n_ranks))),
            Event(rank, "communication", "all_gather", 1.010, 1.020, 64, "gather", tuple(range(n_ranks))),
        ])  # fmt: skip
    return events


def samples(n=500, rank=0):
    return [MemorySample(rank, 5 + i / 1000, {"parameters": 4000, "activations": 1000 * (i % 7)}) for i in range(n)]


FIGURES = {
    "mesh": lambda: draw.mesh({"dp_shard": 2, "tp": 4}, groups="tp", title="8 ranks"),
    "shards": lambda: draw.shards((8, 8), {"S(0)": ["S(0)"], "R": ["R"], "P": ["P(sum)"]}, mesh=8, title="x"),
    "shards_by_rank": lambda: draw.shards((8, 8), {"S(0)": ["S(0)"], "P": ["P(sum)"]}, mesh=8, by_rank=True),
    "timeline": lambda: draw.timeline(step_events(8), title="a step"),
    "memory_bars": lambda: draw.memory([{"parameters": 3e6, "optimizer": 6e6}] * 8, limit=1e7),
    "memory_over_time": lambda: draw.memory([samples(3000, r) for r in range(2)], step_events(2)),
    "traffic": lambda: draw.traffic(traffic(step_events(8)), title="all"),
    "parity": lambda: draw.parity({"tp 8": {"loss": 0.0, "gradients": 1e-14}, "bug": {"loss": 1e-3, "gradients": float("nan")}}),
    "plan": lambda: draw.plan([[None] * r + [f"F{i}" for i in range(8)] for r in range(8)]),
}  # fmt: skip


@functools.cache
def figure_of(name):
    return FIGURES[name]()


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_is_small_deterministic_and_readable(name):
    figure = figure_of(name)
    svg = draw.to_svg(figure)
    assert len(svg) < 60_000
    assert svg == draw.to_svg(FIGURES[name]()), "the same data, the same bytes"
    assert "<dc:date>" not in svg
    tree = ElementTree.fromstring(svg)
    assert any(e.tag.endswith("text") for e in tree.iter()), "letters stay letters"
    assert not re.search(r"\d\.\d{3}", svg.split("</defs>")[-1]), "no more than two decimals"
    width, height = figure.get_size_inches()
    assert 1 < width <= 9 and 0.5 < height < 9
    data, metadata = figure._repr_mimebundle_()
    assert data["image/png"].startswith(b"\x89PNG") and len(data["image/png"]) < 40_000
    assert metadata["image/png"]["width"] <= 900
    assert figure.alt in data["text/plain"]
    assert all(t.get_fontsize() >= 6 for ax in figure.axes for t in ax.texts)


@pytest.mark.parametrize("name", FIGURES)
def test_no_text_lies_on_another_and_none_is_cut_off(name):
    figure = figure_of(name)
    figure.draw_without_rendering()
    shown = [*figure.texts]
    for ax in figure.axes:
        shown += [*ax.texts, ax.title, ax._left_title] + [t for t in (ax.xaxis.label, ax.yaxis.label) if ax.axison]
        for axis, (low, high) in ((ax.xaxis, sorted(ax.get_xlim())), (ax.yaxis, sorted(ax.get_ylim()))):
            shown += [t.label1 for t in axis.get_major_ticks() if ax.axison and low <= t.get_loc() <= high]
    for legend in figure.legends:
        shown += [*legend.get_texts(), legend.get_title()]
    boxes = [(t.get_text(), t.get_window_extent()) for t in shown if t.get_text() and t.get_visible()]
    for (a, box), (b, other) in itertools.combinations(boxes, 2):
        overlap = min(box.x1, other.x1) - max(box.x0, other.x0), min(box.y1, other.y1) - max(box.y0, other.y0)
        assert min(overlap) < 2, f"{a!r} and {b!r} overlap by {overlap} points"
    for text, box in boxes:
        assert box.x0 >= -1 and box.x1 <= figure.bbox.x1 + 1 and box.y1 <= figure.bbox.y1 + 1, f"{text!r} is cut off"


def test_words_say_title_what_is_drawn_axes_and_legend():
    said = "memory over time of 2 ranks, up to 10 kB; panels: rank 0, rank 1; axes: kB, ms; legend: parameters, activations"
    assert _canvas.describe(figure_of("memory_over_time")) == said
    svg = draw.to_svg(figure_of("mesh"))
    assert "<title>8 ranks</title>\n<desc>8 ranks; mesh of 8 ranks: dp_shard 2 x tp 4</desc>" in svg
    plain = Figure()
    plain.subplots().set(title="a < b", xlabel="ms")
    svg = draw.to_svg(plain)
    assert "<title>a &lt; b</title>" in svg and _theme.finish(svg, "a < b", "a < b; axes: ms") == svg, "twice is once"


def test_ink_turns_light_on_dark_paper_and_stays_on_colours():
    svg = draw.to_svg(draw.plan([["F0", "B0", None]]))
    texts = {t: start for start, t in re.findall(r"<text([^>]*)>([^<]+)", svg)}
    assert 'class="on"' in re.search(r"<text[^>]*>0</text>(?=\s*</g>\s*<g id=\"text_)", svg)[0], "0 in sky blue"
    assert "class" not in texts["rank 0"] and "class" not in texts["time slot"] and "class" not in texts["forward"]
    svg = draw.to_svg(draw.timeline(step_events(1), names=False))
    assert 'class="on"' not in svg, "idle grey turns dark with the paper"


def test_committed_figures_have_words_and_are_for_light_and_dark():
    paths = sorted((ROOT / "figures").glob("*.svg"))
    assert len(paths) > 80
    for path in paths:
        svg = path.read_text()
        root = ElementTree.fromstring(svg)
        title, description = root[0], root[1]
        assert (title.tag.split("}")[1], description.tag.split("}")[1]) == ("title", "desc"), path.name
        assert len(title.text) > 8 and len(description.text) > 8, (path.name, title.text, description.text)
        assert root.get("role") == "img" and "prefers-color-scheme: dark" in svg and "<script" not in svg, path.name
        if "matplotlib" in svg:
            assert svg == _theme.finish(svg, title.text, description.text), f"{path.name}: not as `save` writes it"


def test_ink_is_readable_on_light_and_on_dark_paper():
    light, dark = "#ffffff", _theme.PAPER["#ffffff"]
    for ink, on_dark in _theme.INK.items():
        assert _theme.contrast(ink, light) >= 4.5 and _theme.contrast(on_dark, dark) >= 4.5
        for grey, dark_grey in _theme.PAPER.items():  # idle time, empty cells
            assert _theme.contrast(ink, grey) >= 4.5 and _theme.contrast(on_dark, dark_grey) >= 4.5
    assert round(_theme.contrast("#000000", "#ffffff"), 1) == 21


def test_palette_is_one_colour_a_meaning_and_tells_ranks_apart():
    assert len({draw.rank_colour(r) for r in range(16)}) == 16
    seen = [
        _canvas.PHASES[p] for p in ("forward", "backward", "recompute", "optimizer", "gather", "reduce", "exchange")
    ]
    assert len(set(seen)) == len(seen)
    kinds = [c for k, c in _canvas.KINDS.items() if k not in ("buffers", "other")]
    assert len(set(kinds)) == len(kinds)

    for colour in [*_canvas.PHASES.values(), *_canvas.KINDS.values(), *map(draw.rank_colour, range(16))]:
        assert _theme.contrast(colour, to_hex(_canvas.ink_on(colour))) >= 3, f"text on {colour} is hard to read"


def test_nothing_of_matplotlib_is_changed():
    code = (
        "import sys, matplotlib; before = dict(dict.items(matplotlib.rcParams))\n"
        "from minititan.lab import draw\n"
        "figure = draw.mesh({'tp': 2}); draw.to_svg(figure); figure._repr_mimebundle_()\n"
        "assert 'matplotlib.pyplot' not in sys.modules, 'pyplot'\n"
        "assert 'torch' not in sys.modules, 'torch'\n"
        "assert dict(dict.items(matplotlib.rcParams)) == before\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)


# --- mesh and shards -------------------------------------------------------------------------------------------


def test_mesh_places_ranks_row_major_and_hides_axes_of_one():
    figure = draw.mesh({"pp": 1, "dp_shard": 2, "cp": 1, "tp": 3})
    ax = figure.axes[0]
    at = {t.get_text(): t.get_position() for t in ax.texts}
    assert at["rank 0"][1] == at["rank 1"][1] < at["rank 3"][1] and at["rank 0"][0] == at["rank 3"][0] < at["rank 1"][0]
    assert "tp" in at and "dp_shard" in at and "pp" not in at and "cp" not in at


def test_mesh_of_three_axes_shows_panels_and_joins_any_axis():
    def bars(figure):
        """Pairs of ranks that a bar joins."""
        ax = figure.axes[0]
        centre = {
            tuple(round(v, 6) for v in t.get_position()): t.get_text() for t in ax.texts if "rank" in t.get_text()
        }
        return {frozenset(centre[tuple(round(v, 6) for v in p)] for p in line.get_xydata()) for line in ax.lines}

    sizes = {"pp": 2, "dp": 2, "tp": 2}
    assert {"pp 0", "pp 1"} <= set(texts(draw.mesh(sizes)))
    for axis, stride in {"pp": 4, "dp": 2, "tp": 1}.items():
        pairs = {frozenset((f"rank {r}", f"rank {r + stride}")) for r in range(8) if not r & stride}
        assert bars(draw.mesh(sizes, groups=axis)) == pairs, axis


def test_mesh_takes_torch_meshes_highlights_and_explains():
    figure = draw.mesh({"a": 2, "b": 2}, ranks=[[0, 2], [1, 3]], highlight=[0, 1], labels={3: "last"})
    at = {t.get_text(): t.get_position() for t in figure.axes[0].texts}
    assert at["rank 2"][0] > at["rank 0"][0] and at["rank 2"][1] == at["rank 0"][1] and "last" in at
    ax = figure.axes[0]
    assert patches_of(ax, draw.rank_colour(0)) and not patches_of(ax, draw.rank_colour(2)), "others fade"
    with pytest.raises(ValueError, match=r"a=2 x b=2 is 4 ranks, but 3 are given"):
        draw.mesh({"a": 2, "b": 2}, ranks=[0, 1, 2])
    with pytest.raises(ValueError, match=r"no axis is called 'c'; there are a, b"):
        draw.mesh({"a": 2, "b": 2}, groups="c")


def pieces(ax) -> dict[str, set[tuple]]:
    """colour -> (left, top, width, height) of its boxes."""
    found = {}
    for p in ax.patches:
        if hasattr(p, "get_x"):
            box = tuple(round(v, 6) for v in (p.get_x(), p.get_y(), p.get_width(), p.get_height()))
            found.setdefault(to_hex(p.get_facecolor()), set()).add(box)
    return found


def test_shards_are_cut_as_torch_chunk_cuts():
    import torch

    figure = draw.shards((10, 4), {"S(0)": ["S(0)"]}, mesh=4)
    start = 0
    for rank, chunk in enumerate(torch.empty(10, 4).chunk(4)):
        assert pieces(figure.axes[0])[draw.rank_colour(rank).lower()] == {(0, start, 4, len(chunk))}
        start += len(chunk)
    assert figure.axes[0].get_xlabel() == "a rank holds 3 × 4 or 1 × 4"
    empty = draw.shards((2, 4), {"S(0)": ["S(0)"]}, mesh=4)
    assert draw.rank_colour(3).lower() not in pieces(empty.axes[0]), "ranks 2 and 3 hold nothing"


def test_shards_over_two_axes_and_strided():
    figure = draw.shards(
        (4, 4), {"both": ["S(0)", "S(1)"], "twice": ["S(0)", "S(0)"], "FSDP over TP": ["_S(0, 2)", "S(0)"]}, mesh={"dp": 2, "tp": 2}
    )  # fmt: skip
    both, twice, strided = figure.axes
    assert pieces(both)[draw.rank_colour(1).lower()] == {(2, 0, 2, 2)}
    assert pieces(twice)[draw.rank_colour(1).lower()] == {(0, 1, 4, 1)}
    assert pieces(strided)[draw.rank_colour(1).lower()] == {(0, 2, 4, 1)}, "TP cut first: rank 1 has the second half"


def test_strided_shards_are_where_dtensor_puts_them():
    import torch.distributed as dist

    from minititan.lab.launch import launch

    def rows():
        from torch import nn
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = nn.Sequential(nn.Linear(1, 8, bias=False))
        with __import__("torch").no_grad():
            model[0].weight.copy_(__import__("torch").arange(8.0)[:, None])
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
        weight = model[0].weight
        del Replicate
        return [str(p) for p in weight.placements], weight.to_local().flatten().tolist(), dist.get_rank()

    for placements, held, rank in launch(rows, ranks=4):
        ax = draw.shards((8, 1), {"w": placements}, mesh=(2, 2)).axes[0]
        assert pieces(ax)[draw.rank_colour(rank).lower()] == {(0, held[0], 1, len(held))}, placements


def test_replicated_and_partial_look_different():
    figure = draw.shards((8, 8), {"S": ["S(0)"], "R": ["R"], "P": ["P(sum)"], "S R": ["S(0)"]}, mesh=2)
    sharded, replicated, partial, _ = figure.axes
    assert [t.get_text() for t in sharded.texts] == ["0", "1"]
    assert [t.get_text() for t in replicated.texts] == ["0 = 1"]
    assert [t.get_text() for t in partial.texts] == ["0 + 1"]
    assert len(partial.patches) == len(replicated.patches) + 1, "the plus signs, one path"
    assert [t.get_text() for t in draw.shards((8, 8), {"R": ["R"]}, mesh=8).axes[0].texts] == ["0 = … = 7"]


def test_shards_take_placement_objects_pieces_and_one_dim():
    from torch.distributed.tensor import Partial, Replicate, Shard

    figure = draw.shards((8,), {"a": [Shard(0)], "b": (Replicate(),), "c": [Partial()], "d": [Shard(-1)]}, mesh=2)
    assert [[t.get_text() for t in ax.texts] for ax in figure.axes] == [
        ["0", "1"],
        ["0 = 1"],
        ["0 + 1"],
        ["0", "1"],
    ]
    ragged = draw.shards((4, 4), {"flat": [((0, 3), (0, 4)), ((3, 4), (0, 4))]}, mesh=2)
    assert pieces(ragged.axes[0])[draw.rank_colour(1).lower()] == {(0, 3, 4, 1)}


def test_shards_explain_mistakes():
    with pytest.raises(ValueError, match=r"1 placements \['S\(0\)'\] for 2 mesh axes of sizes \(2, 2\)"):
        draw.shards((4, 4), {"a": ["S(0)"]}, mesh=(2, 2))
    with pytest.raises(ValueError, match="a placement is S"):
        draw.shards((4, 4), {"a": ["X"]}, mesh=2)
    with pytest.raises(ValueError, match="1 or 2 dims"):
        draw.shards((4, 4, 4), {"a": ["S(0)"]}, mesh=2)
    with pytest.raises(ValueError, match="1 pieces are given for 2 ranks"):
        draw.shards((4, 4), {"a": [((0, 4), (0, 4))]}, mesh=2)


# --- timeline, memory, traffic ---------------------------------------------------------------------------------


def test_timeline_draws_to_scale_with_idle_and_busy_share():
    figure = draw.timeline(step_events(2))
    ax = figure.axes[0]
    assert ax.get_xlabel() == "ms" and ax.get_xlim() == pytest.approx((0, 40))
    assert legend_of(figure) == ["forward", "backward", "gather", "idle"]
    assert [t for t in texts(figure) if "rank" in t] == ["rank 0", "rank 1"]
    assert [t.strip() for t in texts(figure) if "%" in t] == ["75%", "50%"] * 2, "30 of 40 ms; 20 of 40 ms"
    (forward,) = patches_of(ax, _canvas.PHASES["forward"])
    x = forward.get_path().vertices[:, 0]
    assert (x.min(), x.max()) == pytest.approx((0, 10)), "one path for the bars of all ranks"
    (gather,) = patches_of(ax, _canvas.PHASES["gather"])
    tops = sorted(set(gather.get_path().vertices[:, 1].round(3)))
    assert len(tops) == 8, "two lanes for what overlaps, on each of two ranks"


def test_timeline_shows_where_compute_is_blocked():
    *events, gather = step_events(1)[0]
    events.append(replace(gather, blocked=(1.002, 1.008)))
    figure = draw.timeline(events)
    ax = figure.axes[0]
    assert legend_of(figure) == ["forward", "backward", "gather", "wait", "idle"]
    assert [t.strip() for t in texts(figure) if "%" in t] == ["60%", "50%"], "6 of 40 ms less than without the wait"
    (forward,), (grey,) = (patches_of(ax, _canvas.PHASES[p]) for p in ("forward", "wait"))
    assert sorted(set(forward.get_path().vertices[:, 0].round(6))) == [0, 2, 8, 10]
    assert sorted(set(grey.get_path().vertices[:, 0].round(6))) == [2, 8]
    alone = draw.timeline([e for e in events if e.lane != "compute"])
    assert "wait" not in legend_of(alone), "nothing to show it on"


def test_timeline_window_ranks_and_names():
    figure = draw.timeline(step_events(4), window=(15, 30), ranks=[1, 3])
    assert figure.axes[0].get_xlim() == (15, 30)
    assert [t for t in texts(figure) if "rank" in t] == ["rank 1", "rank 3"]
    assert "forward" not in legend_of(figure)
    assert texts(draw.timeline(step_events(1))).count("layers.0") == 2
    assert "layers.0" not in texts(draw.timeline(step_events(1), names=False))
    with pytest.raises(ValueError, match="there are no events to draw"):
        draw.timeline([[], []])


def test_timeline_takes_anything_with_the_attributes():
    event = SimpleNamespace(rank=0, lane="disk", name="write", start=0.0, end=0.5)
    figure = draw.timeline([event])
    assert legend_of(figure) == ["other", "idle"] and "write" in texts(figure)


def test_a_thousand_events_stay_small():
    events = [
        Event(r, "compute", f"layers.{i}", i / 100, i / 100 + 0.006, phase="forward")
        for r in range(8)
        for i in range(130)
    ]
    assert len(draw.to_svg(draw.timeline(events))) < 120_000
    data, _ = draw.timeline(events)._repr_mimebundle_()
    assert len(data["image/png"]) < 40_000


def test_memory_bars_add_up():
    figure = draw.memory(
        {"DDP": {"parameters": 4e6, "optimizer": 8e6}, "FSDP2": {"parameters": 1e6, "optimizer": 2e6}},
        limit=1e7,
    )
    assert legend_of(figure) == ["parameters", "optimizer"]
    assert [t for t in texts(figure) if "MB" in t] == ["12 MB", "3 MB", " limit 10 MB "]
    widths = [p.get_width() for p in figure.axes[0].patches if hasattr(p, "get_width")]
    assert widths == [4, 8, 1, 2]
    assert [t.get_text() for t in figure.axes[0].get_yticklabels()] == ["DDP", "FSDP2"]


def test_memory_over_time_keeps_the_peak():
    spiky = samples(5000)
    spiky[1234] = MemorySample(0, spiky[1234].time, {"parameters": 4000, "activations": 96_000})
    figure = draw.memory(spiky)
    assert "peak 100 kB" in texts(figure)
    assert figure.axes[0].get_ylabel() == "kB" and figure.axes[0].get_xlabel() == "ms"
    with pytest.raises(ValueError, match="there are no samples to draw"):
        draw.memory([])


def test_memory_strip_names_the_phases():
    shifted = [SimpleNamespace(**{**vars(e), "start": e.start + 4, "end": e.end + 4}) for e in step_events(1)[0]]
    assert {"forward", "backward"} <= set(texts(draw.memory(samples(41), shifted)))


def test_traffic_shows_each_number():
    figure = draw.traffic({"pairs": [[0, 1500], [2500, 0]], "sent": {"all_gather": 4000}, "calls": {"all_gather": 1}})
    table, bars = figure.axes
    assert [t.get_text() for t in table.texts] == ["·", "1.50", "2.50", "·"]
    assert table.get_title("left") == "kB from rank to rank"
    assert [t.get_text() for t in bars.texts] == ["4 kB, 1 call"]
    assert len(draw.traffic({"pairs": [[0, 0], [0, 0]]}).axes) == 1
    with pytest.raises(ValueError, match="square table"):
        draw.traffic({"pairs": [[1, 2]]})


# --- parity and plan -------------------------------------------------------------------------------------------


def test_parity_shows_exact_and_wrong():
    figure = figure_of("parity")
    ax = figure.axes[0]
    assert legend_of(figure) == ["loss", "gradients", "tolerance 1e-10"]
    crosses = [line for line in ax.lines if line.get_marker() == "x"]
    assert sum(len(line.get_xdata()) for line in crosses) == 2, "1e-3 and nan"
    assert "2 errors above 1e-10" in figure.alt
    assert ax.get_xticklabels()[0].get_text() == "0" and ax.get_xscale() == "log"
    with pytest.raises(ValueError, match="no errors"):
        draw.parity({})


def test_plan_counts_the_bubble():
    p, m = 4, 8
    rows = [
        [None] * r
        + [f"F{i}" for i in range(m)]
        + [None] * (3 * (p - 1 - r))
        + [f"B{i}" for i in range(m)]
        + [None] * (2 * r)
        for r in range(p)
    ]
    figure = draw.plan(rows, slots={"F": 1, "B": 2})
    assert "33 slots, 27% bubble" in figure.alt  # (p-1)/(m+p-1) = 3/11
    assert legend_of(figure) == ["forward", "backward", "bubble 27%"]
    chunks = draw.plan([["0F0", "2F0", "2I0", "2W0"]])
    assert legend_of(chunks) == ["forward", "input gradient", "weight gradient", "bubble 0%"]
    assert len({to_hex(p.get_facecolor()) for p in chunks.axes[0].patches}) == 5, "a second stage has its own tone"
    with pytest.raises(ValueError, match=r"rank 0 has 'what\?'"):
        draw.plan([["what?"]])


def test_a_pipeline_is_drawn_alike_from_a_plan_and_from_a_run():
    """A simulation in slots, a recording in seconds: the same boxes in the same colours, and the same bubble."""
    slots = [(0, "0F0", 0, 1), (0, "0B0", 3, 5), (1, "1F0", 1, 2), (1, "1B0", 2, 3)]
    run = [(rank, action, 7 + a / 100, 7 + b / 100) for rank, action, a, b in slots]
    plan, timeline = draw.plan(slots), draw.timeline(run)
    assert legend_of(plan) == legend_of(timeline) == ["forward", "backward", "bubble 50%"]
    assert "in 5 slots" in plan.alt and "over 50 ms" in timeline.alt
    boxes = [[p.get_path().vertices[:, 0].max() for p in f.axes[0].patches[1:]] for f in (plan, timeline)]
    assert [round(10 * x) for x in boxes[0]] == [round(x) for x in boxes[1]]
    svg = ElementTree.fromstring(draw.plan_svg(slots, "two"))
    texts = [e.text for e in svg.iter() if e.tag.endswith("text")]
    assert {"two", "forward", "backward", "bubble 50.0%", "rank 1", "5 time slots"} <= set(texts)
    assert [t.get_text() for t in draw.timeline(run, ranks=[1]).axes[0].get_yticklabels()] == ["rank 1"]


def test_memory_svg_has_the_numbers_of_memory():
    data = {"DDP": {"parameters": 4e9, "gradients": 4e9}, "a < b": {"parameters": 1e9}}
    svg = ElementTree.fromstring(draw.memory_svg(data, limit=6e9, title="two"))
    texts = [e.text for e in svg.iter() if e.tag.endswith("text")]
    assert {"two", "DDP", "a < b", "8 GB", "1 GB", "limit 6 GB", "4", "parameters", "gradients"} <= set(texts)
    widths = [float(e.get("width")) for e in svg.iter() if e.tag.endswith("rect")]
    assert widths[2:] == [315.0, 315.0, 78.8, 0.0]  # after two of the legend


# --- files and notebooks ---------------------------------------------------------------------------------------


def test_save_finds_the_figures_folder(tmp_path, monkeypatch):
    (tmp_path / "figures").mkdir()
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")
    path = draw.save(figure_of("mesh"), "mesh")
    assert path == tmp_path / "figures" / "mesh.svg" and path.read_text().lstrip().startswith("<?xml")
    first = path.read_bytes()
    assert draw.save(figure_of("mesh"), "mesh").read_bytes() == first
    assert draw.save(figure_of("mesh"), "mesh.png", tmp_path).read_bytes().startswith(b"\x89PNG")
    (tmp_path / "figures" / "mesh.svg").unlink()
    (tmp_path / "figures").rmdir()
    with pytest.raises(ValueError, match="no folder called 'figures'"):
        draw.save(figure_of("mesh"), "mesh")


def test_a_figure_is_shown_once_in_a_notebook(tmp_path):
    import nbformat
    from nbclient import NotebookClient

    cells = [
        "from minititan.lab import draw",
        "figure = draw.mesh({'tp': 2})",
        "figure",
        "%matplotlib inline\nimport matplotlib.pyplot",
        "figure",
        "[draw.mesh({'tp': 2}) for _ in range(3)]; None",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    NotebookClient(notebook, timeout=60, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [c.outputs for c in notebook.cells]
    assert [len(o) for o in outputs] == [0, 0, 1, 0, 1, 0]
    for (shown,) in (outputs[2], outputs[4]):
        assert set(shown.data) == {"image/png", "text/html", "text/plain"}
        assert shown.metadata["image/png"]["width"] > 100
        assert shown.metadata["image/png"]["alt"] == "mesh of 2 ranks: tp 2"
        assert shown.data["text/html"].startswith('<img alt="mesh of 2 ranks: tp 2" width=')
        assert shown.data["text/plain"] == "<mesh of 2 ranks: tp 2>"


def test_a_drawing_is_a_matplotlib_figure():
    assert all(isinstance(figure_of(name), Figure) for name in FIGURES)
