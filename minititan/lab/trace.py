"""What did each rank do, and when?  Events from the run itself, never from a model of it.

    with recording() as events:                      # on every rank
        with span("update", phase="optimizer"):      # your own code; costs nothing outside a recording
            optimizer.step()
    return events                                    # plain data, for lab.draw or Perfetto

    rank 0  compute        [ layers.0 ][ layers.1 ]       [ layers.2 ]
            communication       [== all_gather ==] [= all_gather =]
                                ^ issued         ^ truly complete, whenever somebody waits for it
            blocked                                [ waits  ]

**How a collective is seen.** Whoever asks for one -- ``dist.all_reduce``, FSDP2, a DTensor that changes placement, a
backward pass -- it ends in one ``c10d::`` operator that carries the tensors, the process group and a ``Work``.
A ``TorchDispatchMode`` stands there. A functional collective (``_c10d_functional::``) is handed to its kernel with
the mode still on, so that its inner ``c10d::`` operator is what is recorded: nothing is counted twice.

**When it ends.** The future of the ``Work`` runs a callback on gloo's own thread when the last byte is there. On gloo
a send, a recv and a reduce_scatter (an all_reduce and, in ``wait``, a copy) have no future: they end when ``wait``
returns, an upper bound, or with the recording if nobody waits. On CUDA an operator only enqueues, so these are the
host's times: there, use the profiler (notebook 18). On meta tensors a functional collective leaves no event.

**What it costs.** Every operator passes through Python once, 10-20 us. Order and overlap are true; to measure speed,
time the run without a recording.

Times are seconds on CLOCK_MONOTONIC, which all processes of one host share. Bytes are bytes.
"""

from __future__ import annotations

import fnmatch
import json
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Event:
    """Something that a rank did from `start` to `end`, in seconds on CLOCK_MONOTONIC.

    For communication, `n_bytes` is the size of the whole tensor that it is about: the output of an all_gather, the
    input of a reduce_scatter, the tensor of an all_reduce or broadcast, all the pieces of a gather or scatter, what
    this rank gives to an all_to_all, the message of a send or recv. What travels for it is `traffic`'s business.
    """

    rank: int
    lane: str  # "compute", "communication", or your own
    name: str  # "all_gather", "layers.0", ...
    start: float
    end: float
    n_bytes: int = 0
    phase: str = ""  # chooses the colour: forward, recompute, backward, optimizer, gather, reduce, exchange, ...
    ranks: tuple[int, ...] = ()  # members of the group, as global ranks
    axis: str = ""  # mesh axis of the group, or its description; "" for the default group
    peer: int = -1  # the other end of a send or recv, or the root; a global rank
    splits: tuple[int, ...] = ()  # all_to_all: bytes for each member of the group
    dtype: str = ""
    blocked: tuple[float, ...] = ()  # (from, to): the time in which the rank did nothing but wait for it

    @property
    def group_size(self) -> int:
        return len(self.ranks)

    @property
    def duration(self) -> float:
        return self.end - self.start


# --- recording -------------------------------------------------------------------------------------------------

# c10d operator: name, phase, index of the argument that holds the whole tensor.
_COLLECTIVES = {
    "allreduce_": ("all_reduce", "reduce", 0),
    "allreduce_coalesced_": ("all_reduce", "reduce", 0),
    "reduce_": ("reduce", "reduce", 0),
    "allgather_": ("all_gather", "gather", 0),
    "_allgather_base_": ("all_gather", "gather", 0),
    "allgather_coalesced_": ("all_gather", "gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", "gather", 0),
    "reduce_scatter_": ("reduce_scatter", "reduce", 1),
    "_reduce_scatter_base_": ("reduce_scatter", "reduce", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", "reduce", 1),
    "broadcast_": ("broadcast", "broadcast", 0),
    "gather_": ("gather", "gather", 1),
    "scatter_": ("scatter", "broadcast", 0),
    "alltoall_": ("all_to_all", "exchange", 1),
    "alltoall_base_": ("all_to_all", "exchange", 1),
    "send": ("send", "send", 0),
    "recv_": ("recv", "recv", 0),
    "recv_any_source_": ("recv", "recv", 0),
    "barrier": ("barrier", "barrier", 0),
    "monitored_barrier_": ("barrier", "barrier", 0),
}
_FUNCTIONAL = ("_c10d_functional", "_dtensor")
_NOT_A_COLLECTIVE = ("wait_tensor", "_wrap_tensor_autograd")
# "Work::getFuture not implemented" on gloo in torch 2.13; asking, and building that error, takes 20 ms.
_NO_FUTURE_ON_CPU = ("send", "recv", "reduce_scatter")

_open: list[_Recorder] = []  # a rank is one process: a span on any of its threads belongs to every open recording


class _Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))
        self.events: list[Event] = []
        self.drafts: list[_Draft] = []
        self.flying: dict[int, _Flight] = {}
        self.awaited: dict[int, set[int]] = {}  # storage of a functional collective's output: works under way for it
        self.patience = 5.0  # seconds that `close` waits for what is still under way
        self.landed = threading.Condition()  # callbacks arrive on gloo's threads

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if _is_wrapper(types):
            return NotImplemented  # a DTensor first becomes operators on plain tensors, which come by here
        name = func.__name__.partition(".")[0]
        if func.namespace in _FUNCTIONAL and name not in _NOT_A_COLLECTIVE:
            before = set(self.flying)
            with self:
                out = func.redispatch(_backend_keys(args), *args, **kwargs)
            for tensor in tree_leaves(out):
                self.awaited[tensor.untyped_storage()._cdata] = set(self.flying) - before
            return out
        if func.namespace in _FUNCTIONAL and name == "wait_tensor":
            keys = self.awaited.pop(args[0].untyped_storage()._cdata, ())
            with self.waiting(keys):
                return func(*args, **kwargs)
        if func.namespace != "c10d" or name not in _COLLECTIVES:
            return func(*args, **kwargs)
        start = time.monotonic()
        out = func(*args, **kwargs)
        work = out[-1] if isinstance(out, tuple) else out
        fields = {"start": start, **_describe(name, args)}
        if isinstance(work, torch.ScriptObject):
            on_cpu = all(t.device.type == "cpu" for t in tree_leaves(args[0]))
            emulated = any(getattr(m, "works_have_futures", False) for m in _get_current_dispatch_mode_stack())
            emulated = emulated and name != "recv_any_source_"
            has_future = emulated or not (on_cpu and fields["name"] in _NO_FUTURE_ON_CPU)
            self.take_off(dist.Work.unbox(work), has_future, fields)
        else:  # monitored_barrier_ returns when it is over
            self.add(end=time.monotonic(), **fields)
        return out

    def add(self, **fields) -> None:
        with self.landed:
            self.events.append(Event(rank=self.rank, **fields))

    def take_off(self, work: dist.Work, has_future: bool, fields: dict) -> None:
        key = id(work)  # stays its own: `flying` keeps the object alive
        self.flying[key] = _Flight(work, has_future, fields)
        if has_future:
            work.get_future().add_done_callback(lambda _: self.land(key))

    def land(self, key: int) -> None:
        now = time.monotonic()
        with self.landed:
            flight = self.flying.pop(key, None)
            if flight is not None:
                flight.place = len(self.events)
                self.events.append(Event(rank=self.rank, end=now, **flight.fields))
                self.landed.notify_all()

    @contextmanager
    def waiting(self, keys: Iterable[int]) -> Iterator[None]:
        """Around a wait for the works `keys`: they are over then, and this thread was blocked so long."""
        flights = [self.flying[key] for key in keys if key in self.flying]
        start = time.monotonic()
        yield
        end = time.monotonic()
        for key in keys:
            self.land(key)
        if end - start > 2e-5:
            for flight in flights:
                self.events[flight.place] = replace(self.events[flight.place], blocked=(start, end))

    def close(self) -> None:
        with self.landed:
            self.landed.wait_for(lambda: not any(f.has_future for f in self.flying.values()), self.patience)
        for key in list(self.flying):
            self.land(key)
        for draft in self.drafts:
            if draft.end is not None:
                self.add(lane="compute", **vars(draft))
        self.events.sort(key=lambda e: (e.start, -e.end))


@dataclass
class _Flight:
    """A collective under way."""

    work: dist.Work
    has_future: bool
    fields: dict
    place: int = -1  # of its event, once it has landed


@dataclass
class _Draft:
    """A span whose end is the last of several hooks; written down when the recording closes."""

    name: str
    phase: str
    start: float
    end: float | None = None

    def touch(self, *_) -> None:
        self.end = time.monotonic()


def _is_wrapper(types: Iterable[type]) -> bool:
    """Whether a tensor is made of others: DTensor, AsyncCollectiveTensor, Float8Tensor, ..."""
    return any(hasattr(t, "__tensor_flatten__") for t in types)


def _backend_keys(args: tuple) -> torch._C.DispatchKeySet:
    device = next((t.device.type for t in tree_leaves(args) if isinstance(t, Tensor)), "cpu")
    key = {"cpu": "CPU", "cuda": "CUDA", "meta": "Meta"}.get(device, "PrivateUse1")
    return torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))


def _n_bytes(tensors) -> int:
    return sum(t.numel() * t.element_size() for t in tree_leaves(tensors) if isinstance(t, Tensor))


def _describe(op: str, args: tuple) -> dict:
    """The fields of an Event, from the arguments of a c10d operator."""
    name, phase, whole = _COLLECTIVES[op]
    group = next(a for a in args if isinstance(a, torch.ScriptObject) and "ProcessGroup" in a._type().qualified_name())
    group = dist.ProcessGroup.unbox(group)
    ranks = tuple(dist.get_process_group_ranks(group))
    tensors = [t for t in tree_leaves(args[:2]) if isinstance(t, Tensor)]
    n_bytes = 0 if name == "barrier" else _n_bytes(args[whole])
    if name in ("gather", "scatter"):
        n_bytes *= len(ranks)  # only the root holds all the pieces
    peer = {"send": 2, "recv_": 2, "broadcast_": 2, "gather_": 3, "scatter_": 3, "reduce_": 3}.get(op)
    splits = ()
    if op == "alltoall_":
        splits = tuple(_n_bytes(piece) for piece in args[1])
    elif op == "alltoall_base_":
        sizes = args[4] or [1] * len(ranks)
        splits = tuple(n_bytes * size // max(sum(sizes), 1) for size in sizes)
    axis = group.group_desc.removeprefix("mesh_")
    return {
        "lane": "communication",
        "name": name,
        "phase": phase,
        "n_bytes": n_bytes,
        "ranks": ranks,
        "axis": "" if axis in ("default_pg", "undefined") else axis,
        "peer": -1 if peer is None else ranks[args[peer]],
        "splits": splits,
        "dtype": str(tensors[0].dtype).removeprefix("torch.") if tensors and name != "barrier" else "",
    }


@contextmanager
def recording() -> Iterator[list[Event]]:
    """Collects this rank's spans and collectives into the list that it yields, in order of their start.

    The list is complete when the block has been left; it waits up to 5 s there for collectives under way.
    """
    recorder = _Recorder()
    wait = dist.Work.wait

    def observed_wait(work, *args, **kwargs):
        with recorder.waiting([id(work)]):
            return wait(work, *args, **kwargs)

    dist.Work.wait = observed_wait
    _open.append(recorder)
    try:
        with recorder:
            yield recorder.events
    except BaseException:
        recorder.patience = 0.0  # an error must not wait for collectives that may never end
        raise
    finally:
        _open.remove(recorder)
        dist.Work.wait = wait
        recorder.close()


@contextmanager
def span(name: str, lane: str = "compute", phase: str = "", n_bytes: int = 0) -> Iterator[None]:
    """`with span("loss"): ...` or `@span("loss")`: one Event of this rank. Does nothing outside a recording."""
    start = time.monotonic()
    try:
        yield
    finally:
        end = time.monotonic()
        for recorder in _open:
            recorder.add(lane=lane, name=name, start=start, end=end, n_bytes=n_bytes, phase=phase)


# --- modules ---------------------------------------------------------------------------------------------------


class Hooks(list):
    """Handles of registered hooks; `remove()`, or leaving the `with` block, takes all of them off."""

    def remove(self) -> None:
        while self:
            self.pop().remove()

    def __enter__(self) -> Hooks:
        return self

    def __exit__(self, *_) -> None:
        self.remove()


def trace_modules(
    model: nn.Module, names: Iterable[str] | None = None, optimizer: torch.optim.Optimizer | None = None
) -> Hooks:
    """Puts a span around every forward, recompute and backward of some modules (and around `optimizer.step`).

    names: patterns as in a shell, such as "layers.*.attention". Default: the blocks in each outermost ModuleList or
    ModuleDict, and what stands beside them (embedding, norm, output).

    Call it after the techniques are applied: then FSDP2's gathers and reduce-scatters stay outside of the spans. The
    backward of a module lasts from the gradient of its output to the last of its own nodes in the autograd graph.

    ValueError when a pattern matches no module.
    """
    chosen = dict(_blocks(model)) if names is None else _matching(model, names)
    hooks = Hooks()
    for name, module in chosen.items():
        hooks += _trace_module(module, name)
    if optimizer is not None:
        starts: list[float] = []

        def after_step(*_):
            for recorder in _open:
                recorder.add(lane="compute", name="step", phase="optimizer", start=starts[-1], end=time.monotonic())
            starts.clear()

        hooks.append(optimizer.register_step_pre_hook(lambda *_: starts.append(time.monotonic())))
        hooks.append(optimizer.register_step_post_hook(after_step))
    return hooks


def _blocks(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from ((f"{path}.{key}", block) for key, block in child.named_children())
        elif any(isinstance(m, nn.ModuleList | nn.ModuleDict) for m in child.modules()):
            yield from _blocks(child, f"{path}.")
        elif any(True for _ in child.parameters()):
            yield path, child


def _matching(model: nn.Module, patterns: Iterable[str]) -> dict[str, nn.Module]:
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    modules = dict(model.named_modules())
    for pattern in patterns:
        if not fnmatch.filter(modules, pattern):
            raise ValueError(f"no module is called {pattern!r}; there are {', '.join(n for n in modules if n)}")
    return {name: m for name, m in modules.items() if any(fnmatch.fnmatchcase(name, p) for p in patterns)}


def _trace_module(module: nn.Module, name: str) -> list:
    calls: list[tuple[float, list[Tensor]]] = []

    def before(_, args, kwargs):
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.requires_grad]
        calls.append((time.monotonic(), inputs))

    def after(_, args, kwargs, output):
        start, inputs = calls.pop()
        recomputed = torch._C._current_graph_task_id() != -1  # a forward inside a backward
        for recorder in _open:
            phase = "recompute" if recomputed else "forward"
            recorder.add(lane="compute", name=name, phase=phase, start=start, end=time.monotonic())
        if _open and torch.is_grad_enabled():
            _watch_backward(name, inputs, output)

    return [
        module.register_forward_pre_hook(before, with_kwargs=True),
        # always_call: a recomputation stops, by an exception, as soon as it has what the backward needs
        module.register_forward_hook(after, with_kwargs=True, always_call=True),
    ]


def _watch_backward(name: str, inputs: list[Tensor], output) -> None:
    outputs = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad and t.grad_fn is not None]
    if not outputs:
        return
    drafts: list[_Draft] = []

    def begin(grad):
        if not drafts:
            drafts.append(_Draft(name, "backward", time.monotonic()))
            for recorder in _open:
                recorder.drafts.append(drafts[0])

    def end(*_):
        if drafts:
            drafts[0].touch()

    for tensor in outputs:
        tensor.register_hook(begin)
    for node in _last_nodes([t.grad_fn for t in outputs], stop={t.grad_fn for t in inputs}):
        node.register_hook(end)


def _last_nodes(roots: list, stop: set) -> list:
    """The nodes between `roots` and `stop` that lead out of there, or to nothing but leaves.

    Their post-hooks run before any hook on the input's gradient: before FSDP2 gathers what the previous block needs.
    """
    todo, seen, last = [n for n in roots if n not in stop], set(), []
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            behind = [n for n, _ in node.next_functions if n is not None and type(n).__name__ != "AccumulateGrad"]
            if not behind or not stop.isdisjoint(behind):
                last.append(node)
            todo += [n for n in behind if n not in stop]
    return last


# --- bytes -----------------------------------------------------------------------------------------------------


@dataclass
class Traffic:
    """What travelled, by plain numbers. `pairs[i][j]` is the bytes that rank i sent to rank j."""

    pairs: list[list[float]]
    sent: dict[str, float] = field(default_factory=dict)  # by collective: bytes that all ranks together sent
    calls: dict[str, int] = field(default_factory=dict)  # by collective: calls, counted once a group

    @property
    def total(self) -> float:
        return sum(map(sum, self.pairs))


def traffic(events: Iterable, world_size: int | None = None, key: Callable[[Event], str] = lambda e: e.name) -> Traffic:
    """Bytes between each pair of ranks, if every collective of n ranks on N bytes runs as the usual ring:

    all_gather, reduce_scatter   each rank sends (n-1)/n N to the next
    all_reduce                   both, one after the other: 2 (n-1)/n N to the next
    broadcast, reduce            N along the ring from, or to, the root: n-1 hops
    gather, scatter              N/n between the root and each other rank
    all_to_all                   its piece directly to each other rank
    send                         N to the peer (recv is the same message, not counted again)

    These are the algorithm's bytes, the fewest that a bandwidth-optimal ring needs. gloo and NCCL may choose trees for
    small tensors, and add headers. `key` chooses what `sent` and `calls` are grouped by, e.g. `lambda e: e.axis`.

    events: of all ranks, flat or one list a rank.
    """
    events = [e for e in _flat(events) if e.lane == "communication" and e.ranks]
    size = world_size or 1 + max((max(*e.ranks, e.rank, e.peer) for e in events), default=0)
    result = Traffic([[0.0] * size for _ in range(size)])
    for e in events:
        if e.name in ("recv", "barrier"):
            continue
        for to, n in _sends(e):
            result.pairs[e.rank][to] += n
            result.sent[key(e)] = result.sent.get(key(e), 0.0) + n
        counts_here = e.name == "send" or e.rank == e.ranks[0]
        result.calls[key(e)] = result.calls.get(key(e), 0) + counts_here
    return result


def _sends(e: Event) -> Iterator[tuple[int, float]]:
    """(receiver, bytes) of this rank's part in one collective."""
    n, here = len(e.ranks), e.ranks.index(e.rank)
    following = e.ranks[(here + 1) % n]
    if e.name == "send":
        yield e.peer, e.n_bytes
    elif n == 1:
        return
    elif e.name in ("all_gather", "reduce_scatter", "all_reduce"):
        yield following, e.n_bytes * (n - 1) / n * (2 if e.name == "all_reduce" else 1)
    elif (e.name == "broadcast" and following != e.peer) or (e.name == "reduce" and e.rank != e.peer):
        yield following, e.n_bytes
    elif e.name == "gather" and e.rank != e.peer:
        yield e.peer, e.n_bytes / n
    elif e.name == "scatter" and e.rank == e.peer:
        yield from ((to, e.n_bytes / n) for to in e.ranks if to != e.rank)
    elif e.name == "all_to_all":
        yield from ((to, b) for to, b in zip(e.ranks, e.splits, strict=True) if to != e.rank)


def _flat(events: Iterable) -> list[Event]:
    return [e for item in events for e in (item if isinstance(item, list | tuple) else [item])]


# --- memory ----------------------------------------------------------------------------------------------------


def _local(tensor: Tensor) -> Tensor:
    """The plain tensor that this rank holds of a (D)Tensor."""
    while hasattr(tensor, "_local_tensor"):
        tensor = tensor._local_tensor
    return tensor.detach()


def memory_by_kind(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, int]:
    """Bytes that this rank holds now: parameters, gradients, optimizer, buffers.

    Local shards only; a tied tensor counts once, a freed storage as zero. Unsharded copies and activations come and
    go during a step: `watch_memory` sees them.
    """
    states = [] if optimizer is None else [v for s in optimizer.state.values() for v in s.values()]
    kinds = {
        "parameters": list(model.parameters()),
        "gradients": [p.grad for p in model.parameters() if p.grad is not None],
        "optimizer": [v for v in states if isinstance(v, Tensor)],
        "buffers": list(model.buffers()),
    }
    seen, result = set(), {}
    for kind, tensors in kinds.items():
        result[kind] = 0
        for t in map(_local, tensors):
            storage = t.untyped_storage()
            place = (storage._cdata, t.storage_offset(), t.numel())
            if place not in seen:
                seen.add(place)
                result[kind] += min(t.numel() * t.element_size(), storage.nbytes())
    return result


@dataclass(frozen=True)
class MemorySample:
    """Bytes alive on a rank at a moment (seconds, CLOCK_MONOTONIC), by kind."""

    rank: int
    time: float
    n_bytes: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.n_bytes.values())


class _MemoryWatch(TorchDispatchMode):
    """Logs (time, storage, bytes) whenever a storage appears, is resized or dies; kinds are decided at the end."""

    def __init__(self):
        super().__init__()
        self.log: list[tuple[float, int, int]] = []
        self.kinds: dict[int, str] = {}
        self.alive: dict[int, tuple[weakref.ref, int]] = {}  # address of the storage: reference, serial number
        self.count = 0

    def note(self, tensor: Tensor, kind: str | None = None) -> None:
        tensor = _local(tensor)
        if tensor.device.type == "meta" or type(tensor) not in (Tensor, nn.Parameter):
            return
        storage = tensor.untyped_storage()
        serial = self.number(storage)
        if kind:
            self.kinds[serial] = kind

    def number(self, storage: torch.UntypedStorage) -> int:
        key = storage._cdata
        if key not in self.alive:
            self.count += 1
            serial = self.count

            def died(_, key=key, serial=serial):
                self.alive.pop(key, None)
                self.log.append((time.monotonic(), serial, 0))

            self.alive[key] = (weakref.ref(storage, died), serial)
            self.log.append((time.monotonic(), serial, storage.nbytes()))
        return self.alive[key][1]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if _is_wrapper(types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        gathered = "gather" in func.__name__ and func.namespace in ("c10d", *_FUNCTIONAL)
        for tensor in tree_leaves(args[0] if gathered and func.namespace == "c10d" else out):
            if isinstance(tensor, Tensor):
                self.note(tensor, "gathered" if gathered else None)
        return out

    def samples(self, rank: int) -> list[MemorySample]:
        held: dict[int, int] = {}
        now: dict[str, int] = {}
        result = []
        for moment, serial, n_bytes in self.log:
            kind = self.kinds.get(serial, "activations")
            before = held.get(serial, 0)
            if n_bytes != before:
                held[serial] = n_bytes
                now[kind] = now.get(kind, 0) + n_bytes - before
                if result and result[-1].time == moment:
                    result.pop()
                result.append(MemorySample(rank, moment, dict(now)))
        return result


@contextmanager
def watch_memory(
    model: nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None
) -> Iterator[list[MemorySample]]:
    """Follows every tensor storage that operators make, resize or drop; the list is filled when the block ends.

    Kinds: "parameters", "optimizer", "buffers" and "gradients" are the model's and the optimizer's (gradients are
    looked up when one is accumulated, and those of sharded parameters at each `optimizer.step` and at the end, so give
    the optimizer if you clear them); "gathered" are outputs of an all_gather and storages that grow from nothing, as
    FSDP2's unsharded parameters do; all else "activations": what autograd saves, and temporaries. Bytes of storages,
    on the host or a GPU, without an allocator's rounding; `peak` finds what was held at a time.
    """
    watch, samples = _MemoryWatch(), []
    resize = torch.UntypedStorage.resize_

    def observed_resize(storage, size):
        serial = watch.number(storage)
        if storage.nbytes() == 0 and size:
            watch.kinds.setdefault(serial, "gathered")
        result = resize(storage, size)
        watch.log.append((time.monotonic(), serial, size))
        return result

    def note_state(*_):
        if model is not None:
            for kind, tensors in (("parameters", model.parameters()), ("buffers", model.buffers())):
                for t in tensors:
                    watch.note(t, kind)
                    if t.grad is not None:
                        watch.note(t.grad, "gradients")
        if optimizer is not None:
            for state in optimizer.state.values():
                for t in state.values():
                    if isinstance(t, Tensor):
                        watch.note(t, "optimizer")

    note_state()
    now = time.monotonic()
    watch.log = [(now, serial, n_bytes) for _, serial, n_bytes in watch.log]  # all that was there: one sample
    hooks = [] if optimizer is None else [optimizer.register_step_pre_hook(note_state)]

    def note_gradient(p):
        if p.grad is not None:  # another hook may have sent and cleared it
            watch.note(p.grad, "gradients")

    for p in [] if model is None else model.parameters():
        if p.requires_grad:
            hooks.append(p.register_post_accumulate_grad_hook(note_gradient))
    torch.UntypedStorage.resize_ = observed_resize
    try:
        with watch:
            yield samples
    finally:
        torch.UntypedStorage.resize_ = resize
        for hook in hooks:
            hook.remove()
        note_state()
        rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))
        samples += watch.samples(rank)
        watch.alive.clear()  # the references die with their callbacks


def peak(samples: Iterable[MemorySample], start: float = -math.inf, end: float = math.inf) -> MemorySample:
    """The largest total that a rank held at any time from start to end; with start == end, what it held then.

    Times are `time.monotonic()`. Raises ValueError when nothing was sampled before the end.
    """
    held = [s for s in samples if s.time <= end]
    if not held:
        raise ValueError(
            f"no sample until {end}: did the block of watch_memory end, and are times from time.monotonic?"
        )
    before = [s for s in held if s.time <= start][-1:]
    return max(before + [s for s in held if s.time > start], key=lambda s: s.total)


@contextmanager
def cuda_snapshot(path: str | os.PathLike, max_entries: int = 100_000) -> Iterator[Path]:
    """Records what the GPU's allocator does, each allocation with the Python stack that asked for it, and writes a
    pickle that https://pytorch.org/memory_viz opens. Also when the block raises, for out of memory is when one looks.

    path: give each rank its own. max_entries: allocations and frees, of which the last are kept. Raises ValueError
    without CUDA: `watch_memory` follows storages on any device.
    """
    if not torch.cuda.is_available():
        raise ValueError(
            f"no CUDA device, so no allocator to write {os.fspath(path)} about: run on a GPU, or use watch_memory, "
            "which follows storages on a CPU too"
        )
    memory = torch.cuda.memory
    memory._record_memory_history(max_entries=max_entries)
    try:
        yield Path(path)
    finally:
        try:
            memory._dump_snapshot(os.fspath(path))
        finally:
            memory._record_memory_history(enabled=None)


# --- Perfetto --------------------------------------------------------------------------------------------------


def save_chrome_trace(events: Iterable, path: str | os.PathLike) -> Path:
    """Writes events (flat, or one list a rank) as a trace that https://ui.perfetto.dev opens: a process a rank, a
    thread a lane and one for the time blocked, microseconds since the first event. Returns the path."""
    events = _flat(events)
    events += [Event(e.rank, "blocked", e.name, *e.blocked, phase="wait") for e in events if e.blocked]
    events.sort(key=lambda e: (e.start, -e.end))
    origin = min((e.start for e in events), default=0.0)
    entries, threads = [], {}
    for e in events:
        # One thread must nest properly: what only partly overlaps goes to the next thread of its lane.
        copies = threads.setdefault((e.rank, e.lane), [])
        copy = next((i for i, open_ends in enumerate(copies) if _fits(open_ends, e)), len(copies))
        if copy == len(copies):
            copies.append([])
        copies[copy].append(e.end)
        entries.append((e, copy))
    order = {"compute": 0, "communication": 1}
    lanes = sorted({(order.get(e.lane, 2), e.lane, copy) for e, copy in entries})
    tid = {(lane, copy): i for i, (_, lane, copy) in enumerate(lanes)}
    out = []
    for rank in sorted({e.rank for e in events}):
        out.append({"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}})
        out.append({"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}})
    for rank, lane, copy in sorted({(e.rank, e.lane, copy) for e, copy in entries}, key=lambda t: (t[0], tid[t[1:]])):
        name, i = lane if copy == 0 else f"{lane} {copy + 1}", tid[lane, copy]
        out.append({"ph": "M", "pid": rank, "tid": i, "name": "thread_name", "args": {"name": name}})
        out.append({"ph": "M", "pid": rank, "tid": i, "name": "thread_sort_index", "args": {"sort_index": i}})
    for e, copy in entries:
        args = {"bytes": e.n_bytes, "ranks": list(e.ranks), "axis": e.axis, "dtype": e.dtype, "peer": e.peer}
        args = {k: v for k, v in args.items() if v not in (0, [], "", -1) or (k == "peer" and v == 0)}
        out.append(
            {
                "ph": "X",
                "pid": e.rank,
                "tid": tid[e.lane, copy],
                "name": e.name,
                "cat": e.phase or e.lane,
                "ts": round((e.start - origin) * 1e6, 3),
                "dur": round((e.end - e.start) * 1e6, 3),
                "args": args,
            }
        )
    path = Path(path)
    path.write_text(json.dumps({"traceEvents": out, "displayTimeUnit": "ms"}))
    return path


def _fits(open_ends: list[float], e: Event) -> bool:
    """Closes what has ended before `e`; says whether `e` lies inside of what is still open."""
    while open_ends and open_ends[-1] <= e.start:
        open_ends.pop()
    return not open_ends or e.end <= open_ends[-1]
