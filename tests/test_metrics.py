"""Meter, flops and logs: numbers against hand-made ones, and a log that survives a kill."""

import csv
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from minititan import metrics
from minititan.metrics import Meter, flops_per_token, log_to, peak_flops, peak_memory
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


def test_csv_is_readable_after_a_kill(tmp_path):
    path = tmp_path / "killed.csv"
    code = (
        "import sys, itertools; from minititan.metrics import log_to\n"
        "log = log_to('csv', sys.argv[1])\n"
        "for step in itertools.count(): log.log({'step': step, 'loss': 1 / (step + 1)})\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(path)])
    deadline = time.monotonic() + 60
    while not (path.exists() and path.stat().st_size > 10_000) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert len(rows) > 100 and path.read_bytes().endswith(b"\n")
    assert [int(row["step"]) for row in rows] == list(range(len(rows)))
    assert all(float(row["loss"]) == 1 / (int(row["step"]) + 1) for row in rows)


def test_csv_says_which_column_is_new(tmp_path):
    with log_to("csv", tmp_path / "a.csv") as log:
        log.log({"step": 1, "loss": 2.0})
        with pytest.raises(ValueError, match=r"a\.csv.*\['held_back'\].*\['step', 'loss'\]"):
            log.log({"step": 2, "loss": 1.0, "held_back": 3.0})


def test_an_unknown_sink_is_named():
    with pytest.raises(ValueError, match=r"no sink 'excel'.*csv"):
        log_to("excel", "runs")
