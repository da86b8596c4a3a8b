"""Drafts are verified in one step, and answers are those of single steps, to the last token."""

from dataclasses import replace

import numpy as np
import pytest

from alignedserve.core.ids import RequestId
from alignedserve.core.request import SampledToken, SamplingParams
from alignedserve.runtime.engine.forward.decoder import Decoder
from alignedserve.runtime.engine.steps.drafts import Drafter, Tokens, looked_up
from tests.support.grammars import EOS, PERSON, byte_masks
from tests.support.marks import each
from tests.support.models.tiny_engines import GREEDY, TinyEngine, random_tokens, tiny_decoder
from tests.support.models.tiny_models import make_tiny_model

NUM_TOKENS = 40
PROMPTS = {name: random_tokens(seed, 7 + 3 * seed) for seed, name in enumerate(("a", "b", "c"), 1)}
SAMPLINGS = {
    "greedy": GREEDY,
    "drawn": replace(GREEDY, temperature=1.2, top_p=0.9, seed=7),
    "with log-probabilities": replace(GREEDY, temperature=0.7, seed=3, num_logprobs=3),
}


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(folder, "llama")
    return tiny_decoder(folder)


def answers(
    decoder: Decoder, sampling: SamplingParams, drafter: Drafter | None, **options: object
) -> tuple[dict[str, list[SampledToken]], int, int]:
    """Return the tokens of each sequence, the number of steps, and that of right drafts."""
    engine = TinyEngine(decoder, **options)  # type: ignore[arg-type]
    if drafter is not None:
        engine.engine._drafting.drafter = drafter
    given: dict[str, list[SampledToken]] = {name: [] for name in PROMPTS}
    for name, prompt in PROMPTS.items():
        engine.add(name, prompt, sampling, spare_tokens=NUM_TOKENS + 1)
        given[name] += engine.step(**{name: len(prompt)}).sampled
    num_steps = num_right = 0
    while left := [name for name, tokens in given.items() if len(tokens) < NUM_TOKENS]:
        output = engine.step(num_drafts=5 if drafter is not None else 0, **dict.fromkeys(left, 1))
        assert dict(output.forced) == {key: right for key, _, right in output.drafted if right}
        for token in output.sampled:
            given[token.request_id].append(token)
        num_steps, num_right = num_steps + 1, num_right + sum(right for _, _, right in output.drafted)
    for name, prompt in PROMPTS.items():
        known = engine.engine.token_ids(RequestId(name))
        assert known == (*prompt, *(token.token_id for token in given[name]))
        assert engine.engine.num_computed(RequestId(name)) == len(known) - 1
    return {name: tokens[:NUM_TOKENS] for name, tokens in given.items()}, num_steps, num_right


def following(known: dict[str, list[SampledToken]], wrong_at: int | None = None) -> Drafter:
    """Return a drafter that knows the answers; `wrong_at`: it is wrong at every so many tokens."""
    texts = {name: [*prompt, *(token.token_id for token in known[name])] for name, prompt in PROMPTS.items()}

    def draft(tokens: Tokens, at_most: int) -> Tokens:
        text = next(text for text in texts.values() if text[: len(tokens)] == tokens.tolist())
        drafts = np.array(text[len(tokens) : len(tokens) + at_most], np.int64)
        if wrong_at is not None:
            drafts[(np.arange(len(drafts)) + len(tokens)) % wrong_at == 0] += 1
        return drafts

    return draft


@each("kind", SAMPLINGS)
def test_answers_are_the_same_whatever_is_drafted(decoder: Decoder, kind: str) -> None:
    alone, num_steps, _ = answers(decoder, SAMPLINGS[kind], None)
    assert num_steps == NUM_TOKENS - 1
    for drafter, most_steps in (
        (following(alone), NUM_TOKENS // 2),
        (following(alone, wrong_at=3), NUM_TOKENS - 8),
        (lambda tokens, at_most: np.full(at_most, 5), NUM_TOKENS),
        (looked_up, NUM_TOKENS),
    ):
        drafted, num_steps, num_right = answers(decoder, SAMPLINGS[kind], drafter)
        assert drafted == alone
        assert num_steps <= most_steps
        assert num_right or most_steps == NUM_TOKENS


def test_a_plain_attention_takes_no_drafts(decoder: Decoder) -> None:
    alone, num_steps, _ = answers(decoder, GREEDY, None, attention="torch")
    drafted, as_many, num_right = answers(decoder, GREEDY, following(alone), attention="torch")
    assert (drafted, as_many, num_right) == (alone, num_steps, 0)


def test_few_sequences_take_many_drafts_and_many_share_a_limit(decoder: Decoder) -> None:
    prompt, engine = PROMPTS["a"], TinyEngine(decoder, max_sequences=1)
    engine.engine._drafting.drafter = lambda tokens, at_most: np.full(at_most, 5)
    engine.add("a", prompt, GREEDY, spare_tokens=40)
    engine.step(a=len(prompt))
    assert [count for _, count, _ in engine.step(num_drafts=30, a=1).drafted] == [30]
    engine, names = TinyEngine(decoder, max_sequences=8), "abcdefgh"
    engine.engine._drafting.drafter = lambda tokens, at_most: np.full(at_most, 5)
    for name in names:
        engine.add(name, prompt, GREEDY, spare_tokens=40)
    engine.step(**dict.fromkeys(names, len(prompt)))
    output = engine.step(num_drafts=30, **dict.fromkeys(names, 1))
    assert [count for _, count, _ in output.drafted] == [30, 30, 30, 30, 8]
    assert {token.request_id for token in output.sampled} == set(names)


@each(
    "changes",
    [{"repetition_penalty": 1.5}, {"logit_bias": ((5, 4.0),)}, {"grammar": PERSON}, {"min_tokens": 60}],
)
def test_options_that_change_logits_take_no_drafts(decoder: Decoder, changes: dict[str, object]) -> None:
    engine = TinyEngine(decoder, masks=byte_masks(jumps_ahead=False))
    engine.engine._drafting.drafter = lambda tokens, at_most: np.full(at_most, 5)
    engine.add("a", PROMPTS["a"], replace(GREEDY, **changes))  # type: ignore[arg-type]
    engine.step(a=len(PROMPTS["a"]))
    assert engine.step(num_drafts=4, a=1).drafted == ()


def test_drafts_end_before_the_end_of_an_answer_of_its_blocks_and_of_its_limit(decoder: Decoder) -> None:
    engine, prompt = TinyEngine(decoder), PROMPTS["a"]
    engine.engine._drafting.drafter = lambda tokens, at_most: np.array([5, EOS, 5, 5, 5, 5])[:at_most]
    engine.add("a", prompt, GREEDY)
    engine.step(a=len(prompt))
    assert [(count, right <= count) for _, count, right in engine.step(num_drafts=6, a=1).drafted] == [(1, True)]
    engine.engine._drafting.drafter = lambda tokens, at_most: np.full(at_most, 5)
    engine.add("b", prompt, replace(GREEDY, max_tokens=4))
    engine.step(b=len(prompt))
    assert [count for _, count, _ in engine.step(num_drafts=6, b=1).drafted] == [2]
    engine.add("c", prompt, GREEDY, spare_tokens=3)
    engine.step(c=len(prompt))
    assert [len(prompt) + 1 + n for _, n, _ in engine.step(num_drafts=9, c=1).drafted] == [4 * len(engine.blocks["c"])]


@each(
    "tokens, at_most, drafts",
    [
        ([5, 6, 7, 8, 1, 5, 6], 2, [7, 8]),
        ([5, 6, 7, 8, 1, 5, 6], 9, [7, 8, 1, 5, 6]),
        ([1, 5, 6, 7, 2, 5, 6, 8, 1, 5, 6], 1, [7]),  # three in common before two
        ([5, 6, 7, 5, 6, 8, 5, 6], 1, [8]),  # the latest of equals
        ([1, 2, 3, 4], 3, []),
        ([5, 1, 5], 3, []),  # one in common is too few
        ([5], 3, []),
        ([5, 5, 5, 5], 3, [5]),
    ],
)
def test_what_followed_the_longest_match_is_drafted(tokens: list[int], at_most: int, drafts: list[int]) -> None:
    assert looked_up(np.array(tokens), at_most).tolist() == drafts
