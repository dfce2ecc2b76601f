"""tests/gpu: what can be known of it without a GPU. It says so; its sections work at toy size; none takes the others along."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import time

import psutil
import pytest

from minititan.lab import show

FOLDER = pathlib.Path(__file__).parent / "gpu"
_spec = importlib.util.spec_from_file_location("gpu_check", FOLDER / "check.py")
gpu_check = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(gpu_check)


def run(*arguments, timeout=120, **environment):
    hidden = {"CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable}
    return subprocess.run(
        ["bash", str(FOLDER / "run.sh"), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=os.environ | hidden | environment,
    )


def test_without_a_gpu_it_says_so_and_ends_well(tmp_path):
    done = run(OUT=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == gpu_check.NO_GPU and not done.stderr
    assert not list(tmp_path.iterdir()), "no numbers, no file"


def test_an_unknown_section_is_named():
    done = run("--sections", "smoke,speed")
    assert done.returncode == 2 and "speed: no such section; there are smoke, throughput" in done.stderr


# ---- the supervisor, with sections of a few lines that import no torch ----------------------------------------

FINISHED = (
    "import sys, json; open(sys.argv[1], 'w').write(json.dumps({'rows': [{'x': 1}], 'finished': True, 'ok': True}))"
)
FAILS = "import sys, json; open(sys.argv[1], 'w').write(json.dumps({'rows': [{'x': 2}]})); raise RuntimeError('five is six')"
DIES = "import os; print('last words', flush=True); os.kill(os.getpid(), 9)"
HANGS = """
import json, subprocess, sys, time
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open(sys.argv[1], "w").write(json.dumps({"rows": [{"pid": other.pid}], "why": "one of two"}))
time.sleep(60)
"""
SAYS_NO = FINISHED.replace("'ok': True", "'ok': False, 'why': 'fsdp: wrong'")


def supervise(tmp_path, limit=60.0, **codes):
    sections = {}
    for name, code in codes.items():
        code, budget = code if isinstance(code, tuple) else (code, 30)
        sections[name] = gpu_check.Section(budget, [sys.executable, "-c", code])
    failed = gpu_check.supervise(sections, {"machine": {}}, tmp_path / "gpu.json", limit)
    return failed, json.loads((tmp_path / "gpu.json").read_text())


def test_a_failing_section_is_recorded_and_the_others_survive(tmp_path, capsys):
    failed, report = supervise(tmp_path, first=FINISHED, fails=FAILS, dies=DIES, says_no=SAYS_NO, last=FINISHED)
    assert failed == 3
    told = report["sections"]
    assert [name for name, section in told.items() if section["ok"]] == ["first", "last"]
    assert "RuntimeError: five is six" in told["fails"]["why"] and "exit code 1" in told["fails"]["why"]
    assert "exit code -9: last words" in told["dies"]["why"] and told["says_no"]["why"] == "fsdp: wrong"
    assert report["first"] == report["last"] == [{"x": 1}] and report["fails"] == [{"x": 2}], "what it had till then"
    assert "dies" not in report
    assert capsys.readouterr().out.count("FAILED") == 3
    log = (tmp_path / gpu_check.FAILURES).read_text()
    assert "Traceback" in log and "last words" in log and "---- says_no" in log and "---- last" not in log


def test_a_section_that_hangs_is_ended_with_all_it_started(tmp_path):
    began = time.monotonic()
    failed, report = supervise(tmp_path, hangs=(HANGS, 1.5), last=FINISHED)
    assert time.monotonic() - began < 30 and failed == 1
    assert report["sections"]["hangs"]["why"] == "ended after its 2 s; one of two" and report["sections"]["last"]["ok"]
    pid = report["hangs"][0]["pid"]
    until = time.monotonic() + 10
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until, "what the section had started lives on"
        time.sleep(0.05)


def test_what_no_time_is_left_for_is_not_begun(tmp_path):
    failed, report = supervise(tmp_path, limit=1.0, hangs=("import time; time.sleep(60)", 0.9), last=FINISHED)
    assert failed == 2 and report["sections"]["last"]["why"] == "not begun: 0 of 1 s were left"


def test_the_exit_code_of_a_section_that_fails(tmp_path):
    """A real one: smoke at toy size, in a tenth of a second that it does not get."""
    done = run("--toy", "--sections", "smoke", "--limit", "0.3", "--out", tmp_path)
    assert done.returncode == 1 and ("FAILED" in done.stdout or "cannot run" in done.stdout), done.stdout


# ---- logic of the sections ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measure():
    sys.path.insert(0, str(FOLDER))
    try:
        import measure
    finally:
        sys.path.remove(str(FOLDER))
    return measure


@pytest.mark.parametrize("first", [1, 2, 4, 8, 16, 64])
@pytest.mark.parametrize("fits", [1, 4, 7, 32])
def test_the_largest_batch_is_found_from_anywhere(measure, first, fits):
    def attempt(batch):
        return {"batch": batch} if batch <= fits else "out of memory"

    batch, row, tries = measure.search(attempt, first, lambda took: True)
    assert batch == row["batch"] == max(2**i for i in range(7) if 2**i <= fits)
    assert tries[2 * batch] == "out of memory"


def test_without_time_no_larger_batch_is_tried(measure):
    batch, _, tries = measure.search(lambda batch: {}, 4, lambda took: False)
    assert batch == 4 and tries == {4: "fits", 8: "not tried"}
    with pytest.raises(ValueError, match="not even a batch of 1 fits: no memory"):
        measure.search(lambda batch: "no memory", 4, lambda took: True)


def test_the_peak_of_a_snapshot(measure):
    actions = [("segment_alloc", 100), ("alloc", 10), ("alloc", 20), ("free_requested", 10), ("free_completed", 10)]
    entries = [{"action": action, "size": size} for action, size in [*actions, ("alloc", 5), ("segment_free", 100)]]
    assert measure.peak_of_trace(entries, 7) == 37
    assert measure.peak_of_trace([], 7) == 7


def test_out_of_memory_is_known_by_any_name(measure):
    import torch

    told = [torch.OutOfMemoryError("CUDA"), RuntimeError("CUDA error: out of memory")]
    told += [RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)")]
    assert all(map(measure.is_out_of_memory, told)) and not measure.is_out_of_memory(RuntimeError("shapes differ"))


# ---- all of it ------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_every_section_at_toy_size(tmp_path):
    done = run("--toy", "--out", tmp_path, timeout=890)
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert done.returncode == 0, json.dumps(report["sections"], indent=1) + done.stdout + done.stderr
    assert set(report) == {"machine", "smoke", "throughput", "compile", "checkpoint", "allocator", "sections"}
    assert all(section["ok"] and section["seconds"] > 0 for section in report["sections"].values())
    assert report["machine"]["toy"] and report["machine"]["gpu"] is None

    assert len(report["smoke"]) > 30
    left_out = [row["technique"] for row in report["smoke"] if row["ok"] is None]
    assert left_out == ["activation_checkpoint_budget"]
    assert all(0 <= row["error"] < row["tolerance"] for row in report["smoke"] if row["ok"])

    recipes = report["throughput"]
    assert [row["recipe"] for row in recipes] == ["bf16", "float8 tensorwise", "float8 rowwise"]
    for row in recipes:
        assert row["batch"] == 4 and row["tries"]["4"] == "fits"  # 8 sequences are made to run out of memory
        assert row["tokens_per_s"] == pytest.approx(4 * 64 / row["step_s"])
        assert row["ratio"] == pytest.approx(row["tokens_per_s"] / recipes[0]["tokens_per_s"])
        peak = 989e12 if row["recipe"] == "bf16" else 1979e12
        assert row["mfu"] == pytest.approx(row["tokens_per_s"] * row["flops_per_token"] / peak) and row["mfu"] > 0
        assert row["peak_bytes"] > 0 and row["predicted_bytes"] > 0
    assert "8 sequences" in recipes[0]["tries"]["8"]

    assert {row["how"] for row in report["compile"]} == {"eager", "blocks", "whole"}
    for row in report["compile"]:
        assert row["seconds_cold"] > 0 and row["tokens_per_s"] > 0 and row["peak_bytes"] > 0
        assert (row["graphs"] == 0) == (row["how"] == "eager")
    assert [row["mode"] for row in report["checkpoint"]] == ["none", "full", "every_other", "per_op"]
    for row in report["checkpoint"]:
        assert row["step_s"] > 0 and row["predicted_bytes"] == pytest.approx(row["peak_bytes"], rel=0.02)
    held = report["allocator"]
    assert held["predicted_bytes"] == pytest.approx(held["ledger_peak_bytes"], rel=0.02)
    assert sum(held["ledger_bytes"].values()) == held["ledger_peak_bytes"]
    for section in ("smoke", "throughput", "compile", "checkpoint", "allocator"):
        table = show.gpu_figures(section, tmp_path / "gpu.json").splitlines()
        assert len(table) == 2 + len(report[section]) and table[0].startswith("toy size")
