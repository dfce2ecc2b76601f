"""Initial weights that do not depend on the layout, without a full copy of the model anywhere.

A 70B model in float32 is 282 GB: no rank can build it first and shard it afterwards. So the model is built on the
meta device (shapes without memory), sharded there, and each rank then makes only its own shards real. The question
is what values go in. If every rank draws its shard from its own random generator, the model depends on the number of
ranks; if all draw from equal generators, all shards of a parameter are equal (what a DTensor does on a CPU mesh,
pytorch#138329). Two runs that should be equal then differ from step 0, and no parity test can find anything.

Here a parameter's values are a function of its name and the seed. Each rank, for one parameter after the other:

    name, seed ── sha256 ──> generator ── init ──> the full parameter ── slice ──> this rank's shard ──> device
                                                   (one at a time, then freed)

    33 rows, Shard(0) over 4 ranks            16 rows on a mesh [fsdp 2 x tp 2], (_StridedShard(0, 2), Shard(0)):
    rows  0 ..  8   rank 0                    rows  0 ..  3   fsdp 0 ┐ of tp 0      TP cuts first, by what the
    rows  9 .. 17   rank 1                    rows  4 ..  7   fsdp 1 ┘              arithmetic needs; FSDP cuts what
    rows 18 .. 26   rank 2                    rows  8 .. 11   fsdp 0 ┐ of tp 1      TP left to a rank
    rows 27 .. 32   rank 3, as torch.chunk    rows 12 .. 15   fsdp 1 ┘

so plain, tensor-parallel, FSDP2, HSDP and combined layouts, and each pipeline stage, start from bitwise the weights of
one process, with no message sent and no seed checkpoint read.

Memory      The rank's own shards, and for a moment one full parameter in float32, with the copy of the slice in hand:
            4·V·D bytes for the largest, 8.4 GB for the embedding of Llama 405B, in host memory.
Traffic     0 bytes.
Time        Every rank draws all N numbers, 1e8 a second on a CPU core: 0.1 s for 10 M parameters, 80 s for 8 B, 12
            minutes for 70 B. For those take draw_on="cuda": other values than on a CPU, again the same in every layout.
Use it      always, before the optimizer is built.
Not here    starting from a checkpoint (it fills the shards by itself), drawing only the slice (a CPU generator cannot
            jump ahead), bitwise equality between unlike CPUs (log and cos may round differently).
References  pytorch#138329 (equal shards), torchtitan#514 and #1750 (loss that depends on the layout), and the meta-device
            start of torch.distributed.fsdp.fully_shard.
"""

import hashlib
import logging
import os
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

Init = Callable[[str, Tensor, torch.Generator], None]


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    """The module that `build()` makes, with every tensor created in it on the meta device: shapes, no memory."""
    with torch.device("meta"):
        return build()


def generator_for(name: str, seed: int, device: torch.device | str = "cpu") -> torch.Generator:
    """The generator of one parameter. sha256 and not hash(): Python salts the latter anew in every process."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little"))


def default_init(name: str, tensor: Tensor, generator: torch.Generator) -> None:
    """For a model without an `init_parameter` of its own: 1-D weights 1, biases 0, all else normal with std 0.02."""
    kind = name.rpartition(".")[2]
    if kind == "bias" or kind in ("running_mean", "num_batches_tracked"):
        tensor.zero_()
    elif kind == "running_var" or (kind == "weight" and tensor.ndim == 1):
        tensor.fill_(1)
    else:
        tensor.normal_(0.0, 0.02, generator=generator)


def _clean(name: str) -> str:
    """The name before activation checkpointing and torch.compile wrapped the module."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


def shard_rows(n_rows: int, dim: int, sharded: DTensor) -> Tensor:
    """Which of the n_rows along tensor dimension `dim` this rank holds, as a 1-D index.

    The mesh axes cut one after the other, each as torch.chunk does: the last pieces may be smaller, or empty.
    _StridedShard(dim, split_factor) cuts every one of split_factor equal blocks, so that a later axis may still take
    one block each; a plain Shard is the same with one block.
    """
    rows = torch.arange(n_rows)
    for axis, placement in enumerate(sharded.placements):
        if placement.is_partial():
            raise ValueError(f"a parameter cannot be a sum still to be made, but has {sharded.placements}")
        if placement.is_replicate() or placement.dim != dim:
            continue
        n_ranks, coordinate = sharded.device_mesh.size(axis), sharded.device_mesh.get_local_rank(axis)
        pieces = [piece.chunk(n_ranks) for piece in rows.chunk(getattr(placement, "split_factor", 1))]
        rows = torch.cat([cut[coordinate] if coordinate < len(cut) else cut[0][:0] for cut in pieces])
    return rows


def _make_real(name: str, meta: Tensor, device: torch.device, seed: int, init: Init, draw_on: torch.device) -> Tensor:
    """A tensor like `meta` on `device`, this rank's part of it filled. The full one is freed on return."""
    real = torch.empty_like(meta, device=device)  # of a DTensor: the local shard only
    local = real.to_local() if isinstance(real, DTensor) else real
    full = torch.empty(meta.shape, dtype=torch.float32 if meta.is_floating_point() else meta.dtype, device=draw_on)
    init(name, full, generator_for(name, seed, draw_on))
    if isinstance(meta, DTensor):
        for dim in range(full.ndim):
            rows = shard_rows(full.shape[dim], dim, meta)
            if len(rows) < full.shape[dim]:
                full = full.index_select(dim, rows.to(draw_on))
    assert full.shape == local.shape, f"{name}: sliced {tuple(full.shape)}, but the shard is {tuple(local.shape)}"
    local.copy_(full)  # casts to the parameter's dtype
    return real


@torch.no_grad()
def materialize(
    model: nn.Module,
    device: torch.device | str,
    seed: int,
    init: Init | None = None,
    draw_on: torch.device | str = "cpu",
) -> nn.Module:
    """Makes a meta model real, in place, each rank its own shards; returns the model.

    model: plain, or after tensor parallel, FSDP2, HSDP or several of them, and after activation checkpointing or
    compile; ties between parameters are kept. Parameters become new objects: build the optimizer afterwards.
    init(name, full_tensor, generator): fills one full parameter (or meta buffer) in place; default
    `model.init_parameter`, else `default_init`. draw_on: where full parameters are drawn; the same on every rank.
    Buffers that are real already keep their values and move to `device`.

    Raises ValueError when a parameter is real already, or when `default_init` does not know a meta buffer.
    """
    device, draw_on = torch.device(device), torch.device(draw_on)
    places: dict[int, tuple[str, Tensor, list]] = {}  # by the tensor's identity, so that ties stay ties
    for prefix, module in model.named_modules(remove_duplicate=False):
        for attribute, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                name = _clean(f"{prefix}.{attribute}" if prefix else attribute)
                places.setdefault(id(tensor), (name, tensor, []))[2].append((module, attribute))

    parameters = [(name, t) for name, t, _ in places.values() if isinstance(t, nn.Parameter)]
    if real := [f"{name} ({t.device})" for name, t in parameters if not t.is_meta]:
        raise ValueError(
            f"{len(real)} of {len(parameters)} parameters are real already, {real[0]} first: drawing would overwrite them; "
            f"build the model with on_meta(...), and materialize it once"
        )
    if init is None:
        init = getattr(model, "init_parameter", default_init)
    known = ("running_mean", "running_var", "num_batches_tracked")
    buffers = [name for name, t, _ in places.values() if t.is_meta and not isinstance(t, nn.Parameter)]
    unknown = [name for name in buffers if name.rpartition(".")[2] not in known]
    if unknown and init is default_init:
        raise ValueError(
            f"{len(unknown)} of {len(buffers)} buffers on meta have a value that their name does not tell, {unknown[0]} "
            f"first: pass init=, a function that fills them too"
        )

    for name, tensor, owners in places.values():
        new = _make_real(name, tensor, device, seed, init, draw_on) if tensor.is_meta else tensor.to(device)
        if isinstance(tensor, nn.Parameter):
            new = nn.Parameter(new, requires_grad=tensor.requires_grad)
        for module, attribute in owners:
            setattr(module, attribute, new)
    return model


def demo() -> None:
    """On 4 ranks: every layout's weights against those of one process. torchrun --nproc-per-node 4 meta_init.py"""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    # full_tensor() of FSDP x TP needs two gathers and says so on every rank; here they are only the check.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    dist.init_process_group("gloo")
    rank, n_ranks = dist.get_rank(), dist.get_world_size()

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(12, 36), nn.Linear(36, 12), nn.Linear(12, 33, bias=False)).double()

    def tensor_parallel(model: nn.Module, mesh: dist.DeviceMesh) -> None:
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})

    def both(model: nn.Module, mesh: dist.DeviceMesh) -> None:
        tensor_parallel(model, mesh["tp"])
        fully_shard(model, mesh=mesh["dp"])

    layouts = {
        "plain": (lambda model, mesh: None, {"all": n_ranks}),
        "tensor parallel": (tensor_parallel, {"tp": n_ranks}),
        "FSDP2, 33 rows": (lambda model, mesh: fully_shard(model, mesh=mesh), {"dp": n_ranks}),
        "HSDP": (lambda model, mesh: fully_shard(model, mesh=mesh), {"replicate": 2, "dp": n_ranks // 2}),
        "FSDP2 x TP": (both, {"dp": n_ranks // 2, "tp": 2}),
    }
    one_process = dict(materialize(build().to("meta"), "cpu", seed=7).named_parameters())
    for layout, (apply, axes) in layouts.items():
        mesh = dist.init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
        model = on_meta(build)
        apply(model, mesh)
        materialize(model, "cpu", seed=7)
        error, bytes_here = 0.0, 0
        for name, p in model.named_parameters():
            is_sharded = isinstance(p, DTensor)
            bytes_here += (p.to_local() if is_sharded else p).nbytes
            full = p.full_tensor() if is_sharded else p
            error = max(error, (full - one_process[name]).abs().max().item())
        if rank == 0:
            print(f"{layout:16} {bytes_here:6,} bytes a rank, largest difference to one process {error:.1e}")
        assert error == 0.0, f"{layout}: {error}"
    dist.barrier()
    dist.destroy_process_group()
    print(end="", flush=True)
    os._exit(0)  # one gloo process in ten aborts while the interpreter ends


if __name__ == "__main__":
    demo()
