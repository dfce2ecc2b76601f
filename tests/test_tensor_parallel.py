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
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(
        logging.ERROR
    )  # two gathers: as it must
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
                with (
                    recording() as events,
                    loss_parallel() if case == "vocabulary" else contextlib.nullcontext(),
                ):
                    logits = model(tokens_BT)
                    if case == "by hand":
                        loss = tp.vocab_parallel_cross_entropy_by_hand(logits, targets_BT, config.vocab_size)
                    else:
                        loss = cross_entropy(logits, targets_BT)
                    loss.backward()
                counts[case, n_layers] = Counter(
                    (e.name, e.n_bytes) for e in events if e.lane == "communication"
                )
        return counts

    counts = launch(on_rank, ranks=4, timeout=100)[0]
    n_bytes, N = B * T * TINY.dim * 8, B * T
    per_block = {
        case: counts[case, 2] - counts[case, 1] for case in ("by hand", "native", "sequence", "vocabulary")
    }
    assert (
        per_block["by hand"] == per_block["native"] == per_block["vocabulary"] == {("all_reduce", n_bytes): 4}
    )
    # f: a gather forward, a scatter backward; g the other way round
    assert per_block["sequence"] == {("all_gather", n_bytes): 4, ("reduce_scatter", n_bytes): 4}
    ends = {case: counts[case, 1] - per_block[case] for case in per_block}
    logits = ("all_gather", N * TINY.vocab_size * 8)
    assert ends["by hand"] == {("all_reduce", n_bytes): 2, ("all_reduce", N * 8): 3}
    assert ends["native"] == {("all_reduce", n_bytes): 2, logits: 1}
    assert ends["vocabulary"] == {("all_reduce", n_bytes): 2, ("all_reduce", N * 8): 3}
    # embedding: scatter, gather; output: gather, scatter
    assert ends["sequence"] == {("all_gather", n_bytes): 2, ("reduce_scatter", n_bytes): 2, logits: 1}
