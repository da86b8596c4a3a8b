"""Sizes of models, for cost models; `ModelConfig.shape` makes one of any config.json."""

from dataclasses import dataclass, replace

from alignedserve.core.block_layout import DTYPE_BYTES, BlockLayout, LayerHeads
from alignedserve.core.errors import ConfigError
from alignedserve.costmodel.gpu_limits import REQUEST_TOKENS
from alignedserve.costmodel.hardware import Hardware


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes that the time and memory of a decoder depend on.

    Matrices only: norms and biases are under 0.1 % of a model.
    """

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    is_gated: bool  # three matrices in the feed-forward part, not two
    ties_embeddings: bool  # one table for tokens in and logits out
    num_positions: int = 0  # rows of learned positions; 0 with rotary ones
    dtype: str = "float16"  # of weights and cache, a key of DTYPE_BYTES
    num_experts: int = 0  # of a mixture in place of the feed-forward part, on some layers or all
    num_chosen_experts: int = 0  # that a token passes
    expert_size: int = 0  # as ffn_size
    num_expert_layers: int = 0
    shared_expert_size: int = 0  # as ffn_size, of the expert that every token passes
    kv_parts: int = 2  # keys and values are cached; 1: latents, which are both
    attention_parameters: int = 0  # of a layer; 0: those of queries, keys, values and output
    num_cached_layers: int = 0  # with keys and values, where others keep a state of fixed size; 0: all
    num_state_layers: int = 0  # those others
    state_layer_bytes: int = 0  # of a context's state on one of them
    unlike: tuple[LayerHeads, ...] = ()  # of the cached layers, the last, whose heads have other sizes
    num_windowed_layers: int = 0  # of the cached layers, those that can keep no more than a window
    window: int = 0  # tokens of it

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ConfigError(f"dtype must be one of {', '.join(DTYPE_BYTES)}, not {self.dtype!r}.")

    @property
    def dtype_bytes(self) -> int:
        """Return the bytes of one weight and of one element of the cache."""
        return DTYPE_BYTES[self.dtype]

    @property
    def kv_width(self) -> int:
        """Return the elements of one token's keys (or values) on one layer."""
        return self.num_kv_heads * self.head_dim

    @property
    def cached_heads(self) -> tuple[LayerHeads, ...]:
        """Return the layers with keys and values by the sizes of their heads."""
        num_alike = (self.num_cached_layers or self.num_layers) - sum(heads.num_layers for heads in self.unlike)
        return LayerHeads(num_alike, self.num_kv_heads, self.head_dim), *self.unlike

    @property
    def layer_parameters(self) -> int:
        """Return the weights of all layers together."""
        return self._layers(self.num_experts)

    @property
    def token_parameters(self) -> int:
        """Return the weights that every token is multiplied with, all layers together."""
        return self._layers(self.num_chosen_experts)

    def read_parameters(self, num_tokens: int) -> float:
        """Return the weights of all layers that `num_tokens` read, where each token chooses its experts at random.

        Example: a token passes 8 of 128 experts; 16 tokens read 128 * (1 - (1 - 8 / 128) ** 16) = 82 of them.
        """
        if not self.num_expert_layers:
            return self.layer_parameters
        unread = (1.0 - self.num_chosen_experts / self.num_experts) ** num_tokens
        return self.layer_parameters - unread * (self.layer_parameters - self._layers(0))

    @property
    def dense_parameters(self) -> int:
        """Return the weights of all layers but those of experts that tokens choose."""
        return self._layers(0)

    @property
    def expert_parameters(self) -> int:
        """Return the weights of all experts that tokens choose; routers count as dense."""
        return self.layer_parameters - self.dense_parameters

    def _layers(self, num_experts: int) -> int:
        attention = self.attention_parameters
        if not attention:
            attention = 2 * self.hidden_size * (self.num_heads * self.head_dim + self.kv_width)
        row = (3 if self.is_gated else 2) * self.hidden_size
        dense = (self.num_layers - self.num_expert_layers) * row * self.ffn_size
        router = self.hidden_size * self.num_experts
        experts = self.num_expert_layers * (router + row * (num_experts * self.expert_size + self.shared_expert_size))
        return self.num_layers * attention + dense + experts

    @property
    def head_parameters(self) -> int:
        """Return the weights of the last matrix, which makes logits of a hidden state."""
        return self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """Return the weights in all, tied ones once."""
        tables = self.head_parameters * (1 if self.ties_embeddings else 2)
        return self.layer_parameters + tables + self.num_positions * self.hidden_size

    @property
    def weight_bytes(self) -> int:
        return self.num_parameters * self.dtype_bytes

    @property
    def token_flops(self) -> int:
        """Return the operations of one token through the layers' matrices; a multiplication and an addition are two."""
        return 2 * self.token_parameters

    @property
    def pair_flops(self) -> int:
        """Return the operations of attending from one query to one key, all layers: score and weighted value."""
        return (
            4 * self.num_heads * sum(cached_head.num_layers * cached_head.head_dim for cached_head in self.cached_heads)
        )

    @property
    def projection_flops(self) -> int:
        """Return the operations of recomputing one token's keys and values from a hidden cache, all layers."""
        return 4 * self.num_layers * self.hidden_size * self.kv_width

    @property
    def kv_token_bytes(self) -> int:
        """Return the bytes of one token's keys and values, all layers."""
        width = sum(
            cached_head.num_layers * cached_head.num_kv_heads * cached_head.head_dim
            for cached_head in self.cached_heads
        )
        return self.kv_parts * width * self.dtype_bytes

    @property
    def hidden_ratio(self) -> float:
        """Return a hidden cache's bytes by those of keys and values: 0.5 for multi-head attention; from 1 on it does
        not pay.

        Example: Llama-3-8B has 8 key heads of 128 for 4 096 of hidden size: 4096 / (2 * 1024) = 2.
        """
        return self.hidden_size / (self.kv_parts * self.kv_width)


def _opt(name: str, num_layers: int, hidden_size: int, num_heads: int) -> ModelShape:
    """Return an OPT shape (Zhang et al.

    2022, table 1): multi-head attention, feed-forward part four times as wide, 2 048 positions.
    """
    return ModelShape(
        name=name,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        ffn_size=4 * hidden_size,
        vocab_size=50272,
        is_gated=False,
        ties_embeddings=True,
        num_positions=2050,
    )


def _llama(
    name: str, num_layers: int, hidden_size: int, num_heads: int, num_kv_heads: int, ffn_size: int, vocab_size: int
) -> ModelShape:
    return ModelShape(
        name=name,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=hidden_size // num_heads,
        ffn_size=ffn_size,
        vocab_size=vocab_size,
        is_gated=True,
        ties_embeddings=False,
    )


_SHAPES = (
    _opt("opt-125m", 12, 768, 12),
    _opt("opt-2.7b", 32, 2560, 32),
    _opt("opt-6.7b", 32, 4096, 32),
    _opt("opt-13b", 40, 5120, 40),
    _opt("opt-30b", 48, 7168, 56),
    _opt("opt-66b", 64, 9216, 72),
    _opt("opt-175b", 96, 12288, 96),
    _llama("llama-2-7b", 32, 4096, 32, 32, 11008, 32000),
    _llama("llama-2-13b", 40, 5120, 40, 40, 13824, 32000),
    _llama("llama-2-70b", 80, 8192, 64, 8, 28672, 32000),
    _llama("llama-3-8b", 32, 4096, 32, 8, 14336, 128256),
    _llama("llama-3-70b", 80, 8192, 64, 8, 28672, 128256),
    # BLOOM (config.json of bigscience/bloom): ALiBi positions, tied embeddings, a feed-forward part four times as wide.
    ModelShape("bloom-176b", 70, 14336, 112, 112, 128, 57344, 250880, is_gated=False, ties_embeddings=True),
)
MODEL_SHAPES = {shape.name: shape for shape in _SHAPES}


def model_shape(name: str, dtype: str | None = None) -> ModelShape:
    """Return the shape with this name, in `dtype` if that is set. Raises ConfigError listing the names."""
    if name not in MODEL_SHAPES:
        raise ConfigError(f"model {name!r} is none of {', '.join(MODEL_SHAPES)}.")
    shape = MODEL_SHAPES[name]
    return shape if dtype is None else replace(shape, dtype=dtype)


MEMORY_SHARE = (
    0.9  # of the device's memory that a server takes, vLLM's default; the rest is the driver's and libraries'
)
_LARGEST_SHARE = 0.6  # that the longest context takes of what it took, for rings to be chosen
_ACTIVATION_TOKENS = 8192  # of the largest pass that memory is kept for


def num_cache_blocks(
    shape: ModelShape,
    machine: Hardware,
    *,
    tensor_parallel: int = 1,
    block_size: int = 16,
    memory_share: float = MEMORY_SHARE,
) -> int:
    """Return the blocks of keys and values that a worker of `tensor_parallel` devices holds.

    Raises ConfigError when the model does not fit.

    memory_share * memory - weights - activations, by the bytes of a block; every device holds a part of each block.
    """
    free_bytes = tensor_parallel * memory_share * machine.memory_bytes - shape.weight_bytes - _activation_bytes(shape)
    num_blocks = int(free_bytes // (block_size * shape.kv_token_bytes))
    if num_blocks < 1:
        gib = 1 << 30
        raise ConfigError(
            f"model {shape.name!r} ({shape.weight_bytes / gib:.1f} GiB of weights) does not fit {tensor_parallel} x "
            f"{machine.name!r} ({machine.memory_bytes / gib:.1f} GiB); set tensor_parallel higher."
        )
    return num_blocks


def rings_pay(whole: BlockLayout, rings: BlockLayout, max_context_len: int) -> bool:
    """Return whether an ordinary request takes no more where layers with a window keep no more than it, and the longest
    far less. Both layouts are of one model, see BlockLayout.with_rings."""
    ordinary = rings.bytes_of(REQUEST_TOKENS) <= whole.bytes_of(REQUEST_TOKENS)
    return ordinary and rings.bytes_of(max_context_len) <= _LARGEST_SHARE * whole.bytes_of(max_context_len)


def _activation_bytes(shape: ModelShape) -> int:
    inner = max(shape.ffn_size, shape.num_chosen_experts * shape.expert_size)
    width = 2 * shape.hidden_size + (2 if shape.is_gated else 1) * inner
    return _ACTIVATION_TOKENS * width * shape.dtype_bytes
