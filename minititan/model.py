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

Five seams let the file be sharded without a change to it:

1. `layers` is a ModuleDict under the layers' own numbers, and both ends are optional. A pipeline stage is the same
   class with fewer layers; its parameters keep the names, hence the initial values, of the whole.
2. Heads are counted by the tensor (`unflatten(-1, (-1, head_dim))`), never by the config: under tensor parallel the
   local output of wq holds H/tp heads and the same line is right.
3. `attention.inner(q, k, v)` is a module of its own, which context parallel replaces by a ring.
4. Positions are an argument, so a rank that holds tokens 4096 to 8191 rotates by the true ones. cos and sin are
   computed from them in every forward: there is no buffer that could be left on meta.
5. `init_parameter(name, tensor, generator)` fills one whole parameter by its name, apart from construction.

Left out: dropout and biases (Llama has none), key/value caches (this trains), masks between documents.

References: Llama 3 (arXiv 2407.21783), RoPE (2104.09864), GQA (2305.13245), SwiGLU (2002.05202), RMSNorm (1910.07467).
RoPE pairs number i of a head with number i + K/2, as `transformers` does: weights cross over by renaming alone.

Shape suffixes: B batch, T tokens, D model dim, V vocabulary, H query heads, G key/value heads, K head dim.
"""

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a Llama. Raises ValueError when they do not fit together.

    rope_scaling: by how much Llama 3.1 and later slow the slow rotations, for contexts beyond 8,192 tokens (8 in 3.1,
    32 in 3.2, 1 for not at all); it changes the logits at every length.
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

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads


# vocab_size, dim, n_layers, n_heads, n_kv_heads, ffn_dim
PRESETS: dict[str, ModelConfig] = {
    "debug": ModelConfig(256, 64, 4, 8, 4, 176),
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

        Norms 1. Matrices normal with std 1/sqrt(inputs), which keeps the size of what passes through; wo and w2, which
        add to the residual stream, smaller by sqrt(2 n_layers). The embedding std 1. The output, and with it a tied
        embedding, std 0.02 or less, so that the first loss is close to log(vocab_size).
        """
        kind = name.split(".")[-2]
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


def count_parameters(config: ModelConfig) -> int:
    """Number of parameters, a tied matrix counted once; built on meta, so that 405B cost no memory."""
    with torch.device("meta"):
        return sum(p.numel() for p in Transformer(config).parameters())


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
        say(f"{name:12} {count_parameters(config):>15,} parameters")
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
