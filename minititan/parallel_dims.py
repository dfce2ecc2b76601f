"""Name the ranks: from one flat list of GPUs to axes that each do one job.

A job of N ranks is a list 0 .. N-1. Every technique splits a different thing, so each wants its own small groups
of ranks: tensor parallelism (tp) cuts the matrices, context parallelism (cp) the sequence, FSDP (dp_shard) the
parameters, plain data parallelism (dp_replicate) the batch only, pipelining (pp) the layers. Write the rank as a
number in mixed radix, one digit per axis, and the groups fall out: *ranks that differ in one digit only*.

    8 ranks = pp 1 × dp_replicate 2 × dp_shard 2 × cp 1 × tp 2          rank = ((r·2) + s)·2 + t

        replica r=0            replica r=1
      ┌──────┬──────┐        ┌──────┬──────┐
      │ 0  1 │ 2  3 │        │ 4  5 │ 6  7 │      tp: [0 1] [2 3] [4 5] [6 7]      neighbours, the fastest link
      └──────┴──────┘        └──────┴──────┘      dp_shard: [0 2] [1 3] [4 6] [5 7]
        s=0    s=1             s=0    s=1         dp_replicate: [0 4] [1 5] [2 6] [3 7]     far apart, rarely used

The order is the whole design. The last axis varies fastest, so its groups are neighbours inside one machine: tp,
which speaks several times in every layer, goes there. The first axis varies slowest, so its groups span machines:
pp, which sends one activation per microbatch, goes there.

Some jobs belong to several axes at once. These *views* are flattened from the axes, in the same order:

    view     axes                          who needs it
    dp       dp_replicate × dp_shard       the data loader: cp, tp and pp ranks read the same rows
    loss     dp_replicate × dp_shard × cp  sums of loss and tokens: everything that splits tokens
    fsdp     dp_shard × cp                 sharding parameters: cp ranks hold equal weights, so they share the load
    hsdp     dp_replicate, fsdp (2 axes)   the same inside each replica, gradients summed across replicas
    ep       the fast part of dp_shard × cp × tp, and efsdp the rest of it: where the experts of a MoE go.
             ep takes no ranks of its own; it borrows those three axes for the expert layers only.
    ehsdp    dp_replicate, efsdp (2 axes)  for experts what hsdp is for the rest

Cost: a mesh is only names, but each group is a communicator (NCCL: buffers on the GPU, and seconds at scale). The
groups of the five axes are made once. A view with a single axis larger than 1 *is* that axis, and views with the
same ranks share one group, so none is made twice. All are made at once and not at first use, because making a
group is a collective over all ranks: a stage that asks for a view that another does not ask for would hang the job.

Not here: which technique uses which axis (minititan/train.py), and where ranks physically are (the launcher fills a
machine with consecutive ranks; keep tp ≤ GPUs per machine).

References: the axes follow Megatron-LM (Narayanan et al. 2021, arXiv:2104.04473) and torchtitan (Liang et al. 2024,
arXiv:2410.06511); DeviceMesh: https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.device_mesh
"""

import math
import os
import sys
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")  # slowest-varying first
VIEWS = {
    "dp": ("dp_replicate", "dp_shard"),
    "loss": ("dp_replicate", "dp_shard", "cp"),
    "fsdp": ("dp_shard", "cp"),
    "hsdp": ("dp_replicate", "dp_shard", "cp"),  # the one view of two axes: dp_replicate and fsdp
}
BORROWED = ("dp_shard", "cp", "tp")  # what ep × efsdp is made of


@dataclass(frozen=True)
class ParallelDims:
    """How `world_size` ranks are split among the axes.

    Each degree is a positive number of ranks; one of the five axes may be -1 and takes what the others leave.
    After construction every degree is a number. `ep` is not a factor: it divides dp_shard × cp × tp.

    Raises ValueError, with all factors and a way out, for every combination that does not fill the world exactly.
    """

    dp_replicate: int = 1
    dp_shard: int = -1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    world_size: int | None = None
    _meshes: dict[str, DeviceMesh] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self):
        for name in (*AXES, "ep", "world_size"):
            self._check_number(name, getattr(self, name))
        open_axes = [name for name in AXES if getattr(self, name) == -1]
        if len(open_axes) > 1:
            raise ValueError(
                f"only one axis can be -1 (take the ranks that are left), not {' and '.join(open_axes)}: "
                f"{self._factors()} on {self.world_size} ranks. Give all but one of them a number."
            )
        if open_axes:
            taken = math.prod(getattr(self, name) for name in AXES if name not in open_axes)
            if self.world_size % taken:
                raise ValueError(self._does_not_fit(open_axes[0], taken))
            object.__setattr__(self, open_axes[0], self.world_size // taken)
        elif math.prod(self.shape) != self.world_size:
            raise ValueError(self._does_not_fit(None, math.prod(self.shape)))
        borrowed = math.prod(getattr(self, name) for name in BORROWED)
        if borrowed % self.ep:
            divisors = [d for d in range(1, borrowed + 1) if borrowed % d == 0]
            raise ValueError(
                f"ep={self.ep} does not divide the ranks that it borrows: dp_shard {self.dp_shard} × cp {self.cp} "
                f"× tp {self.tp} = {borrowed} (of {self._factors()} = {self.world_size} ranks). "
                f"Use an ep among {divisors}, or more of dp_shard, cp or tp."
            )

    # ------------------------------------------------------------------ the arithmetic, without any process group

    @property
    def shape(self) -> tuple[int, ...]:
        """Degrees in mesh order: pp, dp_replicate, dp_shard, cp, tp."""
        return tuple(getattr(self, name) for name in AXES)

    def size(self, name: str) -> int:
        """Ranks in each group of an axis or view (hsdp: of both its axes together)."""
        if name in ("ep", "efsdp"):
            borrowed = math.prod(getattr(self, axis) for axis in BORROWED)
            return self.ep if name == "ep" else borrowed // self.ep
        return math.prod(getattr(self, axis) for axis in self._axes_of(name))

    def coordinates(self, rank: int) -> dict[str, int]:
        """The digits of `rank`: its position on each of the five axes."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not one of the {self.world_size} ranks 0 .. {self.world_size - 1}")
        digits = {}
        for name, size in zip(reversed(AXES), reversed(self.shape), strict=True):
            rank, digits[name] = divmod(rank, size)
        return {name: digits[name] for name in AXES}

    def groups(self, name: str) -> list[list[int]]:
        """All groups of an axis or view: ranks that agree on every other axis, in the order of the group's ranks."""
        ranks = torch.arange(self.world_size)
        if name in ("ep", "efsdp"):
            cube, picked = ranks.view(-1, self.size("efsdp"), self.ep), [2 if name == "ep" else 1]
        else:
            cube, picked = ranks.view(self.shape), [AXES.index(axis) for axis in self._axes_of(name)]
        return cube.movedim(picked, list(range(-len(picked), 0))).reshape(-1, self.size(name)).tolist()

    def describe(self, max_ranks: int = 64) -> str:
        """Two tables: where each rank sits, and the groups of each axis and view. Needs no process group."""
        experts = f"; experts: ep {self.ep} × efsdp {self.size('efsdp')}" if self.ep > 1 else ""
        lines = [f"{self.world_size} ranks = {self._factors()}{experts}", "", "rank  " + "  ".join(AXES)]
        for rank in range(min(self.world_size, max_ranks)):
            at = self.coordinates(rank)
            lines.append(f"{rank:>4}  " + "  ".join(f"{at[name]:>{len(name)}}" for name in AXES))
        if self.world_size > max_ranks:
            lines.append(f" ...  {self.world_size - max_ranks} more ranks")
        lines += ["", f"{'groups':<14}size  ranks"]
        for name in (*AXES, *VIEWS, *(("ep", "efsdp") if self.ep > 1 else ())):
            groups, size = self.groups(name), str(self.size(name))
            if name == "hsdp" and self.dp_replicate > 1:
                size = f"{self.dp_replicate}×{self.size('fsdp')}"
            shown = "  ".join(_short(group) for group in groups[: 8 if len(groups) <= 8 else 3])
            more = f"  ... {len(groups)} groups" if len(groups) > 8 else ""
            lines.append(f"{name:<14}{size:>4}  {shown + more if self.size(name) > 1 else 'each rank alone'}")
        return "\n".join(lines)

    # ------------------------------------------------------------------------------------------- the real mesh

    def build_mesh(self, device_type: str) -> DeviceMesh:
        """Make all groups; every rank of the default process group calls this once.

        Returns the mesh of the five axes (axes of size 1 included), in the order of AXES. Raises ValueError when the
        default process group is missing or has another size than `world_size`.
        """
        if not dist.is_initialized():
            raise ValueError(
                f"a mesh of {self.world_size} ranks needs torch.distributed.init_process_group() first; "
                f"start {self.world_size} processes with torchrun --nproc-per-node {self.world_size}."
            )
        if dist.get_world_size() != self.world_size:
            raise ValueError(
                f"{self._factors()} was made for {self.world_size} ranks, but {dist.get_world_size()} are running: "
                f"make ParallelDims with world_size={dist.get_world_size()}, or start {self.world_size} ranks."
            )
        root = init_device_mesh(device_type, self.shape, mesh_dim_names=AXES)
        self._meshes.clear()
        self._meshes.update({name: root[name] for name in AXES})
        for name in ("dp", "loss", "fsdp"):
            self._meshes[name] = self._flat(root, VIEWS[name])
        # Flattened meshes cannot be sliced out of the root by name (deprecated in torch 2.11), so the two-axis view
        # is put together from its parts, as fully_shard itself does.
        self._meshes["hsdp"] = DeviceMesh._concatenate([root["dp_replicate"], self._meshes["fsdp"]])
        if self.ep > 1:
            block = self._flat(root, BORROWED)
            experts = block._unflatten(0, (block.size() // self.ep, self.ep), ("efsdp", "ep"))
            self._meshes.update(ep=experts["ep"], efsdp=experts["efsdp"])
            self._meshes["ehsdp"] = DeviceMesh._concatenate([root["dp_replicate"], experts["efsdp"]])
        return root

    def axis(self, name: str) -> DeviceMesh:
        """The mesh of an axis or view that this rank is in; ready for fully_shard, parallelize_module, DTensor.

        All share one root mesh, which is what FSDP over one and TP over another of them needs. A view that has only
        one axis larger than 1 is that axis, under the axis's own name.
        """
        if name in self._meshes:
            return self._meshes[name]
        known = (*AXES, *VIEWS, "ep", "efsdp", "ehsdp")
        if name not in known:
            raise ValueError(f"no axis or view {name!r}; there are {', '.join(known)}")
        if not self._meshes:
            raise ValueError(f"axis({name!r}) before build_mesh(), which makes the groups, on all ranks at once.")
        raise ValueError(
            f"ep is 1, so there is no {name!r}: experts are then sharded like all other layers (axis 'fsdp'). "
            f"Set ep to a divisor of dp_shard × cp × tp = {self.size('efsdp')}."
        )

    # ------------------------------------------------------------------------------------------------- helpers

    def _flat(self, root: DeviceMesh, axes: tuple[str, ...]) -> DeviceMesh:
        wide = tuple(name for name in axes if root[name].size() > 1)
        if len(wide) < 2:
            return root[wide[0] if wide else axes[-1]]
        return root[wide]._flatten("_".join(wide))  # the same axes again: torch returns the same mesh

    def _axes_of(self, name: str) -> tuple[str, ...]:
        if name not in (*AXES, *VIEWS):
            raise ValueError(f"no axis or view {name!r}; there are {', '.join((*AXES, *VIEWS))}, ep, efsdp")
        return VIEWS.get(name, (name,))

    def _factors(self) -> str:
        return " × ".join(f"{name} {getattr(self, name)}" for name in AXES)

    def _check_number(self, name: str, value: object) -> None:
        if name == "world_size" and value is None:
            raise ValueError(
                f"world_size is missing: give the number of ranks that {self._factors()} is to fill, "
                f"for example world_size=torch.distributed.get_world_size()."
            )
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(
                f"{name}={value!r} is a {type(value).__name__}, and a number of ranks is an int "
                f"({self._factors()}, ep {self.ep}, world_size {self.world_size})."
            )
        if value == -1 and name in AXES:
            return
        if value < 1:
            fill = "; -1 lets one axis take the ranks that are left" if name in AXES else ""
            borrow = "; ep borrows ranks and cannot be filled by -1" if name == "ep" and value == -1 else ""
            raise ValueError(
                f"{name}={value} must be at least 1{fill}{borrow} "
                f"({self._factors()}, ep {self.ep}, world_size {self.world_size})."
            )

    def _does_not_fit(self, open_axis: str | None, taken: int) -> str:
        """The message for degrees that do not fill the world, with one degree that could be changed to fit it."""
        given = [name for name in AXES if name != open_axis]
        product = " × ".join(f"{name} {getattr(self, name)}" for name in given)
        if open_axis:
            problem = f"{open_axis}=-1 cannot be filled: {product} = {taken} ranks, which does not divide"
            remedies = [f"start a multiple of {taken} ranks"]
            candidates = sorted(given, key=lambda name: -getattr(self, name))  # lower the largest
        else:
            problem = f"{product} = {taken} ranks, which is not"
            remedies = [f"start {taken} ranks"]
            candidates = ("dp_shard", "dp_replicate", "cp", "tp", "pp")  # the easiest to change first
        for name in candidates:
            degree, others = getattr(self, name), taken // getattr(self, name)
            fits = [d for d in range(1, self.world_size + 1) if self.world_size % (others * d) == 0]
            if open_axis and fits and fits[0] < degree:
                best = max(d for d in fits if d < degree)
                left = self.world_size // (others * best)
                remedies.append(f"lower {name} to {best} ({open_axis} is then {left})")
                break
            if not open_axis and fits:
                remedies.append(f"set {name}={fits[-1]}")
                break
        else:
            remedies.append(f"choose degrees whose product divides {self.world_size}")
        remedy = ", or ".join(remedies)
        return f"{problem} the {self.world_size} ranks there are (world_size). Remedy: {remedy}."


def _short(ranks: list[int]) -> str:
    """[0 1 2 3], and longer groups as their first members, step and last: [0 8 16 .. 504]."""
    shown = ranks if len(ranks) <= 8 else [*ranks[:3], "..", ranks[-1]]
    return "[" + " ".join(map(str, shown)) + "]"


def demo() -> None:
    """Every group of the real mesh against the plain arithmetic of one process, for several layouts."""
    on_gpus = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device_type = "cuda" if on_gpus else "cpu"
    dist.init_process_group("nccl" if on_gpus else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    layouts = [{"dp_shard": -1}]
    if world % 2 == 0:
        layouts += [{"tp": 2}, {"dp_replicate": 2}, {"cp": 2, "ep": 2}, {"pp": 2, "tp": -1, "dp_shard": 1}]
    wrong = 0
    for layout in layouts:
        dims = ParallelDims(**layout, world_size=world)
        dims.build_mesh(device_type)
        for name in (*AXES, *VIEWS, *(("ep", "efsdp") if dims.ep > 1 else ())):
            mesh, mine = dims.axis(name), next(group for group in dims.groups(name) if rank in group)
            wrong += mesh.mesh.flatten().tolist() != mine
            if mesh.ndim == 1:  # names are not enough: does the group join exactly these ranks, in this order?
                total = torch.tensor(2**rank, device=device_type)
                dist.all_reduce(total, group=mesh.get_group())
                wrong += int(total) != sum(2**member for member in mine)
                wrong += mesh.get_local_rank() != mine.index(rank)
        if rank == 0:
            print(dims.describe(), end="\n\n")
    count = torch.tensor(wrong, device=device_type)
    dist.all_reduce(count)
    if rank == 0:
        print(f"{len(layouts)} layouts on {world} ranks: {int(count)} groups differ from the arithmetic")
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(int(count > 0))  # not sys.exit: about one in ten finished gloo processes aborts in its teardown


if __name__ == "__main__":
    demo()
