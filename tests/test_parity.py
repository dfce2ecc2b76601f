"""Every layout trains the same model: loss, gradients, clipped norm and parameters against one process.

The reference is plain PyTorch written out here: one model, one batch, AdamW without fusion, no mesh, no accumulation.
All in float64, over three optimizer steps, with padding that ranks get unequal shares of, clipping that bites, and two
microbatches a step. An error is relative to the norm of what it should be, so a gradient that is zero scores 1.
"""

import argparse
import functools
import itertools
import logging
import math
from dataclasses import asdict, replace

import pytest
import torch
import torch.nn.functional as F

import minititan.train
from minititan.data import ByteCorpus, batches
from minititan.expert_parallel import update_expert_bias
from minititan.lab.launch import launch
from minititan.meta_init import materialize, on_meta
from minititan.model import ModelConfig, Transformer
from minititan.pipeline_parallel import SCHEDULES
from minititan.train import IGNORE, ParallelConfig, TrainConfig, check, train

MODEL = ModelConfig(256, dim=32, n_layers=2, n_heads=8, n_kv_heads=8, ffn_dim=48)
CONFIG = TrainConfig(
    model=MODEL, steps=3, global_batch=16, seq_len=16, accumulate=2, lr=1e-2, warmup_steps=1, max_norm=0.25,
    dtype="float64", eval_batches=1, log_every=0, data=argparse.__file__,
)  # fmt: skip
TOLERANCE = 1e-10

AXES = ("dp_replicate", "dp_shard", "cp", "tp", "pp")
FACTORINGS = [f for f in itertools.product((1, 2, 4, 8), repeat=len(AXES)) if math.prod(f) == 8]  # 35
FAST = [(2, 2, 1, 2, 1), (1, 2, 2, 1, 2), (1, 1, 2, 2, 2)]


def padded(*arguments):
    """Batches with targets left out by their value, so that a rank's share is the whole's and shares are unequal."""
    tokens_BT, targets_BT = batches(*arguments)
    return tokens_BT, targets_BT.masked_fill(targets_BT % 3 == 0, IGNORE)


def record(config: TrainConfig) -> dict:
    """What train() makes of config, whole, by name: of this rank's pipeline stages. Runs on a rank."""
    # full_tensor() of FSDP × TP says that it gathers twice, and a compiler that checkpointing has a policy
    for logger in ("torch.distributed.tensor", "torch._dynamo"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    minititan.train.batches = padded
    found = {"gradients": [{} for _ in range(config.steps)], "updated": [{}]}  # parameters: after the last step

    def watch(moment, step, part):
        if moment == "updated" and step < config.steps - 1:
            return  # the next step's gradients tell
        for name, parameter in part.named_parameters():
            tensor = (parameter.grad if moment == "gradients" else parameter).detach()
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            name = name.replace("_checkpoint_wrapped_module.", "")
            into = found[moment][step if moment == "gradients" else 0]
            into[name] = whole.clone()  # a replicated tensor is whole already, and goes on changing

    result = train(config, watch)
    return found | {"losses": result.losses, "grad_norms": result.grad_norms, "held": result.held_back_last}


def record_all(configs: list[TrainConfig]) -> list[dict | None]:
    """One rank of each stage tells: pp is the outermost axis of the mesh."""
    rank, n = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return [
        found if rank % (n // config.parallel.pp) == 0 else None for config in configs for found in [record(config)]
    ]


def joined(stages: list[dict], names: list[str]) -> dict:
    """What the stages of one run hold, in the order of the whole model."""
    whole = dict(stages[0])
    for moment in ("gradients", "updated"):
        steps = [
            {k: v for part in parts for k, v in part.items()}
            for parts in zip(*(s[moment] for s in stages), strict=True)
        ]
        assert all(set(step) == set(names) for step in steps)
        whole[moment] = [{name: step[name] for name in names} for step in steps]
    return whole


@functools.cache
def reference(architecture: ModelConfig) -> dict:
    """The same training in one process, without anything that is tested."""
    config = replace(CONFIG, model=architecture)
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
        if architecture.n_experts:
            update_expert_bias(model)
    found["updated"].append({n: p.detach() for n, p in model.named_parameters()})
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


def layout(*factors: int, config: TrainConfig = CONFIG, **axes: int) -> TrainConfig:
    """A config of these degrees, in the order of AXES or by name, the others 1. A pipeline gets a layer a stage or more,
    and two microbatches a rank."""
    degrees = dict.fromkeys(AXES, 1) | dict(zip(AXES, factors, strict=False)) | axes
    pp = degrees["pp"]
    model = replace(config.model, n_layers=max(config.model.n_layers, 2 * pp if pp > 1 and pp < 8 else pp))
    accumulate = max(
        config.accumulate, min(2 * pp, config.global_batch // (degrees["dp_replicate"] * degrees["dp_shard"]))
    )
    return replace(config, parallel=ParallelConfig(**degrees), model=model, accumulate=accumulate if pp > 1 else 2)


def compare(configs: list[TrainConfig], ranks: int = 8) -> dict[str, dict[str, float]]:
    """Layout -> its largest errors, all from one launch."""
    told = launch(record_all, configs, ranks=ranks, timeout=60 + 60 * len(configs))
    errors_of = {}
    for config, by_rank in zip(configs, zip(*told, strict=True), strict=True):
        expected = reference(config.model)
        found = joined([stage for stage in by_rank if stage], list(expected["updated"][0]))
        degrees = " × ".join(f"{name} {n}" for name, n in asdict(config.parallel).items() if n > 1)
        options = [config.schedule] if config.parallel.pp > 1 else []
        options += [f"cp {config.cp_method}"] if config.cp_method != "ring" else []
        options += [name for name in ("sequence_parallel", "loss_parallel") if getattr(config, name)]
        name = ", ".join([degrees or "1 rank", *options, *(["experts"] if config.model.n_experts else [])])
        errors_of[name] = errors(found, expected)
        print(f"{name}: " + "  ".join(f"{kind} {error:.1e}" for kind, error in errors_of[name].items()))
    return errors_of


def run_and_compare(configs: list[TrainConfig], ranks: int = 8) -> None:
    wrong = {name: worst for name, worst in compare(configs, ranks).items() if not max(worst.values()) < TOLERANCE}
    assert not wrong


def test_one_rank_is_the_reference():
    run_and_compare([layout()], ranks=1)


def test_eight_ranks_are_one_process():
    run_and_compare([layout(*factors) for factors in FAST])


def test_sequence_and_loss_parallel():
    """Each alone and both, alone and with FSDP and replicas; 259 rows are 65, 65, 65 and 64 on four ranks."""
    sequence, loss = {"sequence_parallel": True}, {"loss_parallel": True}
    odd = replace(CONFIG, model=replace(MODEL, vocab_size=259, tied=True), **sequence, **loss)
    layouts = [layout(tp=4, config=odd), layout(dp_shard=2, tp=2, config=replace(CONFIG, **sequence))]
    run_and_compare([*layouts, layout(dp_replicate=2, tp=2, config=replace(CONFIG, **loss))], ranks=4)


BOTH = replace(CONFIG, sequence_parallel=True, loss_parallel=True)


@pytest.mark.full
def test_sequence_and_loss_parallel_on_eight_ranks():
    factors = ((1, 1, 1, 8, 1), (1, 2, 1, 4, 1), (2, 2, 1, 2, 1), (2, 1, 1, 4, 1), (1, 1, 2, 4, 1), (1, 2, 1, 2, 2))
    run_and_compare([layout(*f, config=BOTH) for f in factors])


@pytest.mark.full
def test_tensor_parallel_8_on_sixteen_ranks():
    """With FSDP 2: plain, with sequence parallel, with loss parallel too, and async."""
    configs = [CONFIG, replace(CONFIG, sequence_parallel=True), BOTH, replace(CONFIG, async_tensor_parallel=True)]
    run_and_compare([layout(dp_shard=2, tp=8, config=config) for config in configs], ranks=16)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_eight_ranks_are_one_process_in_every_other_factoring():
    run_and_compare([layout(*factors) for factors in FACTORINGS if factors not in FAST])


@pytest.mark.full
def test_every_schedule_and_method():
    """On four ranks, with FSDP: the pipeline's schedules, with accumulate microbatches; the ways of context parallel."""
    schedules = [replace(CONFIG, schedule=schedule) for schedule in SCHEDULES]
    methods = [replace(CONFIG, cp_method=method) for method in ("all_gather", "ulysses")]
    pipelines = [layout(dp_shard=2, pp=2, config=config) for config in schedules]
    run_and_compare([*pipelines, *(layout(dp_shard=2, cp=2, config=config) for config in methods)], ranks=4)


EXPERTS = replace(
    CONFIG,
    model=replace(MODEL, n_experts=4, top_k=2, n_shared_experts=1, expert_ffn_dim=16, balance_loss=0.1, bias_rate=0.01),
)


def test_experts():
    """A mixture of experts, kept even by a bias and by a loss, spread over borrowed ranks."""
    layouts = [layout(dp_shard=4, ep=2, config=EXPERTS), layout(dp_shard=2, tp=2, ep=4, config=EXPERTS)]
    run_and_compare(layouts, ranks=4)


@pytest.mark.full
def test_experts_on_eight_ranks():
    degrees = [
        {"dp_shard": 8, "ep": 4}, {"dp_replicate": 2, "dp_shard": 4, "ep": 2}, {"dp_shard": 4, "tp": 2, "ep": 4},
        {"dp_shard": 2, "cp": 4, "ep": 2}, {"dp_shard": 2, "cp": 2, "tp": 2, "ep": 4}, {"dp_shard": 4, "pp": 2, "ep": 4},
        {"dp_shard": 2, "tp": 2, "pp": 2, "ep": 2}, {"dp_shard": 8},
    ]  # fmt: skip
    sequence = replace(EXPERTS, sequence_parallel=True)
    run_and_compare([*(layout(**d, config=EXPERTS) for d in degrees), layout(dp_shard=4, tp=2, ep=2, config=sequence)])


# ---- pairs: a technique that changes how a block computes, beside those that spread it ----------------------------

ASYNC = replace(CONFIG, async_tensor_parallel=True)
while_compiling = pytest.mark.filterwarnings("ignore")  # torch's compiler looks at what torch has deprecated
PER_OP, FULL = ({"activation_checkpoint": mode} for mode in ("per_op", "full"))


def test_async_tensor_parallel():
    both = replace(ASYNC, loss_parallel=True, **PER_OP)
    run_and_compare([layout(tp=4, config=ASYNC), layout(dp_shard=2, tp=2, config=both)], ranks=4)


@pytest.mark.full
def test_async_tensor_parallel_beside_every_axis():
    degrees = [
        {"dp_replicate": 2, "tp": 2},
        {"cp": 2, "tp": 2},
        {"pp": 2, "tp": 2},
        {"dp_shard": 2, "tp": 2} | {"config": replace(ASYNC, **FULL)},
    ]
    run_and_compare([layout(**({"config": ASYNC} | d)) for d in degrees], ranks=4)


@pytest.mark.full
def test_activation_checkpointing_beside_every_axis():
    of_mode = {mode: replace(CONFIG, activation_checkpoint=mode) for mode in ("full", "every_other", "per_op")}
    degrees = [
        {"dp_shard": 2, "tp": 2},
        {"dp_shard": 2, "cp": 2},
        {"dp_shard": 2, "pp": 2},
    ]
    run_and_compare([layout(**d, config=config) for config in of_mode.values() for d in degrees], ranks=4)
    experts = replace(EXPERTS, activation_checkpoint="full")
    run_and_compare([layout(dp_shard=4, ep=2, config=experts)], ranks=4)


@while_compiling
@pytest.mark.full
def test_compiled_blocks():
    """Traced whole by Dynamo and AOTAutograd; test_regional_compile lets inductor make code of it."""
    traced = replace(CONFIG, compile="aot_eager")
    layouts = [layout(dp_shard=4, config=traced), layout(dp_shard=2, pp=2, config=traced)]
    both = replace(traced, sequence_parallel=True, loss_parallel=True, **PER_OP)
    layouts += [layout(tp=4, config=traced), layout(dp_shard=2, tp=2, config=both), layout(tp=2, pp=2, config=traced)]
    run_and_compare(layouts, ranks=4)


@while_compiling
@pytest.mark.full
def test_compiled_blocks_beside_checkpointing_and_by_inductor():
    traced = replace(CONFIG, compile="aot_eager")
    configs = [replace(traced, **PER_OP), replace(traced, **FULL), replace(CONFIG, compile="inductor")]
    run_and_compare([layout(dp_replicate=2, dp_shard=2, config=config) for config in configs], ranks=4)


FLOAT8 = replace(CONFIG, seq_len=32, model=replace(MODEL, dim=64, ffn_dim=128, n_kv_heads=4))


def recorded(configs: list[TrainConfig], ranks: int) -> list[dict]:
    """What each makes of its parameters, whole, all from one launch."""
    of_config = [
        [found for found in by_rank if found]
        for by_rank in zip(*launch(record_all, configs, ranks=ranks, timeout=240), strict=True)
    ]
    return [joined(stages, sorted(name for stage in stages for name in stage["updated"][0])) for stages in of_config]


def first_gradients(found: dict, expected: dict) -> float:
    """Largest error of a gradient in the first step, relative to its norm."""
    got, want = found["gradients"][0], expected["gradients"][0]
    return max(((got[name] - want[name]).norm() / want[name].norm()).item() for name in want)


@pytest.mark.full
def test_float8_whose_scales_no_layout_changes():
    """rowwise_with_gw_hp has a scale for each token and for each row of a weight that is whole, so any cut of the batch,
    the sequence or the layers computes float8's very numbers; tensor parallel cuts the rows of wo and w2."""
    rowwise = replace(FLOAT8, float8="rowwise_with_gw_hp")
    layouts = [layout(dp_shard=2, cp=2, config=replace(rowwise, **FULL)), layout(dp_shard=2, pp=2, config=rowwise)]
    alone = recorded([replace(config, parallel=ParallelConfig()) for config in layouts], ranks=1)
    worst = [errors(found, expected) for found, expected in zip(recorded(layouts, ranks=4), alone, strict=True)]
    assert max(error for of_layout in worst for error in of_layout.values()) < TOLERANCE, worst


@pytest.mark.full
def test_float8_whose_scales_follow_the_layout():
    """tensorwise has one scale for all tokens of a microbatch on a rank. Cut otherwise, values are rounded otherwise: the
    gradients of the first step are as near to one process's as two roundings are, 6 % each by the module's own table.
    How FSDP gathers the weights changes nothing at all."""
    tensorwise = replace(FLOAT8, float8="tensorwise")
    alone, in_float64 = recorded([layout(config=tensorwise), layout(config=FLOAT8)], ranks=1)
    assert first_gradients(alone, in_float64) > 0.01, "one process computes in float8 too"
    wide, narrow = (replace(tensorwise, float8_all_gather=gather) for gather in (False, True))
    found = recorded(
        [layout(**d, config=c) for d in ({"dp_shard": 4}, {"dp_shard": 2, "tp": 2}) for c in (wide, narrow)], ranks=4
    )
    for gathered_wide, gathered_narrow in (found[:2], found[2:]):
        assert max(errors(gathered_narrow, gathered_wide).values()) < TOLERANCE
        assert 0.01 < first_gradients(gathered_wide, alone) < 0.12


def test_tied_embeddings_and_sizes_that_do_not_divide():
    """259 rows and 44 columns over 2 × 2 ranks: shards of unequal size; the tied matrix is one parameter."""
    config = replace(CONFIG, model=replace(MODEL, vocab_size=259, ffn_dim=44, tied=True))
    run_and_compare([layout(dp_shard=2, tp=2, config=config), layout(dp_replicate=2, tp=2, config=config)], ranks=4)


def test_what_cannot_work_is_refused_with_the_reason():
    """Before any rank is started: check() makes no group."""
    for factors in FACTORINGS:
        assert check(layout(*factors), 8).world_size == 8
    with pytest.raises(ValueError, match=r"n_kv_heads 4 .*\[1, 2, 4\]"):
        check(layout(tp=8, config=replace(CONFIG, model=replace(MODEL, n_kv_heads=4))), 8)
    short = replace(layout(dp_shard=2, tp=4), seq_len=18)
    check(short, 8)
    with pytest.raises(ValueError, match=r"degree 4: seq_len 18 is no multiple \(20 is\); take \[1, 2\]"):
        check(replace(short, sequence_parallel=True), 8)
    refused = {
        "1f1b on 4 ranks with 1 stage each needs 4 microbatches or more, got 2": replace(
            layout(dp_shard=2, pp=4), accumulate=2
        ),
        "2 layers cannot fill 4 ranks": replace(layout(dp_shard=2, pp=4), model=MODEL),
        "tied=True makes one matrix of the embedding, on the first of 2 stages": layout(
            dp_shard=4, pp=2, config=replace(CONFIG, model=replace(MODEL, tied=True))
        ),
        "seq_len 16 cannot be cut into 2 equal chunks for each of 3 ranks": layout(cp=3),
        "ulysses gives each of 4 ranks equal heads": layout(
            cp=4, tp=4, config=replace(CONFIG, cp_method="ulysses", accumulate=1)
        ),
        "pp 2 × cp 2 × tp 2 with sequence_parallel": layout(cp=2, tp=2, pp=2, config=BOTH),
        "zbv splits backward, and 4 experts": layout(dp_shard=4, pp=2, config=replace(EXPERTS, schedule="zbv")),
        "async_tensor_parallel .*so tp 4 with float8 would": layout(
            tp=4, config=replace(ASYNC, float8="rowwise", model=replace(MODEL, dim=64, ffn_dim=128))
        ),
        "async_tensor_parallel .*so tp 2 with 4 experts": layout(
            dp_shard=2, tp=2, ep=2, config=replace(EXPERTS, async_tensor_parallel=True)
        ),
        "4 sequences × 18 tokens are 72": replace(layout(dp_shard=2, config=FLOAT8), float8="rowwise", seq_len=18),
        "float8_all_gather is about what FSDP gathers": replace(
            layout(tp=2, config=FLOAT8), float8="tensorwise", float8_all_gather=True
        ),
        "float8 is 'none': set it to": replace(layout(dp_shard=2, config=FLOAT8), float8_all_gather=True),
        "0 of .* matrices of Transformer would be float8": replace(layout(tp=8), float8="tensorwise"),
        "compile inductor makes one graph of a block, and with cp 2 its": layout(
            cp=2, tp=2, config=replace(CONFIG, compile="inductor")
        ),
        "with async_tensor_parallel, tp 2 its ranks": layout(tp=2, config=replace(ASYNC, compile="inductor")),
        "compile inductor with tp 2 cannot compute whole blocks again": layout(
            tp=2, config=replace(CONFIG, compile="inductor", **FULL)
        ),
        "schedule zbv splits backward, and compile inductor": layout(
            pp=2, config=replace(CONFIG, compile="inductor", schedule="zbv")
        ),
        "ep 2 spreads experts, and the model has n_experts 0": layout(dp_shard=8, ep=2),
        "4 experts cannot be spread evenly over ep 8": layout(dp_shard=8, ep=8, config=EXPERTS),
        "tp 2 with 4 experts.*set ep to a divisor of both 4 and .* = 8": layout(dp_shard=4, tp=2, config=EXPERTS),
    }
    for message, config in refused.items():
        with pytest.raises(ValueError, match=message):
            check(config, math.prod(getattr(config.parallel, name) for name in AXES))


def test_the_comparison_can_fail():
    expected = reference(CONFIG.model)
    assert max(errors(expected, expected).values()) == 0
    name = "layers.1.attention.wk.weight"
    zeroed = {**expected, "gradients": [dict(step) for step in expected["gradients"]]}
    zeroed["gradients"][2][name] = torch.zeros_like(zeroed["gradients"][2][name])
    assert errors(zeroed, expected)["gradients"] == 1.0
    off = {**expected, "grad_norms": [norm * (1 + 1e-9) for norm in expected["grad_norms"]]}
    assert errors(off, expected)["grad_norms"] > TOLERANCE
