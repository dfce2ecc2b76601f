"""What ranks did, as a film of ten seconds: an SVG that plays in a README and in a cell, from recorded events.

    animate.ring(events)                     keys and values travel round the ranks, while each attends (notebook 11)
    animate.pipeline(events)                 microbatches run through the stages, and wait there (notebook 09)
    animate.gather_and_free(events, memory)  FSDP's blocks come and go, gradients stay (notebook 04)

Times are the recorded ones, all slowed down alike. CSS moves everything, so there is no script in it, and a reader who
wants reduced motion sees a still. Colours are those of `lab.draw`; ink and paper follow the reader's theme.
`draw.save(film, "name")` writes figures/name.svg.
"""

import math
from collections.abc import Iterable, Sequence
from html import escape

from minititan.lab._canvas import (
    ACTIONS,
    IDLE,
    INK,
    KINDS,
    PHASES,
    image_html,
    ink_on,
    number,
    rank_colour,
    unit_of,
)
from minititan.lab._theme import INK as DARK_INK
from minititan.lab._theme import PAPER as DARK_PAPER
from minititan.lab.draw import _action, _flat, _kinds, _thin

WIDTH, SECONDS, PAUSE = 850, 10, 0.1  # pixels; seconds of a round; the share of it in which all stands still
_SOFT = "#5A5A5A", "#A9B1BA"  # quieter ink, on light and on dark paper


class Film:
    """An SVG that plays. A cell shows it by its HTML."""

    def __init__(self, title: str, height: int, start: float, end: float):
        if not end > start:
            raise ValueError(f"the events last from {start} to {end} s: there is nothing to show; record a run first")
        self.title, self.alt, self.height = title, title, height
        self.start, self.end = start, end
        self.names: dict[str, str] = {}  # body of an @keyframes -> its name
        self.parts: list[str] = []

    def at(self, moment: float) -> str:
        """When in a round, as a percentage."""
        share = min(max((moment - self.start) / (self.end - self.start), 0.0), 1.0)
        return f"{100 * (1 - PAUSE) * share:.1f}".removesuffix(".0") + "%"

    def _name(self, body: str) -> str:
        return self.names.setdefault(body, f"k{len(self.names)}")

    def shown(self, *spans: tuple[float, float]) -> str:
        """Attributes of an element that is there from a to b only, for each span; an end of infinity stays."""
        body = "0%{opacity:0}"
        for a, b in spans:
            body += f"{self.at(a)}{{opacity:1}}" + (f"{self.at(b)}{{opacity:0}}" if b < math.inf else "")
        return f'class="cut" style="animation-name:{self._name(body)}"'

    def moved(self, *stops: tuple[float, str]) -> str:
        """Attributes of an element that moves evenly from one (moment, CSS) to the next."""
        body, last = f"0%{{{stops[0][1]}}}", 0.0
        for moment, css in stops:  # two at one moment would melt into one: a jump takes a tenth of a percent
            last = max(last + 0.1, float(self.at(moment)[:-1]))
            body += f"{last:.1f}".removesuffix(".0") + f"%{{{css}}}"
        return f'class="run" style="animation-name:{self._name(body + f"to{{{stops[-1][1]}}}")}"'

    def add(self, *parts: str) -> None:
        self.parts += parts

    def text(self, x: float, y: float, text: str, css: str = "ink", **more) -> str:
        extra = "".join(f' {k.replace("_", "-")}="{v}"' for k, v in more.items())
        return f'<text class="{css}" x="{x:g}" y="{y:g}"{extra}>{escape(text)}</text>'

    def legend(self, x: float, y: float, entries: Iterable[tuple[str, str]], frames: bool = False) -> None:
        for colour, label in entries:
            fill = 'class="idle"' if colour == IDLE else f'fill="{colour}"'
            fill = f'fill="none" stroke-width="3" stroke="{colour}"' if frames else fill
            self.add(f'<rect {fill} x="{x:g}" y="{y - 9:g}" width="11" height="11"/>', self.text(x + 15, y + 1, label))
            x += 33 + 6.4 * len(label)

    def slower(self) -> str:
        times = SECONDS * (1 - PAUSE) / (self.end - self.start)
        return f"{(self.end - self.start) * 1e3:.0f} ms, recorded; shown {times:.0f} times slower"

    def svg(self) -> str:
        light, dark = next(iter(DARK_INK.values())), DARK_PAPER
        style = (
            f".ink{{fill:{INK}}}.soft{{fill:{_SOFT[0]}}}.paper{{fill:#ffffff}}.idle{{fill:{IDLE}}}"
            f".line{{stroke:{_SOFT[0]};fill:none}}.mid{{text-anchor:middle}}"
            f".cut,.run{{animation:{SECONDS}s step-end infinite}}.run{{animation-timing-function:linear}}"
            f".all>*{{animation:{SECONDS}s linear infinite;animation-name:inherit}}"
            "@media (prefers-reduced-motion: reduce){.cut,.run,.all>*{animation:none!important}.off{opacity:0}}"
            f"@media (prefers-color-scheme: dark){{.ink{{fill:{light}}}.soft{{fill:{_SOFT[1]}}}"
            f".line{{stroke:{_SOFT[1]}}}.paper{{fill:{dark['#ffffff']}}}.idle{{fill:{dark['#ececec']}}}}}"
        )
        style += "".join(f"@keyframes {name}{{{body}}}" for body, name in self.names.items())
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {WIDTH} {self.height}" '
            f'width="{WIDTH}" height="{self.height}" font-family="DejaVu Sans,Verdana,Arial,sans-serif" font-size="11">\n'
            f"<title>{escape(self.title)}</title>\n<desc>{escape(self.alt)}</desc>\n<style>{style}</style>\n"
            f'<rect class="paper" width="{WIDTH}" height="{self.height}"/>\n'
            f'<text class="ink" x="8" y="20" font-size="13" font-weight="bold">{escape(self.title)}</text>\n'
            + "\n".join(self.parts)
            + "\n</svg>\n"
        )

    def __repr__(self) -> str:
        return f"<{self.alt}>"

    def _repr_html_(self) -> str:
        return image_html("image/svg+xml", self.svg().encode(), WIDTH, self.alt)


def _chip(x: float, y: float, width: float, height: float, colour: str, text: str) -> str:
    """A coloured box around (x, y) with a word in it."""
    box = f'<rect x="{x - width / 2:.1f}" y="{y - height / 2:.1f}" width="{width}" height="{height}" rx="4"'
    label = f'<text class="mid" x="{x:.1f}" y="{y + 4:.1f}" fill="{ink_on(colour)}">{text}</text>'
    return f'{box} fill="{colour}"/>{label}'


# --- ring ------------------------------------------------------------------------------------------------------


def ring(events: Sequence[Sequence], title: str = "Ring attention: queries stay, keys and values travel") -> Film:
    """Key/value blocks go round the ranks while each attends to the block that it holds.

    events: of each rank, from a forward pass or more: a "forward" span for every block, and a send to the next rank
        before every span but the last. Whose block a rank holds follows from the sends.
    ValueError when a rank has fewer forward spans than there are ranks, or fewer sends than blocks to pass on.
    """
    n = len(events)
    tiles = [[e for e in of if e.lane == "compute" and e.phase == "forward"][:n] for of in events]
    sends = [[e for e in of if e.name == "send"][: n - 1] for of in events]
    for rank in range(n):
        if len(tiles[rank]) < n or len(sends[rank]) < n - 1:
            raise ValueError(
                f"rank {rank} has {len(tiles[rank])} forward spans and {len(sends[rank])} sends, but {n} ranks pass on "
                f"{n} blocks: record a ring in which every rank attends to every block, zigzag or not causal"
            )
    holds = [list(range(n))]  # step -> rank -> whose block it has
    for step in range(n - 1):
        arrived = dict.fromkeys(range(n))
        for rank in range(n):
            arrived[sends[rank][step].peer] = holds[-1][rank], rank
        if None in arrived.values():
            raise ValueError(f"in step {step} nobody sends to rank {[r for r, a in arrived.items() if a is None]}")
        holds.append([arrived[rank][0] for rank in range(n)])
    film = Film(title, 330, min(of[0].start for of in sends + tiles), max(of[-1].end for of in tiles))
    film.alt = (
        f"Film of {n} ranks around a ring. Each keeps its queries; its block of keys and values moves to the next rank "
        f"while it attends. After {n} steps every query has met every key. {film.slower()}."
    )
    centre = [
        (205 + 140 * math.cos(a), 178 + 112 * math.sin(a)) for a in (math.tau * (r / n - 0.375) for r in range(n))
    ]
    inwards = [28 if x < 205 else -28 for x, _ in centre]
    slot = [(x + dx, y + 8) for (x, y), dx in zip(centre, inwards, strict=True)]
    points = " ".join(f"{x:.0f},{y:.0f}" for x, y in slot)
    film.add(f'<polygon class="line" points="{points}" stroke-dasharray="3 4"/>')
    for rank, (x, y) in enumerate(centre):
        colour, box = rank_colour(rank), f'x="{x - 60:.1f}" y="{y - 36:.1f}" width="120" height="72" rx="8"'
        film.add(
            f'<rect class="idle" {box}/>',
            film.text(x, y - 16, f"rank {rank}", "ink mid", font_weight="bold"),
            _chip(x - inwards[rank], y + 8, 44, 26, colour, f"Q{rank}"),
            f'<rect {box} fill="none" stroke="{colour}" stroke-width="3.5" '
            f"{film.shown(*((e.start, e.end) for e in tiles[rank]))}/>",
        )
    cell, left, top = 58, 545, 88
    film.add(
        film.text(left + cell * n / 2, top - 42, "which queries have met which keys", "ink mid", font_weight="bold")
    )
    for r in range(n):
        film.add(_chip(left - 26, top + cell * (r + 0.5), 44, 26, rank_colour(r), f"Q{r}"))
        film.add(_chip(left + cell * (r + 0.5), top - 20, 44, 26, rank_colour(r), f"KV{r}"))
    for rank in range(n):
        for step, e in enumerate(tiles[rank]):
            owner, colour = holds[step][rank], rank_colour(rank)
            x, y = left + cell * owner, top + cell * rank
            grow = film.moved((e.start, "transform:scaleX(0)"), (e.end, "transform:scaleX(1)"))
            film.add(
                f'<rect class="idle" x="{x + 1}" y="{y + 1}" width="{cell - 2}" height="{cell - 2}"/>'
                f'<g transform="translate({x + 1} {y + 1})"><rect width="{cell - 2}" height="{cell - 2}" '
                f'fill="{colour}" {grow}/></g>'
                f"<g {film.shown((e.end, math.inf))}>"
                f'<text class="mid" x="{x + cell / 2}" y="{y + cell / 2 + 4}" fill="{ink_on(colour)}">step {step}</text></g>'
            )
    for step in range(n):  # a block, where it is in this step; the one that travels on is the next step's
        for rank in range(n):
            owner, tile = holds[step][rank], tiles[rank][step]
            stay = math.inf if step == n - 1 else tile.end
            chip = _chip(0, 0, 44, 26, rank_colour(owner), f"KV{owner}")
            x, y = slot[rank]
            if step == 0:
                film.add(
                    f'<g transform="translate({x:.1f} {y:.1f})"><g {film.shown((film.start, stay))}>{chip}</g></g>'
                )
                continue
            before = next(r for r in range(n) if sends[r][step - 1].peer == rank)
            send = sends[before][step - 1]
            places = [slot[before], _door(slot[before], slot[rank], centre[rank]), slot[rank]]
            here, waits, inside = (f"transform:translate({a - x:.0f}px,{b - y:.0f}px)" for a, b in places)
            landed, begun = min(send.end, tile.start), tile.start
            quick = min(begun, landed + 0.02 * (film.end - film.start))
            track = film.moved(
                (send.start, here), (landed, waits), (max(begun - (quick - landed), landed), waits), (begun, inside)
            )
            film.add(
                f'<g transform="translate({x:.1f} {y:.1f})" opacity="0" {film.shown((send.start, stay))}>'
                f"<g {track}>{chip}</g></g>"
            )
    film.add(film.text(8, 318, f"A frame: the rank attends. {film.slower()}", "soft"))
    return film


def _door(start: tuple, end: tuple, centre: tuple) -> tuple[float, float]:
    """Where a chip on its way from start to end stands just outside the box around `centre`."""
    for i in range(100, -1, -1):
        x, y = (a + (b - a) * i / 100 for a, b in zip(start, end, strict=True))
        if abs(x - centre[0]) > 84 or abs(y - centre[1]) > 51:
            return x, y
    return start


# --- pipeline --------------------------------------------------------------------------------------------------


def pipeline(events: Sequence[tuple], title: str = "1F1B: microbatches run through the stages") -> Film:
    """Forwards and backwards appear in time; beside them, the microbatches whose activations a rank keeps.

    events: tuples (rank, "2B1", start, end), as `draw.timeline` takes them. A microbatch is in flight on a rank from the
    end of its forward to the end of its backward there.
    """
    ran = sorted((a, b, rank, *_action(rank, name)) for rank, name, a, b in events)
    n = 1 + max(rank for _, _, rank, *_ in ran)
    film = Film(title, 92 + 40 * n, ran[0][0], max(b for _, b, *_ in ran))
    held = [_in_flight([e for e in ran if e[2] == rank]) for rank in range(n)]  # (from, to, place, microbatch)
    most = [1 + max(place for _, _, place, _ in of) for of in held]
    film.alt = (
        f"Film of a pipeline of {n} ranks: forwards (light blue) pass down the ranks, backwards (dark blue) come back up, "
        f"grey is waiting. Ranks 0 to {n - 1} keep at most {', '.join(map(str, most))} microbatches. {film.slower()}."
    )
    busy = [(sum(a <= t < b for of in held for a, b, *_ in of), -t) for of in held for t, *_ in of]
    still = -max(busy)[1]  # when the most are in flight
    left, top, row = 90 + 25 * max(most), 62, 40
    scale = (WIDTH - 12 - left) / (film.end - film.start)
    film.add(film.text(76, 50, "in flight", font_weight="bold"))
    film.legend(left, 50, [(ACTIONS["F"], "forward"), (ACTIONS["B"], "backward"), (IDLE, "bubble: the rank waits")])
    film.add(f'<svg x="{left}" y="{top}" width="{WIDTH - 12 - left}" height="{row * n}">')
    film.add(*(f'<rect class="idle" y="{row * r + 4}" width="100%" height="30"/>' for r in range(n)))
    shapes, labels, when = {}, {}, {}
    for a, b, rank, stage, kind, microbatch in ran:
        x, width = (a - film.start) * scale, (b - a) * scale
        when[rank, kind, microbatch, stage] = a, b
        shapes.setdefault(kind, []).append(
            f"M{x:.1f} {row * rank + 4}h{max(width - 1, 0.5):.1f}v30h-{max(width - 1, 0.5):.1f}z"
        )
        labels.setdefault(kind, []).append(f'<text x="{x + width / 2:.1f}" y="{row * rank + 23}">{microbatch}</text>')
    for kind, shape in shapes.items():
        film.add(f'<path fill="{ACTIONS[kind]}" d="{"".join(shape)}"/>')
        film.add(f'<g class="mid" fill="{ink_on(ACTIONS[kind])}">{"".join(labels[kind])}</g>')
    lines = []
    for (rank, kind, microbatch, _), (_, b) in when.items():
        to = rank + (1 if kind == "F" else -1)
        arrival = next(
            (a for (r, k, m, _), (a, _) in when.items() if (r, k, m) == (to, kind, microbatch) and a >= b), None
        )
        if arrival is not None:
            y0, y1 = (row * rank + 34, row * to + 4) if to > rank else (row * rank + 4, row * to + 34)
            lines.append(f"M{(b - film.start) * scale:.1f} {y0}L{(arrival - film.start) * scale:.1f} {y1}")
    film.add(f'<path class="line" stroke-width="1" d="{"".join(lines)}"/>')
    wide = WIDTH - 12 - left  # a curtain over what is still to come; in a still it is out of sight
    sweep = film.moved((film.start, f"transform:translateX(-{wide}px)"), (film.end, "transform:translateX(0)"))
    bands = "".join(
        f'<rect class="paper" y="{row * r - 6}" width="{wide}" height="{row}"/>'
        f'<rect class="idle" y="{row * r + 4}" width="{wide}" height="30"/>'
        for r in range(n)
    )
    head = f'<path class="line" stroke-width="2" d="M0 0V{row * n}"/>'
    film.add(f'<g transform="translate({wide} 0)"><g {sweep}>{bands}{head}</g></g></svg>')
    for rank, of in enumerate(held):
        y = top + row * rank + 19
        film.add(film.text(8, y + 4, f"rank {rank}", font_weight="bold"))
        film.add(
            *(f'<rect class="idle" x="{76 + 25 * i}" y="{y - 11}" width="22" height="22"/>' for i in range(most[rank]))
        )
        for a, b, place, microbatch in of:
            there = "" if a <= still < b else ' opacity="0"'
            film.add(
                f"<g{there} {film.shown((a, b))}>{_chip(87 + 25 * place, y, 22, 22, ACTIONS['F'], microbatch)}</g>"
            )
    film.add(film.text(left, 62 + row * n + 20, film.slower(), "soft"))
    return film


def _in_flight(ran: list[tuple]) -> list[tuple[float, float, int, str]]:
    """(end of the forward, end of the backward, lowest place that is free, microbatch) on one rank."""
    back = {(stage, m): b for _, b, _, stage, kind, m in ran if kind in "BI"}
    placed: list[tuple[float, float, int, str]] = []
    for _, b, _, stage, kind, m in ran:
        if kind == "F":
            taken = {place for _, until, place, _ in placed if until > b}
            place = next(i for i in range(len(placed) + 1) if i not in taken)
            placed.append((b, back.get((stage, m), math.inf), place, m))
    return placed


# --- FSDP ------------------------------------------------------------------------------------------------------


def gather_and_free(
    events: Sequence[Sequence], memory: Sequence[Sequence], title: str = "FSDP: gather a block, compute, free it"
) -> Film:
    """Shards stay where they are; a block's other shards come in and go; of its gradients one shard stays.

    events: of each rank over a step, as `recording` and `trace_modules` give them: all_gathers before and
        reduce_scatters after the spans of the blocks, forward and backward. What is gathered or reduced outside of the
        blocks is called "the rest". memory: of each rank, as `watch_memory` gives it; it says when a block is freed.
    ValueError when a rank gathers nothing.
    """
    n, everything = len(events), _flat(events)
    blocks = sorted({e.name for e in everything if e.lane == "compute" and e.phase == "forward"})
    names = ["the rest", *blocks]
    film = Film(title, 100 + 26 * len(names) + 150, min(e.start for e in everything), max(e.end for e in everything))
    film.alt = (
        f"Film of a training step on {n} ranks: each keeps 1/{n} of every block (blue). The other shards fly in (green) "
        f"before the block computes, forward and again backward, and are freed; gradients (orange) fly to the rank that "
        f"keeps them. Below, bytes of rank 0 by kind over time. {film.slower()}."
    )
    film.legend(
        76, 44, [(KINDS["parameters"], "own shard"), (KINDS["gathered"], "gathered"), (KINDS["gradients"], "gradients")]
    )
    film.legend(370, 44, [(PHASES["forward"], "computes forward"), (PHASES["backward"], "backward")], frames=True)
    pitch, wide, narrow = (WIDTH - 84) / n, 96 / n, 56 / n
    top, row = 76, 26
    for i, name in enumerate(names):
        film.add(film.text(8, top + row * i + 15, name.replace("layers.", "layer ")))
    flights, hidden, shown = [], "opacity:0;", "opacity:1;"
    away, near = "translate:var(--d)", "translate:0"  # --d: how far away the owner's own is drawn
    for rank in range(n):
        left = 82 + pitch * rank
        film.add(film.text(left, top - 8, f"rank {rank}", font_weight="bold"))
        story = _story(events[rank], memory[rank], rank)

        def slices(owners: list[int], motion: str, x: float, width: float, fill: str, place: str, rank=rank) -> str:
            """One box for each owner of a shard. They inherit the motion of their group."""
            motion = motion.replace('class="run"', 'class="all"')
            boxes = [
                f'<path style="--d:{pitch * (owner - rank):.0f}px" d="M{x + width * owner:g} 0h{width - 1:g}v20h-{width - 1:g}z"/>'
                for owner in owners
            ]
            return f'<g {place} fill="{fill}" {motion}>{"".join(boxes)}</g>'

        for i, name in enumerate(names):
            told = story.get(name, {"gathered": [], "computed": [], "reduced": None})
            place = f'transform="translate({left:g} {top + row * i})"'
            film.add(
                f'<g {place}><path class="idle" d="M0 0h96v20h-96zM106 0h56v20h-56z"/>'
                f'<path fill="{KINDS["parameters"]}" d="M{wide * rank:g} 0h{wide - 1:g}v20h-{wide - 1:g}z"/></g>'
            )
            if told["gathered"]:
                stops = [
                    stop
                    for a, b, freed in told["gathered"]
                    for stop in (
                        (a, hidden + away),
                        (a, shown + away),
                        (b, near),
                        (freed, shown + near),
                        (freed, hidden + near),
                    )
                ]
                still = 'class="all"' if name == blocks[-1] else 'class="all off"'
                others = [owner for owner in range(n) if owner != rank]
                boxes = slices(others, film.moved(*stops), 0, wide, KINDS["gathered"], place)
                flights.append(boxes.replace('class="all"', still))
            if told["reduced"]:
                ready, a, b, gone = told["reduced"]
                stays = film.moved((ready, hidden), (ready, "opacity:1"), (gone, "opacity:1"), (gone, hidden))
                goes = film.moved(
                    (ready, hidden + near),
                    (ready, shown + near),
                    (a, near),
                    (b, shown + away),
                    (b, hidden + away),
                )
                flights.append(slices([rank], stays, 106, narrow, KINDS["gradients"], place))
                others = [owner for owner in range(n) if owner != rank]
                boxes = slices(others, goes, 106, narrow, KINDS["gradients"], place)
                flights.append(boxes.replace('class="all"', 'class="all off"'))
            for a, b, phase in told["computed"]:
                there = film.shown((a, b)).replace('class="', 'class="off ')
                frame = f'x="-2.5" y="-2.5" width="101" height="25" rx="3" stroke="{PHASES[phase]}"'
                flights.append(f'<g {place}><rect {frame} fill="none" stroke-width="4" {there}/></g>')
    film.add(*flights)
    _bytes_over_time(film, memory[0], top + row * len(names) + 34, 96)
    film.add(film.text(82, film.height - 8, film.slower(), "soft"))
    return film


def _story(events: Sequence, memory: Sequence, rank: int) -> dict[str, dict]:
    """block -> when this rank gathered and freed it, computed it, and reduced its gradients."""
    computed = [e for e in events if e.lane == "compute" and e.phase in ("forward", "backward")]
    gathers = [e for e in events if e.name == "all_gather"]
    if not gathers:
        raise ValueError(f"rank {rank} gathers nothing: record a step of a sharded model, with its communication")
    steps = [e.start for e in events if e.phase == "optimizer"]
    gone = min(steps, default=math.inf) if not steps else max(e.end for e in events if e.phase == "optimizer")
    story: dict[str, dict] = {}

    def of(name: str) -> dict:
        return story.setdefault(name, {"gathered": [], "computed": [], "reduced": None})

    held = [(s.time, s.n_bytes.get("gathered", 0)) for s in memory]
    for e in computed:
        of(e.name)["computed"].append((e.start, e.end, e.phase))
    for gather, following in zip(gathers, [*(g.start for g in gathers[1:]), math.inf], strict=True):
        use = next((e for e in computed if e.start >= gather.end), None)
        if use is None or use.start > following:  # the next gather comes first: it stays until nothing is gathered
            last = max(e.end for e in computed)
            freed = next((t for t, size in held if t >= last and size == 0), last)
            of("the rest")["gathered"].append((gather.start, gather.end, freed))
            continue
        full = max(size for t, size in held if use.start - 1e-3 <= t <= use.end or t <= use.start)
        full = next((size for t, size in reversed(held) if t <= (use.start + use.end) / 2), full)
        freed = next((t for t, size in held if t >= use.end - 1e-3 and size < full), use.end)
        of(use.name)["gathered"].append((gather.start, gather.end, freed))
    for reduce in (e for e in events if e.name == "reduce_scatter"):
        source = max((e for e in computed if e.end <= reduce.start), key=lambda e: e.end)
        fresh = source.phase == "backward" and not of(source.name)["reduced"]
        ready = source.end if fresh else reduce.start
        of(source.name if fresh else "the rest")["reduced"] = (ready, reduce.start, reduce.end, gone)
    return story


def _bytes_over_time(film: Film, samples: Sequence, top: float, height: float) -> None:
    """Stacked areas of one rank, uncovered as time goes by."""
    left, wide = 82, WIDTH - 92
    before = [s for s in samples if s.time <= film.start][-1:]
    mine = _thin(before + [s for s in samples if film.start < s.time <= film.end], film.start, film.end, most=110)
    kinds = _kinds(k for s in mine for k, v in s.n_bytes.items() if v)
    largest = max(s.total for s in mine)
    size, unit = unit_of(largest)
    x = [(s.time - film.start) / (film.end - film.start) * wide for s in mine] + [wide]
    x[0], below = 0.0, [0.0] * len(mine)
    film.add(film.text(left, top - 6, f"bytes of rank 0: {', '.join(kinds)}, at most {number(largest / size)} {unit}"))
    film.add(f'<svg x="{left}" y="{top}" width="{wide}" height="{height}">')
    for kind in kinds:
        above = [low + s.n_bytes.get(kind, 0) / largest * height for low, s in zip(below, mine, strict=True)]
        d = f"M0 {height}{_steps(above, x[1:], height)}{_steps(below[::-1], x[-2::-1], height)}"
        film.add(f'<path fill="{KINDS.get(kind, KINDS["other"])}" d="{d}z"/>')
        below = above
    sweep = film.moved((film.start, f"transform:translateX(-{wide}px)"), (film.end, "transform:translateX(0)"))
    film.add(
        f'<g transform="translate({wide} 0)"><g {sweep}><rect class="paper" width="{wide}" height="{height}"/>'
        f'<path class="line" stroke-width="2" d="M0 0V{height}"/></g></g></svg>'
    )


def _steps(values: Sequence[float], until: Sequence[float], height: float) -> str:
    """A path's vertical and horizontal lines, those joined that go on alike."""
    lines: list[tuple[str, float]] = []
    for v, x in zip(values, until, strict=True):
        up = f"{height - v:.0f}"
        if lines and lines[-1][0] == up:
            lines.pop()
        lines.append((up, x))
    return "".join(f"V{up}H{x:.0f}" for up, x in lines)
