"""The sections of check.py, each in a process of its own: measure.py [--toy] --out FOLDER SECTION RESULT DEADLINE

A section adds rows to a Run, which writes them to the RESULT file at once, so that a kill loses only what was under way.
It is ended at DEADLINE, of time.time(); what can be left out is, when time runs short. Job, of minititan.train, is the trainer of all but smoke.
"""

import argparse
import gc
import importlib
import importlib.util
import json
import math
import os
import pickle
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from check import write
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from minititan import activation_checkpoint, planner
from minititan.grad_clip import clip_grad_norm_
from minititan.lab.trace import cuda_snapshot, peak, watch_memory
from minititan.meta_init import materialize, on_meta
from minititan.metrics import flops_per_token, peak_memory
from minititan.model import PRESETS, ModelConfig, Transformer, count_parameters, grouped_linear
from minititan.optimizer import build_adamw
from minititan.parallel_dims import ParallelDims


class _Nothing:
    """For tyro and tqdm, where they are missing: minititan.train imports them for its command line and its bar."""

    def __init__(self, *_, **__): ...
    def __enter__(self):
        return self

    def __exit__(self, *_): ...
    def set_postfix_str(self, *_, **__): ...
    def update(self, *_): ...


STAND_INS = []
for _name in ("tyro", "tqdm"):
    try:
        importlib.import_module(_name)
    except ImportError:  # of what it needs itself, too
        STAND_INS.append(_name)
        sys.modules[_name] = types.ModuleType(_name)
        sys.modules[_name].tqdm = _Nothing
from minititan.train import Job, TrainConfig, check  # noqa: E402

for _name in STAND_INS:
    del sys.modules[_name]  # whoever looks for it later does not find it, which is true

# Dense flops/s of an H100 SXM and an H200, by NVIDIA's data sheets (their headlines are with sparsity: twice as much).
PEAK_BF16, PEAK_FLOAT8 = 989e12, 1979e12
ROWWISE_ON_CPU = "only supports per-tensor scaling for CPU"  # torch 2.11's words, at toy size
SNAPSHOT_BYTES = 8 * 2**20  # a larger one is not kept


@dataclass
class Run:
    """What a section has found so far, and how much time it has."""

    path: Path
    out: Path
    toy: bool
    deadline: float  # of time.time(): of all clocks the one that processes share
    rows: list | dict = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what was left out, which is no failure

    @property
    def left(self) -> float:
        return self.deadline - time.time()

    @cached_property
    def device(self) -> torch.device:
        return torch.device("cpu") if self.toy else torch.device("cuda", 0)

    @cached_property
    def dims(self) -> ParallelDims:
        dims = ParallelDims(world_size=1)
        dims.build_mesh(self.device.type)
        return dims

    @property
    def backend(self) -> str:  # of torch.compile: at toy size what it would generate is not the question
        return "aot_eager" if self.toy else "inductor"

    @property
    def model(self) -> ModelConfig:
        return replace(PRESETS["debug"], n_layers=2, tied=True) if self.toy else PRESETS["llama3-1b"]

    def add(self, **row) -> None:
        self.rows.append(row)
        self.save()

    def save(self, finished: bool = False) -> None:
        why = "; ".join([*self.failed, *self.notes])
        write(self.path, {"rows": self.rows, "finished": finished, "ok": not self.failed, "why": why})


def short(error: BaseException) -> str:
    """Its last words, and the line of ours or of torch that raised it."""
    frame = traceback.extract_tb(error.__traceback__)[-1:]
    where = "".join(f" ({Path(f.filename).name}:{f.lineno})" for f in frame)
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:600] + where


def has(*packages: str) -> list[str]:
    """Those of them that are missing here."""
    return [name for name in packages if importlib.util.find_spec(name) is None]


def join_group(device: torch.device) -> None:
    """A default group of one rank, that needs no port."""
    options = {"backend": "gloo"}
    if device.type == "cuda":
        torch.cuda.set_device(device)
        options = {"backend": "nccl", "device_id": device}
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1, **options)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def differ(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> float:
    """The largest difference of two tensors, relative to the norm of theirs."""
    worst = 0.0
    for a, b in zip(ours, theirs, strict=True):
        a, b = (t.full_tensor() if isinstance(t, DTensor) else t for t in (a.detach(), b.detach()))
        a, b = a.double(), b.double()
        error = ((a - b).norm() / b.norm().clamp(min=1e-300)).item()
        worst = max(worst, error if math.isfinite(error) else math.inf)
    return worst


# ---- the machine ----------------------------------------------------------------------------------------------


def machine(run: Run) -> None:
    """Also whether there is a GPU, and what is missing."""
    gpu = torch.cuda.is_available()
    run.rows = {
        "gpu": torch.cuda.get_device_name(0) if gpu else None,
        "gpu_memory_bytes": torch.cuda.get_device_properties(0).total_memory if gpu else None,
        "capability": list(torch.cuda.get_device_capability(0)) if gpu else None,
        "peak_bf16_flops": PEAK_BF16,
        "peak_float8_flops": PEAK_FLOAT8,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if gpu else None,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "missing": sorted({*has("torchao", "cloudpickle"), *STAND_INS}),
        "date": time.strftime("%Y-%m-%d"),
    }


# ---- smoke: each technique on a group of one ------------------------------------------------------------------


class Techniques:
    """Each method but those with _ is a technique: it returns its largest relative error against the plain model.

    A group of one sends nothing anywhere, but calls everything: the backend, DTensor, the hooks, the kernels.
    """

    def __init__(self, run: Run):
        self.device, self.backend = run.device, run.backend
        self.mesh = init_device_mesh(self.device.type, (1,), mesh_dim_names=("all",))
        self.config = PRESETS["debug"]
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(self.config.vocab_size, (2, 2, 64), generator=generator).to(self.device)
        self.tokens_BT, self.targets_BT = tokens

    def _model(self, dtype: torch.dtype = torch.float64, config: ModelConfig | None = None) -> nn.Module:
        return materialize(on_meta(lambda: Transformer(config or self.config).to(dtype)), self.device, seed=0)

    def _step(self, model: nn.Module, run: Callable | None = None, tokens_BT: Tensor | None = None) -> list[Tensor]:
        """The loss and all gradients."""
        logits_BTV = (run or model)(self.tokens_BT if tokens_BT is None else tokens_BT)
        loss = F.cross_entropy(logits_BTV.flatten(0, 1), self.targets_BT.flatten())
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters())]

    def _plain(self, dtype: torch.dtype = torch.float64, config: ModelConfig | None = None) -> list[Tensor]:
        return self._step(self._model(dtype, config))

    def meta_init(self) -> float:
        on_cpu = materialize(on_meta(lambda: Transformer(self.config).double()), "cpu", seed=0)
        return differ((p.cpu() for p in self._model().parameters()), on_cpu.parameters())

    def data_parallel_by_hand(self) -> float:
        from minititan.data_parallel import BucketedAllReduceByHand

        model = self._model()
        BucketedAllReduceByHand(model, self.mesh)
        return differ(self._step(model), self._plain())

    def data_parallel(self) -> float:
        from minititan.data_parallel import apply_ddp

        model = self._model()
        return differ(self._step(model, apply_ddp(model, self.mesh)), self._plain())

    def fsdp_by_hand(self) -> float:
        from minititan.fsdp import FullyShardByHand

        model, plain = self._model(), self._model()
        names = [name for name, _ in plain.named_parameters()]
        handle = FullyShardByHand(model, self.mesh)
        loss, *_ = self._step(model)
        whole = handle.whole(gradients=True)
        return differ([loss, *(whole[name] for name in names)], self._step(plain))

    def fsdp(self) -> float:
        from minititan.fsdp import apply_fsdp

        return differ(self._step(apply_fsdp(self._model(), self.mesh)), self._plain())

    def fsdp_bf16(self) -> float:
        from minititan.fsdp import apply_fsdp

        model = apply_fsdp(self._model(torch.float32), self.mesh, param_dtype=torch.bfloat16)
        return differ(self._step(model), self._plain())

    def tensor_parallel(self, **flags) -> float:
        from minititan.tensor_parallel import apply_tensor_parallel

        model = apply_tensor_parallel(self._model(), self.mesh, **flags)
        with loss_parallel():
            return differ(self._step(model), self._plain())

    def sequence_parallel(self) -> float:
        return self.tensor_parallel(sequence_parallel=True)

    def loss_parallel(self) -> float:
        return self.tensor_parallel(sequence_parallel=True, loss_parallel=True)

    def async_tensor_parallel(self) -> float:
        from minititan.async_tensor_parallel import apply_async_tensor_parallel

        return differ(self._step(apply_async_tensor_parallel(self._model(), self.mesh)), self._plain())

    def pipeline_parallel(self) -> float:
        from minititan.pipeline_parallel import build_schedule, split_model

        whole = self._model()
        plain = self._step(whole)
        whole.zero_grad()
        part = split_model(whole, 1, 0)

        def share(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
            loss = F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), reduction="sum")
            return loss / self.targets_BT.numel()

        loss = build_schedule([part], "1f1b", 2, share, self.mesh).step(self.tokens_BT, self.targets_BT)
        return differ([loss, *(p.grad for p in part.parameters())], plain)

    def context_parallel(self, method: str = "ring") -> float:
        from minititan.context_parallel import apply_context_parallel, shard_sequence

        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float64  # flash attention has no other there
        model = apply_context_parallel(self._model(dtype), self.mesh, method)
        tokens_BT = shard_sequence(self.tokens_BT, self.mesh)
        return differ(self._step(model, tokens_BT=tokens_BT), self._plain(dtype))

    def context_parallel_all_gather(self) -> float:
        return self.context_parallel("all_gather")

    def context_parallel_ulysses(self) -> float:
        return self.context_parallel("ulysses")

    def expert_parallel(self) -> float:
        from minititan.expert_parallel import apply_expert_parallel

        config = PRESETS["debug-moe"]
        model = apply_expert_parallel(self._model(config=config), self.mesh)
        return differ(self._step(model), self._plain(config=config))

    def grouped_mm(self) -> float:
        generator = torch.Generator().manual_seed(0)
        x_SI, w_EOI = (torch.randn(*s, generator=generator).to(self.device) for s in ((96, 64), (4, 32, 64)))
        counts_E = torch.tensor([32, 0, 40, 24], device=self.device)
        ours = grouped_linear(x_SI.bfloat16(), w_EOI.bfloat16(), counts_E)
        return differ([ours], [grouped_linear(x_SI, w_EOI, counts_E)])

    def float8_by_hand(self) -> float:
        """Against torchao, recipe for recipe."""
        from minititan.float8 import RECIPES, convert_to_float8, float8_linear_by_hand

        worst = 0.0
        for recipe in RECIPES:
            torch.manual_seed(0)
            layer = nn.Linear(64, 64, bias=False).to(self.device, torch.bfloat16)
            native, found = convert_to_float8(nn.Sequential(layer), recipe, skip=())[0], []
            x_MK, dy_MN = torch.randn(2, 64, 64).to(self.device, torch.bfloat16)
            for call in (partial(float8_linear_by_hand, w_NK=native.weight, recipe=recipe), native):
                x = x_MK.clone().requires_grad_()
                native.weight.grad = None
                y = call(x)
                y.backward(dy_MN)
                found.append((y, x.grad, native.weight.grad))
            worst = max(worst, differ(*found))
        return worst

    def float8_tensorwise(self, recipe: str = "tensorwise") -> float:
        from minititan.float8 import convert_to_float8

        model = convert_to_float8(self._model(torch.bfloat16), recipe)
        return differ(self._step(model), self._plain(torch.bfloat16))

    def float8_rowwise(self) -> float:
        return self.float8_tensorwise("rowwise")

    def float8_rowwise_with_gw_hp(self) -> float:
        return self.float8_tensorwise("rowwise_with_gw_hp")

    def float8_all_gather(self) -> float:
        from minititan.float8 import convert_to_float8, scales_once_a_step, send_float8_as_bytes
        from minititan.fsdp import apply_fsdp

        model = convert_to_float8(self._model(torch.float32), fsdp_all_gather=True)
        apply_fsdp(model, self.mesh, param_dtype=torch.bfloat16)
        send_float8_as_bytes(model)
        scales_once_a_step(model, build_adamw(model.parameters()))
        return differ(self._step(model), self._plain())

    def activation_checkpoint_by_hand(self) -> float:
        model = self._model()
        for block in model.layers.values():
            block.forward = partial(activation_checkpoint.checkpoint_by_hand, block.forward)
        return differ(self._step(model), self._plain())

    def activation_checkpoint_full(self, mode: str = "full") -> float:
        model = activation_checkpoint.apply_activation_checkpoint(self._model(), mode)
        return differ(self._step(model), self._plain())

    def activation_checkpoint_every_other(self) -> float:
        return self.activation_checkpoint_full("every_other")

    def activation_checkpoint_per_op(self) -> float:
        return self.activation_checkpoint_full("per_op")

    def activation_checkpoint_budget(self) -> float:
        model = activation_checkpoint.apply_activation_checkpoint(self._model(torch.float32), "budget")
        return differ(self._step(model), self._plain())

    def regional_compile(self) -> float:
        from minititan.regional_compile import compile_blocks

        model = compile_blocks(self._model(torch.float32), backend=self.backend)
        return differ(self._step(model), self._plain())

    def grad_clip(self) -> float:
        from minititan.fsdp import apply_fsdp

        model, plain = apply_fsdp(self._model(), self.mesh), self._model()
        ours, theirs = self._step(model)[1:], self._step(plain)[1:]
        norm = clip_grad_norm_(model.parameters(), 0.1)
        truth = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        return differ([norm, *ours], [truth, *theirs])

    def optimizer(self, state_dtype: torch.dtype | None = None) -> float:
        from minititan.fsdp import apply_fsdp

        model, plain = apply_fsdp(self._model(), self.mesh), self._model()
        ours = build_adamw(model.parameters(), state_dtype, lr=1e-3, weight_decay=0.1)
        theirs = torch.optim.AdamW(plain.parameters(), 1e-3, (0.9, 0.95), weight_decay=0.1, foreach=False)
        for _ in range(3):
            for module, optimizer in ((model, ours), (plain, theirs)):
                self._step(module)
                optimizer.step()
                optimizer.zero_grad()
        return differ(model.parameters(), plain.parameters())

    def optimizer_bf16_state(self) -> float:
        return self.optimizer(torch.bfloat16)

    def checkpoint(self) -> float:
        """Saved by FSDP, on the way of save and of async_save, and read by FSDP and by a plain model."""
        from minititan.checkpoint import async_save, load, save
        from minititan.fsdp import apply_fsdp

        model, worst = apply_fsdp(self._model(), self.mesh), 0.0
        optimizer = build_adamw(model.parameters())
        self._step(model)
        optimizer.step()
        optimizer.zero_grad()
        saved = [p.full_tensor().clone() for p in model.parameters()]
        with tempfile.TemporaryDirectory() as folder:
            save(Path(folder, "now"), 1, model, optimizer)
            async_save(Path(folder, "later"), 1, model, optimizer).wait()
            for name, shard in (("now", True), ("later", False)):
                config = self.config
                other = materialize(on_meta(lambda config=config: Transformer(config).double()), self.device, seed=1)
                other = apply_fsdp(other, self.mesh) if shard else other
                extra = load(Path(folder, name), other, build_adamw(other.parameters()))
                worst = max(worst, differ(other.parameters(), saved), abs(extra["step"] - 1))
        return worst

    def flight_recorder(self) -> float:
        """The share of calls in which the journal by hand and the backend's own ring buffer differ; dumped, too."""
        from minititan.flight_recorder import dump, read_journal_by_hand, recording

        x = torch.ones(8, device=self.device)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            with recording(folder):
                for n in range(1, 6):
                    dist.all_reduce(x[:n].clone())
                    dist.all_gather([torch.empty_like(x)], x)
                    dist.broadcast(x.double(), src=0)
                synchronize(self.device)
                ring = dump(folder)["calls"][-15:]
                journal = read_journal_by_hand(folder / "journal_0")
                there = (folder / "calls_0.json").exists()
        fields = ("group", "number", "name", "shapes", "dtypes")
        wrong = sum(any(a[f] != b[f] for f in fields) for a, b in zip(journal, ring, strict=True))
        if wrong:
            a, b = next((a, b) for a, b in zip(journal, ring, strict=True) if any(a[f] != b[f] for f in fields))
            print({f: (a[f], b[f]) for f in fields})
        return 1.0 if not there or len(ring) != 15 else wrong / 15

    def train(self) -> float:
        """The first loss of the composed loop against the plain model's on the same rows."""
        from minititan.data import ByteCorpus, batches
        from minititan.train import train

        config = TrainConfig(steps=2, global_batch=4, seq_len=64, dtype="float64", log_every=0, eval_batches=1)
        tokens_BT, targets_BT = (x.to(self.device) for x in batches(ByteCorpus(), 4, 64, 0))
        plain = F.cross_entropy(self._model()(tokens_BT).flatten(0, 1), targets_BT.flatten())
        return abs(train(config).losses[0] / plain.item() - 1)


# Errors of float64 but where the arithmetic is narrower: bf16 (of which float8 is judged by gradients through 4 blocks).
TOLERANCES = {
    "fsdp_bf16": 0.1,
    "grouped_mm": 0.02,
    "float8_by_hand": 0.01,
    "float8_tensorwise": 0.4,
    "float8_rowwise": 0.4,
    "float8_rowwise_with_gw_hp": 0.4,
    "float8_all_gather": 0.4,
    "activation_checkpoint_budget": 1e-3,
    "regional_compile": 1e-3,
    "optimizer_bf16_state": 0.01,
}


def smoke(run: Run) -> None:
    join_group(run.device)
    techniques = Techniques(run)
    names = [name for name in vars(Techniques) if not name.startswith("_")]
    for name in names:
        tolerance = TOLERANCES.get(name, 1e-10)
        if name.startswith("context_parallel") and run.device.type == "cuda":
            tolerance = 0.05  # bf16
        missing = "torchao is not installed" if "float8" in name and has("torchao") else ""
        if run.toy and name == "activation_checkpoint_budget":
            missing = "it is inductor's, which compiles C++ for a minute on a CPU"
        if missing:
            why = f"left out: {missing}"
            run.add(technique=name, ok=None, error=None, seconds=0.0, tolerance=tolerance, why=why)
            run.notes.append(f"{name} {why}")
            continue
        began, error, why = time.monotonic(), None, ""
        try:
            error = getattr(techniques, name)()
            synchronize(run.device)
            if not error < tolerance:
                why = f"its error of {error:.1e} is not below {tolerance}"
        except Exception as problem:
            traceback.print_exc()
            why = short(problem)
            if ROWWISE_ON_CPU in why:
                run.add(technique=name, ok=None, error=None, seconds=0.0, tolerance=tolerance, why=f"left out: {why}")
                run.notes.append(f"{name} left out: this torch multiplies rowwise on a GPU only")
                continue
        if why:
            run.failed.append(f"{name}: {why}"[:400])
        seconds = round(time.monotonic() - began, 2)
        row = {"technique": name, "ok": not why, "error": error if error is None or math.isfinite(error) else None}
        run.add(**row, seconds=seconds, tolerance=tolerance, why=why)
        gc.collect()


# ---- the trainer ----------------------------------------------------------------------------------------------


def build_job(run: Run, batch: int, seq_len: int, **options) -> tuple[Job, list[tuple[Tensor, Tensor]]]:
    """A trainer of this model on this device, and the one microbatch that it trains on again and again."""
    config = TrainConfig(model=run.model, global_batch=batch, seq_len=seq_len, lr=1e-4, log_every=0, **options)
    check(config, 1)
    job = Job(config, run.dims, run.device, partial(materialize, draw_on=run.device))
    generator = torch.Generator().manual_seed(0)
    rows_BT = torch.randint(run.model.vocab_size, (batch, seq_len + 1), generator=generator).to(run.device)
    return job, [(rows_BT[:, :-1].contiguous(), rows_BT[:, 1:].contiguous())]


def step(job: Job, pieces: list[tuple[Tensor, Tensor]]) -> None:
    job.forward_backward(pieces)
    clip_grad_norm_(job.parameters, job.config.max_norm)
    job.update(job.config.lr)


def time_steps(job: Job, pieces: list[tuple[Tensor, Tensor]], warm: int, n: int) -> float:
    """Seconds of the median step, of n after so many that do not count."""
    seconds = []
    for i in range(warm + n):
        synchronize(job.device)
        began = time.perf_counter()
        step(job, pieces)
        synchronize(job.device)
        if i >= warm:
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def held_at_most(job: Job, pieces: list[tuple[Tensor, Tensor]]) -> int:
    """Bytes of tensors in one more step: the allocator's count. On a CPU the ledger's, which does not see into compiled
    blocks: of those what the process holds."""
    if job.device.type == "cuda":
        synchronize(job.device)
        torch.cuda.reset_peak_memory_stats(job.device)
        step(job, pieces)
        synchronize(job.device)
        return torch.cuda.max_memory_allocated(job.device)
    if job.config.compile != "none" or job.parts[0]._compiled_call_impl is not None:
        return peak_memory(job.device)
    with watch_memory(job.parts[0], job.optimizer) as samples:
        step(job, pieces)
    return peak(samples).total


def predicted(run: Run, batch: int, seq_len: int, **layout) -> int:
    """The planner's largest moment."""
    fused = run.device.type == "cuda"
    moments = planner.memory(run.model, batch=batch, seq_len=seq_len, fused_norms=fused, **layout)
    return max(map(planner.total, moments.values()))


def is_out_of_memory(error: BaseException) -> bool:
    """Of the GPU: torch's own, what cuBLAS and NCCL say, and any of them inside of a compiler's error."""
    told = str(error)
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in told or "ALLOC_FAILED" in told


def free() -> None:
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# ---- throughput -----------------------------------------------------------------------------------------------

RECIPES = {"bf16": "none", "float8 tensorwise": "tensorwise", "float8 rowwise": "rowwise"}
TOY_LIMIT = 4  # sequences: more are made to run out of memory, for a CPU would not


def attempt(run: Run, recipe: str, batch: int, seq_len: int) -> dict | str:
    """The row of a recipe at this batch, or why it does not fit. Blocks compiled, float32 weights, FSDP in bf16."""
    failure, row = "", {}
    try:
        if run.toy and batch > TOY_LIMIT:
            raise torch.OutOfMemoryError(f"{batch} sequences, at toy size made to fail")
        options = {"compute_dtype": "bfloat16", "compile": run.backend, "float8": RECIPES[recipe]}
        job, pieces = build_job(run, batch, seq_len, **options)
        seconds = time_steps(job, pieces, warm=2, n=3 if run.toy else 6)
        row = {"step_s": seconds, "peak_bytes": held_at_most(job, pieces)}
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        failure = f"{type(error).__name__}: {str(error)[:200]}"
    # Past the except block, so that no traceback holds the tensors.
    job = pieces = None
    free()
    return failure or row


def search(attempt_at: Callable[[int], dict | str], first: int, time_for_more: Callable[[float], bool]) -> tuple:
    """(largest batch that fits, its row, {batch: what happened}), by doubling from `first`, or halving down to 1.

    time_for_more(seconds of the attempt before): whether to try a larger one when the first fits. ValueError if 1 does not fit.
    """
    batch, best, tries = first, None, {}
    while True:
        began = time.monotonic()
        found = attempt_at(batch)
        took = time.monotonic() - began
        tries[batch] = "fits" if isinstance(found, dict) else found
        if isinstance(found, dict):
            best = batch, found
            if 2 * batch in tries:
                break
            if not time_for_more(took):
                tries[2 * batch] = "not tried"
                break
            batch *= 2
        elif best or batch == 1:
            break
        else:
            batch //= 2
    if best is None:
        raise ValueError(f"not even a batch of 1 fits: {tries[1]}")
    return *best, tries


def throughput(run: Run) -> None:
    join_group(run.device)
    model, seq_len = run.model, 64 if run.toy else 8192
    n = count_parameters(model) - (0 if model.tied else model.vocab_size * model.dim)
    flops = flops_per_token(n, model.n_layers, model.n_heads, model.head_dim, seq_len)
    capacity = 2**40 if run.toy else torch.cuda.mem_get_info()[0]
    layout = {"stage": "fsdp", "compute_dtype": torch.bfloat16}
    fits = [b for b in (1, 2, 4, 8, 16) if predicted(run, b, seq_len, **layout) < 0.95 * capacity]
    first, rate = 2 if run.toy else max(fits, default=1), None
    for i, recipe in enumerate(RECIPES):
        if RECIPES[recipe] != "none" and has("torchao"):
            run.notes.append(f"{recipe} left out: torchao is not installed")
            continue
        share = run.left / (len(RECIPES) - i)  # equal parts of what is left, and doubling pays for two attempts
        until = time.monotonic() + 1.3 * share
        is_first = i == 0

        def time_for_more(took: float, until=until, is_first=is_first) -> bool:
            return is_first and time.monotonic() + 0.8 * took < until

        try:
            batch, row, tries = search(partial(attempt, run, recipe, seq_len=seq_len), first, time_for_more)
        except Exception as error:
            traceback.print_exc()
            known = ROWWISE_ON_CPU in str(error)
            (run.notes if known else run.failed).append(f"{recipe}: {short(error)}")
            run.save()
            free()
            continue
        first = batch  # the other recipes hold what bf16 does
        tokens_per_s = batch * seq_len / row["step_s"]
        rate = rate or tokens_per_s
        top = PEAK_FLOAT8 if RECIPES[recipe] != "none" else PEAK_BF16
        run.add(
            recipe=recipe,
            batch=batch,
            tokens_per_s=tokens_per_s,
            mfu=tokens_per_s * flops / top,  # of the peak of its own format
            ratio=tokens_per_s / rate,
            mfu_of_bf16_peak=tokens_per_s * flops / PEAK_BF16,  # as most reports count float8 too
            seq_len=seq_len,
            flops_per_token=flops,
            predicted_bytes=predicted(run, batch, seq_len, **layout),
            **row,
            tries={str(key): told for key, told in tries.items()},
        )


# ---- compile --------------------------------------------------------------------------------------------------


def compile_one(run: Run, how: str) -> dict:
    """In a fresh process: what the first step costs, and what later ones give."""
    from minititan.regional_compile import count_graphs

    join_group(run.device)
    batch, seq_len = (2, 64) if run.toy else (2, 8192)
    start_s = 0.0
    if how != "eager":  # the compiler's own start, which no way of using it can spare
        began = time.perf_counter()
        x = torch.ones(2, device=run.device, requires_grad=True)
        torch.compile(lambda x: x + 1, backend=run.backend)(x).sum().backward()
        start_s = time.perf_counter() - began
    with count_graphs() as count:
        blocks = {"compile": run.backend} if how == "blocks" else {}
        job, pieces = build_job(run, batch, seq_len, dtype="bfloat16", **blocks)
        if how == "whole":
            job.parts[0].compile(backend=run.backend)
            job.loss_sum = torch.compile(job.loss_sum, backend=run.backend)
        synchronize(run.device)
        began = time.perf_counter()
        job.forward_backward(pieces)
        synchronize(run.device)
        seconds_cold = time.perf_counter() - began
        job.update(job.config.lr)
        step_s = time_steps(job, pieces, warm=2, n=3 if run.toy else 6)
        held = held_at_most(job, pieces)
    row = {"how": how, "seconds_cold": seconds_cold, "tokens_per_s": batch * seq_len / step_s, "step_s": step_s}
    row |= {"start_s": start_s, "batch": batch, "seq_len": seq_len, "graphs": count.graphs, "breaks": count.breaks}
    return row | {"peak_bytes": held}


def compile_section(run: Run) -> None:
    """blocks first: whole may take longer than there is."""
    for how in ("blocks", "eager", "whole"):
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder, "row.json")
            command = [
                sys.executable,
                __file__,
                *(["--toy"] if run.toy else []),
                "--out",
                str(run.out),
                f"compile:{how}",
            ]
            environment = os.environ | {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
            seconds = max(run.left - 3, 1)
            try:
                done = subprocess.run(
                    [*command, str(result), f"{time.time() + seconds:.1f}"],
                    env=environment,
                    timeout=seconds,
                    stdin=subprocess.DEVNULL,
                )
            except subprocess.TimeoutExpired:
                run.failed.append(f"{how}: not done after {seconds:.0f} s")
                run.save()
                break
            found = json.loads(result.read_text()) if result.exists() else {}
            if found.get("finished") and found["ok"]:
                run.add(**found["rows"])
            else:
                run.failed.append(f"{how}: {found.get('why') or f'exit code {done.returncode}'}")
                run.save()


# ---- memory ---------------------------------------------------------------------------------------------------


def checkpoint(run: Run) -> None:
    """Peak and step time of each mode, not compiled (a compiler keeps less than the table of the planner says)."""
    join_group(run.device)
    batch, seq_len = (2, 64) if run.toy else (2, 4096)
    for mode in planner.CHECKPOINTS:
        job, pieces = build_job(run, batch, seq_len, dtype="bfloat16", activation_checkpoint=mode)
        step_s = time_steps(job, pieces, warm=2, n=3)
        held = held_at_most(job, pieces)
        layout = {"stage": "ddp", "dtype": torch.bfloat16, "checkpoint": mode}
        told = predicted(run, batch, seq_len, **layout)
        row = {"mode": mode, "peak_bytes": held, "predicted_bytes": told, "step_s": step_s, "ratio": told / held}
        run.add(**row, batch=batch, seq_len=seq_len)
        job = pieces = None
        free()


def peak_of_trace(entries: Iterable[dict], at_first: int) -> int:
    """The most bytes that were allocated at a time, from a snapshot's list of what the allocator did."""
    now = most = at_first
    for entry in entries:
        if entry["action"] == "alloc":
            now += entry["size"]
        elif entry["action"] == "free_completed":
            now -= entry["size"]
        most = max(most, now)
    return most


def allocator(run: Run) -> None:
    """One step four times: counted by the allocator, followed by the ledger, recorded by a snapshot, predicted."""
    join_group(run.device)
    batch, seq_len = (2, 64) if run.toy else (2, 4096)
    job, pieces = build_job(run, batch, seq_len, dtype="bfloat16")
    time_steps(job, pieces, warm=2, n=1)
    on_gpu = run.device.type == "cuda"
    told = predicted(run, batch, seq_len, stage="ddp", dtype=torch.bfloat16)
    with watch_memory(job.parts[0], job.optimizer) as samples:
        step(job, pieces)
        synchronize(run.device)
    fullest = peak(samples)
    run.rows = {"batch": batch, "seq_len": seq_len, "predicted_bytes": told, "ledger_peak_bytes": fullest.total}
    run.rows |= {"ledger_bytes": fullest.n_bytes, "predicted_ratio": told / fullest.total}  # to the allocator's, if any
    run.save()
    if not on_gpu:
        run.notes.append("no allocator to ask on a CPU: ledger and planner only")
        return
    held = held_at_most(job, pieces)
    run.rows |= {"allocated_peak_bytes": held, "reserved_peak_bytes": torch.cuda.max_memory_reserved()}
    run.rows |= {"predicted_ratio": told / held, "ledger_ratio": fullest.total / held}
    run.save()
    at_first = torch.cuda.memory_allocated()
    path = run.out / "gpu_snapshot.pickle"
    with cuda_snapshot(path):
        step(job, pieces)
        synchronize(run.device)
    n_bytes = path.stat().st_size
    traces = pickle.loads(path.read_bytes())["device_traces"]
    run.rows |= {"snapshot_peak_bytes": peak_of_trace(traces[0], at_first), "snapshot_entries": len(traces[0])}
    run.rows |= {"snapshot_file_bytes": n_bytes, "snapshot": path.name}
    if n_bytes > SNAPSHOT_BYTES:
        path.unlink()
        run.rows["snapshot"] = None
        run.notes.append(f"a snapshot of {n_bytes / 2**20:.0f} MiB was read and not kept")


SECTIONS = {
    "machine": machine,
    "smoke": smoke,
    "throughput": throughput,
    "compile": compile_section,
    "checkpoint": checkpoint,
    "allocator": allocator,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("section")
    parser.add_argument("result", type=Path)
    parser.add_argument("deadline", type=float)
    given = parser.parse_args()
    run = Run(given.result, given.out, given.toy, given.deadline)
    given.out.mkdir(parents=True, exist_ok=True)
    try:
        name, _, how = given.section.partition(":")
        if how:
            run.rows = compile_one(run, how)
        else:
            SECTIONS[name](run)
    except Exception as error:
        traceback.print_exc()
        run.failed.append(short(error))
    run.save(finished=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # neither gloo's teardown nor inductor's workers need be waited for


if __name__ == "__main__":
    main()
