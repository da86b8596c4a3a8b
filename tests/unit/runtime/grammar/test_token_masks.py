"""Masks of rows: what may follow, when an answer may end, and what a resumed answer's state is."""

import numpy as np
import pytest

from alignedserve.core.request import SamplingParams
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
