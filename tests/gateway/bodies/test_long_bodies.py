"""Long bodies and prompts: refused by what they would cost, or read while everything else goes on."""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from alignedserve.api.errors import Overloaded, ResourceUnavailable
from alignedserve.api.models.model_registry import RegisteredModel
from alignedserve.api.openai import chat_grammar
from alignedserve.api.openai.parsing import check_cost
from alignedserve.api.openai.request_builder import likely_class
from alignedserve.api.work_lanes import WorkLanes, note_class, rough_length
from alignedserve.config.sections import GatewayConfig
from alignedserve.core.errors import InvalidRequest
from alignedserve.core.request import RequestClass
from alignedserve.gateway.routes.request_bodies import task_of
from alignedserve.keys.entry import ANYONE, KeyEntry
from alignedserve.runtime.grammar import constraints as lark
from tests.gateway.support import Gateway, error_of, gateway, tokenizer
from tests.gateway.tool_support import HERMES, function, model_with
from tests.support.marks import each
from tests.support.waiting import holds

MIB = 1 << 20
LONG = "hello " * 500


async def ask(served: Gateway, path: str, text: str, **fields: Any) -> Any:
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": text}]},
        "/v1/messages": {"messages": [{"role": "user", "content": text}], "max_tokens": 4},
        "/v1/completions": {"prompt": text, "max_tokens": 1},
        "/v1/responses": {"input": text},
        "/v1/embeddings": {"input": text},
        "/tokenize": {"prompt": text},
    }
    return await served.client.post(path, json={"model": "tiny", **bodies[path], **fields})


PATHS = ("/v1/chat/completions", "/v1/messages", "/v1/completions", "/v1/responses", "/v1/embeddings")


@pytest.mark.parametrize("path", PATHS)
async def test_what_cannot_fit_the_context_is_never_tokenized(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def encoded(*_: Any, **__: Any) -> Any:
        raise AssertionError("tokenized")

    async with gateway() as served:
        monkeypatch.setattr("alignedserve.text.tokenizer._encoded", encoded)
        answer = await ask(served, path, " " * 300_000)
    assert answer.status_code == 400
    assert "256 tokens" in answer.text or "> 255 maximum" in answer.text


@pytest.mark.parametrize("path", [*PATHS, "/tokenize"])
async def test_other_requests_are_answered_while_a_long_one_is_read(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, has_begun = threading.Event(), threading.Event()
    encode = tokenizer().encode

    def waiting(text: str, **fields: Any) -> list[int]:
        has_begun.set()
        assert goes_on.wait(60), "nothing else was answered"
        return encode(text[:8], **fields)

    async with gateway() as served:
        monkeypatch.setattr(tokenizer(), "encode", waiting)
        reading = asyncio.create_task(ask(served, path, LONG))
        await holds(has_begun.is_set)
        monkeypatch.setattr(tokenizer(), "encode", encode)
        assert (await served.client.get("/health")).status_code == 200
        assert (await served.chat(stream=True)).text.endswith("data: [DONE]\n\n")
        goes_on.set()
        assert (await reading).status_code == 200


async def test_the_words_that_an_answer_must_not_hold_are_read_once_for_all_prompts_and_beside_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = [f"{number} stop here and now" for number in range(200)]
    readers: dict[str, list[threading.Thread]] = {}
    encode = tokenizer().encode

    def noted(text: str, **fields: Any) -> list[int]:
        readers.setdefault(text, []).append(threading.current_thread())
        return encode(text, **fields)

    async with gateway() as served:
        monkeypatch.setattr(tokenizer(), "encode", noted)
        answer = await served.complete(prompt=["hello"] * 8, max_tokens=1, bad_words=words)
    assert len(answer.json()["choices"]) == 8
    assert all(len(readers[word]) == 1 and readers[word] != [threading.main_thread()] for word in words)
    assert len({request.sampling.bad_words for request in served.backend.submitted}) == 1


async def test_a_long_constraint_is_read_while_disks_hang() -> None:
    goes_on = threading.Event()
    writes = [asyncio.create_task(asyncio.to_thread(goes_on.wait)) for _ in range(40)]  # as of uploads
    try:
        async with gateway() as served:
            chosen = {"choice": [f"{number} {'x' * 20}" for number in range(300)]}
            async with asyncio.timeout(20):
                assert (await served.chat(structured_outputs=chosen)).status_code == 200
    finally:
        goes_on.set()
        await asyncio.gather(*writes)


async def test_streams_go_on_while_the_grammar_of_long_tools_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    writers, serialize = list[threading.Thread](), lark.serialize

    def noted(*arguments: Any) -> str:
        writers.append(threading.current_thread())
        return serialize(*arguments)

    monkeypatch.setattr(chat_grammar, "serialize", noted)
    async with gateway(model=replace(model_with(HERMES), max_context_len=20_000)) as served:
        answer = await served.chat(tools=[function(f"call{number}", at={"type": "string"}) for number in range(60)])
    assert answer.status_code == 200
    assert writers != [threading.main_thread()]


@each(
    "inner",
    ["[]," * 20_000, '{"a":1},' * 10_000, "1," * 1_100_000],
    ids=["lists", "objects", "numbers"],
)
async def test_a_body_of_too_many_values_is_not_parsed(inner: str) -> None:
    body = f'{{"model":"tiny","prompt":[{inner}1]}}'
    async with gateway() as served:
        headers = {"content-type": "application/json"}
        answer = await served.client.post("/v1/completions", content=body.encode(), headers=headers)
    assert "The body has more than" in error_of(answer, 400)["message"]


def test_what_stands_in_strings_costs_nothing() -> None:
    text = r"[{,\"[,\\" * 20_000
    check_cost(f'{{"a": "{text}", "b": "\\\\", "c": []}}'.encode(), GatewayConfig(max_json_containers=2))
    with pytest.raises(InvalidRequest):
        check_cost(f'{{"a": "{text}", "b": "\\\\", "c": [[]]}}'.encode(), GatewayConfig(max_json_containers=2))


async def test_a_lane_with_too_much_waiting_refuses_more() -> None:
    lanes, goes_on = WorkLanes(), threading.Event()
    try:
        waiting = [asyncio.create_task(lanes.run(10_000, goes_on.wait)) for _ in range(64)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await lanes.run(10_000, goes_on.wait)
        assert await lanes.run(10_000_000, lambda: "the long lane is another") == "the long lane is another"
        assert await lanes.run(10, lambda: "short work waits for none") == "short work waits for none"
        waiting.append(asyncio.create_task(lanes.run(10_000, goes_on.wait, is_bounded=False)))  # of an answer
    finally:
        goes_on.set()
    assert all(await asyncio.gather(*waiting))
    assert await lanes.run(10_000, lambda: 1) == 1
    lanes.close()


async def test_documents_fill_no_lane_and_chats_go_before_them() -> None:
    lanes, goes_on, order = WorkLanes(), threading.Event(), list[str]()

    async def run(request_class: RequestClass, work: Callable[[], Any]) -> Any:
        note_class(request_class)
        return await lanes.run(1_000_000, work)

    def begin(request_class: RequestClass, work: Callable[[], Any]) -> "asyncio.Task[Any]":
        return asyncio.create_task(run(request_class, work))

    try:
        running = begin(RequestClass.REAL_TIME, goes_on.wait)
        documents = [begin(RequestClass.BEST_EFFORT, partial(order.append, "document")) for _ in range(48)]
        await asyncio.sleep(0)
        with pytest.raises(ResourceUnavailable):
            await begin(RequestClass.BEST_EFFORT, goes_on.wait)
        chats = [begin(RequestClass.REAL_TIME, partial(order.append, "chat")) for _ in range(63)]
        await asyncio.sleep(0)
    finally:
        goes_on.set()
    await asyncio.gather(running, *chats, *documents)
    assert order[:9] == ["chat"] * 9
    lanes.close()


@each(
    ("body", "expected"),
    [
        (b'{"service_tier": "flex", "messages": []}', RequestClass.BEST_EFFORT),
        (b'{"messages": [], "service_tier":"default"}', RequestClass.REAL_TIME),
        (b'{"messages": [], "service_tier": 5}', RequestClass.REAL_TIME),
        (b'{"input": [], "background": true}', RequestClass.BEST_EFFORT),
        (b'{"input": [], "background": false}', RequestClass.REAL_TIME),
        (b"[]", RequestClass.REAL_TIME),
    ],
)
def test_the_class_of_a_body_that_is_not_read_yet(body: bytes, expected: RequestClass) -> None:
    assert likely_class(body, KeyEntry("tests", "tests")) is expected
    assert likely_class(b"{}", KeyEntry("tests", "tests", default_tier="flex")) is RequestClass.BEST_EFFORT


@each("path", ["/v1/chat/completions", "/v1/messages", "/v1/completions", "/v1/responses", "/v1/embeddings"])
async def test_a_documents_text_is_read_after_that_of_a_chat(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    order, encode = list[str](), tokenizer().encode
    goes_on = [threading.Event() for _ in range(2)]

    def noted(text: str, **fields: Any) -> list[int]:
        order.append("document" if "document" in text else "chat")
        return encode("hello", **fields)

    async with gateway() as served:
        monkeypatch.setattr(tokenizer(), "encode", noted)
        busy = [asyncio.create_task(served.services.lanes.run(10_000, event.wait)) for event in goes_on]
        asked = [asyncio.create_task(ask(served, path, "document " + LONG, service_tier="flex"))]
        await holds(lambda: served.services.lanes._middle.num_open(is_best_effort=True) == 1)
        asked.append(asyncio.create_task(ask(served, path, LONG)))
        await holds(lambda: served.services.lanes._middle.num_open(is_best_effort=False) == 3)
        goes_on[0].set()  # one thread alone: on two, which is the first to have begun is by chance
        assert [answer.status_code for answer in await asyncio.gather(*asked)] == [200, 200]
        goes_on[1].set()
        await asyncio.gather(*busy)
    assert order == ["chat", "document"]


async def test_a_long_body_that_names_no_model_is_not_read_by_another_model_than_the_first(served: Gateway) -> None:
    models = served.services.models
    assert task_of("/tokenize", served.services, ANYONE).first == 0
    asleep = RegisteredModel(replace(models.all[0].card, name="asleep", aliases=()), is_asleep=True)
    models.replace_all([asleep, *models.all])
    order = task_of("/tokenize", served.services, ANYONE)
    assert (order.first, order.names) == (None, {"tiny": 0})  # the gateway waits until it is awake
    own = KeyEntry("team", "key.team", models=("tiny",))
    assert task_of("/tokenize", served.services, own).first == 0


def test_lengths_of_what_is_parsed() -> None:
    assert rough_length({"a": "x" * 5000, "b": ["y" * 10, 1]}) > 5000
    assert rough_length([[]] * 1_000_000) < 300_000  # it stops counting
