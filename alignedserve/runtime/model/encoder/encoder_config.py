"""The configuration of an encoder: sizes, and what is made of its hidden states; without torch."""

import enum
from dataclasses import dataclass

from alignedserve.core.block_layout import DTYPE_BYTES, BlockLayout
from alignedserve.runtime.model.decoder.decoder_parts import Activation


class EncoderFamily(enum.Enum):
    """Encoder families by the `model_type` of config.json."""

    BERT = "bert"
    ROBERTA = "roberta"
    XLM_ROBERTA = "xlm-roberta"
    CAMEMBERT = "camembert"
    DISTILBERT = "distilbert"


class Pooling(enum.Enum):
    """How the hidden states of a text's tokens become one vector, by sentence-transformers' names."""

    CLS = "cls"  # the first token's
    MEAN = "mean"
    MAX = "max"  # element by element
    MEAN_SQRT = "mean_sqrt_len_tokens"  # the sum over the root of the number of tokens
    WEIGHTED_MEAN = "weightedmean"  # token i, from 1 on, counts i times
    LAST = "lasttoken"


class HeadActivation(enum.Enum):
    """Nonlinearities after pooling."""

    IDENTITY = "identity"
    SIGMOID = "sigmoid"
    TANH = "tanh"
    RELU = "relu"


@dataclass(frozen=True, slots=True)
class DenseConfig:
    """A linear layer after pooling, with weights in a folder of its own."""

    folder: str  # inside the model's
    in_width: int
    out_width: int
    has_bias: bool
    activation: HeadActivation


@dataclass(frozen=True, slots=True)
class EmbeddingConfig:
    """How a text's vector is made of its hidden states."""

    pooling: Pooling = Pooling.MEAN
    dense: tuple[DenseConfig, ...] = ()
    prompts: tuple[tuple[str, str], ...] = ()  # (name, what is put before a text)
    default_prompt: str | None = None  # the name of the one that is used where none is chosen
    is_matryoshka: bool = False  # trained so that the first elements of a vector are a vector too
    dimensions: tuple[int, ...] = ()  # the lengths that it may be cut to; none: any


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """One encoder whose tokens attend to all others of their prompt. All sizes are positive and consistent."""

    family: EncoderFamily
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_positions: int  # rows of the table of positions
    position_offset: int  # the row of the first token
    num_token_types: int  # 0: the model does not tell the texts of a pair apart
    activation: Activation
    norm_eps: float
    dtype: str  # of the files, a key of DTYPE_BYTES
    max_position_embeddings: int  # the longest prompt, special tokens included
    embedding: EmbeddingConfig = EmbeddingConfig()
    score: HeadActivation | None = None  # a cross-encoder: what turns its output into a score

    # What those ask for who serve decoders too.
    eos_token_ids: tuple[int, ...] = ()
    stored_quantization: None = None

    @property
    def head_dim(self) -> int:
        """Return the elements of one head."""
        return self.hidden_size // self.num_heads

    @property
    def embedding_size(self) -> int:
        """Return the width of the largest tensor, the table of tokens."""
        return self.hidden_size

    @property
    def vector_width(self) -> int:
        """Return the elements of a text's vector; 1 of a score."""
        if self.score is not None:
            return 1
        return self.embedding.dense[-1].out_width if self.embedding.dense else self.hidden_size

    @property
    def num_projected(self) -> int:
        """Return the number of weights that every token is multiplied with."""
        return self.num_layers * (4 * self.hidden_size + 2 * self.intermediate_size) * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """Return the number of weights."""
        looked_up = (self.vocab_size + self.num_positions + self.num_token_types) * self.hidden_size
        per_layer = 9 * self.hidden_size + self.intermediate_size  # biases and norms
        return looked_up + self.num_projected + self.num_layers * per_layer + 2 * self.hidden_size + self._head_weights

    def weight_bytes(self, dtype: str) -> int:
        return self.num_parameters * DTYPE_BYTES[dtype]

    def loaded_weight_bytes(self, dtype: str, quantization: str | None = None) -> int:
        projected_bytes = 1 if quantization == "int8" else DTYPE_BYTES[dtype]
        return (self.num_parameters - self.num_projected) * DTYPE_BYTES[dtype] + self.num_projected * projected_bytes

    def block_layout(self, block_size: int, dtype: str) -> BlockLayout:
        """Return the layout of blocks: those of a prompt hold one layer, which all layers use one after another."""
        return BlockLayout(
            block_size=block_size, num_layers=1, num_kv_heads=self.num_heads, head_dim=self.head_dim, dtype=dtype
        )

    def hidden_block_tokens(self, block_size: int) -> int | None:
        """Return None: there are no hidden caches."""
        return None

    @property
    def _head_weights(self) -> int:
        if self.score is not None:
            return (self.hidden_size + 1) * self.hidden_size + self.hidden_size + 1
        return sum(dense.out_width * (dense.in_width + dense.has_bias) for dense in self.embedding.dense)
