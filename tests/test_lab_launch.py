"""Every promise of lab.launch: results, output, and each way in which a rank can fail."""

import contextlib
import ctypes
import dataclasses
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time

import psutil
import pytest
import torch
import torch.distributed as dist

from minititan.lab import _ranks
from minititan.lab._start import ForkServer
from minititan.lab.launch import RankError, launch, preload, rank_device
from minititan.lab.trace import recording


@dataclasses.dataclass
class Inner:
    tensor: torch.Tensor
    nothing: None = None


@dataclasses.dataclass
class Outer:
    rank: int
    inner: Inner


def ranks_alive() -> list[psutil.Process]:
    """Living processes below this one, the fork server left out."""
    server = ForkServer._current.process.pid if ForkServer._current else None
    return [p for p in psutil.Process().children(recursive=True) if p.pid != server]


def gone_within(seconds: float, processes: list[psutil.Process]) -> bool:
    """Whether none of them runs any more; a zombie only waits for init to read its exit code."""

    def runs(process):
        with contextlib.suppress(psutil.NoSuchProcess):
            return process.status() != psutil.STATUS_ZOMBIE

    end = time.monotonic() + seconds
    while any(map(runs, processes)) and time.monotonic() < end:
        time.sleep(0.02)
    return not any(map(runs, processes))


@pytest.fixture(autouse=True)
def nothing_left():
    yield
    assert not ranks_alive()


def rank_of() -> int:
    return dist.get_rank()


# ------------------------------------------------------------------------------------------ what comes back


def test_results_by_rank_of_a_closure():
    base = 10

    def add(more):
        total = torch.tensor([dist.get_rank() + base + more])
        dist.all_reduce(total)
        return total

    results = launch(add, 1, ranks=3)
    assert [r.tolist() for r in results] == [[36]] * 3


def test_tensors_nested_dataclasses_and_none():
    def give(kind):
        rank = dist.get_rank()
        return None if kind == "none" else Outer(rank, Inner(torch.full((2, 3), float(rank), dtype=torch.float64)))

    assert launch(give, "none", ranks=2) == [None, None]
    results = launch(give, "nested", ranks=2)
    assert all(isinstance(r, Outer) and isinstance(r.inner, Inner) for r in results)
    assert [r.rank for r in results] == [0, 1]
    assert results[1].inner.tensor.dtype == torch.float64
    assert torch.equal(results[1].inner.tensor, torch.ones(2, 3, dtype=torch.float64))


def test_a_class_of_the_main_module_is_the_same_class_on_return():
    code = """
        import dataclasses
        from minititan.lab.launch import launch
        @dataclasses.dataclass
        class Mine:
            x: int
        def give():
            return Mine(3)
        print([isinstance(r, Mine) and r.x for r in launch(give, ranks=2)])
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=100)
    assert done.stdout.splitlines()[-1] == "[3, 3]", done.stderr
    assert done.stderr == ""


def test_a_view_travels_without_its_storage_and_gradients_are_detached():
    def give():
        big = torch.zeros(1 << 22)
        weight = torch.ones(3, requires_grad=True)
        return big[:2], weight * 2

    view, product = launch(give, ranks=1)[0]
    assert view.untyped_storage().nbytes() == 8
    assert torch.equal(product, torch.full((3,), 2.0)) and not product.requires_grad


def test_environment_directory_threads_and_device():
    os.environ["MINITITAN_TEST"] = "seen"
    try:

        def tell():
            names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MINITITAN_TEST")
            return [os.environ[n] for n in names], os.getcwd(), torch.get_num_threads(), str(rank_device())

        results = launch(tell, ranks=2, threads=2)
    finally:
        del os.environ["MINITITAN_TEST"]
    assert results[1] == (["1", "1", "2", "seen"], os.getcwd(), 2, "cpu")


def test_after_matmuls_in_the_kernel():
    x = torch.randn(512, 512)
    for _ in range(3):
        x = torch.nn.functional.normalize(x @ x)

    def multiply():
        y = torch.ones(256, 256) @ torch.ones(256, 256)
        dist.all_reduce(y)
        return y[0, 0].item()

    assert launch(multiply, ranks=4, timeout=20) == [1024.0] * 4


def test_two_launches_at_once_from_two_threads():
    results = {}

    def work(name):
        def total():
            x = torch.tensor(float(len(name)))
            dist.all_reduce(x)
            return name, x.item()

        results[name] = launch(total, ranks=3)

    threads = [threading.Thread(target=work, args=(name,)) for name in ("a", "bb")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results == {"a": [("a", 3.0)] * 3, "bb": [("bb", 6.0)] * 3}


def test_spawn_gives_the_same():
    def total():
        x = torch.tensor(dist.get_rank() + 1.0)
        dist.all_reduce(x)
        return x.item()

    assert launch(total, ranks=2, start="spawn") == [3.0, 3.0]

    def fail():
        if dist.get_rank() == 1:
            raise KeyError("spawned")
        dist.barrier()

    with pytest.raises(RankError, match="spawned") as caught:
        launch(fail, ranks=2, start="spawn")
    assert caught.value.rank == 1

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RankError, match="SIGKILL"):
        launch(die, ranks=2, start="spawn")


# ------------------------------------------------------------------------------------------ what is printed


def test_output_is_labelled_and_equal_lines_are_folded(capsys):
    def speak():
        print("same")
        if dist.get_rank() == 2:
            print("only two")
        print("to stderr", file=sys.stderr)
        print("no newline", end="")

    launch(speak, ranks=4, device="cpu")
    out, err = capsys.readouterr()
    assert out.splitlines() == ["[rank 0-3] same", "[rank 2] only two", "[rank 0-3] no newline"]
    assert err.splitlines() == ["[rank 0-3] to stderr"]


def test_output_is_live(monkeypatch):
    class Clocked:
        def __init__(self):
            self.lines = []

        def write(self, text):
            self.lines.append((time.monotonic(), text))

        def flush(self):
            pass

    clocked = Clocked()

    def slow():
        print("before")
        time.sleep(1.0)

    monkeypatch.setattr(sys, "stdout", clocked)
    launch(slow, ranks=2, device="cpu")
    end = time.monotonic()
    monkeypatch.undo()
    assert [text for _, text in clocked.lines] == ["[rank 0-1] before\n"]
    assert end - clocked.lines[0][0] > 0.6


def test_progress_bars_show_their_last_state(capsys):
    def bar():
        for i in range(5):
            print(f"\r{i}/4", end="")
        print()

    launch(bar, ranks=1, device="cpu")
    assert capsys.readouterr().out == "[rank 0] 4/4\n"


def test_200_megabytes_of_output(capsys):
    def flood():
        if dist.get_rank() == 1:
            line = "x" * 999 + "\n"
            for _ in range(200):
                sys.stdout.write(line * 1000)
            print("the last words")
        return "done"

    before = psutil.Process().memory_info().rss
    assert launch(flood, ranks=2, device="cpu", timeout=60) == ["done", "done"]
    out = capsys.readouterr().out
    assert psutil.Process().memory_info().rss - before < 60e6
    assert len(out) < 2e6
    assert out.endswith("[rank 1] the last words\n")
    assert "[rank 1] ... 198,949,439 bytes not shown" in out


def test_200_megabytes_without_a_newline(capsys):
    def flood():
        for _ in range(200):
            sys.stdout.write("x" * 1_000_000)

    launch(flood, ranks=1, device="cpu", timeout=60)
    assert "bytes not shown" in capsys.readouterr().out


def test_torchrun_line_and_device_are_told(capsys):
    from minititan.lab import launch as module

    launch(rank_of, ranks=2, device="cpu", torchrun=True)
    assert "torchrun --nproc-per-node 2 -m test_lab_launch" in capsys.readouterr().out
    module._told_device.clear()
    launch(rank_of, ranks=1, device="auto")
    launch(rank_of, ranks=1, device="auto")
    assert capsys.readouterr().out.count("gloo" if not torch.cuda.is_available() else "NCCL") == 1


# --------------------------------------------------------------------------------------------- what fails


def inner_failure():
    raise ZeroDivisionError("the true cause")


def test_first_failure_with_its_own_traceback_and_the_others_positions():
    def fail():
        if dist.get_rank() == 2:
            time.sleep(0.3)  # let the others arrive in their collective
            inner_failure()
        dist.all_reduce(torch.ones(3))

    began = time.monotonic()
    with pytest.raises(RankError) as caught:
        launch(fail, ranks=4)
    assert time.monotonic() - began < 15
    error, text = caught.value, str(caught.value)
    assert error.rank == 2 and isinstance(error.exception, ZeroDivisionError)
    assert text.startswith("rank 2 of 4 failed: ZeroDivisionError: the true cause")
    assert 'in inner_failure\n    raise ZeroDivisionError("the true cause")' in text
    assert "_ranks.py" not in text and os.getcwd() not in text
    assert sorted(error.positions) == [0, 1, 3]
    assert any("waits in all_reduce #1 (float32 [3])" in line for line in error.positions.values())
    assert launch(rank_of, ranks=2) == [0, 1]


def test_chained_exceptions_keep_their_chain():
    def fail():
        try:
            inner_failure()
        except ZeroDivisionError as cause:
            raise LookupError("what followed") from cause

    with pytest.raises(RankError, match="what followed") as caught:
        launch(fail, ranks=1)
    assert "direct cause" in str(caught.value) and "the true cause" in str(caught.value)


def test_an_exception_that_cannot_be_sent_is_told():
    class Odd(Exception):
        def __init__(self):
            super().__init__("odd one")
            self.lock = threading.Lock()

    def fail():
        raise Odd

    with pytest.raises(RankError, match="odd one") as caught:
        launch(fail, ranks=1)
    assert caught.value.exception is None


def test_a_hang_names_the_collective_and_who_never_called_it():
    def hang():
        x = torch.ones(4)
        dist.all_reduce(x)
        if dist.get_rank() == 0:
            dist.all_reduce(x)
        elif dist.get_rank() == 2:
            with recording():  # which stands around the wait
                dist.all_reduce(x, async_op=True).wait()
        else:
            time.sleep(60)

    began = time.monotonic()
    with pytest.raises(RankError) as caught:
        launch(hang, ranks=3, timeout=1.5)
    assert time.monotonic() - began < 20
    positions = caught.value.positions
    differs = "rank 1 has not called all_reduce #2 (float32 [4]), in which ranks 0, 2 wait"
    assert str(caught.value).startswith(f"no result from ranks 0-2 within 1.5 s: {differs}\n")
    assert "rank 0 waits in all_reduce #2 (float32 [4])" in positions[0]
    assert positions[0].endswith("dist.all_reduce(x); rank 1 has not called it")
    assert "in hang: dist.all_reduce(x, async_op=True).wait()" in positions[2]
    assert "time.sleep(60)" in positions[1] and "in hang" in positions[1]


def test_a_hang_in_a_subgroup_and_one_in_recv():
    def hang():
        pair = dist.new_group([1, 2])
        rank = dist.get_rank()
        if rank == 2:
            dist.all_gather([torch.zeros(2), torch.zeros(2)], torch.ones(2), group=pair)
        elif rank == 0:
            dist.recv(torch.zeros(1), src=1)
        return "back"

    with pytest.raises(RankError) as caught:
        launch(hang, ranks=3, timeout=1.5)
    positions = caught.value.positions
    assert "rank 2 waits in all_gather #1 of the group of ranks 1-2" in positions[2]
    assert "rank 1 never called it" in positions[2]
    assert "rank 0 is in recv" in positions[0]
    assert positions[1] == "rank 1 has returned"


def test_a_hang_where_ranks_call_different_collectives():
    def hang():
        if dist.get_rank() == 0:
            dist.broadcast(torch.ones(8), src=1)
            dist.barrier()
        else:
            dist.all_gather([torch.ones(8)] * 2, torch.ones(8))
            time.sleep(60)

    with pytest.raises(RankError) as caught:
        launch(hang, ranks=2, timeout=1.5)
    assert "rank 1 called all_gather as #1" in str(caught.value) or "rank 0 called broadcast as #1" in str(caught.value)


def test_a_stopped_rank_does_not_hang_the_report():
    def stop():
        if dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.barrier()

    with pytest.raises(RankError) as caught:
        launch(stop, ranks=2, timeout=1)
    assert "does not answer" in caught.value.positions[0]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (lambda: os._exit(3), "ended with exit code 3 before it returned"),
        (lambda: os._exit(0), "ended with exit code 0 before it returned"),
        (lambda: sys.exit(4), "called sys.exit(4)"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed by SIGKILL"),
        (lambda: ctypes.string_at(0), "was killed by SIGSEGV"),
        (lambda: os.abort(), "was killed by SIGABRT"),
    ],
)
def test_a_rank_that_dies(how, words):
    def die():
        dist.barrier()
        if dist.get_rank() == 1:
            how()
        dist.barrier()

    server = ForkServer.of_this_process().process.pid
    began = time.monotonic()
    with pytest.raises(RankError) as caught:
        launch(die, ranks=3)
    assert time.monotonic() - began < 15
    assert caught.value.rank == 1 and words in str(caught.value)
    assert launch(rank_of, ranks=2) == [0, 1]
    assert ForkServer.of_this_process().process.pid == server  # it survives its children


def test_interrupt_ends_every_rank():
    def hang():
        time.sleep(60)

    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        launch(hang, ranks=4)
    assert time.monotonic() - began < 15
    assert not ranks_alive()
    assert launch(rank_of, ranks=2) == [0, 1]


def test_a_killed_kernel_leaves_nothing():
    code = """
        import os, time
        from minititan.lab.launch import launch
        def hang():
            print(os.getpid(), flush=True)
            time.sleep(100)
        launch(hang, ranks=3, device="cpu", start=START)
    """
    for start in ("forkserver", "spawn"):
        script = textwrap.dedent(code).replace("START", repr(start))
        kernel = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        pids = [int(kernel.stdout.readline().split()[-1]) for _ in range(3)]
        below = psutil.Process(kernel.pid).children(recursive=True)
        assert set(pids) <= {p.pid for p in below}
        kernel.kill()
        kernel.wait()
        kernel.stdout.close()
        assert gone_within(5, below)


def test_what_a_rank_started_ends_with_it():
    def start():
        return os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "100")

    (pid,) = launch(start, ranks=1)
    assert not psutil.pid_exists(pid) or gone_within(5, [psutil.Process(pid)])


def test_a_delivered_result_counts_even_when_the_rank_then_aborts():
    def give():
        if dist.get_rank() == 0:
            threading.Timer(0.3, os.abort).start()
        else:
            time.sleep(1.0)
        return dist.get_rank()

    assert launch(give, ranks=2) == [0, 1]


def test_the_server_is_replaced_when_it_has_died():
    server = ForkServer.of_this_process()
    server.process.kill()
    server.process.wait()
    assert launch(rank_of, ranks=2) == [0, 1]

    def hang():
        time.sleep(60)

    server = ForkServer.of_this_process()
    threading.Timer(0.7, server.process.kill).start()
    with pytest.raises(RankError, match="fork server died"):
        launch(hang, ranks=2)
    assert launch(rank_of, ranks=2) == [0, 1]


# ------------------------------------------------------------------------------ what is refused, in words


def test_unpicklable_arguments_and_closures_are_named():
    lock = threading.Lock()

    def use():
        return lock

    def take(a, b):
        return a

    with pytest.raises(ValueError, match=r"argument 1 of .*take, cannot be sent to the ranks \(a lock\)"):
        launch(take, 1, lock)
    with pytest.raises(ValueError, match=r"'lock', which .*use uses, cannot be sent"):
        launch(use)


def test_an_unpicklable_result_and_a_dtensor_are_explained():
    def give_lock():
        return threading.Lock()

    with pytest.raises(RankError, match=r"rank \d returned something that cannot be sent .*a lock"):
        launch(give_lock, ranks=2)

    def give_dtensor():
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh = init_device_mesh("cpu", (2,))
        return {"weight": distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])}

    with pytest.raises(RankError) as caught:
        launch(give_dtensor, ranks=2)
    text = str(caught.value)
    assert "returned a DTensor (global shape (4, 2)" in text
    assert ".full_tensor()" in text and ".to_local()" in text


def test_a_launch_inside_a_rank():
    def nest():
        launch(rank_of, ranks=2)

    with pytest.raises(RankError, match=r"inside rank \d of another launch"):
        launch(nest, ranks=2)


def test_init_process_group_in_the_kernel():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeError, match=r"rank 0 of 1.*destroy_process_group"):
            launch(rank_of, ranks=2)
    finally:
        dist.destroy_process_group()
    assert launch(rank_of, ranks=2) == [0, 1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"ranks": 0}, "ranks must be a positive integer, got 0"),
        ({"ranks": True}, "got True"),
        ({"ranks": 2.0}, r"got 2\.0"),
        ({"threads": -1}, "threads must be a positive integer, got -1"),
        ({"timeout": 0}, "timeout must be a positive number of seconds, got 0"),
        ({"timeout": float("nan")}, "got nan"),
        ({"timeout": "10"}, "got '10'"),
        ({"device": "gpu"}, "device must be 'auto', 'cpu' or 'cuda', got 'gpu'"),
        ({"start": "fork"}, "start must be"),
    ],
)
def test_bad_arguments(arguments, words):
    with pytest.raises(ValueError, match=words):
        launch(rank_of, **arguments)


def test_calling_the_function_by_mistake():
    with pytest.raises(ValueError, match="not launch"):
        launch(3)


def test_cuda_without_enough_gpus_says_how_many():
    gpus = torch.cuda.device_count()
    with pytest.raises(ValueError, match=f"{gpus + 1} ranks, but this machine has {gpus}"):
        launch(rank_of, ranks=gpus + 1, device="cuda")


# ------------------------------------------------------------------------------------------ nothing is left


def test_100_launches_leave_nothing(monkeypatch, tmp_path):
    launch(rank_of, ranks=1)  # the server is there, and what importing torch caches
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))

    def count():
        dist.barrier()
        return dist.get_rank()

    def state():
        me = psutil.Process()
        return {
            "fds": me.num_fds(),
            "threads": me.num_threads(),
            "sockets": len(me.net_connections("all")),
            "children": len(me.children(recursive=True)),
            "server fds": psutil.Process(ForkServer._current.process.pid).num_fds(),
            "files": os.listdir(tmp_path),
        }

    launch(count, ranks=2)
    before = state()
    for _ in range(100):
        assert launch(count, ranks=2) == [0, 1]
    end = time.monotonic() + 5  # the server closes the last rank's pipe a moment after its result is here
    while state() != before and time.monotonic() < end:
        time.sleep(0.01)
    assert state() == before and not before["files"]


def test_the_server_only_imports():
    """No thread runs in the server: that is what makes forking it sound."""
    pid = ForkServer.of_this_process().process.pid
    assert psutil.Process(pid).num_threads() == 1
    assert _ranks.inside_rank is None


def test_benchmark_counts_all_ways():
    from minititan.lab import _benchmark

    times = _benchmark.measure(ranks=2, repeats=1)
    assert set(times) == {"launch, first call", "launch, warm", "spawn", "torchrun"}
    assert all(seconds > 0 for runs in times.values() for seconds in runs)


# --- preload -----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ranks are forked on Linux only")
def test_preload_makes_ranks_that_have_imported_it_and_outlives_its_server(monkeypatch):
    monkeypatch.setattr(ForkServer, "_wanted", [])

    def has():
        return "mailbox" in sys.modules  # of Python's own, and of no use to anybody here

    preload("mailbox", "mailbox")
    assert launch(has, ranks=2, device="cpu") == [True, True]
    ForkServer.of_this_process().process.kill()
    ForkServer.of_this_process().process.wait()
    assert launch(has, ranks=1, device="cpu") == [True]
    with pytest.raises(ImportError, match="cannot preload no_such_module: ModuleNotFoundError"):
        preload("no_such_module")
    assert launch(has, ranks=1, device="cpu") == [True] and ForkServer._wanted == ["mailbox"]
