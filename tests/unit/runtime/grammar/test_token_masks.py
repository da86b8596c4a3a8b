"""Masks of rows: what may follow, when an answer may end, and what a resumed answer's state is."""

import time
from itertools import cycle

import numpy as np
import pytest
from llguidance import LLMatcher, LLParserLimits

from alignedserve.core.request import SamplingParams
from alignedserve.runtime.grammar import compiler, token_masks
from alignedserve.runtime.grammar.client_seconds import ClientSeconds
from alignedserve.runtime.grammar.compiler import MAX_BLANKS, BlankRun, BlankTokens, with_free_blanks
from alignedserve.runtime.grammar.constraints import StructuredOutputs, part_of, serialize_alone
from alignedserve.runtime.grammar.token_masks import TokenMasks
from tests.support.grammars import EOS, byte_masks, encode, regex_grammar, text_of


def allowed(masks: TokenMasks, row: int, *, is_early: bool = False) -> set[int]:
    step = masks.start(np.array([row]), np.array([is_early])).result()
    assert step.at.tolist() == [0]
    bits = np.unpackbits(step.bits.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def added(sampling: SamplingParams, generated: str = "") -> TokenMasks:
    masks = byte_masks()
    masks.add(5, sampling, tuple(encode(generated)))
    return masks


def test_a_mask_has_what_may_follow() -> None:
    masks = added(SamplingParams(grammar=regex_grammar("ab?")))
    assert allowed(masks, 5) == {*encode("a"), *[token for token in range(199) if text_of([token]) == "ab"]}
    masks.record(np.array([5]), np.array(encode("a")))
    assert allowed(masks, 5) == {*encode("b"), EOS}
    masks.record(np.array([5]), np.array(encode("b")))
    assert allowed(masks, 5) == {EOS}


def test_an_end_that_is_not_wanted_comes_where_nothing_else_may_follow() -> None:
    for sampling, is_early in (
        (SamplingParams(grammar=regex_grammar("a{1,2}"), ignore_eos=True), False),
        (SamplingParams(grammar=regex_grammar("a{1,2}"), min_tokens=9, max_tokens=9), True),
    ):
        masks = added(sampling, "a")
        assert allowed(masks, 5, is_early=is_early) == set(encode("a"))
        masks.record(np.array([5]), np.array(encode("a")))
        assert allowed(masks, 5, is_early=is_early) == {EOS}


def test_a_resumed_answer_has_used_up_as_much_of_a_bound_on_tokens() -> None:
    """What a token forces counts with it, whether a mask has found that or not."""
    words = 'start: words "!"\nwords[max_tokens=4]: /(hello|e)*/'
    sampling = SamplingParams(grammar=LLMatcher.grammar_from_lark(words))
    masks, answer = added(sampling), ""
    for letter in "ehello!":
        assert allowed(added(sampling, answer), 5) == allowed(masks, 5), answer
        masks.record(np.array([5]), np.array(encode(letter)))
        answer += letter


@pytest.mark.parametrize(
    ("grammar", "generated"), [("nonsense", ""), (regex_grammar("ab"), "b"), (regex_grammar("ab"), "abc")]
)
def test_a_grammar_that_fails_allows_nothing_and_says_why(grammar: str, generated: str) -> None:
    masks = added(SamplingParams(grammar=grammar), generated)
    masks.add(6, SamplingParams(grammar=regex_grammar("a")), ())
    step = masks.start(np.array([5, 6]), np.zeros(2, np.bool_)).result()
    assert not step.bits[0].any()
    assert step.bits[1].any()
    assert masks.failure(5)
    assert "nonsense" not in str(masks.failure(5))
    assert masks.failure(6) is None


def test_an_answer_that_the_library_panics_at_fails_alone() -> None:
    panics = 'start: a b\na[max_tokens=1]: /(true12|a)*/\nb: "true" /[0-9]{3}/ "!"'
    sampling = SamplingParams(grammar=LLMatcher.grammar_from_lark(panics))
    masks = added(sampling)
    masks.add(6, sampling, ())
    at_first = allowed(masks, 6)
    (true,) = (token for token in at_first if text_of([token]) == "true")
    masks.record(np.array([5, 6]), np.array([true, *encode("a")]))
    assert allowed(masks, 6) == set(encode("t"))
    masks.add(7, sampling, ())
    assert allowed(masks, 7) == at_first
    assert [bool(masks.failure(row)) for row in (5, 6, 7)] == [True, False, False]


def test_answers_that_visit_more_of_a_pattern_than_one_matcher_takes_all_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "PARSER_LIMITS", LLParserLimits(max_lexer_states=400))
    masks = byte_masks()
    sampling = SamplingParams(grammar=regex_grammar("|".join(f"{letter}{{1,900}}" for letter in "abcdef")))
    for row, letter in enumerate("abcdef"):
        masks.add(row, sampling, tuple(encode(letter * 150)))
        assert encode(letter)[0] in allowed(masks, row)
        assert masks.failure(row) is None
    masks.add(6, sampling, tuple(encode("a" * 800)))
    assert not allowed(masks, 6)
    assert masks.failure(6) == "the grammar is too complex: a pattern of it has too many states"
    masks.close()


def _blanks(tokens: set[int]) -> set[str]:
    return {text for text in map(text_of, ([token] for token in tokens if token != EOS)) if text.isspace()}


def test_blanks_end_where_something_else_may_follow() -> None:
    grammar = regex_grammar(r"a[ \n]*b")
    masks = added(SamplingParams(grammar=grammar), "a" + " \n" * 19)
    assert _blanks(allowed(masks, 5)) == {" ", "\n"}
    masks.record(np.array([5, 5]), np.array(encode(" \n")))
    assert allowed(masks, 5) == set(encode("b"))
    assert _blanks(allowed(added(SamplingParams(grammar=with_free_blanks(grammar)), "a" + " " * 50), 5))


def test_blanks_that_a_grammar_wants_are_written() -> None:
    assert allowed(added(SamplingParams(grammar=regex_grammar(r"a {60}b")), "a" + " " * 50), 5) == set(encode(" "))


def test_text_ends_a_run_of_blanks() -> None:
    masks = added(SamplingParams(grammar=regex_grammar(r"(a| )*")), " " * 39 + "a" + " " * 39)
    assert " " in _blanks(allowed(masks, 5))


def test_a_blank_of_several_tokens_is_one() -> None:
    tokens = BlankTokens([b"a", b" ", b"\xe2", b"\x81", b"\x9f", b" \xe2\x81", b"\xe2\x82"])
    assert tokens.token_ids == (1, 2, 5)  # U+205F is a blank, the euro sign is none
    run = BlankRun([0, *[2, 3, 4] * (MAX_BLANKS - 1)])
    assert not run.is_full(tokens)
    run.append([5, 4])
    assert run.is_full(tokens)


RULES = {
    "ambiguous": ('root ::= s\ns ::= s s | "a"', "a"),
    "both ways": ('root ::= s\ns ::= s s s | s s | "a" | "b"', "ab"),
    "chains": ('root ::= r\nr ::= "a" q | "b"\n' + "q ::= " + " | ".join(["r"] * 90), "a"),
}


def bomb(rules: str) -> SamplingParams:
    part = part_of(StructuredOutputs(grammar=rules))
    return SamplingParams(max_tokens=5000, grammar=serialize_alone(part))


@pytest.mark.parametrize("name", RULES)
def test_a_heavy_grammar_ends_at_its_budget_and_holds_up_nobody(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_masks, "ANSWER_S", 0.2)
    (rules, letters), masks, waits = RULES[name], byte_masks(), [0.0]
    masks.add(0, bomb(rules), ())
    masks.add(1, SamplingParams(grammar=regex_grammar("[ab]*")), ())
    rows, late = np.array([0, 1]), np.zeros(2, np.bool_)
    for letter in cycle(encode(letters)):
        began = time.monotonic()
        unready = masks.unready([0, 1], 2)
        ready = np.array([row for row in rows.tolist() if row not in unready])
        assert 1 in ready
        masks.start(ready, late[: len(ready)]).result()
        if masks.failure(0) is not None:
            break
        masks.record(ready, np.full(len(ready), letter if 0 in ready else encode("a")[0]))
        waits.append(time.monotonic() - began)
        if 0 not in ready:
            time.sleep(0.002)
    assert masks.failure(0) == "the grammar takes more than 0.2 s of computing for one answer"
    assert masks.failure(1) is None
    assert sorted(waits)[len(waits) * 9 // 10] < 0.05
    masks.close()


def test_a_pattern_that_takes_long_becomes_a_heavy_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_masks, "ANSWER_S", 0.2)
    monkeypatch.setattr(token_masks, "_HEAVY_S", 0.001)  # masks of this vocabulary take about three milliseconds
    schema = {"type": "string", "pattern": "^((a{1000}){50})$"}
    masks, num_tokens = byte_masks(), 0
    masks.add(0, SamplingParams(max_tokens=5000, grammar=serialize_alone(part_of(StructuredOutputs(json=schema)))), ())
    while masks.failure(0) is None:
        if not masks.unready([0], 1):
            masks.start(np.array([0]), np.zeros(1, np.bool_)).result()
            masks.record(np.array([0]), np.array(encode("a" if num_tokens else '"')))
            num_tokens += 1
    assert "computing for one answer" in str(masks.failure(0))
    assert 2 < num_tokens < 1000
    masks.close()


def test_the_answers_of_a_client_share_a_budget() -> None:
    seconds = ClientSeconds()
    assert seconds.add("a", 29.0, 0.0)
    assert not seconds.add("a", 2.0, 0.0)
    assert seconds.add("b", 29.0, 0.0)
    assert seconds.add("a", 1.0, 8.0)  # two are forgiven
    assert not seconds.add("a", 20.0, 8.0)
