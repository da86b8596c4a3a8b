"""What a key may ask of batches: the tier at which they run, priorities, how many; and whose usage it sees."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from typing_extensions import override

from alignedserve.batches.interfaces import Page
from alignedserve.batches.repository import MAX_ACTIVE
from alignedserve.cli.batch.client import BatchClient, RequestRefused
from alignedserve.client.openai_client import OpenAiClient
from alignedserve.config.sections import BatchesConfig
from alignedserve.core.errors import ConfigError, PeerError
from alignedserve.gateway.app import build_app
from alignedserve.gateway.files.files_api import FilesApi
from alignedserve.keys.file import KeyRow, SecretRow, ring_of
from alignedserve.keys.ring import digest_of
from tests.gateway.batches.batch_server import listening
from tests.gateway.batches.batch_support import BatchGateway, batch_gateway
from tests.gateway.support import error_of
from tests.support.batch_samples import chat_lines
from tests.support.memory_records import MemoryRecords

NO_FILE = {"input_file_id": "file-" + "0" * 24}


def with_key(served: BatchGateway, **fields: Any) -> None:
    """Let one key in, `team-a`, whose secret all requests bring from now on."""
    row = KeyRow("team-a", (SecretRow(digest_of("team-a").hex()),), **fields)
    assert served.services.files_api is not None
    for keys in (served.services.keys, served.services.files_api.keys):
        keys.ring = ring_of((), [row])
    served.client.headers["authorization"] = "Bearer team-a"


async def create(served: BatchGateway, **fields: Any) -> Any:
    return await served.create((await served.upload(chat_lines(3))).json()["id"], **fields)


@pytest.mark.parametrize("priority", [-1, 6])
async def test_a_batch_has_no_priority_that_its_key_may_not_send(priority: int, undriven: BatchGateway) -> None:
    with_key(undriven, priorities=(3, 5))
    error = error_of(await create(undriven, priority=priority), 403)
    assert (error["param"], error["code"]) == ("priority", "priority_not_allowed")
    assert error["message"] == "The key team-a may not send this priority; it may send 3 to 5."
    for fields in ({"priority": 3}, {"priority": 5}, {}):  # whoever names none sends none
        assert (await create(undriven, **fields)).status_code == 200
    assert len((await undriven.client.get("/v1/batches")).json()["data"]) == 3


async def test_a_key_without_flex_has_no_batches(undriven: BatchGateway) -> None:
    with_key(undriven, tiers=("default",))
    assert error_of(await create(undriven), 403)["code"] == "service_tier_not_allowed"


async def test_a_model_of_others_is_as_absent_in_a_batch_as_one_that_is_not_there(driven: BatchGateway) -> None:
    with_key(driven, models=("other",))
    forbidden = await driven.wait_for((await driven.submit(chat_lines(3)))["id"])
    absent = await driven.wait_for((await driven.submit(chat_lines(3).replace(b'"tiny"', b'"nothing"')))["id"])
    assert forbidden["errors"] == absent["errors"]
    assert (forbidden["status"], driven.backend.submitted) == ("failed", [])
    with_key(driven, models=("ti*",))
    assert (await driven.wait_for((await driven.submit(chat_lines(3)))["id"]))["status"] == "completed"


async def test_the_command_says_what_its_key_may_not(tmp_path: Path) -> None:
    async with batch_gateway(tmp_path, is_driven=False) as served, listening(served.app) as url:
        with_key(served, tiers=("default",))
        for api_key, expected in (("team-a", "The key team-a may not use service_tier flex"), ("other", "wants a key")):
            async with BatchClient(url=url, api_key=api_key, say=lambda _: None) as client:
                with pytest.raises(RequestRefused, match=expected):
                    await client.create({"endpoint": "/v1/completions", "completion_window": "1h"} | NO_FILE, "again")


async def test_the_load_generator_says_what_its_key_may_not(tmp_path: Path) -> None:
    async with batch_gateway(tmp_path, is_driven=False) as served, listening(served.app) as url:
        with_key(served)
        for api_key, expected in (("team-a", "403: This key may not see what others use"), ("other", "wants a key")):
            async with OpenAiClient(url=url, api_key=api_key) as client:
                with pytest.raises(PeerError, match=expected):
                    await client.get("/v1/alignedserve/live")


@pytest.mark.parametrize(("may_see_usage", "seen"), [(False, ["team-a"]), (True, ["anyone", "team-a"])])
async def test_a_key_sees_the_usage_of_all_where_its_entry_says_so(
    undriven: BatchGateway, may_see_usage: bool, seen: list[str]
) -> None:
    undriven.services.usage.is_kept = True
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
    assert (await undriven.client.post("/v1/chat/completions", json=body)).status_code == 200
    with_key(undriven, may_see_usage=may_see_usage)
    assert (await undriven.client.post("/v1/chat/completions", json=body)).status_code == 200
    asked = f"start_time={int(time.time()) - 3600}&bucket_width=1h&group_by=key"
    page = (await undriven.client.get(f"/v1/usage?{asked}")).json()
    assert sorted(one["key"] for bucket in page["data"] for one in bucket["results"]) == seen


class SlowRecords(MemoryRecords):
    """Answers after others had their turn, as a store elsewhere does."""

    @override
    async def page(self, index: str, *, after: str | None, limit: int, newest_first: bool) -> Page | None:
        """See RecordStore."""
        found = await super().page(index, after=after, limit=limit, newest_first=newest_first)
        await asyncio.sleep(0.01)
        return found


async def test_a_key_has_no_more_batches_where_it_asks_two_gateways_at_once(tmp_path: Path) -> None:
    async with batch_gateway(tmp_path, is_driven=False, max_active=2, records=SlowRecords()) as served:
        file_id = (await served.upload(chat_lines(1))).json()["id"]
        other = build_app(replace(served.services, files_api=FilesApi(served.stores, served.config)))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(other), base_url="http://localhost") as client:
            second = replace(served, client=client)
            answers = await asyncio.gather(*(one.create(file_id) for one in (served, second) * 4))
    assert sorted(answer.status_code for answer in answers) == [200] * 2 + [429] * 6


async def test_a_key_may_have_so_many_batches(tmp_path: Path) -> None:
    async with batch_gateway(tmp_path, is_driven=False, max_active=2) as served:
        file_id = (await served.upload(chat_lines(1))).json()["id"]
        for _ in range(2):
            assert (await served.create(file_id)).status_code == 200
        refused = await served.create(file_id)
    assert error_of(refused, 429)["code"] == "rate_limit_exceeded"


async def test_a_key_may_have_so_many_tokens_of_batches_and_waits_for_none_that_never_fit(
    undriven: BatchGateway,
) -> None:
    with_key(undriven, enqueued_batch_tokens=1000)
    small, large, huge = [(await undriven.upload(chat_lines(count))).json()["id"] for count in (3, 12, 30)]
    assert (await undriven.create(small)).status_code == 200
    later, never = await undriven.create(large), await undriven.create(huge)
    for refused in (later, never):
        assert error_of(refused, 429)["message"].startswith("Limit of enqueued batch tokens (enqueued_batch_tokens)")
    assert later.headers["retry-after"] == "60"
    assert (never.headers["x-should-retry"], "retry-after" in never.headers) == ("false", False)


async def test_all_keys_have_so_many_batches_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alignedserve.gateway.files.files_api.MAX_ACTIVE", 1)
    async with batch_gateway(tmp_path, is_driven=False) as served:
        assert (await create(served)).status_code == 200
        with_key(served)
        refused = await create(served)
    error = error_of(refused, 429)
    assert (error["code"], refused.headers["retry-after"]) == ("resource_unavailable", "60")
    assert error["message"] == "All keys together have 1 batches that are not over, and may have no more."


def test_one_key_never_has_all_batches_that_there_may_be() -> None:
    with pytest.raises(ConfigError, match="max_active must be at most 2500"):
        BatchesConfig(max_active=2501)
    assert 4 * BatchesConfig(max_active=2500).max_active == MAX_ACTIVE


async def test_uploads_that_still_arrive_have_no_more_room_than_files(tmp_path: Path) -> None:
    may_end = asyncio.Event()

    async def form() -> AsyncIterator[bytes]:
        yield b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        yield b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n' + b"x" * 400
        await may_end.wait()
        yield b"\r\n--b--\r\n"

    async with batch_gateway(tmp_path, is_driven=False, max_files_bytes=1000) as served:
        headers = {"content-type": "multipart/form-data; boundary=b"}
        uploads = [
            asyncio.create_task(served.client.post("/v1/files", content=form(), headers=headers)) for _ in range(3)
        ]
        (refused,), _ = await asyncio.wait(uploads, timeout=20.0, return_when=asyncio.FIRST_COMPLETED)
        may_end.set()
        answers = await asyncio.gather(*uploads)
    assert error_of(refused.result(), 429)["message"] == "This key has too many files; delete some."
    assert sorted(answer.status_code for answer in answers) == [200, 200, 429]
