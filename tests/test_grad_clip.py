"""grad_clip: the norm and every clipped gradient of every layout against torch.nn.utils.clip_grad_norm_ in one process."""

import copy
import logging
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard

from minititan.grad_clip import clip_grad_norm_, global_norm_by_hand
from minititan.lab.launch import launch
from minititan.lab.trace import recording

NORMS = (1.0, 2.0, 3.0, math.inf)


class Block(nn.Module):
    """7 rows over 4 ranks: 2, 2, 2, 1; 5 rows: the last rank has none."""

    def __init__(self, n_out: int):
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(8, 1e-5), nn.Linear(8, 16, bias=False), nn.Linear(16, 8)
        self.odd, self.tail = nn.Linear(8, 7), nn.Linear(7, n_out)

    def forward(self, x):
        return self.tail(self.odd(x + self.down(self.up(self.norm(x)).tanh())).tanh()).tanh()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Block(8), Block(5)

    def forward(self, x):
        return self.second(self.first(x)).square().mean()


def tensor_parallel(model, mesh):
    for block in (model.first, model.second):
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()}, src_data_rank=None)
    return model


def blockwise(model, mesh):
    for module in (model.first, model.second, model):
        fully_shard(module, mesh=mesh)
    return model


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def compare(norm, truth, parameters, reference):
    """Relative errors of the norm and of each clipped gradient; reference: name -> gradient."""
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)  # two gathers: as it must
    assert type(norm) is torch.Tensor and norm.dtype == torch.float64 and norm.shape == ()
    found = {"norm": ((norm - truth).abs() / truth).item()}
    for name, p in parameters:
        grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        found[name] = ((grad - reference[name]).norm() / reference[name].norm()).item()
    return found


def assert_small(results):
    for rank, cases in enumerate(results):
        assert cases
        for case, found in cases.items():
            bad = {name: error for name, error in found.items() if not error < 1e-12}
            assert not bad, f"{case} on rank {rank}: {bad}"


def test_every_layout_equals_one_process():
    def on_rank():
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        line = init_device_mesh("cpu", (4,), mesh_dim_names=("line",))
        layouts = {
            "plain": lambda m: m,
            "fsdp": lambda m: blockwise(m, line),
            "hsdp": lambda m: blockwise(m, grid),
            "tp": lambda m: tensor_parallel(m, line),
            "fsdp x tp": lambda m: blockwise(tensor_parallel(m, grid["inner"]), grid["outer"]),
        }
        torch.manual_seed(0)
        model, x = Net().double(), torch.randn(4, 8, 8, dtype=torch.float64)
        found, n_collectives = {}, {}
        for case, apply in layouts.items():
            net = apply(copy.deepcopy(model))
            kinds = {p.placements if isinstance(p, DTensor) else None for p in net.parameters()}
            if case == "fsdp x tp":
                mixed = {(_StridedShard(0, split_factor=2), Shard(0)), (Shard(0), Shard(1)), (Shard(0),)}
                assert mixed <= kinds, "strided shards and parameters of two meshes"
            net(x).backward()
            unclipped = {name: q.grad for name, q in net.named_parameters()}
            for p in NORMS:
                for max_norm in (1e-3, 1e6, math.inf):
                    truth = copy.deepcopy(model)
                    truth(x).backward()
                    norm = nn.utils.clip_grad_norm_(truth.parameters(), min(max_norm, 1e9), norm_type=p)
                    for name, q in net.named_parameters():
                        q.grad = unclipped[name].clone()
                    with recording() as events:
                        mine = clip_grad_norm_(net.parameters(), max_norm, norm_type=p)
                    n_collectives[case] = [e.name for e in events if e.lane == "communication"]
                    scale = min(1.0, max_norm / (norm.item() + 1e-6))
                    found[f"{case} {p} {max_norm}"] = {"norm": ((mine - norm).abs() / norm).item()}
                    for name, q in net.named_parameters():  # that the unclipped ones are right is shown below
                        grad, expected = (local(t) for t in (q.grad, unclipped[name]))
                        torch.testing.assert_close(grad, scale * expected, rtol=1e-12, atol=0)
                    if (p, max_norm) == (2.0, 1e-3):
                        reference = {name: q.grad for name, q in truth.named_parameters()}
                        found[case] = compare(mine, norm, net.named_parameters(), reference)
        return found, n_collectives

    results = launch(on_rank, ranks=4, timeout=100)
    assert_small([found for found, _ in results])
    # one scalar per mesh and sharded axes: FSDP x TP has (outer, inner) of the grid, (outer) of the grid and of FSDP's own
    expected = {"plain": 0, "fsdp": 1, "hsdp": 1, "tp": 1, "fsdp x tp": 4}
    assert {case: len(names) for case, names in results[0][1].items()} == expected
    assert {name for names in results[0][1].values() for name in names} == {"all_reduce"}


def test_partial_gradients_are_reduced_first_and_stay_reduced():
    def on_rank():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        found = {}
        for p in NORMS:
            for reduce_op in ("sum", "avg"):
                torch.manual_seed(1)
                summands = torch.randn(4, 6, 4, dtype=torch.float64)  # one a rank
                whole = summands.sum(0) if reduce_op == "sum" else summands.mean(0)
                local = summands[dist.get_rank()]
                both = nn.Parameter(DTensor.from_local(torch.zeros_like(local), mesh, [Replicate(), Replicate()]))
                both.grad = DTensor.from_local(local, mesh, [Partial(reduce_op), Partial(reduce_op)])
                # sharded by outer, a summand by inner
                pair = summands.view(2, 2, 6, 4)[:, mesh.get_local_rank("inner")]
                half = nn.Parameter(
                    DTensor.from_local(torch.zeros(3, 4, dtype=torch.float64), mesh, [Shard(0), Replicate()])
                )
                rows = pair.sum(0).chunk(2)[mesh.get_local_rank("outer")]
                rows = rows if reduce_op == "sum" else rows / 2
                half.grad = DTensor.from_local(rows.contiguous(), mesh, [Shard(0), Partial(reduce_op)])

                truth = [nn.Parameter(torch.zeros_like(whole)) for _ in "ab"]
                for q in truth:
                    q.grad = whole.clone()
                norm = nn.utils.clip_grad_norm_(truth, 0.5, norm_type=p)
                mine = clip_grad_norm_([both, half], 0.5, norm_type=p)
                assert both.grad.placements == both.placements and half.grad.placements == half.placements
                reference = {"both": truth[0].grad, "half": truth[1].grad}
                found[f"{p} {reduce_op}"] = compare(mine, norm, [("both", both), ("half", half)], reference)
        return found

    assert_small(launch(on_rank, ranks=4))


def test_sequence_parallel_norms_have_partial_gradients():
    def on_rank():
        mesh = init_device_mesh("cpu", (4,))
        torch.manual_seed(0)
        model = nn.ModuleDict({"norm": nn.RMSNorm(8, 1e-5), "out": nn.Linear(8, 8)}).double()
        x_BTD = torch.randn(2, 8, 8, dtype=torch.float64)
        truth = copy.deepcopy(model)
        truth["out"](truth["norm"](x_BTD)).square().sum().backward()
        plan = {
            "norm": SequenceParallel(),
            "out": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
        parallelize_module(model, mesh, plan, src_data_rank=None)
        model["out"](model["norm"](x_BTD.chunk(4, 1)[dist.get_rank()])).square().sum().backward()
        assert model["norm"].weight.grad.placements[0].is_partial()
        norm = nn.utils.clip_grad_norm_(truth.parameters(), 0.1)
        mine = clip_grad_norm_(model.parameters(), 0.1)
        reference = {name: p.grad for name, p in truth.named_parameters()}
        return {"sequence": compare(mine, norm, model.named_parameters(), reference)}

    assert_small(launch(on_rank, ranks=4))


def test_pipeline_stages_share_one_norm_and_a_frozen_stage_joins_in():
    def on_rank():
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "fsdp"))
        stage = ("first", "second")[grid.get_local_rank("pp")]
        torch.manual_seed(0)
        model, x = Net().double(), torch.randn(4, 8, 8, dtype=torch.float64)
        found = {}
        for p in NORMS:
            for frozen in ((), ("first",), ("first", "second")):
                truth = copy.deepcopy(model)
                truth(x).backward()
                for name in frozen:
                    truth.get_submodule(name).zero_grad()
                norm = nn.utils.clip_grad_norm_(truth.parameters(), 1e-3, norm_type=p)
                whole = blockwise(copy.deepcopy(model), grid["fsdp"])
                whole(x).backward()
                mine = whole.get_submodule(stage)
                if stage in frozen:
                    mine.zero_grad()
                result = clip_grad_norm_(mine.parameters(), 1e-3, grid["pp"], p)
                if len(frozen) == 2:
                    assert result == 0
                    continue
                parameters = [] if stage in frozen else mine.named_parameters()
                reference = {name: q.grad for name, q in truth.get_submodule(stage).named_parameters()}
                found[f"{p} {frozen}"] = compare(result, norm, parameters, reference)
            reference = nn.Parameter(torch.ones(4, dtype=torch.float64))
            reference.grad = torch.ones(4, dtype=torch.float64)
            alone = [] if stage == "first" else [reference]
            assert clip_grad_norm_(alone, 1e9, grid["pp"], p) == reference.grad.norm(p), "a stage without parameters"
        return found

    results = launch(on_rank, ranks=4, timeout=100)
    assert_small(results)
    assert len({found["2.0 ()"]["norm"] for found in results}) == 1


def test_what_is_not_finite_is_returned_on_every_rank():
    def on_rank():
        mesh = init_device_mesh("cpu", (4,))
        seen = {}
        for p in NORMS:
            for bad in (math.nan, math.inf, -math.inf):
                local = torch.ones(3)
                if dist.get_rank() == 2:
                    local[1] = bad
                parameter = nn.Parameter(DTensor.from_local(torch.zeros(3), mesh, [Shard(0)]))
                parameter.grad = DTensor.from_local(local, mesh, [Shard(0)])
                seen[p, bad] = clip_grad_norm_(parameter, 1.0, norm_type=p).item()
        return seen

    for seen in launch(on_rank, ranks=4):
        for (_, bad), norm in seen.items():
            assert math.isnan(norm) if math.isnan(bad) else norm == math.inf


def with_grads(*grads):
    parameters = [nn.Parameter(torch.zeros_like(g)) for g in grads]
    for p, g in zip(parameters, grads, strict=True):
        p.grad = g.clone()
    return parameters


@pytest.mark.parametrize("p", NORMS)
def test_one_process_without_a_process_group_is_torch(p):
    torch.manual_seed(0)
    grads = [
        torch.randn(5, 3, dtype=torch.float64),
        torch.randn(7, dtype=torch.float64),
        torch.zeros(0, 3).double(),
    ]
    for max_norm in (0.1, 100.0):
        mine, torchs = with_grads(*grads), with_grads(*grads[:2])
        norm = clip_grad_norm_(iter(mine), max_norm, norm_type=p)
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(torchs, max_norm, p), rtol=1e-14, atol=0)
        for a, b in zip(mine, torchs, strict=False):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-14, atol=0)


def test_corner_cases_of_one_process():
    assert clip_grad_norm_([], 1.0) == 0 and clip_grad_norm_(nn.Parameter(torch.ones(3)), 1.0) == 0
    (p,) = with_grads(torch.tensor([3.0, 4.0]))
    assert clip_grad_norm_([p, p], 100.0) == 5, "given twice, counted once"
    assert clip_grad_norm_([p, p], 1.0) == 5
    torch.testing.assert_close(p.grad, torch.tensor([0.6, 0.8]), rtol=1e-6, atol=0)  # and scaled once
    view = p.grad
    clip_grad_norm_(p, 0.5)
    assert view is p.grad, "in place"
    (zero,) = with_grads(torch.zeros(4))
    assert clip_grad_norm_(zero, 1.0) == 0 and not zero.grad.any()
    for wrong in (0, -1.0, math.nan, -math.inf):
        with pytest.raises(ValueError, match=r"above 0, got .*pass inf"):
            clip_grad_norm_(p, wrong)
        with pytest.raises(ValueError, match="above 0"):
            clip_grad_norm_(p, 1.0, norm_type=wrong)


def test_low_precision_gradients_are_summed_in_float32():
    grads = [torch.full((4096,), 1e-3, dtype=dtype) for dtype in (torch.bfloat16, torch.float16)]
    grads.append(torch.full((4096,), 1e-3, dtype=torch.float64))
    parameters = with_grads(*grads)
    truth = torch.cat([g.double() for g in grads]).norm()
    norm = clip_grad_norm_(parameters, 0.01)
    torch.testing.assert_close(norm, truth, rtol=1e-5, atol=0)  # bf16 sums would stop growing at 256 summands
    for p, g in zip(parameters, grads, strict=True):
        assert p.grad.dtype == g.dtype
        expected = (g.double() * 0.01 / (norm + 1e-6)).to(g.dtype)
        torch.testing.assert_close(p.grad, expected, rtol=1e-12 if g.dtype == torch.float64 else 1e-2, atol=0)
    scale = (0.01 / (norm + 1e-6)).float()  # not rounded to bf16: each element is the product, rounded once
    assert torch.equal(parameters[0].grad, (grads[0].float() * scale).bfloat16())
    huge = with_grads(torch.tensor([1.5e19]), torch.tensor([1.5e19]))  # the squares' sum is no float32
    torch.testing.assert_close(clip_grad_norm_(huge, 1.0).item(), 1.5e19 * 2**0.5, rtol=1e-6, atol=0)


def test_by_hand():
    def on_rank():
        torch.manual_seed(0)
        whole = torch.randn(8, 3, dtype=torch.float64)
        parts = whole.chunk(4)[dist.get_rank()]
        return ((global_norm_by_hand([parts[:1], parts[1:]]) - whole.norm()) / whole.norm()).item()

    assert max(map(abs, launch(on_rank, ranks=4))) < 1e-12
