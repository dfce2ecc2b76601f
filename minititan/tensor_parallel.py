"""Tensor parallelism: one matrix, many ranks.

A layer that no longer fits, or no longer finishes in time, on one device is cut inside its matrices. Megatron's
observation is that a transformer block needs one pattern only, twice: a matrix cut by its output features (column
parallel), then a matrix cut by its input features (row parallel). Between the two, everything acts on each feature
or each head alone, so nothing travels.

            f     column parallel     nothing travels       row parallel      g
            │      w1_fD, w3_fD     silu(w1 x) · (w3 x)        w2_Df          │
  rank 0  x ┼───▶ rows [0, f)  ───▶ features [0, f)  ───▶ columns [0, f)  y_0 ┼─▶ y_0 + y_1
  rank 1  x ┼───▶ rows [f, 2f) ───▶ features [f, 2f) ───▶ columns [f, 2f) y_1 ┼─▶ y_0 + y_1

                          f forward    backward          g forward        backward      norms see
  tensor parallel         identity     all-reduce        all-reduce       identity      all T tokens, n times
  + sequence parallel     all-gather   reduce-scatter    reduce-scatter   all-gather    T/n tokens each

f and g mirror each other. Forward, each y_r is one summand of the output: g adds them. Backward, each rank's dL/dx is
one summand, for it saw only its own features: f adds them. Without f everything runs, but each gradient below this
block is a summand that passes for the sum. Sequence parallelism cuts the all-reduce into its two halves and lets norms,
dropout and residuals live between them, on T/n tokens. A norm's weight is then whole but used on a part, so that its
gradient is a summand too. Attention is the same pair with heads for features, a head never cut. Embedding and output
are cut by vocabulary; the loss can then be taken without ever gathering the logits.

Letters     B batch, T tokens, D model, H query heads, G key/value heads, K head dim, F feed-forward, V vocabulary,
            N = B·T; lower case: this rank's part (t = T/n, f = F/n, v about V/n); n ranks, e bytes an element
Traffic     4 all-reduces of B·T·D·e bytes a block: f and g of attention and of feed-forward. In a ring a rank sends
            2(n-1)/n of that, and nothing hides it. With sequence parallelism 4 all-gathers and 4 reduce-scatters: the
            same bytes (and D numbers a norm). Once a model: one more f and g, and B·T·V·e to gather the logits, or
            three all-reduces of B·T numbers for a vocabulary-parallel loss.
Memory      1/n of all matrices, their gradients and optimizer states, and of the activations between the pair. What
            norms keep is whole, or 1/n with sequence parallelism. The pair's inputs, 2 B·T·D a block, are whole either
            way: to keep 1/n of them, backward must gather again, as Megatron's does.
Use it      inside one NVLink domain (n up to 8), when a block does not fit or the batch per rank would fall below 1.
            n divides H, G and F, and T with sequence parallelism. Each matmul gets n times thinner: efficiency falls.
Not here    copies of key/value heads for n > G, overlap (async_tensor_parallel), gathering again (notebook 07)
References  Shoeybi et al. 2019, arXiv 1909.08053; Korthikanti et al. 2022, arXiv 2205.05198 (sequence parallelism)
"""

import os
import sys
from collections.abc import Callable, Mapping
from copy import deepcopy
from fnmatch import fnmatch
from functools import partial
from math import ceil, gcd

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, parallel

Group = dist.ProcessGroup | None  # None: the default group
Plan = Mapping[str, parallel.ParallelStyle]

# ---------------------------------------------------------------------------------------------------- by hand

# torch 2.13 renamed all_gather_into_tensor and reduce_scatter_tensor, and warns of the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _same(x: Tensor, group: Group) -> Tensor:
    return x.view_as(x)


def _all_reduce(x: Tensor, group: Group, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    out = x.clone(memory_format=torch.contiguous_format)  # autograd may hand the same gradient to others
    dist.all_reduce(out, op, group)
    return out


def _gather_tokens(x_BtD: Tensor, group: Group) -> Tensor:
    x_nBtD = x_BtD.new_empty(dist.get_world_size(group), *x_BtD.shape)
    _all_gather(x_nBtD.flatten(0, 1), x_BtD.contiguous(), group=group)  # one behind the other in dim 0
    return x_nBtD.movedim(0, 1).flatten(1, 2)


def _sum_and_scatter_tokens(x_BTD: Tensor, group: Group) -> Tensor:
    n = dist.get_world_size(group)
    check_tensor_parallel(n, seq_len=x_BTD.shape[1])
    x_nBtD = x_BTD.unflatten(1, (n, -1)).movedim(1, 0).contiguous()
    out_BtD = torch.empty_like(x_nBtD[0])
    _reduce_scatter(out_BtD, x_nBtD.flatten(0, 1), group=group)
    return out_BtD


class _Mirrored(torch.autograd.Function):
    """One function of (tensor, group) forward, and another one, of the gradient, backward."""

    @staticmethod
    def forward(ctx, x: Tensor, group: Group, forward: Callable, backward: Callable) -> Tensor:
        ctx.group, ctx.of_gradient = group, backward
        return forward(x, group)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return ctx.of_gradient(grad, ctx.group), None, None, None


def enter_by_hand(x: Tensor, group: Group = None, sequence_parallel: bool = False) -> Tensor:
    """f: x itself, and backward the sum of its gradients. Or this rank's T/n tokens -> all T, and their sum scattered."""
    ways = (_gather_tokens, _sum_and_scatter_tokens) if sequence_parallel else (_same, _all_reduce)
    return _Mirrored.apply(x, group, *ways)


def leave_by_hand(x: Tensor, group: Group = None, sequence_parallel: bool = False) -> Tensor:
    """g: the sum of x, and backward the gradient itself. Or T/n tokens of the sum, and their gradients gathered."""
    ways = (_sum_and_scatter_tokens, _gather_tokens) if sequence_parallel else (_all_reduce, _same)
    return _Mirrored.apply(x, group, *ways)


def column_linear_by_hand(x: Tensor, weight_fD: Tensor, group: Group = None, sequence_parallel: bool = False) -> Tensor:
    """x [B, T, D], whole on every rank, or [B, T/n, D] -> this rank's output features [B, T, f]."""
    return F.linear(enter_by_hand(x, group, sequence_parallel), weight_fD)


def row_linear_by_hand(
    x_BTf: Tensor, weight_Df: Tensor, group: Group = None, sequence_parallel: bool = False
) -> Tensor:
    """This rank's input features -> [B, T, D], or [B, T/n, D]. (A bias would be added after the sum, once.)"""
    return leave_by_hand(F.linear(x_BTf, weight_Df), group, sequence_parallel)


def _vocab_start(vocab_size: int, n_rows: int, group: Group) -> int:
    """First row of this rank when V rows are cut as torch.chunk and DTensor do it: ceil(V/n) each, the last fewer."""
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    start, end = (min(r * ceil(vocab_size / n), vocab_size) for r in (rank, rank + 1))
    if n_rows != end - start:
        problem = f"rank {rank} of {n} holds {n_rows} of {vocab_size} vocabulary rows, but its part [{start}, {end})"
        raise ValueError(f"{problem} has {end - start}: cut the weight with torch.chunk({n}, dim=0)")
    return start


def vocab_parallel_embedding_by_hand(
    tokens_BT: Tensor, weight_vD: Tensor, vocab_size: int, group: Group = None, sequence_parallel: bool = False
) -> Tensor:
    """-> [B, T, D], or [B, T/n, D]: each rank looks up the tokens whose rows it holds, 0 for the others; g adds."""
    if ((tokens_BT < 0) | (tokens_BT >= vocab_size)).any():  # no rank would own it, all would add 0
        raise ValueError(f"a token is outside [0, {vocab_size}): they span {tokens_BT.aminmax()}")
    index_BT = tokens_BT - _vocab_start(vocab_size, len(weight_vD), group)
    mine_BT = (index_BT >= 0) & (index_BT < len(weight_vD))
    x_BTD = F.embedding(index_BT * mine_BT, weight_vD) * mine_BT[..., None]
    return leave_by_hand(x_BTD, group, sequence_parallel)


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits_Nv: Tensor, index_N: Tensor, smoothing: float, vocab_size: int, group: Group) -> Tensor:
        z_Nv = logits_Nv.to(torch.promote_types(logits_Nv.dtype, torch.float32))
        peak_N1 = _all_reduce(z_Nv.amax(1, keepdim=True), group, dist.ReduceOp.MAX)
        z_Nv = z_Nv - peak_N1  # so that exp cannot overflow
        mine_N = (index_N >= 0) & (index_N < z_Nv.shape[1])
        index_N1 = (index_N * mine_N)[:, None]
        wanted_N = torch.where(mine_N, z_Nv.gather(1, index_N1)[:, 0], 0)  # one rank holds the target, the others add 0
        if smoothing:
            wanted_N = (1 - smoothing) * wanted_N + smoothing / vocab_size * z_Nv.sum(1)
        wanted_N = _all_reduce(wanted_N, group)
        exp_Nv = z_Nv.exp_()
        sum_N = _all_reduce(exp_Nv.sum(1), group)
        ctx.save_for_backward(exp_Nv.div_(sum_N[:, None]), index_N1, mine_N)
        ctx.dtype, ctx.smoothing, ctx.vocab_size = logits_Nv.dtype, smoothing, vocab_size
        return sum_N.log() - wanted_N

    @staticmethod
    def backward(ctx, grad_N: Tensor):  # grad * (softmax - what is wanted), and nothing travels
        softmax_Nv, index_N1, mine_N = ctx.saved_tensors
        grad_Nv = (softmax_Nv - ctx.smoothing / ctx.vocab_size) * grad_N[:, None]
        grad_Nv.scatter_add_(1, index_N1, (ctx.smoothing - 1) * (grad_N * mine_N)[:, None])
        return grad_Nv.to(ctx.dtype), None, None, None, None


def vocab_parallel_cross_entropy_by_hand(
    logits_BTv: Tensor,
    targets_BT: Tensor,
    vocab_size: int,
    group: Group = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Cross entropy in nats of logits cut by vocabulary, in float32 or better; no rank ever holds a whole row of logits.

    Three reductions of B·T numbers forward, none backward. reduction: "mean" over the targets other than ignore_index
    (nan if there are none), or "sum". label_smoothing as in F.cross_entropy. ValueError for a target outside the
    vocabulary (checking waits for the device once).
    """
    keep_BT = targets_BT != ignore_index
    if reduction not in ("mean", "sum") or not 0 <= label_smoothing <= 1:
        raise ValueError(
            f"reduction {reduction!r} must be 'mean' or 'sum', label_smoothing {label_smoothing} in [0, 1]"
        )
    if (keep_BT & ((targets_BT < 0) | (targets_BT >= vocab_size))).any():
        raise ValueError(f"a target is outside [0, {vocab_size}) and not ignore_index {ignore_index}")
    index_N = (targets_BT - _vocab_start(vocab_size, logits_BTv.shape[-1], group)).flatten()
    logits_Nv = logits_BTv.flatten(0, -2)
    loss_N = _VocabParallelCrossEntropy.apply(logits_Nv, index_N, label_smoothing, vocab_size, group)
    total = torch.where(keep_BT.flatten(), loss_N, 0).sum()
    return total if reduction == "sum" else total / keep_BT.sum()


def cut_dim(name: str) -> int | None:
    """The dim of a Llama's weight [out, in] that is cut: 0 column parallel or vocabulary, 1 row parallel, None: whole."""
    dims = {"tok_embeddings": 0, "wq": 0, "wk": 0, "wv": 0, "wo": 1, "w1": 0, "w3": 0, "w2": 1, "output": 0}
    return dims.get(name.removesuffix(".weight").rpartition(".")[2])


def apply_tensor_parallel_by_hand(model: nn.Module, group: Group = None, sequence_parallel: bool = False) -> nn.Module:
    """Megatron on a Llama with Meta's names, in place: plain parts for weights, f and g as hooks, and that is all.

    Every rank holds the same real weights before. The logits come out cut by vocabulary, for the cross entropy above.
    """
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    check_tensor_parallel(n, **_sizes(model))
    if any(p.is_meta for p in model.parameters()):
        raise ValueError("the weights are on meta: a part by hand is a plain tensor, so materialize them first")
    options = {"group": group, "sequence_parallel": sequence_parallel}
    parts: dict[nn.Parameter, nn.Parameter] = {}  # a tied weight is cut once
    for path, module in model.named_modules():
        kind = path.rpartition(".")[2]
        if (dim := cut_dim(kind)) is not None:
            vocab_size, weight = len(module.weight), module.weight
            part = nn.Parameter(weight.detach().chunk(n, dim)[rank].clone())
            module.weight = parts.setdefault(weight, part)
        if kind in ("attention", "feed_forward", "output"):
            module.register_forward_pre_hook(lambda _, args: (enter_by_hand(args[0], **options), *args[1:]))
        elif kind in ("wo", "w2"):
            module.register_forward_hook(lambda _, args, out: leave_by_hand(out, **options))
        elif kind == "tok_embeddings":
            embed = partial(vocab_parallel_embedding_by_hand, vocab_size=vocab_size, **options)
            module.forward = lambda tokens_BT, m=module, embed=embed: embed(tokens_BT, m.weight)
        elif sequence_parallel and dim is None and [*module.parameters(recurse=False)]:  # on T/n tokens: f for weights
            if type(module) is not nn.RMSNorm:
                raise ValueError(f"{path} is a {type(module).__name__}: by hand, only nn.RMSNorm acts on T/n tokens")
            norm = partial(F.rms_norm, normalized_shape=module.normalized_shape, eps=module.eps)
            module.forward = lambda x, m=module, norm=norm: norm(x, weight=enter_by_hand(m.weight, group))
    return model


# ----------------------------------------------------------------------------------------------------- native

_META_NAMES = {  # transformers' name of a module -> Meta's (a constant)
    "embed_tokens": "tok_embeddings", "self_attn": "attention", "mlp": "feed_forward", "lm_head": "output",
    "q_proj": "wq", "k_proj": "wk", "v_proj": "wv", "o_proj": "wo", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2",
    "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
_SIZES = {  # by the rows of which module
    "wq": "n_heads", "wk": "n_kv_heads", "w1": "ffn_dim", "tok_embeddings": "vocab_size", "output": "vocab_size"
}  # fmt: skip


def check_tensor_parallel(tp: int, *, vocab_size: int | None = None, **divided: int | None) -> None:
    """ValueError, with all numbers and the remedy, if a model cannot be cut over tp ranks. Pure: call it before a start.

    divided: what tp must divide, by name: n_heads, n_kv_heads, ffn_dim, and seq_len for sequence parallelism (None: not
    checked). A vocabulary is cut unevenly, and exactly, as long as each rank gets a row.
    """
    if type(tp) is not int or tp < 1:
        raise ValueError(f"the tensor parallel degree must be a whole number of at least 1, got {tp!r}")
    divided = {name: size for name, size in divided.items() if size is not None}
    wrong = [f"{name} {size} is no multiple ({ceil(size / tp) * tp} is)" for name, size in divided.items() if size % tp]

    def each_has_a_row(n: int) -> bool:
        return vocab_size is None or ceil(vocab_size / n) * (n - 1) < vocab_size

    if not each_has_a_row(tp):
        wrong.append(f"vocab_size {vocab_size} leaves the last rank without a row")
    if wrong:
        common = gcd(*divided.values()) or tp
        legal = [n for n in range(1, common + 1) if common % n == 0 and each_has_a_row(n)]
        raise ValueError(f"tensor parallel degree {tp}: {', '.join(wrong)}; take {legal} for {divided}")


def _sizes(model: nn.Module) -> dict[str, int]:
    """The arguments of check_tensor_parallel, from the modules that are there."""
    sizes = {}
    for path, module in model.named_modules():
        parent, _, leaf = path.rpartition(".")
        if name := _SIZES.get(_META_NAMES.get(leaf, leaf)):
            width = model.get_submodule(parent).head_dim if "heads" in name else 1
            sizes[name] = len(module.weight) // width
    return sizes


def _plan(x: Placement, loss_parallel: bool) -> dict[str, parallel.ParallelStyle]:
    """By Meta's names; x is how x_BTD lies between the blocks: Replicate(), or Shard(1) for sequence parallelism."""
    whole = Replicate()
    logits = {"output_layouts": Shard(-1) if loss_parallel else whole, "use_local_output": not loss_parallel}
    plan: dict[str, parallel.ParallelStyle] = {
        "tok_embeddings": parallel.RowwiseParallel(input_layouts=whole, output_layouts=x),
        # One DTensor that two or three linears share: one gather forward and one reduction backward in place of each's.
        "layers.*.attention": parallel.PrepareModuleInput(
            input_layouts=(x, None, None), desired_input_layouts=(whole, None, None)
        ),
        "layers.*.feed_forward": parallel.PrepareModuleInput(input_layouts=x, desired_input_layouts=whole),
        **{f"layers.*.attention.{w}": parallel.ColwiseParallel() for w in ("wq", "wk", "wv")},
        "layers.*.attention.wo": parallel.RowwiseParallel(output_layouts=x),
        **{f"layers.*.feed_forward.{w}": parallel.ColwiseParallel() for w in ("w1", "w3")},
        "layers.*.feed_forward.w2": parallel.RowwiseParallel(output_layouts=x),
        "output": parallel.ColwiseParallel(input_layouts=x, **logits),
    }
    if x != whole:
        norms = ("layers.*.attention_norm", "layers.*.ffn_norm", "norm")
        plan |= {norm: parallel.SequenceParallel() for norm in norms}
    return plan


def _present(plan: Plan, model: nn.Module) -> Plan:  # a pipeline stage may have no embedding or output
    names = [name for name, _ in model.named_modules()]
    return {key: style for key, style in plan.items() if any(fnmatch(name, key) for name in names)}


def llama_plan(model: nn.Module, sequence_parallel: bool = False, loss_parallel: bool = False) -> Plan:
    """What each module of a Llama with Meta's names does, as far as `model` has it: for parallelize_module."""
    return _present(_plan(Shard(1) if sequence_parallel else Replicate(), loss_parallel), model)


def hf_llama_plan(model: nn.Module, sequence_parallel: bool = False, loss_parallel: bool = False) -> Plan:
    """The same for transformers' LlamaForCausalLM or LlamaModel."""
    x, whole = Shard(1) if sequence_parallel else Replicate(), Replicate()
    take = {"input_kwarg_layouts": {"hidden_states": x}, "desired_input_kwarg_layouts": {"hidden_states": whole}}
    plan = _plan(x, loss_parallel) | {"layers.*.attention": parallel.PrepareModuleInput(**take)}
    if sequence_parallel:  # transformers counts positions on the embedding's output, and slices the norm's
        cut = {"input_layouts": whole, "desired_input_layouts": x, "use_local_output": True}
        plan["tok_embeddings"] = parallel.RowwiseParallel(input_layouts=whole)
        plan["layers.0"] = parallel.PrepareModuleInput(**cut)
        plan["norm"] = parallel.SequenceParallel(use_local_output=True)
    hf_names = {meta: hf for hf, meta in _META_NAMES.items()}

    def rename(key: str) -> str:
        name = ".".join(hf_names.get(part, part) for part in key.split("."))
        return name if name == "lm_head" or not hasattr(model, "model") else f"model.{name}"

    return _present({rename(key): style for key, style in plan.items()}, model)


def apply_tensor_parallel(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: Plan | None = None,
    sequence_parallel: bool = False,
    loss_parallel: bool = False,
) -> nn.Module:
    """Cut `model` over the one-axis `mesh`, in place, and return it; parameters in the plan become DTensors.

    Apply it before activation checkpointing, compile and FSDP, to a model that is on meta or the same on all ranks: each
    keeps its part, nothing is sent. Tied parameters stay one. plan None: `llama_plan` or `hf_llama_plan`, whichever fits
    the module names, after checking the sizes. With sequence_parallel n must divide the sequence, and a norm's gradient
    is a Partial DTensor: its summands are added when somebody reads it (clipping, FSDP, the optimizer). Logits are plain
    and whole, or with loss_parallel a DTensor cut by vocabulary: take F.cross_entropy (torch refuses label_smoothing)
    and its backward within `torch.distributed.tensor.parallel.loss_parallel()`.

    ValueError: sizes that n does not divide, a mesh of several axes, unknown module names, DTensors already there.
    """
    if mesh.ndim != 1:
        raise ValueError(f"tensor parallel takes one mesh axis, got {mesh}: pass mesh['tp']")
    if any(isinstance(p, DTensor) for p in model.parameters()):
        raise ValueError("the model holds DTensors already: apply tensor parallel once, and before FSDP")
    if plan is None:
        names = {path.rpartition(".")[2] for path, _ in model.named_modules()}
        if not names & {"wq", "q_proj"}:
            raise ValueError(f"neither wq nor q_proj among the modules {sorted(names)}: pass a plan for them")
        check_tensor_parallel(mesh.size(), **_sizes(model))
        plan = (llama_plan if "wq" in names else hf_llama_plan)(model, sequence_parallel, loss_parallel)
        for name, _ in model.named_parameters():  # it would act on a part of the heads or features
            inside = {"attention", "self_attn", "feed_forward", "mlp"} & {*name.split(".")}
            if inside and not any(fnmatch(name.rpartition(".")[0], key) for key in plan):
                raise ValueError(f"attention and feed-forward are cut, but not their {name}: pass a plan")
    elif sequence_parallel or loss_parallel:
        raise ValueError("a plan decides on sequence and loss parallel itself: pass them to llama_plan")
    first: dict[nn.Parameter, str] = {}
    names = [(name, first.setdefault(p, name)) for name, p in model.named_parameters(remove_duplicate=False)]
    if sequence_parallel:
        check = partial(check_tensor_parallel, mesh.size())
        for embedding in (m for m in model.modules() if isinstance(m, nn.Embedding)):
            embedding.register_forward_pre_hook(lambda _, args: check(seq_len=args[0].shape[1]))
    parallel.parallelize_module(model, mesh, dict(plan), src_data_rank=None)
    for name, source in names:  # two names of one parameter have become two DTensors: tie them again
        path, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(path), leaf, model.get_parameter(source))
    for module in (m for path, m in model.named_modules() if path in ("output", "lm_head")):
        module.register_forward_hook(_not_a_view)
    return model


def _not_a_view(module: nn.Module, args: tuple, out: Tensor) -> Tensor:
    """DTensor.to_local() returns a view, where FSDP2's backward hook would be lost on writing to it: FSDP2 warns."""
    return torch.ops.aten._unsafe_view(out, out.shape) if type(out) is Tensor else out


# ------------------------------------------------------------------------------------------------------- demo


class _Attention(nn.ModuleDict):  # no positions in the demo
    head_dim = 4

    def forward(self, x, cos, sin):
        q, k, v = (self[w](x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for w in ("wq", "wk", "wv"))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(out.transpose(1, 2).flatten(-2))


class _FeedForward(nn.ModuleDict):
    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class _Llama(nn.ModuleDict):
    def forward(self, tokens):
        x, block = self.tok_embeddings(tokens), self.layers["0"]
        x = x + block.attention(block.attention_norm(x), None, None)
        x = x + block.feed_forward(block.ffn_norm(x))
        return self.output(self.norm(x))


def _tiny_llama(V: int, D: int, C: int, ffn_dim: int) -> nn.Module:
    norm, linear = partial(nn.RMSNorm, D, 1e-5), partial(nn.Linear, bias=False)
    attention = _Attention({"wq": linear(D, D), "wk": linear(D, C), "wv": linear(D, C), "wo": linear(D, D)})
    ffn = _FeedForward({"w1": linear(D, ffn_dim), "w3": linear(D, ffn_dim), "w2": linear(ffn_dim, D)})
    block = nn.ModuleDict({"attention_norm": norm(), "attention": attention, "ffn_norm": norm(), "feed_forward": ffn})
    ends = {"tok_embeddings": nn.Embedding(V, D), "norm": norm(), "output": linear(D, V)}
    return _Llama({"layers": nn.ModuleDict({"0": block}), **ends}).double()


def demo() -> None:
    """Loss and all gradients in float64 against one process: by hand and native, with sequence and loss parallel."""
    dist.init_process_group("gloo")
    n, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (n,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    V = 64 * n - 3  # n does not divide the vocabulary
    whole = _tiny_llama(V, D=16 * n, C=8 * n, ffn_dim=12 * n)
    tokens_BT, targets_BT = torch.randint(V, (2, 2, 4 * n))
    targets_BT[0, :3] = -100
    truth = F.cross_entropy(whole(tokens_BT).flatten(0, 1), targets_BT.flatten())
    truth.backward()
    worst = torch.zeros((), dtype=torch.float64)
    for way in ("by hand", "native", "native, loss parallel"):
        for sequence in (False, True):
            model = deepcopy(whole)
            if way == "by hand":
                apply_tensor_parallel_by_hand(model, sequence_parallel=sequence)
                loss = vocab_parallel_cross_entropy_by_hand(model(tokens_BT), targets_BT, V)
                loss.backward()
            else:
                apply_tensor_parallel(model, mesh, None, sequence, loss_parallel="loss" in way)
                with parallel.loss_parallel():  # for DTensors: plain logits take the plain way
                    loss = F.cross_entropy(model(tokens_BT).flatten(0, 1), targets_BT.flatten())
                    loss.backward()
            loss = loss.full_tensor() if isinstance(loss, DTensor) else loss
            errors = [((loss - truth) / truth).abs().detach()]
            for name, p in model.named_parameters():
                grad, expected = p.grad, whole.get_parameter(name).grad
                grad = grad.full_tensor() if isinstance(grad, DTensor) else grad
                if grad.shape != expected.shape:  # by hand: a part
                    expected = expected.chunk(n, cut_dim(name))[rank]
                errors.append((grad - expected).norm() / expected.norm())
            error = torch.stack(errors).max()
            dist.all_reduce(error, dist.ReduceOp.MAX)
            worst = torch.maximum(worst, error)
            if rank == 0:
                case = way + ", sequence parallel" * sequence
                print(f"{case:40} largest error of loss and {len(errors) - 1} gradients: {error:.1e}")
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0 if worst < 1e-10 else 1)  # a finished gloo process can abort in the interpreter's own exit


if __name__ == "__main__":
    demo()
