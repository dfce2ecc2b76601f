"""How the figures of `lab.draw` look, show themselves and are written: palette, style, text, files.

One meaning, one colour, in all figures, after Okabe and Ito (2008), whose eight colours stay apart for every common
kind of colour vision. Nothing here touches matplotlib's global state: no pyplot, no rcParams left behind.
"""

import base64
import functools
import io
import re
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.path import Path as Outline

from minititan.lab._theme import finish

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
        """JupyterLab shows the HTML, as it gives an image/png no alt text; nbconvert takes that from the metadata. A
        committed notebook keeps the PNG alone (tests/run_notebook.py)."""
        png, width, words = _png(self, dpi=160), round(self.get_figwidth() * 100), describe(self)
        html = image_html("image/png", png, width, words)
        bundle = {"image/png": png, "text/html": html, "text/plain": repr(self)}
        return bundle, {"image/png": {"width": width, "alt": words}}


def image_html(mime_type: str, data: bytes, width: int, alt: str) -> str:
    source = f"data:{mime_type};base64,{base64.b64encode(data).decode()}"
    return f'<img alt="{escape(alt)}" width="{width}" src="{source}">'


def title_of(figure: Figure) -> str:
    """Its title, or that of its only panel, or `alt`."""
    panels = [ax.get_title(loc=side) for ax in figure.axes for side in ("left", "center") if ax.get_title(loc=side)]
    titles = [figure.get_suptitle(), *(legend.get_title().get_text() for legend in figure.legends)]
    titles += panels if len(panels) == 1 else []
    titles += [getattr(figure, "alt", ""), ", ".join(panels), "figure"]
    return next(" ".join(t.split()) for t in titles if t and t != "None")


def describe(figure: Figure) -> str:
    """What is seen, in words: title, `alt`, what the panels and axes are called, and the legend."""
    said = {
        "panels": [ax.get_title(loc=side) for ax in figure.axes for side in ("left", "center")],
        "axes": [label for ax in figure.axes for label in (ax.get_xlabel(), ax.get_ylabel())],
        "legend": [t.get_text() for owner in (figure, *figure.axes) for t in _legend_texts(owner)],
    }
    words = list(dict.fromkeys([title_of(figure), getattr(figure, "alt", title_of(figure))]))
    for what, names in said.items():
        names = [" ".join(n.split()) for n in dict.fromkeys(names) if n.strip()]
        if names and names != [title_of(figure)]:
            words.append(f"{what}: {', '.join(names)}")
    return "; ".join(words)


def _legend_texts(owner: Figure | Axes) -> list:
    legends = owner.legends if isinstance(owner, Figure) else [owner.get_legend()]
    return [t for legend in legends if legend is not None for t in legend.get_texts()]


def _png(figure: Figure, dpi: int) -> bytes:
    """Few flat colours: a palette of the most frequent, each exact, makes it a third of the size of a true-colour PNG."""
    from PIL import Image

    with matplotlib.rc_context(_STYLE):
        raw = io.BytesIO()
        figure.savefig(raw, format="png", dpi=dpi)
    out = io.BytesIO()
    pixels = np.asarray(Image.open(raw).convert("RGB"), dtype=np.int32)
    codes, where, counts = np.unique(pixels @ (65536, 256, 1), return_inverse=True, return_counts=True)
    colours = np.stack([codes >> 16, codes >> 8 & 255, codes & 255], 1)
    palette = colours[np.argsort(-counts, kind="stable")[:96]]
    nearest = np.square(colours[:, None] - palette).sum(2).argmin(1).astype(np.uint8)
    image = Image.fromarray(nearest[where].reshape(pixels.shape[:2]), mode="P")
    image.putpalette(palette.astype(np.uint8).tobytes())
    image.save(out, format="png", optimize=True)
    return out.getvalue()


def to_svg(figure: Figure) -> str:
    """SVG text: letters stay letters, coordinates have two decimals, the same bytes for the same data. For light and
    dark pages, with title and description."""
    with matplotlib.rc_context(_STYLE):
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    svg = re.sub(r"-?\d+\.\d{3,}", lambda m: f"{float(m[0]):.2f}".rstrip("0").rstrip("."), out.getvalue())
    return finish(svg, title_of(figure), describe(figure))


def save(figure: Figure, name: str, folder: str | Path | None = None) -> Path:
    """Writes the figure, or a film of `lab.animate`, to `name`.svg (or .png, if the name says so) in `folder`; by default the
    `figures` of this repository, looked for from the current directory upwards. Returns the path. ValueError when there is none."""
    if folder is None:
        here = Path.cwd()
        folder = next((p / "figures" for p in (here, *here.parents) if (p / "figures").is_dir()), None)
        if folder is None:
            raise ValueError(f"no folder called 'figures' in {here.name!r} or above it: pass folder=...")
    path = Path(folder) / (name if name.endswith((".svg", ".png")) else f"{name}.svg")
    if path.suffix == ".png":
        path.write_bytes(_png(figure, dpi=110))
    else:
        path.write_text(to_svg(figure) if isinstance(figure, Figure) else figure.svg())
    return path


def styled(function):
    """Makes a function draw in this style, and lays its figure out once: then every way to show it is the same."""

    @functools.wraps(function)
    def inner(*args, **kwargs):
        with matplotlib.rc_context(_STYLE):
            figure = function(*args, **kwargs)
            figure.draw_without_rendering()
            figure.set_layout_engine("none")
            return figure

    return inner


def rank_colour(rank: int) -> str:
    """One colour a rank: eight strong ones, then the same ones lighter."""
    strong, turn = RANKS[rank % len(RANKS)], rank // len(RANKS)
    return lighter(strong, min(0.55, 0.45 * turn)) if turn else strong


def lighter(colour: str, share: float) -> str:
    return to_hex([c + (1 - c) * share for c in to_rgb(colour)])


def ink_on(colour: str) -> str:
    r, g, b = to_rgb(colour)
    return "white" if 0.299 * r + 0.587 * g + 0.114 * b < 0.5 else INK


def new_figure(height: float, alt: str, width: float = WIDTH, **kwargs) -> Drawing:
    figure = Drawing(figsize=(width, height), layout="constrained", facecolor="white", **kwargs)
    figure.get_layout_engine().set(w_pad=0.04, h_pad=0.04)
    figure.alt = alt
    return figure


def legend(figure: Figure, handles: Sequence[Any], title: str = "") -> None:
    """The title, and under it the legend: both above the data, from the left."""
    bold = {"weight": "bold", "size": 10}
    if handles:
        widest = max(text_width(str(h.get_label()), 8.5) for h in handles) + 0.45
        columns = max(1, min(len(handles), int((figure.get_figwidth() - 0.1) / widest)))
        style = {"title": title, "title_fontproperties": bold, "alignment": "left"} if title else {}
        figure.legend(handles=handles, loc="outside upper left", ncols=columns, borderpad=0.2, **style)
    elif title:
        figure.suptitle(title, x=0.01, ha="left", **bold)


def say(ax: Axes, x: float, y: float, text: str, size: float = 8, **kwargs) -> None:
    ax.text(x, y, text, **{"ha": "center", "va": "center", "size": size} | kwargs)


def text_width(text: str, size: float) -> float:
    """About how many inches wide."""
    return 0.62 * size / 72 * len(text)


def compound(points: Sequence[tuple[float, float]], corners: int) -> Outline:
    """One path of many closed polygons, so that an SVG stays small."""
    codes = ([Outline.MOVETO] + [Outline.LINETO] * (corners - 2) + [Outline.CLOSEPOLY]) * (len(points) // corners)
    return Outline(points, codes)


def boxes_path(boxes: Iterable[tuple[float, float, float, float]]) -> Outline:
    """One path of many rectangles (left, right, top, bottom)."""
    points = [p for x0, x1, y0, y1 in boxes for p in ((x0, y0), (x1, y0), (x1, y1), (x0, y1), (x0, y0))]
    return compound(points, 5)


def unit_of(largest: float) -> tuple[float, str]:
    for size, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if largest >= size:
            return size, name
    return 1.0, "bytes"


def number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
