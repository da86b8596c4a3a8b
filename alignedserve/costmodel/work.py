"""Work of an iteration: the sums of computing and moving by which its time is predicted."""

from dataclasses import dataclass


@dataclass(slots=True)
class IterationWork:
    """Sums over the requests of one iteration, and the one maximum that a straggler needs.

    A policy fills one while it packs: `add_chunk` and `add_decode` take O(1).
    """

    num_prompt_tokens: int = 0  # computed by prefill chunks
    num_chunks: int = 0
    prompt_pairs: int = 0  # (query, key) pairs that the attention of those chunks scores
    prompt_keys: int = 0  # that those chunks read: all tokens up to the end of each
    prompt_squares: int = 0  # of their lengths: the mask hides half of that
    num_decodes: int = 0  # requests that compute one token
    decode_context_len: int = 0  # keys that decodes read, summed
    max_decode_context_len: int = 0  # of the longest of them: the straggler of kernels with one block per sequence
    hidden_context_len: int = 0  # of the decodes, tokens whose keys and values are projected anew from a hidden cache
    num_sampled: int = 0  # rows of logits
    num_constrained: int = 0  # of those, rows that are sampled under a grammar
    swap_in_tokens: float = 0.0  # full-width cache tokens copied from host to device (an int8 copy counts half)
    swap_out_tokens: float = 0.0  # and the other way

    def add_chunk(
        self, num_tokens: int, num_cached: int, *, is_last: bool, is_constrained: bool = False, num_scored: int = 0
    ) -> None:
        """Add a chunk of a prompt after `num_cached` tokens whose cache exists; the last one samples a token.

        `num_scored`: tokens with a row of logits, for clients that want scores of the prompt.
        """
        self.num_chunks += 1
        self.num_prompt_tokens += num_tokens
        self.prompt_pairs += pairs_of(num_tokens, num_cached)
        self.prompt_keys += num_cached + num_tokens
        self.prompt_squares += num_tokens * num_tokens
        self.num_sampled += is_last + num_scored
        self.num_constrained += is_last and is_constrained

    def add_decode(self, context_len: int, *, is_hidden: bool = False, is_constrained: bool = False) -> None:
        """Add a request whose next token reads `context_len` tokens."""
        self.num_decodes += 1
        self.decode_context_len += context_len
        self.max_decode_context_len = max(self.max_decode_context_len, context_len)
        self.hidden_context_len += context_len if is_hidden else 0
        self.num_sampled += 1
        self.num_constrained += is_constrained

    def add_decodes(
        self, num: int, context_len: int, max_context_len: int, hidden_context_len: int = 0, num_constrained: int = 0
    ) -> None:
        """Add `num` decodes at once; `context_len` is their sum."""
        self.num_decodes += num
        self.decode_context_len += context_len
        self.max_decode_context_len = max(self.max_decode_context_len, max_context_len)
        self.hidden_context_len += hidden_context_len
        self.num_sampled += num
        self.num_constrained += num_constrained

    def subtract(self, other: "IterationWork") -> None:
        """Take the sums of `other` out again; the longest context stays, as sums do not tell the second longest."""
        self.num_prompt_tokens -= other.num_prompt_tokens
        self.num_chunks -= other.num_chunks
        self.prompt_pairs -= other.prompt_pairs
        self.prompt_keys -= other.prompt_keys
        self.prompt_squares -= other.prompt_squares
        self.num_decodes -= other.num_decodes
        self.decode_context_len -= other.decode_context_len
        self.hidden_context_len -= other.hidden_context_len
        self.num_sampled -= other.num_sampled
        self.num_constrained -= other.num_constrained
        self.swap_in_tokens -= other.swap_in_tokens
        self.swap_out_tokens -= other.swap_out_tokens

    def copy(self) -> "IterationWork":
        """Return a copy to try something out on."""
        return IterationWork(
            self.num_prompt_tokens,
            self.num_chunks,
            self.prompt_pairs,
            self.prompt_keys,
            self.prompt_squares,
            self.num_decodes,
            self.decode_context_len,
            self.max_decode_context_len,
            self.hidden_context_len,
            self.num_sampled,
            self.num_constrained,
            self.swap_in_tokens,
            self.swap_out_tokens,
        )

    @property
    def num_tokens(self) -> int:
        """Return the forward size: tokens that go through the linear layers."""
        return self.num_prompt_tokens + self.num_decodes

    @property
    def swapped_tokens(self) -> float:
        """Return the full-width cache tokens copied in both directions."""
        return self.swap_in_tokens + self.swap_out_tokens

    @property
    def is_empty(self) -> bool:
        """Return whether there is nothing to compute."""
        return self.num_tokens == 0


def pairs_of(num_tokens: int, num_cached: int) -> int:
    """Return the (query, key) pairs that a chunk of `num_tokens` after `num_cached` scores.

    Example: 3 tokens after 10 score 11 + 12 + 13 = 36 pairs.
    """
    return num_tokens * num_cached + num_tokens * (num_tokens + 1) // 2
