"""lab.animate: films from events alone; what moves when; words; small; light and dark. Each part takes milliseconds."""

import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from minititan.lab import _theme, animate, draw
from minititan.lab.trace import Event, MemorySample


def ring_events(n=4):
    """Each rank: send 0-6 ms of every 10, attend 1-9; one send fewer than tiles; then a backward tile."""
    events = []
    for rank in range(n):
        of = [Event(rank, "compute", "tile", s / 100 + 0.001, s / 100 + 0.009, phase="forward") for s in range(n)]
        of += [
            Event(rank, "communication", "send", s / 100, s / 100 + 0.006, 64, "send", peer=(rank + 1) % n)
            for s in range(n - 1)
        ]
        of.append(Event(rank, "compute", "tile", 0.05, 0.08, phase="backward"))
        events.append(sorted(of, key=lambda e: e.start))
    return events


def pipeline_events():
    return [(0, "0F0", 0, 1), (0, "0F1", 1, 2), (1, "1F0", 1, 2), (1, "1B0", 2, 4), (0, "0B0", 4, 6),
            (1, "1F1", 4, 5), (1, "1B1", 5, 7), (0, "0B1", 7, 9)]  # fmt: skip


def fsdp_events(n=2):
    """The rest gathered at 0, layers.0 at 1; forward 2-3, freed at 3; gathered again at 4, backward 5-6, reduced."""
    events, memory = [], []
    for rank in range(n):
        comm = [
            ("all_gather", 0, 1),
            ("all_gather", 1, 2),
            ("all_gather", 4, 5),
            ("reduce_scatter", 6, 7),
            ("reduce_scatter", 7, 8),
        ]
        of = [Event(rank, "communication", name, a, b, 8) for name, a, b in comm]
        of += [
            Event(rank, "compute", "layers.0", 2, 3, phase="forward"),
            Event(rank, "compute", "layers.0", 5, 6, phase="backward"),
            Event(rank, "compute", "step", 8, 9, phase="optimizer"),
        ]
        events.append(sorted(of, key=lambda e: e.start))
        gathered = [(0, 0), (0.5, 4), (1.5, 12), (3, 4), (4.5, 12), (6, 4), (6.5, 0)]
        memory.append([MemorySample(rank, t, {"parameters": 6, "gathered": size}) for t, size in gathered])
    return events, memory


FILMS = {
    "ring": lambda: animate.ring(ring_events()),
    "pipeline": lambda: animate.pipeline(pipeline_events()),
    "fsdp": lambda: animate.gather_and_free(*fsdp_events()),
}


@pytest.mark.parametrize("name", FILMS)
def test_a_film_is_small_has_words_and_plays_without_a_script(name, tmp_path):
    film = FILMS[name]()
    svg = film.svg()
    assert svg == FILMS[name]().svg() and len(svg) < 60_000
    root = ElementTree.fromstring(svg)
    assert root.get("role") == "img" and root[0].text == film.title and root[1].text == film.alt
    assert film.alt in repr(film) and "recorded; shown" in film.alt
    used = set(re.findall(r"animation-name:(k\d+)", svg))
    assert used == set(re.findall(r"@keyframes (k\d+)", svg)) and len(used) >= 5
    assert "prefers-reduced-motion: reduce" in svg and "prefers-color-scheme: dark" in svg
    assert not re.search(r"<script|<animate|href|nan|inf\b", svg)
    assert f'<img alt="{film.alt[:20]}' in film._repr_html_() and "data:image/svg+xml;base64," in film._repr_html_()
    assert draw.save(film, "film", tmp_path).read_text() == svg
    for body in re.findall(r"@keyframes k\d+\{((?:[^{}]*\{[^}]*\})*)\}", svg):
        moments = [float(p) for p in re.findall(r"([\d.]+)%\{", body)]
        assert moments == sorted(moments) and moments[0] == 0 and max(moments) <= 91
        assert "trans" not in body or len(moments) == len(set(moments)), "a jump would become a glide"
        # a keyframe that does not name opacity takes it from its neighbours: what hides must also say when it shows
        assert ("opacity:0" in body) == ("opacity:1" in body), body


def test_quiet_ink_is_readable():
    for ink, paper in zip(animate._SOFT, ("#ffffff", _theme.PAPER["#ffffff"]), strict=True):
        assert _theme.contrast(ink, paper) >= 4.5


def steps_of(svg):
    """(rank, owner) -> step, from the matrix: 58 pixels a cell."""
    found = re.findall(r'x="([\d.]+)" y="([\d.]+)" fill="[^"]+">step (\d)<', svg)
    return {(int((float(y) - 88) // 58), int((float(x) - 545) // 58)): int(step) for x, y, step in found}


def test_ring_follows_blocks_by_the_sends():
    events = ring_events()
    pairs = [(rank, owner) for rank in range(4) for owner in range(4)]
    assert steps_of(animate.ring(events).svg()) == {(r, o): (r - o) % 4 for r, o in pairs}
    back = [[replace(e, peer=(e.rank - 1) % 4) if e.name == "send" else e for e in of] for of in events]
    assert steps_of(animate.ring(back).svg()) == {(r, o): (o - r) % 4 for r, o in pairs}
    lost = [[replace(e, peer=1) if e.name == "send" else e for e in of] for of in events]
    with pytest.raises(ValueError, match=r"in step 0 nobody sends to rank \[0, 2, 3\]"):
        animate.ring(lost)
    with pytest.raises(ValueError, match="rank 0 has 1 forward spans and 3 sends, but 4 ranks"):
        animate.ring([[e for e in of if e.phase != "forward" or e.start < 0.01] for of in events])


def test_pipeline_counts_what_is_in_flight():
    film = animate.pipeline(pipeline_events())
    assert "at most 2, 1 microbatches" in film.alt
    ran = sorted((a, b, rank, *draw._action(rank, name)) for rank, name, a, b in pipeline_events())
    of_rank_0 = animate._in_flight([e for e in ran if e[2] == 0])
    assert of_rank_0 == [(1, 6, 0, "0"), (2, 9, 1, "1")]
    assert film.at(0) == "0%" and film.at(4.5) == "45%" and film.at(9) == "90%"


def test_fsdp_frees_when_memory_says_so():
    events, memory = fsdp_events()
    story = animate._story(events[1], memory[1], 1)
    assert story["layers.0"]["gathered"] == [(1, 2, 3), (4, 5, 6)]
    assert story["layers.0"]["reduced"] == (6, 6, 7, 9)
    assert story["the rest"]["gathered"] == [(0, 1, 6.5)] and story["the rest"]["reduced"] == (7, 7, 8, 9)
    late = [MemorySample(1, s.time + 0.4 * (s.time == 3), s.n_bytes) for s in memory[1]]
    assert animate._story(events[1], late, 1)["layers.0"]["gathered"][0] == (1, 2, 3.4)
    with pytest.raises(ValueError, match="rank 0 gathers nothing"):
        animate.gather_and_free([[e for e in of if e.name != "all_gather"] for of in events], memory)


def test_nothing_recorded_is_said():
    with pytest.raises(ValueError, match="nothing to show"):
        animate.Film("x", 100, 1.0, 1.0)
