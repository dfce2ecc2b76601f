"""regional_compile: one graph for all blocks, equal to eager in float64, in the right order, and what it costs.

"aot_eager" traces, differentiates and runs what inductor would be given: it finds every graph, break and recompilation
in a tenth of the time. The tests marked full let inductor make code.
"""

import logging
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from minititan.activation_checkpoint import apply_activation_checkpoint
from minititan.fsdp import apply_fsdp
from minititan.lab.launch import launch
from minititan.meta_init import materialize, on_meta
from minititan.model import PRESETS, Transformer
from minititan.regional_compile import CompileOnceByHand, compile_blocks, count_graphs, measure_compile
from minititan.tensor_parallel import apply_tensor_parallel

pytestmark = pytest.mark.filterwarnings(
    "ignore"
)  # the compiler uses what torch has deprecated, and looks at grads of non-leaves

CONFIG = replace(PRESETS["debug"], dim=32, n_heads=4, n_kv_heads=4, ffn_dim=48)
TOKENS_BT = torch.arange(4 * 16).view(4, 16) * 7 % 256


def new_model(config=CONFIG) -> Transformer:
    return materialize(on_meta(lambda: Transformer(config).double()), "cpu", seed=0)


def run(model: nn.Module, tokens_BT=TOKENS_BT) -> list[torch.Tensor]:
    """The loss, and every gradient by name."""
    model.zero_grad()
    loss = model(tokens_BT).logsumexp(-1).square().mean()
    loss.backward()
    grads = [p.grad for _, p in sorted(model.named_parameters())]
    return [loss.detach(), *(g.full_tensor() if hasattr(g, "full_tensor") else g.clone() for g in grads)]


def worst(found, expected) -> float:
    return max(((a - b).norm() / b.norm()).item() for a, b in zip(found, expected, strict=True))


@pytest.fixture(autouse=True)
def forget():
    yield
    torch._dynamo.reset()


# ---- one graph ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_layers", [1, 5])
def test_one_graph_for_any_number_of_blocks(n_layers):
    model = new_model(replace(CONFIG, n_layers=n_layers))
    expected, names = run(model), list(model.state_dict())
    compile_blocks(model, backend="aot_eager")
    with count_graphs() as count:
        found = run(model)
    assert (count.graphs, count.breaks, count.recompiles) == (1, 0, 0)
    assert worst(found, expected) < 1e-10
    assert list(model.state_dict()) == names
    new_model(replace(CONFIG, n_layers=n_layers)).load_state_dict(model.state_dict())


@pytest.mark.full
def test_inductor_equals_eager():
    model = new_model()
    expected = run(model)
    with count_graphs() as count:
        assert worst(run(compile_blocks(model)), expected) < 1e-10
    assert count.graphs == 1


def test_by_hand_equals_eager_with_one_graph():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

        def forward(self, x):
            return x + self.norm(self.linear(x).relu())

    torch.manual_seed(0)
    blocks, x = [Block().double().eval() for _ in range(4)], torch.randn(5, 8).double().requires_grad_()
    for block in blocks:
        block.norm.running_var.uniform_(0.5, 2)
    by_hand, made = CompileOnceByHand(lambda pure: made.append(pure) or pure), []

    def through(call):
        for block in blocks:
            block.zero_grad()
        y = x
        for block in blocks:
            y = call(block, y)
        y.square().sum().backward()
        return [y.detach(), *(p.grad.clone() for block in blocks for p in block.parameters())]

    assert worst(through(by_hand.call), through(lambda block, y: block(y))) < 1e-10
    assert (by_hand.graphs, by_hand.hits, len(made)) == (1, 3, 1)
    by_hand.call(blocks[0], torch.randn(6, 8).double())
    blocks[1].slope = 2.0  # a Python number is a guard too
    by_hand.call(blocks[1], x)
    assert by_hand.graphs == 3


# ---- what goes wrong, counted -----------------------------------------------------------------------------------


class _Numbered(nn.Module):
    """A block that knows its number, or prints, or neither."""

    def __init__(self, number: int, breaks: bool = False):
        super().__init__()
        self.linear, self.number, self.breaks = nn.Linear(4, 4), number, breaks

    def forward(self, x):
        y = self.linear(x)
        if self.breaks:
            torch._dynamo.graph_break()
        return x + y * self.number


def _stack(**options) -> nn.Module:
    model = nn.Sequential()
    model.layers = nn.ModuleList(_Numbered(i + 1, **options) for i in range(3))
    model.forward = lambda x: [x := layer(x) for layer in model.layers][-1]
    return model


def test_a_number_in_a_block_is_a_graph_each():
    model, x = _stack(), torch.randn(2, 4, requires_grad=True)
    compile_blocks(model, backend="aot_eager")
    with count_graphs() as count:
        model(x)
    assert count.graphs == 3 and count.recompiles >= 2
    assert any("number" in reason for reason in count.reasons)


def test_a_break_is_counted_or_refused():
    x = torch.randn(2, 4, requires_grad=True)
    model = _stack(breaks=True)
    compile_blocks(model, blocks=[model.layers[0]], fullgraph=False, backend="aot_eager")
    with count_graphs() as count:
        model(x)
    assert count.graphs == 2 and count.breaks == 1
    torch._dynamo.reset()  # it remembers that this code breaks, and runs it eagerly
    strict = compile_blocks(_stack(breaks=True), backend="aot_eager")
    with pytest.raises(torch._dynamo.exc.Unsupported):
        strict(x)


def test_a_branch_on_a_value_is_a_break_too():
    class Branches(nn.Module):
        def forward(self, x):
            y = x * 2
            return y + 1 if y.sum() > 0 else y - 1

    model = nn.ModuleDict({"layers": nn.ModuleList([Branches()])})
    compile_blocks(model, fullgraph=False, backend="eager")
    with count_graphs() as count:
        model["layers"][0](torch.ones(2))
    assert (count.graphs, count.breaks) == (2, 1) and "branching" in count.reasons[0]


def test_a_changed_shape_compiles_once_more_and_then_no_more():
    model = compile_blocks(new_model(), backend="aot_eager")
    counts = []
    with count_graphs() as count:
        for length in (16, 8, 12, 10):
            run(model, TOKENS_BT[:, :length])
            counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert counts == [1, 2, 2, 2] and count.recompiles >= 1
    model = compile_blocks(new_model(), dynamic=False, backend="aot_eager")
    with count_graphs() as count:
        for length in (16, 8, 12):
            run(model, TOKENS_BT[:, :length])
    assert count.graphs == 3


# ---- with the others ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["full", "every_other", "per_op"])
def test_equals_eager_with_checkpointing(mode):
    model = new_model()
    expected = run(model)
    apply_activation_checkpoint(model, mode)
    compile_blocks(model, backend="aot_eager")
    with count_graphs() as count:
        assert worst(run(model), expected) < 1e-10
    assert count.graphs == (2 if mode == "every_other" else 1)


def _sharded_errors(backend: str) -> dict[str, float]:
    n = dist.get_world_size()
    expected = run(new_model())
    line = init_device_mesh("cpu", (n,))

    def fsdp(model):
        apply_fsdp(compile_blocks(model, backend=backend), line)

    def checkpointed_fsdp(model):
        apply_activation_checkpoint(model, "full")
        apply_fsdp(compile_blocks(model, backend=backend), line)

    errors = {}
    for way in (fsdp, checkpointed_fsdp):
        model = on_meta(lambda: Transformer(CONFIG).double())
        way(model)
        with count_graphs() as count:
            errors[way.__name__] = worst(run(materialize(model, "cpu", seed=0)), expected)
        assert count.graphs == 1 and count.breaks == 0, f"{way.__name__}: {count}, {count.reasons}"
    return errors


@pytest.mark.full
def test_with_fsdp():
    for errors in launch(_sharded_errors, "aot_eager", ranks=2, timeout=120):
        assert max(errors.values()) < 1e-10, errors


@pytest.mark.full
def test_inductor_with_fsdp():
    for errors in launch(_sharded_errors, "inductor", ranks=2, timeout=280):
        assert max(errors.values()) < 1e-10, errors


def _tensor_parallel_errors(backend: str, tp: int, cases: list[dict]) -> dict[str, float]:
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)  # full_tensor on two axes
    expected = run(new_model())
    mesh = init_device_mesh("cpu", (dist.get_world_size() // tp, tp), mesh_dim_names=("dp", "tp"))
    errors = {}
    for case in cases:
        model = on_meta(lambda: Transformer(CONFIG).double())
        apply_tensor_parallel(model, mesh["tp"], sequence_parallel=case.get("sequence_parallel", False))
        if "checkpoint" in case:
            apply_activation_checkpoint(model, case["checkpoint"])
        compile_blocks(model, backend=backend)
        if tp < dist.get_world_size():
            apply_fsdp(model, mesh["dp"])
        with count_graphs() as count:
            errors[str(case)] = worst(run(materialize(model, "cpu", seed=0)), expected)
        assert count.graphs == 1 and count.breaks == 0, f"{case}: {count}, {count.reasons}"
    return errors


@pytest.mark.parametrize(
    ("backend", "tp", "cases"),
    [
        ("aot_eager", 2, [{"sequence_parallel": True}]),
        pytest.param("aot_eager", 2, [{}, {"checkpoint": "per_op"}], marks=pytest.mark.full),
        pytest.param("aot_eager", 4, [{}, {"sequence_parallel": True, "checkpoint": "per_op"}], marks=pytest.mark.full),
        pytest.param("inductor", 2, [{"sequence_parallel": True}], marks=pytest.mark.full),
    ],
    ids=["fsdp2xtp2_sp", "fsdp2xtp2", "tp4", "inductor"],
)
def test_with_tensor_parallel(backend, tp, cases):
    for errors in launch(_tensor_parallel_errors, backend, tp, cases, timeout=280):
        assert max(errors.values()) < 1e-10, errors


# ---- measurements and errors ----------------------------------------------------------------------------------------


def test_measured_in_a_fresh_process():
    config = replace(CONFIG, n_layers=3)
    blocks = measure_compile(new_model(config), TOKENS_BT, "blocks", backend="aot_eager")
    eager = measure_compile(new_model(config), TOKENS_BT, "eager")
    assert (blocks.graphs, eager.graphs) == (1, 0)
    assert blocks.cold_s > eager.cold_s > 0 and blocks.warm_s < blocks.cold_s


def test_bad_input():
    model = new_model()
    with pytest.raises(ValueError, match="0 blocks"):
        compile_blocks(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="1 of 1 blocks are not inside Transformer"):
        compile_blocks(model, blocks=[nn.Linear(2, 2)])
    compile_blocks(model, backend="aot_eager")
    with pytest.raises(ValueError, match="4 modules, such as a TransformerBlock, are compiled already"):
        compile_blocks(model)
    with pytest.raises(ValueError, match="none of the 3 ways: eager, blocks, whole"):
        measure_compile(model, TOKENS_BT, "all")

    class Local(nn.Linear):
        pass

    with pytest.raises(ValueError, match="fresh process cannot have this Local"):
        measure_compile(Local(2, 2), torch.ones(2, 2))
    broken = deepcopy(new_model())
    with pytest.raises(RuntimeError, match="'eager' failed with exit code 1"):
        measure_compile(broken, torch.ones(2, 2), "eager")


def test_full_checkpointing_of_dtensors_is_refused():
    def tensor_parallel():
        model = apply_tensor_parallel(new_model(), init_device_mesh("cpu", (2,)))
        apply_activation_checkpoint(model, "every_other")
        try:
            compile_blocks(model)
        except ValueError as error:
            return str(error)

    assert "2 of 4 blocks are checkpointed in full and have DTensors" in launch(tensor_parallel, ranks=2)[0]


def test_after_fsdp_is_refused():
    def late():
        model = apply_fsdp(new_model(), init_device_mesh("cpu", (1,)))
        try:
            compile_blocks(model)
        except ValueError as error:
            return str(error)

    assert "4 modules, such as a FSDPTransformerBlock, are sharded already" in launch(late, ranks=1)[0]
