"""What this machine can do, in sentences: the first cell of notebook 00 prints it.

    print(report())

Only the standard library is imported, in a syntax that any Python 3.8 reads: it has to speak where nothing else works.
`look` asks the machine, `tell` makes sentences of what it found, and `report` does both.
"""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

OLDEST_PYTHON, OLDEST_TORCH = (3, 11), (2, 11)
INSTALL = "pip install torch==2.13.0 -e '.[workbook]'"
CORE = ("torch", "cloudpickle", "tyro", "tqdm")  # nothing runs without them
NOTEBOOK = ("matplotlib", "numpy", "pygments")  # no notebook runs without them
EXTRA = (
    "ipywidgets",
    "torchao",
    "torchft",
    "tensorboard",
    "wandb",
    "safetensors",
    "transformers",
)  # some notebooks need them
# The modules of this package that need one.
NEEDED_BY = {"float8": "torchao", "fault_tolerance": "torchft"}
LAUNCHER, A_RANK = 0.5e9, 0.1e9  # bytes, measured with 8 ranks: 11 MB of their own each, before they compute
SHM_FOR_NCCL = 1 << 30


class NotReady(RuntimeError):
    """The workbook cannot run in this Python; the message says why and what to do."""

    def _render_traceback_(self) -> list[str]:
        """What IPython shows: the sentences, no frames."""
        return [f"Not ready. {self}"]


@dataclass
class Notebook:
    """What a notebook asks for: at most `ranks` processes (0: none), and packages that are not in every install."""

    number: str
    ranks: int
    packages: tuple = ()


@dataclass
class Machine:
    """What is here. Bytes, GPUs by name, versions by package; None for what is not there or cannot be told."""

    python: tuple = (3, 11, 0)
    executable: str = "python"
    system: str = "Linux"
    cores: int = 1
    load: float | None = None  # processes that want a core, the mean of the last minute
    memory: int | None = None
    free: int | None = None
    shm: int | None = None  # of /dev/shm
    gpus: list = field(default_factory=list)
    versions: dict = field(default_factory=dict)


def report() -> str:
    """What this machine is, what it lacks and what will run how. Raises NotReady when nothing would run."""
    return tell(look(), notebooks_here())


# --- what it says ----------------------------------------------------------------------------------------------


def tell(machine: Machine, notebooks=()) -> str:
    """The report as text, from plain data. Raises NotReady when nothing would run."""
    reasons = why_not(machine)
    if reasons:
        raise NotReady(" ".join(reasons))
    lines = [_here(machine), *_runs(machine, notebooks), *warnings(machine, notebooks)]
    return "\n".join(lines)


def why_not(machine: Machine) -> list[str]:
    """Why no notebook would run, one sentence each; empty when they would."""
    python = ".".join(map(str, machine.python[:3]))
    if tuple(machine.python[:2]) < OLDEST_PYTHON:
        return [
            f"This notebook's kernel is Python {python}; {_dotted(OLDEST_PYTHON)} or newer is needed. "
            f"Make the environment with a newer one, as the README says, and choose it under Kernel > Change Kernel."
        ]
    missing = [name for name in CORE + NOTEBOOK if not machine.versions.get(name)]
    if missing:
        return [
            f"This notebook's kernel, Python {python}, has no {_listed(missing)}. Is it the environment that the README "
            f"makes? If not, choose that under Kernel > Change Kernel; if so, run {INSTALL} in it."
        ]
    torch = tuple(int(n) for n in re.findall(r"\d+", machine.versions["torch"])[:2])
    if torch < OLDEST_TORCH:
        return [f"torch {machine.versions['torch']} is too old, {_dotted(OLDEST_TORCH)} is needed: run {INSTALL}."]
    return []


def warnings(machine: Machine, notebooks=()) -> list[str]:
    """What works less well here than it could, one sentence each."""
    said = []
    for name in EXTRA:
        users = [n.number for n in notebooks if name in n.packages]
        if users and not machine.versions.get(name):
            said.append(f"{_numbers(users)} will ask for {name}, which is missing: run {INSTALL}.")
    most = max((n.ranks for n in notebooks), default=8)
    need = LAUNCHER + most * A_RANK
    if machine.free is not None and machine.free < need:
        said.append(
            f"Only {_gb(machine.free)} of memory are free; {most} ranks want {_gb(need)}. Close something, or a rank may "
            "be killed in the middle of a cell."
        )
    if machine.load is not None and machine.load > 1.5 * machine.cores:
        said.append(
            f"This machine is busy: {machine.load:.1f} processes want its {_count(machine.cores, 'core')}. Results will "
            "be right; times, and pictures of who waits for whom, will not be those of an idle machine."
        )
    if machine.gpus and machine.system == "Linux" and (machine.shm or 0) < SHM_FOR_NCCL:
        there = f"has {_gb(machine.shm)}" if machine.shm else "is not there"
        said.append(
            f"/dev/shm {there}, and NCCL talks between the GPUs of a host through it: give the container --shm-size=1g. "
            "Ranks on the CPU do without."
        )
    if machine.system == "Windows":
        said.append("This is Windows, where nothing here was tried: use WSL.")
    elif machine.system != "Linux":
        said.append(
            f"On {machine.system} each rank is a new interpreter, so that a launch takes seconds instead of a tenth."
        )
    return said


def _here(machine: Machine) -> str:
    memory = "" if machine.memory is None else f" · {_gb(machine.memory)} memory"
    if machine.memory is not None and machine.free is not None:
        memory += f", {_gb(machine.free)} free"
    gpus = _count(len(machine.gpus), "GPU") + (f" ({machine.gpus[0]})" if machine.gpus else "")
    python = ".".join(map(str, machine.python[:3]))
    return f"{_count(machine.cores, 'core')}{memory} · {gpus} · Python {python} · torch {machine.versions['torch']}"


def _runs(machine: Machine, notebooks) -> list[str]:
    sizes = sorted({n.ranks for n in notebooks}, key=lambda ranks: (ranks == 0, ranks))
    lines = []
    for ranks in sizes:
        who = _numbers([n.number for n in notebooks if n.ranks == ranks])
        if ranks == 0:
            lines.append(f"{who}: in this process, without ranks.")
        else:
            share = "a core each" if ranks <= machine.cores else f"sharing {_count(machine.cores, 'core')}"
            lines.append(f"{who}: {_count(ranks, 'rank')} on the CPU, {share}.")
    if notebooks and len(machine.gpus) > 1:
        lines.append(f"Their sections 'On real GPUs': on up to {len(machine.gpus)} GPUs, with NCCL.")
    elif notebooks:
        why = "there is no GPU" if not machine.gpus else "one GPU is no group"
        lines.append(f"Their sections 'On real GPUs': the same calls on the CPU, for {why}.")
    return lines


def _gb(n: float) -> str:
    return f"{n / 1e9:.0f} GB" if n >= 9.5e9 else f"{n / 1e9:.1f} GB"


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def _listed(names) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _numbers(numbers) -> str:
    """ "notebooks 02-05 and 07": neighbours in the list of numbers as ranges."""
    runs: list = []
    for number in numbers:
        if runs and int(number) == int(runs[-1][-1]) + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [part for run in runs for part in ([f"{run[0]}-{run[-1]}"] if len(run) > 2 else run)]
    return f"Notebook{'' if len(numbers) == 1 else 's'} {_listed(parts)}"


def _dotted(version) -> str:
    return ".".join(map(str, version))


# --- what it looks at ------------------------------------------------------------------------------------------


def look() -> Machine:
    """This machine, as the notebook's kernel sees it: in a container, the container's share."""
    versions = {name: _version(name) for name in CORE + NOTEBOOK + EXTRA}
    memory, free = _memory()
    return Machine(
        python=tuple(sys.version_info[:3]),
        executable=sys.executable,
        system=platform.system(),
        cores=_cores(),
        load=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        memory=memory,
        free=free,
        shm=_size_of("/dev/shm"),
        gpus=_gpus() if versions["torch"] else [],
        versions=versions,
    )


def notebooks_here(folder=None) -> list[Notebook]:
    """The notebooks of this workbook, each with what its first lines say that it needs, and what it imports."""
    folder = Path(__file__).resolve().parents[2] / "notebooks" if folder is None else Path(folder)
    found = []
    for path in sorted(folder.glob("[0-9][0-9]_*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        title = "".join(cells[0]["source"])
        code = "".join("".join(cell["source"]) + "\n" for cell in cells if cell["cell_type"] == "code")
        needs = re.search(r"\*\*needs\*\*([^·]*)", title)
        ranks = re.search(r"(\d+) ranks", needs.group(1)) if needs else None
        imported = set(re.findall(r"^\s*(?:from|import) (\w+)", code, re.M)) & set(EXTRA)
        imported |= {NEEDED_BY[m] for m in re.findall(r"minititan\.(\w+)", code) if m in NEEDED_BY}
        found.append(Notebook(path.name[:2], int(ranks.group(1)) if ranks else 0, tuple(sorted(imported))))
    return found


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _gpus() -> list[str]:
    try:
        import torch

        return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    except Exception:  # a broken driver, a broken torch: the notebook's own import will tell
        return []


def _cores() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _words("/sys/fs/cgroup/cpu.max")
    if len(quota) == 2 and quota[0].isdigit():
        cores = min(cores, max(1, int(quota[0]) // int(quota[1])))
    return cores


def _memory() -> tuple:
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None, None
    words = _words("/proc/meminfo")
    free = int(words[words.index("MemAvailable:") + 1]) * 1024 if "MemAvailable:" in words else None
    limit, used = _words("/sys/fs/cgroup/memory.max"), _words("/sys/fs/cgroup/memory.current")
    if limit and limit[0].isdigit() and used and free is not None:
        memory, free = min(memory, int(limit[0])), min(free, int(limit[0]) - int(used[0]))
    return memory, free


def _size_of(folder: str) -> int | None:
    try:
        stat = os.statvfs(folder)
    except (AttributeError, OSError):
        return None
    return stat.f_blocks * stat.f_frsize


def _words(path: str) -> list[str]:
    try:
        return Path(path).read_text().split()
    except OSError:
        return []
