"""Each fault, on real ranks, is named: rank, collective, cause. And the record is whole, whatever kills its writer."""

import json
import os
import pickle
import random
import re
import signal
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from minititan import flight_recorder
from minititan.flight_recorder import dump, explain, read, read_journal_by_hand, recording, torch_analysis
from minititan.lab.launch import RankError, launch

CAUSES = {"skip": "missing", "swap": "order", "shape": "shape", "dtype": "dtype", "sleep": "slow", "die": "dead"}
NUMBER = {"all_gather": 1, "broadcast": 2, "all_reduce": 1}  # in the first step
PER_STEP = {"all_gather": 2, "broadcast": 2, "all_reduce": 1}


def run(folder, fault, culprits=(2,), step=2, collective="all_gather", timeout=20.0):
    """Run a lab until its watchdog, or the fault itself, ends it; the launcher's own deadline must not be needed."""
    began = time.monotonic()
    told = ""
    try:
        launch(flight_recorder.laboratory, str(folder), fault, culprits, step, collective, 4, 0.4, 3, timeout=timeout)
    except RankError as error:
        told = str(error).splitlines()[0]
    assert "no result" not in told, told
    return explain(folder), told, time.monotonic() - began


def as_expected(found, fault, culprits, step, collective):
    if fault == "swap":
        collective = "all_gather"
    group = (0, 1, 2, 3)
    if collective == "all_reduce":
        group = (0, 1) if culprits[0] < 2 else (2, 3)
    number = NUMBER[collective] + PER_STEP[collective] * step
    told = (found.ranks, found.cause, found.collective, found.number, found.group)
    return told == (tuple(culprits), CAUSES[fault], collective, number, group)


# --------------------------------------------------------------------------------------------- the five labs


@pytest.mark.parametrize(
    ("fault", "culprits", "collective"),
    [
        ("skip", (2,), "all_gather"),
        ("swap", (1, 3), "all_gather"),
        ("shape", (2,), "all_reduce"),
        ("dtype", (0,), "all_gather"),
        ("sleep", (1,), "broadcast"),
        ("die", (3,), "all_gather"),
    ],
)
def test_each_fault_is_named_within_the_deadline(tmp_path, fault, culprits, collective):
    found, told, seconds = run(tmp_path, fault, culprits, collective=collective, timeout=20)
    assert as_expected(found, fault, culprits, 2, collective), found
    assert "flight_recorder.py, line" in str(found)
    assert told and seconds < 20
    if fault == "sleep":
        assert "time.sleep(60)" in str(found)
    if fault in ("shape", "dtype"):
        assert "SIGABRT" in told  # nothing could be dumped by those who aborted: it is the journal that tells


def test_two_groups_that_wait_for_each_other(tmp_path):
    found, *_ = run(tmp_path, "cross", (2,), collective="all_reduce")
    assert (found.ranks, found.cause, found.collective, found.number) == ((2,), "missing", "all_gather", 5)
    assert "would call it only afterwards, the record ends here" in str(found)


@pytest.mark.full
def test_random_faults(tmp_path):
    dice = random.Random(8)
    wrong = []
    for n in range(20):
        fault, step, collective = dice.choice([*CAUSES]), dice.randrange(4), dice.choice([*NUMBER])
        culprits = tuple(sorted(dice.sample(range(4), 2))) if fault == "swap" else (dice.randrange(4),)
        step = max(step, 1) if fault == "swap" else step  # half against half, and nothing before: nobody could know
        found, *_ = run(tmp_path / str(n), fault, culprits, step, collective)
        if not as_expected(found, fault, culprits, step, collective):
            wrong.append((fault, culprits, step, collective, str(found)))
    assert not wrong, "\n".join(map(str, wrong))


def test_a_run_without_a_fault_differs_in_nothing_and_leaves_no_hook(tmp_path):
    def work(folder):
        flight_recorder.laboratory(folder, patience=20.0)
        before = read_journal_by_hand(f"{folder}/journal_{dist.get_rank()}")
        dist.all_reduce(torch.ones(3))  # no longer recorded
        assert read_journal_by_hand(f"{folder}/journal_{dist.get_rank()}") == before
        return len(before)

    assert launch(work, str(tmp_path), timeout=30) == [12] * 4
    found = explain(tmp_path)
    assert (found.ranks, found.cause) == ((), "none") and str(found).startswith("no rank differs")


def test_the_run_goes_on_after_a_dump_and_point_to_point_is_watched(tmp_path):
    def work(folder):
        rank = dist.get_rank()
        with recording(folder, patience=0.3):
            x = torch.ones(4)
            if rank == 0:
                dist.recv(x, src=1)
            until = time.monotonic() + 15
            while rank == 1 and time.monotonic() < until and not os.path.exists(f"{folder}/calls_1.json"):
                time.sleep(0.02)
            if rank == 1:
                dist.send(2 * x, dst=0)
        return x[0].item()

    assert launch(work, str(tmp_path), ranks=2, timeout=30) == [2.0, 1.0]
    found = explain(tmp_path)
    assert (found.ranks, found.cause, found.collective, found.group) == ((1,), "slow", "recv", (1, 0))


def test_an_exception_is_the_cause_and_its_echoes_are_not(tmp_path):
    def work(folder):
        with recording(folder, patience=5.0):
            dist.all_reduce(torch.ones(3))
            if dist.get_rank() == 1:
                raise ValueError("a bad batch")
            dist.all_reduce(torch.ones(3))

    with pytest.raises(RankError, match="a bad batch"):
        launch(work, str(tmp_path), ranks=3, timeout=20)
    found = explain(tmp_path)
    assert (found.ranks, found.cause, found.number) == ((1,), "failed", 2)
    assert "rank 1 failed with ValueError: a bad batch before all_reduce #2" in str(found)


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("sleeps", "rank 1 has not called all_reduce #3 (float32 [4]), in which ranks 0, 2 wait"),
        ("leaves", "rank 1 never called all_reduce #3 (float32 [4]), in which ranks 0, 2 wait"),
        ("another", "rank 1 called broadcast as #3, where ranks 0, 2 called all_reduce #3 (float32 [4])"),
    ],
)
def test_the_launchers_hang_report_uses_the_same_words(tmp_path, fault, sentence):
    """The lab and a technique do not import each other: that they agree is seen here, on one and the same run."""

    def work(folder):
        x = torch.ones(4)
        with recording(folder, patience=0.3):
            dist.all_reduce(x)
            dist.all_reduce(x)
            if dist.get_rank() != 1:
                dist.all_reduce(x)
            elif fault == "another":
                dist.broadcast(x, src=1)
                time.sleep(60)  # a broadcast's source need not wait
            elif fault == "sleeps":
                time.sleep(60)

    with pytest.raises(RankError) as caught:
        launch(work, str(tmp_path), ranks=3, timeout=1.2)
    told, found = str(caught.value).splitlines()[0], explain(tmp_path)
    assert told.endswith(f" within 1.2 s: {sentence}")
    assert re.sub(r" at [\w.]+, line \d+, in \w+", "", str(found).split("; ")[0].removesuffix(".")).startswith(sentence)


# ------------------------------------------------------------------------------------------------ the record


def test_the_journal_equals_the_ring_buffer_for_all_ways_to_call(tmp_path):
    def work(folder):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        dist.all_reduce(torch.ones(3))  # before the recording: the numbers go on
        with recording(folder):
            model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
            model(torch.ones(1, 3)).sum().backward()  # from C++
            distribute_tensor(torch.ones(4), mesh["tp"], [Shard(0)]).full_tensor()  # functional
            with torch.inference_mode():
                dist.all_reduce(torch.ones(2, dtype=torch.bfloat16), group=mesh.get_group("dp"))
            dist.all_gather_object([None] * 4, "x")
            dist.barrier()
            ring = dump()["calls"]
        by_hand = read_journal_by_hand(f"{folder}/journal_{dist.get_rank()}")
        fields = ("group", "number", "name", "dtypes", "where")
        return [[{f: call[f] for f in fields} for call in calls] for calls in (ring[-len(by_hand) :], by_hand)]

    results = launch(work, str(tmp_path), timeout=30)
    for ring, by_hand in results:
        assert [c | {"dtypes": 0} for c in by_hand] == [c | {"dtypes": 0} for c in ring]
        assert {c["name"] for c in by_hand} == {"all_reduce", "all_gather", "broadcast", "scatter", "barrier"}
        assert all("test_flight_recorder.py, line" in c["where"] for c in by_hand)
    assert explain(tmp_path).cause == "none"


def test_a_journal_wraps_and_survives_a_kill(tmp_path):
    def work(folder):
        with recording(folder, slots=8):
            for n in range(1, 21):
                dist.all_reduce(torch.ones(n))
            with warnings.catch_warnings(action="ignore"):
                dist.all_reduce_coalesced([torch.ones(n + 1) for n in range(60)])
            if dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.barrier()

    with pytest.raises(RankError, match="SIGKILL"):
        launch(work, str(tmp_path), ranks=2, timeout=20)
    calls = read_journal_by_hand(tmp_path / "journal_1")
    assert [c["number"] for c in calls] == list(range(14, 22))
    assert calls[0]["shapes"] == [[14]] and calls[-1]["shapes"][-1] == [52, "more"]
    assert (tmp_path / "journal_1").stat().st_size == 64 + 8 * 512


def test_torchs_analyser_reads_our_dumps_and_a_dump_needs_no_recording(tmp_path):
    def work(folder):
        dist.all_reduce(torch.ones(3))
        if dist.get_rank() == 1:
            dist.all_gather([torch.ones(3)] * 3, torch.ones(3), async_op=True)
        else:
            dist.all_reduce(torch.ones(3), async_op=True)
        found = dump(folder)
        return found

    dumps = launch(work, str(tmp_path), ranks=3, timeout=20)
    for found in (explain(dumps), explain(tmp_path)):
        assert (found.ranks, found.cause, found.number) == ((1,), "order", 2)
        assert "rank 1 called all_gather as #2" in str(found) and "test_flight_recorder.py" in str(found)
    told = torch_analysis(tmp_path)
    assert "Culprit rank 1" in told and "COLLECTIVE_TYPE_MISMATCH" in told and "tabulate" not in told


def test_nccl_dumps_are_read(tmp_path):
    """As torch's NCCL watchdog writes them, with members as text, states, and C++ frames before Python's."""
    for rank in range(3):
        entries = [
            {
                "process_group": ("0", "default_pg"), "collective_seq_id": n, "profiling_name": "nccl:_all_gather_base",
                "input_sizes": [[4 + (rank == 2 and n == 3)]], "input_dtypes": ["BFloat16"], "retired": n < 3,
                "time_created_ns": 10**9 * n, "state": "completed", "is_p2p": False,
                "frames": [{"name": "step", "filename": "/somewhere/train.py", "line": 12}],
            }
            for n in (1, 2, 3)
        ]  # fmt: skip
        ring = {
            "version": "2.10",
            "pg_config": {"0": {"name": "0", "desc": "", "ranks": "[0, 1, 2]"}},
            "entries": entries,
        }
        (tmp_path / f"rank_{rank}").write_bytes(pickle.dumps(ring))
    found = explain(tmp_path)
    assert (found.ranks, found.cause, found.collective, found.number) == ((2,), "shape", "all_gather", 3)
    assert "bfloat16 [5]" in str(found) and "train.py, line 12, in step" in str(found)
    names = flight_recorder.nccl_environment(tmp_path)
    assert names["TORCH_FR_DUMP_TEMP_FILE"] == f"{tmp_path}/rank_" and names["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"


# ----------------------------------------------------------------------------------------- explain, on records


def records(programs, world=None, **more):
    """Dumps of ranks whose calls are words: "G4 R8" is an all_gather of 4 numbers, then an all_reduce of 8."""
    names = {"G": "all_gather", "R": "all_reduce", "B": "broadcast", "S": "reduce_scatter"}
    dumps = []
    for rank, program in enumerate(programs):
        calls = []
        for n, word in enumerate(program.split(), 1):
            name, size = names[word[0]], int(word[1:] or 4)
            where = f"train.py, line {'GRBS'.index(word[0]) + 1}, in step"
            calls.append(flight_recorder._call("0 all", n, name, [[size]], ["float32"], where, float(n)))
        d = {"rank": rank, "world": len(programs), "groups": {"0 all": [*range(len(programs))]}, "calls": calls}
        dumps.append(d | {"state": "running", "gone": [], "doing": "train.py, line 9, in load", "time": 50.0} | more)
    return dumps


@pytest.mark.parametrize(
    ("programs", "ranks", "cause", "collective", "number"),
    [
        (["G R B G"] * 3, (), "none", "all_gather", 4),
        (["G R B G R", "G R B R", "G R B G R"], (1,), "missing", "all_gather", 4),
        (["G R B G R B", "G R B R G B", "G R B G R B"], (1,), "order", "all_gather", 4),
        (["G R B G R", "G R B R G", "G R B G R", "G R B R G"], (1, 3), "order", "all_gather", 4),
        (["G R B G R B R G", "G R B G R B G R"] * 2, (0, 2), "order", "all_gather", 7),
        (["G R G", "G R G", "G R R G"], (2,), "extra", "all_reduce", 3),
        (["G4 R8"] * 3 + ["G4 R9"], (3,), "shape", "all_reduce", 2),
        (["G R B", "G R B", "G"], (2,), "slow", "all_reduce", 2),
        (["G", "G", ""], (2,), "slow", "all_gather", 1),
        (["G", "R"], (1,), "order", "all_gather", 1),  # nothing came before: the lower rank is taken for right
        (["G B R", "G B R", "G R"], (2,), "missing", "broadcast", 2),
    ],
)
def test_explain_on_records(programs, ranks, cause, collective, number):
    found = explain(records(programs))
    assert (found.ranks, found.cause, found.collective, found.number) == (ranks, cause, collective, number), found


def test_who_is_gone_is_taken_from_the_first_dump():
    dumps = records(["G R", "G R", "G"])
    dumps[0] |= {"gone": [2], "time": 1.0}
    dumps[1] |= {"gone": [0, 2], "time": 2.0}  # rank 0 was ended meanwhile
    dumps[2] |= {"time": None}  # a journal only
    found = explain(dumps)
    assert (found.ranks, found.cause) == ((2,), "dead") and "its last call was all_gather #1" in str(found)


def test_a_rank_that_left_nothing_is_told():
    found = explain(records(["G", "G", "G", "G"])[:3])
    assert (found.ranks, found.cause) == ((3,), "dead") and "it left no record" in str(found)


def test_a_thousand_ranks_take_a_moment():
    programs = ["G R B " * 10 for _ in range(1000)]
    programs[713] = "G R B " * 7 + "G B " + "G R B " * 2
    began = time.process_time()
    found = explain(records(programs))
    assert (found.ranks, found.cause, found.collective, found.number) == ((713,), "missing", "all_reduce", 23)
    assert "ranks 0-712, 714-999 wait" in str(found)
    assert time.process_time() - began < 20


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda folder: explain(folder), "holds no dump and no journal"),
        (lambda folder: explain([]), "no dumps to explain"),
        (lambda folder: read(folder), "holds no dump"),
        (lambda folder: recording(folder).__enter__(), "needs a process group"),
    ],
)
def test_refused_with_the_remedy(tmp_path, call, words):
    with pytest.raises(ValueError, match=words):
        call(tmp_path)


def test_arguments_are_refused(tmp_path):
    def work(folder):
        told = []
        for options in ({"patience": 0.0}, {"slots": 0}):
            try:
                with recording(folder, **options):
                    pass
            except ValueError as error:
                told.append(str(error))
        try:
            flight_recorder.laboratory(folder, "explode")
        except ValueError as error:
            told.append(str(error))
        return told

    patience, slots, fault = launch(work, str(tmp_path), ranks=1, timeout=20)[0]
    assert "above 0" in patience and "at least 1" in slots and "'explode'" in fault


# --------------------------------------------------------------------------------------------- the exercises


def test_dumps_are_plain_data(tmp_path):
    dumps = records(["G R", "G"])
    assert explain(json.loads(json.dumps(dumps))) == explain(dumps)
