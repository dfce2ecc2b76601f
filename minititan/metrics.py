"""What a training run is worth: tokens a second, how much of the hardware that uses, and memory.

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

Cost: nothing that waits. `Meter` reads the clock and the allocator's counters; it never synchronises a GPU. The loop
does, when it reads the loss (`loss.item()`); without that the host's clock would measure how fast kernels are queued.

References: PaLM (Chowdhery et al. 2022, arXiv:2204.02311, appendix B) · torchtitan, docs/metrics ·
data sheets of A100, H100 (SXM, PCIe, NVL), H200, B200.
"""

import csv
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

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


@dataclass
class Meter:
    """Turns steps into rows of numbers.

        meter = Meter(flops_per_token(...), n_devices=world_size, device=device)
        row = meter.step(loss, grad_norm, tokens=global_batch * seq_len)

    flops_per_token: None leaves MFU out. n_devices: over how many the tokens of a step are spread. peak: flops/s of one
    device; found by its name when None. The first step starts when the Meter is made, or at `start()`.
    """

    flops_per_token: float | None = None
    n_devices: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    peak: float | None = None
    steps: int = 0
    tokens: int = 0
    _since: float = field(default=0.0, repr=False)

    def __post_init__(self):
        if self.n_devices < 1:
            raise ValueError(f"n_devices={self.n_devices}: tokens are trained on at least one device")
        if self.peak is None:
            self.peak = peak_flops(self.device)
        self.start()

    def start(self) -> None:
        """The next step begins now. For what must not count as training, such as an evaluation between two steps."""
        self._since = time.perf_counter()

    def step(self, loss: float, grad_norm: float, tokens: int, **extra: float) -> dict[str, float | None]:
        """One finished optimizer step of `tokens` tokens, all devices together. Returns its row, `extra` at the end.

        `loss` and `grad_norm` must be the global ones: the Meter sends nothing.
        step_time_s: seconds since the last step. tokens_per_s: of all devices together. mfu: 0 to 1, or None.
        peak_memory_bytes: of this process, so far.
        """
        now = time.perf_counter()
        seconds, self._since = max(now - self._since, 1e-9), now
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
            "peak_memory_bytes": peak_memory(self.device),
            **extra,
        }


class CsvLog:
    """Rows to a CSV file. Each row reaches the file before `log` returns, so that a kill loses nothing of it."""

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "w", newline="", encoding="utf-8")  # noqa: SIM115 - close() is ours
        self._columns: list[str] | None = None

    def log(self, row: dict[str, float | None]) -> None:
        """Writes one row; the first gives the columns. None is an empty cell.

        Raises ValueError for a column that the first row did not have: a CSV file has one header.
        """
        writer = csv.writer(self._file, lineterminator="\n")
        if self._columns is None:
            self._columns = list(row)
            writer.writerow(self._columns)
        if unknown := [name for name in row if name not in self._columns]:
            raise ValueError(
                f"{self.path}: row has the new columns {unknown}, but the header is {self._columns}; "
                f"give every row the same keys, None where there is no value."
            )
        writer.writerow([row.get(name) for name in self._columns])
        self._file.flush()  # to the kernel, which outlives this process

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> "CsvLog":
        return self

    def __exit__(self, *_) -> None:
        self.close()


SINKS = {"csv": CsvLog}


def log_to(sink: str, path: str | os.PathLike) -> CsvLog:
    """A place for rows: has `.log(row)` and `.close()`, and is a context manager. `path` is begun anew.

    Call it on one rank. Raises ValueError for an unknown sink.
    """
    if sink not in SINKS:
        raise ValueError(f"no sink {sink!r} to log to; there are: {', '.join(SINKS)}")
    return SINKS[sink](path)
