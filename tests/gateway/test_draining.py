"""A gateway that is about to end: what is open goes on, what is new is refused."""

import asyncio

from alignedserve.gateway.intake import Intake
from tests.gateway.support import EOS, error_of, gateway, saying, tokens_of
from tests.harnesses.scripted_backend import Script
from tests.support.marks import each
from tests.support.waiting import holds


async def test_an_answer_that_runs_is_finished_and_a_new_request_is_refused() -> None:
    goes_on = asyncio.Event()
    script = Script((*tokens_of("the quick brown fox"), EOS), held_until=goes_on)
    async with gateway(lambda _: script) as served:
        intake = served.services.intake
        running = asyncio.create_task(served.chat())
        await holds(lambda: bool(served.backend.submitted))
        intake.is_closed = True
        for path in ("/v1/chat/completions", "/v1/embeddings", "/v1/batches", "/v1/files", "/v1/responses"):
            refused = await served.client.post(path, json={})
            assert error_of(refused, 503)["code"] == "draining"
            assert int(refused.headers["retry-after"]) > 0
        assert "draining" in error_of(await served.client.get("/ready"), 503)["message"]
        assert (await served.client.get("/health")).status_code == 200
        assert (await served.client.get("/v1/models")).headers["connection"] == "close"
        assert intake.num_open == 1
        goes_on.set()
        assert (await running).json()["choices"][0]["message"]["content"] == "the quick brown fox"
        assert intake.num_open == 0


async def test_refused_and_failed_requests_are_open_no_more() -> None:
    async with gateway(saying("the quick")) as served:
        await served.chat(model="unknown")
        await served.client.post("/v1/nothing")
        assert (await served.client.get("/v1/models")).headers.get("connection") is None
        assert served.services.intake.num_open == 0


def test_a_drain_does_not_wait_for_whoever_asks_all_the_time() -> None:
    intake = Intake()
    intake.is_closed = True
    assert intake.admit("GET") is None
    assert intake.num_open == 0


@each("is_closed", [False, True])
def test_a_request_is_released_once(is_closed: bool) -> None:
    intake = Intake()
    ticket = intake.admit("GET")
    intake.is_closed = is_closed
    assert ticket is not None
    ticket.release()
    ticket.release()
    assert intake.num_open == 0
