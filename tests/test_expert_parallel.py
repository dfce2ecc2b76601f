"""Expert parallelism: every layout against one process in float64, every routing to the row, bytes to the formula."""

import functools
import itertools
import logging
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from minititan import expert_parallel as ep
from minititan.grad_clip import clip_grad_norm_
from minititan.lab.launch import launch
from minititan.lab.trace import recording
from minititan.meta_init import materialize, on_meta
from minititan.model import PRESETS, ModelConfig, MoE, Transformer
from minititan.parallel_dims import ParallelDims
from minititan.tensor_parallel import apply_tensor_parallel

TINY = ModelConfig(
    vocab_size=64, dim=32, n_layers=2, n_heads=8, n_kv_heads=4, ffn_dim=48,
    n_experts=8, top_k=2, n_shared_experts=1, expert_ffn_dim=24, bias_rate=0.02, balance_loss=0.1,
)  # fmt: skip
B, T, STEPS, MAX_NORM = 8, 8, 2, 0.5


def init(name: str, full: torch.Tensor, generator: torch.Generator) -> None:
    if full.is_floating_point():
        full.normal_(1.0 if "norm" in name else 0.0, 0.3, generator=generator)
    else:
        full.zero_()


def build(config: ModelConfig, apply=lambda model: model) -> nn.Module:
    return materialize(apply(on_meta(lambda: Transformer(config).double())), "cpu", seed=1, init=init)


def batch(config: ModelConfig, step: int) -> torch.Tensor:
    """[2, B, T]: tokens and targets, of which the first sequences have few."""
    generator = torch.Generator().manual_seed(step)
    tokens_BT, targets_BT = torch.randint(config.vocab_size, (2, B, T), generator=generator)
    targets_BT[0, 1:] = -100
    return torch.stack([tokens_BT, targets_BT])


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def train(config: ModelConfig, model: nn.Module, n: int = 1, rank: int = 0, accumulate: int = 1, meshes=()) -> dict:
    """Some steps of data-parallel rank `rank` of n, gradients averaged by the layout: all that must be the same."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    for block in model.layers.values():
        block.moe.router.sequence_weight = n / B
    found = {}
    for step in range(STEPS):
        tokens_BT, targets_BT = batch(config, step)
        n_valid, loss = (targets_BT != -100).sum(), 0.0
        pieces = list(
            zip(tokens_BT.chunk(n)[rank].chunk(accumulate), targets_BT.chunk(n)[rank].chunk(accumulate), strict=True)
        )
        for tokens, targets in pieces:
            share = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum") / n_valid
            (share * n).backward()
            loss += share.detach()
        if meshes:
            dist.all_reduce(loss, group=meshes[0].get_group())
        found[f"loss {step}"] = loss
        found[f"norm {step}"] = clip_grad_norm_(model.parameters(), MAX_NORM)
        if step == STEPS - 1:  # of earlier ones the norm: gathering all of them is most of this test's time
            found |= {f"gradient {name}": whole(p.grad) for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        found[f"rows {step}"] = ep.update_expert_bias(model, *meshes).double()
    found |= {f"parameter {name}": whole(p) for name, p in model.named_parameters()}
    found |= {f"bias {name}": b.double() + 10 for name, b in model.named_buffers() if "bias" in name}
    return found


@functools.cache
def reference(config: ModelConfig) -> dict:
    found = train(config, build(config))
    assert all(norm > MAX_NORM for name, norm in found.items() if "norm " in name and "gradient" not in name)
    assert all(value.any() for value in found.values())
    assert len({tuple(row.tolist()) for name, value in found.items() if "rows" in name for row in value}) == STEPS * 2
    return found


def errors(found: dict, truth: dict) -> dict[str, float]:
    assert found.keys() == truth.keys()
    return {name: ((found[name] - value).norm() / value.norm()).item() for name, value in truth.items()}


def run(config=TINY, sequence=False, fsdp=True, accumulate=1, recompute=False, **degrees) -> dict[str, float]:
    """A layout, composed as the docstring says."""
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # full_tensor() over two axes: two gathers
    dims = ParallelDims(**degrees, world_size=dist.get_world_size())
    root = dims.build_mesh("cpu")

    def apply(model):
        if dims.tp > 1:
            apply_tensor_parallel(model, dims.axis("tp"), sequence_parallel=sequence)
        ep.apply_expert_parallel(model, dims.axis("ep"), dims.axis("tp") if dims.tp > 1 else None, sequence)
        if recompute:
            for block in model.layers.values():
                forward = block.forward
                block.forward = lambda *args, f=forward: checkpoint(f, *args, use_reentrant=False)
        if fsdp:
            mesh, dense = dims.axis("efsdp"), dims.axis("fsdp")
            if dims.dp_replicate > 1:
                mesh, dense = DeviceMesh._concatenate([root["dp_replicate"], mesh]), dims.axis("hsdp")
            ep.shard_experts(model, mesh)
            for block in (*model.layers.values(), model):
                fully_shard(block, mesh=dense)
        return model

    dp = dims.axis("dp")
    meshes = (dims.axis("loss"), dims.axis("tp"))
    return errors(
        train(config, build(config, apply), dp.size(), dp.get_local_rank(), accumulate, meshes), reference(config)
    )


def no_error(results: list[dict[str, dict[str, float]]], cases: int) -> None:
    """Results by rank: case -> name -> error. A nan or a missing name fails too."""
    for rank, found in enumerate(results):
        assert len(found) == cases
        for case, of_case in found.items():
            bad = {name: error for name, error in of_case.items() if not error < 1e-10}
            assert of_case and not bad, f"{case} on rank {rank}: {bad}"


def test_four_ranks_equal_one_process():
    """With FSDP, tensor and sequence parallel; ep smaller than, as large as, and larger than tp; experts cut in dim 1."""

    def on_rank():
        return {
            "fsdp 4, ep 2": run(dp_shard=4, ep=2, accumulate=2),
            "fsdp 4, ep 4": run(dp_shard=4, ep=4, recompute=True),
            "fsdp 4, ep 2, one expert a rank": run(replace(TINY, n_experts=2, top_k=1), dp_shard=4, ep=2),
            "fsdp 2 × tp 2, ep 2": run(dp_shard=2, tp=2, ep=2),
            "fsdp 2 × tp 2, ep 4, sequence": run(dp_shard=2, tp=2, ep=4, sequence=True),
            "tp 4, ep 4, no fsdp": run(dp_shard=1, tp=4, ep=4, fsdp=False),
        }

    no_error(launch(on_rank, ranks=4, timeout=120), 6)


@pytest.mark.full
def test_four_ranks_equal_one_process_in_the_other_layouts():
    def on_rank():
        found = {}
        for (dp_shard, tp), degree, sequence in itertools.product(((4, 1), (2, 2), (1, 4)), (2, 4), (False, True)):
            if not (sequence and tp == 1):
                layout = {"dp_shard": dp_shard, "tp": tp, "ep": degree, "sequence": sequence}
                found[str(layout)] = run(**layout, accumulate=2, recompute=degree == 2)
        odd = replace(TINY, n_experts=12, top_k=3, n_shared_experts=0, expert_ffn_dim=10, balance_loss=0.0)
        found["12 experts, ffn 10"] = run(odd, dp_shard=4, ep=2)
        found["ddp"] = run(dp_replicate=2, dp_shard=2, ep=2)
        return found

    no_error(launch(on_rank, ranks=4, timeout=200), 12)


@pytest.mark.full
def test_eight_ranks_equal_one_process():
    def on_rank():
        return {
            "hsdp 2 × 4, ep 2": run(dp_replicate=2, dp_shard=4, ep=2),
            "hsdp 2 × 2 × tp 2, ep 2": run(dp_replicate=2, dp_shard=2, tp=2, ep=2),
            "fsdp 8, ep 8": run(dp_shard=8, ep=8),
            "fsdp 4 × tp 2, ep 4": run(dp_shard=4, tp=2, ep=4, sequence=True),
        }

    no_error(launch(on_rank, ranks=8, timeout=200), 4)


def test_by_hand_equals_the_model():
    """The same mixture by dispatch_by_hand and combine_by_hand, from the router on: value and all gradients."""

    def on_rank():
        n, rank = dist.get_world_size(), dist.get_rank()
        moe = build(replace(TINY, balance_loss=0.0)).layers["1"].moe
        x_BTD, towards = torch.randn(
            2, 4, 15, TINY.dim, dtype=torch.float64, generator=torch.Generator().manual_seed(3)
        )
        x = x_BTD.clone().requires_grad_()
        out = moe(x)
        (out * towards).sum().backward()
        truth = {"out": out[rank], "x": x.grad[rank]} | {name: p.grad for name, p in moe.named_parameters()}

        moe.zero_grad()
        mine = x_BTD[rank].clone().requires_grad_()
        weights_BTK, experts_BTK, _ = moe.router(mine[None])
        rows, counts, route = ep.dispatch_by_hand(mine, experts_BTK[0], 8)
        experts = [p.detach().chunk(n)[rank].clone().requires_grad_() for p in moe.experts.parameters()]
        pieces = []
        for x_RD, w1, w2, w3 in zip(rows.split(counts.tolist()), *experts, strict=True):
            pieces.append(F.linear(F.silu(F.linear(x_RD, w1)) * F.linear(x_RD, w3), w2))
        out = ep.combine_by_hand(torch.cat(pieces), weights_BTK[0], route) + moe.shared_experts(mine)
        (out * towards[rank]).sum().backward()
        found = {"out": out, "x": mine.grad}
        for name, p in moe.named_parameters():
            if name.startswith("experts"):  # this rank's, of all tokens
                truth[name] = truth[name].chunk(n)[rank]
                found[name] = experts[("w1", "w2", "w3").index(name[-2:])].grad
            else:
                dist.all_reduce(p.grad)
                found[name] = p.grad
        return {"by hand": errors(found, truth)}

    no_error(launch(on_rank, ranks=4), 1)


# ------------------------------------------------------------------------------------------------- conservation


def degenerate_routings(n: int):
    """(experts_NK of each rank, number of experts), in every way that a load can be uneven."""

    def to(*experts_by_rank):
        return [torch.tensor(e, dtype=torch.long).view(-1, 1) for e in experts_by_rank]

    E = 2 * n
    yield [torch.zeros(0, 2, dtype=torch.long)] * n, E  # no token at all
    for rank in range(n):
        yield to(*([0, E - 1] * (r == rank) for r in range(n))), E  # one rank has all tokens
        yield to(*([] if r == rank else list(range(E)) for r in range(n))), E  # one has none, and gets some
        yield to(*([e for e in range(E) if e // 2 != rank] for _ in range(n))), E  # one has some, and gets none
        yield to(*([2 * ((r + rank) % n)] * (r + 1) for r in range(n))), E  # all to the next but `rank`: one peer each
        yield to(*([3] if r == rank else [] for r in range(n))), E  # a single token
    for expert in range(E):
        yield to(*([expert] * (r + 3) for r in range(n))), E  # every token to one expert
    yield [torch.arange(E).expand(3, E).clone()] * n, E  # every token to every expert
    yield [torch.zeros(2, 1, dtype=torch.long)] + [torch.full((5, 1), n - 1)] * (n - 1), n  # an expert a rank


def random_routing(n: int, generator: torch.Generator):
    draw = lambda high: int(torch.randint(high, (), generator=generator))  # noqa: E731
    E = n * (1 + draw(4))
    K = 1 + draw(min(E, 4))
    skew_E = torch.randn(E, generator=generator) * draw(5)
    tokens = [draw(12) * (draw(4) > 0) for _ in range(n)]
    return [(torch.rand(N, E, generator=generator).log() + skew_E).topk(K).indices for N in tokens], E


@pytest.mark.parametrize("ranks, total", [(2, 1000), (3, 100), (4, 100), pytest.param(4, 1000, marks=pytest.mark.full)])
def test_a_thousand_routings_conserve_every_row(ranks, total):
    """Every rank knows all routings, so it knows which rows must arrive, in which order, and what must come back."""

    def on_rank():
        n, rank = dist.get_world_size(), dist.get_rank()
        generator = torch.Generator().manual_seed(0)
        routings = list(degenerate_routings(n))
        n_degenerate = len(routings)
        routings += [random_routing(n, generator) for _ in range(total - n_degenerate)]
        alone = busiest = empty = 0
        for i, (experts_nNK, E) in enumerate(routings):
            e, K = E // n, experts_nNK[0].shape[1]
            # row (rank, token): a name that float64 holds exactly
            x_nND = [
                torch.stack([torch.full((len(x),), 1.0 + r), torch.arange(1.0, 1 + len(x))], 1).double()
                for r, x in enumerate(experts_nNK)
            ]
            expected = [
                x_nND[source][token]
                for expert in range(rank * e, rank * e + e)
                for source in range(n)
                for token in (experts_nNK[source] == expert).any(1).nonzero()[:, 0].tolist()
            ]
            expected_RD = torch.stack(expected) if expected else torch.zeros(0, 2, dtype=torch.float64)
            x_ND = x_nND[rank].requires_grad_()
            weights_NK = 2.0 ** torch.arange(K).expand(len(x_ND), K)
            if i % 2 or i < n_degenerate:
                rows_RD, counts_e, route = ep.dispatch_by_hand(x_ND, experts_nNK[rank], E)
                assert torch.equal(rows_RD, expected_RD), (i, rank)
                assert counts_e.tolist() == [
                    sum((x == rank * e + j).sum().item() for x in experts_nNK) for j in range(e)
                ]
                assert sum(route.received) == len(expected_RD) and sum(route.sent) == K * len(x_ND)
                out_ND = ep.combine_by_hand(rows_RD * 3, weights_NK, route)
                assert torch.equal(out_ND, x_ND * 3 * (2.0**K - 1)), (i, rank)
                if i % 8 == 1 or i < n_degenerate:
                    (gradient,) = torch.autograd.grad(out_ND.sum(), x_ND)
                    assert (gradient == 3 * (2.0**K - 1)).all(), (i, rank)
            if i % 2 == 0 or i < n_degenerate:  # native: from rows that are sorted
                order_S = experts_nNK[rank].flatten().argsort(stable=True)
                counts_E = experts_nNK[rank].flatten().bincount(minlength=E)
                seen = []

                def compute(rows_RD, counts_e, seen=seen):
                    seen.append((rows_RD.detach(), counts_e))
                    return rows_RD * 3

                rows_SD = x_ND[order_S // K]
                out_SD = ep._exchanged(compute, dist.group.WORLD, 0.25, rows_SD, counts_E)
                assert torch.equal(seen[0][0], expected_RD) and seen[0][1].sum() == len(expected_RD), (i, rank)
                assert torch.equal(out_SD, 3 * rows_SD), (i, rank)
                if i % 8 == 0 or i < n_degenerate:
                    (gradient,) = torch.autograd.grad(out_SD.sum(), x_ND)
                    assert (gradient == 3 * K).all(), (i, rank)
            alone += not len(expected_RD)
            empty += not len(x_ND)
            busiest = max(busiest, len(expected_RD))
        return n_degenerate, len(routings), alone, empty, busiest

    results = launch(on_rank, ranks=ranks, timeout=200)
    assert results[0][:2] == (3 + 7 * ranks, total)
    for _, _, alone, empty, busiest in results:
        assert alone > total // 100 and empty > total // 10 and busiest > 20, results


# --------------------------------------------------------------------------------------------------------- cost


def test_bytes_equal_the_formula():
    """Per MoE layer and rank: counts, rows there, rows back; the last two again backward; with TP a gather of outputs."""

    def on_rank():
        n, rank = dist.get_world_size(), dist.get_rank()
        counts = {}
        for tp in (1, 2):
            dims = ParallelDims(dp_shard=n // tp, tp=tp, ep=n, world_size=n)
            dims.build_mesh("cpu")
            tp_mesh = dims.axis("tp") if tp > 1 else None
            moe = build(TINY).layers["0"]
            ep.apply_expert_parallel(moe, dims.axis("ep"), tp_mesh)
            moe.moe.router.balance_loss = 0.0
            x_BTD = torch.randn(
                2, T, TINY.dim, dtype=torch.float64, generator=torch.Generator().manual_seed(rank // tp)
            )
            moe.moe(x_BTD.clone())  # fills DTensor's caches
            with recording() as events:
                moe.moe(x_BTD.clone().requires_grad_()).sum().backward()
            events = [e for e in events if e.lane == "communication"]
            rows_E = moe.moe.router.tokens_per_expert
            counts[tp] = [(e.name, e.splits or e.n_bytes) for e in events], rows_E.view(n, -1).sum(1).tolist()
        return counts

    results = launch(on_rank, ranks=4)
    row = TINY.dim * 8
    for tp, N in ((1, 2 * T), (2, T)):  # a tensor-parallel rank takes half of its sequences' tokens
        to = [of_rank[tp][1] for of_rank in results]
        for rank, of_rank in enumerate(results):
            events = of_rank[tp][0]
            there = tuple(row * n_rows for n_rows in to[rank])
            back = tuple(row * to[source][rank] for source in range(4))
            assert sum(there) == N * TINY.top_k * row
            exchanges = [splits for name, splits in events if name == "all_to_all"]
            assert exchanges == [(2 * 8,) * 4, there, back, there, back]
            others = [(name, size) for name, size in events if name != "all_to_all"]
            gather = ("all_gather", 2 * T * row)
            assert others == ([gather, gather] if tp > 1 else [])  # of outputs, and of the input's gradient


# ------------------------------------------------------------------------------------------------------ balance


def test_the_bias_evens_the_load():
    """A router that prefers two experts; each rank has other tokens; the weights' gradients never see the bias."""

    def on_rank():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        torch.manual_seed(0)
        moe = MoE(replace(TINY, dim=16, n_experts=8, balance_loss=0.0))
        moe.router.gate.weight.data.mul_(0.2)[:2, 0] += 0.4
        loads = []
        for step in range(60):
            torch.manual_seed(1000 * dist.get_rank() + step)
            x_BTD = torch.randn(4, 32, 16)
            x_BTD[..., 0] += 2
            moe(x_BTD).sum().backward()
            counts_LE = ep.update_expert_bias(moe, mesh)
            assert counts_LE.sum() == 4 * 4 * 32 * 2 and not moe.router.tokens_per_expert.any()
            loads.append((counts_LE.max() * 8 / counts_LE.sum()).item())
        return loads, moe.router.bias_steps.tolist(), moe.router.gate.weight.grad.isfinite().all().item()

    results = launch(on_rank, ranks=4)
    loads, steps, finite = results[0]
    assert finite and all(r[:2] == results[0][:2] for r in results), "every rank decides the same"
    assert loads[0] > 3 > 2 > max(loads[-10:]), loads
    assert steps[0] < 0 and steps[1] < 0 and max(steps) <= 60


def test_the_loss_for_even_load_sees_whole_sequences():
    """A sequence over four ranks, as with context parallel: the gradients are those of one process."""

    def on_rank():
        n, rank = dist.get_world_size(), dist.get_rank()
        mesh = init_device_mesh("cpu", (n,))
        config = replace(TINY, n_shared_experts=0, balance_loss=1.0)
        x_BTD = torch.randn(3, 4 * n, TINY.dim, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        found = []
        for spread in (False, True):
            moe = build(config).layers["0"].moe
            if spread:
                ep.spread_sequences(moe, mesh)
            x = (x_BTD.chunk(n, 1)[rank] if spread else x_BTD).clone().requires_grad_()
            (moe(x) * 0).sum().backward()  # nothing but the loss for even load
            gradient = moe.router.gate.weight.grad
            if spread:
                dist.all_reduce(gradient)
            found.append({"gate": gradient, "x": x.grad if spread else x.grad.chunk(n, 1)[rank]})
        return {"spread": errors(found[1], found[0])}

    no_error(launch(on_rank, ranks=4), 1)


# ----------------------------------------------------------------------------------------------------- mistakes


def test_degrees_that_do_not_fit_are_refused_before_a_rank_starts():
    for degree in (1, 2, 4, 8):
        ep.check_expert_parallel(degree, 8, tp=2, seq_len=128)
    with pytest.raises(
        ValueError, match=r"8 experts cannot be spread evenly over ep 3: take an ep among \[1, 2, 4, 8\]"
    ):
        ep.check_expert_parallel(3, 8)
    with pytest.raises(ValueError, match="8 experts cannot be spread evenly over ep 16"):
        ep.check_expert_parallel(16, 8)
    with pytest.raises(ValueError, match=r"seq_len 10 is no multiple of tp 4.*seq_len 8 or 12"):
        ep.check_expert_parallel(2, 8, tp=4, seq_len=10)
    for wrong in (0, -1, 2.0, True, None):
        with pytest.raises(ValueError, match="whole number of at least 1"):
            ep.check_expert_parallel(wrong, 8)


def test_mistakes_are_told():
    def on_rank():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "tp"))
        found = {}

        def refused(case, call, *args, **kwargs):
            with pytest.raises(ValueError) as raised:
                call(*args, **kwargs)
            found[case] = str(raised.value)

        small = replace(TINY, n_layers=1)
        refused("axes", ep.apply_expert_parallel, Transformer(small), mesh)
        refused("odd", ep.apply_expert_parallel, Transformer(replace(small, n_experts=3)), mesh["ep"])
        refused("dense", ep.apply_expert_parallel, Transformer(PRESETS["debug"]), mesh["ep"])
        refused("dense bias", ep.update_expert_bias, Transformer(PRESETS["debug"]))
        spread = ep.apply_expert_parallel(Transformer(small), mesh["ep"])
        assert spread.layers["0"].moe.experts.w1.placements == (Shard(0),)
        refused("twice", ep.apply_expert_parallel, spread, mesh["ep"])
        cut = apply_tensor_parallel(Transformer(small), mesh["tp"])
        refused("tp", ep.apply_expert_parallel, cut, mesh["ep"])
        ep.apply_expert_parallel(cut, mesh["ep"], mesh["tp"])
        refused("sequence", cut, torch.zeros(2, 7, dtype=torch.long))
        biased = Transformer(small)
        biased.layers["0"].moe.router.scale = nn.Parameter(torch.ones(8))
        refused("plain parameter", ep.apply_expert_parallel, biased, mesh["ep"], mesh["tp"])
        listed = nn.ModuleDict({"moe": nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])})})
        refused("a list", ep.apply_expert_parallel, listed, mesh["ep"])
        x_ND = torch.zeros(3, 4)
        refused("expert", ep.dispatch_by_hand, x_ND, torch.tensor([[0], [8], [1]]), 8)
        refused("split", ep.dispatch_by_hand, x_ND, torch.tensor([[0], [1], [1]]), 6)
        return found

    found = launch(on_rank, ranks=4)[0]
    for case, words in {
        "axes": "pass mesh['ep'] and mesh['tp']",
        "odd": "3 experts cannot be spread evenly over ep 2: take an ep among [1, 3]",
        "dense": "no module of Transformer is called 'experts'",
        "dense bias": "no module of Transformer has tokens_per_expert",
        "twice": "apply expert parallel once, and before FSDP",
        "tp": "parameters are DTensors, as tok_embeddings.weight is: pass tp_mesh too",
        "sequence": "seq_len 7 is no multiple of tp 2",
        "plain parameter": "layers.0.moe.router.scale is not of an nn.Linear",
        "a list": "moe.experts is a ModuleList",
        "expert": "an expert is outside [0, 8)",
        "split": "6 experts cannot be spread evenly over ep 4",
    }.items():
        assert words in found[case], found[case]
