"""Stored responses: continued, referred to, listed, deleted; owned by their key and bounded."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from typing_extensions import override

from alignedserve.api.models.model_services import ModelCard
from alignedserve.config.sections import GatewayConfig
from alignedserve.core.errors import StoreFull, StoreUnavailable
from alignedserve.gateway.responses import responses_api as store_loss
from alignedserve.messages.state import Change
from tests.gateway.batches.batch_support import BatchGateway, batch_gateway
from tests.gateway.responses.responses_support import events_of, response_of, text_of
from tests.gateway.support import EOS, error_of, saying, tokenizer, tokenizer_folder
from tests.harnesses.scripted_backend import ScriptedBackend
from tests.support.memory_records import MemoryRecords

MINE, THEIRS = {"authorization": "Bearer mine"}, {"authorization": "Bearer theirs"}


async def respond(served: BatchGateway, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
    body = {"model": "tiny", "input": "hello", **fields}
    return await served.client.post("/v1/responses", json=body, headers=headers)


async def get(served: BatchGateway, path: str, headers: dict[str, str] | None = None) -> httpx.Response:
    return await served.client.get(f"/v1/responses/{path}", headers=headers)


def prompt_of(served: BatchGateway) -> str:
    return tokenizer().decode(served.backend.submitted[-1].prompt_token_ids, skip_special_tokens=False)


async def test_a_stored_response_is_found_as_it_was(tmp_path: Path) -> None:
    async with batch_gateway(tmp_path, is_driven=False) as served:
        response = response_of(await respond(served))
        assert response["store"] is True
        assert (await get(served, response["id"])).json() == response
        streamed = events_of(await respond(served, stream=True))[-1]["response"]
        assert (await get(served, streamed["id"])).json() == streamed


async def test_store_false_leaves_nothing(tmp_path: Path) -> None:
    async with batch_gateway(tmp_path, is_driven=False) as served:
        response = response_of(await respond(served, store=False))
        error_of(await get(served, response["id"]), 404)
        assert served.records._values == {}  # nothing else in the whole store either


async def test_a_response_is_continued_under_another_model(tmp_path: Path) -> None:
    async with batch_gateway(tmp_path, is_driven=False) as served:
        backend = ScriptedBackend(saying("good day"))
        served.services.add_model(ModelCard("other", tokenizer_folder(), 256, (EOS,)), backend, tokenizer())
        first = response_of(await respond(served))
        second = response_of(await respond(served, previous_response_id=first["id"], input="and now?", model="other"))
        assert (second["model"], text_of(second)) == ("other", "good day")
        prompt = tokenizer().decode(backend.submitted[-1].prompt_token_ids, skip_special_tokens=False)
        assert [word in prompt for word in ("hello", "hello world", "and now?")] == [True] * 3


async def test_a_response_continues_a_conversation(tmp_path: Path) -> None:
    async with batch_gateway(tmp_path, is_driven=False) as served:
        first = response_of(await respond(served, instructions="be kind"))
        second = response_of(await respond(served, input="more", previous_response_id=first["id"]))
        third = response_of(await respond(served, input="end", previous_response_id=second["id"]))
        assert prompt_of(served) == (
            "<|bos|><|user|>hello<|end|>\n<|assistant|>hello world<|end|>\n<|user|>more<|end|>\n"
            "<|assistant|>hello world<|end|>\n<|user|>end<|end|>\n<|assistant|>"
        )
        assert third["previous_response_id"] == second["id"]
        await served.client.delete(f"/v1/responses/{first['id']}")
        error = error_of(await respond(served, previous_response_id=third["id"]), 404)
    assert (error["param"], error["code"]) == ("previous_response_id", "previous_response_not_found")


async def test_items_are_referred_to(tmp_path: Path) -> None:
    async with batch_gateway(tmp_path, is_driven=False) as served:
        first = response_of(await respond(served))
        [sent] = (await get(served, f"{first['id']}/input_items")).json()["data"]
        references = [{"type": "item_reference", "id": sent["id"]}, {"id": first["output"][0]["id"]}]
        twice = response_of(await respond(served, input=references[:1] * 2))
        pages = (await get(served, f"{twice['id']}/input_items?order=asc")).json()["data"]
        assert len({sent["id"], *(item["id"] for item in pages)}) == 3  # each item has its own id
        second = response_of(await respond(served, input=[*references, {"role": "user", "content": "and"}]))
        assert "hello<|end|>\n<|assistant|>hello world<|end|>\n<|user|>and" in prompt_of(served)
        listed = (await get(served, f"{second['id']}/input_items?order=asc")).json()["data"]
        assert [item["role"] for item in listed] == ["user", "assistant", "user"]
        missing = [{"id": first["output"][0]["id"] + "f"}]
        error_of(await respond(served, input=missing), 404)


async def test_input_items_come_in_pages(tmp_path: Path) -> None:
    items = [{"role": "user", "content": str(number)} for number in range(5)]
    async with batch_gateway(tmp_path, is_driven=False) as served:
        path = f"{response_of(await respond(served, input=items))['id']}/input_items"
        page = (await get(served, f"{path}?order=asc&limit=3")).json()
        rest = (await get(served, f"{path}?order=asc&after={page['last_id']}")).json()
        newest = (await get(served, f"{path}?limit=1")).json()
        error_of(await get(served, f"{path}?limit=101"), 400)
        error_of(await get(served, f"{path}?after=msg_1"), 400)
    shown = [item["content"][0]["text"] for item in page["data"] + rest["data"]]
    assert (shown, page["has_more"], rest["has_more"]) == (["0", "1", "2", "3", "4"], True, False)
    assert newest["data"][0]["content"] == [{"type": "input_text", "text": "4"}]


async def test_another_keys_responses_do_not_exist(tmp_path: Path) -> None:
    async with batch_gateway(tmp_path, is_driven=False, api_keys=("mine", "theirs")) as served:
        own = response_of(await respond(served, MINE))["id"]
        unknown = "resp_" + "0" * 32
        for name in (own, unknown, "resp_1", "%2e%2e"):
            answers = [
                await get(served, name, THEIRS),
                await get(served, f"{name}/input_items", THEIRS),
                await served.client.delete(f"/v1/responses/{name}", headers=THEIRS),
                await served.client.post(f"/v1/responses/{name}/cancel", headers=THEIRS),
            ]
            continued = await respond(served, THEIRS, previous_response_id=name)
            assert {answer.text for answer in answers} == {
                '{"error":{"message":"No such response.","type":"invalid_request_error",'
                '"param":"response_id","code":"response_not_found"}}'
            }
            assert error_of(continued, 404)["code"] == "previous_response_not_found"
        reference = [{"type": "item_reference", "id": f"msg_{own.removeprefix('resp_')}o0"}]
        error_of(await respond(served, THEIRS, input=reference), 404)
        assert response_of(await get(served, own, MINE))["id"] == own


async def test_a_deleted_response_is_gone(tmp_path: Path) -> None:
    async with batch_gateway(tmp_path, is_driven=False) as served:
        name = response_of(await respond(served))["id"]
        deleted = await served.client.delete(f"/v1/responses/{name}")
        assert deleted.json() == {"id": name, "object": "response", "deleted": True}
        error_of(await get(served, name), 404)
        error_of(await served.client.delete(f"/v1/responses/{name}"), 404)


async def test_conversations_are_bounded(tmp_path: Path) -> None:
    config = GatewayConfig(max_response_turns=2)
    async with batch_gateway(tmp_path, is_driven=False, gateway_config=config) as served:
        last = None
        for _ in range(3):
            last = response_of(await respond(served, previous_response_id=last))["id"]
        assert error_of(await respond(served, previous_response_id=last), 400)["param"] == "previous_response_id"


async def test_the_oldest_responses_make_room(tmp_path: Path) -> None:
    config = GatewayConfig(max_responses_bytes=8000)
    async with batch_gateway(tmp_path, is_driven=False, gateway_config=config) as served:
        names = [response_of(await respond(served))["id"] for _ in range(12)]
        found = [(await get(served, name)).status_code == 200 for name in names]
    assert found == sorted(found)  # the newest ones are there
    assert 2 <= sum(found) <= 7


class Losing(MemoryRecords):
    """Records that fail for some commits, each of which is made all the same."""

    num_lost = 0

    def __init__(self, error: StoreUnavailable | None = None) -> None:
        """`error`: None: they are away."""
        super().__init__()
        self.error = error or StoreUnavailable("away")

    @override
    async def commit(self, changes: Sequence[Change], *, unchanged: Mapping[str, bytes | None]) -> bool:
        is_made = await super().commit(changes, unchanged=unchanged)
        if self.num_lost:
            self.num_lost -= 1
            raise self.error
        return is_made


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_a_response_whose_store_is_away_at_its_end_is_stored_when_that_is_back(
    is_streamed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_loss, "_PAUSE_S", 0.0)
    records = Losing()
    async with batch_gateway(tmp_path, is_driven=False, records=records) as served:
        records.num_lost = 3
        answer = await respond(served, stream=is_streamed)
        response = events_of(answer)[-1]["response"] if is_streamed else response_of(answer)
        assert (response["status"], text_of(response)) == ("completed", "hello world")
        assert (await get(served, response["id"])).json() == response


async def test_a_full_disk_is_told_at_once(tmp_path: Path) -> None:
    records = Losing(StoreFull("no space left on the disk"))
    async with batch_gateway(tmp_path, is_driven=False, records=records) as served:
        records.num_lost = 1
        assert error_of(await respond(served), 503)["code"] == "storage_full"
        assert records.num_lost == 0


async def test_a_turn_whose_store_is_away_at_its_end_is_once_in_its_conversation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_loss, "_PAUSE_S", 0.0)
    records = Losing()
    async with batch_gateway(tmp_path, is_driven=False, records=records) as served:
        path = f"/v1/conversations/{(await served.client.post('/v1/conversations', json={})).json()['id']}"
        records.num_lost = 2
        response_of(await respond(served, conversation=path.rpartition("/")[2], store=False))
        items = (await served.client.get(f"{path}/items")).json()["data"]
        assert sorted(item["role"] for item in items) == ["assistant", "user"]


async def test_a_store_that_is_down_fails_what_needs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_loss, "_RETURNS_S", 0.0)
    async with batch_gateway(tmp_path, is_driven=False) as served:
        name = response_of(await respond(served))["id"]
        served.records.is_down = True
        error_of(await get(served, name), 503)
        error_of(await respond(served), 503)
        events = events_of(await respond(served, stream=True))
        assert events[-1]["type"] == "response.failed"
        assert text_of(response_of(await respond(served, store=False))) == "hello world"


async def test_only_responses_in_the_background_can_be_cancelled(tmp_path: Path) -> None:
    async with batch_gateway(tmp_path, is_driven=False) as served:
        name = response_of(await respond(served))["id"]
        error_of(await served.client.post(f"/v1/responses/{name}/cancel"), 400)
        error_of(await get(served, f"{name}?stream=true"), 400)
