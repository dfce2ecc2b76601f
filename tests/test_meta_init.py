"""Every layout starts from bitwise the weights of one process, from its own shards alone, and without a message."""

import gc
import logging

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minititan.lab.launch import launch
from minititan.lab.trace import recording
from minititan.meta_init import default_init, generator_for, materialize, on_meta
from minititan.model import PRESETS, Transformer

SEED = 7


class Block(nn.Module):
    """33 hidden rows, which no 2 or 4 ranks divide; a gain of 3, which leaves one of 4 ranks with nothing."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 33), nn.Linear(33, 16)
        self.gain = nn.Parameter(torch.empty(3))

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x)))) * self.gain.prod()


class Net(nn.Module):
    """Tied ends, a frozen weight, and an init of its own that leaves nothing at a constant."""

    def __init__(self):
        super().__init__()
        self.embedding, self.output = nn.Embedding(40, 16), nn.Linear(16, 40, bias=False)
        self.output.weight = self.embedding.weight
        self.layers = nn.ModuleDict({str(i): Block() for i in range(2)})
        self.layers["1"].up.weight.requires_grad_(False)

    def init_parameter(self, name, tensor, generator):
        tensor.normal_(0.0, 0.5, generator=generator)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers.values():
            x = layer(x)
        return self.output(x)


def build(dtype=torch.float64):
    return Net().to(dtype)


def mesh_of(**axes):
    return dist.init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


def shard(model, mesh, **options):
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def tensor_parallel(model, mesh):
    for layer in model.layers.values():
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    parallelize_module(model, mesh, {"embedding": RowwiseParallel()})
    model.output.weight = model.embedding.weight
    return model


def tensor_parallel_then_shard(model, **axes):
    mesh = mesh_of(**axes)
    tensor_parallel(model, mesh["tp"])
    return shard(model, mesh[tuple(name for name in axes if name != "tp")])


OFFLOAD = CPUOffloadPolicy(pin_memory=False)


def by_columns(p):
    return Shard(1) if p.ndim == 2 and p.shape[1] % 4 == 0 else Shard(0)


# name -> (ranks, how to shard it, placements that must have come up)
LAYOUTS = {
    "plain": (4, lambda model: model, set()),
    "tensor parallel": (4, lambda model: tensor_parallel(model, mesh_of(tp=4)), {"S(0)", "S(1)", "R"}),
    "FSDP2": (4, lambda model: shard(model, mesh_of(dp=4)), {"S(0)"}),
    "FSDP2 by columns": (
        4,
        lambda m: shard(m, mesh_of(dp=4), shard_placement_fn=by_columns),
        {"S(0)", "S(1)"},
    ),
    "FSDP2, offloaded": (4, lambda m: shard(m, mesh_of(dp=4), offload_policy=OFFLOAD), {"S(0)"}),
    "HSDP": (4, lambda model: shard(model, mesh_of(copies=2, dp=2)), {"RS(0)"}),
    "FSDP2 x TP": (4, lambda m: tensor_parallel_then_shard(m, dp=2, tp=2), {"_S(0, 2)S(0)", "S(0)S(1)"}),
    "HSDP x TP": (
        8,
        lambda m: tensor_parallel_then_shard(m, copies=2, dp=2, tp=2),
        {"R_S(0, 2)S(0)", "RS(0)S(1)"},
    ),
}


def on_ranks(test, layouts, timeout=100):
    """test(apply) on the ranks of every layout -> {layout: results by rank}; one launch for each number of ranks."""
    quiet = "torch.distributed.tensor._redistribute"  # full_tensor() of FSDP x TP needs two gathers and says so

    def each(names):
        logging.getLogger(quiet).setLevel(logging.ERROR)
        return [test(LAYOUTS[name][1]) for name in names]

    found = {}
    for ranks in {LAYOUTS[name][0] for name in layouts}:
        names = [name for name in layouts if LAYOUTS[name][0] == ranks]
        by_rank = launch(each, names, ranks=ranks, device="cpu", timeout=timeout)
        found |= dict(zip(names, zip(*by_rank, strict=True), strict=True))
    return found


def one_process(dtype=torch.float64):
    return dict(materialize(on_meta(lambda: build(dtype)), "cpu", SEED).named_parameters())


def test_every_layout_starts_from_bitwise_the_weights_of_one_process():
    def compare(apply):
        model = materialize(apply(on_meta(build)), "cpu", SEED)
        different, met, n_here = [], set(), 0
        for name, p in model.named_parameters():
            full = p.full_tensor() if isinstance(p, DTensor) else p
            if not torch.equal(full, expected[name]) or p.requires_grad == (name == "layers.1.up.weight"):
                different.append(name)
            met.add("".join(str(placement) for placement in getattr(p, "placements", ())))
            n_here += (p.to_local() if isinstance(p, DTensor) else p).numel()
        return (
            len(list(model.parameters())),
            different,
            model.output.weight is model.embedding.weight,
            met,
            n_here,
        )

    expected = one_process()
    n_all = sum(p.numel() for p in expected.values())
    for layout, by_rank in on_ranks(compare, LAYOUTS).items():
        for n, different, tied, met, n_here in by_rank:
            assert (n, different, tied) == (len(expected), [], True), layout
            assert LAYOUTS[layout][2] <= met, layout
            assert (n_here == n_all) if layout == "plain" else (n_here < 0.7 * n_all), layout


def test_the_weights_are_all_different():
    """Else equality would prove little: no two numbers, in one parameter or in two, are drawn alike."""
    values = torch.cat([p.flatten() for p in one_process().values()])
    assert len(values.unique()) > 0.99 * len(values)


def test_fsdp_computes_and_steps_with_what_it_was_given():
    """FSDP2 keeps references to the shards that it made itself; it must have taken the new ones, ragged and empty."""
    tokens = torch.arange(40).view(8, 5)

    def losses(apply):
        model = materialize(apply(on_meta(build)), "cpu", SEED)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        found = []
        for _ in range(2):
            found.append(model(tokens).square().mean())
            found[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        return torch.stack(found).detach()

    expected = losses(LAYOUTS["plain"][1])
    assert (expected[0] - expected[1]).abs() > 1e-3
    for layout, by_rank in on_ranks(losses, ["FSDP2", "HSDP", "FSDP2 by columns", "FSDP2, offloaded"]).items():
        for found in by_rank:
            assert ((found - expected) / expected).abs().max() < 1e-12, layout


def test_the_composed_transformer_has_the_loss_of_one_process():
    """As train does it: tensor parallel, then FSDP, then real."""
    from minititan.fsdp import apply_fsdp
    from minititan.tensor_parallel import apply_tensor_parallel

    tokens = torch.arange(2 * 32).view(2, 32)

    def loss(ranks=0):
        model = on_meta(lambda: Transformer(PRESETS["debug"]).double())
        if ranks:
            mesh = mesh_of(dp=2, tp=2)
            apply_fsdp(apply_tensor_parallel(model, mesh["tp"]) or model, mesh["dp"])
        materialize(model, "cpu", SEED)
        return torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).detach()

    expected = loss()
    for found in launch(loss, 4, ranks=4, device="cpu"):
        assert abs(found - expected) < 1e-10


# --- without a message, one parameter at a time --------------------------------------------------------------------


def test_nothing_is_sent():
    """One rank alone makes its shards real, and ends: a collective would wait for the others for ever."""

    def alone(apply):
        model = apply(on_meta(build))
        dist.barrier()
        if dist.get_rank() == 1:
            with recording() as events:
                materialize(model, "cpu", SEED)
            real = all(not p.is_meta for p in model.parameters())
            return [e.name for e in events if e.lane == "communication"], real

    for layout, by_rank in on_ranks(alone, ["FSDP2 x TP"], timeout=30).items():
        assert by_rank == (None, ([], True), None, None), layout


class LiveBytes(TorchDispatchMode):
    """The most bytes of memory that tensors made inside it held at once."""

    def __init__(self):
        super().__init__()
        self.live, self.peak = {}, 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                self.live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.live = {key: (ref, n) for key, (ref, n) in self.live.items() if not ref.expired()}
        self.peak = max(self.peak, sum(n for _, n in self.live.values()))
        return out


def test_one_full_parameter_at_a_time():
    def measure(apply, hoard):
        model, seen, most, hoarded = apply(on_meta(lambda: build(torch.float32))), [], 0, []

        def init(name, tensor, generator):
            nonlocal most
            seen.append(StorageWeakRef(tensor.untyped_storage()))
            most = max(most, sum(not ref.expired() for ref in seen))
            model.init_parameter(name, tensor, generator)
            if hoard:
                hoarded.append(tensor)

        gc.disable()  # freed means freed at once, not when a collection comes
        with LiveBytes() as memory:
            materialize(model, "cpu", SEED, init)
        gc.enable()
        local = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
        held = sum(x.untyped_storage().nbytes() for x in local)
        assert held == sum(x.nbytes for x in local), "a shard keeps more alive than itself"
        return most, memory.peak - held, len(seen)

    def both(apply):
        return measure(apply, hoard=False), measure(apply, hoard=True)

    largest = 40 * 16 * 4  # the embedding in float32
    for layout, by_rank in on_ranks(both, ["plain", "FSDP2", "FSDP2 x TP", "tensor parallel"]).items():
        for (most, above, n), (most_hoarded, above_hoarded, _) in by_rank:
            assert (most, n) == (1, 15), layout  # and a tied parameter is drawn once
            assert above <= 1.5 * largest, layout
            assert most_hoarded == n and above_hoarded > 1.5 * largest, "the test would not see it"


# --- names, seeds, types -------------------------------------------------------------------------------------------


def test_values_depend_on_name_and_seed_only():
    torch.manual_seed(99)
    state = torch.get_rng_state()
    one, two = one_process(), one_process()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert torch.equal(torch.get_rng_state(), state)
    other = dict(materialize(on_meta(build), "cpu", SEED + 1).named_parameters())
    assert not any(torch.equal(one[name], other[name]) for name in one)
    assert generator_for("layers.0.up.weight", 0).initial_seed() == 9633056286955210254  # old runs stay reproducible


@pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning")  # importing inductor warns
def test_wrappers_change_no_name_and_so_no_value():
    def wrapped():
        model = build()
        model.layers["0"] = checkpoint_wrapper(model.layers["0"])
        model.layers["1"] = torch.compile(checkpoint_wrapper(model.layers["1"]))
        return model

    expected = one_process()
    model = materialize(on_meta(wrapped), "cpu", SEED)
    names = [name for name, _ in model.named_parameters()]
    assert "layers.1._orig_mod._checkpoint_wrapped_module.gain" in names
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.values(), strict=True))
    whole = materialize(checkpoint_wrapper(on_meta(build)), "cpu", SEED)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), expected.values(), strict=True))


def test_a_pipeline_stage_has_the_values_of_the_whole():
    config = PRESETS["debug"]
    whole = materialize(on_meta(lambda: Transformer(config)), "cpu", SEED).state_dict()
    stages = [
        on_meta(lambda: Transformer(config, [0, 1], output=False)),
        on_meta(lambda: Transformer(config, [2, 3], embedding=False)),
    ]
    found = {name: t for stage in stages for name, t in materialize(stage, "cpu", SEED).state_dict().items()}
    assert set(found) == set(whole) and all(torch.equal(found[name], whole[name]) for name in whole)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_values_are_drawn_in_float32_and_cast(dtype):
    in_float32, cast = one_process(torch.float32), one_process(dtype)
    assert all(torch.equal(cast[name], p.to(dtype)) for name, p in in_float32.items())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_drawing_on_a_gpu_gives_one_set_of_values_too():
    one, two = (materialize(on_meta(build), device, SEED, draw_on="cuda") for device in ("cpu", "cuda"))
    assert all(torch.equal(a, b.cpu()) for a, b in zip(one.parameters(), two.parameters(), strict=True))


# --- init functions and buffers ------------------------------------------------------------------------------------


class WithBuffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.conv = nn.Conv1d(4, 4, 1)
        with torch.device("cpu"):
            self.register_buffer("table", torch.arange(4.0), persistent=False)


def test_a_model_without_init_parameter_gets_the_default():
    model = materialize(on_meta(WithBuffers), "cpu", SEED)
    assert (model.norm.weight == 1).all() and (model.norm.bias == 0).all() and (model.mix.bias == 0).all()
    assert (model.norm.running_mean == 0).all() and (model.norm.running_var == 1).all()
    assert model.norm.num_batches_tracked.dtype == torch.int64 and model.norm.num_batches_tracked == 0
    assert torch.equal(model.table, torch.arange(4.0)) and "table" not in model.state_dict()
    for weight in (model.mix.weight, model.conv.weight):
        assert 0.01 < weight.std() < 0.04
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))


def test_a_buffer_whose_value_no_name_tells_is_refused_or_filled_by_init():
    def with_table():
        model = WithBuffers()
        model.register_buffer("frequency", torch.arange(4.0))
        return model

    with pytest.raises(ValueError, match=r"1 of 4 buffers on meta have a value.*frequency first: pass init="):
        materialize(on_meta(with_table), "cpu", SEED)

    def init(name, tensor, generator):
        if name == "frequency":
            tensor.copy_(torch.arange(4.0))
        else:
            default_init(name, tensor, generator)

    model = materialize(on_meta(with_table), "cpu", SEED, init)
    assert torch.equal(model.frequency, torch.arange(4.0)) and "frequency" in model.state_dict()


def test_a_real_parameter_is_never_overwritten():
    model = on_meta(build)
    model.layers["0"].gain = nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match=r"1 of 15 parameters are real already, layers\.0\.gain \(cpu\) first"):
        materialize(model, "cpu", SEED)
    assert all(p.is_meta for name, p in model.named_parameters() if name != "layers.0.gain")  # nothing was begun
    with pytest.raises(ValueError, match=r"15 of 15 parameters are real already, embedding\.weight"):
        materialize(materialize(on_meta(build), "cpu", SEED), "cpu", SEED)


def test_an_init_that_fails_is_seen():
    def init(name, tensor, generator):
        raise KeyError(name)

    with pytest.raises(KeyError, match=r"embedding\.weight"):
        materialize(on_meta(build), "cpu", SEED, init)
