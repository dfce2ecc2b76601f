"""Regional compilation: compile one block, use it for all.

torch.compile follows the Python of a model and writes down every operator it meets. A model of L equal blocks is, to
it, L times as many operators: each is traced, differentiated, scheduled and turned into source that a C++ or Triton
compiler then reads, and a loop over layers is unrolled. Training waits for minutes before its first step, and again
whenever a shape changes. But the blocks are one piece of code with other weights:

    whole model    ┌ embed · block 0 · block 1 · block 2 · ... · block L-1 · norm · output ┐   1 graph of L blocks
    regional         embed ·┌ block ┐· ^       · ^       · ... · ^         · norm · output     1 graph of 1 block
                            └───────┘  the same code, found again by its guards, other weights

A compiled function keeps, beside its machine code, guards: what must hold for the code to be right (types, shapes,
dtypes, flags such as train/eval). Weights are inputs of the graph, not constants in it, so block 1 passes the guards
that block 0 left behind and its code is reused. What is lost is fusion across a block's border: one norm or addition.

Cost        cold start  whole: about a + b·L seconds, regional: about a + b, where b is seconds to tens of seconds
            every call  guards of each block, tens of microseconds
            memory      the same; less than eager, since fused operators keep fewer intermediates for backward
Use it      from a few layers on, for any model with repeated blocks. Order: float8, tensor parallel, activation
            checkpointing, then this, then FSDP. Then the wrapper of a checkpointed block is what gets compiled, the
            compiler sees what is to be recomputed, and FSDP's gathers stay outside of the graph.
Goes wrong  blocks that differ in a Python value (a layer number as an attribute): each value is a guard that fails, each
            block a graph of its own, and the ninth is an error (fullgraph=False: the rest run eagerly, a line in the log).
            Shapes that change: a second graph, and with dynamic=False one for every length. Compiling before checkpointing
            per op: the policy looks for operators and finds none, for they are inside a compiled function. `count_graphs`
            tells the first two. A tensor that still travels:
            tensor parallel's embedding gives an AsyncCollectiveTensor, which waits at its first operator. torch 2.13
            unwraps it at a graph's door, and the gradient goes past a node: an error in backward, or with FSDP an
            embedding's gradient wrong by its own size, without a word. So a block waits for its inputs first.
Not here    full checkpointing of a block of DTensors: what it recomputes sends, and torch 2.13 confuses the mesh with
            the tensors kept for that, so it is refused; compiled autograd, CUDA graphs, collectives moved by inductor.

References  torch.compile https://docs.pytorch.org/docs/stable/torch.compiler.html, regional compilation
            https://docs.pytorch.org/tutorials/recipes/regional_compilation.html, tensors that travel at a graph's door
            https://github.com/pytorch/pytorch/pull/179849
"""

import io
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map

# ---- by hand --------------------------------------------------------------------------------------------------


class CompileOnceByHand:
    """The mechanism in 20 lines: one compiled function for all modules of one class, weights as arguments, guards.

    compiler(function) -> function: what makes a graph fast; called once for each set of guards. `hits` and `graphs`
    count. Training works, buffers that change do not (they come back as arguments).
    """

    def __init__(self, compiler: Callable[[Callable], Callable]):
        self.compiler, self.code, self.hits = compiler, {}, 0

    @property
    def graphs(self) -> int:
        return len(self.code)

    def guards(self, module: nn.Module, args: tuple) -> tuple:
        """What the code may rely on: everything that is not the value of a tensor."""
        tensors = [*module.parameters(), *module.buffers(), *args]
        shapes = tuple((t.shape, t.dtype, t.device, t.requires_grad) for t in tensors)
        numbers = tuple(v for m in module.modules() for v in vars(m).values() if isinstance(v, int | float | str))
        return type(module), shapes, numbers, torch.is_grad_enabled()

    def call(self, module: nn.Module, *args: Tensor):
        key = self.guards(module, args)
        if key not in self.code:

            def pure(weights: dict, *args, shape=module):  # the first module lends its structure, not its weights
                return torch.func.functional_call(shape, weights, args)

            self.code[key] = self.compiler(pure)
        else:
            self.hits += 1
        return self.code[key](dict(module.named_parameters()) | dict(module.named_buffers()), *args)


# ---- native ---------------------------------------------------------------------------------------------------


def _default_blocks(module: nn.Module) -> list[nn.Module]:
    found, containers = [], (nn.ModuleList, nn.ModuleDict)
    for child in module.children():
        is_block = isinstance(module, containers) and not isinstance(child, containers)
        found += [child] if is_block else _default_blocks(child)
    return found


def _waited(x):
    """x, arrived if it travels. (A view would go on travelling; this is an operator, and autograd follows it.)"""
    return torch.ops.aten._unsafe_view(x, x.shape) if isinstance(x, AsyncCollectiveTensor) else x


def _recomputes_all(module: nn.Module) -> bool:
    """A CheckpointWrapper without a policy on what to keep."""
    return "context_fn" not in getattr(getattr(module, "checkpoint_fn", None), "keywords", {"context_fn": None})


def _wait_then(call: Callable) -> Callable:
    return lambda *args, **kwargs: call(*tree_map(_waited, args), **tree_map(_waited, kwargs))


def compile_blocks(
    model: nn.Module,
    blocks: Iterable[nn.Module] | None = None,
    fullgraph: bool = True,
    dynamic: bool | None = None,
    backend: str | Callable = "inductor",
) -> nn.Module:
    """Compiles each block of `model` in place, at its first call; returns the model. Names and checkpoints stay.

    After float8, tensor parallel and activation checkpointing, before FSDP.
    blocks: modules inside `model`; default, the children of each outermost ModuleList and ModuleDict.
    fullgraph: a graph break is an error that names its line (False: it costs, silently).
    dynamic: None lets torch turn a dimension that changes into a variable at its second value; False: each length gets
    its own graph; True: variables from the start. backend: as in torch.compile; "aot_eager" traces and compiles nothing.
    Raises ValueError: 0 blocks, a block that is not inside the model, or one that is compiled or sharded already, or has
    DTensors and recomputes all of itself.
    """
    blocks = _default_blocks(model) if blocks is None else list(blocks)
    if not blocks:
        raise ValueError(
            f"found 0 blocks: {type(model).__name__} has no ModuleList or ModuleDict. Pass blocks=[...], the modules "
            "that repeat"
        )
    inside = set(model.modules())
    if strangers := [type(block).__name__ for block in blocks if block not in inside]:
        raise ValueError(f"{len(strangers)} of {len(blocks)} blocks are not inside {type(model).__name__}: {strangers}")
    sharded = [m for m in blocks if any(k.__name__ == "FSDPModule" for k in type(m).__mro__)]
    compiled = [m for block in blocks for m in block.modules() if m._compiled_call_impl is not None]
    if done := sharded or compiled:
        raise ValueError(
            f"{len(done)} modules, such as a {type(done[0]).__name__}, are {'sharded' if sharded else 'compiled'} already. "
            "The order: float8, activation checkpointing, then this, once, then FSDP"
        )
    cut = [block for block in blocks if any(isinstance(p, DTensor) for p in block.parameters())]
    if whole := [m for block in cut for m in block.modules() if _recomputes_all(m)]:
        raise ValueError(
            f"{len(whole)} of {len(blocks)} blocks are checkpointed in full and have DTensors, which torch cannot compile: "
            "checkpoint mode 'per_op', which keeps what was sent, or compile without checkpointing"
        )
    for block in blocks:
        block.compile(fullgraph=fullgraph, dynamic=dynamic, backend=backend)
        block._compiled_call_impl = _wait_then(block._compiled_call_impl)
    return model


# ---- measurements ---------------------------------------------------------------------------------------------


@dataclass
class GraphCount:
    graphs: int = 0
    breaks: int = 0  # places where a frame was cut, each with two graphs and Python between
    recompiles: int = 0  # graphs made because guards failed
    reasons: tuple[str, ...] = ()  # of the breaks and of the failed guards

    def __str__(self) -> str:
        return f"{self.graphs} graphs, {self.breaks} breaks, {self.recompiles} recompilations"


@contextmanager
def count_graphs() -> Iterator[GraphCount]:
    """Counts what torch.compile does inside of the block; forgets all that was compiled before (torch._dynamo.reset)."""
    from torch._dynamo.utils import counters, guard_failures  # half a second, and only when needed

    torch._dynamo.reset()
    counters.clear()
    guard_failures.clear()
    count = GraphCount()
    try:
        yield count
    finally:
        count.graphs = counters["stats"]["unique_graphs"]
        # torch 2.13 books a branch on a tensor's value elsewhere
        branches = {k: n for k, n in counters["unimplemented"].items() if k.startswith("Data-dependent branching")}
        breaks = counters["graph_break"] | branches
        count.breaks = sum(breaks.values())
        failures = [str(f).splitlines()[0] for found in guard_failures.values() for f in found]
        count.recompiles = len(failures)
        count.reasons = tuple(dict.fromkeys([*(str(r).splitlines()[0] for r in breaks), *failures]))


@dataclass(frozen=True)
class CompileCost:
    """Seconds and counts of one fresh process. cold: the first forward and backward; warm: the median of later ones."""

    how: str
    cold_s: float
    warm_s: float
    graphs: int
    breaks: int
    start_s: float  # of the compiler itself, measured before on a function of one addition; not in cold_s


HOW = ("eager", "blocks", "whole")


def measure_compile(
    model: nn.Module,
    inputs: Tensor | tuple,
    how: str = "blocks",
    backend: str = "inductor",
    timeout: float = 600.0,
) -> CompileCost:
    """What compiling costs, in a fresh process with all of torch's compile caches off.

    how: "eager", "blocks" (`compile_blocks`) or "whole" (model.compile()). The model and its inputs are pickled, so
    their classes must be importable there, and not live in a notebook. A step is forward, the mean of squares of the
    first tensor that comes out, backward; one thread. ValueError: another `how`, or a model that cannot be pickled;
    RuntimeError with its last line if the process fails.
    """
    if how not in HOW:
        raise ValueError(f"how={how!r} is none of the {len(HOW)} ways: {', '.join(HOW)}")
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    try:
        told = pickle.dumps((sys.path, how, backend))
        work = io.BytesIO()
        torch.save((model, inputs), work)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(f"a fresh process cannot have this {type(model).__name__}: {error}") from None
    environment = os.environ | {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1", "OMP_NUM_THREADS": "1"}
    child = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, "--measure"],
        input=len(told).to_bytes(4) + told + work.getvalue(),
        capture_output=True,
        env=environment,
        timeout=timeout,
    )
    if child.returncode:
        last = child.stderr.decode().strip().splitlines()[-1:]
        raise RuntimeError(f"measuring {how!r} failed with exit code {child.returncode}: {' '.join(last)}")
    return CompileCost(how, *pickle.loads(child.stdout[child.stdout.rindex(b"result:") + 7 :]))


def _measure() -> None:
    """The fresh process of `measure_compile`: work on stdin, numbers on stdout."""
    n = int.from_bytes(sys.stdin.buffer.read(4))
    path, how, backend = pickle.loads(sys.stdin.buffer.read(n))
    sys.path += [p for p in path if p not in sys.path]
    model, inputs = torch.load(io.BytesIO(sys.stdin.buffer.read()), weights_only=False)

    def step() -> float:
        began = time.perf_counter()
        out = next(t for t in tree_leaves(model(*inputs)) if isinstance(t, Tensor))
        out.square().mean().backward()
        return time.perf_counter() - began

    start_s = 0.0
    if how != "eager":
        began = time.perf_counter()
        torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2, requires_grad=True)).sum().backward()
        start_s = time.perf_counter() - began
    with count_graphs() as count:
        if how == "blocks":
            compile_blocks(model, fullgraph=False, backend=backend)
        elif how == "whole":
            model.compile(backend=backend)
        cold_s = step()
        warm_s = sorted(step() for _ in range(5))[2]
    sys.stdout.buffer.write(b"result:" + pickle.dumps((cold_s, warm_s, count.graphs, count.breaks, start_s)))
    sys.stdout.buffer.flush()
    os._exit(0)  # inductor's workers need not be waited for


# ---- the proof ------------------------------------------------------------------------------------------------


class _Block(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(dim), nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x_BD: Tensor) -> Tensor:
        return x_BD + self.down(torch.nn.functional.silu(self.up(self.norm(x_BD))))


class _Net(nn.Module):
    def __init__(self, n_layers: int, dim: int = 32):
        super().__init__()
        self.layers = nn.ModuleList(_Block(dim) for _ in range(n_layers))

    def forward(self, x_BD: Tensor) -> Tensor:
        for layer in self.layers:
            x_BD = layer(x_BD)
        return x_BD


def demo(n_layers: int = 6) -> None:
    """Compiled once by hand, by blocks and eager: outputs and gradients in float64, and the graphs it took."""
    from copy import deepcopy

    torch.set_num_threads(1)
    torch.manual_seed(0)
    eager, x_BD = _Net(n_layers).double(), torch.randn(8, 32, dtype=torch.float64, requires_grad=True)
    by_hand = CompileOnceByHand(lambda pure: pure)

    def run(model: nn.Module, forward: Callable) -> list[Tensor]:
        out = forward(x_BD)
        out.square().mean().backward()
        return [out.detach(), *(p.grad for p in model.parameters())]

    def forward_by_hand(model: nn.Module) -> Callable:
        def forward(x):
            for layer in model.layers:
                x = by_hand.call(layer, x)
            return x

        return forward

    expected = run(eager, eager)
    once, blocks = deepcopy(eager), compile_blocks(deepcopy(eager))
    for model in (once, blocks):
        model.zero_grad()
    found = {"by hand": run(once, forward_by_hand(once))}
    with count_graphs() as count:
        found["blocks"] = run(blocks, blocks)
    for name, tensors in found.items():
        pairs = zip(tensors, expected, strict=True)
        error = max(((a - b).norm() / b.norm()).item() for a, b in pairs)
        graphs = by_hand.graphs if name == "by hand" else count.graphs
        if os.environ.get("RANK", "0") == "0":
            print(f"{name:8} {n_layers} layers, {graphs} graph{'s' * (graphs > 1)}: error {error:.1e} against eager")
        assert error < 1e-10 and graphs == 1
    print(end="", flush=True)
    os._exit(0)


if __name__ == "__main__":
    _measure() if sys.argv[1:] == ["--measure"] else demo()
