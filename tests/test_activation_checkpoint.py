"""Every way of recomputing against not recomputing: same numbers, counted matmuls, measured bytes."""

import os
import shutil
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import minititan.activation_checkpoint
from minititan.activation_checkpoint import MATMULS, apply_activation_checkpoint, checkpoint_by_hand
from minititan.fsdp import apply_fsdp
from minititan.lab.launch import launch
from minititan.lab.trace import recording, watch_memory
from minititan.meta_init import materialize, on_meta
from minititan.model import ModelConfig, Transformer
from minititan.tensor_parallel import apply_tensor_parallel

CONFIG = ModelConfig(vocab_size=64, dim=32, n_layers=3, n_heads=4, n_kv_heads=2, ffn_dim=48)
while_compiling = pytest.mark.filterwarnings("ignore")  # torch's compiler uses what torch has deprecated
EAGER = ("by hand", "full", "every_other", "per_op")
ROWS, TIME = 4, 8


def new_model(dropout=0.2, config=CONFIG, dtype=torch.float64, apply=lambda model: model, **parts):
    model = on_meta(lambda: Transformer(config, **parts).to(dtype))
    apply(model)
    materialize(model, "cpu", seed=0)
    for block in model.layers.values() if dropout else ():
        for part in (block.attention, block.feed_forward):
            part.register_forward_hook(lambda module, inputs, x_BTD: F.dropout(x_BTD, dropout))
    return model


def recompute(model, mode, **options):
    if mode == "by hand":
        for block in model.layers.values():
            block.forward = lambda *args, forward=block.forward: checkpoint_by_hand(forward, *args)
    elif mode != "none":
        apply_activation_checkpoint(model, mode, **options)
    return model


def tokens(rows=ROWS):
    return torch.randint(CONFIG.vocab_size, (rows, TIME), generator=torch.Generator().manual_seed(1))


def step(model, tokens_BT=None, steps=2):
    """Loss and gradients of two steps of SGD, each with its own dropout -> {name: value}."""
    tokens_BT = tokens() if tokens_BT is None else tokens_BT
    torch.manual_seed(2)
    seen = {}
    for i in range(steps):
        loss = F.cross_entropy(model(tokens_BT).flatten(0, 1), tokens_BT.flatten())
        loss.backward()
        seen[f"loss {i}"] = loss.detach()
        for name, p in model.named_parameters():
            name = name.replace("_checkpoint_wrapped_module.", "")
            seen[f"gradient {i} of {name}"] = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad.clone()
            p.data.sub_(p.grad)
        model.zero_grad()
    return seen


def worst(found, reference):
    assert found.keys() == reference.keys()
    assert all(value.norm() > 0 for value in reference.values()), "a zero reference proves nothing"
    errors = {name: ((found[name] - want).norm() / want.norm()).item() for name, want in reference.items()}
    return max(errors.items(), key=lambda item: item[1])


def drawing_as_eager():
    """Compiled code then takes its random numbers from where eager does, so that the two can be compared."""
    from torch._inductor import config

    return config.patch(fallback_random=True)


class CountMatmuls(TorchDispatchMode):
    n = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.n += op in MATMULS
        return op(*args, **(kwargs or {}))


# ---- same numbers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("mode", EAGER)
def test_equals_no_checkpointing(mode, dropout):
    reference = step(new_model(dropout))
    assert len(reference) == 2 * (1 + 9 * 3 + 3)
    assert worst(step(recompute(new_model(dropout), mode)), reference)[1] < 1e-10


def test_another_mask_is_caught():
    """The comparison has teeth: without the random state, the same loss and gradients of another network."""
    reference = step(new_model(), steps=1)
    found = step(recompute(new_model(), "full", preserve_rng_state=False), steps=1)
    assert found["loss 0"] == reference["loss 0"]
    assert worst(found, reference)[1] > 0.1
    assert worst(step(new_model(0.0), steps=1), reference)[1] > 0.1  # there is dropout at all


def test_equals_no_checkpointing_under_fsdp():
    def compare():
        mesh, rank = init_device_mesh("cpu", (4,)), torch.distributed.get_rank()
        mine = tokens()[rank : rank + 1]
        reference = step(apply_fsdp(new_model(), mesh), mine)
        return {mode: worst(step(apply_fsdp(recompute(new_model(), mode), mesh), mine), reference) for mode in EAGER}

    for found in launch(compare, ranks=4, device="cpu"):
        assert len(found) == 4
        assert max(error for _, error in found.values()) < 1e-10, found


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_equals_no_checkpointing_under_tensor_parallel(sequence_parallel):
    """And per_op sends no sum twice: its backward has as many reductions as that without checkpointing."""

    def compare():
        mesh = init_device_mesh("cpu", (2,))

        def cut(mode):
            return new_model(
                apply=lambda model: recompute(
                    apply_tensor_parallel(model, mesh, sequence_parallel=sequence_parallel), mode
                )
            )

        reference, found, sums = step(cut("none")), {}, {}
        for mode in ("none", "full", "per_op"):
            found[mode] = worst(step(cut(mode)), reference)
            loss = cut(mode)(tokens()).square().mean()
            with recording() as events:
                loss.backward()
            sums[mode] = sum(e.name in ("all_reduce", "reduce_scatter") for e in events)
        return found, sums

    for found, sums in launch(compare, ranks=2, device="cpu"):
        assert max(error for _, error in found.values()) < 1e-10, found
        assert sums["per_op"] == sums["none"] < sums["full"], sums


# ---- counted and measured -------------------------------------------------------------------------------------


def test_matmuls_run_again():
    """Of 7 in each of 3 blocks: by hand 7, full 6 (w2 is not needed), per_op 3 (wq, wv, w1)."""
    counts = {}
    for mode in ("none", *EAGER):
        loss = recompute(new_model(dropout=0.0), mode)(tokens()).square().mean()
        with CountMatmuls() as counted:
            loss.backward()
        counts[mode] = counted.n
    assert counts.pop("none") == 2 * (7 * 3 + 1)
    again = {mode: n - 2 * (7 * 3 + 1) for mode, n in counts.items()}
    assert again == {"by hand": 7 * 3, "full": 6 * 3, "every_other": 6 * 2, "per_op": 3 * 3}


def test_bytes_kept_equal_the_formula():
    D, C, ff, H, L, n_tokens = 128, 64, 352, 8, 4, 4 * 64
    config = ModelConfig(vocab_size=64, dim=D, n_layers=L, n_heads=H, n_kv_heads=4, ffn_dim=ff)
    formula = {"none": 8 * D + 2 * C + 4 * ff, "per_op": 3 * D + C + ff, "full": D, "by hand": D}
    formula["every_other"] = (formula["none"] + formula["full"]) / 2
    kept = {}
    for mode in formula:
        model = recompute(new_model(0.0, config, torch.float32, embedding=False, output=False), mode)
        with watch_memory(model) as samples:
            x_BTD = torch.randn(4, 64, D, requires_grad=True)
            last_BTD = model(x_BTD)
        kept[mode] = samples[-1].n_bytes["activations"] - last_BTD.nbytes
        assert kept[mode] == pytest.approx(4 * n_tokens * L * formula[mode], rel=0.1), mode
    assert kept["none"] > kept["every_other"] > kept["per_op"] > kept["full"] == kept["by hand"]


def test_peak_is_the_inputs_and_one_block():
    D, ff, L = 128, 352, 4
    config = ModelConfig(vocab_size=64, dim=D, n_layers=L, n_heads=8, n_kv_heads=4, ffn_dim=ff)
    peaks = {}
    for mode in ("none", "full", "by hand"):
        model = recompute(new_model(0.0, config, torch.float32, embedding=False, output=False), mode)
        model(torch.randn(4, 64, D)).sum().backward()  # gradients are there from now on
        with watch_memory(model) as samples:
            model(torch.randn(4, 64, D)).sum().backward()
        peaks[mode] = max(s.n_bytes.get("activations", 0) for s in samples)
    a, A = 4 * 256 * D, 4 * 256 * (8 * D + 2 * 64 + 4 * ff)
    assert peaks["none"] > L * A
    for mode in ("full", "by hand"):
        assert (L - 1) * a + A < peaks[mode] < (L - 1) * a + 1.6 * A  # and what backward itself works on


# ---- by hand --------------------------------------------------------------------------------------------------


def both(function, make_inputs, autocast=False):
    """The function with torch's checkpoint and with ours: outputs, gradients of inputs, random numbers after it."""
    found = []
    for run in (
        lambda *a, **k: checkpoint(*a, use_reentrant=False, **k),
        checkpoint_by_hand,
        lambda f, *a, **k: f(*a, **k),
    ):
        torch.manual_seed(3)
        args, kwargs, parameters = make_inputs()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = run(function, *args, **kwargs)
        outputs = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        sum(t.float().square().sum() for t in outputs if t.requires_grad).backward()
        found.append((out, [p.grad for p in parameters], torch.rand(2)))
    return found


def test_by_hand_takes_and_gives_anything():
    w = nn.Parameter(torch.empty(4, 4))

    def make_inputs():
        w.data.normal_()
        w.grad = None
        x, y = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
        plain, index = torch.randn(3, 4), torch.tensor([2, 0, 1])
        return ({"x": x, "many": [y, None, 2.0]}, plain), {"index": index, "flag": True}, [x, y, w]

    def function(nest, plain, *, index, flag):
        y, nothing, scale = nest["many"]
        mixed = F.dropout(nest["x"] @ w * scale + y[index], 0.5)
        assert nothing is None
        return {"mixed": mixed, "order": index + 1, "flag": flag, "pair": (mixed.detach(), torch.tanh(y) + plain)}

    theirs, ours, none = both(function, make_inputs)
    for out, grads, after in (theirs, none):
        assert torch.equal(ours[2], after)
        assert all(torch.equal(a, b) for a, b in zip(ours[1], grads, strict=True))
        assert out.keys() == ours[0].keys() and ours[0]["flag"] is True
        for a, b in ((ours[0]["mixed"], out["mixed"]), (ours[0]["pair"][1], out["pair"][1])):
            assert torch.equal(a, b) and a.requires_grad
    assert not ours[0]["order"].requires_grad and ours[0]["order"].dtype == torch.int64


def test_by_hand_keeps_autocast():
    linear = nn.Linear(8, 8)

    def make_inputs():
        linear.zero_grad()
        x = torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()
        return (x,), {}, [x, *linear.parameters()]

    theirs, ours, none = both(lambda x: linear(x).tanh(), make_inputs, autocast=True)
    assert ours[0].dtype == torch.bfloat16
    for other in (theirs, none):
        assert all(torch.equal(a, b) for a, b in zip(ours[1], other[1], strict=True))


def test_by_hand_in_odd_places():
    """No input with a gradient; one of two outputs used; no gradient at all; the same tensor twice; accumulation."""
    linear, x = nn.Linear(4, 4).double(), torch.randn(3, 4, dtype=torch.float64)
    checkpoint_by_hand(linear, x).sum().backward()
    assert torch.equal(linear.bias.grad, torch.full((4,), 3.0, dtype=torch.float64))
    checkpoint_by_hand(linear, x).sum().backward()
    assert torch.equal(linear.bias.grad, torch.full((4,), 6.0, dtype=torch.float64))

    a = torch.randn(3, requires_grad=True)
    used, _ = checkpoint_by_hand(lambda t: (t * 2, t * 3), a)
    used.sum().backward()
    assert torch.equal(a.grad, torch.full((3,), 2.0))

    a.grad = None
    checkpoint_by_hand(torch.mul, a, a).sum().backward()
    assert torch.allclose(a.grad, 2 * a)

    with torch.no_grad():
        assert not checkpoint_by_hand(linear, x).requires_grad

    frozen = nn.Linear(4, 4).requires_grad_(False)
    checkpoint_by_hand(frozen, x.float()).sum().backward()
    assert frozen.weight.grad is None

    first = torch.autograd.grad(checkpoint_by_hand(torch.pow, a, 3).square().sum(), a, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


# ---- native ---------------------------------------------------------------------------------------------------


def test_names_and_checkpoints():
    for mode in ("full", "every_other", "per_op"):
        plain, model = new_model(), recompute(new_model(), mode)
        assert model.state_dict().keys() == plain.state_dict().keys()
        model.load_state_dict(plain.state_dict())
        wrapped = [
            name for name in model.layers if "_checkpoint_wrapped_module" in dict(model.layers[name].named_modules())
        ]
        assert wrapped == (["0", "2"] if mode == "every_other" else ["0", "1", "2"])
    on_meta_first = new_model(apply=lambda m: recompute(m, "full"))
    for a, b in zip(on_meta_first.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)


def test_blocks_and_save_are_the_callers():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = self.b = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())

        def forward(self, x):
            return self.b(self.a(x))

    counts = {}
    for options in ({"mode": "full"}, {"mode": "per_op"}, {"mode": "per_op", "save": [torch.ops.aten.addmm.default]}):
        torch.manual_seed(0)
        model = Twice()
        apply_activation_checkpoint(model, blocks=[model.a], **options)
        assert model.a is model.b
        loss = model(torch.randn(2, 4, requires_grad=True)).sum()
        with CountMatmuls() as counted:
            loss.backward()
        counts[str(options)] = counted.n - 2 * 4
    assert list(counts.values()) == [4, 2, 0]


@while_compiling
def test_compile_after_per_op():
    model, reference = recompute(new_model(0.0), "per_op"), step(new_model(0.0), steps=1)
    for block in model.layers.values():
        block.compile(backend="aot_eager_decomp_partition")
    assert worst(step(model, steps=1), reference)[1] < 1e-10


def saved_bytes(model):
    """By what autograd packs: a compiled block is no sequence of operators that a watch could follow."""
    own, storages = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}

    def pack(tensor):
        if (place := tensor.untyped_storage().data_ptr()) not in own:
            storages[place] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        x_BTD = model(torch.randn(ROWS, TIME, CONFIG.dim, dtype=torch.float64, requires_grad=True))
    return sum(storages.values()) if x_BTD.requires_grad else 0


class Mlp(nn.Module):
    """A block that is quick to compile."""

    def __init__(self, dim=8):
        super().__init__()
        self.up, self.down = nn.Linear(dim, 3 * dim), nn.Linear(3 * dim, dim)

    def forward(self, x_BD):
        return x_BD + self.down(F.dropout(F.gelu(self.up(x_BD)), 0.4))


def mlp_gradients(model, x_BD):
    torch.manual_seed(4)
    out_BD = x_BD
    for block in model:
        out_BD = block(out_BD)
    out_BD.square().mean().backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    return {"out": out_BD.detach()} | {k: g.full_tensor() if hasattr(g, "full_tensor") else g for k, g in grads.items()}


def mlps():
    torch.manual_seed(5)
    return nn.ModuleList([Mlp(), Mlp()]).double()


@while_compiling
@pytest.mark.full
def test_budget_keeps_dropout():
    """Compiled by inductor: some seconds the first time, then from its cache. At 0, all is run again."""
    x_BD = torch.randn(6, 8, dtype=torch.float64)
    with drawing_as_eager():
        model = apply_activation_checkpoint(mlps(), "budget", budget=0)
        assert worst(mlp_gradients(model, x_BD), mlp_gradients(mlps(), x_BD))[1] < 1e-10
    assert model.state_dict().keys() == dict(model.named_parameters()).keys() == mlps().state_dict().keys()


@while_compiling
@pytest.mark.full
def test_budget_under_fsdp():
    def compare():
        mesh = init_device_mesh("cpu", (2,))
        x_BD = torch.randn(6, 8, dtype=torch.float64) * (1 + torch.distributed.get_rank())
        with drawing_as_eager():
            plain, model = mlps(), apply_activation_checkpoint(mlps(), "budget", budget=0)
            for block in (*plain, *model):
                fully_shard(block, mesh=mesh)
            return worst(mlp_gradients(model, x_BD), mlp_gradients(plain, x_BD))

    for name, error in launch(compare, ranks=2, device="cpu", timeout=300):
        assert error < 1e-10, name


@while_compiling
@pytest.mark.full
def test_budget_in_bytes_and_with_its_own_random_numbers():
    """Kept falls with the budget, from what compile keeps to a block's input; the gradient is that of one mask."""
    gradients, kept = {}, {}
    for budget in (1, 0.5, 0):
        torch._dynamo.reset()
        model = recompute(new_model(embedding=False, output=False), "budget", budget=budget)
        own, storages = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}

        def pack(tensor, own=own, storages=storages):  # compiled code is no row of operators that could be watched
            if (place := tensor.untyped_storage().data_ptr()) not in own:
                storages[place] = tensor.untyped_storage().nbytes()
            return tensor

        torch.manual_seed(6)
        x_BTD = torch.randn(ROWS, TIME, CONFIG.dim, dtype=torch.float64, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(x_BTD).square().mean()
        loss.backward()
        gradients[budget] = {"loss": loss.detach(), "x": x_BTD.grad} | {k: p.grad for k, p in model.named_parameters()}
        kept[budget] = sum(storages.values()) / (8 * ROWS * TIME * CONFIG.n_layers)  # numbers a token and block
        assert worst(gradients[budget], gradients[1])[1] < 1e-10, budget
    D, small = CONFIG.dim, 24  # seeds, cos and sin, the last output
    assert D <= kept[0] < D + small
    assert kept[0] < kept[0.5] < D + 0.5 * (kept[1] - D) + small < kept[1] < 8 * D + 2 * 16 + 4 * CONFIG.ffn_dim


def test_mistakes_are_told_with_their_numbers():
    def sharded():
        model = new_model(0.0)
        for block in model.layers.values():
            fully_shard(block, mesh=init_device_mesh("cpu", (2,)))
        return apply_activation_checkpoint(model)

    def twice(first, second):
        apply_activation_checkpoint(apply_activation_checkpoint(new_model(0.0), first), second)

    def collect():
        model = new_model(0.0)
        mistakes = {
            "mode": lambda: apply_activation_checkpoint(model, "selective"),
            "budget": lambda: apply_activation_checkpoint(model, "budget", budget=50),
            "budget nan": lambda: apply_activation_checkpoint(model, "budget", budget=float("nan")),
            "no blocks": lambda: apply_activation_checkpoint(nn.Linear(2, 2)),
            "empty": lambda: apply_activation_checkpoint(model, blocks=[]),
            "foreign": lambda: apply_activation_checkpoint(model, blocks=[nn.Linear(2, 2), model.layers["0"]]),
            "itself": lambda: apply_activation_checkpoint(model, blocks=[model]),
            "packet": lambda: apply_activation_checkpoint(model, "per_op", save=[torch.ops.aten.mm]),
            "twice": lambda: twice("every_other", "full"),
            "compiled": lambda: twice("budget", "full"),
            "sharded": sharded,
        }
        told = {}
        for what, mistake in mistakes.items():
            try:
                mistake()
                told[what] = "nothing"
            except ValueError as error:
                told[what] = str(error)
        apply_activation_checkpoint(model)  # nothing was changed before
        return told

    expected = {
        "mode": ["'selective'", "4", "per_op", "budget"],
        "budget": ["50", "0", "1"],
        "budget nan": ["nan"],
        "no blocks": ["0 blocks", "Linear", "blocks="],
        "empty": ["0 blocks", "blocks="],
        "foreign": ["1 of 2", "Linear", "Transformer"],
        "itself": ["1 of 1", "Transformer"],
        "packet": ["aten.mm.default"],
        "twice": ["2 modules", "CheckpointWrapper", "once"],
        "compiled": ["3 modules", "TransformerBlock", "budget"],
        "sharded": ["3 modules", "FSDPTransformerBlock", "then FSDP"],
    }
    for told in launch(collect, ranks=2, device="cpu"):
        assert told.keys() == expected.keys()
        for what, words in expected.items():
            assert all(word in told[what] for word in words), (what, told[what])


def test_the_file_alone_proves_itself(tmp_path):
    alone = shutil.copy(minititan.activation_checkpoint.__file__, tmp_path)
    without_compiler = {**os.environ, "CXX": "no-compiler", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-W", "error", alone],
        cwd=tmp_path,
        env=without_compiler,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0 and not run.stderr, run.stderr
    assert run.stdout.count("against none") == 4
