"""Context parallelism: three ways against one process in float64, tiles and bytes against the formula."""

import logging
import math
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from minititan import context_parallel as cp
from minititan.lab.launch import launch
from minititan.lab.trace import recording, traffic, watch_memory
from minititan.meta_init import materialize, on_meta
from minititan.model import ModelConfig, Transformer
from minititan.parallel_dims import ParallelDims
from minititan.tensor_parallel import apply_tensor_parallel

ATTENTION = {"ring": cp.ring_attention, "all_gather": cp.all_gather_attention, "ulysses": cp.ulysses_attention}
TINY = ModelConfig(vocab_size=64, dim=32, n_layers=2, n_heads=8, n_kv_heads=4, ffn_dim=48)


def relative(ours, theirs):
    return ((ours - theirs).norm() / theirs.norm()).item()


def worst(results: list[dict[str, dict[str, float]]]) -> None:
    """Results by rank: case -> name -> error. A nan fails too."""
    assert results[0]
    for rank, cases in enumerate(results):
        for case, found in cases.items():
            bad = {name: error for name, error in found.items() if not error < 1e-10}
            assert found and not bad, f"{case} on rank {rank}: {bad}"


# --- attention alone -------------------------------------------------------------------------------------------


def parity_of_attention(group, n: int) -> dict[str, dict[str, float]]:
    """All methods, masks and balances, and H/G query heads a key/value head, over a group of n ranks with this one."""
    found = {}
    for grouping in (1, 2, 4):
        B, T, G, K = 2, 4 * n, n, 8
        torch.manual_seed(grouping)
        q, k, v, grad = (torch.randn(B, h, T, K, dtype=torch.float64) for h in (grouping * G, G, G, grouping * G))
        whole = [x.clone().requires_grad_() for x in (q, k, v)]
        for causal in (True, False):
            truth = F.scaled_dot_product_attention(*whole, is_causal=causal, enable_gqa=True)
            truths = [truth.detach(), *torch.autograd.grad(truth, whole, grad)]
            for method, attend in ATTENTION.items():
                for balance in (True, False):
                    mine = [cp.shard_sequence(x, group, 2, balance).requires_grad_() for x in (q, k, v)]
                    out = attend(*mine, group, causal=causal, balance=balance)
                    grads = torch.autograd.grad(out, mine, cp.shard_sequence(grad, group, 2, balance))
                    by_heads = cp.unshard_sequence(torch.cat((out.detach(), *grads), 1), group, 2, balance)
                    whole_again = by_heads.split([x.shape[1] for x in truths], 1)
                    found[f"{n} {grouping=} {causal=} {method} {balance=}"] = {
                        name: relative(ours, theirs)
                        for name, ours, theirs in zip(("out", "dq", "dk", "dv"), whole_again, truths, strict=True)
                    }
    return found


def test_two_three_and_four_ranks_equal_one_process():
    def on_rank():
        mesh, three = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp")), dist.new_group([0, 1, 2])
        found = parity_of_attention(None, 4) | parity_of_attention(mesh["cp"], 2)
        return found | (parity_of_attention(three, 3) if dist.get_rank() < 3 else {})

    results = launch(on_rank, ranks=4, timeout=100)
    assert [len(cases) for cases in results] == [108, 108, 108, 72]
    worst(results)


@pytest.mark.full
def test_eight_ranks_equal_one_process():
    results = launch(lambda: parity_of_attention(None, 8), ranks=8, timeout=200)
    assert len(results[0]) == 36
    worst(results)


def test_odd_shapes():
    """One key/value head; layouts that are not contiguous; a gradient that is one number, broadcast; an odd part."""

    def on_rank():
        n, found = dist.get_world_size(), {}
        for method in ("ring", "all_gather"):
            for t, balance in ((6, True), (5, False)):
                torch.manual_seed(0)
                qkv = torch.randn(1, n * t, 5 + 2, 3, dtype=torch.float64)
                mine, whole = cp.shard_sequence(qkv, None, 1, balance).requires_grad_(), qkv.requires_grad_()

                def heads(x):
                    return x.transpose(1, 2).split((5, 1, 1), 1)

                out = ATTENTION[method](*heads(mine), balance=balance)
                out.sum().backward()
                whole.grad = None
                F.scaled_dot_product_attention(*heads(whole), is_causal=True, enable_gqa=True).sum().backward()
                ours, theirs = cp.unshard_sequence(mine.grad, None, 1, balance), whole.grad
                parts = {"dk": [5], "dv": [6]}
                found[f"{method} {balance=}"] = {p: relative(ours[:, :, i], theirs[:, :, i]) for p, i in parts.items()}
                found[f"{method} {balance=}"]["dq"] = (ours[:, :, :5] - theirs[:, :, :5]).norm().item()
        return found

    worst(launch(on_rank, ranks=3))


def test_bfloat16_is_as_near_as_one_process():
    """Blocks are merged, and gradients added up, in float32: the errors are those of bf16 inputs, whatever n."""

    def on_rank():
        torch.manual_seed(0)
        q, k, v, grad = (torch.randn(1, h, 256, 16).bfloat16() for h in (4, 4, 4, 4))

        def run(attend, *tensors):
            leaves = [x.detach().clone().requires_grad_() for x in tensors]
            out = attend(*leaves)
            towards = grad if len(out[0][0]) == 256 else cp.shard_sequence(grad, None, 2)
            return [out.detach(), *torch.autograd.grad(out, leaves, towards.to(out.dtype))]

        def sdpa(*tensors):
            return F.scaled_dot_product_attention(*tensors, is_causal=True)

        exact, single = run(sdpa, q.double(), k.double(), v.double()), run(sdpa, q, k, v)
        found = {"one process": [relative(x, y) for x, y in zip(single, exact, strict=True)]}
        for method, attend in ATTENTION.items():
            mine = run(attend, *(cp.shard_sequence(x, None, 2) for x in (q, k, v)))
            assert all(x.dtype == torch.bfloat16 for x in mine)
            mine = [cp.unshard_sequence(x, None, 2) for x in mine]
            found[method] = [relative(x, y) for x, y in zip(mine, exact, strict=True)]
        return found

    found = launch(on_rank, ranks=4)[0]
    for method in ATTENTION:
        for ours, theirs in zip(found[method], found["one process"], strict=True):
            assert ours < 1.5 * theirs < 0.02, (method, found)


# --- by hand ---------------------------------------------------------------------------------------------------


def test_by_hand():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 8, 4, dtype=torch.float64) for _ in "qkv")
    whole, whole_lse = cp.attention_by_hand(q, k, v)
    parts = [cp.attention_by_hand(q, k[:, :, keys], v[:, :, keys]) for keys in (slice(0, 3), slice(3, 8))]
    merged, lse = cp.merge_by_hand(*parts[0], *parts[1])
    assert relative(merged, whole) < 1e-14 and relative(lse, whole_lse) < 1e-14
    assert relative(whole, F.scaled_dot_product_attention(q, k, v)) < 1e-14
    huge = [(out, lse + 1e4) for out, lse in parts]  # exp of either alone would overflow
    assert relative(cp.merge_by_hand(*huge[0], *huge[1])[0], whole) < 1e-11

    def on_rank():
        mine = [cp.shard_sequence(x, None, 2, balance=False) for x in (q, k, v)]
        out = cp.unshard_sequence(cp.ring_attention_by_hand(*mine), None, 2, balance=False)
        return relative(out, F.scaled_dot_product_attention(q, k, v, is_causal=True))

    assert max(launch(on_rank, ranks=4)) < 1e-14


# --- where tokens lie ------------------------------------------------------------------------------------------


def test_tokens_lie_where_positions_say():
    def on_rank():
        n, rank = dist.get_world_size(), dist.get_rank()
        for balance in (True, False):
            places = cp.positions(24, n, rank, balance)
            x = torch.randn(2, 24, 3)
            dist.broadcast(x, 0)
            for dim, whole in ((1, x), (2, x.transpose(1, 2)), (0, x[0])):
                mine = cp.shard_sequence(whole, None, dim, balance)
                assert torch.equal(mine, whole.index_select(dim, places)) and mine.is_contiguous()
                assert torch.equal(cp.unshard_sequence(mine, None, dim, balance), whole)
            mine = cp.shard_sequence(places.new_tensor(range(24)), None, 0, balance)
            assert torch.equal(mine, places)
        return cp.positions(24, n, rank).tolist()

    assert launch(on_rank, ranks=3) == [
        [0, 1, 2, 3, 20, 21, 22, 23],
        [4, 5, 6, 7, 16, 17, 18, 19],
        [8, 9, 10, 11, 12, 13, 14, 15],
    ]


def test_balance_is_the_same_as_torch_s():
    from torch.distributed.tensor.experimental._context_parallel import _load_balancer

    for n in (2, 3, 4):
        order = _load_balancer._HeadTailLoadBalancer(24, n, "cpu")._generate_indices()[0]
        assert torch.equal(order, torch.cat([cp.positions(24, n, rank) for rank in range(n)]))


class Tiles(TorchDispatchMode):
    """Which query met which key, seen at the kernel: the first number of each is its place in the sequence."""

    def __init__(self):
        super().__init__()
        self.forward, self.backward = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._overloadpacket.__name__
        if name.startswith("_scaled_dot_product_flash_attention_for_cpu"):
            backward = name.endswith("backward")
            q, k = args[1:3] if backward else args[:2]
            tiles = self.backward if backward else self.forward
            causal = any(args[7:8] if backward else args[4:5])
            tiles.append((q[0, 0, :, 0].int().tolist(), k[0, 0, :, 0].int().tolist(), causal))
        return func(*args, **(kwargs or {}))


def pairs(tiles) -> list[tuple[int, int]]:
    return [(i, j) for q, k, causal in tiles for a, i in enumerate(q) for b, j in enumerate(k) if not causal or b <= a]


def recorded_tiles(method: str, causal: bool, balance: bool, T: int):
    x = torch.zeros(1, dist.get_world_size(), T, 4, dtype=torch.float64)
    x[..., 0] = torch.arange(T)
    mine = cp.shard_sequence(x, None, 2, balance).requires_grad_()
    with Tiles() as tiles:
        ATTENTION[method](mine, mine, mine, causal=causal, balance=balance).sum().backward()
    return tiles.forward, tiles.backward


def test_work_per_rank_from_the_recorded_tiles():
    T = 48

    def on_rank():
        cases = [(m, c, b) for m in ("ring", "all_gather") for c in (True, False) for b in (True, False)]
        return {case: recorded_tiles(*case, T) for case in cases}

    for n in (3, 4):
        by_rank, t = launch(on_rank, ranks=n), T // n
        for case in by_rank[0]:
            _, causal, balance = case
            expected = [(i, j) for i in range(T) for j in range(T) if j <= i or not causal]
            for direction in (0, 1):
                met = [pairs(tiles[case][direction]) for tiles in by_rank]
                assert sorted(pair for of_rank in met for pair in of_rank) == expected, "each pair once, on one rank"
                work = [len(of_rank) for of_rank in met]
                if causal and not balance:
                    assert work == [t * (t + 1) // 2 + rank * t * t for rank in range(n)]
                else:
                    assert max(work) <= 1.05 * min(work) and max(work) == min(work)
        contiguous = [len(pairs(tiles["ring", True, False][0])) for tiles in by_rank]
        assert max(contiguous) / min(contiguous) == pytest.approx(2 * n - 1, rel=0.15)


# --- bytes -----------------------------------------------------------------------------------------------------


def test_bytes_on_the_wire_equal_the_formula():
    B, H, G, K = 2, 12, 12, 4

    def on_rank():
        n, found = dist.get_world_size(), {}
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            for groups in (n, G):
                q, k, v = (torch.randn(B, h, 4, K, dtype=dtype, requires_grad=True) for h in (H, groups, groups))
                for method, attend in ATTENTION.items():
                    with recording() as events:
                        attend(q, k, v).sum().backward()
                    found[method, groups, dtype.itemsize] = events
        return found

    for n in (2, 3, 4):
        by_rank = launch(on_rank, ranks=n)
        for method, groups, itemsize in by_rank[0]:
            moved = traffic([found[method, groups, itemsize] for found in by_rank])
            formula = cp.wire_bytes(method, n, B, 4 * n, H, groups, K, itemsize)
            assert moved.total == pytest.approx(n * formula, rel=1e-12), (method, n, groups, itemsize)
            assert [sum(row) for row in moved.pairs] == pytest.approx([formula] * n, rel=1e-12)
            calls = {
                "ring": {"send": 3 * n * (n - 1)},
                "all_gather": {"all_gather": 2, "reduce_scatter": 1},
                "ulysses": {"all_to_all": 4},
            }
            assert moved.calls == calls[method]


# --- a whole model ---------------------------------------------------------------------------------------------

B, T, STEPS, ACCUMULATE = 4, 32, 3, 2


def build(config: ModelConfig, apply=lambda model: model):
    """The same weights on every layout, norms included, which are not 1 here."""

    def init(name, full, generator):
        if full.is_floating_point():
            full.normal_(1.0 if "norm" in name else 0.0, 0.3, generator=generator)
        else:
            full.zero_()

    return materialize(apply(on_meta(lambda: Transformer(config).double())), "cpu", seed=1, init=init)


def microbatch(vocab_size: int, i: int):
    """Targets are ignored here and there, so ranks and microbatches have different numbers of them."""
    generator = torch.Generator().manual_seed(i)
    text_BT = torch.randint(vocab_size, (B, T + 1), generator=generator)
    tokens_BT, targets_BT = text_BT[:, :-1], text_BT[:, 1:].clone()
    targets_BT[0, : 5 + i] = -100
    return tokens_BT, targets_BT


def train(model, config, ways: int = 1, mine=lambda x: x, logits_of=lambda out: out):
    """Some AdamW steps -> the loss and gradients of each. ways: ranks that FSDP takes the mean of."""
    optimizer, seen = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(STEPS):
        batches = [microbatch(config.vocab_size, step * ACCUMULATE + i) for i in range(ACCUMULATE)]
        n_valid = sum((targets_BT != -100).sum().item() for _, targets_BT in batches)
        loss = torch.zeros((), dtype=torch.float64)
        for i, (tokens_BT, targets_BT) in enumerate(batches):
            if isinstance(model, FSDPModule):
                model.set_is_last_backward(i == ACCUMULATE - 1)
            logits_BTV = logits_of(model(mine(tokens_BT)))
            total = F.cross_entropy(logits_BTV.flatten(0, 1), mine(targets_BT).flatten(), reduction="sum")
            (total * ways / n_valid).backward()
            loss += total.detach() / n_valid
        seen.append((loss, {name: whole(p.grad).clone() for name, p in model.named_parameters()}))
        optimizer.step()
        optimizer.zero_grad()
    return seen


def whole(tensor):
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)  # two gathers: as it must
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def compare(seen, truth, group) -> dict[str, float]:
    found = {}
    for step, ((loss, gradients), (true_loss, true_gradients)) in enumerate(zip(seen, truth, strict=True)):
        dist.all_reduce(loss, group=group)
        found[f"loss {step}"] = abs(loss / true_loss - 1).item()
        assert gradients.keys() == true_gradients.keys()
        found |= {f"{name} {step}": relative(grad, true_gradients[name]) for name, grad in gradients.items()}
    return found


def parity_of_model(config, truth, method="ring", balance=True, recompute=False, **degrees):
    dims = ParallelDims(**degrees, world_size=dist.get_world_size())
    dims.build_mesh("cpu")

    def apply(model):
        if dims.tp > 1:
            apply_tensor_parallel(model, dims.axis("tp"), sequence_parallel=recompute)
        cp.apply_context_parallel(model, dims.axis("cp"), method, balance)
        if recompute:
            for block in model.layers.values():
                forward = block.forward
                block.forward = lambda *args, f=forward: checkpoint(f, *args, use_reentrant=False)
        if dims.size("hsdp") > 1:
            for module in (*model.layers.values(), model):
                fully_shard(module, mesh=dims.axis("hsdp" if dims.dp_replicate > 1 else "fsdp"))
        return model

    def mine(x_BT):
        return cp.shard_sequence(
            x_BT.chunk(dims.size("dp"))[dims.axis("dp").get_local_rank()], dims.axis("cp"), 1, balance
        )

    seen = train(build(config, apply), config, dims.size("hsdp"), mine)
    return compare(seen, truth, dims.axis("loss").get_group())


def test_whole_model_equals_one_process():
    """Three AdamW steps with accumulation 2, FSDP over dp_shard × cp, and with tensor parallel."""

    def on_rank():
        truth = train(build(TINY), TINY)
        return {
            "dp 2, cp 2": parity_of_model(TINY, truth, dp_shard=2, cp=2),
            "cp 2, tp 2, recomputed": parity_of_model(TINY, truth, "ulysses", recompute=True, cp=2, tp=2),
        }

    worst(launch(on_rank, ranks=4, timeout=100))


@pytest.mark.full
def test_whole_model_on_eight_ranks():
    config = replace(TINY, n_layers=1, n_kv_heads=8)

    def on_rank():
        truth, found = train(build(config), config), {}
        layouts = [
            {"cp": 8},
            {"dp_shard": 2, "cp": 2, "tp": 2},
            {"dp_replicate": 2, "dp_shard": 2, "cp": 2},
            {"cp": 4, "tp": 2},
        ]
        for method, layout in [("ring", x) for x in layouts] + [("ulysses", x) for x in layouts[:2]]:
            found[f"{method} {layout}"] = parity_of_model(config, truth, method, **layout)
        found["all_gather"] = parity_of_model(config, truth, "all_gather", **layouts[1])
        found["contiguous"] = parity_of_model(config, truth, "all_gather", False, **layouts[0])
        return found

    worst(launch(on_rank, ranks=8, timeout=200))


def test_three_ranks_without_fsdp():
    """Gradients summed by hand: what a rank has is its tokens' summand."""

    def on_rank():
        n, found = dist.get_world_size(), {}
        truth = train_lengths(build(TINY))
        for method in ("ring", "all_gather"):
            mesh = init_device_mesh("cpu", (n,))
            model = cp.apply_context_parallel(build(TINY), mesh, method)
            loss, gradients = train_lengths(model, lambda x, mesh=mesh: cp.shard_sequence(x, mesh))
            for tensor in (loss, *gradients.values()):
                dist.all_reduce(tensor)
            found[method] = {name: relative(grad, truth[1][name]) for name, grad in gradients.items()}
            found[method]["loss"] = relative(loss, truth[0])
        return found

    def train_lengths(model, mine=lambda x: x):
        tokens_BT, targets_BT = microbatch(TINY.vocab_size, 0)
        logits_BTV = model(mine(tokens_BT[:, :30]))
        loss = F.cross_entropy(logits_BTV.flatten(0, 1), mine(targets_BT[:, :30]).flatten(), reduction="sum")
        loss.backward()
        return loss.detach(), {name: p.grad for name, p in model.named_parameters()}

    worst(launch(on_rank, ranks=3))


@pytest.mark.full
def test_transformers_llama():
    """A random LlamaForCausalLM with grouped heads, with FSDP and TP; and what it refuses."""
    pytest.importorskip("transformers")
    layouts = [("ulysses", {"cp": 4}), ("ring", {"dp_shard": 2, "cp": 2}), ("all_gather", {"cp": 2, "tp": 2})]

    def on_rank():
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
        heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
        config = LlamaConfig(**sizes, **heads, use_cache=False, max_position_embeddings=64)
        torch.manual_seed(3)
        plain = LlamaForCausalLM(config).double()
        truth = train(deepcopy(plain), config, logits_of=lambda out: out.logits)
        found, refused = {}, {}
        for method, layout in layouts:
            dims = ParallelDims(**layout, world_size=4)
            dims.build_mesh("cpu")
            model = deepcopy(plain)
            if dims.tp > 1:
                apply_tensor_parallel(model, dims.axis("tp"))
            cp.apply_context_parallel(model, dims.axis("cp"), method)
            for module in (*model.model.layers, model):
                fully_shard(module, mesh=dims.axis("fsdp"))

            def mine(x_BT, dims=dims):
                rows = x_BT.chunk(dims.size("dp"))[dims.axis("dp").get_local_rank()]
                return cp.shard_sequence(rows, dims.axis("cp"))

            seen = train(model, config, dims.size("hsdp"), mine, lambda out: out.logits)
            found[f"{method} {layout}"] = compare(seen, truth, dims.axis("loss").get_group())
        untouched = plain(microbatch(64, 0)[0]).logits
        assert plain.config._attn_implementation == "sdpa" and untouched.shape[1] == T

        model, tokens_BT = cp.apply_context_parallel(plain, dims.axis("cp")), torch.zeros(1, 8, dtype=torch.long)
        for case, options in {
            "mask": {"attention_mask": torch.tensor([[1] * 7 + [0]])},
            "documents": {"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])},
            "labels": {"labels": tokens_BT},
        }.items():
            with pytest.raises(ValueError) as raised:
                model(input_ids=tokens_BT, **options)
            refused[case] = str(raised.value)
        places = cp.positions(16, 2, dims.axis("cp").get_local_rank())[None]
        with torch.no_grad():
            logits = [
                model(tokens_BT).logits,
                model(input_ids=tokens_BT, position_ids=places, attention_mask=torch.ones(1, 8)).logits,
                model(inputs_embeds=model.model.embed_tokens(tokens_BT)).logits,
            ]
        assert torch.equal(logits[0], logits[1]) and torch.equal(logits[0], logits[2])
        return found, refused

    results = launch(on_rank, ranks=4, timeout=100)
    worst([found for found, _ in results])
    for case, words in {"mask": "padding goes to the end", "documents": "restart", "labels": "shift the whole"}.items():
        assert words in results[0][1][case]


def test_a_stage_of_a_pipeline_gets_global_positions():
    def on_rank():
        mesh = init_device_mesh("cpu", (2,))
        torch.manual_seed(0)
        stage = Transformer(TINY, [1], embedding=False, output=False).double()
        stage.init_weights(torch.Generator().manual_seed(0))
        x_BTD = torch.randn(2, 16, TINY.dim, dtype=torch.float64)
        with torch.no_grad():
            truth = stage(x_BTD)
            out = cp.apply_context_parallel(stage, mesh)(cp.shard_sequence(x_BTD, mesh))
            places = cp.positions(16, 2, dist.get_rank())
            again = stage(cp.shard_sequence(x_BTD, mesh), places)
        assert torch.equal(out, again)
        return {"stage": {"x": relative(cp.unshard_sequence(out, mesh), truth)}}

    worst(launch(on_rank, ranks=2))


def test_experts_are_balanced_over_the_whole_sequence():
    config = replace(TINY, n_experts=4, top_k=2, expert_ffn_dim=16, balance_loss=0.5, n_layers=1)

    def on_rank():
        mesh = init_device_mesh("cpu", (2,))

        def gradients(model, mine):
            tokens_BT, targets_BT = microbatch(config.vocab_size, 0)
            logits_BTV = model(mine(tokens_BT))
            F.cross_entropy(logits_BTV.flatten(0, 1), mine(targets_BT).flatten(), reduction="sum").backward()
            return {name: p.grad for name, p in model.named_parameters()}

        truth = gradients(build(config), lambda x: x)
        found = gradients(cp.apply_context_parallel(build(config), mesh), lambda x: cp.shard_sequence(x, mesh))
        for grad in found.values():
            dist.all_reduce(grad)
        return {"experts": {name: relative(grad, truth[name]) for name, grad in found.items()}}

    worst(launch(on_rank, ranks=2))


# --- memory ----------------------------------------------------------------------------------------------------


def peak_activations(n_tokens: int) -> dict[int, int]:
    """cp degree (all ranks, or each rank alone) -> bytes of activations at the peak of a step on this rank."""
    config, n = (
        ModelConfig(vocab_size=32, dim=16, n_layers=1, n_heads=2, n_kv_heads=1, ffn_dim=32),
        dist.get_world_size(),
    )
    model = Transformer(config)
    model.init_weights(torch.Generator().manual_seed(0))
    mesh = init_device_mesh("cpu", (n,))
    cp.apply_context_parallel(model, mesh)
    tokens_BT = cp.shard_sequence(torch.arange(n_tokens)[None] % 32, mesh)
    with watch_memory(model) as samples:
        F.cross_entropy(model(tokens_BT).flatten(0, 1), tokens_BT.flatten(), reduction="sum").backward()
    return max(sample.n_bytes.get("activations", 0) for sample in samples)


def activation_memory(lengths) -> None:
    for n_tokens in lengths:
        one = launch(peak_activations, n_tokens, ranks=1)[0]
        for n in (2, 4):
            for measured in launch(peak_activations, n_tokens, ranks=n):
                assert one / measured == pytest.approx(n, rel=0.1), (n_tokens, n, one, measured)


def test_activation_memory_falls_as_one_over_n():
    activation_memory([2048])


@pytest.mark.full
def test_activation_memory_of_long_sequences():
    activation_memory([4096, 8192, 16384])


# --- what is refused -------------------------------------------------------------------------------------------


def test_sizes_that_do_not_divide_are_refused_before_a_rank_starts():
    for n in (1, 2, 3, 4, 8):
        cp.check_context_parallel(n, seq_len=48, n_heads=1, n_kv_heads=1)
    cp.check_context_parallel(3, seq_len=15, balance=False)
    cp.check_context_parallel(1, seq_len=15)
    cp.check_context_parallel(4, seq_len=48, method="ulysses", n_heads=8, n_kv_heads=4)
    with pytest.raises(
        ValueError, match=r"seq_len 100 .* 2 equal chunks .* 4 ranks .*96 or 104, a multiple of 8.*degree of 2$"
    ):
        cp.check_context_parallel(4, seq_len=100)
    with pytest.raises(ValueError, match=r"seq_len 5 cannot be cut .*pad or cut it to 3 or 6, a multiple of 3$"):
        cp.check_context_parallel(3, seq_len=5, balance=False)
    with pytest.raises(ValueError, match=r"seq_len 0 .* to 4, a"):
        cp.check_context_parallel(2, seq_len=0)
    with pytest.raises(ValueError, match=r"n_kv_heads 2 on a rank.*method='ring'.*degree of 1 or 2"):
        cp.check_context_parallel(4, method="ulysses", n_heads=8, n_kv_heads=2)
    with pytest.raises(ValueError, match="'flash' is none of ring, all_gather, ulysses, torch"):
        cp.check_context_parallel(2, method="flash")
    with pytest.raises(ValueError, match="torch's own head-tail balance"):
        cp.check_context_parallel(2, method="torch", balance=False)
    for wrong in (0, -2, 2.0, True, "4"):
        with pytest.raises(ValueError, match="whole number of at least 1"):
            cp.check_context_parallel(wrong, seq_len=8)


def test_mistakes_are_told():
    def on_rank():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        found, small = {}, replace(TINY, n_layers=1)

        def refused(case, function, *args, **options):
            with pytest.raises(ValueError) as raised:
                function(*args, **options)
            found[case] = str(raised.value)

        q, k, v = (torch.zeros(1, h, 4, 8) for h in (4, 2, 2))
        refused("axes", cp.ring_attention, q, k, v, mesh)
        refused("shapes", cp.ring_attention, q, k[:, :, :2], v[:, :, :2], mesh["cp"])
        refused("heads", cp.all_gather_attention, q, k[:, [0, 1, 1]], v[:, [0, 1, 1]])
        refused("ulysses", cp.ulysses_attention, q, k, v)
        refused("odd", cp.ring_attention, q[:, :, :3], k[:, :, :3], v[:, :, :3], mesh["cp"])
        cp.ring_attention(q[:, :, :3], k[:, :, :3], v[:, :, :3], mesh["cp"], causal=False)
        refused("length", cp.shard_sequence, torch.zeros(2, 10), mesh["cp"])
        refused("method", cp.apply_context_parallel, Transformer(small), mesh["cp"], "rings")
        refused("model", cp.apply_context_parallel, torch.nn.Linear(4, 4), mesh["cp"])
        four = init_device_mesh("cpu", (4,))
        refused("few heads", cp.apply_context_parallel, Transformer(replace(small, n_kv_heads=2)), four, "ulysses")
        model = cp.apply_context_parallel(Transformer(small), mesh["cp"])
        refused("twice", cp.apply_context_parallel, model, mesh["cp"])
        tokens_BT = torch.zeros(1, 8, dtype=torch.long)
        refused("positions", model, tokens_BT, torch.arange(8) + 1)
        native = cp.apply_context_parallel(Transformer(small), mesh["cp"], "torch")
        refused("no context", native, tokens_BT)

        def in_context():
            with cp.torch_context_parallel(mesh["cp"]):
                native(tokens_BT)

        refused("cpu", in_context)
        return found

    found = launch(on_rank, ranks=4)[0]
    for case, words in {
        "axes": "mesh['cp']",
        "shapes": "the same tokens of the sequence",
        "heads": "4 query heads cannot share 3",
        "ulysses": "n_kv_heads 2 on a rank",
        "odd": "seq_len 6 cannot",
        "length": "pad or cut it to 8 or 12",
        "method": "'rings' is none of",
        "model": "no attention that is known",
        "few heads": "ulysses gives each of 4 ranks",
        "twice": "apply it once",
        "positions": "positions_T are not the 8 places",
        "no context": "torch_context_parallel(mesh)",
        "cpu": "no attention for a cpu mesh",
    }.items():
        assert words in found[case], found[case]


def test_a_dry_run_allocates_nothing():
    """On meta, in a fake group of 8 ranks: the shapes of a real one."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def on_rank():
        dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=8)
        mesh = init_device_mesh("cpu", (8,))
        config = replace(TINY, n_kv_heads=8, n_layers=1)
        for method in ATTENTION:
            model = cp.apply_context_parallel(on_meta(lambda: Transformer(config)), mesh, method)
            logits_BTV = model(torch.zeros(1, 32, dtype=torch.long, device="meta"))
            logits_BTV.sum().backward()
            assert logits_BTV.shape == (1, 32, 64) and all(p.grad.is_meta for p in model.parameters())
        dist.destroy_process_group()
        return math.prod(logits_BTV.shape)

    assert launch(on_rank, ranks=1) == [2048]
