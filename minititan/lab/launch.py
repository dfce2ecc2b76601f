"""Run a function from a notebook cell on N fresh ranks, in about a tenth of a second.

    def hello(word):
        rank = torch.tensor(dist.get_rank())
        dist.all_reduce(rank)
        return f"{word}: the ranks' sum is {rank}"

    launch(hello, "from a cell", ranks=4)      # -> four strings, by rank

The ranks are processes forked from a server that has imported torch and run nothing (see `_ranks.py`), so
neither a matmul nor a CUDA context in the kernel can break them. The function travels by value (cloudpickle):
closures and functions written in a cell work. Each rank has an initialised default process group, gloo on CPU
or NCCL on GPUs, and the environment that torchrun gives (RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE).

What the ranks print is shown as it comes, labelled, equal lines folded: `[rank 0-3] ...`. What goes wrong is
raised as `RankError` in the cell: the first failing rank's own traceback, then a line on where each other rank
was. A launch that does not end within `timeout` is ended, with one sentence on who keeps whom waiting, in which
collective (the words are those of `flight_recorder.explain`), then a line on each rank. When `launch` returns or
raises, its processes, sockets and descriptors are gone.

`python -m minititan.lab.launch --benchmark` measures it beside torchrun and beside spawning.
"""

import argparse
import collections
import contextlib
import inspect
import io
import linecache
import os
import pickle
import selectors
import signal
import socket
import struct
import sys
import time
import types
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import cloudpickle
import torch
import torch.distributed as dist

from minititan.lab import _ranks
from minititan.lab._output import Output, names
from minititan.lab._start import ForkServer, Spawner

__all__ = ["RankError", "launch", "preload", "rank_device"]


class RankError(RuntimeError):
    """A rank failed, died, or did not end in time.

    Attributes:
        rank: the first rank that failed; None after a timeout.
        exception: that rank's exception, where it could be sent; else None.
        positions: rank -> one line on where that rank was.
    """

    def __init__(self, message: str, rank: int | None = None, exception=None, positions: dict | None = None):
        super().__init__(message)
        self.rank = rank
        self.exception = exception
        self.positions = positions or {}

    def _render_traceback_(self) -> list[str]:
        """What IPython shows: the ranks' story, not the launcher's frames."""
        return [f"RankError: {self}"]


def rank_device() -> torch.device:
    """This rank's device: `cuda:LOCAL_RANK` when the process group has NCCL, else the CPU. Also under torchrun."""
    if dist.is_initialized() and "nccl" in dist.get_backend_config():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    return torch.device("cpu")


def launch(
    fn: Callable,
    *args: Any,
    ranks: int = 4,
    device: str = "auto",
    timeout: float = 60.0,
    threads: int = 1,
    start: str = "auto",
    torchrun: bool = False,
) -> list:
    """Run `fn(*args)` on `ranks` fresh processes and return the list of their results, by rank.

    Args:
        fn: any function, one from a cell too. It, its closure and `args` are sent by value.
        ranks: number of processes.
        device: "cpu" (gloo), "cuda" (NCCL, one GPU a rank) or "auto": CUDA when there are `ranks` GPUs.
        timeout: seconds from the ranks' start to the last result.
        threads: torch threads of each rank.
        start: "forkserver" (Linux), "spawn" (a new interpreter a rank: seconds), or "auto": the first that works.
        torchrun: also print the torchrun line that does the same.

    Raises:
        ValueError: an argument is out of range or cannot be sent; nothing was started.
        RuntimeError: called inside a rank, or after `init_process_group` in this process; nothing was started.
        RankError: a rank raised, died, returned what cannot be sent, or did not end in time. All ranks are ended.
    """
    _check_place()
    if not callable(fn):
        raise ValueError(f"launch needs a function, got {fn!r}: write launch(fn, *args), not launch(fn(*args))")
    for name, value in (("ranks", ranks), ("threads", threads)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} must be a positive integer, got {value!r}")
    if not isinstance(timeout, (int, float)) or not 0 < timeout < float("inf"):
        raise ValueError(f"timeout must be a positive number of seconds, got {timeout!r}")
    if start not in ("auto", "forkserver", "spawn"):
        raise ValueError(f"start must be 'auto', 'forkserver' or 'spawn', got {start!r}")
    if start == "forkserver" and not sys.platform.startswith("linux"):
        raise ValueError(f"start='forkserver' works on Linux only, this is {sys.platform}: use start='spawn'")
    device = _choose_device(device, ranks)
    call = _dump_call(fn, args)
    if torchrun:
        print(torchrun_line(fn, ranks))
    forked = start == "forkserver" or (start == "auto" and sys.platform.startswith("linux"))
    server = ForkServer.of_this_process() if forked else None
    return _Launch(call, ranks, device, float(timeout), threads, server).run()


def preload(*modules: str) -> None:
    """Import `modules` once, where ranks are forked from, so that later launches find them imported already.

    For what takes seconds to import, such as "transformers". Where ranks are spawned (not Linux) it does nothing.
    Raises ImportError: a module that is missing, fails, or starts threads, which a forked rank would lack.
    """
    _check_place()
    if not sys.platform.startswith("linux"):
        return
    for module in modules:
        if module not in ForkServer._wanted:
            ForkServer.of_this_process().preload(module)
            ForkServer._wanted.append(module)


def torchrun_line(fn: Callable, ranks: int) -> str:
    """The shell command that runs `fn` on as many ranks outside the notebook."""
    module = getattr(fn, "__module__", "__main__")
    if module != "__main__":
        return f"torchrun --nproc-per-node {ranks} -m {module}"
    name = getattr(fn, "__name__", "fn")
    return f"torchrun --nproc-per-node {ranks} script.py  # script.py: init_process_group(), then {name}()"


# ------------------------------------------------------------------------------- what is refused at once


def _check_place() -> None:
    if _ranks.inside_rank is not None:
        raise RuntimeError(
            f"launch() was called inside rank {_ranks.inside_rank} of another launch: ranks do not start ranks. "
            "The process group of the outer launch is ready here; use torch.distributed directly, or "
            "dist.new_group for a part of the ranks."
        )
    if dist.is_available() and dist.is_initialized():
        raise RuntimeError(
            f"this process already belongs to a process group (rank {dist.get_rank()} of {dist.get_world_size()}): "
            "init_process_group belongs inside the function that you launch, and there launch() has already done "
            "it. Call torch.distributed.destroy_process_group() here, then launch again."
        )


_told_device: set[str] = set()


def _choose_device(device: str, ranks: int) -> str:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device must be 'auto', 'cpu' or 'cuda', got {device!r}")
    if device == "cuda" and gpus < ranks:
        raise ValueError(
            f"device='cuda' needs one GPU a rank: {ranks} ranks, but this machine has {gpus}. "
            + (f"Use ranks={gpus} or device='cpu'." if gpus else "Use device='cpu'.")
        )
    if device == "auto":
        device = "cuda" if gpus >= ranks else "cpu"
        told = f"{device}, {gpus}"
        if told not in _told_device:  # say it once, and again when the answer changes
            _told_device.add(told)
            print(
                f"[launch] {ranks} ranks on {'CUDA with NCCL' if device == 'cuda' else 'the CPU with gloo'}: {gpus} GPUs here"
            )
    return device


class _CallPickler(cloudpickle.Pickler):
    """Functions keep the file name of their cell (cloudpickle drops it), so that tracebacks can show its lines."""

    @staticmethod
    def _reduce_code(code: types.CodeType):
        build, parts = cloudpickle.Pickler.dispatch_table[types.CodeType](code)
        return build, tuple(code.co_filename if part == "<dynamic-code>" else part for part in parts)

    dispatch_table: ClassVar = collections.ChainMap({types.CodeType: _reduce_code}, cloudpickle.Pickler.dispatch_table)


def _dump_call(fn: Callable, args: tuple) -> bytes:
    buffer = io.BytesIO()
    try:
        _CallPickler(buffer).dump((fn, args))
        return buffer.getvalue()
    except Exception as error:
        name = getattr(fn, "__qualname__", repr(fn))
        culprits = [(f"argument {i} of {name}", value) for i, value in enumerate(args)]
        with contextlib.suppress(TypeError):
            used = inspect.getclosurevars(fn)
            culprits += [(f"{k!r}, which {name} uses", v) for k, v in (used.nonlocals | used.globals).items()]
        for what, value in culprits:
            try:
                cloudpickle.dumps(value)
            except Exception as cause:
                raise ValueError(
                    f"{what}, cannot be sent to the ranks (a {type(value).__name__}): {cause}. "
                    f"Create it inside {name}, on each rank."
                ) from None
        raise ValueError(f"{name} cannot be sent to the ranks: {error}") from None


# --------------------------------------------------------------------------------------- one launch


class _Rank:
    """What the kernel knows of one rank."""

    def __init__(self, rank: int):
        self.rank = rank
        self.started = False
        self.pid: int | None = None
        self.control, self.their_control = socket.socketpair()
        self.out, self.their_out = os.pipe()
        self.err, self.their_err = os.pipe()
        self.exits, self.their_exits = os.pipe()
        self.inbox = bytearray()
        self.exit_text = b""
        self.result: bytes | None = None
        self.error: dict | None = None
        self.report: dict | None = None
        self.exit_code: int | None = None
        self.gone_at: float | None = None  # when its death was seen; exit_code None then: the server died too
        self.open = True

    def close_theirs(self) -> None:
        self.their_control.close()
        for fd in (self.their_out, self.their_err, self.their_exits):
            os.close(fd)

    def close(self) -> None:
        self.control.close()
        if not self.started:
            self.close_theirs()
        for fd in (self.out, self.err, self.exits):
            os.close(fd)

    def take(self) -> None:
        """Read what has come on the control socket; file the messages that are complete."""
        try:
            chunk = self.control.recv(1 << 20)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            chunk = b""
        if not chunk:
            self.open = False
            return
        self.inbox += chunk
        while len(self.inbox) >= 8:
            (n,) = struct.unpack("!Q", self.inbox[:8])
            if len(self.inbox) < 8 + n:
                return
            message = cloudpickle.loads(bytes(self.inbox[8 : 8 + n]))
            del self.inbox[: 8 + n]
            if message["kind"] == "result":
                self.result = message["value"]
            elif message["kind"] == "error":
                self.error = message
            else:
                self.report = message

    def take_exit(self) -> bool:
        """Read birth and death from the exits pipe; True at its end."""
        chunk = os.read(self.exits, 4096)
        self.exit_text += chunk
        for line in self.exit_text.decode().splitlines():
            word, number = line.split()
            if word == "pid":
                self.pid = int(number)
            else:
                self.exit_code = int(number)
        if self.gone_at is None and (self.exit_code is not None or not chunk):
            self.gone_at = time.monotonic()
        return not chunk

    @property
    def failed_at(self) -> float | None:
        if self.result is not None:
            return None  # it has delivered: how its interpreter ends does not matter
        if self.error is not None:
            return self.error["time"]
        return self.gone_at


class _Launch:
    def __init__(self, call: bytes, ranks: int, device: str, timeout: float, threads: int, server: ForkServer | None):
        self.call, self.device, self.timeout, self.threads = call, device, timeout, threads
        self.starter = server or Spawner()
        self.selector = selectors.DefaultSelector()
        self.ranks = [_Rank(r) for r in range(ranks)]
        self.output = Output(ranks)
        self.store, self.store_fd, self.port, self.store_file = None, -1, 0, ""

    def run(self) -> list:
        try:
            self._open_store()
            self._start()
            self._follow()
        finally:
            self._end()
        return [pickle.loads(rank.result) for rank in self.ranks]

    def _open_store(self) -> None:
        """Where the ranks find each other. On Linux a file in memory: connecting to a TCPStore asks the name server for
        the loopback address, which without a network (seen here in 1 of 10) takes 5 s."""
        if hasattr(os, "memfd_create"):
            self.store_fd = os.memfd_create("minititan")
            self.store_file = f"/proc/{os.getpid()}/fd/{self.store_fd}"
        else:
            self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            self.port = self.store.port

    def _start(self) -> None:
        sources, cells = _cell_sources()
        for rank in self.ranks:
            job = _ranks.Job(
                rank=rank.rank,
                ranks=len(self.ranks),
                device=self.device,
                threads=self.threads,
                port=self.port,
                store_file=self.store_file,
                timeout=self.timeout,
                call=self.call,
                cwd=os.getcwd(),
                path=[os.path.abspath(p) for p in sys.path],
                environ=dict(os.environ),
                # a test runner's own categories would have every rank import it
                warning_filters=[f for f in warnings.filters if f[2].__module__ in ("builtins", "torch")],
                sources=sources,
                cells=cells,
            )
            fds = (rank.their_control.fileno(), rank.their_out, rank.their_err, rank.their_exits)
            try:
                self.starter.start_rank(job, *fds)
            except OSError:  # the server has died since it was last looked at
                self.starter = ForkServer.of_this_process()
                self.starter.start_rank(job, *fds)
            rank.close_theirs()
            rank.started = True
            self._register(rank)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                rank.control.sendall(_ranks.pack(job))
            rank.control.setblocking(False)

    def _register(self, rank: _Rank) -> None:
        def read_output(fd: int, stream: str):
            def read():
                chunk = os.read(fd, 1 << 18)
                self.output.feed(rank.rank, stream, chunk)
                return not chunk

            return read

        def read_control():
            rank.take()
            return not rank.open

        read = selectors.EVENT_READ
        self.selector.register(rank.control, read, read_control)
        self.selector.register(rank.out, read, read_output(rank.out, "stdout"))
        self.selector.register(rank.err, read, read_output(rank.err, "stderr"))
        self.selector.register(rank.exits, read, rank.take_exit)

    def _pump(self, seconds: float) -> None:
        """Wait for news for at most `seconds`, take it, show what is to be shown."""
        if isinstance(self.starter, Spawner):
            self.starter.poll()
            seconds = min(seconds, 0.02)
        for key, _ in self.selector.select(max(seconds, 0)):
            if key.data():
                self.selector.unregister(key.fileobj)
        self.output.show()

    def _follow(self) -> None:
        deadline = time.monotonic() + self.timeout
        while any(rank.result is None for rank in self.ranks):
            if any(rank.failed_at is not None for rank in self.ranks):
                self._fail()
            if time.monotonic() > deadline:
                self._hang()
            self._pump(min(0.05, max(deadline - time.monotonic(), 0)))

    def _ask(self, patience: float) -> None:
        """Ask every rank that lives where it is, and wait for the answers."""
        asked = [rank for rank in self.ranks if rank.failed_at is None and rank.open and rank.exit_code is None]
        for rank in asked:
            rank.report = None
            with contextlib.suppress(OSError):
                rank.control.send(_ranks.pack("report"))
        until = time.monotonic() + patience
        while time.monotonic() < until and any(r.report is None and r.gone_at is None for r in asked):
            self._pump(0.02)

    def _fail(self) -> None:
        self._ask(0.4)
        patience = time.monotonic() + 3.0
        while True:  # a death may be told a moment after its peers' complaints about it
            failed = [rank for rank in self.ranks if rank.failed_at is not None]
            if not all(map(_lost_connection, failed)) or time.monotonic() > patience:
                break
            self._pump(0.02)
        first = min(failed, key=lambda rank: (_lost_connection(rank), rank.failed_at))
        positions = {r.rank: self._position(r) for r in self.ranks if r is not first}
        exception = None
        if first.error is not None:
            head = f"rank {first.rank} of {len(self.ranks)} failed: {first.error['summary']}"
            body = first.error["text"]
            if first.error["exception"] is not None:
                exception = cloudpickle.loads(first.error["exception"])
        else:
            head, body = f"rank {first.rank} of {len(self.ranks)} {_death(first)}", ""
        raise RankError(_story(head, body, positions), first.rank, exception, positions) from None

    def _hang(self) -> None:
        self._ask(1.0)
        late = [rank.rank for rank in self.ranks if rank.result is None]
        positions = {rank.rank: self._position(rank) for rank in self.ranks}
        head = f"no result from {names(late)} within {self.timeout:g} s"
        head += f": {differs}" if (differs := self._differs()) else ""
        raise RankError(_story(head, "", positions), None, None, positions)

    def _position(self, rank: _Rank) -> str:
        me = f"rank {rank.rank}"
        if rank.result is not None:
            return f"{me} has returned"
        if rank.error is not None:
            return f"{me} failed too: {rank.error['summary'].splitlines()[0][:200]}"
        if rank.gone_at is not None:
            return f"{me} {_death(rank)}"
        if rank.report is None:
            return f"{me} does not answer: it is stopped, or in native code that holds the interpreter"
        where = rank.report["where"]
        if rank.report["pending"]:
            one = rank.report["pending"][0]
            behind = "".join(f"; {names(who)} {words} it" for words, who in self._late(one).items())
            behind += "".join(f"; {names(who)} {words}" for words, who in self._elsewhere(one).items())
            return f"{me} waits in {self._what(one)} at {where}{behind}"
        if rank.report["call"]:
            return f"{me} is in {rank.report['call']} at {where}"
        return f"{me} is at {where}" if where else f"{me} is starting or has nothing to do"

    # The words are those of flight_recorder.explain, which knows more: each rank's calls with their lines. Here is what
    # the numbers say. (A technique and the lab do not import each other; a test compares the two on the same faults.)

    def _differs(self) -> str:
        """Who keeps the others waiting, in which collective; nothing when all wait for each other."""
        waits = {r.rank: r.report["pending"][0] for r in self.ranks if r.report and r.report["pending"]}
        callers: dict[str, list[int]] = {}
        for r, one in waits.items():
            callers.setdefault(self._what(one), []).append(r)
        for what, right in sorted(callers.items(), key=lambda item: -len(item[1])):
            one = waits[right[0]]
            for words, who in self._elsewhere(one).items():
                return f"{names(who)} {words}, where {names(right)} called {what}"
            for words, who in self._late(one).items():
                if not waits.keys() & set(who):
                    return f"{names(who)} {words} {what}, in which {names(right)} {'wait' if right[1:] else 'waits'}"
        return ""

    def _what(self, one: dict) -> str:
        whose = f" of the group of {names(one['ranks'])}" if len(one["ranks"]) != len(self.ranks) else ""
        shapes = ", ".join(str(s) for s in one["sizes"][:3]) + (", ..." if len(one["sizes"]) > 3 else "")
        tensors = f" ({'/'.join(one['dtypes'])} {shapes})" if one["dtypes"] else ""
        return f"{one['name']} #{one['number']}{whose}{tensors}"

    def _calls(self, one: dict) -> dict[int, dict[int, str]]:
        """What each member that answers has called in this group, by number."""
        reports = {r: self.ranks[r].report for r in one["ranks"]}
        return {r: report["groups"].get(one["group"], {}) for r, report in reports.items() if report}

    def _late(self, one: dict) -> dict[str, list[int]]:
        """Who of the group has not come to a collective that another one waits in."""
        late = [r for r, calls in self._calls(one).items() if max(calls, default=0) < one["number"]]
        never, yet = ([r for r in late if (self.ranks[r].result is not None) is back] for back in (True, False))
        return {words: who for words, who in (("never called", never), (_have(yet) + " not called", yet)) if who}

    def _elsewhere(self, one: dict) -> dict[str, list[int]]:
        """Who of the group called another collective under the same number."""
        told: dict[str, list[int]] = {}
        for r, calls in self._calls(one).items():
            if (name := calls.get(one["number"], one["name"])) != one["name"]:
                told.setdefault(f"called {name} as #{one['number']}", []).append(r)
        return told

    def _end(self) -> None:
        """Dismiss or end every rank, wait until it is gone, close everything. No exception leaves a rank alive."""
        interrupted = None
        while True:
            try:
                self._dismiss()
                break
            except KeyboardInterrupt as again:  # a second interrupt must not leave ranks behind
                interrupted = again
        self._close()
        if interrupted is not None:
            raise interrupted

    def _dismiss(self) -> None:
        done = all(rank.result is not None for rank in self.ranks)
        for rank in self.ranks:
            if rank.open and rank.control.fileno() >= 0:
                with contextlib.suppress(KeyError):
                    self.selector.unregister(rank.control)
                rank.control.close()  # the rank's control thread reads the end of file and exits
            rank.open = False
        grace = time.monotonic() + (1.0 if done else 0.0)
        end = grace + 5.0
        while left := [rank for rank in self.ranks if rank.started and rank.gone_at is None]:
            if time.monotonic() > end:
                break
            if time.monotonic() >= grace:
                for rank in left:
                    if rank.pid is not None:
                        self.starter.kill(rank.pid)
            self._pump(0.02)
        drain = time.monotonic() + 0.5
        outputs = {fd for rank in self.ranks for fd in (rank.out, rank.err)}
        while outputs & set(self.selector.get_map()) and time.monotonic() < drain:
            self._pump(0.02)
        self.output.show(last=True)

    def _close(self) -> None:
        self.selector.close()
        for rank in self.ranks:
            rank.close()
        self.store = None
        if self.store_fd >= 0:
            os.close(self.store_fd)
            self.store_fd = -1


def _cell_sources() -> tuple[dict[str, list[str]], dict[str, str]]:
    """The source of every notebook cell run so far, by its pseudo file name, and how a cell is called."""
    sources = {
        name: entry[2]
        for name, entry in list(linecache.cache.items())
        if len(entry) == 4 and entry[2] and not os.path.exists(name)
    }
    cells = dict.fromkeys(sources, "cell")
    with contextlib.suppress(Exception):
        from IPython import get_ipython

        cells |= {name: f"cell {n}" for name, n in get_ipython().compile._filename_map.items()}
    return sources, cells


def _have(ranks: list[int]) -> str:
    return "have" if len(ranks) > 1 else "has"


def _lost_connection(rank: _Rank) -> bool:
    """Whether this failure is only the echo of a peer's death."""
    if rank.error is None:
        return False
    text = rank.error["summary"].lower()
    echoes = ("connection closed by peer", "connection reset by peer", "broken pipe", "remote process exited")
    return any(echo in text for echo in echoes)


def _death(rank: _Rank) -> str:
    if rank.exit_code is None:
        return "was lost: the launcher's fork server died"
    if rank.exit_code < 0:
        name = signal.Signals(-rank.exit_code).name
        hint = {"SIGKILL": " (out of memory?)", "SIGABRT": " (native code aborted; see its stderr above)"}
        return f"was killed by {name}{hint.get(name, '')}"
    return f"ended with exit code {rank.exit_code} before it returned (os._exit?)"


def _story(head: str, body: str, positions: dict[int, str]) -> str:
    lines = [head]
    if body:
        lines += ["", body, ""]
    lines += [f"  {line}" for line in positions.values()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Run a function from a notebook on N ranks.")
    parser.add_argument("--benchmark", action="store_true", required=True, help="print how long a start takes")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3, help="turns; a turn has 5 warm launches")
    given = parser.parse_args()
    from minititan.lab import _benchmark  # it needs this module whole

    _benchmark.show(_benchmark.measure(given.ranks, given.repeats), given.ranks)


if __name__ == "__main__":
    main()
