"""The loop around the techniques: command line, refusals, what is shown, and what happens when numbers break."""

import csv
import json
import math
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import minititan.train
from minititan.grad_clip import clip_grad_norm_
from minititan.lab.launch import launch
from minititan.model import PRESETS, ModelConfig, count_parameters
from minititan.optimizer import build_adamw
from minititan.train import ParallelConfig, TrainConfig, check, lr_at, parse, train

TINY = ModelConfig(256, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=48)
CONFIG = TrainConfig(
    model=TINY, steps=4, global_batch=8, seq_len=16, warmup_steps=1, eval_batches=1, log_every=2, data=csv.__file__
)  # fmt: skip
REPO = Path(__file__).parents[1]


def run(*command: str) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    return subprocess.run(
        [sys.executable, *command], cwd=REPO, env=environment, capture_output=True, text=True, timeout=120
    )


TINY_ARGUMENTS = (
    "--model.dim 32 --model.n-layers 2 --model.n-heads 4 --model.n-kv-heads 2 --model.ffn-dim 48 "
    f"--steps 4 --global-batch 8 --seq-len 16 --eval-batches 1 --data {csv.__file__}"
).split()

# ------------------------------------------------------------------------------------------------- command line


def test_options_start_from_the_preset():
    arguments = "--preset llama3-8b --model.n-layers 2 --parallel.dp-shard 2 --parallel.tp 2 --steps 7"
    config = parse(arguments.split())
    assert config.model == replace(PRESETS["llama3-8b"], n_layers=2)
    assert config.parallel == ParallelConfig(dp_shard=2, tp=2) and config.steps == 7
    assert parse([]) == TrainConfig()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("--preset llama9", "llama3-405b"),
        ("--model.dim 63", "dim 63"),
        ("--step 5", "--steps"),
        ("--dtype float8", "bfloat16"),
    ],
)
def test_options_that_do_not_exist(arguments, told, capsys):
    with pytest.raises(SystemExit) as end:
        parse(arguments.split())
    output = capsys.readouterr()
    assert end.value.code == 2 and told in " ".join((output.out + output.err).replace("│", " ").split())


def test_torchrun_trains_and_ends_cleanly(tmp_path):
    arguments = [
        *TINY_ARGUMENTS,
        "--parallel.dp-shard",
        "-1",
        "--parallel.tp",
        "2",
        "--csv",
        str(tmp_path / "a.csv"),
    ]
    done = run("-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "minititan.train", *arguments)
    assert done.returncode == 0, done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    assert last["layout"] == "dp_replicate 1 × dp_shard 1 × tp 2" and last["steps"] == 4
    assert last["loss_first"] == pytest.approx(5.55, abs=0.05) and last["loss_last"] < last["loss_first"]
    assert last["held_back_last"] < last["held_back_first"] and last["tokens_per_s"] > 0
    assert done.stdout.count("step     0") == 1  # rank 0 only
    assert len((tmp_path / "a.csv").read_text().splitlines()) == 5
    assert "Traceback" not in done.stderr


def test_one_plain_process_trains():
    done = run("-m", "minititan.train", *TINY_ARGUMENTS, "--log-every", "0")
    assert done.returncode == 0 and done.stderr == ""
    assert json.loads(done.stdout)["held_back_last"] < 5.55  # nothing else is printed


def test_a_layout_that_does_not_fit_ends_before_a_group_is_made():
    done = run("-m", "minititan.train", *TINY_ARGUMENTS, "--parallel.tp", "3")
    assert done.returncode == 1 and "tp 3 = 3 ranks, which does not divide the 1 ranks" in done.stderr


# ------------------------------------------------------------------------------------------------- refusals

REFUSED = [
    ({"parallel": ParallelConfig(pp=2)}, 8, ["1f1b on 2 ranks", "needs 2 microbatches or more, got 1"]),
    ({"parallel": ParallelConfig(cp=3)}, 3, ["seq_len", "3 ranks"]),
    ({"parallel": ParallelConfig(ep=2)}, 8, ["ep 2 spreads experts", "n_experts 0"]),
    ({"parallel": ParallelConfig(dp_shard=-1, tp=8)}, 4, ["tp 8", "4 ranks"]),
    ({"parallel": ParallelConfig(tp=4)}, 4, ["n_kv_heads 2", "4"]),
    ({"global_batch": 12}, 8, ["global_batch 12", "dp_shard 8 × accumulate 1 = 8", "use global_batch 16"]),
    ({"global_batch": 8, "accumulate": 3}, 2, ["dp_shard 2 × accumulate 3 = 6", "use global_batch 12"]),
    ({"seq_len": 9000}, 1, ["seq_len 9000", "max_seq_len 8192"]),
    ({"model": replace(TINY, vocab_size=100)}, 1, ["vocab_size 100", "256"]),
    (
        {"parallel": ParallelConfig(pp=2), "schedule": "zbv", "accumulate": 4, "activation_checkpoint": "per_op"}
        | {"model": replace(TINY, n_layers=4)},
        2,
        ["schedule zbv", "activation_checkpoint per_op", "take full or every_other", "1f1b"],
    ),
    ({"steps": 0}, 1, ["steps=0"]),
    ({"lr": -1.0}, 1, ["lr=-1.0"]),
    ({"max_norm": math.nan}, 1, ["max_norm=nan"]),
    ({"compile": True}, 1, ["compile=True", "'none', 'inductor', 'aot_eager'"]),
    ({"compute_dtype": "fp16"}, 1, ["compute_dtype='fp16'", "'float32', 'bfloat16'"]),
]  # fmt: skip


@pytest.mark.parametrize(("change", "world_size", "pieces"), REFUSED, ids=[str(c) for c, *_ in REFUSED])
def test_refused_with_all_numbers(change, world_size, pieces):
    with pytest.raises(ValueError) as error:
        check(replace(CONFIG, **change), world_size)
    assert all(piece in str(error.value) for piece in pieces), str(error.value)


def test_refused_on_ranks_before_any_group_is_made():
    def ask():
        before = len(dist.distributed_c10d._world.pg_map)
        with pytest.raises(ValueError, match="needs 2 microbatches or more, got 1"):
            train(replace(CONFIG, parallel=ParallelConfig(pp=2)))
        return len(dist.distributed_c10d._world.pg_map) - before

    assert launch(ask, ranks=2) == [0, 0]


# ------------------------------------------------------------------------------------------------- the loop


def test_learning_rate_rises_then_falls_to_zero_after_the_last_step():
    config = TrainConfig(steps=10, warmup_steps=4, lr=1.0)
    rates = [lr_at(step, config) for step in range(11)]
    assert rates[:4] == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert rates[4:] == pytest.approx([1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0])
    assert [lr_at(step, replace(config, decay_steps=0)) for step in (3, 4, 9)] == pytest.approx([0.8, 1, 1])
    assert [lr_at(step, replace(config, decay_steps=2)) for step in (4, 8, 9)] == pytest.approx([1, 1, 0.5])
    assert lr_at(0, replace(config, warmup_steps=0)) == 1.0


def test_what_is_shown_logged_and_returned(tmp_path, capsys):
    def both(path):
        plain = train(replace(CONFIG, csv=path, parallel=ParallelConfig(tp=2)))
        mixed = train(replace(CONFIG, compute_dtype="bfloat16", accumulate=2, log_every=0))
        narrow = train(replace(CONFIG, dtype="bfloat16", log_every=0))
        return plain, mixed, narrow

    (plain, mixed, narrow), (other, *_) = launch(both, str(tmp_path / "log.csv"), ranks=2, timeout=120)
    assert other.losses == plain.losses and other.grad_norms == plain.grad_norms  # global on every rank
    assert plain.n_parameters == mixed.n_parameters == count_parameters(TINY)
    assert mixed.losses == pytest.approx(plain.losses, rel=2e-2) == narrow.losses and mixed.losses != plain.losses

    rows = list(csv.DictReader((tmp_path / "log.csv").read_text().splitlines()))
    assert [float(row["loss"]) for row in rows] == plain.losses
    assert [float(row["grad_norm"]) for row in rows] == plain.grad_norms
    assert [row["tokens"] for row in rows] == [str(8 * 16 * n) for n in (1, 2, 3, 4)]
    assert [float(row["lr"]) for row in rows] == [lr_at(step, CONFIG) for step in range(4)]
    assert [row["held_back"] for row in rows] == [
        str(plain.held_back_first),
        "",
        "",
        str(plain.held_back_last),
    ]
    assert all(row["mfu"] == "" and float(row["tokens_per_s"]) > 0 for row in rows)

    shown = [line for line in capsys.readouterr().out.splitlines() if "step " in line]
    assert [line.split("step")[1].split()[0] for line in shown] == ["0", "2", "3"]
    assert f"loss {plain.losses[0]:.4f}" in shown[0]


DOUBLE = replace(CONFIG, steps=2, accumulate=2, dtype="float64", log_every=0)


def losses_and_norms(cases):
    def run_all():
        results = [train(replace(c, parallel=layout, activation_checkpoint=mode)) for c, layout, mode in cases]
        return [result.losses + result.grad_norms for result in results]

    return launch(run_all, ranks=4, timeout=120)[0]


def test_activation_checkpointing_changes_no_number():
    modes = ("none", "full", "every_other", "per_op")
    plain, *others = losses_and_norms([(DOUBLE, ParallelConfig(dp_shard=2, tp=2), mode) for mode in modes])
    assert all(numbers == pytest.approx(plain, rel=1e-10, abs=0) for numbers in others)


@pytest.mark.full
def test_activation_checkpointing_changes_no_number_beside_pipeline_context_and_experts():
    experts = replace(DOUBLE, model=replace(TINY, n_experts=4, expert_ffn_dim=16, balance_loss=0.01))
    cases = [(DOUBLE, ParallelConfig(dp_shard=4), "none"), (DOUBLE, ParallelConfig(dp_shard=2, pp=2), "full")]
    cases += [(DOUBLE, ParallelConfig(dp_shard=2, cp=2), mode) for mode in ("full", "per_op")]
    cases += [(experts, ParallelConfig(dp_shard=4, ep=2), mode) for mode in ("none", "full")]
    plain, *others, with_experts, with_experts_again = losses_and_norms(cases)
    assert all(numbers == pytest.approx(plain, rel=1e-10, abs=0) for numbers in others)
    assert with_experts_again == pytest.approx(with_experts, rel=1e-10, abs=0)
    assert with_experts != pytest.approx(plain, rel=1e-3)


def test_activation_checkpointing_wraps_each_block_before_it_is_sharded():
    def wrapped():
        seen = {}

        def watch(moment, step, model):
            seen[mode] = [type(block).__name__ for block in model.layers.values()]

        for mode in ("none", "every_other"):
            train(replace(CONFIG, steps=1, log_every=0, activation_checkpoint=mode), watch)
        return seen

    kinds = launch(wrapped, ranks=2)[0]
    assert kinds == {
        "none": ["FSDPTransformerBlock"] * 2,
        "every_other": ["FSDPCheckpointWrapper", "FSDPTransformerBlock"],
    }


def test_a_broken_number_stops_all_ranks_before_the_optimizer_step():
    def run_until_it_breaks(where):
        moments, values = [], {}

        def watch(moment, step, model):
            moments.append((moment, step))
            if (moment, step) == ("updated", 1):
                if where == "loss" and dist.get_rank() == 1:
                    model.output.weight.data.to_local().fill_(math.nan)  # one shard of one rank
                values.update({name: p.to_local().clone() for name, p in model.named_parameters()})
                values["model"] = model

        def clip(parameters, max_norm, pp_mesh):  # the gradients of one rank overflow after a loss that is finite
            parameters = list(parameters)
            if where == "gradient norm" and dist.get_rank() == 1 and ("updated", 1) in moments:
                parameters[-1].grad.to_local().mul_(math.inf)
            return clip_grad_norm_(parameters, max_norm, pp_mesh)

        minititan.train.clip_grad_norm_ = clip
        with pytest.raises(FloatingPointError) as error:
            train(replace(CONFIG, log_every=0), watch)
        model = values.pop("model")
        same = all(
            torch.equal(values[name].nan_to_num(), p.to_local().nan_to_num()) for name, p in model.named_parameters()
        )
        return str(error.value), moments[-1], same

    for where in ("loss", "gradient norm"):
        for told, last, same in launch(run_until_it_breaks, where, ranks=2):
            assert f"step 2: the {where} is" in told and ("nan" in told or "inf" in told)
            assert "before the optimizer step" in told and "lower lr (now 0.00667, at most 0.01)" in told
            assert last == ("updated", 1) and same  # and step 2 changed nothing


def test_a_group_for_each_mesh_so_that_the_fused_kernel_takes_it():
    def count():
        groups = {}

        def watch(moment, step, model):
            groups[moment] = [len(group["params"]) for group in build_adamw(model.parameters()).param_groups]

        train(replace(CONFIG, steps=1, log_every=0, parallel=ParallelConfig(dp_shard=2, tp=2)), watch)
        train(replace(CONFIG, steps=1, log_every=0, parallel=ParallelConfig(dp_shard=1, dp_replicate=2, tp=2)))
        return groups["updated"]

    # 2 layers of 7 matrices and the two ends lie on fsdp × tp, 5 norms on fsdp
    assert sorted(launch(count, ranks=4, timeout=120)[0]) == [5, 16]


# ------------------------------------------------------------------------------------------------- days of training


def final(config: TrainConfig) -> tuple[list[float], dict[str, torch.Tensor]]:
    """On a rank: losses, and parameters after the last step, whole."""
    parameters = {}

    def watch(moment, step, part):
        if moment == "updated":
            parameters.update({n: p.detach().clone() for n, p in part.named_parameters()})

    losses = train(config, watch).losses
    return losses, {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in parameters.items()}


def test_a_run_goes_on_from_its_checkpoint_on_any_number_of_ranks(tmp_path):
    """6 steps at once, or 4 and then 2: bitwise on the same ranks, to 1e-10 on others. Old checkpoints are deleted."""
    config = replace(CONFIG, steps=6, dtype="float64", log_every=0)
    stopped = replace(config, checkpoint=str(tmp_path / "run"), checkpoint_every=2, keep_last=1, stop_at=4)
    losses, parameters = launch(final, config, ranks=2)[0]
    assert launch(final, stopped, ranks=2)[0][0] == losses[:4]
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["step-00000004"]
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    rest, same = launch(final, replace(stopped, stop_at=None), ranks=2)[0]
    assert rest == losses[4:] and all(torch.equal(same[name], p) for name, p in parameters.items())
    split = replace(
        stopped, stop_at=None, checkpoint=str(tmp_path / "other"), parallel=ParallelConfig(dp_shard=2, tp=2)
    )
    rest, same = launch(final, split, ranks=4)[0]
    assert rest == pytest.approx(losses[4:], rel=1e-10)
    for name, p in parameters.items():
        assert (same[name] - p).norm() < 1e-10 * p.norm(), name
    with pytest.raises(Exception, match="holds the state after 6 steps, and this run ends at 6"):
        launch(final, split, ranks=4)


def test_rows_go_to_tensorboard_and_a_resumed_run_adds_to_them(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = replace(CONFIG, log=("tensorboard", "csv"), log_folder=str(tmp_path), checkpoint=str(tmp_path / "kept"))
    losses = [
        loss for n in (2, 4) for loss in launch(train, replace(config, stop_at=n, log_every=0), ranks=1)[0].losses
    ]
    rows = list(csv.DictReader((tmp_path / "rows.csv").read_text().splitlines()))
    assert [int(row["step"]) for row in rows] == [1, 2, 3, 4]
    assert [float(row["loss"]) for row in rows] == losses
    (folder,) = {path.parent for path in tmp_path.rglob("events.out.tfevents.*")}
    found = EventAccumulator(str(folder)).Reload().Scalars("loss")
    assert [event.step for event in found] == [1, 2, 3, 4]
    assert [event.value for event in found] == pytest.approx(losses, rel=1e-6)
