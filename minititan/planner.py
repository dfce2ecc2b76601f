"""Planner: how many bytes one rank holds, of what, and when, before anything is allocated.

A training step is a tape. Forward puts down what gradients will need; backward takes it up again from the end, and puts
down gradients. What lies there at any moment follows from the shapes alone: nothing in these bytes is fitted.

    parameters, optimizer  ████████████████████████████████████████████████████████████  always
    activations                ▁▁▂▂▃▃▄▄▅▅▆▆▇▇█│█ │█ │█▇▆▆▅▄▄▃▂▂▁                        a block more, a block less
    logits                                    │█ │███│█                                  kept, and their gradients
    gathered (FSDP)            ▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃│▂ │▂ │▅▅▅▅▅▅▅▅▅▅▅▅                        block by block
    gradients                                 │  │  │▁▁▂▂▃▃▄▄▅▅▆▆▇███████████████████
    moment                rest  forward runs  forward loss output layers.3 .. .0 embedding    step

What autograd keeps of a block for the N = B·T tokens of a microbatch, with e bytes a number in the dtype that computes,
w = max(e, 4) where torch uses float32 at least, t tensor-parallel ranks, s = t with sequence parallel and else 1:

    tensor              shape           bytes for N tokens    is kept because
    x, x'               B T/s D         2 N · e D/s           a norm's gradient needs its input
      norms not fused   B T/s D         4 N · w D/s           .. in w bytes, and its input normalised too (on a CPU)
    1/rms               B T/s           2 N · w/s             .. and what each token was multiplied by
    norm(x), norm(x')   B T D           2 N · e D             input of wq, wk, wv; of w1, w3
    q, k, v             B H/t T K, ..   N · e (D + 2 C)/t     attention; C = n_kv_heads · K
    logsumexp           B H/t T         N · w H/t             attention: from it the softmax is made again, tile by tile
    result              B H/t T K       N · e D/t             attention's output, and input of wo
    w1 x, silu, w3 x, h B T F/t         4 N · e F/t           silu's input, both factors of the product, input of w2

    full                keeps x alone   N · e D/s
    every_other                         that of blocks 0, 2, 4, ..; the others keep all
    per_op              x, result, logsumexp, and of the matmuls what wk, wo and w3 give:
                                        N · (e D/s + e (D + C + F)/t + e D + w H/t)
                        with t above 1 the sums over ranks after wo and w2 too: N · 2 e D/s

    once a model        the last norm, as above; cos and sin, 2 T K numbers; tokens and targets, 16 N;
                        logits: their log-probabilities, N · w V, or V/t with loss parallel

More is there in backward, whose peak is the largest of these moments:

    loss                two more tensors of the logits' size, the gradients of log-probabilities and of logits; three
                        with loss parallel
    output              the gradient of its matrix
    layers.i            all that is kept of block i (made again first, with checkpointing), the gradient of its output,
                        and in the feed-forward three gradients of h's size, h itself being gone
      FSDP              the whole root and its gradients so far (root: embedding, last norm, output), block i whole,
                        block i-1 on its way in, the gradient of block i+1 on its way out in the dtype that reduces
      DDP               buckets for all gradients, at rest too; the sum of earlier microbatches lies beside them
    embedding           its gradient, which tensor parallel makes whole on each rank (unless it is tied)

Stages: "ddp" (and one process: all counts 1), "zero1" (DDP; each rank updates its rows), "zero2" (a block's gradient is
cut as soon as it is whole), "fsdp" (ZeRO-3; HSDP with dp_replicate above 1). Meant is rank 0: uneven rows leave no other
rank more. Left out: an allocator's rounding and gaps, buffers inside of NCCL, gloo and cuBLAS, and what fits between
two moments. `memory` is of a model in one stage. Dense models only, but for `state_bytes`.

Pipelines (`estimate`, whose `moments` are those of all ranks): 1F1B's in-flight microbatches, each in its checkpointed
form; parameters gathered once a step, whole gradients in float32 until its end; messages, which torch keeps for all
microbatches; and on the last rank the logits. torch's `schedule.step(return_outputs=True)`, its default and until 2025 its
only way, keeps those of all m microbatches, and joins them at the end into one tensor: returned_logits says in which dtype.
For the joined one, larger than any tensor before, the allocator takes a new segment beside all that it has. Schedules that
split backward keep what checkpointing made again until the weights' half: they are predicted as without checkpointing, and
roughly (0.83 to 1.04 of what 4 ranks held without it, 0.67 to 1.21 with mode full).

Time (`estimate`): matmuls and attention at a share of the GPU's flops, everything elementwise and every message at a share
of its bandwidths (MATMUL, ATTENTION, BANDWIDTH below: three numbers for all models, layouts and GPUs), the pipeline's
bubble by its formula; of messages counts what no arithmetic hides. Against 14 published rows of torchtitan on H100:
tokens/s within 14% on each and in their order, memory within 7%. The three, ALLOCATOR and SPREAD were chosen in view of
these rows: that five numbers carry 28 values is shown, not that a 29th will be met. SPREAD is there for the order: without
it 128 GPUs come out 1% faster than 8, not 1 to 10% slower. Of that table six more rows are neither here nor fitted: memory
within 7% on five, and 25% too high on 405B with pp 8, interleaved; tokens/s within 21%.

tests/test_planner.py and notebook 05 hold it against bytes measured on real ranks.
References: activations https://arxiv.org/abs/2205.05198 · ZeRO https://arxiv.org/abs/1910.02054
Letters: B batch, T tokens, D model dim, V vocabulary, H query heads, K head dim, F feed-forward, L layers.
"""

import argparse
from dataclasses import dataclass, replace
from itertools import product
from math import ceil, log, prod, sqrt
from typing import Any, NamedTuple

import torch

STAGES = ("ddp", "zero1", "zero2", "fsdp")
CHECKPOINTS = ("none", "full", "every_other", "per_op")
KINDS = ("parameters", "gradients", "optimizer", "gathered", "activations", "logits")
Bytes = dict[str, int]  # of each of KINDS


def total(held: Bytes) -> int:
    return sum(held.values())


def _check(c, stage, checkpoint, dp_replicate, dp_shard, tp, dtype, compute_dtype, **counts) -> None:
    if getattr(c, "n_experts", 0):
        raise ValueError(
            f"n_experts {c.n_experts}: only dense models are planned so far; take n_experts 0, or state_bytes"
        )
    for name, value, choices in (("stage", stage, STAGES), ("checkpoint", checkpoint, CHECKPOINTS)):
        if value not in choices:
            raise ValueError(f"{name}={value!r} is none of the {len(choices)} there are: {', '.join(choices)}")
    for name, value in {"dp_replicate": dp_replicate, "dp_shard": dp_shard, "tp": tp, **counts}.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
    wrong = {"ddp": ("cuts nothing", "dp_shard", dp_shard, "dp_replicate")}
    wrong |= dict.fromkeys(("zero1", "zero2"), ("cuts over all its ranks", "dp_replicate", dp_replicate, "dp_shard"))
    if stage in wrong and wrong[stage][2] > 1:
        what, name, value, instead = wrong[stage]
        raise ValueError(f"stage {stage!r} {what}, but {name} is {value}: use {instead} for its ranks")
    if stage != "fsdp" and tp > 1 and dp_replicate * dp_shard > 1:
        raise ValueError(
            f"stage {stage!r} with tp {tp} and dp_replicate {dp_replicate} × dp_shard {dp_shard}: DDP takes no "
            "tensor-parallel parameters; use stage 'fsdp'"
        )
    if stage != "fsdp" and compute_dtype not in (None, dtype):
        raise ValueError(
            f"compute_dtype {compute_dtype} beside dtype {dtype} is FSDP's, which casts what it gathers; with stage "
            f"{stage!r} set dtype alone, or use stage 'fsdp'"
        )
    divided = {"n_heads": c.n_heads, "n_kv_heads": c.n_kv_heads, "ffn_dim": c.ffn_dim}
    if odd := [f"{name} {size}" for name, size in divided.items() if size % tp]:
        raise ValueError(f"tp {tp} does not divide {', '.join(odd)}: take a divisor of {divided}")


def parameter_shapes(config, tp: int = 1, ep: int = 1) -> tuple[dict, dict]:
    """(block, root), each name -> shape of what the first of tp ranks has, and of the ep ranks that share experts, before
    data parallel cuts its rows."""
    c = config
    D, C, F, V = c.dim, c.dim // c.n_heads * c.n_kv_heads, c.ffn_dim, ceil(c.vocab_size / tp)
    block = {"attention_norm": (D,), "wq": (D // tp, D), "wk": (C // tp, D), "wv": (C // tp, D), "wo": (D, D // tp)}
    block |= {"ffn_norm": (D,), "w1": (F // tp, D), "w3": (F // tp, D), "w2": (D, F // tp)}
    if E := getattr(c, "n_experts", 0):  # tensor parallel gives them tokens, and cuts nothing of them
        f, own = c.expert_ffn_dim or F, E // ep
        block |= {name: (c.n_shared_experts * f, D)[:: -1 if name == "w2" else 1] for name in ("w1", "w3", "w2")}
        block |= {"router": (E, D), "experts.w1": (own, f, D), "experts.w3": (own, f, D), "experts.w2": (own, D, f)}
        block = {name: shape for name, shape in block.items() if prod(shape)}
    ends = {"tok_embeddings": (V, D), "norm": (D,)}
    return block, ends if c.tied else ends | {"output": (V, D)}


def kept_by_block(
    config,
    tokens: int,
    itemsize: int,
    checkpoint: str = "none",
    tp: int = 1,
    sequence_parallel: bool = False,
    fused_norms: bool = True,
) -> Bytes:
    """Bytes that one block keeps for backward for so many tokens, by tensor: the table above.

    checkpoint: "none", "full" or "per_op"; every_other is "full" for blocks 0, 2, 4, ...
    """
    c, N, e, w, s = config, tokens, itemsize, max(itemsize, 4), tp if sequence_parallel else 1
    heads = {"q": c.n_heads, "k": c.n_kv_heads, "v": c.n_kv_heads, "result": c.n_heads}
    inside = {name: N * n * (c.dim // c.n_heads) // tp * e for name, n in heads.items()}
    inside["logsumexp"] = N * c.n_heads // tp * w
    inside |= dict.fromkeys(("w1 x", "silu", "w3 x", "h"), N * c.ffn_dim // tp * e)
    x, whole_x = N * c.dim // s * e, N * c.dim * e
    if checkpoint == "full":
        return {"x": x}
    if checkpoint == "per_op":
        kept = {"x": x} | {name: inside[name] for name in ("result", "logsumexp", "w3 x")}
        kept |= {"wk's result": inside["k"], "wo's result": whole_x}
        return kept | ({"sum after wo": x, "sum after w2": x} if tp > 1 else {})
    norms = {}
    for norm, name in (("attention_norm", "x"), ("ffn_norm", "x'")):
        norms[name] = x if fused_norms else x // e * w
        norms[f"{name} normalised"] = 0 if fused_norms else x // e * w
        norms[f"1/rms of {name}"] = N // s * w
        norms[f"{norm}({name})"] = whole_x
    return norms | inside


def step_moments(
    config,
    stage: str = "fsdp",
    dp_replicate: int = 1,
    dp_shard: int = 1,
    tp: int = 1,
    *,
    batch: int = 1,
    seq_len: int,
    microbatches: int = 1,
    reshard_after_forward: bool = True,
    checkpoint: str = "none",
    dtype: torch.dtype = torch.float32,
    compute_dtype: torch.dtype | None = None,
    state_dtype: torch.dtype | None = None,
    sequence_parallel: bool = False,
    loss_parallel: bool = False,
    fused_norms: bool = True,
) -> dict[str, Bytes]:
    """Moment -> kind -> bytes that one rank holds, in order: rest, forward (its end, with the loss), then backward's
    loss, output, layers.L-1, .., layers.0, embedding, and the optimizer's step. Of the last of several microbatches.

    config: a ModelConfig, or whatever has its attributes. batch: sequences of seq_len on this rank in a microbatch.
    dtype: of parameters and gradients. compute_dtype: what FSDP gathers and computes in, reducing in float32 or better.
    state_dtype: of AdamW's two averages; default dtype. fused_norms: a norm is one kernel; False on a CPU.
    "gathered" is whatever FSDP and ZeRO-2 hold whole for a while, gradients too. Raises ValueError.
    """
    c, N, L, n = config, batch * seq_len, config.n_layers, dp_shard
    counts = {"batch": batch, "seq_len": seq_len, "microbatches": microbatches}
    _check(c, stage, checkpoint, dp_replicate, dp_shard, tp, dtype, compute_dtype, **counts)
    fsdp, cuts_gradients, several = stage == "fsdp", stage in ("zero2", "fsdp"), microbatches > 1
    has_buckets = not cuts_gradients and dp_replicate * n > 1
    p, e, state = dtype.itemsize, (compute_dtype or dtype).itemsize, (state_dtype or dtype).itemsize
    w, r = max(e, 4), max(e, 4) if compute_dtype else p  # r: in the dtype that reduces

    # Numbers of a block and of the root, whole and in this rank's rows; of the gradients that come first and last.
    block, root = parameter_shapes(c, tp)
    shapes = [*block.values()] * L + [*root.values()]
    in_block, in_root = (sum(map(prod, unit.values())) for unit in (block, root))
    block_rows, root_rows = (sum(ceil(z[0] / n) * prod(z[1:]) for z in unit.values()) for unit in (block, root))
    whole, rows = L * in_block + in_root, L * block_rows + root_rows
    table = prod(root["tok_embeddings"])
    first = table if c.tied else in_root - table  # the output's and the last norm's
    last = table if c.tied or tp == 1 else c.vocab_size * c.dim  # the embedding's
    updated = whole if stage == "ddp" else rows
    always = {"parameters": p * (rows if fsdp else whole), "optimizer": 2 * updated * state + 4 * len(shapes)}
    all_gradients = p * (rows if cuts_gradients else whole + last - table)

    # What each block keeps, what the one that runs backward holds, and what lies around the blocks.
    layout = {"tp": tp, "sequence_parallel": sequence_parallel, "fused_norms": fused_norms}
    of_mode = {mode: kept_by_block(c, N, e, mode, **layout) for mode in ("none", "full", "per_op")}
    modes = [("full", "none")[i % 2] if checkpoint == "every_other" else checkpoint for i in range(L)]
    kept = [total(of_mode[mode]) for mode in modes]
    x, everything = of_mode["full"]["x"], of_mode["none"]
    running = {mode: total(everything) + 2 * everything["h"] + x for mode in of_mode}  # x: the output's gradient
    running["per_op"] += of_mode["per_op"].get("sum after w2", 0)  # which the second run stops short of
    for mode in ("full", "per_op") if w > e and not fused_norms else ():
        running[mode] += x  # beside the norm's wide copy of it
    last_norm = sum(everything[name] for name in ("x", "x normalised", "1/rms of x", "attention_norm(x)"))
    cast = compute_dtype is not None and e < 4  # FSDP then casts cos and sin for each block
    around = 2 * seq_len * (c.dim // c.n_heads) * (L * e if cast else 4) + 16 * N
    logits = N * w * (ceil(c.vocab_size / tp) if loss_parallel else c.vocab_size)

    def moment(gathered=0, gradients=0, activations=0, logits=0) -> Bytes:
        changing = {"gathered": gathered, "gradients": gradients, "activations": activations, "logits": logits}
        return {kind: int((always | changing)[kind]) for kind in KINDS}

    def gradients(trained: int, n_blocks: int) -> int:
        """When `trained` numbers have their gradient, and with them all those of the last n_blocks blocks."""
        if cuts_gradients:
            return p * (rows if several else n_blocks * block_rows + (0 if fsdp else first // n))
        if has_buckets:
            return p * (whole + (whole - trained if several else 0))  # what has not moved into a bucket yet
        return p * (whole if several else trained)

    def gathered(n_blocks: int) -> int:
        """The root's parameters, and those of so many blocks."""
        return e * (in_root + n_blocks * in_block) if fsdp else 0

    leaving = (
        n * r * root_rows if fsdp and several else 0
    )  # the microbatch before has sent it; it stays till the next is
    here = gathered(0 if reshard_after_forward else L) + leaving
    there = around + last_norm + sum(kept)
    tape = {"rest": moment(gradients=p * whole if has_buckets else 0)}
    tape["forward"] = moment(here, gradients(0, 0), there, logits)
    tape["loss"] = moment(here, gradients(0, 0), there, logits * (4 if loss_parallel and tp > 1 else 3))
    new = e * first if cuts_gradients or several else 0  # beside the sum it will be added to, or not yet cut
    tape["output"] = moment(here + new, gradients(first, 0), there, logits + (logits // w * e if e < w else 0))

    waiting = e * first if fsdp else 0  # the root's gradients leave together, after the embedding's
    for i in reversed(range(L)):
        after, below, w2 = L - 1 - i, around + sum(kept[:i]), prod(block["w2"])
        coming = n * e * block_rows if fsdp and reshard_after_forward and i else 0
        here = gathered(1 if reshard_after_forward else i + 1) + waiting + coming + leaving
        here += e * w2 if cuts_gradients else 0
        in_w2 = moment(here, gradients(first + after * in_block + w2, after), below + running[modes[i]])
        leaving = n * r * block_rows if fsdp else 0
        here = gathered(0 if reshard_after_forward else i) + waiting + coming + leaving
        here += e * in_block if cuts_gradients else 0
        at_its_end = moment(here, gradients(first + (after + 1) * in_block, after + 1), below + x)
        tape[f"layers.{i}"] = max(in_w2, at_its_end, key=total)

    new = e * last if cuts_gradients or several or has_buckets or c.tied else 0
    trained = gradients(whole if has_buckets else whole - table, L) + (0 if new else p * last)
    in_table = moment(gathered(0) + waiting + new + leaving, trained, around + x)
    at_its_end = moment(e * in_root + n * r * root_rows if fsdp else 0, all_gradients, 16 * N)
    tape["embedding"] = max(in_table, at_its_end, key=total)
    # A narrow state is widened to be updated, a parameter at a time: 8 bytes a number, 15 to round it stochastically.
    widest = max(ceil(z[0] / (1 if stage == "ddp" else n)) * prod(z[1:]) for z in shapes)
    tape["step"] = moment(gradients=all_gradients, activations=23 * widest if state < min(p, 4) else 0)
    return tape


def memory(config, *args, **kwargs) -> dict[str, Bytes]:
    """rest, forward (its end), backward (its peak), step -> kind -> bytes of one rank. Arguments: as `step_moments`."""
    tape = step_moments(config, *args, **kwargs)
    ends = {name: tape.pop(name) for name in ("rest", "forward", "step")}
    return ends | {"backward": max(tape.values(), key=total), "step": ends.pop("step")}


# ---- time and links -------------------------------------------------------------------------------------------

GIB = 2**30
# The three efficiencies, and what the allocator holds beyond tensors. The same for every model, layout and GPU.
MATMUL = 0.57  # of the peak flops, bf16 or float8
ATTENTION = 0.2  # of the peak bf16 flops
BANDWIDTH = 0.75  # of HBM's and the links' bytes/s
ALLOCATOR = 1.2  # reserved over allocated: rounding, gaps, workspaces
SPREAD = 0.01  # standard deviation of the speed of GPUs at their power limit; a step waits for the slowest of all


class GPU(NamedTuple):
    """Of one GPU, from its data sheet. Bandwidths in bytes/s, of a link in one direction."""

    memory: float  # bytes a process can have
    flops: float  # bf16, dense
    hbm: float
    nvlink: float = 450e9
    network: float = 50e9
    per_host: int = 8
    float8: float = 2.0  # its flops over those of bf16


GPUS = {
    "h100-96gb": GPU(95 * GIB, 989e12, 2.4e12),  # 500 W: clocks fall under load, which MATMUL holds too
    "h100-80gb": GPU(79 * GIB, 989e12, 3.35e12),
    "h200": GPU(140 * GIB, 989e12, 4.8e12),
    "b200": GPU(178 * GIB, 2250e12, 8e12, nvlink=900e9),
    "a100-80gb": GPU(79 * GIB, 312e12, 2.0e12, nvlink=300e9, network=25e9, float8=1.0),
}
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")  # slowest-varying first: tp ranks are neighbours
# schedule -> (stages a rank, units of a microbatch in a stage where the ramp has 1 a rank, least microbatches a rank)
SCHEDULES = {
    "gpipe": (1, 1, 0),
    "1f1b": (1, 1, 1),
    "interleaved_1f1b": (2, 1, 1),
    "looped_bfs": (2, 1, 1),
    "interleaved_zero_bubble": (2, 3, 1),
    "zbv": (2, 3, 2),
    "dualpipev": (2, 3, 2),
}


class Link(NamedTuple):
    """What a rank sends in a step on one axis."""

    kind: str  # "nvlink" or "network"
    n_bytes: int
    seconds: float
    exposed: float  # seconds of them that nothing hides


@dataclass(frozen=True)
class Estimate:
    """A step as it should go. memory, of the fullest rank at its peak, sums to peak; time, in seconds, to step_time."""

    layout: str
    memory: Bytes
    moment: str  # of the peak
    moments: dict[str, Bytes]  # all, of tensors alone
    capacity: float
    bubble: float
    links: dict[str, Link]
    time: dict[str, float]
    tokens: int  # in a step, of a GPU's share
    mfu: float

    @property
    def peak(self) -> int:
        return total(self.memory)

    @property
    def fits(self) -> bool:
        return self.peak <= self.capacity

    @property
    def step_time(self) -> float:
        return sum(self.time.values())

    @property
    def tokens_per_s_gpu(self) -> float:
        return self.tokens / self.step_time

    def limit(self) -> str:
        """What stands in the way of more tokens a second, and what moves it."""
        slow = max((name for name in self.time if name not in ("matmul", "attention")), key=self.time.get)
        share = f"{slow} takes {self.time[slow] / self.step_time:.0%} of the step: {REMEDIES[slow]}"
        return f"memory, {self.peak / self.capacity:.0%} full in {self.moment}; then {share}"

    def describe(self) -> str:
        lines = [f"{self.layout}: {self.tokens_per_s_gpu:,.0f} tokens/s a GPU, MFU {self.mfu:.1%}"]
        lines += [f"peak {self.peak / GIB:.1f} GiB of {self.capacity / GIB:.0f} in {self.moment}: "]
        lines[-1] += ", ".join(f"{kind} {n / GIB:.1f}" for kind, n in self.memory.items() if n)
        lines += [f"step {self.step_time:.2f} s: " + ", ".join(f"{k} {s:.3f}" for k, s in self.time.items() if s)]
        for axis, link in self.links.items():
            lines += [f"{axis:13}{link.n_bytes / 1e9:8.2f} GB by {link.kind}, {link.seconds:.3f} s"]
            lines[-1] += f", of which {link.exposed:.3f} s in sight"
        return "\n".join([*lines, "next limit: " + self.limit()])


REMEDIES = {
    "elementwise": "compile, or fewer recomputed blocks",
    "communication": "async tensor parallel, larger microbatches, or smaller groups on the slow link",
    "optimizer": "more tokens a step",
    "bubble": "more microbatches, or an interleaved or zero-bubble schedule",
}


def layers_of_stages(n_layers: int, n_stages: int) -> list[int]:
    """How many layers each stage has: the next one always to the lightest, where the ends weigh one layer each."""
    if not 1 <= n_stages <= n_layers:
        raise ValueError(f"{n_layers} layers cannot fill {n_stages} stages, each with at least 1: use fewer stages")
    counts = [1] * n_stages
    ends = [(s == 0) + (s == n_stages - 1) for s in range(n_stages)]
    for _ in range(n_layers - n_stages):
        counts[min(range(n_stages), key=lambda s: (counts[s] + ends[s], -s))] += 1
    return counts


def bubble_fraction(schedule: str, n_ranks: int, microbatches: int, stages_per_rank: int | None = None) -> float:
    """The idle share of the ranks of a pipeline. ValueError: fewer microbatches than the formula holds for."""
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule={schedule!r} is none of the {len(SCHEDULES)} there are: {', '.join(SCHEDULES)}")
    v, units, least = SCHEDULES[schedule]
    v = stages_per_rank or v
    if n_ranks > 1 and microbatches < least * n_ranks - (schedule == "zbv"):
        raise ValueError(
            f"{schedule} on pp {n_ranks} wants at least {least * n_ranks - (schedule == 'zbv')} microbatches, got "
            f"{microbatches}: take more microbatches, fewer stages, or gpipe"
        )
    return (n_ranks - 1) / (units * v * microbatches + n_ranks - 1)


def _degrees(dims) -> dict[str, int]:
    return {axis: getattr(dims, axis, 1) for axis in AXES}


def stages_of_rank(schedule: str, n_ranks: int, rank: int, stages_per_rank: int | None = None) -> list[int]:
    v = stages_per_rank or SCHEDULES[schedule][0]
    return (
        [rank, 2 * n_ranks - 1 - rank] if schedule in ("zbv", "dualpipev") else list(range(rank, v * n_ranks, n_ranks))
    )


def _parts(config, schedule, p, rank, stages_per_rank=None) -> tuple[int, bool, bool]:
    """(layers, has the embedding, has the output) of a rank of the pipeline."""
    mine = stages_of_rank(schedule, p, rank, stages_per_rank)
    counts = layers_of_stages(config.n_layers, p * len(mine)) if p > 1 else [config.n_layers]
    mine = mine if p > 1 else [0]
    return sum(counts[s] for s in mine), 0 in mine, len(counts) - 1 in mine


def _numbers(config, tp: int, first: bool, last: bool) -> tuple[int, int]:
    """Parameters, on one of tp ranks, of a block; and of the embedding if first, the last norm and the output if last."""
    block, root = (sum(map(prod, unit.values())) for unit in parameter_shapes(config, tp))
    table = ceil(config.vocab_size / tp) * config.dim
    return block, root if first and last else table * first + (table + config.dim) * last


def state_bytes(
    config,
    dims,
    rank: int = 0,
    schedule: str = "1f1b",
    stages_per_rank: int | None = None,
    dtype: torch.dtype = torch.float32,
    state_dtype: torch.dtype | None = None,
) -> Bytes:
    """parameters, gradients, optimizer -> bytes that this rank of the job holds at rest, to the byte: FSDP over
    dp_shard × cp cuts rows as torch.chunk does, after tensor parallel and the pipeline have. With dims.ep above 1 experts
    are whole on one of ep ranks, and cut among those of dp_shard × cp × tp that hold the same."""
    degrees, where = _degrees(dims), {}
    for axis in reversed(AXES):
        rank, where[axis] = divmod(rank, degrees[axis])
    if rank:
        raise ValueError(f"rank is beyond the {prod(degrees.values())} ranks of {degrees}")
    pp, dp, cp, tp, ep = (*(degrees[axis] for axis in ("pp", "dp_shard", "cp", "tp")), getattr(dims, "ep", 1))
    if getattr(config, "n_experts", 0) % ep or dp * cp * tp % ep:
        raise ValueError(
            f"ep {ep} must divide n_experts {getattr(config, 'n_experts', 0)} and dp_shard × cp × tp = {dp * cp * tp}"
        )
    if pp > 1 and getattr(config, "tied", False):
        raise ValueError(f"tied embeddings lie on the first and the last stage of pp {pp}: untie, or take pp 1")
    n_layers, first, last = _parts(config, schedule, pp, where["pp"], stages_per_rank)
    block, root = parameter_shapes(config, tp, ep)
    held = [*block.items()] * n_layers
    held += [(name, shape) for name, shape in root.items() if (first if name == "tok_embeddings" else last)]

    def piece(size: int, n: int, i: int) -> int:  # of torch.chunk: the last ones may be smaller, or empty
        return max(0, min(ceil(size / n), size - i * ceil(size / n)))

    i, numbers = where["dp_shard"] * cp + where["cp"], 0
    for name, shape in held:
        if name in ("tok_embeddings", "output"):
            shape = (piece(config.vocab_size, tp, where["tp"]), *shape[1:])
        if name.startswith("experts") and ep > 1:
            n, j = dp * cp * tp // ep, (i * tp + where["tp"]) // ep
            dim = next((dim for dim, size in enumerate(shape) if size % n == 0), 0)
        else:
            n, j, dim = dp * cp, i, 0
        numbers += piece(shape[dim], n, j) * prod(shape[:dim] + shape[dim + 1 :])
    p, state = dtype.itemsize, (state_dtype or dtype).itemsize
    return {"parameters": p * numbers, "gradients": p * numbers, "optimizer": 2 * state * numbers + 4 * len(held)}


class _Job(NamedTuple):
    """What every part of an estimate asks for."""

    c: Any
    gpu: GPU
    pp: int
    dp_replicate: int
    n: int  # FSDP: dp_shard × cp
    cp: int
    tp: int
    batch: int  # sequences in a microbatch
    seq_len: int
    m: int  # microbatches
    schedule: str
    v: int | None
    checkpoint: str
    compile: bool
    float8: bool
    async_tp: bool
    sequence_parallel: bool
    loss_parallel: bool
    returned: int = 0  # bytes a logit that the last stage hands back
    fused_norms: bool = True

    @property
    def N(self) -> int:  # tokens of a microbatch on a rank
        return self.batch * self.seq_len // self.cp

    @property
    def s(self) -> int:
        return self.tp if self.sequence_parallel else 1


def _stage_moments(job: _Job, r: int) -> dict[str, Bytes]:
    """Of rank r of a pipeline. FSDP gathers once a step, and adds up whole gradients in float32 until its end."""
    c, (n_layers, first, last) = job.c, _parts(job.c, job.schedule, job.pp, r, job.v)
    layout = {"tp": job.tp, "sequence_parallel": job.sequence_parallel, "fused_norms": job.fused_norms}
    of_mode = {mode: kept_by_block(c, job.N, 2, mode, **layout) for mode in ("none", "full", "per_op")}
    kept, h, x = {mode: total(of) for mode, of in of_mode.items()}, of_mode["none"]["h"], of_mode["full"]["x"]
    # A schedule that splits backward keeps a second run's tape until the weights' half.
    checkpoint = "none" if SCHEDULES[job.schedule][1] > 1 else job.checkpoint
    a_block = (kept["none"] + x) / 2 if checkpoint == "every_other" else kept[checkpoint]
    block, ends = _numbers(c, job.tp, first, last)
    whole = n_layers * block + ends
    rows = ceil(whole / job.n)
    v = job.v or SCHEDULES[job.schedule][0]
    p, m, waits = job.pp, job.m, job.schedule in ("gpipe", "looped_bfs")  # with backward until all is forward
    chunks = {  # microbatches in flight, each in 1/v of this rank's layers
        "1f1b": min(m, p - r),
        "interleaved_1f1b": min(m * v, 2 * (p - r - 1) + (v - 1) * p + 1),
        "interleaved_zero_bubble": min(m * v, p * v),
        "zbv": min(m * v, 2 * p),
        "dualpipev": min(m * v, 2 * p + 1),
    }.get(job.schedule, m * v)
    # Messages that torch keeps for all microbatches: what a stage receives, which is on the tape while in flight, and its
    # gradient; the gradient that comes back; with several stages a rank what was sent, too.
    messages = m * (2 * (v - first) + (v - last) * (1 + (v > 1))) - chunks * (v - first) / v
    around = messages * x + 4 * job.seq_len // job.cp * (c.dim // c.n_heads) * n_layers + 16 * job.N
    tape = around + chunks / v * n_layers * a_block
    words = ceil(c.vocab_size / job.tp) if job.loss_parallel else c.vocab_size
    logits = job.N * words * last  # numbers of a microbatch
    at_once = m if waits else 1
    returned = logits * m * job.returned
    always = {"parameters": 4 * rows, "optimizer": 8 * rows}
    gathered = 2 * ends + (1 if job.float8 else 2) * n_layers * block if job.n > 1 else 2 * whole

    def moment(**changing) -> Bytes:
        return {kind: int((always | changing).get(kind, 0)) for kind in KINDS}

    here = {"gathered": gathered, "gradients": 4 * whole}
    running = 2 * h + x + (kept["none"] - a_block if job.checkpoint != "none" else 0)
    of_loss = logits * 4 * (at_once + (3 if job.loss_parallel and job.tp > 1 else 2)) + (
        returned or logits * 2 * at_once
    )
    found = {"a block's backward": moment(**here, activations=tape + running, logits=returned)}
    if last:
        found["the loss"] = moment(**here, activations=tape + job.N * c.dim * 2, logits=of_loss)
    reduced = {"gathered": 4 * max(block, ends), "gradients": 4 * whole + 4 * rows, "activations": around}
    found["the last reduce"] = moment(**reduced, logits=returned)
    if returned:
        found["logits joined"] = moment(gradients=4 * rows, activations=around, logits=2 * returned)
    return found


def _memory(job: _Job) -> tuple[dict[str, Bytes], str, Bytes]:
    """(moments, the fullest of them, what is reserved in it by kind)."""
    if job.pp == 1:
        layout = {"dp_replicate": job.dp_replicate, "dp_shard": job.n, "tp": job.tp, "checkpoint": job.checkpoint}
        layout |= {"sequence_parallel": job.sequence_parallel, "loss_parallel": job.loss_parallel}
        sizes = {"batch": job.batch, "seq_len": job.seq_len // job.cp, "microbatches": job.m}
        moments = step_moments(
            job.c, "fsdp", **layout, **sizes, compute_dtype=torch.bfloat16, fused_norms=job.fused_norms
        )
        reserved = moments
    else:
        stages = [_stage_moments(job, r) for r in range(job.pp)]
        moments = {f"{name} on rank {r}": held for r, of in enumerate(stages) for name, held in of.items()}
        reserved = {}
        for name, held in moments.items():
            # The joined logits are one tensor, larger than any before. An allocator does not join its segments, so that
            # it takes a new one for them, beside all those of the fullest moment.
            joined = stages[int(name.split()[-1])].get("logits joined", {}).get("logits", 0) // 2
            if not name.startswith("logits joined"):
                reserved[name] = held | {"logits": held["logits"] + joined}
    moment = max(reserved, key=lambda name: total(reserved[name]))
    held = reserved[moment]
    return moments, moment, held | {"allocator": int(total(held) * (ALLOCATOR - 1))}


def _work(job: _Job, n_layers: int, first: bool, last: bool) -> dict[str, float]:
    """Seconds of one microbatch on a rank, forward and backward, by kind; 'tp' those of its messages, hidden or not."""
    c, N, t, s, gpu = job.c, job.N, job.tp, job.s, job.gpu
    D, F, V = c.dim, c.ffn_dim, c.vocab_size
    C = D // c.n_heads * c.n_kv_heads
    again = {"none": 0.0, "every_other": 0.5, "per_op": 1.0, "full": 1.0}[job.checkpoint]
    linear = {"wq": D * D, "wk": D * C, "wv": D * C, "wo": D * D, "w1": D * F, "w3": D * F, "w2": D * F}
    forward = sum(linear.values())
    redone = {"per_op": linear["wq"] + linear["wv"] + linear["w1"]}.get(job.checkpoint, again * (forward - D * F))
    layer_flops = 2 * N * (3 * forward + redone) / t * n_layers
    peak = gpu.flops * MATMUL
    matmul = layer_flops / (peak * (gpu.float8 if job.float8 else 1)) + 6 * N * D * V / t * last / peak
    passes = 3.5 + (again if job.checkpoint != "per_op" else 0)  # of the forward; backward makes the scores again
    attention = passes * 2 * N * job.seq_len * D / t * n_layers / (gpu.flops * ATTENTION)

    # Numbers read or written for a token and layer, 2 bytes each; a compiled chain reads its inputs and writes its result.
    norm, rope, silu, silu_back = (2, 2, 3, 5) if job.compile else (14, 8, 5, 9)
    once = (2 * norm + 5) * D / s + rope * (D + C) / t + silu * F / t
    back = (2 * norm + 4) * D / s + 7 * D + rope * (D + C) / t + silu_back * F / t
    n_bytes = N * n_layers * 2 * ((1 + again) * once + back)
    n_bytes += 38 * N * V / (t if job.loss_parallel else 1) * last  # softmax in float32, kernel by kernel
    block, ends = _numbers(c, t, first, last)
    weights = n_layers * block + ends
    if job.float8:  # largest magnitude, cast: 2 + 2 + 1 bytes an operand
        x = 2 * D / s + D / t + F / t
        dy = (D + 2 * C) / t + 2 * D / s + 2 * F / t
        n_bytes += 5 * N * n_layers * ((2 + again) * x + dy)
        n_bytes += 3 * n_layers * block  # weights, transposed for backward
    n_bytes += (10 if job.m > 1 else 6) * weights  # a gradient is added to the sum, or copied to be sent
    n_bytes += 0 if job.pp > 1 else 8 * weights  # gathered twice, and copied out of the message
    if job.async_tp:
        n_bytes += N * D * 2 * 2 * (4 + again) * n_layers  # the parts of sums
    e = 1 if job.float8 else 2  # what is gathered may travel in 8 bits, sums do not
    a_message = N * D * (t - 1) / t
    redo = {"per_op": 2 * e, "none": 0}.get(job.checkpoint, again * (2 * e + 2))
    tp = a_message * (n_layers * (4 * e + 4 * 2 + redo) + 4 * first + 4 * last)
    return {"matmul": matmul, "attention": attention, "elementwise": n_bytes / (gpu.hbm * BANDWIDTH), "tp bytes": tp}


def _speed(job: _Job, stride: int, size: int) -> tuple[str, float]:
    """A group's link, and a member's bytes/s: across hosts, the members on a host share its network cards."""
    if stride * size <= job.gpu.per_host:
        return "nvlink", job.gpu.nvlink * BANDWIDTH
    members = max(1, min(size, job.gpu.per_host // stride))
    return "network", min(job.gpu.nvlink, job.gpu.network * members) * BANDWIDTH


def estimate(
    config,
    dims,
    gpu: str | GPU = "h100-96gb",
    *,
    seq_len: int,
    local_batch: int = 1,
    microbatches: int | None = None,
    schedule: str = "1f1b",
    stages_per_rank: int | None = None,
    checkpoint: str = "full",
    compile: bool = True,
    float8: bool = False,
    async_tp: bool = False,
    sequence_parallel: bool = True,
    loss_parallel: bool = True,
    returned_logits: torch.dtype | None = None,
    fused_norms: bool = True,
) -> Estimate:
    """A training step: bf16 compute, float32 parameters, gradients and AdamW; FSDP over dp_shard × cp.

    config: a ModelConfig, dims: a ParallelDims, or whatever has their attributes. local_batch: sequences of seq_len
    of each data-parallel rank in a step; microbatches: default pp. float8: tensorwise, gathered in 8 bits.
    returned_logits: dtype of what a pipeline's last stage hands back; None with return_outputs=False. fused_norms: as
    `step_moments`.
    ValueError: sizes that do not divide; experts; a schedule with too few microbatches.
    """
    degrees = _degrees(dims)
    gpu = GPUS[gpu] if isinstance(gpu, str) else gpu
    pp, cp, tp, m = degrees["pp"], degrees["cp"], degrees["tp"], microbatches or degrees["pp"]
    _check(config, "fsdp", checkpoint, degrees["dp_replicate"], degrees["dp_shard"], tp, torch.float32, torch.bfloat16, pp=pp, cp=cp, seq_len=seq_len, local_batch=local_batch, microbatches=m)  # fmt: skip
    if local_batch % m:
        legal = [k for k in range(1, local_batch + 1) if local_batch % k == 0]
        raise ValueError(f"local_batch {local_batch} cannot be cut into {m} equal microbatches: use one of {legal}")
    if seq_len % (2 * cp if cp > 1 else 1) or seq_len // cp % tp:
        raise ValueError(
            f"seq_len {seq_len} cannot be cut by 2 × cp {cp} and tp {tp}: take a multiple of {2 * cp * tp}"
        )
    if pp > 1 and getattr(config, "tied", False):
        raise ValueError(f"tied embeddings lie on the first and the last stage of pp {pp}: untie, or take pp 1")
    bubble = bubble_fraction(schedule, pp, m, stages_per_rank) if pp > 1 else 0.0
    n = degrees["dp_shard"] * cp
    job = _Job(config, gpu, pp, degrees["dp_replicate"], n, cp, tp, local_batch // m, seq_len, m, schedule, stages_per_rank, checkpoint, compile, float8, async_tp and tp > 1, sequence_parallel and tp > 1, loss_parallel and tp > 1, returned_logits.itemsize if returned_logits else 0, fused_norms)  # fmt: skip
    moments, moment, held = _memory(job)

    ranks = [(_parts(config, schedule, pp, r, stages_per_rank)) for r in {0, pp // 2, pp - 1}]
    works = [_work(job, *parts) for parts in ranks]
    kinds = ("matmul", "attention", "elementwise")
    i = max(range(len(ranks)), key=lambda i: sum(works[i][k] for k in kinds) + works[i]["tp bytes"] / gpu.nvlink)
    (n_layers, first, last), work = ranks[i], works[i]
    time = {kind: m * work[kind] for kind in kinds}
    n_gpus = prod(degrees.values())
    slowest = 1 + SPREAD * sqrt(2 * log(n_gpus))  # the expected largest of so many normal numbers
    time = {kind: seconds * slowest for kind, seconds in time.items()}
    busy, links = sum(time.values()), {}

    def link(axis, stride, size, n_bytes, hidden):
        kind, speed = _speed(job, stride, size)
        if size > 1:
            links[axis] = Link(kind, int(n_bytes), n_bytes / speed, max(0.0, n_bytes / speed - hidden))

    link("tp", 1, tp, m * work["tp bytes"], 0.9 * time["matmul"] if job.async_tp else 0.0)
    kv = job.N * 2 * (config.dim // config.n_heads) * config.n_kv_heads // tp * 2 * n_layers
    passes = 3 if checkpoint in ("none", "per_op") else 4  # forward, again, and backward with the gradients of k and v
    link("cp", tp, cp, (cp - 1) * kv * passes * m, time["attention"] / 2)
    block, ends = _numbers(config, tp, first, last)
    share, times = (n - 1) / n, 1 if pp > 1 else m
    gathers = (1 if pp > 1 else 2) * times * ((1 if float8 else 2) * n_layers * block + 2 * ends) * share
    reduces = times * 4 * (n_layers * block + ends) * share
    speed = _speed(job, tp, n)[1]
    # Nothing hides the first gather and the last reduce; a pipeline reduces when all microbatches are done.
    sight = (2 * (ends + block) + 4 * (ends if pp == 1 else n_layers * block + ends)) * share / speed
    link("fsdp", tp, n, gathers + reduces, min(busy, (gathers + reduces) / speed) - sight)
    rows, k = (n_layers * block + ends) / n, job.dp_replicate
    link("dp_replicate", tp * n, k, 2 * (k - 1) / k * 4 * rows * times, busy / 2 / m)
    stages = stages_per_rank or SCHEDULES[schedule][0]
    link("pp", tp * n * k, pp, 2 * m * stages * job.N * config.dim // job.s * 2, 0.0)
    time["communication"] = sum(link.exposed for link in links.values())
    in_turn = busy + sum(links[a].exposed for a in ("tp", "cp", "pp") if a in links)  # in each microbatch
    time["bubble"] = in_turn * bubble / (1 - bubble)
    time["optimizer"] = 40 * rows / (gpu.hbm * BANDWIDTH)  # clipped and updated: ten passes of float32

    tokens = local_batch * seq_len * degrees["dp_replicate"] * degrees["dp_shard"] / n_gpus
    multiply = config.n_layers * sum(map(prod, parameter_shapes(config)[0].values())) + config.vocab_size * config.dim
    flops = 6 * multiply + 12 * config.n_layers * config.dim * seq_len
    layout = " × ".join(f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1) or "one GPU"
    found = Estimate(layout, held, moment, moments, gpu.memory, bubble, links, time, tokens, 0.0)
    return replace(found, mfu=flops * found.tokens_per_s_gpu / gpu.flops)


# ---- search ---------------------------------------------------------------------------------------------------


class Dims(NamedTuple):
    """As `ParallelDims`, without a mesh."""

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1


class Plan(NamedTuple):
    dims: Dims
    options: dict  # microbatches, schedule and checkpoint
    estimate: Estimate


class Ranking(NamedTuple):
    plans: list[Plan]  # the best of each layout that fits, fastest first
    n_tried: int  # layouts, before their microbatches and checkpoints
    why: str


def _divisors(n: int) -> list[int]:
    return [k for k in range(1, n + 1) if n % k == 0]


def search(config, n_gpus: int, gpu: str | GPU = "h100-96gb", *, seq_len: int, global_batch: int, **options) -> Ranking:
    """All layouts of n_gpus that do global_batch sequences a step and fit, by tokens/s; why the first is first.

    Tried for each: every number of microbatches, 1F1B and interleaved, checkpoints none, per_op and full, unless an
    option says otherwise; options as `estimate` takes them. ValueError: nothing fits, with the one that comes nearest.
    """
    spec = GPUS[gpu] if isinstance(gpu, str) else gpu
    best, nearest, n_tried, refused = [], None, 0, ""
    for tp, pp in product(_divisors(min(n_gpus, spec.per_host)), _divisors(n_gpus)):
        for cp in _divisors(n_gpus // (tp * pp)) if n_gpus % (tp * pp) == 0 else []:
            dims = Dims(dp_shard=n_gpus // (tp * pp * cp), cp=cp, tp=tp, pp=pp)
            if global_batch % dims.dp_shard or cp > seq_len // 4096 + 1:
                continue
            n_tried, of_layout = n_tried + 1, []
            tries = {"checkpoint": ("none", "per_op", "full"), "schedule": ("1f1b", "interleaved_1f1b")[: 1 + (pp > 1)]}
            tries["microbatches"] = [m for m in _divisors(global_batch // dims.dp_shard) if m >= pp]
            tries |= {name: (value,) for name, value in options.items()}
            for values in product(*tries.values()):
                tried = dict(zip(tries, values, strict=True))
                try:
                    found = estimate(
                        config, dims, spec, seq_len=seq_len, local_batch=global_batch // dims.dp_shard, **tried
                    )
                except ValueError as error:
                    refused = str(error)
                    continue
                plan = Plan(dims, {name: tried[name] for name in ("microbatches", "schedule", "checkpoint")}, found)
                if found.fits:
                    of_layout.append(plan)
                elif nearest is None or found.peak < nearest.estimate.peak:
                    nearest = plan
            if of_layout:
                best.append(max(of_layout, key=lambda plan: plan.estimate.tokens_per_s_gpu))
    if not best:
        near = f"{nearest.estimate.layout} needs {nearest.estimate.peak / GIB:.0f} GiB" if nearest else refused
        raise ValueError(
            f"none of {n_tried} layouts of {n_gpus} GPUs with {spec.memory / GIB:.0f} GiB does {global_batch} sequences "
            f"of {seq_len}: {near}. Take more GPUs, shorter sequences, or another batch"
        )
    best.sort(key=lambda plan: -plan.estimate.tokens_per_s_gpu)
    return Ranking(best, n_tried, _why(best, n_tried))


def _why(plans: list[Plan], n_tried: int) -> str:
    first = plans[0].estimate
    told = [f"{first.layout} comes first of {len(plans)} layouts that fit, of {n_tried}"]
    for plan in plans[1:3]:
        other = plan.estimate
        lost = {kind: other.time[kind] - first.time[kind] for kind in first.time}  # the same tokens a step
        most, slower = max(lost, key=lost.get), other.step_time / first.step_time - 1
        if slower < 0.01:
            told.append(f"{other.layout} is as fast")
            continue
        told.append(
            f"{other.layout} is {slower:.1%} slower, most of it {most}: {other.time[most]:.2f} s in place of "
            f"{first.time[most]:.2f} s"
        )
    return "; ".join(told) + f". Next limit: {first.limit()}"


# ---- command line ---------------------------------------------------------------------------------------------


class Sizes(NamedTuple):
    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    ffn_dim: int
    vocab_size: int = 128_256
    tied: bool = False


MODELS = {
    "llama3-1b": Sizes(2048, 16, 32, 8, 8192, tied=True),
    "llama3-8b": Sizes(4096, 32, 32, 8, 14_336),
    "llama3-70b": Sizes(8192, 80, 64, 8, 28_672),
    "llama3-405b": Sizes(16_384, 126, 128, 8, 53_248),
}


def main(arguments: list[str] | None = None) -> None:
    """python -m minititan.planner --model llama3-70b --gpus 256 --global-batch 512           ranks layouts
    python -m minititan.planner --model llama3-8b --dp-shard 8 --local-batch 2 --checkpoint per_op   tells of one"""
    parser = argparse.ArgumentParser(usage=main.__doc__)
    parser.add_argument("--model", choices=MODELS, default="llama3-8b")
    parser.add_argument("--gpu", choices=GPUS, default="h100-96gb")
    parser.add_argument("--gpus", type=int, help="rank all layouts of so many")
    parser.add_argument("--global-batch", type=int, help="with --gpus: sequences a step; default one a GPU")
    for axis in AXES:
        parser.add_argument(f"--{axis.replace('_', '-')}", type=int, default=1)
    numbers = {"seq_len": 8192, "local_batch": None, "microbatches": None, "stages_per_rank": None}
    for name, default in numbers.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--schedule", choices=SCHEDULES)
    parser.add_argument("--checkpoint", choices=CHECKPOINTS)
    for name in ("float8", "async_tp", "no_compile"):
        parser.add_argument(f"--{name.replace('_', '-')}", action="store_true")
    told = vars(parser.parse_args(arguments))
    model, gpu, gpus, batch = (told.pop(name) for name in ("model", "gpu", "gpus", "global_batch"))
    dims = Dims(**{axis: told.pop(axis) for axis in AXES})
    options = {name: value for name, value in told.items() if value is not None} | {"compile": not told["no_compile"]}
    options.pop("no_compile")
    try:
        if not gpus:
            print(estimate(MODELS[model], dims, gpu, **options).describe())
            return
        ranking = search(MODELS[model], gpus, gpu, global_batch=batch or gpus, **options)
    except ValueError as error:
        parser.error(str(error))
    for plan in ranking.plans[:10]:
        e, told = plan.estimate, ", ".join(map(str, plan.options.values()))
        print(
            f"{e.tokens_per_s_gpu:7,.0f} tokens/s a GPU, MFU {e.mfu:5.1%}, {e.peak / GIB:5.1f} GiB  {e.layout} ({told})"
        )
    print(f"\n{ranking.why}\n\n{ranking.plans[0].estimate.describe()}")


if __name__ == "__main__":
    main()
