"""The decoder-only transformer, on a flat run of tokens.

    input_ids (T,) -> embedding -> L x [norm, attention, +, norm, MLP, +] -> norm -> hidden (T, H)

There is no batch dimension and no padding: the T tokens may belong to one request or to fifty. The
model computes q, k and v and asks `kv.attend(layer, q, k, v)` for the rest. What `kv` is decides
where keys and values live and what each query may see, so the model never changes.

T tokens, H hidden size, Hq/Hkv query and KV heads, D head size, V vocabulary.
Sources: LLaMA (Touvron et al. 2023), RMSNorm (Zhang and Sennrich 2019), RoPE (Su et al. 2021),
grouped-query attention (Ainslie et al. 2023), SwiGLU (Shazeer 2020).
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infer_lab.model.config import ModelConfig, RopeConfig


class Attends(Protocol):
    """Whatever keeps keys and values: it stores the new ones and answers the queries."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (T, Hq, D), k and v (T, Hkv, D) of one layer -> (T, Hq, D)."""
        ...


class Transformer(nn.Module):
    """Llama, Mistral, Qwen2 and Qwen3 from one code path.

    A new one holds no weights yet, just memory for them: `load_model` fills it.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self.rope = RotaryEmbedding(config.head_size, config.rope)

    @property
    def device(self) -> torch.device:
        """Where the weights are, hence where `input_ids` and `positions` must be."""
        return self.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The type that hidden states, keys and values have."""
        return self.embed_tokens.weight.dtype

    def reset_rope(self) -> None:
        """Compute the RoPE frequencies anew: they are no weights, so no file holds them."""
        self.rope = RotaryEmbedding(self.config.head_size, self.config.rope).to(self.device)

    def forward(self, input_ids: Tensor, positions: Tensor, kv: Attends) -> Tensor:
        """Token ids (T,) at positions (T,) -> hidden states (T, H), all int64 in."""
        hidden = self.embed_tokens(input_ids)  # (T, H)
        cos, sin = self.rope(positions, hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden, cos, sin, kv)
        return self.norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states (rows, H) -> a score for every token of the vocabulary (rows, V)."""
        return self.lm_head(hidden)


class DecoderLayer(nn.Module):
    """Attention lets tokens exchange information; the MLP works on each token alone."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(config, index)
        self.post_attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, kv: Attends) -> Tensor:
        """(T, H) -> (T, H)."""
        hidden = hidden + self.attention(self.input_norm(hidden), cos, sin, kv)
        return hidden + self.mlp(self.post_attention_norm(hidden))


class Attention(nn.Module):
    """Grouped-query attention: Hq/Hkv query heads share each key and value head."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads
        self.head_size = config.head_size
        q_size = config.num_heads * config.head_size
        kv_size = config.num_kv_heads * config.head_size
        # One product instead of three: the rows are q's, then k's, then v's.
        self.qkv_proj = Linear(config.hidden_size, q_size + 2 * kv_size, bias=config.qkv_bias)
        self.o_proj = Linear(q_size, config.hidden_size, bias=config.output_bias)
        norm = RMSNorm if config.qk_norm else nn.Identity
        self.q_norm = norm(config.head_size, config.rms_norm_eps)
        self.k_norm = norm(config.head_size, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, kv: Attends) -> Tensor:
        """(T, H) -> (T, H); the only place where tokens see each other is `kv.attend`."""
        qkv = self.qkv_proj(x).unflatten(-1, (-1, self.head_size))  # (T, Hq + 2 Hkv, D)
        q, k, v = qkv.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        q = rotate(self.q_norm(q), cos, sin)
        k = rotate(self.k_norm(k), cos, sin)
        out = kv.attend(self.layer, q, k, v)  # (T, Hq, D)
        return self.o_proj(out.flatten(1))


class MLP(nn.Module):
    """SwiGLU: one half of a wide product gates the other."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, wide, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_up_proj = Linear(hidden, 2 * wide, bias=bias)
        self.down_proj = Linear(wide, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """(T, H) -> (T, H)."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class Linear(nn.Linear):
    """x (..., in) -> x W^T + b (..., out); made without spending time on random weights."""

    def reset_parameters(self) -> None:
        """Leave the memory as it is."""


class Embedding(nn.Embedding):
    """Token ids (T,) -> rows of a table (T, H); made without random weights, too."""

    def reset_parameters(self) -> None:
        """Leave the memory as it is."""


class RMSNorm(nn.Module):
    """Divide by the root mean square of the last dimension, then scale each channel."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """(..., size) -> (..., size)."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class RotaryEmbedding(nn.Module):
    """Turns a position into the angles by which pairs of channels are rotated."""

    inv_freq: Tensor  # (D/2,) float32, radians per position

    def __init__(self, head_size: int, rope: RopeConfig) -> None:
        super().__init__()
        self.register_buffer("inv_freq", rope_frequencies(head_size, rope), persistent=False)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Positions (T,) -> cos and signed sin (T, 1, D), see `rotate`; 1 stands for all heads."""
        angles = positions[:, None, None].to(self.inv_freq.dtype) * self.inv_freq
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x (T, heads, D): channel i and channel i + D/2 form a pair. -> (T, heads, D).

    The first of a pair becomes first * cos - second * sin, the second second * cos + first * sin.
    Rolling by D/2 brings each channel's partner to its place; the minus is in `sin` already.
    """
    partners = x.roll(x.shape[-1] // 2, dims=-1)
    return torch.addcmul(x * cos, partners, sin)


def rope_frequencies(head_size: int, rope: RopeConfig) -> Tensor:
    """Radians per position for each pair of channels, (D/2,) float32, from fast to slow."""
    exponents = torch.arange(0, head_size, 2, dtype=torch.float32, device="cpu") / head_size
    inv_freq = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return inv_freq / rope.factor
    if rope.kind == "llama3":
        # How many full turns fit into the context that the model was first trained on.
        turns = rope.original_max_position * inv_freq / (2 * math.pi)
        low, high = rope.low_freq_factor, rope.high_freq_factor
        keep = ((turns - low) / (high - low)).clamp(0, 1)  # 1: fast, keep; 0: slow, divide
        return inv_freq * keep + inv_freq / rope.factor * (1 - keep)
    return inv_freq
