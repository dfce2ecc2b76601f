"""An SVG for light and dark pages, with words: its ink and its paper change with the reader's theme, its colours do not.

A picture in a README or a notebook is an `<img>`: no script runs in it, but its own `<style>` may ask the reader's theme.
What means something (a rank, a phase, a kind of memory) keeps its colour. White paper, grey idle time and black ink are
exchanged, except for ink that stands on a colour.
"""

import math
import re
from html import escape

# light -> dark, for what means nothing
INK = {"#222222": "#e6edf3", "#000000": "#e6edf3", "#333333": "#e6edf3"}
PAPER = {"#ffffff": "#0d1117", "#ececec": "#262c36", "#e8e8e8": "#262c36", "#d5d5d5": "#3d444d"}


def _dark_style() -> str:
    rules = []
    light = next(iter(INK.values()))
    rules.append(f'text:not(.on):not([style*="fill:"]){{fill:{light}!important}}')
    for ink, dark in INK.items():
        rules.append(
            f'text:not(.on)[style*="fill: {ink}"],tspan[style*="fill: {ink}"],use[style*="fill: {ink}"]{{fill:{dark}!important}}'
        )
        rules.append(f'[style*="stroke: {ink}"]{{stroke:{dark}!important}}')
    for paper, dark in PAPER.items():
        rules.append(f':is(path,use)[style*="fill: {paper}"]:not([id^="QuadMesh"] *){{fill:{dark}!important}}')
        on_fill = ':not([style*="fill: none"])' if paper == "#ffffff" else ""  # a white line on a colour stays white
        rules.append(f':is(path,use)[style*="stroke: {paper}"]{on_fill}{{stroke:{dark}!important}}')
    return "@media (prefers-color-scheme: dark){" + "".join(rules) + "}"


_STYLE = f'<style id="theme">{_dark_style()}</style>'
_OURS = re.compile(
    r'<title>.*?</title>\n?|<desc>.*?</desc>\n?|<style id="theme">.*?</style>\n?| class="on"| role="img"', re.S
)


def finish(svg: str, title: str, description: str) -> str:
    """The SVG of matplotlib, with the style for dark pages, `<title>` and `<desc>`. Twice is the same as once."""
    svg = _mark_ink_on_colours(_OURS.sub("", svg))
    words = f"<title>{escape(title)}</title>\n<desc>{escape(description)}</desc>\n{_STYLE}\n"
    return re.sub(r"<svg\b([^>]*)>\n?", lambda m: f'<svg role="img"{m[1]}>\n{words}', svg, count=1)


def contrast(one: str, other: str) -> float:
    """Of two colours "#rrggbb", as WCAG 2 counts: 1 to 21; text needs 4.5."""
    bright, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


# --- which ink stands on a colour ------------------------------------------------------------------------------

_ELEMENT = re.compile(
    r'<g id="(\w+?)_?\d*">|<path d="([^"]*)"[^>]*?style="([^"]*)"|<text style="([^"]*)"([^>]*)>([^<]*)'
)
_NUMBER = re.compile(r"-?[\d.]+(?:e-?\d+)?")


def _mark_ink_on_colours(svg: str) -> str:
    """class="on" for each text in ink whose middle lies in a shape that keeps its colour."""
    shapes: list[tuple[list, tuple, bool]] = []  # polygons, the box around them, whether it keeps its colour
    group = ""

    def look(m: re.Match) -> str:
        nonlocal group
        name, d, style, text_style, where, text = m.groups()
        if name:
            group = name
        elif d:
            fill = re.search(r"fill: (#\w{6})", style)
            alpha = re.search(r"(?<![\w-])(?:fill-)?opacity: ([\d.]+)", style)
            if fill and not (alpha and float(alpha[1]) < 0.5):
                polygons = [_points(part) for part in d.split("M")[1:]]
                xs, ys = zip(*(p for polygon in polygons for p in polygon), strict=True)
                box = min(xs), max(xs), min(ys), max(ys)
                shapes.append((polygons, box, group == "QuadMesh" or fill[1] not in PAPER))
        elif text_style and ("fill:" not in text_style or any(f"fill: {ink}" in text_style for ink in INK)):
            x, y = _middle(text_style, where, text)
            under = [keeps for polygons, box, keeps in shapes if _inside(x, y, polygons, box)]
            if under and under[-1]:  # the last one drawn lies on top
                return m[0].replace("<text", '<text class="on"', 1)
        return m[0]

    return _ELEMENT.sub(look, svg)


def _points(path: str) -> list[tuple[float, float]]:
    numbers = [float(n) for n in _NUMBER.findall(path)]
    return list(zip(numbers[::2], numbers[1::2], strict=False))


def _middle(style: str, where: str, text: str) -> tuple[float, float]:
    size = float(re.search(r"font-size: ([\d.]+)", style)[1])
    place = re.search(r'x="(-?[\d.]+)" y="(-?[\d.]+)"', where) or re.search(
        r"translate\((-?[\d.]+) (-?[\d.]+)\)", where
    )
    turn = re.search(r"rotate\((-?[\d.]+)", where)
    angle = math.radians(float(turn[1])) if turn else 0.0
    along = {"middle": 0.0, "end": -0.5}.get((re.search(r"text-anchor: (\w+)", style) or ["", ""])[1], 0.5)
    dx, dy = along * 0.55 * size * len(text), -0.35 * size
    x, y = float(place[1]), float(place[2])
    return x + dx * math.cos(angle) - dy * math.sin(angle), y + dx * math.sin(angle) + dy * math.cos(angle)


def _inside(x: float, y: float, polygons: list, box: tuple) -> bool:
    if not (box[0] <= x <= box[1] and box[2] <= y <= box[3]):
        return False
    crossings = 0
    for points in polygons:
        for (x0, y0), (x1, y1) in zip(points, points[1:] + points[:1], strict=True):
            crossings += (y0 > y) != (y1 > y) and x < x0 + (y - y0) / (y1 - y0) * (x1 - x0)
    return crossings % 2 == 1
