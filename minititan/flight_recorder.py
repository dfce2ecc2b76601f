"""Flight recorder: which of a thousand ranks is everybody waiting for, and why?

A collective ends for nobody before its last member has come. One rank that skips a call, swaps two, brings another
shape, sleeps or dies therefore stops all of them, and the stack of 999 ranks shows the same innocent line. What tells
them apart is the *record*: each rank's calls, numbered in each group, must be the same list on all members.

    rank 0   #1 all_gather   #2 all_reduce   #3 all_gather . waits
    rank 1   #1 all_gather   #2 all_reduce   #3 all_gather . waits         for each group and number:
    rank 2   #1 all_gather   #2 all_reduce   #3 all_reduce . waits    ◄──  who differs? who never came?
    rank 3   #1 all_gather   #2 all_reduce   #3 all_gather . waits

Two records. torch's own *ring buffer* holds the last 2,000 collectives, with stack, on gloo as on NCCL; about 1.5 us
a call. It dies with its process, and gloo aborts in C++ on unequal sizes before anything can be dumped. So there is a
*journal by hand*: before each call its fingerprint goes into a file mapped into memory. The kernel keeps a page that
was written once, so SIGKILL and abort lose nothing. It hooks the dispatcher's BackendSelect key of the `c10d::`
operators: Python, DDP's C++ reducer, FSDP, DTensor, inference mode, all pass; an operator that is no collective costs
nothing. A lock on a file says who is gone: the kernel releases it, however a process ends.

A *watchdog* thread looks while the main thread waits. When a collective is older than `patience`, it asks everybody
(a file in the common folder) and each rank dumps: its calls, where it stands, who is gone.

`explain` follows who waits for whom to a rank that waits for nobody, and compares its calls, in program order, with
those of a rank that waits. Of the explanations skipped / exchanged / one too many it takes the one that accounts for
most calls. If half stands against half, the side that did the same before is taken for right; a record cannot know.

    the record                                                    cause
    its list lacks one call, and then goes on as the others'      missing
    two calls exchanged (in one group or across two)              order
    the same call, other numbers                                  shape, dtype
    its list is too short, and it is alive / gone / raised        slow / dead / failed

Cost        measured in notebook 16. Journal: 512 bytes a slot, 2 MiB a rank; no call to the system for a collective.
On NCCL     torch dumps by itself, in its own watchdog: set `nccl_environment(folder)` before init_process_group. The
            entries then also know scheduled/started/completed. `explain` reads those files as well as ours.
Not here    a skipped call among equal ones from the same line (a loop's `continue`): the record shows one call too few,
            not which. Wrong values: see the parity tests. Several folders: all ranks must see one (a shared file system).
References  https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html · torch.distributed.flight_recorder
            (`torchfrtrace`) · Jiang et al. 2024, MegaScale, arXiv 2402.15627 (diagnosis of hangs at 10,000 GPUs)
"""

import ast
import contextlib
import fcntl
import gc
import io
import json
import linecache
import logging
import mmap
import os
import pathlib
import pickle
import shutil
import signal
import struct
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

Folder = str | os.PathLike

# ---------------------------------------------------------------------------------------------------- by hand

# operator of c10d: its name, and the argument with what this rank puts in
_OPERATORS = {
    "allreduce_": ("all_reduce", 0), "allreduce_coalesced_": ("all_reduce", 0), "reduce_": ("reduce", 0),
    "allgather_": ("all_gather", 1), "_allgather_base_": ("all_gather", 1), "allgather_coalesced_": ("all_gather", 1),
    "allgather_into_tensor_coalesced_": ("all_gather", 1), "reduce_scatter_": ("reduce_scatter", 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1), "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "broadcast_": ("broadcast", 0), "gather_": ("gather", 1), "scatter_": ("scatter", 1), "barrier": ("barrier", None),
    "alltoall_": ("all_to_all", 1), "alltoall_base_": ("all_to_all", 1), "send": ("send", 0), "recv_": ("recv", 0),
}  # fmt: skip
_POINT_TO_POINT = ("send", "recv")
_HEADER, _SLOT = 64, 512  # bytes
_TORCH = os.path.dirname(torch.__file__) + os.sep


class JournalByHand:
    """A rank's last `slots` collectives in `folder`, written before each starts, in memory that outlives the process.

    Files: journal_R (mapped), status_R.json (groups, and how it ended), alive_R (locked as long as the process lives).
    """

    def __init__(self, folder: Folder, slots: int = 4096):
        if slots < 1:
            raise ValueError(f"a journal of {slots} slots holds nothing: give at least 1, better some steps' worth")
        self.folder, self.slots, self.rank = pathlib.Path(folder), slots, dist.get_rank()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.count, self.numbers, self.lock = 0, {}, threading.Lock()
        self.status = {"rank": self.rank, "world": dist.get_world_size(), "groups": {}, "state": "running"}
        for name in (f"calls_{self.rank}.json", f"rank_{self.rank}"):  # of an earlier run
            (self.folder / name).unlink(missing_ok=True)
        self.alive = open(self.folder / f"alive_{self.rank}", "w")  # noqa: SIM115
        fcntl.lockf(self.alive, fcntl.LOCK_EX)
        with open(self.folder / f"journal_{self.rank}", "w+b") as file:
            file.truncate(_HEADER + slots * _SLOT)
            self.map = mmap.mmap(file.fileno(), 0)
        struct.pack_into("<QQ", self.map, 0, 0, slots)
        self.save_status()

    def save_status(self) -> None:
        _write(self.folder / f"status_{self.rank}.json", json.dumps(self.status).encode())

    def note(self, name: str, at: int | None, args: tuple) -> None:
        """Write down one call of a c10d operator, from its arguments."""
        group = next(a for a in args if isinstance(a, torch.ScriptObject) and hasattr(a, "_type") and _is_group(a))
        group = dist.ProcessGroup.unbox(group)
        members = dist.get_process_group_ranks(group)
        tensors = [] if at is None else list(_tensors(args[at]))
        key = f"{group.group_name} {members if len(members) < self.status['world'] else 'all'}"
        if name in _POINT_TO_POINT:  # each direction between two ranks is a group of its own
            peer = members[args[2]]
            members = [self.rank, peer] if name == "send" else [peer, self.rank]
            key += f" {members[0]}>{members[1]}"
        with self.lock:
            if key not in self.numbers:
                self.numbers[key] = 0 if name in _POINT_TO_POINT else _last_number(group)
                self.status["groups"][key] = members
                self.save_status()
            self.numbers[key] += 1
            shapes = [list(t.shape) for t in tensors[:8]]
            dtypes = sorted({str(t.dtype).removeprefix("torch.") for t in tensors})
            more = len(tensors) - len(shapes)
            where = _where(sys._getframe(2))
            call = [key, self.numbers[key], name, shapes + [[more, "more"]] * (more > 0), dtypes, where, time.time()]
            text = json.dumps(call).encode()
            if len(text) > _SLOT:
                text = json.dumps([*call[:3], [], dtypes, where[-80:], call[6]]).encode()[:_SLOT]
            start = _HEADER + self.count % self.slots * _SLOT
            self.map[start : start + _SLOT] = text.ljust(_SLOT)
            self.count += 1
            struct.pack_into("<Q", self.map, 0, self.count)  # last: a record counts when it is whole

    def hook(self) -> torch.library.Library:
        """Have every collective of this process noted, until `_destroy()`. All ways to call one end in these operators."""
        library = torch.library.Library("c10d", "IMPL")
        below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
        for operator, (name, at) in _OPERATORS.items():
            overload = getattr(torch.ops.c10d, operator).default

            def noted(keys, *args, overload=overload, name=name, at=at, **kwargs):
                self.note(name, at, args)
                return overload.redispatch(keys & below, *args, **kwargs)

            library.impl(operator, noted, "BackendSelect", with_keyset=True)
        return library


def read_journal_by_hand(path: Folder) -> list[dict]:
    """The calls in a journal, oldest first, whatever became of its writer."""
    data = pathlib.Path(path).read_bytes()
    count, slots = struct.unpack_from("<QQ", data)
    calls = []
    for i in range(max(0, count - slots), count):
        start = _HEADER + i % slots * _SLOT
        with contextlib.suppress(ValueError):  # it was killed while it wrote over this one
            calls.append(_call(*json.loads(data[start : start + _SLOT])))
    return calls


def _call(group, number, name, shapes, dtypes, where, seconds) -> dict:
    return {
        "group": group, "number": number, "name": name, "shapes": shapes, "dtypes": dtypes, "where": where, "time": seconds
    }  # fmt: skip


def _is_group(obj: torch.ScriptObject) -> bool:
    return "ProcessGroup" in obj._type().qualified_name()


def _tensors(nested) -> Iterator[Tensor]:
    if isinstance(nested, Tensor):
        yield nested
    else:
        for item in nested:
            yield from _tensors(item)


def _write(path: pathlib.Path, data: bytes) -> None:
    """All or nothing: who reads it meanwhile, or after a kill, gets the old file or the new one."""
    aside = path.with_name(f".{path.name}.{threading.get_ident()}")
    aside.write_bytes(data)
    os.replace(aside, path)


def _where(frame) -> str:
    """The innermost line that is not torch's."""
    last = frame
    while frame is not None and (
        frame.f_code.co_filename.startswith((_TORCH, "<")) or "contextlib" in frame.f_code.co_filename
    ):
        frame = frame.f_back
    code = (frame or last).f_code
    return f"{os.path.basename(code.co_filename)}, line {(frame or last).f_lineno}, in {code.co_name}"


# ----------------------------------------------------------------------------------------------------- native


def _ring(frames: bool = False, active_only: bool = False) -> dict:
    """torch's ring buffer: NCCL's where that is the backend, gloo's otherwise."""
    if "nccl" in dist.get_backend_config() and hasattr(torch._C._distributed_c10d, "_dump_nccl_trace"):
        return pickle.loads(torch._C._distributed_c10d._dump_nccl_trace(True, frames, active_only))
    return pickle.loads(torch._C._distributed_c10d._dump_fr_trace(True, frames, active_only))


def _last_number(group: dist.ProcessGroup) -> int:
    """How many collectives a group has behind it, so that the journal numbers on as the ring buffer does."""
    mine = (e for e in _ring()["entries"] if e["process_group"][0] == group.group_name)
    return max((e["collective_seq_id"] for e in mine), default=0)


def _for_torch(ring: dict) -> dict:
    """A dump that torch's analyser takes: on gloo the ring knows neither the groups' members nor what is completed."""
    if set(ring["pg_config"]) <= {""}:
        world = dist.distributed_c10d._world
        ring["pg_config"] = {
            name: {"name": name, "desc": group.group_desc, "ranks": str(list(world.pg_group_ranks[group]))}
            for group, name in world.pg_names.items()
        }
        for entry in ring["entries"]:
            entry["state"] = "completed" if entry["retired"] else "scheduled"
    return ring


def _calls_of_ring(ring: dict, world: int) -> tuple[list[dict], dict[str, list[int]]]:
    """(calls, members by group) of torch's dump, ours or NCCL's."""
    members = {name: list(ast.literal_eval(str(c["ranks"]))) for name, c in ring["pg_config"].items() if name}
    calls, groups = [], {}
    for entry in ring["entries"]:
        name = entry["process_group"][0]
        if entry.get("is_p2p"):
            continue  # its peer is known by name only
        ranks = members.get(name) or list(range(world))
        key = f"{name} {ranks if len(ranks) < world else 'all'}"
        groups[key] = ranks
        frames = [f for f in entry.get("frames", []) if not f["filename"].startswith((_TORCH, "<"))]
        frames = [f for f in frames if "contextlib" not in f["filename"] and f["name"] != "noted"] or [
            {"filename": "?", "line": 0, "name": "?"}
        ]
        where = f"{os.path.basename(frames[0]['filename'])}, line {frames[0]['line']}, in {frames[0]['name']}"
        dtypes = sorted({_DTYPES.get(d, d.lower()) for d in entry["input_dtypes"]})
        what = entry["profiling_name"].split(":")[-1].removeprefix("_").removesuffix("_base")
        shapes = [list(s) for s in entry["input_sizes"]]
        seconds = entry["time_created_ns"] / 1e9
        calls.append(_call(key, entry["collective_seq_id"], what, shapes, dtypes, where, seconds))
    return calls, groups


_DTYPES = {"Float": "float32", "Double": "float64", "Half": "float16", "Long": "int64", "Int": "int32", "Byte": "uint8"}


def dump(folder: Folder | None = None) -> dict:
    """This rank's ring buffer as plain data, for `explain`: rank, world, groups, calls (numbered, with file and line).

    With a folder also written there: calls_R.json, and rank_R for torch's own analyser (`torch_analysis`). Take it before
    an exception is handled: a failed collective counts as completed then. It needs no `recording`.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    ring = _for_torch(_ring(frames=True))
    calls, groups = _calls_of_ring(ring, world)
    found = {"rank": rank, "world": world, "groups": groups, "calls": calls, "state": "running", "time": time.time()}
    found |= {"gone": [], "doing": _where(sys._getframe(1))}
    if folder is not None:
        pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
        _write(pathlib.Path(folder) / f"rank_{rank}", pickle.dumps(ring))
        _write(pathlib.Path(folder) / f"calls_{rank}.json", json.dumps(found).encode())
    return found


@contextlib.contextmanager
def recording(
    folder: Folder, patience: float | None = None, exit_code: int | None = None, slots: int = 4096
) -> Iterator[JournalByHand]:
    """Keep a journal of this rank's collectives, and with `patience` a watchdog. On every rank, one folder for all.

    patience: seconds that a collective may take before every rank dumps into the folder. The run is not touched, unless
    exit_code is given: then each rank ends with it after the dumps, so that torchrun starts again what gloo would let hang
    for 30 minutes. An exception that leaves the block is dumped too. A fresh folder for each run.
    """
    if not dist.is_initialized():
        raise ValueError("recording() needs a process group: call torch.distributed.init_process_group() first")
    if patience is not None and not patience > 0:
        raise ValueError(f"patience is a number of seconds above 0, or None for no watchdog; got {patience!r}")
    journal = JournalByHand(folder, slots)
    watchdog = _Watchdog(journal, patience, exit_code)
    library = journal.hook()
    try:
        if patience is not None:
            watchdog.start()
        yield journal
        journal.status["state"] = "ended"
    except BaseException as error:
        journal.status["state"] = f"failed: {type(error).__name__}: {error}".splitlines()[0][:300]
        watchdog.write_dump(ask=True, echo=_is_echo(journal.status["state"]))
        watchdog.await_peers(1.0 if patience is not None else 0.0)
        raise
    finally:
        watchdog.over.set()
        library._destroy()
        if watchdog.is_alive():
            watchdog.join()
        journal.save_status()
        journal.alive.close()


_ECHOES = ("connection closed by peer", "connection reset", "broken pipe", "timed out", "remote process exited")


def _is_echo(state: str) -> bool:
    """Whether an error only says that a peer has gone."""
    return any(words in state.lower() for words in _ECHOES)


class _Watchdog(threading.Thread):
    """Looks on while the main thread waits; dumps when a collective is too old, or when another rank asks for it."""

    def __init__(self, journal: JournalByHand, patience: float | None, exit_code: int | None):
        super().__init__(name="flight recorder", daemon=True)
        self.journal, self.patience, self.exit_code = journal, patience, exit_code
        self.folder, self.over, self.main = journal.folder, threading.Event(), threading.main_thread().ident
        self.asked, self.last_stuck = self.folder / "asked", None
        self.answered = self.time_asked()

    def time_asked(self) -> int:
        try:
            return os.stat(self.asked).st_mtime_ns
        except FileNotFoundError:
            return 0

    def run(self) -> None:
        _ring(frames=True)  # the first one with frames loads symbols: up to a second, not to be spent in an emergency
        while not self.over.wait(min(self.patience / 10, 0.5)):
            oldest, seconds = self.oldest()
            was_asked = self.time_asked() > self.answered + self.patience * 1e9  # several ask about one hang
            if was_asked or (seconds > self.patience and oldest != self.last_stuck):
                self.last_stuck = oldest
                self.write_dump(ask=not was_asked)
                if self.exit_code is not None:
                    self.await_peers(1.0)
                    os._exit(self.exit_code)

    def oldest(self) -> tuple[tuple | None, float]:
        """The oldest collective under way, or the send or recv that blocks the main thread, and since how many seconds."""
        now = time.time()
        for entry in _ring(active_only=True)["entries"]:
            if not entry["retired"]:
                return (entry["process_group"], entry["collective_seq_id"]), now - entry["time_created_ns"] / 1e9
        frame = sys._current_frames().get(self.main)
        if self.journal.count and frame is not None and frame.f_code.co_filename.endswith("distributed_c10d.py"):
            last = self.last_call()
            if last["name"] in _POINT_TO_POINT:
                return (last["group"], last["number"]), now - last["time"]
        return None, 0.0

    def last_call(self) -> dict:
        with self.journal.lock:
            start = _HEADER + (self.journal.count - 1) % self.journal.slots * _SLOT
            return _call(*json.loads(self.journal.map[start : start + _SLOT]))

    def write_dump(self, ask: bool, echo: bool = False) -> None:
        if ask:
            self.asked.touch()
        self.answered = self.time_asked()
        rank, journal = self.journal.rank, self.journal
        until = time.monotonic() + 0.5
        while not (gone := self.gone()) and echo and time.monotonic() < until:
            time.sleep(0.01)  # a dead process' sockets may be closed before its lock is released
        frame = sys._current_frames().get(self.main)
        doing = ""
        if journal.status["state"] == "running" and frame is not None:
            doing = _where(frame)
            while frame.f_back is not None and frame.f_code.co_filename.startswith((_TORCH, "<")):
                frame = frame.f_back
            doing += f": {linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()}".removesuffix(": ")
        calls = read_journal_by_hand(self.folder / f"journal_{rank}")
        found = journal.status | {"calls": calls, "doing": doing, "gone": gone, "time": time.time()}
        _write(self.folder / f"calls_{rank}.json", json.dumps(found).encode())
        with contextlib.suppress(Exception):  # for torch's analyser; ours does not need it
            _write(self.folder / f"rank_{rank}", pickle.dumps(_for_torch(_ring(frames=True))))

    def gone(self) -> list[int]:
        """Ranks whose process has ended without leaving its recording."""
        return [r for r in range(self.journal.status["world"]) if r != self.journal.rank and _is_gone(self.folder, r)]

    def await_peers(self, seconds: float) -> None:
        """Wait until all who live have dumped: who exits first must not take the others with it."""
        until, world = time.monotonic() + seconds, self.journal.status["world"]
        while time.monotonic() < until:
            written = {r for r in range(world) if (self.folder / f"calls_{r}.json").exists()}
            if all(r in written or _is_gone(self.folder, r) or _has_left(self.folder, r) for r in range(world)):
                return
            time.sleep(0.01)


def _has_left(folder: pathlib.Path, rank: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return json.loads((folder / f"status_{rank}.json").read_bytes())["state"] != "running"
    return False


def _is_gone(folder: pathlib.Path, rank: int) -> bool:
    with contextlib.suppress(FileNotFoundError, BlockingIOError), open(folder / f"alive_{rank}") as file:
        fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # refused as long as its owner lives
        return not _has_left(folder, rank)
    return False


def nccl_environment(folder: Folder, entries: int = 2000) -> dict[str, str]:
    """What to put into os.environ before init_process_group, so that NCCL's watchdog dumps into folder/rank_R itself."""
    return {
        "TORCH_FR_BUFFER_SIZE": str(entries),  # before torch 2.9: TORCH_NCCL_TRACE_BUFFER_SIZE
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",  # the timeout is that of the process group
        "TORCH_FR_DUMP_TEMP_FILE": os.path.join(os.fspath(folder), "rank_"),  # before: TORCH_NCCL_DEBUG_INFO_TEMP_FILE
        "TORCH_NCCL_ENABLE_MONITORING": "1",  # also when the watchdog itself hangs
    }


def torch_analysis(folder: Folder) -> str:
    """What torch's own analyser (`torchfrtrace FOLDER -p rank_`) says to the dumps in a folder."""
    told, out = logging.StreamHandler(io.StringIO()), io.StringIO()
    logger, collects = logging.getLogger("Flight Recorder"), gc.isenabled()
    logger.addFilter(keeps := lambda record: "tabulate" not in record.getMessage())  # an optional package
    from torch.distributed.flight_recorder import fr_trace

    others, logger.handlers[:] = list(logger.handlers), [told]
    try:
        with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
            fr_trace.main([os.fspath(folder), "-p", "rank_", "--allow-incomplete-ranks"])
    finally:
        logger.handlers[:] = others
        logger.removeFilter(keeps)
        if collects:
            gc.enable()  # it turns the collector off
    return (told.stream.getvalue() + out.getvalue()).strip()


# --------------------------------------------------------------------------------------------------- explain


@dataclass(frozen=True)
class Finding:
    """Which rank, which collective, what differs; `str()` is one sentence.

    cause: missing, order, extra, shape, dtype, slow, dead, failed; "none" when the records agree.
    """

    ranks: tuple[int, ...]
    cause: str
    collective: str
    number: int
    group: tuple[int, ...]
    sentence: str

    def __str__(self) -> str:
        return self.sentence


def read(folder: Folder) -> list[dict]:
    """What the ranks left in a folder: a rank's dump, else its journal, else (NCCL) torch's own dump."""
    folder, found = pathlib.Path(folder), {}
    for path in sorted(folder.glob("rank_*")):
        ring, rank = pickle.loads(path.read_bytes()), int(path.name.removeprefix("rank_"))
        world = 1 + max(max(ast.literal_eval(str(c["ranks"])), default=0) for c in ring["pg_config"].values())
        calls, groups = _calls_of_ring(ring, world)
        found[rank] = {"rank": rank, "world": world, "groups": groups, "calls": calls, "state": "running", "gone": []}
        found[rank] |= {"doing": "", "time": path.stat().st_mtime}
    for path in folder.glob("status_*.json"):
        status = json.loads(path.read_bytes())
        calls = read_journal_by_hand(folder / f"journal_{status['rank']}")
        found[status["rank"]] = status | {"calls": calls, "gone": [], "doing": "", "time": None}
    dumped = [json.loads(path.read_bytes()) for path in folder.glob("calls_*.json")]
    newest = max((d["time"] for d in dumped), default=0.0)
    found |= {d["rank"]: d for d in dumped if newest - d["time"] < 60}  # older: of a hang that passed
    if not found:
        raise ValueError(
            f"{folder.name} holds no dump and no journal: was it the folder given to recording() or dump()?"
        )
    return [found[rank] for rank in sorted(found)]


def _names(ranks: Iterable[int]) -> str:
    """rank 2, or ranks 0-3, 5."""
    spans: list[list[int]] = []
    for r in sorted(ranks):
        if spans and r == spans[-1][1] + 1:
            spans[-1][1] = r
        else:
            spans.append([r, r])
    plural = "s" if len(spans) > 1 or (spans and spans[0][0] < spans[0][1]) else ""
    return f"rank{plural} " + ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans)


def explain(dumps: Folder | Iterable[dict]) -> Finding:
    """Who differs, at which collective, in what: from a folder of dumps and journals, or from a list of `dump()`s."""
    dumps = read(dumps) if isinstance(dumps, (str, os.PathLike)) else list(dumps)
    if not dumps:
        raise ValueError("there are no dumps to explain: each rank's dump() is needed, or the folder of a recording()")
    return _Case(dumps).solve()


class _Case:
    def __init__(self, dumps: list[dict]):
        self.dumps = {d["rank"]: d for d in dumps}
        self.world = max(d["world"] for d in dumps)
        self.groups = {key: tuple(members) for d in dumps for key, members in d["groups"].items()}
        self.by_number: dict[str, dict[int, dict[int, dict]]] = defaultdict(dict)  # group -> rank -> number -> call
        for rank, d in self.dumps.items():
            for call in d["calls"]:
                self.by_number[call["group"]].setdefault(rank, {})[call["number"]] = call
        # the same code on every rank gives the same lists, group by group of the same size
        sizes = {key: len(members) for key, members in self.groups.items()}
        self.program = {
            rank: [(*self.content(c), c["where"], sizes[c["group"]]) for c in d["calls"]]
            for rank, d in self.dumps.items()
        }
        self.dumped = dumped = {
            d["rank"] for d in dumps if d["time"] is not None
        }  # they lived then, whatever came later
        first = min((d for d in dumps if d["gone"] and d["rank"] in dumped), key=lambda d: d["time"], default=None)
        if first is not None:
            self.gone = set(first["gone"]) - dumped
        elif dumped:
            self.gone = set(range(self.world)) - set(self.dumps)
        else:  # nobody could dump: all who have not left their recording are gone
            self.gone = {r for r in range(self.world) if self.state(r) == "running"}

    def state(self, rank: int) -> str:
        return self.dumps[rank]["state"] if rank in self.dumps else "running"

    @staticmethod
    def content(call: dict) -> tuple:
        name = "send/recv" if call["name"] in _POINT_TO_POINT else call["name"]
        if name in ("all_to_all", "scatter"):  # ranks may put in different amounts; only a scatter's root puts in any
            return name, "", *(call["dtypes"] if name == "all_to_all" else ())
        return name, json.dumps(call["shapes"]), *call["dtypes"]

    def solve(self) -> Finding:
        differing, lacking = [], []
        for key, by_rank in self.by_number.items():
            start = max(min(calls) for calls in by_rank.values())  # a ring forgets
            last = {r: max(by_rank.get(r, {0: None})) for r in self.groups[key]}
            for k in range(start, max(last.values()) + 1):
                made = {r: by_rank[r][k] for r in by_rank if k in by_rank[r]}
                if len({self.content(call) for call in made.values()}) > 1:
                    differing.append((min(call["time"] for call in made.values()), key, k, made))
                    break
            behind = [r for r in last if last[r] < max(last.values())]
            for r in behind:
                k = max(last[r] + 1, start)
                waiting = [q for q in by_rank if k in by_rank[q]]
                if waiting:
                    lacking.append((by_rank[waiting[0]][k]["time"], r, waiting, key, k))
        if differing:
            return self.of_difference(*min(differing, key=lambda d: d[:3])[1:])
        if lacking:
            return self.of_absence(lacking)
        return self.of_agreement()

    # --- the same number, another call

    def of_difference(self, key: str, k: int, made: dict[int, dict]) -> Finding:
        sides: dict[tuple, list[int]] = defaultdict(list)
        for rank, call in made.items():
            sides[self.content(call)].append(rank)

        def trust(ranks: list[int]) -> tuple:
            rank = min(ranks)
            return len(ranks), -self.objections(rank), *self.did_so_before(rank, made[rank]), -rank

        right = max(sides.values(), key=trust)
        wrong = sorted(set(made) - set(right))
        return self.classify(wrong, right, key, k)

    def objections(self, rank: int) -> int:
        """How many ranks have another program, as far as both go."""
        mine = self.program[rank]
        counts = Counter(tuple(p) for p in self.program.values())
        return sum(n for p, n in counts.items() if any(a != b for a, b in zip(p, mine, strict=False)))

    def did_so_before(self, rank: int, call: dict) -> tuple[bool, int]:
        """Whether the call came after the one before it in an earlier round too; and how long ago it was made last."""
        program, at = self.program[rank], self.dumps[rank]["calls"].index(call)
        pair = program[max(0, at - 1) : at + 1]
        again = any(program[i : i + len(pair)] == pair for i in range(at - len(pair) + 1))
        return again, next((n for n in range(1, at + 1) if program[at - n] == program[at]), 0)

    # --- a call that somebody has not made

    def of_absence(self, lacking: list[tuple]) -> Finding:
        waits_for: dict[int, set[int]] = defaultdict(set)
        for _, absent, waiting, *_ in lacking:
            for r in waiting:
                waits_for[r].add(absent)
        roots = sorted({absent for _, absent, *_ in lacking if absent not in waits_for})
        if self.dumped and self.gone and not self.gone & set(roots):
            return self.of_agreement()  # it died ahead of the others: they did not come, as they were ended too
        raised = [r for r in roots if self.state(r).startswith("failed") and not _is_echo(self.state(r))]
        causes = [r for r in roots if r in self.gone] or raised or roots
        if not causes:  # everybody waits for somebody: who has another program than most?
            around = sorted(waits_for)
            most = max(map(self.objections, around))
            causes = [r for r in around if self.objections(r) == most]
        relevant = sorted((x for x in lacking if x[1] in causes), key=lambda x: x[0])
        _, first, waiting, key, k = relevant[0]
        causes = [x[1] for x in relevant if x[3:] == (key, k)] if first in roots else causes
        right = [r for r in waiting if r not in causes] or waiting
        if not roots and len(causes) == len(waits_for):  # no majority: who did so before?
            late = {r: self.dumps[r]["calls"][-1] for r in causes}
            odd = [r for r in causes if not self.did_so_before(r, late[r])[0]]
            if odd and len(odd) < len(causes):
                rows = [x for x in relevant if x[1] in odd] or relevant
                causes, right, (key, k) = odd, [r for r in rows[0][2] if r not in odd], rows[0][3:]
        return self.classify(sorted(set(causes)), sorted(right), key, k)

    # --- in what do they differ?

    def classify(self, wrong: list[int], right: list[int], key: str, k: int) -> Finding:
        """Compare a wrong rank's program with that of a right one, from their first difference on."""
        c = wrong[0]
        a = next((r for r in right if r != c), None)
        ours, theirs = self.program.get(c, []), self.program[a]
        i = next((n for n, (x, y) in enumerate(zip(ours, theirs, strict=False)) if x != y), min(len(ours), len(theirs)))
        if i < len(ours) and i < len(theirs):
            others = [r for r, p in self.program.items() if p[: i + 1] == theirs[: i + 1]]
            same = [r for r in others if c in self.groups[self.dumps[r]["calls"][i]["group"]]]
            a, theirs = (same[0], self.program[same[0]]) if same else (a, theirs)
            mine, call = self.dumps[c]["calls"][i], self.dumps[a]["calls"][i]
            at = mine["where"]
            if ours[i][0] == theirs[i][0] and ours[i][-2:] == theirs[i][-2:]:
                return self.of_content(wrong, mine, call)
            best = self.best_edit(ours[i:], theirs[i:] + self.outlook(theirs))
            if best == "missing":
                later = "; or would call it only afterwards, the record ends here" if len(ours) == i + 1 else ""
                they = "it" if len(wrong) == 1 else "they"
                return self.told(wrong, "missing", call, f"never called {{it}}, in which {{others}} {{wait}} at {call['where']}: "
                                 f"{they} went on to {self.what(mine)} at {at}{later}")  # fmt: skip
            if best == "order":
                return self.told(wrong, "order", call, f"called {self.what(mine)} at {at} before {{it}}, which {{others}} "
                                 f"called first, at {call['where']}")  # fmt: skip
            if best == "extra":
                return self.told(wrong, "extra", mine, f"called {{it}} at {at}, which {{others}} never called: "
                                 f"{{others}} called {self.what(call)} there")  # fmt: skip
        made = self.by_number[key]
        if c in made and k in made[c]:  # other code, or an older difference: what the number says
            mine, call = made[c][k], made[a][k]
            if mine["name"] == call["name"]:
                return self.of_content(wrong, mine, call)
            return self.told(wrong, "order", call, f"called {mine['name']} as #{k} at {mine['where']}, where {{others}} "
                             f"called {{it}} at {call['where']}")  # fmt: skip
        for r, program in self.program.items():  # it stopped: what comes next in the program?
            if program[:i] == ours and len(program) > i and c in self.groups[self.dumps[r]["calls"][i]["group"]]:
                return self.of_state(wrong, self.dumps[r]["calls"][i])
        return self.of_state(wrong, made[a][k])

    @staticmethod
    def best_edit(ours: list, theirs: list) -> str | None:
        """Which single mistake accounts for most of our calls, and contradicts none?"""

        def account(expected: list) -> int:
            pairs = list(zip(ours, expected, strict=False))
            return len(pairs) if all(x == y for x, y in pairs) else 0

        ways = {"missing": account(theirs[1:]), "extra": account([ours[0], *theirs]) if len(ours) > 1 else 0}
        for j in range(1, min(8, len(theirs))):
            if theirs[j] == ours[0]:
                moved = [theirs[j], *theirs[1:j], theirs[0], *theirs[j + 1 :]]
                ways["order"] = account(moved) if len(ours) > j else 0  # seen whole, or it may as well be a skipped one
                break
        best = max(ways, key=lambda way: (ways[way], way == "order", way == "missing"))
        return best if ways[best] > 0 else None

    @staticmethod
    def outlook(program: list) -> list:
        """What probably comes next: what came after the last two calls in an earlier round, else the first round again."""
        end = program[-2:]
        for i in range(len(program) - 3, -1, -1):
            if program[i : i + 2] == end:
                return program[i + 2 :]
        return program

    def of_content(self, wrong: list[int], mine: dict, call: dict) -> Finding:
        cause = "shape" if mine["shapes"] != call["shapes"] else "dtype"
        return self.told(wrong, cause, call, f"put {self.tensors(mine)} into {{it}} at {mine['where']}, where {{others}} "
                         f"put {self.tensors(call)}", bare=True)  # fmt: skip

    def of_state(self, wrong: list[int], call: dict) -> Finding:
        rank, state = wrong[0], self.state(wrong[0])
        calls = self.dumps[rank]["calls"] if rank in self.dumps else []
        last = f"its last call was {self.what(calls[-1])} at {calls[-1]['where']}" if calls else "it left no record"
        wait = f"in which {{others}} {{wait}} at {call['where']}"
        if rank in self.gone:
            all_gone = "" if self.dumped else " (as all did, and nobody could dump; this one was furthest behind)"
            return self.told(wrong, "dead", call, f"died{all_gone} before {{it}}, {wait}; {last}")
        if state.startswith("failed"):
            return self.told(
                wrong,
                "failed",
                call,
                f"{state.replace('failed', 'failed with', 1).replace(':', '', 1)} before {{it}}, {wait}",
            )
        if state == "ended":
            return self.told(wrong, "missing", call, f"never called {{it}}, {wait}: it has ended; {last}")
        dumped = self.dumps.get(rank, {})
        idle = max(0.0, (dumped.get("time") or call["time"]) - call["time"])
        doing = dumped.get("doing")
        doing = f"{idle:.1f} s after them rank {rank} is at {doing}" if doing else (
            "it does not answer: it is stopped, or in native code that holds the interpreter")  # fmt: skip
        have = "has" if len(wrong) == 1 else "have"
        return self.told(wrong, "slow", call, f"{have} not called {{it}}, {wait}; {doing}")

    def of_agreement(self) -> Finding:
        calls = {r: d["calls"][-1] for r, d in self.dumps.items() if d["calls"]}
        gone = sorted(self.gone & set(calls))
        raised = [r for r in sorted(self.dumps) if self.state(r).startswith("failed") and not _is_echo(self.state(r))]
        if raised or (gone and len(gone) < self.world):
            rank = (raised or gone)[0]
            call = calls.get(rank) or next(iter(calls.values()))
            how = self.state(rank).replace("failed: ", "failed with ") if raised else "died"
            return self.told(
                raised or gone, "failed" if raised else "dead", call, f"{how} in or after {{it}} at {call['where']}"
            )
        last = max(calls.values(), key=lambda c: c["time"], default=None)
        at = f"; the last call is {self.what(last)} at {last['where']}" if last else ""
        if gone:
            at += f"; {_names(gone)} are gone"
        name, number, key = (last["name"], last["number"], last["group"]) if last else ("", 0, "")
        return Finding((), "none", name, number, self.groups.get(key, ()), f"no rank differs{at}.")

    def told(self, wrong: list[int], cause: str, call: dict, text: str, bare: bool = False) -> Finding:
        group = self.groups[call["group"]]
        made = self.by_number[call["group"]]
        others = [r for r in group if r not in wrong and call["number"] in made.get(r, ())] or [
            r for r in group if r not in wrong
        ]
        text = text.format(it=self.what(call, bare), others=_names(others), wait="wait" if len(others) > 1 else "waits")
        name = call["name"]
        return Finding(tuple(wrong), cause, name, call["number"], group, f"{_names(wrong)} {text}.")

    def what(self, call: dict, bare: bool = False) -> str:
        group = self.groups[call["group"]]
        of_group = f" of the group of {_names(group)}" if len(group) < self.world else ""
        tensors = "" if bare or not call["dtypes"] else f" ({self.tensors(call)})"
        return f"{call['name']} #{call['number']}{of_group}{tensors}"

    @staticmethod
    def tensors(call: dict) -> str:
        shapes = ", ".join(str(s) for s in call["shapes"][:3]) + (", ..." if len(call["shapes"]) > 3 else "")
        return f"{'/'.join(call['dtypes'])} {shapes}".strip()


# -------------------------------------------------------------------------------------------------- the labs


def laboratory(
    folder: Folder, fault: str = "", culprits: Iterable[int] = (2,), step: int = 2, collective: str = "all_gather",
    n_steps: int = 4, patience: float = 0.5, exit_code: int | None = None
) -> None:  # fmt: skip
    """Run on an even number of ranks: steps of three overlapped collectives, with one fault of the culprits in one step.

    fault: skip, swap (all_gather and broadcast), cross (all_gather and all_reduce, each waited for at once: two groups
    that wait for each other), shape, dtype, sleep, die, or "" for none.
    collective: where skip, shape, dtype, sleep and die happen: all_gather, broadcast (of all), or all_reduce (in pairs).
    """
    faults = ("", "skip", "swap", "cross", "shape", "dtype", "sleep", "die")
    if fault not in faults or collective not in _LABORATORY or not 0 <= step < n_steps:
        raise ValueError(
            f"fault {fault!r} of {faults}, collective {collective!r} of {(*_LABORATORY,)}, step {step} < {n_steps}"
        )
    rank, n = dist.get_rank(), dist.get_world_size()
    pair = [dist.new_group([r, r + 1]) for r in range(0, n - 1, 2)][rank // 2]
    with recording(folder, patience, exit_code):
        for now in range(n_steps):
            names, wrong = list(_LABORATORY), now == step and rank in culprits
            if wrong and fault in ("swap", "cross"):
                i, j = (0, 2) if fault == "swap" else (0, 1)
                names[i], names[j] = names[j], names[i]
            works = []
            for name in names:
                size, dtype = 8, torch.float32
                if wrong and name == collective:
                    if fault == "skip":
                        continue
                    if fault == "sleep":
                        time.sleep(60)
                    elif fault == "die":
                        _await_others(folder)
                        os.kill(os.getpid(), signal.SIGKILL)
                    size, dtype = 9 if fault == "shape" else 8, torch.float64 if fault == "dtype" else torch.float32
                works.append(_LABORATORY[name](torch.ones(size, dtype=dtype), pair))
                if fault == "cross":
                    works.pop().wait()
            for work in works:
                work.wait()


def _await_others(folder: Folder) -> None:
    """Until each other rank's journal is longer than ours: it dies while they wait for it."""
    rank, until = dist.get_rank(), time.monotonic() + 10
    paths = [pathlib.Path(folder) / f"journal_{r}" for r in range(dist.get_world_size())]
    while time.monotonic() < until:
        counts = [struct.unpack("<Q", path.read_bytes()[:8])[0] if path.exists() else 0 for path in paths]
        if all(n > counts[rank] for r, n in enumerate(counts) if r != rank):
            return
        time.sleep(0.01)


def _gather_weights(x: Tensor, pair: dist.ProcessGroup) -> dist.Work:
    return dist.all_gather([torch.empty_like(x) for _ in range(dist.get_world_size())], x, async_op=True)


def _reduce_gradients(x: Tensor, pair: dist.ProcessGroup) -> dist.Work:
    return dist.all_reduce(x, group=pair, async_op=True)


def _share_loss(x: Tensor, pair: dist.ProcessGroup) -> dist.Work:
    return dist.broadcast(x, src=0, async_op=True)


_LABORATORY: dict[str, Callable] = {
    "all_gather": _gather_weights, "all_reduce": _reduce_gradients, "broadcast": _share_loss
}  # fmt: skip


def demo() -> None:
    """The journal by hand equals torch's ring buffer, call for call; a rank that comes late is named, the run goes on."""
    on_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
    dist.init_process_group("nccl" if on_gpus else "gloo", device_id=device if on_gpus else None)
    rank, world = dist.get_rank(), dist.get_world_size()
    place = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(place)
    folder, x = pathlib.Path(place[0]), torch.ones(8, device=device)
    with recording(folder):
        for step in range(1, 6):
            dist.all_reduce(x[:step].clone())
            dist.all_gather([torch.empty_like(x) for _ in range(world)], x)
            dist.broadcast(x.double(), src=step % world)
        ring = dump()["calls"][-15:]
        by_hand = read_journal_by_hand(folder / f"journal_{rank}")
    fields = ("group", "number", "name", "shapes", "dtypes", "where")
    wrong = sum(any(a[f] != b[f] for f in fields) for a, b in zip(by_hand, ring, strict=True))
    wrong = torch.tensor(wrong, device=device)
    dist.all_reduce(wrong)
    if rank == 0:
        print(f"journal by hand against the ring buffer: {wrong.item()} of {15 * world} calls differ")
    with recording(folder / "late", patience=0.3):
        until = time.monotonic() + 30
        while rank == 1 and time.monotonic() < until and not (folder / "late" / "calls_1.json").exists():
            time.sleep(0.05)  # late until somebody has asked
        dist.all_reduce(x)
    dist.barrier()
    found = explain(folder / "late")
    if rank == 0:
        print(found)
    if wrong.item() or (found.ranks, found.cause) != ((1,), "slow"):
        raise SystemExit(f"{wrong.item()} calls differ, or the late rank was not named: {found}")
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder)
    dist.destroy_process_group()
    print(end="", flush=True)
    os._exit(0)  # about one finished gloo process in ten aborts while the interpreter exits


if __name__ == "__main__":
    demo()
