"""A network and processors of known speed, on a machine that has neither: sleep, on purpose and labelled.

Four ranks on two cores cannot show overlap: their compute gets in each other's way, and loopback is either free or
slow for reasons that have nothing to do with bytes. So the arithmetic runs as it is, exactly, and takes *at least*
the time that a described machine would need. Who sleeps needs no core; sixteen ranks can be busy at once on two.

    with link(bytes_per_s=50e6, latency_s=1e-3), processor(flops_per_s=2e9):
        step()                                     # every collective and every matmul takes its time, or longer
    with at_least(0.020):                          # or one stretch of code, such as a pipeline stage
        y = stage(x)

    rank 0  compute   [ matmul ][ matmul ][ matmul ]          waits for the link only where the program waits for it
            link      [== all_gather ==][== send ==]          one wire a rank: messages leave one after the other

**How.** A ``TorchDispatchMode`` stands where every collective becomes one ``c10d::`` operator. It answers at once with
a ``Work`` of its own; a thread, the wire, sleeps for the message's latency and bytes and only then starts the real
operation. The receiver, or the group, is done when the real operation is: no rank can finish before the last one has
begun and its wire has carried. What a rank sends is the ring's share, as `lab.trace.traffic` counts it; a recv costs
nothing, the sender's wire has paid.

A matmul, convolution or attention operator is counted by torch's own table of flops (forward and backward), then
sleeps until its time is over. Its inputs and outputs are never touched: results are bit for bit those of a plain run.

What it is not: a network simulator. No congestion, no topology, one wire a rank for all its groups; sleep is exact
to about 0.1 ms, so describe times of milliseconds. A collective that fails raises where it is waited for, or at the
next one. The label of `describe()` belongs in the title of a figure. Open a `recording()` inside of the link.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from minititan.lab import trace


def _flops(func, args: tuple, kwargs: dict, out) -> int:
    """By torch's table, which lacks the CPU's flash attention."""
    name = func._overloadpacket.__name__
    if name == "_scaled_dot_product_flash_attention_for_cpu":
        return sdpa_flop_count(*(t.shape for t in args[:3]))
    if name == "_scaled_dot_product_flash_attention_for_cpu_backward":
        return sdpa_backward_flop_count(*(t.shape for t in args[:4]))
    count = flop_registry.get(func._overloadpacket)
    return count(*args, **kwargs, out_val=out) if count else 0


def _sleep_until(moment: float) -> None:
    if (left := moment - time.monotonic()) > 0:
        time.sleep(left)


# --- compute ---------------------------------------------------------------------------------------------------


@contextmanager
def at_least(seconds: float) -> Iterator[None]:
    """`with at_least(0.02): ...` or `@at_least(0.02)`: sleeps at the end until `seconds` have passed.

    ValueError for a negative or infinite time.
    """
    _check(seconds=seconds)
    began = time.monotonic()
    yield
    _sleep_until(began + seconds)


class _Processor(TorchDispatchMode):
    def __init__(self, flops_per_s: float):
        super().__init__()
        self.flops_per_s = flops_per_s

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if trace._is_wrapper(types):
            return NotImplemented
        began = time.monotonic()
        out = func(*args, **(kwargs or {}))
        _sleep_until(began + _flops(func, args, kwargs or {}, out) / self.flops_per_s)
        return out


@contextmanager
def processor(flops_per_s: float) -> Iterator[None]:
    """Inside, every matmul-like operator of this rank takes at least its flops / flops_per_s.

    Backward included, also where autograd runs it on its own thread. ValueError unless flops_per_s is above 0.
    """
    _check(flops_per_s=flops_per_s, above=0.0)
    with _Processor(flops_per_s):
        yield


# --- link ------------------------------------------------------------------------------------------------------


class _Wire:
    """One thread that lets a rank's messages out one after the other, each after its time on the wire."""

    def __init__(self, bytes_per_s: float, latency_s: float):
        self.bytes_per_s, self.latency_s = bytes_per_s, latency_s
        self.free_at, self.under_way, self.jobs = 0.0, [], queue.SimpleQueue()
        self.error: Exception | None = None  # the first one; Work.wait() of a work from a future would not raise it
        self.told = False
        self.hurry, self.wait = threading.Event(), dist.Work.wait
        self.thread = threading.Thread(target=self.run, daemon=True, name="emulated link")
        self.thread.start()

    def put(self, seconds: float, start, result: list) -> torch.futures.Future:
        """`start()` begins the real operation and returns its Work; the future is done when that is over."""
        self.free_at = max(self.free_at, time.monotonic()) + seconds
        done = self.expect()
        self.jobs.put((self.free_at, start, done, result))
        return done

    def arrives(self, work: dist.Work, result: list) -> torch.futures.Future:
        """Nothing to carry, only to be told of: a recv that is under way already."""
        done = self.expect()
        self.follow(work, done, result)
        return done

    def expect(self) -> torch.futures.Future:
        self.under_way = [f for f in self.under_way if not f.done()]  # a future holds its tensors
        self.under_way.append(done := torch.futures.Future())
        return done

    def run(self) -> None:
        while job := self.jobs.get():
            self.carry(*job)
            job = None  # or the tensors of the last message would live until the next one

    def carry(self, moment: float, start, done: torch.futures.Future, result: list) -> None:
        self.hurry.wait(max(0.0, moment - time.monotonic()))
        try:
            with torch.inference_mode():  # gloo copies into tensors that autograd, or inference, may own
                work = start()
        except Exception as error:
            self.fail(done, error)
        else:
            self.follow(work, done, result)

    def follow(self, work: dist.Work, done: torch.futures.Future, result: list) -> None:
        """A thread for each: the next message may leave before this one is received, as on a real wire."""

        def finish():
            try:
                with torch.inference_mode():
                    self.wait(work)
            except Exception as error:
                self.fail(done, error)
            else:
                done.set_result(result)  # what DistributedDataParallel reads it from

        threading.Thread(target=finish, daemon=True, name="emulated message").start()

    def fail(self, done: torch.futures.Future, error: Exception) -> None:
        self.error = self.error or error
        done.set_exception(error)

    def check(self) -> None:
        if self.error is not None:
            self.told = True
            raise self.error

    def close(self, patience_s: float) -> None:
        """Waits for what nobody has waited for; what is then still to be sent goes at once, so that no peer hangs."""
        end = time.monotonic() + patience_s
        for done in self.under_way:
            while not done.done() and time.monotonic() < end:
                time.sleep(1e-3)
        self.hurry.set()
        self.jobs.put(None)
        self.thread.join(1.0)


class _Link(TorchDispatchMode):
    works_have_futures = True  # `lab.trace` then sees the true end of a send or reduce_scatter too

    def __init__(self, wire: _Wire):
        super().__init__()
        self.wire = wire

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if trace._is_wrapper(types):
            return NotImplemented
        name = func.__name__.partition(".")[0]
        if func.namespace in trace._FUNCTIONAL and name not in trace._NOT_A_COLLECTIVE:
            with self:  # its kernel calls a c10d operator, which comes by here
                return func.redispatch(trace._backend_keys(args), *args, **kwargs)
        if func.namespace in trace._FUNCTIONAL and name == "wait_tensor":
            out = func(*args, **kwargs)
            self.wire.check()
            return out
        if func.namespace != "c10d" or name not in trace._COLLECTIVES or name == "monitored_barrier_":
            return func(*args, **kwargs)
        self.wire.check()

        def start():  # straight to the backend: what autograd has to say, it has said on the caller's thread
            out = func.redispatch(trace._backend_keys(args), *args, **kwargs)
            return dist.Work.unbox(out[-1] if isinstance(out, tuple) else out)

        if name == "recv_any_source_":
            return start().boxed()  # its Work knows who it was
        result = [t for t in tree_leaves(args[0]) if isinstance(t, torch.Tensor)]
        if name == "recv_":
            done = self.wire.arrives(start(), result)
        else:
            event = trace.Event(rank=dist.get_rank(), start=0.0, end=0.0, **trace._describe(name, args))
            sent = sum(n_bytes for _, n_bytes in trace._sends(event))
            done = self.wire.put(_hops(event) * self.wire.latency_s + sent / self.wire.bytes_per_s, start, result)
        work = torch._C._distributed_c10d._create_work_from_future(done).boxed()
        return work if len(func._schema.returns) == 1 else (args[0], work)


def _hops(event: trace.Event) -> int:
    """Messages that follow one another in the ring."""
    n = event.group_size
    if event.name in ("send", "barrier"):
        return int(event.name == "send")
    return 2 * (n - 1) if event.name == "all_reduce" else n - 1


@contextmanager
def link(bytes_per_s: float, latency_s: float = 0.0) -> Iterator[None]:
    """Inside, every message of this rank leaves by a wire of so many bytes/s, `latency_s` seconds a hop.

    A blocking collective blocks so long; an asynchronous one is under way meanwhile, whoever waits for it waits.
    Every rank must open the same link. At the end it waits up to 5 s for what nobody has waited for.
    ValueError unless bytes_per_s is above 0 and latency_s at least 0; also around a link or in a recording, which
    would see nothing of what the wire's thread does.
    """
    _check(bytes_per_s=bytes_per_s, above=0.0)
    _check(latency_s=latency_s)
    if trace._open:
        raise ValueError(f"{len(trace._open)} recording is open around the link and would be empty: open it inside")
    if any(isinstance(mode, _Link) for mode in _get_current_dispatch_mode_stack()):
        raise ValueError("2 links, one in the other: a message has 1 wire; close the first")
    wire = _Wire(bytes_per_s, latency_s)

    def wait_or_raise(work, *args, **kwargs):
        out = wire.wait(work, *args, **kwargs)
        wire.check()
        return out

    dist.Work.wait = wait_or_raise
    patience_s = 5.0
    try:
        with _Link(wire):
            yield
    except BaseException:
        patience_s = 0.0
        raise
    finally:
        dist.Work.wait = wire.wait
        wire.close(patience_s)
    if not wire.told:
        wire.check()


def describe(bytes_per_s: float | None = None, latency_s: float = 0.0, flops_per_s: float | None = None) -> str:
    """The label that every figure of an emulated run carries: "emulated: 50 MB/s after 1 ms a hop, 2 GFLOP/s"."""
    parts = []
    if bytes_per_s is not None:
        parts.append(f"{bytes_per_s / 1e6:g} MB/s after {latency_s * 1e3:g} ms a hop")
    if flops_per_s is not None:
        parts.append(f"{flops_per_s / 1e9:g} GFLOP/s")
    return "emulated: " + (", ".join(parts) or "nothing")


def _check(above: float | None = None, **named: float) -> None:
    ((name, value),) = named.items()
    wrong = not 0 <= value < float("inf") or (above is not None and value <= above)
    if wrong:
        least = "above 0" if above is not None else "at least 0"
        raise ValueError(f"{name}={value!r}: a finite number {least} is needed")
