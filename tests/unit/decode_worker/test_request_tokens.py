"""A request on a worker gets its tokens one by one, and tells its gateway where its answer ends."""

from typing import Any

from alignedserve.core.request import FinishReason, SampledToken, SamplingParams, TokenLogprob
from alignedserve.messages.gateways import TokenDelta
from alignedserve.worker_core.request import WorkerRequest
from tests.support.marks import each
from tests.support.samples import R1, request

EOS = frozenset({2})


@each(
    ("token_id", "num_generated", "changes", "expected"),
    [
        (9, 1, {}, None),
        (2, 1, {}, FinishReason.STOP),
        (2, 1, {"ignore_eos": True}, None),
        (2, 1, {"ignore_eos": True, "grammar": "json"}, FinishReason.STOP),
        (5, 1, {"stop_token_ids": (5, 6)}, FinishReason.STOP),
        (2, 1, {"stop_token_ids": (5, 6)}, FinishReason.STOP),
        (2, 1, {"ignore_eos": True, "stop_token_ids": (2,)}, FinishReason.STOP),
        (9, 4, {}, FinishReason.LENGTH),
        (2, 4, {}, FinishReason.STOP),
        (9, 3, {}, None),
    ],
)
def test_when_an_answer_is_over(
    token_id: int, num_generated: int, changes: dict[str, Any], expected: FinishReason | None
) -> None:
    sampling = SamplingParams(max_tokens=4, **changes)
    tracked = WorkerRequest(request(sampling=sampling), 1, [7] * (num_generated - 1))
    delta = tracked.append(SampledToken(R1, token_id), EOS)
    assert delta == TokenDelta(R1, num_generated - 1, (token_id,), finish_reason=expected)
    assert tracked.generated_token_ids[-1] == token_id
    assert tracked.context_len == tracked.request.prompt_len + num_generated


def test_the_first_token_brings_what_was_cached_and_every_one_its_log_probability() -> None:
    tracked = WorkerRequest(request(), 1, [])
    tracked.num_hit_tokens = 16
    logprob = TokenLogprob(7, -0.5)
    assert tracked.append(SampledToken(R1, 7, logprob), EOS) == TokenDelta(R1, 0, (7,), (logprob,), None, 16)
    assert tracked.append(SampledToken(R1, 8, logprob), EOS) == TokenDelta(R1, 1, (8,), (logprob,))


def test_a_prompt_that_is_only_asked_about_gets_no_token() -> None:
    tracked = WorkerRequest(request(sampling=SamplingParams(max_tokens=0)), 1, [])
    delta = tracked.append(SampledToken(R1, 7, embedding=b"vector"), EOS)
    assert delta == TokenDelta(R1, 0, (), (), FinishReason.LENGTH, embedding=b"vector")
    assert not tracked.generated_token_ids
