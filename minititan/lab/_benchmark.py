"""How long until the ranks have spoken to each other: launch beside torchrun, spawning, and ipyparallel if installed.

`python -m minititan.lab.launch --benchmark` prints it.
"""

import contextlib
import importlib.util
import io
import logging
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time

import torch
import torch.distributed as dist

from minititan.lab.launch import launch


def _first_all_reduce() -> float:
    dist.all_reduce(torch.ones(1))
    return time.monotonic()


_TORCHRUN_SCRIPT = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
print(f"finished {time.monotonic()}", flush=True)
dist.destroy_process_group()
"""


def _by_ipyparallel(ranks: int) -> tuple[float, float]:
    """Seconds until engines that are started now have finished one, and seconds of the next, on the same engines."""
    import ipyparallel

    def join(rank: int, n: int, path: str) -> None:
        import torch.distributed as dist

        dist.init_process_group("gloo", store=dist.FileStore(path, n), rank=rank, world_size=n)

    def first_all_reduce(*_) -> float:
        import time

        import torch
        import torch.distributed as dist

        dist.all_reduce(torch.ones(1))
        return time.monotonic()

    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):  # it draws bars
        with ipyparallel.Cluster(n=ranks, log_level=logging.ERROR) as client:
            view, path = client[:], os.path.join(folder, "store")
            view.map_sync(join, range(ranks), [ranks] * ranks, [path] * ranks)
            started = max(view.map_sync(first_all_reduce, range(ranks))) - began
            again = time.monotonic()
            return started, max(view.map_sync(first_all_reduce, range(ranks))) - again


def measure(ranks: int = 4, repeats: int = 3) -> dict[str, list[float]]:
    """Seconds from the call to the last rank's first finished all_reduce, for each way to start ranks.

    The ways take turns, so that a busy machine slows all of them.
    """

    def launched(start: str) -> float:
        began = time.monotonic()
        return max(launch(_first_all_reduce, ranks=ranks, device="cpu", start=start)) - began

    def by_torchrun(script: str) -> float:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), script]
        began = time.monotonic()
        done = subprocess.run(
            command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300
        )
        ends = [float(t) for t in re.findall(r"finished ([0-9.]+)", done.stdout)]
        if len(ends) < ranks:
            raise RuntimeError(f"torchrun gave {len(ends)} of {ranks} results:\n{done.stderr}")
        return max(ends) - began

    times: dict[str, list[float]] = {"launch, first call": [launched("forkserver")]}
    with tempfile.TemporaryDirectory() as folder:
        script = os.path.join(folder, "script.py")
        with open(script, "w") as file:
            file.write(_TORCHRUN_SCRIPT)
        for _ in range(repeats):
            for _ in range(5):
                times.setdefault("launch, warm", []).append(launched("forkserver"))
            times.setdefault("spawn", []).append(launched("spawn"))
            times.setdefault("torchrun", []).append(by_torchrun(script))
            if importlib.util.find_spec("ipyparallel"):
                for name, seconds in zip(("started", "warm"), _by_ipyparallel(ranks), strict=True):
                    times.setdefault(f"ipyparallel, {name}", []).append(seconds)
    return times


def show(times: dict[str, list[float]], ranks: int) -> None:
    warm = statistics.median(times["launch, warm"])
    print(f"seconds from the call to the first finished all_reduce of {ranks} ranks on the CPU")
    print(f"{'':22}{'min':>8}{'median':>9}{'max':>8}{'runs':>6}{'median / warm':>15}")
    for name, seconds in times.items():
        middle = statistics.median(seconds)
        print(f"{name:22}{min(seconds):8.3f}{middle:9.3f}{max(seconds):8.3f}{len(seconds):6}{middle / warm:15.1f}")
