"""The composed training loop: a Llama on text, split over ranks by numbers alone.

    torchrun --nproc-per-node 8 -m minititan.train --parallel.dp-shard 2 --parallel.tp 2 --steps 100
    python -m minititan.train --preset debug --model.dim 256 --model.n-layers 8     # one process
    launch(train, TrainConfig(steps=20), ranks=8)                                   # from a notebook
    python -m minititan.train --dry-run --world-size 512 --preset llama3-405b ...   # one rank, nothing computed

`--preset` (debug, llama3-1b, llama3-8b, ...) gives the model's sizes, and each --model.x changes one of them.

What happens in a step, on each rank:

    batches ──> rows of this dp rank ──> per microbatch: forward, loss, backward ──> clip ──> AdamW
                                         (FSDP gathers, reduces)                    (global norm)

The loss. A rank's share is the *sum* of its tokens' cross entropies over the number of *all* ranks' valid tokens in
the step, so that shares simply add up, whatever the batch, the padding or the accumulation. FSDP averages gradients
over its ranks, so the share is multiplied by their number before backward. Nothing is rescaled after it.

Everything shown is global: the loss is summed over the ranks that hold different tokens, the norm over all shards.
Every layout starts from the same weights (meta_init) and reads the same rows (data), so all layouts give one curve.

With --fault-tolerance.lighthouse this job is one of several that train one model (fault_tolerance): each takes its part
of the rows, gradients and loss are means over the jobs that are alive, and a step in which one dies is done again. Every
job has its own csv, logs and checkpoints; global_batch stays the number of sequences of all jobs together.

From top to bottom: the configuration; `parallelize`, the order in which techniques compose; `check`, what cannot work;
`Job`, what one rank trains and how it goes forward and backward; `train`, the loop; the command line.
"""

import argparse
import contextlib
import importlib.util
import json
import math
import os
import socket
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import torch
import torch.distributed as dist
import torch.nn.functional as F
import tyro
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from tqdm import tqdm

from minititan.activation_checkpoint import SAVED, SUMS, apply_activation_checkpoint
from minititan.async_tensor_parallel import apply_async_tensor_parallel, check_async_tensor_parallel
from minititan.checkpoint import async_save, latest, load
from minititan.context_parallel import apply_context_parallel, check_context_parallel, shard_sequence
from minititan.data import ByteCorpus, batches
from minititan.expert_parallel import (
    apply_expert_parallel,
    check_expert_parallel,
    shard_experts,
    update_expert_bias,
)
from minititan.fault_tolerance import FaultTolerantReplica, torchrun_store
from minititan.float8 import convert_to_float8, scales_once_a_step, send_float8_as_bytes
from minititan.fsdp import apply_fsdp
from minititan.grad_clip import clip_grad_norm_
from minititan.meta_init import materialize, on_meta
from minititan.metrics import Meter, check_sinks, flops_per_token, log_to
from minititan.model import PRESETS, ModelConfig, Transformer
from minititan.optimizer import build_adamw, warmup_stable_decay
from minititan.parallel_dims import ParallelDims
from minititan.pipeline_parallel import SCHEDULES, build_schedule, check_pipeline_parallel, split_model, stages_of_ranks
from minititan.regional_compile import compile_blocks
from minititan.tensor_parallel import apply_tensor_parallel, check_tensor_parallel

IGNORE = -100  # a target that is no token: padding
NOT_IN_FLOAT8 = ("output", "gate")  # whose rounding would go straight into the loss, or into the choice of experts


@dataclass(frozen=True)
class ParallelConfig:
    """Ranks on each axis; -1 takes those that are left."""

    dp_replicate: int = 1
    dp_shard: int = -1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1


@dataclass(frozen=True)
class FaultToleranceConfig:
    """This job (a torchrun) as one of several that train one model; a job that dies and comes back heals from a peer."""

    lighthouse: str | None = None  # where all meet, http://host:29510 of `torchft_lighthouse --min_replicas 1`
    groups: int = 2  # jobs; none begins before all are there, and those that are left go on
    name: str = "group_0"  # another one in each job


@dataclass(frozen=True)
class TrainConfig:
    """Everything that a run depends on. Runs that differ in `parallel` only have one and the same curve."""

    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    fault_tolerance: FaultToleranceConfig = field(default_factory=FaultToleranceConfig)
    model: ModelConfig = field(default_factory=lambda: PRESETS["debug"])
    steps: int = 100
    global_batch: int = 16  # sequences in an optimizer step, over all ranks and microbatches
    seq_len: int = 128
    accumulate: int = 1  # microbatches in an optimizer step
    data: str | None = None  # a file or folder of text; None: the Python standard library's source
    seed: int = 0
    lr: float = 1e-2  # suits the debug model; 8B parameters want 3e-4
    warmup_steps: int = 20  # lr rises linearly from 0
    decay_steps: int | None = None  # at the end, while lr falls to 0; None: all after the warm-up, 0: lr never falls
    weight_decay: float = 0.1
    max_norm: float = 1.0  # gradients are scaled down to this global norm
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"  # of parameters, gradients and AdamW's state
    compute_dtype: Literal["float32", "bfloat16"] | None = None  # FSDP gathers and computes in it
    schedule: str = "1f1b"  # with pp: one of pipeline_parallel.SCHEDULES; accumulate is its number of microbatches
    stages_per_rank: int | None = None  # with pp: None is 1, or 2 for a schedule that wants more
    cp_method: Literal["ring", "all_gather", "ulysses"] = "ring"  # with cp
    sequence_parallel: bool = False  # with tp: norms and residuals on 1/tp of the tokens; tp divides seq_len
    loss_parallel: bool = False  # with tp: the loss of logits that stay cut by vocabulary
    async_tensor_parallel: bool = False  # with tp: sequence parallel whose messages travel while chunks are multiplied
    float8: Literal["none", "tensorwise", "rowwise", "rowwise_with_gw_hp"] = "none"  # linears but output and routers
    float8_all_gather: bool = False  # FSDP gathers tensorwise float8 weights in 8 bits
    compile: Literal["none", "inductor", "aot_eager"] = "none"  # each block, and the loss; aot_eager traces only
    activation_checkpoint: Literal["none", "full", "every_other", "per_op"] = "none"  # what backward computes again
    eval_batches: int = 4  # held-back batches, read before the first and after the last step
    log_every: int = 10  # steps between lines, where there is no terminal for a bar; 0: no lines
    csv: str | None = None  # a file that gets a row a step
    log: tuple[Literal["tensorboard", "wandb", "csv"], ...] = ()  # who else gets the rows, in log_folder
    log_folder: str = "runs"
    checkpoint: str | None = (
        None  # a folder: the run goes on from its latest checkpoint, of any layout, and adds its own
    )
    checkpoint_every: int = 100  # steps; written while training goes on; the last step is always saved
    keep_last: int = 3  # checkpoints
    stop_at: int | None = None  # ends before this step, to be resumed; steps goes on to shape the learning rate


@dataclass
class TrainResult:
    """Plain data, filled as training goes on. Losses (nats a token) and norms are global, one a step."""

    layout: str
    n_parameters: int
    held_back_first: float = math.nan
    held_back_last: float = math.nan
    tokens_per_s: float = math.nan  # of all ranks together, in the median step
    peak_memory_bytes: int = 0  # of the rank that held most
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    step_times_s: list[float] = field(default_factory=list)

    def summary(self) -> dict:
        """What the command line prints last, as one line of JSON."""
        fields = {name: value for name, value in asdict(self).items() if not isinstance(value, list)}
        if not self.losses:  # a group that came back when its peers had done all
            return {"steps": 0} | fields
        times = {"steps": len(self.losses), "step_time_s": statistics.median(self.step_times_s)}
        return times | {"loss_first": self.losses[0], "loss_last": self.losses[-1]} | fields


def parallelize(model: nn.Module, dims: ParallelDims, config: TrainConfig) -> nn.Module:
    """The whole order of composition, on a model on meta, in place.

    float8 is first: it replaces linear layers. Tensor parallel cuts their weights, which all others wrap; experts and
    context parallel replace what lies between those. Activation checkpointing wraps the blocks that they have left, and
    compile makes one graph of each. FSDP is last, because it cuts what is on a rank, module by module as it finds them.
    A pipeline stage keeps its parameters gathered: many microbatches are under way at once.
    """
    tp_mesh = dims.axis("tp") if dims.tp > 1 else None
    if config.float8 != "none":
        convert_to_float8(model, config.float8, NOT_IN_FLOAT8, config.float8_all_gather, tp=dims.tp)
    if tp_mesh and config.async_tensor_parallel:
        apply_async_tensor_parallel(model, tp_mesh, config.loss_parallel)
    elif tp_mesh:
        flags = {"sequence_parallel": config.sequence_parallel, "loss_parallel": config.loss_parallel}
        apply_tensor_parallel(model, tp_mesh, **flags)
    if dims.ep > 1:
        apply_expert_parallel(model, dims.axis("ep"), tp_mesh, config.sequence_parallel)
    if dims.cp > 1:
        apply_context_parallel(model, dims.axis("cp"), config.cp_method)
    if config.activation_checkpoint != "none":
        in_tiles = dims.cp > 1 and config.cp_method != "ulysses"
        apply_activation_checkpoint(model, config.activation_checkpoint, save=SUMS if in_tiles else SAVED)
    if config.compile != "none":
        compile_blocks(model, backend=config.compile)
    compute_dtype = getattr(torch, config.compute_dtype) if config.compute_dtype else None
    if dims.size("hsdp") > 1 or dims.ep > 1 or compute_dtype:
        replicated = "hsdp" if dims.dp_replicate > 1 else "fsdp"
        if dims.ep > 1:
            options = {"mp_policy": MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)}
            shard_experts(model, dims.axis(f"e{replicated}"), **(options if compute_dtype else {}))
        reshard = False if dims.pp > 1 else None
        apply_fsdp(model, dims.axis(replicated), param_dtype=compute_dtype, reshard_after_forward=reshard)
        if config.float8_all_gather:
            send_float8_as_bytes(model)
    return model


def check(config: TrainConfig, world_size: int) -> ParallelDims:
    """The layout on world_size ranks, or a ValueError that says why not. Makes no group and allocates nothing."""
    model, dims = config.model, ParallelDims(**asdict(config.parallel), world_size=world_size)
    for name, hint in get_type_hints(TrainConfig).items():
        choices = next((get_args(kind) for kind in (hint, *get_args(hint)) if get_origin(kind) is Literal), None)
        value = getattr(config, name)
        if choices and value is not None and not isinstance(value, tuple) and value not in choices:
            raise ValueError(f"{name}={value!r} must be one of {', '.join(map(repr, choices))}")
    if dims.pp > 1:
        _check_pipeline(config, dims)
    if model.n_experts:
        check_expert_parallel(dims.ep, model.n_experts, dims.tp, config.seq_len // dims.cp)
        if dims.tp > 1 and dims.ep == 1:
            raise ValueError(
                f"tp {dims.tp} with {model.n_experts} experts: the tensor-parallel ranks share experts as ep ranks do, so "
                f"set ep to a divisor of both {model.n_experts} and dp_shard × cp × tp = {dims.size('efsdp')}, above 1"
            )
    elif dims.ep > 1:
        raise ValueError(f"ep {dims.ep} spreads experts, and the model has n_experts 0: set ep to 1, or n_experts")
    cut_seq_len = config.seq_len // dims.cp
    heads = {name: getattr(model, name) // dims.tp for name in ("n_heads", "n_kv_heads")}
    check_context_parallel(dims.cp, seq_len=config.seq_len, method=config.cp_method, **heads)
    divided = {name: getattr(model, name) for name in ("n_heads", "n_kv_heads", "ffn_dim", "vocab_size")}
    check_tensor_parallel(dims.tp, **divided, seq_len=cut_seq_len if config.sequence_parallel else None)
    for name in (
        "steps",
        "global_batch",
        "seq_len",
        "accumulate",
        "eval_batches",
        "lr",
        "max_norm",
        "checkpoint_every",
    ):
        if not 0 < (value := getattr(config, name)) < math.inf:
            raise ValueError(f"{name}={value} must be above 0")
    if config.global_batch % (pieces := dims.size("dp") * config.accumulate):
        raise ValueError(
            f"global_batch {config.global_batch} cannot be cut into dp_replicate {dims.dp_replicate} × dp_shard "
            f"{dims.dp_shard} × accumulate {config.accumulate} = {pieces} equal microbatches: "
            f"use global_batch {math.ceil(config.global_batch / pieces) * pieces}, or lower one of the others."
        )
    if config.seq_len > model.max_seq_len:
        raise ValueError(f"seq_len {config.seq_len} exceeds model.max_seq_len {model.max_seq_len}: change one")
    if model.vocab_size < ByteCorpus.vocab_size:
        raise ValueError(f"model.vocab_size {model.vocab_size} must be {ByteCorpus.vocab_size} or more: bytes")
    if config.log:
        check_sinks(config.log)
    _check_pairs(config, dims, cut_seq_len)
    if config.fault_tolerance.lighthouse:
        _check_fault_tolerance(config, dims)
    return dims


def _check_pipeline(config: TrainConfig, dims: ParallelDims) -> None:
    model, splits = config.model, SCHEDULES.get(config.schedule, SCHEDULES["1f1b"]).splits_backward
    rows = config.global_batch // dims.size("dp")
    check_pipeline_parallel(config.schedule, dims.pp, config.accumulate, config.stages_per_rank, model.n_layers, rows)
    whole = ", ".join(name for name, kind in SCHEDULES.items() if not kind.splits_backward)
    if config.activation_checkpoint == "per_op" and splits:
        raise ValueError(
            f"schedule {config.schedule} goes backward twice through a graph, and activation_checkpoint per_op allows "
            f"one pass: take full or every_other, or use one of {whole}"
        )
    if config.compile != "none" and splits:
        raise ValueError(
            f"schedule {config.schedule} splits backward, and compile {config.compile} makes one piece of each block's: "
            f"use one of {whole}"
        )
    if model.n_experts and splits:
        raise ValueError(
            f"schedule {config.schedule} splits backward, and {model.n_experts} experts, sharded apart, would miss the "
            f"half with their gradients: use one of {whole}"
        )
    if (config.sequence_parallel or config.async_tensor_parallel) and dims.tp > 1 and dims.cp > 1:
        raise ValueError(
            f"pp {dims.pp} × cp {dims.cp} × tp {dims.tp} with sequence_parallel: a stage gets 1/tp of this rank's tokens "
            "and cannot tell where they stand in a sequence that cp has cut too; leave out one of the four"
        )
    if model.tied:
        raise ValueError(
            f"tied=True makes one matrix of the embedding, on the first of {dims.pp} stages, and of the output, on the "
            "last: take tied=False, or pp 1"
        )


def _check_pairs(config: TrainConfig, dims: ParallelDims, cut_seq_len: int) -> None:
    """async_tensor_parallel, float8 and compile, each beside the others."""
    model = config.model
    if config.async_tensor_parallel and dims.tp > 1:
        sizes = {name: getattr(model, name) for name in ("n_heads", "n_kv_heads", "ffn_dim", "vocab_size")}
        check_async_tensor_parallel(dims.tp, **sizes, seq_len=cut_seq_len)
        others = {"float8": config.float8 != "none", f"{model.n_experts} experts": bool(model.n_experts)}
        if refused := [name for name, there in others.items() if there]:
            raise ValueError(
                f"async_tensor_parallel multiplies by the rows of dense matrices itself, so tp {dims.tp} with "
                f"{' and '.join(refused)} would drop them: use sequence_parallel"
            )
    if config.float8 != "none":
        rows = config.global_batch // (dims.size("dp") * config.accumulate)
        if (tokens := rows * cut_seq_len) % 16:
            raise ValueError(
                f"float8 sums over the tokens of a microbatch in steps of 16, and {rows} sequences × {cut_seq_len} tokens "
                f"are {tokens}: change seq_len, global_batch or accumulate"
            )
        if config.float8_all_gather and dims.size("hsdp") == 1:
            raise ValueError(
                "float8_all_gather is about what FSDP gathers, and dp_replicate × dp_shard × cp is 1: leave it out"
            )
        on_meta(lambda: convert_to_float8(
            Transformer(model), config.float8, NOT_IN_FLOAT8, config.float8_all_gather, tp=dims.tp
        ))  # fmt: skip
    elif config.float8_all_gather:
        raise ValueError("float8_all_gather gathers what float8 has made, and float8 is 'none': set it to 'tensorwise'")
    if config.compile != "none":
        inside = {"cp": dims.cp, "ep": dims.ep, "async_tensor_parallel, tp": dims.tp * config.async_tensor_parallel}
        if axes := [f"{name} {n}" for name, n in inside.items() if n > 1]:
            raise ValueError(
                f"compile {config.compile} makes one graph of a block, and with {' × '.join(axes)} its ranks exchange "
                "messages one by one inside of it: compile with dp_replicate, dp_shard, tp and pp, or leave it out"
            )
        if dims.tp > 1 and config.activation_checkpoint in ("full", "every_other"):
            raise ValueError(
                f"compile {config.compile} with tp {dims.tp} cannot compute whole blocks again, and activation_checkpoint is "
                f"{config.activation_checkpoint}: take per_op, or compile none"
            )


def _check_fault_tolerance(config: TrainConfig, dims: ParallelDims) -> None:
    groups, n_experts = config.fault_tolerance.groups, config.model.n_experts
    if groups < 2:
        raise ValueError(f"fault_tolerance.groups {groups}: nobody is left to heal from; 2 or more, or no lighthouse")
    for what, why in {
        f"pp {dims.pp}": dims.pp > 1 and "a pipeline's messages would wait for a rank that has given up the step",
        f"{n_experts} experts": n_experts and "their biases follow the load of one group, so that groups would differ",
        "float8_all_gather": config.float8_all_gather and "the scales of a state that has healed would be the old ones",
    }.items():
        if why:
            raise ValueError(f"fault_tolerance with {what}: {why}; leave out one of the two")
    pieces = math.lcm(*range(1, groups + 1)) * dims.size("dp") * config.accumulate
    if config.global_batch % pieces:
        raise ValueError(
            f"global_batch {config.global_batch} must be cut among 1 to {groups} groups, whoever is left, each of dp "
            f"{dims.size('dp')} × accumulate {config.accumulate}: use a multiple of {pieces}"
        )
    if not importlib.util.find_spec("torchft"):
        raise ValueError("fault_tolerance needs torchft, which is not installed: pip install 'minititan[ft]'")


def lr_at(step: int, config: TrainConfig) -> float:
    """Learning rate of step 0, 1, ..: linear warm-up, a plateau if decay_steps leaves one, then linear to 0."""
    warmup_steps = min(config.warmup_steps, config.steps)  # a trial run of a few steps only warms up
    rest = config.steps - warmup_steps
    decay_steps = rest if config.decay_steps is None else min(config.decay_steps, rest)
    return config.lr * warmup_stable_decay(config.steps, warmup_steps, decay_steps)(step)


def cross_entropy_sum(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Sum over valid tokens, in float32 or better."""
    logits_NV = logits_BTV.flatten(0, 1).to(torch.promote_types(logits_BTV.dtype, torch.float32))
    loss = F.cross_entropy(logits_NV, targets_BT.flatten(), ignore_index=IGNORE, reduction="sum")
    return loss.to_local() if isinstance(loss, DTensor) else loss  # whole on every rank


def check_finite(step: int, config: TrainConfig, losses: list[float], **values: float) -> None:
    for name, value in values.items():
        if not math.isfinite(value):
            computing = f", computing in {config.compute_dtype}" if config.compute_dtype else ""
            raise FloatingPointError(
                f"step {step}: the {name} is {value}. Stopped before the optimizer step, so the parameters are those "
                f"that step {step} began with. Losses before: {[round(loss, 3) for loss in losses[-3:]]}. Try a lower lr "
                f"(now {lr_at(step, config):.3g}, at most {config.lr:.3g}), more warmup_steps (now "
                f"{config.warmup_steps}), or a wider dtype (now {config.dtype}{computing})."
            )


class Job:
    """What one rank trains: its parts of the model, their optimizer, and a step's way forward and backward.

    make_real: what gives the parts on meta their values, as `materialize(part, device, seed)`.
    """

    def __init__(self, config: TrainConfig, dims: ParallelDims, device: torch.device, make_real=materialize):
        self.config, self.dims, self.device = config, dims, device
        self.loss_group = dims.axis("loss").get_group()
        self.n_averaged = dims.size("hsdp")  # FSDP takes the mean gradient over these ranks; times this it is the sum
        self.corpus_rank = dims.axis("dp").get_local_rank(), dims.size("dp")

        model = on_meta(lambda: Transformer(config.model).to(getattr(torch, config.dtype)))
        self.n_parameters = sum(p.numel() for p in model.parameters())
        self.parts = [model]  # of a pipeline: this rank's stages
        if dims.pp > 1:
            placement = stages_of_ranks(config.schedule, dims.pp, config.stages_per_rank)
            n_stages = sum(map(len, placement))
            self.parts = [split_model(model, n_stages, stage) for stage in placement[dims.axis("pp").get_local_rank()]]
        for part in self.parts:
            parallelize(part, dims, config)
            make_real(part, device, config.seed)
        self.parameters = [p for part in self.parts for p in part.parameters()]
        self.optimizer = build_adamw(self.parameters, lr=config.lr, weight_decay=config.weight_decay)
        for part in self.parts if config.float8_all_gather else ():
            scales_once_a_step(part, self.optimizer)
        modules = [module for part in self.parts for module in part.modules()]
        self.routers = [module for module in modules if hasattr(module, "sequence_weight")]
        for router in self.routers:
            router.sequence_weight = self.n_averaged / config.global_batch

        compiles = config.compile != "none" and not config.loss_parallel
        self.loss_sum = torch.compile(cross_entropy_sum, backend=config.compile) if compiles else cross_entropy_sum
        self.replica: FaultTolerantReplica | None = None  # see join_peers
        self.pipeline, self.stage_inputs = None, {}
        if dims.pp > 1:
            if dims.cp == 1:  # sequence parallel stages cannot count the tokens; with cp a hook knows the places
                self.stage_inputs["positions_T"] = torch.arange(config.seq_len, device=device)
            axis = dims.axis("pp")
            self.pipeline = build_schedule(self.parts, config.schedule, config.accumulate, self.loss_share, axis)

    def loss_share(self, logits_BTV: Tensor, targets_BT: Tensor, divisor: Tensor | int = 1) -> Tensor:
        return self.loss_sum(logits_BTV, targets_BT) / divisor

    def join_peers(self, first: int) -> None:
        """Makes this job one of several that train one model, at step `first`."""
        config, store = self.config.fault_tolerance, None
        if dist.get_rank() == 0:
            store = dist.TCPStore(socket.gethostname(), 0, is_master=True, wait_for_workers=False)
        place = [(store.host, store.port) if store else None]
        dist.broadcast_object_list(place, device=self.device)
        store = store or dist.TCPStore(*place[0], is_master=False)
        where = {"name": config.name, "lighthouse": config.lighthouse, "store": store}
        where |= {"peer_timeout": 60.0, "quorum_timeout": 600.0, "work_timeout": 600.0}
        self.replica = FaultTolerantReplica(self.parts[0], self.optimizer, **where)
        self.replica.step = first
        self.replica.manager.load_state_dict({"step": first, "batches_committed": 0})  # who is behind heals

    def microbatches(self, text: ByteCorpus, step: int, share: tuple[int, int] = (0, 1)) -> list[tuple[Tensor, Tensor]]:
        """This rank's (tokens_BT, targets_BT) of one step. share: this group's number, and of how many."""
        config, (rank, n_ranks) = self.config, self.corpus_rank
        place = share[0] * n_ranks + rank, share[1] * n_ranks
        rows = batches(text, config.global_batch, config.seq_len, step, *place, config.seed)
        if self.dims.cp > 1:
            rows = [shard_sequence(x_BT, self.dims.axis("cp")) for x_BT in rows]
        n_pieces = 1 if self.pipeline else config.accumulate  # a pipeline cuts them itself
        return list(zip(*(x_BT.to(self.device).chunk(n_pieces) for x_BT in rows), strict=True))

    def forward_backward(self, pieces: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Leaves the gradients of one step in the parameters; returns its global loss, float64."""
        with loss_parallel():  # of logits that are DTensors, others take the plain way
            n_valid = sum((targets_BT != IGNORE).sum() for _, targets_BT in pieces)
            dist.all_reduce(n_valid, group=self.loss_group)
            divisor = n_valid.double() / self.n_averaged  # int / int would be float32
            loss = torch.zeros((), dtype=torch.float64, device=self.device)
            for left, (tokens_BT, targets_BT) in zip(reversed(range(len(pieces))), pieces, strict=True):
                if self.pipeline:
                    loss += self.pipeline.step(tokens_BT, targets_BT, {"divisor": divisor}, **self.stage_inputs)
                    continue
                (model,) = self.parts
                if isinstance(model, FSDPModule):
                    model.set_is_last_backward(left == 0)
                    model.set_requires_all_reduce(left == 0)  # to shards each time, across replicas once
                share = self.loss_share(model(tokens_BT), targets_BT, divisor)
                share.backward()
                loss += share.detach()
            loss /= self.n_averaged
            dist.all_reduce(loss, group=self.loss_group)
            if self.replica:
                self.replica.mean(loss)  # as the gradients are already
            return loss

    @torch.no_grad()
    def held_back_loss(self, corpus: ByteCorpus) -> float:
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        with loss_parallel():
            for i in range(self.config.eval_batches):
                for tokens_BT, targets_BT in self.microbatches(corpus.held_back, i):
                    total[0] += (
                        self.pipeline.eval(tokens_BT, targets_BT, **self.stage_inputs)
                        if self.pipeline
                        else self.loss_share(self.parts[0](tokens_BT), targets_BT)
                    )
                    total[1] += (targets_BT != IGNORE).sum()
        dist.all_reduce(total, group=self.loss_group)
        return (total[0] / total[1]).item()

    def update(self, lr: float) -> bool:
        """One optimizer step on the gradients that are there, which it drops; then experts' biases. False: a peer died."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        sound = self.replica.commit() if self.replica else self.optimizer.step() or True
        self.optimizer.zero_grad()
        if self.routers:
            spread = [self.dims.axis("loss"), *([self.dims.axis("tp")] if self.dims.tp > 1 else [])]
            update_expert_bias(nn.ModuleList(self.parts), *spread)
        return sound


Watch = Callable[[str, int, nn.Module], object]


def train(config: TrainConfig, watch: Watch = lambda *_: None) -> TrainResult:
    """Trains in the default process group, which must exist; every rank of it calls this with the same config.

    watch: called on each rank for each part of the model there (one, or its stages of a pipeline), with the name of the
    moment: ("gradients", step, part) once they are clipped and not yet applied, ("updated", step, part) afterwards.
    Raises ValueError before any group is made (see `check`), and FloatingPointError, on all ranks and before the
    optimizer step, when the loss or the gradient norm is not finite.
    """
    dims = check(config, dist.get_world_size())
    corpus = ByteCorpus(config.data)
    on_gpu = "nccl" in dist.get_backend_config()
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    dims.build_mesh(device.type)
    job = Job(config, dims, device)
    first, end = 0, min(config.steps, config.stop_at or config.steps)
    if config.checkpoint and latest(config.checkpoint):
        first = load(config.checkpoint, job.parts, job.optimizer)["step"]
        if first >= end:
            raise ValueError(
                f"{Path(config.checkpoint).name} holds the state after {first} steps, and this run ends at {end}: take more steps, or "
                "another folder"
            )
    n_multiplying = job.n_parameters - (0 if config.model.tied else config.model.vocab_size * config.model.dim)
    sizes = (config.model.n_layers, config.model.n_heads, config.model.head_dim, config.seq_len)
    n_groups = config.fault_tolerance.groups if config.fault_tolerance.lighthouse else 1
    meter = Meter(flops_per_token(n_multiplying, *sizes), n_groups * dist.get_world_size(), device)
    axes = ("dp_replicate", "dp_shard", "tp", *(name for name in ("cp", "pp", "ep") if getattr(dims, name) > 1))
    layout = " × ".join(f"{name} {getattr(dims, name)}" for name in axes)
    result = TrainResult(layout, job.n_parameters, held_back_first=job.held_back_loss(corpus))
    n_tokens, is_first = config.global_batch * config.seq_len, dist.get_rank() == 0
    has_bar = is_first and sys.stderr.isatty()
    with contextlib.ExitStack() as stack:
        after = first or None  # None: logs begin anew
        sinks = [("csv", config.csv)] if config.csv else []
        sinks += [(config.log, config.log_folder)] if config.log else []
        logs = [stack.enter_context(log_to(*sink, after=after)) for sink in sinks] if is_first else []
        bar = stack.enter_context(tqdm(initial=first, total=config.steps, unit="step", disable=not has_bar))
        saving = None
        steps, row = range(first, end), {"peak_memory_bytes": 0}
        if n_groups > 1:
            job.join_peers(first)
            steps = job.replica.steps(end, n_groups, patience=300.0)
        meter.start()
        for step in steps:
            meter.steps, meter.tokens = step, step * n_tokens
            share = job.replica.share if job.replica else (0, 1)
            loss = job.forward_backward(job.microbatches(corpus, step, share)).item()
            grad_norm = clip_grad_norm_(
                job.parameters, config.max_norm, dims.axis("pp") if dims.pp > 1 else None
            ).item()
            check_finite(step, config, result.losses, **{"loss": loss, "gradient norm": grad_norm})
            for part in job.parts:
                watch("gradients", step, part)
            if not job.update(lr_at(step, config)):
                continue  # with the same step, and who is left
            for part in job.parts:
                watch("updated", step, part)
            row = meter.step(loss, grad_norm, n_tokens, lr=lr_at(step, config))
            result.losses.append(loss)
            result.grad_norms.append(grad_norm)
            result.step_times_s.append(row["step_time_s"])
            is_last = step == end - 1
            if config.checkpoint and (is_last or (step + 1) % config.checkpoint_every == 0):
                options = {"keep_last": config.keep_last, "previous": saving}
                saving = async_save(config.checkpoint, step + 1, job.parts, job.optimizer, **options)
            if is_last:
                result.held_back_last = job.held_back_loss(corpus)
            for log in logs:
                held_back = {end - 1: result.held_back_last, first: result.held_back_first}
                log.log(row | {"held_back": held_back.get(step)})
            line = f"loss {loss:.4f}  grad norm {grad_norm:.3f}  {row['tokens_per_s']:,.0f} tokens/s"
            bar.set_postfix_str(line, refresh=False)
            bar.update()
            if is_first and not has_bar and config.log_every and (step % config.log_every == 0 or is_last):
                print(f"step {step:>5}  {line}", flush=True)
    if saving:
        saving.wait()
    if job.replica:
        job.replica.close()
        if job.replica.step < end:
            raise RuntimeError(
                f"{config.fault_tolerance.name} is at step {job.replica.step} of {end}, and found {job.replica.share[1]} of "
                f"{config.fault_tolerance.groups} groups at {config.fault_tolerance.lighthouse}: start the others"
            )
    peak = torch.tensor(row["peak_memory_bytes"], device=device)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    result.peak_memory_bytes = int(peak)
    if result.losses:
        result.tokens_per_s = n_tokens / statistics.median(result.step_times_s)
    return result


def parse(arguments: list[str] | None = None) -> TrainConfig:
    """The command line (None: this process's). `--preset` is where the other options start from."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--preset", choices=PRESETS, default="debug")
    known, rest = first.parse_known_args(arguments)
    start = TrainConfig(model=PRESETS[known.preset])
    return tyro.cli(TrainConfig, args=rest, default=start, description=__doc__, prog="minititan.train")


@record  # torchrun then ends with the failing rank's own error
def main() -> None:
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--dry-run", action="store_true")
    first.add_argument("--world-size", type=int, default=int(os.environ.get("WORLD_SIZE", "1")))
    first.add_argument("--dry-rank", type=int, default=0)
    known, rest = first.parse_known_args()
    config = parse(rest)
    check(config, known.world_size)
    if known.dry_run:
        from minititan.dry_run import dry_run

        print(dry_run(config, known.world_size, known.dry_rank))
        return
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # ranks share the cores: with two threads each, steps take four times as long
    options: dict = {"backend": "gloo"}
    if torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        options = {"backend": "nccl", "device_id": device}
    if "RANK" in os.environ:  # under torchrun, whose restarts need a fresh store
        names = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
        options |= {"store": torchrun_store()} | names
    else:  # a group of one, that needs no port
        options |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(**options)
    result = train(config)
    if dist.get_rank() == 0:
        print(json.dumps(result.summary(), ensure_ascii=False))
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # one in ten finished gloo processes aborts in the interpreter's teardown, and torchrun starts it again


if __name__ == "__main__":
    main()
