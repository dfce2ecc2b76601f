"""lab.exercises: right, wrong in words, not solved yet; never an exception but for an unknown name."""

import pytest
import torch
import torch.distributed as dist

from minititan.lab import exercises
from minititan.lab.exercises import (
    Right,
    Verdict,
    ask,
    check,
    close,
    compare,
    equals,
    exercise,
    on_calls,
    on_ranks,
)


@pytest.fixture
def judged(monkeypatch):
    """judged(judge)(answer) -> Verdict, in a registry of its own."""
    monkeypatch.setattr(exercises, "EXERCISES", {})

    def register(judge, hint="think"):
        exercise("99.name", judge, hint=hint)
        return lambda answer: check("99.name", answer)

    return register


def stub(*args):
    pass


def stub_with_dots(*args): ...


def stub_with_a_docstring(*args):
    """Says what to do."""


def stub_with_a_hole(*args):
    left = ...
    return left, 1


def stub_that_raises(*args):
    raise NotImplementedError("your turn")


# --- stubs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [
        None,
        ...,
        NotImplemented,
        NotImplementedError,
        stub,
        stub_with_dots,
        stub_with_a_docstring,
        stub_with_a_hole,
        stub_that_raises,
    ],
)
def test_a_stub_is_not_solved_yet_and_gets_the_hint(judged, answer):
    verdict = judged(on_calls([((0, 4), (3, 1))]))(answer)
    assert verdict.status == "not solved yet" and not verdict.solved and not verdict
    assert repr(verdict) == "○ 99.name: not solved yet. Hint: think"
    assert "Hint: think" in verdict._repr_html_()


def test_a_function_that_returns_a_constant_is_an_answer(judged):
    assert judged(on_calls([(0, 3)]))(lambda x: 3).solved
    assert judged_wrong(on_calls([(0, 3)]), lambda x: 0) == "<lambda>(0): it is zero"


def test_a_stub_in_a_judge_of_ones_own(judged):
    assert judged(lambda answer: None if ask(answer, 1) == 2 else "no")(stub).status == "not solved yet"


# --- verdicts --------------------------------------------------------------------------------------------------


def test_right_answers_say_the_number(judged):
    assert repr(judged(close(12))(12)) == "✓ 99.name: solved. it is 12"
    assert judged_message(close(torch.ones(3)), torch.ones(3).double() + 1e-12).startswith(
        "largest relative error 1.0e-12"
    )
    assert judged_message(equals([1, 2]), [1, 2]) == "exactly"
    assert judged_message(equals("S(0)"), "S(0)") == "it is 'S(0)'"
    assert judged_message(on_calls([(1, 2), (2, 3)]), lambda x: x + 1) == "2 of 2 calls right"


def judged_message(judge, answer) -> str:
    said = judge(answer)
    assert isinstance(said, Right), said
    return said


M = torch.arange(6.0).view(2, 3)


@pytest.mark.parametrize(
    ("expected", "answer", "words"),
    [
        (M, M.T, "transposed: the shape is (3, 2), expected (2, 3)"),
        (M, M[:1], "the shape is (1, 3), expected (2, 3)"),
        (M, 4 * M, "4 times too large (a sum where a mean is wanted?)"),
        (M, M / 8, "8 times too small (divided once too often, or one part of a sum?)"),
        (M, 1.5 * M, "1.5 times too large (a sum where a mean is wanted?)"),
        (M, -M, "the sign is wrong"),
        (M, -2 * M, "2 times too large and of the wrong sign (a sum where a mean is wanted?)"),
        (M, 0 * M, "all zero"),
        (M, M * float("nan"), "6 of 6 values are nan"),
        (M, M.flip(0), "the right values in another order"),
        (M, M + torch.tensor([[0, 0, 0], [0, 5, 0]]), "1 of 6 values differ, most at (1, 1): got 9, expected 4"),
        (M, "six", "this should be a tensor of shape (2, 3), and is a text"),
        (torch.tensor([[1.0, 2], [3, 4]]), torch.tensor([[1.0, 3], [2, 4]]), "transposed"),
        (torch.tensor([1.0, 2, 3, 4]), torch.tensor([2.0, 3, 4, 1]), "shifted by one: entry 0 holds what belongs to entry 1 (off by a rank?)"),
        (torch.tensor([1.0, 2, 3, 4]), torch.tensor([4.0, 1, 2, 3]), "shifted by one: entry 0 holds what belongs to entry 3 (off by a rank?)"),
        (12, 48, "4 times too large"),
        (12, 3, "4 times too small"),
        (12, 13, "off by one: got 13"),
        (12, 17.5, "too large: got 17.5"),
        (12, 0, "it is zero"),
        (12, float("nan"), "it is nan"),
        (12, torch.ones(2), "the shape is (2,), expected that of a single number"),
        (12, len, "this should be a number, and is a function"),
        ("S(0)", "S(1)", "got 'S(1)'"),
        (True, 1, "got 1"),
        ({"a": 1, "b": 2}, {"a": 1, "c": 3}, "missing: 'b'; not asked for: 'c'"),
        ({"a": 1, "b": 2}, {"a": 1, "b": 3}, "'b': off by one: got 3"),
        ({"a": 1}, [1], "this should be a dict, and is a list"),
        ([M, 2 * M, 3 * M], [2 * M, 3 * M, M], "shifted by one: entry 0 holds what belongs to entry 1 (off by a rank?)"),
        ([M, 2 * M, 3 * M], [M, M, 3 * M], "entry 1: 2 times too small (divided once too often, or one part of a sum?)"),
        ([M, M], [M], "this should have 2 entries, and has 1"),
        (["a", "b"], "ab", "this should be a list of 2, and is a text"),
        ([[3, 2], [1, 0]], [[3, 2, 1], [0]], "got [[3, 2, 1], [0]], expected [[3, 2], [1, 0]]"),
        ((0, 3), (0, 0), "1 of 2 values differ, most at 1: got 0, expected 3"),
        ((10, 0), (12, 0), "1 of 2 values differ, most at 0: got 12, expected 10"),
    ],
)  # fmt: skip
def test_wrong_answers_are_told_in_words(expected, answer, words):
    said = compare(answer, expected)
    assert said == words and not isinstance(said, Right)


def test_numbers_may_come_as_tensors_lists_or_numbers():
    for answer in (M, M.tolist(), M.double(), M.requires_grad_().clone(), M.detach().numpy()):
        assert isinstance(compare(answer, M), Right)
    assert isinstance(compare(torch.tensor(12), 12), Right) and isinstance(compare((3, 1), (3, 1)), Right)
    assert isinstance(compare([], []), Right) and isinstance(compare(torch.zeros(2), torch.zeros(2)), Right)
    assert not isinstance(compare(torch.full((2,), 1e-3), torch.zeros(2)), Right), "zero is not near to a small number"


def test_tolerance_is_relative_to_the_largest_magnitude():
    expected = torch.tensor([1e6, 1.0])
    assert isinstance(compare(expected + torch.tensor([0.0, 0.5]), expected, 1e-6), Right)
    assert not isinstance(compare(expected + torch.tensor([0.0, 5.0]), expected, 1e-6), Right)


def test_a_function_that_fails_is_told_with_its_line(judged):
    def broken(a, b):
        c = a + b
        return c / 0

    verdict = judged(on_calls([((0, 4), 1)]))(broken)
    assert verdict.status == "wrong"
    assert verdict.message == "ZeroDivisionError in line 3 of your function: division by zero"


def test_a_wrong_call_is_shown(judged):
    def neighbours(rank, n):
        return rank - 1, rank + 1

    verdict = judged(on_calls([((1, 4), (0, 2)), ((0, 4), (3, 1))]))(neighbours)
    assert verdict.message.startswith("neighbours(0, 4): 1 of 2 values differ, most at 0: got -1, expected 3")
    assert "should be a function, and is a number" in judged_wrong(on_calls([(1, 2)]), 3)


def judged_wrong(judge, answer) -> str:
    said = judge(answer)
    assert said is not None and not isinstance(said, Right)
    return said


def test_a_judge_that_breaks_on_an_answer_does_not_raise(judged):
    verdict = judged(lambda answer: answer.nothing)(3)
    assert verdict.status == "wrong" and "AttributeError" in verdict.message


def test_html_is_escaped():
    page = Verdict("99.x", "wrong", "<script>", "")._repr_html_()
    assert "<script>" not in page and "&lt;script&gt;" in page


# --- on ranks --------------------------------------------------------------------------------------------------


def test_on_ranks_runs_the_answer_on_real_ranks(judged):
    def right(k):
        return dist.get_rank() * k

    def shifted(k):
        return (dist.get_rank() + 1) % dist.get_world_size() * k

    def unsolved(k):
        raise NotImplementedError

    def broken(k):
        raise KeyError("oops")

    verdict = judged(on_ranks(3, expected=[0, 3, 6]))
    assert verdict(right).solved
    assert "shifted by one" in verdict(shifted).message
    assert verdict(unsolved).status == verdict(stub).status == "not solved yet"
    assert verdict(broken).status == "wrong" and "KeyError: 'oops'" in verdict(broken).message
    assert "should be a function" in verdict(3).message


# --- 03, a bug on one of four ranks -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((2, "share"), None),
        ((3, "gradient"), "still 16% off. Of gradient: it is that of the rank's rows"),
        ((2, "weight"), "the cause lies before the all-reduce"),
        ((2,), "two things are asked for"),
    ],
)
def test_03_runs_the_step_again_with_what_is_blamed_made_right(answer, words):
    verdict = check("03.which_rank", answer)
    assert verdict.solved if words is None else verdict.status == "wrong" and words in verdict.message, verdict
    assert check("03.which_rank", (..., ...)).status == "not solved yet"


# --- 10, in slots -----------------------------------------------------------------------------------------------


def test_10_takes_the_bubble_from_the_order_in_which_a_plan_ran():
    from minititan.pipeline_parallel import actions, idle_share, peak_activations, simulate

    for schedule, v in (
        ("1f1b", 1),
        ("interleaved_1f1b", 2),
        ("interleaved_zero_bubble", 2),
        ("zbv", 2),
        ("dualpipev", 2),
    ):
        rows = actions(schedule, 4, 8, v)
        planned = simulate(rows)
        bubble, held = exercises._replay(rows)
        assert bubble == pytest.approx(idle_share(planned)) and held == max(peak_activations(planned)) / v, schedule
    with pytest.raises(ValueError, match="wait for each other"):
        exercises._replay([row[::-1] for row in rows])


# --- words ------------------------------------------------------------------------------------------------------


def test_a_function_that_does_something_and_returns_nothing_is_told_so(judged):
    def forgetful(rank, n):
        left, right = rank - 1, rank + 1  # noqa: F841

    verdict = judged(on_calls([((1, 4), (0, 2))]))(forgetful)
    assert verdict.status == "wrong" and "is a `return` missing?" in verdict.message


def test_a_failure_outside_of_the_function_is_told_with_its_line_in_the_cell(judged):
    def inner():
        return None + 1

    def outer(rank, n):
        return inner()

    message = judged(on_calls([((1, 4), (0, 2))]))(outer).message
    assert f"in line {inner.__code__.co_firstlineno + 1} of its cell, in inner" in message


# --- 14 ----------------------------------------------------------------------------------------------------------


def _guards_by_values(module, args):
    return tuple((p.shape, p.dtype, p.sum().item()) for p in module.parameters())


def _guards_of_shapes(module, args):
    return type(module), tuple(t.shape for t in (*module.parameters(), *args))


def _guards_in_lists(module, args):
    return [t.shape for t in (*module.parameters(), *args)]


def _guards(module, args):
    tensors = tuple((t.shape, t.dtype, t.requires_grad) for t in (*module.parameters(), *args))
    return type(module), tensors, module.scale, module.training, torch.is_grad_enabled()


@pytest.mark.parametrize(
    ("name", "answer", "words"),
    [
        ("14.guards", _guards, None),
        ("14.guards", _guards_by_values, "32 layers, 32 graphs"),
        ("14.guards", _guards_of_shapes, "7 of 10 guards are missing: the dtype of an input"),
        ("14.guards", _guards_in_lists, "make tuples of the lists"),
        ("14.graphs", lambda n: 1 + (1 in n[1:] and n[0] != 1) + any(k not in (1, n[0]) for k in n[1:]), None),
        ("14.graphs", lambda n: len(set(n)), "[16, 8, 12, 10, 8]: a graph for each length is what dynamic=False does"),
        ("14.graphs", lambda n: min(2, len(set(n))), "[16, 8, 12, 1, 10]: a length of 1 is never a variable"),
        ("14.graphs", lambda n: len(set(n)) - 1, "[16]: the first graph counts too"),
    ],
)
def test_14(name, answer, words):
    verdict = check(name, answer)
    assert verdict.solved if words is None else verdict.status == "wrong" and words in verdict.message, verdict


class _Numbered(torch.nn.Module):
    def __init__(self, number, how):
        super().__init__()
        self.linear, value = torch.nn.Linear(8, 8), torch.tensor(1.0 / number)
        if how in ("int", "float"):
            self.number = number if how == "int" else float(number)
        elif how == "parameter":
            self.scale = torch.nn.Parameter(value)
        else:
            self.register_buffer("scale", value, persistent=how == "buffer")

    def forward(self, x):
        y = self.linear(x)
        return x + (y / self.number if hasattr(self, "number") else y * self.scale)


@pytest.mark.filterwarnings("ignore")  # the compiler uses what torch has deprecated
def test_14_numbered():
    ways = ("int", "float", "parameter", "buffer", "")
    told = {how: check("14.numbered", lambda n, how=how: _Numbered(n, how)) for how in ways}
    assert told[""].solved, told[""]
    assert "4 blocks, 4 graphs: an int that forward reads is a guard" in told["int"].message
    assert "4 blocks, 2 graphs: a float becomes a variable" in told["float"].message
    assert "'scale' besides linear.weight and linear.bias: it would be trained" in told["parameter"].message
    assert "would be missing in old checkpoints" in told["buffer"].message
    assert "an nn.Module, is asked for, not a number" in check("14.numbered", lambda n: n).message


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_14_graphs_is_what_torch_does():
    for lengths in ([16, 8, 12, 1, 10], [1, 8, 12, 1], [8, 1, 12, 8], [4, 1], [1, 1], [7, 7]):
        torch._dynamo.reset()
        graphs, block = [], _Numbered(1, "")
        block.compile(backend=lambda graph, inputs, graphs=graphs: graphs.append(graph) or graph.forward)
        for length in lengths:
            block(torch.ones(2, length, 8))
        assert len(graphs) == exercises._n_graphs(lengths), lengths
    torch._dynamo.reset()


# --- registry --------------------------------------------------------------------------------------------------


def test_an_unknown_name_lists_the_near_ones(judged):
    judged(close(1))
    with pytest.raises(ValueError, match=r"there is no exercise '99.nam'; near to it: 99.name"):
        check("99.nam", 1)


def test_a_name_is_taken_once_and_the_decorator_registers(judged):
    @exercise("99.other", hint="h")
    def _(answer):
        return None if answer == 1 else "no"

    assert check("99.other", 1).solved and check("99.other", 2).message == "no"
    with pytest.raises(ValueError, match=r"'99.other' exists already"):
        exercise("99.other", close(1))


def test_the_registered_exercises_are_well_formed():
    for name, entry in exercises.EXERCISES.items():
        assert name == entry.name and name[:2].isdigit() and name[2] == "." and name[3:].isidentifier(), name
        assert entry.hint, f"{name} has no hint"
        for answer in (None, stub_that_raises):
            assert check(name, answer).status == "not solved yet", name


# --- 15 checkpoints --------------------------------------------------------------------------------------------


def rectangle(saved, mine, none_if=lambda size: size <= 0, ends=False):
    offsets = tuple(map(max, saved[0], mine[0]))
    last = [min(o + s, p + t) for o, s, p, t in zip(*saved, *mine, strict=True)]
    sizes = tuple(end if ends else end - offset for offset, end in zip(offsets, last, strict=True))
    return None if any(none_if(size) for size in sizes) else (offsets, sizes)


def from_ones_corner(saved, mine):
    found = rectangle(saved, mine)
    return found and (tuple(o - p for o, p in zip(found[0], mine[0], strict=True)), found[1])


def newest(folders, by=lambda name: int(name[5:]), is_name=lambda name: name[5:].isdigit(), short=0):
    def whole(promised, found):
        return promised is not None and all(found.get(file, -1) >= size - short for file, size in promised.items())

    return max((name for name, files in folders.items() if is_name(name) and whole(*files)), key=by, default=None)


def aside(disk, name, data, *order):
    for what in order:
        {
            "write": lambda: disk.write("aside", data),
            "sync": lambda: disk.sync("aside"),
            "delete": lambda: disk.delete(name),
            "rename": lambda: disk.rename("aside", name),
        }[what]()


# --- 16 flight recorder ----------------------------------------------------------------------------------------


def first_difference(programs):
    """A solution, on which the wrong ones below are variations."""
    right = max(programs, key=programs.count)
    for rank, mine in enumerate(programs):
        if mine == right:
            continue
        at = next((i for i, (a, b) in enumerate(zip(mine, right, strict=False)) if a != b), min(len(mine), len(right)))
        if at == len(mine):
            return rank, at, "slow"
        if mine[at][0] == right[at][0]:
            return rank, at, "shape"
        if mine[at : at + 2] == right[at : at + 2][::-1]:
            return rank, at, "order"
        return rank, at, "missing"


def mean_of_all(x):
    both = torch.tensor([x.sum(), len(x)], dtype=torch.float64)
    dist.all_reduce(both)
    return both[0] / both[1]


def returns_early(x):
    return mean_of_all(x) if len(x) else torch.zeros(())


def mean_of_means(x):
    mean = x.mean() if len(x) else torch.zeros((), dtype=torch.float64)
    dist.all_reduce(mean)
    return mean / dist.get_world_size()


@pytest.mark.parametrize(
    ("name", "answer", "words"),
    [
        ("15.overlap", rectangle, None),
        ("15.overlap", lambda a, b: rectangle(a, b, none_if=lambda size: size < 0), "of no rows, or less"),
        ("15.overlap", lambda a, b: rectangle(a, b, ends=True), "those are ends, and sizes are asked for"),
        ("15.overlap", from_ones_corner, "the whole tensor's numbers are asked for"),
        ("15.overlap", lambda a, b: (tuple(map(max, a[0], b[0])), tuple(map(min, a[1], b[1]))), "no overlap where"),
        ("15.overlap", lambda a, b: 3, "two tuples, (offsets, sizes), or None"),
        ("15.newest", newest, None),
        ("15.newest", lambda f: newest(f, by=str), "compared as texts"),
        ("15.newest", lambda f: newest(f, is_name=lambda n: n[5:13].isdigit(), by=lambda n: int(n[5:13])), "not got its name"),
        ("15.newest", lambda f: newest(f, short=1), "a byte is missing"),
        ("15.newest", lambda f: max(f, default=None), "it was never finished"),
        ("15.atomic", lambda *a: aside(*a, "write", "sync", "rename"), None),
        ("15.atomic", lambda *a: aside(*a, "write", "rename"), "for lack of a sync"),
        ("15.atomic", lambda *a: aside(*a, "write", "sync", "delete", "rename"), "there is no last.pt at all"),
        ("15.atomic", lambda *a: aside(*a, "write", "sync"), "still holds the old content"),
        ("15.atomic", lambda disk, name, data: disk.write(name, data), "a kill inside write('last.pt'): last.pt holds 10 of 21"),
        ("15.atomic", lambda disk, name, data: disk.write("other.pt", data), "other.pt has changed"),
        ("15.atomic", lambda disk, name, data: disk.rename("x", name), "no file 'x' on the disk"),
    ],
)  # fmt: skip
def test_exercises_of_15_tell_what_is_wrong(name, answer, words):
    verdict = check(name, answer)
    assert verdict.solved if words is None else verdict.status == "wrong" and words in verdict.message, verdict


@pytest.mark.parametrize(
    ("name", "answer", "words"),
    [
        ("16.who", (1, "broadcast", 4, "missing"), None),
        ("16.who", (1, "all_gather", 4, "order"), "is a call before it not there?"),
        ("16.who", (1, "broadcast", 5, "slow"), "not at its end"),
        ("16.who", (2, "broadcast", 4, "missing"), "not like the other three"),
        ("16.who", 1, "four things"),
        ("16.difference", first_difference, None),
        ("16.difference", lambda p: (r := first_difference(p)) and (*r[:2], "missing"), "the other way round"),
        ("16.difference", lambda p: (r := first_difference(p)) and (r[0], len(p[r[0]]), r[2]), "not the last one made"),
        ("16.difference", lambda p: (0, 0, "slow"), "None is right"),
        ("16.everybody_calls", mean_of_all, None),
        (
            "16.everybody_calls",
            returns_early,
            "rank 2 never called all_reduce #1 (float64 [2]), in which ranks 0-1, 3 wait",
        ),
        ("16.everybody_calls", mean_of_means, "2.5 is the mean of the ranks' means"),
    ],
)
def test_flight_recorder(name, answer, words):
    verdict = check(name, answer)
    assert verdict.solved if words is None else (verdict.status == "wrong" and words in verdict.message), verdict


# --- 19 compose everything -------------------------------------------------------------------------------------


def test_19_layout_takes_every_layout_that_meets_the_limits_and_says_which_one_is_missed():
    def said(dp_shard, tp, pp, accumulate):
        return check("19.layout", {"dp_shard": dp_shard, "tp": tp, "pp": pp, "accumulate": accumulate})

    assert said(2, 2, 2, 4).solved and said(2, 2, 2, 8).solved and said(1, 2, 4, 16).solved
    for numbers, words in {
        (2, 2, 1, 4): "= 4 ranks, and there are 8",
        (2, 4, 1, 4): "cannot share 2 key/value heads",
        (1, 1, 8, 16): "cannot fill 8 stages",
        (8, 1, 1, 2): "a rank holds 1/1 of the parameters",
        (2, 2, 2, 3): "= 6 equal microbatches",
        (2, 2, 2, 2): "= 33% of the time",
        (2, 1, 4, 8): "= 27% of the time",
    }.items():
        assert words in said(*numbers).message
    assert said(2, 2, 2, ...).status == "not solved yet"
    assert check("19.layout", {"tp": 8}).status == check("19.layout", 3).status == "wrong"


def test_19_order_names_the_pair_that_is_the_wrong_way_round():
    right = ["float8", "tensor_parallel", "activation_checkpoint", "compile", "fsdp", "materialize", "optimizer"]
    assert check("19.order", right).solved and check("19.order", [...] * 7).status == "not solved yet"
    for i in range(6):
        swapped = [*right[:i], right[i + 1], right[i], *right[i + 2 :]]
        assert check("19.order", swapped).message.startswith(f"{right[i + 1]} before {right[i]}: ")
    assert "missing: optimizer" in check("19.order", right[:-1]).message
    assert "there twice" in check("19.order", [*right, "fsdp"]).message


def test_19_norm_knows_the_usual_wrong_norms():
    def norm(counts, root=True):
        def answer(ranks):
            total = sum(s for at, parts in ranks for s, cut in parts.values() if counts(at, cut))
            return total**0.5 if root else total

        return check("19.norm", answer)

    def once(at, cut):
        return all(i == 0 for axis, i in at.items() if axis != "pp" and axis not in cut)

    assert norm(once).solved
    assert "the square of the norm" in norm(once, root=False).message
    assert "copies are counted" in norm(lambda at, cut: True).message
    assert "first stage's norm only" in norm(lambda at, cut: once(at, cut) and not at.get("pp")).message
    assert "rank 0's own" in norm(lambda at, cut: not any(at.values())).message

    def sum_of_norms(ranks):
        return sum(sum(s for s, _ in parts.values()) ** 0.5 for _, parts in ranks)

    assert "their squares add" in check("19.norm", sum_of_norms).message


# --- 21, lift it -----------------------------------------------------------------------------------------------


def needs(source):
    import ast
    import sys

    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add("." if node.level else node.module.split(".")[0])
    return sorted(found - set(sys.stdlib_module_names) - {"torch"})


def needs_by_lines(source):
    found = {line.split()[1].split(".")[0] for line in source.splitlines() if line.startswith(("import ", "from "))}
    return sorted(found & {"numpy", "torchao", "nothing", "yaml"})


ORDER = ["float8", "tensor_parallel", "activation_checkpoint", "compile", "fsdp", "materialize", "optimizer"]


def own_name(name, ddp):
    name = name.removeprefix("module.") if ddp else name
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        (
            "21.needs",
            needs,
            {
                "text in a string": needs_by_lines,
                "the part before the first dot": lambda s: ["numpy", "torchao.float8"] if "numpy" in s else needs(s),
                "are there anyway": lambda s: sorted({*needs(s), "torch"}),
            },
        ),
        (
            "21.order",
            lambda given: sorted(given, key=ORDER.index),
            {
                "would go on with the old ones": lambda given: sorted(given, key=["optimizer", *ORDER].index),
                "each of them once": lambda given: ORDER,
                "must come after it": lambda given: sorted(given, key=["float8", "fsdp", *ORDER].index),
            },
        ),
        (
            "21.names",
            own_name,
            {
                "in the middle of a name": lambda name, ddp: name.removeprefix("module.") if ddp else name,
                "called module itself": lambda name, ddp: own_name(name, ddp).replace("module.", ""),
            },
        ),
    ],
)
def test_the_exercises_of_21(name, right, wrong):
    assert check(name, right).solved, check(name, right)
    for words, answer in wrong.items():
        verdict = check(name, answer)
        assert verdict.status == "wrong" and words in verdict.message, verdict
