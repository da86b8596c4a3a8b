"""What layers of Gemma 3n and 4 have that others have not; without torch."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple


class HeadSizes(NamedTuple):
    """The keys and values of one token on one layer."""

    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class LayerExtras:
    """Parts of a decoder whose values are normalised as its keys are, without weights.

    Layers with a window have heads of their own sizes. Scores are not divided by a root of these.

    The last layers have neither keys nor values. They read those of the last layer before them that is of their kind.

    Layer embeddings: every layer has a short vector of a token, of a table and of what the first layer reads. It is
    multiplied with a gate that is made of the stream, and what comes of it is added behind the layer.

    Streams (AltUp, Baykal et al., 2023): several residual streams, of which a layer computes one and predicts and
    corrects the others. Beside its attention there is a short product (LAuReL).
    """

    windowed_heads: HeadSizes
    full_heads: HeadSizes
    num_shared: int = 0  # last layers without keys and values
    repeats_keys: bool = False  # on layers without a window values are made of the keys' product
    inner_sizes: tuple[int, ...] = ()  # of the feed-forward part of each layer; empty: they are all alike
    sparsities: tuple[float, ...] = ()  # of each layer: the share of gates below which they count as 0; empty: none
    embedding_width: int = 0  # of layer embeddings; 0: there are none
    embedding_vocab: int = 0  # tokens that have some; others have those of token 0
    picture_token: int = 0  # whose layer embeddings pictures have
    pictures_in_windows: bool = False  # tokens of a picture read one another in layers with a window
    num_streams: int = 1
    laurel_rank: int = 0  # this and the next: of models with several streams
    scales_corrected: bool = False
    has_scales: bool = False  # a number by which the stream is multiplied behind each layer

    @property
    def title(self) -> str:
        return "layer embeddings, shared keys or several streams (Gemma 3n and 4)"

    def heads(self, *, is_windowed: bool) -> HeadSizes:
        return self.windowed_heads if is_windowed else self.full_heads

    def attention_parameters(self, width: int, num_heads: int, num_layers: int, windowed: Collection[int]) -> int:
        total = 0
        for layer in range(num_layers):
            is_windowed = layer in windowed
            kv_heads, head_dim = self.heads(is_windowed=is_windowed)
            total += 2 * width * num_heads * head_dim + head_dim
            if layer < num_layers - self.num_shared:
                num_products = 1 if self.repeats_keys and not is_windowed else 2
                total += num_products * width * kv_heads * head_dim + head_dim
        return total

    def other_parameters(self, width: int, num_layers: int) -> int:
        streams, short = self.num_streams, self.embedding_width
        total = self.looked_up_parameters(num_layers)
        if short:
            total += num_layers * (2 * width * short + width) + width * num_layers * short + short
        if streams > 1:
            routed = streams**2 + streams**3 + streams * width + 2 * width
            total += num_layers * (routed + 2 * self.laurel_rank * width + width) + 2 * (streams - 1) * width**2
        return total

    def looked_up_parameters(self, num_layers: int) -> int:
        return self.embedding_vocab * num_layers * self.embedding_width
