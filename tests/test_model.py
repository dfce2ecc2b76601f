"""The model against `transformers`, against itself in parts, and its seams used as later techniques use them."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from minititan.model import (
    PRESETS,
    Transformer,
    count_parameters,
    from_hf_state_dict,
    grouped_linear,
    rotary_angles,
    to_hf_state_dict,
)

DEBUG = PRESETS["debug"]
TIED = dataclasses.replace(DEBUG, tied=True)
DEBUG_MOE = PRESETS["debug-moe"]


def build(config, seed=0, dtype=torch.float64, **parts):
    model = Transformer(config, **parts).to(dtype)
    model.init_weights(torch.Generator().manual_seed(seed))
    return model


def tokens(rows=2, length=24, seed=1):
    return torch.randint(DEBUG.vocab_size, (rows, length), generator=torch.Generator().manual_seed(seed))


# The published counts of meta-llama/Meta-Llama-3-8B, -3-70B, -3.1-405B and -3.2-1B.
PUBLISHED = {
    "llama3-1b": 1_235_814_400,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts_are_the_published_ones(name):
    assert count_parameters(PRESETS[name]) == PUBLISHED[name]


def test_the_formula_of_the_docstring_counts_the_same():
    for c in PRESETS.values():
        attention = 2 * c.dim**2 + 2 * c.dim * c.n_kv_heads * c.head_dim + 2 * c.dim
        ends = c.vocab_size * c.dim * (1 if c.tied else 2) + c.dim
        for n_experts, active in ((c.n_experts, False), (c.top_k, True)):
            layer = attention + 3 * c.dim * c.ffn_dim
            if c.n_experts:
                experts = n_experts + c.n_shared_experts
                layer = attention + c.n_experts * c.dim + experts * 3 * c.dim * (c.expert_ffn_dim or c.ffn_dim)
            assert count_parameters(c, active) == c.n_layers * layer + ends
    assert count_parameters(dataclasses.replace(DEBUG, n_experts=4)) > count_parameters(DEBUG)  # ffn_dim each


@pytest.mark.parametrize(
    "change, told",
    [
        ({"dim": 60}, "dim 60 over n_heads 8 gives a head_dim of 7.5.*multiple of 16"),
        ({"dim": 56}, "dim 56 over n_heads 8 gives a head_dim of 7;"),
        ({"n_kv_heads": 3}, r"n_heads 8 is no multiple of n_kv_heads 3.*take n_kv_heads from \[1, 2, 4, 8\]"),
        ({"n_kv_heads": 16}, "n_heads 8 is no multiple of n_kv_heads 16"),
        ({"n_layers": 0}, "n_layers must be a whole number of at least 1, got 0"),
        ({"vocab_size": 256.0}, "vocab_size must be a whole number of at least 1, got 256.0"),
        ({"ffn_dim": True}, "ffn_dim must be a whole number"),
        ({"max_seq_len": -1}, "max_seq_len must be a whole number"),
        ({"norm_eps": 0.0}, "norm_eps must be above 0"),
        ({"rope_theta": float("nan")}, "rope_theta must be above 0, got nan"),
        ({"n_experts": -1}, "n_experts must be a whole number of at least 0, got -1"),
        ({"n_experts": 4, "top_k": 0}, "top_k must be a whole number of at least 1, got 0"),
        ({"n_experts": 4, "top_k": 5}, "top_k 5 of n_experts 4: take a top_k from 1 to 4"),
        ({"n_experts": 1}, "top_k 2 of n_experts 1"),
        ({"n_experts": 4, "expert_ffn_dim": 0}, "expert_ffn_dim must be a whole number of at least 1, got 0"),
        ({"n_experts": 4, "n_shared_experts": True}, "n_shared_experts must be a whole number"),
        ({"n_experts": 4, "bias_rate": -1.0}, "bias_rate must be 0 or more, got -1.0"),
        ({"n_experts": 4, "balance_loss": float("nan")}, "balance_loss must be 0 or more, got nan"),
        ({"n_shared_experts": 1}, "n_experts 0 is a dense model, and n_shared_experts 1.*take n_experts of 1"),
    ],
)
def test_sizes_that_do_not_fit_are_told(change, told):
    with pytest.raises(ValueError, match=told):
        dataclasses.replace(DEBUG, **change)


# --- against transformers ------------------------------------------------------------------------------------------

LLAMAS = {
    "grouped heads": DEBUG,
    "tied": TIED,
    "a key head for each query head": dataclasses.replace(DEBUG, n_kv_heads=8),
    "one key head": dataclasses.replace(DEBUG, n_kv_heads=1, vocab_size=99, ffn_dim=77),
    # head_dim 32 at theta 500,000 has pairs on both sides of the band in which the speeds blend, and one inside it
    "stretched rotations": dataclasses.replace(DEBUG, n_heads=2, n_kv_heads=1, rope_scaling=8.0),
}


def hf_llama(config, seed=0):
    """transformers' model of this config, with random weights large enough that every part matters."""
    transformers = pytest.importorskip("transformers")
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling != 1.0:
        rope |= {
            "rope_type": "llama3",
            "factor": config.rope_scaling,
            "original_max_position_embeddings": 8192,
        }
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    hf_config = transformers.LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.dim,
        num_hidden_layers=config.n_layers,
        num_attention_heads=config.n_heads,
        num_key_value_heads=config.n_kv_heads,
        intermediate_size=config.ffn_dim,
        rms_norm_eps=config.norm_eps,
        rope_parameters=rope,
        max_position_embeddings=131_072,
        tie_word_embeddings=config.tied,
        use_cache=False,
    )
    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM(hf_config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.1 if p.ndim == 1 else p.shape[-1] ** -0.5)
    return model


@pytest.mark.parametrize("name", LLAMAS)
def test_logits_and_gradients_are_those_of_transformers(name):
    config = LLAMAS[name]
    hf, ours = hf_llama(config), Transformer(config)
    ours.load_state_dict(from_hf_state_dict(hf.state_dict(), config), strict=True)
    tokens_BT = tokens(length=40) % config.vocab_size
    positions_T = torch.arange(40) * 150  # up to 5850: the slow pairs have turned too
    # With a mask of ones: without one, transformers takes a jump in the positions for the border of a document.
    expected = hf(tokens_BT, position_ids=positions_T[None], attention_mask=torch.ones_like(tokens_BT)).logits
    logits = ours(tokens_BT, positions_T)
    assert expected.abs().max() > 1
    assert (logits - expected).abs().max() < 1e-5
    if config.rope_scaling != 1.0:  # the test would see a missing scaling
        plain = Transformer(dataclasses.replace(config, rope_scaling=1.0))
        plain.load_state_dict(ours.state_dict())
        assert (plain(tokens_BT, positions_T) - expected).abs().max() > 1e-2

    for out in (expected, logits):
        F.cross_entropy(out.flatten(0, 1), tokens_BT.flatten()).backward()
    theirs = from_hf_state_dict({n: p.grad for n, p in hf.named_parameters()}, config)
    for n, p in ours.named_parameters():
        assert (p.grad - theirs[n]).norm() < 1e-5 * theirs[n].norm(), n


@pytest.mark.parametrize("name", ["grouped heads", "tied"])
def test_weights_go_to_transformers_and_back(name):
    config = LLAMAS[name]
    ours = build(config, seed=3, dtype=torch.float32)
    state = to_hf_state_dict(ours.state_dict(), config)
    hf = hf_llama(config)
    hf.load_state_dict(state, strict=True)
    back = from_hf_state_dict(hf.state_dict(), config)
    assert back.keys() == ours.state_dict().keys()
    assert all(torch.equal(back[n], t) for n, t in ours.state_dict().items())
    assert (hf(tokens()).logits - ours(tokens())).abs().max() < 1e-5


def test_checkpoints_that_leave_out_the_tied_output_or_carry_rotary_tables():
    state = to_hf_state_dict(build(TIED).state_dict(), TIED)
    del state["lm_head.weight"]  # as safetensors files are
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)  # as files of before 2023 do
    build(TIED).load_state_dict(from_hf_state_dict(state, TIED), strict=True)
    ours = build(TIED).state_dict()
    del ours["output.weight"]
    assert "lm_head.weight" in to_hf_state_dict(ours, TIED)


def test_names_of_another_model_are_told():
    hf_state = to_hf_state_dict(build(DEBUG).state_dict(), DEBUG)
    small = dataclasses.replace(DEBUG, n_layers=3)
    with pytest.raises(ValueError, match=r"9 of 39 names are not of this Llama: model\.layers\.3\..*it has 30"):
        from_hf_state_dict(hf_state, small)
    with pytest.raises(ValueError, match="39 of 39 names are not of this Llama"):
        to_hf_state_dict(hf_state, DEBUG)  # the wrong way round
    with pytest.raises(ValueError, match=r"1 of 1 names are not of this Llama: layers\.0\.norm\.weight"):
        to_hf_state_dict({"layers.0.norm.weight": torch.ones(1)}, DEBUG)


# --- the arithmetic ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [DEBUG, TIED, DEBUG_MOE], ids=["untied", "tied", "experts"])
def test_backward_is_the_derivative_in_float64(config):
    model = build(config)
    inputs, targets = tokens(length=25)[:, :-1], tokens(length=25)[:, 1:]

    def loss():
        return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())

    loss().backward()
    assert all(p.dtype == p.grad.dtype == torch.float64 for p in model.parameters())
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, p in model.named_parameters():
            direction = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            direction = direction / direction.norm() + p.grad / p.grad.norm()  # never across the gradient
            p += 1e-5 * direction
            up = loss()
            p -= 2e-5 * direction
            slope = (up - loss()) / 2e-5
            p += 1e-5 * direction
            expected = (p.grad * direction).sum()
            assert abs(slope - expected) < 1e-6 * abs(expected) + 1e-10, name


class Ops(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.names.append(op.__name__)
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_attention_reaches_the_flash_kernel_without_repeating_key_heads(dtype):
    model = build(DEBUG, dtype=dtype)
    with Ops() as ops:
        model(tokens()).sum().backward()
    assert ops.names.count("_scaled_dot_product_flash_attention_for_cpu.default") == DEBUG.n_layers
    assert ops.names.count("_scaled_dot_product_flash_attention_for_cpu_backward.default") == DEBUG.n_layers
    assert not any("repeat_interleave" in name for name in ops.names)


class WrittenOutAttention(nn.Module):
    """softmax(q k^T / sqrt(K)) v with the rule of who may look at whom given by positions."""

    def __init__(self, positions_T):
        super().__init__()
        self.allowed_TT = positions_T[None, :] <= positions_T[:, None]

    def forward(self, q_BHTK, k_BGTK, v_BGTK):
        heads = q_BHTK.shape[1] // k_BGTK.shape[1]
        k_BHTK, v_BHTK = (x.repeat_interleave(heads, dim=1) for x in (k_BGTK, v_BGTK))
        scores = q_BHTK @ k_BHTK.transpose(2, 3) * q_BHTK.shape[-1] ** -0.5
        return scores.masked_fill(~self.allowed_TT, float("-inf")).softmax(-1) @ v_BHTK


def test_inner_can_be_replaced_and_tokens_reordered_with_their_positions():
    """What context parallel does: another attention, and tokens in another order than their positions."""
    model, order = build(DEBUG), torch.randperm(24, generator=torch.Generator().manual_seed(2))
    expected = model(tokens())
    for positions_T in (torch.arange(24), order):
        for block in model.layers.values():
            block.attention.inner = WrittenOutAttention(positions_T)
        logits = model(tokens()[:, positions_T], positions_T)
        assert (logits - expected[:, positions_T]).abs().max() < 1e-12


def test_a_chunk_of_positions_turns_as_in_the_whole():
    whole = rotary_angles(torch.arange(8192), DEBUG)
    part = rotary_angles(torch.arange(4096, 8192), DEBUG)
    assert all(torch.equal(p, w[4096:]) for p, w in zip(part, whole, strict=True))
    assert all(x.dtype == torch.float32 for x in whole)


def test_only_distances_matter_and_the_offset_is_used():
    model = build(DEBUG)
    at_0, at_1000 = model(tokens()), model(tokens(), torch.arange(1000, 1024))
    assert torch.equal(at_0, model(tokens(), torch.arange(24)))
    assert (at_0 - at_1000).abs().max() < 1e-5  # angles are float32
    stretched = model(tokens(), torch.arange(24) * 40)
    assert (at_0 - stretched).abs().max() > 1e-3


def test_later_tokens_change_nothing_before_them():
    model, changed = build(DEBUG), tokens().clone()
    changed[:, 10] = (changed[:, 10] + 1) % 256
    before, after = model(tokens()), model(changed)
    assert torch.equal(before[:, :10], after[:, :10])
    assert (before[:, 10:] != after[:, 10:]).any(dim=2).all()


def test_a_sequence_above_max_seq_len_is_told():
    model = build(dataclasses.replace(DEBUG, max_seq_len=16))
    with pytest.raises(ValueError, match="24 tokens exceed max_seq_len 16"):
        model(tokens())


# --- experts -------------------------------------------------------------------------------------------------------


def every_expert_for_every_token(moe, x_BTD):
    """The same mixture with a mask in place of all sorting: what each token gets from each expert, and the scores."""
    router, experts, K = moe.router, moe.experts, moe.router.top_k
    scores = (x_BTD @ router.gate.weight.T).sigmoid()
    threshold = (
        (scores + router.bias_rate * router.bias_steps).detach().sort(-1, descending=True).values[..., K - 1 : K]
    )
    chosen = (scores + router.bias_rate * router.bias_steps).detach() >= threshold
    weights = scores * chosen
    if K > 1:
        weights = weights / weights.sum(-1, keepdim=True)
    hidden = torch.einsum("btd,efd->btef", x_BTD, experts.w1), torch.einsum("btd,efd->btef", x_BTD, experts.w3)
    out = torch.einsum("btef,edf->bted", F.silu(hidden[0]) * hidden[1], experts.w2)
    out = (out * weights[..., None]).sum(2)
    return out + (moe.shared_experts(x_BTD) if moe.shared_experts else 0), scores, chosen


MIXTURES = {
    "2 of 8 and a shared one": DEBUG_MOE,
    "1 of 8": dataclasses.replace(DEBUG_MOE, top_k=1, n_shared_experts=0),
    "all of 3": dataclasses.replace(DEBUG_MOE, n_experts=3, top_k=3, n_shared_experts=2, expert_ffn_dim=5),
    "1 of 1": dataclasses.replace(DEBUG_MOE, n_experts=1, top_k=1),
    "with a loss for even load": dataclasses.replace(DEBUG_MOE, balance_loss=0.3),
}


@pytest.mark.parametrize("sequence_weight", [None, 2.0])
@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_is_the_sum_over_all_experts_with_most_weights_zero(name, sequence_weight):
    config = MIXTURES[name]
    moe = build(config).layers["2"].moe
    moe.router.sequence_weight = sequence_weight  # None: the mean over the 3
    moe.router.bias_rate = 0.05
    moe.router.bias_steps += torch.arange(config.n_experts) % 3  # they change who is chosen, and no weight
    x_BTD = torch.randn(3, 7, config.dim, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    towards = torch.randn(x_BTD.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = []
    for forward in (moe, lambda x: every_expert_for_every_token(moe, x)):
        x = x_BTD.clone().requires_grad_()
        out = forward(x)
        total = 0
        if forward is not moe:
            out, scores, chosen = out
            for b in range(3):  # DeepSeek-V3's formula, a sequence at a time
                load = chosen[b].double().mean(0) * config.n_experts / config.top_k
                uneven = (load * (scores[b] / scores[b].sum(-1, True)).mean(0)).sum()
                total = total + config.balance_loss * uneven * (sequence_weight or 1 / 3)
        moe.zero_grad()
        ((out * towards).sum() + total).backward()
        found.append([out.detach(), x.grad, *(p.grad.clone() for p in moe.parameters())])
    for got, want in zip(*found, strict=True):
        assert (got - want).norm() < 1e-12 * want.norm()
    assert torch.equal(moe.router.tokens_per_expert, chosen.sum((0, 1)))


def test_experts_without_a_token_get_zeros():
    moe = build(DEBUG_MOE).layers["0"].moe
    moe.router.bias_rate = 1.0
    moe.router.bias_steps[3:5] += 2
    moe(torch.randn(2, 5, DEBUG_MOE.dim, dtype=torch.float64)).sum().backward()
    assert moe.router.tokens_per_expert.tolist() == [0, 0, 0, 10, 10, 0, 0, 0]
    used = [weight.grad.flatten(1).norm(dim=1) > 0 for weight in moe.experts.parameters()]
    assert all(of_weight.tolist() == [False] * 3 + [True] * 2 + [False] * 3 for of_weight in used)
    moe(torch.randn(0, 5, DEBUG_MOE.dim, dtype=torch.float64)).sum().backward()  # no token at all


def test_rows_are_counted_once_a_microbatch():
    """Also when forward is computed twice, and not where nothing is learnt; integers stay so in bf16."""
    model = build(DEBUG_MOE, dtype=torch.bfloat16)
    routers = [block.moe.router for block in model.layers.values()]
    with torch.no_grad():
        model(tokens())
    assert not any(router.tokens_per_expert.any() for router in routers)
    for expected in (96, 192):  # 2 of 2 × 24
        model(tokens()).sum().backward()
        assert all(router.tokens_per_expert.sum() == expected for router in routers)
    for block in model.layers.values():
        forward = block.forward
        block.forward = lambda *args, f=forward: torch.utils.checkpoint.checkpoint(f, *args, use_reentrant=False)
    model(tokens()).sum().backward()
    assert all(router.tokens_per_expert.sum() == 288 for router in routers)
    assert all(buffer.dtype == torch.int64 for buffer in model.buffers())
    assert set(model.state_dict()) - {n for n, _ in model.named_parameters()} == {
        f"layers.{i}.moe.router.bias_steps" for i in range(4)
    }


def test_grouped_kernel_and_loop_agree():
    x = torch.randn(20, 16, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(4, 24, 16, dtype=torch.bfloat16, requires_grad=True)
    counts, towards = torch.tensor([0, 13, 0, 7]), torch.randn(20, 24)
    with Ops() as ops:
        out = grouped_linear(x, weight, counts)
    assert any("grouped_mm" in name for name in ops.names)
    loop = grouped_linear(x.double(), weight.double(), counts)
    got, want = (torch.autograd.grad((o * towards).sum(), (x, weight)) for o in (out, loop))
    for one, other in zip((out, *got), (loop, *want), strict=True):
        assert (one - other).norm() < 5e-3 * other.norm()
    assert not got[1][0].any() and not got[1][2].any()
    with torch.device("meta"):  # shapes only: nobody knows the counts
        assert grouped_linear(torch.empty(9, 16), torch.empty(4, 24, 16), torch.empty(4, dtype=torch.long)).is_meta


def test_experts_have_no_names_in_transformers():
    with pytest.raises(ValueError, match="no Llama of transformers has experts, and this one has n_experts 8"):
        to_hf_state_dict(build(DEBUG_MOE).state_dict(), DEBUG_MOE)


# --- pipeline stages -----------------------------------------------------------------------------------------------


def stages_of(whole, split):
    last = whole.config.n_layers - 1
    stages = [Transformer(whole.config, part, 0 in part, last in part).double() for part in split]
    for stage in stages:
        stage.load_state_dict({n: whole.state_dict()[n] for n in stage.state_dict()}, strict=True)
    return stages


@pytest.mark.parametrize("config", [DEBUG, DEBUG_MOE], ids=["dense", "experts"])
@pytest.mark.parametrize("split", [[[0, 1, 2, 3]], [[0], [1, 2], [3]], [range(0, 3), range(3, 4)]])
def test_stages_make_the_whole_exactly(split, config):
    whole = build(config)
    stages = stages_of(whole, split)
    names = [n for stage in stages for n, _ in stage.named_parameters()]
    assert sorted(names) == sorted(n for n, _ in whole.named_parameters())
    x = tokens()
    for stage in stages:
        x = stage(x)
    expected = whole(tokens())
    assert torch.equal(x, expected)
    x.square().mean().backward()
    expected.square().mean().backward()
    gradients = {n: p.grad for stage in stages for n, p in stage.named_parameters()}
    assert all(torch.equal(gradients[n], p.grad) for n, p in whole.named_parameters())


def test_a_middle_stage_has_no_ends_and_needs_the_true_positions():
    whole = build(DEBUG)
    first, middle, last = stages_of(whole, [[0], [1, 2], [3]])
    assert middle.tok_embeddings is middle.norm is middle.output is None
    positions_T = torch.arange(100, 124) * 7
    x = last(middle(first(tokens(), positions_T), positions_T), positions_T)
    assert torch.equal(x, whole(tokens(), positions_T))


def test_stages_that_cannot_be_are_told():
    with pytest.raises(ValueError, match=r"layers \[3, 4\] must be different numbers from 0 to 3"):
        Transformer(DEBUG, layers=[3, 4])
    with pytest.raises(ValueError, match=r"layers \[1, 1\]"):
        Transformer(DEBUG, layers=[1, 1])
    with pytest.raises(ValueError, match=r"tied=True makes one matrix.*embedding=True and output=False.*tied=False"):
        Transformer(TIED, layers=[0], output=False)
    assert Transformer(TIED, layers=[1], embedding=False, output=False).output is None


# --- initial weights -----------------------------------------------------------------------------------------------


def test_tied_ends_are_one_parameter_that_sums_both_gradients():
    model, twin = build(TIED), build(DEBUG)
    assert model.output.weight is model.tok_embeddings.weight
    twin.load_state_dict(model.state_dict())
    for m in (model, twin):
        m(tokens()).square().mean().backward()
    summed = twin.output.weight.grad + twin.tok_embeddings.weight.grad
    torch.testing.assert_close(model.output.weight.grad, summed, rtol=1e-12, atol=0)


def test_initial_weights_have_the_sizes_that_the_docstring_gives():
    config = dataclasses.replace(DEBUG, dim=256, ffn_dim=512)
    stds = {
        "tok_embeddings": 1.0,
        "output": 0.02,
        "layers.3.attention.wq": 1 / 16,
        "layers.0.attention.wo": 1 / 16 / 8**0.5,
        "layers.1.feed_forward.w1": 1 / 16,
        "layers.2.feed_forward.w2": 512**-0.5 / 8**0.5,
    }
    model = build(config)
    for name, std in stds.items():
        weight = model.get_parameter(f"{name}.weight")
        assert abs(weight.std() / std - 1) < 0.03 and abs(weight.mean()) < 0.02 * std, name
    assert all((p == 1).all() for n, p in model.named_parameters() if "norm" in n)
    assert abs(build(dataclasses.replace(config, tied=True)).output.weight.std() - 0.02) < 1e-3


def test_initial_experts_have_the_sizes_of_a_feed_forward():
    config = dataclasses.replace(DEBUG_MOE, dim=256, expert_ffn_dim=128)
    model = build(config)
    for name, std in {"experts.w1": 1 / 16, "experts.w3": 1 / 16, "experts.w2": 128**-0.5 / 8**0.5}.items():
        weight = model.get_parameter(f"layers.1.moe.{name}")
        assert all(abs(one.std() / std - 1) < 0.03 for one in weight), name
    assert abs(model.layers["0"].moe.router.gate.weight.std() * 16 - 1) < 0.05
    model.init_parameter("layers.0.moe.router.bias_steps", steps := torch.full((8,), 7), None)
    assert not steps.any()


@pytest.mark.parametrize("config", [DEBUG, TIED], ids=["untied", "tied"])
def test_the_first_loss_is_near_log_vocabulary_and_an_overfit_batch_is_learnt(config):
    model = build(config, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(40):
        losses.append(F.cross_entropy(model(tokens()).flatten(0, 1), tokens(seed=9).flatten()))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert abs(losses[0] - 5.545) < 0.1
    assert losses[-1] < 0.5


def test_init_weights_depends_on_the_generator_only():
    one, two, other = build(DEBUG, seed=1), build(DEBUG, seed=1), build(DEBUG, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not torch.equal(one.output.weight, other.output.weight)


def test_no_buffers_and_a_forward_on_meta():
    with torch.device("meta"):
        model = Transformer(PRESETS["llama3-8b"])
        logits = model(torch.empty(1, 8192, dtype=torch.long))
        experts = Transformer(DEBUG_MOE)(torch.empty(2, 16, dtype=torch.long))
    assert not list(model.buffers())
    assert logits.shape == (1, 8192, 128_256) and logits.is_meta
    assert experts.shape == (2, 16, 256) and experts.is_meta
