"""Masks of rows: what may follow, when an answer may end, and what a resumed answer's state is."""

import numpy as np
import pytest

from alignedserve.core.request import SamplingParams
from alignedserve.runtime.grammar.token_masks import TokenMasks
from tests.support.grammars import EOS, PERSON, byte_masks, encode, regex_grammar, text_of
from tests.support.marks import each

SEMICOLON = encode(";")[0]


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


def test_only_rows_with_a_grammar_have_one() -> None:
    masks = added(SamplingParams(grammar=regex_grammar("a")))
    assert not masks.has_any(np.array([1, 2]))
    assert masks.has_any(np.array([1, 5]))
    step = masks.start(np.array([1, 2, 5, 3]), np.zeros(4, np.bool_)).result()
    assert step.at.tolist() == [2]
    masks.remove(5)
    assert not masks.has_any(np.array([1, 5]))


@each("ends_at", range(1, 30, 3))
def test_a_resumed_answer_has_the_same_masks(ends_at: int) -> None:
    answer = '{"name":"otter","is_here":true,"tags":["abc","b"]}'
    one = added(SamplingParams(grammar=PERSON))
    for token_id in encode(answer[:ends_at]):
        allowed(one, 5)
        one.record(np.array([5]), np.array([token_id]))
    assert allowed(one, 5) == allowed(added(SamplingParams(grammar=PERSON), answer[:ends_at]), 5)


def test_an_end_that_is_not_wanted_comes_where_nothing_else_may_follow() -> None:
    for sampling, is_early in (
        (SamplingParams(grammar=regex_grammar("a{1,2}"), ignore_eos=True), False),
        (SamplingParams(grammar=regex_grammar("a{1,2}"), min_tokens=9, max_tokens=9), True),
    ):
        masks = added(sampling, "a")
        assert allowed(masks, 5, is_early=is_early) == set(encode("a"))
        masks.record(np.array([5]), np.array(encode("a")))
        assert allowed(masks, 5, is_early=is_early) == {EOS}


def test_stop_tokens_are_not_wanted_early_either() -> None:
    sampling = SamplingParams(
        grammar=regex_grammar("[;a]*"), min_tokens=3, max_tokens=9, stop_token_ids=(SEMICOLON, 10**6)
    )
    masks = added(sampling)
    assert SEMICOLON not in allowed(masks, 5, is_early=True)
    assert SEMICOLON in allowed(masks, 5)


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
