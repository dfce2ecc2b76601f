"""A dry run tells what real ranks hold and call."""

import csv
import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from minititan.dry_run import DryRun, dry_run
from minititan.lab.launch import launch
from minititan.lab.trace import recording
from minititan.meta_init import materialize
from minititan.model import PRESETS, ModelConfig
from minititan.parallel_dims import ParallelDims
from minititan.planner import state_bytes
from minititan.train import Job, ParallelConfig, TrainConfig, check

CONFIG = TrainConfig(
    model=ModelConfig(259, dim=32, n_layers=4, n_heads=4, n_kv_heads=4, ffn_dim=44),  # rows that do not divide
    global_batch=16, seq_len=16, accumulate=2, data=csv.__file__,
)  # fmt: skip
LAYOUTS = {
    "FSDP": replace(CONFIG, parallel=ParallelConfig(dp_shard=4)),
    "replicas": replace(CONFIG, parallel=ParallelConfig(dp_replicate=2, dp_shard=2)),
    "FSDP × TP": replace(CONFIG, parallel=ParallelConfig(dp_shard=2, tp=2), sequence_parallel=True, loss_parallel=True),
    "async TP": replace(CONFIG, parallel=ParallelConfig(tp=4), async_tensor_parallel=True),
    "ring": replace(CONFIG, parallel=ParallelConfig(dp_shard=2, cp=2), activation_checkpoint="full"),
    "1F1B": replace(CONFIG, parallel=ParallelConfig(dp_shard=2, pp=2), accumulate=4),
    "interleaved": replace(CONFIG, parallel=ParallelConfig(tp=2, pp=2), accumulate=4, schedule="interleaved_1f1b"),
}
LAYOUTS["V"] = replace(LAYOUTS["1F1B"], schedule="zbv")
FAST = ("FSDP × TP", "V")
COMPARED = ("all_gather", "reduce_scatter", "send", "recv", "all_to_all")


def really(names) -> dict[str, tuple[dict, Counter]]:
    """On a rank: bytes held and large messages of the second step, of each layout."""
    told = {}
    for name in names:
        config = LAYOUTS[name]
        dims = check(config, 4)
        dims.build_mesh("cpu")
        job = Job(config, dims, torch.device("cpu"), materialize)
        rows = torch.zeros(config.global_batch // dims.size("dp"), config.seq_len // dims.cp, dtype=torch.int64)
        pieces = [(rows, rows)] if job.pipeline else [(x, x) for x in rows.chunk(config.accumulate)]
        job.forward_backward(pieces)
        job.update(1e-3)
        with recording() as events:
            job.forward_backward(pieces)
        tensors = {"parameters": job.parameters, "gradients": [p.grad for p in job.parameters]}
        tensors["optimizer"] = [t for state in job.optimizer.state.values() for t in state.values()]
        local = {kind: [getattr(t, "_local_tensor", t) for t in found] for kind, found in tensors.items()}
        held = {kind: sum(t.numel() * t.element_size() for t in found) for kind, found in local.items()}
        told[name] = held, Counter(e.name for e in events if e.name in COMPARED)
    return told


def dry(names) -> dict[str, DryRun]:
    """On a rank alone: a dry run makes a process group, and this process must have none."""
    dist.destroy_process_group()
    return {name: dry_run(LAYOUTS[name], 4, rank=3) for name in names}


@pytest.mark.parametrize("names", [FAST, pytest.param(tuple(LAYOUTS), marks=pytest.mark.full)], ids=["two", "all"])
def test_bytes_and_calls_are_those_of_a_real_rank(names):
    on_rank_3 = launch(really, names, ranks=4, timeout=120)[3]
    (found,) = launch(dry, names, ranks=1, timeout=120)
    for name, (held, calls) in on_rank_3.items():
        assert found[name].held == held, name
        config = LAYOUTS[name]
        layout = check(config, 4), 3, config.schedule, config.stages_per_rank
        assert state_bytes(config.model, *layout) == held, name
        counted = Counter()
        for of_axis in found[name].collectives.values():
            counted.update({kind: count for kind, (count, _) in of_axis.items() if kind in COMPARED})
        assert counted == calls, name
        assert found[name].peak["parameters"] == held["parameters"] and found[name].peak["other"] > 0


def test_bytes_sent_follow_the_formulas():
    """FSDP on 4 ranks: two microbatches gather each block twice, the root once more as it stays, and reduce once each."""
    (found,) = launch(dry, ["FSDP"], ranks=1, timeout=120)
    calls, parameters = found["FSDP"].collectives["dp_shard"], 4 * found["FSDP"].held["parameters"]
    n_gathered, n_reduced = calls["all_gather"], calls["reduce_scatter"]
    assert n_reduced[0] == 2 * 5 and n_gathered[0] == 2 * (4 + 5)
    assert n_reduced[1] == pytest.approx(2 * parameters * 3 / 4, rel=0.02)  # padding of rows that do not divide


@pytest.mark.full
def test_a_rank_of_512_holds_what_the_planner_says():
    """Llama 3 405B on dp_shard 4 × tp 8 × pp 16, rank 0: 25 s and 0.4 GiB here."""
    command = (
        "-m minititan.train --dry-run --world-size 512 --preset llama3-405b --parallel.dp-shard 4 --parallel.tp 8 "
        "--parallel.pp 16 --accumulate 16 --global-batch 64 --seq-len 8192 --compute-dtype bfloat16 --sequence-parallel "
        "--loss-parallel --activation-checkpoint full"
    )
    done = subprocess.run([sys.executable, *command.split()], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("  at rest")]
    told = {kind: int(n.replace(",", "")) for _, _, kind, n, *_ in lines}
    assert told == state_bytes(PRESETS["llama3-405b"], ParallelDims(dp_shard=4, tp=8, pp=16, world_size=512))


def test_command_line():
    command = (
        "-m minititan.train --dry-run --world-size 16 --dry-rank 15 --preset llama3-8b --model.n-layers 2 "
        "--parallel.dp-shard 2 --parallel.tp 8 --global-batch 4 --seq-len 64"
    )
    done = subprocess.run([sys.executable, *command.split()], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    first, *rest = done.stdout.splitlines()
    assert (
        first.startswith("2 layers on pp 1 × dp_replicate 1 × dp_shard 2 × cp 1 × tp 8: rank 15 (") and "tp 7)" in first
    )
    assert any(line.split()[:2] == ["tp", "all_reduce"] for line in rest), json.dumps(rest)


def test_refusals():
    with pytest.raises(ValueError, match="rank 4 is none of 0 to 3"):
        dry_run(LAYOUTS["FSDP"], 4, rank=4)
    experts = replace(CONFIG, parallel=ParallelConfig(dp_shard=4), model=replace(CONFIG.model, n_experts=4, top_k=2))
    with pytest.raises(ValueError, match="what 4 experts get depends on values"):
        dry_run(experts, 4)
    with pytest.raises(ValueError, match="what compile inductor would fuse"):
        dry_run(replace(LAYOUTS["FSDP"], compile="inductor"), 4)
    with pytest.raises(ValueError, match="tp 3 = 3 ranks"):
        dry_run(replace(CONFIG, parallel=ParallelConfig(tp=3)), 4)

    def in_a_group():
        with pytest.raises(ValueError, match="this process has one"):
            dry_run(LAYOUTS["FSDP"], 4)

    launch(in_a_group, ranks=1)
