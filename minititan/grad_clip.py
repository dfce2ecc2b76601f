"""Gradient clipping: one true norm, however the gradients lie.

Clipping rescales all gradients by min(1, max_norm / norm), where norm is the p-norm of ALL of them as one vector. A
rank holds a part: rows of some matrices under FSDP, heads under TP, layers under PP, and whole copies of what is
replicated. Three ways to get it wrong, each seen in public and each silent, for a wrong norm still trains:

    the local norm              each rank clips by its own number; with PP 0.443 and 0.580 for a true 0.730, and the
                                stages drift apart in scale (torchtitan#596)
    the norms' sum              norms do not add, their p-th powers do: norm^p = sum over parts of |part|^p
    all ranks summed            what is replicated is counted once a copy: too large by up to n^(1/p)

So each gradient says, by its placements, over which axes its parts have to be summed, and over which not:

                     dp_shard   tp                                          all-reduce over
    wq.weight     [  Shard,     Shard    ]  ┐ sum |local|^p  ──────────────▶ dp_shard, tp ──┐
    wo.weight     [  Shard,     Shard    ]  ┘                                               │
    norm.weight   [  Shard,     Replicate]  ── sum |local|^p ──────────────▶ dp_shard ──────┤ + ─▶ pp ─▶ ^(1/p)
    a plain tensor (the same everywhere)    ── sum |local|^p ───────────────────────────────┘
    Partial: summands, not parts; they are reduced first, for |a| + |b| is not |a + b|

Parameters of one model can live on several meshes (norms on FSDP's, matrices on FSDP × TP's, experts on a third), and
torch refuses to stack their norms (pytorch#180346). Here each (mesh, axes) adds up its own scalar, and only scalars meet.

Cost        per (mesh, sharded axes), 8 bytes all-reduced over each of those axes; a typical FSDP × TP model makes three.
            Local norms are one fused pass over the gradients, scaling is another, in place.
Precision   bf16 and fp16 gradients are squared and summed in float32, float64 ones in float64, the few scalars in
            float64 always: the square of a norm above 1.8e19 would overflow float32.
Not here    an embedding whose two copies live on two pipeline stages (it counts twice), per-parameter clipping,
            error_if_nonfinite: the norm is returned as it is, inf or nan, and you decide before optimizer.step().
References  Pascanu et al. 2013, arXiv 1211.5063; torch.nn.utils.clip_grad_norm_, whose result and arithmetic
            (norm + 1e-6) this keeps; github.com/pytorch/torchtitan/issues/596, github.com/pytorch/pytorch/issues/180346
"""

import logging
import math
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from copy import deepcopy

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

# ---------------------------------------------------------------------------------------------------- by hand


def global_norm_by_hand(parts: Iterable[Tensor], group: dist.ProcessGroup | None = None) -> Tensor:
    """The whole idea for one group, p = 2 and parts that are nobody else's: powers add, norms do not."""
    square = sum((part.double().square().sum() for part in parts), torch.zeros((), dtype=torch.float64))
    dist.all_reduce(square, group=group)
    return square.sqrt()


# ----------------------------------------------------------------------------------------------------- native


def _power_sum(parts: list[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """sum |x|^p over local parts as float64, or for p = inf [max |x|, is any nan]: MAX of a nan may hide it."""
    by_kind = defaultdict(list)
    for part in parts:
        if part.numel():  # an uneven shard can be empty
            by_kind[part.dtype, part.device].append(part)
    norms = [torch.zeros(1, dtype=torch.float64, device=device)]
    for (dtype, _), tensors in by_kind.items():
        wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else None
        each = torch._foreach_norm(tensors, norm_type, dtype=wide)
        norms.append(torch.stack(each).to(device, torch.float64))
    norms = torch.cat(norms)
    if norm_type != math.inf:
        return norms.pow(norm_type).sum()
    return torch.stack([norms.nan_to_num(nan=0.0, posinf=math.inf).max(), norms.isnan().any()])


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    pp_mesh: DeviceMesh | None = None,
    norm_type: float = 2.0,
) -> Tensor:
    """Scale all gradients in place so that their global p-norm is at most max_norm; return the norm before that.

    The result is a plain float64 scalar, equal on all ranks of the meshes involved and of `pp_mesh`, the one-axis mesh
    of the pipeline stages. All those ranks must call it, each with all of its own parameters in the same order as its
    peers on the same meshes: also a rank whose gradients are None or that has no parameters. A parameter given twice
    counts once. A Partial gradient is reduced, and stays so. max_norm inf only measures.

    ValueError: max_norm or norm_type (p > 0, or inf) not above 0.
    """
    max_norm, p = float(max_norm), float(norm_type)
    if not (max_norm > 0 and p > 0):
        raise ValueError(f"max_norm and norm_type must be above 0, got {max_norm} and {p}; to only measure, pass inf")
    parameters = dict.fromkeys([parameters] if isinstance(parameters, Tensor) else parameters)
    first = next(iter(parameters), None)
    device = torch.device(pp_mesh.device_type if pp_mesh else "cpu" if first is None else first.device)
    # Which all-reduces take place is read from the parameters, not from the gradients: a rank without any joins in.
    parts: dict[tuple[DeviceMesh | None, tuple[int, ...]], list[Tensor]] = {}
    for parameter in parameters:
        grad, mesh, axes = parameter.grad, None, ()
        if isinstance(parameter, DTensor):
            mesh, placements = parameter.device_mesh, parameter.placements
            axes = tuple(i for i, placement in enumerate(placements) if not placement.is_replicate())
            if isinstance(grad, DTensor):
                if grad.placements != placements:
                    parameter.grad = grad = grad.redistribute(placements=placements)
                grad = grad.to_local()
        parts.setdefault((mesh, axes), []).extend([] if grad is None else [grad])

    op = dist.ReduceOp.MAX if p == math.inf else dist.ReduceOp.SUM
    totals = [_power_sum([], p, device)]
    for (mesh, axes), local in parts.items():
        total = _power_sum(local, p, torch.device(mesh.device_type) if mesh else device)
        for axis in (axis for axis in axes if mesh.size(axis) > 1):
            dist.all_reduce(total, op, mesh.get_group(axis))
        totals.append(total.to(device))
    total = torch.stack(totals)
    total = total.amax(0) if p == math.inf else total.sum(0)
    if pp_mesh is not None:
        dist.all_reduce(total, op, pp_mesh.get_group())
    norm = torch.where(total[1] > 0, math.nan, total[0]) if p == math.inf else total.pow(1 / p)

    if max_norm < math.inf:
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # a nan stays a nan
        by_kind = defaultdict(list)
        for part in (part for local in parts.values() for part in local):
            by_kind[part.dtype, part.device].append(part)
        for (dtype, where), tensors in by_kind.items():
            torch._foreach_mul_(tensors, scale.to(where, torch.promote_types(dtype, torch.float32)))
    return norm


# ------------------------------------------------------------------------------------------------------- demo


class _Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(8, 1e-5), nn.Linear(8, 12), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(self.norm(x)).relu()).square().sum()


def demo() -> None:
    """The norm and every clipped gradient of five layouts against torch.nn.utils.clip_grad_norm_ in one process."""
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)  # full_tensor of FSDP x TP
    dist.init_process_group("gloo")
    n, rank = dist.get_world_size(), dist.get_rank()
    if n % 2:
        raise SystemExit(f"this demo lays {n} ranks out as 2 x n/2: start an even number of them")
    grid = init_device_mesh("cpu", (2, n // 2), mesh_dim_names=("outer", "inner"))
    line = init_device_mesh("cpu", (n,))
    torch.manual_seed(0)
    whole, x = _Net().double(), torch.randn(16, 8, dtype=torch.float64)
    cut = {"up": ColwiseParallel(), "down": RowwiseParallel()}  # the norm stays plain

    def tensor_parallel(net: nn.Module, mesh: DeviceMesh) -> nn.Module:
        return parallelize_module(net, mesh, cut, src_data_rank=None)

    layouts: dict[str, Callable[[nn.Module], nn.Module]] = {
        f"FSDP {n}": lambda net: fully_shard(net, mesh=line),
        f"HSDP 2 x {n // 2}": lambda net: fully_shard(net, mesh=grid),
        f"TP {n}": lambda net: tensor_parallel(net, line),
        f"FSDP 2 x TP {n // 2}": lambda net: fully_shard(tensor_parallel(net, grid["inner"]), mesh=grid["outer"]),
        f"PP 2 x FSDP {n // 2}": lambda net: fully_shard(net, mesh=grid["inner"]),
    }
    worst = 0.0
    for layout, shard in layouts.items():
        stages = (("norm", "up"), ("down",)) if layout.startswith("PP") else (("norm", "up", "down"),)
        mine = stages[grid.get_local_rank("outer") if len(stages) > 1 else 0]
        pp_mesh = grid["outer"] if len(stages) > 1 else None
        for p in (1.0, 2.0, math.inf):
            reference, net = deepcopy(whole), shard(deepcopy(whole))
            for model in (reference, net):
                model(x).backward()
            truth = nn.utils.clip_grad_norm_(reference.parameters(), 1.0, norm_type=p)
            parameters = {k: v for k, v in net.named_parameters() if k.split(".")[0] in mine}
            parts = (v.grad.to_local() if isinstance(v, DTensor) else v.grad for v in parameters.values())
            local = nn.utils.get_total_norm([part for part in parts if part.numel()], p)
            norm = clip_grad_norm_(parameters.values(), 1.0, pp_mesh, p)
            errors = [(norm - truth).abs() / truth]
            for name, v in parameters.items():
                grad, expected = v.grad, reference.get_parameter(name).grad
                grad = grad.full_tensor() if isinstance(grad, DTensor) else grad
                errors.append((grad - expected).norm() / expected.norm())
            error = torch.stack(errors).max()
            dist.all_reduce(error, dist.ReduceOp.MAX)
            worst = max(worst, error.item())
            if rank == 0:
                print(f"{layout:16} p = {p:<4} norm {norm:8.3f}  (local: {local:8.3f})  error {error:.1e}")
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0 if worst < 1e-10 else 1)  # a finished gloo process can abort in the interpreter's own exit


if __name__ == "__main__":
    demo()
