"""Data parallel: the same model on every rank, each with its own rows of the batch; what travels is the gradient.

The loss of a batch is a sum over its tokens, so its gradient is a sum too: each rank takes the gradient of its rows,
and an all-reduce gives every rank the mean. Equal weights and equal gradients give equal weights again, without
sending one. Backward produces gradients last layer first, so most of the sum can travel while it still computes:

    a hook per gradient    bwd 3 | 3 . bwd 2 | 2 . bwd 1 | 1 . bwd 0 | 0        many small messages, compute waits
    buckets                bwd 3 . bwd 2 . bwd 1 . bwd 0 | wait                 few large ones, beside the compute
                                   [ bucket 0: 3, 2 ]  [ bucket 1: 1, 0 ]
    flat buffer            [ 3.bias | 3.weight | 2.bias | 2.weight | 1 1 1 1 ]  each .grad is a view: nothing to copy
                                                                     one number a parameter: has it a gradient here?

Buckets start in one fixed order on all ranks, because a collective is matched by its position, not by its name. Of A
microbatches only the last one sends, and it sends the sum of all. Two mistakes that train and are wrong: a hook that
averages the *parameter* it is given, not its `.grad`; a hook on the gradient that *arrives* (`Tensor.register_hook`),
which leaves out what earlier microbatches accumulated. Hooks belong after accumulation.

Which mean? Ranks with unequal numbers of tokens must not weigh the same. Let a rank's loss be
`n * sum of its tokens' losses / number of all ranks' tokens in the step`: the mean over n ranks is then the true one.

Cost, with P the bytes of the trained parameters, n ranks, AdamW in the parameters' dtype:

    held by a rank      P parameters + P gradients (the buckets are the gradients; + P if they were copies) + 2 P AdamW
    sent by a rank      2 (n-1)/n P a step, whatever A; A times that without `no_sync`
    not hidden          the last bucket: the first layers and the embedding, whose gradients come last
    all else hidden     from about 2 F/W tokens a rank and microbatch on: backward takes 4 flops a parameter and token,
                        the all-reduce 8 bytes (fp32). F = 400 Tflop/s, W = 50 GB/s: 16,000 tokens

Use it as long as 16 bytes a parameter (fp32, AdamW) fit a device; beyond that, `fsdp`. Not by hand: buckets regrouped
by the observed order of arrival, gradients compressed on the wire, batch norm's buffers kept in step; `apply_ddp` has
them from torch's DistributedDataParallel. Both give all ranks the first rank's weights to begin with.

References: PyTorch DDP https://arxiv.org/abs/2006.15704 · Horovod https://arxiv.org/abs/1802.05799 · bandwidth-optimal
all-reduce https://doi.org/10.1016/j.jpdc.2008.09.002
"""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel


def _check(model: nn.Module, mesh) -> list[nn.Parameter]:
    """The parameters to train, each once; ValueError for a model or mesh that cannot be replicated."""
    kind, named = type(model).__name__, dict(model.named_parameters())
    if isinstance(mesh, DeviceMesh) and mesh.ndim != 1:
        raise ValueError(
            f"the mesh has {mesh.ndim} axes, {mesh.mesh_dim_names} of {tuple(mesh.shape)}: give the 1 axis whose "
            "ranks read different rows, as in mesh['dp_replicate'], or flatten those that do into 1"
        )
    if isinstance(model, DistributedDataParallel):
        raise ValueError("the model is a DistributedDataParallel already: wrap its .module, or wrap once")
    if meta := [name for name, p in named.items() if p.is_meta]:
        raise ValueError(
            f"{len(meta)} of {len(named)} parameters of {kind} are on meta, {meta[0]} first: materialize the model "
            "before; all its values are needed here"
        )
    if cut := [name for name, p in named.items() if isinstance(p, DTensor)]:
        p = named[cut[0]]
        raise ValueError(
            f"{len(cut)} of {len(named)} parameters of {kind} are DTensors, {cut[0]} with {p.placements} on a mesh of "
            f"{tuple(p.device_mesh.shape)}: replicate them with fully_shard over 2 axes (HSDP), not with this"
        )
    trained = [p for p in named.values() if p.requires_grad]
    if not trained:
        raise ValueError(f"0 of {len(named)} parameters of {kind} require a gradient: nothing to all-reduce")
    return trained


# ---- by hand --------------------------------------------------------------------------------------------------


def _group_of(mesh):
    return mesh.get_group() if isinstance(mesh, DeviceMesh) else mesh


@torch.no_grad()
def _start_equal(model: nn.Module, group) -> None:
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor, group=group, group_src=0)


def all_reduce_per_gradient_by_hand(model: nn.Module, mesh=None) -> None:
    """The whole idea: as soon as a gradient is complete, replace it by the mean over the ranks of `mesh`.

    Right with accumulation too, as the mean of what is equal already changes nothing, but it sends A times. Every
    rank must reach the same parameters in the same order. mesh: see `BucketedAllReduceByHand`.
    """
    trained, group = _check(model, mesh), _group_of(mesh)
    _start_equal(model, group)

    def average(parameter):  # called after accumulation, and with the parameter: mind the .grad
        dist.all_reduce(parameter.grad.div_(dist.get_world_size(group)), group=group)

    for parameter in trained:
        parameter.register_post_accumulate_grad_hook(average)


class _Bucket:
    """Some parameters, and one flat buffer that holds their gradients, and for each a 1 if it has one here."""

    def __init__(self, parameters: list[nn.Parameter]):
        self.parameters, sizes = parameters, [p.numel() for p in parameters]
        self.flat = parameters[0].new_zeros(sum(sizes) + len(sizes))
        *pieces, self.has_gradient = self.flat.split([*sizes, len(sizes)])
        self.views = {p: piece.view_as(p) for p, piece in zip(parameters, pieces, strict=True)}
        self.missing = set(parameters)

    def take(self, parameter: nn.Parameter) -> None:
        """The gradient moves to its place; what later microbatches add is then added there."""
        if parameter.grad is not (view := self.views[parameter]):
            view.copy_(parameter.grad)
            parameter.grad = view

    def fill(self) -> Tensor:
        self.has_gradient.fill_(1)
        for i, parameter in enumerate(self.parameters):
            if parameter.grad is None:
                self.views[parameter].zero_()
                self.has_gradient[i] = 0
            else:
                self.take(parameter)
        return self.flat

    def hand_out(self) -> None:
        """A parameter that only other ranks used gets its mean; one that nobody used keeps `.grad` None."""
        for i, parameter in enumerate(self.parameters):
            if parameter.grad is None and self.has_gradient[i] > 0:
                parameter.grad = self.views[parameter]
        self.missing = set(self.parameters)


class BucketedAllReduceByHand:
    """Makes `model` a replica, in place: from then on `backward()` leaves the mean gradient over all ranks.

    mesh: a 1-axis DeviceMesh, a ProcessGroup, or None for all ranks. bucket_bytes: a bucket is closed once it has as
    many; one dtype each. `.grad` of a parameter is a view of its bucket. Tied, frozen, and on some or all ranks unused
    parameters are fine, as long as each rank's backward reaches one. Raises ValueError as `apply_ddp` does.
    """

    def __init__(self, model: nn.Module, mesh=None, bucket_bytes: int = 25 * 2**20):
        if not bucket_bytes > 0:
            raise ValueError(f"bucket_bytes={bucket_bytes} must be above 0; 1 gives each gradient its own")
        trained, self.group = _check(model, mesh), _group_of(mesh)
        self.n, self.syncing = dist.get_world_size(self.group), True
        _start_equal(model, self.group)
        closed, open_ones = [], {}
        for parameter in reversed(trained):  # the last layer's gradients are the first to come
            kind = parameter.dtype, parameter.device
            members = open_ones.setdefault(kind, [])
            members.append(parameter)
            if sum(p.nbytes for p in members) >= bucket_bytes:
                closed.append(open_ones.pop(kind))
        self.buckets = [_Bucket(members) for members in (*closed, *open_ones.values())]
        self.bucket_of = {p: bucket for bucket in self.buckets for p in bucket.parameters}
        self.launched, self.in_backward = [], False
        for parameter in self.bucket_of:
            parameter.register_post_accumulate_grad_hook(self.arrived)

    @torch.no_grad()
    def arrived(self, parameter: nn.Parameter) -> None:
        """Backward is done with this gradient. Start every bucket that is complete, and no later one before it."""
        bucket = self.bucket_of[parameter]
        bucket.take(parameter)
        if not self.syncing:
            return
        if not self.in_backward:
            self.in_backward = True
            Variable._execution_engine.queue_callback(self.finish)
        bucket.missing.discard(parameter)
        while len(self.launched) < len(self.buckets) and not self.buckets[len(self.launched)].missing:
            self.launch()

    def launch(self) -> None:
        flat = self.buckets[len(self.launched)].fill().div_(self.n)  # before the sum: fp16 does not overflow
        self.launched.append(dist.all_reduce(flat, group=self.group, async_op=True))

    @torch.no_grad()
    def finish(self) -> None:
        """The end of backward: start the buckets with unused parameters, and wait for all."""
        while len(self.launched) < len(self.buckets):
            self.launch()
        for work, bucket in zip(self.launched, self.buckets, strict=True):
            work.wait()
            bucket.hand_out()
        self.launched, self.in_backward = [], False

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward in here only accumulates on this rank."""
        before, self.syncing = self.syncing, False
        try:
            yield
        finally:
            self.syncing = before


# ---- native ---------------------------------------------------------------------------------------------------


def apply_ddp(
    model: nn.Module, mesh: DeviceMesh, bucket_mb: float = 25.0, find_unused_parameters: bool = False
) -> DistributedDataParallel:
    """Wraps `model` in torch's DistributedDataParallel over the 1-axis `mesh`; call the result, `.module` is yours.

    Gradients are views of the buckets, of `bucket_mb` MiB each (the first one of 1 MiB, so that it starts early), and
    the mean over the mesh. State dict names get the prefix `module.`: save `.module`. find_unused_parameters: a
    backward may miss parameters; it walks the graph in every forward, so freeze what is never used instead.
    Order: materialize, then this, then the optimizer. Delete the wrapper before `destroy_process_group`.
    Raises ValueError before any change: no DeviceMesh or several axes; a model on meta, with DTensors (FSDP, tensor
    parallel), wrapped before, or with no parameter to train.
    """
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(f"mesh is a {type(mesh).__name__}: make it init_device_mesh('cuda', (n,))")
    if not bucket_mb > 0:
        raise ValueError(f"bucket_mb={bucket_mb} must be above 0; torch's default is 25")
    _check(model, mesh)
    return DistributedDataParallel(
        model,
        process_group=mesh.get_group(),
        bucket_cap_mb=bucket_mb,
        find_unused_parameters=find_unused_parameters,
        gradient_as_bucket_view=True,
    )


def skip_sync(replica, skip: bool = True) -> AbstractContextManager:
    """`with skip_sync(replica, not is_last):` around a microbatch's forward (DDP decides there) and backward.

    replica: what `apply_ddp` or `BucketedAllReduceByHand` gave you; one without `no_sync` sends each time.
    """
    return replica.no_sync() if skip and hasattr(replica, "no_sync") else nullcontext()


# ---- the proof ------------------------------------------------------------------------------------------------


def demo(steps: int = 3, accumulate: int = 2) -> None:
    """By hand == native == one process in float64: rank r reads r + 1 rows, so that a mean of means would be wrong."""
    on_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
    dist.init_process_group("nccl" if on_gpus else "gloo", device_id=device if on_gpus else None)
    rank, n = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (n,))
    n_rows = n * (n + 1) // 2
    torch.manual_seed(0)
    x_SARD = torch.randn(steps, accumulate, n_rows, 33, dtype=torch.float64).to(device)
    targets_SAR = torch.randint(7, x_SARD.shape[:3]).to(device)

    def train(way, rows: slice) -> list[Tensor]:
        torch.manual_seed(1 + (rank if way else 0))  # a replica's first weights come from the first rank
        model = nn.Sequential(nn.Linear(33, 65), nn.Tanh(), nn.Linear(65, 7)).to(device, torch.float64)
        replica = way(model, mesh) if way else None
        run = replica if isinstance(replica, nn.Module) else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        seen = []
        for x_ARD, targets_AR in zip(x_SARD[:, :, rows], targets_SAR[:, :, rows], strict=True):
            for left, x_RD, targets_R in zip(reversed(range(accumulate)), x_ARD, targets_AR, strict=True):
                with skip_sync(replica, left > 0):
                    loss = F.cross_entropy(run(x_RD), targets_R, reduction="sum") / (accumulate * n_rows)
                    (loss * n if way else loss).backward()
                seen.append(loss.detach())
            seen += [p.grad.clone() for p in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
        return seen

    reference, first = train(None, slice(None)), rank * (rank + 1) // 2
    ways = {
        "all_reduce_per_gradient_by_hand": all_reduce_per_gradient_by_hand,
        "BucketedAllReduceByHand": lambda *a: BucketedAllReduceByHand(*a, bucket_bytes=4096),
        "apply_ddp": apply_ddp,
    }
    for name, way in ways.items():
        worst = {"loss": 0.0, "gradient": 0.0}
        for ours, theirs in zip(train(way, slice(first, first + rank + 1)), reference, strict=True):
            kind = "gradient" if ours.dim() else "loss"
            if kind == "loss":
                dist.all_reduce(ours)
            worst[kind] = max(worst[kind], ((ours - theirs).norm() / theirs.norm()).item())
        if rank == 0:
            print(f"{name:32} against one process:", *(f"{k} {e:.1e}" for k, e in worst.items()))
        if not max(worst.values()) < 1e-10:
            raise SystemExit(f"{name} differs from one process by {worst}, more than 1e-10")
    dist.barrier()
    dist.destroy_process_group()
    print(end="", flush=True)
    os._exit(0)  # about one finished gloo process in ten aborts while the interpreter exits


if __name__ == "__main__":
    demo()
