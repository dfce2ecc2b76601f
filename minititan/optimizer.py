"""AdamW with a state that fits, and a learning rate that rises, stays and falls.

A step looks at two averages of each number's gradient: `m` of the gradient, which says where to go, and `v` of its
square, which says how far gradients usually reach. The parameter moves by about lr * m / sqrt(v), whatever the scale
of the loss. Weight decay pulls at the parameter, not at the gradient, so sqrt(v) does not divide it.

    bytes of a parameter in fp32      parameter 4 + gradient 4 + m 4 + v 4 = 16
    state_dtype=torch.bfloat16        parameter 4 + gradient 4 + m 2 + v 2 = 12      computed in fp32, kept in bf16

The error this brings. bf16 has 8 significant bits: from one number to the next it is 0.4 to 0.8 %, and a change of less
than half of that is lost by rounding to the nearest. v moves by (1-b2) (g² - v); with b2 = 0.999, that is
-0.1 % of v at most when gradients shrink, so v *never comes down again* and the steps stay too short:

    v    o o o o o o o o o o   nearest: stuck, each step rounds back to where it was
           .   o   o           stochastic: down with a probability of the distance, so right on average
             .   o   . o
    fp32       .   .   .

So the state is rounded stochastically by default. Measured against an fp32 state (`state_errors`: 1,000 steps in which
gradients become ten times smaller; by then a window of 1/(1-b2) steps has to have forgotten the large ones):

    b2                                0.95              0.99              0.999
    nearest, stochastic: v            0.5 %, 0.8 %      4.1 %, 2.2 %      52 %, 5.0 %
    way that parameters have gone     0.08 %, 0.12 %    1.1 %, 0.5 %      3.6 %, 0.9 %

Its noise comes from (seed, step, number of the parameter): replicas, in DDP, HSDP or along a tensor-parallel axis, get
the same and stay bitwise equal; a resumed run repeats itself with no generator in the checkpoint. But another layout
cuts other pieces and draws other noise: curves agree up to it. `stochastic_rounding=False` is the same in every layout.

    lr multiplier   1        _______________
                           /                 \\          warm-up: v knows nothing yet, so first steps are short
                    0     /                   \\_        stable: can be prolonged, branched, stopped at any time
                         warm-up    stable   decay      decay: most of what annealing gives, in 10 to 20 % of the steps

Cost: no communication; the state is elementwise, so it is sharded as its parameter is. The fused kernel reads gradient
and reads and writes parameter, m and v once: 28 bytes a parameter in fp32. A narrow state is widened one parameter at a
time: for a moment the fp32 state of the largest, and several times that traffic. Not here: 8-bit states (in torchao),
fp32 masters of bf16 parameters (FSDP's mixed precision keeps the fp32 ones), Muon.

References: AdamW https://arxiv.org/abs/1711.05101 · stochastic rounding https://arxiv.org/abs/2010.06192 ·
warmup-stable-decay https://arxiv.org/abs/2404.06395, shapes of the decay https://arxiv.org/abs/2405.18392
"""

import math
import os
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

_FUSED_ON = {"cpu", "cuda", "mps", "xpu"}  # where torch 2.11 has the fused kernel

# ---- by hand --------------------------------------------------------------------------------------------------


@torch.no_grad()
def adamw_by_hand(p, grad, m, v, step, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1) -> None:
    """One step, in place on p, m and v, all of grad's shape. `step` counts from 1."""
    p -= lr * weight_decay * p
    m += (1 - betas[0]) * (grad - m)
    v += (1 - betas[1]) * (grad * grad - v)
    m_hat = m / (1 - betas[0] ** step)  # averages began at 0: after t steps they know a part 1 - b^t
    v_hat = v / (1 - betas[1] ** step)
    p -= lr * m_hat / (v_hat.sqrt() + eps)


def round_stochastically(x: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """bf16 neighbour of x below or above, with odds that make x the expectation; inf and nan are kept.

    bf16 is the upper half of float32's bits. A random number added to the lower half carries into the upper one as
    often as the lower half is large, in either sign, and at an exponent's end too.
    """
    x = x.float()
    noise = torch.randint(1 << 16, x.shape, dtype=torch.int32, device=x.device, generator=generator)
    rounded = (x.view(torch.int32) + noise) & -(1 << 16)
    return torch.where(x.isfinite(), rounded.view(torch.float32), x).bfloat16()


# ---- native ---------------------------------------------------------------------------------------------------


def _local(t: Tensor) -> Tensor:
    return t.to_local() if isinstance(t, DTensor) else t


class _StateDtypeAdamW(torch.optim.AdamW):
    """torch's AdamW, whose averages are kept in `state_dtype` and computed in at least float32."""

    def __init__(self, groups, state_dtype: torch.dtype, stochastic_rounding: bool, seed: int, **options):
        self.state_dtype, self.stochastic_rounding, self.seed = state_dtype, stochastic_rounding, seed
        super().__init__([group | {"n_steps": 0} for group in groups], **options)

    @torch.no_grad()
    def step(self, closure=None):
        with torch.enable_grad():
            loss = closure() if closure else None
        before = 0
        for group in self.param_groups:
            group["n_steps"] = group.get("n_steps", 0) + 1  # state["step"] may be on a GPU: reading it would wait
            for i, p in enumerate(group["params"], start=before):
                if p.grad is not None:
                    seed = 7919 * self.seed + 1_000_003 * group["n_steps"] + i
                    self._update(p, group, torch.Generator(p.device).manual_seed(seed))
            before += len(group["params"])
        return loss

    def _update(self, p: Tensor, group: dict, generator: torch.Generator) -> None:
        state = self.state[p]
        if not state:
            on = p.device if group["fused"] else "cpu"  # as in torch.optim.AdamW: either loads the other's state
            state["step"] = torch.zeros((), dtype=torch.float32, device=on)
            state["exp_avg"] = torch.zeros_like(p, dtype=self.state_dtype)
            state["exp_avg_sq"] = torch.zeros_like(p, dtype=self.state_dtype)
        grad = p.grad
        if isinstance(p, DTensor) and grad.placements != p.placements:
            grad = grad.redistribute(placements=p.placements)  # Partial: summands, not values
        kept = [_local(t) for t in (p, state["exp_avg"], state["exp_avg_sq"])]
        dtype = torch.promote_types(torch.promote_types(p.dtype, torch.float32), self.state_dtype)
        wide = [t.to(dtype) for t in kept]
        adamw(
            *([t] for t in (wide[0], _local(grad).to(dtype), *wide[1:])),
            max_exp_avg_sqs=[],
            state_steps=[state["step"]],
            foreach=False,
            fused=bool(group["fused"]),
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            **{k: group[k] for k in ("lr", "weight_decay", "eps", "amsgrad", "maximize")},
        )
        for narrow, result in zip(kept, wide, strict=True):
            if narrow is not kept[0] and narrow.dtype == torch.bfloat16 and self.stochastic_rounding:
                result = round_stochastically(result, generator)
            if narrow is not result:
                narrow.copy_(result)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict) -> None:
        super().load_state_dict(state_dict)  # widens the state to the parameter's dtype
        for state in self.state.values():
            state |= {k: state[k].to(self.state_dtype) for k in ("exp_avg", "exp_avg_sq")}


def build_adamw(
    params: Iterable[Tensor],
    state_dtype: torch.dtype | None = None,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    decay_matrices_only: bool = False,
    stochastic_rounding: bool = True,
    seed: int = 0,
) -> torch.optim.AdamW:
    """torch's AdamW, fused where the device has it, for any mix of plain and sharded parameters.

    state_dtype: of both averages. None is the parameters', and torch.optim.AdamW itself; bfloat16 halves them, with
    `stochastic_rounding` by default; float32 widens those of bf16 parameters. State dicts fit torch.optim.AdamW's.
    decay_matrices_only: parameters of fewer than 2 dims (norms, biases) do not decay.
    One group per mesh and decay, for the fused kernel takes no list that mixes meshes, or has plain tensors too.
    Build it last: after materialize and after everything that replaces parameters.
    Raises ValueError: no parameters, parameters on meta, a state_dtype that cannot hold squares.
    """
    params = list(params)
    if not params:
        raise ValueError("0 parameters: was model.parameters() used up before, or is the model empty?")
    if meta := sum(p.is_meta for p in params):
        raise ValueError(
            f"{meta} of {len(params)} parameters are on meta and would never change: materialize the model first, "
            "for that replaces them"
        )
    if state_dtype not in (None, torch.bfloat16, torch.float32, torch.float64):
        raise ValueError(
            f"state_dtype={state_dtype} cannot hold the squares of small gradients (1e-10 of 1e-5; float16 ends at "
            "6e-8): use torch.bfloat16, torch.float32, torch.float64 or None"
        )
    groups: dict = {}
    for p in params:
        decays = p.dim() >= 2 or not decay_matrices_only
        groups.setdefault((getattr(p, "device_mesh", None), decays), []).append(p)
    groups = [{"params": ps, "weight_decay": weight_decay * decays} for (_, decays), ps in groups.items()]
    fused = all(p.device.type in _FUSED_ON for p in params) or None
    options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "fused": fused}
    if state_dtype is None:
        return torch.optim.AdamW(groups, **options)
    return _StateDtypeAdamW(groups, state_dtype, stochastic_rounding, seed, **options)


# ---- the learning rate ----------------------------------------------------------------------------------------

_SHAPES = {
    "linear": lambda left: left,
    "sqrt": lambda left: 1 - math.sqrt(1 - left),  # falls fast, then long and low
    "cosine": lambda left: (1 - math.cos(math.pi * left)) / 2,
}


def warmup_stable_decay(
    steps: int, warmup_steps: int = 0, decay_steps: int = 0, shape: str = "linear", final: float = 0.0
) -> Callable[[int], float]:
    """step (0, 1, ..) -> what to multiply lr by; `LambdaLR(optimizer, warmup_stable_decay(...))` takes it as it is.

    Warm-up is linear: 1/(warmup_steps + 1) at step 0, 1 at step `warmup_steps`. The last `decay_steps` of all `steps`
    fall from 1 to `final`, which would be reached at step `steps`, by shape: "linear", "sqrt" (1 - sqrt) or "cosine".
    No stable part (decay_steps = steps - warmup_steps) is the usual linear or cosine schedule; no decay, a constant.
    Raises ValueError: negative lengths, warm-up and decay that overlap, an unknown shape, `final` not in [0, 1].
    """
    if min(steps, warmup_steps, decay_steps) < 0 or warmup_steps + decay_steps > steps:
        raise ValueError(
            f"warmup_steps {warmup_steps} + decay_steps {decay_steps} = {warmup_steps + decay_steps} must be 0 or more "
            f"each, and at most steps {steps} together: shorten one, or train longer"
        )
    if shape not in _SHAPES:
        raise ValueError(f"shape={shape!r} is none of {', '.join(map(repr, _SHAPES))}")
    if not 0 <= final <= 1:
        raise ValueError(f"final={final} must be in [0, 1]: a part of lr, 0.1 for a tenth")

    def multiplier(step: int) -> float:
        warm = min((step + 1) / (warmup_steps + 1), 1.0)
        left = min(max(steps - step, 0) / decay_steps, 1.0) if decay_steps else 1.0
        return warm * (final + (1 - final) * _SHAPES[shape](left))

    return multiplier


# ---- the proof ------------------------------------------------------------------------------------------------


def state_errors(steps: int = 1000, beta2: float = 0.999, size: int = 4096) -> dict[str, dict[str, float]]:
    """{rounding: {what: relative error to float32}} after gradients that become ten times smaller on the way."""
    torch.manual_seed(0)
    mean, scales = torch.randn(size), torch.logspace(0, -1, steps)
    gradients = [scale * (mean + 3 * torch.randn(size)) for scale in scales]

    def averages(**options):
        p = nn.Parameter(torch.zeros(size))
        optimizer = build_adamw([p], lr=1e-3, betas=(0.9, beta2), weight_decay=0.0, **options)
        for p.grad in gradients:
            optimizer.step()
        m, v = (optimizer.state[p][k].float() for k in ("exp_avg", "exp_avg_sq"))
        return {"m": m, "v": v, "m / sqrt(v)": m / v.sqrt(), "way so far": p.detach()}

    exact = averages()
    found = {}
    for rounding in ("nearest", "stochastic"):
        ours = averages(state_dtype=torch.bfloat16, stochastic_rounding=rounding == "stochastic")
        found[rounding] = {k: ((ours[k] - want).norm() / want.norm()).item() for k, want in exact.items()}
    return found


def demo(steps: int = 5) -> None:
    """By hand == sharded over the ranks == torch in one process, in float64; and the error of a bf16 state."""
    on_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
    dist.init_process_group("nccl" if on_gpus else "gloo", device_id=device if on_gpus else None)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    torch.manual_seed(0)
    x_SBD = torch.randn(steps, 8, 33, dtype=torch.float64).to(device)

    def train(build, shard: bool) -> tuple[Tensor, int]:
        """All weights after the steps, and the bytes of state on this rank."""
        torch.manual_seed(1)
        layers = [nn.Linear(33, 33) for _ in range(3)]  # 33 rows, which 4 ranks do not divide
        model = nn.ModuleList(layers).to(device, torch.float64)
        for layer in layers if shard else ():
            fully_shard(layer, mesh=mesh)
        params = list(model.parameters())
        optimizer = build(params) if build else None
        state = {p: (torch.zeros_like(p), torch.zeros_like(p)) for p in params}
        for step, x_BD in enumerate(x_SBD):
            for layer in layers:
                x_BD = x_BD + torch.tanh(layer(x_BD))
            x_BD.logsumexp(dim=1).mean().backward()
            if optimizer:
                optimizer.step()
            else:
                for p in params:
                    adamw_by_hand(p, p.grad, *state[p], step + 1)
            model.zero_grad()
        averages = [v for s in (optimizer.state.values() if optimizer else ()) for v in s.values() if v.dim()]
        whole = [p.full_tensor() if shard else p for p in params]
        return torch.cat([p.detach().flatten() for p in whole]), sum(_local(v).nbytes for v in averages)

    def torch_adamw(params):
        return torch.optim.AdamW(params, betas=(0.9, 0.95), weight_decay=0.1, foreach=False)

    reference, _ = train(torch_adamw, shard=False)
    ways = {
        "adamw_by_hand": (None, False, 1e-10),
        "build_adamw, sharded": (build_adamw, True, 1e-10),
        "state_dtype=float64, sharded": (lambda ps: build_adamw(ps, torch.float64), True, 1e-10),
        "state_dtype=bfloat16, sharded": (lambda ps: build_adamw(ps, torch.bfloat16), True, 1e-3),
    }
    for name, (build, shard, tolerance) in ways.items():
        ours, n_bytes = train(build, shard)
        error = ((ours - reference).norm() / reference.norm()).item()
        if dist.get_rank() == 0:
            print(f"{name:30} against torch in one process: weights {error:.1e}, {n_bytes:,} bytes of state a rank")
        if not error < tolerance:
            raise SystemExit(f"{name}: weights differ by {error}, more than {tolerance}")
    for beta2 in (0.95, 0.99, 0.999) if dist.get_rank() == 0 else ():
        for rounding, errors in state_errors(beta2=beta2).items():
            print(f"b2 {beta2:<6} bf16 state, {rounding:10}", *(f"  {k} {e:.2%}" for k, e in errors.items()))
    dist.barrier()
    dist.destroy_process_group()
    print(end="", flush=True)
    os._exit(0)  # about one finished gloo process in ten aborts while the interpreter exits


if __name__ == "__main__":
    demo()
