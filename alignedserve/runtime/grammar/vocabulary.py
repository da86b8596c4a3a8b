"""The vocabulary that grammars are matched against: the bytes of every token, as answers are decoded to text."""

from collections.abc import Sequence

from llguidance import LLTokenizer, TokenizerWrapper

from alignedserve.core.errors import UnsupportedModel
from alignedserve.runtime.model.tokenizer import Tokenizer


def grammar_vocabulary(tokenizer: Tokenizer, *, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """Build the vocabulary of a model with logits for `vocab_size` tokens, those without text included.

    Takes the bytes from our own tokenizer, and so knows the families that it knows. Raises UnsupportedModel for a model
    whose answers cannot end, or whose tokens are of another kind.
    """
    if not eos_token_ids:
        raise UnsupportedModel("the model has no token that ends an answer")
    words = TokenizerWrapper(_Words(tokenizer, vocab_size, eos_token_ids))
    try:
        return LLTokenizer(words, n_vocab=vocab_size, eos_token=list(eos_token_ids))
    except ValueError as error:
        raise UnsupportedModel(f"its tokens cannot be matched: {str(error)[:200]}") from error


class _Words:
    """The tokens in the form that llguidance reads."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = eos_token_ids[0]
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        special = (token_id for token_id in range(vocab_size) if tokenizer.is_special(token_id))
        self.special_token_ids = sorted({*special, *eos_token_ids})
        of_text = set(range(vocab_size)).difference(self.special_token_ids)
        self._id_of = {self.tokens[token_id]: token_id for token_id in sorted(of_text, reverse=True)}
        self._max_bytes = max(map(len, self._id_of), default=0)

    def __call__(self, text: str) -> list[int]:
        """Return the token ids of text that a grammar forces: those that the model knows it by, if they spell it."""
        token_ids = self._tokenizer.encode_text(text)
        raw = text.encode()
        if b"".join([self.tokens[token_id] for token_id in token_ids]) == raw:
            return token_ids
        return self._longest_first(raw)

    def _longest_first(self, raw: bytes) -> list[int]:
        """Return tokens of these bytes, the longest that fits first, as far as there are any."""
        token_ids = []
        while raw:
            prefixes = (raw[:length] for length in range(min(len(raw), self._max_bytes), 0, -1))
            known = next((prefix for prefix in prefixes if prefix in self._id_of), None)
            if known is None:
                break
            token_ids.append(self._id_of[known])
            raw = raw[len(known) :]
        return token_ids
