"""The vocabulary that grammars are matched against: the bytes of every token, as answers are decoded to text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llguidance import LLTokenizer, TokenizerWrapper

from alignedserve.core.errors import UnsupportedModel
from alignedserve.text.tokenizer import Tokenizer

Encode = Callable[[str], list[int]]


@dataclass(frozen=True, slots=True)
class TokenTable:
    """All that a vocabulary is built of, but the model's own way to tokenise."""

    tokens: tuple[bytes, ...]
    special_token_ids: tuple[int, ...]
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None

    def vocabulary(self, encode: Encode | None = None) -> LLTokenizer:
        """Build the vocabulary; raises UnsupportedModel if its tokens are of another kind.

        `encode`: tokenises text that a grammar forces; None: the longest tokens that fit, which is enough to compile.
        """
        words = TokenizerWrapper(_Words(self, encode))
        try:
            return LLTokenizer(words, n_vocab=len(self.tokens), eos_token=list(self.eos_token_ids))
        except ValueError as error:
            reason = str(error)[:200]
            raise UnsupportedModel(f"grammars cannot be applied to the model's tokenizer: {reason}") from error


def token_table(tokenizer: Tokenizer, *, vocab_size: int, eos_token_ids: Sequence[int]) -> TokenTable:
    """Return the tokens of a model with logits for `vocab_size` of them, those without text included. Takes the bytes
    from our own tokenizer, and so knows the families that it knows. Raises UnsupportedModel for a model whose answers
    cannot end."""
    if not eos_token_ids:
        raise UnsupportedModel("the model has no token that ends an answer")
    special = (token_id for token_id in range(vocab_size) if tokenizer.is_special(token_id))
    return TokenTable(
        tuple([tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]),
        tuple(sorted({*special, *eos_token_ids})),
        tuple(eos_token_ids),
        tokenizer.bos_token_id,
    )


def grammar_vocabulary(tokenizer: Tokenizer, *, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """Build the vocabulary of a model: see `token_table`. Raises UnsupportedModel."""
    table = token_table(tokenizer, vocab_size=vocab_size, eos_token_ids=eos_token_ids)
    return table.vocabulary(tokenizer.encode_text)


class _Words:
    def __init__(self, table: TokenTable, encode: Encode | None) -> None:
        self._encode = encode
        self.eos_token_id = table.eos_token_ids[0]
        self.bos_token_id = table.bos_token_id
        self.tokens = list(table.tokens)
        self.special_token_ids = list(table.special_token_ids)
        of_text = set(range(len(self.tokens))).difference(self.special_token_ids)
        self._id_of = {self.tokens[token_id]: token_id for token_id in sorted(of_text, reverse=True)}
        self._max_bytes = max(map(len, self._id_of), default=0)

    def __call__(self, text: str) -> list[int]:
        raw = text.encode()
        token_ids = [] if self._encode is None else self._encode(text)
        if b"".join([self.tokens[token_id] for token_id in token_ids]) == raw:
            return token_ids
        return self._longest_first(raw)

    def _longest_first(self, raw: bytes) -> list[int]:
        token_ids = []
        while raw:
            prefixes = (raw[:length] for length in range(min(len(raw), self._max_bytes), 0, -1))
            known = next((prefix for prefix in prefixes if prefix in self._id_of), None)
            if known is None:
                break
            token_ids.append(self._id_of[known])
            raw = raw[len(known) :]
        return token_ids
