"""Vocabularies of a token per byte, and grammars over them, for engines of tiny models."""

import json
from typing import Any

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from alignedserve.runtime.grammar.compiler import GrammarCompiler
from alignedserve.runtime.grammar.token_masks import TokenMasks

VOCAB_SIZE = 199  # of the tiny models
EOS = 2  # likewise
_FIRST_BYTE = 3
_PAIRS = ('{"', '":', '",', '"}', "ab", "true", "false", "12")


class _Words:
    """Three special tokens, the characters of ASCII, some longer tokens, and tokens without text."""

    eos_token_id = EOS
    bos_token_id = 1
    special_token_ids = (0, 1, EOS)

    def __init__(self, vocab_size: int) -> None:
        tokens = [b"<pad>", b"<s>", b"</s>", *(bytes([byte]) for byte in range(128)), *(one.encode() for one in _PAIRS)]
        self.tokens = (tokens + [b""] * vocab_size)[:vocab_size]

    def __call__(self, text: str) -> list[int]:
        return encode(text)


def encode(text: str) -> list[int]:
    return [_FIRST_BYTE + byte for byte in text.encode()]


def text_of(token_ids: list[int], vocab_size: int = VOCAB_SIZE) -> str:
    """Return the text of an answer, without its end."""
    words = _Words(vocab_size)
    return b"".join(words.tokens[token_id] for token_id in token_ids if token_id != EOS).decode()


def byte_vocabulary(vocab_size: int = VOCAB_SIZE, eos_token_ids: tuple[int, ...] = (EOS,)) -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Words(vocab_size)), n_vocab=vocab_size, eos_token=list(eos_token_ids))


def byte_masks(eos_token_ids: tuple[int, ...] = (EOS,), *, jumps_ahead: bool = False) -> TokenMasks:
    compiler = GrammarCompiler(lambda: byte_vocabulary(eos_token_ids=eos_token_ids))
    return TokenMasks(
        compiler, vocab_size=VOCAB_SIZE, eos_token_ids=eos_token_ids, num_threads=1, jumps_ahead=jumps_ahead
    )


def json_grammar(schema: dict[str, Any]) -> str:
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides={"whitespace_flexible": False})


def regex_grammar(regex: str) -> str:
    return LLMatcher.grammar_from_regex(regex)


PERSON = json_grammar(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "pattern": "^[a-z]{2,8}$"},
            "is_here": {"type": "boolean"},
            "tags": {"type": "array", "items": {"enum": ["ab", "abc", "b"]}, "maxItems": 3},
        },
        "required": ["name", "is_here", "tags"],
        "additionalProperties": False,
    }
)
