"""Predicted output lengths in the router: how they come in, travel, and are judged; and the runner that makes them."""

import asyncio

import numpy as np
import pytest

from alignedserve.config.sections import ModelSectionConfig, RouterConfig
from alignedserve.core.errors import ConfigError, FailureKind
from alignedserve.core.ids import RequestId
from alignedserve.messages.events import PeerDisconnected, Received, Send
from alignedserve.messages.gateways import (
    AbortRequest,
    LengthTotals,
    RequestFailed,
    RequestRejected,
    ResumeRequest,
    SubmitRequest,
)
from alignedserve.messages.handshake import Role
from alignedserve.messages.pools import PoolRegistered, RequestPooled
from alignedserve.messages.wire import Message
from alignedserve.messages.workers import (
    PrefillCompleted,
    RequestFinished,
    RequestPreempted,
    SetPredictedLength,
    WorkerLoad,
)
from alignedserve.runtime.model.served_model import resolve_model
from router.async_predictor import AsyncLengthPredictor
from router.prediction import ENCODERS, make_length_predictor
from router.prediction.encoders import HashedNgrams
from router.prediction.predictor import LengthPredictor
from router.state import LengthPredicted
from tests.harnesses.router import (
    DISPATCHED,
    GRANTED,
    POOLED,
    RouterHarness,
    colocated_router,
    decoding,
    given,
    pooled,
    prefilling,
)
from tests.support.samples import DECODE, GATEWAY, POOL, PREFILL, R1, R2, epoch, request, worker


def predicted(made: RouterHarness, length: float) -> list[Send]:
    return made.logic.on_event(LengthPredicted(R1, length), made.now)


# --- the logic


def test_a_prediction_that_is_in_time_travels_with_the_request() -> None:
    made = RouterHarness()
    made.submit(request())
    assert predicted(made, 5.5) == []
    made.hear(POOL, PoolRegistered(100))
    assert made.hear(PREFILL, worker(can_prefill=True, can_decode=False)) == [
        given(request(), 1, predicted_output_len=5.5)
    ]


def test_no_request_waits_for_a_prediction_and_a_late_one_is_sent_after() -> None:
    made = prefilling()  # with the limit, as nothing of its class has finished
    assert predicted(made, 5.5) == [Send(PREFILL, SetPredictedLength(R1, DISPATCHED, 5.5))]


def test_a_colocated_worker_is_told_while_it_decodes() -> None:
    made = colocated_router()
    made.submit(request())
    made.hear(DECODE, PrefillCompleted(R1, DISPATCHED, 4))
    assert predicted(made, 5.5) == [Send(DECODE, SetPredictedLength(R1, DISPATCHED, 5.5))]


def test_a_pool_and_a_worker_that_only_decodes_are_told() -> None:
    in_pool, running = pooled(), decoding()
    assert predicted(in_pool, 5.5) == [Send(POOL, SetPredictedLength(R1, POOLED, 5.5))]
    assert predicted(running, 5.5) == [Send(DECODE, SetPredictedLength(R1, GRANTED, 5.5))]


def test_what_was_told_while_the_request_moved_on_is_told_again() -> None:
    made = prefilling()
    predicted(made, 5.5)  # the prefill worker may have handed it on by now
    assert Send(POOL, SetPredictedLength(R1, POOLED, 5.5)) in made.hear(POOL, RequestPooled(R1, POOLED, 4, 1))


def test_a_prediction_that_was_in_time_is_told_once() -> None:
    made = RouterHarness()
    made.submit(request())
    predicted(made, 5.5)
    made.hear(POOL, PoolRegistered(100))
    made.hear(PREFILL, worker(can_prefill=True, can_decode=False))
    assert not any(
        isinstance(one.message, SetPredictedLength) for one in made.hear(POOL, RequestPooled(R1, POOLED, 4, 1))
    )


def test_no_more_is_expected_than_may_come() -> None:
    assert predicted(prefilling(), 100.0) == [Send(PREFILL, SetPredictedLength(R1, DISPATCHED, 8.0))]


def test_a_prediction_for_a_request_that_is_over_is_ignored() -> None:
    made = prefilling()
    made.hear(GATEWAY, AbortRequest(R1))
    assert predicted(made, 5.5) == []


def test_an_overrun_prediction_is_doubled_when_the_request_is_dispatched_again() -> None:
    made = prefilling()
    predicted(made, 2.5)
    assert made.hear(PREFILL, RequestPreempted(R1, DISPATCHED, (7, 8, 9))) == [
        given(request(), 2, 7, 8, 9, predicted_output_len=5.0)
    ]


def test_the_mean_of_the_class_stands_in() -> None:
    made = decoding()
    made.hear(DECODE, RequestFinished(R1, GRANTED, 3))
    assert made.submit(request("r2")) == [given(request("r2"), 2, predicted_output_len=3.0)]


def test_what_was_expected_on_arrival_is_judged() -> None:
    made = decoding()
    predicted(made, 5.5)
    made.hear(DECODE, RequestFinished(R1, GRANTED, 3))
    made.submit(request("r2"))
    made.hear(PREFILL, RequestFinished(request("r2").request_id, epoch(2), 4))
    assert made.status().lengths == LengthTotals(num_finished=2, num_predicted=1, num_tokens=7, error_tokens=3.5)


# --- the runner


class Loop:
    """A runner, and what it has delivered."""

    def __init__(self) -> None:
        self.delivered: asyncio.Queue[LengthPredicted] = asyncio.Queue()
        self.runner = AsyncLengthPredictor(LengthPredictor(HashedNgrams()), self.delivered.put_nowait)

    def hear(self, message: Message, answer: Message | None = None) -> None:
        self.runner.observe(Received(GATEWAY, message), [] if answer is None else [Send(GATEWAY, answer)])

    async def known(self) -> list[str]:
        """Return the requests that it would learn from, once it has done what it was given."""
        self.hear(SubmitRequest(request("last")))
        while (await self.prediction()).request_id != "last":
            pass
        self.runner._forget([RequestId("last")])
        return [str(request_id) for request_id in self.runner._encoded]

    async def prediction(self) -> LengthPredicted:
        return await asyncio.wait_for(self.delivered.get(), 10.0)


async def test_the_runner_predicts_what_is_submitted_and_learns_from_what_finishes() -> None:
    loop = Loop()
    loop.hear(SubmitRequest(request(max_tokens=100)))
    assert await loop.prediction() == LengthPredicted(R1, 100.0)
    loop.hear(RequestFinished(R1, DISPATCHED, 30))
    loop.hear(ResumeRequest(request("r2", max_tokens=100), (7,)))
    event = await loop.prediction()
    assert event.request_id == R2
    assert event.predicted_len == pytest.approx(30.0)
    loop.runner.close()


async def test_the_runner_keeps_no_prompt_of_what_is_refused_fails_or_was_of_a_gateway_that_is_lost() -> None:
    """In an overload of long prompts a router kept gigabytes of those that it had refused."""
    loop = Loop()
    loop.hear(SubmitRequest(request()))
    loop.hear(SubmitRequest(request("r2")), RequestRejected(R2, "the queue is full", 1.0))
    loop.hear(SubmitRequest(request()), RequestRejected(R1, "this request is already being served", 0.0))
    assert await loop.known() == ["r1"]
    loop.hear(WorkerLoad(), RequestFailed(R1, FailureKind.UNSERVABLE, "it is too long"))
    loop.hear(SubmitRequest(request("r3")))
    assert await loop.known() == ["r3"]
    loop.runner.observe(PeerDisconnected(Role.GATEWAY, GATEWAY))
    assert await loop.known() == []
    loop.runner.close()


async def test_the_runner_learns_nothing_of_what_it_does_not_know_or_was_aborted() -> None:
    loop = Loop()
    loop.hear(SubmitRequest(request(max_tokens=100)))
    loop.hear(AbortRequest(R1))
    loop.hear(RequestFinished(R1, DISPATCHED, 30))
    loop.hear(SubmitRequest(request("r2", max_tokens=100)))
    assert [await loop.prediction() for _ in range(2)][1].predicted_len == 100.0
    loop.runner.close()


async def test_what_comes_in_the_turn_in_which_the_runner_is_closed_is_dropped() -> None:
    loop = Loop()
    errors: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    loop.hear(SubmitRequest(request()))
    await loop.prediction()
    loop.hear(SubmitRequest(request("r2")))
    loop.runner.close()
    await asyncio.sleep(0)
    assert (errors, loop.delivered.empty()) == ([], True)


async def test_when_the_thread_is_behind_no_more_is_asked_of_it() -> None:
    loop = Loop()
    for number in range(300):  # none is delivered before this test waits
        loop.hear(SubmitRequest(request(f"r{number}")))
    assert [(await loop.prediction()).request_id for _ in range(256)][-1] == "r255"
    loop.hear(SubmitRequest(request("later")))
    assert (await loop.prediction()).request_id == "later"
    loop.runner.close()


# --- the choice

SERVED = resolve_model(ModelSectionConfig())


def test_an_unknown_predictor_is_refused_and_the_valid_ones_are_named() -> None:
    with pytest.raises(ConfigError, match=r"'tea'; known: class_mean, hashed_ngrams, token_embedd"):
        make_length_predictor(RouterConfig(length_predictor="tea"), SERVED)


def test_the_mean_of_the_class_needs_no_predictor() -> None:
    assert make_length_predictor(RouterConfig(length_predictor="class_mean"), SERVED) is None


def test_token_embeddings_are_those_of_the_served_model() -> None:
    encoder = ENCODERS["token_embeddings"](RouterConfig(), SERVED)
    assert encoder.num_features == 256
    assert np.linalg.norm(encoder.encode((5, 6, 7)).features) == pytest.approx(1.0)


def test_random_weights_have_no_embeddings_to_compare_by() -> None:
    served = resolve_model(ModelSectionConfig(random_weights=True))
    with pytest.raises(ConfigError, match=r"model\.random_weights is set"):
        make_length_predictor(RouterConfig(length_predictor="token_embeddings"), served)


def test_the_sentence_encoder_that_is_gone_names_what_serves_in_its_place() -> None:
    with pytest.raises(ConfigError, match="use token_embeddings"):
        make_length_predictor(RouterConfig(length_predictor="sentence_encoder"), SERVED)
