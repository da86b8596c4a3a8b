"""Conversations: their items, changed by clients and by responses, whole, streamed and in the background."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from alignedserve.config.sections import GatewayConfig
from alignedserve.gateway.responses import conversations
from tests.gateway.batches.batch_support import BatchGateway, batch_gateway
from tests.gateway.responses.responses_support import events_of, response_of
from tests.gateway.responses.test_responses_background import begin, reached
from tests.gateway.support import error_of, gateway, saying, tokenizer
from tests.support.lazy_types import LazyType

PATH = "/v1/conversations"
_CONVERSATION = LazyType("openai.types.conversations", "Conversation")
_DELETED = LazyType("openai.types.conversations", "ConversationDeletedResource")
_ITEM = LazyType("openai.types.conversations", "ConversationItem")
_PAGE = LazyType("openai.pagination", "AsyncConversationCursorPage")


def message(text: str, role: str = "user") -> dict[str, Any]:
    return {"type": "message", "role": role, "content": text}


async def create(served: BatchGateway, *texts: str, **fields: Any) -> str:
    answer = await served.client.post(PATH, json={"items": [message(text) for text in texts], **fields})
    assert answer.status_code == 200, answer.text
    _CONVERSATION.check(answer.json())
    return str(answer.json()["id"])


async def items_of(served: BatchGateway, name: str, **query: Any) -> list[dict[str, Any]]:
    answer = await served.client.get(f"{PATH}/{name}/items", params={"order": "asc", **query})
    assert answer.status_code == 200, answer.text
    _PAGE.check(answer.json())
    items: list[dict[str, Any]] = answer.json()["data"]
    for item in items:
        _ITEM.check(item)
    return items


async def texts_of(served: BatchGateway, name: str) -> list[str]:
    return [item["content"][0]["text"] for item in await items_of(served, name)]


async def respond(served: BatchGateway, name: str, text: str, **fields: Any) -> Any:
    body = {"model": "tiny", "input": text, "conversation": name, **fields}
    return await served.client.post("/v1/responses", json=body)


async def test_a_conversation_is_created_changed_and_deleted(tmp_path: Path) -> None:
    async with batch_gateway(tmp_path, is_driven=False) as served:
        name = await create(served, "one", metadata={"topic": "a"})
        path = f"{PATH}/{name}"
        first = (await served.client.get(path)).json()
        changed = (await served.client.post(path, json={"metadata": {"topic": "b"}})).json()
        assert (first["metadata"], changed["metadata"]) == ({"topic": "a"}, {"topic": "b"})
        assert changed == (await served.client.get(path)).json()
        deleted = (await served.client.delete(path)).json()
        _DELETED.check(deleted)
        assert deleted == {"id": name, "object": "conversation.deleted", "deleted": True}
        assert error_of(await served.client.get(path), 404)["code"] == "conversation_not_found"
        assert error_of(await respond(served, name, "two"), 404)["param"] == "conversation"


async def test_items_are_added_listed_in_pages_found_and_deleted(tmp_path: Path) -> None:
    async with batch_gateway(tmp_path, is_driven=False) as served:
        name = await create(served, "one")
        added = await served.client.post(f"{PATH}/{name}/items", json={"items": [message("two"), message("three")]})
        second, third = (item["id"] for item in added.json()["data"])
        assert await texts_of(served, name) == ["one", "two", "three"]
        assert [item["id"] for item in await items_of(served, name, order="desc", limit=1)] == [third]
        assert [item["id"] for item in await items_of(served, name, after=second)] == [third]
        item = (await served.client.get(f"{PATH}/{name}/items/{second}")).json()
        assert item["content"] == [{"type": "input_text", "text": "two"}]
        after = (await served.client.delete(f"{PATH}/{name}/items/{second}")).json()
        assert after["id"] == name
        assert await texts_of(served, name) == ["one", "three"]
        for ask in (served.client.get, served.client.delete):
            assert error_of(await ask(f"{PATH}/{name}/items/{second}"), 404)["code"] == "item_not_found"


@pytest.mark.parametrize("order", ["asc", "desc"])
async def test_a_client_deletes_what_it_lists_page_after_page(tmp_path: Path, order: str) -> None:
    async with batch_gateway(tmp_path, is_driven=False) as served:
        name, seen = await create(served, *"abcdefg"), list[str]()
        kept = [item["id"] for item in await items_of(served, name)][3]
        after: dict[str, str] = {}
        while page := await items_of(served, name, order=order, limit=2, **after):
            seen += [item["content"][0]["text"] for item in page]
            for item in page:
                if item["id"] != kept:
                    assert (await served.client.delete(f"{PATH}/{name}/items/{item['id']}")).status_code == 200
            after = {"after": page[-1]["id"]}
        assert seen == sorted("abcdefg", reverse=order == "desc")
        assert await texts_of(served, name) == ["d"]


async def test_items_that_are_added_come_after_deleted_ones(tmp_path: Path) -> None:
    async with batch_gateway(tmp_path, is_driven=False) as served:
        name = await create(served, "one", "two", "three")
        first, second, third = (item["id"] for item in await items_of(served, name))
        for deleted in (third, first, second):
            await served.client.delete(f"{PATH}/{name}/items/{deleted}")
        await served.client.post(f"{PATH}/{name}/items", json={"items": [message("four")]})
        for after in (first, second, third):
            assert [item["content"][0]["text"] for item in await items_of(served, name, after=after)] == ["four"]
            assert await items_of(served, name, after=after, order="desc") == []


@pytest.mark.parametrize("as_object", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_reads_a_conversation_and_adds_to_it(tmp_path: Path, stream: bool, as_object: bool) -> None:
    async with batch_gateway(tmp_path, is_driven=False) as served:
        name = await create(served, "one")
        given: Any = {"id": name} if as_object else name
        answer = await respond(served, given, "two", stream=stream)
        response = events_of(answer)[-1]["response"] if stream else response_of(answer)
        assert response["conversation"] == {"id": name}
        prompt = tokenizer().decode(served.backend.submitted[0].prompt_token_ids, skip_special_tokens=False)
        assert prompt.index("one") < prompt.index("two")
        assert await texts_of(served, name) == ["one", "two", "hello world"]
        await respond(served, name, "three", store=False)
        assert await texts_of(served, name) == ["one", "two", "hello world", "three", "hello world"]
        counted = await served.client.post("/v1/responses/input_tokens", json={"input": "a", "conversation": name})
        assert counted.json()["input_tokens"] > len(served.backend.submitted[1].prompt_token_ids)


async def test_a_response_in_the_background_adds_its_items_once_it_is_over(tmp_path: Path) -> None:
    goes_on = asyncio.Event()
    async with batch_gateway(tmp_path, saying("hello world", held_until=goes_on)) as served:
        name = await create(served, "one")
        queued = await begin(served, input="two", conversation=name)
        locked = error_of(await respond(served, name, "three"), 409)
        assert locked["code"] == "conversation_locked"
        assert await texts_of(served, name) == ["one"]
        goes_on.set()
        await reached(served, queued["id"], "completed")
        assert await texts_of(served, name) == ["one", "two", "hello world"]
        assert (await respond(served, name, "three")).status_code == 200
        assert len(await items_of(served, name)) == 5


async def test_of_responses_in_the_background_that_begin_at_once_one_is_first(tmp_path: Path) -> None:
    async with batch_gateway(tmp_path) as served:
        name = await create(served, "one")
        answers = await asyncio.gather(*(respond(served, name, "two", background=True) for _ in range(3)))
        (begun,) = [answer.json() for answer in answers if answer.status_code == 200]
        locked = [error_of(answer, 409)["code"] for answer in answers if answer.status_code != 200]
        await reached(served, begun["id"], "completed")
        assert await texts_of(served, name) == ["one", "two", "hello world"]
    assert locked == ["conversation_locked"] * 2


@pytest.mark.parametrize("is_deleted", [False, True])
async def test_one_that_is_cancelled_or_deleted_leaves_the_conversation_as_it_was(
    tmp_path: Path, is_deleted: bool
) -> None:
    async with batch_gateway(tmp_path, is_driven=False) as served:
        name = await create(served, "one")
        path = f"/v1/responses/{(await begin(served, input='two', conversation=name))['id']}"
        await (served.client.delete(path) if is_deleted else served.client.post(f"{path}/cancel"))
        assert (await respond(served, name, "three")).status_code == 200
        assert await texts_of(served, name) == ["one", "three", "hello world"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_for_which_others_left_no_room_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    async with batch_gateway(tmp_path, is_driven=False) as served:
        name = await create(served, "one")
        monkeypatch.setattr(conversations, "_MAX_BYTES_AFTER", 200)
        answer = await respond(served, name, "two", stream=stream)
        if stream:
            begun, *_, last = events_of(answer)
            assert last["type"] == "error" or last["response"]["status"] == "failed"
            response_id = begun["response"]["id"]
            error_of(await served.client.get(f"/v1/responses/{response_id}"), 404)
        else:
            error = error_of(answer, 400)
            assert (error["param"], error["code"]) == ("conversation", "context_length_exceeded")
        assert await texts_of(served, name) == ["one"]
        monkeypatch.undo()
        assert (await respond(served, name, "two")).status_code == 200


async def test_one_in_the_background_for_which_others_left_no_room_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with batch_gateway(tmp_path) as served:
        name = await create(served, "one")
        monkeypatch.setattr(conversations, "_MAX_BYTES_AFTER", 200)
        queued = await begin(served, input="two", conversation=name)
        failed = await reached(served, queued["id"], "failed")
        assert "no room" in failed["error"]["message"]
        assert failed["output"]
        assert await texts_of(served, name) == ["one"]
        assert (await served.client.get(f"/v1/responses/{queued['id']}")).json() == failed
        monkeypatch.undo()
        assert (await respond(served, name, "two")).status_code == 200


async def test_another_key_has_no_such_conversation(tmp_path: Path) -> None:
    async with batch_gateway(tmp_path, api_keys=("a", "b"), is_driven=False) as served:
        served.client.headers["authorization"] = "Bearer a"
        name = await create(served, "one")
        served.client.headers["authorization"] = "Bearer b"
        for answer in (
            await served.client.get(f"{PATH}/{name}"),
            await served.client.post(f"{PATH}/{name}", json={"metadata": {}}),
            await served.client.delete(f"{PATH}/{name}"),
            await served.client.get(f"{PATH}/{name}/items"),
            await served.client.post(f"{PATH}/{name}/items", json={"items": [message("two")]}),
            await respond(served, name, "two"),
        ):
            assert error_of(answer, 404)["code"] == "conversation_not_found"


async def test_what_cannot_be_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversations, "_MAX_BYTES", 1000)
    async with batch_gateway(tmp_path, is_driven=False) as served:
        name = await create(served, "one")
        previous = response_of(await respond(served, name, "two"))["id"]
        for answer, param in (
            (await respond(served, "conv_1", "x"), "conversation"),
            (await respond(served, name, "x", previous_response_id=previous), "conversation"),
            (await respond(served, name, "x" * 1000), "conversation"),
            (await served.client.post(PATH, json={"items": [message("x")] * 21}), "items"),
            (await served.client.post(PATH, json={"items": [message("x" * 2000)]}), "items"),
            (await served.client.post(PATH, json={"items": [{"type": "item_reference", "id": "a"}]}), "items[0].type"),
            (await served.client.post(PATH, json={"items": [{"type": "mcp_call"}]}), "items[0].type"),
            (await served.client.post(f"{PATH}/{name}", json={}), "metadata"),
            (await served.client.get(f"{PATH}/{name}/items", params={"after": "x"}), "after"),
        ):
            assert answer.status_code in (400, 404), answer.text
            assert answer.json()["error"]["param"] == param
        body = {"model": "tiny", "input": "x", "previous_response_id": previous}
        error = error_of(await served.client.post("/v1/responses", json=body), 400)
        assert error["code"] == "response_in_conversation"


async def test_the_longest_unchanged_make_room(tmp_path: Path) -> None:
    config = GatewayConfig(max_responses_bytes=20_000)
    async with batch_gateway(tmp_path, is_driven=False, gateway_config=config) as served:
        names = [await create(served, "x" * 3000) for _ in range(3)]
        await served.client.post(f"{PATH}/{names[0]}/items", json={"items": [message("more")]})
        names += [await create(served, "x" * 3000) for _ in range(4)]
        found = [(await served.client.get(f"{PATH}/{name}")).status_code for name in names]
    assert found[-1] == 200
    assert found[0] == 200
    assert found[1] == 404


async def test_without_a_store_there_are_none() -> None:
    async with gateway() as served:
        error = error_of(await served.client.post(PATH, json={}), 400)
    assert error["code"] == "responses_not_stored"
