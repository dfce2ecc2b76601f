"""Tensor parallelism: every layout against one process in float64, the collectives against the formula."""

import contextlib
import logging
from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel

from minititan import tensor_parallel as tp
from minititan.lab.launch import launch
from minititan.lab.trace import recording
from minititan.meta_init import materialize, on_meta
from minititan.model import ModelConfig, Transformer

TINY = ModelConfig(vocab_size=64, dim=32, n_layers=2, n_heads=8, n_kv_heads=4, ffn_dim=48)
B, T = 4, 16


def build(config: ModelConfig, apply=lambda model: model) -> nn.Module:
    """The same weights on every layout, norms included, which are not 1 here."""

    def init(name, full, generator):
        full.normal_(1.0 if "norm" in name else 0.0, 0.3, generator=generator)

    return materialize(apply(on_meta(lambda: Transformer(config).double())), "cpu", seed=1, init=init)


def batch(vocab_size: int):
    generator = torch.Generator().manual_seed(2)
    tokens_BT, targets_BT = torch.randint(vocab_size, (2, B, T), generator=generator)
    targets_BT[0, :5] = -100
    return tokens_BT, targets_BT


def cross_entropy(logits_BTV, targets_BT):
    return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


def reference(config: ModelConfig):
    model = build(config)
    tokens_BT, targets_BT = batch(config.vocab_size)
    logits = model(tokens_BT)
    loss = cross_entropy(logits, targets_BT)
    loss.backward()
    return logits.detach(), loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def whole(tensor):
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)  # two gathers: as it must
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def errors(loss, model, truth_loss, truth, group=None) -> dict[str, float]:
    """Relative error of the loss and of every gradient: of the whole one, or of this rank's part by hand."""
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    found = {"loss": ((whole(loss) - truth_loss).abs() / truth_loss.abs()).item()}
    for name, p in model.named_parameters():
        grad, expected = whole(p.grad), truth[name]
        if grad.shape != expected.shape:
            expected = expected.chunk(n, tp.cut_dim(name))[rank]
        found[name] = ((grad - expected).norm() / expected.norm()).item()
    assert found.keys() == {"loss", *truth}
    return found


def run_by_hand(config, group=None):
    _, loss, truth = reference(config)
    tokens_BT, targets_BT = batch(config.vocab_size)
    model = tp.apply_tensor_parallel_by_hand(build(config), group)
    mine = tp.vocab_parallel_cross_entropy_by_hand(model(tokens_BT), targets_BT, config.vocab_size, group)
    mine.backward()
    return errors(mine, model, loss, truth, group)


def run_native(config, mesh, sequence=False, vocabulary=False, fsdp_mesh=None):
    logits, loss, truth = reference(config)
    tokens_BT, targets_BT = batch(config.vocab_size)
    seen = []

    def apply(model):
        tp.apply_tensor_parallel(model, mesh, None, sequence, vocabulary)
        assert (model.output.weight is model.tok_embeddings.weight) == config.tied
        if fsdp_mesh is not None:
            for module in (*model.layers.values(), model):
                fully_shard(module, mesh=fsdp_mesh)
        return model

    model = build(config, apply)
    assert (model.output.weight is model.tok_embeddings.weight) == config.tied
    for block in model.layers.values():
        block.attention.inner.register_forward_pre_hook(lambda _, args: seen.extend(args))
    with loss_parallel() if vocabulary else contextlib.nullcontext():
        if fsdp_mesh is None:
            out = model(tokens_BT)
            mine = cross_entropy(out, targets_BT)
            mine.backward()
        else:  # each data-parallel rank its rows; the sum over all targets, averaged by FSDP
            n, rank = fsdp_mesh.size(), fsdp_mesh.get_local_rank()
            rows = slice(rank * B // n, (rank + 1) * B // n)
            out = model(tokens_BT[rows])
            mine = F.cross_entropy(out.flatten(0, 1), targets_BT[rows].flatten(), reduction="sum")
            mine = mine * (n / (targets_BT != -100).sum().item())
            mine.backward()
    assert isinstance(out, DTensor) == vocabulary
    assert all(type(t) is torch.Tensor for t in seen), "attention.inner gets plain local tensors"
    n = mesh.size()
    assert {t.shape[1] for t in seen} == {config.n_heads // n, config.n_kv_heads // n}
    found = errors(mine, model, loss, truth)
    if fsdp_mesh is None:
        found["logits"] = ((whole(out) - logits).norm() / logits.norm()).item()
    else:
        found.pop("loss")  # of these rows only
    return found


def worst(results: list[dict[str, dict[str, float]]]) -> None:
    """Results by rank: case -> name -> error. A nan or a missing name fails too."""
    for rank, cases in enumerate(results):
        for case, found in cases.items():
            bad = {name: error for name, error in found.items() if not error < 1e-10}
            assert not bad, f"{case} on rank {rank}: {bad}"


def test_four_ranks_equal_one_process():
    def on_rank():
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        odd, tied = replace(TINY, vocab_size=250), replace(TINY, tied=True, vocab_size=61)
        found = {
            "by hand": run_by_hand(TINY),
            "by hand, 250 rows": run_by_hand(odd),
            "by hand, tied": run_by_hand(tied),
        }
        for sequence in (False, True):
            for vocabulary in (False, True):
                flags = ", sequence" * sequence + ", vocabulary" * vocabulary
                found[f"native{flags}"] = run_native(TINY, mesh, sequence, vocabulary)
                found[f"native, 250 rows, tied{flags}"] = run_native(
                    replace(odd, tied=True), mesh, sequence, vocabulary
                )
        return found

    results = launch(on_rank, ranks=4, timeout=100)
    assert len(results[0]) == 11
    worst(results)


def test_tp_2_times_fsdp_2():
    def on_rank():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
        found = {"by hand": run_by_hand(TINY, mesh.get_group("tp")), "native": run_native(TINY, mesh["tp"])}
        for sequence, vocabulary in ((False, False), (True, False), (True, True)):
            config = replace(TINY, tied=True, vocab_size=63) if vocabulary else TINY
            found[f"fsdp {sequence=} {vocabulary=}"] = run_native(
                config, mesh["tp"], sequence, vocabulary, mesh["fsdp"]
            )
        return found

    worst(launch(on_rank, ranks=4, timeout=100))


def test_eight_ranks():
    def on_rank():
        mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("tp",))
        config = replace(TINY, n_layers=1, n_kv_heads=8, vocab_size=250)
        return {
            "by hand": run_by_hand(config),
            "native": run_native(config, mesh),
            "native, sequence, vocabulary": run_native(config, mesh, True, True),
        }

    worst(launch(on_rank, ranks=8, timeout=100))


def test_collectives_equal_the_formula():
    """4 all-reduces of B·T·D a block by hand and native; the same bytes as gathers and scatters with SP."""

    def on_rank():
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        tokens_BT, targets_BT = batch(TINY.vocab_size)
        counts = {}
        for n_layers in (1, 2):
            config = replace(TINY, n_layers=n_layers)
            for case in ("by hand", "native", "sequence", "vocabulary"):
                if case == "by hand":
                    model = tp.apply_tensor_parallel_by_hand(build(config))
                else:
                    flags = {"sequence_parallel": case == "sequence", "loss_parallel": case == "vocabulary"}
                    model = build(config, lambda m, flags=flags: tp.apply_tensor_parallel(m, mesh, **flags))

                def step(model=model, case=case, config=config):
                    with loss_parallel() if case == "vocabulary" else contextlib.nullcontext():
                        logits = model(tokens_BT)
                        if case == "by hand":
                            loss = tp.vocab_parallel_cross_entropy_by_hand(logits, targets_BT, config.vocab_size)
                        else:
                            loss = cross_entropy(logits, targets_BT)
                        loss.backward()

                step()  # fills DTensor's caches
                model.zero_grad()
                with recording() as events:
                    step()
                counts[case, n_layers] = Counter((e.name, e.n_bytes) for e in events if e.lane == "communication")
        return counts

    counts = launch(on_rank, ranks=4, timeout=100)[0]
    n_bytes, N = B * T * TINY.dim * 8, B * T
    per_block = {case: counts[case, 2] - counts[case, 1] for case in ("by hand", "native", "sequence", "vocabulary")}
    assert per_block["by hand"] == per_block["native"] == per_block["vocabulary"] == {("all_reduce", n_bytes): 4}
    # f: a gather forward, a scatter backward; g the other way round
    assert per_block["sequence"] == {("all_gather", n_bytes): 4, ("reduce_scatter", n_bytes): 4}
    ends = {case: counts[case, 1] - per_block[case] for case in per_block}
    logits = ("all_gather", N * TINY.vocab_size * 8)
    assert ends["by hand"] == {("all_reduce", n_bytes): 2, ("all_reduce", N * 8): 3}
    assert ends["native"] == {("all_reduce", n_bytes): 2, logits: 1}
    assert ends["vocabulary"] == {("all_reduce", n_bytes): 2, ("all_reduce", N * 8): 3}
    # embedding: scatter, gather; output: gather, scatter
    assert ends["sequence"] == {("all_gather", n_bytes): 2, ("reduce_scatter", n_bytes): 2, logits: 1}


def test_pieces_by_hand():
    """Column, row, attention and embedding alone, and the cross entropy's corner cases."""

    def on_rank():
        n, rank = dist.get_world_size(), dist.get_rank()
        torch.manual_seed(0)
        found = {}

        def leaf(*shape):
            return torch.randn(shape, dtype=torch.float64, requires_grad=True)

        def compare(case, by_hand, plain, whole, *weights):
            """The value, the gradient of x (whole on every rank) and those of weights (a part on every rank)."""
            twins = [t.detach().clone().requires_grad_() for t in (whole, *weights) if t.requires_grad]
            got = by_hand(whole, *weights)
            expected = plain(*([whole] if not whole.requires_grad else []), *twins)
            towards = torch.randn(got.shape, dtype=got.dtype)
            for value in (got, expected):
                (value * towards).sum().backward()
            found[case] = {"value": ((got - expected).norm() / expected.norm()).item()}
            for w in weights:
                dist.all_reduce(w.grad)
            for i, (t, twin) in enumerate(zip([t for t in (whole, *weights) if t.requires_grad], twins, strict=True)):
                found[case][f"gradient {i}"] = ((t.grad - twin.grad).norm() / twin.grad.norm()).item()

        compare(
            "column and row",
            lambda x, w1, w2: tp.row_linear_by_hand(
                tp.column_linear_by_hand(x, w1.chunk(n, 0)[rank]).tanh(), w2.chunk(n, 1)[rank]
            ),
            lambda x, w1, w2: F.linear(F.linear(x, w1).tanh(), w2),
            leaf(2, 8, 16),
            leaf(12, 16),
            leaf(16, 12),
        )

        def attention(x, *weights):
            q, k, v = (F.linear(x, w).unflatten(-1, (-1, 4)).transpose(1, 2) for w in weights[:3])
            k, v = (t.repeat_interleave(4, dim=1) for t in (k, v))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return F.linear(out.transpose(1, 2).flatten(-2), weights[3])

        compare(
            "attention of 16 heads and 4 key/value heads",
            lambda x, *weights: tp.attention_by_hand(x, *weights, head_dim=4),
            attention,
            leaf(2, 8, 16),
            *(leaf(64, 16), leaf(16, 16), leaf(16, 16), leaf(16, 64)),
        )
        V = 4 * n - 3
        compare(
            "embedding of 13 rows",
            lambda tokens, w: tp.vocab_parallel_embedding_by_hand(tokens, w.chunk(n)[rank], V),
            F.embedding,
            torch.arange(V).repeat(2).view(2, V),
            leaf(V, 8),
        )

        targets = torch.randint(V, (3, 5))
        targets[0] = -1
        for reduction in ("mean", "sum"):
            for dtype, shift in ((torch.float64, 0.0), (torch.float64, 1e4), (torch.bfloat16, 0.0)):
                logits = (torch.randn(3, 5, V, dtype=torch.float64) * 5 + shift).to(dtype).requires_grad_()
                exact = logits.detach().double().requires_grad_()
                args = {"ignore_index": -1, "reduction": reduction}
                loss = tp.vocab_parallel_cross_entropy_by_hand(logits.chunk(n, -1)[rank], targets, V, **args)
                truth = F.cross_entropy(exact.flatten(0, 1), targets.flatten(), **args)
                (3 * loss).backward()
                (3 * truth).backward()
                dist.all_reduce(logits.grad)
                assert logits.grad.dtype == dtype and not logits.grad[0].any()
                error = (logits.grad - exact.grad).norm() / exact.grad.norm()
                if dtype == torch.bfloat16:  # float32 inside, rounded once
                    assert loss.dtype == torch.float32 and (loss - truth).abs() < 1e-5 * truth and error < 5e-3
                else:
                    case = f"cross entropy {reduction} {shift}"
                    found[case] = {"loss": ((loss - truth).abs() / truth).item(), "gradient": error.item()}
        ignored = torch.full((2, 5), -100)
        logits = torch.zeros(2, 5, V).chunk(n, -1)[rank]
        assert tp.vocab_parallel_cross_entropy_by_hand(logits, ignored, V).isnan(), "no target: as in torch"

        table, mistakes = torch.zeros(V, 8).chunk(n)[rank], {}
        for case, call in {
            "target": lambda: tp.vocab_parallel_cross_entropy_by_hand(logits, torch.full((2, 5), V), V),
            "negative": lambda: tp.vocab_parallel_cross_entropy_by_hand(logits, torch.full((2, 5), -1), V),
            "token": lambda: tp.vocab_parallel_embedding_by_hand(torch.tensor([V]), table, V),
            "rows": lambda: tp.vocab_parallel_embedding_by_hand(torch.tensor([0]), torch.zeros(7, 8), V),
            "reduction": lambda: tp.vocab_parallel_cross_entropy_by_hand(logits, ignored, V, reduction="none"),
        }.items():
            with pytest.raises(ValueError) as raised:
                call()
            mistakes[case] = str(raised.value)
        return found, mistakes

    results = launch(on_rank, ranks=4)
    worst([found for found, _ in results])
    mistakes = results[3][1]
    assert "outside [0, 13)" in mistakes["target"] and "ignore_index -100" in mistakes["negative"]
    assert "outside [0, 13)" in mistakes["token"]
    assert "rank 3 of 4 holds 7 of 13" in mistakes["rows"] and "[12, 13) has 1" in mistakes["rows"]
    assert "'none'" in mistakes["reduction"]


def test_degrees_that_do_not_divide_are_refused_before_a_rank_starts():
    llama = {"n_heads": 8, "n_kv_heads": 4, "ffn_dim": 176}
    for n in (1, 2, 4):
        tp.check_tensor_parallel(n, vocab_size=250, **llama)
    tp.check_tensor_parallel(4, n_kv_heads=None, vocab_size=None)
    with pytest.raises(ValueError, match=r"degree 8: n_kv_heads 4 is no multiple.*\[1, 2, 4\].*'n_heads': 8"):
        tp.check_tensor_parallel(8, vocab_size=256, **llama)
    with pytest.raises(ValueError, match=r"ffn_dim 176 is no multiple"):
        tp.check_tensor_parallel(3, **llama)
    with pytest.raises(ValueError, match=r"seq_len 10 is no multiple.*take \[1, 2\] for"):
        tp.check_tensor_parallel(4, seq_len=10, n_heads=8)
    with pytest.raises(ValueError, match=r"vocab_size 5 leaves the last rank without a row.*\[1, 2\]"):
        tp.check_tensor_parallel(4, vocab_size=5, n_heads=8)  # 2, 2, 1 and none
    for wrong in (0, -2, 2.0, True, "4"):
        with pytest.raises(ValueError, match="whole number of at least 1"):
            tp.check_tensor_parallel(wrong, n_heads=8)


def test_mistakes_are_told():
    def on_rank():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
        found = {}

        def refused(case, model, *args, **kwargs):
            with pytest.raises(ValueError) as raised:
                tp.apply_tensor_parallel(model, *args, **kwargs)
            found[case] = str(raised.value)

        small = replace(TINY, n_layers=1)
        refused("axes", Transformer(small), mesh)
        refused("heads", Transformer(replace(small, n_kv_heads=1)), mesh["tp"])
        refused("names", nn.Sequential(nn.Linear(4, 4)), mesh["tp"])
        refused("plan", Transformer(small), mesh["tp"], {"output": ColwiseParallel()}, sequence_parallel=True)
        refused("fsdp first", fully_shard(Transformer(small), mesh=mesh["fsdp"]), mesh["tp"])
        model = Transformer(small)
        model.layers["0"].attention.q_norm = nn.RMSNorm(4)
        refused("inside", model, mesh["tp"])
        with pytest.raises(ValueError, match="materialize them first"):
            tp.apply_tensor_parallel_by_hand(on_meta(lambda: Transformer(small)))
        model = tp.apply_tensor_parallel(Transformer(small), mesh["tp"], sequence_parallel=True)
        with pytest.raises(ValueError) as raised:
            model(torch.zeros(2, 7, dtype=torch.long))
        found["sequence"] = str(raised.value)
        # a stage of a pipeline has a plan for what it holds, and a plan of one's own decides alone
        stage = tp.apply_tensor_parallel(Transformer(small, embedding=False, output=False), mesh["tp"])
        x_BTD = torch.randn(2, 4, TINY.dim)
        own = tp.apply_tensor_parallel(Transformer(small), mesh["tp"], {"output": ColwiseParallel()})
        shapes = stage(x_BTD).shape, own(torch.zeros(2, 4, dtype=torch.long)).shape
        sharded = {name for name, p in own.named_parameters() if isinstance(p, DTensor)}
        assert sharded == {"output.weight"} and own.output.weight.placements == (Shard(0),)
        return found, tuple(map(tuple, shapes))

    found, shapes = launch(on_rank, ranks=4)[0]
    assert shapes == ((2, 4, 32), (2, 4, 32))  # 64 logits over 2 ranks
    for case, words in {
        "axes": "mesh['tp']",
        "heads": "n_kv_heads 1 is no multiple",
        "names": "neither wq nor q_proj",
        "plan": "pass them to llama_plan",
        "fsdp first": "before FSDP",
        "inside": "layers.0.attention.q_norm.weight",
        "sequence": "seq_len 7 is no multiple",
    }.items():
        assert words in found[case], found[case]


def test_transformers_llama():
    """hf_llama_plan on a random LlamaForCausalLM with grouped heads and biases, tied and untied."""
    pytest.importorskip("transformers")

    def on_rank():
        from transformers import LlamaConfig, LlamaForCausalLM

        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        found = {}
        cases = [(False, False, False), (True, False, True), (False, True, True), (True, True, False)]
        for sequence, vocabulary, tied in cases:
            sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 130}
            heads = {
                "num_attention_heads": 8,
                "num_key_value_heads": 4,
                "attention_bias": True,
                "mlp_bias": True,
            }
            config = LlamaConfig(**sizes, **heads, tie_word_embeddings=tied, use_cache=False)

            def build(config=config):
                torch.manual_seed(3)
                model = LlamaForCausalLM(config).double()
                for name, p in model.named_parameters():
                    if name.endswith("bias"):
                        nn.init.normal_(p)
                for name, _ in list(model.named_modules()):  # theirs computes in float32 at most
                    if name.endswith("norm"):
                        parent, _, leaf = name.rpartition(".")
                        exact = nn.RMSNorm(64, config.rms_norm_eps, dtype=torch.float64)
                        setattr(model.get_submodule(parent), leaf, exact)
                return model

            tokens_BT, targets_BT = batch(130)
            model = build()
            logits = model(input_ids=tokens_BT).logits
            loss = cross_entropy(logits, targets_BT)
            loss.backward()
            truth = {name: p.grad for name, p in model.named_parameters()}

            model = tp.apply_tensor_parallel(build(), mesh, None, sequence, vocabulary)
            assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
            with loss_parallel() if vocabulary else contextlib.nullcontext():
                out = model(input_ids=tokens_BT).logits
                mine = cross_entropy(out, targets_BT)
                mine.backward()
            case = f"{sequence=} {vocabulary=} {tied=}"
            found[case] = errors(mine, model, loss, truth)
            found[case]["logits"] = ((whole(out) - logits).norm() / logits.norm()).item()
        return found

    worst(launch(on_rank, ranks=4, timeout=100))
