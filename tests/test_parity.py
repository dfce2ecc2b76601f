"""Every layout trains the same model: loss, gradients, clipped norm and parameters against one process.

The reference is plain PyTorch written out here: one model, one batch, AdamW without fusion, no mesh, no accumulation.
All in float64, over three optimizer steps, with padding that ranks get unequal shares of, clipping that bites, and two
microbatches a step. An error is relative to the norm of what it should be, so a gradient that is zero scores 1.
"""

import argparse
import itertools
import logging
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import minititan.train
from minititan.data import ByteCorpus, batches
from minititan.lab.launch import launch
from minititan.meta_init import materialize, on_meta
from minititan.model import ModelConfig, Transformer
from minititan.train import IGNORE, ParallelConfig, TrainConfig, check, train

MODEL = ModelConfig(256, dim=32, n_layers=2, n_heads=8, n_kv_heads=8, ffn_dim=48)
CONFIG = TrainConfig(
    model=MODEL, steps=3, global_batch=16, seq_len=16, accumulate=2, lr=1e-2, warmup_steps=1, max_norm=0.25,
    dtype="float64", eval_batches=1, log_every=0, data=argparse.__file__,
)  # fmt: skip
TOLERANCE = 1e-10

FACTORINGS = [  # all of 8 into the three axes that exist
    (r, s, t) for r, s, t in itertools.product((1, 2, 4, 8), repeat=3) if r * s * t == 8
]
FAST = [(1, 8, 1), (2, 2, 2), (1, 2, 4), (1, 1, 8)]


def padded(*arguments):
    """Batches with targets left out by their value, so that a rank's share is the whole's and shares are unequal."""
    tokens_BT, targets_BT = batches(*arguments)
    return tokens_BT, targets_BT.masked_fill(targets_BT % 3 == 0, IGNORE)


def record(config: TrainConfig) -> dict:
    """What train() makes of config, whole: by name, on rank 0. Runs on a rank."""
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # full_tensor() of FSDP × TP: two gathers
    minititan.train.batches = padded
    found = {"gradients": [], "updated": []}

    def watch(moment, step, model):
        whole = {}
        for name, parameter in model.named_parameters():
            tensor = (parameter.grad if moment == "gradients" else parameter).detach()
            whole[name] = (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()
        found[moment].append(whole)

    result = train(config, watch)
    return found | {"losses": result.losses, "grad_norms": result.grad_norms, "held": result.held_back_last}


def record_all(configs: list[TrainConfig]) -> list[dict] | None:
    found = [record(config) for config in configs]
    return found if torch.distributed.get_rank() == 0 else None


def reference(config: TrainConfig) -> dict:
    """The same training in one process, without anything that is tested."""
    model = materialize(on_meta(lambda: Transformer(config.model).double()), "cpu", config.seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), betas=(0.9, 0.95), weight_decay=config.weight_decay, foreach=False, fused=False
    )
    corpus = ByteCorpus(config.data)
    found = {"gradients": [], "updated": [], "losses": [], "grad_norms": []}
    for step, lr in enumerate((0.5 * config.lr, config.lr, 0.5 * config.lr)):  # warm-up of 1 step, then down
        tokens_BT, targets_BT = padded(corpus, config.global_batch, config.seq_len, step, 0, 1, config.seed)
        loss = F.cross_entropy(model(tokens_BT).flatten(0, 1), targets_BT.flatten(), ignore_index=IGNORE)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_norm)
        assert norm > config.max_norm, "clipping must bite to be tested"
        found["losses"].append(loss.item())
        found["grad_norms"].append(norm.item())
        found["gradients"].append({n: p.grad.clone() for n, p in model.named_parameters()})
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
        found["updated"].append({n: p.detach().clone() for n, p in model.named_parameters()})
    tokens_BT, targets_BT = padded(corpus.held_back, config.global_batch, config.seq_len, 0, 0, 1, config.seed)
    with torch.no_grad():
        logits_NV = model(tokens_BT).flatten(0, 1)
    found["held"] = F.cross_entropy(logits_NV, targets_BT.flatten(), ignore_index=IGNORE).item()
    return found


def errors(found: dict, expected: dict) -> dict[str, float]:
    """Largest relative error of each kind, over steps and parameters."""

    def of(got, want):
        got, want = torch.as_tensor(got, dtype=torch.float64), torch.as_tensor(want, dtype=torch.float64)
        assert got.shape == want.shape
        error, size = (got - want).norm().item(), want.norm().item()
        return error / size if size else math.inf

    worst = {}
    for kind in ("losses", "grad_norms"):
        worst[kind] = max(of(got, want) for got, want in zip(found[kind], expected[kind], strict=True))
    for kind in ("gradients", "updated"):
        assert [list(step) for step in found[kind]] == [list(step) for step in expected[kind]]
        pairs = zip(found[kind], expected[kind], strict=True)
        worst[kind] = max(of(got[name], want[name]) for got, want in pairs for name in want)
    return worst | {"held_back": of(found["held"], expected["held"])}


def layout(dp_replicate: int, dp_shard: int, tp: int, config: TrainConfig = CONFIG) -> TrainConfig:
    return replace(config, parallel=ParallelConfig(dp_replicate, dp_shard, tp=tp))


def run_and_compare(configs: list[TrainConfig], ranks: int = 8) -> None:
    found = launch(record_all, configs, ranks=ranks, timeout=60 + 60 * len(configs))[0]
    wrong = {}
    for config, one in zip(configs, found, strict=True):
        worst = errors(one, reference(config))
        print(f"{config.parallel}: " + "  ".join(f"{kind} {error:.1e}" for kind, error in worst.items()))
        if not max(worst.values()) < TOLERANCE:
            wrong[str(config.parallel)] = worst
    assert not wrong


def test_one_rank_is_the_reference():
    run_and_compare([layout(1, 1, 1)], ranks=1)


def test_eight_ranks_are_one_process():
    run_and_compare([layout(*factors) for factors in FAST])


def test_sequence_and_loss_parallel():
    """Each alone and both, alone and with FSDP and replicas; 259 rows are 65, 65, 65 and 64 on four ranks."""
    sequence, loss = {"sequence_parallel": True}, {"loss_parallel": True}
    odd = replace(CONFIG, model=replace(MODEL, vocab_size=259, tied=True), **sequence, **loss)
    layouts = [layout(1, 1, 4, odd), layout(1, 2, 2, replace(CONFIG, **sequence))]
    run_and_compare([*layouts, layout(2, 1, 2, replace(CONFIG, **loss))], ranks=4)


@pytest.mark.full
def test_sequence_and_loss_parallel_on_eight_ranks():
    config = replace(CONFIG, sequence_parallel=True, loss_parallel=True)
    run_and_compare([layout(*factors, config) for factors in ((1, 1, 8), (1, 2, 4), (2, 2, 2), (2, 1, 4))])


@pytest.mark.full
@pytest.mark.parametrize("factors", [f for f in FACTORINGS if f not in FAST], ids=str)
def test_eight_ranks_are_one_process_in_every_other_factoring(factors):
    run_and_compare([layout(*factors)])


def test_tied_embeddings_and_sizes_that_do_not_divide():
    """259 rows and 44 columns over 2 × 2 ranks: shards of unequal size; the tied matrix is one parameter."""
    odd = replace(MODEL, vocab_size=259, ffn_dim=44, tied=True)
    config = replace(CONFIG, model=odd)
    run_and_compare([layout(1, 2, 2, config), layout(2, 1, 2, config)], ranks=4)


def test_what_is_not_composed_is_refused_with_the_reason():
    """Every factoring of 8 ranks into all five axes either is one of those above or says why not."""
    divisors = (1, 2, 4, 8)
    for r, s, c, t, p in itertools.product(divisors, repeat=5):
        if r * s * c * t * p != 8:
            continue
        config = replace(CONFIG, parallel=ParallelConfig(r, s, c, t, p))
        if c == p == 1:
            assert (r, s, t) in FACTORINGS and check(config, 8).world_size == 8
        else:
            with pytest.raises(ValueError, match="not composed yet") as error:
                check(config, 8)
            assert f"pp {p}" in str(error.value) or f"cp {c}" in str(error.value)
    with pytest.raises(ValueError, match=r"n_kv_heads 4 .*\[1, 2, 4\]"):
        check(replace(layout(1, 1, 8), model=replace(MODEL, n_kv_heads=4)), 8)
    short = replace(layout(1, 2, 4), seq_len=18)
    check(short, 8)
    with pytest.raises(ValueError, match=r"degree 4: seq_len 18 is no multiple \(20 is\); take \[1, 2\]"):
        check(replace(short, sequence_parallel=True), 8)


def test_the_comparison_can_fail():
    expected = reference(CONFIG)
    assert max(errors(expected, expected).values()) == 0
    name = "layers.1.attention.wk.weight"
    zeroed = {**expected, "gradients": [dict(step) for step in expected["gradients"]]}
    zeroed["gradients"][2][name] = torch.zeros_like(zeroed["gradients"][2][name])
    assert errors(zeroed, expected)["gradients"] == 1.0
    off = {**expected, "grad_norms": [norm * (1 + 1e-9) for norm in expected["grad_norms"]]}
    assert errors(off, expected)["grad_norms"] > TOLERANCE
