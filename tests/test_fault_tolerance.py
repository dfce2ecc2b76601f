"""fault_tolerance: ranks die by SIGKILL; who survives never restarts, and all end equal bit for bit."""

import json
import os
import pathlib
import random
import subprocess
import sys

import psutil
import pytest
import torch
from torch import nn

from minititan.fault_tolerance import (
    FaultTolerantReplica,
    Laboratory,
    against_one_process,
    form_quorum_by_hand,
    kill,
    rows_of,
    run_elastic,
)

N_STEPS = 12


@pytest.fixture(scope="module")
def laboratory():
    before = {p.pid for p in psutil.Process().children(recursive=True)}
    with Laboratory() as laboratory:
        yield laboratory
        here = psutil.Process(laboratory.parent.pid)
        assert not here.children(recursive=True), "a run has left processes"
    assert not {p.pid for p in psutil.Process().children(recursive=True)} - before


def chosen(events, kind):
    return [e for e in events if e["kind"] == kind]


def check_healed(events, killed, n_steps=N_STEPS):
    """What the module promises of a run in which `killed` groups were killed once each."""
    assert [e["group"] for e in chosen(events, "kill")] == killed
    lives = {(e["group"], e["life"]) for e in chosen(events, "born") if e["group"] >= 0}
    survivors = {group for group, _ in lives} - set(killed)
    assert all((group, 1) not in lives for group in survivors), "a survivor was started again"
    redone = [(e["group"], e["rank"]) for e in chosen(events, "redo") if e["group"] in survivors]
    assert all(redone.count(who) <= len(killed) for who in redone), f"repeated more than once: {redone}"
    assert {e["group"] for e in chosen(events, "healed") if e["life"] == 1} == set(killed)
    ranks = {(e["group"], e["rank"]) for e in chosen(events, "born") if e["group"] >= 0}
    assert {(e["group"], e["rank"]): e["step"] for e in chosen(events, "state")} == dict.fromkeys(ranks, n_steps)
    errors = against_one_process(events, n_steps)
    assert errors["differ"] == 0 and max(errors["loss"], errors["parameter"]) < 1e-10, errors
    for group, rank in {(e["group"], e["rank"]) for e in chosen(events, "state") if e["group"] in survivors}:
        steps = [e["step"] for e in chosen(events, "loss") if (e["group"], e["rank"]) == (group, rank)]
        assert steps == list(range(n_steps)), "each step is committed once"


def test_a_rank_is_killed_in_mid_step_and_its_group_heals(laboratory):
    kills = [kill(1, 1, step=4, after=0.03)]
    events = laboratory.run("train_replica", 2, 2, kills, away=1.2, options={"n_steps": N_STEPS, "groups": 2})
    check_healed(events, [1])
    members = [e["members"] for e in chosen(events, "commit") if (e["group"], e["rank"]) == (0, 0) and e["update"]]
    assert members[:4] == [2] * 4 and 1 in members, "the survivor went on alone meanwhile"


def test_by_hand(laboratory):
    kills = [kill(0, 0, step=5, after=0.03)]
    events = laboratory.run("train_by_hand", 2, 1, kills, away=0.5, options={"n_steps": N_STEPS, "groups": 2})
    check_healed(events, [0])


def test_elastic_goes_on_from_the_last_checkpoint(laboratory, tmp_path):
    options = {"n_steps": 10, "save_every": 3, "folder": str(tmp_path)}
    events = laboratory.run("train_elastic", 1, 2, [kill(0, 1, step=5, after=0.02)], options=options)
    assert [e["step"] for e in chosen(events, "loaded") if e["rank"] == 0] == [0, 3]
    assert [e["step"] for e in chosen(events, "loss") if e["rank"] == 0 and e["life"] == 1] == list(range(3, 10))
    errors = against_one_process(events, 10)
    assert errors["differ"] == 0 and max(errors["loss"], errors["parameter"]) < 1e-10


def test_who_comes_back_to_nobody_says_so(laboratory):
    with pytest.raises(RuntimeError, match=r"group_0 came back, and found 0 peers that are further than step 0"):
        laboratory.run("train_replica", 1, 1, [kill(0, 0, step=1)], max_lives=2, options={"groups": 1})


def test_a_deadline_ends_a_run_and_all_its_processes(laboratory):
    with pytest.raises(TimeoutError, match=r"not over after 1.0 s: .*group 0 rank 0"):
        laboratory.run("train_replica", 1, 1, deadline=1.0, options={"groups": 1, "n_steps": 1000})
    assert not psutil.Process(laboratory.parent.pid).children(recursive=True)


@pytest.mark.full
def test_ten_runs_with_kills_at_random_moments(laboratory):
    dice = random.Random(0)
    for _ in range(10):
        group, rank = dice.randrange(2), dice.randrange(2)
        kills = [kill(group, rank, step=dice.randrange(1, N_STEPS - 1), after=dice.uniform(0, 0.05))]
        options = {"n_steps": N_STEPS, "groups": 2, "step_seconds": 0.02}
        check_healed(laboratory.run("train_replica", 2, 2, kills, options=options), [group])


@pytest.mark.full
def test_three_groups_of_one_rank_and_both_others_die(laboratory):
    kills = [kill(1, 0, step=2, after=0.02), kill(2, 0, step=6, after=0.02)]
    options = {"n_steps": N_STEPS, "groups": 3, "step_seconds": 0.15}
    check_healed(laboratory.run("train_replica", 3, 1, kills, options=options), [1, 2])


@pytest.mark.full
def test_a_rank_that_hangs_but_heartbeats_ends_itself(laboratory):
    options = {"n_steps": N_STEPS, "groups": 2, "work_timeout": 2.0, "peer_timeout": 8.0}
    options["hang"] = {"group": 1, "rank": 0, "step": 4}
    events = laboratory.run("train_replica", 2, 2, options=options)
    assert {e["group"] for e in chosen(events, "exit") if e["code"]} == {1}
    assert against_one_process(events, N_STEPS)["differ"] == 0
    assert "Timeout (0:00:02)!" in laboratory._last_errors(20_000), "it says where it hung"


@pytest.mark.full
@pytest.mark.parametrize("outer", ["diloco", "local_sgd"])
def test_semi_synchronous_training_survives(laboratory, outer):
    options = {"n_steps": 6, "groups": 2, "outer": outer}
    events = laboratory.run("train_semi_synchronously", 2, 2, [kill(1, 0, step=2, after=0.05)], options=options)
    assert {e["group"] for e in chosen(events, "born") if e["life"] == 1} == {1}
    assert len({(e["rank"], e["digest"]) for e in chosen(events, "state")}) == 2
    losses = [e["loss"] for e in chosen(events, "loss") if (e["group"], e["rank"]) == (0, 0)]
    assert len(losses) == 6 and losses[-1] < losses[0]


@pytest.mark.full
def test_torchrun_restarts_from_the_last_checkpoint(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import json, os, signal, sys\n"
        f"sys.path.insert(0, {str(pathlib.Path(__file__).parent.parent / 'minititan')!r})\n"
        "import fault_tolerance\n"
        "first = os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'\n"
        "def report(kind, **details):\n"
        "    line = json.dumps({'rank': int(os.environ['RANK']), 'kind': kind} | details)\n"
        "    os.write(1, (line + '\\n').encode())\n"
        "    if first and kind == 'forward' and details['step'] == 5 and os.environ['RANK'] == '1':\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        f"fault_tolerance.elastic_training(report, {str(tmp_path)!r}, 8, save_every=2, step_seconds=0.02)\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, str(script)], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [e["step"] for e in chosen(events, "loaded") if e["rank"] == 0] == [0, 4]
    errors = against_one_process(events, 8)
    assert errors["differ"] == 0 and max(errors["loss"], errors["parameter"]) < 1e-10


# --- without processes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("silent_for", "asked", "quorum"),
    [
        ({"a": 0.1, "b": 0.1}, {"a": 3, "b": 3}, ["a", "b"]),
        ({"a": 0.1, "b": 0.1}, {"a": 3}, None),  # b is alive: only slow
        ({"a": 0.1, "b": 1.2}, {"a": 3}, ["a"]),  # b is dead
        ({"a": 0.1, "b": 1.2}, {"a": 3, "b": 3}, ["a"]),  # b asked, then died
        ({"b": 0.0, "a": 0.1, "c": 0.0}, {"a": 7, "c": 0, "b": 7}, ["a", "b", "c"]),
        ({"a": 1.2}, {"a": 3}, None),
        ({}, {}, None),
    ],
)
def test_quorum_by_hand(silent_for, asked, quorum):
    assert form_quorum_by_hand(silent_for, asked, timeout=1.0) == quorum


def test_mistakes_are_told_with_their_numbers():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(ValueError, match=r"work_timeout=0 seconds: each must be above 0"):
        FaultTolerantReplica(model, optimizer, name="a", lighthouse="", store=None, work_timeout=0)
    with pytest.raises(ValueError, match=r"save_every=0 of 10 steps: at least 1"):
        run_elastic(None, None, 10, None, None, save_every=0)
    with pytest.raises(ValueError, match=r"12 rows among 5: unequal"):
        rows_of(0, 0, 5)
