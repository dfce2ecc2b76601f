"""Pipeline parallelism: every schedule against one process in float64; plans, bubbles and memory against the formula."""

import contextlib
import csv
import itertools
import logging
import re
import time
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from minititan import pipeline_parallel as pp
from minititan.activation_checkpoint import apply_activation_checkpoint, checkpoint_by_hand
from minititan.data_parallel import apply_ddp
from minititan.fsdp import apply_fsdp
from minititan.grad_clip import clip_grad_norm_
from minititan.lab.emulate import at_least
from minititan.lab.launch import RankError, launch
from minititan.meta_init import materialize, on_meta
from minititan.model import ModelConfig, Transformer
from minititan.tensor_parallel import apply_tensor_parallel

TINY = ModelConfig(vocab_size=64, dim=32, n_layers=9, n_heads=4, n_kv_heads=4, ffn_dim=48)  # 9: never even stages
SHORT = replace(TINY, n_layers=5)  # for the compositions, whose DTensors are slow on a CPU
T, IGNORE, MAX_NORM = 6, -100, 0.5
KINDS = [(name, kind.least) for name, kind in pp.SCHEDULES.items()]
KINDS += [("interleaved_zero_bubble", 2), ("interleaved_1f1b", 3)]  # (schedule, stages a rank)

# --- plans: no ranks ---------------------------------------------------------------------------------------------


def plans(ps=(1, 2, 3, 4, 8), ms=(*range(1, 10), 12, 16, 24)):
    for (name, v), p, m in itertools.product(KINDS, ps, ms):
        with contextlib.suppress(ValueError):
            pp.check_pipeline_parallel(name, p, m, v)
            yield name, p, m, v


def least(name, p, v):
    return next(m for m in itertools.count(1) if (name, p, m, v) in set(plans([p], [m])))


def test_the_formula_is_the_simulation():
    found = list(plans())
    assert {name for name, *_ in found} == set(pp.SCHEDULES) and len(found) > 300
    for name, p, m, v in found:
        rows = pp.actions(name, p, m, v)
        idle = pp.idle_share(pp.simulate(rows))
        assert abs(pp.bubble_fraction(name, p, m, v) - idle) < 1e-12, (name, p, m, v)
        complete = sorted(a for row in rows for a in row if "F" in a)
        assert complete == sorted(f"{s}F{k}" for s in range(p * v) for k in range(m))
        for row, stages in zip(rows, pp.stages_of_ranks(name, p, v), strict=True):
            assert {int(re.match(r"\d+", a)[0]) for a in row} == set(stages)


def test_bubbles_shrink_from_schedule_to_schedule():
    for p, rounds in itertools.product((2, 4, 8), (1, 2, 4)):
        b = {name: pp.bubble_fraction(name, p, rounds * p) for name in pp.SCHEDULES if name != "dualpipev"}
        assert b["interleaved_zero_bubble"] < b["interleaved_1f1b"] < b["1f1b"] == b["gpipe"]
        assert b["zbv"] < b["interleaved_1f1b"] == b["looped_bfs"]
        if rounds > 1:
            assert pp.bubble_fraction("dualpipev", p, rounds * p) == b["zbv"]
    assert pp.bubble_fraction("1f1b", 4, 12) == 0.2
    unequal = pp.simulate(pp.actions("1f1b", 2, 2), {"F": 1, "B": 3})
    assert max(end for *_, end in unequal) == 12 and abs(pp.idle_share(unequal) - 1 / 3) < 1e-12


def test_peaks_are_those_of_the_docstring():
    for p, v in itertools.product((2, 4, 8), (2, 3)):
        m = 4 * p
        said = {
            "gpipe": (1, m),
            "1f1b": (1, p),
            "interleaved_1f1b": (v, p + (p - 1) / v),
            "looped_bfs": (v, m),
            "interleaved_zero_bubble": (v, p),
            "zbv": (2, p),
            "dualpipev": (2, p + 0.5),
        }
        for name, (stages, peak) in said.items():
            found = pp.peak_activations(pp.simulate(pp.actions(name, p, m, stages)))
            assert max(found) == round(stages * peak), (name, p, v)
        assert pp.peak_activations(pp.simulate(pp.actions("1f1b", p, m))) == list(range(p, 0, -1))


def test_a_stuck_plan_says_where():
    with pytest.raises(ValueError, match=r"stuck.*\['0B0', '1F0'\]"):
        pp.simulate([["0B0", "0F0"], ["1F0", "1B0"]])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("2f2b", 4, 8), r"'2f2b' is none of gpipe, 1f1b, .*dualpipev"),
        (("1f1b", 4, 3), "1f1b on 4 ranks with 1 stage each needs 4 microbatches or more, got 3.*gpipe"),
        (("dualpipev", 4, 7), "needs 8 microbatches or more, got 7.*zbv"),
        (("zbv", 4, 8, 1), "zbv wants exactly 2 stages on a rank, got 1; what takes 1: gpipe, 1f1b, interleaved_zero_b"),
        (("interleaved_1f1b", 4, 8, 1), "wants 2 or more stages on a rank, got 1"),
        (("looped_bfs", 4, 8, 1), "wants 2 or more stages on a rank, got 1"),
        (("gpipe", 4, 8, 2), "wants exactly 1 stages on a rank, got 2"),
        (("interleaved_1f1b", 4, 9), "9 microbatches in 2 equal rounds.*use 8 or 12"),
        (("1f1b", 4, 8, None, 3), "3 layers cannot fill 4 ranks × 1 = 4 stages"),
        (("zbv", 4, 8, None, 7), "7 layers cannot fill 4 ranks × 2 = 8 stages"),
        (("1f1b", 4, 8, None, 4, 12), r"12 rows cannot be cut into 8 equal microbatches: use one of \[1, 2, 3, 4, 6, 12\]"),
        (("1f1b", 4, 0), "0 microbatches: each must be at least 1"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_before_a_start(arguments, words):
    with pytest.raises(ValueError, match=words):
        pp.check_pipeline_parallel(*arguments)


# --- splitting: no ranks -----------------------------------------------------------------------------------------


def test_layers_go_to_the_lightest_stage():
    def counts(*arguments):
        return [len(layers) for layers in pp.layers_of_stages(*arguments)]

    assert pp.layers_of_stages(5, 2, 0, 0) == [[0, 1], [2, 3, 4]]
    assert counts(32, 4, 0, 0) == [8, 8, 8, 8]
    assert counts(32, 4) == [7, 8, 9, 8]  # 34 weights: 8, 8, 9, 9
    assert counts(4, 4, 5, 5) == [1, 1, 1, 1]
    assert counts(16, 4, 0, 3.5) == [5, 5, 5, 1]
    for n_layers, n_stages, i, o in itertools.product(range(1, 20), range(1, 9), (0, 1, 2.5), (0, 1, 3)):
        if n_layers >= n_stages:
            loads = counts(n_layers, n_stages, i, o)
            assert sum(loads) == n_layers and min(loads) >= 1
            loads[0] += i
            loads[-1] += o
            movable = [load for load, count in zip(loads, counts(n_layers, n_stages, i, o), strict=True) if count > 1]
            assert not movable or max(movable) - min(loads) <= 1, "no layer could move and help"
    with pytest.raises(ValueError, match="3 layers cannot fill 4 stages"):
        pp.layers_of_stages(3, 4)


def whole(config=TINY):
    return on_meta(lambda: Transformer(config).double())


def hf_llama(tied=False):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, tie_word_embeddings=tied,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).double()


def sequential():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 5)).double()


@pytest.mark.parametrize("build", [lambda: materialize(whole(), "cpu", 0), hf_llama, sequential])
@pytest.mark.parametrize("n_stages", [1, 2, 4, 5])
def test_parts_compose_to_the_whole_under_its_names(build, n_stages):
    model = build()
    parts = [pp.split_model(model, n_stages, s) for s in range(n_stages)]
    names = [name for part in parts for name, _ in part.named_parameters()]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters()), "each in one part, as in the whole"
    x = torch.randn(2, 8).double() if isinstance(model, nn.Sequential) else torch.randint(64, (2, T))
    expected = model(x)
    for part in parts:
        x = part(x)
    assert torch.equal(x, getattr(expected, "logits", expected))
    assert all(a is not b for part in parts for a in part.parameters() for b in model.parameters())


def test_splitting_on_meta_allocates_nothing_and_draws_the_same_values():
    expected = dict(materialize(whole(), "cpu", 3).named_parameters())
    for s in range(4):
        part = pp.split_model(whole(), 4, s)
        assert all(p.is_meta for p in part.parameters())
        for name, p in materialize(part, "cpu", 3).named_parameters():
            assert torch.equal(p, expected[name])


def test_names_of_ones_own():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inp, self.body, self.head = nn.Linear(3, 4), nn.ModuleList([nn.Linear(4, 4)] * 0), nn.Linear(4, 2)
            self.body.extend(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x):
            x = self.inp(x)
            for layer in self.body:
                x = layer(x)
            return self.head(x)

    net, x = Net(), torch.randn(2, 3)
    with pytest.raises(ValueError, match=r"Net has none of the known sets.*tok_embeddings layers norm output"):
        pp.split_model(net, 2, 0)
    y = x
    for s in range(3):
        y = pp.split_model(net, 3, s, names=(["inp"], "body", ["head"]))(y)
    assert torch.equal(y, net(x))
    with pytest.raises(ValueError, match="3 layers cannot fill 4 stages"):
        pp.split_model(net, 4, 0, names=(["inp"], "body", ["head"]))
    with pytest.raises(ValueError, match=r"stage 2 is none of 0 \.\. 1"):
        pp.split_model(net, 2, 2, names=(["inp"], "body", ["head"]))


def test_tied_embeddings_are_refused_and_the_reason_is_said():
    tied = on_meta(lambda: Transformer(ModelConfig(64, 32, 4, 4, 4, 48, tied=True)))
    with pytest.raises(
        ValueError, match=r"tok_embeddings.weight and output.weight are 1 parameter, but stage 0 and st"
    ):
        pp.split_model(tied, 2, 0)
    assert pp.split_model(tied, 1, 0).output.weight is not None
    with pytest.raises(ValueError, match=r"embed_tokens.weight and lm_head.weight.*tie_word_embeddings=False"):
        pp.split_model(hf_llama(tied=True), 2, 1)


def test_backward_in_two_is_backward():
    for bias in (True, False):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(5, 7, bias=bias), nn.RMSNorm(7), nn.Tanh(), nn.Linear(7, 3, bias=bias)).double()
        twin = deepcopy(net)
        split = pp.SplitBackwardByHand(net)
        for x in torch.randn(2, 4, 6, 5).double():  # adds to what is there
            outputs = [m(i) for m, i in ((net, x.clone().requires_grad_()), (twin, x.clone().requires_grad_()))]
            dy = torch.randn_like(outputs[0])
            before = [None if p.grad is None else p.grad.clone() for p in net.parameters()]
            split.backward(outputs[0], dy)
            outputs[1].backward(dy)
            linear = [i for i, (name, _) in enumerate(net.named_parameters()) if name[0] in "03"]
            for i in linear:
                now = list(net.parameters())[i].grad
                assert now is before[i] is None or torch.equal(now, before[i]), "not before it is asked for"
            assert len(split.pending) == 1
            split.weights()
        for a, b in zip(net.parameters(), twin.parameters(), strict=True):
            assert (a.grad - b.grad).norm() <= 1e-12 * b.grad.norm()


# --- against one process -----------------------------------------------------------------------------------------


def batch(rows, seed=1):
    """Targets left out in unequal numbers, so that a mean of the microbatches' means would be wrong."""
    generator = torch.Generator().manual_seed(seed)
    tokens_BT, targets_BT = torch.randint(64, (2, rows, T), generator=generator)
    return tokens_BT, targets_BT.masked_fill(torch.rand(rows, T, generator=generator) < 0.4, IGNORE)


def share(logits_BTV, targets_BT, n_valid):
    logits_NV = logits_BTV.flatten(0, 1)
    return F.cross_entropy(logits_NV, targets_BT.flatten(), ignore_index=IGNORE, reduction="sum") / n_valid


def step_batches(rows, step, accumulate):
    """The batches of one optimizer step, and how many tokens count in all of them."""
    found = [batch(rows, seed=10 * step + i) for i in range(accumulate)]
    return found, sum((targets != IGNORE).sum() for _, targets in found)


def reference(rows, config=TINY, steps=2, accumulate=2):
    """Training in one process: per step the loss, the gradients, the norm; then the held-back loss."""
    model = materialize(whole(config), "cpu", 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = {}
    for step in range(steps):
        batches, n_valid = step_batches(rows, step, accumulate)
        loss = sum(share(model(tokens), targets, n_valid) for tokens, targets in batches)
        loss.backward()
        found[step, "loss"] = loss.detach()
        found[step, "norm"] = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        assert found[step, "norm"] > MAX_NORM, "clipping must bite to be tested"
        found |= {(step, name): p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        tokens, targets = batch(rows, seed=99)
        with torch.no_grad():
            found[step, "held back"] = share(model(tokens), targets, (targets != IGNORE).sum())
    return found


def full(tensor):
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def errors(found, expected):
    """Relative; of what this rank has."""
    of = {}
    for key, value in found.items():
        want = expected[key]
        of[key] = ((full(value).double() - want).norm() / want.norm()).item()
    return of


def worst(results, config=TINY, tolerance=1e-10):
    """By rank: case -> key -> error. A nan fails; together the ranks of a case must have all parameters."""
    cases = results[0]
    names = {f"{step}, {name}" for step in range(2) for name, _ in whole(config).named_parameters()}
    for case in cases:
        keys = set()
        for rank, result in enumerate(results):
            bad = {key: error for key, error in result[case].items() if not error < tolerance}
            assert not bad, f"{case} on rank {rank}: {bad}"
            keys |= {f"{step}, {name}" for step, name in result[case]}
        assert names <= keys, f"{case}: {names - keys} were not compared"


def train(parts, schedule, m, rows, mesh=None, dp=None, steps=2, accumulate=2, watch=None, **model_kwargs):
    """The same training through a pipeline; dp: the axis that averages gradients, of which each rank reads its rows."""
    pipeline = pp.build_schedule(parts, schedule, m, share, mesh, *([watch] if watch else []))
    parameters = {name.removeprefix("module."): p for part in parts for name, p in part.named_parameters()}
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-2, foreach=False)
    n, mine = (dp.size(), dp.get_local_rank()) if dp else (1, 0)
    found = {}

    def cut(tensor):
        return tensor.chunk(n)[mine]

    for step in range(steps):
        batches, n_valid = step_batches(rows, step, accumulate)
        loss = 0
        for tokens, targets in batches:
            loss += pipeline.step(cut(tokens), cut(targets), {"n_valid": n_valid / n}, **model_kwargs) / n
        if dp:
            dist.all_reduce(loss, group=dp.get_group())
        found[step, "loss"] = loss
        pp_mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
        found[step, "norm"] = clip_grad_norm_(parameters.values(), MAX_NORM, pp_mesh)
        names = {name: name.replace("_checkpoint_wrapped_module.", "") for name in parameters}
        found |= {(step, names[name]): full(p.grad).clone() for name, p in parameters.items()}
        optimizer.step()
        optimizer.zero_grad()
        tokens, targets = batch(rows, seed=99)
        held = pipeline.eval(cut(tokens), cut(targets), {"n_valid": (targets != IGNORE).sum()}, **model_kwargs)
        if dp:
            dist.all_reduce(held, group=dp.get_group())
        found[step, "held back"] = held
    return found


def parts_of(schedule, v, p=None, rank=None, seed=0, prepare=lambda part: part):
    p, rank = p or dist.get_world_size(), dist.get_rank() if rank is None else rank
    stages = pp.stages_of_ranks(schedule, p, v)[rank]
    return [materialize(prepare(pp.split_model(whole(), p * v, s)), "cpu", seed) for s in stages]


def run_native(name, m, v, truth):
    """Two steps of AdamW over two accumulated batches; and that what ran is the plan."""
    ran = []

    @contextlib.contextmanager
    def watch(action):
        ran.append(action)
        yield

    found = errors(train(parts_of(name, v), name, m, rows=m, watch=watch), truth)
    plan = pp.actions(name, dist.get_world_size(), m, v)[dist.get_rank()]
    assert ran[: len(plan)] == plan, f"{name}: {ran[: len(plan)]} ran, planned was {plan}"
    return found


@pytest.mark.parametrize("p", [2, 4])
def test_every_schedule_is_one_process(p):
    def on_rank():
        return {f"{name} v={v} m={m}": run_native(name, m, v, truth[m]) for name, m, v in cases}

    cases = [(name, max(least(name, p, v), 4), v) for name, v in KINDS if p == 2]  # all, also with room to spare
    cases = cases or [(name, least(name, p, v), v) for name, v in KINDS if name in ("1f1b", "zbv")]
    truth = {m: reference(rows=m) for m in {m for _, m, _ in cases}}
    worst(launch(on_rank, ranks=p, timeout=100))


def once(name, m, v, rows):
    """Loss and gradients of one step."""
    pipeline = pp.build_schedule(parts := parts_of(name, v), name, m, share)
    tokens, targets = batch(rows)
    n_valid = (targets != IGNORE).sum()
    found = {"loss": pipeline.step(tokens, targets, {"n_valid": n_valid})}
    found |= {key: p.grad for part in parts for key, p in part.named_parameters()}
    return found


def truth_of_once(rows):
    model = materialize(whole(), "cpu", 0)
    tokens, targets = batch(rows)
    loss = share(model(tokens), targets, (targets != IGNORE).sum())
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.full
@pytest.mark.parametrize("p", [2, 4])
def test_every_schedule_with_every_number_of_microbatches(p):
    def on_rank():
        return {(name, v, m): errors(once(name, m, v, m), truth[m]) for name, _, m, v in cases}

    cases = [case for case in plans([p], range(1, 4 * p + 1)) if p * case[3] <= TINY.n_layers]
    truth = {m: truth_of_once(m) for m in range(1, 4 * p + 1)}
    results = launch(on_rank, ranks=p, timeout=300)
    assert {name for name, *_ in results[0]} == set(pp.SCHEDULES)
    for result in results:
        bad = {(case, key): e for case, of in result.items() for key, e in of.items() if not e < 1e-10}
        assert not bad


BY_HAND = {
    "gpipe": lambda part, *data: pp.gpipe_by_hand(part, *data),
    "1f1b": lambda part, *data: pp.one_f_one_b_by_hand(part, *data),
    "zero bubble": lambda part, *data: pp.one_f_one_b_by_hand(part, *data, split=pp.SplitBackwardByHand(part)),
}


@pytest.mark.parametrize("p", [1, 2, 4])
def test_by_hand_is_one_process(p):
    def on_rank():
        found, rank = {}, dist.get_rank()
        for m, expected in truth.items():
            tokens, targets = batch(2 * m)
            n_valid, hidden = (targets != IGNORE).sum(), torch.empty(2, T, TINY.dim).double()
            for name, run in BY_HAND.items():
                part = materialize(pp.split_model(whole(), p, rank), "cpu", 0)
                data = tokens.chunk(m), targets.chunk(m), lambda y, t, n=n_valid: share(y, t, n), hidden
                losses = run(part, *data)
                assert len(losses) == (m if rank == p - 1 else 0)
                one = {key: q.grad for key, q in part.named_parameters()}
                found[name, m] = errors(one | ({"loss": sum(losses)} if losses else {}), expected)
        return found

    truth = {m: truth_of_once(2 * m) for m in {1: (1, 3), 2: (1, 2, 3, 8), 4: (1, 2, 3, 4, 7, 16)}[p]}
    for result in launch(on_rank, ranks=p, timeout=100):
        bad = {(case, key): e for case, of in result.items() for key, e in of.items() if not e < 1e-10}
        assert len(result) >= 6 and not bad


# --- with the others ---------------------------------------------------------------------------------------------

SPLITTING = ("interleaved_zero_bubble", "zbv", "dualpipev")


def run_composed(what, name, v, grid, truth):
    """2 stages a line × 2 ranks that do `what`."""
    line, other = grid["pp"], grid["other"]
    m, rows = 4, 8
    stages = pp.stages_of_ranks(name, 2, v)[line.get_local_rank()]
    parts = [pp.split_model(whole(SHORT), 2 * v, s) for s in stages]
    kwargs = {}
    if what.startswith("tp"):
        sequence = what == "tp, sequence"
        for part in parts:
            apply_tensor_parallel(part, other, sequence_parallel=sequence)
        kwargs = {"positions_T": torch.arange(T)} if sequence else {}
    if what == "checkpoint":
        for part in parts:
            apply_activation_checkpoint(part, "full")
    if what in ("fsdp", "checkpoint"):
        for part in parts:
            apply_fsdp(part, other, reshard_after_forward=False)
    for part in parts:
        materialize(part, "cpu", 0)
    if what == "ddp":
        parts = [apply_ddp(part, other) for part in parts]
    dp = None if what.startswith("tp") else other
    return errors(train(parts, name, m, rows, line, dp, **kwargs), truth)


def run_all_composed(cases):
    def on_rank():
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "other"))
        return {f"pp × {what}, {name}": run_composed(what, name, v, grid, truth) for what, name, v in cases}

    truth = reference(8, SHORT)
    worst(launch(on_rank, ranks=4, timeout=250), SHORT)


FAST = [
    ("fsdp", "1f1b", 1),
    ("fsdp", "zbv", 2),
    ("ddp", "interleaved_zero_bubble", 2),
    ("tp", "interleaved_zero_bubble", 1),
    ("tp, sequence", "1f1b", 1),
]


@pytest.mark.full  # by default test_parity has the pipeline with FSDP, TP and context parallel
def test_with_fsdp_ddp_tensor_parallel_and_checkpointing():
    run_all_composed(FAST)


@pytest.mark.full
@pytest.mark.parametrize("what", ["fsdp", "ddp", "tp", "checkpoint"])
def test_all_schedules_with(what):
    run_all_composed([(what, name, v) for name, v in KINDS if v < 3 and (what, name, v) not in FAST])


def test_torch_ddp_alone_lets_replicas_of_a_zero_bubble_drift():
    """Why parts are taken out of DDP: pytorch#144530. When this fails, torch has been repaired."""

    def on_rank():
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        stage, dp = grid["pp"].get_local_rank(), grid["dp"]
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(dp.get_local_rank())).double()
        drift = {}
        for torch_class in (pp.pipelining.Schedule1F1B, pp.pipelining.ScheduleInterleavedZeroBubble):
            part = nn.parallel.DistributedDataParallel(nn.Linear(4, 4).double(), process_group=dp.get_group())
            native = pp.PipelineStage(part, stage, 2, torch.device("cpu"), group=grid["pp"].get_group())
            native = native if torch_class is pp.pipelining.Schedule1F1B else [native]
            schedule = torch_class(native, 2, lambda y, t: (y - t).square().sum())
            schedule.step(*([x] if stage == 0 else []), target=x if stage == 1 else None)
            grads = [torch.empty(4, 4).double() for _ in range(2)]
            dist.all_gather(grads, part.module.weight.grad.contiguous(), group=dp.get_group())
            drift[torch_class.__name__] = ((grads[0] - grads[1]).norm() / grads[0].norm()).item()
        return stage, drift

    for stage, drift in launch(on_rank, ranks=4):
        assert drift["Schedule1F1B"] == 0
        assert (drift["ScheduleInterleavedZeroBubble"] > 0.1) == (stage == 1), (stage, drift)


def test_reentrant_checkpoints_do_not_leave_the_gradient_of_the_trial_run():
    """torch learns shapes by running a microbatch, loss and all; a checkpoint that calls backward() inside adds to .grad."""

    def on_rank():
        found = {}
        for name, v in (("1f1b", 1), ("zbv", 2)):
            parts = parts_of(name, v)
            for part in parts:
                for block in part.layers.values():
                    block.forward = lambda *a, f=block.forward: checkpoint_by_hand(f, *a)
            found[name] = errors(train(parts, name, 4, 4), truth)
        return found

    truth = reference(4)
    worst(launch(on_rank, ranks=2))


@pytest.mark.parametrize("kind", ["sequential", pytest.param("llama", marks=pytest.mark.full)])  # imports on each rank
def test_sequential_and_transformers_run_too(kind):
    """Parts whose output is a view, which torch cannot detach in place, in the schedules that do it."""

    def on_rank():
        model = sequential() if kind == "sequential" else hf_llama()
        x, y = batch(8)
        if kind == "sequential":
            x, y = torch.randn(2, 8, 3, 8, generator=torch.Generator().manual_seed(0)).double()

        def loss_fn(out, target):
            return share(out, target, 30) if kind == "llama" else (out - target[..., :5]).square().sum() / 10

        truth = loss_fn(getattr(out := model(x), "logits", out), y)
        truth.backward()
        expected = {"loss": truth.detach()} | {name: p.grad for name, p in model.named_parameters()}
        found = {}
        for name, v in (("1f1b", 1), ("interleaved_zero_bubble", 2), ("zbv", 2)):
            stages = pp.stages_of_ranks(name, 2, v)[dist.get_rank()]
            parts = [pp.split_model(model, 2 * v, s) for s in stages]
            for part in parts:
                part.zero_grad()
            one = {"loss": pp.build_schedule(parts, name, 4, loss_fn).step(x, y)}
            one |= {key: p.grad for part in parts for key, p in part.named_parameters()}
            found[name] = errors(one, expected)
        return found

    for result in launch(on_rank, ranks=2, timeout=100):
        assert len(result) == 3 and all(e < 1e-10 for of in result.values() for e in of.values()), result


# --- memory and time ---------------------------------------------------------------------------------------------


class Held:
    """Bytes that autograd holds, leaving parameters aside: each saved tensor while its graph lives."""

    def __init__(self, parameters):
        self.parameters = {p.untyped_storage().data_ptr() for p in parameters}
        self.now = self.peak = 0

    def __enter__(self):
        held = self

        class Saved:
            def __init__(self, tensor):
                self.tensor = tensor
                self.n = 0 if tensor.untyped_storage().data_ptr() in held.parameters else tensor.nbytes
                held.now += self.n
                held.peak = max(held.peak, held.now)

            def __del__(self):
                held.now -= self.n

        self.hooks = torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor)
        self.hooks.__enter__()
        return self

    def __exit__(self, *exception):
        self.hooks.__exit__(*exception)


def test_live_activations_measured():
    """In microbatches: GPipe m on each rank, 1F1B p - r on rank r; by hand and native."""
    p, m = 4, 8

    def on_rank():
        rank = dist.get_rank()
        tokens, targets = batch(m)
        found, n = {}, (targets != IGNORE).sum()

        def loss_fn(y, t):
            return share(y, t, n)

        hidden = torch.empty(1, T, TINY.dim).double()
        for name in ("gpipe", "1f1b"):
            for how in ("by hand", "native"):
                part = materialize(pp.split_model(whole(), p, rank), "cpu", 0)
                if how == "native":
                    pipeline = pp.build_schedule(part, name, m, loss_fn)
                    pipeline.step(tokens, targets)  # the first one also learns shapes
                with Held(part.parameters()) as one:  # what one microbatch keeps here
                    x = tokens[:1] if rank == 0 else torch.randn(1, T, TINY.dim).double().requires_grad_()
                    y = part(x)
                    y = loss_fn(y, targets[:1]) if rank == p - 1 else y
                    unit = one.now
                    del y
                with Held(part.parameters()) as held:
                    if how == "native":
                        pipeline.step(tokens, targets)
                    else:
                        BY_HAND[name](part, tokens.chunk(m), targets.chunk(m), loss_fn, hidden)
                found[name, how] = held.peak / unit, held.now
        return found

    for rank, found in enumerate(launch(on_rank, ranks=p, timeout=60)):
        for (name, how), (microbatches, left) in found.items():
            expected = m if name == "gpipe" else p - rank
            assert abs(microbatches - expected) < 0.05 and left == 0, (rank, name, how, microbatches, left)


def measured_bubble(name, m, v, seconds):
    """Idle share of a real run whose actions take at least their time; and what each rank did when."""
    costs = {"F": 1, "I": 1, "W": 1, "B": 2}
    events = []

    @contextlib.contextmanager
    def watch(action):
        start = time.monotonic()
        with at_least(seconds / v * costs[re.search("[FBIW]", action)[0]]):
            yield
        events.append((dist.get_rank(), action, start, time.monotonic()))

    net, x = nn.Sequential(*(nn.Linear(8, 8) for _ in range(8))), torch.randn(m, 8)
    parts = [pp.split_model(net, 4 * v, s) for s in pp.stages_of_ranks(name, 4, v)[dist.get_rank()]]
    pipeline = pp.build_schedule(parts, name, m, lambda y, t: y.sum(), watch=watch)
    pipeline.step(x, x)
    everything = [None] * dist.get_world_size()
    dist.all_gather_object(everything, events)
    return [event for of_rank in everything for event in of_rank]


def check_bubbles(cases, seconds):
    """Name, m -> idle share, the least of up to four runs: what else the machine does can only add to it."""

    def on_rank():
        found = {}
        for case in cases:
            for _ in range(4):
                events = measured_bubble(*case, seconds)
                found[case] = min(found.get(case, 1), pp.idle_share(events))
                if found[case] < pp.bubble_fraction(case[0], 4, *case[1:]) + 0.04:  # all ranks know the same events
                    break
        return found

    bubbles = {}
    for (name, m, v), idle in launch(on_rank, ranks=4, timeout=250)[0].items():
        bubbles[name, m], formula = idle, pp.bubble_fraction(name, 4, m, v)
        assert abs(idle - formula) < 0.05, f"{name}, m={m}: measured {idle:.3f}, formula {formula:.3f}"
    return bubbles


@pytest.mark.full  # it compares times: for a quiet machine only
def test_measured_bubbles_are_the_formula():
    b = check_bubbles([("gpipe", 4, 1), ("1f1b", 4, 1), ("interleaved_1f1b", 4, 2), ("zbv", 8, 2)], 0.04)
    assert b["zbv", 8] < b["interleaved_1f1b", 4] < b["1f1b", 4] < b["gpipe", 4] + 0.03


@pytest.mark.full
def test_measured_bubbles_of_all_schedules():
    cases = [(name, m, 1 if name in ("gpipe", "1f1b") else 2) for name in pp.SCHEDULES for m in (4, 8, 16)]
    b = check_bubbles([case for case in cases if case[:2] != ("dualpipev", 4)], 0.04)
    for m in (4, 8, 16):
        assert b["interleaved_zero_bubble", m] < b["interleaved_1f1b", m] < b["1f1b", m] < b["gpipe", m] + 0.02


# --- CSV, and what is refused on ranks ---------------------------------------------------------------------------


def test_a_schedule_from_a_file(tmp_path):
    """Plans of ours written out, torch's own with messages, and one that no class has: a V with the order of GPipe."""
    paths = {}
    for name, v in (("zbv", 2), ("interleaved_1f1b", 2)):
        paths[name] = str(tmp_path / f"{name}.csv")
        with open(paths[name], "w", newline="") as file:
            csv.writer(file).writerows(pp.actions(name, 2, 4, v))
    paths["own"] = str(tmp_path / "own.csv")
    rows = [
        [f"0F{k}" for k in range(4)]
        + [x for k in range(4) for x in (f"3F{k}", f"3B{k}")]
        + [f"0B{k}" for k in range(4)],
        [x for k in range(4) for x in (f"1F{k}", f"2F{k}")] + [x for k in range(4) for x in (f"2B{k}", f"1B{k}")],
    ]
    with open(paths["own"], "w", newline="") as file:
        csv.writer(file).writerows(rows)
    lowered = str(tmp_path / "lowered.csv")
    broken = {"stuck": [["0B0", "0F0"], ["1F0", "1B0"]], "one rank": [["0F0", "0B0"]], "twice": rows}
    broken["twice"] = [rows[0] + ["0F0"], rows[1]]
    for name, plan in broken.items():
        paths[name] = str(tmp_path / f"{name}.csv")
        with open(paths[name], "w", newline="") as file:
            csv.writer(file).writerows(plan)

    def run(path, m=4):
        stages = pp.stages_of_ranks(path, 2)
        parts = [
            materialize(pp.split_model(whole(), max(map(max, stages)) + 1, s), "cpu", 0)
            for s in stages[dist.get_rank()]
        ]
        pipeline = pp.build_schedule(parts, path, m, share)
        tokens, targets = batch(4)
        loss = pipeline.step(tokens, targets, {"n_valid": (targets != IGNORE).sum()})
        one = {"loss": loss} | {key: p.grad for part in parts for key, p in part.named_parameters()}
        return errors(one, truth_of_once(4)), pipeline

    def on_rank():
        found = {}
        for name in ("zbv", "interleaved_1f1b", "own"):
            found[name], pipeline = run(paths[name])
            if name == "zbv" and dist.get_rank() == 0:
                pipeline.schedule._dump_csv(lowered)
        dist.barrier()
        found["with messages"], _ = run(lowered)
        words = {}
        for name, m in (("stuck", 1), ("one rank", 1), ("twice", 4), ("own", 3), ("own", 5)):
            try:
                run(paths[name], m)
            except ValueError as error:
                words[name, m] = str(error)
            except IndexError:
                words[name, m] = "index"
        return found, words

    for found, words in launch(on_rank, ranks=2, timeout=60):
        assert all(e < 1e-10 for of in found.values() for e in of.values()), found
        assert "stuck" in words["stuck", 1] and "2 F" in words["twice", 4]
        assert "plans 0F3, but there are 3" in words["own", 3]
        assert "stage 0 has 0 F, 0 B, 0 I, 0 W of microbatch 4 (of 5)" in words["own", 5]


def test_refused_on_every_rank_before_anything_is_sent():
    def on_rank():
        rank, words = dist.get_rank(), {}

        def attempt(name, function):
            try:
                function()
            except ValueError as error:
                words[name] = str(error)

        loop, v_shape = parts_of("interleaved_1f1b", 2), parts_of("zbv", 2)
        attempt("V", lambda: pp.build_schedule(loop, "zbv", 4, share))
        attempt("one", lambda: pp.build_schedule(loop[:1], "zbv", 4, share))
        attempt("few", lambda: pp.build_schedule(v_shape, "dualpipev", 3, share))
        selective = [apply_activation_checkpoint(part, "per_op") for part in parts_of("zbv", 2)]
        attempt("selective", lambda: pp.build_schedule(selective, "zbv", 4, share))
        compiled = parts_of("zbv", 2)
        for part in compiled:
            for block in part.layers.values():
                block.compile(backend="eager")
        attempt("compiled", lambda: pp.build_schedule(compiled, "zbv", 4, share))
        pipeline = pp.build_schedule(parts_of("1f1b", 1), "1f1b", 2, share)
        tokens, targets = batch(4)
        attempt("rows", lambda: pipeline.step(tokens[:3], targets[:3], {"n_valid": 1}))
        pipeline.step(tokens, targets, {"n_valid": 1})
        attempt("shorter", lambda: pipeline.step(tokens[:, :4], targets[:, :4], {"n_valid": 1}))
        pipeline.eval(tokens[:, :4], targets[:, :4], {"n_valid": 1})  # other buffers: may have its own shape
        attempt("eval", lambda: pipeline.eval(tokens, targets, {"n_valid": 1}))
        logits = pipeline.eval(tokens[:, :4])
        return words, None if logits is None else tuple(logits.shape), rank

    for words, shape, rank in launch(on_rank, ranks=2, timeout=60):
        assert f"wants stages {[[0, 3], [1, 2]][rank]} of 4 on rank {rank}" in words["V"] if rank == 0 else True
        assert "zbv wants exactly 2 stages on a rank, got 1" in words["one"]
        assert "needs 4 microbatches or more, got 3" in words["few"]
        assert "checkpointed selectively" in words["selective"] and "is compiled" in words["compiled"]
        assert "3 rows of inputs cannot be cut into 2 equal microbatches" in words["rows"]
        assert "inputs have shape (4, 4), and (4, 6) in the first step" in words["shorter"]
        assert "inputs have shape (4, 6), and (4, 4) in the first eval" in words["eval"]
        assert shape == ((4, 4, 64) if rank == 1 else None)


def test_a_stage_whose_output_changes_shape_says_so():
    def on_rank():
        class Cut(nn.Module):
            calls = 0

            def forward(self, x):
                self.calls += 1
                return x[:, : 3 + (self.calls > 3)]

        net = nn.Sequential(nn.Linear(4, 4), Cut(), nn.Linear(4, 4), nn.Identity()).double()
        part = pp.split_model(net, 2, dist.get_rank())
        pipeline = pp.build_schedule(part, "gpipe", 4, lambda y, t: y.sum())
        pipeline.step(torch.randn(4, 6, 4).double(), torch.zeros(4))

    with pytest.raises(
        RankError, match=r"stage 0 of 2 gave \(1, 4, 4\) for a microbatch, and \(1, 3, 4\) for the first"
    ):
        launch(on_rank, ranks=2, timeout=30)
