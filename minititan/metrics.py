"""What a training run is worth: tokens a second, how much of the hardware that uses, and where the rest went.

Losses compare models; tokens/s compares runs of one model on one machine; MFU (model flops utilisation) compares
anything with anything:

                 tokens/s  ×  flops a token of this model needs        needs, not does: recomputed activations, padding
    MFU  =  ────────────────────────────────────────────────────       and optimizer steps earn nothing, so a slower
                 GPUs  ×  flops/s one GPU can do at most               run cannot look better by doing more

Flops per trained token (the convention of PaLM, appendix B, which torchtitan, nanoGPT and most reports share):

    flops = 6·N + 12·L·H·K·T        N  parameters that multiply: all but the input embedding, which is a lookup
                                       (the output matrix multiplies, also when it is tied to the embedding)
                                    L  layers   H  query heads   K  numbers a head   T  tokens of a sequence

    6·N          a parameter is one multiply and one add forward (2), and twice that backward: the gradient of the
                 input and of the weight (4)
    12·L·H·K·T   attention scores: a query meets T keys with K multiply-adds in each of H heads (2·H·K·T), the
                 weighted sum of values takes as many again, and backward twice both: (2 + 2)·3

The second term counts all T keys although causal attention needs on average half: the convention predates kernels
that skip them. `causal=True` counts the half; state which one when you compare. For Llama-3 8B at T = 8192 the
attention term is 12.9 of 57.9 GFLOP a token.

`peak_flops` knows what NVIDIA's data sheets say for dense bf16 (their headline numbers are with 2:4 sparsity, twice as
much). MFU is None where no peak is known, as on a CPU: better no number than one against a guess.

What is shown must be global, and each number has its own way there, over exactly the axes that split it (`reduce_row`):

    tokens, loss's sum      summed      over the axes that split tokens: dp, cp         not tp: its ranks see the same
    loss                    sum of sums / sum of tokens, over the same; a mean of means weighs a short rank like a long
    memory, waiting         maximum     over all ranks: the slowest and the fullest decide
    gradient norm           root of the sum of squares, over the axes that split parameters (grad_clip knows which)

    rank 0 ── Meter.step ─▶ row ─▶ tensorboard, wandb, csv, or several at once       what all ranks did
    each rank ─────┬─────────────▶ jsonl: rank_0000.jsonl, ...                       what this one did
                   └ StepProfiler ▶ rank_0000_step_000000100.trace.json.gz, ...      a few steps in every detail

Resuming   `after=None` begins a log anew, `after=120` goes on with step 121: what a killed run wrote for later steps is
           taken out (CSV), hidden (TensorBoard, which also hides what lay in the folder when it begins anew) or, on the
           same run id, stands first (W&B). JSON lines are a diary: they only ever grow.
A kill     loses no row that `log` has returned from. Nothing is synced to the disk, so a power cut can.
Cost       nothing that waits: `Meter` reads the clock and the allocator's counters and never synchronises a GPU. The
           loop does, when it reads the loss (`loss.item()`); without that the host's clock would measure how fast
           kernels are queued. A reduced row is 2 all-reduces of a few numbers for each axis. A traced step is slower.
References PaLM (Chowdhery et al. 2022, arXiv:2204.02311, appendix B) · torchtitan, docs/metrics · torch.profiler ·
           data sheets of A100, H100 (SXM, PCIe, NVL), H200, B200.
"""

import csv
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.profiler import profile, schedule

# Dense bf16 flops/s by what torch.cuda.get_device_name() contains; the first match counts.
PEAK_BF16_FLOPS = {
    "A100": 312e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,  # SXM: "NVIDIA H100 80GB HBM3"
    "H200": 989e12,
    "GB200": 2500e12,
    "B200": 2250e12,
}


def flops_per_token(
    n_parameters: int, n_layers: int, n_heads: int, head_dim: int, seq_len: int, causal: bool = False
) -> int:
    """Flops to train on one token, forward and backward: 6·N + 12·L·H·K·T (half of the second term if `causal`).

    n_parameters: those of the whole model that multiply, so without an input embedding that is not tied.
    """
    numbers = {"n_parameters": n_parameters, "n_layers": n_layers, "n_heads": n_heads}
    for name, value in {**numbers, "head_dim": head_dim, "seq_len": seq_len}.items():
        if value < (0 if name in ("n_parameters", "n_layers") else 1):
            raise ValueError(f"{name}={value}: sizes of a model are positive")
    return 6 * n_parameters + (6 if causal else 12) * n_layers * n_heads * head_dim * seq_len


def peak_flops(device: torch.device | str) -> float | None:
    """Dense bf16 flops/s of a GPU, by torch.device or by its name; None where no data sheet is known, as on CPU."""
    if isinstance(device, torch.device):
        if device.type != "cuda":
            return None
        device = torch.cuda.get_device_name(device)
    return next((flops for name, flops in PEAK_BF16_FLOPS.items() if name in device), None)


def peak_memory(device: torch.device) -> int:
    """Most bytes this process has held so far: tensors on a GPU (the allocator), else its resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:  # not getrusage: Linux hands a child the peak of the process that started it
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    except (OSError, IndexError):
        try:
            import resource  # macOS, in bytes there
        except ImportError:
            return 0  # Windows
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


# ---- a row of numbers -----------------------------------------------------------------------------------------


@dataclass
class Meter:
    """Turns steps into rows of numbers.

        meter = Meter(flops_per_token(...), n_devices=world_size, device=device)
        with meter.data_wait():
            batch = next(loader)
        row = meter.step(loss, grad_norm, tokens=global_batch * seq_len)

    flops_per_token: None leaves MFU out. n_devices: over how many the tokens of a step are spread. peak: flops/s of one
    device; found by its name when None. bubble: the share of a step in which a pipeline's ranks stand idle, of its
    schedule; None leaves it out. The first step starts when the Meter is made, or at `start()`.
    """

    flops_per_token: float | None = None
    n_devices: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    peak: float | None = None
    bubble: float | None = None
    steps: int = 0
    tokens: int = 0
    _since: float = field(default=0.0, repr=False)
    _waited: float = field(default=0.0, repr=False)

    def __post_init__(self):
        if self.n_devices < 1:
            raise ValueError(f"n_devices={self.n_devices}: tokens are trained on at least one device")
        if self.bubble is not None and not 0 <= self.bubble < 1:
            raise ValueError(f"bubble={self.bubble} is a share of the step: from 0 to below 1")
        if self.peak is None:
            self.peak = peak_flops(self.device)
        self.start()

    def start(self) -> None:
        """The next step begins now. For what must not count as training, such as an evaluation between two steps."""
        self._since, self._waited = time.perf_counter(), 0.0

    @contextmanager
    def data_wait(self) -> Iterator[None]:
        """Around everything that fetches a batch: the seconds in which the step has nothing to compute."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._waited += time.perf_counter() - began

    def step(self, loss: float, grad_norm: float, tokens: int, **extra: float) -> dict[str, float | None]:
        """One finished optimizer step of `tokens` tokens, all devices together. Returns its row, `extra` at the end.

        `loss` and `grad_norm` must be the global ones: the Meter sends nothing.
        step_time_s: seconds since the last step. data_wait_s: seconds of them for a batch, of this rank.
        tokens_per_s: of all devices together. mfu: 0 to 1, or None. peak_memory_bytes: of this process, so far.
        """
        now = time.perf_counter()
        seconds, self._since = max(now - self._since, 1e-9), now
        waited, self._waited = self._waited, 0.0
        self.steps, self.tokens = self.steps + 1, self.tokens + tokens
        rate, mfu = tokens / seconds, None
        if self.peak and self.flops_per_token:
            mfu = rate * self.flops_per_token / (self.n_devices * self.peak)
        return {
            "step": self.steps,
            "loss": loss,
            "grad_norm": grad_norm,
            "tokens": self.tokens,
            "tokens_per_s": rate,
            "mfu": mfu,
            "step_time_s": seconds,
            "data_wait_s": waited,
            "peak_memory_bytes": peak_memory(self.device),
            **({} if self.bubble is None else {"bubble": self.bubble}),
            **extra,
        }


Over = dist.ProcessGroup | DeviceMesh | Sequence["Over"] | None  # None: the default group
Number = float | Tensor


def _groups(over: Over) -> list[dist.ProcessGroup]:
    """One group for each axis. ValueError if two have more than this rank in common: it would be added twice."""
    if isinstance(over, DeviceMesh):
        return [over.get_group(axis) for axis in range(over.ndim)]
    if not isinstance(over, (list, tuple)):
        return [over or dist.group.WORLD]
    groups = [group for part in over for group in _groups(part)]
    members = [set(dist.get_process_group_ranks(group)) for group in groups]
    for i, some in enumerate(members):
        for others in members[:i]:
            if len(some & others) > 1:
                raise ValueError(
                    f"the axes {sorted(others)} and {sorted(some)} have {len(some & others)} ranks in common, so their "
                    "numbers would be added twice: name each axis that splits them once"
                )
    return groups


def reduce_row(
    over: Over,
    sums: Mapping[str, Number] | None = None,
    means: Mapping[str, tuple[Number, Number]] | None = None,
    norms: Mapping[str, Number] | None = None,
    maxima: Mapping[str, Number] | None = None,
    device: torch.device | str | None = None,
) -> dict[str, float]:
    """Global numbers, equal on all ranks of `over`, in float64: name -> number, in the order given.

        row = reduce_row([mesh["dp"], mesh["cp"]], sums={"tokens": n}, means={"loss": (loss_sum, n)})
        row |= reduce_row(None, maxima={"peak_memory_bytes": bytes})               # of all ranks

    over: the axes that split these numbers, as a mesh (all of its axes), a group, or a list of them; an axis on which
    they are equal must be left out, or a sum counts them again. means: (total, weight), to the sum of totals over the
    sum of weights; nan without any weight. norms: roots of sums of squares. maxima: a nan on one rank is a nan.
    Numbers may be tensors of one element. device: default, that of the first tensor, or the CPU. Waits for it once.
    """
    sums, means, norms, maxima = sums or {}, means or {}, norms or {}, maxima or {}
    names = [*sums, *means, *norms, *maxima]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"{sorted(twice)} twice in a row of {names}: a name has one number")
    totals, weights = zip(*means.values(), strict=True) if means else ((), ())
    added, sizes = [*sums.values(), *totals, *norms.values(), *weights], (len(sums), len(means), len(norms), len(means))
    values = [*added, *maxima.values()]
    if device is None:
        device = next((value.device for value in values if isinstance(value, Tensor)), "cpu")
    if not names:
        return {}
    row = torch.stack([torch.as_tensor(v).detach().to(device, torch.float64).reshape(()) for v in values])
    row[len(sums) + len(means) :][: len(norms)].square_()
    added, largest = row.split([len(added), len(maxima)])
    added = torch.cat([added, largest.isnan().double()])  # a MAX may lose a nan
    largest = largest.clone()
    for group in _groups(over):
        dist.all_reduce(added, group=group)
        if maxima:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    sum_, total, square, weight, n_nan = added.split([*sizes, len(maxima)])
    row = torch.cat([sum_, total / weight, square.sqrt(), torch.where(n_nan > 0, math.nan, largest)])
    return dict(zip(names, row.tolist(), strict=True))


# ---- where rows go --------------------------------------------------------------------------------------------


class Sink(Protocol):
    """A place for rows, and a context manager. A row's numbers may be None; "step" counts from 1."""

    def log(self, row: Mapping[str, Any]) -> None: ...
    def close(self) -> None: ...
    def __enter__(self) -> "Sink": ...
    def __exit__(self, *_) -> None: ...


class _Closing:
    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self.close()


def _lines(path: Path) -> list[str]:
    """Those of a file that may not be there; without the last if a power cut has left it without its end."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return text[: text.rfind("\n") + 1].splitlines()


class CsvLog(_Closing):
    """Rows to a CSV file. Each row reaches the file before `log` returns, so that a kill loses nothing of it."""

    def __init__(self, path: str | os.PathLike, after: int | None = None):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        rows = list(csv.reader(_lines(self.path))) if after is not None else []
        self._columns: list[str] | None = rows[0] if rows else None
        if rows:
            if "step" not in rows[0]:
                raise ValueError(f"{self.path} has the columns {rows[0]} and no 'step': which rows are after {after}?")
            at = rows[0].index("step")
            rows = [rows[0], *(row for row in rows[1:] if float(row[at]) <= after)]
        aside = self.path.with_name(self.path.name + ".part")
        with open(aside, "w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)
        os.replace(aside, self.path)  # whole, whenever the kill comes
        self._file = open(self.path, "a", newline="", encoding="utf-8")  # noqa: SIM115 - close() is ours
        self._writer = csv.writer(self._file, lineterminator="\n")

    def log(self, row: Mapping[str, Any]) -> None:
        """Writes one row; the first gives the columns. None is an empty cell.

        Raises ValueError for a column that the first row did not have: a CSV file has one header.
        """
        if self._columns is None:
            self._columns = list(row)
            self._writer.writerow(self._columns)
        if unknown := [name for name in row if name not in self._columns]:
            raise ValueError(
                f"{self.path}: row has the new columns {unknown}, but the header is {self._columns}; "
                f"give every row the same keys, None where there is no value."
            )
        self._writer.writerow([row.get(name) for name in self._columns])
        self._file.flush()  # to the kernel, which outlives this process

    def close(self) -> None:
        self._file.close()


class RankLog(_Closing):
    """What one rank did, as JSON lines in folder/rank_0003.jsonl: rows, and events between them.

    Each line carries "time" (seconds since 1970), "rank" and "pid", and is one write to the end of the file, whole or
    not there. It only grows: a restarted rank writes on, and its pid tells the incarnations apart. JSON has no nan:
    it is the text "nan". rank: that of the default group, or 0.
    """

    def __init__(self, folder: str | os.PathLike, after: int | None = None, rank: int | None = None):
        self.rank = _rank() if rank is None else rank
        self.path = Path(folder) / f"rank_{self.rank:04d}.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            os.write(self._fd, b"\n")  # a power cut's half line stays alone
        if after is not None:
            self.event("resumed", step=after)

    def log(self, row: Mapping[str, Any]) -> None:
        self.event("row", **row)

    def event(self, name: str, **fields: Any) -> None:
        """One line, such as `event("checkpoint", step=120, seconds=3.1)`."""
        line = {"time": time.time(), "rank": self.rank, "pid": os.getpid(), "event": name, **fields}
        finite = {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}
        os.write(self._fd, (json.dumps(finite, default=str) + "\n").encode())

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


def read_rank_logs(folder: str | os.PathLike) -> list[dict[str, Any]]:
    """The lines of all ranks in order of their time (of their hosts' clocks); what is no JSON is left out."""
    found = []
    for path in sorted(Path(folder).glob("rank_*.jsonl")):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                continue  # half a line, of a power cut
    return sorted(found, key=lambda line: line["time"])


class TensorBoardLog(_Closing):
    """Numbers to an event file in `folder`, one tag a column; `tensorboard --logdir` shows its parent's runs.

    TensorBoard keeps float32: whole numbers above 2^24 are rounded. What is no number is left out.
    """

    def __init__(self, folder: str | os.PathLike, after: int | None = None, config: Mapping | None = None):
        from torch.utils.tensorboard import SummaryWriter

        start = 0 if after is None else after + 1
        is_used = any(Path(folder).glob("events.out.tfevents.*"))
        self._writer = SummaryWriter(os.fspath(folder), purge_step=start if is_used else None)
        if config:
            lines = json.dumps(dict(config), indent=4, default=str).splitlines()
            self._writer.add_text("config", "\n".join(f"    {line}" for line in lines), after or 0)
        self._writer.flush()

    def log(self, row: Mapping[str, Any]) -> None:
        for name, value in row.items():
            if isinstance(value, int | float | Tensor) and name != "step":
                self._writer.add_scalar(name, value, row["step"])
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbLog(_Closing):
    """Rows to Weights & Biases: by default offline, into folder/wandb, for `wandb sync` to send if you ever want.

    mode: "online" wants an account. options: of wandb.init, such as project, name, tags. W&B's own process starts here
    and ends in `close`; nothing is printed, and nothing is written outside of `folder`. `after` goes on under the same
    id, which is in folder/wandb_id; offline that is one more folder, which `wandb sync` joins to the first.
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        after: int | None = None,
        config: Mapping | None = None,
        mode: str = "offline",
        **options: Any,
    ):
        folder = Path(folder).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        own = {f"WANDB_{kind}_DIR": str(folder / "wandb" / kind.lower()) for kind in ("CACHE", "DATA")}
        with _environment(WANDB_ERROR_REPORTING="false", **own):  # for the process that init starts
            import wandb

            if wandb.run is not None:
                raise ValueError(f"the W&B run {wandb.run.id} is open in this process: call its finish() first")
            kept = folder / "wandb_id"
            run_id = kept.read_text() if after is not None and kept.exists() else os.urandom(4).hex()
            kept.write_text(run_id)
            quiet = {"silent": True, "console": "off", "x_disable_stats": True, "x_disable_meta": True}
            quiet |= {"x_save_requirements": False, "disable_git": True, "disable_code": True}
            settings = wandb.Settings(**quiet | options.pop("settings", {}))
            defaults = {"project": "minititan", "id": run_id, "resume": None if after is None else "allow"}
            named = {"dir": folder, "mode": mode, "config": dict(config or {}), "settings": settings}
            self._wandb, self._run = wandb, wandb.init(**defaults | options | named)

    def log(self, row: Mapping[str, Any]) -> None:
        self._run.log({name: value for name, value in row.items() if value is not None}, step=row["step"])

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
            self._wandb.teardown()  # its process
        self._run = None


@contextmanager
def _environment(**variables: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class _Several(_Closing):
    def __init__(self, open_one, names: Sequence[str]):
        with ExitStack() as stack:  # if one cannot be opened, those before it are closed
            self._sinks = [stack.enter_context(open_one(name)) for name in names]
            self._stack = stack.pop_all()

    def log(self, row: Mapping[str, Any]) -> None:
        for sink in self._sinks:
            sink.log(row)

    def close(self) -> None:
        self._stack.close()


SINKS = {"tensorboard": TensorBoardLog, "wandb": WandbLog, "csv": CsvLog, "jsonl": RankLog}


def check_sinks(sinks: str | Sequence[str]) -> list[str]:
    """Their names as a list, or ValueError for one that is unknown or not installed. Imports none."""
    names = [sinks] if isinstance(sinks, str) else list(sinks)
    for name in names:
        if name not in SINKS:
            raise ValueError(f"no sink {name!r} to log to; there are: {', '.join(SINKS)}")
        if name in ("tensorboard", "wandb") and find_spec(name) is None:
            raise ValueError(f"{name} is not installed: pip install 'minititan[log]', or log to csv or jsonl")
    if len(set(names)) < len(names) or not names:
        raise ValueError(f"sinks {names}: name each once, and at least one")
    return names


def log_to(
    sink: str | Sequence[str] = "tensorboard",
    path: str | os.PathLike = "runs",
    after: int | None = None,
    config: Mapping | None = None,
    **options: Any,
) -> Sink:
    """A place for rows: has `.log(row)` and `.close()`, and is a context manager. Call it on one rank, "jsonl" on each.

    sink: a name of SINKS, or several to get the same rows. path: a folder; of "csv" alone the file, among several
    path/rows.csv. after: None begins anew, a step goes on after it. config: what the run depends on, for TensorBoard
    and W&B to show. options: of wandb.init. Raises ValueError for a sink that is unknown or not installed.
    """
    names = check_sinks(sink)
    if options and "wandb" not in names:
        raise ValueError(f"options {sorted(options)} are those of wandb.init, and {names} has no 'wandb'")

    def open_one(name: str) -> Sink:
        more = {"config": config} if name in ("tensorboard", "wandb") else {}
        place = path if name != "csv" or isinstance(sink, str) else Path(path) / "rows.csv"
        return SINKS[name](place, after, **more, **(options if name == "wandb" else {}))

    return open_one(sink) if isinstance(sink, str) else _Several(open_one, names)


# ---- a few steps in every detail ------------------------------------------------------------------------------


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


class StepProfiler:
    """A trace of steps start, start + 1, ..., start + steps - 1, and of as many every `every` steps after that.

        with StepProfiler("traces", start=100, every=1000) as profiler:
            for step in range(n):
                ...
                profiler.step()

    One file a rank and window, folder/rank_0003_step_000000100.trace.json.gz, that https://ui.perfetto.dev opens; the
    last `keep` of this rank stay. Steps count from 0; the one before a window warms the profiler up. memory: with CUDA,
    also what the allocator did, as a pickle that https://pytorch.org/memory_viz opens; on a CPU, which has no such
    history, every allocation as an event "[memory]" in the trace. A window that the end cuts short is written too.
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        start: int = 10,
        steps: int = 3,
        every: int = 1000,
        keep: int = 3,
        memory: bool = False,
        rank: int | None = None,
    ):
        if start < 1 or steps < 1 or keep < 1 or every <= steps:
            raise ValueError(
                f"start={start}, steps={steps}, every={every}, keep={keep}: each is at least 1, and every is above steps, "
                "for the step before a window is the profiler's warm-up"
            )
        self.folder, self.start, self.steps, self.every, self.keep = Path(folder), start, steps, every, keep
        self.memory, self.rank = memory, _rank() if rank is None else rank
        self.at, self._first, self._profile = 0, 0, None

    def __enter__(self) -> "StepProfiler":
        self.folder.mkdir(parents=True, exist_ok=True)
        self._begin()
        return self

    def step(self) -> None:
        """A step has ended."""
        self.at += 1
        if self._profile is not None:
            self._profile.step()  # the last of a window saves it
            if self.at == self._first + self.steps:
                self._profile = None
        self._begin()

    def __exit__(self, *_) -> None:
        if self._profile is not None:
            if self.at <= self._first:  # not one whole step of it
                self._profile.on_trace_ready = None
            self._profile.stop()
            self._profile = None
            self._record_allocations(False)

    def _begin(self) -> None:
        first = self.at + 1
        if self._profile is None and first >= self.start and (first - self.start) % self.every == 0:
            self._first = first
            plan = schedule(wait=0, warmup=1, active=self.steps, repeat=1)
            self._profile = profile(schedule=plan, on_trace_ready=self._save, profile_memory=self.memory)
            self._record_allocations(True)
            level = os.environ.get("KINETO_LOG_LEVEL", "6")  # below, torch 2.13 tells stderr of each start and stop
            with _environment(KINETO_LOG_LEVEL=level):
                self._profile.start()

    def _record_allocations(self, on: bool) -> None:
        if self.memory and torch.cuda.is_available():
            torch.cuda.memory._record_memory_history(**({"max_entries": 100_000} if on else {"enabled": None}))

    def _save(self, window: profile) -> None:
        name = f"rank_{self.rank:04d}_step_{self._first:09d}"
        aside = self.folder / f".{name}.part.json.gz"  # its ending compresses it
        window.export_chrome_trace(str(aside))
        os.replace(aside, self.folder / f"{name}.trace.json.gz")
        if self.memory and torch.cuda.is_available():
            torch.cuda.memory._dump_snapshot(str(self.folder / f"{name}.memory.pickle"))
            self._record_allocations(False)
        for ending in ("trace.json.gz", "memory.pickle"):
            for old in sorted(self.folder.glob(f"rank_{self.rank:04d}_step_*.{ending}"))[: -self.keep]:
                old.unlink()


# ---- the proof ------------------------------------------------------------------------------------------------


def demo() -> None:
    """Rows of 2 x n/2 ranks, each with another number of tokens, against one process; then read back from CSV."""
    dist.init_process_group("gloo")
    n, rank = dist.get_world_size(), dist.get_rank()
    if n % 2:
        raise SystemExit(f"this demo lays {n} ranks out as 2 x n/2: start an even number of them")
    mesh = init_device_mesh("cpu", (2, n // 2), mesh_dim_names=("dp", "tp"))
    losses = [torch.rand(2 + 3 * r, generator=torch.Generator().manual_seed(r)).double() for r in range(n)]
    mine = losses[rank // (n // 2)]  # tokens are split over dp, and equal on tp
    truth = torch.cat(losses[:2])
    row = reduce_row(mesh["dp"], {"tokens": mine.numel()}, {"loss": (mine.sum(), mine.numel())}, {"norm": mine.norm()})
    row |= reduce_row(mesh, maxima={"slowest": rank})
    with tempfile.TemporaryDirectory() as folder:
        with log_to("csv", Path(folder) / "rows.csv") as log:
            log.log({"step": 1, **row})
        back = next(csv.DictReader((Path(folder) / "rows.csv").read_text().splitlines()))
    expected = {"tokens": truth.numel(), "loss": truth.mean(), "norm": truth.norm(), "slowest": n - 1}
    errors = {name: abs(float(back[name]) - float(value)) / float(value) for name, value in expected.items()}
    errors = reduce_row(None, maxima=errors)
    if rank == 0:
        mean_of_means = torch.stack([x.mean() for x in losses[:2]]).mean()
        print(f"{n} ranks against one process:", *(f"{name} {e:.1e}" for name, e in errors.items()))
        print(f"a mean of means would say {mean_of_means:.4f} in place of {truth.mean():.4f}")
    if not max(errors.values()) < 1e-10:
        raise SystemExit(f"a row differs from one process by {errors}, more than 1e-10")
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # about one finished gloo process in ten aborts while the interpreter exits


if __name__ == "__main__":
    demo()
