"""Grammars are compiled once, kept within bounds, and refused without repeating them."""

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers

from alignedserve.core.errors import InvalidRequest, UnsupportedModel
from alignedserve.runtime.grammar import compiler as compiler_module
from alignedserve.runtime.grammar.compiler import GrammarCompiler, GrammarError
from alignedserve.runtime.grammar.vocabulary import grammar_vocabulary
from alignedserve.text.tokenizer import Tokenizer
from tests.support.grammars import byte_vocabulary, json_grammar, regex_grammar


def test_a_grammar_is_compiled_once() -> None:
    compiler = GrammarCompiler(byte_vocabulary)
    assert compiler.compile(regex_grammar("a+")) is compiler.compile(regex_grammar("a+"))
    assert compiler.compile(regex_grammar("a+")) is not compiler.compile(regex_grammar("b+"))
    compiler.close()


def test_grammars_that_somebody_waits_for_go_before_those_of_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    has_begun, may_go_on, compiled = threading.Event(), threading.Event(), list[str]()

    def compile_now(_: LLTokenizer, grammar: str) -> None:
        has_begun.set()
        may_go_on.wait(20)
        compiled.append(grammar)

    monkeypatch.setattr(compiler_module, "compile_now", compile_now)
    compiler = GrammarCompiler(byte_vocabulary)
    documents = [compiler.compile(grammar, is_real_time=False) for grammar in ("running", "a", "both", "b")]
    has_begun.wait(20)
    compiler.compile("chat", is_real_time=True)
    assert compiler.compile("both", is_real_time=True) is documents[2]
    may_go_on.set()
    documents[-1].result(10)
    assert compiled == ["running", "chat", "both", "a", "b"]
    compiler.close()


@pytest.mark.parametrize(("name", "limit"), [("MAX_KEPT", 2), ("MAX_KEPT_CHARACTERS", 250)])
def test_those_used_last_are_kept(name: str, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, name, limit)
    compiler = GrammarCompiler(byte_vocabulary)
    first, second = compiler.compile(regex_grammar("a" * 9)), compiler.compile(regex_grammar("b" * 9))
    assert compiler.compile(regex_grammar("a" * 9)) is first
    compiler.compile(regex_grammar("c" * 9))
    assert compiler.compile(regex_grammar("a" * 9)) is first
    assert compiler.compile(regex_grammar("b" * 9)) is not second
    compiler.close()


def test_of_those_that_answers_have_followed_the_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "MAX_FOLLOWED", 1)
    compiler = GrammarCompiler(byte_vocabulary)
    grammars = [regex_grammar(letter) for letter in "abcd"]
    compiled = [compiler.compile(grammar) for grammar in grammars]
    for grammar in grammars[:3]:
        compiler.release(grammar)
    assert compiler.compile(grammars[2]) is compiled[2]  # asked for again
    compiler.release(grammars[1])
    again = [compiler.compile(grammar) for grammar in grammars]
    assert [one is two for one, two in zip(compiled, again, strict=True)] == [False, False, True, True]
    compiler.close()


@pytest.mark.parametrize(
    "grammar",
    ["secret", '{"grammars": [{"secret": 1}]}', regex_grammar("(secret"), LLMatcher.grammar_from_lark("start: secret")],
)
def test_a_malformed_grammar_is_refused_without_its_words(grammar: str) -> None:
    compiler = GrammarCompiler(byte_vocabulary)
    with pytest.raises(GrammarError) as caught:
        compiler.compile(grammar).result()
    assert "secret" not in str(caught.value)
    with pytest.raises(InvalidRequest) as refused:
        compiler.check(grammar)
    assert refused.value.code == "invalid_grammar"
    compiler.close()


def test_a_model_without_vocabulary_says_why() -> None:
    def fail() -> LLTokenizer:
        raise UnsupportedModel("no tokens")

    compiler = GrammarCompiler(fail)
    with pytest.raises(GrammarError, match="no tokens"):
        compiler.compile(regex_grammar("a")).result()
    compiler.close()


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
