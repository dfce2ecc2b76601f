"""Llama 3: the model that every other file of this package shards, splits, checkpoints or compiles.

A token becomes a vector of D numbers. Each of n_layers blocks adds two corrections to it: attention looks at the
earlier tokens, the feed-forward at the token itself. A last norm and one matrix make V logits of it.

    tokens_BT → tok_embeddings → x_BTD → block 0 → block 1 → … → norm → output → logits_BTV

    block   x ─┬─ attention_norm → wq wk wv → RoPE → inner → wo ─ + ─┬─ ffn_norm → w2(silu(w1 ·) * w3 ·) ─ + ─ x
               └─────────────────────────────────────────────────┘   └─────────────────────────────────────┘

Parameters, with H query heads, G key/value heads of K = D/H numbers and a feed-forward of F:

    a layer   2·D·D + 2·D·G·K + 3·D·F + 2·D      wq and wo; wk and wv; w1, w2 and w3; two norms
    the ends  2·V·D + D, or V·D + D when tied    tok_embeddings and output; the last norm

which gives 8,030,261,248 for the 8B model, the published count to the unit. A token costs, forward and backward, about
6 flops a parameter outside tok_embeddings and 6·n_layers·D·T for causal attention over T tokens.

With n_experts above 0 every block has a mixture of experts in place of its feed-forward. A router scores E small
feed-forwards (of f hidden numbers each) for every token; the top_k best compute, the others cost nothing; shared experts
see all tokens. So parameters grow with E and flops with top_k:

    moe     x ─┬─ router: K of E experts, K weights ─ rows sorted by expert ─ experts ─ weighted sum ─ + ─
               └─ shared_experts: one feed-forward of n_shared_experts · f ───────────────────────────┘

    a layer   E·D + (E + n_shared_experts)·3·D·f in place of 3·D·F, of which a token uses E·D + (K + n_shared)·3·D·f

Six seams let the file be sharded without a change to it:

1. `layers` is a ModuleDict under the layers' own numbers, and both ends are optional. A pipeline stage is the same
   class with fewer layers; its parameters keep the names, hence the initial values, of the whole.
2. Heads are counted by the tensor (`unflatten(-1, (-1, head_dim))`), never by the config: under tensor parallel the
   local output of wq holds H/tp heads and the same line is right.
3. `attention.inner(q, k, v)` is a module of its own, which context parallel replaces by a ring.
4. Positions are an argument, so a rank that holds tokens 4096 to 8191 rotates by the true ones. cos and sin are
   computed from them in every forward: there is no buffer that could be left on meta.
5. `init_parameter(name, tensor, generator)` fills one whole parameter by its name, apart from construction.
6. `moe.experts(x_SD, counts_E)` takes rows sorted by expert, which expert parallel exchanges before and after.

Left out: dropout and biases (Llama has none), key/value caches (this trains), masks between documents.

References: Llama 3 (arXiv 2407.21783), RoPE (2104.09864), GQA (2305.13245), SwiGLU (2002.05202), RMSNorm (1910.07467),
experts: DeepSeekMoE (2401.06066), balance by a bias (2408.15664), sigmoid scores and both together (2412.19437).
RoPE pairs number i of a head with number i + K/2, as `transformers` does: weights cross over by renaming alone.

Shape suffixes: B batch, T tokens, D model dim, V vocabulary, H query heads, G key/value heads, K head dim. In the experts:
E experts, K experts of a token, N = B·T, S = N·K rows, F hidden numbers, I and O inputs and outputs of a matrix.
"""

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a Llama. Raises ValueError when they do not fit together.

    rope_scaling: by how much Llama 3.1 and later slow the slow rotations, for contexts beyond 8,192 tokens (8 in 3.1,
    32 in 3.2, 1 for not at all); it changes the logits at every length.
    n_experts: 0 for a dense model; else each block has so many experts of expert_ffn_dim (None: ffn_dim), of which a
    token uses top_k, and n_shared_experts more that all tokens use.
    bias_rate: what an expert's bias is moved by, up or down, in a step (0: never); balance_loss: weight of the loss term
    for even load (0: none). See `Router`.
    """

    vocab_size: int
    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    ffn_dim: int
    max_seq_len: int = 8192
    norm_eps: float = 1e-5
    rope_theta: float = 500_000.0
    tied: bool = False
    rope_scaling: float = 1.0
    n_experts: int = 0
    top_k: int = 2
    n_shared_experts: int = 0
    expert_ffn_dim: int | None = None
    bias_rate: float = 0.001
    balance_loss: float = 0.0

    def __post_init__(self) -> None:
        for name in ("vocab_size", "dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim", "max_seq_len"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        if self.dim % self.n_heads or self.head_dim % 2:
            raise ValueError(
                f"dim {self.dim} over n_heads {self.n_heads} gives a head_dim of {self.dim / self.n_heads:g}; it must be "
                f"whole and even (RoPE rotates pairs): take a dim that is a multiple of {2 * self.n_heads}"
            )
        if self.n_heads % self.n_kv_heads:
            served = [g for g in range(1, self.n_heads + 1) if self.n_heads % g == 0]
            raise ValueError(
                f"n_heads {self.n_heads} is no multiple of n_kv_heads {self.n_kv_heads}: each key/value head serves as "
                f"many query heads as the next; take n_kv_heads from {served}"
            )
        for name in ("norm_eps", "rope_theta", "rope_scaling"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)!r}")
        self._check_experts()

    def _check_experts(self) -> None:
        least = {"n_experts": 0, "n_shared_experts": 0, "top_k": 1, "expert_ffn_dim": 1}
        for name, at_least in least.items():
            value = getattr(self, name)
            if name == "expert_ffn_dim" and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
                raise ValueError(f"{name} must be a whole number of at least {at_least}, got {value!r}")
        for name in ("bias_rate", "balance_loss"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)!r}")
        if self.n_experts and self.top_k > self.n_experts:
            raise ValueError(
                f"a token cannot go to top_k {self.top_k} of n_experts {self.n_experts}: take a top_k from 1 to "
                f"{self.n_experts}, or more experts"
            )
        if not self.n_experts and (self.n_shared_experts or self.expert_ffn_dim or self.balance_loss):
            raise ValueError(
                f"n_experts 0 is a dense model, and n_shared_experts {self.n_shared_experts}, expert_ffn_dim "
                f"{self.expert_ffn_dim}, balance_loss {self.balance_loss} would be ignored: take n_experts of 1 or more"
            )

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads


# vocab_size, dim, n_layers, n_heads, n_kv_heads, ffn_dim
PRESETS: dict[str, ModelConfig] = {
    "debug": ModelConfig(256, 64, 4, 8, 4, 176),
    "debug-moe": ModelConfig(256, 64, 4, 8, 4, 176, n_experts=8, top_k=2, n_shared_experts=1, expert_ffn_dim=64),
    "llama3-1b": ModelConfig(128_256, 2048, 16, 32, 8, 8192, 131_072, tied=True, rope_scaling=32.0),
    "llama3-8b": ModelConfig(128_256, 4096, 32, 32, 8, 14_336),
    "llama3-70b": ModelConfig(128_256, 8192, 80, 64, 8, 28_672),
    "llama3-405b": ModelConfig(128_256, 16_384, 126, 128, 8, 53_248, 131_072, rope_scaling=8.0),
}


def rotary_angles(positions_T: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor]:
    """cos_TK and sin_TK, float32, of the angle by which each position turns each pair of a head's numbers."""
    dims = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=positions_T.device)
    frequency = 1.0 / config.rope_theta ** (dims / config.head_dim)
    if config.rope_scaling != 1.0:
        # A pair that turns 4 times or more within 8192 tokens keeps its speed, one that turns less than once is slowed
        # by the whole factor, and between the two the speeds blend (Llama 3.1).
        kept = ((8192 * frequency / (2 * math.pi) - 1) / 3).clamp(0, 1)
        frequency = frequency * (kept + (1 - kept) / config.rope_scaling)
    angle_TK = (positions_T.float()[:, None] * frequency).repeat(1, 2)
    return angle_TK.cos(), angle_TK.sin()


def rotate(x_BHTK: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
    """Turns numbers i and i + K/2 of every head as a point (real, imaginary); computed in no less than cos's precision."""
    real, imaginary = x_BHTK.chunk(2, dim=-1)
    return (x_BHTK * cos_TK + torch.cat((-imaginary, real), dim=-1) * sin_TK).type_as(x_BHTK)


class CausalAttention(nn.Module):
    """softmax(q k^T / sqrt(K)) v over the current and earlier tokens; H/G query heads share a key/value head."""

    def forward(self, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor) -> Tensor:
        grouped = q_BHTK.shape[1] != k_BGTK.shape[1]
        return F.scaled_dot_product_attention(q_BHTK, k_BGTK, v_BGTK, is_causal=True, enable_gqa=grouped)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.wq = nn.Linear(config.dim, config.n_heads * config.head_dim, bias=False)
        self.wk = nn.Linear(config.dim, config.n_kv_heads * config.head_dim, bias=False)
        self.wv = nn.Linear(config.dim, config.n_kv_heads * config.head_dim, bias=False)
        self.wo = nn.Linear(config.n_heads * config.head_dim, config.dim, bias=False)
        self.inner = CausalAttention()

    def forward(self, x_BTD: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
        q_BHTK, k_BGTK, v_BGTK = (
            w(x_BTD).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for w in (self.wq, self.wk, self.wv)
        )
        out_BHTK = self.inner(rotate(q_BHTK, cos_TK, sin_TK), rotate(k_BGTK, cos_TK, sin_TK), v_BGTK)
        return self.wo(out_BHTK.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, ffn_dim, bias=False)  # gate
        self.w2 = nn.Linear(ffn_dim, dim, bias=False)  # down
        self.w3 = nn.Linear(dim, ffn_dim, bias=False)  # up

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x_BTD)) * self.w3(x_BTD))


class _WithLoss(torch.autograd.Function):
    """x itself, and in backward the gradient of `loss` on top: a loss term that no one has to carry to the end."""

    @staticmethod
    def forward(ctx, x: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad, torch.ones_like(ctx.saved_tensors[0])


class Router(nn.Module):
    """Which top_k experts each token goes to, and with what weights.

    A score is a sigmoid, each expert's for itself. A token's weights are its chosen scores, made to sum to 1 (but for
    top_k 1, where that would be a constant, and teach nothing). Two ways to even load, alone or together:

    bias: an expert with less than its share of the rows is moved up by bias_rate after each step (`update_expert_bias`
    of expert_parallel), one with more down. It acts on the choice and not on the weights, so it has no gradient. It is
    kept as a whole number, `bias_steps`, of steps of bias_rate: exact in every layout and dtype. `tokens_per_expert`
    counts rows since then, in backward: once a microbatch, not again when activations are recomputed, never in
    evaluation.

    loss: balance_loss · E / (K T) · sum over experts of (a sequence's rows) · (mean share of the scores), for each
    sequence of T tokens. It adds its gradient here; what the model returns does not show it. It counts as the mean over
    the sequences of a call; a loop whose loss is weighed otherwise sets `sequence_weight`, what one sequence counts.
    Where a sequence lies on several ranks, `whole_sequence` is replaced by the sum over them.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.top_k, self.bias_rate, self.balance_loss = config.top_k, config.bias_rate, config.balance_loss
        self.sequence_weight: float | None = None
        self.gate = nn.Linear(config.dim, config.n_experts, bias=False)
        self.whole_sequence = nn.Identity()
        steps, counts = (torch.zeros(config.n_experts, dtype=torch.int64) for _ in range(2))
        self.register_buffer("bias_steps", steps)
        self.register_buffer("tokens_per_expert", counts, persistent=False)

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """-> weights_BTK, in float32 or better, experts_BTK, and counts_BE: rows of each sequence for each expert."""
        logits_BTE = self.gate(x_BTD)
        scores_BTE = logits_BTE.to(torch.promote_types(logits_BTE.dtype, torch.float32)).sigmoid()
        experts_BTK = (scores_BTE.detach() + self.bias_rate * self.bias_steps).topk(self.top_k).indices
        weights_BTK = scores_BTE.gather(-1, experts_BTK)
        if self.top_k > 1:
            weights_BTK = weights_BTK / (weights_BTK.sum(-1, keepdim=True) + 1e-20)
        counts_BE = torch.zeros_like(scores_BTE[:, 0], dtype=torch.int64)
        counts_BE.scatter_add_(1, experts_BTK.flatten(1), torch.ones_like(experts_BTK).flatten(1))
        if weights_BTK.requires_grad:
            if self.balance_loss:
                weights_BTK = _WithLoss.apply(weights_BTK, self._uneven(scores_BTE, counts_BE))
            weights_BTK.register_hook(lambda _: self._count(counts_BE))
        return weights_BTK, experts_BTK, counts_BE

    def _count(self, counts_BE: Tensor) -> None:
        self.tokens_per_expert += counts_BE.sum(0)

    def _uneven(self, scores_BTE: Tensor, counts_BE: Tensor) -> Tensor:
        weight = 1 / len(scores_BTE) if self.sequence_weight is None else self.sequence_weight
        counts_BE = self.whole_sequence(counts_BE)
        rows_B1 = counts_BE.sum(1, keepdim=True)  # K T
        load_BE = counts_BE * scores_BTE.shape[-1] / rows_B1.to(scores_BTE.dtype)  # 1 when even
        shares_BE = (scores_BTE / scores_BTE.sum(-1, keepdim=True)).sum(1) * self.top_k / rows_B1  # mean over T
        return self.balance_loss * weight * (load_BE * shares_BE).sum()


def grouped_linear(x_SI: Tensor, weight_EOI: Tensor, counts_E: Tensor) -> Tensor:
    """The first counts_E[0] rows times the first matrix, the next counts_E[1] times the second, ... -> [S, O]."""
    if x_SI.is_meta:  # nobody knows the counts; shape and flops are those of one matrix for all
        return F.linear(x_SI, weight_EOI[0])
    if x_SI.dtype == torch.bfloat16 and not any(size % 8 for size in weight_EOI.shape[1:]):
        ends_E = counts_E.cumsum(0, dtype=torch.int32)  # one kernel for all, and the host does not wait for the counts
        return F.grouped_mm(x_SI, weight_EOI.transpose(1, 2), offs=ends_E)
    pairs = zip(x_SI.split(counts_E.tolist()), weight_EOI, strict=True)
    return torch.cat([F.linear(x, weight) for x, weight in pairs])


class GroupedExperts(nn.Module):
    """E feed-forwards in three tensors. An expert without rows gets a gradient of zeros, not None."""

    def __init__(self, n_experts: int, dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(n_experts, ffn_dim, dim) * dim**-0.5)  # gate
        self.w2 = nn.Parameter(torch.randn(n_experts, dim, ffn_dim) * ffn_dim**-0.5)  # down
        self.w3 = nn.Parameter(torch.randn(n_experts, ffn_dim, dim) * dim**-0.5)  # up

    def forward(self, x_SD: Tensor, counts_E: Tensor) -> Tensor:
        """Rows sorted by expert, and how many each has. Of weights that are cut by expert, this rank's are used."""
        w1, w2, w3 = (w.to_local() if isinstance(w, DTensor) else w for w in (self.w1, self.w2, self.w3))
        h_SF = F.silu(grouped_linear(x_SD, w1, counts_E)) * grouped_linear(x_SD, w3, counts_E)
        return grouped_linear(h_SF, w2, counts_E)


class MoE(nn.Module):
    """Each token through top_k of n_experts, and through the shared ones. No capacity: no token is ever dropped."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        ffn_dim = config.expert_ffn_dim or config.ffn_dim
        self.router = Router(config)
        self.experts = GroupedExperts(config.n_experts, config.dim, ffn_dim)
        shared = config.n_shared_experts * ffn_dim
        self.shared_experts = FeedForward(config.dim, shared) if shared else None

    def forward(self, x_BTD: Tensor) -> Tensor:
        weights_BTK, experts_BTK, counts_BE = self.router(x_BTD)
        order_S = experts_BTK.flatten().argsort(stable=True)  # which of the N·K comes as number s when sorted by expert
        rows_SD = x_BTD.flatten(0, 1)[order_S // experts_BTK.shape[-1]]
        out_SD = self.experts(rows_SD, counts_BE.sum(0))
        out_SD = torch.zeros_like(out_SD).index_copy(0, order_S, out_SD)
        out_BTKD = out_SD.unflatten(0, experts_BTK.shape)
        out_BTD = (out_BTKD * weights_BTK[..., None].to(out_BTKD.dtype)).sum(2)
        return out_BTD if self.shared_experts is None else out_BTD + self.shared_experts(x_BTD)


class TransformerBlock(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.is_moe = config.n_experts > 0
        if self.is_moe:
            self.moe = MoE(config)
        else:
            self.feed_forward = FeedForward(config.dim, config.ffn_dim)

    def forward(self, x_BTD: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), cos_TK, sin_TK)
        return x_BTD + (self.moe if self.is_moe else self.feed_forward)(self.ffn_norm(x_BTD))


class Transformer(nn.Module):
    """A Llama, or the part of one that a pipeline stage holds.

    layers: the numbers of the layers to build (default: all). embedding=False takes x_BTD in place of tokens_BT;
    output=False leaves out the last norm and the output matrix, and returns x_BTD. Construction under
    `torch.device("meta")` allocates nothing. Raises ValueError for layers that the config does not have, and for a
    part that would separate a tied embedding from its output.
    """

    def __init__(
        self,
        config: ModelConfig,
        layers: Iterable[int] | None = None,
        embedding: bool = True,
        output: bool = True,
    ) -> None:
        super().__init__()
        numbers = list(range(config.n_layers) if layers is None else layers)
        if len(set(numbers)) < len(numbers) or not set(numbers) <= set(range(config.n_layers)):
            raise ValueError(f"layers {numbers} must be different numbers from 0 to {config.n_layers - 1} (n_layers)")
        if config.tied and embedding != output:
            raise ValueError(
                f"tied=True makes one matrix of tok_embeddings and output, but this part has embedding={embedding} and "
                f"output={output}, so two parts would each train a copy: take tied=False, or keep both ends in one part"
            )
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim) if embedding else None
        self.layers = nn.ModuleDict({str(i): TransformerBlock(config) for i in numbers})
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps) if output else None
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False) if output else None
        if config.tied and output:
            self.output.weight = self.tok_embeddings.weight

    def forward(self, tokens_BT_or_x_BTD: Tensor, positions_T: Tensor | None = None) -> Tensor:
        """tokens_BT (int) or, without an embedding, x_BTD -> logits_BTV or, without an output, x_BTD.

        positions_T: the place of each token in its sequence (default 0..T-1); needed when a rank holds a part of the
        sequence. Raises ValueError when T exceeds max_seq_len.
        """
        if positions_T is None:
            n_tokens, longest = tokens_BT_or_x_BTD.shape[1], self.config.max_seq_len
            if n_tokens > longest:
                raise ValueError(f"{n_tokens} tokens exceed max_seq_len {longest}: cut the batch, or raise max_seq_len")
            positions_T = torch.arange(n_tokens, device=tokens_BT_or_x_BTD.device)
        cos_TK, sin_TK = rotary_angles(positions_T, self.config)
        x_BTD = tokens_BT_or_x_BTD if self.tok_embeddings is None else self.tok_embeddings(tokens_BT_or_x_BTD)
        for block in self.layers.values():
            x_BTD = block(x_BTD, cos_TK, sin_TK)
        return x_BTD if self.output is None else self.output(self.norm(x_BTD))

    @torch.no_grad()
    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator | None = None) -> None:
        """Fills `tensor`, the whole of parameter `name`, in place.

        Norms 1, a router's counts 0. Matrices normal with std 1/sqrt(inputs), which keeps the size of what passes through; wo and w2, which
        add to the residual stream, smaller by sqrt(2 n_layers). The embedding std 1. The output, and with it a tied
        embedding, std 0.02 or less, so that the first loss is close to log(vocab_size).
        """
        kind = name.removesuffix(".weight").rpartition(".")[2]
        if kind in ("bias_steps", "tokens_per_expert"):
            tensor.zero_()
            return
        std = tensor.shape[-1] ** -0.5
        if kind in ("wo", "w2"):
            std /= (2 * self.config.n_layers) ** 0.5
        elif kind == "tok_embeddings" and not self.config.tied:
            std = 1.0
        elif kind in ("output", "tok_embeddings"):
            std = min(std, 0.02)
        tensor.fill_(1.0) if kind.endswith("norm") else tensor.normal_(0.0, std, generator=generator)

    def init_weights(self, generator: torch.Generator | None = None) -> None:
        """Fills all parameters, one after the other. (`meta_init.materialize` makes them independent of the layout.)"""
        for name, parameter in self.named_parameters():
            self.init_parameter(name, parameter, generator)


def count_parameters(config: ModelConfig, active: bool = False) -> int:
    """Number of parameters, a tied matrix counted once; built on meta, so that 405B cost no memory.

    active: without the experts that a token does not use, n_experts - top_k a layer.
    """
    with torch.device("meta"):
        parameters = dict(Transformer(config).named_parameters())
    idle = config.n_experts - config.top_k if active and config.n_experts else 0
    return sum(p.numel() - (p.numel() // len(p) * idle if ".experts." in n else 0) for n, p in parameters.items())


_ENDS_TO_HF = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
_LAYER_TO_HF = {
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}


def _hf_names(config: ModelConfig) -> dict[str, str]:
    """Our name -> its name in `transformers`, for every parameter."""
    if config.n_experts:
        raise ValueError(f"no Llama of transformers has experts, and this one has n_experts {config.n_experts}")
    names = {f"{ours}.weight": f"{hf}.weight" for ours, hf in _ENDS_TO_HF.items()}
    for i in range(config.n_layers):
        for ours, hf in _LAYER_TO_HF.items():
            names[f"layers.{i}.{ours}.weight"] = f"model.layers.{i}.{hf}.weight"
    return names


def _rename(state: Mapping[str, Tensor], names: Mapping[str, str], tied: bool) -> dict[str, Tensor]:
    if unknown := [name for name in state if name not in names]:
        raise ValueError(
            f"{len(unknown)} of {len(state)} names are not of this Llama: {', '.join(unknown[:3])}"
            f"{', …' if len(unknown) > 3 else ''}; it has {len(names)}, such as {', '.join(list(names)[:4])}"
        )
    renamed = {names[name]: tensor for name, tensor in state.items()}
    embedding, _, output = list(names.values())[:3]
    if tied and embedding in renamed:
        renamed.setdefault(output, renamed[embedding])
    return renamed


def to_hf_state_dict(model_state: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """The state of a Transformer, or of a stage of it, under the names of `transformers`' LlamaForCausalLM.

    Values are passed on untouched, so a shard (DTensor) stays one. Raises ValueError for a name that it does not know.
    """
    return _rename(model_state, _hf_names(config), config.tied)


def from_hf_state_dict(hf_state: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """The way back. A tied checkpoint may lack lm_head; the rotary tables that old ones carry are left out."""
    weights = {name: tensor for name, tensor in hf_state.items() if not name.endswith("rotary_emb.inv_freq")}
    return _rename(weights, {hf: ours for ours, hf in _hf_names(config).items()}, config.tied)


def demo() -> None:
    """Counts the presets' parameters, then shows that pipeline stages compose to the whole model."""
    say = print if os.environ.get("RANK", "0") == "0" else (lambda *_: None)
    for name, config in PRESETS.items():
        active = f", a token uses {count_parameters(config, active=True):,}" if config.n_experts else ""
        say(f"{name:12} {count_parameters(config):>15,} parameters{active}")
    config = PRESETS["debug"]
    whole = Transformer(config).double()
    whole.init_weights(torch.Generator().manual_seed(0))
    x = tokens_BT = torch.arange(2 * 32).view(2, 32)
    for layers in ([0], [1, 2], [3]):
        stage = Transformer(config, layers, embedding=0 in layers, output=3 in layers).double()
        stage.load_state_dict({name: whole.state_dict()[name] for name in stage.state_dict()})
        x = stage(x)
    error = (x - whole(tokens_BT)).abs().max().item()
    say(f"three pipeline stages against the whole: largest difference {error:.1e}")
    assert error < 1e-10


if __name__ == "__main__":
    demo()
