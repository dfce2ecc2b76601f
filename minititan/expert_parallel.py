"""Expert parallelism: a model has many experts, a token needs a few, so the token travels and the experts stay.

A mixture of experts (MoE) has E small feed-forwards where a dense model has one. A router sends each token to K of them
and adds their outputs, weighted. Parameters grow with E, flops with K. Sharded as other layers are, all E experts would
be gathered for the sake of K; here each of n ranks keeps E/n of them whole, and rows of activations are exchanged:

    rank 0   tokens ─ router ─ K copies, sorted by expert ─┐            ┌─ experts 0, 1 ─┐            ┌─ weighted sum
                                                           ├ all-to-all ┤                ├ all-to-all ┤
    rank 1   tokens ─ router ─ K copies, sorted by expert ─┘            └─ experts 2, 3 ─┘            └─ weighted sum
                                      dispatch: who has how many rows for whom is exchanged first         combine

Nothing is dropped and nothing padded: an expert takes as many rows as choose it, all of them or none. The price is that
the slowest rank is the one with the favourite experts, so the router has to be kept even (`update_expert_bias`).

Where the ranks come from. Experts take no ranks of their own: the ranks of an ep group do FSDP, context and tensor
parallelism in the other layers. Here tensor-parallel ranks are more data ranks: each takes its part of the sequence
through router, experts and shared experts, and the outputs are gathered (with sequence parallelism they lie so already).
A router's gradient is then a summand on each of them, which DTensor keeps as Partial until it is added.

What is a mean. FSDP takes the mean gradient over its d = dp_shard·cp ranks. An expert's gradient is the sum over the
tokens of its ep group, which are those of n/t losses (t tensor-parallel ranks share one loss). Times t/n it is the mean;
the mean over the d·t/n ranks of efsdp, that FSDP takes of it, is then the mean over all d. (fully_shard's own
set_gradient_divide_factor would do too, but torch 2.13 ignores it on a mesh of one rank, which efsdp often is.)

Cost        N tokens a rank, D numbers of e bytes each: two all-to-alls forward and two backward, each sends up to
            N·K·D·e bytes from a rank, of which 1/n stay when the load is even; and 8·E bytes of counts. FSDP
            alone would gather all 3·E·D·F·e bytes of a layer twice. With tensor parallelism, also N·D·e gathered.
            The host waits once a layer, to learn how many rows will come.
Memory      1/n of the experts, gradients, states. Activations: K rows a token, as many as come.
Use it      when experts do not fit, or their gathers do not hide; within fast links, as it cannot hide either. n divides E.
Not here    capacity limits, routing limited to some nodes, overlap of the exchange with shared experts or another
            microbatch, kernels that exchange without the host (DeepEP).
References  GShard 2006.16668; Switch 2101.03961; MegaBlocks 2211.15841 (dropless); 2408.15664 (bias in place of a loss);
            torchtitan#1878, #2416 (router gradients without the tensor-parallel sum)

Letters     N tokens of a rank, K experts of a token, S = N·K rows sent, R rows received, D model, F feed-forward,
            E experts, n ranks of the ep group, e = E/n experts of a rank, L layers
"""

import logging
import os
import sys
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, parallel

Group = dist.ProcessGroup | None  # None: the default group

# ---------------------------------------------------------------------------------------------------- by hand


class _AllToAll(torch.autograd.Function):
    """sent[r] rows to each rank r, received[r] from it; gradients travel the same ways back."""

    @staticmethod
    def forward(ctx, x_SD: Tensor, sent: list[int], received: list[int], group: Group) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        x_RD = x_SD.new_empty(sum(received), *x_SD.shape[1:])
        dist.all_to_all_single(x_RD, x_SD.contiguous(), received, sent, group=group)
        return x_RD

    @staticmethod
    def backward(ctx, grad_RD: Tensor):
        return _AllToAll.apply(grad_RD, ctx.received, ctx.sent, ctx.group), None, None, None


class Route(NamedTuple):
    """What combine needs to know of a dispatch."""

    order_S: Tensor  # the rows sent, sorted by expert: row s is copy order_S[s] of the N·K
    order_R: Tensor  # the rows received, sorted by expert: row r came as number order_R[r]
    sent: list[int]  # rows to each rank
    received: list[int]  # rows from each rank


def dispatch_by_hand(
    x_ND: Tensor, experts_NK: Tensor, n_experts: int, group: Group = None
) -> tuple[Tensor, Tensor, Route]:
    """Each token to the ranks of its experts -> rows_RD sorted by this rank's experts, counts_e of each, and the route.

    Rank r of n holds experts r·e to r·e + e - 1. ValueError: n does not divide n_experts, an expert that there is not.
    """
    n, K = dist.get_world_size(group), experts_NK.shape[-1]
    check_expert_parallel(n, n_experts)
    experts_S = experts_NK.flatten()
    if ((experts_S < 0) | (experts_S >= n_experts)).any():
        raise ValueError(f"an expert is outside [0, {n_experts}): they span {experts_S.aminmax()}")
    order_S = experts_S.argsort(stable=True)
    leaving_ne = experts_S.bincount(minlength=n_experts).view(n, -1)
    coming_ne = torch.empty_like(leaving_ne)
    dist.all_to_all_single(coming_ne, leaving_ne, group=group)  # [r, j]: how many rows rank r has for my expert j
    sent, received = leaving_ne.sum(1).tolist(), coming_ne.sum(1).tolist()
    rows_RD = _AllToAll.apply(x_ND[order_S // K], sent, received, group)  # by sender, and then by expert
    order_R = _by_expert(coming_ne)
    return rows_RD[order_R], coming_ne.sum(0), Route(order_S, order_R, sent, received)


def combine_by_hand(out_RD: Tensor, weights_NK: Tensor, route: Route, group: Group = None) -> Tensor:
    """The experts' outputs back to where their tokens are, each token's K added with its weights -> [N, D]."""
    out_SD = _AllToAll.apply(_scatter(out_RD, route.order_R), route.received, route.sent, group)
    out_NKD = _scatter(out_SD, route.order_S).unflatten(0, weights_NK.shape)
    return (out_NKD * weights_NK[..., None].to(out_NKD.dtype)).sum(1)


def _by_expert(coming_ne: Tensor) -> Tensor:
    """order_R: from by sender, then by expert, to by expert, then by sender."""
    expert_ne = torch.arange(coming_ne.shape[1], device=coming_ne.device).expand_as(coming_ne)
    return expert_ne.flatten().repeat_interleave(coming_ne.flatten()).argsort(stable=True)


def _scatter(rows: Tensor, order: Tensor) -> Tensor:
    """The inverse of rows[order], and without a sum in backward."""
    return torch.zeros_like(rows).index_copy(0, order, rows)


# ----------------------------------------------------------------------------------------------------- native


def check_expert_parallel(ep: int, n_experts: int, tp: int = 1, seq_len: int | None = None) -> None:
    """ValueError, with all numbers and the remedy, if a model cannot be spread so. Pure: call it before a start."""
    if type(ep) is not int or ep < 1:
        raise ValueError(f"the expert parallel degree must be a whole number of at least 1, got {ep!r}")
    if n_experts % ep or n_experts < 1:
        fits = [d for d in range(1, n_experts + 1) if n_experts % d == 0]
        raise ValueError(f"{n_experts} experts cannot be spread evenly over ep {ep}: take an ep among {fits}")
    if seq_len is not None and seq_len % tp:
        raise ValueError(
            f"seq_len {seq_len} is no multiple of tp {tp}, whose ranks each take a part of the sequence through the "
            f"experts: use seq_len {seq_len - seq_len % tp or tp} or {seq_len + tp - seq_len % tp}"
        )


def _find(model: nn.Module) -> dict[str, tuple[nn.Module, nn.Module]]:
    """Path -> (MoE block, its `experts`)."""
    found = {}
    for path, module in model.named_modules():
        parent, _, leaf = path.rpartition(".")
        if leaf == "experts":
            found[parent] = model.get_submodule(parent), module
    if not found:
        raise ValueError(f"no module of {type(model).__name__} is called 'experts', so there is nothing to spread")
    return found


def _exchanged(compute: Callable, group: Group, factor: float, x_SD: Tensor, counts_E: Tensor) -> Tensor:
    """`compute(rows, counts)` on the ranks that have the experts, in place of here. Its weights' gradients: × factor."""
    leaving_ne = counts_E.view(dist.get_world_size(group), -1)
    coming_ne = all_to_all_single(leaving_ne, None, None, group)
    sent, received = torch.stack([leaving_ne.sum(1), coming_ne.sum(1)]).tolist()  # here the host waits
    rows_RD = all_to_all_single_autograd(x_SD, received, sent, group)
    order_R = _by_expert(coming_ne)
    rows_RD = rows_RD[order_R]
    out_RD = compute(rows_RD, coming_ne.sum(0))
    for tensor, scale in ((rows_RD, 1 / factor), (out_RD, factor)):
        if factor != 1 and tensor.requires_grad:
            tensor.register_hook(partial(torch.mul, other=scale))
    return all_to_all_single_autograd(_scatter(out_RD, order_R), sent, received, group)


def apply_expert_parallel(
    model: nn.Module, mesh: DeviceMesh, tp_mesh: DeviceMesh | None = None, sequence_parallel: bool = False
) -> nn.Module:
    """Spread the experts of each MoE block over the one-axis `mesh`, in place, and return the model.

    model: each MoE block has a module called `experts`, which the block calls as experts(x_SD, counts_E), rows sorted by
    expert. Dim 0 of its parameters counts experts; they become DTensors, Shard(0), so it computes with their `to_local()`.
    Their gradients are means, as FSDP's (see above). A model on meta is fine, else the same on all ranks.
    tp_mesh: needed when the rest of the model is tensor parallel. The block is then called on [B, T, D], the same on
    each tensor-parallel rank, or this rank's part of T with `sequence_parallel`, and has its other parameters in
    nn.Linear modules, which become DTensors too, replicated.

    Order: apply_tensor_parallel, this, activation checkpointing, shard_experts, fully_shard of blocks and model.
    ValueError: E not divisible, no experts, DTensors already there, a tensor-parallel model without tp_mesh.
    """
    for name, axis in {"mesh": mesh, "tp_mesh": tp_mesh}.items():
        if axis is not None and axis.ndim != 1:
            raise ValueError(f"{name} takes one mesh axis, got {axis}: pass mesh['ep'] and mesh['tp']")
    found = _find(model)
    if any(isinstance(p, DTensor) for _, experts in found.values() for p in experts.parameters()):
        raise ValueError("the experts are DTensors already: apply expert parallel once, and before FSDP")
    if tp_mesh is None and (cut := [name for name, p in model.named_parameters() if isinstance(p, DTensor)]):
        raise ValueError(f"{len(cut)} parameters are DTensors, as {cut[0]} is: pass tp_mesh too, and FSDP comes last")
    tp = 1 if tp_mesh is None else tp_mesh.size()
    for path, (_, experts) in found.items():
        sizes = {len(p) for p in experts.parameters()}
        if isinstance(experts, nn.ModuleList | nn.ModuleDict) or len(sizes) != 1:
            raise ValueError(
                f"{path}.experts is a {type(experts).__name__}: it needs parameters with all E experts in dim 0"
            )
        check_expert_parallel(mesh.size(), *sizes)
    for path, (block, experts) in found.items():
        for name, p in list(experts.named_parameters()):
            owner, _, leaf = name.rpartition(".")
            cut = nn.Parameter(distribute_tensor(p, mesh, [Shard(0)], src_data_rank=None), p.requires_grad)
            experts.get_submodule(owner).register_parameter(leaf, cut)
        experts.forward = partial(_exchanged, experts.forward, mesh.get_group(), tp / mesh.size())
        if tp_mesh is not None:
            _take_turns(path, block, tp_mesh, sequence_parallel)
    if tp_mesh is not None:
        spread_sequences(model, tp_mesh)
    return model


def _take_turns(path: str, block: nn.Module, tp_mesh: DeviceMesh, sequence_parallel: bool) -> None:
    """Each tensor-parallel rank takes its part of the tokens through the whole block."""
    linears = {name: m for name, m in block.named_modules() if isinstance(m, nn.Linear)}
    for name, _ in block.named_parameters():
        if not name.startswith("experts.") and name.rpartition(".")[0] not in linears:
            raise ValueError(f"{path}.{name} is not of an nn.Linear, and its gradient would miss the sum over tp")
    whole, part = Shard(1) if sequence_parallel else Replicate(), Shard(1)
    plan = {name: parallel.SequenceParallel(use_local_output=True) for name in linears}
    plan[""] = parallel.PrepareModuleInputOutput(
        input_layouts=(whole,),
        desired_input_layouts=(part,),
        use_local_input=True,
        output_layouts=(part,),
        desired_output_layouts=(whole,),
        use_local_output=True,
    )
    for name, style in plan.items():
        parallel.parallelize_module(block.get_submodule(name), tp_mesh, style, src_data_rank=None)
    if not sequence_parallel:
        block.register_forward_pre_hook(partial(_check_sequence, tp_mesh.size()), prepend=True)


def _check_sequence(tp: int, module: nn.Module, args: tuple[Tensor]) -> None:
    check_expert_parallel(1, 1, tp, args[0].shape[1])


class _SumOver(nn.Module):
    def __init__(self, group: Group) -> None:
        super().__init__()
        self.group = group

    def forward(self, counts: Tensor) -> Tensor:
        counts = counts.clone()
        dist.all_reduce(counts, group=self.group)
        return counts


def spread_sequences(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Tell each router (a module with `whole_sequence`) that a sequence lies on all ranks of `mesh`, as with context
    parallel: the loss for even load then counts all of it. `apply_expert_parallel` does so for its tp_mesh."""
    for router in [m for m in model.modules() if hasattr(m, "whole_sequence")]:
        router.whole_sequence = nn.Sequential(router.whole_sequence, _SumOver(mesh.get_group()))
    return model


def shard_experts(model: nn.Module, mesh: DeviceMesh, **options) -> nn.Module:
    """`fully_shard(experts, mesh=mesh, **options)` for each block, before that of block and model over their own mesh.

    mesh: the ranks that hold the same experts (efsdp), also when that is one; of 2 axes, the first replicates. It shares a
    root mesh with the ep mesh. The cut is along the first dim that it divides, else by experts, and uneven.
    """
    n = mesh.size(mesh.ndim - 1)

    def along(p: Tensor) -> Shard:
        local = p.to_local() if isinstance(p, DTensor) else p
        return Shard(next((dim for dim, size in enumerate(local.shape) if size % n == 0), 0))

    for _, experts in _find(model).values():
        fully_shard(experts, mesh=mesh, shard_placement_fn=along, **options)
    return model


@torch.no_grad()
def update_expert_bias(model: nn.Module, *meshes: DeviceMesh) -> Tensor:
    """Once a step, after backward: experts with less than their share of the rows become likelier, the others less.

    For each router, a module with the whole-number buffers tokens_per_expert and bias_steps (the bias, in steps of a
    fixed size). meshes: the axes over which tokens are spread, the tensor-parallel one included when it is given to
    apply_expert_parallel. All in whole numbers, so any layout decides the same. Returns the counts_LE of all ranks together.
    """
    routers = [m for m in model.modules() if hasattr(m, "tokens_per_expert")]
    if not routers:
        raise ValueError(f"no module of {type(model).__name__} has tokens_per_expert, so no bias can be updated")
    counts_LE = torch.stack([router.tokens_per_expert for router in routers])
    for mesh in meshes:
        dist.all_reduce(counts_LE, group=mesh.get_group())
    steps_LE = torch.sign(counts_LE.sum(1, keepdim=True) - counts_LE.shape[1] * counts_LE)
    for router, steps_E in zip(routers, steps_LE, strict=True):
        router.bias_steps += steps_E
        router.tokens_per_expert.zero_()
    return counts_LE


# ------------------------------------------------------------------------------------------------------- demo


class _Experts(nn.Module):
    def __init__(self, E: int, D: int, hidden: int):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(E, hidden, D)), nn.Parameter(torch.randn(E, D, hidden))

    def forward(self, x_SD: Tensor, counts_E: Tensor) -> Tensor:
        up, down = (w.to_local() if isinstance(w, DTensor) else w for w in (self.up, self.down))
        rows = zip(x_SD.split(counts_E.tolist()), up, down, strict=True)
        return torch.cat([F.linear(F.linear(x, u).tanh(), d) for x, u, d in rows])


class _MoE(nn.Module):
    def __init__(self, E: int, D: int, hidden: int, K: int):
        super().__init__()
        self.gate, self.experts, self.K = nn.Linear(D, E, bias=False), _Experts(E, D, hidden), K

    def route(self, x_ND: Tensor) -> tuple[Tensor, Tensor]:
        return self.gate(x_ND).softmax(-1).topk(self.K)

    def forward(self, x_ND: Tensor) -> Tensor:
        weights_NK, experts_NK = self.route(x_ND)
        experts_S = experts_NK.flatten()
        order_S, counts_E = experts_S.argsort(stable=True), experts_S.bincount(minlength=len(self.gate.weight))
        out_SD = _scatter(self.experts(x_ND[order_S // self.K], counts_E), order_S)
        return (out_SD.unflatten(0, weights_NK.shape) * weights_NK[..., None]).sum(1)


def demo() -> None:
    """Loss and all gradients in float64 against one process: by hand, and native with each ep, under FSDP."""
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # full_tensor() over two axes: two gathers
    dist.init_process_group("gloo")
    n, rank = dist.get_world_size(), dist.get_rank()
    line = init_device_mesh("cpu", (n,))
    torch.manual_seed(0)
    whole = _MoE(E=2 * n, D=8, hidden=12, K=2).double()
    pieces = torch.randn(n * (n + 7) // 2, 8, dtype=torch.float64).split([4 + r for r in range(n)])  # uneven
    x_ND, n_tokens = pieces[rank], sum(map(len, pieces))
    truth = whole(torch.cat(pieces)).logsumexp(1).mean()
    truth.backward()
    worst = 0.0

    def compare(what: str, loss: Tensor, grads: list[Tensor]) -> None:
        nonlocal worst
        errors = [(loss - truth).abs() / truth.abs()]
        errors += [(g - p.grad).norm() / p.grad.norm() for g, p in zip(grads, whole.parameters(), strict=True)]
        error = torch.stack(errors).max().detach()
        dist.all_reduce(error, dist.ReduceOp.MAX)
        worst = max(worst, error.item())
        if rank == 0:
            print(f"{what:24} largest error of loss and {len(grads)} gradients: {error:.1e}")

    def loss_of(out_ND: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's share, such that the mean over ranks is the loss; and the loss."""
        share = out_ND.logsumexp(1).sum() * n / n_tokens
        mean = share.detach() / n
        dist.all_reduce(mean)
        return share, mean

    model = deepcopy(whole)
    for name, p in list(model.experts.named_parameters()):
        setattr(model.experts, name, nn.Parameter(p.detach().chunk(n)[rank].clone()))
    weights_NK, experts_NK = model.route(x_ND)
    rows_RD, counts_e, route = dispatch_by_hand(x_ND, experts_NK, 2 * n)
    share, loss = loss_of(combine_by_hand(model.experts(rows_RD, counts_e), weights_NK, route))
    share.backward()
    dist.all_reduce(model.gate.weight.grad)
    gathered = [[torch.empty_like(p) for _ in range(n)] for p in model.experts.parameters()]
    for parts, p in zip(gathered, model.experts.parameters(), strict=True):
        dist.all_gather(parts, p.grad)
    compare("by hand", loss, [g / n for g in (model.gate.weight.grad, *map(torch.cat, gathered))])

    for ep in (d for d in range(1, n + 1) if n % d == 0):
        mesh = init_device_mesh("cpu", (n // ep, ep), mesh_dim_names=("efsdp", "ep"))
        model = apply_expert_parallel(deepcopy(whole), mesh["ep"])
        fully_shard(shard_experts(model, mesh["efsdp"]), mesh=line)
        share, loss = loss_of(model(x_ND))
        share.backward()
        compare(f"native, ep {ep} × efsdp {n // ep}", loss, [p.grad.full_tensor() for p in model.parameters()])
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0 if worst < 1e-10 else 1)  # a finished gloo process can abort in the interpreter's own exit


if __name__ == "__main__":
    demo()
