"""What runs outside the kernel: the fork server, and the body of one rank.

    kernel ──launch()──> fork server (torch imported, nothing run) ──fork──> rank 0 .. n-1

The kernel is never forked: a process that has run one matmul owns worker threads that do not survive a fork.
The server has imported torch and done nothing else, so its children start in milliseconds and are sound.

A rank has four file descriptors: `control` (a socket; the job comes in, the result goes out, a request for a
report may come at any time), its stdout, its stderr, and, held by the server, `exits`, on which the server
writes the pid at birth and the wait status at death. The end of the kernel ends the server (end of file on its
socket), and the end of the server ends the ranks (PR_SET_PDEATHSIG), so nothing outlives a kernel.

Only `launch.py` starts this file. Messages are length-prefixed cloudpickle bytes.
"""

import contextlib
import ctypes
import gc
import importlib
import io
import json
import linecache
import os
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field
from typing import Any

import cloudpickle

inside_rank: int | None = None  # this process is a rank: launch() refuses to start ranks inside ranks


@dataclass
class Job:
    """What a rank is told at its start."""

    rank: int
    ranks: int
    device: str
    threads: int
    port: int  # of the kernel's TCPStore, where there is no store_file
    store_file: str  # on Linux: a file in memory, that the kernel owns
    timeout: float
    call: bytes  # cloudpickle of (fn, args)
    cwd: str
    path: list[str]
    environ: dict[str, str]
    warning_filters: list
    sources: dict[str, list[str]] = field(default_factory=dict)  # cell file name -> its lines, for tracebacks
    cells: dict[str, str] = field(default_factory=dict)  # cell file name -> "cell 5"


# ---------------------------------------------------------------------------------------------- messages


def pack(message: Any) -> bytes:
    body = cloudpickle.dumps(message)
    return struct.pack("!Q", len(body)) + body


def _read_exactly(sock: socket.socket, n: int) -> bytes:
    data = bytearray()
    while len(data) < n:
        chunk = sock.recv(min(n - len(data), 1 << 20))
        if not chunk:
            raise EOFError
        data += chunk
    return bytes(data)


def read_message(sock: socket.socket) -> Any:
    (n,) = struct.unpack("!Q", _read_exactly(sock, 8))
    return cloudpickle.loads(_read_exactly(sock, n))


# ------------------------------------------------------------------------------------------ the fork server


def serve(fd: int) -> None:
    """Fork a rank for each request on the socket `fd`, tell its death on the pipe that came with it.

    A request is `b"fork"` with the descriptors (control, out, err, exits), `b"kill <pid>"`, or `b"import <module>"`,
    which is answered.
    """
    channel = socket.socket(fileno=fd)
    _preload()
    gc.collect()
    gc.freeze()  # the children share these pages; without this the first collection copies them all
    wake_r, wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    exits: dict[int, int] = {}  # pid -> descriptor on which its death is told
    channel.sendall(b"ready")

    import selectors

    with selectors.DefaultSelector() as selector:
        selector.register(channel, selectors.EVENT_READ)
        selector.register(wake_r, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is channel:
                    request, fds, _, _ = socket.recv_fds(channel, 1024, 4)
                    if not request:  # the kernel is gone
                        for pid in exits:
                            _kill_group(pid)
                        os._exit(0)
                    if request == b"fork":
                        pid = os.fork()
                        if pid == 0:
                            for other in (*exits.values(), fds[3], wake_r, wake_w):
                                os.close(other)
                            signal.set_wakeup_fd(-1)
                            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                            channel.close()
                            try:
                                run(*fds[:3], parent=os.getppid())
                            finally:
                                os._exit(70)
                        for given in fds[:3]:
                            os.close(given)
                        exits[pid] = fds[3]
                        _tell(fds[3], f"pid {pid}\n")
                    elif request.startswith(b"import "):
                        channel.sendall(_import(request[7:].decode()))
                    elif (pid := int(request.split()[1])) in exits:
                        _kill_group(pid)
                else:
                    with contextlib.suppress(BlockingIOError):
                        os.read(wake_r, 4096)
                    for pid in list(exits):
                        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                            _kill_group(pid)  # what the rank itself started; its pid is still reserved
                            _, status = os.waitpid(pid, 0)
                            _tell(exits[pid], f"exit {os.waitstatus_to_exitcode(status)}\n")
                            os.close(exits.pop(pid))


def _tell(fd: int, text: str) -> None:
    with contextlib.suppress(OSError):  # the kernel no longer listens
        os.write(fd, text.encode())


def _kill_group(pid: int) -> None:
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def _import(name: str) -> bytes:
    """Import a module that later ranks are to be born with -> b"imported", or what is wrong with it."""
    tasks = "/proc/self/task"
    before = len(os.listdir(tasks)) if os.path.isdir(tasks) else 0
    try:
        importlib.import_module(name)
    except Exception as error:
        return f"{type(error).__name__}: {error}".encode()[:1000]
    more = len(os.listdir(tasks)) - before if before else 0
    if more > 0:
        return f"its import starts {more} threads, which ranks that are forked would lack".encode()
    gc.collect()
    gc.freeze()
    return b"imported"


def _preload() -> None:
    """Import what ranks need, and run nothing."""
    import torch
    import torch._dynamo  # fully_shard imports it at its first call: a second of every rank's time
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel  # noqa: F401

    with contextlib.suppress(ImportError):
        import numpy  # noqa: F401


# ---------------------------------------------------------------------------------------- the body of a rank


def run(control_fd: int, out_fd: int, err_fd: int, parent: int | None = None) -> None:
    """Be one rank: take the job, call the function, send its result, wait to be dismissed. Never returns."""
    with contextlib.suppress(PermissionError):  # already a leader: the spawn way starts it in its own session
        os.setsid()
    _die_with_parent(parent)
    _redirect(out_fd, err_fd)
    control = socket.socket(fileno=control_fd)
    send_lock = threading.Lock()

    def send(message: dict) -> None:
        data = pack({"time": time.monotonic()} | message)
        with send_lock:
            control.sendall(data)

    try:
        job: Job = read_message(control)
        main_thread = threading.get_ident()
        threading.Thread(
            target=_answer_control, args=(control, send, main_thread, job), name="control", daemon=True
        ).start()
        try:
            result = _call(job)
        except BaseException as error:
            _flush()
            send(_describe_error(error, job))
        else:
            _flush()
            send({"kind": "result", "value": result})
        threading.Event().wait()  # keep the connections of the others alive until the kernel dismisses us
    except (BrokenPipeError, ConnectionResetError, EOFError):
        os._exit(1)  # the kernel is gone


def _call(job: Job) -> bytes:
    """Set this process up as rank `job.rank`, call the function, return its result as bytes."""
    import warnings

    global inside_rank
    inside_rank = job.rank
    os.chdir(job.cwd)
    sys.path[:] = job.path
    os.environ.clear()
    os.environ.update(job.environ)
    os.environ.update(
        RANK=str(job.rank),
        LOCAL_RANK=str(job.rank),
        WORLD_SIZE=str(job.ranks),
        LOCAL_WORLD_SIZE=str(job.ranks),
    )
    if sys.platform == "linux":  # every rank is on this host: do not depend on how its name resolves
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    for name, lines in job.sources.items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)

    import datetime

    import torch
    import torch.distributed as dist

    torch.set_num_threads(job.threads)
    if job.device == "cuda":
        torch.cuda.set_device(job.rank)
    # the launcher's own deadline comes first and reports more than gloo's
    patience = datetime.timedelta(seconds=max(job.timeout, 1) + 3600)
    if job.store_file:
        store = dist.FileStore(job.store_file, job.ranks)
    else:
        store = dist.TCPStore("127.0.0.1", job.port, is_master=False, timeout=patience)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if job.device == "cuda" else "cpu:gloo",
        store=store,
        rank=job.rank,
        world_size=job.ranks,
        timeout=patience,
    )
    warnings.filters[:] = job.warning_filters
    fn, args = cloudpickle.loads(job.call)
    value = fn(*args)
    return _dump_result(value, job.rank)


class _ResultPickler(cloudpickle.Pickler):
    """Tensors travel as CPU copies of what they show, not of the storage they look into; DTensors do not travel."""

    def __init__(self, file: io.BytesIO, rank: int):
        super().__init__(file)
        self.rank = rank

    def reducer_override(self, obj: Any):
        import torch

        if isinstance(obj, torch.Tensor):
            from torch.distributed.tensor import DTensor

            if isinstance(obj, DTensor):
                raise ValueError(
                    f"rank {self.rank} returned a DTensor (global shape {tuple(obj.shape)}, placements "
                    f"{obj.placements}): its mesh exists only on the ranks. Return .full_tensor() for the whole "
                    "tensor (a collective: call it on every rank) or .to_local() for this rank's shard."
                )
            plain = type(obj) in (torch.Tensor, torch.nn.Parameter)
            if plain and obj.layout == torch.strided and obj.device.type != "meta":
                wasteful = obj.untyped_storage().nbytes() > obj.nbytes
                if obj.is_cuda or wasteful or obj.grad_fn is not None:
                    return obj.detach().to("cpu", copy=True).contiguous().__reduce_ex__(2)
        return super().reducer_override(obj)


def _dump_result(value: Any, rank: int) -> bytes:
    buffer = io.BytesIO()
    try:
        _ResultPickler(buffer, rank).dump(value)
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(
            f"rank {rank} returned something that cannot be sent to the notebook (a {type(value).__name__}): "
            f"{error}. Return tensors, dataclasses or plain data."
        ) from None
    return buffer.getvalue()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    with contextlib.suppress(Exception):
        ctypes.CDLL(None).fflush(None)  # what C code printed


def _redirect(out_fd: int, err_fd: int) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (out_fd, 1), (err_fd, 2)):
        os.dup2(source, target)
        os.close(source)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    for fd, name in ((1, "stdout"), (2, "stderr")):
        stream = open(fd, "w", 1, "utf-8", "backslashreplace", closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _die_with_parent(parent: int | None) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if parent is not None and os.getppid() != parent:
            os._exit(1)


# --------------------------------------------------------------------- what a rank says about itself


def _answer_control(control: socket.socket, send, main_thread: int, job: Job) -> None:
    """In a thread of its own: answer requests for a report while the main thread waits; end with the kernel."""
    try:
        while True:
            read_message(control)  # the only request there is
            send({"kind": "report"} | position(main_thread, job))
    except Exception:
        os._exit(0)  # dismissed, or the kernel is gone; not sys.exit: gloo may abort in the interpreter's end


def position(thread: int, job: Job) -> dict:
    """Where this rank is: its stack as text, the collective that it waits in, how far each group has come."""
    frame = sys._current_frames().get(thread)
    stack = list(traceback.StackSummary.extract(traceback.walk_stack(frame)))  # innermost first
    stack = stack[: _index_of_body(stack)]
    call = next((f.name for f in stack if f.filename.endswith("distributed_c10d.py") and f.name[0] != "_"), None)
    own = next((f for f in stack if not _is_library(f.filename)), stack[0] if stack else None)
    where = ""
    if own is not None:
        where = f"{shown_path(own.filename, job)}, line {own.lineno}, in {own.name}"
        where += f": {own.line}" if own.line else ""
    return {"where": where, "call": call, **collectives()}


def collectives() -> dict:
    """The flight recorder's view: each group's calls by number, and what is unfinished, oldest first."""
    groups: dict[str, dict[int, str]] = {}
    pending: list[dict] = []
    try:
        import torch
        from torch.distributed import distributed_c10d as c10d

        ranks = {name: sorted(c10d._world.pg_group_ranks[pg]) for pg, name in c10d._world.pg_names.items()}
        entries = json.loads(torch._C._distributed_c10d._dump_fr_trace_json(True, False)).get("entries", [])
        for entry in entries:
            group, _ = entry["process_group"]
            name = entry["profiling_name"].split(":")[-1].removeprefix("_").removesuffix("_base")
            one = {
                "group": group,
                "ranks": ranks.get(group, []),
                "name": name,
                "number": entry["collective_seq_id"],
                "sizes": entry["input_sizes"],
                "dtypes": sorted({_DTYPES.get(d, d.lower()) for d in entry["input_dtypes"]}),
            }
            groups.setdefault(group, {})[one["number"]] = name
            if not entry["retired"]:
                pending.append(one)
    except Exception:  # a report is best effort: it must not hide the failure that it describes
        pass
    return {"groups": groups, "pending": pending}


_DTYPES = {"Float": "float32", "Double": "float64", "Half": "float16", "Long": "int64", "Int": "int32", "Byte": "uint8"}


def _describe_error(error: BaseException, job: Job) -> dict:
    text = traceback_text(error, job)
    if isinstance(error, SystemExit):
        text = f"SystemExit: the function called sys.exit({error.code!r}); return a value instead\n" + text
    try:
        data = cloudpickle.dumps(error)
        cloudpickle.loads(data)
    except Exception:
        data = None
    summary = "".join(traceback.format_exception_only(error)).strip()
    return {"kind": "error", "text": text, "summary": summary, "exception": data}


def traceback_text(error: BaseException, job: Job) -> str:
    """The traceback from the user's function on, with cells by number and no absolute path."""
    told = traceback.TracebackException.from_exception(error)
    seen: set[int] = set()
    stack = [told]
    while stack:
        one = stack.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        one.stack[:] = [f for f in one.stack if f.filename != __file__]
        for f in one.stack:
            _ = f.line  # read the source before the name changes
            f.filename = shown_path(f.filename, job)
        stack += [one.__cause__, one.__context__, *(getattr(one, "exceptions", None) or [])]
    return "".join(told.format()).rstrip()


def _index_of_body(stack: list) -> int:
    """Where, from the innermost frame on, the launcher's own frames begin."""
    return next((i for i, f in enumerate(stack) if f.filename == __file__), len(stack))


def _is_library(filename: str) -> bool:
    """Not what the learner wrote: nor is this folder, whose trace and emulation stand around a wait."""
    library = ("site-packages", f"lib{os.sep}python3", "<frozen", "<string>", "<__array_function__")
    return any(part in filename for part in (*library, os.path.dirname(__file__) + os.sep))


def shown_path(filename: str, job: Job) -> str:
    """`cell 5`, a path below the working directory, or one that starts at a package: never an absolute path."""
    if filename in job.cells:
        return job.cells[filename]
    for marker in (
        "site-packages" + os.sep,
        f"lib{os.sep}python{sys.version_info[0]}.{sys.version_info[1]}{os.sep}",
    ):
        if marker in filename:
            return filename.split(marker, 1)[1]
    for base in (job.cwd, *job.path):
        if base and os.path.isabs(filename) and filename.startswith(base + os.sep):
            return filename[len(base) + 1 :]
    return os.path.basename(filename) if os.path.isabs(filename) else filename
