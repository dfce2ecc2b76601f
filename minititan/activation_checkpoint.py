"""Activation checkpointing: forget what forward computed, and compute it again when backward asks for it.

Autograd keeps what each operator needs for its gradient, in a Llama block some twenty times the block's input, and
backward uses last what forward kept first. But all of it follows from the input. So keep that; run a block forward
once more just before its backward; and the inside of only one block ever exists.

    a: a block's input.  A: all that its gradient needs.                    held at most
    none    fwd 0  fwd 1  fwd 2 │ bwd 2         bwd 1         bwd 0
    held    A      2A     3A    │ 3A            2A            A             L A
    full    fwd 0  fwd 1  fwd 2 │ fwd 2  bwd 2  fwd 1  bwd 1  fwd 0  bwd 0
    held    a      2a     3a    │ 2a+A          a+A           A             (L-1) a + A

The second run must be the first again. Dropout would draw another mask, and the gradient would belong to a network
that never made the loss: so the random state is kept and put back, and autocast too. Nothing else is guarded: a
function that counts its calls, or changes its input in place, is on its own.

Between none and full, keep what is dear to compute and small to hold. A matmul over k inputs spends 2k flops on each
number, a norm or a silu about ten: recompute the latter always, every second matmul, attention never. Kept are the
2nd, 4th and 6th; the 7th, w2, ends the block: no gradient needs its result, so it is neither kept nor run again.

A Llama block with D model, C = key/value heads times their size, F feed-forward: numbers kept for each token, bytes
of that for Llama 3 8B in bf16, matmuls run again, and the flops they add to a step (of matmuls):

    none          6 D + 2 C + 4 F      168 kB    none                8 D where a norm is not one kernel, as on CPU
    per_op        3 D + C + F           55 kB    wq wv w1     12%    5 D with tensor parallel, whose sums are kept
    every_other   half of none + full   88 kB    half of full 12%
    full          D                      8 kB    all but w2   24%    by hand: w2 too, 33%
    budget b      D + b (A - D)                  the cheapest set that fits; A of compile, which fuses, is smaller

Left out, as small: 1 number a token for each norm, and one a head for attention.

Use it when activations are what does not fit: per_op first, full for long sequences. Order: tensor parallel, this,
compile ("budget" is the compile), FSDP, which then gathers a block once for its recompute and backward. Parameters'
names gain `_checkpoint_wrapped_module.`; keys of a state_dict do not. On CPU with torch 2.13 all modes work; "budget"
needs a C++ compiler, and keeps random numbers itself, which torch's solver loses (pytorch issue 190758).
Not here: offload to the host, recomputation within recomputation, second derivatives by hand.

References: Chen et al. 2016, arXiv 1604.06174 · Korthikanti et al. 2022 (selective), arXiv 2205.05198 ·
https://docs.pytorch.org/docs/stable/checkpoint.html · https://pytorch.org/blog/activation-checkpointing-techniques/
"""

import itertools
import os
import shutil
from collections.abc import Callable, Iterable
from contextlib import ExitStack, contextmanager
from functools import cache, partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper, checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

# ---- by hand --------------------------------------------------------------------------------------------------


class _Surroundings:
    """What a result depends on besides the arguments: random states and autocast, of the CPU and of their GPUs."""

    def __init__(self, tensors: Iterable[Tensor]):
        self.gpus = sorted({t.device.index for t in tensors if t.is_cuda})
        self.states = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, self.gpus)]
        kinds = ("cpu", "cuda") if self.gpus else ("cpu",)
        self.autocast = [(k, torch.get_autocast_dtype(k), torch.is_autocast_enabled(k)) for k in kinds]

    @contextmanager
    def restored(self):
        with torch.random.fork_rng(self.gpus), ExitStack() as stack:  # fork: afterwards all is as it was before
            torch.set_rng_state(self.states[0])
            for gpu, state in zip(self.gpus, self.states[1:], strict=True):
                torch.cuda.set_rng_state(state, gpu)
            for autocast in self.autocast:
                stack.enter_context(torch.autocast(*autocast))
            yield


class _Recompute(torch.autograd.Function):
    """To autograd, the whole function is one operator, which saves its inputs and nothing else."""

    @staticmethod
    def forward(ctx, anchor, call, note, *tensors):  # autograd does not record in here
        ctx.call, ctx.surroundings = call, _Surroundings(tensors)
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        leaves, spec = call(tensors)
        note += [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec
        return tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads):
        inputs = [t.detach().requires_grad_(t.requires_grad) for t in ctx.saved_tensors]  # leaves of a small graph
        with torch.enable_grad(), ctx.surroundings.restored():
            outputs = [leaf for leaf in ctx.call(inputs)[0] if isinstance(leaf, Tensor)]
        pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if g is not None and o.requires_grad]
        if pairs:
            torch.autograd.backward(*zip(*pairs, strict=True))  # parameters get their .grad right here
        return None, None, None, *[t.grad for t in inputs]


def checkpoint_by_hand(function: Callable, *args, **kwargs):
    """`function(*args, **kwargs)`, of which only the tensors among the arguments are kept for backward.

    Arguments and results: any nest of lists, tuples and dicts of tensors and of anything else. Parameters that the
    function finds elsewhere (a module's own) get their gradients too, by backward() and not by autograd.grad(). A
    tensor that it finds elsewhere and that is computed from parameters must be passed as an argument.
    """
    leaves, spec = tree_flatten((args, kwargs))
    others = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def call(tensors):
        args, kwargs = _put_back(tensors, others, spec)
        return tree_flatten(function(*args, **kwargs))

    # Without an input that requires a gradient, autograd would skip the function, its parameters and all.
    anchor, note = torch.empty(0, requires_grad=True), []
    outputs = _Recompute.apply(anchor, call, note, *[leaf for leaf in leaves if isinstance(leaf, Tensor)])
    return _put_back(outputs, *note)


_TENSOR = object()  # where a tensor was taken out of a nest


def _put_back(tensors, leaves, spec):
    tensors = iter(tensors)
    return tree_unflatten([next(tensors) if leaf is _TENSOR else leaf for leaf in leaves], spec)


# ---- native ---------------------------------------------------------------------------------------------------

MODES = ("full", "every_other", "per_op", "budget")
_aten, _c10d = torch.ops.aten, torch.ops._c10d_functional
MATMULS = frozenset(getattr(_aten, name).default for name in ("mm", "addmm", "linear", "_scaled_mm", "_grouped_mm"))
_KERNELS = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
ATTENTION = frozenset(
    {
        *(getattr(_aten, f"_scaled_dot_product_{kernel}").default for kernel in _KERNELS),
        torch.ops.higher_order.flex_attention,
    }
)
SUMS = frozenset({_c10d.reduce_scatter_tensor.default, _c10d.all_reduce.default})  # of tensor parallel: not sent twice
SAVED = ATTENTION | SUMS


def _default_blocks(module: nn.Module) -> list[nn.Module]:
    found, containers = [], (nn.ModuleList, nn.ModuleDict)
    for child in module.children():
        is_block = isinstance(module, containers) and not isinstance(child, containers)
        found += [child] if is_block else _default_blocks(child)
    return found


def _per_op_contexts(saved: frozenset):
    """For one call of a block: keep the results of `saved`, and of every second matmul beginning with the second."""
    counts = {False: itertools.count(1), True: itertools.count(1)}  # torch 2.11 asks again when it recomputes

    def policy(context, op, *args, **kwargs):
        keep = op in saved or (op in MATMULS and next(counts[context.is_recompute]) % 2 == 0)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class _KeepRandomNumbers(CustomGraphPass):
    """torch's solver draws random numbers a second time, and gets others: silently wrong gradients. Forbid it that.

    What is kept instead is small: inductor draws one seed a dropout, and makes the mask from it wherever it needs it.
    """

    def __call__(self, graph: torch.fx.Graph) -> None:
        for node in graph.nodes:
            if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
                names = [argument.name for argument in node.target._schema.arguments]
                given = dict(zip(names, node.args, strict=False)) | node.kwargs
                if "dropout_p" not in names or given.get("dropout_p"):  # attention without dropout draws nothing
                    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE

    def uuid(self) -> bytes:
        return get_hash_for_files(
            (__file__,)
        )  # blocks compiled with this very code are found again in inductor's cache


@cache  # dynamo compiles anew for each new backend, and gives up after 8
def _compile_within(budget: float) -> Callable:
    """A backend of torch.compile: inductor, told the budget while it cuts the graph into forward and backward."""

    def within(graph, inputs):
        budget_above_0 = max(float(budget), 1e-9)  # at 0 the solver does not look at what must be kept
        with (
            torch._functorch.config.patch(activation_memory_budget=budget_above_0),
            torch._inductor.config.patch(joint_custom_post_pass=_KeepRandomNumbers()),
        ):
            return torch._dynamo.lookup_backend("inductor")(graph, inputs)

    return within


def apply_activation_checkpoint(
    model: nn.Module,
    mode: str = "full",
    blocks: Iterable[nn.Module] | None = None,
    save: Iterable = SAVED,
    budget: float = 0.5,
    preserve_rng_state: bool = True,
) -> nn.Module:
    """Makes the blocks of `model` recompute, in place; returns it. After tensor parallel, before compile and FSDP.

    mode: "full", each block keeps its input; "every_other", blocks 0, 2, 4, ... do; "per_op", each also keeps the
    results of `save` and of every second matmul; "budget", torch.compile decides, and compiles each block.
    blocks: modules inside `model`; default, the children of each outermost ModuleList and ModuleDict.
    save: per_op; operators such as torch.ops.aten.bmm.default. default: attention, and the sums of tensor parallel. SUMS
    where attention goes tile by tile in Python, as a ring does: kept would be the result of each tile.
    budget: from 0, as little as full keeps, to 1, what compile keeps by itself.
    preserve_rng_state: False spares a copy of the random state a block, and makes dropout wrong.
    A model on meta is fine. Raises ValueError before any change.
    """
    if mode not in MODES:
        raise ValueError(f"mode={mode!r} is none of the {len(MODES)} there are: {', '.join(MODES)}")
    if not 0 <= budget <= 1:
        raise ValueError(f"budget={budget!r} is outside of 0 (keep the inputs) to 1 (keep what compile would)")
    save = frozenset(save)
    if packets := [str(op) for op in save if isinstance(op, torch._ops.OpOverloadPacket)]:
        raise ValueError(f"{len(packets)} of save have no overload, as {packets[0]}: write {packets[0]}.default")
    blocks = _default_blocks(model) if blocks is None else list(blocks)
    if not blocks:
        raise ValueError(
            f"found 0 blocks: {type(model).__name__} has no ModuleList or ModuleDict. Pass blocks=[...], the modules "
            "to recompute one at a time"
        )
    places = {block: [] for block in blocks}
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child in places:
                places[child].append((parent, name))
    if strangers := [type(block).__name__ for block, found in places.items() if not found]:
        raise ValueError(
            f"{len(strangers)} of {len(blocks)} blocks are not inside {type(model).__name__}: {strangers} (nor is the "
            "model itself: a block is replaced in its parent)"
        )
    kinds = (FSDPModule, CheckpointWrapper, OptimizedModule)
    if done := [m for m in model.modules() if isinstance(m, kinds) or m._compiled_call_impl is not None]:
        raise ValueError(
            f"{len(done)} modules, such as a {type(done[-1]).__name__}, are sharded, checkpointed or compiled already. "
            "The order: tensor parallel, then this, once, then compile (which mode='budget' is), then FSDP"
        )
    if mode == "budget":
        for block in places:
            block.compile(backend=_compile_within(budget))
        return model
    options = {"preserve_rng_state": preserve_rng_state}
    if mode == "per_op":
        options["context_fn"] = partial(_per_op_contexts, save)
    for block in list(places)[:: 2 if mode == "every_other" else 1]:
        wrapped = checkpoint_wrapper(block, **options)  # without reentrant: torch's default for it
        for parent, name in places[block]:
            parent.register_module(name, wrapped)
    return model


# ---- the proof ------------------------------------------------------------------------------------------------


class _Block(nn.Module):
    def __init__(self, dim: int = 32):
        super().__init__()
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x_BTD):
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(x_BTD).chunk(3, dim=-1))
        mixed_BHTK = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + F.dropout(self.out(mixed_BHTK.transpose(1, 2).flatten(2)), 0.2)
        return x_BTD + F.dropout(self.down(F.gelu(self.up(x_BTD))), 0.2)


def demo() -> None:
    """Loss and every gradient in float64, with dropout, against no checkpointing; under torchrun with FSDP."""
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    mesh = init_device_mesh("cpu", (ranks,)) if ranks > 1 else None

    def step(mode: str) -> list[Tensor]:
        torch.manual_seed(0)
        blocks = nn.ModuleList([_Block() for _ in range(3)]).double()
        for block in blocks if mode == "by hand" else ():
            block.forward = partial(checkpoint_by_hand, block.forward)
        if mode in MODES:
            apply_activation_checkpoint(blocks, mode)
        for block in blocks if mesh else ():
            fully_shard(block, mesh=mesh)
        torch.manual_seed(1 + rank)
        x_BTD = torch.randn(2, 16, 32, dtype=torch.float64)
        for block in blocks:
            x_BTD = block(x_BTD)
        loss = x_BTD.square().mean()
        loss.backward()
        return [loss.detach(), *(p.grad.full_tensor() if mesh else p.grad for p in blocks.parameters())]

    reference = step("none")
    for mode in ("by hand", *MODES):
        if mode == "budget" and (mesh or not shutil.which(os.environ.get("CXX", "g++"))):
            continue  # it compiles C++, for long when each rank does
        with torch._inductor.config.patch(fallback_random=True):  # compiled dropout draws what eager would
            pairs = zip(step(mode), reference, strict=True)
        worst = max(((ours - theirs).norm() / theirs.norm()).item() for ours, theirs in pairs)
        if rank == 0:
            print(f"{mode:12}against none: largest error of the loss and {len(reference) - 1} gradients {worst:.1e}")
        if not worst < 1e-10:
            raise SystemExit(f"{mode} differs from no checkpointing by {worst}, more than 1e-10")
    if mesh:
        dist.barrier()
        dist.destroy_process_group()
    print(end="", flush=True)
    os._exit(0)  # about one finished gloo process in ten aborts while the interpreter exits


if __name__ == "__main__":
    demo()
