"""Every exercise both ways: its stub is unsolved, the notebook's solution solves it, two plausible mistakes do not.

A mistake is the solution with some text replaced. Exercises whose tests are in tests/test_lab_exercises.py, answer by
answer, are not repeated here.
"""

import ast
import collections
import functools
import json
import pathlib
import re

import pytest

from minititan.lab import exercises
from minititan.lab.exercises import check

HERE = pathlib.Path(__file__).parent
NOTEBOOKS = {p.name[:2]: p for p in sorted((HERE.parent / "notebooks").glob("*.ipynb"))}
ON_RANKS = {
    "00.global_mean",
    "00.reduce_scatter",
    "01.rows_to_columns",
    "02.seed_from",
    "03.share",
    "04.hsdp_reduce",
    "05.fit",
    "06.row_bias",
    "06.greedy_token",
    "07.gather_again",
    "07.log_z",
    "08.scatter",
    "09.tied",
    "10.below_ten",
    "13.gather_uneven",
}
MISTAKES = {
    "00.ring_neighbours": [("(rank - 1) % n", "rank - 1"), ("(rank - 1) % n, (rank + 1)", "(rank + 1) % n, (rank - 1)")],
    "00.global_mean": [("dist.all_reduce(total)", "pass"), ("total[0] / total[1]", "total[0]")],
    "00.reduce_scatter": [("step - 1) % n, (rank - step - 2)", "step) % n, (rank - step - 1)"), ("chunks[rank]", "x")],
    "01.group_of": [("axis + 1 :", "axis :"), ("i * stride", "i")],
    "01.algebra": [('"x * y, both P": "no"', '"x * y, both P": "P"'), ('"S(0)",\n}', '"no",\n}')],
    "01.rows_to_columns": [("torch.cat(into, 0)", "torch.cat(into, 1)"), ("torch.cat(into, 0)", "into[0]")],
    "02.peak_gb": [(" + 128_256 * 8_192", ""), (" / 64", "")],
    "02.seed_from": [('int.from_bytes(digest[:8], "little")', "hash((name, seed))"), ("{seed}/{name}", "{name}")],
    "02.my_rows": [("tp * of_tp + fsdp * of_both", "fsdp * of_tp + tp * of_both"), ("first, first +", "first,")],
    "03.share": [("dist.get_world_size() * ", ""), ("dist.all_reduce(n_tokens)", "pass")],
    "03.buckets": [("reversed(range(len(sizes)))", "range(len(sizes))"), (" + ([members] if members else [])", "")],
    "04.rows": [("min(rank * k, length)", "rank * k"), ("-(-length // n)", "length // n")],
    "04.peak": [("(4 + 4)", "4"), ("model / n", "model")],
    "04.hsdp_reduce": [("mesh.size()", "mesh.size(0)"), ("dist.all_reduce(rows, group=replicate)", "pass")],
    "05.segment": [("L / s * a + s * A", "s * A"), (" if L % s == 0", "")],
    "05.same_dice": [("torch.set_rng_state(ctx.state)", "pass"), ("torch.random.fork_rng(devices=[]), ", "")],
    "05.fit": [('"per_op")', '"full")'), ("apply_fsdp(model, mesh)", "model"), ('"per_op")', '"every_other")')],
    "06.row_bias": [("+ bias_D", "+ bias_D.detach()"), (" + bias_D", "")],
    "06.fused_gate_up": [
        ("torch.cat([w1.chunk(n)[rank], w3.chunk(n)[rank]])", "w13.chunk(n)[rank]"),
        ("w1.chunk(n)[rank], w3.chunk(n)[rank]", "w3.chunk(n)[rank], w1.chunk(n)[rank]"),
    ],
    "06.greedy_token": [(" + rank * logits_Nv.shape[1]", ""), ("values_nN.argmax", "values_nN.argmin")],
    "07.gather_again": [
        (
            "tensor_parallel._sum_and_scatter_tokens(dy_BTf @ weight_fD, None)",
            "(dy_BTf @ weight_fD).chunk(dist.get_world_size(), 1)[dist.get_rank()]",
        ),
        (", dy_BTf.flatten(0, 1).T @ x_BTD.flatten(0, 1)", ", None"),
    ],
    "07.inputs_gb": [(" / 8 / 1e9", " / 1e9"), ("* 2 / 1e9", "* 4 / 1e9")],
    "07.log_z": [("dist.all_reduce(peak_N, dist.ReduceOp.MAX)", "pass"), (".log() + peak_N", ".log()")],
    "08.chunks": [("(rank - 1 - step)", "(rank - step)"), ("(rank - step)", "(rank + step)")],
    "08.longest_hop": [("(n * ratio - 1)", "(ratio - 1)"), ("ratio < n / (2 * n - 1)", "False")],
    "08.scatter": [("total + arriving if works else total", "total"), ("(rank - 1 - step)", "(rank - step)")],
    "09.least_microbatches": [("max(p, ", "max(1, "), ("math.ceil", "math.floor")],
    "09.order": [("p - 1 - rank", "p - rank"), ("min(m, p - 1 - rank)", "m")],
    "09.tied": [("gradient + other", "other"), ("gradient + other", "(gradient + other) / 2")],
    "10.split": [("grad if weight.grad is None else weight.grad + grad", "grad"), ("ctx.later.append(weight_gradient)", "weight_gradient()")],
    "10.when": [("len(owed) > rank", "len(owed) > p"), ("out + owed", "out")],
    "10.below_ten": [('"zbv", P, M', '"interleaved_1f1b", P, M, 2'), ('"zbv"', '"dualpipev"'), ('"zbv", P, M', '"1f1b", P, 2 * M')],
    "11.merge": [
        ("(lse_nBHt - lse_nBHt.logsumexp(0)).exp()", "torch.full_like(lse_nBHt, 1 / len(lse_nBHt))"),
        (" - lse_nBHt.logsumexp(0)", ""),
    ],
    "11.places": [("2 * n - 1 - rank", "n + rank"), ("torch.cat((chunks[rank], chunks[2 * n - 1 - rank]))", "chunks[rank]")],
    "11.fewest_bytes": [("G % n == 0 and ", ""), ("(H / G + 1) / 2", "H / G")],
    "12.by_expert": [("for j in range(e) for r in range(n)", "for r in range(n) for j in range(e)"), ("r * e + j", "j * n + r")],
    "12.expert_mean": [("* tp / ep", "/ ep"), ("efsdp / (dp_shard * cp)", "1.0")],
    "12.dropped": [(".clamp(min=0)", ""), (".ceil()", ".floor()")],
    "13.decode": [("exponent - 7)", "exponent - 8)"), ("exponent == 15 and mantissa == 7", "exponent == 15")],
    "13.smooth": [(".sqrt()", ""), ("x_MK.abs().amax(0) / w_NK.abs().amax(0)", "w_NK.abs().amax(0) / x_MK.abs().amax(0)")],
    "13.gather_uneven": [("whole[:n_rows]", "whole"), ("-(-n_rows // dist.get_world_size())", "n_rows // dist.get_world_size()")],
    "17.quorum": [(" and alive <= set(asked)", ""), ("len(alive) >= minimum and ", "")],
    "17.interval": [("2 * d * M", "d * M"), ("(t / 2 + R)", "(t + R)")],
    "17.unequal_shares": [(" * n_members", ""), ("my_rows * n_members / all_rows", "1.0")],
    "18.mfu": [('(0 if sizes["tied"] else sizes["embedding"])', 'sizes["embedding"]'), ("(n_gpus * peak)", "peak")],
    "18.idle": [("max(each)", "min(each)"), ("[sum(", "[max(")],
    "18.one_curve": [("step <= line", "step < line"), ('line["event"] == "resumed"', "False")],
    "20.least_gpus": [("16 *", "4 *"), ("share * capacity", "capacity")],
    "20.hidden": [("(n - 1) / n * ", ""), ("flops / link", "link / flops")],
    "20.choose": [(' if x["peak"] <= capacity', ""), ('x["tokens"] / x["seconds"]', 'x["tokens"]')],
}  # fmt: skip


@functools.cache
def cells_of(number: str) -> list[dict]:
    return json.loads(NOTEBOOKS[number].read_text(encoding="utf-8"))["cells"]


def is_solution(cell: dict) -> bool:
    return "solution" in cell["metadata"].get("tags", [])


def checked_in(cell: dict) -> set[str]:
    return set(re.findall(r'\bcheck\(\s*"([^"]+)"', "".join(cell["source"]))) if cell["cell_type"] == "code" else set()


def said_in(cell: dict) -> str:
    texts = [o.get("text", o.get("data", {}).get("text/plain", "")) for o in cell["outputs"]]
    return "".join("".join(text) for text in texts)


def names_that_cells_define(number: str) -> dict:
    """A notebook's imports, functions, classes and constants, nothing run."""
    found = {"__name__": "__main__"}  # so that what ranks get travels by value
    for cell in cells_of(number):
        if cell["cell_type"] != "code" or is_solution(cell) or "raises-exception" in cell["metadata"].get("tags", []):
            continue
        for node in ast.parse("".join(cell["source"])).body:
            literal = isinstance(node, ast.Assign) and not any(
                isinstance(n, ast.Call) or (isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load))
                for n in ast.walk(node.value)
            )
            if literal or isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef):
                try:
                    exec(compile(ast.Module([node], []), "cell", "exec"), found)
                except NameError:  # a default argument that is computed: no exercise uses it
                    continue
    return found


def answer_of(name: str, old: str = "", new: str = ""):
    """The answer of an exercise's solution cell, with `old` replaced by `new`."""
    (cell,) = [c for c in cells_of(name[:2]) if is_solution(c) and name in checked_in(c)]
    text = "".join(cell["source"])
    assert old in text, f"{name}: {old!r} is not in the solution"
    text = text.replace(old, new) if old else text
    tree = ast.parse(text)
    (call,) = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "check"]
    before = [n for n in tree.body if n.end_lineno < call.lineno and not isinstance(n, ast.Expr)]
    found = names_that_cells_define(name[:2])
    exec(compile(ast.Module(before, []), "solution", "exec"), found)
    return eval(ast.unparse(call.args[1]), found)


BOTH_WAYS = [
    pytest.param(name, marks=[pytest.mark.full] if name in ON_RANKS else [])
    for name in exercises.EXERCISES
    if name in MISTAKES
]


@pytest.mark.parametrize("name", BOTH_WAYS)
def test_the_solution_solves_and_two_mistakes_do_not(name):
    verdict = check(name, answer_of(name))
    assert verdict.solved, verdict
    for old, new in MISTAKES[name]:
        verdict = check(name, answer_of(name, old, new))
        assert verdict.status == "wrong" and len(verdict.message.split()) >= 3, f"{old!r} as {new!r}: {verdict}"
        assert "NameError" not in verdict.message, verdict


def test_every_exercise_is_tried_both_ways():
    elsewhere = set()
    for node in ast.walk(ast.parse((HERE / "test_lab_exercises.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            elsewhere.add(node.value)
    assert exercises.EXERCISES.keys() - MISTAKES.keys() - elsewhere == set()
    assert MISTAKES.keys() <= exercises.EXERCISES.keys()
    assert all(len(set(mistakes)) >= 2 for mistakes in MISTAKES.values())


@pytest.mark.parametrize("number", NOTEBOOKS)
def test_a_notebook_has_two_to_four_exercises_with_a_stub_and_a_solution(number):
    registered = [name for name in exercises.EXERCISES if name[:2] == number]
    assert 2 <= len(registered) <= 4
    cells = [c for c in cells_of(number) if c["cell_type"] == "code"]
    for name in registered:
        users = [c for c in cells if name in checked_in(c)]
        assert [is_solution(c) for c in users] == [False, True], f"{name}: a stub, then a solution"
        stub, solution = users
        assert f"{name}: not solved yet" in said_in(stub), said_in(stub)
        assert f"{name}: solved" in said_in(solution), said_in(solution)


def test_every_exercise_belongs_to_a_notebook():
    counts = collections.Counter(name[:2] for name in exercises.EXERCISES)
    assert counts.keys() <= NOTEBOOKS.keys()


if __name__ == "__main__":
    for number, path in NOTEBOOKS.items():
        names = [name for name in exercises.EXERCISES if name[:2] == number]
        print(f"| {path.stem} | {len(names)} | {', '.join(names)} |")
    print(f"| together | {len(exercises.EXERCISES)} | |")
