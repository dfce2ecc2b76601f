"""Meter, flops, reduced rows, logs and traces: numbers against hand-made ones, files that survive a kill."""

import csv
import gzip
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.flop_counter import FlopCounterMode

from minititan import metrics
from minititan.lab.launch import launch
from minititan.metrics import (
    Meter,
    RankLog,
    StepProfiler,
    check_sinks,
    flops_per_token,
    log_to,
    peak_flops,
    peak_memory,
    read_rank_logs,
    reduce_row,
)
from minititan.model import PRESETS, ModelConfig, Transformer, count_parameters


def test_the_llama_3_8b_number():
    c = PRESETS["llama3-8b"]
    multiplying = count_parameters(c) - c.vocab_size * c.dim
    flops = flops_per_token(multiplying, c.n_layers, c.n_heads, c.head_dim, 8192)
    assert flops == 6 * 7_504_924_672 + 12 * 32 * 32 * 128 * 8192
    assert flops / 1e9 == pytest.approx(57.9, abs=0.05)


@pytest.mark.parametrize("tied", [False, True])
def test_the_formula_counts_what_torch_counts(tied):
    """torch counts matmuls of the real model; the formula also counts the norms' few parameters."""
    config = ModelConfig(256, dim=64, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=176, tied=tied)
    model, tokens_BT = Transformer(config), torch.arange(2 * 128).view(2, 128)

    class Explicit(nn.Module):  # the fused kernel of the CPU is not among the ops that the counter knows
        def forward(self, q_BHTK, k_BGTK, v_BGTK):
            k_BHTK, v_BHTK = (x.repeat_interleave(2, dim=1) for x in (k_BGTK, v_BGTK))
            return (q_BHTK @ k_BHTK.transpose(-1, -2)).softmax(-1) @ v_BHTK

    for block in model.layers.values():
        block.attention.inner = Explicit()
    with FlopCounterMode(display=False) as counter:
        model(tokens_BT).sum().backward()
    multiplying = count_parameters(config) - (0 if tied else config.vocab_size * config.dim)
    norms = 5 * config.dim
    told = flops_per_token(multiplying - norms, config.n_layers, config.n_heads, config.head_dim, 128)
    assert counter.get_total_flops() / tokens_BT.numel() == told


def test_causal_takes_half_of_the_attention_only():
    whole, half, none = (
        flops_per_token(1000, 2, 4, 8, t, causal) for t, causal in ((64, False), (64, True), (32, False))
    )
    assert half == none and whole - half == half - 6000


@pytest.mark.parametrize("wrong", [{"n_parameters": -1}, {"seq_len": 0}, {"head_dim": 0}])
def test_flops_of_nonsense(wrong):
    numbers = {"n_parameters": 1, "n_layers": 1, "n_heads": 1, "head_dim": 1, "seq_len": 1}
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}="):
        flops_per_token(**{**numbers, **wrong})


def test_peaks_are_the_data_sheets_dense_bf16():
    names = {
        "NVIDIA A100-SXM4-80GB": 312e12,
        "NVIDIA H100 80GB HBM3": 989e12,
        "NVIDIA H100 PCIe": 756e12,
        "NVIDIA H100 NVL": 835e12,
        "NVIDIA H200": 989e12,
        "NVIDIA B200": 2250e12,
        "NVIDIA GB200": 2500e12,
        "NVIDIA GeForce RTX 3060": None,
    }
    assert {name: peak_flops(name) for name in names} == names
    assert peak_flops(torch.device("cpu")) is None


def test_a_step_is_tokens_over_its_own_seconds(monkeypatch):
    clock = iter([10.0, 12.0, 12.5, 100.0, 104.0])
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: next(clock))
    meter = Meter(flops_per_token=6e9, n_devices=4, peak=1e12)
    first, second = meter.step(3.0, 0.5, tokens=1000), meter.step(2.5, 0.25, tokens=1000, lr=0.1)
    assert (first["tokens_per_s"], first["step_time_s"], first["loss"]) == (500.0, 2.0, 3.0)
    assert (second["step"], second["tokens"], second["tokens_per_s"]) == (2, 2000, 2000.0)
    assert second["grad_norm"] == 0.25 and second["lr"] == 0.1
    assert second["mfu"] == pytest.approx(2000 * 6e9 / (4 * 1e12))  # of all four devices' peak
    meter.start()  # at 100: what lay between is nobody's step
    assert meter.step(2.0, 0.1, tokens=1000)["step_time_s"] == 4.0


def test_no_peak_no_mfu():
    assert Meter(flops_per_token=6e9).step(1.0, 1.0, tokens=1)["mfu"] is None
    assert Meter(peak=1e12).step(1.0, 1.0, tokens=1)["mfu"] is None
    with pytest.raises(ValueError, match="n_devices=0"):
        Meter(n_devices=0)


def test_peak_memory_sees_what_was_held_and_freed_again():
    before = peak_memory(torch.device("cpu"))
    block = torch.ones(200 * 2**20, dtype=torch.uint8)
    during = peak_memory(torch.device("cpu"))
    del block
    assert during - before > 100 * 2**20 and peak_memory(torch.device("cpu")) > during - 2**22  # the kernel rounds


def test_csv_rows_are_there_before_close(tmp_path):
    path = tmp_path / "runs" / "one.csv"
    with log_to("csv", path) as log:
        log.log({"step": 1, "loss": 1 / 3, "mfu": None})
        log.log({"step": 2, "loss": float("nan"), "mfu": 0.5})
        log.log({"step": 3})
        rows = list(csv.DictReader(path.read_text().splitlines()))
    assert [row["step"] for row in rows] == ["1", "2", "3"]
    assert float(rows[0]["loss"]) == 1 / 3 and rows[0]["mfu"] == "" and rows[1]["loss"] == "nan"
    assert rows[2]["loss"] == ""


def test_a_kill_loses_no_row(tmp_path):
    """SIGKILL amid rows to three sinks at once: each file holds whole rows 1, 2, ... without a gap."""
    code = (
        "import sys, itertools; from minititan.metrics import log_to\n"
        "assert not {'tensorboard', 'wandb'} & set(sys.modules), 'the core imports neither'\n"
        "log = log_to(['csv', 'tensorboard', 'jsonl'], sys.argv[1])\n"
        "for step in itertools.count(1): log.log({'step': step, 'loss': 1 / step}); print(step, flush=True)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    told = 0
    while told < 300:
        told = int(child.stdout.readline())
    os.kill(child.pid, signal.SIGKILL)
    told = max([told, *map(int, child.stdout.read().split("\n")[:-1])])
    child.stdout.close()
    child.wait()
    rows = list(csv.DictReader((tmp_path / "rows.csv").read_text().splitlines()))
    lines = read_rank_logs(tmp_path)
    events = scalars(tmp_path, "loss")
    for found in (
        {int(row["step"]): float(row["loss"]) for row in rows},
        {line["step"]: line["loss"] for line in lines},
        {step: pytest.approx(loss, rel=1e-6) for step, loss in events},
    ):
        assert len(found) in (told, told + 1)  # the last one may have been written and not yet told
        assert found == {step: 1 / step for step in range(1, len(found) + 1)}


def test_csv_says_which_column_is_new(tmp_path):
    with log_to("csv", tmp_path / "a.csv") as log:
        log.log({"step": 1, "loss": 2.0})
        with pytest.raises(ValueError, match=r"a\.csv.*\['held_back'\].*\['step', 'loss'\]"):
            log.log({"step": 2, "loss": 1.0, "held_back": 3.0})


def test_an_unknown_sink_is_named():
    with pytest.raises(ValueError, match=r"no sink 'excel'.*csv"):
        log_to("excel", "runs")


# ---- data wait and bubble -------------------------------------------------------------------------------------


def test_the_wait_for_data_is_part_of_its_step_only(monkeypatch):
    clock = iter([0.0, 1.0, 4.0, 5.0, 5.5, 10.0, 12.0, 20.0, 21.0, 30.0, 31.0])
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: next(clock))
    meter = Meter(bubble=0.25)
    for _ in range(2):
        with meter.data_wait():
            pass
    first, second = meter.step(1.0, 1.0, tokens=1), meter.step(1.0, 1.0, tokens=1)
    assert (first["data_wait_s"], first["step_time_s"], first["bubble"]) == (3.5, 10.0, 0.25)
    assert (second["data_wait_s"], second["step_time_s"]) == (0.0, 2.0)
    with meter.data_wait():  # an evaluation's batches are nobody's wait
        pass
    meter.start()
    assert meter.step(1.0, 1.0, tokens=1)["data_wait_s"] == 0.0


def test_no_bubble_no_column():
    assert "bubble" not in Meter().step(1.0, 1.0, tokens=1)
    with pytest.raises(ValueError, match=r"bubble=1\.5"):
        Meter(bubble=1.5)


# ---- reduced rows ---------------------------------------------------------------------------------------------


def _reduce_on_a_mesh():
    """dp 2 x tp 2: tokens are split over dp, unevenly, and equal on tp; each rank has its own part of a vector."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp = mesh.get_local_rank("dp")
    losses = _losses(dp)
    part = torch.arange(3, dtype=torch.float64) + 10 * rank
    group = dist.new_group([0, 1, 2, 3])
    rows = {
        "dp": reduce_row(
            mesh["dp"],
            sums={"tokens": len(losses)},
            means={"loss": (losses.sum(), len(losses)), "accuracy": (torch.tensor(float(dp)), torch.tensor(2))},
        ),
        "all": reduce_row(mesh, norms={"norm": part.norm()}, maxima={"slowest": torch.tensor(rank), "least": -rank}),
        "both axes by name": reduce_row([mesh["dp"], mesh["tp"]], sums={"ranks": 1}),
        "a group": reduce_row(group, sums={"ranks": 1.0}),
        "default": reduce_row(None, maxima={"rank": rank}),
        "nothing": reduce_row(None),
        "nan": reduce_row(None, maxima={"a": math.nan if rank == 2 else 9.0, "b": 1.0}),
        "inf": reduce_row(None, maxima={"a": math.inf if rank == 2 else 9.0}),
        "no weight": reduce_row(mesh["dp"], means={"loss": (0.0, 0)}),
        "one axis of one": reduce_row(mesh["tp"], sums={"rank": rank}),
        "long": reduce_row(mesh["dp"], sums={"tokens": 2**40 + dp}),  # float32 would round it
    }
    errors = {}
    for name, call in {
        "overlap": lambda: reduce_row([mesh["dp"], None], sums={"tokens": 1}),
        "twice": lambda: reduce_row(mesh["dp"], sums={"a": 1}, maxima={"a": 2}),
    }.items():
        try:
            call()
        except ValueError as error:
            errors[name] = str(error)
    return rows, errors


def _losses(dp):
    return torch.rand(5 + 90 * dp, generator=torch.Generator().manual_seed(dp)).double()


@pytest.fixture(scope="module")
def reduced():
    return launch(_reduce_on_a_mesh)


def test_rows_are_reduced_over_exactly_their_axes(reduced):
    whole = torch.cat([_losses(0), _losses(1)])
    vector = torch.cat([torch.arange(3, dtype=torch.float64) + 10 * r for r in range(4)])
    for rank, (rows, _) in enumerate(reduced):
        assert list(rows["dp"]) == ["tokens", "loss", "accuracy"]
        assert rows["dp"]["tokens"] == 100 and rows["dp"]["accuracy"] == 1 / 4
        assert rows["dp"]["loss"] == pytest.approx(whole.mean().item(), rel=1e-14)
        assert rows["all"]["norm"] == pytest.approx(vector.norm().item(), rel=1e-14)
        assert (rows["all"]["slowest"], rows["all"]["least"]) == (3.0, 0.0)
        assert rows["both axes by name"] == rows["a group"] == {"ranks": 4.0}
        assert rows["default"] == {"rank": 3.0} and rows["nothing"] == {}
        assert rows["one axis of one"] == {"rank": 1.0 if rank < 2 else 5.0}  # 0 + 1, and 2 + 3
        assert rows["long"] == {"tokens": 2.0**41 + 1}
    mean_of_means = (_losses(0).mean() + _losses(1).mean()) / 2
    assert abs(mean_of_means - whole.mean()) > 1e-3  # or the test above could not tell them apart


def test_a_nan_on_one_rank_is_nobodys_maximum(reduced):
    for rows, _ in reduced:
        assert math.isnan(rows["nan"]["a"]) and rows["nan"]["b"] == 1.0
        assert rows["inf"]["a"] == math.inf and math.isnan(rows["no weight"]["loss"])


def test_axes_that_overlap_are_refused(reduced):
    for _, errors in reduced:
        assert "added twice" in errors["overlap"] and "2 ranks in common" in errors["overlap"]
        assert "{'a'}" in errors["twice"] or "['a']" in errors["twice"]


# ---- TensorBoard ----------------------------------------------------------------------------------------------


def scalars(folder, tag):
    """[(step, value)], read back by TensorBoard itself."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return [(e.step, e.value) for e in events.Scalars(tag)]


def test_tensorboard_reads_back_what_was_written(tmp_path):
    with log_to(path=tmp_path, config={"lr": 0.1, "model": ModelConfig}) as log:  # the default sink
        for step in range(1, 4):
            log.log({"step": step, "loss": 1 / step, "mfu": None, "note": "text", "tokens": 1000 * step})
        assert [step for step, _ in scalars(tmp_path, "loss")] == [1, 2, 3]  # before close
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path)).Reload()
    assert events.Tags()["scalars"] == ["loss", "tokens"]
    assert scalars(tmp_path, "tokens") == [(1, 1000.0), (2, 2000.0), (3, 3000.0)]
    assert [e.value for e in events.Scalars("loss")] == pytest.approx([1, 1 / 2, 1 / 3], rel=1e-6)
    assert b'"lr": 0.1' in events.Tensors("config/text_summary")[0].tensor_proto.string_val[0]


def run(path, steps, after=None, sinks=("csv", "tensorboard", "jsonl"), sign=1.0):
    with log_to(list(sinks), path, after) as log:
        for step in steps:
            log.log({"step": step, "loss": sign * step, "mfu": None})


def test_a_resumed_run_shows_each_step_once(tmp_path):
    run(tmp_path, range(1, 8))  # its last checkpoint was of step 4
    run(tmp_path, range(5, 10), after=4, sign=-1.0)
    expected = [(step, step if step < 5 else -step) for step in range(1, 10)]
    rows = list(csv.DictReader((tmp_path / "rows.csv").read_text().splitlines()))
    assert [(int(row["step"]), float(row["loss"])) for row in rows] == expected
    assert scalars(tmp_path, "loss") == expected
    lines = read_rank_logs(tmp_path)  # a diary: also what is no longer true
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6, 7, 4, 5, 6, 7, 8, 9]
    assert [line["event"] for line in lines].index("resumed") == 7


def test_a_run_begun_anew_hides_the_old_one(tmp_path):
    run(tmp_path, range(1, 8), sinks=("csv", "tensorboard"))
    run(tmp_path, range(1, 3), sinks=("csv", "tensorboard"), sign=-1.0)
    assert scalars(tmp_path, "loss") == [(1, -1.0), (2, -2.0)]
    assert (tmp_path / "rows.csv").read_text() == "step,loss,mfu\n1,-1.0,\n2,-2.0,\n"


def test_csv_goes_on_after_a_power_cut(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("step,loss\n1,0.5\n2,0.25\n3,0.1")  # the end of the line is missing: 0.1, or 0.125?
    with log_to("csv", path, after=3) as log:
        log.log({"step": 4, "loss": 0.0625})
    assert path.read_text() == "step,loss\n1,0.5\n2,0.25\n4,0.0625\n"
    path.write_text("loss\n1\n")
    with pytest.raises(ValueError, match=r"\['loss'\] and no 'step'"):
        log_to("csv", path, after=3)
    with log_to("csv", tmp_path / "new.csv", after=3) as log:  # nothing to go on from is no error
        log.log({"step": 4})
    assert (tmp_path / "new.csv").read_text() == "step\n4\n"


# ---- Weights & Biases -----------------------------------------------------------------------------------------

WANDB_RUN = """
import os, sys
import psutil
from minititan.metrics import log_to
before = dict(os.environ)
for after, steps in ((None, range(1, 4)), (2, range(3, 6))):
    with log_to("wandb", "run", after, config={"lr": 0.1}, project="p", name="n") as log:
        assert psutil.Process().children(recursive=True)  # its service
        for step in steps:
            log.log({"step": step, "loss": 1 / step, "mfu": None})
    assert not psutil.Process().children(recursive=True)
assert dict(os.environ) == before
"""


def test_wandb_reads_back_an_offline_run(tmp_path):
    """Two runs of one id; no process left, not a word printed, nobody called, nothing written elsewhere."""
    from wandb.util import get_core_path

    calls = []
    with socket.create_server(("127.0.0.1", 0)) as server:  # whoever calls anywhere comes by here

        def listen():
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                calls.append(connection.recv(200))
                connection.close()

        threading.Thread(target=listen, daemon=True).start()
        proxy = f"http://127.0.0.1:{server.getsockname()[1]}"
        home = tmp_path / "home"
        home.mkdir()
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB", "XDG"))}
        environment |= {"HOME": str(home), "TMPDIR": str(home), "PYTHONPATH": str(Path(metrics.__file__).parents[1])}
        environment |= dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy"), proxy)
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", WANDB_RUN],
            cwd=tmp_path,
            env=environment | {"NO_PROXY": ""},
            capture_output=True,
            text=True,
            timeout=100,
        )
        server.shutdown(socket.SHUT_RDWR)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert calls == []
    assert [p for p in home.rglob("*") if p.is_file()] == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["home", "run"]

    run_id = (tmp_path / "run" / "wandb_id").read_text()
    files = sorted((tmp_path / "run" / "wandb").glob(f"offline-run-*/run-{run_id}.wandb"))
    assert len(files) == 2
    for file, steps in zip(files, (range(1, 4), range(3, 6)), strict=True):
        command = [get_core_path(), "leet", "inspect", "-no-observability", "-json", "-run-file", str(file)]
        told = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60).stdout
        records = [json.loads(line) for line in told.splitlines()]
        rows = [r["history"]["item"] for r in records if r["type"] == "history"]
        assert [(row["step"], row["loss"]) for row in rows] == [(step, 1 / step) for step in steps]
        begun = next(r["run"] for r in records if r["type"] == "run")
        assert begun["run_id"] == run_id and begun["project"] == "p" and begun["config"]["update"]["lr"] == 0.1
        assert records[-1]["exit"]["exit_code"] == 0


# ---- names and extras -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_library_that_is_missing_is_named_with_its_extra(name, monkeypatch):
    monkeypatch.setattr(metrics, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match=rf"{name} is not installed: pip install 'minititan\[log\]'.*csv"):
        log_to(["csv", name], "nowhere")
    assert not Path("nowhere").exists()


def test_sinks_are_checked_before_any_is_opened(tmp_path):
    assert check_sinks(["csv", "jsonl"]) == ["csv", "jsonl"] and check_sinks("csv") == ["csv"]
    for wrong in (["csv", "excel"], ["csv", "csv"], []):
        with pytest.raises(ValueError):
            log_to(wrong, tmp_path / "runs")
    with pytest.raises(ValueError, match=r"options \['project'\].*no 'wandb'"):
        log_to("csv", tmp_path / "runs", project="p")
    assert not (tmp_path / "runs").exists()


# ---- what one rank did ----------------------------------------------------------------------------------------


def test_a_ranks_log_is_a_line_an_event(tmp_path):
    with RankLog(tmp_path, rank=3) as log:
        log.event("checkpoint", step=4, seconds=0.5)
        log.log({"step": 5, "loss": math.nan, "shape": torch.Size([2])})
    path = tmp_path / "rank_0003.jsonl"
    path.write_text(path.read_text() + '{"time": 1, "ra')  # a power cut
    with RankLog(tmp_path, rank=3) as log:
        log.event("resumed", step=4)
    with RankLog(tmp_path, rank=11) as log:
        log.event("late")
    lines = read_rank_logs(tmp_path)
    assert [(line["rank"], line["event"]) for line in lines] == [
        (3, "checkpoint"),
        (3, "row"),
        (3, "resumed"),
        (11, "late"),
    ]
    assert lines[0]["seconds"] == 0.5 and lines[1]["loss"] == "nan" and lines[0]["pid"] == os.getpid()
    assert lines[0]["time"] <= lines[-1]["time"] == pytest.approx(time.time(), abs=60)
    text = path.read_text()
    assert text.count("\n") == 4 and text.endswith("\n")


# ---- traces ---------------------------------------------------------------------------------------------------


def read(path):
    with gzip.open(path) as file:
        return json.load(file)


def _profiled(folder, n=9, **options):
    model = nn.Linear(16, 16)
    with StepProfiler(folder, **options) as profiler:
        for _ in range(n):
            loss = model(torch.randn(4, 16)).sum()
            loss.backward()
            if dist.is_initialized():
                dist.all_reduce(model.weight.grad)
            profiler.step()


def test_each_rank_traces_its_windows_and_keeps_the_last(tmp_path, capfd):
    launch(partial(_profiled, tmp_path, start=2, steps=2, every=3, keep=2), ranks=2, device="cpu")
    assert capfd.readouterr() == ("", "")
    names = [f"rank_{rank:04d}_step_{step:09d}.trace.json.gz" for rank in range(2) for step in (5, 8)]  # not 2
    assert sorted(p.name for p in tmp_path.iterdir()) == names
    pids = set()
    for name, n_steps in zip(names, (2, 1, 2, 1), strict=True):  # the loop ended in the last window
        trace = read(tmp_path / name)
        spans = [e for e in trace["traceEvents"] if e["ph"] == "X"]
        # what Perfetto asks of a span: numbers for when and how long, a process and a thread
        assert all(isinstance(e[key], int | float) for e in spans for key in ("ts", "dur") if e["name"])
        assert all({"name", "pid", "tid"} <= set(e) for e in spans) and min(e["dur"] for e in spans) >= 0
        assert sum(e["name"].startswith("ProfilerStep#") for e in spans) == 2
        assert sum(e["name"] == "aten::addmm" for e in spans) == n_steps
        assert sum(e["name"] == "c10d::allreduce_" for e in spans) == n_steps
        pids |= {e["pid"] for e in spans if e["name"] == "aten::addmm"}
    assert len(pids) == 2


def test_a_trace_of_the_memory_on_cpu(tmp_path):
    _profiled(tmp_path, start=1, steps=1, memory=True)
    (path,) = tmp_path.iterdir()
    memory = [e for e in read(path)["traceEvents"] if e["name"] == "[memory]"]
    assert any(e["args"]["Bytes"] == 4 * 16 * 4 for e in memory)  # the output of the layer


def test_a_window_without_a_whole_step_leaves_nothing(tmp_path):
    _profiled(tmp_path, 3, start=3, every=7)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(RuntimeError), StepProfiler(tmp_path, start=1, steps=4) as profiler:
        for step in range(3):
            if step == 2:
                raise RuntimeError("a crash is when one looks")
            torch.ones(3).sum()
            profiler.step()
    assert [p.name for p in tmp_path.iterdir()] == ["rank_0000_step_000000001.trace.json.gz"]


def test_with_cuda_a_window_is_also_a_snapshot(tmp_path, monkeypatch):
    """The calls and files; the allocator itself is not here."""
    calls = []
    memory = torch.cuda.memory
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(memory, "_record_memory_history", lambda **options: calls.append(options))
    monkeypatch.setattr(memory, "_dump_snapshot", lambda path: Path(path).write_bytes(b"") and None)
    with StepProfiler(tmp_path, start=2, steps=2, every=3, keep=2, memory=True) as profiler:
        for _ in range(10):
            profiler.step()
    on, off = {"max_entries": 100_000}, {"enabled": None}
    assert calls == [on, off] * 4  # the last is a warm-up that the end cuts off
    pickles = sorted(p.name for p in tmp_path.iterdir() if "memory" in p.name)
    assert pickles == [f"rank_0000_step_{step:09d}.memory.pickle" for step in (5, 8)]


@pytest.mark.parametrize("wrong", [{"start": 0}, {"steps": 0}, {"every": 3}, {"keep": 0}])
def test_windows_that_cannot_be(wrong, tmp_path):
    with pytest.raises(ValueError, match="warm-up"):
        StepProfiler(tmp_path, **wrong)
