"""How the kernel starts ranks: through a fork server, or each as a new interpreter. Used by `launch.py` only."""

import atexit
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from typing import ClassVar

from minititan.lab import _ranks


def _bootstrap(call: str) -> list[str]:
    """The command of an interpreter that finds this package as this process does, and then makes `call`."""
    code = f"import sys; sys.path[:] = {sys.path!r}; from minititan.lab import _ranks; _ranks.{call}"
    return [sys.executable, "-c", code]


class ForkServer:
    """The process that forks ranks. Started by the first launch, one a process, replaced when it has died."""

    _current: "ForkServer | None" = None
    _guard = threading.Lock()
    _wanted: ClassVar[list[str]] = []  # modules to import, again where a server is replaced

    @classmethod
    def of_this_process(cls) -> "ForkServer":
        with cls._guard:
            current = cls._current
            if current is None or current.owner != os.getpid() or current.process.poll() is not None:
                if current is not None and current.owner == os.getpid():
                    current.close()
                cls._current = None  # stays so when the start fails
                cls._current = cls()
                for module in cls._wanted:
                    cls._current.preload(module)
            return cls._current

    def __init__(self):
        self.owner = os.getpid()
        self.lock = threading.Lock()
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, tempfile.TemporaryFile() as complaints:  # the file has no name: nothing is left behind
            self.process = subprocess.Popen(
                _bootstrap(f"serve({theirs.fileno()})"),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=complaints,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # an interrupt is for the kernel, which ends its ranks itself
                env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            )
            theirs.close()
            atexit.register(self.close)
            try:
                self.channel.settimeout(300)
                ready = self.channel.recv(16)
            except BaseException:
                self.close()
                raise
            if ready != b"ready":
                self.close()
                complaints.seek(0)
                text = complaints.read().decode(errors="replace").strip()
                raise RuntimeError(f"the launcher's fork server did not start:\n{text}")
        self.channel.settimeout(10)

    def start_rank(self, job: _ranks.Job, control: int, out: int, err: int, exits: int) -> None:
        with self.lock:
            socket.send_fds(self.channel, [b"fork"], [control, out, err, exits])

    def preload(self, module: str) -> None:
        """Have the server import a module, so that ranks are born with it. ImportError where that does not go."""
        with self.lock:
            self.channel.settimeout(300)
            self.channel.send(f"import {module}".encode())
            answer = self.channel.recv(1024).decode()
            self.channel.settimeout(10)
        if answer != "imported":
            self.close()  # what half of an import leaves behind is nobody's: the next launch gets a new server
            raise ImportError(f"the ranks' fork server cannot preload {module}: {answer}")

    def kill(self, pid: int) -> None:
        """Ask for SIGKILL; the server does it only while the pid is its child's, so no other process can be hit."""
        with contextlib.suppress(OSError), self.lock:
            self.channel.send(f"kill {pid}".encode())

    def close(self) -> None:
        atexit.unregister(self.close)
        if self.owner != os.getpid():
            return
        self.channel.close()  # the server ends its ranks, then itself
        try:
            self.process.wait(1)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Spawner:
    """A new interpreter for each rank: works everywhere, takes seconds. The same interface as ForkServer."""

    def __init__(self):
        self.processes: dict[int, tuple[subprocess.Popen, int]] = {}

    def start_rank(self, job: _ranks.Job, control: int, out: int, err: int, exits: int) -> None:
        process = subprocess.Popen(
            _bootstrap(f"run({control}, {out}, {err}, parent={os.getpid()})"),
            pass_fds=[control, out, err],
            start_new_session=True,
            env=os.environ | {"OMP_NUM_THREADS": str(job.threads)},
        )
        self.processes[process.pid] = (process, os.dup(exits))
        os.write(exits, f"pid {process.pid}\n".encode())

    def poll(self) -> None:
        for pid, (process, exits) in list(self.processes.items()):
            if process.poll() is not None:
                os.write(exits, f"exit {process.returncode}\n".encode())
                os.close(exits)
                del self.processes[pid]

    def kill(self, pid: int) -> None:
        if pid in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
