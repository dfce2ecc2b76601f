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


def on_ranks(*args: Any, expected: Sequence, tolerance: float = 1e-9, timeout: float = 30.0) -> Judge:
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
    if not got.any():
        return "all zero" if not scalar else "it is zero"
    if (factor := _factor(got, want, slack)) is not None:
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


def _says_not_implemented(error: BaseException) -> bool:
    inner = getattr(error, "exception", None)  # a RankError carries the rank's own
    return isinstance(error, NotSolvedYet | NotImplementedError) or (
        isinstance(inner, NotSolvedYet | NotImplementedError) or "NotImplementedError" in str(error).split("\n")[0]
    )


def _what_raised(error: Exception, answer: Any) -> str:
    code = getattr(answer, "__code__", None)
    frames = traceback.extract_tb(error.__traceback__)
    line = next((f.lineno for f in reversed(frames) if code and f.filename == code.co_filename), None)
    place = f" in line {line - code.co_firstlineno + 1} of your function" if line else ""
    return f"{type(error).__name__}{place}: {error}"


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
    results = launch(on_rank, ranks=3, device="cpu", timeout=30)
    if any(_is_stub(r) for r in results):
        raise NotSolvedYet
    of_means = sum(one.mean() for one in losses) / 3
    if all(_as_tensor(r) is not None and abs(float(r) - of_means) < 1e-9 for r in results):
        return "that is the mean of the ranks' means: a rank with one token weighs as much as one with three"
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

    results = launch(on_rank, ranks=4, device="cpu", timeout=30)
    if any(_is_stub(chunk) for chunk, _ in results):
        raise NotSolvedYet
    total = sum(given(rank) for rank in range(4))
    said = compare([chunk for chunk, _ in results], list(total.chunk(4)))
    if not isinstance(said, Right):
        return said
    sent = traffic([events for _, events in results]).total / 4
    least = 3 / 4 * 12 * 8
    if sent > least:
        return f"right, but each rank sends {sent:.0f} bytes; {least:.0f} are enough"
    return Right(f"right, with {sent:.0f} bytes sent by each rank, the fewest possible")


# === 01 mesh and DTensor =======================================================================================


exercise(
    "01.group_of",
    on_calls(
        [
            ((5, 0, (2, 4)), [1, 5]),
            ((5, 1, (2, 4)), [4, 5, 6, 7]),
            ((6, 1, (2, 2, 2)), [4, 6]),
            ((0, 0, (3, 5)), [0, 5, 10]),
            ((17, 1, (2, 3, 4)), [13, 17, 21]),
            ((3, 1, (4, 1)), [3]),
        ]
    ),
    hint="along an axis, neighbours are as many ranks apart as all later axes have together",
)


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
    if isinstance(answer, Mapping) and any(value is ... for value in answer.values()):
        raise NotSolvedYet
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

    results = launch(on_rank, ranks=4, device="cpu", timeout=30)
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
    return compare(answer, shards + whole, 0.01)


@exercise("02.seed_from", hint="Python salts hash() anew in every process; hashlib does not")
def _(answer):
    from minititan.lab.launch import launch

    names = [f"layers.{i}.attention.w{x}.weight" for i in range(20) for x in "qkvo"]
    asked = [(name, seed) for name in names for seed in (0, 1)]
    here = [ask(answer, *one) for one in asked]
    there = launch(lambda: [answer(*one) for one in asked], ranks=1, device="cpu", timeout=30)[0]
    if wrong := next((v for v in here if not isinstance(v, int) or not 0 <= v < 2**63), None):
        return f"an integer in [0, 2**63) is asked for, not {_short(wrong)}"
    if here != there:
        return f"two processes disagree about {asked[0]}: {_short(here[0])} here and {_short(there[0])} there"
    if len(set(here)) < len(here):
        return f"{len(here) - len(set(here))} of {len(here)} pairs of a name and a seed share their value with another"
    return Right(f"{len(here)} values, all different, the same in two processes")


exercise(
    "02.my_rows",
    on_calls(
        [
            ((16, 0, 0, 2, 2), (0, 4)),
            ((16, 1, 0, 2, 2), (4, 8)),
            ((16, 0, 1, 2, 2), (8, 12)),
            ((64, 3, 1, 4, 2), (56, 64)),
        ]
    ),
    hint="TP cuts first: which block does tp own? then fsdp's part of that block",
)

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

    gradients = launch(on_rank, ranks=3, device="cpu", timeout=30)
    if any(g is None for g in gradients):
        raise NotSolvedYet
    tokens = [torch.arange(1.0, 2.0 + rank, dtype=torch.float64) * 10**rank for rank in range(3)]
    truth = torch.cat(tokens).mean().item()
    got = sum(g.item() for g in gradients) / 3
    if math.isclose(got, sum(t.mean().item() for t in tokens) / 3):
        return "that is the mean of the ranks' means: a rank with one token weighs as much as one with three"
    if math.isclose(3 * got, truth):
        return "a third of what it should be: data parallel divides by the 3 ranks, so multiply by them"
    return compare(got, truth)


exercise(
    "03.buckets",
    on_calls(
        [
            (([4, 4, 4], 8), [[2, 1], [0]]),
            (([4, 4, 4, 4], 8), [[3, 2], [1, 0]]),
            (([100, 1, 1, 1], 2), [[3, 2], [1, 0]]),
            (([5, 1, 9], 1), [[2], [1], [0]]),
            (([1, 2, 3], 100), [[2, 1, 0]]),
        ]
    ),
    hint="walk backwards; close the bucket after the parameter that makes it full; do not lose the rest",
)

exercise(
    "03.tokens_to_hide",
    on_calls([((400e12, 50e9, 4, 2), 8_000.0), ((400e12, 50e9, 2, 2), 4_000.0), ((1e15, 400e9, 4, 8), 4_375.0)]),
    hint="4 t / flops seconds a parameter on one side; 2 (n-1)/n of `width` bytes over `bandwidth` on the other",
)

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

exercise(
    "04.peak",
    on_calls(
        [
            ((1_000_000, 0, 0, 8), 2_000_000.0),
            ((1_000_000, 100_000, 0, 1_000_000), 16.0 + 800_000),
            ((8e9, 1e9, 2e8, 64), 16 * 8e9 / 64 + 8 * 1e9 + 8 * 2e8),
        ]
    ),
    hint="16 bytes a parameter are cut n ways; 4 bytes a parameter for each whole copy of the root's and the block's",
)


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

    results = launch(on_rank, ranks=4, device="cpu", timeout=30)
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
    on_calls([((16, 1, 1), 4), ((36, 1, 1), 6), ((32, 1, 20), 1), ((64, 16, 1), 32), ((12, 3, 1), 6)]),
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
        ask(apply, run, x).square().sum().backward()
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


@exercise("05.keep", hint="itertools.combinations of every length; among those that fit, the most flops")
def _(answer):
    lists = [
        ([("wq", 4, 16), ("wk", 1, 4), ("w1", 11, 44), ("w2", 4, 44)], 9),
        ([("a", 5, 10), ("b", 4, 40), ("c", 6, 30), ("d", 4, 50)], 10),
        ([("a", 6, 60), ("b", 5, 45), ("c", 5, 45)], 10),  # the best for its size first is not best
        ([("a", 3, 1)], 2),
    ]
    for ops, room in lists:
        kept = ask(answer, ops, room)
        names = {name for name, _, _ in ops}
        if not isinstance(kept, set | frozenset | list | tuple) or not set(kept) <= names:
            return f"a set of names out of {sorted(names)} is asked for, not {_short(kept)}"
        size = sum(size for name, size, _ in ops if name in kept)
        saved = sum(flops for name, _, flops in ops if name in kept)
        best = 0
        for chosen in range(2 ** len(ops)):
            some = [op for i, op in enumerate(ops) if chosen >> i & 1]
            if sum(size for _, size, _ in some) <= room:
                best = max(best, sum(flops for _, _, flops in some))
        if size > room:
            return f"{sorted(kept)} takes {size}, more than the room of {room}"
        if saved < best:
            return f"{sorted(kept)} spares {saved} flops in a room of {room}; {best} are possible"
    return Right(f"{len(lists)} of {len(lists)} lists, as good as can be")


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

    results = launch(on_rank, ranks=4, device="cpu", timeout=30)
    if any(r is None for r in results):
        raise NotSolvedYet
    x, w, bias = given()
    truth = x @ w.T + bias
    if isinstance(compare(results[0][0], x @ w.T + 4 * bias), Right):
        return "the bias arrives 4 times: every rank added it before the sum"
    said = compare([y for y, _ in results], [truth] * 4)
    if not isinstance(said, Right):
        return f"the output: {said}"
    for rank, (_, grad) in enumerate(results):
        said = "missing" if grad is None else compare(grad, torch.full((5,), 6.0))
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

    results = launch(on_rank, ranks=4, device="cpu", timeout=30)
    if any(_is_stub(tokens) for tokens, _ in results):
        raise NotSolvedYet
    said = compare([tokens for tokens, _ in results], [given().argmax(-1)] * 4)
    if not isinstance(said, Right):
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

    results = launch(on_rank, ranks=4, device="cpu", timeout=30)
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

    results = launch(on_rank, ranks=4, device="cpu", timeout=30)
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

exercise(
    "08.longest_hop",
    on_calls([((4, 0.03, 0.625), 0.04), ((4, 0.03, 0.75), 0.08), ((2, 1.0, 0.8), 3.0), ((4, 0.03, 0.5), 0.0)]),
    hint="beyond the best point h > m: solve m + (n-1) h = ratio (n m + (n-1) h) for h; the best ratio is n / (2n-1)",
)


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

    results = launch(on_rank, ranks=4, device="cpu", timeout=30)
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
    for p, bubble, m in ((4, 1 / 4, 9), (8, 1 / 8, 49), (16, 1 / 16, 225), (4, 1 / 2, 4), (2, 1 / 2, 2)):
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
    from minititan.lab.launch import launch
    from minititan.lab.trace import recording

    def given(rank):
        return torch.arange(12.0, dtype=torch.float64).view(4, 3) * (1 if rank == 0 else 10)

    def on_rank():
        import torch.distributed as dist

        rank, n = dist.get_rank(), dist.get_world_size()
        with recording() as events:
            out = answer(given(rank) if rank in (0, n - 1) else None)
        return out, sum(e.n_bytes for e in events if e.lane == "communication" and e.name != "recv")

    results = launch(on_rank, ranks=4, device="cpu", timeout=20)
    if all(out is None for out, _ in results):
        raise NotSolvedYet
    ends = {"the first": results[0][0], "the last": results[3][0]}
    for name, got in ends.items():
        if got is None:
            return f"{name} rank got nothing"
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


exercise(
    "10.idle",
    on_calls(
        [((4, 1, 1, 1), 3.0), ((4, 1, 1, 0.5), 4.5), ((2, 2, 1, 1), 2.0), ((8, 1, 2, 3), 14.0), ((4, 1, 1, 2), 3.0)]
    ),
    hint="the last rank starts (p-1) F late, and meanwhile only W can be moved there; no W hides the way back of I",
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
    from minititan.lab.launch import launch
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

    results = launch(on_rank, ranks=4, device="cpu", timeout=30)
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
        if found != expected and not (name.startswith("both") and (found is None or found is ...)):
            return f"{name}: {expected} is right, not {_short(found)}{why.get(name, '')}"
        if found != expected:
            raise NotImplementedError
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
            said = ": a failure comes in the middle of an interval, on average" if abs(found[1] - whole) < 1e-6 else ""
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
        else:
            why = f"{_short(found)} GPUs hold {16 * n_parameters / n / 1e9:.1f} GB each if they are {n}"
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
