"""ParallelDims: the arithmetic against digits written out by hand, the real mesh against the arithmetic."""

import itertools
import logging
import re
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from minititan.lab.launch import launch
from minititan.parallel_dims import AXES, VIEWS, ParallelDims

AXES_OF = {
    **{name: (name,) for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp")},
    "dp": ("dp_replicate", "dp_shard"),
    "loss": ("dp_replicate", "dp_shard", "cp"),
    "fsdp": ("dp_shard", "cp"),
    "hsdp": ("dp_replicate", "dp_shard", "cp"),
}


def factorings(n: int):
    """Every (pp, dp_replicate, dp_shard, cp, tp) whose product is n."""
    divisors = [d for d in range(1, n + 1) if n % d == 0]
    for degrees in itertools.product(divisors, repeat=5):
        if torch.tensor(degrees).prod() == n:
            yield dict(zip(AXES, degrees, strict=True))


@pytest.mark.parametrize("world_size", [1, 2, 6, 8, 12])
def test_groups_are_the_ranks_that_differ_only_on_their_axes(world_size):
    for layout in factorings(world_size):
        dims = ParallelDims(**layout, world_size=world_size)
        digits = list(itertools.product(*(range(layout[name]) for name in AXES)))  # rank -> coordinates
        assert [tuple(dims.coordinates(rank).values()) for rank in range(world_size)] == digits
        for name, axes in AXES_OF.items():
            fixed = [i for i, axis in enumerate(AXES) if axis not in axes]
            expected = {}
            for rank, at in enumerate(digits):
                expected.setdefault(tuple(at[i] for i in fixed), []).append(rank)
            assert sorted(dims.groups(name)) == sorted(expected.values())
            assert {len(group) for group in dims.groups(name)} == {dims.size(name)}


def test_the_docstring_picture():
    dims = ParallelDims(dp_replicate=2, dp_shard=2, tp=2, world_size=8)
    assert dims.groups("tp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert dims.groups("dp_shard") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert dims.groups("dp_replicate") == [[0, 4], [1, 5], [2, 6], [3, 7]]


@pytest.mark.parametrize("ep", [1, 2, 4, 8])
def test_ep_takes_neighbours_of_what_it_borrows_and_efsdp_the_rest(ep):
    dims = ParallelDims(pp=2, dp_shard=2, cp=2, tp=2, ep=ep, world_size=16)
    assert dims.size("ep") * dims.size("efsdp") == 8
    for stage in (0, 1):
        block = list(range(8 * stage, 8 * stage + 8))
        assert [g for g in dims.groups("ep") if g[0] in block] == [block[i : i + ep] for i in range(0, 8, ep)]
        assert [g for g in dims.groups("efsdp") if g[0] in block] == [block[i::ep] for i in range(ep)]


@pytest.mark.parametrize("axis", AXES)
def test_minus_one_takes_what_is_left(axis):
    dims = ParallelDims(**{**dict.fromkeys(AXES, 1), "tp": 2, "pp": 2, axis: -1}, world_size=24)
    assert torch.tensor(dims.shape).prod() == 24 and getattr(dims, axis) >= 6
    assert dims == ParallelDims(**dict(zip(AXES, dims.shape, strict=True)), world_size=24)
    assert hash(dims) == hash(ParallelDims(**dict(zip(AXES, dims.shape, strict=True)), world_size=24))


# Each: arguments, then pieces that the message must hold: every factor, what was wrong, the remedy.
WRONG = [
    # 32 ranks do not divide 16
    (
        {"dp_shard": -1, "tp": 8, "pp": 4, "world_size": 16},
        ["pp 4 × dp_replicate 1 × cp 1 × tp 8 = 32", "16 ranks", "multiple of 32", "lower tp to 4"],
    ),
    ({"dp_shard": 3, "tp": 2, "world_size": 8}, ["dp_shard 3", "tp 2 = 6", "8 ranks", "set dp_shard=4"]),
    ({"dp_shard": 1, "tp": 3, "world_size": 8}, ["tp 3 = 3 ranks", "8 ranks", "set tp=8"]),
    ({"dp_shard": 1, "tp": 4, "pp": 2, "world_size": 7}, ["= 8 ranks", "7 ranks", "start 8 ranks"]),
    # more on the axes than there are ranks
    (
        {"dp_replicate": 4, "tp": 4, "world_size": 2},
        ["dp_replicate 4", "tp 4 = 16 ranks", "2 ranks", "16 ranks"],
    ),
    (
        {"dp_replicate": 2, "dp_shard": 2, "cp": 2, "tp": 2, "pp": 2, "world_size": 8},
        ["= 32 ranks", "start 32"],
    ),
    ({"dp_shard": -1, "tp": -1, "world_size": 8}, ["dp_shard and tp", "8 ranks", "all but one"]),
    ({"dp_shard": -1, "tp": -1, "cp": -1, "world_size": 8}, ["dp_shard and cp and tp"]),
    ({"ep": 3, "world_size": 8}, ["ep=3", "dp_shard 8 × cp 1 × tp 1 = 8", "[1, 2, 4, 8]"]),
    ({"ep": 4, "pp": 4, "world_size": 8}, ["ep=4", "dp_shard 2 × cp 1 × tp 1 = 2", "[1, 2]"]),
    ({"ep": -1, "world_size": 8}, ["ep=-1", "borrows"]),
    ({"tp": 2}, ["world_size is missing", "tp 2", "get_world_size"]),
    ({"world_size": 0}, ["world_size=0", "at least 1"]),
    ({"world_size": -1}, ["world_size=-1", "at least 1"]),
]


@pytest.mark.parametrize(("layout", "pieces"), WRONG, ids=[str(layout) for layout, _ in WRONG])
def test_wrong_combinations_say_all_factors_and_the_remedy(layout, pieces):
    with pytest.raises(ValueError) as error:
        ParallelDims(**layout)
    for piece in pieces:
        assert piece in str(error.value)


@pytest.mark.parametrize("value", [0, -2, True, False, 2.0, "2", None, [2], torch.tensor(2)], ids=repr)
@pytest.mark.parametrize("name", [*AXES, "ep", "world_size"])
def test_a_degree_is_a_positive_int(name, value):
    with pytest.raises(ValueError, match=name) as error:
        ParallelDims(**{"world_size": 8, name: value})
    assert all(f"{axis} " in str(error.value) for axis in AXES) and "world_size" in str(error.value)  # all factors


def test_every_remedy_offered_is_a_layout_that_works():
    for world_size in (1, 2, 6, 7, 8, 16):
        for degrees in itertools.product([-1, 1, 2, 3, 4, 8], [1, 2, 3], [1, 3, 8], [1, 4, 5]):
            layout = dict(zip(("dp_shard", "dp_replicate", "tp", "pp"), degrees, strict=True))
            try:
                ParallelDims(**layout, world_size=world_size)
            except ValueError as error:
                if change := re.search(r"(?:lower|set) (\w+)(?: to |=)(\d+)", str(error)):
                    ParallelDims(**{**layout, change[1]: int(change[2])}, world_size=world_size)
                if start := re.search(r"start (?:a multiple of )?(\d+) ranks", str(error)):
                    ParallelDims(**layout, world_size=int(start[1]))


def test_describe_shows_who_sits_where_without_a_process_group():
    text = ParallelDims(dp_replicate=2, dp_shard=2, tp=2, world_size=8, ep=4).describe()
    assert "pp 1 × dp_replicate 2 × dp_shard 2 × cp 1 × tp 2" in text
    rows = [line.split() for line in text.splitlines()]
    assert ["5", "0", "1", "0", "0", "1"] in rows  # rank 5 = (0, 1, 0, 0, 1)
    assert "[0 4]  [1 5]  [2 6]  [3 7]" in text and "2×2" in text and "ep 4 × efsdp 1" in text
    assert "each rank alone" in text


def test_describe_stays_short_for_many_ranks():
    text = ParallelDims(pp=16, dp_shard=-1, tp=8, world_size=16_384).describe()
    assert len(text.splitlines()) < 90 and max(map(len, text.splitlines())) < 130
    assert "16320 more ranks" in text and "[0 1024 2048 .. 15360]" in text


def test_questions_that_have_no_answer():
    dims = ParallelDims(world_size=8)
    for ask in (dims.size, dims.groups, dims.axis):
        with pytest.raises(ValueError, match="no axis or view 'dp_shards'; there are pp, dp_replicate"):
            ask("dp_shards")
    with pytest.raises(ValueError, match="before build_mesh"):
        dims.axis("tp")
    with pytest.raises(ValueError, match="rank 8 is not one of the 8"):
        dims.coordinates(8)
    with pytest.raises(ValueError, match=r"8 ranks needs .*init_process_group"):
        dims.build_mesh("cpu")


# ------------------------------------------------------------------------------------------------- on real ranks

LAYOUTS = [
    {"dp_replicate": 2, "dp_shard": 2, "tp": 2},
    {"dp_replicate": 2, "cp": 2, "tp": 2, "ep": 2, "dp_shard": 1},
    {"dp_shard": 2, "cp": 2, "tp": 2, "ep": 4},
    {"pp": 2, "dp_shard": 2, "tp": 2, "ep": 2},
]


def test_the_mesh_is_the_arithmetic_and_every_group_joins_just_its_ranks():
    def ask():
        warnings.simplefilter("error")
        found = []
        for layout in LAYOUTS:
            dims = ParallelDims(**layout, world_size=8)
            mesh = dims.build_mesh("cpu")
            found.append({"root": (mesh.mesh_dim_names, tuple(mesh.shape))})
            for name in (*AXES, *VIEWS, *(("ep", "efsdp") if dims.ep > 1 else ())):
                view = dims.axis(name)
                told = [torch.zeros((), dtype=torch.long) for _ in range(view.shape[-1])]
                dist.all_gather(told, torch.tensor(dist.get_rank()), group=view.get_group(view.ndim - 1))
                found[-1][name] = (view.mesh.tolist(), [int(rank) for rank in told], view.get_coordinate())
        return found

    for rank, layouts in enumerate(launch(ask, ranks=8)):
        for layout, found in zip(LAYOUTS, layouts, strict=True):
            dims = ParallelDims(**layout, world_size=8)
            assert found.pop("root") == (AXES, dims.shape)
            for name, (ranks, told, coordinate) in found.items():
                mine = next(group for group in dims.groups(name) if rank in group)
                if name == "hsdp":
                    assert [*itertools.chain(*ranks)] == mine and len(ranks) == dims.dp_replicate
                    assert ranks[coordinate[0]][coordinate[1]] == rank and ranks[coordinate[0]] == told
                else:
                    assert ranks == told == mine and mine[coordinate[0]] == rank


def test_views_make_no_group_twice():
    def count():
        made = []
        for layout in ({"dp_shard": 4}, {"dp_replicate": 2, "dp_shard": 2}, {"dp_shard": 2, "tp": 2}):
            before = len(dist.distributed_c10d._world.pg_map)
            dims = ParallelDims(**layout, world_size=4)
            dims.build_mesh("cpu")
            made.append(len(dist.distributed_c10d._world.pg_map) - before)
            assert dims.axis("dp") == dims.axis("loss")  # cp is 1
        return made

    # A rank's new groups: one for each axis, less those that span the world (torch takes the default group then).
    assert launch(count, ranks=4) == [[4, 5, 5]] * 4


def test_missing_experts_and_a_world_of_another_size():
    def ask():
        dims = ParallelDims(dp_shard=1, tp=2, world_size=2)
        dims.build_mesh("cpu")
        told = []
        for wrong in (lambda: dims.axis("ep"), lambda: ParallelDims(world_size=8).build_mesh("cpu")):
            try:
                wrong()
            except ValueError as error:
                told.append(str(error))
        return told

    for experts, world in launch(ask, ranks=2):
        assert "ep is 1" in experts and "dp_shard × cp × tp = 2" in experts
        assert "8 ranks, but 2 are running" in world and "world_size=2" in world


@pytest.mark.parametrize("layout", [{"dp_shard": 2, "tp": 2}, {"dp_replicate": 2, "tp": 2}, {"cp": 2, "tp": 2}])
def test_fsdp_composes_with_tensor_parallel_on_the_same_root(layout):
    def step(layout):
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        warnings.simplefilter("error")
        logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # full_tensor() of FSDP × TP is slow

        class MLP(nn.Module):
            def __init__(self):
                super().__init__()
                self.up = nn.Linear(8, 16, bias=False, dtype=torch.float64)
                self.down = nn.Linear(16, 8, bias=False, dtype=torch.float64)

            def forward(self, x_BD):
                return self.down(self.up(x_BD).tanh()) * 1.0

        torch.manual_seed(0)
        alone, model, x_BD = MLP(), MLP(), torch.randn(4, 8, dtype=torch.float64)
        model.load_state_dict(alone.state_dict())
        dims = ParallelDims(**{"dp_shard": 1, **layout}, world_size=dist.get_world_size())
        dims.build_mesh("cpu")
        parallelize_module(model, dims.axis("tp"), {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(model, mesh=dims.axis("hsdp" if dims.dp_replicate > 1 else "fsdp"))
        (alone(x_BD) ** 2).sum().backward()
        (model(x_BD) ** 2).sum().backward()
        errors = []
        for name, parameter in alone.named_parameters():
            gathered = dict(model.named_parameters())[name].grad.full_tensor()
            errors.append(((gathered - parameter.grad).norm() / parameter.grad.norm()).item())
        return max(errors)

    assert max(launch(step, layout, ranks=4)) < 1e-12
