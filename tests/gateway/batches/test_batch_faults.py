"""Batches and files when what is stored cannot be read for a while, or the store's answer is lost."""

from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from alignedserve.batches import driver
from alignedserve.batches.records import FileId
from alignedserve.core.errors import StorageError, StoreUnavailable
from alignedserve.messages.state import Change, SetValue
from tests.gateway.batches.batch_support import BatchGateway, batch_gateway, eventually
from tests.gateway.support import error_of
from tests.support.batch_samples import chat_lines


async def test_a_validation_that_cannot_read_pauses_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "_RESTART_S", 0.1)
    async with batch_gateway(tmp_path, is_driven=False) as served:
        whole = served.stores.blobs.chunks

        async def chunks(file_id: FileId, start: int = 0) -> AsyncIterator[bytes]:
            raise StorageError("the disk does not answer")
            yield b""

        monkeypatch.setattr(served.stores.blobs, "chunks", chunks)
        made = await served.submit(chat_lines(2))
        served.start_driver()

        async def is_paused() -> bool:
            return bool((await served.batch(made["id"]))["alignedserve"]["paused"] == "the disk does not answer")

        await eventually(is_paused)
        assert (await served.batch(made["id"]))["status"] == "validating"
        monkeypatch.setattr(served.stores.blobs, "chunks", whole)
        done = await served.wait_for(made["id"])
    assert (done["status"], done["alignedserve"]["paused"]) == ("completed", None)


async def test_an_upload_whose_record_may_be_kept_keeps_its_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store had it, and its answer was lost: a record without content would be a lie."""
    async with batch_gateway(tmp_path, is_driven=False) as served:
        commit = served.records.commit

        async def losing(changes: Sequence[Change], *, unchanged: Mapping[str, bytes | None]) -> bool:
            await commit(changes, unchanged=unchanged)
            raise StoreUnavailable("lost")

        monkeypatch.setattr(served.records, "commit", losing)
        assert (await served.upload(chat_lines(1))).status_code == 503
        monkeypatch.undo()
        listed: dict[str, Any] = (await served.client.get("/v1/files")).json()
        assert [await served.results(file["id"]) for file in listed["data"]] == [chat_lines(1).decode().splitlines()]


async def damage(served: BatchGateway, key: str) -> None:
    """Damage a value as a disk might: Redis keeps no checksums of values."""
    [raw] = await served.records.read([key])
    assert raw is not None
    await served.records.commit([SetValue(key, b"?" + raw[1:])], unchanged={})


async def test_damaged_progress_is_added_up_anew_from_the_log(tmp_path: Path) -> None:
    async with batch_gateway(tmp_path, is_driven=False) as served:
        batch = await served.submit(chat_lines(3))
        await damage(served, f"progress/{batch['id']}")
        served.start_driver()

        async def is_told() -> bool:
            return (await served.client.get(f"/v1/batches/{batch['id']}")).status_code == 200

        await eventually(is_told)
        done = await served.wait_for(batch["id"])
        assert done["request_counts"] == {"total": 3, "completed": 3, "failed": 0}
        assert len(await served.results(done["output_file_id"])) == 3


async def test_a_damaged_batch_stops_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with batch_gateway(tmp_path, is_driven=False) as served:
        damaged = await served.submit(chat_lines(3))
        await damage(served, f"batch/{damaged['id']}")
        other = await served.submit(chat_lines(2))
        served.start_driver()
        assert (await served.wait_for(other["id"]))["status"] == "completed"
        answer = await served.client.get(f"/v1/batches/{damaged['id']}")
        assert error_of(answer, 503)["code"] == "storage_unavailable"
    assert caplog.text.count(f"{damaged['id']} is left out: ") == 1
