"""Llama 3: the model that every technique in this package shards, splits, checkpoints or compiles.

A token becomes a vector of D numbers; n_layers blocks each add two corrections to it (attention looks at
earlier tokens, the feed-forward looks at the token itself); a last norm and one matrix turn it into V logits.

    tokens_BT ─ tok_embeddings ─ x_BTD ─┬──────────────────(+)─┬───────────────────(+)─ … ─ norm ─ output ─ logits_BTV
                                        └ attention_norm        └ ffn_norm          |
                                            wq wk wv → rope       w1 (gate)  w3 (up)|
                                            → inner → wo          silu(w1 x)·w3 x → w2

    block:  x = x + wo(attention(norm(x)));   x = x + w2(silu(w1 norm(x)) · w3 norm(x))

Parameters, with H query heads, G key/value heads of K = D/H numbers and a feed-forward of F:

    per layer   2·D·D + 2·D·G·K + 3·D·F + 2·D          (wq and wo; wk and wv; w1, w2 and w3; two norms)
    ends        V·D (tied) or 2·V·D, and D             (tok_embeddings and output; norm)

which is 8,030,261,248 for the 8B model, to the unit. A token costs about 6 flops a parameter forward and
backward, plus 6·n_layers·D·T for causal attention over T tokens.

Five seams make the file shardable without a change to it:

1. `layers` is a ModuleDict under the layers' own numbers, and both ends are optional. A pipeline stage is the
   same class with fewer layers; its parameters keep the names, hence the initial values, of the whole.
2. Heads are counted by the tensor (`unflatten(-1, (-1, head_dim))`), never by the config: under tensor parallel
   wq's local output holds H/tp heads and the same line is right.
3. `attention.inner(q, k, v)` is a module of its own; context parallel replaces it by a ring.
4. Positions are an argument, so a rank that holds tokens 4096..8191, or every other chunk, rotates by the true ones.
   cos and sin are computed from them in each forward: the model has no buffer that could be left on meta.
5. `init_parameter(name, tensor, generator)` fills one parameter by its name, apart from construction.

Left out: dropout and biases (Llama has none), key/value caches (this trains), document masks.

References: Llama 3 (arXiv 2407.21783), RoPE (2104.09864), GQA (2305.13245), SwiGLU (2002.05202), RMSNorm
(1910.07467). The half-split RoPE and the parameter shapes are those of `transformers`' LlamaForCausalLM, so
weights cross over by renaming alone.

Shape suffixes: B batch, T tokens, D model dim, V vocabulary, H query heads, G key/value heads, K head dim, F ffn dim.
"""

import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a Llama. `rope_scaling` is the factor by which Llama 3.1 and later stretch the slow rotations beyond
    8,192 tokens (8 for 3.1, 32 for 3.2; 1: not at all). Raises ValueError for sizes that do not fit together."""

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

    def __post_init__(self) -> None:
        for name in ("vocab_size", "dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim", "max_seq_len"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        if self.dim % self.n_heads:
            raise ValueError(
                f"dim {self.dim} does not divide into n_heads {self.n_heads} (remainder {self.dim % self.n_heads}): "
                f"take dim {self.dim - self.dim % self.n_heads or self.n_heads} or another number of heads"
            )
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"n_heads {self.n_heads} is no multiple of n_kv_heads {self.n_kv_heads}: each key/value head must "
                f"serve the same number of query heads; take n_kv_heads from "
                f"{[g for g in range(1, self.n_heads + 1) if self.n_heads % g == 0]}"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"dim {self.dim} / n_heads {self.n_heads} gives the odd head_dim {self.head_dim}: RoPE rotates pairs, "
                f"so the head_dim must be even"
            )
        for name in ("norm_eps", "rope_theta", "rope_scaling"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)!r}")

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads


PRESETS: dict[str, ModelConfig] = {
    "debug": ModelConfig(256, dim=64, n_layers=4, n_heads=8, n_kv_heads=4, ffn_dim=176),
    "llama3-1b": ModelConfig(
        128_256, 2048, 16, 32, 8, 8192, max_seq_len=131_072, tied=True, rope_scaling=32.0
    ),
    "llama3-8b": ModelConfig(128_256, 4096, 32, 32, 8, 14_336),
    "llama3-70b": ModelConfig(128_256, 8192, 80, 64, 8, 28_672),
    "llama3-405b": ModelConfig(128_256, 16_384, 126, 128, 8, 53_248, max_seq_len=131_072, rope_scaling=8.0),
}


def rotary_angles(positions_T: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor]:
    """cos_TK and sin_TK, float32, of the angle by which each position turns each pair of a head's numbers."""
    dims = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=positions_T.device)
    frequency = 1.0 / config.rope_theta ** (dims / config.head_dim)
    if config.rope_scaling != 1.0:
        # Llama 3.1: a pair that turns at least 4 times within 8192 tokens keeps its speed, one that turns less than
        # once is slowed by the whole factor, and those between by a blend of both.
        kept = ((8192 * frequency / (2 * math.pi) - 1) / 3).clamp(0, 1)
        frequency = frequency * (kept + (1 - kept) / config.rope_scaling)
    angle_TK = (positions_T.float()[:, None] * frequency).repeat(1, 2)
    return angle_TK.cos(), angle_TK.sin()


def rotate(x_BHTK: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
    """Turns number i and number i + K/2 of every head as the pair (real, imaginary); at least in cos's precision."""
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
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.ffn_dim, bias=False)  # gate
        self.w2 = nn.Linear(config.ffn_dim, config.dim, bias=False)  # down
        self.w3 = nn.Linear(config.dim, config.ffn_dim, bias=False)  # up

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x_BTD)) * self.w3(x_BTD))


class TransformerBlock(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(self, x_BTD: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), cos_TK, sin_TK)
        return x_BTD + self.feed_forward(self.ffn_norm(x_BTD))


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
        if len(set(numbers)) != len(numbers) or not set(numbers) <= set(range(config.n_layers)):
            raise ValueError(
                f"layers {numbers} must be different numbers from 0 to {config.n_layers - 1} (n_layers {config.n_layers})"
            )
        if config.tied and embedding != output:
            raise ValueError(
                f"tied=True makes tok_embeddings and output one matrix, but this part has embedding={embedding} and "
                f"output={output}: two stages would train two copies of it; take tied=False, or keep both ends together"
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
            n_tokens = tokens_BT_or_x_BTD.shape[1]
            if n_tokens > self.config.max_seq_len:
                raise ValueError(
                    f"a sequence of {n_tokens} tokens exceeds max_seq_len {self.config.max_seq_len}"
                )
            positions_T = torch.arange(n_tokens, device=tokens_BT_or_x_BTD.device)
        cos_TK, sin_TK = rotary_angles(positions_T, self.config)
        x_BTD = tokens_BT_or_x_BTD if self.tok_embeddings is None else self.tok_embeddings(tokens_BT_or_x_BTD)
        for block in self.layers.values():
            x_BTD = block(x_BTD, cos_TK, sin_TK)
        return x_BTD if self.output is None else self.output(self.norm(x_BTD))

    @torch.no_grad()
    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator | None = None) -> None:
        """Fills `tensor`, the whole of the parameter `name`, in place.

        Norms 1; matrices normal with std 0.02, and those that write to the residual stream (wo, w2) smaller by
        sqrt(2 n_layers), so that the stream's variance does not grow with depth (GPT-2)."""
        kind = name.split(".")[-2]
        if kind.endswith("norm"):
            tensor.fill_(1.0)
        else:
            scale = (2 * self.config.n_layers) ** -0.5 if kind in ("wo", "w2") else 1.0
            tensor.normal_(0.0, 0.02 * scale, generator=generator)

    def init_weights(self, generator: torch.Generator | None = None) -> None:
        """Fills every parameter of an unsharded model, one after the other. (For weights that do not depend on the
        layout, draw each from a generator of its own name: `meta_init.materialize`.)"""
        for name, parameter in self.named_parameters():
            self.init_parameter(name, parameter, generator)


def count_parameters(config: ModelConfig) -> int:
    """Number of parameters, a tied matrix counted once; built on meta, so that 405B cost no memory."""
    with torch.device("meta"):
        return sum(p.numel() for p in Transformer(config).parameters())


_TO_HF = {
    "tok_embeddings": "model.embed_tokens",
    "norm": "model.norm",
    "output": "lm_head",
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


def _rename(
    state: Mapping[str, Tensor], names: Mapping[str, str], inside: str, n_layers: int
) -> dict[str, Tensor]:
    """Renames `[layers.N.]part.weight` by the table; `inside` is the target's prefix of a layer."""
    renamed, unknown = {}, []
    for name, tensor in state.items():
        match = re.fullmatch(r"(?:(?:model\.)?layers\.(\d+)\.)?(.+)\.weight", name)
        if not match or match[2] not in names or (match[1] and int(match[1]) >= n_layers):
            unknown.append(name)
        else:
            layer = f"{inside}layers.{match[1]}." if match[1] else ""
            renamed[f"{layer}{names[match[2]]}.weight"] = tensor
    if unknown:
        raise ValueError(
            f"{len(unknown)} of {len(state)} names do not belong to a Llama of {n_layers} layers: "
            f"{', '.join(unknown[:4])}{', …' if len(unknown) > 4 else ''}"
        )
    return renamed


def to_hf_state_dict(model_state: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """The names of `transformers`' LlamaForCausalLM for the state of a Transformer (or of a stage of it).

    Values are passed on untouched, so shards (DTensor) stay shards. Raises ValueError for names that it does not know.
    """
    state = _rename(model_state, _TO_HF, "model.", config.n_layers)
    if config.tied and "model.embed_tokens.weight" in state:
        state.setdefault("lm_head.weight", state["model.embed_tokens.weight"])
    return state


def from_hf_state_dict(hf_state: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """The way back. A tied checkpoint may lack lm_head; the rotary buffers that old ones carry are dropped."""
    weights = {name: t for name, t in hf_state.items() if not name.endswith("rotary_emb.inv_freq")}
    state = _rename(weights, {hf: ours for ours, hf in _TO_HF.items()}, "", config.n_layers)
    if config.tied and "tok_embeddings.weight" in state:
        state.setdefault("output.weight", state["tok_embeddings.weight"])
    return state


def demo() -> None:
    """Counts the presets' parameters, then shows that pipeline stages compose to the whole model."""
    say = print if os.environ.get("RANK", "0") == "0" else (lambda *_: None)
    for name, config in PRESETS.items():
        say(f"{name:12} {count_parameters(config):>15,} parameters")
    config = PRESETS["debug"]
    whole = Transformer(config).double()
    whole.init_weights(torch.Generator().manual_seed(0))
    stages = [
        Transformer(config, layers=range(0, 1), output=False),
        Transformer(config, layers=range(1, 3), embedding=False, output=False),
        Transformer(config, layers=range(3, 4), embedding=False),
    ]
    tokens_BT = torch.arange(2 * 32).view(2, 32)
    x = tokens_BT
    for stage in stages:
        stage.double().load_state_dict({n: whole.state_dict()[n] for n in stage.state_dict()})
        x = stage(x)
    error = (x - whole(tokens_BT)).abs().max().item()
    say(f"three pipeline stages against the whole: largest difference {error:.1e}")
    assert error < 1e-10


if __name__ == "__main__":
    demo()
