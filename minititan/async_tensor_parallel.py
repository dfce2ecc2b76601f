"""Async tensor parallelism: multiply one chunk while the next one travels.

With sequence parallelism the tokens between two matrices lie in n chunks, one on each rank. A column-parallel matrix
needs all of them, so they are gathered first; a row-parallel one makes a summand of all of them, which is reduced and
scattered afterwards. All ranks wait for both. But a matrix multiplies each token alone: cut the gather into the hops of
a ring, and the arithmetic of one chunk hides the hop of the next. The scatter is the same, run backwards.

    rank 0 of 4           all_gather_matmul                      matmul_reduce_scatter
    compute      [ x0 W ][ x3 W ][ x2 W ][ x1 W ]       [ y3 V ][ y2 V ][ y1 V ][ y0 V ]     y is cut by features:
    link         [= x3 =][= x2 =][= x1 =]                       [= z3 =][= z2 =][= z1 =]     z is a sum under way
                  its own chunk needs no hop             the last one to be multiplied is its own

Backward is made of the same two rings. Of y = gather(x) W: dx = scatter(dy W'), the other ring, and dW = dy' gather(x),
for which x travels a second time, so that nobody keeps it whole. Of z = scatter(y V): dy = gather(dz) V', and
dV = gather(dz)' y in that very ring. wq, wk and wv share one gather, w1 and w3 another.

Letters     B batch, T tokens, D model, F feed-forward, V vocabulary; lower case: this rank's part (t = T/n, f = F/n);
            n ranks, e bytes an element, m seconds to multiply one chunk, h seconds for its hop
Time        serial n m + (n-1) h, ring m + (n-1) max(m, h): whatever the link, one chunk of compute stays in sight.
            Four ranks with as much communication as compute: 5/8 of the serial time. At best n/(2n-1), where m = h.
Traffic     a block and step: 6 gathers and 4 scatters, each n-1 messages of B·t·D·e bytes to the next rank; 4 and 4
            with keep_gathered, as in sequence parallelism that does not gather again. The norms' gradients add two
            all-reduces of D numbers. Embedding: a scatter and a gather; output: 2 gathers (1), a scatter, the logits.
Memory      1/n of the matrices and of x between blocks; for backward, 1/n of a block's two gathered inputs, all of
            them with keep_gathered.
Use it      where sequence parallelism is used, with chunks so large that a GEMM of B·t rows is still efficient.
Not here    float8, autocast, one loop for both rings of a backward, a chunk's halves in both directions of the link.
References  Wang et al., ASPLOS 2023 (10.1145/3567955.3567959); Korthikanti et al. 2022, arXiv 2205.05198;
            torch.distributed._symmetric_memory; pytorch#193027 (asked to fuse, upstream may not, and not say so)
"""

import os
import sys
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, reduce
from math import ceil, gcd
from types import MethodType

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

Group = dist.ProcessGroup | None  # None: the default group

# ---------------------------------------------------------------------------------------------------- the rings


def chunk_sizes(n_tokens: int, n: int) -> list[int]:
    """How many tokens each rank holds, cut as by torch.tensor_split: the first ones one more, if n does not divide."""
    return [n_tokens // n + (rank < n_tokens % n) for rank in range(n)]


class _Ring:
    """n ranks that each hold a chunk along dim; messages go to the next rank only."""

    def __init__(self, x: Tensor, group: Group, dim: int, n_tokens: int | None, how: str):
        self.group, self.dim = group, dim % x.ndim
        self.n, self.rank = dist.get_world_size(group), dist.get_rank(group)
        n_tokens = self.n * x.shape[dim] if n_tokens is None else n_tokens
        self.sizes = chunk_sizes(n_tokens, self.n)
        even = n_tokens % self.n == 0
        if self.dim == x.ndim - 1:
            raise ValueError(
                f"dim {dim} of {tuple(x.shape)} is what the matrix multiplies: tokens lie in one before it"
            )
        if how not in ("auto", "ring", "fused"):
            raise ValueError(f"how={how!r} is none of 'auto', 'ring', 'fused'")
        if how == "fused" and not even:
            raise ValueError(f"the fused kernels take equal chunks, not {self.sizes} of {n_tokens} tokens: how='ring'")
        self.fused = how == "fused" or (how == "auto" and even and can_fuse(group, x.device))

    def rows(self, x: Tensor, c: int) -> Tensor:
        return x.narrow(self.dim, sum(self.sizes[:c]), self.sizes[c])

    def exchange(self, out: Tensor, c: int) -> Callable[[], Tensor]:
        """Starts to send `out` and to receive chunk c, of the same shape but for its length -> waits, gives chunk c."""
        out = out.contiguous()
        received = out.new_empty([self.sizes[c] if i == self.dim else size for i, size in enumerate(out.shape)])
        peers = ((dist.isend, out, self.rank + 1), (dist.irecv, received, self.rank - 1))
        ops = [
            dist.P2POp(op, t, group=self.group, group_peer=r % self.n)
            for op, t, r in peers
            if t.numel() and not t.is_meta
        ]
        works = dist.batch_isend_irecv(ops) if ops else []

        def arrived() -> Tensor:
            for work in works:
                work.wait()
            return received

        return arrived

    def gather(self, x_shard: Tensor, consume: Callable[[int, Tensor], None]) -> None:
        """consume(c, chunk c) for each chunk, this rank's first; meanwhile the next one arrives."""
        chunk = x_shard
        for step in range(self.n):
            c = (self.rank - step) % self.n
            arrived = self.exchange(chunk, (c - 1) % self.n) if step < self.n - 1 else None
            consume(c, chunk)
            chunk = arrived() if arrived else None

    def reduce(self, produce: Callable[[int], Tensor]) -> Tensor:
        """The sum over all ranks of produce(this rank). That of chunk c begins at rank c + 1 and comes home complete."""
        arrived = None
        for step in range(self.n):
            c = (self.rank - 1 - step) % self.n
            total = produce(c)  # while what the ranks before have added up arrives
            total = total + arrived() if arrived else total
            arrived = self.exchange(total, (c - 1) % self.n) if step < self.n - 1 else None
        return total

    # The two, with matrices [out, in]. torch.ops.symm_mem has kernels for them, which take [in, out].

    def gather_matmul(self, x_shard: Tensor, weights: Sequence[Tensor], keep: bool) -> tuple:
        if self.fused:
            name, right = _symmetric_memory_for(self.group), [w.t() for w in weights]
            return torch.ops.symm_mem.fused_all_gather_matmul(x_shard, right, self.dim, name, return_A=keep)
        chunks, outs = [None] * self.n, [[None] * self.n for _ in weights]

        def multiply(c: int, chunk: Tensor) -> None:
            chunks[c] = chunk if keep else None
            for out, weight in zip(outs, weights, strict=True):
                out[c] = _linear(chunk, weight)

        self.gather(x_shard, multiply)
        return torch.cat(chunks, self.dim) if keep else None, [torch.cat(out, self.dim) for out in outs]

    def matmul_reduce(self, xs: Sequence[Tensor], weights: Sequence[Tensor], also=lambda c: None) -> Tensor:
        """also(c): other work on chunk c that may hide a hop."""
        if self.fused:  # a sum of products is the product of what is put side by side
            name, left, right = _symmetric_memory_for(self.group), torch.cat(xs, -1), torch.cat(weights, 1).t()
            total = torch.ops.symm_mem.fused_matmul_reduce_scatter(left, right, "sum", self.dim, name)
            for c in range(self.n):
                also(c)
            return total

        def produce(c: int) -> Tensor:
            also(c)
            return reduce(torch.add, (_linear(self.rows(x, c), w) for x, w in zip(xs, weights, strict=True)))

        return self.reduce(produce)


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    """F.linear, as one GEMM of all rows: of a slice it would make a batch of small ones."""
    return (x.flatten(0, -2) @ weight.t()).view(*x.shape[:-1], len(weight))


def _weight_gradient(grad: Tensor, x: Tensor, before: Tensor | None = None) -> Tensor:
    """[out, in] of the tokens that grad and x have, added to `before`."""
    gradient = grad.flatten(0, -2).t() @ x.flatten(0, -2)
    return gradient if before is None else before.add_(gradient)


class _AllGatherMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_shard: Tensor, ring: _Ring, keep: bool, *weights: Tensor):
        whole, outs = ring.gather_matmul(x_shard, weights, keep)
        ctx.ring, ctx.keep = ring, keep
        ctx.save_for_backward(whole if keep else x_shard, *weights)
        return tuple(outs)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        x, *weights = ctx.saved_tensors
        ring, dws = ctx.ring, [None] * len(weights)

        def add(c: int, chunk: Tensor) -> None:
            dws[:] = [_weight_gradient(ring.rows(g, c), chunk, dw) for g, dw in zip(grads, dws, strict=True)]

        wanted, back = any(ctx.needs_input_grad[3:]), [w.t() for w in weights]
        if wanted and ctx.keep:
            dx = ring.matmul_reduce(grads, back, also=lambda c: add(c, ring.rows(x, c)))
        else:
            dx = ring.matmul_reduce(grads, back)
            if wanted:
                ring.gather(x, add)
        return dx, None, None, *dws


class _MatmulReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, ring: _Ring) -> Tensor:
        ctx.ring = ring
        ctx.save_for_backward(x, weight)
        return ring.matmul_reduce([x], [weight])

    @staticmethod
    def backward(ctx, grad_shard: Tensor):
        x, weight = ctx.saved_tensors
        ring, dxs, dw = ctx.ring, [None] * ctx.ring.n, None
        if ring.fused:
            grad, (dx,) = ring.gather_matmul(grad_shard, [weight.t()], keep=True)
            return dx, _weight_gradient(grad, x), None

        def multiply(c: int, grad: Tensor) -> None:
            nonlocal dw
            dxs[c], dw = _linear(grad, weight.t()), _weight_gradient(grad, ring.rows(x, c), dw)

        ring.gather(grad_shard, multiply)
        return torch.cat(dxs, ring.dim), dw, None


class _ReduceScatter(torch.autograd.Function):
    """The ring without a matrix, for the embedding: summands [B, T, D] -> the sum's chunk [B, t, D]."""

    @staticmethod
    def forward(ctx, x: Tensor, ring: _Ring) -> Tensor:
        ctx.ring = ring
        return ring.reduce(partial(ring.rows, x))

    @staticmethod
    def backward(ctx, grad_shard: Tensor):
        chunks = [None] * ctx.ring.n
        ctx.ring.gather(grad_shard, chunks.__setitem__)
        return torch.cat(chunks, ctx.ring.dim), None


class _SumGradient(torch.autograd.Function):
    """For a parameter that all ranks hold and each applies to its own tokens: the gradient is the sum over the ranks."""

    @staticmethod
    def forward(ctx, weight: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, grad: Tensor):
        grad = grad.clone(memory_format=torch.contiguous_format)
        if not grad.is_meta:
            dist.all_reduce(grad, group=ctx.group)
        return grad, None


def all_gather_matmul(
    x_shard: Tensor,
    weights: Tensor | Sequence[Tensor],
    group: Group = None,
    *,
    dim: int = -2,
    n_tokens: int | None = None,
    keep_gathered: bool = False,
    how: str = "auto",
) -> Tensor | tuple[Tensor, ...]:
    """gather(x) @ weight.T, without waiting for the gather: [B, t, D] and [f, D] -> [B, T, f]. Differentiable.

    weights: one, or a sequence that shares the gather; the result is one, or a tuple. dim: that of the tokens, any but
    the last. n_tokens: of all ranks together, needed where n does not divide it (`chunk_sizes` says who holds how many).
    keep_gathered: keep gather(x) for backward, in place of gathering again. how: "ring", "fused" (torch's
    symmetric-memory kernels), or "auto": fused where `can_fuse` and chunks are equal. ValueError for a chunk of
    another length than rank and n_tokens give it.
    """
    ring = _Ring(x_shard, group, dim, n_tokens, how)
    if (held := x_shard.shape[ring.dim]) != ring.sizes[ring.rank]:
        problem = f"rank {ring.rank} of {ring.n} holds {held} of {n_tokens} tokens in place of {ring.sizes[ring.rank]}"
        raise ValueError(f"{problem}: cut x with torch.tensor_split({ring.n}, dim={ring.dim})")
    single = isinstance(weights, Tensor)
    outs = _AllGatherMatmul.apply(x_shard, ring, keep_gathered, *([weights] if single else weights))
    return outs[0] if single else outs


def matmul_reduce_scatter(
    x: Tensor, weight: Tensor, group: Group = None, *, dim: int = -2, how: str = "auto"
) -> Tensor:
    """scatter(sum over ranks of x @ weight.T), each chunk leaving when it is ready: [B, T, f] and [D, f] -> [B, t, D].

    Arguments as of `all_gather_matmul`. Tokens that n does not divide are cut as by torch.tensor_split.
    """
    return _MatmulReduceScatter.apply(x, weight, _Ring(x, group, dim, x.shape[dim], how))


# -------------------------------------------------------------------------------------- fused kernels, and if it is true


def can_fuse(group: Group, device: torch.device) -> bool:
    """Whether torch's symmetric-memory kernels can serve the group: CUDA, and each GPU reaches every other's memory.

    It sends nothing, so it takes for granted that the group's ranks share a host (else pass how="ring"), and each must
    see all GPUs there (no CUDA_VISIBLE_DEVICES for each).
    """
    n = dist.get_world_size(group)
    if device.type != "cuda" or n == 1 or n > torch.cuda.device_count():
        return False
    return all(torch.cuda.can_device_access_peer(a, b) for a in range(n) for b in range(n) if a != b)


def _symmetric_memory_for(group: Group) -> str:
    """The group's name, once symmetric memory is enabled: deprecated, yet inductor fuses nothing without (pytorch#193027)."""
    from torch.distributed import _symmetric_memory

    name = (group or dist.group.WORLD).group_name
    if not _symmetric_memory.is_symm_mem_enabled_for_group(name):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            _symmetric_memory.enable_symm_mem_for_group(name)
    return name


@dataclass
class Fusion:
    """How often a gather or scatter was fused with its matmul, was sent as messages of a ring, or was left serial."""

    fused: int = 0
    ring: int = 0
    serial: int = 0

    def __str__(self) -> str:
        verdict = "overlapped" if self.fused or self.ring else "nothing to overlap"
        if self.serial:
            verdict = (
                f"{'PARTLY' if self.fused or self.ring else 'NOT'} overlapped (see the remedies of micro_pipelining)"
            )
        return (
            f"{verdict}: {self.fused} fused operators, {self.ring} messages of rings, {self.serial} serial collectives"
        )


def fusion_report(record: object) -> Fusion:
    """What really ran or will run, told from the names of operators. Serial ones of other axes (FSDP) are counted too.

    record: a torch.profiler.profile that has ended (of an eager or a compiled step), a torch.fx.Graph or GraphModule
    after inductor's passes, or an iterable of names such as "symm_mem::fused_all_gather_matmul".
    """
    if hasattr(record, "key_averages"):
        counts = Counter({event.key: event.count for event in record.key_averages()})
    else:
        graph = getattr(record, "graph", record)
        names = [str(node.target) for node in graph.nodes] if hasattr(graph, "nodes") else graph
        counts = Counter(name if "::" in name else name.replace(".", "::", 1) for name in names)

    def of(namespace: str, *wanted: str) -> int:
        starts = tuple(f"{namespace}::{operator}" for operator in wanted)
        return sum(count for name, count in counts.items() if name.startswith(starts))

    functional = of("_c10d_functional", "all_gather", "reduce_scatter")  # each calls a plain one when it runs
    plain = of("c10d", "allgather", "_allgather", "reduce_scatter", "_reduce_scatter")
    return Fusion(of("symm_mem", "fused_"), of("c10d", "send"), max(functional, plain))


@contextmanager
def micro_pipelining(mesh: DeviceMesh) -> Iterator[Fusion]:
    """Asks inductor to fuse gathers and matmuls over `mesh`, and tells what became of it. The native way to overlap.

        model = apply_tensor_parallel(model, mesh, sequence_parallel=True)
        with micro_pipelining(mesh) as fusion:
            torch.compile(model)(tokens).sum().backward()           # compiled in here
        print(fusion)

    Yields a Fusion that counts in every graph compiled inside. Remedies when it says NOT: compile in here (what was
    compiled before stays as it was); torch with NCCL, on GPUs that reach each other's memory; each gather followed by
    its matmuls and each matmul by its scatter, with no bmm and no other use of what is between.
    """
    from torch._inductor import config

    total = Fusion()

    def count(graph: torch.fx.Graph) -> None:
        seen = fusion_report(graph)
        total.fused, total.serial = total.fused + seen.fused, total.serial + seen.serial

    if mesh.device_type == "cuda":
        _symmetric_memory_for(mesh.get_group())
    with config.patch(_micro_pipeline_tp=True, post_grad_custom_post_pass=count):
        yield total


# ----------------------------------------------------------------------------------------------------- on a Llama

_META_NAMES = {  # transformers' name of a module -> Meta's (a constant)
    **{"embed_tokens": "tok_embeddings", "self_attn": "attention", "mlp": "feed_forward", "lm_head": "output"},
    **{"q_proj": "wq", "k_proj": "wk", "v_proj": "wv", "o_proj": "wo"},
    **{"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"},
    **{"input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm"},
}
_PAIRS = {"attention": (("wq", "wk", "wv"), "wo"), "feed_forward": (("w1", "w3"), "w2")}
_COLUMN = ("tok_embeddings", "wq", "wk", "wv", "w1", "w3", "output")  # by output features, or by vocabulary
_WHOLE = ("attention_norm", "ffn_norm", "norm")


def _kind(path: str) -> str:
    leaf = path.rpartition(".")[2]
    return _META_NAMES.get(leaf, leaf)


def check_async_tensor_parallel(tp: int, *, vocab_size: int | None = None, **divided: int | None) -> None:
    """ValueError, with all numbers and the remedy, if a model cannot be cut over tp ranks. Pure: call it before a start.

    divided: what tp must divide, by name: n_heads, n_kv_heads, ffn_dim, seq_len (None: not checked).
    """
    if type(tp) is not int or tp < 1:
        raise ValueError(f"the tensor parallel degree must be a whole number of at least 1, got {tp!r}")
    divided = {name: size for name, size in divided.items() if size is not None}
    wrong = [f"{name} {size} is no multiple of it" for name, size in divided.items() if size % tp]
    if vocab_size is not None and ceil(vocab_size / tp) * (tp - 1) >= vocab_size:
        wrong.append(f"vocab_size {vocab_size} leaves the last rank without a row")
    if wrong:
        common = gcd(*divided.values()) or tp
        remedy = f"take one of {[n for n in range(1, common + 1) if common % n == 0]} for {divided}"
        if divided.get("seq_len", tp) % tp:
            remedy += f", or pad the sequence to {ceil(divided['seq_len'] / tp) * tp}"
        raise ValueError(f"tensor parallel degree {tp}: {', '.join(wrong)}; {remedy}")


def _check(model: nn.Module, mesh: DeviceMesh) -> None:
    if mesh.ndim != 1:
        raise ValueError(f"async tensor parallel takes one mesh axis, got {mesh}: pass mesh['tp']")
    sizes, unknown = {}, []
    for path, module in model.named_modules():
        kind, parameters = _kind(path), list(module.named_parameters(recurse=False))
        if any(isinstance(p, DTensor) for _, p in parameters):
            raise ValueError("the model holds DTensors already: apply async tensor parallel once, and before FSDP")
        if kind in ("wq", "wk"):
            heads = {"wq": "n_heads", "wk": "n_kv_heads"}[kind]
            sizes[heads] = len(module.weight) // model.get_submodule(path.rpartition(".")[0]).head_dim
        elif kind in ("w1", "tok_embeddings", "output"):
            sizes["ffn_dim" if kind == "w1" else "vocab_size"] = len(module.weight)
        if kind not in (*_COLUMN, *_WHOLE, "wo", "w2"):
            unknown += [f"{path}.{name}" for name, _ in parameters]
    if unknown or not sizes:
        problem = f"{unknown[0]}, with {len(unknown) - 1} more, is none of them" if unknown else "has none of them"
        raise ValueError(f"this cuts a Llama with the module names of Meta or transformers, and {problem}")
    check_async_tensor_parallel(mesh.size(), **sizes)


def _local(p: Tensor) -> Tensor:
    return p.to_local() if isinstance(p, DTensor) else p


def apply_async_tensor_parallel(
    model: nn.Module,
    mesh: DeviceMesh,
    loss_parallel: bool = False,
    keep_gathered: bool = False,
    how: str = "auto",
) -> nn.Module:
    """Tensor and sequence parallelism over the one-axis `mesh` with every gather and scatter overlapped, in place.

    For a Llama with Meta's names or transformers', on meta or the same on all ranks; before checkpointing, compile and
    FSDP (whose units must hold attention and feed-forward whole). Parameters keep their names and become DTensors:
    matrices cut as tensor_parallel cuts them, embedding and output by vocabulary, norms replicated, their gradients
    summed over the axis. Tokens come in whole, and each rank's blocks see a chunk of the sequence, which n must divide.
    Logits are plain and whole, or with loss_parallel a DTensor cut by vocabulary: then take F.cross_entropy and its
    backward within `torch.distributed.tensor.parallel.loss_parallel()`. A part without embedding or output takes or
    gives chunks [B, t, D] (our Transformer then wants positions_T of the whole). transformers: no inputs_embeds that
    need gradients, no cache. keep_gathered and how: see `all_gather_matmul`.

    ValueError: sizes that n does not divide, a mesh of several axes, unknown modules, DTensors already there.
    """
    _check(model, mesh)
    group, n, rank = mesh.get_group(), mesh.size(), mesh.get_local_rank()
    if how == "auto":
        how = "fused" if can_fuse(group, torch.device(mesh.device_type)) else "ring"
    gather_matmul = partial(all_gather_matmul, group=group, keep_gathered=keep_gathered, how=how)
    made: dict[nn.Parameter, nn.Parameter] = {}  # a tied weight stays one

    def distribute(module: nn.Module, weight_dim: int | None, bias_dim: int | None) -> None:
        for name, p in list(module.named_parameters(recurse=False)):
            dim = bias_dim if name == "bias" else weight_dim
            part, placement = (p, Replicate()) if dim is None else (p.chunk(n, dim)[rank], Shard(dim))
            meta = {"run_check": False, "shape": p.shape, "stride": p.stride()}
            part = DTensor.from_local(part.detach().clone(), mesh, [placement], **meta)
            setattr(module, name, made.setdefault(p, nn.Parameter(part, p.requires_grad)))

    def sum_gradient(p: Tensor) -> Tensor:
        return _SumGradient.apply(_local(p), group)

    def embed(self, tokens_BT: Tensor) -> Tensor:
        check_async_tensor_parallel(n, seq_len=tokens_BT.shape[1])
        if ((tokens_BT < 0) | (tokens_BT >= self.num_embeddings)).any():  # no rank would own it, all would add 0
            raise ValueError(f"a token is outside [0, {self.num_embeddings}): they span {tokens_BT.aminmax()}")
        weight_vD, start = _local(self.weight), ceil(self.num_embeddings / n) * rank
        index_BT = tokens_BT - start
        mine_BT = (index_BT >= 0) & (index_BT < len(weight_vD))
        padded = self.padding_idx is not None and 0 <= self.padding_idx - start < len(weight_vD)
        padding_idx = self.padding_idx - start if padded else None  # its row gets no gradient
        summand_BTD = F.embedding(index_BT * mine_BT, weight_vD, padding_idx) * mine_BT[..., None]
        return _ReduceScatter.apply(summand_BTD, _Ring(summand_BTD, group, 1, tokens_BT.shape[1], "ring"))

    def embed_to_whole(self, tokens_BT: Tensor) -> Tensor:
        """transformers reads the number of tokens off the embedding: this rank's chunk, in nan of the whole's shape."""
        x_BtD = embed(self, tokens_BT)
        before, after = rank * x_BtD.shape[1], (n - 1 - rank) * x_BtD.shape[1]
        return F.pad(x_BtD, (0, 0, before, after), value=float("nan"))

    def take_chunk(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return (args[0].tensor_split(n, 1)[rank], *args[1:]), kwargs

    def norm(self, x_BtD: Tensor) -> Tensor:
        held = dict(self._parameters)
        try:  # its own forward, on other tensors: a norm may be of any class
            self._parameters.update({name: sum_gradient(p) for name, p in held.items() if p is not None})
            return type(self).forward(self, x_BtD)
        finally:
            self._parameters.update(held)

    def gather_for(columns: list[nn.Linear], module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Before attention or feed-forward: its matrices have multiplied when they are called. Of x the shape is left."""
        x_BtD = args[0] if args else kwargs["hidden_states"]
        for column, out in zip(columns, gather_matmul(x_BtD, [_local(c.weight) for c in columns]), strict=True):
            column.multiplied = out
        shape = (x_BtD.shape[0], n * x_BtD.shape[1], x_BtD.shape[2])
        x_BTD = x_BtD.new_full((), float("nan")).expand(shape)  # no memory, and nobody may use it unseen
        return ((x_BTD, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": x_BTD})

    def column(self, x_BTD: Tensor) -> Tensor:
        out_BTf, self.multiplied = self.multiplied, None
        return out_BTf if self.bias is None else out_BTf + _local(self.bias)

    def row(self, x_BTf: Tensor) -> Tensor:
        out_BtD = matmul_reduce_scatter(x_BTf, _local(self.weight), group, how=how)
        return out_BtD if self.bias is None else out_BtD + sum_gradient(self.bias)

    def output(self, x_BtD: Tensor) -> Tensor:
        logits_BTv = gather_matmul(x_BtD, _local(self.weight))
        logits_BTv = logits_BTv if self.bias is None else logits_BTv + _local(self.bias)
        shape = torch.Size((*logits_BTv.shape[:2], self.out_features))
        stride = (shape[1] * shape[2], shape[2], 1)
        cut = DTensor.from_local(logits_BTv, mesh, [Shard(2)], run_check=False, shape=shape, stride=stride)
        # to_local() gives a view, on which FSDP2 would lose its hook, and warns
        return cut if loss_parallel else torch.ops.aten._unsafe_view(cut.full_tensor(), shape)

    def all_logits(module: nn.Module, args: tuple, kwargs: dict) -> None:
        if not isinstance(keep := kwargs.get("logits_to_keep", 0), int) or keep:
            raise ValueError(f"logits_to_keep={keep} would cut every rank's chunk of the sequence: slice the logits")

    forwards: dict[str, Callable] = {"tok_embeddings": embed, "output": output, "wo": row, "w2": row}
    forwards |= dict.fromkeys(_WHOLE, norm) | dict.fromkeys((w for pair, _ in _PAIRS.values() for w in pair), column)
    for path, module in list(model.named_modules()):
        kind = _kind(path)
        if kind in forwards:
            cut = (0, 0) if kind in _COLUMN else (None, None) if kind in _WHOLE else (1, None)
            distribute(module, *cut)
            forward = embed_to_whole if path.endswith("embed_tokens") else forwards[kind]
            module.forward = MethodType(forward, module)
        if kind in _PAIRS:
            children = {_kind(name): child for name, child in module.named_children()}
            columns = [children[w] for w in _PAIRS[kind][0]]
            module.register_forward_pre_hook(partial(gather_for, columns), with_kwargs=True)
        elif hasattr(module, "embed_tokens"):
            module.layers[0].register_forward_pre_hook(take_chunk, with_kwargs=True)
        elif hasattr(module, "lm_head"):
            module.register_forward_pre_hook(all_logits, with_kwargs=True)
    return model


# ------------------------------------------------------------------------------------------------------- demo


class _FeedForward(nn.Module):
    def __init__(self, D: int, F_: int):
        super().__init__()
        self.w1, self.w3, self.w2 = (nn.Linear(*s, bias=False) for s in ((D, F_), (D, F_), (F_, D)))

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x_BTD)) * self.w3(x_BTD))


class _WithoutAttention(nn.Sequential):
    def __init__(self, V: int, D: int):
        names = ("tok_embeddings", "ffn_norm", "feed_forward", "norm", "output")
        parts = nn.Embedding(V, D), nn.RMSNorm(D), _FeedForward(D, 3 * D), nn.RMSNorm(D), nn.Linear(D, V, bias=False)
        super().__init__(OrderedDict(zip(names, parts, strict=True)))


def demo() -> None:
    """In float64 against one process: the two functions on chunks of unlike length, then a Llama without attention."""
    dist.init_process_group("gloo")
    n, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    worst = torch.zeros((), dtype=torch.float64)

    def compare(what: str, ours: Sequence[Tensor], truth: Sequence[Tensor]) -> None:
        errors = [(a - b).detach().norm() / b.detach().norm() for a, b in zip(ours, truth, strict=True)]
        dist.all_reduce(error := torch.stack(errors).max(), dist.ReduceOp.MAX)
        worst.copy_(torch.maximum(worst, error))
        if rank == 0:
            print(f"{what:70} largest error {error:.1e}")

    T, D = 4 * n + 1, 8
    x, w, v = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((2, T, D), (4 * n, D), (D, 4 * n)))
    y = F.linear(F.linear(x, w).tanh(), v)
    y.square().sum().backward()

    def mine(x: Tensor, y: Tensor, w: Tensor, v: Tensor) -> list[Tensor]:
        return [*(t.tensor_split(n, 1)[rank] for t in (x, y)), w.chunk(n, 0)[rank], v.chunk(n, 1)[rank]]

    for keep in (False, True):
        x_BtD, _, *weights = (t.detach().clone().requires_grad_() for t in mine(x, y, w, v))
        hidden = all_gather_matmul(x_BtD, weights[0], n_tokens=T, keep_gathered=keep).tanh()
        out = matmul_reduce_scatter(hidden, weights[1])
        out.square().sum().backward()
        parts = [x_BtD.grad, out, *(t.grad for t in weights)]
        compare(
            f"rings, chunks of {chunk_sizes(T, n)}{', gathered once' * keep}", parts, mine(x.grad, y, w.grad, v.grad)
        )

    V = 16 * n - 3
    whole, model = (_WithoutAttention(V, 8 * n).double() for _ in range(2))
    model.load_state_dict(whole.state_dict())
    apply_async_tensor_parallel(model, init_device_mesh("cpu", (n,), mesh_dim_names=("tp",)))
    tokens_BT, targets_BT = torch.randint(V, (2, 2, 4 * n))
    losses = [F.cross_entropy(m(tokens_BT).flatten(0, 1), targets_BT.flatten()) for m in (model, whole)]
    sum(losses).backward()
    gradients = [p.grad.full_tensor() for p in model.parameters()]
    compare("a model, loss and gradients", [losses[0], *gradients], [losses[1], *(p.grad for p in whole.parameters())])
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0 if worst < 1e-10 else 1)  # a finished gloo process can abort in the interpreter's own exit


if __name__ == "__main__":
    demo()
