"""Batches and files when what is stored cannot be read for a while, or the store's answer is lost."""

from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from alignedserve.batches import driver
from alignedserve.batches.ports import Change
from alignedserve.batches.records import FileId
from alignedserve.core.errors import StorageError, StoreUnavailable
from tests.batch_samples import chat_lines
from tests.gateway.batch_support import batch_gateway, eventually


async def test_a_validation_that_cannot_read_pauses_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "_BROKEN_S", 0.1)
    async with batch_gateway(tmp_path, is_driven=False) as door:
        whole = door.stores.blobs.chunks

        async def chunks(file_id: FileId, start: int = 0) -> AsyncIterator[bytes]:
            raise StorageError("the disk does not answer")
            yield b""

        monkeypatch.setattr(door.stores.blobs, "chunks", chunks)
        made = await door.submit(chat_lines(2))
        door.start_driver()

        async def is_paused() -> bool:
            return bool((await door.batch(made["id"]))["alignedserve"]["paused"] == "the disk does not answer")

        await eventually(is_paused)
        assert (await door.batch(made["id"]))["status"] == "validating"
        monkeypatch.setattr(door.stores.blobs, "chunks", whole)
        done = await door.wait_for(made["id"])
    assert (done["status"], done["alignedserve"]["paused"]) == ("completed", None)


async def test_an_upload_whose_record_may_be_kept_keeps_its_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store had it, and its answer was lost: a record without content would be a lie."""
    async with batch_gateway(tmp_path, is_driven=False) as door:
        commit = door.records.commit

        async def losing(changes: Sequence[Change], *, unchanged: Mapping[str, bytes | None]) -> bool:
            await commit(changes, unchanged=unchanged)
            raise StoreUnavailable("lost")

        monkeypatch.setattr(door.records, "commit", losing)
        assert (await door.upload(chat_lines(1))).status_code == 503
        monkeypatch.undo()
        listed: dict[str, Any] = (await door.client.get("/v1/files")).json()
        assert [await door.results(file["id"]) for file in listed["data"]] == [chat_lines(1).decode().splitlines()]
