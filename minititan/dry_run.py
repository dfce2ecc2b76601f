"""A step on 512 ranks, on one CPU: the real parallelised model of one rank, with nothing in its tensors.

    python -m minititan.train --dry-run --world-size 512 --preset llama3-405b --parallel.dp-shard 4 --parallel.tp 8 \
        --parallel.pp 16 --accumulate 16 --global-batch 64 --seq-len 8192

    train's own Job:  on meta ─▶ tensor parallel ─▶ .. ─▶ FSDP     512 ranks of torch's "fake" process group, which
                          │                                        sends nothing and answers at once
                          ▼
    fake tensors:     shape, dtype, device, and who is alive; no bytes. Forward, backward, optimizer run on them: each
                      operator that would run does, each collective is counted, each storage has a birth and an end.

What it tells is what this rank would hold and send, exactly, before a GPU is asked for. What it cannot tell: time, the
allocator's gaps, buffers inside of NCCL, and what depends on values: experts' loads (refused). A pipeline's actions are
those of its plan; halves of a split backward run as one, with the first.
"""

import warnings
import weakref
from collections import Counter
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minititan.parallel_dims import AXES, ParallelDims
from minititan.pipeline_parallel import _stages
from minititan.train import Job, TrainConfig, check

# Of a collective's whole tensor, what each of n ranks sends on a ring.
_SENT = {
    "all_reduce": lambda n: 2 * (n - 1) / n, "all_gather": lambda n: (n - 1) / n, "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n, "broadcast": lambda n: 1, "send": lambda n: 1, "recv": lambda n: 0,
}  # fmt: skip


@dataclass(frozen=True)
class DryRun:
    """What one rank would hold and send. Bytes."""

    layout: str
    rank: int
    place: dict[str, int]  # on each axis
    held: dict[str, int]  # parameters, gradients, optimizer: at rest, after a step
    peak: dict[
        str, int
    ]  # when most is held; `other`: activations, logits, gathered parameters and gradients not yet cut
    collectives: dict[str, dict[str, tuple[int, int]]]  # axis -> name -> (calls, bytes sent)

    def __str__(self) -> str:
        gib = 1024**3
        place = ", ".join(f"{axis} {i}" for axis, i in self.place.items())
        lines = [f"{self.layout}: rank {self.rank} ({place})"]
        lines += [f"  at rest  {kind:12} {n:>18,} bytes {n / gib:9.2f} GiB" for kind, n in self.held.items()]
        lines += [f"  at peak  {kind:12} {n:>18,} bytes {n / gib:9.2f} GiB" for kind, n in self.peak.items()]
        for axis, calls in self.collectives.items():
            for name, (count, sent) in calls.items():
                lines.append(f"  {axis:12} {name:14} {count:>7,} calls in a step send {sent / gib:9.2f} GiB")
        return "\n".join(lines)


class _Watch(TorchDispatchMode):
    """Counts collectives by axis, and the bytes of storages that are alive."""

    def __init__(self, axis_of: dict[str, str]):
        super().__init__()
        self.axis_of, self.calls, self.sent = axis_of, Counter(), Counter()
        self.alive, self.seen, self.on_growth = 0, weakref.WeakSet(), lambda: None

    def hold(self, tensor: Tensor) -> None:
        storage = _plain(tensor).untyped_storage()
        if storage not in self.seen:
            self.seen.add(storage)
            self.alive += (size := storage.nbytes())
            weakref.finalize(storage, self._free, size)
            self.on_growth()

    def _free(self, size: int) -> None:
        self.alive -= size

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:  # a check of values, such as of tokens: all are 0
            return 0.0 if args[0].is_floating_point() else False if args[0].dtype == torch.bool else 0
        out = func(*args, **(kwargs or {}))
        if "c10d" in func.namespace:
            self._count(func._overloadpacket.__name__, args, out)
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.hold(leaf)
        return out

    def _count(self, name: str, args: tuple, out: object) -> None:
        kind = next((kind for kind in _SENT if kind.replace("_", "") in name.replace("_", "")), None)
        if kind is None:  # a wait, a barrier
            return
        if isinstance(args[-1], str):  # functional ones end with the group's name
            group = dist.distributed_c10d._resolve_process_group(args[-1])
        else:
            boxed = (a for a in args if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type()))
            group = dist.ProcessGroup.unbox(next(boxed))
        self.add(self.axis_of.get(group.group_name, "all"), kind, group.size(), max(map(_bytes, (args, out))))

    def add(self, axis: str, kind: str, n: int, whole: int) -> None:
        self.calls[axis, kind] += 1
        self.sent[axis, kind] += int(whole * _SENT[kind](n))


def _bytes(found: object) -> int:
    """Of the largest tensor there, or of several in a list together."""
    items = found if isinstance(found, tuple) else (found,)
    return max((sum(t.nbytes for t in tree_leaves(item) if isinstance(t, Tensor)) for item in items), default=0)


def _plain(tensor: Tensor) -> Tensor:
    return _plain(tensor._local_tensor) if isinstance(tensor, DTensor) else tensor


def _make_fake(mode: FakeTensorMode, part: nn.Module, device: torch.device) -> None:
    """As materialize, but without values: new parameters and buffers of the same shapes, in `mode`."""
    made: dict[int, Tensor] = {}  # a tied weight stays one

    def real(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            local = torch.empty_like(_plain(tensor), device=device)
            if isinstance(tensor, DTensor):
                whole = {"shape": tensor.shape, "stride": tensor.stride(), "run_check": False}
                local = DTensor.from_local(local, tensor.device_mesh, tensor.placements, **whole)
            is_parameter = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(local, requires_grad=tensor.requires_grad) if is_parameter else local
        return made[id(tensor)]

    with mode:
        for module in part.modules():
            for tensors in (module._parameters, module._buffers):
                for name, tensor in list(tensors.items()):
                    if tensor is not None:
                        setattr(module, name, real(tensor))


@loss_parallel()
def _run_plan(job: Job, tokens_BT: Tensor, watch: _Watch) -> None:
    """This rank's row of the pipeline's plan, with its messages to the stages before and after."""
    stages = {stage.stage_index: stage for stage in _stages(job.pipeline.schedule)}
    rank, m = job.dims.axis("pp").get_local_rank(), job.config.accumulate
    n_stages, held = next(iter(stages.values())).num_stages, {}
    rows_bT = tokens_BT.chunk(m)
    is_cut = job.config.sequence_parallel or job.config.async_tensor_parallel
    seq_len = tokens_BT.shape[1] // (job.dims.tp if is_cut else 1)
    dtype = getattr(torch, job.config.compute_dtype or job.config.dtype)

    def message(kind: str, other: int, tensor: Tensor) -> None:
        if 0 <= other < n_stages and other not in stages:  # in a V, the last rank passes it on to itself
            watch.add("pp", kind, job.dims.pp, tensor.nbytes)

    for action in filter(None, job.pipeline.actions[rank]):
        stage, kind, k = _parsed(action)
        part = stages[stage].submod
        if kind == "F":
            x = rows_bT[k]
            if stage:
                x = torch.empty(len(x), seq_len, job.config.model.dim, dtype=dtype, requires_grad=True)
            message("recv", stage - 1, x)
            out = part(x, **job.stage_inputs)
            if stage == n_stages - 1:
                out = job.loss_share(out, rows_bT[k])
            message("send", stage + 1, out)
            held[stage, k] = (x, out)
        elif kind in "BI":
            x, out = held.pop((stage, k))
            if isinstance(part, FSDPModule):  # as torch's stages: whole gradients add up, and are reduced once
                part.set_is_last_backward(False)
                part.set_reshard_after_backward(False)
                part.set_requires_gradient_sync(False)
            grad = None if stage == n_stages - 1 else torch.empty_like(out)
            message("recv", stage + 1, out)
            out.backward(grad)
            if stage:
                message("send", stage - 1, x.grad)
    for stage in stages.values():
        stage.perform_reduce_grad(1)


def _parsed(action: str) -> tuple[int, str, int]:
    """'3B1' -> (3, 'B', 1)."""
    kind = next(c for c in action if c.isalpha())
    stage, k = action.split(kind)
    return int(stage), kind, int(k)


def dry_run(config: TrainConfig, world_size: int, rank: int = 0) -> DryRun:
    """One step of `rank` of world_size ranks, on fake tensors; the process must have no process group, and has none
    afterwards. ValueError: as `train.check`; experts; compile; a rank that there is not."""
    dims = check(config, world_size)
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is none of 0 to {world_size - 1}")
    if config.model.n_experts:
        raise ValueError(f"what {config.model.n_experts} experts get depends on values, which fake tensors have not")
    if config.compile != "none":
        raise ValueError(f"what compile {config.compile} would fuse is not seen on fake tensors: take compile none")
    if dist.is_initialized():
        raise ValueError("a dry run makes a process group of its own, and this process has one: run it elsewhere")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        return _dry_run(config, dims, rank)
    finally:
        dist.destroy_process_group()


def _dry_run(config: TrainConfig, dims: ParallelDims, rank: int) -> DryRun:
    dims.build_mesh("cpu")
    meshes = [dims.axis(name) for name in ("loss", "fsdp", *AXES) if dims.size(name) > 1]
    axis_of = {mesh.get_group().group_name: "×".join(mesh.mesh_dim_names) for mesh in meshes}
    mode, watch, peak = FakeTensorMode(allow_non_fake_inputs=True), _Watch(axis_of), Counter()
    job = Job(config, dims, torch.device("cpu"), lambda part, device, seed: _make_fake(mode, part, device))

    def held() -> dict[str, int]:
        kinds = {"parameters": job.parameters, "gradients": [p.grad for p in job.parameters if p.grad is not None]}
        kinds["optimizer"] = [t for state in job.optimizer.state.values() for t in state.values()]
        return {kind: sum(_plain(t).nbytes for t in tensors) for kind, tensors in kinds.items()}

    def at_most() -> None:
        if watch.alive > peak.total():
            now = held()
            peak.clear()
            peak.update(now | {"other": watch.alive - sum(now.values())})

    tokens_BT = torch.zeros(config.global_batch // dims.size("dp"), config.seq_len // dims.cp, dtype=torch.int64)
    with warnings.catch_warnings(), mode, watch:
        warnings.filterwarnings("ignore", ".*returned a view tensor")  # the watch looks at outputs, and changes none
        for parameter in job.parameters:
            watch.hold(parameter)
        for parameter in job.parameters:
            parameter.grad = torch.empty_like(parameter)
        job.update(config.lr)  # AdamW makes its averages at the end of the first step: the second is the one to watch
        watch.calls.clear(), watch.sent.clear()
        watch.on_growth = at_most
        if job.pipeline:
            _run_plan(job, tokens_BT, watch)
        else:
            job.forward_backward([(rows_bT, rows_bT) for rows_bT in tokens_BT.chunk(config.accumulate)])
        at_rest = held()
        job.update(config.lr)
    calls = {}
    for (axis, name), count in watch.calls.items():
        calls.setdefault(axis, {})[name] = (count, watch.sent[axis, name])
    layout = " × ".join(f"{name} {n}" for name, n in zip(AXES, dims.shape, strict=True))
    return DryRun(f"{config.model.n_layers} layers on {layout}", rank, dims.coordinates(rank), at_rest, peak, calls)
