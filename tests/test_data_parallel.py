"""DDP by hand and native against one process: relative errors, so that a gradient that is zero scores 1."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from minititan.data_parallel import (
    BucketedAllReduceByHand,
    all_reduce_per_gradient_by_hand,
    apply_ddp,
    skip_sync,
)
from minititan.lab.launch import launch
from minititan.lab.trace import recording, span

VOCABULARY, DIM, TIME = 51, 16, 5


class Net(nn.Module):
    """Tied ends, uneven sizes, a frozen weight; and on demand a weight nobody uses and one that few rows use."""

    def __init__(self, sometimes=True, seed=0):
        super().__init__()
        self.embedding, self.output = nn.Embedding(VOCABULARY, DIM), nn.Linear(DIM, VOCABULARY, bias=False)
        self.output.weight = self.embedding.weight
        self.up, self.down, self.frozen = nn.Linear(DIM, 33), nn.Linear(33, DIM), nn.Linear(DIM, DIM)
        self.frozen.requires_grad_(False)
        if sometimes:
            self.never, self.rare = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(DIM))
        self.to(torch.float64)
        generator = torch.Generator().manual_seed(seed)
        for p in self.parameters():
            nn.init.normal_(p, std=0.3, generator=generator)  # also the biases: nothing compared may be 0

    def forward(self, tokens_BT):
        x_BTD = self.embedding(tokens_BT)
        rare_B = tokens_BT[:, 0] == 0
        if rare_B.any():
            x_BTD = x_BTD + self.rare * rare_B[:, None, None]
        x_BTD = self.frozen(x_BTD + self.down(torch.tanh(self.up(x_BTD))))
        return self.output(x_BTD)


def rows_of(rank, step, microbatch, sometimes):
    """1 to 3 rows, so that ranks have unequal numbers of tokens; row 0 of rank 1 is rare in microbatch 0."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * microbatch + rank)
    shape = 1 + (rank + microbatch) % 3, TIME
    tokens_BT = torch.randint(1, VOCABULARY, shape, generator=generator)
    if sometimes and rank == 1 and microbatch == 0:
        tokens_BT[0, 0] = 0
    return tokens_BT


def cross_entropy_sum(model, tokens_BT):
    return F.cross_entropy(model(tokens_BT[:, :-1]).mT, tokens_BT[:, 1:], reduction="sum")


def train(model, ranks, accumulate, n_copies=1, replica=None, sync=skip_sync, sometimes=True, steps=3):
    """3 steps of AdamW on the rows of `ranks` together -> losses, {name: gradient or None} a step, weights."""
    run = replica if isinstance(replica, nn.Module) else model
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses, gradients = [], []
    everyone = range(dist.get_world_size())
    for step in range(steps):
        rows = partial(rows_of, step=step, sometimes=sometimes)
        n_tokens = (TIME - 1) * sum(len(rows(r, microbatch=a)) for r in everyone for a in range(accumulate))
        for a in range(accumulate):
            with sync(replica, a < accumulate - 1):
                tokens_BT = torch.cat([rows(r, microbatch=a) for r in ranks])
                share = cross_entropy_sum(run, tokens_BT) / n_tokens
                (share * n_copies).backward()
            losses.append(share.detach())
        gradients.append({k: None if p.grad is None else p.grad.clone() for k, p in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)  # a bucket must forget, and its views outlive, either
    return torch.stack(losses), gradients, {k: p.detach().clone() for k, p in model.named_parameters()}


def relative(ours, theirs):
    assert theirs.norm() > 0, "a zero reference proves nothing"
    return ((ours - theirs).norm() / theirs.norm()).item()


def errors(ours, theirs):
    """{what: relative error} of everything that `train` returns; a gradient on one side only is an error of 1."""
    losses = ours[0].clone()
    dist.all_reduce(losses)
    found = {"loss": relative(losses, theirs[0])}
    for step, (mine, want) in enumerate(zip(ours[1], theirs[1], strict=True)):
        for name in want:
            if mine[name] is None or want[name] is None:
                found[f"step {step}, {name} is None"] = float(mine[name] is not want[name])
            else:
                found[f"step {step}, gradient of {name}"] = relative(mine[name], want[name])
    return found | {f"weight {name}": relative(ours[2][name], theirs[2][name]) for name in theirs[2]}


def my_ranks():
    return [dist.get_rank()]


def one_process(accumulate, sometimes, **options):
    everyone = range(dist.get_world_size())
    return train(Net(sometimes), everyone, accumulate, sometimes=sometimes, **options)


WAYS = {  # name -> does it take parameters without a gradient, and how to make a replica
    "per gradient": (False, lambda model, mesh: all_reduce_per_gradient_by_hand(model, mesh)),
    "buckets": (True, lambda model, mesh: BucketedAllReduceByHand(model, mesh)),
    "a bucket each": (True, lambda model, mesh: BucketedAllReduceByHand(model, mesh, bucket_bytes=1)),
    "some buckets, a group": (
        True,
        lambda model, mesh: BucketedAllReduceByHand(model, mesh.get_group(), bucket_bytes=5000),
    ),
    "native": (False, lambda model, mesh: apply_ddp(model, mesh)),
    "native, unused": (True, lambda model, mesh: apply_ddp(model, mesh, 0.001, find_unused_parameters=True)),
}


def test_every_way_equals_one_process():
    def compare():
        mesh, found = init_device_mesh("cpu", (dist.get_world_size(),)), {}
        reference = {(a, s): one_process(a, s) for a in (1, 2, 3) for s in (True, False)}
        for way, (sometimes, replicate) in WAYS.items():
            for accumulate in (1, 2, 3):
                model = Net(sometimes, seed=dist.get_rank())  # the first rank's weights are everybody's
                replica = replicate(model, mesh)
                ours = train(model, my_ranks(), accumulate, dist.get_world_size(), replica, sometimes=sometimes)
                found[way, accumulate] = errors(ours, reference[accumulate, sometimes])
        return found

    for found in launch(compare, ranks=4, device="cpu"):
        assert len(found) == 3 * len(WAYS)
        for way, by_what in found.items():
            assert len(by_what) > 20
            worst = max(by_what, key=by_what.get)
            assert by_what[worst] < 1e-10, (way, worst, by_what[worst])


def test_the_mistakes_that_people_made_are_caught():
    """Each trains without a word. The comparison above gives them an error of 0.1 and more."""

    def average_the_weights(model, mesh):  # the hook gets the parameter, and the parameter is what it reduces
        for p in model.parameters():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.data.div_(2)))

    class before_accumulation:
        """The hook sees what arrives, not the sum with earlier microbatches."""

        def __init__(self, model, mesh):
            self.on = True
            for p in model.parameters():
                if p.requires_grad:
                    p.register_hook(self.average)

        def average(self, gradient):
            if self.on:
                dist.all_reduce(gradient := gradient / 2)
            return gradient

    def off(replica, skip):
        replica.on = not skip
        return skip_sync(None)

    def forget_n(model, mesh):
        replica = BucketedAllReduceByHand(model, mesh)
        replica.n = 1
        return replica

    def measure():
        mesh, found = init_device_mesh("cpu", (2,)), {}
        ways = {
            "weights": (average_the_weights, skip_sync),
            "before accumulation": (before_accumulation, off),
            "sum": (forget_n, skip_sync),
            "local": (lambda *_: None, skip_sync),
        }
        for name, (wrong, sync) in ways.items():
            for accumulate in (1, 2):
                model = Net(sometimes=False)
                replica = wrong(model, mesh)
                ours = train(model, my_ranks(), accumulate, 2, replica, sync, sometimes=False, steps=1)
                one = one_process(accumulate, False, steps=1)
                by_what = errors(ours, one)
                found[name, accumulate] = max(e for what, e in by_what.items() if "gradient" in what)
        return found

    for found in launch(measure, ranks=2, device="cpu"):
        assert found.pop(("before accumulation", 1)) < 1e-10  # which is why it needs a test with 2
        assert all(error > 0.1 for error in found.values()), found
        assert found["sum", 1] == pytest.approx(1.0)


def test_collectives_bytes_and_overlap():
    """Whatever the accumulation: P once, and one number a parameter by hand. The first bucket leaves before the end."""

    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(DIM, DIM, bias=False) for _ in range(6)])

        def forward(self, x_BD):
            for i, layer in enumerate(self.layers):
                x_BD = torch.tanh(layer(x_BD))
                x_BD.register_hook(partial(self.mark, f"backward of {i}"))
            return x_BD

        def mark(self, name, _):
            with span(name):
                pass

    def count():
        mesh, layer, found = init_device_mesh("cpu", (2,)), 4 * DIM * DIM, {}
        ways = {
            "per gradient": all_reduce_per_gradient_by_hand,
            "buckets": partial(BucketedAllReduceByHand, bucket_bytes=2 * layer),
            "native": partial(apply_ddp, bucket_mb=2 * layer / 2**20),
        }
        for way, replicate in ways.items():
            model = Plain()
            replica = replicate(model, mesh)
            run = replica if isinstance(replica, nn.Module) else model
            for _ in range(3):  # DDP regroups its buckets after the first backward
                with recording() as events:
                    for left in (2, 1, 0):
                        with skip_sync(replica, left > 0):
                            run(torch.ones(2, DIM)).sum().backward()
                model.zero_grad()
            events = [e for e in events if e.lane != "wait"]
            found[way] = [(e.name, e.n_bytes) for e in sorted(events, key=lambda e: e.start)]
        return found

    layer, number = 4 * DIM * DIM, 4
    for found in launch(count, ranks=2, device="cpu"):
        sent = {way: [n for name, n in events if name == "all_reduce"] for way, events in found.items()}
        assert sent["per gradient"] == [layer] * 6 * 3
        assert sent["buckets"] == [2 * (layer + number)] * 3
        assert sum(sent["native"]) == 6 * layer and len(sent["native"]) == 3
        for way, events in found.items():
            names = [name for name, _ in events if name.startswith(("backward", "all_reduce"))]
            last = names[len(names) - names[::-1].index("backward of 5") - 1 :]
            assert last.index("all_reduce") < last.index("backward of 0"), (way, last)
        assert [n for n in names if n == "all_reduce"] == ["all_reduce"] * 3


def test_gradients_are_views_and_memory_is_the_formula():
    def look():
        model = Net()
        replica = BucketedAllReduceByHand(model, bucket_bytes=5000)
        trained = [p for p in model.parameters() if p.requires_grad]
        cross_entropy_sum(model, rows_of(1, 0, 0, True)).backward()
        flat = sum(bucket.flat.nbytes for bucket in replica.buckets)
        assert flat == sum(p.nbytes + 8 for p in trained)  # P and one number a parameter
        storages = {bucket.flat.untyped_storage().data_ptr() for bucket in replica.buckets}
        assert {p.grad.untyped_storage().data_ptr() for p in trained if p.grad is not None} <= storages
        order = [p for bucket in replica.buckets for p in bucket.parameters]
        assert len(replica.buckets) > 2 and {*order} == {*trained}
        with pytest.raises(ZeroDivisionError), replica.no_sync():
            raise ZeroDivisionError
        assert replica.syncing
        return [p.grad is None for p in (model.never, model.rare, model.embedding.weight)]

    assert launch(look, ranks=1, device="cpu") == [[True, False, False]]


def test_kinds_do_not_mix_in_a_bucket():
    """bf16 and fp32 parameters, buffers, and a gradient that the user replaced between microbatches."""

    def look():
        torch.manual_seed(dist.get_rank())
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4).bfloat16())
        model[1].running_mean.fill_(dist.get_rank() + 1.0)
        replica = BucketedAllReduceByHand(model)
        assert sorted(str(b.flat.dtype) for b in replica.buckets) == ["torch.bfloat16", "torch.float32"]
        assert model[1].running_mean.tolist() == [1.0] * 4
        with replica.no_sync():
            model[0](torch.ones(1, 4)).sum().backward()
        model[0].bias.grad = torch.full((4,), float(dist.get_rank()))
        (model[2](model[1](model[0](torch.ones(2, 4))).bfloat16()).sum() + model[0].bias.sum()).backward()
        return model[0].bias.grad, model[2].bias.grad

    first, second = launch(look, ranks=2, device="cpu")
    for ours, theirs in zip(first, second, strict=True):
        assert torch.equal(ours, theirs)
    assert torch.allclose(first[0], torch.full((4,), 1.5)) and torch.equal(first[1], 2 * torch.ones(4).bfloat16())


def test_mistakes_are_told_with_their_numbers():
    def collect():
        line = init_device_mesh("cpu", (2,))
        grid = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        frozen = Net().requires_grad_(False)
        sharded, wrapped = fully_shard(nn.Linear(4, 4), mesh=line), apply_ddp(Net(), line)
        mistakes = {
            "axes": lambda f: f(Net(), grid),
            "meta": lambda f: f(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta")), line),
            "frozen": lambda f: f(frozen, line),
            "DTensor": lambda f: f(sharded, line),
            "twice": lambda f: f(wrapped, line),
            "no mesh": lambda f: f(Net(), line.get_group()) and apply_ddp(Net(), line.get_group()),
            "no size": lambda f: f(Net(), line, -1),
        }
        told = {}
        for way in (apply_ddp, BucketedAllReduceByHand):
            for what, mistake in mistakes.items():
                try:
                    mistake(way)
                except ValueError as error:
                    told[way.__name__, what] = str(error)
        ours = apply_ddp(Net(), line, 5)
        assert isinstance(ours, DistributedDataParallel) and isinstance(ours.module, Net)
        return told

    expected = {
        "axes": ["2 axes", "('replicate', 'shard')", "(2, 1)", "mesh["],
        "meta": ["2 of 4", "Sequential", "1.weight", "materialize"],
        "frozen": ["0 of 9", "Net"],
        "DTensor": ["2 of 2", "weight", "Shard(dim=0)", "(2,)", "HSDP"],
        "twice": [".module"],
        "no mesh": ["ProcessGroup", "init_device_mesh"],
        "no size": ["-1", "25"],
    }
    for told in launch(collect, ranks=2, device="cpu"):
        for way in ("apply_ddp", "BucketedAllReduceByHand"):
            for what, words in expected.items():
                if (way, what) == ("BucketedAllReduceByHand", "no size"):
                    words = ["-1", "above 0"]
                assert all(word in told.get((way, what), "") for word in words), (way, what, told)
