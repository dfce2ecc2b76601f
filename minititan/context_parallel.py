"""Context parallelism: one sequence, many ranks.

Memory for activations grows with the tokens of a sequence, and a sequence is the one thing that a batch cannot split.
So cut it: each of n ranks holds T/n tokens of every sequence. All of a Llama acts on each token alone, except one place:
a query meets the keys and values of all earlier tokens, which lie on other ranks. Three ways to let them meet:

ring         key/value blocks travel round the ranks while the queries stay. Softmax need not see a row at once: two
             blocks' outputs merge, if each comes with the logarithm of its denominator (lse):
                 lse = log(e^lse_a + e^lse_b)        out = out_a e^(lse_a - lse) + out_b e^(lse_b - lse)
             A block is sent on while it is used, so the wire works beside the attention.
all_gather   every rank gets all keys and values at once, then does the same tiles. In backward each holds a summand of
             every key's gradient: a reduce-scatter brings them home.
ulysses      an all-to-all swaps the cut: before, T/n tokens of all heads; after, all tokens of H/n heads. Attention as
             ever, and an all-to-all back.

    who computes what, 4 ranks, causal (a row: a rank's queries; a column: whose keys; # all, h half, \\ the diagonal)

    contiguous          zigzag             contiguous: rank 0 has 1 tile to do, rank n-1 has n, and all wait for it.
    0  \\                0  \\ h h h         zigzag ("balance"): 2n chunks, rank r holds chunks r and 2n-1-r. Every rank
    1  # \\              1  h \\ h h         has the same: its diagonal, and half of each other tile: all its queries
    2  # # \\            2  h h \\ h         with the first chunk of an earlier rank, or its last chunk's queries with
    3  # # # \\          3  h h h \\         both chunks of a later one. Without a causal mask any cut is balanced.

Letters     B batch, T tokens, t = T/n of this rank, H query heads, G key/value heads, K head dim; n ranks; e bytes of a
            number, g of a gradient that is still being added up (4 for 16-bit numbers, else e)
Traffic     sent by a rank in a layer, forward and backward (`wire_bytes`):
            ring, all_gather   (n-1)/n · 2·B·T·G·K · (2 e + g)   keys and values twice, their gradients once
            ulysses            (n-1)/n · 4·B·T/n·(H + G)·K · e     falls with n; the others do not
Memory      activations are 1/n; the ring holds one more block, all_gather all keys and values of a layer for a moment.
Use it      when one sequence's activations do not fit. ulysses if n divides G; it sends less if n > (H/G + 1)/2 (16-bit
            numbers). ring for any n, and when tiles are long enough to hide the sends: the time of a tile grows with
            (T/n)², its bytes with T/n. all_gather for any n, in one message; simplest, if the memory is there.
            FSDP then spans data parallel × cp: cp ranks hold equal weights, and FSDP adds up their gradients.
Not here    masks between documents (refused where they could be asked for), dropout, a ring of rings, n > G in ulysses.
References  Liu et al. 2023, arXiv 2310.01889 (ring); Jacobs et al. 2023, 2309.14509 (Ulysses); Brandon et al. 2023,
            2311.09431 (balance); Milakov and Gimelshein 2018, 1805.02867 (online softmax); Dao 2023, 2307.08691 (lse)
"""

import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from functools import partial
from types import BuiltinFunctionType

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

Group = dist.ProcessGroup | DeviceMesh | None  # a mesh of one axis; None: the default group
METHODS = ("ring", "all_gather", "ulysses", "torch")
_aten = torch.ops.aten
# torch 2.13 renamed all_gather_into_tensor and reduce_scatter_tensor, and warns of the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _place(group: Group) -> tuple[dist.ProcessGroup | None, int, int]:
    """-> process group, number of its ranks, this rank in it."""
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"context parallel takes one mesh axis, got {group}: pass mesh['cp']")
        group = group.get_group()
    return group, dist.get_world_size(group), dist.get_rank(group)


# --------------------------------------------------------------------------------------- who holds which tokens


def check_context_parallel(
    cp: int,
    *,
    seq_len: int | None = None,
    method: str = "ring",
    balance: bool = True,
    n_heads: int | None = None,
    n_kv_heads: int | None = None,
) -> None:
    """ValueError, with all numbers and the remedy, if a sequence or heads cannot be cut over cp ranks. Pure.

    n_heads, n_kv_heads: of one rank, so divided by the tensor parallel degree; only ulysses cuts them. None: unchecked.
    """
    if type(cp) is not int or cp < 1:
        raise ValueError(f"the context parallel degree must be a whole number of at least 1, got {cp!r}")
    if method not in METHODS:
        raise ValueError(f"method {method!r} is none of {', '.join(METHODS)}")
    if method == "torch" and not balance:
        raise ValueError("method 'torch' has torch's own head-tail balance: pass balance=True, or method='ring'")
    chunks = 2 if balance and cp > 1 else 1  # of a rank
    pieces = chunks * cp
    if seq_len is not None and (seq_len % pieces or seq_len < 1):
        near = sorted({max(seq_len // pieces, 1) * pieces, (seq_len // pieces + 1) * pieces})
        fits = [n for n in range(2, cp) if seq_len > 0 and seq_len % (chunks * n) == 0]
        other = f", or take a context parallel degree of {' or '.join(map(str, fits))}" if fits else ""
        raise ValueError(
            f"seq_len {seq_len} cannot be cut into {chunks} equal chunk{'s' * (chunks - 1)} for each of {cp} ranks "
            f"(balance={balance}): pad or cut it to {' or '.join(map(str, near))}, a multiple of {pieces}{other}"
        )
    heads = {name: h for name, h in {"n_heads": n_heads, "n_kv_heads": n_kv_heads}.items() if h is not None}
    if method == "ulysses" and (wrong := [f"{name} {h}" for name, h in heads.items() if h % cp]):
        fits = [n for n in range(1, cp + 1) if not any(h % n for h in heads.values())]
        raise ValueError(
            f"ulysses gives each of {cp} ranks equal heads, but {' and '.join(wrong)} on a rank cannot be cut so: take "
            f"method='ring', or a context parallel degree of {' or '.join(map(str, fits))}"
        )


def positions(seq_len: int, cp: int, rank: int, balance: bool = True, device=None) -> Tensor:
    """The places in the whole sequence of the tokens that `rank` of `cp` holds: int64 [seq_len / cp]."""
    check_context_parallel(cp, seq_len=seq_len, balance=balance)
    places_T = torch.arange(seq_len, device=device)
    return _cut(places_T, cp, rank, 0, balance)


def _cut(x: Tensor, n: int, rank: int, dim: int, balance: bool) -> Tensor:
    if not balance:
        return x.chunk(n, dim)[rank]
    chunks = x.chunk(2 * n, dim)
    return torch.cat((chunks[rank], chunks[2 * n - 1 - rank]), dim)


def _in_order(x: Tensor, n: int, dim: int) -> Tensor:
    """All ranks' tokens, a rank after the other, balanced -> in the order of the sequence."""
    chunks = x.chunk(2 * n, dim)
    return torch.cat((*chunks[0::2], *chunks[1::2][::-1]), dim)


def shard_sequence(x: Tensor, mesh: Group, dim: int = 1, balance: bool = True) -> Tensor:
    """This rank's tokens of a whole x, the same on every rank of `mesh`. For tokens, targets, positions, weights alike.

    Shift targets before, not after: the target of a chunk's last token is in another chunk.
    """
    _, n, rank = _place(mesh)
    check_context_parallel(n, seq_len=x.shape[dim], balance=balance)
    return _cut(x, n, rank, dim, balance).contiguous()


@torch.no_grad()
def unshard_sequence(x: Tensor, mesh: Group, dim: int = 1, balance: bool = True) -> Tensor:
    """The way back: the whole of what each rank holds a part of, in order, on every rank. Without gradient."""
    group, n, _ = _place(mesh)
    check_context_parallel(n, seq_len=n * x.shape[dim], balance=balance)
    x = x.movedim(dim, 0).contiguous()
    whole = x.new_empty(n * len(x), *x.shape[1:])
    _all_gather(whole, x, group=group)
    return (_in_order(whole, n, 0) if balance else whole).movedim(0, dim)


# ------------------------------------------------------------------------------------------------------ by hand


def attention_by_hand(q_BHtK: Tensor, k_BHsK: Tensor, v_BHsK: Tensor, causal: bool = False) -> tuple[Tensor, Tensor]:
    """Attention as on paper, with the whole score matrix -> out_BHtK and lse_BHt, the log of each row's denominator."""
    score_BHts = q_BHtK @ k_BHsK.transpose(-1, -2) / q_BHtK.shape[-1] ** 0.5
    if causal:
        future = torch.ones(score_BHts.shape[-2:], dtype=torch.bool, device=score_BHts.device).triu(1)
        score_BHts = score_BHts.masked_fill(future, -torch.inf)
    lse_BHt = score_BHts.logsumexp(-1)
    return (score_BHts - lse_BHt[..., None]).exp() @ v_BHsK, lse_BHt


def merge_by_hand(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two sets of keys -> over both: each output weighs what its softmax denominator weighs."""
    lse = torch.logaddexp(lse_a, lse_b)
    return (lse_a - lse).exp()[..., None] * out_a + (lse_b - lse).exp()[..., None] * out_b, lse


def ring_attention_by_hand(q_BHtK: Tensor, k_BHtK: Tensor, v_BHtK: Tensor, group: Group = None) -> Tensor:
    """Causal, contiguous, forward only: use a block, then send it to the next rank and get the previous one's."""
    group, n, rank = _place(group)
    kv = torch.stack((k_BHtK, v_BHtK))
    out, lse = attention_by_hand(q_BHtK, *kv, causal=True)
    for step in range(1, n):
        kv = _send_on(kv, group)()  # here nobody computes meanwhile
        if step <= rank:  # the block of rank - step; a later rank's would lie in the future
            out, lse = merge_by_hand(out, lse, *attention_by_hand(q_BHtK, *kv))
    return out


def _send_on(x: Tensor, group: dist.ProcessGroup | None, tag: int = 0) -> Callable[[], Tensor]:
    """Starts to send x to the next rank of the group, and to receive; the result waits and returns what has come."""
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    arriving = torch.empty_like(x)
    send = dist.P2POp(dist.isend, x, group=group, tag=tag, group_peer=(rank + 1) % n)
    recv = dist.P2POp(dist.irecv, arriving, group=group, tag=tag, group_peer=(rank - 1) % n)
    if x.is_cuda:  # NCCL: both in one group of calls, or two ranks that both send first would wait forever
        works = dist.batch_isend_irecv([send, recv])
    else:
        works = [op.op(op.tensor, op.peer, group, tag) for op in (send, recv)]

    def wait() -> Tensor:
        for work in works:
            work.wait()
        return arriving

    return wait


# ------------------------------------------------------------------------------- tiles, by torch's flash kernels


def tile(rank: int, source: int, t: int, causal: bool, balance: bool) -> tuple[slice, slice, bool] | None:
    """Which of rank's t queries meet which of source's t keys, and whether causally; None: no pair may meet."""
    whole, head, tail = slice(0, t), slice(0, t // 2), slice(t // 2, t)
    if not causal:
        return whole, whole, False
    if source == rank:
        return whole, whole, True  # balanced too: both chunks are in order
    if not balance:
        return (whole, whole, False) if source < rank else None
    return (whole, head, False) if source < rank else (tail, whole, False)


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """-> out_BHtK, lse_BHt. The kernels share a key/value head among H/G query heads, without copies."""
    if q.device.type != "cuda":
        return _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"flash attention on CUDA takes float16 or bfloat16, got {q.dtype}: cast, or method='ulysses'")
    out, lse, *_ = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
    return out, lse[..., : q.shape[2]]


def _flash_backward(grad, q, k, v, out, lse, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """-> dq, dk, dv of this tile. out and lse are those of all keys: then the tile's share of the softmax is right."""
    if q.device.type != "cuda":
        kernel = _aten._scaled_dot_product_flash_attention_for_cpu_backward
        return kernel(grad, q, k, v, out, lse, 0.0, causal)
    no_dropout, lengths = torch.empty(2, dtype=torch.uint64, device=q.device), (q.shape[2], k.shape[2])
    kernel = _aten._scaled_dot_product_flash_attention_backward
    lse = lse.contiguous()
    return kernel(grad, q, k, v, out, lse, None, None, *lengths, 0.0, causal, no_dropout, no_dropout)


Blocks = Iterator[tuple[int, Tensor]]  # (whose, its keys and values), this rank's own first


def _ring_blocks(kv: Tensor, group: dist.ProcessGroup | None) -> Blocks:
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    for step in range(n):
        arriving = _send_on(kv, group) if step < n - 1 else None
        yield (rank - step) % n, kv  # whoever asked computes now, while the block travels on
        kv = arriving() if arriving else kv


def _gathered_blocks(kv: Tensor, group: dist.ProcessGroup | None) -> Blocks:
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    whole = kv.new_empty(n, *kv.shape)
    _all_gather(whole.flatten(0, 1), kv, group=group)
    for step in range(n):
        yield (rank - step) % n, whole[(rank - step) % n]


class _BlockAttention(torch.autograd.Function):
    """Ring and all_gather: a tile for each block that comes by. Saves this rank's part only; blocks come again."""

    @staticmethod
    def forward(ctx, q_BHtK, k_BGtK, v_BGtK, group, blocks, causal, balance):
        rank, t, kv = dist.get_rank(group), q_BHtK.shape[2], torch.stack((k_BGtK, v_BGtK))
        wide = torch.promote_types(q_BHtK.dtype, torch.float32)  # sums over blocks lose nothing
        for source, (k, v) in blocks(kv, group):
            if (met := tile(rank, source, t, causal, balance)) is None:
                continue
            rows, keys, diagonal = met
            part = _flash(q_BHtK[:, :, rows], k[:, :, keys], v[:, :, keys], diagonal)
            if source == rank:  # the first, and all rows
                out_BHtK, lse_BHt = part[0].to(wide), part[1]
            else:
                merged = merge_by_hand(out_BHtK[:, :, rows], lse_BHt[:, :, rows], *part)
                out_BHtK[:, :, rows], lse_BHt[:, :, rows] = merged
        out_BHtK = out_BHtK.to(q_BHtK.dtype)
        ctx.save_for_backward(q_BHtK, kv, out_BHtK, lse_BHt)
        ctx.options = group, blocks, causal, balance
        return out_BHtK

    @staticmethod
    def backward(ctx, grad_BHtK):
        q_BHtK, kv, out_BHtK, lse_BHt = ctx.saved_tensors
        group, blocks, causal, balance = ctx.options
        n, rank, t = dist.get_world_size(group), dist.get_rank(group), q_BHtK.shape[2]
        wide = torch.promote_types(q_BHtK.dtype, torch.float32)
        grad_BHtK = grad_BHtK if grad_BHtK.stride(-1) == 1 else grad_BHtK.contiguous()
        dq_BHtK, travels, arriving = torch.zeros_like(q_BHtK, dtype=wide), blocks is _ring_blocks, None
        if not travels:
            d_all = kv.new_zeros(n, *kv.shape, dtype=wide)  # a summand of everybody's
        for step, (source, (k, v)) in enumerate(blocks(kv, group)):
            part = None
            if (met := tile(rank, source, t, causal, balance)) is not None:
                rows, keys, diagonal = met
                queries = grad_BHtK[:, :, rows], q_BHtK[:, :, rows]
                results = out_BHtK[:, :, rows], lse_BHt[:, :, rows]
                dq, *part = _flash_backward(*queries, k[:, :, keys], v[:, :, keys], *results, diagonal)
                dq_BHtK[:, :, rows] += dq
            # A block's gradient follows it, one step behind: from the rank after its owner round to the owner.
            d_kv = d_all[source] if not travels else arriving() if step > 1 else torch.zeros_like(kv, dtype=wide)
            if part:
                d_kv[:, :, :, keys] += torch.stack(part)
            if travels and step == 0:
                own = d_kv
            elif travels:
                arriving = _send_on(d_kv, group, tag=1)
        if travels:
            d_kv = own + arriving() if n > 1 else own
        else:
            d_kv = torch.empty_like(d_all[0])
            _reduce_scatter(d_kv, d_all.flatten(0, 1), group=group)
        dk_BGtK, dv_BGtK = d_kv.to(kv.dtype)
        return dq_BHtK.to(q_BHtK.dtype), dk_BGtK, dv_BGtK, None, None, None, None


# ----------------------------------------------------------------------------------------- one signature for all


def _checked(q: Tensor, k: Tensor, v: Tensor, group: Group, causal: bool, balance: bool, method: str):
    group, n, _ = _place(group)
    if q.dim() != 4 or k.shape != v.shape or q.shape[0::2] != k.shape[0::2] or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: expected [B, H, t, K], [B, G, t, K] twice, with "
            "the same tokens of the sequence on each rank for all three"
        )
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads cannot share {k.shape[1]} key/value heads evenly: G must divide H")
    heads = {"n_heads": q.shape[1], "n_kv_heads": k.shape[1]}
    check_context_parallel(n, seq_len=n * q.shape[2], method=method, balance=balance and causal, **heads)
    return group


def ring_attention(
    q_BHtK: Tensor, k_BGtK: Tensor, v_BGtK: Tensor, group: Group = None, *, causal: bool = True, balance: bool = True
) -> Tensor:
    """Attention over the whole sequence, of which each rank of `group` holds t tokens -> its t rows, [B, H, t, K].

    balance: tokens lie as `shard_sequence` with the same `balance` puts them (without causal it makes no difference).
    G divides H; a key/value head travels once, not once for each of its query heads. Scores are divided by sqrt(K).
    """
    group = _checked(q_BHtK, k_BGtK, v_BGtK, group, causal, balance, "ring")
    return _BlockAttention.apply(q_BHtK, k_BGtK, v_BGtK, group, _ring_blocks, causal, balance)


def all_gather_attention(
    q_BHtK: Tensor, k_BGtK: Tensor, v_BGtK: Tensor, group: Group = None, *, causal: bool = True, balance: bool = True
) -> Tensor:
    """The same result as `ring_attention`: one all-gather of keys and values in place of n - 1 hops."""
    group = _checked(q_BHtK, k_BGtK, v_BGtK, group, causal, balance, "all_gather")
    return _BlockAttention.apply(q_BHtK, k_BGtK, v_BGtK, group, _gathered_blocks, causal, balance)


class _AllToAll(torch.autograd.Function):
    """x_n..: piece r goes to rank r; piece r of the result came from rank r. Its gradient goes the same way back."""

    @staticmethod
    def forward(ctx, x: Tensor, group):
        ctx.group, x = group, x.contiguous()
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        return _AllToAll.apply(grad, ctx.group), None


def ulysses_attention(
    q_BHtK: Tensor, k_BGtK: Tensor, v_BGtK: Tensor, group: Group = None, *, causal: bool = True, balance: bool = True
) -> Tensor:
    """The same result as `ring_attention`, by heads; n divides G, else ValueError. Any balance: all ranks work alike."""
    group = _checked(q_BHtK, k_BGtK, v_BGtK, group, causal, balance, "ulysses")
    n, reorder = dist.get_world_size(group), causal and balance
    parts = [x.unflatten(1, (n, -1)) for x in (q_BHtK, k_BGtK, v_BGtK)]
    sizes = [x.shape[2] for x in parts]
    x_nBhtK = _AllToAll.apply(torch.cat(parts, 2).movedim(1, 0), group)  # all three in one message
    x_BhTK = x_nBhtK.movedim(0, 2).flatten(2, 3)
    x_BhTK = _in_order(x_BhTK, n, 2) if reorder else x_BhTK
    q, k, v = x_BhTK.split(sizes, 1)
    out_BhTK = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=sizes[0] != sizes[1])
    parts = [_cut(out_BhTK, n, r, 2, reorder) for r in range(n)]
    return _AllToAll.apply(torch.stack(parts), group).movedim(0, 1).flatten(1, 2)


def wire_bytes(method: str, n: int, B: int, T: int, H: int, G: int, K: int, itemsize: int = 2) -> float:
    """Bytes that a rank sends in one layer, forward and backward: the formula of this file's docstring."""
    if method == "ulysses":
        return (n - 1) / n * 4 * B * T / n * (H + G) * K * itemsize
    return (n - 1) / n * 2 * B * T * G * K * (2 * itemsize + max(itemsize, 4))


# ------------------------------------------------------------------------------------------------ a whole model


class ContextParallelAttention(nn.Module):
    """Takes the place of an attention that is called with q_BHtK, k_BGtK, v_BGtK of this rank's tokens."""

    def __init__(self, mesh: DeviceMesh, method: str = "ring", causal: bool = True, balance: bool = True) -> None:
        super().__init__()
        self.mesh, self.method, self.causal, self.balance = mesh, method, causal, balance

    def forward(self, q_BHtK: Tensor, k_BGtK: Tensor, v_BGtK: Tensor) -> Tensor:
        if self.method == "torch":
            if isinstance(F.scaled_dot_product_attention, BuiltinFunctionType):
                raise ValueError("method 'torch': run forward and backward within `torch_context_parallel(mesh)`")
            grouped = q_BHtK.shape[1] != k_BGtK.shape[1]
            return F.scaled_dot_product_attention(q_BHtK, k_BGtK, v_BGtK, is_causal=self.causal, enable_gqa=grouped)
        attend = {"ring": ring_attention, "all_gather": all_gather_attention, "ulysses": ulysses_attention}[self.method]
        return attend(q_BHtK, k_BGtK, v_BGtK, self.mesh, causal=self.causal, balance=self.balance)


@contextmanager
def torch_context_parallel(mesh: DeviceMesh) -> Iterator[None]:
    """Around forward and backward of a model with method="torch": torch's own ring, on CUDA only (else ValueError).

    torch's `context_parallel` here only replaces scaled_dot_product_attention; `shard_sequence` cuts tokens as it does.
    """
    if mesh.device_type != "cuda":
        raise ValueError(
            f"torch's context_parallel has no attention for a {mesh.device_type} mesh (its flash operator has no sharding "
            "rule there): use method='ring', which is the same ring, or a mesh of CUDA devices"
        )
    from torch.distributed.tensor.experimental import context_parallel

    unused = torch.empty(2 * mesh.size(), device="cuda")  # it wants a buffer to cut
    with context_parallel(mesh, buffers=[unused], buffer_seq_dims=[0], no_restore_buffers={unused}):
        yield


def _hf_attention(module: nn.Module, q, k, v, attention_mask=None, scaling=None, dropout=0.0, **_):
    """What transformers calls under the name "context_parallel"."""
    if attention_mask is not None or dropout or (scaling is not None and abs(scaling * q.shape[-1] ** 0.5 - 1) > 1e-6):
        raise ValueError(
            f"context parallel has no attention mask, no dropout (attention_dropout is {dropout}), and scores are scaled by "
            f"1/sqrt({q.shape[-1]}), not by {scaling}: set these in the model's config"
        )
    return module.inner(q, k, v).transpose(1, 2), None


def _give_positions(signature: inspect.Signature, name: str, layout: ContextParallelAttention, _, args, kwargs):
    """Before the model's forward: where this rank's tokens stand. What would be wrong without a word is refused."""
    found = signature.bind(*args, **kwargs).arguments
    found |= found.get("kwargs", {})
    x = next(value for value in found.values() if isinstance(value, Tensor))  # tokens_BT, or x_BTD of a stage
    _, n, rank = _place(layout.mesh)
    t, given, mask = x.shape[1], found.get(name), found.get("attention_mask")
    places_t = positions(n * t, n, rank, layout.balance, x.device)
    if given is not None and (given.shape[-1] != t or bool((given != places_t).any())):
        raise ValueError(
            f"{name} are not the {t} places of rank {rank} of {n} with balance={layout.balance}: leave them out. (Where "
            "they restart at a document, attention would have to stop too: context parallel has no such mask.)"
        )
    if mask is not None and (mask.dim() != 2 or not bool(mask.all())):
        raise ValueError(
            f"attention_mask {tuple(mask.shape)}: there is none in context parallel; padding goes to the end"
        )
    if found.get("labels") is not None:
        raise ValueError(
            "labels would be shifted inside the model, but what follows a chunk's last token is on another rank: shift the "
            "whole sequence, then shard_sequence both, and take the loss of the logits"
        )
    if given is None:
        kwargs = kwargs | {name: places_t[None] if name == "position_ids" else places_t}
    return args, kwargs


class _SumOverGroup(nn.Module):
    def __init__(self, inside: nn.Module, mesh: DeviceMesh) -> None:
        super().__init__()
        self.inside, self.mesh = inside, mesh

    def forward(self, counts: Tensor) -> Tensor:
        counts = self.inside(counts).clone()
        dist.all_reduce(counts, group=self.mesh.get_group())
        return counts


def apply_context_parallel(
    model: nn.Module, mesh: DeviceMesh, method: str = "ring", balance: bool = True, causal: bool = True
) -> nn.Module:
    """Makes `model`, in place, one that is called with this rank's part of each sequence: `shard_sequence(tokens, mesh)`.

    model: the Transformer of this package or one that is built alike (attention modules have `wk` and call `inner(q, k,
    v)`, forward takes `positions_T`), or transformers' LlamaForCausalLM or LlamaModel. method: "ring", "all_gather",
    "ulysses", or "torch" (see `torch_context_parallel`). After tensor parallel, before activation checkpointing, compile
    and FSDP; FSDP over data parallel × cp. Equal weights on all cp ranks. On meta, too.

    The loss is of this rank's tokens: take its sum, over the valid tokens of *all* ranks that hold tokens (cp too); FSDP
    then averages gradients over data parallel × cp, so multiply by the number of those ranks. Targets are shifted before
    they are cut. Where a router balances the experts' load by sequence, its counts become those of the whole sequence.

    ValueError: a mesh of several axes; no attention that is known; heads that ulysses cannot cut; applied twice. And in
    forward, for masks, dropout, labels, and foreign positions.
    """
    _, n, _ = _place(mesh)
    check_context_parallel(n, method=method, balance=balance)
    if any(isinstance(module, ContextParallelAttention) for module in model.modules()):
        raise ValueError("the model has context parallel attention already: apply it once")
    signature = inspect.signature(model.forward)
    name = next((name for name in ("positions_T", "position_ids") if name in signature.parameters), None)
    key = {"positions_T": "wk", "position_ids": "k_proj"}.get(name)
    attentions = [module for module in model.modules() if key and hasattr(module, key)]
    if not attentions:
        raise ValueError(
            f"{type(model).__name__}{signature} has no attention that is known here: forward takes positions_T and "
            "attention has wk and inner, or position_ids and k_proj"
        )
    layout = ContextParallelAttention(mesh, method, causal, balance)
    for attention in attentions:
        weight = getattr(attention, key).weight
        local = weight.to_local() if isinstance(weight, DTensor) else weight
        check_context_parallel(n, method=method, balance=balance, n_kv_heads=len(local) // attention.head_dim)
    if name == "position_ids":
        config = copy(model.config)  # another model may share it
        interfaces = sys.modules[type(attentions[0]).__module__].ALL_ATTENTION_FUNCTIONS
        interfaces.register("context_parallel", _hf_attention)
        config._attn_implementation = "context_parallel"
        for module in model.modules():
            if getattr(module, "config", None) is model.config and module is not model:
                module.config = config
        model.config = config
    for attention in attentions:
        attention.inner = ContextParallelAttention(mesh, method, causal, balance)
    for router in (module for module in model.modules() if hasattr(module, "whole_sequence")):
        router.whole_sequence = _SumOverGroup(router.whole_sequence, mesh)
    model.register_forward_pre_hook(partial(_give_positions, signature, name, layout), with_kwargs=True)
    return model


# --------------------------------------------------------------------------------------------------------- demo


def demo() -> None:
    """The result and the gradients of q, k and v in float64 against one process, for every method and mask."""
    dist.init_process_group("gloo")
    n, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (n,), mesh_dim_names=("cp",))
    torch.manual_seed(0)
    B, T, H, G, K = 2, 8 * n, 4 * n, 2 * n, 8
    q, k, v, grad = (torch.randn(B, heads, T, K, dtype=torch.float64) for heads in (H, G, G, H))
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    worst = 0.0

    def report(case: str, *pairs: tuple[Tensor, Tensor]) -> None:
        nonlocal worst
        error = torch.stack([(ours - theirs).norm() / theirs.norm() for ours, theirs in pairs]).max().detach()
        dist.all_reduce(error, dist.ReduceOp.MAX)
        worst = max(worst, error.item())
        if rank == 0:
            print(f"{case:30} largest error of {'the result' if len(pairs) == 1 else 'out, dq, dk, dv'}: {error:.1e}")

    for causal in (True, False):
        truth = F.scaled_dot_product_attention(*whole, is_causal=causal, enable_gqa=True)
        truths = [truth, *torch.autograd.grad(truth, whole, grad)]
        for method in (ring_attention, all_gather_attention, ulysses_attention):
            for balance in (True, False):
                mine = [shard_sequence(x, mesh, 2, balance).requires_grad_() for x in (q, k, v)]
                out = method(*mine, mesh, causal=causal, balance=balance)
                ours = [out, *torch.autograd.grad(out, mine, shard_sequence(grad, mesh, 2, balance))]
                ours = [unshard_sequence(x.detach(), mesh, 2, balance) for x in ours]
                case = f"{method.__name__[:-10]}{', causal' * causal}{', balanced' * balance}"
                report(case, *zip(ours, truths, strict=True))
    parts = [shard_sequence(x.repeat_interleave(H // x.shape[1], 1), mesh, 2, False) for x in (q, k, v)]
    out = unshard_sequence(ring_attention_by_hand(*parts), mesh, 2, False)
    report("ring by hand, causal", (out, F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)))
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0 if worst < 1e-10 else 1)  # a finished gloo process can abort in the interpreter's own exit


if __name__ == "__main__":
    demo()
