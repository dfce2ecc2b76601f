"""What is read is bit for bit what was saved, in any layout; no kill leaves half a checkpoint with a whole one's name."""

import json
import logging
import os
import random
import shutil
import signal
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from minititan import checkpoint
from minititan.activation_checkpoint import apply_activation_checkpoint
from minititan.checkpoint import (
    async_save,
    export_hf,
    import_hf,
    latest,
    load,
    load_by_hand,
    piece_by_hand,
    save,
    save_by_hand,
)
from minititan.data_parallel import apply_ddp
from minititan.expert_parallel import apply_expert_parallel, shard_experts
from minititan.fsdp import apply_fsdp
from minititan.lab.launch import RankError, launch
from minititan.meta_init import materialize, on_meta
from minititan.model import ModelConfig, Transformer, from_hf_state_dict, to_hf_state_dict
from minititan.optimizer import build_adamw
from minititan.pipeline_parallel import split_model
from minititan.tensor_parallel import apply_tensor_parallel

# 36 rows: 18 on each of 2 tensor-parallel ranks, which 4 ranks of FSDP cut in 5, 5, 5 and 3
DENSE = ModelConfig(vocab_size=64, dim=32, n_layers=2, n_heads=4, n_kv_heads=4, ffn_dim=36)
EXPERTS = ModelConfig(vocab_size=64, dim=32, n_layers=1, n_heads=4, n_kv_heads=4, ffn_dim=36, n_experts=8, top_k=2)


def build(config, seed=0, dtype=torch.float32, **layout):
    """Parts of a Transformer and its optimizer. layout: ranks of each of dp_replicate, dp_shard, tp, pp, or ep."""
    model = on_meta(lambda: Transformer(config).to(dtype))
    axes = {name: n for name, n in layout.items() if n > 1}
    parts = [model]
    if axes and "ep" not in axes:
        names = [name for name in ("pp", "dp_replicate", "dp_shard", "tp") if name in axes]
        mesh = init_device_mesh("cpu", tuple(axes[name] for name in names), mesh_dim_names=tuple(names))
        if "pp" in axes:
            parts = [split_model(model, axes["pp"], mesh["pp"].get_local_rank())]
        for part in parts:
            if "tp" in axes:
                apply_tensor_parallel(part, mesh["tp"])
            if over := tuple(name for name in ("dp_replicate", "dp_shard") if name in axes):
                if over == ("dp_replicate",):
                    continue  # plain replicas
                apply_fsdp(part, mesh[over if len(over) > 1 else over[0]])
    elif axes:
        n = dist.get_world_size()
        mesh = init_device_mesh("cpu", (n // axes["ep"], axes["ep"]), mesh_dim_names=("efsdp", "ep"))
        apply_expert_parallel(model, mesh["ep"])
        shard_experts(model, mesh["efsdp"])
        apply_fsdp(model, init_device_mesh("cpu", (n,)))
    for part in parts:
        materialize(part, "cpu", seed=seed)
    return parts, build_adamw([p for part in parts for p in part.parameters()], lr=1e-2)


def step(parts, optimizer, tokens_BT):
    """One step of a model in one part; the loss of this rank's rows."""
    (model,) = parts
    loss = F.cross_entropy(model(tokens_BT[:, :-1]).flatten(0, 1), tokens_BT[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def rows(i, n=8, length=9):
    """Tokens of step i."""
    return torch.randint(64, (n, length), generator=torch.Generator().manual_seed(i))


def full(t):
    return t.full_tensor() if isinstance(t, DTensor) else t.detach().clone()


def everything(parts, optimizer=None):
    """{name: whole tensor} of parameters, buffers and optimizer state of this rank's parts."""
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    found = {}
    for part in parts:
        found |= {name: full(t) for name, t in part.state_dict().items()}
        for name, p in part.named_parameters():
            if optimizer is not None:
                found |= {f"{name} {key}": full(t) for key, t in optimizer.state[p].items()}
    return found


def differ(ours, theirs):
    """Names that differ in a single bit, or are missing; of all in `ours`."""
    return [
        n for n, t in ours.items() if n not in theirs or not torch.equal(t, theirs[n]) or t.dtype != theirs[n].dtype
    ]


# ---- any layout -------------------------------------------------------------------------------------------------

LAYOUTS = {
    "dp_shard 4 × tp 2": {"dp_shard": 4, "tp": 2},
    "pp 2 × tp 4": {"pp": 2, "tp": 4},
    "dp_replicate 8": {"dp_replicate": 8},
    "dp_replicate 2 × dp_shard 2 × tp 2": {"dp_replicate": 2, "dp_shard": 2, "tp": 2},
    "pp 2 × dp_shard 4": {"pp": 2, "dp_shard": 4},
    "dp_shard 8": {"dp_shard": 8},
}


def there_and_back(folder, config, layouts, first, back=False):
    """Trained and saved as `first`, read as each of `layouts`; with `back`, each of these saves again, read as `first`."""
    parts, optimizer = build(config, **layouts[first])
    for i in range(2):
        step(parts, optimizer, rows(i))
    truth = everything(parts, optimizer)
    save(folder / "first", 2, parts, optimizer)
    save_by_hand(folder / "by hand", dict(parts[0].named_parameters()))
    wrong, seen = {}, {}
    for layout, axes in layouts.items():
        parts, optimizer = build(config, seed=1, **axes)
        load(folder / "first", parts, optimizer)
        ours = everything(parts, optimizer)
        wrong[layout], seen[layout] = differ(ours, truth), [*ours]
        if back:
            save(folder / layout, 3, parts, optimizer)
            again, optimizer = build(config, seed=2, **layouts[first])
            load(folder / layout, again, optimizer)
            wrong[f"{layout}, and back"] = differ(everything(again, optimizer), truth)
        with torch.no_grad():
            tensors = {name: p for part in parts for name, p in part.named_parameters()}
            local = {name: p.to_local() if isinstance(p, DTensor) else p for name, p in tensors.items()}
            loaded = {name: t.clone() for name, t in local.items()}
            for t in local.values():
                t.zero_()
        load_by_hand(folder / "by hand", tensors)
        wrong[f"{layout}, by hand"] = differ(local, loaded)
    return wrong, seen, truth


def check_layouts(results, folder, config):
    truth = results[0][2]
    assert sum(t.abs().sum() > 0 for t in truth.values()) > 0.9 * len(truth)
    for rank, (wrong, _, _) in enumerate(results):
        assert not any(wrong.values()), (rank, {k: v[:3] for k, v in wrong.items() if v})
    for layout in results[0][1]:
        assert {name for _, seen, _ in results for name in seen[layout]} == {*truth}
    parts, optimizer = build(config, seed=4)
    assert load(folder / "first", parts, optimizer) == {"step": 2}  # one process, without a process group
    assert differ(everything(parts, optimizer), truth) == []
    return parts, optimizer, truth


def test_eight_ranks_are_read_by_any_other_layout(tmp_path):
    """dp_shard 4 × tp 2 is read as pp 2 × tp 4, as dp_replicate 8 and in one process; each way bit for bit."""
    few = [*LAYOUTS][:3]
    layouts = {name: LAYOUTS[name] for name in few}
    results = launch(there_and_back, tmp_path, DENSE, layouts, few[0], ranks=8, device="cpu", timeout=200)
    parts, optimizer, truth = check_layouts(results, tmp_path, DENSE)
    save(tmp_path / "one", 7, parts, optimizer)  # and one process is read by many

    def read():
        parts, optimizer = build(DENSE, seed=5, dp_shard=2)
        load(tmp_path / "one", parts, optimizer)
        return differ(everything(parts, optimizer), truth)

    assert launch(read, ranks=2, device="cpu") == [[], []]


@pytest.mark.full
def test_eight_ranks_are_read_by_six_layouts(tmp_path):
    results = launch(there_and_back, tmp_path, DENSE, LAYOUTS, "dp_shard 8", True, ranks=8, device="cpu", timeout=200)
    check_layouts(results, tmp_path, DENSE)


def test_experts_are_read_by_other_layouts(tmp_path):
    layouts = {"ep 2": {"ep": 2}, "ep 4": {"ep": 4}, "dp_shard 4": {"dp_shard": 4}}
    results = launch(there_and_back, tmp_path, EXPERTS, layouts, "ep 2", ranks=4, device="cpu", timeout=120)
    check_layouts(results, tmp_path, EXPERTS)


def test_pieces_tile_the_tensor_and_replicas_are_written_once(tmp_path):
    def on_rank():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        t = nn.Parameter(torch.arange(35.0).view(7, 5))
        cut = checkpoint.DTensor.from_local(t[:0], mesh, run_check=False)  # replicated, empty: a piece of nothing
        parts, _ = build(DENSE, dp_replicate=2, dp_shard=2)
        save_by_hand(tmp_path / "x", {"t": t, "empty": cut} | dict(parts[0].named_parameters()))
        w2 = dict(parts[0].named_parameters())["layers.0.feed_forward.w2.weight"]
        return piece_by_hand(t), piece_by_hand(w2)

    found = launch(on_rank, device="cpu")
    assert found[3][0] == ((0, 0), (7, 5)) and [o for _, (o, _) in found] == [(0, 0), (16, 0)] * 2
    sizes = [(tmp_path / "x" / f"rank-{r}.pt").stat().st_size for r in range(4)]
    assert max(sizes[2:]) < 0.1 * min(sizes[:2]), "ranks 2 and 3 are replicas"


# ---- a run goes on ----------------------------------------------------------------------------------------------


def run(folder, begin, end, every=None, dtype=torch.float32, noise=0.0, seed=0, **layout):
    """Steps begin..end of a run, saving each `every`; from the latest checkpoint if it does not begin at 0."""
    parts, optimizer = build(DENSE, seed=seed, dtype=dtype, **layout)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 1 / (1 + i))
    rank, n = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(100 + rank)
    random.seed(rank)
    if begin:
        extra = load(folder, parts, optimizer)
        assert extra["step"] == begin
        schedule.load_state_dict(extra["schedule"])
    losses, saving = [], None
    for i in range(begin, end):
        tokens_BT = rows(i).chunk(n)[rank]
        if noise:  # of each rank's own generators
            flip = (torch.rand(tokens_BT.shape) < noise) | (random.random() < noise)
            tokens_BT = torch.where(flip, (tokens_BT + 1) % 64, tokens_BT)
        loss = torch.tensor(step(parts, optimizer, tokens_BT), dtype=torch.float64)
        schedule.step()
        dist.all_reduce(loss)
        losses.append(loss.item() / n)
        if every and (i + 1) % every == 0:
            extra = {"schedule": schedule.state_dict()}
            saving = async_save(folder, i + 1, parts, optimizer, extra, previous=saving)
    if saving:
        saving.wait()
    return losses, everything(parts, optimizer)


def test_a_resumed_run_is_the_run_that_was_not_stopped(tmp_path):
    """Bitwise, with noise from each rank's generators, the files written while training goes on."""
    losses, truth = _runs(tmp_path, 0, 6, 3)[0]
    shutil.rmtree(tmp_path / "step-00000006")
    again, ours = _runs(tmp_path, 3, 6, None, seed=9)[0]
    assert again == losses[3:] and len(truth) > 60
    assert differ(ours, truth) == [] and differ(truth, ours) == []


def _runs(folder, begin, end, every, ranks=2, seed=0, dtype=torch.float32, noise=0.1):
    options = {"dtype": dtype, "noise": noise, "seed": seed, "dp_shard": ranks}
    return launch(partial(run, **options), folder, begin, end, every, ranks=ranks, device="cpu")


def test_another_number_of_ranks_goes_on_where_the_run_was(tmp_path):
    options = {"dtype": torch.float64, "noise": 0.0}
    losses, truth = _runs(tmp_path, 0, 5, None, **options)[0]
    _runs(tmp_path, 0, 3, 3, **options)
    again, ours = _runs(tmp_path, 3, 5, None, ranks=4, seed=9, **options)[0]
    assert all(abs(a / b - 1) < 1e-10 for a, b in zip(again, losses[3:], strict=True))
    errors = {n: ((t - truth[n]).norm() / truth[n].norm()).item() for n, t in ours.items()}
    assert len(errors) > 60 and max(errors.values()) < 1e-10, max(errors, key=errors.get)


# ---- kills ------------------------------------------------------------------------------------------------------


def saver(folder, keep_last):
    """Checks what is there, then saves without end; all values tell their step. Never returns."""
    (folder / f"pid-{dist.get_rank()}").write_text(str(os.getpid()))
    parts, optimizer = build(DENSE, dp_shard=2)
    step(parts, optimizer, rows(0))
    tensors = [t for part in parts for t in part.parameters()]
    tensors += [optimizer.state[p][key] for p in tensors for key in ("exp_avg", "exp_avg_sq")]
    at = 0
    if latest(folder / "runs"):
        at = load(folder / "runs", parts, optimizer)["step"]
        tensors = [t for part in parts for t in part.parameters()]
        tensors += [optimizer.state[p][key] for p in tensors for key in ("exp_avg", "exp_avg_sq")]
        for i, t in enumerate(tensors):
            local = t.to_local() if isinstance(t, DTensor) else t
            assert (local == at + i / 128).all(), f"step {at}: tensor {i} is not of it"
    saving = None
    while True:
        at += 1
        with torch.no_grad():
            for i, t in enumerate(tensors):
                t.fill_(at + i / 128)
        if at % 2:
            saving = async_save(folder / "runs", at, parts, optimizer, keep_last=keep_last, previous=saving)
        else:
            save(folder / "runs", at, parts, optimizer, keep_last=keep_last, previous=saving)


def kill_while_saving(folder, chance):
    """Both ranks killed at some moment after a new checkpoint; -> its step, and names of what was left half done."""
    found = latest(folder / "runs")
    before = int(found.name[5:]) if found else 0

    def killer():
        deadline = time.monotonic() + 50
        while time.monotonic() < deadline:
            now = latest(folder / "runs")
            if now is not None and int(now.name[5:]) > before:
                break
            time.sleep(0.005)
        time.sleep(chance.uniform(0, 0.25))
        pids = [int((folder / f"pid-{r}").read_text()) for r in range(2)]
        chance.shuffle(pids)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=killer)
    thread.start()
    with pytest.raises(RankError):
        launch(saver, folder, 2, ranks=2, device="cpu", timeout=58)
    thread.join()
    return [p.name for p in (folder / "runs").iterdir() if p.name.endswith((".writing", ".deleted"))]


@pytest.mark.parametrize("kills", [4, pytest.param(20, marks=pytest.mark.full)])
def test_a_kill_while_saving_spoils_nothing(tmp_path, kills):
    """Every life loads what the one before has left and compares all of it; half of the kills hit an unfinished save."""
    chance, halves, steps = random.Random(kills), 0, []
    for _ in range(kills):
        halves += bool(kill_while_saving(tmp_path, chance))
        newest = latest(tmp_path / "runs")
        steps.append(int(newest.name[5:]))
        parts, optimizer = build(DENSE, seed=1)
        assert load(tmp_path / "runs", parts, optimizer)["step"] == steps[-1]  # and in one process
        assert all((p == steps[-1] + i / 128).all() for i, p in enumerate(parts[0].parameters()))
        whole = [p.name for p in (tmp_path / "runs").iterdir() if p.suffix == ""]
        assert 1 <= len(whole) <= 3
    assert steps == sorted(set(steps)) and halves >= kills / 4, (steps, halves)


# ---- what else there is -----------------------------------------------------------------------------------------


class Tied(nn.Module):
    """A tied weight, a frozen one, a buffer that is kept and one that is not, a parameter without a gradient."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.embedding, self.output = nn.Embedding(10, 6), nn.Linear(6, 10, bias=False)
        self.output.weight = self.embedding.weight
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.layers[0].weight.requires_grad_(False)
        self.unused = nn.Parameter(torch.randn(3))
        self.register_buffer("kept", torch.randn(2))
        self.register_buffer("lost", torch.randn(2), persistent=False)
        self.to(dtype)

    def forward(self, tokens_BT):
        x_BTD = self.embedding(tokens_BT)
        for layer in self.layers:
            x_BTD = x_BTD + torch.tanh(layer(x_BTD))
        return self.output(x_BTD)


def tied(seed, dtype=torch.float32, make=torch.optim.AdamW, steps=2):
    torch.manual_seed(seed)
    model = Tied(dtype)
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    for i in range(steps):
        model(rows(i) % 10).float().logsumexp(-1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def two_groups(parameters):
    small = [p for p in parameters if p.dim() < 2]
    large = [p for p in parameters if p.dim() >= 2]
    return torch.optim.AdamW([{"params": large, "weight_decay": 0.3, "lr": 1e-3}, {"params": small}], lr=1e-2)


OPTIMIZERS = {
    "AdamW": (torch.float32, partial(torch.optim.AdamW, lr=1e-2)),
    "fused": (torch.float32, partial(build_adamw, decay_matrices_only=True)),
    "bf16 state": (torch.float32, partial(build_adamw, state_dtype=torch.bfloat16)),
    "fp32 state of bf16": (torch.bfloat16, partial(build_adamw, state_dtype=torch.float32)),
    "fp64 state": (torch.float32, partial(build_adamw, state_dtype=torch.float64)),
    "two groups": (torch.float32, two_groups),
    "SGD": (torch.float32, partial(torch.optim.SGD, lr=1e-2, momentum=0.9, nesterov=True)),
    "plain SGD": (torch.float32, partial(torch.optim.SGD, lr=1e-2)),
    "a tensor as lr": (torch.float32, partial(torch.optim.Adam, lr=torch.tensor(0.01))),
    "Adafactor": (torch.float32, partial(torch.optim.Adafactor, lr=1e-2)),  # states of other shapes
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("steps", [0, 2])
def test_every_optimizer_goes_on_bit_for_bit(tmp_path, name, steps):
    dtype, make = OPTIMIZERS[name]
    model, optimizer = tied(0, dtype, make, steps)
    for group in optimizer.param_groups:
        group["lr"] *= 0.5  # as a schedule does
    save(tmp_path, steps, model, optimizer, extra={"a": [1, (2.5, None)], "t": torch.arange(3)})
    ours, again = tied(1, dtype, make, 1)
    extra = load(tmp_path, ours, again)
    assert extra.pop("t").tolist() == [0, 1, 2] and extra == {"a": [1, (2.5, None)], "step": steps}
    for i in range(2):  # the same from here on: state, groups, counts, noise of the rounding
        for m, o in ((model, optimizer), (ours, again)):
            m(rows(i) % 10).float().logsumexp(-1).mean().backward()
            o.step()
            o.zero_grad()
    assert differ(everything([model], optimizer), everything([ours], again)) == []
    assert ours.output.weight is ours.embedding.weight and not torch.equal(ours.lost, model.lost)
    for a, b in zip(optimizer.param_groups, again.param_groups, strict=True):
        assert {k: v for k, v in a.items() if k != "params"} == {k: v for k, v in b.items() if k != "params"}


def test_what_is_of_the_device_stays(tmp_path):
    model, optimizer = tied(0)
    save(tmp_path, 2, model, optimizer)
    ours, again = tied(1, make=partial(torch.optim.AdamW, lr=5.0, fused=True, weight_decay=3.0))
    load(tmp_path, ours, again)
    (group,) = again.param_groups
    assert group["fused"] is True and (group["lr"], group["weight_decay"]) == (1e-3, 1e-2)


def test_wrappers_and_stages_add_nothing_to_the_names(tmp_path):
    """Saved as DDP of checkpointed blocks, read by two stages with one optimizer, and the other way round."""

    def on_rank():
        torch.manual_seed(0)
        model = Transformer(DENSE)
        apply_activation_checkpoint(model, "full")
        model = apply_ddp(model, init_device_mesh("cpu", (2,)))
        optimizer = build_adamw(model.parameters())
        model(rows(0)).logsumexp(-1).mean().backward()
        optimizer.step()
        save(tmp_path / "wrapped", 1, model, optimizer)
        whole = Transformer(DENSE)
        parts = [split_model(whole, 2, stage) for stage in range(2)]
        one = build_adamw([p for part in parts for p in part.parameters()])
        load(tmp_path / "wrapped", iter(parts), one)
        plain = Transformer(DENSE)
        of_plain = build_adamw(plain.parameters())
        load(tmp_path / "wrapped", plain, of_plain)
        save(tmp_path / "stages", 1, parts, one)
        load(tmp_path / "stages", model, optimizer)
        truth, n = everything([plain], of_plain), len(dict(plain.named_parameters()))
        state = {f"{name} {k}": v for (name, _), s in zip(plain.named_parameters(), optimizer.state.values(), strict=True)
                 for k, v in s.items()}  # fmt: skip
        return differ(everything(parts, one), truth), differ(state, truth), len(truth) == 4 * n

    assert launch(on_rank, ranks=2, device="cpu") == [([], [], True)] * 2


def test_the_files_are_torchs_own(tmp_path):
    """Names are those of get_optimizer_state_dict, flattened; DCP reads them without this module."""
    model, optimizer = tied(0)
    path = save(tmp_path, 2, model, optimizer)
    torchs = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    theirs = {f"optim.{name}": t for name, t in torchs.items() if name.startswith("state.")}
    found = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    assert {n for n in found if n.startswith("optim.")} == {*theirs} and "model.output.weight" not in found
    room = {name: torch.zeros_like(t) for name, t in theirs.items()}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(room, checkpoint_id=path)
    assert differ(room, theirs) == []


def test_cost_on_disk_is_three_times_the_parameters(tmp_path):
    """Three tensors a parameter and about 2 kB for each: at 4 ranks too, where each writes its part."""

    def on_rank():
        parts, optimizer = build(DENSE, dp_shard=dist.get_world_size())
        step(parts, optimizer, rows(0))
        return save(tmp_path / str(dist.get_world_size()), 1, parts, optimizer)

    parameters = [*Transformer(DENSE).parameters()]
    n_bytes = sum(p.nbytes for p in parameters)
    for ranks in (1, 4):
        path = launch(on_rank, ranks=ranks, device="cpu")[0]
        files = [p.stat().st_size for p in path.glob("*.distcp")]
        pieces = len(parameters) * (3 * ranks + 1)
        assert len(files) == ranks and 0 < sum(files) - 3 * n_bytes < 2500 * pieces
        assert max(files) < 1.1 * sum(files) / ranks + 2500 * len(parameters)


# ---- asynchronous -----------------------------------------------------------------------------------------------


def slow_writes(seconds, log):
    """DCP's `finish`, later, and told."""

    class Slow(checkpoint._Writer):
        def write_data(self, plan, planner):
            time.sleep(seconds)
            return super().write_data(plan, planner)

        def finish(self, metadata, results):
            super().finish(metadata, results)
            log.append(("finished", self.step))

    return Slow


def test_async_save_copies_first_and_the_next_one_waits(tmp_path):
    def on_rank():
        log = []
        checkpoint._Writer = slow_writes(0.3, log)
        parts, optimizer = build(DENSE, dp_shard=2)
        step(parts, optimizer, rows(0))
        saving, truth = None, {}
        for i in range(1, 4):
            saving = async_save(tmp_path, i, parts, optimizer, {"i": i}, keep_last=2, previous=saving)
            log.append(("begun", i, saving.done()))
            with torch.no_grad():
                truth[i] = everything(parts, optimizer)
                for p in parts[0].parameters():
                    p.mul_(2)  # not what is in the file
                    optimizer.state[p]["exp_avg"].add_(1)
                    optimizer.state[p]["step"].add_(1)
        assert latest(tmp_path).name == "step-00000002"
        path = saving.wait()
        save(tmp_path, 4, parts, optimizer, keep_last=2, previous=saving)
        wrong = []
        for i, found in ((3, path), (4, tmp_path)):
            truth[4] = everything(parts, optimizer) if i == 3 else truth[4]
            again, other = build(DENSE, seed=1, dp_shard=2)
            assert load(found, again, other) == ({"i": 3, "step": 3} if i == 3 else {"step": 4})
            wrong += differ(everything(again, other), truth[i])
        return log, wrong, saving.done()

    (log, wrong, done), (other_log, also_wrong, _) = launch(on_rank, ranks=2, device="cpu")
    assert wrong == also_wrong == [] and done
    assert log == [x for i in (1, 2, 3) for x in (("begun", i, False), ("finished", i))] + [("finished", 4)]
    assert all(kind == "begun" and not done for kind, _, done in other_log), "rank 0 finishes"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]


def test_an_async_save_that_fails_says_so_at_the_next(tmp_path):
    def on_rank():
        class Full(checkpoint._Writer):
            def write_data(self, plan, planner):
                raise OSError(28, "No space left on device")

        right, checkpoint._Writer = checkpoint._Writer, Full
        parts, optimizer = build(DENSE, dp_shard=2)
        saving = async_save(tmp_path, 1, parts, optimizer)
        checkpoint._Writer = right
        try:
            async_save(tmp_path, 2, parts, optimizer, previous=saving)
        except OSError as error:
            save(tmp_path, 3, parts, optimizer)
            return str(error)

    assert all("No space left" in said for said in launch(on_rank, ranks=2, device="cpu"))
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000003"]


# ---- refused ----------------------------------------------------------------------------------------------------


def fault(match, function, *args, **options):
    with pytest.raises(ValueError, match=match):
        function(*args, **options)


def test_missing_unfinished_truncated_newer(tmp_path):
    model, optimizer = tied(0)
    fault("there is no checkpoint nothing: no such folder", load, tmp_path / "nothing", model)
    fault(r"no complete checkpoint in .*of 0 names there \(none\)", load, tmp_path, model)
    assert latest(tmp_path) is None and latest(tmp_path / "nothing") is None
    old, new = save(tmp_path, 9, model, optimizer), save(tmp_path, 10, model, optimizer)
    assert latest(tmp_path) == new
    manifest = json.loads((new / "checkpoint.json").read_text())
    before = everything([model], optimizer)
    for name, size in manifest["files"].items():
        held = (new / name).read_bytes()
        assert len(held) == size
        (new / name).write_bytes(held[:-1])
        fault(f"{name} is truncated, {size - 1:,} bytes, of {size:,} written; .* is step-00000009", load, new, model)
        (new / name).unlink()
        fault(f"{name} is missing, of {size:,} written", load, new, model)
        assert latest(tmp_path) == old and load(tmp_path, *tied(1))["step"] == 9
        (new / name).write_bytes(held)
    (new / "checkpoint.json").write_text("{")
    fault("its checkpoint.json is damaged", load, new, model)
    (new / "checkpoint.json").unlink()
    fault("has no checkpoint.json, so it was never finished", load, new, model)
    assert latest(tmp_path) == old
    (new / "checkpoint.json").write_text(json.dumps(manifest | {"version": 99}))
    assert latest(tmp_path) == new, "a newer version is not passed over in silence"
    fault("has version 99, .* this reads up to 1: use the checkpoint.py that wrote it", load, tmp_path, model)
    assert differ(everything([model], optimizer), before) == []
    (tmp_path / "step-00000011.writing").mkdir()
    (tmp_path / "step-00000012").mkdir()
    (tmp_path / "step-12.pt").touch()
    assert latest(tmp_path) == new


def test_foreign(tmp_path):
    model, optimizer = tied(0)
    save(tmp_path, 1, model)
    fault("1 difference: it was saved without an optimizer: pass optimizer=None", load, tmp_path, model, optimizer)
    load(tmp_path, model)
    save(tmp_path, 2, model, optimizer)
    before = everything([model], optimizer)
    other, its = tied(1)
    other.layers.append(nn.Linear(6, 6))
    fault("2 differences: layers.2.weight is not in it; layers.2.bias is not in it", load, tmp_path, other, its)
    other.layers = other.layers[:1]
    fault("not the model's, the first of shape", load, tmp_path, other, its)
    fault("layers.1.weight is in it and not in the model", load, tmp_path, other)
    other, its = tied(1)
    other.unused = nn.Parameter(torch.randn(4))
    fault(r"unused is \(3,\) of float32 there and \(4,\) of float32 here", load, tmp_path, other)
    fault(
        r"embedding.weight is \(10, 6\) of float32 there and \(10, 6\) of bfloat16 here",
        load,
        tmp_path,
        Tied().bfloat16(),
    )
    with torch.device("meta"):
        fault("7 of 7 tensors here are on meta: materialize the model first", load, tmp_path, Tied())
    other, _ = tied(1)
    fault("the optimizer had no layers.0.weight", load, tmp_path, other, torch.optim.AdamW(other.parameters()))
    model, split = tied(0, make=two_groups)
    save(tmp_path, 3, model, split)
    model, optimizer = tied(1)
    fault(
        "group 0 of the optimizer holds unused, saved with .*, and embedding.weight, with",
        load,
        tmp_path,
        model,
        optimizer,
    )
    assert differ(everything(*[[x] if i == 0 else x for i, x in enumerate(tied(0))]), before) == []


def test_arguments(tmp_path):
    model, _optimizer = tied(0)
    for step_, keep in ((-1, None), (1.0, None), (True, None), (1, 0), (1, 2.0)):
        fault(f"step={step_!r}, keep_last={keep!r}: a step is", save, tmp_path, step_, model, keep_last=keep)
    fault("cannot be read back without running code from the file", save, tmp_path, 1, model, extra={"x": Path("a")})
    fault("async_save needs a process group", async_save, tmp_path, 1, model)
    other = torch.optim.SGD(Tied().parameters())
    fault("6 of the optimizer's parameters are not the model's", save, tmp_path, 1, model, other)
    assert [*tmp_path.glob("step-*")] == []


def test_all_ranks_raise_the_same(tmp_path):
    """Also what only one rank can know; nobody waits for it."""

    def on_rank():
        parts, optimizer = build(DENSE, dp_shard=2)
        said = []
        for action in (
            lambda: load(tmp_path / "nothing", parts),
            lambda: save(tmp_path / "file" / "x", 1, parts),
            lambda: save(tmp_path, 1, parts, torch.optim.SGD(Tied().parameters()) if dist.get_rank() else optimizer),
            lambda: save(tmp_path, 1, parts, optimizer, {"x": Path("a")}),
            lambda: load(save(tmp_path, 1, parts), [*parts, nn.Linear(2, 2)] if dist.get_rank() else parts),
        ):
            try:
                action()
            except (ValueError, OSError) as error:
                said.append(str(error))
        return said

    (tmp_path / "file").touch()
    one, other = launch(on_rank, ranks=2, device="cpu")
    assert one == other and len(one) == 5 and "weight is not in it; bias is not in it" in one[4], one


# ---- the folder -------------------------------------------------------------------------------------------------


def test_keep_last_and_leftovers(tmp_path):
    model, _optimizer = tied(0)
    (tmp_path / "step-00000003.writing").mkdir(parents=True)
    (tmp_path / "step-00000002.deleted" / "x").mkdir(parents=True)
    (tmp_path / "mine").mkdir()
    for i in (8, 9, 10, 11):
        save(tmp_path, i, model, keep_last=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine", "step-00000010", "step-00000011"]
    save(tmp_path, 5, model, keep_last=1)  # a run wound back deletes nothing that is ahead of it, nor its own
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine", "step-00000005", "step-00000010", "step-00000011"]
    save(tmp_path, 123_456_789, model)
    assert latest(tmp_path).name == "step-123456789"


def test_a_step_saved_again_is_replaced_and_never_missing(tmp_path, monkeypatch):
    model, _optimizer = tied(0)
    path = save(tmp_path, 1, model, extra={"which": "old"})
    monkeypatch.setattr(checkpoint.Path, "rename", _rename_until(2))  # killed between the two renames
    with pytest.raises(BaseException, match="killed"):
        save(tmp_path, 1, model, extra={"which": "new"})
    monkeypatch.undo()
    assert latest(tmp_path).name == "step-00000001.replaced" and load(tmp_path, model)["which"] == "old"
    assert save(tmp_path, 1, model, extra={"which": "new"}) == path == latest(tmp_path)
    assert load(path, model)["which"] == "new" and [p.name for p in tmp_path.iterdir()] == [path.name]


def _rename_until(calls):
    """Path.rename, but the call of this number among those of checkpoints fails."""
    rename, count = Path.rename, iter(range(1, 100))

    def counted(self, target):
        if self.name.startswith("step-") and next(count) == calls:
            raise RuntimeError("killed")
        return rename(self, target)

    return counted


def test_random_state_is_of_as_many_ranks(tmp_path):
    def draw():
        return torch.rand(2).tolist(), random.random()

    def saved():
        model = nn.Linear(1, 1)
        torch.manual_seed(dist.get_rank())
        random.seed(dist.get_rank())
        save(tmp_path, 1, model)
        return draw()

    def loaded(random_state=True):
        model = nn.Linear(1, 1)
        torch.manual_seed(77)
        random.seed(77)
        load(tmp_path, model, random_state=random_state)
        return draw()

    first = launch(saved, ranks=2, device="cpu")
    assert launch(loaded, ranks=2, device="cpu") == first and first[0] != first[1]
    torch.manual_seed(77)
    random.seed(77)
    fresh = draw()
    assert loaded() == fresh and launch(loaded, False, ranks=2, device="cpu") == [fresh] * 2


# ---- Hugging Face -----------------------------------------------------------------------------------------------

LLAMA = {"vocab_size": 64, "dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 36}


def hf_config(config):
    """config.json of it, for transformers."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.dim // config.n_heads,
        "intermediate_size": config.ffn_dim,
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tied,
        "bos_token_id": None,
        "eos_token_id": None,
    }


@pytest.mark.parametrize("is_tied", [False, True])
def test_transformers_loads_what_is_exported(tmp_path, is_tied):
    transformers = pytest.importorskip("transformers")
    config = ModelConfig(**LLAMA, tied=is_tied)
    to_hf, from_hf = partial(to_hf_state_dict, config=config), partial(from_hf_state_dict, config=config)

    def on_rank():
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
        layout = {"pp": 2, "tp": 2} if not is_tied else {"dp_shard": 2, "tp": 2}
        parts, _ = build(config, **layout)
        export_hf(tmp_path / "out", parts, to_hf, hf_config(config), max_file_bytes=12_000)
        try:
            export_hf(tmp_path / "out", parts, to_hf)
        except ValueError as error:
            assert "out is there already" in str(error)
        again, _ = build(config, seed=1, dp_shard=4)
        import_hf(tmp_path / "out", again, from_hf)
        theirs, _ = build(config)
        import_hf(tmp_path / "out", theirs, from_hf)
        return everything(again), everything(theirs)

    for again, theirs in launch(on_rank, device="cpu"):
        assert differ(again, theirs) == []
    torch.manual_seed(3)
    ours = Transformer(config)
    import_hf(tmp_path / "out", ours, from_hf)
    assert differ(everything([ours]), theirs) == [] and (ours.output.weight is ours.tok_embeddings.weight) == is_tied
    hf = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert sum(p.numel() for p in hf.parameters()) == sum(p.numel() for p in ours.parameters())
    tokens_BT = rows(0)
    logits, expected = ours(tokens_BT), hf(tokens_BT).logits
    assert expected.std() > 0.1 and ((logits - expected).norm() / expected.norm()).item() < 1e-5
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(p.name for p in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 3 and files == sorted(set(index["weight_map"].values()))
    assert index["metadata"]["total_size"] == sum(p.nbytes for p in ours.parameters())
    assert ("lm_head.weight" in index["weight_map"]) != is_tied
    # and what transformers writes is read here
    hf.save_pretrained(tmp_path / "theirs")
    back = Transformer(config)
    import_hf(tmp_path / "theirs", back, from_hf)
    assert differ(everything([back]), theirs) == []


def test_export_in_another_dtype_and_to_one_file(tmp_path):
    from safetensors.torch import load_file

    model = nn.Sequential(nn.Linear(3, 5, bias=False), nn.Linear(5, 3, bias=False))
    export_hf(
        tmp_path / "x", model, lambda state: {f"hf.{k}": v.T for k, v in state.items()} | state, dtype=torch.bfloat16
    )
    found = load_file(tmp_path / "x" / "model.safetensors")
    assert [p.name for p in (tmp_path / "x").iterdir()] == ["model.safetensors"] and len(found) == 4
    assert torch.equal(found["hf.0.weight"], model[0].weight.T.bfloat16())


def test_import_refuses(tmp_path):
    from safetensors.torch import save_file

    config = ModelConfig(**LLAMA, tied=True)
    from_hf = partial(from_hf_state_dict, config=config)
    model = Transformer(config)
    before = everything([model])
    fault("0 of 0 safetensors files are missing", import_hf, tmp_path / "nothing", model, from_hf)
    state = to_hf_state_dict(model.state_dict(), config)
    wanted = {k: torch.randn_like(v) for k, v in state.items() if k != "lm_head.weight"}

    def write(tensors, name="model.safetensors"):
        shutil.rmtree(tmp_path / "in", ignore_errors=True)
        (tmp_path / "in").mkdir()
        save_file(tensors, tmp_path / "in" / name)

    write({k: v for k, v in wanted.items() if k != "model.norm.weight"})
    fault("1 faults: norm.weight is not in it", import_hf, tmp_path / "in", model, from_hf)
    write(wanted | {"model.norm.weight": torch.randn(33)})
    fault(r"norm.weight is \(33,\) in model.norm.weight and \(32,\) here", import_hf, tmp_path / "in", model, from_hf)
    write(wanted | {"lm_head.weight": torch.randn(64, 32)})
    fault(
        "tok_embeddings.weight and output.weight are one tensor here, and .* differ",
        import_hf,
        tmp_path / "in",
        model,
        from_hf,
    )
    write(wanted, "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (tmp_path / "in" / "model.safetensors.index.json").write_text(json.dumps(index))
    fault("1 of 2 safetensors files are missing: model-00002-of-00002", import_hf, tmp_path / "in", model, from_hf)
    assert differ(everything([model]), before) == []
    write(wanted | {"lm_head.weight": wanted["model.embed_tokens.weight"].clone()})
    import_hf(tmp_path / "in", model, from_hf)
    assert torch.equal(model.output.weight, wanted["model.embed_tokens.weight"])
