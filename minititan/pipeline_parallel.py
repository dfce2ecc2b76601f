"""Pipeline parallel: consecutive layers on each rank, microbatches through them, and an order that wastes little time.

Rank r holds the layers of stage r. A batch is cut into m microbatches, so that rank 1 can work on the first while
rank 0 does the second. What travels is one activation forward and its gradient backward, between neighbours: this is
the parallelism for slow links. The price is waiting, the bubble: the first microbatch needs p - 1 stages to reach the
last rank, and its gradient as many to come back. A schedule is each rank's order of forwards F and backwards B:

    GPipe    F0 F1 F2 F3 ·  ·  ·  ·  ·  ·  B0    B1    B2    B3       all forwards, then all backwards. Until then
             ·  F0 F1 F2 F3 ·  ·  ·  B0    B1    B2    B3    ·  ·     each rank keeps the activations of m microbatches
             ·  ·  F0 F1 F2 F3 B0    B1    B2    B3    ·  ·  ·  ·
    1F1B     F0 F1 F2 ·  ·  ·  ·  B0    F3 B1    ·  B2    ·  B3       each backward as soon as it can be: the same
             ·  F0 F1 ·  ·  B0    F2 B1    F3 B2    ·  B3    ·  ·     bubble, but rank r keeps p - r
             ·  ·  F0 B0    F1 B1    F2 B2    F3 B3    ·  ·  ·  ·
    zero     F0 F1 F2 ·  ·  I0 W0 F3 I1 W1 I2 W2 I3 W3                B = I + W: the gradient of the input, for which
    bubble   ·  F0 F1 ·  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3                the previous rank waits, and those of the weights,
             ·  ·  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3                for which nobody does: W fills the holes

Interleaved, rank r holds v smaller stages (r, p+r, 2p+r, ..), and all is filled v times sooner. V-shaped, it holds r
and 2p-1-r: the last stage lies on rank 0 beside the first, and the turn, on rank p-1, needs no message.

Cost. Bubble: idle share of p ranks from the first start to the last end, when F = I = W. Peak: activations of the
fullest rank, in those of one microbatch in 1/p of the model. Messages that a middle rank sends, of B/m·T·D numbers:

                               bubble                              peak           messages
    gpipe                      (p-1) / (m + p-1)                   m              2m
    1f1b                       (p-1) / (m + p-1)                   p              2m      m >= p
    interleaved_1f1b           (p-1) / (vm + p-1)    for m >= p    p + (p-1)/v    2vm
    looped_bfs                 (p-1) / (vm + p-1)    for m >= p    m              2vm
    interleaved_zero_bubble    (p-1) / (3vm + p-1)   for m >= p    p              2vm     v = 1 is the one above
    zbv                        (p-1) / (6m + p-1)    m >= 2p-1     p              4m      v = 2
    dualpipev                  (p-1) / (6m + p-1)                  p + 1/2        4m      v = 2, m >= 2p

The rest of zero bubble is skew: ranks start one after the other. torch keeps buffers for all m microbatches besides.

The loss of a microbatch must be its *share*: the sum over its tokens over the number of tokens of the whole step, on
all ranks. Then gradients just add up. Dividing them afterwards has been wrong twice (torchtitan#1733, #2972).

With FSDP, reshard_after_forward=False, or all parameters are gathered for each microbatch. DDP sends from hooks that
split backwards never call (pytorch#144530): here, parts in DistributedDataParallel get one all-reduce after the
schedule instead, for all seven. The norm to clip by is over all stages. Activation checkpoints: whole blocks.

Use it across machines, once the layers do not fit one. m >= 4p keeps 1F1B's bubble below a fifth.
Not here: tied embeddings on two stages, sequence lengths that change, schedules made for unequal stages,
torch.compile or selective checkpoints with split backwards, two microbatches at once on a rank (DualPipe's overlap).

References: GPipe https://arxiv.org/abs/1811.06965 · 1F1B https://arxiv.org/abs/1806.03377 · interleaved
https://arxiv.org/abs/2104.04473 · breadth first https://arxiv.org/abs/2211.05953 · zero bubble and ZB-V
https://arxiv.org/abs/2401.10241 · DualPipe https://arxiv.org/abs/2412.19437 · torch.distributed.pipelining
Legend: p ranks, v stages a rank, m microbatches, k one of them; action "3B1": stage 3, backward, microbatch 1.
"""

import copy
import csv
import os
import re
import sys
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.microbatch import _Replicate
from torch.distributed.pipelining.schedules import (
    FORWARD,
    _Action,
    _add_send_recv,
    _add_unshard_reshard,
    _PipelineScheduleRuntime,
)
from torch.nn.parallel import DistributedDataParallel

Watch = Callable[[str], AbstractContextManager]  # called with "3B1": to time or to trace that action
LossFunction = Callable[..., Tensor]  # (output, target) -> the microbatch's share of the loss


class Kind(NamedTuple):
    """What torch calls a schedule, and what it asks for."""

    torch_class: type
    least: int = 1  # stages a rank
    most: int | None = 1
    v_shaped: bool = False
    splits_backward: bool = False
    full: bool = False  # needs as many microbatches as there are stages
    rounds: bool = False  # cuts m microbatches into m // p equal rounds


SCHEDULES: Mapping[str, Kind] = {
    "gpipe": Kind(pipelining.ScheduleGPipe),
    "1f1b": Kind(pipelining.Schedule1F1B, full=True),
    "interleaved_1f1b": Kind(pipelining.ScheduleInterleaved1F1B, 2, None, rounds=True),
    "looped_bfs": Kind(pipelining.ScheduleLoopedBFS, 2, None),
    "interleaved_zero_bubble": Kind(
        pipelining.ScheduleInterleavedZeroBubble, 1, None, splits_backward=True, rounds=True
    ),
    "zbv": Kind(pipelining.ScheduleZBVZeroBubble, 2, 2, v_shaped=True, splits_backward=True),
    "dualpipev": Kind(pipelining.ScheduleDualPipeV, 2, 2, v_shaped=True, splits_backward=True, full=True),
}

_PARTS = re.compile(r"(\d+)([FBIW])(\d+)").fullmatch

# ---- plans: plain data, without ranks -------------------------------------------------------------------------


def check_pipeline_parallel(
    schedule: str,
    n_ranks: int,
    n_microbatches: int,
    stages_per_rank: int | None = None,
    n_layers: int | None = None,
    batch: int | None = None,
) -> int:
    """Stages a rank, if all fits together; else ValueError, with all numbers and the remedy. Call it before a start.

    stages_per_rank: None is 1 for gpipe and 1f1b, 2 for the others. batch: rows that the pipeline gets in a step.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule {schedule!r} is none of {', '.join(SCHEDULES)}")
    p, m, kind = n_ranks, n_microbatches, SCHEDULES[schedule]
    v = (1 if kind.most == 1 else 2) if stages_per_rank is None else stages_per_rank
    if min(p, m, v) < 1:
        raise ValueError(f"{p} ranks, {v} stages a rank, {m} microbatches: each must be at least 1")
    if not kind.least <= v <= (kind.most or v):
        wanted = f"exactly {kind.least}" if kind.most else f"{kind.least} or more"
        others = ", ".join(name for name, k in SCHEDULES.items() if k.least <= v <= (k.most or v))
        raise ValueError(f"{schedule} wants {wanted} stages on a rank, got {v}; what takes {v}: {others}")
    if kind.full and m < p * v:
        raise ValueError(
            f"{schedule} on {p} ranks with {v} stage{'s' * (v > 1)} each needs {p * v} microbatches or more, got {m}: "
            f"cut the batch finer, or use {'gpipe' if v == 1 else 'zbv'}, which takes any number"
        )
    if kind.rounds and m % max(1, m // p):
        raise ValueError(
            f"{schedule} on {p} ranks runs {m} microbatches in {m // p} equal rounds, and {m} is no multiple of {m // p}: "
            f"use {m // p * p} or {(m // p + 1) * p}, multiples of {p}"
        )
    if n_layers is not None and n_layers < p * v:
        raise ValueError(f"{n_layers} layers cannot fill {p} ranks × {v} = {p * v} stages: use fewer ranks or stages")
    if batch is not None and (batch < m or batch % m):
        legal = [k for k in range(1, batch + 1) if batch % k == 0]
        raise ValueError(f"{batch} rows cannot be cut into {m} equal microbatches: use one of {legal}, or other rows")
    return v


def stages_of_ranks(schedule: str, n_ranks: int, stages_per_rank: int | None = None) -> list[list[int]]:
    """The stages on each rank: [[0, 4], [1, 5], ..], or of a V [[0, 7], [1, 6], ..]. schedule may be a CSV's path."""
    if schedule.endswith(".csv"):
        return [sorted({int(re.match(r"\d+", action)[0]) for action in row}) for row in _read_csv(schedule)]
    v = check_pipeline_parallel(schedule, n_ranks, 4 * n_ranks, stages_per_rank)
    if SCHEDULES[schedule].v_shaped:
        return [[rank, 2 * n_ranks - 1 - rank] for rank in range(n_ranks)]
    return [list(range(rank, n_ranks * v, n_ranks)) for rank in range(n_ranks)]


def actions(
    schedule, n_ranks: int | None = None, n_microbatches: int | None = None, stages_per_rank: int | None = None
) -> list[list[str]]:
    """What each rank computes, in order: a row a rank of "0F0", then "0B0", or "0I0" and "0W0".

    schedule: what `build_schedule` returned, or a name and the numbers. `csv.writer(file).writerows(rows)` makes a
    file of it, perhaps edited, that `build_schedule` takes.
    """
    if isinstance(schedule, Pipeline):
        return schedule.actions
    v = check_pipeline_parallel(schedule, n_ranks, n_microbatches, stages_per_rank)
    shape = {"num_stages": n_ranks * v, "group_size": n_ranks, "group_rank": 0, "submod": None}
    stages = [SimpleNamespace(stage_index=s, **shape) for s in range(v)]  # as much as a plan asks of a stage
    one, its = SCHEDULES[schedule].most == 1, SCHEDULES[schedule].torch_class
    its = type("Plan", (its,), {"_prepare_schedule_with_comms": lambda *_: None})  # no messages: ten times faster
    plan = its(stages[0] if one else stages, n_microbatches).pipeline_order
    rows = [[part for a in plan[rank] if a for part in _computed(str(a))] for rank in sorted(plan)]
    if one:  # torch 2.13's plan of 1F1B, which is only for show, begins at microbatch 1 on the last rank: count anew
        kinds = [[re.match(r"\d+[FB]", action)[0] for action in row] for row in rows]
        rows = [[f"{kind}{row[:i].count(kind)}" for i, kind in enumerate(row)] for row in kinds]
    return rows


def _computed(action: str) -> list[str]:
    """Nothing of "0SEND_F0", and both of "(0F1;7B0)OVERLAP_F_B", which torch runs one after the other."""
    return re.findall(r"\d+[FBIW]\d+", action)


def _read_csv(path: str) -> list[list[str]]:
    with open(path, newline="") as file:
        return [[part for action in row for part in _computed(action)] for row in csv.reader(file) if row]


def simulate(
    rows: Sequence[Sequence[str]], costs: Mapping[str, float] | None = None
) -> list[tuple[int, str, float, float]]:
    """(rank, action, start, end) when every action starts as soon as its rank is free and what it needs is there.

    costs: time of F, I, W and B; 1, 1, 1 and 2 by default. Messages take none. ValueError if the plan is stuck.
    """
    costs = {"F": 1, "I": 1, "W": 1, "B": 2} | dict(costs or {})
    todo = [[(int(s), kind, k, f"{s}{kind}{k}") for a in row for s, kind, k in [_PARTS(a).groups()]] for row in rows]
    last = max(s for row in todo for s, *_ in row)
    at, free, done, events = [0] * len(todo), [0.0] * len(todo), {}, []
    while any(i < len(row) for i, row in zip(at, todo, strict=True)):
        before = len(events)
        for rank, row in enumerate(todo):
            while at[rank] < len(row):
                s, kind, k, action = row[at[rank]]
                needs = [] if kind == "F" and s == 0 else [(s - 1, "F", k) if kind == "F" else (s, "F", k)]
                if kind == "W" or (kind != "F" and s < last):
                    needs.append((s, "I", k) if kind == "W" else (s + 1, "I", k))
                if not all(need in done for need in needs):
                    break
                start = max([free[rank], *(done[need] for need in needs)])
                free[rank] = done[s, "I" if kind == "B" else kind, k] = start + costs[kind]
                events.append((rank, action, start, free[rank]))
                at[rank] += 1
        if len(events) == before:
            stuck = [row[i][3] for i, row in zip(at, todo, strict=True) if i < len(row)]
            raise ValueError(f"stuck: ranks wait for each other at {stuck}")
    return events


def idle_share(events: Sequence[tuple[int, str, float, float]]) -> float:
    """The bubble of a simulation, or of a recorded run: the share of ranks × time in which nothing is computed."""
    n_ranks = len({rank for rank, *_ in events})
    busy = sum(end - start for *_, start, end in events)
    return 1 - busy / (n_ranks * (max(e[3] for e in events) - min(e[2] for e in events)))


def peak_activations(events: Sequence[tuple[int, str, float, float]]) -> list[int]:
    """By rank, the most (stage, microbatch) pairs held at a time, from the start of F to the end of B or W."""
    held, peak = Counter(), Counter()
    moments = [(start, 1, rank) for rank, action, start, _ in events if "F" in action]
    moments += [(end, -1, rank) for rank, action, _, end in events if "B" in action or "W" in action]
    for _, change, rank in sorted(moments):
        held[rank] += change
        peak[rank] = max(peak[rank], held[rank])
    return [peak[rank] for rank in sorted(peak)]


def bubble_fraction(schedule: str, n_ranks: int, n_microbatches: int, stages_per_rank: int | None = None) -> float:
    """The idle share when F = I = W = B/2: by the formula above, or, for fewer microbatches than it holds for, simulated."""
    p, m = n_ranks, n_microbatches
    v, kind = check_pipeline_parallel(schedule, p, m, stages_per_rank), SCHEDULES[schedule]
    if m < (2 * p - 1 if kind.v_shaped else 1 if kind.most == 1 else p):
        return idle_share(simulate(actions(schedule, p, m, v)))
    idle = (p - 1) * (1 if kind.splits_backward else 3)
    return idle / (3 * v * m + idle)


# ---- splitting ------------------------------------------------------------------------------------------------

# What comes before the layers, where they are, what comes after: Meta's names, transformers' Llama, its inner model.
_NAMES = [
    (("tok_embeddings",), "layers", ("norm", "output")),
    (("model.embed_tokens",), "model.layers", ("model.norm", "lm_head")),
    (("embed_tokens",), "layers", ("norm",)),
]


def layers_of_stages(
    n_layers: int, n_stages: int, input_weight: float = 1.0, output_weight: float = 1.0
) -> list[list[int]]:
    """Consecutive layers for each stage: at least one, and the next one always to the lightest stage.

    The weights say how many layers the embedding and the output (with the loss) are worth. Of equally light stages
    the later one gets it: it holds fewer activations.
    """
    if not 1 <= n_stages <= n_layers:
        raise ValueError(f"{n_layers} layers cannot fill {n_stages} stages, each with at least 1: use fewer stages")
    loads = [1.0] * n_stages
    loads[0] += input_weight
    loads[-1] += output_weight
    counts = [1] * n_stages
    for _ in range(n_layers - n_stages):
        lightest = min(range(n_stages), key=lambda s: (loads[s], -s))
        loads[lightest] += 1
        counts[lightest] += 1
    ends = [sum(counts[: s + 1]) for s in range(n_stages)]
    return [list(range(end - count, end)) for end, count in zip(ends, counts, strict=True)]


class _PassThrough(nn.Module):
    """In the place of what another stage holds."""

    def forward(self, x, *args, **kwargs):
        return x


def _only_tensor(module: nn.Module, args: tuple, output):
    return output if isinstance(output, Tensor) else output[0]


def split_model(
    model: nn.Module,
    n_stages: int,
    stage: int,
    input_weight: float = 1.0,
    output_weight: float = 1.0,
    names: tuple[Sequence[str], str, Sequence[str]] | None = None,
) -> nn.Module:
    """A copy of `model` that holds what stage `stage` of `n_stages` does, under the names that it has in the whole.

    It takes what `model` takes, or the previous part's output, and gives one tensor. Split on meta, and nothing is
    copied; then tensor parallel, FSDP and `materialize` as ever. weights: see `layers_of_stages`.
    names: (modules before the layers, the container of the layers, modules after), each called with the hidden tensor
    first; known are Transformer, transformers' Llama, and any nn.Sequential. Of a ModuleDict of layers the others are
    deleted and missing ends are None, as in Transformer; elsewhere what is missing passes its input through.
    ValueError: too few layers, unknown names, a parameter that two stages would share.
    """
    before, container, after = names or _find_names(model)
    layers = list(model.get_submodule(container)._modules)
    if not 0 <= stage < n_stages:
        raise ValueError(f"stage {stage} is none of 0 .. {n_stages - 1}")
    weights = input_weight if before else 0.0, output_weight if after else 0.0
    cut = layers_of_stages(len(layers), n_stages, *weights)
    prefix = f"{container}." if container else ""
    owner = dict.fromkeys(before, 0) | dict.fromkeys(after, n_stages - 1)
    owner |= {f"{prefix}{layers[i]}": s for s, numbers in enumerate(cut) for i in numbers}
    _refuse_ties(model, owner)
    missing = [name for name, s in owner.items() if s != stage]
    part = copy.deepcopy(model, {id(model.get_submodule(name)): _PassThrough() for name in missing})
    if isinstance(part.get_submodule(container), nn.ModuleDict):
        for name in missing:
            path, _, leaf = name.rpartition(".")
            if name in (*before, *after):
                setattr(part.get_submodule(path), leaf, None)
            else:
                del part.get_submodule(container)[leaf]
    if hasattr(part, "config") and hasattr(part.config, "use_cache"):  # transformers
        part.config.use_cache = False
        part.register_forward_hook(_only_tensor)
    part._stage_of = (stage, n_stages)
    return part


def _find_names(model: nn.Module):
    if isinstance(model, nn.Sequential):
        return (), "", ()
    present = {name for name, _ in model.named_modules()}
    for before, container, after in _NAMES:
        if {*before, container, *after} <= present:
            return before, container, after
    raise ValueError(
        f"{type(model).__name__} has none of the known sets of modules: "
        f"{'; '.join(' '.join([*b, c, *a]) for b, c, a in _NAMES)}. Pass names=(before, container, after)"
    )


def _refuse_ties(model: nn.Module, owner: Mapping[str, int]) -> None:
    first: dict[Tensor, tuple[str, int | None]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        stage = next((s for unit, s in owner.items() if name.startswith(f"{unit}.")), None)
        other, its_stage = first.setdefault(parameter, (name, stage))
        if stage != its_stage:
            raise ValueError(
                f"{other} and {name} are 1 parameter, but stage {its_stage} and stage {stage} would each train a copy: "
                "they start from different values (drawn by name), get different gradients, count twice in the norm "
                "and once in a checkpoint. Untie them (config.tied=False, tie_word_embeddings=False), or use 1 stage"
            )


# ---- by hand --------------------------------------------------------------------------------------------------


def _unwatched(action: str) -> AbstractContextManager:
    return nullcontext()


class _SplitLinear(torch.autograd.Function):
    """y = x Wᵀ + b; backward gives dx only, and leaves what dW needs on a list."""

    @staticmethod
    def forward(ctx, x, weight, bias, later):
        ctx.save_for_backward(x, weight)
        ctx.bias, ctx.later = bias, later
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        ctx.later.append((weight, ctx.bias, x.detach(), dy))
        return dy @ weight, None, None, None


class SplitBackwardByHand:
    """Cuts the backward of `model`'s nn.Linear in two: backward() computes input gradients, `weights()` the others.

    dy Wᵀ and dyᵀ x are two matmuls that need nothing of each other; only the first is urgent. Norms and embeddings
    stay whole: theirs are cheap. `pending`: one list of (weight, bias, x, dy) for each backward since.
    """

    def __init__(self, model: nn.Module):
        self.now, self.pending = [], deque()
        for module in model.modules():
            if type(module) is nn.Linear:
                module.forward = lambda x, m=module: _SplitLinear.apply(x, m.weight, m.bias, self.now)

    def backward(self, y: Tensor, dy: Tensor | None) -> None:
        torch.autograd.backward(y, dy)
        self.pending.append(self.now.copy())
        self.now.clear()

    @torch.no_grad()
    def weights(self) -> None:
        """The weight gradients of the oldest backward that has none yet."""
        for weight, bias, x, dy in self.pending.popleft():
            dy_NF, x_ND = dy.flatten(0, -2), x.flatten(0, -2)
            for parameter, grad in ((weight, dy_NF.T @ x_ND), (bias, dy_NF.sum(0))):
                if parameter is not None and parameter.requires_grad:
                    parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)


class _LineByHand:
    """A rank's place in the line: what it computes for microbatch k, and what it exchanges with its neighbours."""

    def __init__(self, stage, inputs, targets, loss_fn, hidden, group, watch, split=None):
        self.rank, self.p, self.group = dist.get_rank(group), dist.get_world_size(group), group
        self.stage, self.inputs, self.targets, self.loss_fn = stage, inputs, targets, loss_fn
        self.hidden, self.watch, self.split = hidden, watch, split
        self.m = len(inputs)
        self.kept, self.losses, self.leaving, self.n_weights = {}, [], {}, 0

    def forward(self, k: int, x: Tensor | None) -> Tensor:
        with self.watch(f"{self.rank}F{k}"):
            x = self.inputs[k] if x is None else x.requires_grad_()
            y = self.stage(x)
            if self.rank == self.p - 1:
                y = self.loss_fn(y, self.targets[k])
                self.losses.append(y.detach())
        self.kept[k] = x, y  # what backward needs, with all that autograd holds behind y
        return y

    def backward(self, k: int, dy: Tensor | None) -> Tensor | None:
        with self.watch(f"{self.rank}{'I' if self.split else 'B'}{k}"):
            x, y = self.kept.pop(k)
            (self.split.backward if self.split else torch.autograd.backward)(y, dy)
        return x.grad

    def weights(self, keep: int = 0) -> None:
        """Weight gradients that are still to be computed, oldest first, down to `keep`."""
        while self.split and len(self.split.pending) > keep:
            with self.watch(f"{self.rank}W{self.n_weights}"):
                self.split.weights()
            self.n_weights += 1

    def previous(self, **messages) -> Callable[[], Tensor | None]:
        return self.exchange(self.rank - 1, **messages)

    def next(self, **messages) -> Callable[[], Tensor | None]:
        return self.exchange(self.rank + 1, **messages)

    def exchange(self, peer: int, send: Tensor | None = None, receive: bool = False) -> Callable[[], Tensor | None]:
        """Starts both together: of two neighbours that each send first, none would ever receive. -> call it to wait for
        what arrives. For what leaves nobody waits before the next message that way."""
        received, operations = None, []
        if 0 <= peer < self.p and send is not None:
            if peer in self.leaving:
                self.leaving.pop(peer)[1].wait()
            message = send.detach().contiguous()
            operations.append(dist.P2POp(dist.isend, message, group=self.group, group_peer=peer))
        if 0 <= peer < self.p and receive:
            received = torch.empty_like(self.hidden)
            operations.append(dist.P2POp(dist.irecv, received, group=self.group, group_peer=peer))
        works = dist.batch_isend_irecv(operations) if operations else []
        if len(operations) > (received is not None):
            self.leaving[peer] = message, works[0]

        def wait() -> Tensor | None:
            if received is not None:
                works[-1].wait()
            return received

        return wait

    def finish(self) -> list[Tensor]:
        for _, work in self.leaving.values():
            work.wait()
        return self.losses


def gpipe_by_hand(
    stage: nn.Module,
    inputs: Sequence[Tensor],
    targets: Sequence[Tensor],
    loss_fn: LossFunction,
    hidden: Tensor,
    group: dist.ProcessGroup | None = None,
    watch: Watch = _unwatched,
) -> list[Tensor]:
    """All forwards, then all backwards; gradients are added to the parameters'. -> the losses, on the last rank.

    stage: this rank's part of the model, its place in `group` being its place in the line. inputs, targets: m
    microbatches each, of which the first rank reads the ones and the last rank the others. loss_fn(output, target): a
    microbatch's share. hidden: any tensor of the shape, dtype and device of one microbatch between two stages.
    """
    line = _LineByHand(stage, inputs, targets, loss_fn, hidden, group, watch)
    # 1. Fill: every microbatch goes through, and what its backward needs stays here
    for k in range(line.m):
        y = line.forward(k, line.previous(receive=True)())
        line.next(send=y)
    # 2. Drain
    for k in range(line.m):
        dx = line.backward(k, line.next(receive=True)())
        line.previous(send=dx)
    return line.finish()


def one_f_one_b_by_hand(
    stage: nn.Module,
    inputs: Sequence[Tensor],
    targets: Sequence[Tensor],
    loss_fn: LossFunction,
    hidden: Tensor,
    group: dist.ProcessGroup | None = None,
    watch: Watch = _unwatched,
    split: SplitBackwardByHand | None = None,
) -> list[Tensor]:
    """One forward, one backward in turn; arguments and result as in `gpipe_by_hand`, for any number of microbatches.

    split: SplitBackwardByHand(stage) makes it zero bubble (ZB-H1): a later rank leaves more weight gradients for the
    end, rank r leaves r, so that nobody holds more activations than rank 0, and computes them while it would wait.
    """
    line = _LineByHand(stage, inputs, targets, loss_fn, hidden, group, watch, split)
    n_warm_up = min(line.m, line.p - 1 - line.rank)
    # 1. Warm up: one forward for each rank behind this one
    for k in range(n_warm_up):
        y = line.forward(k, line.previous(receive=True)())
        line.next(send=y)
    # 2. Steady: an activation goes forward as a gradient comes back, so what is held does not grow
    x = line.previous(receive=n_warm_up < line.m)()
    for k in range(n_warm_up, line.m):
        dy = line.next(send=line.forward(k, x), receive=True)()
        dx = line.backward(k - n_warm_up, dy)
        arriving = line.previous(send=dx, receive=k < line.m - 1)
        line.weights(keep=line.rank)
        x = arriving()
    # 3. Cool down: the backwards that are left, and weight gradients in the holes between them
    for k in range(line.m - n_warm_up, line.m):
        dx = line.backward(k, line.next(receive=True)())
        line.previous(send=dx)
        line.weights(keep=max(0, len(split.pending) - 1) if split else 0)
    line.weights()
    return line.finish()


# ---- native ---------------------------------------------------------------------------------------------------


class _Stage(PipelineStage):
    """torch's, which tells `watch` what it does, and whose outputs can be detached in place."""

    watch: Watch = staticmethod(_unwatched)

    def _prepare_forward_infra(self, *args, **kwargs):
        """Before it learns the shapes from a microbatch, which may leave gradients (reentrant checkpoints), drop them, or
        change buffers (a router counts rows)."""
        self.buffers = [(b, b.clone()) for b in self.submod.buffers()]
        self.gradients = [(p, p.grad) for p in self.submod.parameters()]
        for p, _ in self.gradients:
            p.grad = None
        return super()._prepare_forward_infra(*args, **kwargs)

    def _post_metadata_inference_cleanup(self):
        super()._post_metadata_inference_cleanup()
        for p, gradient in self.gradients:
            p.grad = gradient
        for buffer, kept in self.buffers:
            buffer.copy_(kept)
        self.gradients, self.buffers = [], []

    def forward_one_chunk(self, fwd_chunk_id, *args, **kwargs):
        with self.watch(f"{self.stage_index}F{fwd_chunk_id}"):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id, loss=None, full_backward=True, last_backward=False):
        with self.watch(f"{self.stage_index}{'B' if full_backward else 'I'}{bwd_chunk_id}"):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id, last_backward=False):
        with self.watch(f"{self.stage_index}W{bwd_chunk_id}"):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    def forward_maybe_with_nosync(self, *args, **kwargs):
        output = super().forward_maybe_with_nosync(*args, **kwargs)
        if self.is_last or type(output) is not Tensor:
            return output
        expected = self._stage_meta.outputs[0].shape
        if output.shape != expected:
            raise ValueError(
                f"stage {self.stage_index} of {self.num_stages} gave {tuple(output.shape)} for a microbatch, and "
                f"{tuple(expected)} for the first: the receiver's buffer has that shape, so pad to one shape"
            )
        # detach_() refuses a view, which a linear with a bias and a slice are
        return torch.ops.aten._unsafe_view(output, output.shape) if output._is_view() else output


class Pipeline:
    """What `build_schedule` returns. `schedule` is torch's own; `losses` those of the last step, on the last stage's rank."""

    def __init__(self, schedule, evaluation, parts, replicas, loss_fn, rows):
        self.schedule, self.evaluation, self.parts, self.actions = schedule, evaluation, parts, rows
        self.replicas, self.loss_fn, self.losses = replicas, loss_fn, []
        self.group = _stages(schedule)[0].group
        self.shapes: dict[str, tuple] = {}

    def step(self, inputs: Tensor, targets: Tensor, loss_kwargs: dict | None = None, **model_kwargs) -> Tensor:
        """Forward and backward of a batch. Adds to the gradients; returns the sum of the microbatches' losses.

        Every rank of the pipeline passes the same batch, [m × rows, ..] (the first stage reads the inputs, the last
        the targets), and gets the same loss. loss_kwargs: further arguments of loss_fn, such as the step's number of
        tokens. model_kwargs: of every part's forward, whole and not cut into microbatches, such as positions.
        ValueError: rows that m does not divide, a shape that is not that of the first step.
        """
        loss = self._run("step", self.schedule, inputs, targets, loss_kwargs, model_kwargs)
        for part, group in self.replicas:
            _average(part.parameters(), group)
        return loss

    @torch.no_grad()
    def eval(self, inputs: Tensor, targets: Tensor | None = None, loss_kwargs: dict | None = None, **model_kwargs):
        """Forward only, through the pipeline. -> the loss, as in `step`; without targets the output, where the last
        stage is, and None elsewhere."""
        self.evaluation._loss_fn = None  # but for targets
        out = self._run("eval", self.evaluation, inputs, targets, loss_kwargs, model_kwargs)
        for module in (m for part in self.parts for m in part.modules() if isinstance(m, FSDPModule)):
            module.reshard()  # or the next step would find the parameters of before the optimizer
        return out

    def _run(self, mode, schedule, inputs, targets, loss_kwargs, model_kwargs):
        m, stages = schedule._n_microbatches, _stages(schedule)
        for name, tensor in {"inputs": inputs, "targets": targets}.items():
            if tensor is None:
                continue
            if len(tensor) < m or len(tensor) % m:
                raise ValueError(f"{len(tensor)} rows of {name} cannot be cut into {m} equal microbatches: pad them")
            first = self.shapes.setdefault((mode, name), tensor.shape)
            if tensor.shape != first:
                raise ValueError(
                    f"{name} have shape {tuple(tensor.shape)}, and {tuple(first)} in the first {mode}, for which the "
                    "buffers between stages were made: pad to that, or build another schedule on the same parts"
                )
        schedule._kwargs_chunk_spec = dict.fromkeys(model_kwargs, _Replicate)
        if targets is not None:  # bound here: only torch 2.13 passes loss_kwargs on by itself
            schedule._loss_fn = partial(self.loss_fn, **(loss_kwargs or {}))
        losses = None if targets is None else []
        output = getattr(schedule, mode)(
            *([inputs] if any(stage.is_first for stage in stages) else []),
            target=targets if any(stage.is_last for stage in stages) else None,
            losses=losses,
            return_outputs=targets is None,
            **model_kwargs,
        )
        for stage in stages:
            stage.clear_runtime_states()
        if targets is None:
            return output
        self.losses = [loss.full_tensor() if hasattr(loss, "full_tensor") else loss for loss in losses]
        self.losses = [loss.detach() for loss in self.losses]
        total = sum(self.losses, torch.zeros((), dtype=torch.float64, device=inputs.device))
        dist.all_reduce(total, group=self.group)
        return total


def _stages(schedule) -> list[PipelineStage]:
    return [schedule._stage] if hasattr(schedule, "_stage") else schedule._stages


@torch.no_grad()
def _average(parameters, group: dist.ProcessGroup) -> None:
    """The mean of the gradients over the group, one message a dtype."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for p in parameters:
        if p.requires_grad:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            by_dtype.setdefault(p.grad.dtype, []).append(p.grad)
    for grads in by_dtype.values():
        flat = torch.cat([g.flatten() for g in grads]).div_(dist.get_world_size(group))
        dist.all_reduce(flat, group=group)
        for grad, mean in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
            grad.copy_(mean.view_as(grad))


def build_schedule(
    parts: nn.Module | Sequence[nn.Module],
    schedule: str,
    n_microbatches: int,
    loss_fn: LossFunction,
    mesh: DeviceMesh | dist.ProcessGroup | None = None,
    watch: Watch = _unwatched,
) -> "Pipeline":
    """A pipeline of these parts by one of SCHEDULES, or by a CSV: a row a rank, as `actions` gives them.

    parts: this rank's, in the order of `stages_of_ranks(schedule, p)[rank]`: real, parallelized (FSDP with
    reshard_after_forward=False), in DistributedDataParallel or not. loss_fn(output, target, **loss_kwargs): the
    microbatch's share of the loss. mesh: the axis, or group, of the line; None: all ranks. watch: called with "3B1"
    around that action, where it runs. The first step also runs one microbatch forward and back, to learn the shapes.
    ValueError: as `check_pipeline_parallel`; parts of other stages; a CSV that is stuck or counts otherwise; parts
    that cannot split their backward.
    """
    parts = [parts] if isinstance(parts, nn.Module) else list(parts)
    group = mesh.get_group() if isinstance(mesh, DeviceMesh) else mesh
    p, rank, v, m = dist.get_world_size(group), dist.get_rank(group), len(parts), n_microbatches
    replicas = [(part.module, part.process_group) for part in parts if isinstance(part, DistributedDataParallel)]
    parts = [part.module if isinstance(part, DistributedDataParallel) else part for part in parts]
    is_csv = schedule.endswith(".csv")
    rows = _read_csv(schedule) if is_csv else actions(schedule, p, m, v)
    placement = stages_of_ranks(schedule, p, v)
    if is_csv:
        _check_csv(schedule, rows, placement, p, m)
    n_stages = sum(map(len, placement))
    made_for = [getattr(part, "_stage_of", (s, n_stages)) for part, s in zip(parts, placement[rank], strict=False)]
    if v != len(placement[rank]) or made_for != [(s, n_stages) for s in placement[rank]]:
        raise ValueError(
            f"{schedule} on {p} ranks wants stages {placement[rank]} of {n_stages} on rank {rank}, got {v} parts, made "
            f"for stages {[s for s, _ in made_for]} of {[n for _, n in made_for]}: split_model by stages_of_ranks"
        )
    if any("I" in action for row in rows for action in row):
        _check_can_split(schedule, parts)

    def stages() -> list[_Stage]:
        made = []
        for part, s in zip(parts, placement[rank], strict=True):
            device = next(part.parameters(), torch.empty(0)).device
            made.append(_Stage(part, s, n_stages, device, group=group))
            made[-1].watch = watch
        return made

    mine = stages()
    if is_csv:
        native = _PipelineScheduleRuntime(mine, m, loss_fn, scale_grads=False)
        with open(schedule) as file:
            native._load_csv(schedule, "compute_comms" if "SEND" in file.read() else "compute_only")
    else:
        kind = SCHEDULES[schedule]
        native = kind.torch_class(mine[0] if kind.most == 1 else mine, m, loss_fn, scale_grads=False)
        if schedule == "dualpipev":  # torch's pairs of F and B send after both; one by one, half of the bubble is left
            native._prepare_schedule_with_comms(dict(enumerate([*map(_Action.from_str, row)] for row in rows)))
    return Pipeline(native, _forward_only(stages(), placement, m), parts, replicas, loss_fn, rows)


def _check_csv(path: str, rows: list[list[str]], placement: list[list[int]], p: int, m: int) -> None:
    if len(rows) != p:
        raise ValueError(f"{path} plans {len(rows)} ranks, and there are {p}: it needs a row for each")
    found = Counter(action for row in rows for action in row)
    wanted = [(s, k) for s in range(sum(map(len, placement))) for k in range(m)]
    for s, k in wanted:
        counts = {kind: found.pop(f"{s}{kind}{k}", 0) for kind in "FBIW"}
        if tuple(counts.values()) not in ((1, 1, 0, 0), (1, 0, 1, 1)):
            said = ", ".join(f"{n} {kind}" for kind, n in counts.items())
            raise ValueError(
                f"{path}: stage {s} has {said} of microbatch {k} (of {m}): it needs 1 F and 1 B, or 1 F, 1 I and 1 W"
            )
    if found:
        raise ValueError(f"{path} plans {next(iter(found))}, but there are {m} microbatches: build it with as many")
    simulate(rows)


def _check_can_split(schedule: str, parts: Sequence[nn.Module]) -> None:
    whole = ", ".join(name for name, kind in SCHEDULES.items() if not kind.splits_backward)
    for part in parts:
        for name, module in part.named_modules():
            options = getattr(getattr(module, "checkpoint_fn", None), "keywords", {})
            if getattr(module, "_compiled_call_impl", None) is not None or isinstance(module, OptimizedModule):
                raise ValueError(
                    f"{schedule} splits backward, but {name} is compiled, as one piece: use one of {whole}"
                )
            if "context_fn" in options:
                raise ValueError(
                    f"{schedule} goes through the graph twice, but {name} is checkpointed selectively, which allows "
                    f"one pass: checkpoint it in full, or use one of {whole}"
                )


def _forward_only(stages: list[_Stage], placement: list[list[int]], n_microbatches: int) -> _PipelineScheduleRuntime:
    """Stage after stage, each with all microbatches. torch's own eval() of a V asks for gradients and fails."""
    evaluation = _PipelineScheduleRuntime(stages, n_microbatches, scale_grads=False)
    ranks = {s: rank for rank, held in enumerate(placement) for s in held}
    plan = {
        rank: _add_unshard_reshard([_Action(s, FORWARD, k) for s in held for k in range(n_microbatches)])
        for rank, held in enumerate(placement)
    }
    evaluation.pipeline_order_with_comms = _add_send_recv(plan, ranks.get, len(ranks))
    evaluation.stage_index_to_group_rank = ranks
    for stage in stages:
        stage.stage_index_to_group_rank = ranks
    return evaluation


# ---- the proof ------------------------------------------------------------------------------------------------


class _Block(nn.Module):
    def __init__(self, D: int):
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(D, 1e-5), nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.up(self.norm(x))))


def demo() -> None:
    """Loss and all gradients of each schedule, by hand and native, against one process, in float64."""
    on_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
    dist.init_process_group("nccl" if on_gpus else "gloo", device_id=device if on_gpus else None)
    rank, p = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    whole = nn.Sequential(*(_Block(12) for _ in range(2 * p + 1))).to(device, torch.float64)  # unequal stages
    m = 2 * p
    x_BD, y_BD = torch.randn(2, 3 * m, 12, dtype=torch.float64).to(device)

    def share(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().sum() / len(x_BD)

    truth = share(whole(x_BD), y_BD)
    truth.backward()
    data = x_BD.chunk(m), y_BD.chunk(m), share, x_BD[:3]
    by_hand = {
        "gpipe_by_hand": lambda part: gpipe_by_hand(part, *data),
        "one_f_one_b_by_hand": lambda part: one_f_one_b_by_hand(part, *data),
        "with SplitBackwardByHand": lambda part: one_f_one_b_by_hand(part, *data, split=SplitBackwardByHand(part)),
    }
    for name in (*by_hand, *SCHEDULES):
        stages = [rank] if name in by_hand else stages_of_ranks(name, p)[rank]
        parts = [split_model(whole, p * len(stages), s) for s in stages]
        for part in parts:
            part.zero_grad()
        if name in by_hand:
            loss = sum(by_hand[name](parts[0]), torch.zeros_like(truth.detach()))
            dist.all_reduce(loss)
        else:
            loss = build_schedule(parts, name, m, share).step(x_BD, y_BD)
        errors = [(loss - truth).abs() / truth]
        for part in parts:
            for key, parameter in part.named_parameters():
                expected = whole.get_parameter(key).grad
                errors.append((parameter.grad - expected).norm() / expected.norm())
        error = torch.stack(errors).max().detach()
        dist.all_reduce(error, dist.ReduceOp.MAX)
        if rank == 0:
            idle = f"  (bubble {bubble_fraction(name, p, m):.1%})" if name in SCHEDULES else ""
            print(f"{name:24} largest error of the loss and all gradients: {error:.1e}{idle}")
        if not error < 1e-10:
            raise SystemExit(f"{name} differs from one process by {error:.1e}, more than 1e-10")
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # about one finished gloo process in ten aborts while the interpreter exits


if __name__ == "__main__":
    demo()
