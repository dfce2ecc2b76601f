"""Planner: how many bytes one rank holds, of what, and when, before anything is allocated.

A training step is a tape. Forward puts down what gradients will need; backward takes it up again from the end, and puts
down gradients. What lies there at any moment follows from the shapes alone: nothing in here is fitted.

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
two moments. Dense models only, on one pipeline stage.

tests/test_planner.py and notebook 05 hold it against bytes measured on real ranks.
References: activations https://arxiv.org/abs/2205.05198 · ZeRO https://arxiv.org/abs/1910.02054
Letters: B batch, T tokens, D model dim, V vocabulary, H query heads, K head dim, F feed-forward, L layers.
"""

from math import ceil, prod

import torch

STAGES = ("ddp", "zero1", "zero2", "fsdp")
CHECKPOINTS = ("none", "full", "every_other", "per_op")
KINDS = ("parameters", "gradients", "optimizer", "gathered", "activations", "logits")
Bytes = dict[str, int]  # of each of KINDS


def total(held: Bytes) -> int:
    return sum(held.values())


def _check(c, stage, checkpoint, dp_replicate, dp_shard, tp, dtype, compute_dtype, **counts) -> None:
    if getattr(c, "n_experts", 0):
        raise ValueError(f"n_experts {c.n_experts}: only dense models are planned so far; take n_experts 0")
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


def parameter_shapes(config, tp: int = 1) -> tuple[dict, dict]:
    """(block, root), each name -> shape of what the first of tp ranks has, before data parallel cuts its rows."""
    c = config
    D, C, F, V = c.dim, c.dim // c.n_heads * c.n_kv_heads, c.ffn_dim, ceil(c.vocab_size / tp)
    block = {"attention_norm": (D,), "wq": (D // tp, D), "wk": (C // tp, D), "wv": (C // tp, D), "wo": (D, D // tp)}
    block |= {"ffn_norm": (D,), "w1": (F // tp, D), "w3": (F // tp, D), "w2": (D, F // tp)}
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
