"""The vocabulary that grammars are matched against: the bytes of every token, as answers are decoded to text."""

from collections.abc import Sequence

from llguidance import LLTokenizer, TokenizerWrapper

from alignedserve.core.errors import UnsupportedModel
from alignedserve.runtime.model.tokenizer import Tokenizer


def grammar_vocabulary(tokenizer: Tokenizer, *, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """Build the vocabulary of a model with logits for `vocab_size` tokens, those without text included.

    Takes the bytes from our own tokenizer, and so knows the families that it knows. Raises UnsupportedModel for a model
    whose answers cannot end.
    """
    if not eos_token_ids:
        raise UnsupportedModel("the model has no token that ends an answer")
    words = _Words(tokenizer, vocab_size, eos_token_ids)
    return LLTokenizer(TokenizerWrapper(words), n_vocab=vocab_size, eos_token=list(eos_token_ids))


class _Words:
    """The tokens in the form that llguidance reads."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = eos_token_ids[0]
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        special = (token_id for token_id in range(vocab_size) if tokenizer.is_special(token_id))
        self.special_token_ids = sorted({*special, *eos_token_ids})

    def __call__(self, text: str) -> list[int]:
        """Return the token ids of a text, none of them special."""
        return self._tokenizer.encode_text(text)
