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
    per_op              x, result, logsumexp, and of the matmuls wk, wo and w3: N · (e D/s + e (D + C + F)/t + e D + w H/t);
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
rank more. Left out: an allocator's rounding and gaps, buffers of NCCL and cuBLAS, and what fits between two moments.

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
            f"compute_dtype {compute_dtype} beside dtype {dtype}: that is FSDP's, which casts what it gathers; with stage "
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


def saved_by_block(
    config, tokens: int, itemsize: int, tp: int = 1, sequence_parallel: bool = False, fused_norms: bool = True
) -> Bytes:
    """Bytes that autograd keeps of one block for so many tokens, by tensor: the table above, without checkpointing."""
    c, N, e, w, s = config, tokens, itemsize, max(itemsize, 4), tp if sequence_parallel else 1
    saved = {}
    for norm, x in (("attention_norm", "x"), ("ffn_norm", "x'")):
        saved[x] = N * c.dim // s * (e if fused_norms else w)
        saved[f"{x} normalised"] = 0 if fused_norms else N * c.dim // s * w
        saved[f"1/rms of {x}"] = N // s * w
        saved[f"{norm}({x})"] = N * c.dim * e
    heads = {"q": c.n_heads, "k": c.n_kv_heads, "v": c.n_kv_heads, "result": c.n_heads}
    saved |= {name: N * n * (c.dim // c.n_heads) // tp * e for name, n in heads.items()}
    saved["logsumexp"] = N * c.n_heads // tp * w
    return saved | dict.fromkeys(("w1 x", "silu", "w3 x", "h"), N * c.ffn_dim // tp * e)


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
    gathered, of what is returned: whatever FSDP and ZeRO-2 hold whole for a while, gradients too. Raises ValueError.
    """
    c, N, L, n = config, batch * seq_len, config.n_layers, dp_shard
    counts = {"batch": batch, "seq_len": seq_len, "microbatches": microbatches}
    _check(c, stage, checkpoint, dp_replicate, dp_shard, tp, dtype, compute_dtype, **counts)
    fsdp, cuts_gradients, several = stage == "fsdp", stage in ("zero2", "fsdp"), microbatches > 1
    has_buckets, s = not cuts_gradients and dp_replicate * n > 1, tp if sequence_parallel else 1
    p, e = dtype.itemsize, (compute_dtype or dtype).itemsize
    r, w = max(e, 4) if compute_dtype else p, max(e, 4)

    # Numbers of a block and of the root: whole, and the rows that are this rank's.
    block, root = parameter_shapes(c, tp)
    blocks, ends = (sum(map(prod, shapes.values())) for shapes in (block, root))
    block_rows, root_rows = (sum(ceil(z[0] / n) * prod(z[1:]) for z in u.values()) for u in (block, root))
    whole, rows = L * blocks + ends, L * block_rows + root_rows
    table = prod(root["tok_embeddings"])
    first = table if c.tied else ends - table  # output and last norm: their gradients come first
    last = table if c.tied or tp == 1 else c.vocab_size * c.dim  # numbers of the embedding's gradient
    averages, cut = whole if stage == "ddp" else rows, rows if cuts_gradients else whole + last - table
    biggest = max(ceil(z[0] / (n if averages == rows else 1)) * prod(z[1:]) for z in (*block.values(), *root.values()))
    narrow = (state_dtype or dtype).itemsize < min(p, 4)

    # Activations: of the blocks before, of the one that runs, of the ends.
    saved = saved_by_block(c, N, e, tp, sequence_parallel, fused_norms)
    x, of_a_norm = N * c.dim // s * e, sum(saved[k] for k in ("x", "x normalised", "1/rms of x", "attention_norm(x)"))
    sums = 2 * x if tp > 1 else 0
    per_op = x + sum(saved[k] for k in ("result", "logsumexp", "k", "w3 x")) + N * c.dim * e + sums
    modes = ["full" if checkpoint == "every_other" and i % 2 == 0 else checkpoint for i in range(L)]
    kept = [{"full": x, "per_op": per_op}.get(mode, total(saved)) for mode in modes]
    beside = {
        "full": 0,
        "per_op": sums // 2,
    }  # what the second run leaves unused: w2's sum, and x if the norm has widened it
    beside = [beside[m] + (x if e < w and not fused_norms else 0) if m in beside else 0 for m in modes]
    angles = (
        2 * seq_len * (c.dim // c.n_heads) * (L * e if compute_dtype and e < 4 else 4)
    )  # FSDP casts a block's inputs
    around = angles + 16 * N
    logits = N * w * (ceil(c.vocab_size / tp) if loss_parallel else c.vocab_size)

    def gradients(trained: int, n_blocks: int) -> int:
        """When `trained` numbers have their gradient, and of the last `n_blocks` blocks all have."""
        if cuts_gradients:
            return p * (rows if several else n_blocks * block_rows + (0 if fsdp else first // n))
        return p * (whole + (whole - trained) * several if has_buckets else whole if several else trained)

    def moment(gathered=0, gradients=0, activations=0, logits=0) -> Bytes:
        held = {"parameters": p * (rows if fsdp else whole), "gradients": gradients}
        held["optimizer"] = 2 * averages * (state_dtype or dtype).itemsize + 4 * (L * len(block) + len(root))
        return held | {"gathered": int(gathered), "activations": int(activations), "logits": logits}

    def parameters(n_blocks: int) -> int:
        """Whole, beside the shards."""
        return e * (ends + n_blocks * blocks) if fsdp else 0

    sent = (
        n * r * root_rows if fsdp and several else 0
    )  # what a reduce-scatter sends lies there until the next one sends
    here = {"gathered": parameters(0 if reshard_after_forward else L) + sent, "gradients": gradients(0, 0)}
    here["activations"] = around + of_a_norm + sum(kept)
    tape = {"rest": moment(gradients=p * whole if has_buckets else 0), "forward": moment(**here, logits=logits)}
    tape["loss"] = moment(**here, logits=logits * (4 if loss_parallel and tp > 1 else 3))
    arriving = e * first if cuts_gradients or several else 0
    here |= {"gathered": here["gathered"] + arriving, "gradients": gradients(first, 0)}
    tape["output"] = moment(**here, logits=logits + (logits // w * e if e < w else 0))

    roots = e * first if fsdp else 0  # gradients that wait for the embedding's
    for i in reversed(range(L)):
        ready, below, w2 = L - 1 - i, around + sum(kept[:i]), prod(block["w2"])
        coming = n * e * block_rows if fsdp and reshard_after_forward and i else 0
        here = parameters(1 if reshard_after_forward else i + 1) + roots + coming + sent + e * w2 * cuts_gradients
        there = below + total(saved) + 2 * saved["h"] + x + beside[i]
        computing = moment(here, gradients(first + ready * blocks + w2, ready), there)
        sent = n * r * block_rows if fsdp else 0
        here = parameters(0 if reshard_after_forward else i) + roots + coming + sent + e * blocks * cuts_gradients
        sending = moment(here, gradients(first + (ready + 1) * blocks, ready + 1), below + x)
        tape[f"layers.{i}"] = max(computing, sending, key=total)

    arriving = e * last if cuts_gradients or several or has_buckets or c.tied else 0
    done = gradients(whole if has_buckets else whole - table, L) + (0 if arriving else p * last)
    computing = moment(parameters(0) + roots + arriving + sent, done, around + x)
    sending = moment((e * ends + n * r * root_rows) * fsdp, p * cut, 16 * N)
    tape["embedding"] = max(computing, sending, key=total)
    tape["step"] = moment(gradients=p * cut)
    tape["step"]["optimizer"] += (
        23 * biggest * narrow
    )  # its fp32 averages (8) while they are rounded stochastically (15)
    return tape


def memory(config, *args, **kwargs) -> dict[str, Bytes]:
    """rest, forward (its end), backward (its peak), step -> kind -> bytes of one rank. Arguments: as `step_moments`."""
    tape = step_moments(config, *args, **kwargs)
    ends = {name: tape.pop(name) for name in ("rest", "forward", "step")}
    return {
        "rest": ends["rest"],
        "forward": ends["forward"],
        "backward": max(tape.values(), key=total),
        "step": ends["step"],
    }
