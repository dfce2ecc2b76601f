"""AdamW against torch's, by hand and with its state in other dtypes; and the learning rate's schedule."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.optim.lr_scheduler import LambdaLR

from minititan.lab.launch import launch
from minititan.optimizer import (
    adamw_by_hand,
    build_adamw,
    round_stochastically,
    state_errors,
    warmup_stable_decay,
)

OPTIONS = {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.3}


def parameters(dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (33, 7), (3,), (5, 2, 3), (1,)
    return [nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64).to(dtype)) for s in shapes]


def run(optimizer, params, steps=5, first=0):
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(100 + step)
        for i, p in enumerate(params):
            if i != 3 or step % 2:  # the last one has no gradient in every other step
                grad = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)
                p.grad = distribute_tensor(grad, p.device_mesh, p.placements) if isinstance(p, DTensor) else grad
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in params]


def largest(ours, theirs):
    return max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_without_state_dtype_it_is_torchs_adamw_bit_for_bit(dtype):
    ours, theirs = parameters(dtype), parameters(dtype)
    found = run(build_adamw(ours, **OPTIONS), ours)
    assert largest(found, run(torch.optim.AdamW(theirs, **OPTIONS, fused=True), theirs)) == 0
    assert largest(found, parameters(dtype)) > 0.01


def test_state_of_the_same_dtype_is_torchs_adamw_bit_for_bit():
    ours, theirs = parameters(), parameters()
    optimizer = build_adamw(ours, torch.float64, **OPTIONS)
    assert largest(run(optimizer, ours), run(torch.optim.AdamW(theirs, **OPTIONS, fused=True), theirs)) == 0


def test_by_hand():
    p, theirs = parameters()[0].detach(), parameters()[:1]
    m, v = torch.zeros_like(p), torch.zeros_like(p)
    optimizer = torch.optim.AdamW(theirs, **OPTIONS)
    for step in range(1, 6):
        theirs[0].grad = torch.randn(p.shape, dtype=torch.float64)
        adamw_by_hand(p, theirs[0].grad, m, v, step, **OPTIONS)
        optimizer.step()
    assert ((p - theirs[0]).norm() / theirs[0].norm()).item() < 1e-15


def test_matrices_only():
    """Without a gradient's pull, what decays shrinks by lr * weight_decay a step and all else stays."""
    for only, state_dtype in ((True, None), (False, None), (True, torch.bfloat16)):
        params = parameters()
        before = [p.detach().clone() for p in params]
        optimizer = build_adamw(params, state_dtype, decay_matrices_only=only, **OPTIONS)
        for p in params:
            p.grad = torch.zeros_like(p)
        optimizer.step()
        for p, was in zip(params, before, strict=True):
            factor = 1 - 0.01 * 0.3 if p.dim() >= 2 or not only else 1.0
            assert torch.allclose(p, factor * was, rtol=1e-15, atol=0), (only, state_dtype, p.shape)


def test_bf16_state():
    """Half the bytes; against an fp32 state the weights are off by what bf16 rounds away, and no more."""
    ours, theirs = parameters(torch.float32), parameters(torch.float32)
    start = parameters(torch.float32)
    optimizer = build_adamw(ours, torch.bfloat16, **OPTIONS)
    found, exact = run(optimizer, ours, 50), run(build_adamw(theirs, **OPTIONS), theirs, 50)
    for p, want, was in zip(found, exact, start, strict=True):
        assert 1e-6 < (error := ((p - want).norm() / (want - was).norm()).item()) < 0.02, error
    for p in ours:
        assert {k: v.dtype for k, v in optimizer.state[p].items()} == {
            "step": torch.float32,
            "exp_avg": torch.bfloat16,
            "exp_avg_sq": torch.bfloat16,
        }


def test_bf16_parameters_with_fp32_state():
    """The averages are those of fp32 arithmetic; only the parameter itself is rounded."""
    ours, exact = parameters(torch.bfloat16), [nn.Parameter(p.float()) for p in parameters(torch.bfloat16)]
    optimizer, wide = build_adamw(ours, torch.float32, **OPTIONS), build_adamw(exact, **OPTIONS)
    for params, one in ((ours, optimizer), (exact, wide)):
        for i, p in enumerate(params):
            p.grad = torch.full_like(p, 0.1 * (i + 1), dtype=torch.bfloat16).to(p.dtype)
        one.step()
    for p, q in zip(ours, exact, strict=True):
        assert p.dtype == torch.bfloat16 and torch.equal(p, q.bfloat16())
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(optimizer.state[p][key], wide.state[q][key])


def test_rounding_is_right_on_average_and_keeps_what_is_no_number():
    generator = torch.Generator().manual_seed(0)
    for value in (1 + 0.3 / 128, -1 - 0.3 / 128, 2 - 0.3 / 128, 3e-39):  # 3e-39 is subnormal
        below, above = sorted({v.item() for v in round_stochastically(torch.full((1000,), value), generator)})
        assert below < value < above
        assert torch.tensor([below, above]).bfloat16().tolist() == [below, above]
        many = round_stochastically(torch.full((200_000,), value), generator).double()
        spread = (above - below) / 2 / math.sqrt(200_000)
        assert abs(many.mean().item() - torch.tensor(value).item()) < 5 * spread
    exact = torch.tensor([0.0, 1.0, -2.5, math.inf, -math.inf, math.nan])
    for _ in range(20):
        assert torch.equal(round_stochastically(exact, generator).isnan(), exact.isnan())
        assert torch.equal(round_stochastically(exact, generator)[:5].float(), exact[:5])
    odd_nan = torch.tensor([0x7FFFFFFF, 0x7F800001], dtype=torch.int32).view(torch.float32)
    assert round_stochastically(odd_nan, generator).isnan().all()  # CUDA's own nan would carry over into -0


def test_the_errors_that_the_docstring_states():
    """Nearest never lets v come down with b2 = 0.999: half of it is wrong. Stochastic: a tenth of that."""
    found = {beta2: state_errors(beta2=beta2) for beta2 in (0.95, 0.999)}
    assert 0.4 < found[0.999]["nearest"]["v"] < 0.6
    assert 0.03 < found[0.999]["stochastic"]["v"] < 0.07
    assert found[0.999]["stochastic"]["way so far"] < 0.5 * found[0.999]["nearest"]["way so far"]
    assert all(errors["v"] < 0.01 for errors in found[0.95].values())


@pytest.mark.parametrize("state_dtype", [None, torch.bfloat16])
def test_state_dict_round_trip(state_dtype):
    """5 + 5 steps through a state dict are 10 steps, bit for bit, noise and all; and torch's AdamW reads it."""
    straight, resumed = parameters(), parameters()
    whole = run(build_adamw(straight, state_dtype, **OPTIONS), straight, 10)
    first = build_adamw(resumed, state_dtype, **OPTIONS)
    run(first, resumed, 5)
    saved = copy.deepcopy(first.state_dict())
    second = build_adamw(resumed, state_dtype)
    second.load_state_dict(saved)
    assert second.state[resumed[0]]["exp_avg"].dtype == (state_dtype or torch.float64)
    assert largest(run(second, resumed, 5, first=5), whole) == 0
    theirs = torch.optim.AdamW(params := parameters(), fused=True)
    theirs.load_state_dict(saved)
    run(theirs, params, 1)
    other = build_adamw(params := parameters(), state_dtype)
    other.load_state_dict(torch.optim.AdamW(parameters(), lr=0.02).state_dict())  # which knows no n_steps
    run(other, params, 1)
    assert other.param_groups[0]["lr"] == 0.02


def test_sharded_and_mixed():
    """FSDP shards, replicas, plain tensors in one call: as in one process; replicas bitwise equal; saved with DCP's."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b, self.c = nn.Linear(7, 7), nn.Linear(7, 3), nn.Linear(3, 3)
            self.to(torch.float64)

    def compare():
        line = init_device_mesh("cpu", (4,))
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))

        def shard(model):
            fully_shard(model.a, mesh=grid)  # HSDP: each shard on two ranks
            fully_shard(model.b, mesh=line)  # 3 rows over 4 ranks: one has none
            return model  # and c is a plain tensor everywhere

        found, drift = {}, []
        for state_dtype in (None, torch.float64, torch.bfloat16):
            for stochastic in (True, False):
                one, model = Net(), shard(Net())
                options = OPTIONS | {"stochastic_rounding": stochastic, "decay_matrices_only": True}
                optimizer = build_adamw(model.parameters(), state_dtype, **options)
                assert len(optimizer.param_groups) == 6
                want = run(build_adamw(one.parameters(), state_dtype, **options), [*one.parameters()])
                run(optimizer, [*model.parameters()])
                ours = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
                errors = [((a - b).norm() / b.norm()).item() for a, b in zip(ours, want, strict=True)]
                found[str(state_dtype), stochastic] = max(errors)
                for group, tensor in (
                    (grid.get_group("replicate"), model.a.weight.to_local()),
                    (None, model.c.weight),
                ):
                    pieces = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
                    dist.all_gather(pieces, tensor.detach(), group=group)
                    drift.append(max((piece - tensor).abs().max().item() for piece in pieces))
        # `model` holds the last kind, nearest; save, load into a fresh one, go on
        saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
        fresh = shard(Net())
        fresh.load_state_dict(model.state_dict())
        loaded = build_adamw(fresh.parameters(), torch.bfloat16, **options | {"lr": 1.0})
        set_optimizer_state_dict(fresh, loaded, saved)
        for m, o in ((model, optimizer), (fresh, loaded)):
            run(o, [*m.parameters()], 2, first=5)
        local = [[getattr(p, "_local_tensor", p).detach() for p in m.parameters()] for m in (model, fresh)]
        resumed = max((a - b).abs().sum().item() for a, b in zip(*local, strict=True))
        dtypes = {s["exp_avg"].dtype for s in loaded.state.values()}
        # a Partial gradient is summands: it is summed before it is squared
        p = nn.Parameter(DTensor.from_local(torch.ones(2), line, [Replicate()]))
        p.grad = DTensor.from_local(torch.full((2,), float(dist.get_rank())), line, [Partial()])
        optimizer = build_adamw([p], torch.float32)
        optimizer.step()
        partial = optimizer.state[p]["exp_avg"].to_local()[0].item()
        return found, drift, resumed, dtypes, partial

    for found, drift, resumed, dtypes, partial in launch(compare, ranks=4, device="cpu"):
        for (state_dtype, stochastic), error in found.items():
            noise = state_dtype == "torch.bfloat16" and stochastic
            assert (1e-7 < error < 1e-2) if noise else error < 1e-10, (state_dtype, stochastic, error)
        assert drift == [0.0] * 12
        assert resumed == 0.0 and dtypes == {torch.bfloat16}
        assert partial == pytest.approx(0.1 * 6)


def test_schedule():
    wsd = warmup_stable_decay(10, warmup_steps=3, decay_steps=4)
    assert [wsd(step) for step in range(12)] == [0.25, 0.5, 0.75, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0, 0]
    linear = warmup_stable_decay(5, decay_steps=5, final=0.5)
    assert [linear(step) for step in range(6)] == pytest.approx([1, 0.9, 0.8, 0.7, 0.6, 0.5])
    assert warmup_stable_decay(0)(7) == 1
    for shape, middle in (("linear", 0.5), ("cosine", 0.5), ("sqrt", 1 - math.sqrt(0.5))):
        curve = [warmup_stable_decay(8, decay_steps=8, shape=shape)(step) for step in range(9)]
        assert curve[0] == 1 and curve[4] == pytest.approx(middle) and curve[8] == pytest.approx(0)
        assert curve == sorted(curve, reverse=True)
    params = parameters()
    optimizer = build_adamw(params, torch.bfloat16, **OPTIONS)
    scheduler, seen = LambdaLR(optimizer, wsd), []
    for _ in range(10):
        seen.append(optimizer.param_groups[0]["lr"])
        run(optimizer, params, 1)
        scheduler.step()
    assert seen == [0.01 * wsd(step) for step in range(10)]


def test_mistakes_are_told_with_their_numbers():
    spent = iter(parameters())
    list(spent)
    mistakes = {
        "0 parameters": lambda: build_adamw(spent),
        "1 of 2": lambda: build_adamw([nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, device="meta"))]),
        "torch.float16": lambda: build_adamw(parameters(), torch.float16),
        "warmup_steps 6 + decay_steps 5 = 11": lambda: warmup_stable_decay(10, 6, 5),
        "warmup_steps -1": lambda: warmup_stable_decay(10, -1, 5),
        "'cubic' is none of 'linear', 'sqrt', 'cosine'": lambda: warmup_stable_decay(10, 1, 5, "cubic"),
        "final=10": lambda: warmup_stable_decay(10, 1, 5, final=10),
    }
    for words, mistake in mistakes.items():
        with pytest.raises(ValueError) as told:
            mistake()
        assert words in str(told.value)
