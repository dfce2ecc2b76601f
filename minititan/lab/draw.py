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

One meaning, one colour, in all figures: RANKS, PHASES and KINDS below, after Okabe and Ito (2008), whose eight colours
stay apart for every common kind of colour vision. No meaning hangs on colour alone: numbers, labels or hatching say
it too.
"""

import functools
import io
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Patch, PathPatch, Rectangle
from matplotlib.path import Path as Outline

BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, VERMILLION, PURPLE = "#F0E442", "#0072B2", "#D55E00", "#CC79A7"
INK, GREY, IDLE, FAINT = "#222222", "#8A8A8A", "#ECECEC", "#D5D5D5"

RANKS = (BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILLION, YELLOW, "#999999")
PHASES = {
    "forward": SKY,
    "recompute": YELLOW,
    "backward": BLUE,
    "optimizer": PURPLE,
    "gather": ORANGE,
    "reduce": VERMILLION,
    "broadcast": "#8C5A2B",
    "exchange": GREEN,
    "send": GREEN,
    "recv": "#8FD3BF",
    "communication": ORANGE,
    "barrier": "#6E6E6E",
    "wait": "#BDBDBD",
    "other": GREY,
}
KINDS = {
    "parameters": BLUE,
    "gradients": ORANGE,
    "optimizer": PURPLE,
    "gathered": GREEN,
    "activations": SKY,
    "buffers": GREY,
    "other": GREY,
}
ACTIONS = {"F": SKY, "B": BLUE, "I": GREEN, "W": PURPLE}
ACTION_NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}

WIDTH = 8.5  # inches: what a notebook's column shows without shrinking
_STYLE = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial", "Helvetica"],
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": GREY,
    "axes.linewidth": 0.8,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "legend.handlelength": 1.1,
    "legend.handleheight": 1.0,
    "legend.columnspacing": 1.3,
    "legend.handletextpad": 0.5,
    "hatch.linewidth": 0.7,
    "svg.fonttype": "none",
    "svg.hashsalt": "minititan",
}


class Drawing(Figure):
    """A Figure that shows itself in a notebook, whether or not pyplot was ever imported. `alt` says it in words."""

    alt = "figure"

    def __repr__(self) -> str:
        return f"<{self.alt}>"

    def _repr_mimebundle_(self, include=None, exclude=None):
        png = _png(self, dpi=160)
        return {"image/png": png, "text/plain": repr(self)}, {"image/png": {"width": _shown_width(self)}}


def _shown_width(figure: Figure) -> int:
    return round(figure.get_figwidth() * 100)


def _png(figure: Figure, dpi: int) -> bytes:
    """Few flat colours: a palette makes it a third of the size of a true-colour PNG."""
    from PIL import Image

    with matplotlib.rc_context(_STYLE):
        raw = io.BytesIO()
        figure.savefig(raw, format="png", dpi=dpi)
    out = io.BytesIO()
    image = (
        Image.open(raw)
        .convert("RGB")
        .quantize(96, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    )
    image.save(out, format="png", optimize=True)
    return out.getvalue()


def to_svg(figure: Figure) -> str:
    """SVG text: letters stay letters, coordinates have two decimals, the same bytes for the same data."""
    with matplotlib.rc_context(_STYLE):
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return re.sub(r"-?\d+\.\d{3,}", lambda m: f"{float(m[0]):.2f}".rstrip("0").rstrip("."), out.getvalue())


def save(figure: Figure, name: str, folder: str | Path | None = None) -> Path:
    """Writes `name`.svg (or .png, if the name says so) into `folder`; by default the `figures` of this repository,
    looked for from the current directory upwards. Returns the path. ValueError when there is none."""
    if folder is None:
        here = Path.cwd()
        folder = next((p / "figures" for p in (here, *here.parents) if (p / "figures").is_dir()), None)
        if folder is None:
            raise ValueError(f"no folder called 'figures' in {here.name!r} or above it: pass folder=...")
    path = Path(folder) / (name if name.endswith((".svg", ".png")) else f"{name}.svg")
    if path.suffix == ".png":
        path.write_bytes(_png(figure, dpi=110))
    else:
        path.write_text(to_svg(figure))
    return path


def _styled(function):
    @functools.wraps(function)
    def styled(*args, **kwargs):
        with matplotlib.rc_context(_STYLE):
            return function(*args, **kwargs)

    return styled


def rank_colour(rank: int) -> str:
    """One colour a rank: eight strong ones, then the same ones lighter."""
    strong, turn = RANKS[rank % len(RANKS)], rank // len(RANKS)
    return _lighter(strong, min(0.55, 0.45 * turn)) if turn else strong


def _lighter(colour: str, share: float) -> str:
    return to_hex([c + (1 - c) * share for c in to_rgb(colour)])


def _ink_on(colour: str) -> str:
    r, g, b = to_rgb(colour)
    return "white" if 0.299 * r + 0.587 * g + 0.114 * b < 0.5 else INK


def _new(height: float, alt: str, width: float = WIDTH, **kwargs) -> Drawing:
    figure = Drawing(figsize=(width, height), layout="constrained", facecolor="white", **kwargs)
    figure.get_layout_engine().set(w_pad=0.04, h_pad=0.04)
    figure.alt = alt
    return figure


def _legend(figure: Figure, handles: Sequence, **kwargs) -> None:
    """Above the data, from the left."""
    if handles:
        figure.legend(handles=handles, loc="outside upper left", ncols=min(len(handles), 7), **kwargs)


def _text_width(text: str, size: float) -> float:
    """About how many inches wide."""
    return 0.62 * size / 72 * len(text)


# --- mesh ------------------------------------------------------------------------------------------------------


@_styled
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
    names = list(real)
    column = names[-1]
    row = names[-2] if len(names) > 1 else None
    outer = names[:-2]
    n_columns, n_rows = real[column], real[row] if row else 1
    panels = list(itertools.product(*(range(real[n]) for n in outer)))

    box_w, box_h, gap_x, gap_y = 0.86, 0.56 if not labels else 0.66, 1.05, 0.78 if not labels else 0.88
    per_line = max(1, min(len(panels), int(WIDTH / 0.72 / (n_columns * gap_x + 0.9))))
    panel_w, panel_h = n_columns * gap_x + 0.75, n_rows * gap_y + (0.62 if outer else 0.3)
    lines = math.ceil(len(panels) / per_line)
    width = per_line * panel_w + 0.85
    height = lines * panel_h + 0.35
    scale = min(0.82, WIDTH / width)
    said = " x ".join(f"{n} {s}" for n, s in real.items())
    figure = _new(
        height * scale + (0.3 if title else 0), f"mesh of {len(order)} ranks: {said}", width=width * scale
    )
    ax = figure.add_subplot()
    ax.set(xlim=(-0.85, width - 0.85), ylim=(height - 0.35, -0.35), aspect="equal")
    ax.axis("off")
    if title:
        ax.set_title(title)

    strong = set(highlight)
    centre: dict[tuple, tuple[float, float]] = {}
    at = dict(zip(itertools.product(*(range(s) for s in real.values())), order, strict=True))
    for p, panel in enumerate(panels):
        x0, y0 = (p % per_line) * panel_w, (p // per_line) * panel_h + (0.32 if outer else 0)
        if outer:
            ax.text(
                x0,
                y0 - 0.12,
                " · ".join(f"{n} {i}" for n, i in zip(outer, panel, strict=True)),
                weight="bold",
            )
        for i, j in itertools.product(range(n_rows), range(n_columns)):
            spot = (*panel, i, j) if row else (*panel, j)
            centre[spot] = x0 + j * gap_x + box_w / 2, y0 + 0.12 + i * gap_y + box_h / 2
    if groups in real:
        _join(ax, centre, names.index(groups), real[groups], strong, at)
    for spot, rank in at.items():
        x, y = centre[spot]
        faded = bool(strong) and rank not in strong
        colour = _lighter(rank_colour(rank), 0.78) if faded else rank_colour(rank)
        ink = GREY if faded else _ink_on(colour)
        edge = INK if rank in strong else "white"
        ax.add_patch(
            FancyBboxPatch(
                (x - box_w / 2 + 0.06, y - box_h / 2 + 0.06),
                box_w - 0.12,
                box_h - 0.12,
                boxstyle="round,pad=0.06,rounding_size=0.1",
                facecolor=colour,
                edgecolor=edge,
                linewidth=2.2 if rank in strong else 1.0,
                zorder=3,
            )
        )
        label = (labels or {}).get(rank)
        ax.text(
            x, y - (0.13 if label else 0), f"rank {rank}", ha="center", va="center", color=ink, weight="bold", zorder=4,
            size=9,
        )  # fmt: skip
        if label:
            ax.text(x, y + 0.15, label, ha="center", va="center", color=ink, size=7.5, zorder=4)
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
    ax.add_patch(
        FancyArrowPatch(
            start, end, arrowstyle="-|>", mutation_scale=9, color=INK, linewidth=1.0, shrinkA=0, shrinkB=0
        )
    )
    if by[0]:
        ax.text(end[0] + 0.06, end[1], text, va="center", size=8.5, style="italic")
    else:
        ax.text(
            start[0] - 0.1,
            (start[1] + end[1]) / 2,
            text,
            ha="center",
            va="center",
            rotation=90,
            size=8.5,
            style="italic",
        )


def _join(ax: Axes, centre: Mapping, axis: int, size: int, strong: set, at: Mapping) -> None:
    """Bars (within a panel) or arcs (between panels) through the ranks that differ along one axis only."""
    for spot, (x, y) in centre.items():
        if spot[axis] + 1 >= size:
            continue
        following = (*spot[:axis], spot[axis] + 1, *spot[axis + 1 :])
        x2, y2 = centre[following]
        faded = bool(strong) and not {at[spot], at[following]} <= strong
        colour = FAINT if faded else INK
        if axis >= len(spot) - 2:
            ax.add_line(Line2D([x, x2], [y, y2], color=colour, linewidth=4, solid_capstyle="butt", zorder=2))
        else:
            arc = FancyArrowPatch(
                (x, y), (x2, y2), arrowstyle="-", connectionstyle="arc3,rad=-0.16", color=colour, linewidth=1.4, zorder=2
            )  # fmt: skip
            ax.add_patch(arc)


# --- shards ----------------------------------------------------------------------------------------------------

Piece = tuple[tuple[int, int], ...]


@_styled
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

    Solid: one rank holds it. Stripes, "0 = 1": these ranks hold equal copies. Dots, "0 + 1": each holds a summand, and
    only the sum is the tensor.
    """
    shape = (1, *shape) if len(shape) == 1 else tuple(shape)
    if len(shape) != 2:
        raise ValueError(f"shards draws tensors of 1 or 2 dims; the shape {tuple(shape)} has {len(shape)}")
    sizes = (mesh,) if isinstance(mesh, int) else tuple(mesh.values() if isinstance(mesh, Mapping) else mesh)
    held = {name: _held(shape, spec, sizes) for name, spec in placements.items()}
    figure = _shards_by_rank(shape, held, math.prod(sizes)) if by_rank else _shards_by_piece(shape, held)
    figure.alt = f"a {shape[0]} x {shape[1]} tensor on {math.prod(sizes)} ranks as {', '.join(held)}"
    if title:
        figure.suptitle(title, x=0.01, ha="left", size=9.5, weight="bold")
    return figure


def _held(shape: tuple[int, int], spec, sizes: tuple[int, ...]) -> list[tuple[Piece, bool]]:
    """For every rank its piece of the tensor, and whether it is only a summand."""
    spec = list(spec) if not isinstance(spec, str) else [spec]
    n_ranks = math.prod(sizes)
    if spec and not isinstance(spec[0], str) and isinstance(spec[0], Sequence):
        if len(spec) != n_ranks:
            raise ValueError(f"{len(spec)} pieces are given for {n_ranks} ranks")
        return [(tuple(map(tuple, piece)), False) for piece in spec]
    words = [str(s).replace(" ", "") for s in spec]
    if len(words) != len(sizes):
        raise ValueError(
            f"{len(words)} placements {words} for {len(sizes)} mesh axes of sizes {sizes}: one an axis"
        )
    splits = []  # (mesh axis, dim), in the order in which the tensor is cut
    for axis, word in enumerate(words):
        match = re.fullmatch(r"_?S(?:hard)?\((?:dim=)?(-?\d+).*\)", word)
        if match:
            # A strided shard (FSDP2 over TP) cuts what later axes have cut before.
            dim = int(match[1]) % 2 if shape[0] != 1 or int(match[1]) < 0 else 1
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
    figure = _new(lines * (panel_h + 0.55), "", width=per_line * panel_w + 0.1)
    for ax, (name, pieces) in zip(
        figure.subplots(lines, per_line, squeeze=False).flat, held.items(), strict=False
    ):
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
    panel_w = min(1.5, (WIDTH - 1.0) / n_ranks)
    panel_h = max(0.3, min(1.5, panel_w * max(0.25, min(shape[0] / shape[1], 1.2))))
    figure = _new(len(held) * (panel_h + 0.12) + 0.3, "", width=n_ranks * panel_w + 1.0)
    grid = figure.subplots(len(held), n_ranks, squeeze=False)
    for line, (name, pieces) in zip(grid, held.items(), strict=True):
        for rank, (ax, (piece, partial)) in enumerate(zip(line, pieces, strict=True)):
            _frame(ax, shape, f"rank {rank}" if line is grid[0] else "", centred=True)
            _piece(
                ax,
                shape,
                piece,
                [rank],
                partial,
                inches=(panel_w - 0.1, panel_h),
                text="+" if partial else "",
            )
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
    ax.add_patch(Rectangle((0, 0), shape[1], shape[0], fill=False, edgecolor=FAINT, linewidth=0.8))


def _piece(
    ax: Axes, shape, piece: Piece, ranks: list[int], partial: bool, inches, text: str | None = None
) -> None:
    (r0, r1), (c0, c1) = piece
    if r0 == r1 or c0 == c1:
        return  # an empty shard
    colours = [rank_colour(r) for r in ranks]
    base = Rectangle(
        (c0, r0), c1 - c0, r1 - r0, facecolor=colours[0], edgecolor="white", linewidth=1.2, zorder=2
    )
    ax.add_patch(base)
    if len(ranks) > 1:
        _stripes(ax, base, (c0, c1, r0, r1), colours, unit=shape[1] / 22)
    if partial:
        dots = Rectangle(
            (c0, r0), c1 - c0, r1 - r0, fill=False, hatch="oo", edgecolor="white", linewidth=0, zorder=4
        )
        ax.add_patch(dots)
    ax.add_patch(Rectangle((c0, r0), c1 - c0, r1 - r0, fill=False, edgecolor=INK, linewidth=0.9, zorder=5))
    if text is None:
        sign = " + " if partial else " = "
        text = sign.join(map(str, ranks)) if len(ranks) <= 4 else f"{ranks[0]}{sign}…{sign}{ranks[-1]}"
    if not text:
        return
    room = inches[0] * (c1 - c0) / shape[1], inches[1] * (r1 - r0) / shape[0]
    size = next(
        (s for s in (10, 9, 8, 7, 6) if _text_width(text, s) < room[0] and s * 1.25 / 72 < room[1]), None
    )
    if size:
        boxed = len(ranks) > 1 or partial
        box = {"boxstyle": "round,pad=0.25", "facecolor": "white", "edgecolor": "none"} if boxed else None
        ink = INK if boxed else _ink_on(colours[0])
        ax.text(
            (c0 + c1) / 2, (r0 + r1) / 2, text, ha="center", va="center", size=size, weight="bold", color=ink, bbox=box,
            zorder=6,
        )  # fmt: skip


def _stripes(ax: Axes, clip, bounds, colours: Sequence[str], unit: float) -> None:
    """Slanted stripes, one path a colour."""
    c0, c1, r0, r1 = bounds
    height, span = r1 - r0, c1 - c0
    slant = min(span, height) * 0.5
    n = max(len(colours), round((span + slant) / unit / 2))
    n = math.ceil(n / len(colours)) * len(colours)
    w = (span + slant) / n
    for k, colour in enumerate(colours):
        if k == 0:
            continue
        quads = []
        for i in range(k, n, len(colours)):
            x = c0 - slant + i * w
            quads += [(x + slant, r0), (x + slant + w, r0), (x + w, r1), (x, r1), (x + slant, r0)]
        patch = PathPatch(_compound(quads, 5), facecolor=colour, edgecolor="none", zorder=3)
        ax.add_patch(patch)
        patch.set_clip_path(clip)


def _compound(points: Sequence[tuple[float, float]], corners: int) -> Outline:
    """One path of many closed polygons, so that an SVG stays small."""
    codes = ([Outline.MOVETO] + [Outline.LINETO] * (corners - 2) + [Outline.CLOSEPOLY]) * (
        len(points) // corners
    )
    return Outline(points, codes)


def _boxes(boxes: Iterable[tuple[float, float, float, float]]) -> Outline:
    """One path of many rectangles (left, right, top, bottom)."""
    points = [p for x0, x1, y0, y1 in boxes for p in ((x0, y0), (x1, y0), (x1, y1), (x0, y1), (x0, y0))]
    return _compound(points, 5)


# --- timeline --------------------------------------------------------------------------------------------------


@_styled
def timeline(
    events: Iterable,
    window: tuple[float, float] | None = None,
    ranks: Iterable[int] | None = None,
    title: str = "",
    names: bool = True,
) -> Drawing:
    """A block a rank, a lane for compute and one for communication; grey is idle, the share of busy time at the right.

    events: anything with rank, lane, name, start, end (seconds) and perhaps phase; flat, or one list a rank.
    window: (from, to) in ms after the first event.   ranks: only these.   names: write an event's name where it fits.
    Communication under way at the same time takes further lanes.
    """
    events = [e for e in _flat(events) if ranks is None or e.rank in set(ranks)]
    if not events:
        raise ValueError(
            "there are no events to draw: did the recording run on the ranks, and was its list returned?"
        )
    origin = min(e.start for e in events)
    end_ms = max(e.end for e in events) - origin
    low, high = window or (0.0, end_ms * 1e3)
    bars = []  # (rank, lane, from ms, to ms, event)
    for e in events:
        a, b = (e.start - origin) * 1e3, (e.end - origin) * 1e3
        if b >= low and a <= high:
            bars.append((e.rank, e.lane, max(a, low), min(b, high), e))
    order = {"compute": 0, "communication": 1}
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
    figure = _new(0.85 + len(shown) * block * inch + (0.2 if title else 0), "")
    figure.alt = f"timeline of {len(shown)} ranks over {high - low:.1f} ms"
    ax = figure.add_subplot()
    if title:
        ax.set_title(title)
    ms_per_inch = (high - low) / (WIDTH - 1.9)
    by_phase: dict[str, list] = {}
    ticks, marks = [], []
    for i, rank in enumerate(shown):
        y = i * block
        ax.text(-0.115, y + sum(n_rows.values()) / 2, f"rank {rank}", transform=ax.get_yaxis_transform(), ha="right", va="center", weight="bold")  # fmt: skip
        for lane in lanes:
            ax.add_patch(
                Rectangle((low, y + 0.06), high - low, n_rows[lane] - 0.12, facecolor=IDLE, edgecolor="none")
            )
            ticks.append(y + n_rows[lane] / 2)
            marks.append({"communication": "comm."}.get(lane, lane))
            placed = rows[rank, lane]
            for row, depth, (_, _, a, b, e) in placed:
                inset = 0.06 + 0.14 * depth
                box = (a, max(b, a + 0.008 * ms_per_inch), y + row + inset, y + row + 1 - inset)
                by_phase.setdefault(_phase(e), []).append((depth, box))
                if names:
                    _name_in(ax, e, box, ms_per_inch, inch * (1 - 2 * inset))
            busy = _covered([(a, b) for _, _, (_, _, a, b, _) in placed]) / max(high - low, 1e-12)
            ax.text(1.008, y + n_rows[lane] / 2, f"{busy:4.0%}", transform=ax.get_yaxis_transform(), va="center", size=7.5, color=INK)  # fmt: skip
            y += n_rows[lane]
    ax.text(1.008, -0.35, "busy", transform=ax.get_yaxis_transform(), va="center", size=7.5, color=INK)
    for phase, boxes in by_phase.items():
        for depth in sorted({d for d, _ in boxes}):
            outline = _boxes(box for d, box in boxes if d == depth)
            colour = PHASES.get(phase, GREY)
            ax.add_patch(
                PathPatch(outline, facecolor=colour, edgecolor="white", linewidth=0.35, zorder=2 + depth)
            )
    ax.set(xlim=(low, high), ylim=(len(shown) * block - 0.45, -0.1), xlabel="ms", yticks=ticks)
    ax.set_yticklabels(marks, size=7.5, color=INK)
    ax.tick_params(axis="y", length=0, pad=3)
    ax.spines[["left", "bottom"]].set_visible(False)
    known = [p for p in PHASES if p in by_phase] + [p for p in by_phase if p not in PHASES]
    handles = [Patch(facecolor=PHASES.get(p, GREY), label=p) for p in known]
    _legend(figure, [*handles, Patch(facecolor=IDLE, label="idle")])
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


def _name_in(ax: Axes, e, box, ms_per_inch: float, height: float) -> None:
    a, b, y0, y1 = box
    room = (b - a) / ms_per_inch
    size = min(7.5, height * 72 * 0.8)
    short = e.name.rpartition(".")[2]
    for text in (e.name, short):
        if _text_width(text, size) + 0.04 < room:
            colour = PHASES.get(_phase(e), GREY)
            ax.text((a + b) / 2, (y0 + y1) / 2, text, ha="center", va="center", size=size, color=_ink_on(colour), zorder=9, clip_on=True)  # fmt: skip
            return


def _flat(items: Iterable) -> list:
    return [x for item in items for x in (item if isinstance(item, list | tuple) else [item])]


# --- memory ----------------------------------------------------------------------------------------------------


def _unit(largest: float) -> tuple[float, str]:
    for size, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if largest >= size:
            return size, name
    return 1.0, "bytes"


def _number(value: float) -> str:
    return (
        f"{value:.0f}"
        if value >= 100 or value == int(value)
        else f"{value:.1f}"
        if value >= 10
        else f"{value:.2f}"
    )


@_styled
def memory(data, events: Iterable | None = None, limit: float | None = None, title: str = "") -> Drawing:
    """Bytes by kind: stacked bars side by side, or stacked areas over time.

    data: bars, from label -> {kind: bytes}, or a list of {kind: bytes} by rank; or areas, from samples with `rank`,
        `time` (seconds) and `n_bytes` ({kind: bytes}), flat or one list a rank: a panel for each rank.
    events: over time only; their phases are shown as a strip under the areas.
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
    size, unit = _unit(largest)
    figure = _new(0.95 + 0.33 * len(data), f"memory by kind: {', '.join(map(str, data))}")
    ax = figure.add_subplot()
    if title:
        ax.set_title(title)
    inches_per_unit = (WIDTH - 2.2) / (largest * 1.1 / size)
    for y, bars in enumerate(data.values()):
        left = 0.0
        for kind in kinds:
            value = bars.get(kind, 0) / size
            if value:
                colour = KINDS.get(kind, GREY)
                ax.barh(y, value, 0.72, left, color=colour, edgecolor="white", linewidth=0.8)
                if _text_width(_number(value), 8) + 0.06 < value * inches_per_unit:
                    ax.text(
                        left + value / 2,
                        y,
                        _number(value),
                        ha="center",
                        va="center",
                        size=8,
                        color=_ink_on(colour),
                    )
                left += value
        ax.text(left + largest / size * 0.012, y, f"{_number(left)} {unit}", va="center", weight="bold")
    if limit:
        ax.axvline(limit / size, color=VERMILLION, linewidth=1.4, linestyle="--")
        ax.text(
            limit / size,
            -0.62,
            f" limit {_number(limit / size)} {unit}",
            color=VERMILLION,
            size=8,
            ha="right",
        )
    ax.set(ylim=(len(data) - 0.45, -0.7 if limit else -0.55), xlim=(0, largest * 1.12 / size), xlabel=unit)
    ax.set_yticks(range(len(data)), list(data))
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    _legend(figure, _kind_handles(kinds))
    return figure


def _memory_over_time(samples: list, events: list, limit, title: str) -> Drawing:
    if not samples:
        raise ValueError(
            "there are no samples to draw: did the watch run on the ranks, and was its list returned?"
        )
    ranks = sorted({s.rank for s in samples})
    kinds = _kinds(k for s in samples for k, v in s.n_bytes.items() if v)
    origin = min([s.time for s in samples] + [e.start for e in events])
    end = max([s.time for s in samples] + [e.end for e in events])
    peak = max(sum(s.n_bytes.values()) for s in samples)
    size, unit = _unit(max(peak, limit or 0))
    figure = _new(
        0.7 + (2.3 if len(ranks) == 1 else 1.35) * len(ranks), f"memory over time of {len(ranks)} ranks"
    )
    panels = figure.subplots(len(ranks), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    top = max(peak * 1.18, (limit or 0) * 1.08) / size
    strip = 0.07 * top if events else 0.0
    for ax, rank in zip(panels, ranks, strict=True):
        mine = _thin([s for s in samples if s.rank == rank], origin, end)
        x = [(s.time - origin) * 1e3 for s in mine] + [(end - origin) * 1e3]
        levels = [[s.n_bytes.get(k, 0) / size for s in [*mine, mine[-1]]] for k in kinds]
        ax.stackplot(x, levels, colors=[KINDS.get(k, GREY) for k in kinds], step="post", linewidth=0)
        highest = max(mine, key=lambda s: sum(s.n_bytes.values()))
        total, at = sum(highest.n_bytes.values()) / size, (highest.time - origin) * 1e3
        ax.axhline(total, color=INK, linewidth=0.7, linestyle=":")
        late = at > 0.5 * x[-1]
        ax.text(
            0 if late else x[-1],
            total,
            f"peak {_number(total)} {unit}",
            size=8,
            va="bottom",
            ha="left" if late else "right",
        )
        if limit:
            ax.axhline(limit / size, color=VERMILLION, linewidth=1.4, linestyle="--")
            ax.text(
                x[-1],
                limit / size,
                f"limit {_number(limit / size)} {unit}",
                color=VERMILLION,
                size=8,
                ha="right",
                va="bottom",
            )
        by_phase: dict[str, list] = {}
        for e in events:
            if e.rank == rank and e.lane == "compute":
                box = ((e.start - origin) * 1e3, (e.end - origin) * 1e3, -strip, -0.15 * strip)
                by_phase.setdefault(_phase(e), []).append(box)
        for phase, boxes in by_phase.items():
            ax.add_patch(PathPatch(_boxes(boxes), facecolor=PHASES.get(phase, GREY), edgecolor="none"))
        ax.set(xlim=(0, x[-1]), ylim=(-1.15 * strip, top), ylabel=unit)
        ax.set_title(f"rank {rank}" if len(ranks) > 1 else title)
    panels[-1].set_xlabel("ms")
    phases = [p for p in PHASES if any(_phase(e) == p for e in events if e.lane == "compute")]
    handles = _kind_handles(list(reversed(kinds)))
    strips = [Patch(facecolor=PHASES[p], edgecolor=INK, linewidth=0.4, label=f"{p} (strip)") for p in phases]
    _legend(figure, [*handles, *strips])
    if title and len(ranks) > 1:
        figure.suptitle(title, x=0.01, ha="left", size=9.5, weight="bold")
    return figure


def _thin(samples: list, origin: float, end: float, most: int = 220) -> list:
    """At most `most` samples: the highest of each slice of time, so that no peak is lost."""
    if len(samples) <= most:
        return samples
    best: dict[int, Any] = {}
    for s in samples:
        slot = int((s.time - origin) / max(end - origin, 1e-12) * (most - 1))
        if slot not in best or sum(s.n_bytes.values()) > sum(best[slot].n_bytes.values()):
            best[slot] = s
    return sorted(
        {id(s): s for s in [samples[0], *best.values(), samples[-1]]}.values(), key=lambda s: s.time
    )


# --- traffic ---------------------------------------------------------------------------------------------------

_HEAT = LinearSegmentedColormap.from_list("heat", ["#F3F8FC", SKY, BLUE, "#003A5C"])


@_styled
def traffic(data, title: str = "") -> Drawing:
    """Who sent how much to whom, and in which collectives.

    data: has (or is a dict of) `pairs`, pairs[i][j] the bytes from rank i to rank j, and perhaps `sent` and `calls`:
    collective -> bytes that all ranks sent together, and -> number of calls.
    """
    get = data.get if isinstance(data, Mapping) else lambda key, default: getattr(data, key, default)
    pairs, sent, calls = get("pairs", []), get("sent", {}), get("calls", {})
    n = len(pairs)
    if not n or any(len(row) != n for row in pairs):
        raise ValueError(
            f"`pairs` must be a square table, a row a rank; its {n} rows have {[len(r) for r in pairs]}"
        )
    largest = max(map(max, pairs))
    size, unit = _unit(largest)
    cell = min(0.52, 4.6 / n)
    side = max(1.5, cell * n)
    figure = _new(max(side + 0.75, 0.38 * len(sent) + 1.0), "", width=WIDTH if sent else side + 1.1)
    total_size, total_unit = _unit(sum(map(sum, pairs)))
    figure.alt = f"traffic of {n} ranks: {_number(sum(map(sum, pairs)) / total_size)} {total_unit}"
    if sent:
        table, bars = figure.subplots(1, 2, width_ratios=[side + 0.4, max(2.0, WIDTH - side - 2.2)])
    else:
        table, bars = figure.add_subplot(), None
    table.pcolormesh([[v / max(largest, 1) for v in row] for row in pairs], cmap=_HEAT, vmin=0, vmax=1, edgecolors="white", linewidth=1)  # fmt: skip
    for i, j in itertools.product(range(n), range(n)):
        value = pairs[i][j]
        text, share = (_number(value / size), value / largest) if value else ("·", 0)
        if _text_width(text, 6.5) < cell:
            points = next(s for s in (8.5, 7.5, 6.5) if _text_width(text, s) < cell or s == 6.5)
            ink = "white" if share > 0.55 else INK if value else GREY
            table.text(j + 0.5, i + 0.5, text, ha="center", va="center", size=points, color=ink)
    table.set(xlabel="to rank", ylabel="from rank", aspect="equal", ylim=(n, 0))
    table.set_xticks([i + 0.5 for i in range(n)], range(n))
    table.set_yticks([i + 0.5 for i in range(n)], range(n))
    table.tick_params(length=0)
    table.spines[:].set_visible(False)
    table.set_title(f"{title + ': ' if title else ''}{unit} sent")
    if bars is not None:
        top = max(sent.values())
        bar_size, bar_unit = _unit(top)
        for y, (name, value) in enumerate(sent.items()):
            bars.barh(y, value / bar_size, 0.62, color=PHASES.get(_COLLECTIVE_PHASE.get(name, ""), GREY))
            count = f", {calls[name]} call{'s' * (calls[name] != 1)}" if name in calls else ""
            text = f"{_number(value / bar_size)} {bar_unit}{count}"
            bars.text(value / bar_size + top / bar_size * 0.02, y, text, va="center", size=8.5)
        bars.set_yticks(range(len(sent)), list(sent))
        bars.set(xlim=(0, 1.62 * top / bar_size), ylim=(max(len(sent), 3) - 0.4, -0.6), xticks=[])
        bars.tick_params(length=0)
        bars.spines["bottom"].set_visible(False)
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


@_styled
def parity(errors: Mapping[str, Mapping[str, float]], tolerance: float = 1e-10, title: str = "") -> Drawing:
    """Relative error of each quantity in each layout, on a log scale, beside the tolerance.

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
    figure = _new(
        1.05 + 0.24 * len(errors), f"parity of {len(errors)} layouts: {wrong} errors above {tolerance:g}"
    )
    ax = figure.add_subplot()
    if title:
        ax.set_title(title)
    markers, colours = "osD^vPX", (BLUE, ORANGE, GREEN, PURPLE, SKY, "#6E6E6E", INK)
    for k, quantity in enumerate(quantities):
        offset = (k - (len(quantities) - 1) / 2) * min(0.2, 0.7 / len(quantities))
        fine, bad = [], []
        for y, row in enumerate(errors.values()):
            if quantity in row:
                v = row[quantity]
                x = high if not math.isfinite(v) else min(max(v, low), high)
                (fine if v <= tolerance else bad).append((x, y + offset))
        style = {"linestyle": "none", "color": colours[k % 7], "markersize": 5.5, "clip_on": False}
        ax.plot(*(zip(*fine, strict=True) if fine else ([], [])), marker=markers[k % 7], **style)
        if bad:
            ax.plot(*zip(*bad, strict=True), marker=markers[k % 7], **style)
            ax.plot(*zip(*bad, strict=True), marker="x", linestyle="none", color=VERMILLION, markersize=10, markeredgewidth=2, clip_on=False)  # fmt: skip
    ax.axvline(tolerance, color=VERMILLION, linewidth=1.3, linestyle="--")
    ax.axvspan(tolerance, high, color=VERMILLION, alpha=0.06, linewidth=0)
    ax.set_xscale("log")
    ax.set(xlim=(low, high), ylim=(len(errors) - 0.5, -0.5), xlabel="relative error to one process")
    ax.set_yticks(range(len(errors)), list(errors))
    ax.tick_params(axis="y", length=0)
    ax.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
    if any(v == 0 for row in errors.values() for v in row.values()):
        ticks = [t for t in ax.get_xticks() if low < t <= high]
        ax.set_xticks([low, *ticks], ["0", *(f"$10^{{{round(math.log10(t))}}}$" for t in ticks)])
    for y in range(len(errors)):
        ax.axhline(y, color=IDLE, linewidth=0.8, zorder=0)
    ax.spines["left"].set_visible(False)
    handles = [
        Line2D([], [], marker=markers[k % 7], color=colours[k % 7], linestyle="none", label=q)
        for k, q in enumerate(quantities)
    ]
    _legend(
        figure, [*handles, Line2D([], [], color=VERMILLION, linestyle="--", label=f"tolerance {tolerance:g}")]
    )
    return figure


# --- plan ------------------------------------------------------------------------------------------------------


@_styled
def plan(
    rows: Sequence[Sequence[str | None]], title: str = "", slots: Mapping[str, int] | None = None
) -> Drawing:
    """The actions of a pipeline: a row a rank, a column a time slot; an empty slot is a bubble.

    rows: for each rank its slots; each None or "", or an action as torch prints it, "[stage]KIND[microbatch]": "F0",
        "2B1", kinds F forward, B backward, I input gradient, W weight gradient. The number shown is the microbatch; a
        rank's second, third, ... stage is lighter.
    slots: kind -> number of columns that it takes, when a row lists each action once, e.g. {"F": 1, "B": 2}.
    """
    cells = []  # (rank, column, width, stage, kind, microbatch)
    n_columns = 0
    for rank, row in enumerate(rows):
        column = 0
        for action in row:
            if not action:
                column += 1
                continue
            match = re.fullmatch(r"(\d*)([A-Z_]+?)(\d*)", str(action))
            if not match:
                raise ValueError(f"an action is like 'F0' or '2B1'; rank {rank} has {action!r}")
            width = (slots or {}).get(match[2], 1)
            cells.append((rank, column, width, match[1], match[2], match[3]))
            column += width
        n_columns = max(n_columns, column)
    kinds = list(dict.fromkeys(c[4] for c in cells))
    kinds.sort(key=lambda k: (list(ACTIONS).index(k) if k in ACTIONS else 9, k))
    idle = 1 - sum(c[2] for c in cells) / max(1, len(rows) * n_columns)
    size = min(0.4, (WIDTH - 0.9) / max(n_columns, 1))
    height = max(size, 0.22)
    figure = _new(
        0.75 + height * len(rows) + (0.2 if title else 0), "", width=max(4.0, size * n_columns + 0.9)
    )
    figure.alt = f"pipeline plan of {len(rows)} ranks in {n_columns} slots, {idle:.0%} bubble"
    ax = figure.add_subplot()
    if title:
        ax.set_title(title)
    ax.add_patch(Rectangle((0, 0), n_columns, len(rows), facecolor=IDLE, edgecolor="none"))
    own = [
        sorted({c[3] for c in cells if c[0] == rank}, key=lambda s: int(s or 0)) for rank in range(len(rows))
    ]
    by_colour: dict[str, list] = {}
    for rank, column, width, stage, kind, microbatch in cells:
        colour = _lighter(ACTIONS.get(kind, GREY), min(0.6, 0.45 * own[rank].index(stage)))
        by_colour.setdefault(colour, []).append((column, column + width, rank + 0.04, rank + 0.96))
        text = microbatch or kind
        if _text_width(text, 6) < size * width:
            points = next((s for s in (8.5, 7.5, 6.5) if _text_width(text, s) + 0.03 < size * width), 6)
            ax.text(column + width / 2, rank + 0.5, text, ha="center", va="center", size=points, color=_ink_on(colour), zorder=3)  # fmt: skip
    for colour, boxes in by_colour.items():
        ax.add_patch(PathPatch(_boxes(boxes), facecolor=colour, edgecolor="white", linewidth=0.7, zorder=2))
    ax.set(xlim=(0, n_columns), ylim=(len(rows), 0), xlabel="time slot")
    ax.set_yticks([i + 0.5 for i in range(len(rows))], [f"rank {i}" for i in range(len(rows))])
    ax.tick_params(axis="y", length=0)
    ax.spines[["left", "bottom"]].set_visible(False)
    handles = [Patch(facecolor=ACTIONS.get(k, GREY), label=ACTION_NAMES.get(k, k)) for k in kinds]
    _legend(figure, [*handles, Patch(facecolor=IDLE, label=f"bubble {idle:.0%}")])
    return figure
