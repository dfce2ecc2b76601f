"""Tensor parallelism: every layout against one process in float64, the collectives against the formula."""

import contextlib
import itertools
import logging
import math
import warnings
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel

from minititan import tensor_parallel as tp
from minititan.lab.launch import launch
from minititan.lab.trace import recording, traffic
from minititan.meta_init import materialize, on_meta
from minititan.model import ModelConfig, Transformer

TINY = ModelConfig(vocab_size=64, dim=32, n_layers=2, n_heads=8, n_kv_heads=4, ffn_dim=48)
B, T = 4, 16
TORCH_NAMES = {"reduce_scatter": "reduce_scatter", "reducescatter": "reduce_scatter", "allgather": "all_gather"}
TORCH_NAMES |= {"all_gather": "all_gather", "allreduce": "all_reduce", "all_reduce": "all_reduce"}


def build(config: ModelConfig, apply=lambda model: model) -> nn.Module:
    """The same weights on every layout, norms included, which are not 1 here."""

    def init(name, full, generator):
        full.normal_(1.0 if "norm" in name else 0.0, 0.3, generator=generator)

    return materialize(apply(on_meta(lambda: Transformer(config).double())), "cpu", seed=1, init=init)


def batch(vocab_size: int):
    generator = torch.Generator().manual_seed(2)
    tokens_BT, targets_BT = torch.randint(vocab_size, (2, B, T), generator=generator)
    targets_BT[0, :5] = -100
    return tokens_BT, targets_BT


def cross_entropy(logits_BTV, targets_BT):
    return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


def reference(config: ModelConfig):
    model = build(config)
    tokens_BT, targets_BT = batch(config.vocab_size)
    logits = model(tokens_BT)
    loss = cross_entropy(logits, targets_BT)
    loss.backward()
    return logits.detach(), loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def whole(tensor):
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)  # two gathers: as it must
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def errors(loss, model, truth_loss, truth, group=None) -> dict[str, float]:
    """Relative error of the loss and of every gradient: of the whole one, or of this rank's part by hand."""
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    found = {"loss": ((whole(loss) - truth_loss).abs() / truth_loss.abs()).item()}
    for name, p in model.named_parameters():
        grad, expected = whole(p.grad), truth[name]
        if grad.shape != expected.shape:
            expected = expected.chunk(n, tp.cut_dim(name))[rank]
        found[name] = ((grad - expected).norm() / expected.norm()).item()
    assert found.keys() == {"loss", *truth}
    return found


def shard(model, mesh):
    for module in (*model.layers.values(), model):
        fully_shard(module, mesh=mesh)
    return model


def my_rows(mesh, targets_BT):
    """This data-parallel rank's rows, and by what to multiply the sum of their losses: FSDP takes the mean."""
    n, rank = mesh.size(), mesh.get_local_rank()
    return slice(rank * B // n, (rank + 1) * B // n), n / (targets_BT != -100).sum().item()


def run_by_hand(config, mesh, sequence=False, fsdp_mesh=None):
    logits, loss, truth = reference(config)
    tokens_BT, targets_BT = batch(config.vocab_size)
    group = mesh.get_group()
    model = tp.apply_tensor_parallel_by_hand(build(config), group, sequence)
    assert (model.output.weight is model.tok_embeddings.weight) == config.tied
    loss_of = partial(tp.vocab_parallel_cross_entropy_by_hand, vocab_size=config.vocab_size, group=group)
    if fsdp_mesh is None:
        out = model(tokens_BT)
        mine = loss_of(out, targets_BT)
        mine.backward()
        found = errors(mine, model, loss, truth, group)
        part = logits.chunk(mesh.size(), -1)[mesh.get_local_rank()]
        return found | {"logits": ((out - part).norm() / part.norm()).item()}
    shard(model, fsdp_mesh)
    rows, times = my_rows(fsdp_mesh, targets_BT)
    mine = loss_of(model(tokens_BT[rows]), targets_BT[rows], reduction="sum") * times
    mine.backward()
    found = errors(mine, model, loss, truth, group)
    found.pop("loss")  # of these rows only
    return found


def run_native(config, mesh, sequence=False, vocabulary=False, fsdp_mesh=None):
    logits, loss, truth = reference(config)
    tokens_BT, targets_BT = batch(config.vocab_size)
    seen = []

    def apply(model):
        tp.apply_tensor_parallel(model, mesh, None, sequence, vocabulary)
        assert (model.output.weight is model.tok_embeddings.weight) == config.tied
        return model if fsdp_mesh is None else shard(model, fsdp_mesh)

    model = build(config, apply)
    assert (model.output.weight is model.tok_embeddings.weight) == config.tied
    for block in model.layers.values():
        block.attention.inner.register_forward_pre_hook(lambda _, args: seen.extend(args))
    with loss_parallel() if vocabulary else contextlib.nullcontext():
        if fsdp_mesh is None:
            out = model(tokens_BT)
            mine = cross_entropy(out, targets_BT)
        else:
            rows, times = my_rows(fsdp_mesh, targets_BT)
            out = model(tokens_BT[rows])
            mine = F.cross_entropy(out.flatten(0, 1), targets_BT[rows].flatten(), reduction="sum") * times
        mine.backward()
    assert isinstance(out, DTensor) == vocabulary
    assert all(type(t) is torch.Tensor for t in seen), "attention.inner gets plain local tensors"
    n = mesh.size()
    assert {t.shape[1] for t in seen} == {config.n_heads // n, config.n_kv_heads // n}
    found = errors(mine, model, loss, truth)
    if fsdp_mesh is None:
        found["logits"] = ((whole(out) - logits).norm() / logits.norm()).item()
    else:
        found.pop("loss")  # of these rows only
    return found


def worst(results: list[dict[str, dict[str, float]]]) -> None:
    """Results by rank: case -> name -> error. A nan or a missing name fails too."""
    for rank, cases in enumerate(results):
        for case, found in cases.items():
            bad = {name: error for name, error in found.items() if not error < 1e-10}
            assert not bad, f"{case} on rank {rank}: {bad}"


def every_way(config, mesh, fsdp_mesh=None):
    """By hand and native, without and with sequence and loss parallelism. (By hand the loss always is parallel.)"""
    odd = replace(config, tied=True, vocab_size=61)  # 16, 16, 16 and 13 rows on four ranks
    found = {}
    for sequence in (False, True):
        for one in (config, odd):
            case = f"{sequence=}, {one.vocab_size} rows, tied={one.tied}"
            found[f"by hand, {case}"] = run_by_hand(one, mesh, sequence, fsdp_mesh)
            loss = one is odd
            found[f"native, {case}, {loss=}"] = run_native(one, mesh, sequence, loss, fsdp_mesh)
    return found


def test_four_ranks_equal_one_process():
    def on_rank():
        return every_way(TINY, init_device_mesh("cpu", (4,), mesh_dim_names=("tp",)))

    results = launch(on_rank, ranks=4, timeout=100)
    assert len(results[0]) == 8
    worst(results)


def test_tp_2_times_fsdp_2():
    def on_rank():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
        config = replace(TINY, n_layers=1)
        alone = {f"{way.__name__} of 2": way(config, mesh["tp"], True) for way in (run_by_hand, run_native)}
        return alone | every_way(config, mesh["tp"], mesh["fsdp"])

    worst(launch(on_rank, ranks=4, timeout=100))


def test_eight_ranks():
    def on_rank():
        mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("tp",))
        config = replace(TINY, n_layers=1, n_kv_heads=8, vocab_size=250)
        ways = {"by hand": run_by_hand(config, mesh, True)}
        return ways | {"native, sequence, vocabulary": run_native(config, mesh, True, True)}

    worst(launch(on_rank, ranks=8, timeout=100))


@pytest.mark.full
def test_every_way_on_eight_ranks():
    """TP 8, and TP 4 times FSDP 2; no number of the second divides the vocabulary of the first."""

    def on_rank():
        mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("tp",))
        config = replace(TINY, n_layers=1)
        found = every_way(replace(config, n_kv_heads=8, vocab_size=250), mesh)
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("fsdp", "tp"))
        return found | {f"fsdp, {case}": e for case, e in every_way(config, mesh["tp"], mesh["fsdp"]).items()}

    results = launch(on_rank, ranks=8, timeout=250)
    assert len(results[0]) == 16
    worst(results)


def test_collectives_equal_the_formula():
    """4 all-reduces of B·T·D a block, or 4 gathers and 4 scatters: the same bytes, seen by two counters."""
    cases = ("by hand", "by hand, sequence", "native", "sequence", "vocabulary")

    def on_rank():
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        tokens_BT, targets_BT = batch(TINY.vocab_size)
        counts, sent = {}, {}
        for n_layers in (1, 2):
            config = replace(TINY, n_layers=n_layers)
            for case in cases:
                flags = {"sequence_parallel": "sequence" in case}
                if "by hand" in case:
                    model = tp.apply_tensor_parallel_by_hand(build(config), **flags)
                else:
                    flags["loss_parallel"] = case == "vocabulary"
                    model = build(config, lambda m, flags=flags: tp.apply_tensor_parallel(m, mesh, **flags))

                def step(model=model, case=case, config=config):
                    with loss_parallel():  # for DTensors
                        logits = model(tokens_BT)
                        if "by hand" in case:
                            loss = tp.vocab_parallel_cross_entropy_by_hand(logits, targets_BT, config.vocab_size)
                        else:
                            loss = cross_entropy(logits, targets_BT)
                        loss.backward()

                if n_layers == 1:
                    with warnings.catch_warnings():  # it looks for gradients of the tokens
                        warnings.simplefilter("ignore")
                        with CommDebugMode() as comm:
                            step()
                    model.zero_grad()
                with recording() as events:
                    step()
                seen = [e for e in events if e.lane == "communication"]
                counts[case, n_layers] = Counter((e.name, e.n_bytes) for e in seen)
                sent[case, n_layers] = traffic(seen).total
                if n_layers == 1:
                    names = Counter()
                    for op, calls in comm.get_comm_counts().items():
                        names[next(new for old, new in TORCH_NAMES.items() if old in str(op))] += calls
                    assert names == Counter(e.name for e in seen), (case, names)
        return counts, sent

    results = launch(on_rank, ranks=4, timeout=100)
    counts = results[0][0]
    n_bytes, N, norm = B * T * TINY.dim * 8, B * T, ("all_reduce", TINY.dim * 8)
    per_block = {case: counts[case, 2] - counts[case, 1] for case in cases}
    assert per_block["by hand"] == per_block["native"] == per_block["vocabulary"] == {("all_reduce", n_bytes): 4}
    # f: a gather forward, a scatter backward; g the other way round
    assert per_block["sequence"] == {("all_gather", n_bytes): 4, ("reduce_scatter", n_bytes): 4}
    assert per_block["by hand, sequence"] == per_block["sequence"] + Counter({norm: 2})  # native: later, when read
    a_block = {case: sum(sent[case, 2] - sent[case, 1] for _, sent in results) / 4 for case in cases}
    formula = 4 * 2 * 3 / 4 * n_bytes  # in a ring of 4
    assert a_block["by hand, sequence"] == formula + 2 * 2 * 3 / 4 * TINY.dim * 8
    assert {a_block[case] for case in cases if case != "by hand, sequence"} == {formula}
    ends = {case: counts[case, 1] - per_block[case] for case in per_block}
    logits = ("all_gather", N * TINY.vocab_size * 8)
    assert ends["by hand"] == ends["vocabulary"] == {("all_reduce", n_bytes): 2, ("all_reduce", N * 8): 3}
    assert ends["native"] == {("all_reduce", n_bytes): 2, logits: 1}
    # embedding: scatter, gather; output: gather, scatter
    halves = {("all_gather", n_bytes): 2, ("reduce_scatter", n_bytes): 2}
    assert ends["sequence"] == halves | {logits: 1}
    assert ends["by hand, sequence"] == halves | {norm: 1, ("all_reduce", N * 8): 3}


def test_what_a_block_keeps_for_backward():
    """Norms: x and x normalised, 4 D a token, whole or 1/n. Inputs of the pairs: 2 D, whole. All else: 1/n."""

    def kept(model, x, positions):
        own = {(p.to_local() if isinstance(p, DTensor) else p).data_ptr() for p in model.parameters()}
        storages = {}

        def pack(saved):
            local = saved.to_local() if isinstance(saved, DTensor) else saved
            storages[local.data_ptr()] = local.untyped_storage().nbytes()
            return saved

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
            out = model(x, positions)
        assert out.requires_grad
        return sum(n for at, n in storages.items() if at not in own)

    def on_rank():
        n = dist.get_world_size()
        mesh = init_device_mesh("cpu", (n,), mesh_dim_names=("tp",))
        found = {}
        for way in ("one process", "by hand", "native"):
            for sequence in (False, True):
                sizes = []
                for n_layers in (1, 2):
                    model = Transformer(replace(TINY, n_layers=n_layers), embedding=False, output=False).double()
                    if way == "by hand":
                        tp.apply_tensor_parallel_by_hand(model, sequence_parallel=sequence)
                    elif way == "native":
                        tp.apply_tensor_parallel(model, mesh, sequence_parallel=sequence)
                    t = T // n if sequence and way != "one process" else T
                    x_BtD = torch.randn(B, t, TINY.dim, dtype=torch.float64, requires_grad=True)
                    sizes.append(kept(model, x_BtD, torch.arange(T)))
                found[way, sequence] = (sizes[1] - sizes[0]) / (8 * B * T)
        return found

    found = launch(on_rank, ranks=4, timeout=60)
    D, C, n = TINY.dim, TINY.head_dim * TINY.n_kv_heads, 4
    norms = 4 * D + 2  # and each one's 1 / root mean square
    inside = 2 * D + 2 * C + 4 * TINY.ffn_dim + TINY.n_heads  # attention keeps a number a head
    expected = {("one process", s): norms + 2 * D + inside for s in (False, True)}
    expected |= {(way, False): norms + 2 * D + inside / n for way in ("by hand", "native")}
    expected |= {(way, True): norms / n + 2 * D + inside / n for way in ("by hand", "native")}
    assert all(of_rank == expected for of_rank in found), (found[0], expected)


def test_pieces_by_hand():
    """Column, row and embedding alone, and the cross entropy's corner cases."""

    def on_rank():
        n, rank = dist.get_world_size(), dist.get_rank()
        torch.manual_seed(0)
        found = {}

        def leaf(*shape):
            return torch.randn(shape, dtype=torch.float64, requires_grad=True)

        def compare(case, by_hand, plain, whole, *weights):
            """The value, the gradient of x (whole on every rank) and those of weights (a part on every rank)."""
            twins = [t.detach().clone().requires_grad_() for t in (whole, *weights) if t.requires_grad]
            got = by_hand(whole, *weights)
            expected = plain(*([whole] if not whole.requires_grad else []), *twins)
            towards = torch.randn(got.shape, dtype=got.dtype)
            for value in (got, expected):
                (value * towards).sum().backward()
            found[case] = {"value": ((got - expected).norm() / expected.norm()).item()}
            for w in weights:
                dist.all_reduce(w.grad)
            for i, (t, twin) in enumerate(zip([t for t in (whole, *weights) if t.requires_grad], twins, strict=True)):
                found[case][f"gradient {i}"] = ((t.grad - twin.grad).norm() / twin.grad.norm()).item()

        def column_and_row(x, w1, w2, sequence=False):
            inner = tp.column_linear_by_hand(x, w1.chunk(n, 0)[rank], None, sequence).tanh()
            return tp.row_linear_by_hand(inner, w2.chunk(n, 1)[rank], None, sequence)

        def plain(x, w1, w2):
            return F.linear(F.linear(x, w1).tanh(), w2)

        compare("column and row", column_and_row, plain, leaf(2, 8, 16), leaf(12, 16), leaf(16, 12))

        tensors = leaf(2, 8, 16), leaf(12, 16), leaf(16, 12)
        twins = [t.detach().clone().requires_grad_() for t in tensors]
        x_part = tensors[0].chunk(n, 1)[rank]  # this rank's tokens, and theirs only
        got, expected = column_and_row(x_part, *tensors[1:], sequence=True), plain(*twins)
        towards = torch.randn(expected.shape, dtype=expected.dtype)
        (expected * towards).sum().backward()
        expected, towards = expected.chunk(n, 1)[rank], towards.chunk(n, 1)[rank]
        (got * towards).sum().backward()
        found["on tokens"] = {"value": ((got - expected).norm() / expected.norm()).item()}
        for i, (t, twin) in enumerate(zip(tensors, twins, strict=True)):
            dist.all_reduce(t.grad)
            found["on tokens"][f"gradient {i}"] = ((t.grad - twin.grad).norm() / twin.grad.norm()).item()
        assert got.shape == (2, 8 // n, 16)
        V = 4 * n - 3
        compare(
            "embedding of 13 rows",
            lambda tokens, w: tp.vocab_parallel_embedding_by_hand(tokens, w.chunk(n)[rank], V),
            F.embedding,
            torch.arange(V).repeat(2).view(2, V),
            leaf(V, 8),
        )

        targets = torch.randint(V, (3, 5))
        targets[0] = -1
        targets[targets == 4] = 5  # a row that is padding below
        wide, narrow = torch.float64, torch.bfloat16
        cases = itertools.product(("mean", "sum"), ((wide, 0.0), (wide, 1e4), (narrow, 0.0)), (0.0, 0.2), (False, True))
        for reduction, (dtype, shift), smoothing, masked in cases:
            logits = torch.randn(3, 5, V, dtype=wide) * 5 + shift
            if masked and not smoothing:  # rank 1's first row is no token
                logits[..., 4] = -math.inf
            logits = logits.to(dtype).requires_grad_()
            exact = logits.detach().double().requires_grad_()
            args = {"ignore_index": -1, "reduction": reduction, "label_smoothing": smoothing}
            loss = tp.vocab_parallel_cross_entropy_by_hand(logits.chunk(n, -1)[rank], targets, V, **args)
            truth = F.cross_entropy(exact.flatten(0, 1), targets.flatten(), **args)
            (3 * loss).backward()
            (3 * truth).backward()
            dist.all_reduce(logits.grad)
            assert logits.grad.dtype == dtype and not logits.grad[0].any()
            error = (logits.grad - exact.grad).norm() / exact.grad.norm()
            if dtype == narrow:  # float32 inside, rounded once
                assert loss.dtype == torch.float32 and (loss - truth).abs() < 1e-5 * truth and error < 5e-3
            else:
                case = f"cross entropy {reduction} {shift=} {smoothing=} {masked=}"
                found[case] = {"loss": ((loss - truth).abs() / truth).item(), "gradient": error.item()}

        ignored = torch.full((2, 5), -100)
        whole_logits = torch.zeros(2, 5, V)
        logits = whole_logits.chunk(n, -1)[rank]
        spread = distribute_tensor(whole_logits, init_device_mesh("cpu", (n,)), [Shard(-1)])
        by_hand = partial(tp.vocab_parallel_cross_entropy_by_hand, logits, ignored, V)
        with loss_parallel():
            native = partial(F.cross_entropy, spread.flatten(0, 1), ignored.flatten())
            for loss in (by_hand, native):  # no target: as in torch
                assert whole(loss()).isnan() and whole(loss(reduction="sum")) == 0
            with pytest.raises(RuntimeError, match=r"mixed torch.Tensor and DTensor"):  # refused: so says our docstring
                native(label_smoothing=0.1)

        table, mistakes = torch.zeros(V, 8).chunk(n)[rank], {}
        for case, call in {
            "target": lambda: tp.vocab_parallel_cross_entropy_by_hand(logits, torch.full((2, 5), V), V),
            "negative": lambda: tp.vocab_parallel_cross_entropy_by_hand(logits, torch.full((2, 5), -1), V),
            "token": lambda: tp.vocab_parallel_embedding_by_hand(torch.tensor([V]), table, V),
            "rows": lambda: tp.vocab_parallel_embedding_by_hand(torch.tensor([0]), torch.zeros(7, 8), V),
            "reduction": lambda: tp.vocab_parallel_cross_entropy_by_hand(logits, ignored, V, reduction="none"),
            "smoothing": lambda: tp.vocab_parallel_cross_entropy_by_hand(logits, ignored, V, label_smoothing=2.0),
        }.items():
            with pytest.raises(ValueError) as raised:
                call()
            mistakes[case] = str(raised.value)
        return found, mistakes

    results = launch(on_rank, ranks=4)
    worst([found for found, _ in results])
    mistakes = results[3][1]
    assert "outside [0, 13)" in mistakes["target"] and "ignore_index -100" in mistakes["negative"]
    assert "outside [0, 13)" in mistakes["token"]
    assert "rank 3 of 4 holds 7 of 13" in mistakes["rows"] and "[12, 13) has 1" in mistakes["rows"]
    assert "'none'" in mistakes["reduction"] and "label_smoothing 2.0 in [0, 1]" in mistakes["smoothing"]


def test_degrees_that_do_not_divide_are_refused_before_a_rank_starts():
    llama = {"n_heads": 8, "n_kv_heads": 4, "ffn_dim": 176}
    for n in (1, 2, 4):
        tp.check_tensor_parallel(n, vocab_size=250, **llama)
    tp.check_tensor_parallel(4, n_kv_heads=None, vocab_size=None)
    with pytest.raises(ValueError, match=r"degree 8: n_kv_heads 4 is no multiple.*\[1, 2, 4\].*'n_heads': 8"):
        tp.check_tensor_parallel(8, vocab_size=256, **llama)
    with pytest.raises(ValueError, match=r"ffn_dim 176 is no multiple"):
        tp.check_tensor_parallel(3, **llama)
    with pytest.raises(ValueError, match=r"seq_len 10 is no multiple.*take \[1, 2\] for"):
        tp.check_tensor_parallel(4, seq_len=10, n_heads=8)
    with pytest.raises(ValueError, match=r"vocab_size 5 leaves the last rank without a row.*\[1, 2\]"):
        tp.check_tensor_parallel(4, vocab_size=5, n_heads=8)  # 2, 2, 1 and none
    for wrong in (0, -2, 2.0, True, "4"):
        with pytest.raises(ValueError, match="whole number of at least 1"):
            tp.check_tensor_parallel(wrong, n_heads=8)


def test_mistakes_are_told():
    def on_rank():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
        found = {}

        def refused(case, model, *args, **kwargs):
            with pytest.raises(ValueError) as raised:
                tp.apply_tensor_parallel(model, *args, **kwargs)
            found[case] = str(raised.value)

        small = replace(TINY, n_layers=1)
        refused("axes", Transformer(small), mesh)
        refused("heads", Transformer(replace(small, n_kv_heads=1)), mesh["tp"])
        refused("names", nn.Sequential(nn.Linear(4, 4)), mesh["tp"])
        refused("plan", Transformer(small), mesh["tp"], {"output": ColwiseParallel()}, sequence_parallel=True)
        refused("fsdp first", fully_shard(Transformer(small), mesh=mesh["fsdp"]), mesh["tp"])
        model = Transformer(small)
        model.layers["0"].attention.q_norm = nn.RMSNorm(4)
        refused("inside", model, mesh["tp"])
        with pytest.raises(ValueError, match="materialize them first"):
            tp.apply_tensor_parallel_by_hand(on_meta(lambda: Transformer(small)))
        model = tp.apply_tensor_parallel(Transformer(small), mesh["tp"], sequence_parallel=True)
        with pytest.raises(ValueError) as raised:
            model(torch.zeros(2, 7, dtype=torch.long))
        found["sequence"] = str(raised.value)
        model = tp.apply_tensor_parallel_by_hand(Transformer(small), mesh.get_group("tp"), sequence_parallel=True)
        with pytest.raises(ValueError) as raised:
            model(torch.zeros(2, 7, dtype=torch.long))
        assert str(raised.value) == found["sequence"]
        model = Transformer(small)
        model.norm = nn.LayerNorm(TINY.dim)
        with pytest.raises(ValueError, match=r"norm is a LayerNorm: by hand, only nn.RMSNorm"):
            tp.apply_tensor_parallel_by_hand(model, mesh.get_group("tp"), sequence_parallel=True)
        # a stage of a pipeline has a plan for what it holds, and a plan of one's own decides alone
        stage = tp.apply_tensor_parallel(Transformer(small, embedding=False, output=False), mesh["tp"])
        x_BTD = torch.randn(2, 4, TINY.dim)
        own = tp.apply_tensor_parallel(Transformer(small), mesh["tp"], {"output": ColwiseParallel()})
        shapes = stage(x_BTD).shape, own(torch.zeros(2, 4, dtype=torch.long)).shape
        sharded = {name for name, p in own.named_parameters() if isinstance(p, DTensor)}
        assert sharded == {"output.weight"} and own.output.weight.placements == (Shard(0),)
        return found, tuple(map(tuple, shapes))

    found, shapes = launch(on_rank, ranks=4)[0]
    assert shapes == ((2, 4, 32), (2, 4, 32))  # 64 logits over 2 ranks
    for case, words in {
        "axes": "mesh['tp']",
        "heads": "n_kv_heads 1 is no multiple",
        "names": "neither wq nor q_proj",
        "plan": "pass them to llama_plan",
        "fsdp first": "before FSDP",
        "inside": "layers.0.attention.q_norm.weight",
        "sequence": "degree 2: seq_len 7 is no multiple (8 is); take [1, 7] for",
    }.items():
        assert words in found[case], found[case]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_transformers_llama(ranks):
    """hf_llama_plan on a random LlamaForCausalLM with grouped heads and biases, tied and untied."""
    pytest.importorskip("transformers")

    def on_rank():
        from transformers import LlamaConfig, LlamaForCausalLM

        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
        found = {}
        cases = [(False, False, False), (True, False, True), (True, True, False)]
        for sequence, vocabulary, tied in cases:
            sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 131}
            heads = {
                "num_attention_heads": 8,
                "num_key_value_heads": 4,
                "attention_bias": True,
                "mlp_bias": True,
            }
            config = LlamaConfig(**sizes, **heads, tie_word_embeddings=tied, use_cache=False)

            def build(config=config):
                torch.manual_seed(3)
                model = LlamaForCausalLM(config).double()
                for name, p in model.named_parameters():
                    if name.endswith("bias"):
                        nn.init.normal_(p)
                for name, _ in list(model.named_modules()):  # theirs computes in float32 at most
                    if name.endswith("norm"):
                        parent, _, leaf = name.rpartition(".")
                        exact = nn.RMSNorm(64, config.rms_norm_eps, dtype=torch.float64)
                        setattr(model.get_submodule(parent), leaf, exact)
                return model

            tokens_BT, targets_BT = batch(131)
            model = build()
            logits = model(input_ids=tokens_BT).logits
            loss = cross_entropy(logits, targets_BT)
            loss.backward()
            truth = {name: p.grad for name, p in model.named_parameters()}

            model = tp.apply_tensor_parallel(build(), mesh, None, sequence, vocabulary)
            assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
            with loss_parallel() if vocabulary else contextlib.nullcontext():
                out = model(input_ids=tokens_BT).logits
                mine = cross_entropy(out, targets_BT)
                mine.backward()
            case = f"{sequence=} {vocabulary=} {tied=}"
            found[case] = errors(mine, model, loss, truth)
            found[case]["logits"] = ((whole(out) - logits).norm() / logits.norm()).item()
        return found

    worst(launch(on_rank, ranks=ranks, timeout=100))
