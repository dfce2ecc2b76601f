"""What the ranks print, as the cell shows it. Used by `launch.py` only."""

import sys
import time
from collections import deque

KEPT_OUTPUT = 1 << 20  # bytes of a rank's stdout, and of its stderr, shown in full; of the rest, the end
KEPT_TAIL = 2000
FOLD_SECONDS = 0.1  # how long a line waits for the other ranks to print the same one


def names(ranks: list[int]) -> str:
    """rank 2, or ranks 0-3, 5."""
    spans: list[list[int]] = []
    for r in sorted(ranks):
        if spans and r == spans[-1][1] + 1:
            spans[-1][1] = r
        else:
            spans.append([r, r])
    text = ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"


class Output:
    """The ranks' lines, shown as they come: labelled, equal lines of several ranks folded into one.

    A line waits up to FOLD_SECONDS for the other ranks to print the same. Of a rank that prints more than
    KEPT_OUTPUT bytes, the rest is read and dropped but for its end, and a line says so.
    """

    def __init__(self, ranks: int):
        self.streams = {name: [_Lines() for _ in range(ranks)] for name in ("stdout", "stderr")}

    def feed(self, rank: int, stream: str, chunk: bytes) -> None:
        self.streams[stream][rank].feed(chunk)

    def show(self, last: bool = False) -> None:
        for name, lines in self.streams.items():
            if last:
                for one in lines:
                    one.close()
            text = self._ready(lines, last)
            if text:
                target = getattr(sys, name)
                target.write(text)
                target.flush()

    def _ready(self, lines: list["_Lines"], last: bool) -> str:
        now, shown = time.monotonic(), []
        while waiting := [one for one in lines if one.queue]:
            oldest = min(waiting, key=lambda one: one.queue[0][0])
            since, text = oldest.queue[0]
            same = [r for r, one in enumerate(lines) if one.queue and one.queue[0][1] == text]
            could_join = any(not one.queue and not one.closed for one in lines)
            if could_join and not last and now - since < FOLD_SECONDS:
                break
            for r in same:
                lines[r].queue.popleft()
            shown.append(f"[{names(same).replace('ranks', 'rank')}] {text}\n")
        return "".join(shown)


class _Lines:
    """One stream of one rank, cut into lines with the time they came."""

    def __init__(self):
        self.queue: deque[tuple[float, str]] = deque()
        self.rest = b""
        self.kept = self.dropped = 0
        self.tail = b""
        self.closed = False

    def feed(self, chunk: bytes) -> None:
        if not chunk:
            self.close()
            return
        room = max(KEPT_OUTPUT - self.kept, 0)
        self.kept += min(len(chunk), room)
        over = chunk[room:]
        self.dropped += len(over)
        if over:
            self.tail = (self.tail + over[-KEPT_TAIL:])[-KEPT_TAIL:]
        *whole, self.rest = (self.rest + chunk[:room]).split(b"\n")
        for line in whole:
            self._add(line)

    def _add(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip("\r")
        self.queue.append((time.monotonic(), text.rsplit("\r", 1)[-1]))  # a progress bar's last state

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        if self.rest:
            self._add(self.rest)
            self.rest = b""
        if self.dropped:
            lost = max(self.dropped - len(self.tail), 0)
            self._add(f"... {lost:,} bytes not shown; the end of the output:".encode())
            for line in self.tail.splitlines():
                self._add(line)
            self.tail = b""
