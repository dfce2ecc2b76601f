"""Pictures of what ranks hold and do, from plain data: lists, dicts, numbers, and Events by their attributes.

    draw.mesh({"dp_shard": 2, "tp": 4})                            who sits where
    draw.shards((8, 8), {"S(0)": ["S(0)"], "R": ["R"]}, mesh=4)    who holds which piece of a tensor
    draw.timeline(events)                                          who did what when, and who waited
    draw.memory(by_rank)      draw.memory(samples)                 bytes by kind: side by side, or over time
    draw.traffic(traffic)                                          who sent how much to whom
    draw.parity({layout: {quantity: error}}, tolerance=1e-10)      how far from one process
    draw.plan(rows)                                                which action of a pipeline in which slot

Every function returns a matplotlib Figure, and touches no global state of matplotlib: a figure is shown once, as the
last expression of a cell. `save(figure, "name")` writes figures/name.svg, the same bytes for the same data.

No meaning hangs on colour alone: numbers, labels or signs say it too. Palette and style: `_canvas.py`.
"""

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_hex, to_rgb
from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Patch, PathPatch, Rectangle
from matplotlib.path import Path as Outline
from matplotlib.ticker import NullLocator

from minititan.lab._canvas import (
    ACTION_NAMES,
    ACTIONS,
    BLUE,
    FAINT,
    GREEN,
    GREY,
    IDLE,
    INK,
    KINDS,
    ORANGE,
    PHASES,
    PURPLE,
    SKY,
    VERMILLION,
    WIDTH,
    Drawing,
    boxes_path,
    ink_on,
    legend,
    lighter,
    new_figure,
    number,
    rank_colour,
    save,
    say,
    styled,
    text_width,
    to_svg,
    unit_of,
)  # fmt: skip

__all__ = [
    "Drawing",
    "memory",
    "memory_svg",
    "mesh",
    "parity",
    "plan",
    "plan_svg",
    "rank_colour",
    "save",
    "shards",
    "timeline",
    "to_svg",
    "traffic",
]

# --- mesh ------------------------------------------------------------------------------------------------------


@styled
def mesh(
    axes: Mapping[str, int],
    ranks: Sequence | None = None,
    groups: str | None = None,
    highlight: Iterable[int] = (),
    labels: Mapping[int, str] | None = None,
    title: str = "",
) -> Drawing:
    """Ranks as boxes, one direction an axis: the last axis runs right, the one before it down, others are panels.

    axes: name -> size, outermost first, such as {"dp_shard": 2, "tp": 4}; axes of size 1 are left out.
    ranks: the ranks in row-major order (nested lists as from `DeviceMesh.mesh.tolist()` are fine); default 0, 1, 2, ...
    groups: the name of an axis; bars join the ranks that talk to each other along it.
    highlight: these ranks stay strong, all others fade.   labels: a second line in a rank's box.
    ValueError when the number of ranks is not the product of the sizes, or `groups` names no axis.
    """
    sizes = dict(axes)
    order = list(_leaves(ranks)) if ranks is not None else list(range(math.prod(sizes.values())))
    if len(order) != math.prod(sizes.values()):
        factors = " x ".join(f"{n}={s}" for n, s in sizes.items())
        raise ValueError(f"{factors} is {math.prod(sizes.values())} ranks, but {len(order)} are given")
    if groups is not None and groups not in sizes:
        raise ValueError(f"no axis is called {groups!r}; there are {', '.join(sizes)}")
    real = {n: s for n, s in sizes.items() if s > 1} or dict(list(sizes.items())[-1:])
    at = dict(zip(itertools.product(*map(range, real.values())), order, strict=True))  # coordinates -> rank
    names = list(real)
    if groups in names[:-2]:  # drawn downwards, where bars can join its ranks
        places = [i for i, n in enumerate(names) if n != groups]
        places.insert(-1, names.index(groups))
        at = {tuple(spot[i] for i in places): rank for spot, rank in at.items()}
        names = [names[i] for i in places]
        real = {n: real[n] for n in names}
    column = names[-1]
    row = names[-2] if len(names) > 1 else None
    outer = names[:-2]
    n_columns, n_rows = real[column], real[row] if row else 1
    panels = list(itertools.product(*(range(real[n]) for n in outer)))

    box_w, box_h, gap_x, gap_y = 0.86, 0.56 if not labels else 0.66, 1.05, 0.78 if not labels else 0.88
    arrow = 0.05 * len(column) + 0.35 if n_columns < 3 else 0.0  # room for the name right of a short arrow
    panel_w, panel_h = n_columns * gap_x + 0.55, n_rows * gap_y + (0.55 if outer else 0.12)
    per_line = max(1, min(len(panels), int((WIDTH / 0.7 - 0.3) / panel_w)))
    lines = math.ceil(len(panels) / per_line)
    left = 0.55 if row else 0.05
    width = per_line * panel_w - 0.7 + left + arrow
    top = 0.02 if outer else -0.27
    height = lines * panel_h - 0.12 - top
    scale = min(0.82, WIDTH / width)
    said = " x ".join(f"{n} {s}" for n, s in real.items())
    alt = f"mesh of {_ranks(len(order))}: {said}"
    head = 0.3 if title else 0.0
    figure = new_figure(height * scale + head + 0.05, alt, width=width * scale + 0.05)
    figure.set_layout_engine("none")
    ax = figure.add_axes((0, 0, 1, 1 - head / figure.get_figheight()))
    ax.set(xlim=(-left, width - left), ylim=(height + top, top), aspect="equal", anchor="NW")
    ax.axis("off")
    legend(figure, (), title)

    strong = set(highlight)
    centre: dict[tuple, tuple[float, float]] = {}
    for p, panel in enumerate(panels):
        x0, y0 = (p % per_line) * panel_w, (p // per_line) * panel_h + (0.32 if outer else 0)
        if outer:
            name = " · ".join(f"{n} {i}" for n, i in zip(outer, panel, strict=True))
            say(ax, x0, y0 - 0.12, name, 9, weight="bold", ha="left", va="baseline")
        for i, j in itertools.product(range(n_rows), range(n_columns)):
            spot = (*panel, i, j) if row else (*panel, j)
            centre[spot] = x0 + j * gap_x + box_w / 2, y0 + 0.12 + i * gap_y + box_h / 2
    if groups in real:
        _join(ax, centre, names.index(groups), real[groups], strong, at)
    for spot, rank in at.items():
        x, y = centre[spot]
        faded = bool(strong) and rank not in strong
        colour = lighter(rank_colour(rank), 0.78) if faded else rank_colour(rank)
        ink = GREY if faded else ink_on(colour)
        edge = INK if rank in strong else "white"
        corner = x - box_w / 2 + 0.06, y - box_h / 2 + 0.06
        box = FancyBboxPatch(corner, box_w - 0.12, box_h - 0.12, "round,pad=0.06,rounding_size=0.1", zorder=3)
        box.set(facecolor=colour, edgecolor=edge, linewidth=2.2 if rank in strong else 1.0)
        ax.add_patch(box)
        label = (labels or {}).get(rank)
        say(ax, x, y - (0.13 if label else 0), f"rank {rank}", 9, color=ink, weight="bold", zorder=4)
        if label:
            say(ax, x, y + 0.15, label, 7.5, color=ink, zorder=4)
    _arrow(ax, (0.0, -0.08 if not outer else 0.28), (min(n_columns, 2) * gap_x - 0.2, 0), column)
    if row:
        _arrow(ax, (-0.16, 0.12 + (0.32 if outer else 0)), (0, min(n_rows, 2) * gap_y - 0.24), row)
    return figure


def _leaves(nested) -> Iterable[int]:
    for item in nested.tolist() if hasattr(nested, "tolist") else nested:
        if isinstance(item, Sequence):
            yield from _leaves(item)
        else:
            yield int(item)


def _arrow(ax: Axes, start: tuple, by: tuple, text: str) -> None:
    end = (start[0] + by[0], start[1] + by[1])
    ax.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=9, color=INK, shrinkA=0, shrinkB=0))
    if by[0]:
        say(ax, end[0] + 0.06, end[1], text, 8.5, style="italic", ha="left")
    else:
        say(ax, start[0] - 0.1, (start[1] + end[1]) / 2, text, 8.5, rotation=90, style="italic")


def _join(ax: Axes, centre: Mapping, axis: int, size: int, strong: set, at: Mapping) -> None:
    """Bars between neighbours that differ along one axis only."""
    for spot, (x, y) in centre.items():
        if spot[axis] + 1 >= size:
            continue
        following = (*spot[:axis], spot[axis] + 1, *spot[axis + 1 :])
        x2, y2 = centre[following]
        faded = bool(strong) and not {at[spot], at[following]} <= strong
        colour = FAINT if faded else INK
        ax.add_line(Line2D([x, x2], [y, y2], color=colour, linewidth=4, solid_capstyle="butt", zorder=2))


# --- shards ----------------------------------------------------------------------------------------------------

Piece = tuple[tuple[int, int], ...]


@styled
def shards(
    shape: Sequence[int],
    placements: Mapping[str, Any],
    mesh: int | Mapping[str, int] | Sequence[int],
    by_rank: bool = False,
    title: str = "",
) -> Drawing:
    """One tensor under several placements, side by side: every piece in the colour of the rank that holds it.

    shape: of the whole tensor, 1 or 2 dims.   mesh: number of ranks, or sizes of the mesh axes (or name -> size).
    placements: title -> either one placement for each mesh axis, as DTensor prints them ("S(0)", "R", "P(sum)",
        "_S(0, 2)"; Placement objects do too), or, for each rank, its piece ((first row, end), (first column, end)).
    by_rank: draw what each rank holds in a box of its own, a row of boxes for each placement.

    A plain box: one rank holds it. A pile of cards, "0 = 1": each of these ranks holds a copy. A pile with plus signs,
    "0 + 1": each holds a summand, and only the sum is the tensor.
    """
    n_dims, shape = len(shape), (1, *shape)[-2:] if len(shape) == 1 else tuple(shape)
    if n_dims not in (1, 2):
        raise ValueError(f"shards draws tensors of 1 or 2 dims; the shape {shape} has {n_dims}")
    sizes = (mesh,) if isinstance(mesh, int) else tuple(mesh.values() if isinstance(mesh, Mapping) else mesh)
    held = {name: _held(shape, n_dims, spec, sizes) for name, spec in placements.items()}
    figure = _shards_by_rank(shape, held, math.prod(sizes)) if by_rank else _shards_by_piece(shape, held)
    figure.alt = f"a {shape[0]} x {shape[1]} tensor on {_ranks(math.prod(sizes))} as {', '.join(held)}"
    legend(figure, (), title)
    return figure


def _held(shape: tuple[int, int], n_dims: int, spec, sizes: tuple[int, ...]) -> list[tuple[Piece, bool]]:
    """For every rank its piece of the tensor, and whether it is only a summand."""
    spec = list(spec) if not isinstance(spec, str) else [spec]
    n_ranks = math.prod(sizes)
    if spec and not isinstance(spec[0], str) and isinstance(spec[0], Sequence):
        if len(spec) != n_ranks:
            raise ValueError(f"{len(spec)} pieces are given for {n_ranks} ranks")
        return [(tuple(map(tuple, piece)), False) for piece in spec]
    words = [str(s).replace(" ", "") for s in spec]
    if len(words) != len(sizes):
        raise ValueError(f"{len(words)} placements {words} for {len(sizes)} mesh axes of sizes {sizes}: one an axis")
    splits = []  # (mesh axis, dim), in the order in which the tensor is cut
    for axis, word in enumerate(words):
        match = re.fullmatch(r"_?S(?:hard)?\((?:dim=)?(-?\d+).*\)", word)
        if match:
            # A strided shard (FSDP2 over TP) cuts what later axes have cut before.
            dim = int(match[1]) % n_dims + 2 - n_dims
            splits.append((word.startswith("_"), -axis if word.startswith("_") else axis, axis, dim))
        elif not re.fullmatch(r"R(eplicate\(\))?|P(artial)?(\(.*\))?|_?NormPartial.*", word):
            raise ValueError(f"a placement is S(dim), R or P; not {word!r}")
    partial = any(word[0] in "P_N" and not word.startswith("_S") for word in words)
    result = []
    for coordinates in itertools.product(*map(range, sizes)):
        piece = [(0, shape[0]), (0, shape[1])]
        for _, _, axis, dim in sorted(splits):
            first, end = piece[dim]
            step = math.ceil((end - first) / sizes[axis])  # as torch.chunk
            low = min(first + coordinates[axis] * step, end)
            piece[dim] = (low, min(low + step, end))
        result.append((tuple(piece), partial))
    return result


def _shards_by_piece(shape, held) -> Drawing:
    per_line = min(len(held), 4)
    lines = math.ceil(len(held) / per_line)
    panel_w = min(2.1, (WIDTH - 0.2) / per_line)
    panel_h = max(0.45, min(2.1, (panel_w - 0.3) * max(0.25, min(shape[0] / shape[1], 1.2))))
    figure = new_figure(lines * (panel_h + 0.55), "", width=per_line * panel_w + 0.1)
    for ax, (name, pieces) in zip(figure.subplots(lines, per_line, squeeze=False).flat, held.items(), strict=False):
        owners: dict[Piece, list[int]] = {}
        for rank, (piece, _) in enumerate(pieces):
            owners.setdefault(piece, []).append(rank)
        _frame(ax, shape, name)
        for piece, ranks in owners.items():
            _piece(ax, shape, piece, ranks, partial=pieces[0][1], inches=(panel_w - 0.2, panel_h))
        sizes = sorted({_local_size(p) for p in owners}, reverse=True)
        ax.set_xlabel("a rank holds " + " or ".join(f"{r} × {c}" for r, c in sizes), size=8, color=INK)
    for ax in list(figure.axes)[len(held) :]:
        ax.remove()
    return figure


def _shards_by_rank(shape, held, n_ranks: int) -> Drawing:
    panel_w = min(1.2, (WIDTH - 1.0) / n_ranks)
    panel_h = max(0.3, min(0.85, panel_w * max(0.25, min(shape[0] / shape[1], 1.2))))
    figure = new_figure(len(held) * (panel_h + 0.12) + 0.3, "", width=n_ranks * panel_w + 1.0)
    grid = figure.subplots(len(held), n_ranks, squeeze=False)
    for i, (line, (name, pieces)) in enumerate(zip(grid, held.items(), strict=True)):
        for rank, (ax, (piece, partial)) in enumerate(zip(line, pieces, strict=True)):
            _frame(ax, shape, f"rank {rank}" if i == 0 else "", centred=True)
            ax.add_patch(Rectangle((0, 0), shape[1], shape[0], fill=False, edgecolor=FAINT, linewidth=0.8))
            _piece(ax, shape, piece, [rank], partial, inches=(panel_w - 0.1, panel_h), text="")
            if rank == 0:
                ax.set_ylabel(name, rotation=0, ha="right", va="center", labelpad=10, weight="bold")
    return figure


def _local_size(piece: Piece) -> tuple[int, int]:
    return piece[0][1] - piece[0][0], piece[1][1] - piece[1][0]


def _frame(ax: Axes, shape, name: str, centred: bool = False) -> None:
    ax.set(
        xlim=(-0.02 * shape[1], 1.02 * shape[1]),
        ylim=(1.03 * shape[0], -0.03 * shape[0]),
        xticks=[],
        yticks=[],
    )
    ax.spines[:].set_visible(False)
    ax.set_title(name, loc="center" if centred else "left", weight="normal" if centred else "bold")


def _piece(ax: Axes, shape, piece: Piece, ranks: list[int], partial: bool, inches, text: str | None = None) -> None:
    (r0, r1), (c0, c1) = piece
    if r0 == r1 or c0 == c1:
        return  # an empty shard
    unit_x, unit_y = shape[1] / inches[0], shape[0] / inches[1]  # of the tensor, an inch
    under = len(ranks) - 1
    step = min(0.075, 0.3 * min((c1 - c0) / unit_x, (r1 - r0) / unit_y) / max(under, 1))  # inches between cards
    width, height = c1 - c0 - under * step * unit_x, r1 - r0 - under * step * unit_y
    for depth in reversed(range(len(ranks))):  # the first rank's card lies on top
        corner = (c0 + depth * step * unit_x, r0 + depth * step * unit_y)
        colour = rank_colour(ranks[depth])
        ax.add_patch(Rectangle(corner, width, height, facecolor=colour, edgecolor="white", linewidth=1.1, zorder=2))
    if text is None:
        sign = " + " if partial else " = "
        text = sign.join(map(str, ranks)) if len(ranks) <= 4 else f"{ranks[0]}{sign}…{sign}{ranks[-1]}"
    room = width / unit_x, height / unit_y
    size = next((s for s in (10, 9, 8, 7, 6) if text_width(text, s) < room[0] and s * 1.25 / 72 < room[1]), 0)
    if text and size:
        ink, middle = ink_on(rank_colour(ranks[0])), (c0 + width / 2, r0 + height / 2)
        say(ax, *middle, text, size, weight="bold", color=ink, zorder=6)
    if partial:
        clear = (text_width(text, size) / 2 + 0.06, size / 72 * 0.9 if text else 0.0)
        _plus_signs(ax, (c0, r0), (width, height), (unit_x, unit_y), clear)


def _plus_signs(ax: Axes, corner, size, units, clear, spacing: float = 0.19, arm: float = 0.035) -> None:
    """A grid of plus signs as one path, `spacing` inches apart; none within `clear` of the middle."""
    counts = [max(1, round(length / unit / spacing)) for length, unit in zip(size, units, strict=True)]
    points = []
    for i, j in itertools.product(range(counts[0]), range(counts[1])):
        from_middle = [s * ((k + 0.5) / n - 0.5) for s, k, n in zip(size, (i, j), counts, strict=True)]
        if all(abs(d / u) < c for d, u, c in zip(from_middle, units, clear, strict=True)):
            continue
        x, y = (c + s / 2 + d for c, s, d in zip(corner, size, from_middle, strict=True))
        dx, dy = arm * units[0], arm * units[1]
        points += [(x - dx, y), (x + dx, y), (x, y - dy), (x, y + dy)]
    codes = [Outline.MOVETO, Outline.LINETO] * (len(points) // 2)
    ax.add_patch(PathPatch(Outline(points, codes), fill=False, edgecolor="white", linewidth=1.1, zorder=4))


# --- timeline --------------------------------------------------------------------------------------------------


@styled
def timeline(
    events: Iterable,
    window: tuple[float, float] | None = None,
    ranks: Iterable[int] | None = None,
    title: str = "",
    names: bool = True,
) -> Drawing:
    """A block a rank, a lane for compute and one for communication; at the right the share of time that each is busy.

    Light grey is idle. Dark grey: compute is blocked until a collective is over, the communication that is not hidden.

    events: anything with rank, lane, name, start, end (seconds), perhaps phase and blocked; flat, or one list a rank.
    window: (from, to) in ms after the first event.   ranks: only these.   names: write an event's name where it fits.
    Communication under way at the same time takes further lanes.
    Events that are tuples (rank, "2B1", start, end) are a pipeline's, recorded or simulated: drawn as `plan` does.
    """
    events = list(events)
    if events and isinstance(events[0], tuple):
        origin = min(start for _, _, start, _ in events)
        ms = [(rank, (a - origin) * 1e3, (b - a) * 1e3, *_action(rank, name)) for rank, name, a, b in events]
        shown = sorted({c[0] for c in ms} if ranks is None else set(ranks))
        return _pipeline([c for c in ms if c[0] in shown], shown, title, "ms")
    events = [e for e in _flat(events) if ranks is None or e.rank in set(ranks)]
    if not events:
        raise ValueError("there are no events to draw: did the recording run on the ranks, and was its list returned?")
    origin = min(e.start for e in events)
    end_ms = max(e.end for e in events) - origin
    low, high = window or (0.0, end_ms * 1e3)
    bars = []  # (rank, lane, from ms, to ms, event)
    for e in events:
        a, b = (e.start - origin) * 1e3, (e.end - origin) * 1e3
        if b >= low and a <= high:
            bars.append((e.rank, e.lane, max(a, low), min(b, high), e))
    order = {"compute": 0, "communication": 1}
    waits = [(e.rank, *((t - origin) * 1e3 for t in e.blocked)) for e in events if getattr(e, "blocked", ())]
    blocked: dict[int, list] = {rank: [] for rank, *_ in bars}
    for rank, a, b in sorted(waits):
        if b >= low and a <= high:
            blocked.setdefault(rank, []).append((max(a, low), min(b, high)))
    lanes = sorted({lane for _, lane, *_ in bars}, key=lambda lane: (order.get(lane, 2), lane))
    shown = sorted({rank for rank, *_ in bars})

    rows: dict[tuple[int, str], list[tuple[int, int, tuple]]] = {}  # (rank, lane): (row, depth, bar)
    n_rows = dict.fromkeys(lanes, 1)
    for rank, lane in itertools.product(shown, lanes):
        mine = sorted((b for b in bars if b[:2] == (rank, lane)), key=lambda b: (b[2], -b[3]))
        rows[rank, lane] = placed = _stack(mine) if lane == "compute" else _spread(mine)
        n_rows[lane] = max([n_rows[lane], *(row + 1 for row, *_ in placed)])

    block = sum(n_rows.values()) + 0.55
    inch = 0.225 if len(shown) <= 4 else 0.19
    figure = new_figure(0.85 + len(shown) * block * inch + (0.2 if title else 0), "")
    figure.alt = f"timeline of {_ranks(len(shown))} over {high - low:.1f} ms"
    ax = figure.add_subplot()
    ms_per_inch = (high - low) / (WIDTH - 1.9)
    tight = {_family(e) for _, lane, a, b, e in bars if lane == "compute" and not _fits(e.name, b - a, ms_per_inch)}
    by_phase: dict[str, list] = {}
    ticks, marks = [], []
    beside = ax.get_yaxis_transform()  # x in shares of the width, y in rows
    for i, rank in enumerate(shown):
        y = i * block
        middle = y + sum(n_rows.values()) / 2
        say(ax, -0.115, middle, f"rank {rank}", 9, transform=beside, ha="right", weight="bold")
        for lane in lanes:
            ax.add_patch(Rectangle((low, y + 0.06), high - low, n_rows[lane] - 0.12, facecolor=IDLE))
            ticks.append(y + n_rows[lane] / 2)
            marks.append({"communication": "comm."}.get(lane, lane))
            placed = rows[rank, lane]
            holes = blocked[rank] if lane == "compute" else []
            busy = []
            for row, depth, (_, _, a, b, e) in placed:
                inset = 0.06 + 0.14 * depth
                top, bottom = y + row + inset, y + row + 1 - inset
                parts = _without(a, b, holes)
                busy += parts
                boxes = [(p, max(q, p + 0.008 * ms_per_inch), top, bottom) for p, q in parts]
                by_phase.setdefault(_phase(e), []).extend((depth, box) for box in boxes)
                text = e.name.rpartition(".")[2] if _family(e) in tight else e.name
                p, q = max(parts, key=lambda part: part[1] - part[0], default=(a, a))
                if names and _fits(text, q - p, ms_per_inch):
                    ink = ink_on(PHASES.get(_phase(e), GREY))
                    say(ax, (p + q) / 2, (top + bottom) / 2, text, 7, color=ink, zorder=9)
            if holes:
                boxes = ((0, (a, b, y + 0.06, y + 0.94)) for a, b in holes)
                by_phase.setdefault("wait", []).extend(boxes)
            share = _covered(busy) / max(high - low, 1e-12)
            say(ax, 1.008, y + n_rows[lane] / 2, f"{share:4.0%}", 7.5, transform=beside, ha="left")
            y += n_rows[lane]
    say(ax, 1.008, -0.35, "busy", 7.5, transform=beside, ha="left")
    for phase, boxes in by_phase.items():
        for depth in sorted({d for d, _ in boxes}):
            outline = boxes_path(box for d, box in boxes if d == depth)
            style = {"facecolor": PHASES.get(phase, GREY), "edgecolor": "white", "linewidth": 0.35}
            ax.add_patch(PathPatch(outline, zorder=2 + depth, **style))
    ax.set(xlim=(low, high), ylim=(len(shown) * block - 0.45, -0.1), xlabel="ms", yticks=ticks)
    ax.set_yticklabels(marks, size=7.5, color=INK)
    ax.tick_params(axis="y", length=0, pad=3)
    ax.spines[["left", "bottom"]].set_visible(False)
    known = [p for p in PHASES if p in by_phase] + [p for p in by_phase if p not in PHASES]
    handles = [Patch(facecolor=PHASES.get(p, GREY), label=p) for p in known]
    legend(figure, [*handles, Patch(facecolor=IDLE, label="idle")], title)
    return figure


def _phase(e) -> str:
    return getattr(e, "phase", "") or ("communication" if e.lane == "communication" else "other")


def _stack(bars: list) -> list[tuple[int, int, tuple]]:
    """Spans of one thread nest: depth is how many others are around one."""
    placed, around = [], []
    for bar in bars:
        around = [b for b in around if b[3] > bar[2] + 1e-9]
        placed.append((0, min(len(around), 2), bar))
        around.append(bar)
    return placed


def _spread(bars: list, most: int = 4) -> list[tuple[int, int, tuple]]:
    """What overlaps goes to the next row that is free."""
    placed, free_at = [], []
    for bar in bars:
        row = next((i for i, t in enumerate(free_at) if t <= bar[2] + 1e-9), len(free_at))
        row = min(row, most - 1)
        free_at[row:] = [max(bar[3], free_at[row] if row < len(free_at) else 0.0), *free_at[row + 1 :]]
        placed.append((row, 0, bar))
    return placed


def _covered(intervals: list[tuple[float, float]]) -> float:
    total, reached = 0.0, -math.inf
    for a, b in sorted(intervals):
        total += max(0.0, b - max(a, reached))
        reached = max(reached, b)
    return total


def _without(a: float, b: float, holes: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The parts of [a, b] outside of sorted `holes`."""
    parts = []
    for low, high in holes:
        if a < high and low < b:
            parts.append((a, low))
            a = high
    return [(p, q) for p, q in [*parts, (a, b)] if p < q]


def _family(e) -> str:
    """Names that differ in their last part only are shortened together: layers.0, layers.1, ..."""
    return e.name.rpartition(".")[0]


def _fits(text: str, ms: float, ms_per_inch: float) -> bool:
    return text_width(text, 7) + 0.03 < ms / ms_per_inch


def _ranks(n: int) -> str:
    return f"{n} rank{'s' * (n != 1)}"


def _flat(items: Iterable) -> list:
    return [x for item in items for x in (item if isinstance(item, list | tuple) else [item])]


# --- memory ----------------------------------------------------------------------------------------------------


@styled
def memory(data, events: Iterable | None = None, limit: float | None = None, title: str = "") -> Drawing:
    """Bytes by kind: stacked bars side by side, or stacked areas over time.

    data: bars, from label -> {kind: bytes}, or a list of {kind: bytes} by rank; or areas, from samples with `rank`,
        `time` (seconds) and `n_bytes` ({kind: bytes}), flat or one list a rank: a panel for each rank.
    events: over time only; the phases of the compute lane are shown as a strip under the areas.
    limit: bytes; a line, such as the memory of the device that it must fit in.
    """
    if isinstance(data, Mapping):
        return _memory_bars(data, limit, title)
    data = list(data)
    if data and isinstance(data[0], Mapping):
        return _memory_bars({f"rank {i}": kinds for i, kinds in enumerate(data)}, limit, title)
    return _memory_over_time(_flat(data), _flat(events or ()), limit, title)


def _kinds(present: Iterable[str]) -> list[str]:
    present = list(dict.fromkeys(present))
    return [k for k in KINDS if k in present] + [k for k in present if k not in KINDS]


def _kind_handles(kinds: Sequence[str]) -> list[Patch]:
    return [Patch(facecolor=KINDS.get(k, GREY), label=k) for k in kinds]


def _memory_bars(data: Mapping[str, Mapping[str, float]], limit, title: str) -> Drawing:
    kinds = _kinds(k for bars in data.values() for k, v in bars.items() if v)
    totals = {label: sum(bars.values()) for label, bars in data.items()}
    largest = max([*totals.values(), limit or 0, 1])
    size, unit = unit_of(largest)
    said = ", ".join(f"{label} {number(total / size)} {unit}" for label, total in totals.items())
    figure = new_figure(0.95 + 0.33 * len(data), f"memory by kind: {said}")
    ax = figure.add_subplot()
    inches_per_unit = (WIDTH - 2.2) / (largest * 1.1 / size)
    for y, bars in enumerate(data.values()):
        left = 0.0
        for kind in kinds:
            value = bars.get(kind, 0) / size
            if value:
                colour = KINDS.get(kind, GREY)
                ax.barh(y, value, 0.72, left, color=colour, edgecolor="white", linewidth=0.8)
                if text_width(number(value), 8) + 0.06 < value * inches_per_unit:
                    box = {"boxstyle": "square,pad=0.15", "facecolor": colour, "edgecolor": "none"}
                    say(ax, left + value / 2, y, number(value), color=ink_on(colour), bbox=box)
                left += value
        box = {
            "boxstyle": "square,pad=0.1",
            "facecolor": "white",
            "edgecolor": "none",
        }  # over the limit's line
        spot = left + largest / size * 0.012
        say(ax, spot, y, f"{number(left)} {unit}", 9, weight="bold", ha="left", bbox=box)
    if limit:
        ax.axvline(limit / size, color=VERMILLION, linewidth=1.4, linestyle="--")
        right = limit < largest / 2
        text = f" limit {number(limit / size)} {unit} "
        say(ax, limit / size, -0.62, text, color=VERMILLION, ha="left" if right else "right")
    ax.set(ylim=(len(data) - 0.45, -0.7 if limit else -0.55), xlim=(0, largest * 1.12 / size), xlabel=unit)
    ax.set_yticks(range(len(data)), list(data))
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    legend(figure, _kind_handles(kinds), title)
    return figure


def memory_svg(data: Mapping[str, Mapping[str, float]], limit: float | None = None, title: str = "") -> str:
    """The bars of `memory` as SVG text and without matplotlib: quick enough for a slider.

    data: label -> {kind: bytes}; limit: bytes, a dashed line.
    """
    kinds = _kinds(k for bars in data.values() for k, v in bars.items() if v)
    largest = max([*(sum(bars.values()) for bars in data.values()), limit or 0, 1])
    size, unit = unit_of(largest)
    x0, scale, row, height = 70, 630 / largest, 30, 30 * len(data) + 34
    out = [_svg_root(height), f'<text x="{x0}" y="14" font-weight="bold">{escape(title)}</text>']
    x = 830
    for kind in reversed(kinds):
        x -= 7 * len(kind) + 26
        out.append(f'<rect x="{x}" y="4" width="11" height="11" fill="{KINDS.get(kind, GREY)}"/>')
        out.append(f'<text x="{x + 15}" y="14">{escape(kind)}</text>')
    for i, (label, bars) in enumerate(data.items()):
        x, y = x0, 26 + row * i
        out.append(f'<text x="{x0 - 6}" y="{y + 16}" text-anchor="end">{escape(label)}</text>')
        for kind in kinds:
            width, colour = scale * bars.get(kind, 0), KINDS.get(kind, GREY)
            text = number(bars.get(kind, 0) / size)
            out.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{row - 6}" fill="{colour}"/>')
            if width > 7 * len(text) + 4:
                ink = ink_on(colour)
                out.append(
                    f'<text x="{x + width / 2:.1f}" y="{y + 16}" text-anchor="middle" fill="{ink}">{text}</text>'
                )
            x += width
        out.append(
            f'<text x="{x + 6:.1f}" y="{y + 16}" font-weight="bold">{number((x - x0) / scale / size)} {unit}</text>'
        )
    if limit:
        x, (size, unit) = x0 + scale * limit, unit_of(limit)
        dx, anchor = (6, "start") if limit < largest / 2 else (-6, "end")
        words = f"limit {number(limit / size)} {unit}"
        out.append(
            f'<path d="M{x:.1f} 20V{height}" stroke="{VERMILLION}" stroke-width="2" stroke-dasharray="5 4"/>'
            f'<text x="{x + dx:.1f}" y="{height - 3}" text-anchor="{anchor}">{words}</text>'
        )
    return "".join([*out, "</svg>"])


def _svg_root(height: int) -> str:
    """Text has the colour of the page around it, which may be dark."""
    font = 'font-family="sans-serif" font-size="11"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" width="840" height="{height}" {font} fill="currentColor">'


def _memory_over_time(samples: list, events: list, limit, title: str) -> Drawing:
    if not samples:
        raise ValueError("there are no samples to draw: did the watch run on the ranks, and was its list returned?")
    ranks = sorted({s.rank for s in samples})
    kinds = _kinds(k for s in samples for k, v in s.n_bytes.items() if v)
    origin = min([s.time for s in samples] + [e.start for e in events])
    end = max([s.time for s in samples] + [e.end for e in events])
    peak = max(sum(s.n_bytes.values()) for s in samples)
    size, unit = unit_of(max(peak, limit or 0))
    height = 2.3 if len(ranks) == 1 else 1.35 * len(ranks)
    figure = new_figure(0.7 + height, f"memory over time of {_ranks(len(ranks))}, up to {number(peak / size)} {unit}")
    panels = figure.subplots(len(ranks), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    top = max(peak * 1.18, (limit or 0) * 1.08) / size
    strip = 0.1 * top if events else 0.0
    ms_per_inch = (end - origin) * 1e3 / (WIDTH - 0.7)
    for ax, rank in zip(panels, ranks, strict=True):
        mine = _thin([s for s in samples if s.rank == rank], origin, end, most=max(80, 240 // len(ranks)))
        x = [(s.time - origin) * 1e3 for s in mine] + [(end - origin) * 1e3]
        levels = [[s.n_bytes.get(k, 0) / size for s in [*mine, mine[-1]]] for k in kinds]
        ax.stackplot(x, levels, colors=[KINDS.get(k, GREY) for k in kinds], step="post", linewidth=0)
        highest = max(mine, key=lambda s: sum(s.n_bytes.values()))
        total, at = sum(highest.n_bytes.values()) / size, (highest.time - origin) * 1e3
        ax.axhline(total, color=INK, linewidth=0.7, linestyle=":")
        side = {"ha": "left" if at > 0.5 * x[-1] else "right", "va": "bottom"}  # away from the peak
        say(ax, 0 if at > 0.5 * x[-1] else x[-1], total, f"peak {number(total)} {unit}", **side)
        if limit:
            ax.axhline(limit / size, color=VERMILLION, linewidth=1.4, linestyle="--")
            text = f"limit {number(limit / size)} {unit}"
            say(ax, x[-1], limit / size, text, color=VERMILLION, ha="right", va="bottom")
        for phase, a, b in _runs([e for e in events if e.rank == rank and e.lane == "compute"]):
            a, b, colour = (a - origin) * 1e3, (b - origin) * 1e3, PHASES.get(phase, GREY)
            ax.add_patch(Rectangle((a, -strip), b - a, 0.8 * strip, facecolor=colour))
            if _fits(phase, b - a, ms_per_inch):
                say(ax, (a + b) / 2, -0.6 * strip, phase, 7, color=ink_on(colour))
        ax.set(xlim=(0, x[-1]), ylim=(-1.15 * strip, top), ylabel=unit)
        ax.set_title(f"rank {rank}" if len(ranks) > 1 else "")
    panels[-1].set_xlabel("ms")
    legend(figure, _kind_handles(kinds), title)
    return figure


def _runs(events: list) -> list[tuple[str, float, float]]:
    """(phase, start, end) of each stretch of events of one phase."""
    runs: list[tuple[str, float, float]] = []
    for e in sorted(events, key=lambda e: e.start):
        if runs and runs[-1][0] == _phase(e):
            runs[-1] = (runs[-1][0], runs[-1][1], max(runs[-1][2], e.end))
        else:
            runs.append((_phase(e), e.start, e.end))
    return runs


def _thin(samples: list, origin: float, end: float, most: int) -> list:
    """At most `most` samples: the highest of each slice of time, so that no peak is lost."""
    if len(samples) <= most:
        return samples
    best: dict[int, Any] = {}
    for s in samples:
        slot = int((s.time - origin) / max(end - origin, 1e-12) * (most - 1))
        if slot not in best or sum(s.n_bytes.values()) > sum(best[slot].n_bytes.values()):
            best[slot] = s
    kept = {id(s): s for s in [samples[0], *best.values(), samples[-1]]}
    return sorted(kept.values(), key=lambda s: s.time)


# --- traffic ---------------------------------------------------------------------------------------------------

_HEAT = LinearSegmentedColormap.from_list("heat", ["#F3F8FC", SKY, BLUE, "#003A5C"])


@styled
def traffic(data, title: str = "") -> Drawing:
    """Who sent how much to whom, and in which collectives.

    data: has (or is a dict of) `pairs`, pairs[i][j] the bytes from rank i to rank j, and perhaps `sent` and `calls`:
    collective -> bytes that all ranks sent together, and -> number of calls.
    """
    get = data.get if isinstance(data, Mapping) else lambda key, default: getattr(data, key, default)
    pairs, sent, calls = get("pairs", []), get("sent", {}), get("calls", {})
    n = len(pairs)
    if not n or any(len(row) != n for row in pairs):
        lengths = [len(row) for row in pairs]
        raise ValueError(f"`pairs` must be a square table, a row a rank; it has {n} rows of {lengths} numbers")
    largest = max(map(max, pairs))
    size, unit = unit_of(largest)
    cell = min(0.52, 4.6 / n)
    side = max(1.5, cell * n)
    height = max(side + 0.75, 0.38 * len(sent) + 1.0) + (0.25 if title else 0)
    figure = new_figure(height, "", width=WIDTH if sent else side + 1.1)
    total_size, total_unit = unit_of(sum(map(sum, pairs)))
    figure.alt = f"traffic of {_ranks(n)}: {number(sum(map(sum, pairs)) / total_size)} {total_unit}"
    if sent:
        table, bars = figure.subplots(1, 2, width_ratios=[side + 0.4, max(2.0, WIDTH - side - 2.2)])
    else:
        table, bars = figure.add_subplot(), None
    shares = [[v / max(largest, 1) for v in row] for row in pairs]
    table.pcolormesh(shares, cmap=_HEAT, vmin=0, vmax=1, edgecolors="white", linewidth=1)
    for i, j in itertools.product(range(n), range(n)):
        value = pairs[i][j]
        text = number(value / size) if value else "·"
        if text_width(text, 6.5) < cell:
            points = next(s for s in (8.5, 7.5, 6.5) if text_width(text, s) < cell or s == 6.5)
            ink = ink_on(to_hex(_HEAT(shares[i][j]))) if value else GREY
            say(table, j + 0.5, i + 0.5, text, points, color=ink)
    table.set(xlabel="to rank", ylabel="from rank", aspect="equal", ylim=(n, 0))
    table.set_xticks([i + 0.5 for i in range(n)], range(n))
    table.set_yticks([i + 0.5 for i in range(n)], range(n))
    table.tick_params(length=0)
    table.spines[:].set_visible(False)
    table.set_title(f"{unit} from rank to rank")
    legend(figure, (), title)
    if bars is not None:
        top = max(sent.values())
        bar_size, bar_unit = unit_of(top)
        for y, (name, value) in enumerate(sent.items()):
            bars.barh(y, value / bar_size, 0.62, color=PHASES.get(_COLLECTIVE_PHASE.get(name, ""), GREY))
            count = f", {calls[name]} call{'s' * (calls[name] != 1)}" if name in calls else ""
            text = f"{number(value / bar_size)} {bar_unit}{count}"
            say(bars, value / bar_size + top / bar_size * 0.02, y, text, 8.5, ha="left")
        bars.set_yticks(range(len(sent)), list(sent))
        bars.set(xlim=(0, 1.62 * top / bar_size), ylim=(max(len(sent), side / 0.5) - 0.4, -0.6), xticks=[])
        bars.tick_params(length=0)
        bars.spines[:].set_visible(False)
        bars.set_title("by collective, all ranks together")
    return figure


_COLLECTIVE_PHASE = {
    "all_gather": "gather",
    "gather": "gather",
    "reduce_scatter": "reduce",
    "all_reduce": "reduce",
    "reduce": "reduce",
    "broadcast": "broadcast",
    "scatter": "broadcast",
    "all_to_all": "exchange",
    "send": "send",
}


# --- parity ----------------------------------------------------------------------------------------------------


@styled
def parity(
    errors: Mapping[str, Mapping[str, float]], tolerance: float = 1e-10, title: str = "", against: str = "one process"
) -> Drawing:
    """Relative error of each quantity in each layout to `against`, on a log scale, beside the tolerance.

    errors: layout -> {quantity: error}. Exact agreement stands at the left edge; nan and inf at the right one, crossed
    out as everything above the tolerance is.
    """
    quantities = list(dict.fromkeys(q for row in errors.values() for q in row))
    if not quantities:
        raise ValueError("there are no errors to draw")
    values = [v for row in errors.values() for v in row.values() if v and math.isfinite(v)]
    low = 10.0 ** math.floor(math.log10(min([*values, tolerance])) - 1)
    high = 10.0 ** math.ceil(math.log10(max([*values, tolerance])) + 0.6)
    wrong = sum(not v <= tolerance for row in errors.values() for v in row.values())
    alt = f"parity of {len(errors)} layouts: {wrong} errors above {tolerance:g}"
    figure = new_figure(1.05 + 0.24 * len(errors), alt)
    ax = figure.add_subplot()
    markers, colours = "osD^vPX", (BLUE, ORANGE, GREEN, PURPLE, SKY, "#6E6E6E", INK)
    for k, quantity in enumerate(quantities):
        offset = (k - (len(quantities) - 1) / 2) * min(0.2, 0.7 / len(quantities))
        points = [(y + offset, row[quantity]) for y, row in enumerate(errors.values()) if quantity in row]
        points = [(min(max(v, low), high) if math.isfinite(v) else high, y, v <= tolerance) for y, v in points]
        style = {"linestyle": "none", "clip_on": False}
        x, y, _ = zip(*points, strict=True)
        ax.plot(x, y, marker=markers[k % 7], color=colours[k % 7], markersize=5.5, label=quantity, **style)
        crossed = [(x, y) for x, y, fine in points if not fine]
        if crossed:
            cross = {"marker": "x", "color": VERMILLION, "markersize": 10, "markeredgewidth": 2}
            ax.plot(*zip(*crossed, strict=True), **cross, **style)
    ax.axvline(tolerance, color=VERMILLION, linewidth=1.3, linestyle="--")
    ax.axvspan(tolerance, high, color=VERMILLION, alpha=0.06, linewidth=0)
    ax.set_xscale("log")
    ax.set(xlim=(low, high), ylim=(len(errors) - 0.5, -0.5), xlabel=f"relative error to {against}")
    ax.set_yticks(range(len(errors)), list(errors))
    ax.tick_params(axis="y", length=0, pad=8)
    ax.xaxis.set_minor_locator(NullLocator())
    if any(v == 0 for row in errors.values() for v in row.values()):
        ticks = [t for t in ax.get_xticks() if low < t <= high]
        ax.set_xticks([low, *ticks], ["0", *(f"$10^{{{round(math.log10(t))}}}$" for t in ticks)])
    for y in range(len(errors)):
        ax.axhline(y, color=IDLE, linewidth=0.8, zorder=0)
    ax.spines["left"].set_visible(False)
    handles = [line for line in ax.lines if line.get_label() in quantities]
    line = Line2D([], [], color=VERMILLION, linestyle="--", label=f"tolerance {tolerance:g}")
    legend(figure, [*handles, line], title)
    return figure


# --- plan ------------------------------------------------------------------------------------------------------


@styled
def plan(rows: Sequence[Sequence], title: str = "", slots: Mapping[str, int] | None = None) -> Drawing:
    """The actions of a pipeline: a row a rank, a column a time slot; an empty slot is a bubble.

    rows: for each rank its slots; each None or "", or an action as torch prints it, "[stage]KIND[microbatch]": "F0",
        "2B1", kinds F forward, B backward, I input gradient, W weight gradient. The number shown is the microbatch; the
        forwards of a rank's second, third, ... stage are lighter, its backwards darker.
        Or a simulation: tuples (rank, "2B1", first slot, end).
    slots: kind -> number of columns that it takes, when a row lists each action once, e.g. {"F": 1, "B": 2}.
    """
    if rows and isinstance(rows[0][0], int):
        timed = [(rank, a, b - a, *_action(rank, name)) for rank, name, a, b in rows]
        return _pipeline(timed, range(1 + max(c[0] for c in timed)), title, "time slot")
    cells = []  # (rank, column, width, stage, kind, microbatch)
    for rank, row in enumerate(rows):
        column = 0
        for action in row:
            if not action:
                column += 1
                continue
            stage, kind, microbatch = _action(rank, action)
            width = (slots or {}).get(kind, 1)
            cells.append((rank, column, width, stage, kind, microbatch))
            column += width
    return _pipeline(cells, range(len(rows)), title, "time slot")


def _action(rank: int, action: str) -> tuple[str, str, str]:
    """(stage, kind, microbatch)"""
    match = re.fullmatch(r"(\d*)([A-Z_]+?)(\d*)", str(action))
    if not match:
        raise ValueError(f"an action is like 'F0' or '2B1'; rank {rank} has {action!r}")
    return match.groups()


def _pipeline(
    cells: list[tuple[int, float, float, str, str, str]], shown: Sequence[int], title: str, unit: str
) -> Drawing:
    """cells: (rank, begin, width, stage, kind, microbatch).   shown: the ranks that have a row."""
    end = max(c[1] + c[2] for c in cells)
    kinds = list(dict.fromkeys(c[4] for c in cells))
    kinds.sort(key=lambda k: (list(ACTIONS).index(k) if k in ACTIONS else 9, k))
    idle = 1 - sum(c[2] for c in cells) / (len(shown) * end)
    if unit == "ms":
        size, height = (WIDTH - 0.9) / end, 0.3
        alt = f"pipeline of {_ranks(len(shown))} over {end:.0f} ms, {idle:.0%} bubble"
    else:
        size = min(0.4, (WIDTH - 0.9) / end)
        height = max(size, 0.22)
        alt = f"pipeline plan of {_ranks(len(shown))} in {end:g} slots, {idle:.0%} bubble"
    figure = new_figure(0.75 + height * len(shown) + 0.2 * bool(title), alt, max(5.0, size * end + 0.9))
    ax = figure.add_subplot()
    ax.add_patch(Rectangle((0, 0), end, len(shown), facecolor=IDLE, edgecolor="none"))
    own = {r: sorted({c[3] for c in cells if c[0] == r}, key=lambda s: int(s or 0)) for r in shown}
    by_colour: dict[str, list] = {}
    for rank, begin, width, stage, kind, microbatch in cells:
        y = shown.index(rank)
        colour = _toned(ACTIONS.get(kind, GREY), own[rank].index(stage), upwards=kind == "F")
        by_colour.setdefault(colour, []).append((begin, begin + width, y + 0.04, y + 0.96))
        text = microbatch or kind
        if text_width(text, 6) < size * width:
            points = next((s for s in (8.5, 7.5, 6.5) if text_width(text, s) + 0.03 < size * width), 6)
            say(ax, begin + width / 2, y + 0.5, text, points, color=ink_on(colour), zorder=3)
    for colour, boxes in by_colour.items():
        style = {"facecolor": colour, "edgecolor": "white", "linewidth": 0.7}
        ax.add_patch(PathPatch(boxes_path(boxes), zorder=2, **style))
    ax.set(xlim=(0, end), ylim=(len(shown), 0), xlabel=unit)
    ax.set_yticks([i + 0.5 for i in range(len(shown))], [f"rank {r}" for r in shown])
    ax.tick_params(axis="y", length=0)
    ax.spines[["left", "bottom"]].set_visible(False)
    handles = [Patch(facecolor=ACTIONS.get(k, GREY), label=ACTION_NAMES.get(k, k)) for k in kinds]
    legend(figure, [*handles, Patch(facecolor=IDLE, label=f"bubble {idle:.0%}")], title)
    return figure


def plan_svg(events: Sequence[tuple[int, str, float, float]], title: str = "") -> str:
    """The picture of `plan` for a simulation, as SVG text and without matplotlib: quick enough for a slider."""
    end, n_ranks = max(e[3] for e in events), 1 + max(e[0] for e in events)
    idle = 1 - sum(b - a for *_, a, b in events) / (n_ranks * end)
    size, row = min(26, 760 / end), 22
    cells = [(rank, a, b - a, *_action(rank, name)) for rank, name, a, b in events]
    own = {r: sorted({c[3] for c in cells if c[0] == r}, key=lambda s: int(s or 0)) for r in range(n_ranks)}
    tones = {}
    height = row * n_ranks + 44
    out = [
        _svg_root(height),
        f'<rect x="56" y="24" width="{size * end:.1f}" height="{row * n_ranks}" fill="{IDLE}"/>',
    ]
    kinds = [k for k in ACTIONS if any(c[4] == k for c in cells)]
    labels = [(ACTIONS[k], ACTION_NAMES[k]) for k in kinds] + [(IDLE, f"bubble {idle:.1%}")]
    for i, (colour, label) in enumerate(labels):
        x = 360 + 112 * (i - len(labels) + 3)
        out.append(
            f'<rect x="{x}" y="4" width="11" height="11" fill="{colour}"/><text x="{x + 15}" y="14">{label}</text>'
        )
    out.append(f'<text x="56" y="14" font-weight="bold">{escape(title)}</text>')
    out += [f'<text x="8" y="{39 + row * r}">rank {r}</text>' for r in range(n_ranks)]
    for rank, begin, width, stage, kind, microbatch in cells:
        key = kind, own[rank].index(stage)
        if key not in tones:
            tones[key] = _toned(ACTIONS.get(kind, GREY), key[1], upwards=kind == "F")
        x, y, w = 56 + size * begin, 25 + row * rank, size * width
        out.append(f'<rect x="{x:.1f}" y="{y}" width="{w - 0.7:.1f}" height="{row - 2}" fill="{tones[key]}"/>')
        if w > 7 * len(microbatch) + 2:
            ink = ink_on(tones[key])
            out.append(f'<text x="{x + w / 2:.1f}" y="{y + 14}" text-anchor="middle" fill="{ink}">{microbatch}</text>')
    out.append(f'<text x="56" y="{height - 4}">{end:g} time slots</text></svg>')
    return "".join(out)


def _toned(colour: str, chunk: int, upwards: bool) -> str:
    """The colour of a rank's second, third, ... stage: light forwards stay apart from dark backwards."""
    share = 1 - 0.55**chunk
    return to_hex([c + ((1.0 if upwards else 0.0) - c) * share for c in to_rgb(colour)])
