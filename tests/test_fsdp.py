"""ZeRO 1, 2 and 3 by hand, as one flat vector, and native, against one process: relative errors, so that a zero scores 1."""

import copy
import time
import warnings
from collections import Counter
from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.checkpoint import checkpoint

from minititan.fsdp import FlatParameterByHand, FullyShardByHand, ZeroByHand, apply_fsdp, prefetch
from minititan.lab.emulate import link, processor
from minititan.lab.launch import launch
from minititan.lab.trace import recording, trace_modules, watch_memory

VOCABULARY, DIM, HIDDEN, ROWS, TIME = 50, 16, 33, 8, 5


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)

    def forward(self, x_BTD):
        return x_BTD + self.down(F.gelu(self.up(self.norm(x_BTD))))


class Block(nn.Module):
    """33 rows, which no 4 ranks divide; a gain of 3, which 4 ranks cannot share; one weight in two places."""

    def __init__(self):
        super().__init__()
        self.mlp = Mlp()
        self.left, self.right = nn.Linear(DIM, DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.right.weight = self.left.weight
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, 3))

    def forward(self, x_BTD, scale=None):
        mixed_BTD = self.left(x_BTD) * torch.sigmoid(self.right(x_BTD)) * self.gain.prod()
        x_BTD = x_BTD + mixed_BTD if scale is None else x_BTD + mixed_BTD * scale
        return self.mlp(x_BTD)


class Net(nn.Module):
    """Tied ends in the root, and 3 blocks: the first with a frozen weight, the second frozen, the last run twice."""

    def __init__(self, freeze_one_weight=True):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.output = nn.Embedding(VOCABULARY, DIM), nn.Linear(DIM, VOCABULARY, bias=False)
        self.output.weight = self.embedding.weight
        self.layers = nn.ModuleDict({str(i): Block() for i in range(3)})
        self.layers["0"].mlp.up.weight.requires_grad_(not freeze_one_weight)
        self.layers["1"].requires_grad_(False)
        self.to(torch.float64)
        for name, p in self.named_parameters():
            if "gain" not in name:
                nn.init.normal_(p, std=0.3)  # also the biases: nothing that is compared may be 0

    def forward(self, tokens_BT):
        x_BTD = self.embedding(tokens_BT)
        for layer in self.layers.values():
            x_BTD = layer(x_BTD)
        x_BTD = layer(x_BTD, scale=x_BTD.mean(dim=-1, keepdim=True))
        return self.output(x_BTD)


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    assert theirs.norm() > 0, "a zero reference proves nothing"
    return ((ours - theirs).norm() / theirs.norm()).item()


def loss_of(model, tokens_BT):
    logits_BTV = model(tokens_BT[:, :-1])
    return F.cross_entropy(logits_BTV.flatten(0, 1), tokens_BT[:, 1:].flatten())


def train(model, tokens_SABT, handle=None, rows=slice(None)):
    """3 AdamW steps -> the losses of this rank's rows, and {name: whole gradient} per step, and whole weights."""
    zero = isinstance(handle, ZeroByHand)
    trained = handle.rows if zero else [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, fused=True)  # a loop over DTensors takes most of the time
    if zero:
        handle.attach(optimizer)
    losses, gradients = [], []
    for tokens_ABT in tokens_SABT[:, :, rows]:
        for tokens_BT in tokens_ABT:
            loss = loss_of(model, tokens_BT) / len(tokens_ABT)
            loss.backward()
            losses.append(loss.detach())
        gradients.append(whole(model, handle, gradients=True))
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses), gradients, whole(model, handle)


def whole(model, handle=None, gradients=False):
    if isinstance(handle, FullyShardByHand) or (isinstance(handle, ZeroByHand) and gradients):
        return {k: t.cpu() for k, t in handle.whole(gradients).items()}
    found = {k: p.grad if gradients else p.detach().clone() for k, p in model.named_parameters()}
    found = {k: t for k, t in found.items() if t is not None}
    if found and isinstance(first := next(iter(found.values())), DTensor):  # like full_tensor(), in one message
        pieces = [None] * first.device_mesh.size(first.device_mesh.ndim - 1)
        local = {k: t.to_local() for k, t in found.items()}
        dist.all_gather_object(pieces, local, group=first.device_mesh.get_group(first.device_mesh.ndim - 1))
        found = {k: torch.cat([piece[k] for piece in pieces]) for k in local}
    return found


def tokens(steps=3, accumulate=1, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (steps, accumulate, ROWS, TIME), generator=generator)


def my_rows():
    each = ROWS // dist.get_world_size()
    return slice(dist.get_rank() * each, (dist.get_rank() + 1) * each)


WAYS = {
    "ZeRO-1": lambda model, line, grid: ZeroByHand(model, line, stage=1),
    "ZeRO-2": lambda model, line, grid: ZeroByHand(model, line.get_group(), stage=2),
    "by hand": lambda model, line, grid: FullyShardByHand(model, line),
    "by hand, a process group": lambda model, line, grid: FullyShardByHand(model, line.get_group()),
    "by hand, HSDP": lambda model, line, grid: FullyShardByHand(model, grid),
    "by hand, no reshard": lambda model, line, grid: FullyShardByHand(model, line, reshard_after_forward=False),
    "by hand, 1 unit": lambda model, line, grid: FullyShardByHand(model, line, blocks=[]),
    "by hand, 2 blocks": lambda model, line, grid: FullyShardByHand(model, line, list(model.layers.values())[1:3]),
    "flat": lambda model, line, grid: FlatParameterByHand(model, line),
    "flat, HSDP": lambda model, line, grid: FlatParameterByHand(model, grid),
    "native": lambda model, line, grid: apply_fsdp(model, line),
    "native, HSDP": lambda model, line, grid: apply_fsdp(model, grid),
    "native, no reshard": lambda model, line, grid: apply_fsdp(model, line, reshard_after_forward=False),
    "native, reshard the root": lambda model, line, grid: apply_fsdp(model, line, reshard_after_forward=True),
    "native, reshard to 2": lambda model, line, grid: apply_fsdp(model, line, reshard_after_forward=2),
    "native, prefetch 2": lambda model, line, grid: prefetch(apply_fsdp(model, line), 2),
    "native, offload": lambda model, line, grid: apply_fsdp(model, line, cpu_offload=True),
    "native, 1 unit": lambda model, line, grid: apply_fsdp(model, line, blocks=[]),
    "native, nested": lambda model, line, grid: apply_fsdp(
        model, line, [m for layer in model.layers.values() for m in (layer, layer.mlp)]
    ),
}
ACCUMULATED = (
    "ZeRO-1",
    "ZeRO-2",
    "by hand",
    "by hand, HSDP",
    "flat",
    "native",
    "native, HSDP",
    "native, no reshard",
    "native, reshard the root",
    "native, reshard to 2",
    "native, offload",
)


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.full), 4, 8])
def test_every_way_equals_one_process(ranks):
    """On 8 ranks HSDP only, 2 groups of 4: it is what differs."""
    ways = {way: shard for way, shard in WAYS.items() if ranks < 8 or "HSDP" in way}
    cases = [(way, 1, 3) for way in ways] + [(way, 3, 2) for way in ways if way in ACCUMULATED]

    def compare():
        line = init_device_mesh("cpu", (ranks,))
        grid = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard"))
        errors, reference = {}, {}
        for way, accumulate, steps in cases:
            data, kind = tokens(steps, accumulate), {"freeze_one_weight": "flat" not in way}
            if (key := (accumulate, *kind.values())) not in reference:
                reference[key] = train(Net(**kind), data)
            one, model = reference[key], Net(**kind)
            losses, gradients, weights = train(model, data, ways[way](model, line, grid), my_rows())
            dist.all_reduce(losses)
            found = errors[way, accumulate] = {"loss": relative(losses / ranks, one[0])}
            for step, theirs in enumerate(one[1]):
                for name, gradient in theirs.items():
                    found[f"step {step}, gradient of {name}"] = relative(gradients[step][name], gradient)
                still = [n for n, g in gradients[step].items() if n not in theirs and g.any()]
                assert not still, f"frozen, but with a gradient: {still}"
            for name, weight in one[2].items():
                found[f"weight {name}"] = relative(weights[name], weight)
        return errors

    for by_way in launch(compare, ranks=ranks, device="cpu", timeout=120):
        assert len(by_way) == len(cases)
        for way, errors in by_way.items():
            assert len(errors) > 50
            worst = max(errors, key=errors.get)
            assert errors[worst] < 1e-10, (way, worst, errors[worst])


def test_forgotten_division_or_scatter_is_caught():
    """The comparison above has teeth: a sum in place of a mean is off by n - 1, a local gradient by about 1."""

    def compare():
        data, one = tokens(steps=1), train(Net(), tokens(steps=1))
        model = Net()
        handle = FullyShardByHand(model, None)
        for unit in handle.units:
            unit.copies = 1
        summed = train(model, data, handle, my_rows())[1][0]
        local = train(Net(), data, None, my_rows())[1][0]
        name = "layers.2.mlp.up.weight"
        return [relative(wrong[name], one[1][0][name]) for wrong in (summed, local)]

    for summed, local in launch(compare, ranks=4, device="cpu"):
        assert summed == pytest.approx(3.0)
        assert local > 0.2


def test_rows_and_padding():
    """Rank r holds rows r*k to r*k + k; what 4 ranks do not fill is 0, and stays 0 under AdamW with decay."""

    def look():
        model = Net()
        full = copy.deepcopy(model.layers["2"])
        FullyShardByHand(model, None)
        before = {k: p.detach().clone() for k, p in model.layers["2"].named_parameters()}
        optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=0.5)
        loss_of(model, tokens(steps=1)[0, 0]).backward()
        optimizer.step()
        after = {k: p.detach().clone() for k, p in model.layers["2"].named_parameters()}
        return dict(full.named_parameters()), before, after, model.output.weight is model.embedding.weight

    for rank, (full, before, after, tied) in enumerate(launch(look, ranks=4, device="cpu")):
        assert tied
        for name, rows in {"mlp.up.weight": 9, "gain": 1, "mlp.norm.weight": 4, "left.weight": 4}.items():
            mine = full[name][rank * rows :][:rows]
            assert before[name].shape == (rows, *full[name].shape[1:])
            assert torch.equal(before[name][: len(mine)], mine)
            for padding in (before[name][len(mine) :], after[name][len(mine) :]):
                assert not padding.any()


def test_collectives_and_bytes_equal_the_formula():
    """Counted by CommDebugMode and by lab.trace, sized by lab.trace; everything padded to 4 ranks.

    FSDP: 2L+1 all-gathers and L+1 reduce-scatters a microbatch, of a unit's bytes each; HSDP: 1 all-reduce more.
    ZeRO-1: a reduce-scatter and an all-gather a parameter and step; ZeRO-2: the reduce-scatter every microbatch.
    """

    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.head, self.layers = nn.Linear(DIM, 3), nn.ModuleList([nn.Linear(DIM, DIM) for _ in range(3)])

        def forward(self, x_BD):
            for layer in self.layers:
                x_BD = x_BD + layer(x_BD).tanh()
            return self.head(x_BD)

    def count():
        line = init_device_mesh("cpu", (4,))
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        seen, x_BD = {}, torch.randn(2, DIM, requires_grad=True)
        for way in expected:
            model = Plain()
            handle = WAYS[way](model, line, grid)
            zero = isinstance(handle, ZeroByHand)
            optimizer = torch.optim.SGD(handle.rows if zero else model.parameters())
            if zero:
                handle.attach(optimizer)

            def step(watch, model=model, optimizer=optimizer):
                for _ in range(3):
                    with watch():
                        model(x_BD).sum().backward()
                with watch():
                    optimizer.step()
                optimizer.zero_grad()

            step(nullcontext)  # FSDP2 sets itself up in the first forward
            counts = []

            @contextmanager
            def counting(counts=counts):  # it loses its way when a model runs twice in it
                with CommDebugMode() as counted, warnings.catch_warnings():
                    warnings.simplefilter("ignore", UserWarning)  # its own module hooks turn outputs into views
                    yield
                counts.append(Counter({names[str(op)]: n for op, n in counted.get_comm_counts().items()}))

            step(counting)
            with recording() as events:
                step(nullcontext)
            sizes = {name: sorted(e.n_bytes for e in events if e.name == name) for name in {e.name for e in events}}
            seen[way] = dict(sum(counts, Counter())), sizes
        return seen

    names = {"c10d._allgather_base_": "all_gather", "c10d._reduce_scatter_base_": "reduce_scatter"}
    names["c10d.allreduce_"] = "all_reduce"
    block, root = 4 * (DIM * DIM + DIM), 4 * (4 * DIM + 4)  # the head's 3 rows are padded to 4 ranks
    units = [block] * 3 + [root]
    parameters = [4 * DIM * DIM, 4 * DIM] * 3 + [4 * 4 * DIM, 4 * 4]
    fsdp = {"all_gather": [block] * 6 + [root], "reduce_scatter": units}
    hsdp = fsdp | {"all_reduce": [size // 2 for size in units]}
    flat_root = 4 * 52  # 51 numbers in 4 pieces
    a_microbatch = {
        "by hand": fsdp,
        "by hand, no reshard": {"all_gather": units, "reduce_scatter": units},
        "flat": {"all_gather": [block] * 6 + [flat_root], "reduce_scatter": [block] * 3 + [flat_root]},
        "native": fsdp,
        "native, no reshard": {"all_gather": units, "reduce_scatter": units},
        "native, prefetch 2": fsdp,
        "by hand, HSDP": hsdp,
        "native, HSDP": hsdp,
    }
    expected = {way: {kind: sorted(3 * sizes) for kind, sizes in kinds.items()} for way, kinds in a_microbatch.items()}
    expected["ZeRO-1"] = {"all_gather": sorted(parameters), "reduce_scatter": sorted(parameters)}
    expected["ZeRO-2"] = {"all_gather": sorted(parameters), "reduce_scatter": sorted(3 * parameters)}
    for seen in launch(count, ranks=4, device="cpu"):
        for way, (counted, sizes) in seen.items():
            assert sizes == expected[way], way
            assert counted == {kind: len(of) for kind, of in expected[way].items()}, way


@pytest.mark.parametrize("by_hand", [FullyShardByHand, FlatParameterByHand])
def test_memory_is_given_back(by_hand):
    """Between its forward and its backward a block holds no bytes: the peak is the root and a block, not the model."""

    def measure():
        model = Net(freeze_one_weight=False)
        whole_bytes = {n: sum(p.nbytes for p in m.parameters()) for n, m in [*model.layers.items(), ("", model)]}
        handle = by_hand(model, None)
        gathered, peaks = [], []
        for unit in handle.units:

            def gather(shards, out=None, original=unit.gather):
                out = original(shards, out)
                gathered.extend(w.untyped_storage() for w in out)
                peaks.append(sum({s.data_ptr(): s.nbytes() for s in gathered}.values()))
                return out

            unit.gather = gather
        loss = loss_of(model, tokens()[0, 0])
        after_forward = sum(s.nbytes() for s in set(gathered))
        loss.backward()
        after_backward = sum(s.nbytes() for s in set(gathered))
        with torch.no_grad():
            loss_of(model, tokens()[0, 0])
        after_eval = sum(s.nbytes() for s in set(gathered))
        return whole_bytes, peaks, after_forward, after_backward, after_eval, len(gathered)

    for whole_bytes, peaks, after_forward, after_backward, after_eval, n in launch(measure, ranks=2, device="cpu"):
        padding = 16 * 8 * DIM
        block = max(v for k, v in whole_bytes.items() if k)
        root = whole_bytes[""] - sum(v for k, v in whole_bytes.items() if k)
        assert n > 2 * 4
        assert root <= after_forward <= root + padding
        assert after_backward == after_eval == 0
        assert root + block <= max(peaks) <= root + block + padding < 0.7 * whole_bytes[""]


def test_measured_peak_of_gathered_storages():
    """The same from outside: every storage that an all-gather fills or that grows from nothing."""

    def measure():
        model = Net()
        FullyShardByHand(model, None)
        loss_of(model, tokens()[0, 0]).backward()
        steps = []
        for _ in range(5):
            with watch_memory(model) as samples:
                loss_of(model, tokens()[0, 0]).backward()
            gathered = [s.n_bytes.get("gathered", 0) for s in samples]
            steps.append((max(gathered), gathered[-1]))
        block = sum(p.nbytes for p in Block().double().parameters())
        root = model.embedding.weight.nbytes * dist.get_world_size()
        return (
            *min(steps),
            root,
            block,
        )  # gloo's thread may hold a receive buffer a little longer than the call

    for peak, at_the_end, root, block in launch(measure, ranks=2, device="cpu"):
        assert at_the_end == 0
        assert root + block <= peak <= root + 2.1 * block  # a block and its receive buffer, of 3


def test_by_hand_under_checkpointing_and_odd_calls():
    """Recomputation, two forwards before their backwards, outputs without gradient, several dtypes in one block."""

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(3)
            self.a, self.b = nn.Linear(5, 5).double(), nn.Linear(5, 5).float()
            self.unused = nn.Parameter(torch.ones(2))

        def forward(self, inputs, keep=True):
            x_BD, dropped = inputs["x"], inputs["x"].detach()
            return {"x": x_BD + self.b(self.a(x_BD).float()).double(), "dropped": dropped, "keep": keep}

    class Model(nn.Module):
        def __init__(self, recompute=False):
            super().__init__()
            self.blocks, self.recompute = nn.ModuleList([nn.ModuleList([Odd(), Odd()]), Odd()]), recompute
            inner = self.blocks[1].forward
            if recompute:
                self.blocks[1].forward = lambda inputs: checkpoint(inner, inputs, use_reentrant=False)

        def forward(self, x_BD):
            for block in (*self.blocks[0], self.blocks[1]):
                x_BD = block({"x": x_BD})["x"]
            return x_BD

    def compare():
        torch.manual_seed(dist.get_rank())
        x_BD, y_BD = torch.randn(2, 3, 5, dtype=torch.float64)
        errors = []
        for recompute in (False, True):
            one, model = Model(), Model(recompute)
            handle = FullyShardByHand(model, None)
            assert len(handle.units) == 3
            for m in (one, model):
                first, second = m(x_BD), m(y_BD)
                (first * second).sum().backward()
            found = handle.whole(gradients=True)
            for name, p in one.named_parameters():
                if p.grad is not None:
                    dist.all_reduce(p.grad)
                    errors.append((p.dtype, relative(found[name], p.grad / 2)))
                else:
                    assert not found[name].any()
        return errors

    for errors in launch(compare, ranks=2, device="cpu"):
        assert len(errors) == 24
        assert all(e < (1e-10 if dtype == torch.float64 else 1e-6) for dtype, e in errors), errors


def test_zero_by_hand_owns_views():
    """33 rows are 9, 9, 9, 6; 3 rows leave rank 3 without any; a step leaves all ranks equal, frozen weights alone."""

    def look():
        model = Net()
        zero = ZeroByHand(model, None, stage=2)
        shapes = {name: tuple(rows.shape) for name, rows in zip(zero.names, zero.rows, strict=True)}
        views = [rows.untyped_storage()._cdata == p.untyped_storage()._cdata for p, rows in zero.rows_of.items()]
        frozen = model.layers["1"].mlp.up.weight.clone()
        optimizer = zero.attach(torch.optim.AdamW(zero.rows, lr=0.1))
        before = model.embedding.weight.detach().clone()
        loss_of(model, tokens(steps=1)[0, 0, my_rows()]).backward()
        kept = [p.grad for p in model.parameters() if p.grad is not None]
        optimizer.step()
        assert torch.equal(model.layers["1"].mlp.up.weight, frozen) and not torch.equal(model.embedding.weight, before)
        assert model.output.weight is model.embedding.weight
        state = {id(rows): s["exp_avg"].shape for rows, s in optimizer.state.items()}
        assert all(state[id(rows)] == rows.shape for rows in zero.rows)
        return shapes, all(views), kept, zero.whole(), dict(model.named_parameters())

    found = launch(look, ranks=4, device="cpu")
    for rank, (shapes, views, kept, whole_weights, _) in enumerate(found):
        assert views and not kept
        assert shapes["layers.2.mlp.up.weight"] == ([9, 9, 9, 6][rank], DIM)
        assert shapes["layers.2.gain"] == ([1, 1, 1, 0][rank],)
        assert "layers.0.mlp.up.weight" not in shapes and "output.weight" not in shapes
        assert all(torch.equal(w, found[0][4][name]) for name, w in whole_weights.items())


def test_prefetch_lets_gathers_travel_beside_compute():
    """Under a link and a processor of known speed: the next block's gather is under way while a block computes."""

    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Mlp() for _ in range(4)])

        def forward(self, x_BTD):
            for layer in self.layers:
                x_BTD = layer(x_BTD)
            return x_BTD * 1.0

    def measure():
        found, block = {}, sum(p.nbytes for p in Mlp().parameters())
        forward_flops = 2 * 2 * 64 * DIM * HIDDEN  # of a block, for 64 tokens
        for n in (0, 1, 2):
            model = apply_fsdp(Chain(), init_device_mesh("cpu", (2,)))
            prefetch(model, 2)
            prefetch(model, n)
            hooks = trace_modules(model)
            x_BTD = torch.randn(1, 64, DIM)
            model(x_BTD).sum().backward()  # sets itself up
            tries = []
            with link(bytes_per_s=block / 2 / 0.01), processor(forward_flops / 0.01):  # 10 ms each
                for _ in range(3):
                    dist.barrier()
                    began = time.monotonic()
                    with recording() as events:
                        model(x_BTD).sum().backward()
                    seconds = time.monotonic() - began
                    blocks = [e for e in events if e.lane == "compute"]
                    gathers = [e for e in events if e.name == "all_gather"]
                    shared = [max(min(g.end, b.end) - max(g.start, b.start) for b in blocks) for g in gathers]
                    tries.append((seconds, len(gathers), sum(s > 0.005 for s in shared)))
            hooks.remove()
            found[n] = tries
        return found

    for found in launch(measure, ranks=2, device="cpu"):
        for n, tries in found.items():
            # Compute: 4 blocks of 10 ms forward and 20 backward; 8 gathers; 4 reduce-scatters, which gloo never hides.
            least = 0.12 + (0.08 if n == 0 else 0.02) + 0.04
            assert all(seconds >= 0.99 * least and gathers == 8 for seconds, gathers, _ in tries), tries
            beside = [count for *_, count in tries]
            assert max(beside) == 0 if n == 0 else max(beside) >= 5, found  # forward and backward: all but the first


def test_flat_parameter_cuts_where_it_falls():
    def look():
        model = nn.Module()
        model.layers = nn.ModuleList([nn.Linear(3, 3)])
        nn.init.constant_(model.layers[0].bias, -1.0)
        model.layers[0].weight.data = torch.arange(9.0).view(3, 3)
        FlatParameterByHand(model, None)
        return {k: p.detach() for k, p in model.named_parameters()}

    pieces = launch(look, ranks=4, device="cpu")
    assert [p["layers.0.flat_parameter"].tolist() for p in pieces] == [
        [0, 1, 2],
        [3, 4, 5],
        [6, 7, 8],
        [-1, -1, -1],
    ]


def test_bf16_compute_with_fp32_reduction():
    """Gathers in bf16, reduce-scatters and the optimizer in fp32; the gradient is off by what bf16 rounds away."""

    def compare():
        line = init_device_mesh("cpu", (4,))
        data = tokens()
        one = train(Net().float(), data)
        rounded = Net().to(torch.bfloat16)
        theirs = train(rounded, data[:1])[1][0]
        found, seen = {}, {}
        for reduce_dtype in (None, torch.bfloat16):
            model = apply_fsdp(Net().float(), line, param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
            with recording() as events:
                assert model(data[0, 0]).dtype == torch.bfloat16
                loss_of(model, data[0, 0]).backward()
            seen[reduce_dtype] = sorted({(e.name, e.dtype) for e in events})
            model.zero_grad()
            gradients = train(model, data, rows=my_rows())[1]
            assert all(p.dtype == torch.float32 for p in model.parameters())
            names = one[1][0]
            found[reduce_dtype] = [relative(gradients[0][n].float(), names[n]) for n in names]
        found["one process in bf16"] = [relative(theirs[n].float(), one[1][0][n]) for n in theirs]
        return found, seen

    for found, seen in launch(compare, ranks=4, device="cpu"):
        assert seen[None] == [("all_gather", "bfloat16"), ("reduce_scatter", "float32")]
        assert seen[torch.bfloat16] == [("all_gather", "bfloat16"), ("reduce_scatter", "bfloat16")]
        mean = {way: sum(errors) / len(errors) for way, errors in found.items()}
        # bf16 keeps 8 bits: one rounding is 2**-9 on average 2e-3, and a gradient goes through some 20 of them.
        assert 1e-4 < mean[None] < 2e-2 and max(found[None]) < 0.1
        assert mean[None] < mean[torch.bfloat16]
        assert mean[None] < 1.5 * mean["one process in bf16"]


def test_native_keeps_ties_names_and_cpu():
    def look():
        line = init_device_mesh("cpu", (2,))
        model = Net()
        names = [n for n, _ in model.named_parameters()]
        sharded = apply_fsdp(model, line, cpu_offload=True)
        assert sharded is model
        assert [n for n, _ in model.named_parameters()] == names
        assert model.output.weight is model.embedding.weight
        assert model.layers["0"].right.weight is model.layers["0"].left.weight
        return {n: (p.requires_grad, tuple(p.to_local().shape), str(p.placements)) for n, p in model.named_parameters()}

    first, second = launch(look, ranks=2, device="cpu")
    assert first["layers.0.mlp.up.weight"] == (False, (17, DIM), "(Shard(dim=0),)")
    assert second["layers.0.mlp.up.weight"] == (False, (16, DIM), "(Shard(dim=0),)")


def test_mistakes_are_told_with_their_numbers():
    class Scalar(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers, self.temperature = nn.ModuleList([nn.Linear(2, 2)]), nn.Parameter(torch.tensor(1.0))

    class NoBlocks(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 2)

    def collect():
        line, cube = (
            init_device_mesh("cpu", (4,)),
            init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("a", "b", "c")),
        )
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        tied = Net()
        tied.layers["2"].mlp.up.weight = tied.layers["1"].mlp.up.weight
        shared = Net()
        shared.layers["2"].mlp = shared.layers["1"].mlp
        twice = apply_fsdp(Net(), line)
        mixed = Net(freeze_one_weight=False)
        mixed.layers["0"].gain.data = mixed.layers["0"].gain.data.float()
        mistakes = {
            "3 axes": lambda: apply_fsdp(Net(), cube),
            "3 axes, by hand": lambda: FullyShardByHand(Net(), cube),
            "no names": lambda: apply_fsdp(Net(), init_device_mesh("cpu", (2, 2))),
            "no mesh": lambda: apply_fsdp(Net(), line.get_group()),
            "no blocks": lambda: apply_fsdp(NoBlocks(), line),
            "no blocks, by hand": lambda: FullyShardByHand(NoBlocks(), line),
            "foreign block": lambda: apply_fsdp(Net(), line, blocks=[Block()]),
            "twice": lambda: apply_fsdp(twice, line),
            "tied": lambda: apply_fsdp(tied, line),
            "tied, by hand": lambda: FullyShardByHand(tied, line),
            "shared module": lambda: FullyShardByHand(shared, line),
            "scalar": lambda: apply_fsdp(Scalar(), line),
            "scalar, by hand": lambda: FullyShardByHand(Scalar(), line),
            "reshard 3": lambda: apply_fsdp(Net(), line, reshard_after_forward=3),
            "reshard 4 of 2": lambda: apply_fsdp(Net(), grid, reshard_after_forward=4),
            "reshard 1": lambda: apply_fsdp(Net(), line, reshard_after_forward=1),
            "reshard 'yes'": lambda: apply_fsdp(Net(), line, reshard_after_forward="yes"),
            "reduce int": lambda: apply_fsdp(Net(), line, reduce_dtype=torch.int32),
            "param fp8": lambda: apply_fsdp(Net(), line, param_dtype=torch.float8_e4m3fn),
            "flat, frozen": lambda: FlatParameterByHand(Net(), line),
            "flat, 2 dtypes": lambda: FlatParameterByHand(mixed, line),
            "stage 3": lambda: ZeroByHand(Net(), line, stage=3),
            "ZeRO, 2 axes": lambda: ZeroByHand(Net(), grid, stage=1),
            "ZeRO, scalar": lambda: ZeroByHand(Scalar(), line, stage=1),
            "prefetch, no FSDP": lambda: prefetch(Net()),
            "prefetch -1": lambda: prefetch(twice, -1),
        }
        told = {}
        for what, mistake in mistakes.items():
            try:
                mistake()
                told[what] = "nothing"
            except ValueError as error:
                told[what] = str(error)
        apply_fsdp(Net(), line, reshard_after_forward=4)
        apply_fsdp(tied, line, blocks=[tied.layers["0"]])
        return told

    expected = {
        "3 axes": ["3 axes", "('a', 'b', 'c')", "(2, 2, 1)", "mesh["],
        "3 axes, by hand": ["3 axes", "mesh["],
        "no names": ["2 axes", "(2, 2)", "mesh_dim_names"],
        "no mesh": ["ProcessGroup", "init_device_mesh"],
        "no blocks": ["0 blocks", "NoBlocks", "blocks=[]"],
        "no blocks, by hand": ["0 blocks", "NoBlocks", "blocks=[]"],
        "foreign block": ["1 blocks", "Net", "Block"],
        "twice": ["4 of 4 units", "once"],
        "tied": ["layers.1.mlp.up.weight", "layers.2.mlp.up.weight", "root"],
        "tied, by hand": ["layers.1.mlp.up.weight", "layers.2.mlp.up.weight", "root"],
        "shared module": ["layers.1.mlp.norm.weight", "layers.2.mlp.norm.weight"],
        "scalar": ["temperature", "()", "(1,)"],
        "scalar, by hand": ["temperature", "()", "(1,)"],
        "reshard 3": ["=3", "4 ranks", "[2, 4]"],
        "reshard 4 of 2": ["=4", "2 ranks", "[2]"],
        "reshard 1": ["=1", "False"],
        "reshard 'yes'": ["'yes'", "4 ranks"],
        "reduce int": ["reduce_dtype=torch.int32", "float"],
        "param fp8": ["param_dtype=torch.float8_e4m3fn", "16 bits"],
        "flat, frozen": ["Block", "2 ", "FullyShardByHand"],
        "flat, 2 dtypes": ["float32", "float64", "FullyShardByHand"],
        "stage 3": ["stage=3", "FullyShardByHand"],
        "ZeRO, 2 axes": ["2 axes", "(2, 2)"],
        "ZeRO, scalar": ["temperature", "()"],
        "prefetch, no FSDP": ["0 sharded", "apply_fsdp"],
        "prefetch -1": ["n=-1", "4 sharded"],
    }
    for told in launch(collect, ranks=4, device="cpu"):
        assert told.keys() == expected.keys()
        for what, words in expected.items():
            assert all(word in told[what] for word in words), (what, told[what])
