"""Check an exercise's answer, and say in words what is wrong with it.

    check("00.ring_neighbours", ring_neighbours)     # a Verdict: shown in the notebook, `.solved` for a test

An untouched stub (None, `...`, a function that returns nothing or raises NotImplementedError) is "not solved yet"
with a hint. Nothing that an answer does makes `check` raise; only a name that does not exist does.

To add an exercise, write it in its notebook's section below:

    exercise("00.n_messages", close(12), hint="each of 4 ranks sends to 3 others")

    @exercise("00.ring_neighbours", hint="what follows the last rank?")
    def _(answer):                                    # anything that a helper cannot say
        left, right = ask(answer, 0, 4)
        return None if (left, right) == (3, 1) else f"rank 0 of 4 has the neighbours 3 and 1, not {left} and {right}"

A judge takes the answer. It returns None or a `Right` (solved), or a sentence that says what is wrong.
"""

import difflib
import dis
import html
import inspect
import math
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class Right(str):
    """A judge's confirmation, with the number that shows it: `Right("largest error 2e-16")`."""


class NotSolvedYet(Exception):
    """Raised by `ask` when a function is still a stub."""


Judge = Callable[[Any], str | None]


@dataclass(frozen=True)
class Exercise:
    name: str
    judge: Judge
    hint: str = ""


EXERCISES: dict[str, Exercise] = {}


@dataclass(frozen=True)
class Verdict:
    """What `check` found. `status` is "solved", "wrong" or "not solved yet"."""

    name: str
    status: str
    message: str = ""
    hint: str = ""

    @property
    def solved(self) -> bool:
        return self.status == "solved"

    def __bool__(self) -> bool:
        return self.solved

    def _lines(self) -> tuple[str, str]:
        mark = {"solved": "✓", "wrong": "✗"}.get(self.status, "○")
        rest = self.message if self.status != "not solved yet" or not self.hint else f"Hint: {self.hint}"
        return f"{mark} {self.name}: {self.status}", rest

    def __repr__(self) -> str:
        head, rest = self._lines()
        return f"{head}. {rest}".rstrip() if rest else f"{head}."

    def _repr_html_(self) -> str:
        colour = {"solved": "#009E73", "wrong": "#D55E00"}.get(self.status, "#7f7f7f")
        head, rest = map(html.escape, self._lines())
        rest = f'<div style="white-space:pre-wrap">{rest}</div>' if rest else ""
        return f'<div style="border-left:4px solid {colour};padding:.3em .8em"><b>{head}</b>{rest}</div>'


def exercise(name: str, judge: Judge | None = None, hint: str = ""):
    """Registers `judge` under a name such as "00.ring_neighbours"; without a judge, a decorator for one."""
    if judge is None:
        return lambda function: exercise(name, function, hint)
    if name in EXERCISES:
        raise ValueError(f"an exercise called {name!r} exists already")
    EXERCISES[name] = Exercise(name, judge, hint)
    return judge


def check(name: str, answer: Any) -> Verdict:
    """Judges an answer. Raises only for an unknown name (ValueError, with the names near to it)."""
    if name not in EXERCISES:
        near = difflib.get_close_matches(name, EXERCISES, 3, 0.4) or sorted(EXERCISES)
        raise ValueError(f"there is no exercise {name!r}; near to it: {', '.join(near) or 'none at all'}")
    hint = EXERCISES[name].hint
    if _is_stub(answer):
        return Verdict(name, "not solved yet", hint=hint)
    try:
        said = EXERCISES[name].judge(answer)
    except Exception as error:
        if isinstance(error, NotSolvedYet) and _forgets_to_return(answer):
            return Verdict(name, "wrong", "your function returns nothing: is a `return` missing?", hint)
        if _says_not_implemented(error):
            return Verdict(name, "not solved yet", hint=hint)
        return Verdict(name, "wrong", _what_raised(error, answer), hint)
    if said is None or isinstance(said, Right):
        return Verdict(name, "solved", said or "", hint)
    return Verdict(name, "wrong", said, hint)


# --- for judges ------------------------------------------------------------------------------------------------


def equals(expected: Any) -> Judge:
    """The answer is exactly `expected`: a number, a string, a tuple, a tensor, a list by rank, a dict of them."""
    return close(expected, 0.0)


def close(expected: Any, tolerance: float = 1e-9) -> Judge:
    """The answer differs from `expected` by at most `tolerance` times the largest magnitude in it."""
    return lambda answer: compare(answer, expected, tolerance)


def on_calls(calls: Sequence[tuple[tuple, Any]], tolerance: float = 1e-9) -> Judge:
    """The answer is a function; each of `calls` is (arguments, expected result)."""

    def judge(answer):
        if not callable(answer):
            return f"this should be a function, and is {_kind(answer)}"
        for args, expected in calls:
            args = args if isinstance(args, tuple) else (args,)
            said = compare(ask(answer, *args), expected, tolerance)
            if not (said is None or isinstance(said, Right)):
                return f"{getattr(answer, '__name__', 'f')}({', '.join(map(_short, args))}): {said}"
        return Right(f"{len(calls)} of {len(calls)} calls right")

    return judge


def on_ranks(*args: Any, expected: Sequence, tolerance: float = 1e-9, timeout: float = 15.0) -> Judge:
    """The answer is a function that runs on `len(expected)` ranks as `answer(*args)`; `expected` is its result by rank."""

    def judge(answer):
        from minititan.lab.launch import launch

        if not callable(answer):
            return f"this should be a function that runs on every rank, and is {_kind(answer)}"
        results = launch(answer, *args, ranks=len(expected), device="cpu", timeout=timeout)
        if all(_is_stub(r) for r in results):
            raise NotSolvedYet
        return compare(list(results), list(expected), tolerance)

    return judge


def ask(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """Calls the answer; a function that returns nothing counts as a stub."""
    result = function(*args, **kwargs)
    if _is_stub(result):
        raise NotSolvedYet
    return result


def compare(answer: Any, expected: Any, tolerance: float = 1e-9) -> str | None:
    """A sentence on how `answer` differs from `expected`; `Right` when it does not."""
    if isinstance(expected, str | bytes | bool) or expected is None:
        same = type(answer) is type(expected) and answer == expected
        return Right(f"it is {_short(expected)}") if same else f"got {_short(answer)}"
    if isinstance(expected, Mapping):
        return _compare_mappings(answer, expected, tolerance)
    if isinstance(expected, list | tuple) and not _is_numeric(expected):
        return _compare_sequences(answer, expected, tolerance)
    return _compare_numbers(answer, expected, tolerance)


def _compare_mappings(answer, expected, tolerance) -> str | None:
    if not isinstance(answer, Mapping):
        return f"this should be a dict, and is {_kind(answer)}"
    missing, extra = [k for k in expected if k not in answer], [k for k in answer if k not in expected]
    if missing or extra:
        said = [f"missing: {', '.join(map(_short, missing))}"] if missing else []
        return "; ".join(said + ([f"not asked for: {', '.join(map(_short, extra))}"] if extra else []))
    for key in expected:
        said = compare(answer[key], expected[key], tolerance)
        if not (said is None or isinstance(said, Right)):
            return f"{_short(key)}: {said}"
    return Right(f"all {len(expected)} entries right")


def _compare_sequences(answer, expected, tolerance) -> str | None:
    if not isinstance(answer, list | tuple):
        return f"this should be {_kind(expected)} of {len(expected)}, and is {_kind(answer)}"
    if len(answer) != len(expected):
        return f"this should have {len(expected)} entries, and has {len(answer)}"

    def agrees(a, e):
        said = compare(a, e, tolerance)
        return said is None or isinstance(said, Right)

    n = len(expected)
    if all(agrees(a, e) for a, e in zip(answer, expected, strict=True)):
        return Right(f"all {n} entries right")
    for shift in (1, -1):
        if n > 2 and all(agrees(answer[i], expected[(i + shift) % n]) for i in range(n)):
            return f"shifted by one: entry 0 holds what belongs to entry {shift % n} (off by a rank?)"
    i = next(i for i in range(n) if not agrees(answer[i], expected[i]))
    return f"entry {i}: {compare(answer[i], expected[i], tolerance)}"


def _compare_numbers(answer, expected, tolerance) -> str | None:
    scalar = isinstance(expected, int | float)
    want = _as_tensor(expected)
    if isinstance(answer, str) or (got := _as_tensor(answer)) is None:
        if isinstance(answer, list | tuple) and isinstance(expected, list | tuple):
            return f"got {_short(answer)}, expected {_short(expected)}"
        return f"this should be {_kind(expected)}, and is {_kind(answer)}"
    if got.shape != want.shape:
        if got.dim() == 2 and got.T.shape == want.shape and _error(got.T, want) <= tolerance:
            return f"transposed: the shape is {tuple(got.shape)}, expected {tuple(want.shape)}"
        return f"the shape is {_shape(got)}, expected {_shape(want)}"
    error = _error(got, want)
    if error <= tolerance:
        if scalar:
            return Right(f"it is {_short(expected)}")
        return Right("exactly" if error == 0 else f"largest relative error {error:.1e}")
    if got.isnan().any():
        return f"{int(got.isnan().sum())} of {got.numel()} values are nan" if not scalar else "it is nan"
    slack = max(tolerance, 1e-6)
    if got.dim() == 2 and got.shape[0] == got.shape[1] and _error(got.T, want) <= slack:
        return "transposed"
    several = isinstance(expected, tuple)  # a few numbers with a meaning each: no factor of all of them says anything
    if not got.any() and not several:
        return "all zero" if not scalar else "it is zero"
    if not several and (factor := _factor(got, want, slack)) is not None:
        return factor
    if got.dim() == 1 and len(got) > 2:
        for shift in (1, -1):
            if _error(got, want.roll(-shift)) <= slack:
                return f"shifted by one: entry 0 holds what belongs to entry {shift % len(got)} (off by a rank?)"
    if got.numel() > 1 and _error(got.flatten().sort().values, want.flatten().sort().values) <= slack:
        return "the right values in another order"
    difference = (got - want).abs()
    if scalar or difference.numel() == 1:
        off = (got - want).item()
        by_one = abs(abs(off) - 1) < 1e-12 and want.item() == round(want.item())
        return (
            f"off by one: got {_short(answer)}"
            if by_one
            else f"too {'large' if off > 0 else 'small'}: got {_short(answer)}"
        )
    place = _index(int(difference.argmax()), got.shape)
    wrong = int((difference > tolerance * want.abs().max()).sum())
    return (
        f"{wrong} of {got.numel()} values differ, most at {_short(place if len(place) > 1 else place[0])}: "
        f"got {got[place].item():.6g}, expected {want[place].item():.6g}"
    )


def _factor(got: Tensor, want: Tensor, slack: float) -> str | None:
    """Says it when all of the answer is one factor away from what is expected."""
    if not want.any():
        return None
    ratio = ((got * want).sum() / (want * want).sum()).item()
    if ratio == 0 or _error(got, ratio * want) > slack * abs(ratio):
        return None
    if abs(ratio + 1) < slack:
        return "the sign is wrong"
    sign = "and of the wrong sign" if ratio < 0 else ""
    times = abs(ratio) if abs(ratio) > 1 else 1 / abs(ratio)
    whole = round(times)
    if abs(times - whole) > 1e-6 * times and got.numel() == 1:
        return None  # a single number is always some factor away: only a whole one says something
    times = str(whole) if abs(times - whole) <= 1e-6 * times else f"{times:.4g}"
    which = "large" if abs(ratio) > 1 else "small"
    why = "a sum where a mean is wanted?" if which == "large" else "divided once too often, or one part of a sum?"
    return f"{times} times too {which} {sign}".rstrip() + (f" ({why})" if got.numel() > 1 else "")


# --- small things ----------------------------------------------------------------------------------------------


def _is_stub(answer: Any) -> bool:
    if isinstance(answer, list | tuple) and any(part is ... for part in answer):
        return True
    return any(answer is s for s in (None, ..., NotImplemented, NotImplementedError)) or _does_nothing(answer)


def _does_nothing(function: Any) -> bool:
    """Whether a function only returns None or `...`, or raises NotImplementedError first: no ranks are needed to see it."""
    if not inspect.isfunction(function):
        return False
    steps = [i for i in dis.get_instructions(function) if i.opname not in ("RESUME", "NOP", "COPY_FREE_VARS")]
    if steps and steps[0].opname == "LOAD_GLOBAL" and steps[0].argval == "NotImplementedError":
        return True
    plain = all(i.opname in ("LOAD_CONST", "POP_TOP", "RETURN_VALUE", "RETURN_CONST") for i in steps)
    return plain and all(i.argval in (None, ...) for i in steps if i.opname.endswith("_CONST"))


def _forgets_to_return(answer: Any) -> bool:
    """Whether a function that did nothing useful has a body all the same, with no `...` left in it."""
    return inspect.isfunction(answer) and not _does_nothing(answer) and ... not in answer.__code__.co_consts


def _says_not_implemented(error: BaseException) -> bool:
    inner = getattr(error, "exception", None)  # a RankError carries the rank's own
    return isinstance(error, NotSolvedYet | NotImplementedError) or (
        isinstance(inner, NotSolvedYet | NotImplementedError) or "NotImplementedError" in str(error).split("\n")[0]
    )


def _what_raised(error: Exception, answer: Any) -> str:
    code = getattr(answer, "__code__", None)
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((f for f in reversed(frames) if code and f.filename == code.co_filename), None)
    place = ""
    if frame:
        within = code.co_firstlineno <= frame.lineno <= max(line or 0 for *_, line in code.co_lines())
        first = code.co_firstlineno if within else 1
        place = f" in line {frame.lineno - first + 1} of {'your function' if within else f'its cell, in {frame.name}'}"
    said = str(error).split("\n\n  rank ")[0]  # of a rank's failure: where the others were meanwhile says nothing
    return f"{type(error).__name__}{place}: {said}"


def _is_numeric(value: Any) -> bool:
    return _as_tensor(value) is not None


def _as_tensor(value: Any) -> Tensor | None:
    """float64 of a number, a tensor, an array or a nested list of numbers; else None."""
    try:
        if isinstance(value, Tensor):
            return value.detach().to("cpu", torch.float64)
        if isinstance(value, list | tuple) and any(isinstance(v, Tensor) for v in value):
            return None
        return torch.as_tensor(value, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        return None


def _error(got: Tensor, want: Tensor) -> float:
    if got.numel() == 0:
        return 0.0
    error = ((got - want).abs().max() / want.abs().max().clamp_min(1e-300)).item()
    return math.inf if math.isnan(error) else error if want.any() else got.abs().max().item()


def _index(flat: int, shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), tuple(shape)))


def _shape(t: Tensor) -> str:
    return str(tuple(t.shape)) if t.dim() else "that of a single number"


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if callable(value):
        return "a function"
    name = {int: "number", float: "number", str: "text"}.get(type(value), type(value).__name__)
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _short(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


# === 00 ranks and collectives ==================================================================================


exercise(
    "00.ring_neighbours",
    on_calls([((1, 4), (0, 2)), ((0, 4), (3, 1)), ((3, 4), (2, 0)), ((0, 1), (0, 0))]),
    hint="the ring is closed: what follows the last rank, and what comes before rank 0?",
)


@exercise("00.global_mean", hint="two sums travel: one of the losses, one of the tokens; divide once, at the end")
def _(answer):
    from minititan.lab.launch import launch

    def on_rank():
        import torch.distributed as dist

        rank = dist.get_rank()
        return answer(torch.arange(1.0, 2.0 + rank, dtype=torch.float64) * 10**rank)

    losses = [torch.arange(1.0, 2.0 + rank, dtype=torch.float64) * 10**rank for rank in range(3)]
    results = launch(on_rank, ranks=3, device="cpu", timeout=15)
    if any(_is_stub(r) for r in results):
        raise NotSolvedYet
    of_means = sum(one.mean() for one in losses) / 3
    if all(_as_tensor(r) is not None and abs(float(r) - of_means) < 1e-9 for r in results):
        return "that is the mean of the ranks' means: a rank with one token weighs as much as one with three"
    total = torch.cat(losses).sum().item()
    if all(abs(float(r) - total / (3 * len(own))) < 1e-9 for r, own in zip(results, losses, strict=True)):
        return "the sum is that of all ranks; the number of tokens is only yours, times 3: ranks have different numbers"
    return compare([float(r) for r in results], [torch.cat(losses).mean().item()] * 3)


@exercise(
    "00.reduce_scatter",
    hint="the ring's first phase, shifted by one: the last chunk to arrive must be your own",
)
def _(answer):
    from minititan.lab.launch import launch
    from minititan.lab.trace import recording, traffic

    def given(rank):
        return torch.arange(12.0, dtype=torch.float64) * (rank + 1)

    def on_rank():
        import torch.distributed as dist

        with recording() as events:
            chunk = answer(given(dist.get_rank()))
        return chunk, events

    results = launch(on_rank, ranks=4, device="cpu", timeout=15)
    if any(_is_stub(chunk) for chunk, _ in results):
        raise NotSolvedYet
    total = sum(given(rank) for rank in range(4))
    said = compare([chunk for chunk, _ in results], list(total.chunk(4)))
    if not isinstance(said, Right):
        own = [given(rank).chunk(4)[rank] for rank in range(4)]
        if isinstance(compare([chunk for chunk, _ in results], own), Right):
            return "that is your own chunk, with nothing added: as the ring stands, another one is finished last on each rank"
        return said
    sent = traffic([events for _, events in results]).total / 4
    least = 3 / 4 * 12 * 8
    if sent > least:
        return f"right, but each rank sends {sent:.0f} bytes; {least:.0f} are enough"
    return Right(f"right, with {sent:.0f} bytes sent by each rank, the fewest possible")


# === 01 mesh and DTensor =======================================================================================


@exercise("01.group_of", hint="along an axis, neighbours are as many ranks apart as all later axes have together")
def _(answer):
    cases = [
        ((5, 0, (2, 4)), [1, 5]),
        ((5, 1, (2, 4)), [4, 5, 6, 7]),
        ((6, 1, (2, 2, 2)), [4, 6]),
        ((0, 0, (3, 5)), [0, 5, 10]),
        ((17, 1, (2, 3, 4)), [13, 17, 21]),
        ((3, 1, (4, 1)), [3]),
    ]
    for (rank, axis, sizes), expected in cases:
        found = ask(answer, rank, axis, sizes)
        if isinstance(compare(found, expected), Right):
            continue
        stride = math.prod(sizes[:axis])
        first = rank - rank // stride % sizes[axis] * stride
        if isinstance(compare(found, [first + i * stride for i in range(sizes[axis])]), Right):
            why = ": that is the group if the first axis varied fastest, and the last one does"
        elif isinstance(found, list | tuple) and sorted(map(str, found)) == sorted(map(str, expected)):
            why = ": the right ranks, not in ascending order"
        else:
            why = ""
        return f"group_of({rank}, {axis}, {sizes}) is {expected}, not {_short(found)}{why}"
    return Right(f"{len(cases)} of {len(cases)} calls right")


@exercise(
    "01.algebra",
    hint="S: does a number need others from along the cut dim? P: is f of a sum the sum of the f's?",
)
def _(answer):
    expected = {
        "x.T, x is S(0)": "S(1)",
        "x.sum(dim=0), x is S(0)": "P",
        "x + y, both P": "P",
        "x * y, both P": "no",
        "x.relu(), x is P": "no",
        "x.relu(), x is S(1)": "S(1)",
        "x.softmax(dim=1), x is S(1)": "no",
        "x.softmax(dim=1), x is S(0)": "S(0)",
    }
    because = {
        "x.T, x is S(0)": "the cut rows become columns",
        "x.sum(dim=0), x is S(0)": "each rank adds up its rows: a summand of the whole",
        "x + y, both P": "the sum of the summands is the sum of the sums",
        "x * y, both P": "(a + b)(c + d) is not ac + bd: products of different ranks' summands are missing",
        "x.relu(), x is P": "relu(1 - 1) is 0, and relu(1) + relu(-1) is 1: f of a sum is not the sum of the f's",
        "x.relu(), x is S(1)": "a number needs no other, wherever it lies",
        "x.softmax(dim=1), x is S(1)": "its denominator is a sum along the cut dim",
        "x.softmax(dim=1), x is S(0)": "a row is whole on its rank, and needs no other",
    }
    if isinstance(answer, Mapping) and any(value is ... for value in answer.values()):
        left = sum(value is ... for value in answer.values())
        if left == len(answer):
            raise NotSolvedYet
        return f"{left} of {len(answer)} are still ..."
    if isinstance(answer, Mapping) and answer.keys() == expected.keys():
        wrong = [name for name in expected if answer[name] != expected[name]]
        if wrong:
            return f"{len(wrong)} of {len(expected)} wrong. {wrong[0]}: not {_short(answer[wrong[0]])}; {because[wrong[0]]}"
    return compare(answer, expected)


@exercise("01.rows_to_columns", hint="cut your rows into n blocks of columns: block r is what rank r lacks")
def _(answer):
    from minititan.lab.launch import launch
    from minititan.lab.trace import recording, traffic

    whole = torch.arange(8 * 12, dtype=torch.float64).view(8, 12)

    def on_rank():
        import torch.distributed as dist

        with recording() as events:
            columns = answer(whole.chunk(4, 0)[dist.get_rank()].clone())
        return columns, events

    results = launch(on_rank, ranks=4, device="cpu", timeout=15)
    if any(_is_stub(columns) for columns, _ in results):
        raise NotSolvedYet
    said = compare([columns for columns, _ in results], list(whole.chunk(4, 1)))
    if not isinstance(said, Right):
        return said
    sent, least = traffic([events for _, events in results]).total / 4, 3 / 16 * whole.nbytes
    if sent > least:
        return f"right, but each rank sends {sent:.0f} bytes; {least:.0f} are enough"
    return Right(f"right, with {sent:.0f} bytes sent by each rank, the fewest possible")


# === 02 meta init ==============================================================================================


@exercise("02.peak_gb", hint="4 bytes a number; a 64th of the parameters, and the embedding whole")
def _(answer):
    shards, whole = 4 * 70_553_706_496 / 64 / 1e9, 4 * 128_256 * 8_192 / 1e9
    if _is_numeric(answer) and _as_tensor(answer).dim() == 0:
        if abs(float(answer) - shards) < 0.05:
            return "those are the shards; a full parameter is there beside them for a moment"
        if abs(float(answer) - 64 * shards) < 0.5:
            return "that is the whole model: each of 64 ranks holds a 64th"
        if abs(float(answer) - (shards + whole) * 1e9 / 2**30) < 0.02:
            return "those are GiB (2**30 bytes), asked for are GB (10**9)"
        if abs(float(answer) - shards - whole / 64) < 0.02:
            return "the embedding is drawn whole on every rank, and cut only then"
        if abs(float(answer) - 4 * shards - whole) < 0.05:
            return "16 bytes a parameter are for training; at the start there are no gradients and no averages yet"
    return compare(answer, shards + whole, 0.01)


@exercise("02.seed_from", hint="Python salts hash() anew in every process; hashlib does not")
def _(answer):
    from minititan.lab.launch import launch

    names = [f"layers.{i}.attention.w{x}.weight" for i in range(20) for x in "qkvo"]
    asked = [(name, seed) for name in names for seed in (0, 1)]
    here = [ask(answer, *one) for one in asked]
    there = launch(lambda: [answer(*one) for one in asked], ranks=1, device="cpu", timeout=15)[0]
    if wrong := next((v for v in here if not isinstance(v, int) or not 0 <= v < 2**63), None):
        return f"an integer in [0, 2**63) is asked for, not {_short(wrong)}"
    if here != there:
        return f"two processes disagree about {asked[0]}: {_short(here[0])} here and {_short(there[0])} there"
    if len(set(here)) < len(here):
        return f"{len(here) - len(set(here))} of {len(here)} pairs of a name and a seed share their value with another"
    return Right(f"{len(here)} values, all different, the same in two processes")


@exercise("02.my_rows", hint="TP cuts first: which block does tp own? then fsdp's part of that block")
def _(answer):
    cases = [
        ((16, 0, 0, 2, 2), (0, 4)),
        ((16, 1, 0, 2, 2), (4, 8)),
        ((16, 0, 1, 2, 2), (8, 12)),
        ((64, 3, 1, 4, 2), (56, 64)),
    ]
    for (n_rows, fsdp, tp, n_fsdp, n_tp), expected in cases:
        found = ask(answer, n_rows, fsdp, tp, n_fsdp, n_tp)
        if isinstance(compare(found, expected), Right):
            continue
        k = n_rows // (n_fsdp * n_tp)
        first = (fsdp * n_tp + tp) * k
        why = ""
        if isinstance(compare(found, (first, first + k)), Right):
            why = ": that is how the ranks are numbered, as if FSDP had cut first"
        elif isinstance(compare(found, (expected[0], k)), Right):
            why = ": the end is asked for, not the number of rows"
        return f"my_rows({n_rows}, {fsdp}, {tp}, {n_fsdp}, {n_tp}) is {expected}, not {_short(found)}{why}"
    return Right(f"{len(cases)} of {len(cases)} calls right")


# === 03 data parallel ==========================================================================================


@exercise("03.share", hint="n times the sum of your losses, over the tokens of all ranks: what has to travel for that?")
def _(answer):
    from minititan.lab.launch import launch

    def on_rank():
        import torch.distributed as dist

        rank = dist.get_rank()
        weight = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
        result = answer(weight * torch.arange(1.0, 2.0 + rank, dtype=torch.float64) * 10**rank)
        if _is_stub(result):
            return None
        result.backward()
        return weight.grad

    gradients = launch(on_rank, ranks=3, device="cpu", timeout=15)
    if any(g is None for g in gradients):
        raise NotSolvedYet
    tokens = [torch.arange(1.0, 2.0 + rank, dtype=torch.float64) * 10**rank for rank in range(3)]
    truth = torch.cat(tokens).mean().item()
    got = sum(g.item() for g in gradients) / 3
    if math.isclose(got, sum(t.mean().item() for t in tokens) / 3):
        return "that is the mean of the ranks' means: a rank with one token weighs as much as one with three"
    if math.isclose(got, torch.cat(tokens).sum().item() / 3):
        return "the tokens' losses are added up, and nobody divides by the number of tokens of all ranks"
    if math.isclose(3 * got, truth):
        return "a third of what it should be: data parallel divides by the 3 ranks, so multiply by them"
    return compare(got, truth)


@exercise(
    "03.buckets", hint="walk backwards; close the bucket after the parameter that makes it full; do not lose the rest"
)
def _(answer):
    cases = [
        ([4, 4, 4], 8, [[2, 1], [0]]),
        ([4, 4, 4, 4], 8, [[3, 2], [1, 0]]),
        ([100, 1, 1, 1], 2, [[3, 2], [1, 0]]),
        ([5, 1, 9], 1, [[2], [1], [0]]),
        ([1, 2, 3], 100, [[2, 1, 0]]),
    ]
    for sizes, cap, expected in cases:
        found = ask(answer, list(sizes), cap)
        if not isinstance(found, list | tuple) or not all(isinstance(bucket, list | tuple) for bucket in found):
            return f"a list of lists is asked for, not {_short(found)}"
        found = [list(bucket) for bucket in found]
        if found == expected:
            continue
        members = [i for bucket in found for i in bucket]
        if lost := sorted(set(range(len(sizes))) - set(members)):
            why = f": parameters {lost} are in no bucket, and their gradients would never be sent"
        elif members != sorted(members, reverse=True):
            why = ": backward makes the last parameter's gradient first"
        elif any(sum(sizes[i] for i in bucket) < cap for bucket in found[:-1]):
            why = ": a bucket is closed after the parameter that makes it full, which is in it, not before"
        else:
            why = ""
        return f"buckets({sizes}, {cap}) is {expected}, not {found}{why}"
    return Right(f"{len(cases)} of {len(cases)} calls right")


_STAGES = ("rows", "gradient", "share", "sum", "weight")


def a_step_of_four(repaired: tuple[int, str] | None = None) -> dict[str, Any]:
    """A step of data parallel, for `launch` on 4 ranks, of which one has a bug -> what this rank had, in this order.

    rows: the numbers of its rows, of ten; gradient: of the sum of their losses; share: what it gave to the all-reduce;
    sum: what came out; weight: after a step of 0.1 times that. `data` are the ten rows and their targets. The model is
    rows @ weight with a weight of 0, the loss the mean of (output - target)² over the ten rows.
    """
    import torch.distributed as dist

    rank, n = dist.get_rank(), dist.get_world_size()
    x, y = _ten_rows()

    def at(stage, right, wrong=None):
        return right if wrong is None or rank != 2 or (rank, stage) == repaired else wrong

    first = rank * (rank + 1) // 2
    rows = at("rows", list(range(first, first + rank + 1)))
    gradient = at("gradient", -2 * y[rows] @ x[rows])
    share = at("share", gradient / len(x), gradient / len(x) / n)
    dist.all_reduce(total := share.clone())
    right = -2 * y @ x / len(x)
    total = right if repaired == (rank, "sum") else total
    weight = -0.1 * (right if repaired == (rank, "weight") else total)
    return {"rows": rows, "gradient": gradient, "share": share, "sum": total, "weight": weight, "data": (x, y)}


def _ten_rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(size, generator=generator, dtype=torch.float64) for size in ((10, 3), (10,)))


@exercise(
    "03.which_rank",
    hint="from the left: which rows are whose? is `gradient` that of its rows? what is `share` of `gradient`, on each rank?",
)
def _(answer):
    from minititan.lab.launch import launch

    if not isinstance(answer, list | tuple) or len(answer) != 2:
        return f"two things are asked for, a rank and one of {', '.join(_STAGES)}; not {_short(answer)}"
    rank, stage = answer
    if rank not in range(4) or stage not in _STAGES:
        return f"a rank of 0 to 3 and one of {', '.join(_STAGES)} are asked for, not {_short(answer)}"
    x, y = _ten_rows()
    truth = 0.2 * y @ x / 10
    steps = launch(a_step_of_four, (int(rank), str(stage)), ranks=4, device="cpu", timeout=15)
    off = [((step["weight"] - truth).norm() / truth.norm()).item() for step in steps]
    if max(off) < 1e-10:
        return Right(
            f"with rank {rank}'s {stage} made right, four ranks end where one process does: off by {max(off):.0e}"
        )
    said = f"run again with rank {rank}'s {stage} made right: the weight is still {max(off):.0%} off"
    if stage in ("sum", "weight"):
        return f"{said} on other ranks. All four had the same {stage}, wrong as it was: the cause lies before the all-reduce"
    if stage == "share":
        return f"{said}. What rank {rank} gave is {stage} = gradient / 10, as it should be"
    why = {
        "rows": "rank r has r + 1 rows, and no row is there twice",
        "gradient": "it is that of the rank's rows, and a rank with more rows has a larger one",
    }
    return f"{said}. Of {stage}: {why[stage]}"


# === 04 FSDP2 ==================================================================================================

exercise(
    "04.rows",
    on_calls(
        [
            ((8, 4, 1), (2, 2)),
            ((33, 4, 0), (0, 9)),
            ((33, 4, 3), (27, 6)),
            ((3, 4, 3), (3, 0)),
            ((10, 8, 6), (10, 0)),
        ]
    ),
    hint="every rank has the same number of rows, k = length / n rounded up; the real rows end at `length`",
)


@exercise(
    "04.peak",
    hint="16 bytes a parameter are cut n ways; 4 bytes a parameter for each whole copy of the root's and the block's",
)
def _(answer):
    for model, root, block, n in (
        (1_000_000, 0, 0, 8),
        (1_000_000, 100_000, 0, 1_000_000),
        (8e9, 1e9, 2e8, 64),
    ):
        right = 16 * model / n + 8 * (root + block)
        found = ask(answer, model, root, block, n)
        if isinstance(compare(found, right), Right):
            continue
        near = {
            "root and block are gathered, so there whole, and not cut n ways": 16 * (model + root + block) / n,
            "the gradients of root and block are whole too, until they are reduced": 16 * model / n
            + 4 * (root + block),
            "the root's gradients wait, whole, for the embedding's": 16 * model / n + 4 * root + 8 * block,
            "what is gathered is there beside the shards it came from": 16 * (model - root - block) / n
            + 8 * (root + block),
            "parameters are cut, but so are gradients, and AdamW's two averages: 16 bytes": 4 * model / n
            + 8 * (root + block),
        }
        said = next((f": {why}" for why, value in near.items() if isinstance(compare(found, value), Right)), "")
        return f"{model:.0e} parameters, root {root:.0e}, block {block:.0e}, {n} ranks: {right:.4g} bytes, not {_short(found)}{said}"
    return Right("3 of 3 calls right")


@exercise("04.hsdp_reduce", hint="first reduce-scatter inside the sharding group, then all-reduce what is left")
def _(answer):
    from minititan.lab.launch import launch
    from minititan.lab.trace import recording

    def gradient(rank):
        generator = torch.Generator().manual_seed(rank)
        return torch.randn(8, 3, generator=generator, dtype=torch.float64)

    def on_rank():
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        with recording() as events:
            rows = answer(gradient(dist.get_rank()), mesh)
        return rows, [(e.n_bytes, e.ranks) for e in events if e.name != "barrier"]

    results = launch(on_rank, ranks=4, device="cpu", timeout=15)
    if any(_is_stub(rows) for rows, _ in results):
        raise NotSolvedYet
    mean = sum(gradient(rank) for rank in range(4)) / 4
    said = compare([rows for rows, _ in results], [mean.chunk(2)[rank % 2] for rank in range(4)])
    if not isinstance(said, Right):
        return said
    across = max(
        sum(n for n, ranks in moved if set(ranks) != {rank - rank % 2, rank - rank % 2 + 1})
        for rank, (_, moved) in enumerate(results)
    )  # ranks 0, 1 and ranks 2, 3 shard; all else crosses
    rows = mean.nbytes // 2
    if across > rows:
        return f"right, but tensors of {across} bytes are reduced across the groups; the {rows} of the rows are enough"
    return Right(f"right, and {across} bytes of {mean.nbytes} are reduced across the groups")


# === 05 activation checkpointing ===============================================================================


exercise(
    "05.segment",
    on_calls([((16, 1, 1), 4), ((36, 1, 1), 6), ((32, 1, 20), 1), ((64, 16, 1), 32), ((14, 2, 1), 7)]),
    hint="held are L / s inputs and s blocks: try every s that divides L",
)


@exercise("05.same_dice", hint="remember torch.get_rng_state() in forward; torch.random.fork_rng puts back what was")
def _(answer):
    weight = torch.arange(1.0, 9.0, dtype=torch.float64).requires_grad_()

    def run(x):
        return torch.nn.functional.dropout(x * weight, 0.5)

    def gradients(apply, seed):
        torch.manual_seed(seed)
        x = torch.ones(8, dtype=torch.float64, requires_grad=True)
        weight.grad = None
        y = ask(apply, run, x)
        torch.rand(3)  # a later layer's dice
        y.square().sum().backward()
        return x.grad, weight.grad, torch.rand(3, dtype=torch.float64)

    with torch.random.fork_rng(devices=[]):
        for seed in range(4):
            ours, truth = gradients(answer, seed), gradients(lambda run, x: run(x), seed)
            for what, got, want in zip(("the input's gradient", "the weight's gradient"), ours, truth, strict=False):
                said = "missing" if got is None else compare(got, want)
                if not isinstance(said, Right):
                    return f"{what} is not that of the mask that forward drew: {said}"
            if not torch.equal(ours[2], truth[2]):
                return (
                    "gradients right, but after backward the generator draws other numbers than without checkpointing"
                )
    return Right("the same mask, and the same numbers after it")


@exercise(
    "05.fit",
    hint="what is the largest kind at the highest point, as things are? one call takes the half of it, the other the rest",
)
def _(answer):
    from minititan.lab.launch import launch

    limit, most = 13e6, 1.15
    by_rank = launch(answer, ranks=4, device="cpu", timeout=60)
    if any(_is_stub(of_rank) for of_rank in by_rank):
        raise NotSolvedYet
    rank = max(range(4), key=lambda r: sum(by_rank[r]["bytes"].values()))
    kinds = {kind: n / 1e6 for kind, n in by_rank[rank]["bytes"].items() if n}
    truth = by_rank[0]["truth"]
    held, again = sum(kinds.values()), by_rank[rank]["flops"] / truth["flops"]
    if held > limit / 1e6:
        largest = sorted(kinds, key=kinds.get, reverse=True)
        state = sum(kinds.get(kind, 0.0) for kind in ("parameters", "gradients", "optimizer"))
        if kinds.get("activations", 0.0) > state:
            why = "most are activations: sharding does not cut them, computing them again does"
        else:
            why = f"{state:.1f} are parameters, gradients and averages, which no recomputation makes fewer: cut them"
        told = ", ".join(f"{kind} {kinds[kind]:.1f}" for kind in largest)
        return f"rank {rank} holds {held:.1f} MB at its highest point, {limit / 1e6:.0f} are allowed: {told}; {why}"
    if (off := max(abs(of_rank["loss"] / truth["loss"] - 1) for of_rank in by_rank)) > 1e-5:
        return (
            f"{held:.1f} MB, but the loss after a step is off by {off:.0e}: the ranks do not train one model together"
        )
    if again > most:
        return (
            f"it fits, in {held:.1f} MB, but multiplies {again:.2f} times as much; {most} times is allowed: "
            "keep of a block what takes many flops to compute again"
        )
    return Right(f"{held:.1f} MB on the fullest rank, {again:.2f} times the multiplications, loss off by {off:.0e}")


# === 06 tensor parallel ========================================================================================


@exercise("06.row_bias", hint="g adds what the ranks give it: where must the bias stay out of that sum?")
def _(answer):
    from minititan.lab.launch import launch

    def given():
        torch.manual_seed(0)
        return (torch.randn(size, dtype=torch.float64) for size in ((2, 3, 8), (5, 8), (5,)))

    def on_rank():
        import torch.distributed as dist

        n, rank = dist.get_world_size(), dist.get_rank()
        x, w, bias = given()
        bias.requires_grad_()
        x, w = (t.contiguous().requires_grad_() for t in (x.chunk(n, -1)[rank], w.chunk(n, 1)[rank]))
        y = answer(x, w, bias)
        if _is_stub(y):
            return None
        y.sum().backward()
        return y.detach(), bias.grad

    results = launch(on_rank, ranks=4, device="cpu", timeout=15)
    if any(r is None for r in results):
        raise NotSolvedYet
    x, w, bias = given()
    truth = x @ w.T + bias
    if isinstance(compare(results[0][0], x @ w.T + 4 * bias), Right):
        return "the bias arrives 4 times: every rank added it before the sum"
    if isinstance(compare(results[0][0], x @ w.T), Right):
        return "the bias is not in the output"
    said = compare([y for y, _ in results], [truth] * 4)
    if not isinstance(said, Right):
        return f"the output: {said}"
    for rank, (_, grad) in enumerate(results):
        said = "missing" if grad is None else compare(grad, torch.full((5,), 6.0))
        if grad is not None and isinstance(compare(grad, torch.full((5,), 6.0 / 4)), Right):
            said = "a quarter: what was divided by 4 forward is divided backward as well, and only the sum over ranks is whole"
        if not isinstance(said, Right):
            return f"the output is right, but the bias' gradient on rank {rank} is not, and replicas drift: {said}"
    return Right("output and gradient right on every rank")


@exercise("06.fused_gate_up", hint="cut w1 and w3 each, then put the two parts together")
def _(answer):
    w13 = torch.arange(16.0 * 3, dtype=torch.float64).view(16, 3)
    for n in (1, 2, 4):
        for rank in range(n):
            part = ask(answer, w13, n, rank)
            if n > 1 and isinstance(compare(part, w13.chunk(n)[rank]), Right):
                what = "gate only" if rank < n // 2 else "up only"
                return f"rank {rank} of {n} gets {what}: its silu(gate) * up pairs features that do not belong together"
            said = compare(part, torch.cat([w.chunk(n)[rank] for w in w13.chunk(2)]))
            if not isinstance(said, Right):
                return f"rank {rank} of {n}: {said}"
    return Right("each rank has the same rows of w1 and of w3")


@exercise("06.greedy_token", hint="what must others know of a rank's part? its best value, and which token that is")
def _(answer):
    from minititan.lab.launch import launch
    from minititan.lab.trace import recording, traffic

    def given():
        return torch.randn(6, 32, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

    def on_rank():
        import torch.distributed as dist

        with recording() as events:
            tokens = answer(given().chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous())
        return tokens, events

    results = launch(on_rank, ranks=4, device="cpu", timeout=15)
    if any(_is_stub(tokens) for tokens, _ in results):
        raise NotSolvedYet
    said = compare([tokens for tokens, _ in results], [given().argmax(-1)] * 4)
    if not isinstance(said, Right):
        if isinstance(compare([t for t, _ in results], [part.argmax(-1) for part in given().chunk(4, 1)]), Right):
            return "that is each rank's best of its own part, counted from 0 there: compare the ranks' best, and add what comes before"
        return said
    sent = traffic([events for _, events in results]).total / 4
    gathered = 3 / 4 * 6 * 32 * 8
    if sent >= gathered:
        return f"right, but {sent:.0f} bytes a rank were sent, no fewer than for all logits ({gathered:.0f})"
    return Right(f"right, with {sent:.0f} bytes sent by each rank; the logits would be {gathered:.0f}")


# === 07 sequence and loss parallel =============================================================================


@exercise("07.gather_again", hint="save x_BtD and not what you gathered; backward gathers it again, and scatters a sum")
def _(answer):
    from minititan.lab.launch import launch

    def given():
        generator = torch.Generator().manual_seed(0)
        sizes = (2, 8, 6), (12, 6), (2, 8, 12)
        return (torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes)

    def on_rank():
        import torch.distributed as dist

        n, rank = dist.get_world_size(), dist.get_rank()
        x, w, towards = given()
        x, w = (t.contiguous().requires_grad_() for t in (x.chunk(n, 1)[rank], w.chunk(n)[rank]))
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            y = answer(x, w)
        if _is_stub(y):
            return None
        saved += [t for t in getattr(y.grad_fn, "__dict__", {}).values() if isinstance(t, Tensor)]
        kept = {t.data_ptr(): t.numel() for t in saved if t.data_ptr() != w.data_ptr()}
        (y * towards.chunk(n, -1)[rank]).sum().backward()
        return y.detach(), x.grad, w.grad, sum(kept.values())

    results = launch(on_rank, ranks=4, device="cpu", timeout=15)
    if any(r is None for r in results):
        raise NotSolvedYet
    x, w, towards = given()
    dx, dw = towards @ w, towards.flatten(0, 1).T @ x.flatten(0, 1)
    for rank, (y, dx_of_rank, dw_of_rank, kept) in enumerate(results):
        said = compare(y, (x @ w.T).chunk(4, -1)[rank])
        if not isinstance(said, Right):
            return f"the output on rank {rank}: {said}"
        said = "missing" if dx_of_rank is None else compare(dx_of_rank, dx.chunk(4, 1)[rank])
        summand = (towards.chunk(4, -1)[rank] @ w.chunk(4)[rank]).chunk(4, 1)[rank]
        if dx_of_rank is not None and isinstance(compare(dx_of_rank, summand), Right):
            said = "it is a summand, of this rank's features only; the ranks' must be added"
        if not isinstance(said, Right):
            return f"the output is right; the gradient of x on rank {rank}: {said}"
        said = "missing" if dw_of_rank is None else compare(dw_of_rank, dw.chunk(4)[rank])
        if not isinstance(said, Right):
            return f"output and gradient of x are right; the gradient of the weight on rank {rank}: {said}"
        if kept > x.numel() // 4:
            return f"right, but {kept} numbers are kept besides the weight; this rank's tokens are {x.numel() // 4}"
    return Right(f"right, and {x.numel() // 4} numbers are kept of {x.numel()}")


@exercise("07.inputs_gb", hint="layers × tokens × dim × 2 bytes; then each GPU has an eighth of the tokens")
def _(answer):
    if not isinstance(answer, list | tuple) or len(answer) != 2:
        return f"two numbers are asked for, not {_short(answer)}"
    whole = 80 * 8192 * 8192 * 2 / 1e9
    for name, got, want in zip(("without", "with"), answer, (whole, whole / 8), strict=True):
        if _is_numeric(got) and _as_tensor(got).dim() == 0:
            if abs(float(got) / want * 2**30 / 1e9 - 1) < 0.005:
                return f"{name} sequence parallelism: those are GiB (2**30 bytes), asked for are GB (10**9)"
            if name == "with" and abs(float(got) / whole - 1) < 0.005:
                return "with sequence parallelism a GPU keeps an eighth of the tokens of each input"
        said = compare(got, want, 0.005)
        if not isinstance(said, Right):
            return f"{name} sequence parallelism: {said}"
    return Right(f"{whole:.1f} and {whole / 8:.2f} GB")


@exercise(
    "07.log_z", hint="subtract the largest of all ranks; the sum is notebook 06's g, whose backward is the identity"
)
def _(answer):
    from minititan.lab.launch import launch

    def given():
        return 1000 + 5 * torch.randn(6, 32, generator=torch.Generator().manual_seed(2), dtype=torch.float64)

    def on_rank():
        import torch.distributed as dist

        part = given().chunk(dist.get_world_size(), 1)[dist.get_rank()].clone().requires_grad_()
        z = answer(part)
        if _is_stub(z):
            return None
        if z.requires_grad:
            (z * torch.arange(1.0, 7.0, dtype=torch.float64)).sum().backward()
        return z.detach(), part.grad

    results = launch(on_rank, ranks=4, device="cpu", timeout=15)
    if any(r is None for r in results):
        raise NotSolvedYet
    truth = given().logsumexp(1)
    slopes = given().softmax(1) * torch.arange(1.0, 7.0, dtype=torch.float64)[:, None]
    for rank, (z, grad) in enumerate(results):
        if not z.isfinite().all():
            return "not finite: exp overflows; subtract the largest logit of all ranks first, and add it at the end"
        if isinstance(compare(z, given().chunk(4, 1)[rank].logsumexp(1)), Right):
            return f"rank {rank} gives log Z of its own part of the vocabulary"
        said = compare(z, truth)
        if not isinstance(said, Right):
            return f"rank {rank}: {said}"
        said = "lost on the way" if grad is None else compare(grad, slopes.chunk(4, 1)[rank])
        if not isinstance(said, Right):
            return f"log Z is right; the gradient of rank {rank}'s logits is not: {said}"
    return Right("values and gradients right on every rank")


# === 08 async tensor parallel ==================================================================================


exercise(
    "08.chunks",
    on_calls([((0, 0, 4), (0, 3)), ((0, 1, 4), (3, 2)), ((2, 3, 4), (3, 2)), ((1, 2, 3), (2, 1)), ((0, 0, 1), (0, 0))]),
    hint="a gather begins with the rank's own chunk, a reduction ends with it; chunks arrive from rank - 1",
)


@exercise(
    "08.longest_hop",
    hint="beyond the best point h > m: solve m + (n-1) h = ratio (n m + (n-1) h) for h; the best ratio is n / (2n-1)",
)
def _(answer):
    calls = [((4, 0.03, 0.625), 0.04), ((4, 0.03, 0.75), 0.08), ((2, 1.0, 0.8), 3.0), ((4, 0.03, 0.5), 0.0)]
    said = on_calls(calls)(answer)
    if isinstance(said, str) and "(4, 0.03, 0.5): " in said:
        return f"{said}; 4 ranks need 4/7 = 0.57 of the serial time at best, with a hop of 0.03, so it is 0"
    return said


@exercise(
    "08.scatter", hint="reduce() of the module, written out: multiply, wait, add, pass on; one's own chunk comes last"
)
def _(answer):
    from minititan.lab.launch import launch
    from minititan.lab.trace import recording

    def given():
        torch.manual_seed(0)
        return torch.randn(64, 64, dtype=torch.float64), torch.randn(32, 64, dtype=torch.float64)

    def on_rank():
        import time

        import torch.distributed as dist
        from torch.utils._python_dispatch import TorchDispatchMode

        products = []

        class Products(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                if func._overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
                    products.append(time.monotonic())
                return func(*args, **(kwargs or {}))

        n, rank = dist.get_world_size(), dist.get_rank()
        x, w = (part.chunk(n, 1)[rank].contiguous() for part in given())
        with recording() as events, Products():
            out = answer(x, w)
        messages = [e for e in events if e.lane == "communication"]
        arriving = [(e.start, e.end) for e in messages if e.name == "recv"]  # from the call to the end of the wait
        covered = sum(any(start < t < end for t in products) for start, end in arriving)
        return out, [e.name for e in messages], covered

    results = launch(on_rank, ranks=4, device="cpu", timeout=15)
    if any(_is_stub(out) for out, _, _ in results):
        raise NotSolvedYet
    x, w = given()
    said = compare([out for out, _, _ in results], list((x @ w.T).chunk(4)))
    if not isinstance(said, Right):
        return said
    names = sorted(set(results[0][1]) - {"send", "recv"})
    if names or results[0][1].count("send") != 3:
        sends = results[0][1].count("send")
        return f"the sums are right, but 3 messages of a rank are enough, not {sends} and {names or 'no collective'}"
    if (covered := min(covered for _, _, covered in results)) < 3:
        return (
            f"the sums are right, but a rank multiplies during {covered} of its 3 messages only, and waits idle for the "
            "others: multiply before you wait for what arrives"
        )
    return Right("right, and a rank multiplies during each of its 3 messages")


# === 09 pipeline ===============================================================================================


def _run_pipeline(rows: list[list[str]], costs: dict[str, int]) -> tuple[int, list[int]]:
    """Rows of "F0", "B0", "I0", "W0", a row a rank -> when all are done, and by rank the most microbatches held.

    A sentence instead of numbers where that cannot run: an action missing, twice, unknown, or waited for in vain.
    """
    p = len(rows)
    microbatches = {a[1:] for row in rows for a in row}
    for rank, row in enumerate(rows):
        for k in sorted(microbatches, key=int):
            kinds = [a[0] for a in row if a[1:] == k]
            if sorted(kinds) not in (["B", "F"], ["F", "I", "W"]):
                found = " ".join(f"{kind}{k}" for kind in kinds) or "nothing"
                return f"rank {rank} has {found} of microbatch {k}; that takes F and B, or F, I and W, once each"
    done, free, held, peak = {}, [0] * p, [0] * p, [0] * p
    rows = [list(row) for row in rows]
    while any(rows):
        moved = False
        for rank, row in enumerate(rows):
            while row:
                kind, k = row[0][0], row[0][1:]
                needs = {"F": [(rank - 1, "F", k)] if rank else [], "W": [(rank, "I", k)]}.get(kind, [(rank, "F", k)])
                if kind in "BI" and rank < p - 1:
                    needs = [*needs, (rank + 1, "I", k)]
                if any(need not in done for need in needs):
                    break
                free[rank] = max([free[rank], *(done[need] for need in needs)]) + costs[kind]
                done[rank, "I" if kind == "B" else kind, k] = free[rank]
                held[rank] += {"F": 1, "B": -1, "I": 0, "W": -1}[kind]
                peak[rank] = max(peak[rank], held[rank])
                row.pop(0)
                moved = True
        if not moved:
            return f"the ranks wait for each other for ever, at {[row[0] if row else 'the end' for row in rows]}"
    return max(free), peak


@exercise("09.least_microbatches", hint="solve (p-1) / (m + p-1) <= bubble for m; and what does 1F1B ask for besides?")
def _(answer):
    for p, bubble, m in ((4, 1 / 4, 9), (8, 1 / 8, 49), (6, 3 / 8, 9), (4, 1 / 2, 4), (2, 1 / 2, 2)):
        got = ask(answer, p, bubble)
        if got == (p - 1) / bubble and got != m:
            return (
                f"{p} ranks, at most {bubble:.1%}: {got:g} counts the bubble against the work, not against all the time"
            )
        if got < p:
            return f"{p} ranks, at most {bubble:.1%}: {got} would be enough, but 1F1B needs a microbatch for each stage"
        said = compare(got, m)
        if not isinstance(said, Right):
            return f"{p} ranks, at most {bubble:.1%}: {said}"
    return Right("5 of 5 right")


@exercise("09.order", hint="p - 1 - rank forwards to warm up, then forward and backward in turn, then what is left")
def _(answer):
    for p, m in ((4, 8), (3, 3), (2, 5), (1, 2)):
        rows = [list(ask(answer, rank, p, m)) for rank in range(p)]
        if wrong := [a for row in rows for a in row if not (isinstance(a, str) and a[:1] in "FB" and a[1:].isdigit())]:
            return f"an action is a text such as 'F0' or 'B0', not {_short(wrong[0])}"
        found = _run_pipeline(rows, {"F": 1, "B": 2})
        if isinstance(found, str):
            return f"{p} ranks, {m} microbatches: {found}"
        end, peak = found
        if any(len(row) != 2 * m for row in rows):
            return f"{p} ranks, {m} microbatches: a row has {2 * m} actions, not {[len(row) for row in rows]}"
        if end > 3 * (m + p - 1):
            return f"{p} ranks, {m} microbatches: it takes {end} slots; {3 * (m + p - 1)} are possible"
        if peak != [min(m, p - rank) for rank in range(p)]:
            return f"{p} ranks, {m} microbatches: ranks hold up to {peak}; 1F1B holds {[p - r for r in range(p)]}"
    return Right("in order, in the least time, holding the least")


@exercise("09.tied", hint="each end sends its own and receives the other's; who is in the middle does nothing")
def _(answer):
    from minititan.lab.launch import RankError, launch
    from minititan.lab.trace import recording

    def given(rank):
        return torch.arange(12.0, dtype=torch.float64).view(4, 3) * (1 if rank == 0 else 10)

    def on_rank():
        import torch.distributed as dist

        rank, n = dist.get_rank(), dist.get_world_size()
        with recording() as events:
            out = answer(given(rank) if rank in (0, n - 1) else None)
        return out, sum(e.n_bytes for e in events if e.lane == "communication" and e.name != "recv")

    try:
        results = launch(on_rank, ranks=4, device="cpu", timeout=10)
    except RankError as error:
        said = str(error)
        if "rank 0 is in send" in said and "rank 3 is in send" in said:
            return (
                "ranks 0 and 3 both wait in send, for the other to receive: start isend and irecv, then wait for both"
            )
        if "never called" not in said and " in all_reduce" not in said:
            raise
        return f"{said.splitlines()[0]}. A collective is everybody's; a message concerns two ranks"
    if all(out is None for out, _ in results):
        raise NotSolvedYet
    ends = {"the first": results[0][0], "the last": results[3][0]}
    for (name, got), rank in zip(ends.items(), (0, 3), strict=True):
        if got is None:
            return f"{name} rank got nothing"
        if isinstance(compare(got, given(rank)), Right):
            return f"{name} rank has its own gradient only: both ends need the sum, or the two copies drift apart"
        said = compare(got, given(0) + given(3))
        if not isinstance(said, Right):
            return f"{name} rank: {said}"
    if busy := [rank for rank in (1, 2) if results[rank][1]]:
        return f"right at both ends, but ranks {busy} send {results[busy[0]][1]} bytes each: they have no part in it"
    return Right(f"right at both ends, {results[0][1]} bytes sent by each of them and nothing by others")


# === 10 zero bubble ============================================================================================


@exercise(
    "10.split", hint="backward returns dy @ weight now; the function on the list adds dyᵀ x to weight.grad, later"
)
def _(answer):
    torch.manual_seed(0)
    weight, later = torch.randn(5, 3, dtype=torch.float64, requires_grad=True), []
    expected = torch.zeros_like(weight)
    for microbatch in range(2):
        x, dy = torch.randn(2, 4, 3, dtype=torch.float64), torch.randn(2, 4, 5, dtype=torch.float64)
        x.requires_grad_()
        y = ask(answer, x, weight, later)
        said = compare(y, x @ weight.T)
        if not isinstance(said, Right):
            return f"forward: {said}"
        y.backward(dy)
        if x.grad is None:
            return "backward left no gradient of x, for which the previous rank waits"
        said = compare(x.grad, dy @ weight)
        if not isinstance(said, Right):
            return f"the gradient of x: {said}"
        if weight.grad is not None:
            return "backward computed the weight's gradient too: that was to be left for later"
        if len(later) != microbatch + 1:
            return f"after {microbatch + 1} backwards the list has {len(later)} entries"
        expected += dy.flatten(0, 1).T @ x.detach().flatten(0, 1)
    for function in later:
        function()
    if weight.grad is None:
        return "the functions on the list left no gradient of the weight"
    said = compare(weight.grad, expected)
    last = dy.flatten(0, 1).T @ x.detach().flatten(0, 1)
    if isinstance(compare(weight.grad, last), Right):
        return "the second microbatch's gradient took the place of the first one's: they add up"
    return Right("input gradients at once, the sum of both weight gradients later") if isinstance(said, Right) else said


@exercise(
    "10.when", hint="rank r may owe r weight gradients while forwards are left; then one after each I, then the rest"
)
def _(answer):
    for p, m in ((4, 8), (3, 6), (2, 4)):
        rows = []
        for rank in range(p):
            warm, row = min(m, p - 1 - rank), [f"F{k}" for k in range(min(m, p - 1 - rank))]
            row += [a for k in range(warm, m) for a in (f"F{k}", f"I{k - warm}")]
            row += [f"I{k}" for k in range(m - warm, m)]
            got = list(ask(answer, row.copy(), rank, p))
            if [a for a in got if a[0] != "W"] != row:
                return f"rank {rank} of {p}: forwards and input gradients must stay as they are, only W is to be put in"
            rows.append(got)
        found = _run_pipeline(rows, {"F": 1, "I": 1, "W": 1})
        if isinstance(found, str):
            return f"{p} ranks, {m} microbatches: {found}"
        end, peak = found
        if max(peak) > p:
            return f"{p} ranks, {m} microbatches: ranks hold up to {peak} microbatches; {p} are allowed"
        if end > 3 * m + p - 1:
            return f"{p} ranks, {m} microbatches: it takes {end} slots, 1F1B {3 * (m + p - 1)}; {3 * m + p - 1} are possible"
    return Right("no slower than ZB-H1, and holding no more than 1F1B")


def _replay(rows: list[list[str]]) -> tuple[float, float]:
    """Rows of "3F0", what each rank ran in order -> the bubble, F, I and W taking a slot and B two, and the most held.

    Held: microbatches from the start of F to the end of B or W, in all stages of a rank, over the number of its stages.
    """
    todo = [[(int(stage), kind, int(k)) for stage, kind, k in (re.match(r"(\d+)([FBIW])(\d+)", a).groups() for a in row)]
            for row in rows]  # fmt: skip
    last, cost = max(stage for row in todo for stage, *_ in row), {"B": 2}
    done, free, peak, busy = {}, [0.0] * len(rows), 0.0, 0
    held, stages = [0] * len(rows), [len({stage for stage, *_ in row}) for row in todo]
    while any(todo):
        before = sum(map(len, todo))
        for rank, row in enumerate(todo):
            while row:
                stage, kind, k = row[0]
                needs = [(stage - 1, "F", k)] if kind == "F" and stage else [(stage, "F", k)] if kind != "F" else []
                if kind in "BI" and stage < last:
                    needs.append((stage + 1, "I", k))
                if kind == "W":
                    needs.append((stage, "I", k))
                if any(need not in done for need in needs):
                    break
                free[rank] = max([free[rank], *(done[need] for need in needs)]) + cost.get(kind, 1)
                done[stage, "I" if kind == "B" else kind, k] = free[rank]
                held[rank] += {"F": 1, "I": 0}.get(kind, -1)
                peak, busy = max(peak, held[rank] / stages[rank]), busy + cost.get(kind, 1)
                row.pop(0)
        if sum(map(len, todo)) == before:
            raise ValueError(f"ranks wait for each other at {[row[0] if row else 'the end' for row in todo]}")
    return 1 - busy / len(rows) / max(free), peak


@exercise(
    "10.below_ten",
    hint="two things shrink the bubble, W where a rank would wait and smaller stages; which schedules have both?",
)
def _(answer):
    from minititan.lab.launch import launch

    by_rank = launch(answer, ranks=4, device="cpu", timeout=60)
    if any(_is_stub(of_rank) for of_rank in by_rank):
        raise NotSolvedYet
    rows, errors = zip(*by_rank, strict=True)
    if max(errors) > 1e-10:
        return f"it ran, and a gradient is off by {max(errors):.0e} against one process"
    microbatches = {action.lstrip("0123456789")[1:] for row in rows for action in row}
    if len(microbatches) != 8:
        return f"{len(microbatches)} microbatches ran, and 8 are asked for"
    bubble, held = _replay([list(row) for row in rows])
    kinds, stages = (
        {action.lstrip("0123456789")[0] for row in rows for action in row},
        len({a.split("F")[0] for a in rows[0] if "F" in a}),
    )
    if bubble >= 0.1:
        whole = "each backward is in one piece, so nothing is left to fill the end with"
        large = "each rank has one stage, as large as can be: the first microbatch takes a whole forward to pass a rank"
        both = "W is put off, and stages are small: but in which order?"
        why = whole if "B" in kinds else large if stages == 1 else both
        return f"the bubble of what ran is {bubble:.1%}, and below 10% is asked for: {why}"
    if held > 4:
        return f"a bubble of {bubble:.1%}, but a rank holds {held:g} microbatches, and 4 are allowed, as in 1F1B: W has to come sooner"
    return Right(
        f"a bubble of {bubble:.1%} on 4 ranks with 8 microbatches, {held:g} held, gradients off by {max(errors):.0e}"
    )


# === 11 context parallel =======================================================================================


@exercise(
    "11.merge", hint="each block weighs exp(lse - the log of the sum of all exp(lse)); torch.logsumexp never overflows"
)
def _(answer):
    from torch.nn.functional import scaled_dot_product_attention

    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 9, 4, generator=generator, dtype=torch.float64) for _ in "qkv")
    for pieces, shift in (((9,), 0.0), ((4, 5), 0.0), ((2, 6, 1), 0.0), ((2, 6, 1), 2e3)):
        outs, lses = [], []
        for k_piece, v_piece in zip(k.split(pieces, 2), v.split(pieces, 2), strict=True):
            scores = q @ k_piece.transpose(-1, -2) / 2
            outs.append(scores.softmax(-1) @ v_piece)
            lses.append(scores.logsumexp(-1) + shift)
        truth, what = scaled_dot_product_attention(q, k, v), f"{len(pieces)} blocks of {pieces} keys"
        got = ask(answer, outs, lses)
        if isinstance(got, Tensor) and not got.isfinite().all():
            return f"{what}, lse up to {max(lse.max().item() for lse in lses):.0f}: not finite, exp overflows"
        if len(pieces) > 1 and isinstance(compare(got, sum(outs) / len(outs)), Right):
            return f"{what}: that is the mean of the outputs, as if every block weighed the same"
        said = compare(got, truth)
        if not isinstance(said, Right):
            return f"{what}: {said}"
    return Right("right for 1, 2 and 3 blocks, and where exp(lse) would overflow")


@exercise("11.places", hint="cut the sequence into 2n chunks; rank r holds chunk r and the chunk as far from the end")
def _(answer):
    for T, n in ((16, 2), (16, 4), (24, 3), (8, 1)):
        c = T // (2 * n)
        for rank in range(n):
            head, tail = list(range(rank * c, (rank + 1) * c)), list(range(T - (rank + 1) * c, T - rank * c))
            got = ask(answer, T, n, rank)
            got = got.tolist() if isinstance(got, Tensor) else list(got)
            if n > 1 and got == list(range(rank * 2 * c, (rank + 1) * 2 * c)):
                return (
                    f"places({T}, {n}, {rank}) = {got}: a contiguous part; rank {n - 1} would have almost all the work"
                )
            if c > 1 and got == head + tail[::-1]:
                return f"places({T}, {n}, {rank}) = {got}: the second chunk runs backwards, and a causal tile needs it forwards"
            if got != head + tail:
                return f"places({T}, {n}, {rank}) = {got}, expected {head + tail}"
    return Right("all ranks right, for 4 sizes")


@exercise("11.fewest_bytes", hint="ring: 2 G (2·2 + 4); ulysses: 4 (H + G)·2 / n; both times (n-1)/n B T K")
def _(answer):
    cases = [(2, 32, 32), (2, 32, 8), (4, 32, 8), (8, 32, 8), (16, 32, 8), (3, 32, 8), (8, 128, 8), (8, 64, 8)]
    for n, H, G in cases:
        ring, ulysses = 2 * G * 8, 4 * (H + G) * 2 / n
        best, got = "ulysses" if G % n == 0 and ulysses < ring else "ring", ask(answer, n, H, G)
        if got not in ("ring", "ulysses"):
            return f"n={n}, H={H}, G={G}: the answer is 'ring' or 'ulysses', not {_short(got)}"
        if got != best and G % n:
            return f"n={n}, H={H}, G={G}: ulysses cannot give {G} key/value heads to {n} ranks evenly"
        if got != best:
            numbers = f"the ring sends {ring:.0f} B·T·K (n-1)/n bytes, ulysses {ulysses:.0f}"
            return f"n={n}, H={H}, G={G}: {numbers}, so {best} sends fewer"
    return Right(f"{len(cases)} of {len(cases)} right")


# === 12 expert parallel ========================================================================================


@exercise("12.by_expert", hint="number the rows; each pair (r, j) is one run of them; put the runs in another order")
def _(answer):
    tables = [
        [[2, 1], [0, 3]],
        [[1, 0, 2], [3, 1, 0]],
        [[0, 0], [0, 0]],
        [[4, 2]],
        [[1], [2], [0]],
        [[0, 0, 5], [0, 0, 0]],
    ]
    for table in tables:
        coming_ne = torch.tensor(table)
        n, e = coming_ne.shape
        key = torch.arange(e).repeat(n).repeat_interleave(coming_ne.flatten())
        truth = key.argsort(stable=True)
        got = torch.as_tensor(ask(answer, coming_ne))
        where = f"coming_ne = {table}"
        if got.tolist() == truth.tolist():
            continue
        if sorted(got.tolist()) != list(range(len(truth))):
            return f"{where}: each of the {len(truth)} rows must come up once; got {got.tolist()}"
        if got.tolist() == truth.argsort().tolist():
            return f"{where}: that is the way back; rows[order] must be the sorted ones: {truth.tolist()}"
        if got.tolist() == list(range(len(truth))):
            return f"{where}: the rows are still ordered by sender: {got.tolist()}"
        if key[got].tolist() == key[truth].tolist():
            return f"{where}: sorted by expert, but rows of one expert have changed places; expected {truth.tolist()}"
        return f"{where}: got {got.tolist()}, expected {truth.tolist()}"
    return Right(f"{len(tables)} tables right, one of them empty")


@exercise("12.expert_mean", hint="sum over all ranks × factor / efsdp must be the sum over all ranks / (dp_shard · cp)")
def _(answer):
    for dp_shard, cp, tp, ep in (
        (4, 1, 1, 4),
        (4, 1, 1, 2),
        (2, 2, 1, 4),
        (2, 1, 2, 4),
        (1, 1, 4, 2),
        (2, 1, 4, 4),
        (2, 2, 4, 8),
    ):
        got, truth = ask(answer, dp_shard, cp, tp, ep), tp / ep
        where = f"dp_shard {dp_shard}, cp {cp}, tp {tp}, ep {ep}"
        if isinstance(compare(got, truth), Right):
            continue
        if isinstance(compare(got, 1 / ep), Right):
            return f"{where}: 1/ep = {1 / ep:g} would be a mean over ranks, but {tp} of them have summands of one loss"
        if isinstance(compare(got, 1 / (dp_shard * cp)), Right):
            return f"{where}: that is the whole mean, and FSDP divides by efsdp = {dp_shard * cp * tp // ep} once more"
        said = compare(got, truth)
        return f"{where}: {said}"
    return Right("seven layouts right, with and without tensor parallelism")


@exercise("12.dropped", hint="room = ceil(capacity_factor · rows / experts); what is above it has no place")
def _(answer):
    cases = [
        ([4, 4, 4, 4], 1.0),
        ([10, 2, 2, 2], 1.0),
        ([10, 2, 2, 2], 1.25),
        ([7, 0, 0, 0], 1.0),
        ([5, 4, 1], 1.0),
        ([9, 1], 2.0),
    ]
    for counts, capacity in cases:
        room = math.ceil(capacity * sum(counts) / len(counts))
        truth = sum(max(0, c - room) for c in counts)
        got = ask(answer, torch.tensor(counts), capacity)
        where = f"dropped({counts}, {capacity})"
        if isinstance(compare(got, truth), Right):
            continue
        if isinstance(compare(got, sum(c - room for c in counts)), Right):
            return f"{where}: an expert with room to spare takes no row of another: only what is above {room} counts"
        floor = int(capacity * sum(counts) / len(counts))
        if isinstance(compare(got, sum(max(0, c - floor) for c in counts)), Right):
            return f"{where}: the room is rounded up, to {room}, and {truth} rows are dropped"
        if isinstance(compare(got, sum(c > room for c in counts)), Right):
            return f"{where}: that is how many experts drop something; {truth} rows are dropped"
        return f"{where}: {compare(got, truth)}"
    return Right(f"{len(cases)} of {len(cases)} loads right")


# === 13 float8 =================================================================================================


@exercise(
    "13.decode", hint="normal: (1 + m/8) · 2^(e - 7). With e = 0 there is no leading 1, and the power is that of e = 1"
)
def _(answer):
    bytes_ = torch.arange(256, dtype=torch.uint8)
    expected = bytes_.view(torch.float8_e4m3fn).double().tolist()
    found = [ask(answer, byte) for byte in range(256)]
    wrong = [
        b for b in range(256) if not (found[b] == expected[b] or (math.isnan(expected[b]) and math.isnan(found[b])))
    ]
    if not wrong:
        return Right("256 of 256 bytes")
    kinds = {
        "the subnormals, exponent 0": lambda b: b >> 3 & 15 == 0,
        "nan, which is 127 and 255 only": lambda b: b & 127 == 127,
        "exponent 15, which is a number like others": lambda b: b >> 3 & 15 == 15,
        "negative numbers": lambda b: b > 127,
    }
    what = next((f": all of them {kind}" for kind, test in kinds.items() if all(map(test, wrong))), "")
    b = wrong[0]
    return f"{len(wrong)} of 256 bytes are wrong{what}. {b:#010b} is {expected[b]:g}, not {_short(found[b])}"


@exercise(
    "13.smooth", hint="what does the cast of x need to be small, what that of w? s moves size from one to the other"
)
def _(answer):
    def cast(t):
        scale = 448 / t.abs().max()
        return (t * scale).to(torch.float8_e4m3fn).double() / scale

    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        size = 2.0 ** torch.randint(-18, 19, (64,), generator=generator).double()
        x = torch.randn(128, 64, generator=generator, dtype=torch.float64) * size
        w = torch.randn(96, 64, generator=generator, dtype=torch.float64) / size
        s = ask(answer, x.clone(), w.clone())
        if not isinstance(s, Tensor) or s.shape != (64,):
            return f"a factor for each of 64 features is asked for, a tensor of shape (64,), not {_short(s)}"
        if not bool((s > 0).all()) or not s.isfinite().all():
            return "a factor is 0, negative or not finite: the product would change"
        truth = x @ w.T
        plain, ours = (
            ((cast(a) @ cast(b).T - truth).norm() / truth.norm()).item() for a, b in ((x, w), (x / s, w * s))
        )
        if ours > 0.06:
            better = "no better than" if ours > 0.8 * plain else "and"
            return f"after the casts the product is off by {ours:.0%}, {better} {plain:.0%} without factors; 4 % is possible"
    return Right(f"off by {ours:.1%} in place of {plain:.0%}")


@exercise(
    "13.gather_uneven",
    hint="rows of zeros change no amax; all ranks send as many rows as the first, and the end is cut",
)
def _(answer):
    from minititan.lab.launch import RankError, launch
    from minititan.lab.trace import recording, traffic

    def given():
        return torch.randn(10, 16, generator=torch.Generator().manual_seed(5))

    def on_rank():
        import torch.distributed as dist

        with recording() as events:
            result = answer(given().chunk(dist.get_world_size())[dist.get_rank()], 10)
        if _is_stub(result):
            return None
        whole, scale = result
        return str(whole.dtype), tuple(whole.shape), whole.double(), float(scale), events

    try:
        results = launch(on_rank, ranks=4, device="cpu", timeout=15)
    except RankError as error:
        if "SIGABRT" in str(error) or "Connection" in str(error):
            return (
                "gloo gives up: the ranks put different numbers of rows into one gather, 3 and 1; make them equal first"
            )
        raise error
    if any(r is None for r in results):
        raise NotSolvedYet
    amax = given().abs().max()
    expected = (given() * (448 / amax)).to(torch.float8_e4m3fn).double()
    for rank, (dtype, shape, whole, scale, _) in enumerate(results):
        if abs(scale * amax.item() / 448 - 1) > 1e-5:
            return f"rank {rank}: the scale is {scale:.4g}, but 448 over the largest of all rows is {448 / amax.item():.4g}"
        if dtype != "torch.float8_e4m3fn":
            return f"rank {rank}: rows in float8_e4m3fn are asked for, not {dtype}"
        if shape != (10, 16):
            return f"rank {rank}: the shape is {shape}, expected (10, 16)" + (
                ": the padding is still there" if shape[0] > 10 else ""
            )
        said = compare(whole, expected)
        if not isinstance(said, Right):
            return f"rank {rank}: {said}"
    sent = traffic([events for *_, events in results]).total / 4
    if sent > 2 * 3 * 3 * 16:
        return f"right, but each rank sends {sent:.0f} bytes; 3 rows of bytes to 3 others are {3 * 3 * 16}"
    return Right(f"{sent:.0f} bytes sent by each rank, scale included")


# === 14 regional compile =======================================================================================


@exercise("14.guards", hint="of every tensor what is not its values; every number in the modules; and is grad enabled?")
def _(answer):
    from contextlib import nullcontext

    from torch import nn

    class Scaled(nn.Linear):
        def __init__(self, width=8, scale=1.0):
            super().__init__(width, 8)
            self.scale = scale

        def forward(self, x):
            return super().forward(x) * self.scale

    class Shifted(Scaled):
        def forward(self, x):
            return super().forward(x) + self.scale

    def key(module, x, context=None):
        with context or nullcontext():
            found = ask(answer, module, (x,))
        hash(found)  # code is looked up by it
        return found

    x = torch.ones(4, 8)
    try:
        first = key(Scaled(), x)
    except TypeError as error:
        if "unhashable" not in str(error):
            raise
        return f"the code is looked up in a dict by this key, and {error}: make tuples of the lists"
    if key(Scaled(), x) != first:
        return "two blocks that differ only in the values of their weights get two keys: 32 layers, 32 graphs"
    if key(Scaled(), x + 1) != first:
        return "an input with other values gets another key: each step would be compiled"
    others = {
        "the length of an input": (Scaled(), torch.ones(5, 8)),
        "the dtype of an input": (Scaled(), x.double()),
        "whether an input needs a gradient": (Scaled(), torch.ones(4, 8, requires_grad=True)),
        "the shape of a weight": (Scaled(16), x),
        "the dtype of a weight": (Scaled().double(), x),
        "whether a weight is frozen": (Scaled().requires_grad_(False), x),
        "a number that forward reads": (Scaled(scale=0.5), x),
        "train or eval": (Scaled().eval(), x),
        "the class": (Shifted(), x),
        "whether gradients are recorded at all": (Scaled(), x, torch.no_grad()),
    }
    missing = [name for name, given in others.items() if key(*given) == first]
    if missing:
        return (
            f"{len(missing)} of {len(others)} guards are missing: {'; '.join(missing)}. Code made for one would run for another, "
            "without a word"
        )
    return Right(f"1 graph for equal blocks, another in {len(others)} of {len(others)} cases that differ")


def _n_graphs(lengths: Sequence[int]) -> int:
    """The first length as it is, 1 always as it is, and one graph with a variable for all others."""
    return 1 + (1 in lengths[1:] and lengths[0] != 1) + any(n != 1 and n != lengths[0] for n in lengths[1:])


@exercise(
    "14.graphs", hint="the first length; 1, which is never a variable; and one graph for whatever else comes later"
)
def _(answer):
    cases = [
        [16],
        [16, 8],
        [16, 8, 12, 10, 8],
        [4, 1],
        [1, 8, 12, 1],
        [16, 8, 12, 1, 10],
        [8, 1, 12, 8],
        [1, 1],
        [7, 7, 7],
    ]
    for lengths in cases:
        got, truth = ask(answer, list(lengths)), _n_graphs(lengths)
        if isinstance(compare(got, truth), Right):
            continue
        if lengths[0] == 1 and isinstance(compare(got, len(set(lengths))), Right):
            return f"{lengths}: after a first 1 the next length becomes a variable at once, so {truth} graphs"
        if isinstance(compare(got, len(set(lengths))), Right):
            return f"{lengths}: a graph for each length is what dynamic=False does; by default it becomes a variable, {truth} graphs"
        if isinstance(compare(got, min(2, len(set(lengths)))), Right):
            return f"{lengths}: a length of 1 is never a variable (it broadcasts), so {truth} graphs"
        if isinstance(compare(got, truth - 1), Right):
            return f"{lengths}: the first graph counts too, so {truth}"
        return f"{lengths}: {compare(got, truth)}"
    return Right(f"{len(cases)} of {len(cases)} sequences right")


@exercise("14.numbered", hint="a tensor's values are no guard; and register_buffer can keep one out of the state_dict")
def _(answer):
    from torch import nn

    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch.manual_seed(0)
    x, numbers = torch.randn(3, 8), (1, 2, 3, 4)
    blocks = [ask(answer, number) for number in numbers]
    if not all(isinstance(block, nn.Module) for block in blocks):
        return f"a block, an nn.Module, is asked for, not {_kind(blocks[0])}"
    names = ["linear.weight", "linear.bias"]
    if more := [name for name in blocks[0].state_dict() if name not in names]:
        what = (
            "would be trained"
            if more[0] in dict(blocks[0].named_parameters())
            else "would be missing in old checkpoints"
        )
        return f"the state_dict has {more[0]!r} besides {' and '.join(names)}: it {what}"
    if list(blocks[0].state_dict()) != names:
        return f"the state_dict should have {' and '.join(names)}, and has {', '.join(blocks[0].state_dict()) or 'nothing'}"
    torch._dynamo.reset()
    for number, block in zip(numbers, blocks, strict=True):
        expected = x + block.linear(x) / number
        block.compile(backend=count)
        said = compare(block(x).detach(), expected.detach(), 1e-5)
        if not isinstance(said, Right):
            return f"block {number}: {said}"
    torch._dynamo.reset()
    if len(graphs) != 1:
        reads = {
            len(numbers): "an int that forward reads is a guard",
            2: "a float becomes a variable at its second value",
        }
        why = reads.get(len(graphs), "1 is possible")
        return f"{len(numbers)} blocks, {len(graphs)} graphs: {why}"
    return Right(f"{len(numbers)} blocks, 1 graph, no new name")


# === 15 checkpoints ============================================================================================


@exercise("15.overlap", hint="in each dim: the larger of the two beginnings, the smaller of the two ends")
def _(answer):
    cases = (  # in the file, held here, the overlap
        (((0, 0), (16, 18)), ((8, 0), (8, 36)), ((8, 0), (8, 18))),
        (((16, 18), (16, 18)), ((24, 0), (8, 36)), ((24, 18), (8, 18))),
        (((3,), (7,)), ((1,), (5,)), ((3,), (3,))),
        (((0, 4, 0), (2, 4, 8)), ((1, 0, 2), (1, 9, 3)), ((1, 4, 2), (1, 4, 3))),
        (((), ()), ((), ()), ((), ())),  # a step count: no dims, and one value
        (((0, 0), (8, 36)), ((8, 0), (8, 36)), None),  # the one ends where the other begins
        (((0, 0), (8, 8)), ((4, 20), (8, 8)), None),
        (((5, 0), (0, 8)), ((0, 0), (8, 8)), None),  # an empty shard
    )
    for i, (saved, mine, expected) in enumerate(cases):
        found = ask(answer, saved, mine) if i == 0 else answer(saved, mine)
        if found is not None:
            if not (isinstance(found, Sequence) and len(found) == 2 and all(isinstance(f, Sequence) for f in found)):
                return f"two tuples, (offsets, sizes), or None are asked for, not {_short(found)}"
            found = tuple(tuple(map(int, numbers)) for numbers in found)
        if found == expected:
            continue
        said = f"in the file {saved}, held {mine}: {expected} is right, not {found}"
        if expected is None:
            return f"{said}: of no rows, or less, there is nothing to read"
        if found is None:
            return f"{said}: a tensor without dims still has a value" if saved == ((), ()) else said
        offsets, sizes = expected
        if found == (offsets, tuple(o + s for o, s in zip(offsets, sizes, strict=True))):
            return f"{said}: those are ends, and sizes are asked for"
        if found[1] == sizes and found[0] in (
            tuple(o - first for o, first in zip(offsets, piece[0], strict=True)) for piece in (saved, mine)
        ):
            return f"{said}: that counts from the piece's own corner, and the whole tensor's numbers are asked for"
        if found == (offsets, tuple(map(min, saved[1], mine[1]))):
            return f"{said}: the smaller size is no overlap where the pieces begin at different places"
        return said
    return Right(f"{len(cases)} pairs of rectangles, of 0 to 3 dims")


@exercise("15.newest", hint="three questions: its name, its checkpoint.json, its files; then the largest number")
def _(answer):
    def folder(**more):
        promised = {"plain.pt": 90, "__0_0.distcp": 500}
        return promised, promised | {"checkpoint.json": 200} | more

    no_list = None, {"plain.pt": 90, "__0_0.distcp": 500}
    promised, found = folder()
    lacking = promised, {name: size for name, size in found.items() if name != "__0_0.distcp"}
    old, new = "step-00000009", "step-00000010"
    cases = {
        "both are whole": ({new: folder(), old: folder()}, new, ": checkpoint.json does not list itself"),
        "the newer one has no checkpoint.json": ({old: folder(), new: no_list}, old, ": it was never finished"),
        "a file of the newer one is short": (
            {old: folder(), new: folder(**{"__0_0.distcp": 499})},
            old,
            ": a byte is missing of what checkpoint.json promises",
        ),
        "a file of the newer one is missing": ({old: folder(), new: lacking}, old, ": a file that is promised is gone"),
        "killed before the rename": (
            {old: folder(), new + ".writing": folder()},
            old,
            ": it has not got its name yet, so the save has not ended",
        ),
        "killed while deleting": ({old + ".deleted": folder(), new: folder()}, new, ""),
        "nine digits": (
            {"step-99999999": folder(), "step-100000000": folder()},
            "step-100000000",
            ": names are compared as texts there, and steps are numbers",
        ),
        "something else lies there": ({"notes": (None, {}), old: folder()}, old, ""),
        "a file is longer than promised": (
            {old: folder(more=1), new: folder(**{"plain.pt": 4096})},
            new,
            ": every byte that was promised is there",
        ),
        "none is whole": ({new: no_list, old: lacking}, None, ": better to say so than to load half of one"),
        "nothing there": ({}, None, ""),
    }
    for name, (folders, expected, why) in cases.items():
        result = answer(folders)
        if result != expected:
            return f"{name}: {expected} is right, not {_short(result)}{why}"
    return Right(f"{len(cases)} folders")


class _Disk:
    """Files whose content is safe from a kill at once, and from a power cut after `sync`; a rename is, from both."""

    def __init__(self, files: Mapping[str, bytes]):
        self.files = {name: {"a kill": data, "a power cut": data} for name, data in files.items()}
        self.moments: list[tuple[str, dict]] = []  # what has just been done, and name -> content after each mishap

    def _done(self, what: str) -> None:
        self.moments.append((what, {name: dict(contents) for name, contents in self.files.items()}))

    def _there(self, name: str) -> dict:
        if name not in self.files:
            raise FileNotFoundError(f"no file {name!r} on the disk, which has {', '.join(self.files)}")
        return self.files[name]

    def write(self, name: str, data: bytes) -> None:
        file = self.files.setdefault(name, {})
        file |= {"a kill": data[: len(data) // 2], "a power cut": b""}
        self._done(f"inside write({name!r})")
        file["a kill"] = data
        self._done(f"after write({name!r})")

    def sync(self, name: str) -> None:
        file = self._there(name)
        file["a power cut"] = file["a kill"]
        self._done(f"after sync({name!r})")

    def rename(self, old: str, new: str) -> None:
        self._there(old)
        self.files[new] = self.files.pop(old)
        self._done(f"after rename({old!r}, {new!r})")

    def delete(self, name: str) -> None:
        self._there(name)
        del self.files[name]
        self._done(f"after delete({name!r})")


@exercise("15.atomic", hint="write another file, make it last, and let one operation that cannot be halved do the rest")
def _(answer):
    old, new, name = b"the old state", b"the new state, longer", "last.pt"
    disk = _Disk({name: old, "other.pt": b"other"})
    answer(disk, name, new)
    if not disk.moments:
        raise NotSolvedYet
    for mishap in ("a kill", "a power cut"):
        for what, files in disk.moments:
            if "other.pt" not in files or files["other.pt"][mishap] != b"other":
                return f"{mishap} {what}: other.pt has changed, and it is somebody else's"
            if name not in files:
                return (
                    f"{mishap} {what}: there is no {name} at all; rename replaces what is there, without such a moment"
                )
            content = files[name][mishap]
            if content not in (old, new):
                size = f"{len(content)} of {len(new)} bytes"
                if mishap == "a kill":
                    return f"a kill {what}: {name} holds {size}, and the old content is gone"
                return f"a power cut {what}: {name} holds {size}: its name was safe before its content was, for lack of a sync"
    if disk.files[name]["a kill"] != new:
        return f"nothing is lost, but at the end {name} still holds the old content"
    return Right(f"{len(disk.moments)} moments, each with a kill and with a power cut")


# === 16 flight recorder ========================================================================================


def a_mystery() -> tuple[str, tuple[int, ...], str, int]:
    """Fault, culprits, collective and step of exercise 16.who: what `flight_recorder.laboratory` takes."""
    return "skip", (1,), "broadcast", 1


@exercise(
    "16.who", hint="lay the four lists side by side: where do they first differ, and do they agree again, shifted?"
)
def _(answer):
    if not (isinstance(answer, Sequence) and len(answer) == 4 and not isinstance(answer, str)):
        return f"four things are asked for: rank, collective, number, cause; not {_short(answer)}"
    rank, name, number, cause = answer
    if rank != 1:
        return f"rank {_short(rank)} did what two others did; one list is not like the other three"
    if (name, number) == ("all_gather", 4):
        return (
            "there the numbers first differ, true. But is rank 1's all_gather wrong, or is a call before it not there?"
        )
    if (name, number) == ("broadcast", 5) or cause == "slow":
        return (
            "rank 1 is one call short, but not at its end: what it called under number 4 is not what the others called"
        )
    if (name, number) != ("broadcast", 4):
        return f"{_short(name)} #{_short(number)} is not it: with which call do the others' lists begin to differ from rank 1's?"
    if cause == "order":
        return "for an exchange the broadcast would have to come a call later; it does not come at all"
    if cause != "missing":
        return f"the shapes and types are equal on all ranks, and all live: {_short(cause)} does not account for it"
    return Right("rank 1 never called broadcast #4, and went on as the others did after theirs")


@exercise(
    "16.difference",
    hint="the odd rank is who differs from most; then compare its rest with the others' rest without a call",
)
def _(answer):
    step = [("all_gather", 8), ("all_reduce", 4), ("broadcast", 2)]
    right = step * 3
    cases = {
        "nobody differs": ([right] * 4, None),
        "rank 2 lacks a call": ([right, right, right[:4] + right[5:], right], (2, 4, "missing")),
        "rank 0 lacks its first call": ([right[1:], right, right, right], (0, 0, "missing")),
        "rank 1 exchanges two": ([right, [*right[:3], right[4], right[3], *right[5:]], right], (1, 3, "order")),
        "rank 3 brings another size": ([right] * 3 + [[*right[:6], ("all_gather", 9), *right[7:]]], (3, 6, "shape")),
        "rank 1 stopped": ([right, right[:5], right, right], (1, 5, "slow")),
        "rank 2 has called nothing": ([right[:3], right[:3], []], (2, 0, "slow")),
    }
    for name, (programs, expected) in cases.items():
        found = answer([list(p) for p in programs])
        if expected is None and (found is None or found is ...):
            continue
        if found is None or found is ...:
            return f"{name}: {_short(expected)} is right; your function says that nobody differs"
        if expected is None:
            return f"all four lists are equal: None is right, not {_short(found)}"
        found = tuple(found) if isinstance(found, list) else found
        if found != expected:
            why = ""
            if isinstance(found, tuple) and len(found) == 3 and found[:2] == expected[:2]:
                why = {
                    "missing": ": without the call the rest agrees with the others' rest",
                    "order": ": the others make the same two calls the other way round",
                    "slow": ": a list that ends too early differs in nothing else",
                    "shape": ": it is the same collective, with another size",
                }[expected[2]]
            elif isinstance(found, tuple) and len(found) == 3 and found[0] == expected[0]:
                why = ": the first call that differs, not the last one made"
            return f"{name}: {_short(expected)} is right, not {_short(found)}{why}"
    return Right(f"{len(cases)} records")


@exercise("16.everybody_calls", hint="a rank without rows still has two numbers to give: a sum of 0 and a count of 0")
def _(answer):
    from minititan.lab.launch import RankError, launch

    rows = [[1.0, 2.0, 6.0], [5.0], [], [4.0, 0.0]]

    def on_rank():
        import torch.distributed as dist

        found = answer(torch.tensor(rows[dist.get_rank()], dtype=torch.float64))
        return "stub" if _is_stub(found) and rows[dist.get_rank()] else found if found is None else float(found)

    try:
        results = launch(on_rank, ranks=4, device="cpu", timeout=5)
    except RankError as error:
        said = str(error).splitlines()[0]
        told = "never called" in said or "failed" in said
        return said if told else f"{said}: does rank 2, which has no rows, call what the others wait in?"
    if "stub" in results:
        raise NotSolvedYet
    if results[2] is None:
        return "rank 2 has no rows, and returns nothing: it needs the mean of all rows as well"
    said = compare(results, [3.0] * 4)
    if isinstance(said, Right):
        return Right("3.0 on all four ranks, also on the one without a row")
    of_means = (3.0 + 5.0 + 0.0 + 2.0) / 4
    if any(math.isnan(r) for r in results):
        return "nan: the mean of no rows is 0 / 0, and one nan makes the sum of all nan"
    if any(abs(r - x) < 1e-9 for r in results for x in (of_means, 10 / 3)):
        return f"{results[0]:.4g} is the mean of the ranks' means; the mean of the six rows is 3.0"
    return f"the mean of all six rows is 3.0 on each rank; {said}"


# === 17 fault tolerance ========================================================================================


@exercise("17.quorum", hint="who is alive? has each of them asked? are they at least `minimum`?")
def _(answer):
    cases = {
        "both alive, both asked": (({"a": 0.1, "b": 0.2}, {"a", "b"}, 1.0, 1), ["a", "b"]),
        "b is alive and has not asked": (({"a": 0.1, "b": 0.2}, {"a"}, 1.0, 1), None),
        "b is dead": (({"a": 0.1, "b": 1.5}, {"a"}, 1.0, 1), ["a"]),
        "b asked, then died": (({"a": 0.1, "b": 1.5}, {"a", "b"}, 1.0, 1), ["a"]),
        "b is dead, and 2 are the minimum": (({"a": 0.1, "b": 1.5}, {"a", "b"}, 1.0, 2), None),
        "all three asked, in another order": (
            ({"c": 0.1, "a": 0.1, "b": 0.3}, {"b", "c", "a"}, 1.0, 2),
            ["a", "b", "c"],
        ),
        "all are dead": (({"a": 2.0}, {"a"}, 1.0, 1), None),
    }
    why = {
        "b is alive and has not asked": ": one who is slow must be waited for, or the run splits in two",
        "b asked, then died": ": a question is no sign of life, only a heartbeat is",
        "b is dead, and 2 are the minimum": ": count the living, not those who have asked",
    }
    for name, (args, expected) in cases.items():
        found = answer(*args)
        if found != expected:
            return f"{name}: {expected} is right, not {_short(found)}{why.get(name, '')}"
    return Right(f"{len(cases)} situations")


@exercise("17.interval", hint="d/t + t/(2 M) is least where its derivative is 0; then 1 - d/t - (t/2 + R)/M")
def _(answer):
    for d, restart, between in ((60.0, 300.0, 10_800.0), (5.0, 120.0, 86_400.0), (30.0, 600.0, 3600.0)):
        t = math.sqrt(2 * d * between)
        right = t, 1 - d / t - (t / 2 + restart) / between
        found = ask(answer, d, restart, between)
        if not (isinstance(found, Sequence) and len(found) == 2):
            return f"two numbers are asked for, the interval in seconds and the goodput, not {_short(found)}"
        if abs(found[0] / right[0] - 1) > 1e-6:
            near = {
                "2 is missing under the root": math.sqrt(d * between),
                "the restart does not depend on the interval, so it has no place in it": math.sqrt(
                    2 * (d + restart) * between
                ),
            }
            said = next((f": {text}" for text, value in near.items() if abs(found[0] / value - 1) < 1e-6), "")
            return f"saving takes {d:.0f} s, a failure every {between:.0f} s: t is {right[0]:.0f} s, not {found[0]:.0f}{said}"
        if abs(found[1] - right[1]) > 1e-6:
            whole = 1 - d / t - (t + restart) / between
            near = {
                "a failure comes in the middle of an interval, on average": whole,
                "each failure also takes the R seconds of a restart": 1 - d / t - t / 2 / between,
                "saving takes its share as well, d of each t seconds": 1 - (t / 2 + restart) / between,
                "that is the share that is lost": 1 - right[1],
            }
            said = next((f": {text}" for text, value in near.items() if abs(found[1] - value) < 1e-6), "")
            return f"with t = {t:.0f} s the goodput is {right[1]:.4f}, not {found[1]:.4f}{said}"
    return Right("saving takes 60 s, restarting 300 s, a failure every 3 h: every 1138 s, and 86.7 % are left")


@exercise("17.unequal_shares", hint="what must the mean over members of scale × (mean over my rows) be equal to?")
def _(answer):
    generator = torch.Generator().manual_seed(0)
    for n_rows, n_members in ((8, 1), (8, 2), (8, 3), (10, 4)):
        rows = torch.randn(n_rows, generator=generator, dtype=torch.float64)
        shares = rows.chunk(n_members)
        scales = [ask(answer, len(share), n_rows, len(shares)) for share in shares]
        found = sum(scale * share.mean() for scale, share in zip(scales, shares, strict=True)) / len(shares)
        if abs(found / rows.mean() - 1) > 1e-9:
            counts = ", ".join(str(len(share)) for share in shares)
            plain = sum(share.mean() for share in shares) / len(shares)
            if abs(found / plain - 1) < 1e-9:
                said = "that is the mean of the means, in which a row of a small share counts more"
            else:
                said = f"it came out {found / rows.mean():.3f} times as large"
            return f"{n_rows} rows as {counts}: the mean over members should be the mean of the rows; {said}"
    return Right("8 rows among 3, as 3, 3, 2, and 10 among 4 as 3, 3, 3, 1")


# === 18 metrics and profiling ==================================================================================


@exercise("18.mfu", hint="6·N + 12·L·H·K·T flops a token; N without an embedding that only looks up; all GPUs' peaks")
def _(answer):
    runs = {  # sizes, tokens/s of all GPUs, GPUs, flops/s of one
        "an untied model": ((8_030_261_248, 525_336_576, False, 32, 32, 128, 8192), 46_000, 8, 989e12),
        "a tied model": ((1_235_814_400, 262_668_288, True, 16, 32, 64, 4096), 60_000, 4, 312e12),
    }
    names = ("n_parameters", "embedding", "tied", "n_layers", "n_heads", "head_dim", "seq_len")
    for name, (sizes, rate, n_gpus, peak) in runs.items():
        s = dict(zip(names, sizes, strict=True))
        attention = 12 * s["n_layers"] * s["n_heads"] * s["head_dim"] * s["seq_len"]
        lookup = 0 if s["tied"] else s["embedding"]

        def of(flops, gpus=n_gpus, rate=rate, peak=peak):
            return rate * flops / (gpus * peak)

        right = of(6 * (s["n_parameters"] - lookup) + attention)
        found = ask(answer, s, rate, n_gpus, peak)
        if not isinstance(found, int | float | Tensor):
            return f"a share of the peak is asked for, a number, not {_short(found)}"
        if abs(found / right - 1) < 1e-9:
            continue
        mistakes = {
            "the input embedding is counted, though nothing multiplies with it": of(6 * s["n_parameters"] + attention),
            "the tied embedding is left out, though as the output matrix it multiplies": of(
                6 * (s["n_parameters"] - s["embedding"]) + attention
            ),
            "attention's scores are missing": of(6 * (s["n_parameters"] - lookup)),
            "attention's scores are missing, and the input embedding counted": of(6 * s["n_parameters"]),
            "attention has 12 flops, 4 forward (scores, sums) and 8 backward": of(
                6 * (s["n_parameters"] - lookup) + attention / 2
            ),
            "one GPU's peak, but the tokens of all": of(6 * (s["n_parameters"] - lookup) + attention, 1),
            "a forward's flops only: backward takes twice as many again": right / 3,
        }
        why = next((f": {text}" for text, value in mistakes.items() if abs(found / value - 1) < 1e-9), "")
        return f"{name}: {right:.4f} of the peak, not {float(found):.4f}{why}"
    return Right("46,000 tokens/s of the 8B model are 34 % of eight H100")


@exercise(
    "18.idle", hint="a collective ends for nobody before the last has come; add up over all of them, rank by rank"
)
def _(answer):
    cases = [
        [[0.0, 10.0], [3.0, 10.0], [1.0, 14.0]],
        [[5.0, 6.0, 7.0]] * 2,
        [[1.0, 2.0, 9.0], [0.0, 4.0, 8.0], [0.5, 3.0, 8.5], [0.25, 3.5, 7.0]],
    ]
    for arrivals in cases:
        expected = [
            sum(max(each) - t for each, t in zip(zip(*arrivals, strict=True), mine, strict=True)) for mine in arrivals
        ]
        found = ask(answer, [list(of_rank) for of_rank in arrivals])
        said = compare(found, expected)
        if isinstance(said, Right):
            continue
        n = len(arrivals)
        late = [
            sum(t - min(each) for each, t in zip(zip(*arrivals, strict=True), mine, strict=True)) for mine in arrivals
        ]
        by_call = [sum(max(each) - t for t in each) for each in zip(*arrivals, strict=True)]
        if isinstance(compare(found, late), Right):
            said = "this is how much later each came than the first; who comes late does not wait"
        elif isinstance(compare(found, by_call), Right):
            said = f"this is a number for each collective; one for each of {n} ranks is asked for"
        elif isinstance(compare(found, [max(map(max, arrivals)) - max(mine) for mine in arrivals]), Right):
            said = "this looks at the last collective only"
        elif isinstance(
            compare(
                found,
                [max(max(c) - t for c, t in zip(zip(*arrivals, strict=True), mine, strict=True)) for mine in arrivals],
            ),
            Right,
        ):
            said = "this is each rank's longest wait; all of its waits together are asked for"
        return f"arrivals {arrivals}: {said}"
    return Right(f"{len(cases)} traces")


@exercise(
    "18.one_curve", hint='a line "resumed" with step s makes every row after s untrue, also those nobody does again'
)
def _(answer):
    def row(step, loss):
        return {"event": "row", "step": step, "loss": loss}

    def resumed(step):
        return {"event": "resumed", "step": step}

    cases = {
        "a run without a fault": ([row(s, 1 / s) for s in (1, 2, 3)], [1, 2, 3]),
        "killed after 5, resumed at 3": (
            [*[row(s, 1 / s) for s in range(1, 6)], resumed(3), *[row(s, -1 / s) for s in range(4, 7)]],
            [1, 2, 3, -4, -5, -6],
        ),
        "killed twice; the last resume goes back further and has done one step": (
            [
                *[row(s, 1 / s) for s in range(1, 6)],
                resumed(4),
                {"event": "checkpoint", "step": 5},
                *[row(s, 10 / s) for s in range(5, 8)],
                resumed(2),
                row(3, -1 / 3),
            ],
            [1, 2, -3],
        ),
    }
    for name, (lines, steps) in cases.items():
        expected = [(abs(s), 1 / s) for s in steps]
        found = ask(answer, [dict(line) for line in lines])
        if isinstance(found, dict):
            return "a list of pairs (step, loss) in order is asked for, not a dict"
        try:
            pairs = [(int(step), float(loss)) for step, loss in found]
        except (TypeError, ValueError):
            return f"a list of pairs (step, loss) is asked for, not {_short(found)}"
        if pairs == expected:
            continue
        got = [step for step, _ in pairs]
        if len(set(got)) < len(got):
            why = f"steps {sorted({s for s in got if got.count(s) > 1})} are there twice"
        elif got != sorted(got):
            why = f"the steps come as {got}"
        elif set(got) > {abs(s) for s in steps}:
            why = f"steps {sorted(set(got) - {abs(s) for s in steps})} are of a run that was thrown away"
        elif got == [abs(s) for s in steps]:
            why = "some losses are those of the run that was killed"
        else:
            why = f"got the steps {got}, expected {[abs(s) for s in steps]}"
        return f"{name}: {why}"
    return Right(f"{len(cases)} diaries")


# === 19 compose everything =====================================================================================


@exercise("19.layout", hint="the product is 8; tp × pp at least 4; then the bubble says how many microbatches")
def _(answer):
    if not isinstance(answer, Mapping):
        return f"this should be a dict of dp_shard, tp, pp and accumulate, and is {_kind(answer)}"
    if any(value in (None, ...) for value in answer.values()):
        raise NotSolvedYet
    names = ("dp_shard", "tp", "pp", "accumulate")
    if set(answer) != set(names) or any(type(answer[n]) is not int or answer[n] < 1 for n in names):
        return f"dp_shard, tp, pp and accumulate are asked for, each a whole number of at least 1; got {_short(answer)}"
    dp, tp, pp, m = (answer[name] for name in names)
    if dp * tp * pp != 8:
        return f"dp_shard {dp} × tp {tp} × pp {pp} = {dp * tp * pp} ranks, and there are 8"
    if 2 % tp:
        return f"tp {tp} cannot share 2 key/value heads"
    if pp > 4:
        return f"4 layers cannot fill {pp} stages"
    if tp * pp < 4:
        return (
            f"gathered, a rank holds 1/{tp * pp} of the parameters, and 1/4 is allowed: dp_shard {dp} cuts what is at rest "
            "only, tp and pp what a rank computes with"
        )
    if 16 % (dp * m):
        return f"16 sequences cannot be cut into dp_shard {dp} × accumulate {m} = {dp * m} equal microbatches"
    bubble = (pp - 1) / (m + pp - 1)
    if bubble > 0.2:
        return f"{m} microbatches on {pp} stages wait (pp-1)/(m+pp-1) = {bubble:.0%} of the time, and 20% is allowed"
    return Right(f"a bubble of {bubble:.0%}, 1/{tp * pp} of the parameters, microbatches of {16 // (dp * m)} sequences")


@exercise(
    "19.order", hint="which of two must find what the other has made? float8 makes new layers, AdamW keeps parameters"
)
def _(answer):
    before = {
        ("float8", "tensor_parallel"): "float8 makes new layers, which would lose their cut weights and hooks",
        ("tensor_parallel", "activation_checkpoint"): "what backward computes again must hold tp's collectives",
        ("activation_checkpoint", "compile"): "per_op finds no operators to choose from in a compiled block",
        ("compile", "fsdp"): "FSDP gathers around the graph; inside of it its hooks would break it into pieces",
        ("fsdp", "materialize"): "the whole model would be in the memory of each rank, and FSDP would cut it only then",
        ("materialize", "optimizer"): "AdamW would hold parameters without values, and update those that nobody uses",
    }
    names = list(dict.fromkeys(name for pair in before for name in pair))
    if not isinstance(answer, list | tuple):
        return f"this should be a list of {len(names)} names, and is {_kind(answer)}"
    if sorted(map(str, answer)) != sorted(names):
        missing = [name for name in names if name not in answer]
        return (
            f"each of {', '.join(names)} once; missing: {', '.join(missing) or 'nothing, but something is there twice'}"
        )
    for (first, then), why in before.items():
        if answer.index(first) > answer.index(then):
            return f"{then} before {first}: {why}"
    return Right("each finds what it needs")


@exercise(
    "19.norm", hint="every piece once: of the ranks that hold copies of it, count only the one at 0 on those axes"
)
def _(answer):
    cases = {  # rank -> where it is, and name -> (sum of squares, axes that cut it); pp cuts by having other names
        "tp 2": [
            ({"tp": 0}, {"wq": (9.0, ("tp",)), "norm": (4.0, ())}),
            ({"tp": 1}, {"wq": (3.0, ("tp",)), "norm": (4.0, ())}),
        ],
        "pp 2 × dp_shard 2": [
            ({"pp": pp, "dp_shard": dp}, {f"layers.{pp}": (1.0 + 5 * pp + 2 * dp, ("dp_shard",))})
            for pp in (0, 1)
            for dp in (0, 1)
        ],
        "dp_replicate 2 × dp_shard 2 × tp 2": [
            (
                {"dp_replicate": r, "dp_shard": dp, "tp": tp},
                {"wq": (2.0 + dp + 3 * tp, ("dp_shard", "tp")), "norm": (0.5 + dp, ("dp_shard",))},
            )
            for r in (0, 1)
            for dp in (0, 1)
            for tp in (0, 1)
        ],
    }
    for name, ranks in cases.items():
        squares = [
            [
                (s, all(i == 0 for axis, i in at.items() if axis != "pp" and axis not in cut))
                for s, cut in parts.values()
            ]
            for at, parts in ranks
        ]
        right = math.sqrt(sum(s for rank in squares for s, counts in rank if counts))
        found = ask(answer, [(dict(at), dict(parts)) for at, parts in ranks])
        said = compare(found, right)
        if isinstance(said, Right):
            continue
        local = [math.sqrt(sum(s for s, _ in rank)) for rank in squares]
        near = {
            "copies are counted, once for each rank that holds one": math.sqrt(sum(norm**2 for norm in local)),
            "this adds norms; their squares add": sum(local),
            "this is rank 0's own norm, and each rank would clip by another": local[0],
            "this is the square of the norm": right**2,
            "this is the first stage's norm only": math.sqrt(
                sum(s for (at, _), rank in zip(ranks, squares, strict=True) for s, c in rank if c and not at.get("pp"))
            ),
        }
        why = next((text for text, value in near.items() if isinstance(compare(found, value), Right)), said)
        return f"{name}: the norm is {right:.4f}, not {_short(found)}; {why}"
    return Right(f"{len(cases)} layouts")


# === 20 plan a cluster =========================================================================================


@exercise("20.least_gpus", hint="16 bytes a parameter / n <= share · capacity, and n = 1, 2, 4, 8, ..")
def _(answer):
    for n_parameters, capacity, share in (
        (8_030_261_248, 80e9, 0.5),
        (405_853_388_800, 80e9, 0.5),
        (70_553_706_496, 96e9, 0.25),
        (10**9, 80e9, 0.5),
    ):
        n = 1
        while 16 * n_parameters > n * share * capacity:
            n *= 2
        found = ask(answer, n_parameters, capacity, share)
        if found == n:
            continue
        asked = f"{n_parameters / 1e9:.1f}e9 parameters, {share:.0%} of {capacity / 1e9:.0f} GB"
        weights = 1
        while 2 * n_parameters > weights * share * capacity:
            weights *= 2
        if found == weights:
            why = (
                "this counts the bf16 weights alone; their gradients and AdamW's averages, in float32, come to 16 bytes"
            )
        elif found == max(1, math.ceil(16 * n_parameters / (share * capacity))):
            why = "enough, but no power of 2"
        elif isinstance(found, int | float) and 0 < found < n:
            each = 16 * n_parameters / found / 1e9
            why = f"of {_short(found)} each would hold {each:.1f} GB, and {share:.0%} of {capacity / 1e9:.0f} are {share * capacity / 1e9:.0f}"
        else:
            why = f"of {n} each holds {16 * n_parameters / n / 1e9:.1f} GB, and that is little enough"
        return f"{asked}: {n}, not {_short(found)}; {why}"
    return Right("8B fits 4 GPUs, 405B wants 256")


@exercise("20.hidden", hint="gather: 2 P (n-1)/n bytes over the link; forward: 2 P N flops at the rate that is reached")
def _(answer):
    for n, flops, link in ((8, 5e14, 300e9), (64, 5e14, 40e9), (512, 8e14, 25e9)):
        right = (n - 1) / n * flops / link
        found = ask(answer, n, flops, link)
        if not isinstance(found, (int, float)) or isinstance(found, bool):
            return f"a number of tokens is asked for, not {_short(found)}"
        if abs(found / right - 1) > 1e-2:
            near = {
                "backward has twice the flops, but gathers again: what must be hidden here is forward's": right / 2,
                "a rank has its own share already: (n-1)/n travels": right * n / (n - 1),
                "a parameter is 2 bytes in bf16, and costs a token 2 flops in forward": right * 2,
            }
            said = next((text for text, value in near.items() if abs(found / value - 1) < 1e-3), "set the times equal")
            return f"n {n}, {flops:.0e} flops/s, {link / 1e9:.0f} GB/s: {right:,.0f} tokens, not {found:,.0f}; {said}"
    return Right("8 GPUs on NVLink: 1,458 tokens; 64 over the network: 12,305")


@exercise("20.choose", hint="drop what does not fit; of the rest the most tokens a second")
def _(answer):
    layouts = {
        "dp": {"peak": 120.0, "tokens": 100, "seconds": 0.5},
        "dp × tp": {"peak": 70.0, "tokens": 100, "seconds": 0.8},
        "dp × pp": {"peak": 60.0, "tokens": 300, "seconds": 2.0},
        "dp × tp × pp": {"peak": 30.0, "tokens": 20, "seconds": 0.3},
    }
    for capacity, right in ((80.0, "dp × pp"), (200.0, "dp"), (40.0, "dp × tp × pp"), (70.0, "dp × pp")):
        found = ask(answer, {name: dict(layout) for name, layout in layouts.items()}, capacity)
        if found == right:
            continue
        if found in layouts and layouts[found]["peak"] > capacity:
            why = f"it needs {layouts[found]['peak']:.0f} and does not fit"
        elif found == "dp × tp × pp":
            why = "the shortest step is not the fastest layout: it does fewer tokens"
        elif found in layouts:
            why = f"{right} does more tokens a second"
        else:
            why = "the name of a layout is asked for"
        return f"capacity {capacity:.0f}: {right}, not {_short(found)}; {why}"
    return Right("4 capacities")


# === 21 lift it ================================================================================================


@exercise("21.needs", hint="ast.walk sees imports inside functions too; sys.stdlib_module_names knows what is Python's")
def _(answer):
    cases = {
        "import os.path\nimport torch.nn.functional as F": [],
        "import numpy as np\nfrom torch import nn\nfrom torchao.float8 import x": ["numpy", "torchao"],
        'TEXT = """\nimport nothing\n"""\ndef f():\n    from torchft.coordination import L\n    return L': ["torchft"],
        "from . import fsdp\nfrom .model import Transformer": ["."],
        "import json, einops, yaml\nfrom minititan.fsdp import apply_fsdp": ["einops", "minititan", "yaml"],
    }
    for source, right in cases.items():
        found = ask(answer, source)
        if not isinstance(found, list | tuple | set):
            return f"a sorted list of names is asked for, not {_short(found)}"
        if list(found) == right:
            continue
        said = f"{source!r} needs {right}, not {_short(found)}"
        if not set(map(type, found)) <= {str}:
            return said
        whole = {name.partition(".")[0] for name in found}
        if "nothing" in found:
            return f"{said}: that line is text in a string; parse the file, do not read its lines"
        if any("." in name.strip(".") for name in found) and whole == set(right):
            return f"{said}: the package is wanted, the part before the first dot"
        if {"os", "json", "torch"} & whole:
            return f"{said}: torch and what Python brings along are there anyway"
        if right == ["."]:
            return f"{said}: a relative import (node.level above 0) needs the package that it was written in"
        if right == ["torchft"]:
            return f"{said}: an import inside a function counts, it only comes later"
        if set(found) == set(right):
            return f"{said}: sorted, please"
        return said
    return Right(f"{len(cases)} files")


@exercise(
    "21.order", hint="who replaces modules comes before who wraps them; who replaces parameters before who lists them"
)
def _(answer):
    order = "float8", "tensor_parallel", "activation_checkpoint", "compile", "fsdp", "materialize", "optimizer"
    because = {
        (
            "materialize",
            "optimizer",
        ): "materialize makes new parameters, and the optimizer would go on with the old ones",
        ("fsdp", "optimizer"): "FSDP makes new parameters, and the optimizer would go on with the old ones",
        ("tensor_parallel", "fsdp"): "FSDP cuts what tensor parallel has left of a matrix, and must come after it",
        ("float8", "tensor_parallel"): "float8 replaces the linears that tensor parallel then cuts",
        ("activation_checkpoint", "compile"): "compile must see the checkpoint, to recompute inside of its graph",
        ("compile", "fsdp"): "FSDP's gathers are hooks around a block, outside of its graph",
        ("fsdp", "materialize"): "materialized before, a rank holds the whole model for a moment",
    }
    for given in (order[::-1], ("optimizer", "fsdp", "tensor_parallel"), ("compile", "materialize", "float8", "fsdp")):
        found = ask(answer, list(given))
        if not isinstance(found, list | tuple):
            return f"a list of names in order is asked for, not {_short(found)}"
        found, right = list(found), [name for name in order if name in given]
        if found == right:
            continue
        if sorted(map(str, found)) != sorted(right):
            return f"of {list(given)}: each of them once, not {_short(found)}"
        for (first, then), why in because.items():
            if {first, then} <= set(found) and found.index(first) > found.index(then):
                return f"{then} before {first}: {why}"
        return f"{right}, not {found}"
    return Right("7 techniques in order, and two choices of them")


@exercise("21.names", hint="DDP puts `module.` before the whole name, once; the other two stand wherever they wrapped")
def _(answer):
    cases = [
        (("layers.0.wq.weight", False), "layers.0.wq.weight"),
        (("module.layers.0.wq.weight", True), "layers.0.wq.weight"),
        (("_orig_mod.layers.0._checkpoint_wrapped_module.wq.weight", False), "layers.0.wq.weight"),
        (("module.layers.3._checkpoint_wrapped_module._orig_mod.wq.weight", True), "layers.3.wq.weight"),
        (("vision.module.weight", False), "vision.module.weight"),
        (("module.vision.module._orig_mod.weight", True), "vision.module.weight"),
        (("module.weight", False), "module.weight"),
        (("module.module.weight", True), "module.weight"),
    ]
    for (name, ddp), right in cases:
        found = ask(answer, name, ddp)
        if found == right:
            continue
        said = f"{name!r}, {'with' if ddp else 'without'} DDP: {right!r}, not {_short(found)}"
        if isinstance(found, str) and found.count("module.") < right.count("module."):
            return f"{said}; the model has a part that is called module itself"
        if isinstance(found, str) and ("_orig_mod" in found or "_checkpoint_wrapped_module" in found):
            return f"{said}; compile and activation checkpointing wrap parts too, in the middle of a name"
        return said
    return Right(f"{len(cases)} names")
