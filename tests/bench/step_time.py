"""A training step on 4 ranks beside one process and the ideal: each layout as `train` composes it, and by hand.

python tests/bench/step_time.py [--rounds 3] [--steps 4] [--only tp pp]      a minute a round, on a quiet machine

The ways take turns, so that a busy machine slows all of them. "× one" is how many steps the ranks make while one process
makes one: cores is the most that it can be, ranks when there are as many cores. CPU seconds are those of all ranks in a
step, by which noise moves less than by time. Large tensors lie in huge pages: without, a tenth of FSDP's time is the
kernel's, which hands out each gathered block's memory again in pages of 4 kB.
"""

import argparse
import math
import os
import statistics
import time
from dataclasses import replace
from functools import partial

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # torch reads it once, so before it is imported

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from minititan.context_parallel import apply_context_parallel, shard_sequence
from minititan.data import ByteCorpus, batches
from minititan.data_parallel import BucketedAllReduceByHand, apply_ddp
from minititan.fsdp import FlatParameterByHand, FullyShardByHand, apply_fsdp
from minititan.grad_clip import clip_grad_norm_
from minititan.lab.launch import launch
from minititan.meta_init import materialize, on_meta
from minititan.model import ModelConfig, Transformer
from minititan.optimizer import build_adamw
from minititan.regional_compile import compile_blocks
from minititan.tensor_parallel import apply_tensor_parallel_by_hand, vocab_parallel_cross_entropy_by_hand
from minititan.train import Job, ParallelConfig, TrainConfig, check

MODEL = ModelConfig(2048, dim=256, n_layers=8, n_heads=8, n_kv_heads=4, ffn_dim=688)
CONFIG = TrainConfig(model=MODEL, global_batch=8, seq_len=256)


def composed(**options):
    """A step of train's, with these options; those of ParallelConfig among them."""
    degrees = {name: options.pop(name) for name in [*options] if hasattr(ParallelConfig, name)}
    config = replace(CONFIG, parallel=ParallelConfig(**{"dp_shard": 1} | degrees), **options)
    dims = check(config, dist.get_world_size())
    dims.build_mesh("cpu")
    job, corpus = Job(config, dims, torch.device("cpu")), ByteCorpus()

    def step(i: int) -> float:
        loss = job.forward_backward(job.microbatches(corpus, i)).item()
        clip_grad_norm_(job.parameters, config.max_norm, dims.axis("pp") if dims.pp > 1 else None)
        job.update(config.lr)
        return loss

    return step


def plain(wrap, share: str = "rows", **options):
    """The shortest loop around `wrap(model, mesh)`. What ranks share: "rows" of the batch, "tokens" of each row, or
    "weights", where all see the whole batch."""
    rank, n = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (n,), mesh_dim_names=("ranks",))
    model = materialize(on_meta(lambda: Transformer(MODEL)), "cpu", CONFIG.seed)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    wrapped = wrap(model, mesh, **options)
    run = wrapped if isinstance(wrapped, nn.Module) else model
    parts = [p for name, p in model.named_parameters() if not isinstance(p, DTensor) and p.shape != shapes.get(name)]
    optimizer, corpus = build_adamw(model.parameters(), lr=CONFIG.lr), ByteCorpus()

    def step(i: int) -> float:
        rows = (rank, n) if share == "rows" else (0, 1)
        tokens_BT, targets_BT = batches(corpus, CONFIG.global_batch, CONFIG.seq_len, i, *rows, CONFIG.seed)
        if share == "tokens":
            tokens_BT, targets_BT = shard_sequence(tokens_BT, mesh), shard_sequence(targets_BT, mesh)
        logits_BTV = run(tokens_BT)
        if share == "weights":
            loss = vocab_parallel_cross_entropy_by_hand(logits_BTV, targets_BT, MODEL.vocab_size)
        else:
            loss = F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())
        loss.backward()
        norm = clip_grad_norm_(parts, math.inf, mesh) if parts else 0  # what only this rank has; inf: only measure
        norm = (norm**2 + clip_grad_norm_(set(model.parameters()) - set(parts), math.inf) ** 2) ** 0.5
        nn.utils.clip_grads_with_norm_([*model.parameters()], CONFIG.max_norm, norm.float())
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


class AllToAllUnit(FlatParameterByHand.unit):
    """gloo's reduce_scatter takes thrice the CPU time of sending each rank its part and adding the parts up there."""

    def sum_and_scatter(self, send_nk):
        parts_nk = torch.empty_like(send_nk)
        dist.all_to_all_single(parts_nk.view(-1), send_nk.view(-1), group=self.shard_group)
        return parts_nk.sum(0)


class AllToAllByHand(FlatParameterByHand):
    unit = AllToAllUnit


def tp_by_hand(model: nn.Module, mesh: DeviceMesh, compiled: bool, **options) -> nn.Module:
    apply_tensor_parallel_by_hand(model, mesh.get_group(), **options)
    return compile_blocks(model) if compiled else model


def cp_by_hand(model: nn.Module, mesh: DeviceMesh, method: str, compiled: bool = False) -> BucketedAllReduceByHand:
    """Tokens are cut, weights are whole on every rank: their gradients are summed as data parallel's are."""
    apply_context_parallel(model, mesh, method)
    return BucketedAllReduceByHand(compile_blocks(model) if compiled else model, mesh)


ONE = "one process"
WAYS = {  # (layout, way): what makes a step on a rank; a way that ends in "compiled" has one process compiled beside it
    (ONE, "train"): partial(composed),
    (ONE, "train, compiled"): partial(composed, compile="inductor"),
    ("dp_replicate 4", "train"): partial(composed, dp_replicate=4),
    ("dp_replicate 4", "DDP"): partial(plain, apply_ddp),
    ("dp_replicate 4", "buckets by hand"): partial(plain, BucketedAllReduceByHand),
    ("dp_shard 4", "train"): partial(composed, dp_shard=4),
    ("dp_shard 4", "native, kept gathered"): partial(plain, apply_fsdp, reshard_after_forward=False),
    ("dp_shard 4", "by hand"): partial(plain, FullyShardByHand),
    ("dp_shard 4", "flat by hand"): partial(plain, FlatParameterByHand),
    ("dp_shard 4", "flat, kept gathered"): partial(plain, FlatParameterByHand, reshard_after_forward=False),
    ("dp_shard 4", "flat, kept, all-to-all"): partial(plain, AllToAllByHand, reshard_after_forward=False),
    ("tp 4", "train"): partial(composed, tp=4),
    ("tp 4", "train, loss parallel"): partial(composed, tp=4, loss_parallel=True),
    ("tp 4", "by hand"): partial(plain, tp_by_hand, share="weights", compiled=False),
    ("tp 4", "by hand, compiled"): partial(plain, tp_by_hand, share="weights", compiled=True),
    ("pp 4", "train, 1f1b"): partial(composed, pp=4, accumulate=8),
    ("pp 4", "train, zbv"): partial(composed, pp=4, accumulate=8, schedule="zbv"),
    ("cp 4", "train, ring"): partial(composed, cp=4),
    ("cp 4", "train, ulysses"): partial(composed, cp=4, cp_method="ulysses"),
    ("cp 4", "buckets, ring"): partial(plain, cp_by_hand, share="tokens", method="ring"),
    ("cp 4", "buckets, all_gather"): partial(plain, cp_by_hand, share="tokens", method="all_gather"),
    ("cp 4", "buckets, ulysses"): partial(plain, cp_by_hand, share="tokens", method="ulysses"),
}


def measure(make, steps: int) -> tuple[list[float], float, float]:
    """On a rank: seconds of each step, CPU seconds that it spent in one, the loss of the last; after two to warm up."""
    step = make()
    for i in range(2):
        step(i)
    dist.barrier()
    cpu, times = time.process_time(), []
    for i in range(2, 2 + steps):
        began = time.perf_counter()
        loss = step(i)
        times.append(time.perf_counter() - began)
    dist.barrier()
    return times, (time.process_time() - cpu) / steps, loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="that are measured in a round")
    parser.add_argument("--only", nargs="*", default=[""], help="ways whose name holds one of these")
    options = parser.parse_args()
    ways = {way: make for way, make in WAYS.items() if way[0] == ONE or any(o in " ".join(way) for o in options.only)}
    times, cpu, losses = ({way: [] for way in ways} for _ in range(3))
    for _ in range(options.rounds):
        for way, make in ways.items():
            told = launch(measure, make, options.steps, ranks=1 if way[0] == ONE else 4, timeout=300)
            seconds, cpu_seconds, loss = zip(*told, strict=True)
            times[way] += [max(step) for step in zip(*seconds, strict=True)]
            cpu[way].append(sum(cpu_seconds))
            losses[way].append(statistics.mean(loss))  # plain: of each rank's tokens; train: of all, on each
    same = losses[ONE, "train"][0]
    worst = max(abs(loss / same - 1) for found in losses.values() for loss in found)
    if worst > 1e-4:
        raise SystemExit(f"losses differ by {worst:.1e} of {same:.4f}: {losses}")
    print(
        f"{MODEL.n_layers} layers of dim {MODEL.dim}, {CONFIG.global_batch} × {CONFIG.seq_len} tokens in a step,",
        end=" ",
    )
    print(f"float32, {os.cpu_count()} cores, one thread a rank, {options.rounds} × {options.steps} steps;")
    print(f"the loss after {1 + options.steps} steps is {same:.4f} in all, to {worst:.0e}")
    print(f"{'':40}{'min s':>8}{'median':>8}{'max':>8}{'× one':>8}{'CPU s':>8}")
    for way, seconds in times.items():
        alone = statistics.median(times[ONE, "train, compiled" if way[1].endswith("compiled") else "train"])
        middle = statistics.median(seconds)
        row = f"{min(seconds):8.3f}{middle:8.3f}{max(seconds):8.3f}{alone / middle:8.2f}{statistics.median(cpu[way]):8.2f}"
        print(f"{way[0]:16}{way[1]:24}{row}")


if __name__ == "__main__":
    main()
