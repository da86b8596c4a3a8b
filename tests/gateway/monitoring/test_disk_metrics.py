"""The space of file systems at /metrics: told where it can be, and never waited for."""

import threading
from pathlib import Path

import pytest

from alignedserve.gateway import storage_metrics
from alignedserve.gateway.storage_metrics import Disks


async def test_size_and_space_of_each_place_are_told(tmp_path: Path) -> None:
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
    monkeypatch.setattr(storage_metrics, "_PATIENCE_S", 0.01)
    disks = Disks({"state": tmp_path})
    assert [await disks.metrics() for _ in range(3)] == [b"", b"", b""]
    assert len(calls) == 1
    released.set()
    monkeypatch.setattr(storage_metrics, "_PATIENCE_S", 60.0)
    assert b"alignedserve_disk_bytes" in await disks.metrics()
