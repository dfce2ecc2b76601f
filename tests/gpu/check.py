"""What one Hopper GPU measures, in at most 8 minutes, as one JSON file.

    tests/gpu/run.sh --out FOLDER            # FOLDER/gpu.json; without a GPU it says so and ends well
    tests/gpu/run.sh --toy --out FOLDER      # every section at toy size on the CPU: the same code, numbers without meaning
    tests/gpu/run.sh --sections smoke,allocator --wheels FOLDER_WITH_WHEELS

Each section (measure.py has them) is a process of its own with a budget of seconds. One that fails, dies or hangs is
recorded with its error and what it had found until then; the others run all the same. gpu.json is written anew after each:

    machine       {gpu, torch, ...}                     sections   {name: {ok, seconds, why}}
    smoke         [{technique, ok, error, seconds}]     of every technique on a group of one, against the plain model
    throughput    [{recipe, batch, tokens_per_s, mfu, ratio}]            llama3-1b in the largest batch that fits
    checkpoint    [{mode, peak_bytes, predicted_bytes, step_s}]          activation checkpointing beside the planner
    allocator     {allocated_peak_bytes, ledger_peak_bytes, predicted_bytes, ...}
    compile       [{how, seconds_cold, tokens_per_s}]   eager, blocks and whole, each in a fresh process without caches

The exit code is 0 if every section is ok, or if there is no GPU; else gpu_failures.log beside gpu.json has the tracebacks.
A missing package (torchao) is no failure: what needs it is left out, and "why" says so. This file needs the standard library only, so that it outlives whatever a section does.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 470.0  # seconds in all; 8 minutes less the start of this file and what ending a process takes
BUDGETS = {"smoke": 100, "throughput": 190, "checkpoint": 50, "allocator": 60, "compile": 200}
FAILURES = "gpu_failures.log"
EMPTY = {"smoke": [], "throughput": [], "compile": [], "checkpoint": [], "allocator": {}}
NO_GPU = "No GPU here, so nothing was measured. (--toy runs every section at toy size on this CPU.)"


class Section(NamedTuple):
    budget: float  # seconds
    command: list[str]  # gets two more arguments: the file for its result, and when it will be ended (time.time())


class Outcome(NamedTuple):
    ok: bool
    seconds: float
    why: str
    rows: Any  # None: it had found nothing
    log: str = ""  # the end of what it printed


def write(path: Path, data: dict) -> None:
    """Whole, whenever the kill comes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(path.name + ".part")
    aside.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n")
    os.replace(aside, path)


def _end_group(child: subprocess.Popen) -> None:
    """The section and whatever it has started. The group's number is the child's, and stays taken while one is left."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def run_section(section: Section, seconds: float, environment: dict[str, str] | None = None) -> Outcome:
    """Runs it for at most so many seconds; its own word counts if it finished, its output's end if it did not."""
    with tempfile.TemporaryDirectory(prefix="minititan_gpu_") as folder:
        result, log = Path(folder, "result.json"), Path(folder, "log")
        began = time.monotonic()
        with open(log, "wb") as output:
            child = subprocess.Popen(
                [*section.command, str(result), f"{time.time() + seconds:.1f}"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=environment,
                start_new_session=True,
            )
            late = False
            try:
                child.wait(timeout=seconds)
            except subprocess.TimeoutExpired:
                late = True
            finally:
                _end_group(child)
        took = round(time.monotonic() - began, 1)
        found = {}
        with contextlib.suppress(OSError, ValueError):
            found = json.loads(result.read_text())
        rows, why = found.get("rows"), found.get("why", "")
        printed = log.read_text(errors="replace").strip()[-20_000:]
        if late:
            return Outcome(False, took, f"ended after its {seconds:.0f} s{'; ' * bool(why)}{why}", rows, printed)
        if not found.get("finished"):  # it died, and said nothing about it
            told = printed[-2000:] or "no output"
            return Outcome(False, took, f"exit code {child.returncode}: {told}", rows, printed)
        return Outcome(bool(found.get("ok")), took, why, rows, printed)


def supervise(
    sections: dict[str, Section],
    report: dict,
    target: Path,
    limit: float = LIMIT,
    environment: dict[str, str] | None = None,
) -> int:
    """Runs the sections one after the other, within `limit` seconds in all; returns how many failed.

    report: what is known already; gets each section's rows under its name, and is written to target after each. What
    those that failed have printed, their tracebacks, goes into FAILURES beside it.
    """
    end = time.monotonic() + limit
    failures = target.with_name(FAILURES)
    failures.unlink(missing_ok=True)
    report.setdefault("sections", {})
    write(target, report)
    for name, section in sections.items():
        left = end - time.monotonic()
        seconds = min(section.budget, left)
        if seconds < min(5.0, section.budget):
            outcome = Outcome(False, 0.0, f"not begun: {max(left, 0):.0f} of {limit:.0f} s were left", None)
        else:
            outcome = run_section(section, seconds, environment)
        if outcome.rows is not None:
            report[name] = outcome.rows
        report["sections"][name] = {"ok": outcome.ok, "seconds": outcome.seconds, "why": outcome.why}
        write(target, report)
        if not outcome.ok:
            with open(failures, "a", encoding="utf-8") as file:
                file.write(f"---- {name}: {outcome.why}\n{outcome.log}\n")
        last = outcome.why.strip().splitlines()[-1:] or [""]
        print(f"{name:11}{'ok' if outcome.ok else 'FAILED':7}{outcome.seconds:6.1f} s  {last[0][:150]}", flush=True)
    return sum(not section["ok"] for section in report["sections"].values())


def _install(wheels: Path, target: Path) -> str:
    """Of the folder's wheels, into a folder that goes with this run; says what happened."""
    files = sorted(map(str, wheels.glob("*.whl")))
    if not files:
        return f"no wheels in {wheels.name}/"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile"]
    try:
        done = subprocess.run(
            [*pip, "--target", str(target), *files],
            capture_output=True,
            text=True,
            timeout=60,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return f"{len(files)} wheels were not installed within 60 s"
    return f"{len(files)} wheels" if not done.returncode else f"pip failed: {done.stderr.strip()[-500:]}"


def main(arguments: list[str] | None = None) -> int:
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or "."), help="folder of gpu.json")
    parser.add_argument("--toy", action="store_true", help="toy size, on the CPU")
    parser.add_argument("--sections", default=",".join(BUDGETS), help="which, in this order")
    parser.add_argument("--wheels", type=Path, default=ROOT / "wheels", help="folder of wheels that are missing here")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds in all")
    given = parser.parse_args(arguments)
    names = given.sections.split(",")
    if unknown := [name for name in names if name not in BUDGETS]:
        parser.error(f"{', '.join(unknown)}: no such section; there are {', '.join(BUDGETS)}")
    out = given.out.resolve()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the section of the moment is ended too
    with tempfile.TemporaryDirectory(prefix="minititan_gpu_", ignore_cleanup_errors=True) as folder:
        site = Path(folder, "site")
        wheels = _install(given.wheels, site) if given.wheels.is_dir() else "none given"
        path = [str(ROOT), *([str(site)] if site.exists() else []), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            "PYTHONUNBUFFERED": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(Path(folder, "inductor")),
            "TRITON_CACHE_DIR": str(Path(folder, "triton")),
            "TORCH_FR_BUFFER_SIZE": "2000",  # for the flight recorder, whatever this torch's default
        }
        if Path("/sys/class/net/lo").exists():  # one rank talks to itself, where there may be no other network
            environment |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
        options = [*(["--toy"] if given.toy else []), "--out", str(out)]
        command = [sys.executable, str(Path(__file__).with_name("measure.py")), *options]
        machine = run_section(Section(90, [*command, "machine"]), min(90, given.limit), environment)
        if not machine.ok:
            print(f"This Python cannot run the sections: {machine.why}")
            return 1
        if not machine.rows["gpu"] and not given.toy:
            print(NO_GPU)
            return 0
        report = {"machine": machine.rows | {"wheels": wheels, "toy": given.toy}}
        report |= {name: rows for name, rows in EMPTY.items() if name in names}
        scale = 4 if given.toy else 1  # CPUs are shared
        sections = {name: Section(scale * BUDGETS[name], [*command, name]) for name in names}
        limit = scale * given.limit - (time.monotonic() - began)
        failed = supervise(sections, report, out / "gpu.json", limit, environment)
    print(
        f"{len(names) - failed} of {len(names)} sections ok, {time.monotonic() - began:.0f} s: {given.out / 'gpu.json'}"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
