"""The sizes of multi-head latent attention; without torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek-V2, 2.1): a token's keys and values are made of one short row, its latent.

    The cache has the row alone, behind a key that is rotated and that all heads share. Queries are multiplied with what
    would make keys of latents, and the sum of latents with what would make values: one key head of `rope_dim + rank`
    elements, whose values are the keys.
    """

    rank: int  # elements of a latent
    rope_dim: int  # of the key beside it
    nope_dim: int  # elements of a head's key that are not rotated
    value_dim: int  # of a head
    query_rank: int | None = None  # queries are made of a short row too; None: of the layer's inputs

    @property
    def row_width(self) -> int:
        return self.rope_dim + self.rank

    @property
    def query_dim(self) -> int:
        return self.rope_dim + self.nope_dim

    def parameters(self, hidden_size: int, num_heads: int) -> int:
        queries = num_heads * self.query_dim
        made = hidden_size * queries
        if self.query_rank is not None:
            made = self.query_rank * (hidden_size + 1 + queries)
        cached = hidden_size * self.row_width + self.rank
        heads = num_heads * (self.rank * (self.nope_dim + self.value_dim) + self.value_dim * hidden_size)
        return made + cached + heads
