"""The vocabulary of grammars has the bytes that answers are decoded to, in every family."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers

from alignedserve.core.errors import UnsupportedModel
from alignedserve.runtime.grammar.vocabulary import grammar_vocabulary
from alignedserve.text.tokenizer import Tokenizer
from tests.support.grammars import json_grammar, regex_grammar

POCKET = Path("alignedserve/pocket/model")


def byte_level(_: Path) -> Tokenizer:
    return Tokenizer.load(POCKET)


def byte_fallback(_: Path) -> Tokenizer:
    """Build a tokenizer as Llama 2 has it."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "\u2581a", '{"', "é"]
    rust = RustTokenizer(
        models.BPE({piece: place for place, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    rust.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    rust.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(rust.to_str(), {}, None)


def metaspace(_: Path) -> Tokenizer:
    """Build a tokenizer of text pieces, some of which it has no bytes for."""
    pieces = [("<unk>", 0.0), ("</s>", 0.0), ("\u2581yes", -1.0), ("yes", -2.0), ("{", -3.0), ("}", -3.0), ('"', -3.0)]
    rust = RustTokenizer(models.Unigram(pieces, 0, byte_fallback=False))
    rust.pre_tokenizer = pre_tokenizers.Metaspace()
    rust.decoder = decoders.Metaspace()
    rust.add_special_tokens(["</s>"])
    return Tokenizer(rust.to_str(), {}, None)


FAMILIES: dict[str, Callable[[Path], Tokenizer]] = {
    "byte level": byte_level,
    "byte fallback": byte_fallback,
    "metaspace": metaspace,
}


def vocabulary_of(tokenizer: Tokenizer, eos: int = 2) -> LLTokenizer:
    return grammar_vocabulary(tokenizer, vocab_size=tokenizer.vocab_size + 40, eos_token_ids=(eos,))


def allowed(vocabulary: LLTokenizer, grammar: str, *prefix: int) -> list[int]:
    matcher = LLMatcher(vocabulary, grammar)
    assert matcher.consume_tokens(list(prefix))
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    return [int(token_id) for token_id in np.flatnonzero(bits)]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_token_has_the_bytes_of_its_text(family: str, tmp_path: Path) -> None:
    tokenizer = FAMILIES[family](tmp_path)
    vocabulary = vocabulary_of(tokenizer)
    assert vocabulary.vocab_size == tokenizer.vocab_size + 40
    for token_id in range(tokenizer.vocab_size):
        own = tokenizer.token_bytes(token_id)
        if b"\xff" not in own:  # in no text: llguidance marks special tokens by it
            assert vocabulary.decode_bytes([token_id]) == own


def test_no_grammar_allows_special_tokens_or_those_without_text() -> None:
    tokenizer = byte_level(POCKET)
    found = allowed(vocabulary_of(tokenizer), regex_grammar("(.|\n)*"))
    assert 2 in found  # the end
    assert not [token_id for token_id in found if token_id != 2 and tokenizer.is_special(token_id)]
    assert max(found) < tokenizer.vocab_size


def test_all_ends_are_allowed_at_the_end() -> None:
    tokenizer = byte_level(POCKET)
    vocabulary = grammar_vocabulary(tokenizer, vocab_size=tokenizer.vocab_size, eos_token_ids=(2, 0))
    assert allowed(vocabulary, json_grammar({"const": 7}), *tokenizer.encode_text("7")) == [0, 2]


def test_a_model_whose_answers_cannot_end_has_none() -> None:
    with pytest.raises(UnsupportedModel, match="no token that ends"):
        grammar_vocabulary(byte_level(POCKET), vocab_size=4000, eos_token_ids=())
