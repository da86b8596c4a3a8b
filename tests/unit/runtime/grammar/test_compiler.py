"""Grammars are compiled once, kept within bounds, and refused without repeating them."""

import threading

import pytest
from llguidance import LLMatcher, LLTokenizer

from alignedserve.core.errors import InvalidRequest, UnsupportedModel
from alignedserve.runtime.grammar import compiler as compiler_module
from alignedserve.runtime.grammar.compiler import GrammarCompiler, GrammarError
from tests.support.grammars import byte_vocabulary, regex_grammar


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
    assert refused.value.param == "grammar"
    compiler.close()


def test_a_model_without_vocabulary_says_why() -> None:
    def fail() -> LLTokenizer:
        raise UnsupportedModel("no tokens")

    compiler = GrammarCompiler(fail)
    with pytest.raises(GrammarError, match="no tokens"):
        compiler.compile(regex_grammar("a")).result()
    compiler.close()
