"""Fully sharded data parallel: every rank keeps 1/n of the model and borrows the rest, one block at a time.

Data parallel copies parameters, gradients and optimizer state to every rank, although a step needs the whole
of a block only while that block computes. So each rank keeps its rows of every parameter; a block is gathered
just before it runs and freed just after, in forward and again in backward, and its gradient leaves at once:
averaged over the ranks, each rank keeping its rows.

    at rest             rank 0 [rows 0-8]  rank 1 [rows 9-17]  rank 2 [rows 18-26]  rank 3 [rows 27-32, 0 0 0]
    block's forward     all-gather: every rank holds all 33 rows -> compute -> free
    block's backward    all-gather: 33 rows again -> gradient of 33 rows -> free the parameters
                        reduce-scatter / n: 9 rows of the mean gradient on each rank -> free the rest
    optimizer           each rank updates its own rows: its state is sharded without doing anything

    time   gather 0 . fwd 0 . gather 1 . fwd 1 . ... . gather 1 . bwd 1 . scatter 1 . gather 0 . bwd 0 . scatter 0
    whole  block 0            block 1                  block 1                        block 0

Cost, with P the bytes of all parameters, B of the largest block, R of the root's own (embedding, norm, output),
n ranks, A microbatches a step, AdamW in the parameters' dtype:

    held by a rank      parameters       gradients     AdamW       sent by a rank, times (n-1)/n
    DDP                 P                P             2 P         2 P
    ZeRO-1              P                P             2 P/n       2 P
    ZeRO-2              P                P/n + B       2 P/n       (A + 1) P
    ZeRO-3 = FSDP       P/n + R + B      P/n + R + B   2 P/n       A (3 P - R)

The root is gathered once a microbatch, as the last thing forward uses is the first that backward needs: with L
blocks, 2L+1 all-gathers and L+1 reduce-scatters. For an instant the receive buffer doubles a gathered block.
HSDP shards within a group and replicates across groups: n is the group, and an all-reduce of P/n crosses groups.

Stages 1 and 2 (`ZeroByHand`) keep the model and cut only what belongs to an update: the optimizer is elementwise, so
a rank that updates its rows needs the state, and the mean gradient, of its rows alone; then all gather the rest.

FSDP1 cut a block as one flat vector (`FlatParameterByHand`): nothing to copy after a gather, but a piece begins
inside one weight's row and ends inside another's. FSDP2 cuts each parameter by rows: a shard keeps shape, name
and dtype, and can be frozen, decayed or saved alone.

Use it when 16 bytes a parameter (fp32, AdamW) do not fit a device, and batches are large enough that a block's
compute hides the gather of the next (`prefetch`). Not by hand: overlap, mixed precision, offload, tensor-parallel
parameters; `apply_fsdp` has them from torch's `fully_shard`. All expect equal initial weights on all ranks and a batch
of its own on each.

References: ZeRO https://arxiv.org/abs/1910.02054 · PyTorch FSDP https://arxiv.org/abs/2304.11277 ·
FSDP2 https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
Legend: n ranks that shard, k rows (or numbers) of a rank, axis = of a mesh, dim = of a tensor.
"""

import os
from collections.abc import Iterable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

# torch 2.13 renamed all_gather_into_tensor and reduce_scatter_tensor, and warns of the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


def _default_blocks(module: nn.Module) -> list[nn.Module]:
    found = []
    for child in module.children():
        is_block = isinstance(module, _CONTAINERS) and not isinstance(child, _CONTAINERS)
        found += [child] if is_block else _default_blocks(child)
    return found


def _find_units(model: nn.Module, blocks: Iterable[nn.Module] | None) -> dict[nn.Module, dict[Tensor, list]]:
    """Each block, and `model` for the rest -> its parameters -> [(module, attribute, full name)], several if tied."""
    blocks = _default_blocks(model) if blocks is None else [*blocks, model]
    if not blocks:
        raise ValueError(
            f"found 0 blocks: {type(model).__name__} has no ModuleList or ModuleDict. Pass blocks=[...], or "
            "blocks=[] to gather the whole model at once"
        )
    units = {module: {} for module in model.modules() if module is model or module in blocks}
    if strangers := [type(block).__name__ for block in blocks if block not in units]:
        raise ValueError(f"{len(strangers)} blocks are not inside {type(model).__name__}: {strangers}")
    owner, first = {}, {}
    for path, module in model.named_modules(remove_duplicate=False):
        owner[path] = module if module in units else owner[path.rpartition(".")[0]]
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            name = f"{path}.{attribute}".removeprefix(".")
            unit, first_name = first.setdefault(parameter, (owner[path], name))
            if unit is not owner[path]:
                raise ValueError(
                    f"{first_name} and {name} are 1 parameter in 2 blocks, and each would free it under the other: "
                    "leave both modules out of `blocks`, so that the root keeps it"
                )
            if parameter.dim() == 0:
                raise ValueError(f"{name} has shape (), so 0 rows to cut: give it shape (1,)")
            units[unit].setdefault(parameter, []).append((module, attribute, name))
    return units


def _check_axes(mesh: DeviceMesh) -> None:
    if mesh.ndim > 2:
        raise ValueError(
            f"the mesh has {mesh.ndim} axes, {mesh.mesh_dim_names} of {mesh.shape}: give the 1 axis to shard over, "
            "or 2, to replicate and to shard over, as in mesh['dp_replicate', 'dp_shard']"
        )


# ---- by hand --------------------------------------------------------------------------------------------------


def _with_rows(tensor: Tensor, n_rows: int) -> Tensor:
    """`tensor`, or if it is shorter a copy with rows of 0 at the end."""
    missing = n_rows - len(tensor)
    return F.pad(tensor, [0, 0] * (tensor.dim() - 1) + [0, missing]) if missing else tensor.contiguous()


class ZeroByHand:
    """ZeRO-1 and 2: a rank holds all parameters, updates k rows of each, and has optimizer state for those only.

        zero = ZeroByHand(model, mesh, stage=2)
        optimizer = zero.attach(torch.optim.AdamW(zero.rows))      # then forward, backward, step, zero_grad as ever

    mesh: a ProcessGroup or 1-axis DeviceMesh. `zero.rows` are views of the parameters; in a step their `.grad` is the
    mean over the ranks. stage 1: whole gradients add up on each rank until `step`, or until `reduce()`, before a clip.
    stage 2: each gradient leaves as soon as backward has it. All ranks must use the same parameters.
    Raises ValueError: any other stage, a mesh of 2 axes, a parameter of shape ().
    """

    def __init__(self, model: nn.Module, mesh, stage: int):
        if stage not in (1, 2):
            raise ValueError(f"stage={stage!r}: 1 cuts optimizer state, 2 gradients too; 3 is FullyShardByHand")
        if isinstance(mesh, DeviceMesh):
            if mesh.ndim > 1:
                raise ValueError(f"the mesh has {mesh.ndim} axes, {tuple(mesh.shape)}: give the 1 axis to cut over")
            mesh = mesh.get_group()
        self.group, self.n, rank = mesh, dist.get_world_size(mesh), dist.get_rank(mesh)
        self.rows_of, self.names = {}, []
        for p, places in _find_units(model, blocks=[])[model].items():
            if p.requires_grad:
                k = -(-len(p) // self.n)
                self.rows_of[p] = nn.Parameter(p.detach()[rank * k :][:k])  # may be fewer than k, or none
                self.names.append(places[0][2])
        self.rows = [*self.rows_of.values()]
        if stage == 2:
            for p in self.rows_of:
                p.register_post_accumulate_grad_hook(self.reduce_one)

    def attach(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        optimizer.register_step_pre_hook(lambda *_: self.reduce())
        optimizer.register_step_post_hook(lambda *_: self.gather_parameters())
        return optimizer

    def reduce(self) -> None:
        for p in self.rows_of:
            if p.grad is not None:
                self.reduce_one(p)

    @torch.no_grad()
    def reduce_one(self, p: nn.Parameter) -> None:
        """A whole gradient leaves; this rank's rows of the mean are added to what earlier microbatches left."""
        rows, k = self.rows_of[p], -(-len(p) // self.n)
        mean = p.new_empty(k, *p.shape[1:])
        _reduce_scatter(mean, _with_rows(p.grad, self.n * k), group=self.group)
        mean = mean.div_(self.n)[: len(rows)]
        rows.grad = mean if rows.grad is None else rows.grad.add_(mean)
        p.grad = None

    def gather(self, p: nn.Parameter, rows: Tensor) -> Tensor:
        k = -(-len(p) // self.n)
        whole = p.new_empty(self.n * k, *p.shape[1:])
        _all_gather(whole, _with_rows(rows, k), group=self.group)
        return whole[: len(p)]

    @torch.no_grad()
    def gather_parameters(self) -> None:
        for p, rows in self.rows_of.items():
            p.copy_(self.gather(p, rows))

    @torch.no_grad()
    def whole(self, gradients: bool = False) -> dict[str, Tensor]:
        """Name -> whole parameter, or whole mean gradient of the step under way. All ranks must call it."""
        found = zip(self.names, self.rows_of.items(), strict=True)
        if not gradients:
            return {name: p.detach().clone() for name, (p, _) in found}
        self.reduce()
        return {name: self.gather(p, rows.grad) for name, (p, rows) in found if rows.grad is not None}


class _GatherAndReduce(torch.autograd.Function):
    """Shards in, whole parameters out; in backward whole gradients in, this rank's rows of their mean out.

    The block's inputs pass through, so that backward gets here only when all of the block is done, frozen or
    not. Outputs share the storage of `whole` but not its version counter: to autograd, gathering again must not
    look like a change of what it saved.
    """

    @staticmethod
    def forward(ctx, unit, whole, n_inputs, *inputs_and_shards):
        ctx.unit, ctx.whole, ctx.n_inputs = unit, whole, n_inputs
        ctx.set_materialize_grads(False)
        outputs = [w.data for w in whole]
        frozen = [o for o, s in zip(outputs, unit.shards, strict=True) if not s.requires_grad]
        ctx.mark_non_differentiable(*frozen)
        return *inputs_and_shards[:n_inputs], *outputs

    @staticmethod
    def backward(ctx, *grads):
        ctx.unit.place(ctx.unit.at_rest)
        ctx.unit.free(ctx.whole)
        return None, None, None, *grads[: ctx.n_inputs], *ctx.unit.reduce(grads[ctx.n_inputs :])


class _Unit:
    """The parameters of one block, or the root's own: gathered, freed and reduced together."""

    def __init__(self, module, parameters, shard_group, replicate_group, free_after_forward):
        self.shard_group, self.replicate_group = shard_group, replicate_group
        self.n, self.rank = dist.get_world_size(shard_group), dist.get_rank(shard_group)
        self.copies = self.n * (dist.get_world_size(replicate_group) if replicate_group else 1)
        self.places, self.free_after_forward, self.calls = [*parameters.values()], free_after_forward, []
        self.shards = self.cut(module, [*parameters])
        self.place(self.at_rest)
        module.register_forward_pre_hook(self.before_forward, with_kwargs=True)
        module.register_forward_hook(self.after_forward)

    def cut(self, module, parameters):
        """Rank r keeps rows r*k to r*k + k of each; rows past the end are 0 and stay 0, as their gradient is 0."""
        self.lengths, self.at_rest = [len(p) for p in parameters], []
        for p in parameters:
            k = -(-len(p) // self.n)
            padded = _with_rows(p.detach(), self.n * k)
            self.at_rest.append(nn.Parameter(padded[self.rank * k :][:k].clone(), p.requires_grad))
        return self.at_rest

    def views(self, whole):
        """Gathered tensors -> parameters. Where this cuts padding off, autograd pads the gradient."""
        return [w if len(w) == length else w[:length] for w, length in zip(whole, self.lengths, strict=True)]

    def room_for(self, shard):
        return shard.new_empty(self.n * len(shard), *shard.shape[1:])

    def gather(self, shards, out=None):
        out = out or self.free([self.room_for(s) for s in shards])  # born as after a free
        for whole in out:
            whole.untyped_storage().resize_(whole.nbytes)
        if len(shards) == 1:
            _all_gather(out[0], shards[0].detach(), group=self.shard_group)
            return out
        send = torch.cat([s.detach().flatten() for s in shards])  # one collective, not one per parameter
        receive_nk = send.new_empty(self.n, len(send))
        _all_gather(receive_nk.view(-1), send, group=self.shard_group)
        for whole, piece_nk in zip(out, receive_nk.split([s.numel() for s in shards], dim=1), strict=True):
            whole.view(self.n, -1).copy_(piece_nk)
        return out

    def free(self, whole):
        for tensor in whole:
            tensor.untyped_storage().resize_(0)  # autograd still holds the tensor, but no memory
        return whole

    def reduce(self, grads):
        trained = [(s, g) for s, g in zip(self.shards, grads, strict=True) if s.requires_grad]
        if not trained:
            return [None] * len(grads)
        filled = [self.room_for(s).zero_() if g is None else g for s, g in trained]
        parts = [g.reshape(self.n, -1) for g in filled]
        mean_k = self.sum_and_scatter(parts[0] if len(parts) == 1 else torch.cat(parts, dim=1))
        if self.replicate_group:
            dist.all_reduce(mean_k, group=self.replicate_group)
        pieces = iter(mean_k.div_(self.copies).split([s.numel() for s, _ in trained]))
        return [next(pieces).view_as(s).to(s.dtype) if s.requires_grad else None for s in self.shards]

    def sum_and_scatter(self, send_nk):
        sum_k = send_nk.new_empty(send_nk.shape[1])
        _reduce_scatter(sum_k, send_nk.view(-1), group=self.shard_group)
        return sum_k

    def place(self, tensors):
        for tensor, places in zip(tensors, self.places, strict=True):
            for module, attribute, _ in places:
                module._parameters[attribute] = tensor

    def before_forward(self, module, args, kwargs):
        whole = self.gather(self.shards)
        leaves, spec = tree_flatten((args, kwargs))
        at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
        outputs = _GatherAndReduce.apply(self, whole, len(at), *[leaves[i] for i in at], *self.shards)
        for i, leaf in zip(at, outputs, strict=False):
            leaves[i] = leaf
        views = self.views(outputs[len(at) :])
        self.calls.append((whole, views))
        self.place(views)
        return tree_unflatten(leaves, spec)

    def after_forward(self, module, args, output):
        whole, views = self.calls.pop()
        self.place(self.at_rest)

        def before_backward(_):
            if whole[0].untyped_storage().size() == 0:
                self.gather(self.shards, out=whole)
            self.place(views)  # activation checkpointing runs forward from here

        needs_backward = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
        for tensor in needs_backward:
            tensor.register_hook(before_backward)
        if self.free_after_forward or not needs_backward:
            self.free(whole)


class FullyShardByHand:
    """Shards `model` in place: then `model(x)`, `backward()` and an optimizer over `model.parameters()` as ever.

    mesh: a ProcessGroup or 1-axis DeviceMesh to shard over; of 2 axes, the first replicates (HSDP). blocks: as in
    `apply_fsdp`. reshard_after_forward=False: blocks stay gathered until their backward, and are not gathered again.
    `model.parameters()` become this rank's k rows, their `.grad` the rows of the mean over all ranks. Raises ValueError: 0 blocks, a parameter of shape () or tied across blocks, a mesh of 3 axes.
    """

    unit = _Unit

    def __init__(
        self, model: nn.Module, mesh, blocks: Iterable[nn.Module] | None = None, reshard_after_forward: bool = True
    ):
        groups = mesh, None
        if isinstance(mesh, DeviceMesh):
            _check_axes(mesh)
            groups = mesh.get_group(mesh.ndim - 1), mesh.get_group(0) if mesh.ndim == 2 else None
        units = _find_units(model, blocks).items()
        self.units = [
            self.unit(block, owned, *groups, free_after_forward=reshard_after_forward and block is not model)
            for block, owned in units
            if owned
        ]

    @torch.no_grad()
    def whole(self, gradients: bool = False) -> dict[str, Tensor]:
        """Name -> whole parameter, or whole mean gradient (0 where there is none). All ranks must call it."""
        result = {}
        for unit in self.units:
            shards = unit.shards
            if gradients:
                shards = [torch.zeros_like(s) if s.grad is None else s.grad for s in shards]
            result |= zip([p[0][2] for p in unit.places], unit.views(unit.gather(shards)), strict=True)
        return result


class _FlatUnit(_Unit):
    def cut(self, module, parameters):
        """All parameters end to end are one vector; a rank keeps k of its numbers, wherever the cuts fall."""
        kinds = {(p.dtype, p.requires_grad) for p in parameters}
        if len(kinds) > 1:
            raise ValueError(
                f"a flat parameter has 1 dtype and 1 requires_grad, but {type(module).__name__} has {len(kinds)} "
                f"such pairs, {kinds}: use FullyShardByHand, or blocks that do not mix them"
            )
        self.shapes = [p.shape for p in parameters]
        flat = nn.Parameter(torch.cat([p.detach().flatten() for p in parameters]), kinds.pop()[1])
        shards, self.at_rest = super().cut(module, [flat]), [None] * len(parameters)
        module.register_parameter("flat_parameter", shards[0])
        return shards

    def views(self, whole):
        pieces = super().views(whole)[0].split([shape.numel() for shape in self.shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, self.shapes, strict=True)]


class FlatParameterByHand(FullyShardByHand):
    """The same with one flat vector a block, as FSDP1 had it: nothing to copy after a gather.

    The price: a block has one dtype and is frozen or trained as one (else ValueError); `model.parameters()` are
    one `flat_parameter` a block; to decay, measure or save one weight of it takes a map and the other ranks.
    """

    unit = _FlatUnit


# ---- native ---------------------------------------------------------------------------------------------------


def apply_fsdp(
    model: nn.Module,
    mesh: DeviceMesh,
    blocks: Iterable[nn.Module] | None = None,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    reshard_after_forward: bool | int | None = None,
    cpu_offload: bool = False,
) -> nn.Module:
    """Shards `model` in place with torch's `fully_shard`, each block and then the rest; returns it.

    mesh: 1 axis to shard over; of 2, the first replicates (HSDP). Gradients are the mean over all of it.
    blocks: modules to gather one at a time; default, the children of each outermost ModuleList and ModuleDict.
    param_dtype: of gathers and compute, while the optimizer keeps the model's. reduce_dtype: of the reduce-scatter;
    default, with a param_dtype, at least float32, so that n gradients are not added up in bf16.
    reshard_after_forward: True frees, False keeps until backward, an int m keeps 1/m, which backward gathers from
    m neighbours; None is True for blocks and False for the root.
    cpu_offload: shards, gradients and optimizer live on the CPU, and so does a norm ("cpu:gloo,cuda:nccl").
    A model on meta is fine; so is a tensor-parallel one (FSDP comes last). Raises ValueError before any change.
    """
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(f"mesh is a {type(mesh).__name__}: make it init_device_mesh('cuda', (n,))")
    _check_axes(mesh)
    if mesh.ndim == 2 and not mesh.mesh_dim_names:
        raise ValueError(f"2 axes of {mesh.shape} need names: mesh_dim_names=('dp_replicate', 'dp_shard')")
    for name, dtype in {"param_dtype": param_dtype, "reduce_dtype": reduce_dtype}.items():
        if dtype is not None and not (dtype.is_floating_point and dtype.itemsize >= 2):
            raise ValueError(f"{name}={dtype} cannot carry gradients: use a float of 16 bits or more")
    n, reshard = mesh.size(mesh.ndim - 1), reshard_after_forward
    parts = [m for m in range(2, n + 1) if n % m == 0]
    if not (reshard is None or isinstance(reshard, bool) or reshard in parts):
        raise ValueError(
            f"reshard_after_forward={reshard!r} does not divide the {n} ranks that shard: use one of {parts}, "
            "True to free, False to keep, or None"
        )
    units = _find_units(model, blocks)
    if sharded := [type(module).__name__ for module in units if isinstance(module, FSDPModule)]:
        raise ValueError(
            f"{len(sharded)} of {len(units)} units are sharded already, as a {sharded[-1]}: call this once"
        )
    if param_dtype and not reduce_dtype:
        reduce_dtype = torch.promote_types(param_dtype, torch.float32)
    on_gpu = mesh.device_type == "cuda"
    options = {
        "mesh": mesh,
        "reshard_after_forward": reshard,
        "mp_policy": MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype),
        "offload_policy": CPUOffloadPolicy(pin_memory=on_gpu) if cpu_offload else OffloadPolicy(),
    }
    for module in reversed(units):  # children first: a call takes every parameter that no one has taken
        if units[module] or module is model:
            fully_shard(module, **options)
    return model


def prefetch(model: nn.Module, n: int = 1) -> None:
    """While a block computes, the parameters of the next `n` travel: forward in order, backward in the other.

    model: from `apply_fsdp`, whose blocks run in the order of `model.modules()`. Holds `n` blocks more; 0 takes it back.
    With CUDA's streams, 1 is what happens anyway as long as the CPU runs ahead of the GPU; on gloo, where a gather
    blocks the CPU, nothing overlaps without this, and reduce-scatters never do. Raises ValueError: n < 0, no FSDP.
    """
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]  # the root first
    if not units or n < 0:
        raise ValueError(f"prefetch n={n} of {len(units)} sharded modules: n is at least 0, after apply_fsdp")
    for i, unit in enumerate(units):
        before = units[max(i - n, 1) : i] if i else units[len(units) - n :] if n else []
        unit.set_modules_to_forward_prefetch(units[i + 1 : i + 1 + n])
        unit.set_modules_to_backward_prefetch(before[::-1])  # the root's backward is the first to begin
    if next(model.parameters()).device_mesh.device_type == "cpu":
        units[0]._set_unshard_async_op(n > 0)


# ---- the proof ------------------------------------------------------------------------------------------------


class _Net(nn.Module):
    """33 rows, which 4 ranks do not divide, and 3 rows, which 4 ranks cannot share."""

    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList([nn.Linear(33, 33) for _ in range(4)]), nn.Linear(33, 3)

    def forward(self, x_BD):
        for layer in self.layers:
            x_BD = x_BD + torch.tanh(layer(x_BD))
        return self.head(x_BD)


def demo(steps: int = 3, accumulate: int = 2) -> None:
    """ZeRO 1, 2, 3 by hand == flat == native == one process: losses and gradients of some AdamW steps in float64."""
    on_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
    dist.init_process_group("nccl" if on_gpus else "gloo", device_id=device if on_gpus else None)
    rank, n = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (n,))
    torch.manual_seed(0)
    x_SABD = torch.randn(steps, accumulate, 2 * n, 33, dtype=torch.float64).to(device)

    def train(way, rows: slice) -> list[Tensor]:
        torch.manual_seed(1)
        model = _Net().to(device, torch.float64)
        handle = way(model, mesh) if way else None
        zero = isinstance(handle, ZeroByHand)
        optimizer = torch.optim.AdamW(handle.rows if zero else model.parameters(), lr=1e-2)
        if zero:
            handle.attach(optimizer)
        seen = []
        for x_ABD in x_SABD[:, :, rows]:
            for x_BD in x_ABD:
                loss = model(x_BD).logsumexp(dim=1).mean() / accumulate
                loss.backward()
                seen.append(loss.detach())
            if isinstance(handle, ZeroByHand | FullyShardByHand):
                grads = handle.whole(gradients=True)
            else:
                grads = {name: p.grad for name, p in model.named_parameters()}
            seen += [g.full_tensor() if hasattr(g, "full_tensor") else g for _, g in sorted(grads.items())]
            optimizer.step()
            optimizer.zero_grad()
        return seen

    reference = train(None, slice(None))
    ways = {f"ZeroByHand, stage {stage}": lambda *a, stage=stage: ZeroByHand(*a, stage) for stage in (1, 2)}
    ways |= {way.__name__: way for way in (FullyShardByHand, FlatParameterByHand, apply_fsdp)}
    for name, way in ways.items():
        worst = {"loss": 0.0, "gradient": 0.0}
        for ours, theirs in zip(train(way, slice(2 * rank, 2 * rank + 2)), reference, strict=True):
            kind = "gradient" if ours.dim() else "loss"
            if kind == "loss":
                dist.all_reduce(ours.div_(n))
            worst[kind] = max(worst[kind], ((ours - theirs).norm() / theirs.norm()).item())
        if rank == 0:
            print(f"{name:20} against one process:", *(f"{k} {e:.1e}" for k, e in worst.items()))
        if not max(worst.values()) < 1e-10:
            raise SystemExit(f"{name} differs from one process by {worst}, more than 1e-10")
    dist.barrier()
    dist.destroy_process_group()
    print(end="", flush=True)
    os._exit(0)  # about one finished gloo process in ten aborts while the interpreter exits


if __name__ == "__main__":
    demo()
