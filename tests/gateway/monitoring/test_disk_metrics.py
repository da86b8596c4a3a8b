"""What a gateway stores, at /metrics: file systems and batches are told where they can be, and never waited for."""

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from alignedserve.gateway import storage_metrics
from alignedserve.gateway.storage_metrics import Disks
from tests.gateway.batches.batch_support import batch_gateway
from tests.support.waiting import holds


async def test_size_and_space_of_each_place_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_metrics, "_PATIENCE_S", 60.0)
    text = (await Disks({"state": tmp_path, "gone": tmp_path / "nothing"}).metrics()).decode()
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    size, free = (float(values[f'alignedserve_disk_{kind}bytes{{place="state"}}']) for kind in ("", "free_"))
    assert 0.0 < free <= size
    assert "gone" not in text


async def test_without_places_nothing_is_told() -> None:
    assert await Disks().metrics() == b""


async def test_a_file_system_that_hangs_holds_up_one_thread_and_no_scrape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released, measure, calls = threading.Event(), storage_metrics._measured, []

    def hang(places: dict[str, Path]) -> bytes:
        calls.append(places)
        released.wait()
        return measure(places)

    monkeypatch.setattr(storage_metrics, "_measured", hang)
    disks = Disks({"state": tmp_path})
    monkeypatch.setattr(disks._reader, "_patience_s", 0.01)
    assert [await disks.metrics() for _ in range(3)] == [b"", b"", b""]
    await holds(lambda: bool(calls))  # a thread starts when it can
    assert len(calls) == 1
    released.set()
    monkeypatch.setattr(disks._reader, "_patience_s", 60.0)
    assert b"alignedserve_disk_bytes" in await disks.metrics()


async def test_a_state_of_batches_that_hangs_holds_up_no_scrape_and_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = asyncio.Event()
    async with batch_gateway(tmp_path, is_driven=False) as served:
        assert served.services.files_api is not None
        reader = served.services.files_api.totals._reader
        read, num_reads = served.records.read, 0

        async def hang(keys: Sequence[str]) -> list[bytes | None]:
            nonlocal num_reads
            num_reads += 1
            await answers.wait()
            return await read(keys)

        assert "alignedserve_batch_state_reachable 1.0" in (await served.client.get("/metrics")).text
        monkeypatch.setattr(served.records, "read", hang)
        monkeypatch.setattr(reader, "_patience_s", 0.01)
        async with asyncio.timeout(5.0):
            for _ in range(2):
                text = (await served.client.get("/metrics")).text
                assert "alignedserve_batch_state_reachable 0.0" in text
                assert "alignedserve_batches_at_risk" not in text
                assert "alignedserve_ready" in text
            assert (await served.client.get("/v1/alignedserve/live")).json()["batches"] is None
        assert num_reads == 1
        answers.set()
        monkeypatch.setattr(reader, "_patience_s", 60.0)
        assert "alignedserve_batches_at_risk 0.0" in (await served.client.get("/metrics")).text
        served.records.is_down = True
        assert "alignedserve_batch_state_reachable 0.0" in (await served.client.get("/metrics")).text
