"""The file routes, over HTTP."""

import asyncio
from collections.abc import AsyncIterator, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from alignedserve.gateway.files import files_api as turns
from alignedserve.gateway.files import lists as file_lists
from tests.gateway.batches.batch_support import BatchGateway, batch_gateway, eventually
from tests.gateway.support import error_of
from tests.support.batch_samples import chat_lines
from tests.support.memory_records import MemoryRecords


def left_on_disk(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "files").iterdir())


async def test_upload_list_get_content_delete(tmp_path: Path) -> None:
    content = chat_lines(4)
    async with batch_gateway(tmp_path, is_driven=False) as served:
        made = (await served.upload(content)).json()
        assert made.items() >= {"object": "file", "bytes": len(content), "filename": "in.jsonl"}.items()
        assert (made["purpose"], made["status"]) == ("batch", "processed")
        assert (await served.client.get(f"/v1/files/{made['id']}")).json() == made
        assert (await served.client.get("/v1/files")).json()["data"] == [made]
        answer = await served.client.get(f"/v1/files/{made['id']}/content")
        assert (answer.content, answer.headers["content-type"]) == (content, "application/octet-stream")
        deleted = (await served.client.delete(f"/v1/files/{made['id']}")).json()
        assert deleted == {"id": made["id"], "object": "file", "deleted": True}
        assert error_of(await served.client.get(f"/v1/files/{made['id']}"), 404)["code"] == "not_found"
        assert error_of(await served.client.delete(f"/v1/files/{made['id']}"), 404)["code"] == "not_found"
    assert left_on_disk(tmp_path) == []


async def test_binary_content_comes_back_as_it_was(tmp_path: Path) -> None:
    content = bytes(range(256)) * 3000
    async with batch_gateway(tmp_path, is_driven=False) as served:
        made = (await served.upload(content)).json()
        assert (await served.client.get(f"/v1/files/{made['id']}/content")).content == content


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("../../etc/passwd", "passwd"),
        ("C:\\temp\\x.jsonl", "x.jsonl"),
        ("/", "upload"),
        ("a\x07b", "a%07b"),  # as the client sends it
        ("x" * 400, "x" * 255),
        ("días.jsonl", "días.jsonl"),
    ],
)
async def test_a_name_is_shown_and_never_a_path(tmp_path: Path, name: str, shown: str, undriven: BatchGateway) -> None:
    made = (await undriven.upload(b"x", name=name)).json()
    content = await undriven.client.get(f"/v1/files/{made['id']}/content")
    assert (made["filename"], content.status_code) == (shown, 200)
    assert left_on_disk(tmp_path) == [made["id"]]


async def test_the_largest_file_and_one_byte_more(tmp_path: Path) -> None:
    async with batch_gateway(tmp_path, is_driven=False, max_file_bytes=200_000) as served:
        assert (await served.upload(b"x" * 200_000)).status_code == 200
        assert error_of(await served.upload(b"x" * 200_001), 413)["code"] == "body_too_large"
        assert error_of(await served.upload(b"x" * 900_000), 413)["code"] == "body_too_large"
    assert len(left_on_disk(tmp_path)) == 1


@pytest.mark.parametrize("place", ["before", "behind"])
async def test_a_body_without_a_length_ends_soon_beside_its_file_too(tmp_path: Path, place: str) -> None:
    num_sent = 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal num_sent
        form = (
            b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
            b'--b\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n{}\r\n--b--\r\n'
        )
        if place == "behind":
            yield form
        for _ in range(100):
            num_sent += 1
            yield b"\r\n" * 16_384
        yield form

    async with batch_gateway(tmp_path, is_driven=False, max_file_bytes=1000) as served:
        headers = {"content-type": "multipart/form-data; boundary=b"}
        answer = await served.client.post("/v1/files", content=body(), headers=headers)
        assert error_of(answer, 413)["code"] == "body_too_large"
    assert num_sent < 10
    assert left_on_disk(tmp_path) == []


async def test_what_a_form_must_hold(tmp_path: Path, undriven: BatchGateway) -> None:
    client = undriven.client
    assert error_of(await undriven.upload(b""), 400)["code"] == "empty_file"
    assert error_of(await undriven.upload(b"x", fields={"purpose": "assistants"}), 400)["param"] == "purpose"
    no_purpose = await client.post("/v1/files", files={"file": ("a", b"x")})
    assert error_of(no_purpose, 400)["param"] == "purpose"
    no_file = await client.post("/v1/files", files={"purpose": (None, "batch")})
    assert error_of(no_file, 400)["param"] == "file"
    unknown = await client.post("/v1/files", files={"file": ("a", b"x")}, data={"purpose": "batch", "nonsense": "1"})
    assert error_of(unknown, 400)["param"] == "nonsense"
    twice = await client.post("/v1/files", files=[("file", ("a", b"x")), ("file", ("b", b"y"))])
    assert error_of(twice, 400)["code"] == "invalid_multipart"
    as_json = await client.post("/v1/files", json={"purpose": "batch"})
    assert error_of(as_json, 415)["code"] == "unsupported_media_type"
    many = await client.post("/v1/files", files={f"p{n}": (None, "x") for n in range(99)})
    assert many.status_code == 400
    assert left_on_disk(tmp_path) == []


async def test_fields_may_come_after_the_file(undriven: BatchGateway) -> None:
    made = await undriven.client.post("/v1/files", files=[("file", ("a", b"x")), ("purpose", (None, "batch"))])
    assert made.status_code == 200


HEAD = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'


@pytest.mark.parametrize(
    "body", [b"", b"nonsense", HEAD, HEAD + b"content", HEAD + b"content\r\n--b", b"--b\r\n" + b"x" * 20_000]
)
async def test_a_broken_form(tmp_path: Path, body: bytes, undriven: BatchGateway) -> None:
    headers = {"content-type": "multipart/form-data; boundary=b"}
    answer = await undriven.client.post("/v1/files", content=body, headers=headers)
    assert error_of(answer, 400)["code"] == "invalid_multipart"
    assert left_on_disk(tmp_path) == []


async def test_an_upload_that_is_broken_off_leaves_nothing(tmp_path: Path) -> None:
    messages: list[dict[str, Any]] = [
        {"type": "http.request", "body": HEAD + b"x" * 100_000, "more_body": True},
        {"type": "http.disconnect"},
    ]
    sent = []

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "http_version": "1.0",
        "method": "POST",
        "path": "/v1/files",
        "query_string": b"",
        "headers": [(b"content-type", b"multipart/form-data; boundary=b")],
    }
    async with batch_gateway(tmp_path, is_driven=False) as served:
        await served.app(scope, receive, send)
    assert (sent, left_on_disk(tmp_path)) == ([], [])


async def test_files_expire(tmp_path: Path) -> None:
    async with batch_gateway(tmp_path, is_driven=False, file_lifetime_s=0.2) as served:
        made = (await served.upload(chat_lines(1))).json()
        asked = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
        kept = (await served.upload(chat_lines(1), fields=asked)).json()
        assert kept["expires_at"] - kept["created_at"] == 3600
        await _expired(served, made["id"])
        assert error_of(await served.create(made["id"]), 404)["param"] == "input_file_id"
        served.start_driver()  # which tidies up as it begins

        async def is_tidy() -> bool:
            return left_on_disk(tmp_path) == [kept["id"]]

        await eventually(is_tidy)


async def _expired(served: BatchGateway, file_id: str) -> None:
    async def is_gone() -> bool:
        return (await served.client.get(f"/v1/files/{file_id}")).status_code == 404

    await eventually(is_gone)


@pytest.mark.parametrize(
    "fields",
    [
        {"expires_after[anchor]": "now", "expires_after[seconds]": "3600"},
        {"expires_after[anchor]": "created_at", "expires_after[seconds]": "60"},
        {"expires_after[anchor]": "created_at", "expires_after[seconds]": "1e4"},
        {"expires_after[anchor]": "created_at"},
    ],
)
async def test_bad_expiry(tmp_path: Path, fields: dict[str, str], undriven: BatchGateway) -> None:
    assert error_of(await undriven.upload(b"x", fields=fields), 400)["param"].startswith("expires_after")
    assert left_on_disk(tmp_path) == []


async def test_a_key_may_store_so_much(tmp_path: Path) -> None:
    async with batch_gateway(tmp_path, is_driven=False, max_files_bytes=1000) as served:
        first = (await served.upload(b"x" * 600)).json()
        assert error_of(await served.upload(b"x" * 600), 429)["code"] == "rate_limit_exceeded"
        await served.client.delete(f"/v1/files/{first['id']}")
        assert (await served.upload(b"x" * 600)).status_code == 200
    assert len(left_on_disk(tmp_path)) == 1


class LaterRecords(MemoryRecords):
    """Answers in a later turn of the loop, as every store does that is not in memory."""

    @override
    async def read(self, keys: Sequence[str]) -> list[bytes | None]:
        """See RecordStore."""
        found = await super().read(keys)
        await asyncio.sleep(0)
        return found


async def test_many_files_of_one_key_are_added_and_deleted_at_once(tmp_path: Path) -> None:
    async with batch_gateway(tmp_path, is_driven=False, records=LaterRecords()) as served:
        added = await asyncio.gather(*(served.upload(b"{}") for _ in range(30)))
        assert {answer.status_code for answer in added} == {200}
        file_ids = [answer.json()["id"] for answer in added]
        deleted = await asyncio.gather(*(served.client.delete(f"/v1/files/{file_id}") for file_id in file_ids))
        assert {answer.status_code for answer in deleted} == {200}
    assert left_on_disk(tmp_path) == []


class AwayRecords(MemoryRecords):
    """Does not answer while it is down, as a store whose host is away: a call fails when its patience is over."""

    def __init__(self) -> None:
        super().__init__()
        self.num_failed = 0

    @override
    async def read(self, keys: Sequence[str]) -> list[bytes | None]:
        """See RecordStore."""
        await asyncio.sleep(0)
        self.num_failed += self.is_down
        return await super().read(keys)


async def test_deletions_of_one_key_fail_together_where_the_store_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other, each after seconds, the last of fifty would fail after minutes."""
    monkeypatch.setattr(turns, "_LONG_S", 0.0)
    records = AwayRecords()
    async with batch_gateway(tmp_path, is_driven=False, records=records) as served:
        file_ids = [(await served.upload(b"{}")).json()["id"] for _ in range(30)]
        records.is_down = True
        delete = [served.client.delete(f"/v1/files/{file_id}") for file_id in file_ids]
        assert {answer.status_code for answer in await asyncio.gather(*delete)} == {503}
        assert records.num_failed == 1
        records.is_down = False
        assert (await served.client.delete(f"/v1/files/{file_ids[0]}")).status_code == 200


async def test_a_file_that_a_batch_reads_stays(tmp_path: Path, undriven: BatchGateway) -> None:
    batch = await undriven.submit()
    refused = await undriven.client.delete(f"/v1/files/{batch['input_file_id']}")
    assert error_of(refused, 409)["code"] == "file_in_use"
    undriven.start_driver()
    done = await undriven.wait_for(batch["id"])
    for file_id in (batch["input_file_id"], done["output_file_id"]):
        assert (await undriven.client.delete(f"/v1/files/{file_id}")).status_code == 200
    assert left_on_disk(tmp_path) == []
    assert list((tmp_path / "results").iterdir()) == []


@pytest.mark.parametrize("file_id", ["file-1", "..%2f..%2fetc%2fpasswd", "file-" + "0" * 24, "batch_" + "0" * 24])
async def test_ids_that_are_none(file_id: str, undriven: BatchGateway) -> None:
    assert (await undriven.client.get(f"/v1/files/{file_id}")).status_code == 404
    assert (await undriven.client.get(f"/v1/files/{file_id}/content")).status_code == 404
    assert error_of(await undriven.create(file_id), 404)["param"] == "input_file_id"


async def test_lists(undriven: BatchGateway) -> None:
    made = [(await undriven.upload(b"x")).json()["id"] for _ in range(3)]
    page = (await undriven.client.get("/v1/files?order=asc&limit=2")).json()
    assert ([one["id"] for one in page["data"]], page["has_more"]) == (made[:2], True)
    rest = (await undriven.client.get(f"/v1/files?order=asc&after={page['last_id']}")).json()
    assert ([one["id"] for one in rest["data"]], rest["has_more"]) == (made[2:], False)
    assert (await undriven.client.get("/v1/files?purpose=batch_output")).json()["data"] == []
    for query in ("limit=0", "limit=x", "order=up", "after=file-0"):
        assert (await undriven.client.get(f"/v1/files?{query}")).status_code == 400


async def test_a_file_that_is_deleted_meanwhile_ends_no_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids and records are read one after the other, and in pieces."""
    monkeypatch.setattr(file_lists, "_PIECE", 2)
    async with batch_gateway(tmp_path, is_driven=False) as served:
        made = [(await served.upload(b"x")).json()["id"] for _ in range(7)]
        pages, deletions = served.records.page, {made[1], made[3], made[4]}

        async def page(index: str, **asked: Any) -> Any:
            found = await pages(index, **asked)
            gone = deletions.intersection(found.members if index.startswith("files/") and found is not None else ())
            deletions.difference_update(gone)
            for file_id in gone:
                assert (await served.client.delete(f"/v1/files/{file_id}")).status_code == 200
            return found

        monkeypatch.setattr(served.records, "page", page)
        shown = (await served.client.get("/v1/files?order=asc&limit=3")).json()
        assert ([one["id"] for one in shown["data"]], shown["has_more"]) == ([made[0], made[2], made[5]], True)
        rest = (await served.client.get(f"/v1/files?order=asc&limit=3&after={shown['last_id']}")).json()
        assert ([one["id"] for one in rest["data"]], rest["has_more"]) == ([made[6]], False)


async def test_a_long_list_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of 10 000 results held up all streams of its gateway, and asked for each batch by itself."""
    monkeypatch.setattr(file_lists, "_PIECE", 4)
    async with batch_gateway(tmp_path) as served:
        for _ in range(6):
            await served.wait_for((await served.submit(chat_lines(1)))["id"])
        num_keys, read = [], served.records.read

        async def counted(keys: Sequence[str]) -> list[bytes | None]:
            num_keys.append(len(keys))
            return await read(keys)

        await served.stop_driver()
        monkeypatch.setattr(served.records, "read", counted)
        shown = (await served.client.get("/v1/files")).json()
        assert (len(shown["data"]), len({one["id"] for one in shown["data"]}), shown["has_more"]) == (12, 12, False)
        assert len(num_keys) == 6
        assert max(num_keys) <= 2 * 4
        num_keys.clear()
        assert len((await served.client.get("/v1/files?purpose=batch&limit=1")).json()["data"]) == 1
        assert len(num_keys) <= 3


async def test_a_download_goes_on_from_a_byte(tmp_path: Path) -> None:
    content = chat_lines(50)
    async with batch_gateway(tmp_path) as served:
        batch = await served.submit(content)
        done = await served.wait_for(batch["id"])
        for file_id in (batch["input_file_id"], done["output_file_id"]):
            path = f"/v1/files/{file_id}/content"
            whole = await served.client.get(path)
            size = len(whole.content)
            assert (whole.status_code, whole.headers["content-length"]) == (200, str(size))
            for offset in (0, 1, 700, size - 1):
                part = await served.client.get(path, headers={"range": f"bytes={offset}-"})
                assert (part.status_code, part.content) == (206, whole.content[offset:])
                assert part.headers["content-range"] == f"bytes {offset}-{size - 1}/{size}"
            beyond = await served.client.get(path, headers={"range": f"bytes={size}-"})
            assert error_of(beyond, 416)["code"] == "range_not_satisfiable"
            assert beyond.headers["content-range"] == f"bytes */{size}"
            for ignored in ("bytes=0-9", "bytes=-5", "lines=1-", "bytes=1-,3-"):
                assert (await served.client.get(path, headers={"range": ignored})).status_code == 200


async def test_a_download_of_what_is_damaged_or_gone_says_so(tmp_path: Path, driven: BatchGateway) -> None:
    done = await driven.wait_for((await driven.submit())["id"])
    log = tmp_path / "results" / f"{done['id']}.log"
    content = bytearray(log.read_bytes())
    content[content.index(b"custom_id")] ^= 1
    log.write_bytes(content)
    path = f"/v1/files/{done['output_file_id']}/content"
    assert error_of(await driven.client.get(path), 503)["code"] == "storage_unavailable"
    log.unlink()
    assert error_of(await driven.client.get(path), 503)["code"] == "storage_unavailable"


async def test_lists_by_purpose_have_no_empty_pages(driven: BatchGateway) -> None:
    first = await driven.submit()
    await driven.wait_for(first["id"])
    for _ in range(5):
        await driven.upload(b"x")
    page = (await driven.client.get("/v1/files?purpose=batch_output&limit=1")).json()
    assert ([one["purpose"] for one in page["data"]], page["has_more"]) == (["batch_output"], False)
    found, after = [], ""
    while True:
        page = (await driven.client.get(f"/v1/files?purpose=batch&limit=2{after}")).json()
        found += [one["id"] for one in page["data"]]
        if not page["has_more"]:
            break
        assert len(page["data"]) == 2
        after = f"&after={page['last_id']}"
    assert len(found) == len(set(found)) == 6
