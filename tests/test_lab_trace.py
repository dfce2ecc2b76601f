"""lab.trace: every collective once, with its bytes, its group and its true end; spans, traffic, memory, Perfetto."""

import json
import pickle
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from minititan.lab.launch import launch
from minititan.lab.trace import (
    Event,
    MemorySample,
    Traffic,
    cuda_snapshot,
    memory_by_kind,
    peak,
    recording,
    save_chrome_trace,
    span,
    trace_modules,
    traffic,
    watch_memory,
)

# torch 2.13 deprecates the older of each pair.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# --- ranks -----------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.linear = nn.Linear(dim, dim)

    def forward(self, x):
        return x + self.linear(x).relu()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 32)
        self.layers = nn.ModuleDict({str(i): Block() for i in range(3)})
        self.output = nn.Linear(32, 10, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers.values():
            x = layer(x)
        return self.output(x) * 1.0


def every_collective():
    rank, n = dist.get_rank(), dist.get_world_size()
    pair = dist.new_group([0, 1], group_desc="pair")
    x = torch.ones(8)  # 32 bytes
    with recording() as events:
        dist.all_reduce(x)
        dist.broadcast(x, 2)
        dist.reduce(x, 1)
        dist.all_gather([torch.empty(8) for _ in range(n)], x)
        all_gather_single(torch.empty(8 * n), x)
        reduce_scatter_single(torch.empty(2), x)
        dist.gather(x, [torch.empty(8) for _ in range(n)] if rank == 3 else None, 3)
        dist.scatter(x, [torch.ones(8)] * n if rank == 3 else None, 3)
        dist.all_to_all_single(torch.empty(8), x)
        take = [4 if r == rank else 1 for r in range(n)]
        give = [1] * n
        give[rank] = 4
        dist.all_to_all_single(torch.empty(7), torch.ones(7), take, give)
        if rank == 0:
            dist.send(x, 1)
        if rank == 1:
            dist.recv(x, 0)
        if rank < 2:
            dist.all_reduce(x.double(), group=pair)
        dist.barrier()
    return events


def late_rank():
    """Rank 3 calls when all others have; they see that it is complete, and wait for it only 0.2 s after that."""
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    dist.barrier()
    with recording() as events:
        while rank == 3 and store.add("issued", 0) < 3:
            time.sleep(0.01)
        work = dist.all_reduce(torch.ones(4), async_op=True)
        store.add("issued", 1)
        while not work.is_completed():
            time.sleep(0.01)
        time.sleep(0.2)
        waited_at = time.monotonic()
        work.wait()
    return events, waited_at


def blocked():
    """Rank 1 is 0.4 s late, and rank 0 waits for it: in a plain collective, and in a functional one."""
    from torch.distributed import _functional_collectives as funcol

    dist.barrier()
    with recording() as events:
        for call in (dist.all_reduce, lambda x: funcol.all_reduce(x, "sum", dist.group.WORLD) + 0):
            dist.barrier()
            time.sleep(0.4 * dist.get_rank())
            call(torch.ones(4))
    return events


def never_waited():
    dist.barrier()
    with recording() as events:
        work = dist.all_reduce(torch.ones(4), async_op=True)
    work.wait()
    return events


def ring_of_p2p():
    rank, n = dist.get_rank(), dist.get_world_size()
    with recording() as events:
        ops = [
            dist.P2POp(dist.isend, torch.ones(4), (rank + 1) % n),
            dist.P2POp(dist.irecv, torch.ones(4), (rank - 1) % n),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
    return events


def functional_and_dtensor():
    from torch.distributed import _functional_collectives as funcol
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    local = torch.full((2, 4), float(dist.get_rank()))
    with recording() as events:
        total = funcol.all_reduce(torch.ones(4), "sum", mesh["tp"].get_group()) + 0
        whole = DTensor.from_local(local, mesh["tp"], [Shard(0)]).redistribute(placements=[Replicate()]).to_local() + 0
        part = DTensor.from_local(local, mesh["tp"], [Partial()]).redistribute(placements=[Shard(0)]).to_local() + 0
    return events, total, whole, part


def fsdp_step():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    model = Net()
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(0, 10, (4, 8))
    hooks = trace_modules(model, optimizer=optimizer)
    for _ in range(2):  # the first step builds AdamW's states
        with recording() as events, watch_memory(model, optimizer) as samples:
            model(tokens).sum().backward()
            optimizer.step()
    hooks.remove()
    return events, samples, memory_by_kind(model, optimizer)


# --- collectives -----------------------------------------------------------------------------------------------


def test_every_collective_is_seen_once_with_its_bytes_and_members():
    by_rank = launch(every_collective, ranks=4)
    names = [e.name for e in by_rank[2]]
    assert names == [
        "all_reduce", "broadcast", "reduce", "all_gather", "all_gather", "reduce_scatter", "gather", "scatter",
        "all_to_all", "all_to_all", "barrier",
    ]  # fmt: skip
    assert [e.n_bytes for e in by_rank[2]] == [32, 32, 32, 128, 128, 32, 128, 128, 32, 28, 0]
    assert [e.peer for e in by_rank[2]] == [-1, 2, 1, -1, -1, -1, 3, 3, -1, -1, -1]
    for rank, events in enumerate(by_rank):
        assert all(e.rank == rank and e.lane == "communication" and e.end >= e.start for e in events)
        assert [e.start for e in events] == sorted(e.start for e in events)
        assert all(e.ranks == ((0, 1) if e.axis == "pair" else (0, 1, 2, 3)) for e in events)
    uneven = by_rank[1][9]
    assert uneven.splits == (4, 16, 4, 4) and sum(uneven.splits) == uneven.n_bytes
    send, pair = by_rank[0][10:12]
    recv = by_rank[1][10]
    assert (send.name, send.peer, send.n_bytes) == ("send", 1, 32)
    assert (recv.name, recv.peer, recv.n_bytes) == ("recv", 0, 32)
    assert (pair.name, pair.axis, pair.n_bytes, pair.dtype, pair.group_size) == (
        "all_reduce",
        "pair",
        64,
        "float64",
        2,
    )


def test_an_async_collective_ends_when_it_is_complete_not_when_issued_nor_when_waited_for():
    by_rank = launch(late_rank, ranks=4)
    (late,), _ = by_rank[3]
    for (event,), waited_at in by_rank[:3]:
        assert event.start < late.start, "the clocks of the ranks are comparable"
        assert event.end >= late.start, "nobody can finish before the last rank has called"
        assert event.end < waited_at - 0.15, "it ends when it is complete, not when somebody waits for it"
        assert event.blocked == (), "nobody was blocked: it was over"


def test_the_time_in_which_a_rank_is_blocked():
    for collective in (e for e in launch(blocked, ranks=2)[0] if e.name == "all_reduce"):
        start, end = collective.blocked
        assert collective.start <= start and end >= collective.end - 0.05 and end - start > 0.1


def test_a_collective_that_nobody_waits_for_is_recorded():
    for events in launch(never_waited, ranks=2):
        assert [e.name for e in events] == ["all_reduce"]


def test_point_to_point_knows_its_other_end():
    by_rank = launch(ring_of_p2p, ranks=4)
    for rank, events in enumerate(by_rank):
        assert {(e.name, e.peer, e.n_bytes) for e in events} == {
            ("send", (rank + 1) % 4, 16),
            ("recv", (rank - 1) % 4, 16),
        }
    assert traffic(by_rank).pairs == [[16.0 * (j == (i + 1) % 4) for j in range(4)] for i in range(4)]


def test_functional_collectives_and_dtensor_are_counted_once():
    results = launch(functional_and_dtensor, ranks=4)
    for rank, (events, total, whole, part) in enumerate(results):
        assert [(e.name, e.axis, e.n_bytes) for e in events] == [
            ("all_reduce", "tp", 16),
            ("all_gather", "tp", 64),
            ("reduce_scatter", "tp", 32),
        ]
        first = rank // 2 * 2
        assert all(e.ranks == (first, first + 1) and e.end > e.start for e in events)
        assert total.tolist() == [2.0] * 4
        assert whole[:, 0].tolist() == [first, first, first + 1, first + 1]
        assert part.tolist() == [[2.0 * first + 1] * 4], "the recording changes no result"


@pytest.fixture(scope="module")
def fsdp_by_rank():
    return launch(fsdp_step, ranks=4)


def test_fsdp_step_in_forward_and_backward(fsdp_by_rank):
    block = (32 * 32 + 32) * 4
    ends = 10 * 32 * 4 + 10 * 32 * 4
    for rank, (events, samples, _) in enumerate(fsdp_by_rank):
        communication = [e for e in events if e.lane == "communication"]
        assert {e.axis for e in communication} == {"dp_shard", "dp_replicate"}
        gathers = [e.n_bytes for e in communication if e.name == "all_gather"]
        assert sorted(gathers) == [ends] + [block] * 6, "the ends once, each block in forward and backward"
        assert sorted(e.n_bytes for e in communication if e.name == "reduce_scatter") == [ends] + [block] * 3
        assert sorted(e.n_bytes for e in communication if e.name == "all_reduce") == [ends / 2] + [block / 2] * 3

        spans = [(e.phase, e.name) for e in events if e.lane == "compute"]
        order = ["embedding", "layers.0", "layers.1", "layers.2", "output"]
        assert spans == [
            *(("forward", n) for n in order), *(("backward", n) for n in reversed(order)), ("optimizer", "step")
        ]  # fmt: skip
        in_backward = {e.name: e for e in events if e.phase == "backward"}
        layer_2 = in_backward["layers.2"]
        assert in_backward["output"].end <= layer_2.start
        prefetch = [e for e in communication if e.name == "all_gather"][4:]
        assert all(not layer_2.start < e.start < layer_2.end for e in prefetch), "gathers stay outside of spans"
        assert all(s.rank == rank for s in samples)


def test_memory_of_an_fsdp_step(fsdp_by_rank):
    n_params = 10 * 32 * 2 + 3 * (32 * 32 + 32)
    for _, samples, held in fsdp_by_rank:
        assert held["parameters"] == held["gradients"] == n_params * 4 / 2, "sharded over 2, replicated over 2"
        assert held["optimizer"] == pytest.approx(2 * held["parameters"], rel=0.05)  # two moments, and step counters
        assert held["buffers"] == 0
        assert [s.time for s in samples] == sorted(s.time for s in samples)
        assert all(v >= 0 for s in samples for v in s.n_bytes.values())
        last = samples[-1].n_bytes
        assert last["parameters"] == held["parameters"] and last["gradients"] == held["gradients"]
        assert last["gathered"] == 0, "what was gathered is freed"
        gathered = [s.n_bytes.get("gathered", 0) for s in samples]
        assert max(gathered) >= (32 * 32 + 32) * 4
        whole = n_params * 4
        assert max(gathered) < 2 * whole
        assert max(s.n_bytes.get("activations", 0) for s in samples) > 0


# --- one process -----------------------------------------------------------------------------------------------


def test_span_is_free_outside_a_recording_and_nests_inside():
    with span("nothing"):
        pass

    @span("f", phase="forward")
    def f(x):
        return x + 1

    with recording() as outer:
        with span("outer", lane="mine", n_bytes=7), recording() as inner:
            assert f(1) == 2 and f(2) == 3
        with pytest.raises(ZeroDivisionError), span("broken"):
            1 / 0  # noqa: B018
    assert f(3) == 4
    assert [e.name for e in inner] == ["f", "f"]
    assert [e.name for e in outer] == ["outer", "f", "f", "broken"]
    assert outer[0].lane == "mine" and outer[0].n_bytes == 7 and outer[1].phase == "forward"
    assert outer[0].start <= outer[1].start and outer[1].end <= outer[0].end


def test_recording_restores_what_it_patched():
    wait, resize = dist.Work.wait, torch.UntypedStorage.resize_
    with pytest.raises(RuntimeError, match="boom"), recording(), watch_memory():
        raise RuntimeError("boom")
    assert dist.Work.wait is wait and torch.UntypedStorage.resize_ is resize


def test_trace_modules_sees_recomputation_and_patterns():
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    x = torch.randn(4, 32, requires_grad=True)
    with pytest.raises(ValueError, match="no module is called 'layers"):
        trace_modules(model, ["layers.*"])
    with trace_modules(model, ["0", "?.linear"]) as hooks:
        assert len(hooks) == 6
        with recording() as events:
            checkpoint(model[0], x, use_reentrant=False).sum().backward()
    expected = [
        ("forward", "0"),
        ("forward", "0.linear"),
        ("backward", "0"),
        ("recompute", "0"),
        ("recompute", "0.linear"),
    ]
    phases = [(e.phase, e.name) for e in events]
    assert phases[:3] == expected[:3] and set(phases) == {*expected, ("backward", "0.linear")}
    outer = next(e for e in events if (e.phase, e.name) == ("backward", "0"))
    again = next(e for e in events if (e.phase, e.name) == ("recompute", "0"))
    assert outer.start <= again.start and again.end <= outer.end
    with recording() as after:
        model(x).sum().backward()
    assert after == [], "the hooks are gone"


def test_tracing_changes_no_gradient():
    torch.manual_seed(0)
    model, tokens = Net(), torch.randint(0, 10, (2, 5))
    model(tokens).square().sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with trace_modules(model), recording(), watch_memory(model):
        model(tokens).square().sum().backward()
    assert all(torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected, strict=True))


def test_memory_by_kind_counts_ties_once_and_freed_storages_as_zero():
    model = nn.Module()
    model.a = nn.Linear(8, 8, bias=False)
    model.b = nn.Linear(8, 8, bias=False)
    model.b.weight = model.a.weight
    model.register_buffer("c", torch.zeros(3, dtype=torch.float64))
    assert memory_by_kind(model) == {"parameters": 256, "gradients": 0, "optimizer": 0, "buffers": 24}
    model.a.weight.untyped_storage().resize_(0)
    assert memory_by_kind(model)["parameters"] == 0


def test_watch_memory_follows_temporaries_resizes_and_views():
    with watch_memory() as samples:
        a = torch.zeros(1000)
        view = a[10:]
        del a
        b = torch.empty(0)
        b.untyped_storage().resize_(400)
        b.untyped_storage().resize_(0)
        del view, b
    totals = [s.total for s in samples]
    assert totals == [4000, 4400, 4000, 0]
    assert samples[1].n_bytes == {"activations": 4000, "gathered": 400}


def test_watch_memory_knows_gradients_that_are_cleared_without_an_optimizer():
    model = nn.Linear(10, 10, bias=False)
    with watch_memory(model) as samples:
        model(torch.ones(2, 10)).sum().backward()
        model(torch.ones(2, 10)).sum().backward()  # makes a second one, and adds it to the first
        model.zero_grad()
    assert max(s.n_bytes.get("gradients", 0) for s in samples) == 400
    assert samples[-1].n_bytes["gradients"] == 0 and samples[-1].n_bytes["activations"] == 0


def test_peak_is_the_largest_that_was_true_in_a_time():
    samples = [MemorySample(0, t, {"parameters": 1, "activations": n}) for t, n in enumerate((5, 9, 2, 4))]
    assert peak(samples).total == 10 and peak(samples, 2).n_bytes["activations"] == 4
    assert peak(samples, 1.5, 1.5).total == 10, "what was held then, not the next change"
    assert peak(samples, 1.5, 2.5).total == 10 and peak(samples, 2.1, 2.9).total == 3
    assert peak(samples, 7, 8).total == 5
    with pytest.raises(ValueError, match="no sample until -1"):
        peak(samples, -2, -1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tells what to do without CUDA")
def test_cuda_snapshot_without_cuda_says_what_to_use(tmp_path):
    with (
        pytest.raises(ValueError, match=r"no CUDA device.*a\.pickle.*watch_memory"),
        cuda_snapshot(tmp_path / "a.pickle"),
    ):
        raise AssertionError("the block must not run")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, whose allocator keeps the history")
def test_cuda_snapshot_is_what_the_viewer_opens(tmp_path):
    with cuda_snapshot(tmp_path / "a.pickle") as path:
        x = torch.ones(1 << 20, device="cuda")
        del x
    snapshot = pickle.loads(path.read_bytes())
    actions = [entry["action"] for trace in snapshot["device_traces"] for entry in trace if entry["size"] >= 1 << 22]
    assert "alloc" in actions and snapshot["segments"]


def test_cuda_snapshot_is_written_when_the_block_runs_out_of_memory(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **options: calls.append(options))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: calls.append(path))
    with pytest.raises(MemoryError), cuda_snapshot(tmp_path / "a.pickle", max_entries=7):
        raise MemoryError
    assert calls == [{"max_entries": 7}, str(tmp_path / "a.pickle"), {"enabled": None}]

    def full(path):
        raise OSError("no space left")

    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", full)
    with pytest.raises(OSError, match="no space"), cuda_snapshot(tmp_path / "a.pickle"):
        pass
    assert calls[-1] == {"enabled": None}, "recording goes on for ever otherwise"


# --- traffic and Perfetto --------------------------------------------------------------------------------------


def collective(name, rank, n_bytes=1200, ranks=(0, 1, 2, 3), **more):
    return Event(rank, "communication", name, 0.0, 1.0, n_bytes, ranks=ranks, **more)


@pytest.mark.parametrize(
    ("name", "to_next", "total"),
    [("all_gather", 900, 3600), ("reduce_scatter", 900, 3600), ("all_reduce", 1800, 7200)],
)
def test_ring_traffic(name, to_next, total):
    result = traffic([[collective(name, r)] for r in range(4)])
    assert result.pairs == [[to_next * (j == (i + 1) % 4) for j in range(4)] for i in range(4)]
    assert result.total == total and result.sent == {name: total} and result.calls == {name: 1}


def test_rooted_traffic():
    roots = {
        "broadcast": [(2, 3), (3, 0), (0, 1)],  # along the ring, from the root; nobody sends to it
        "reduce": [(3, 0), (0, 1), (1, 2)],
        "gather": [(0, 2), (1, 2), (3, 2)],
        "scatter": [(2, 0), (2, 1), (2, 3)],
    }
    for name, arrows in roots.items():
        n_bytes = 1200 if name in ("broadcast", "reduce") else 300
        result = traffic([collective(name, r, peer=2) for r in range(4)])
        expected = [[n_bytes * ((i, j) in arrows) for j in range(4)] for i in range(4)]
        assert result.pairs == expected, name


def test_all_to_all_and_send_go_straight_there():
    splits = (0, 100, 200, 300)
    result = traffic([collective("all_to_all", r, 600, splits=splits) for r in range(4)])
    assert result.pairs == [[splits[j] * (i != j) for j in range(4)] for i in range(4)]
    both = [collective("send", 1, 50, peer=3), collective("recv", 3, 50, peer=1), collective("barrier", 0, 0)]
    assert traffic(both).pairs[1] == [0, 0, 0, 50] and traffic(both).total == 50


def test_traffic_of_subgroups_keyed_by_axis():
    events = [collective("all_gather", r, 100, ranks=g, axis="tp") for g in ((0, 2), (1, 3)) for r in g]
    result = traffic(events, world_size=5, key=lambda e: e.axis)
    assert result.sent == {"tp": 200.0} and result.calls == {"tp": 2}
    assert result.pairs[0][2] == result.pairs[2][0] == result.pairs[1][3] == 50 and len(result.pairs) == 5
    assert isinstance(traffic([]), Traffic)


def test_chrome_trace_is_what_perfetto_reads(tmp_path):
    events = [
        [
            Event(r, "compute", "layers.0", 10.0, 10.010, phase="forward"),
            Event(r, "compute", "layers.0.attention", 10.002, 10.004, phase="forward"),
            Event(r, "communication", "all_gather", 10.001, 10.006, 64, "gather", (0, 1), "fsdp"),
            Event(r, "communication", "all_gather", 10.003, 10.008, 64, "gather", (0, 1), "fsdp"),
            Event(
                r,
                "communication",
                "send",
                10.009,
                10.0095,
                8,
                "send",
                (0, 1),
                peer=0,
                blocked=(10.0091, 10.0095),
            ),
        ]
        for r in range(2)
    ]
    path = save_chrome_trace(events, tmp_path / "trace.json")
    trace = json.loads(path.read_text())
    slices = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    names = {(e["pid"], e["name"], e.get("tid")): e["args"] for e in trace["traceEvents"] if e["ph"] == "M"}
    assert names[1, "process_name", None] == {"name": "rank 1"}
    threads = {e["args"]["name"]: e["tid"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert list(threads) == ["compute", "communication", "communication 2", "blocked"]
    assert len(slices) == 12 and min(e["ts"] for e in slices) == 0
    first = next(e for e in slices if e["name"] == "layers.0" and e["pid"] == 1)
    assert (first["ts"], first["dur"], first["cat"]) == (0, 10000, "forward")
    gathers = [e for e in slices if e["name"] == "all_gather" and e["pid"] == 0]
    assert [e["tid"] for e in gathers] == [threads["communication"], threads["communication 2"]]
    assert gathers[0]["args"] == {"bytes": 64, "ranks": [0, 1], "axis": "fsdp"}
    assert next(e for e in slices if e["cat"] == "send")["args"]["peer"] == 0
    for pid in (0, 1):
        for tid in threads.values():  # within a thread, slices nest or follow each other
            mine = [(e["ts"], e["ts"] + e["dur"]) for e in slices if (e["pid"], e["tid"]) == (pid, tid)]
            assert all(a[1] <= b[0] or b[1] <= a[1] for a in mine for b in mine if a[0] <= b[0])
