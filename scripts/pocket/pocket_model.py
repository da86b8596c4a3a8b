"""A minimal Llama for training; its parameters carry the names Hugging Face gives them."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override


@dataclass(frozen=True, slots=True)
class PocketShape:
    """The sizes of the model; the defaults are the shipped one."""

    vocab_size: int
    hidden_size: int = 256
    num_layers: int = 5
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    ffn_size: int = 640
    max_len: int = 2048
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5


class RMSNorm(nn.Module):
    """Root-mean-square norm; the mean is taken in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Map x (..., size) to the same shape."""
        scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps)
        return (x * scale).to(x.dtype) * self.weight.to(x.dtype)


class Attention(nn.Module):
    """Causal attention with grouped keys and values and rotary positions."""

    def __init__(self, shape: PocketShape) -> None:
        super().__init__()
        self.shape = shape
        width, kv_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, shape.hidden_size, bias=False)

    @override
    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map x (rows, length, hidden_size); cos and sin (length, head_dim)."""
        rows, length, _ = x.shape
        query, key, value = (
            proj(x).view(rows, length, -1, self.shape.head_dim).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = _rotate(query, cos, sin), _rotate(key, cos, sin)
        group = self.shape.num_heads // self.shape.num_kv_heads
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        mixed = _attend(query, key, value)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(rows, length, -1))
        return out


class FeedForward(nn.Module):
    """The gated feed-forward part of a layer."""

    def __init__(self, shape: PocketShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.ffn_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.ffn_size, bias=False)
        self.down_proj = nn.Linear(shape.ffn_size, shape.hidden_size, bias=False)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Map x (..., hidden_size) to the same shape."""
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """One decoder layer: attention, then feed-forward, each on a normed input."""

    def __init__(self, shape: PocketShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.mlp = FeedForward(shape)

    @override
    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map x (rows, length, hidden_size); cos and sin (length, head_dim)."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Body(nn.Module):
    """Holds the parameters under the prefix `model.`."""

    def __init__(self, shape: PocketShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.norm_eps)


class PocketModel(nn.Module):
    """`forward` gives hidden states; `logits` is called on the few positions that need them."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: PocketShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Body(shape)
        steps = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
        angles = torch.outer(torch.arange(shape.max_len, dtype=torch.float32), shape.rope_theta**-steps)
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self._initialise()

    def _initialise(self) -> None:
        for name, weight in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(weight)
            elif weight.dim() == 2:
                nn.init.normal_(weight, std=0.03 if "embed" in name else weight.shape[1] ** -0.5)

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (rows, length) to hidden states (rows, length, hidden_size), after the last norm."""
        x = self.model.embed_tokens(tokens)
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        if torch.is_autocast_enabled("cpu"):
            x, cos, sin = x.bfloat16(), cos.bfloat16(), sin.bfloat16()
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        out: Tensor = self.model.norm(x)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """Map hidden (..., hidden_size) to float32 logits (..., vocab_size)."""
        return functional.linear(hidden, self.model.embed_tokens.weight.to(hidden.dtype)).float()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def _attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Compute causal attention.

    On short rows three plain operations run three times as fast as the fused kernel here.
    """
    length = query.shape[-2]
    if length > 256:
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    future = torch.full((length, length), -math.inf, dtype=query.dtype).triu(1)
    scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-1, -2) + future
    mixed: Tensor = scores.softmax(-1, dtype=scores.dtype) @ value
    return mixed
