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
