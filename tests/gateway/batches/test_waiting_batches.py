"""Batches that start later, at some hours, or are paused, over HTTP."""

import asyncio
import math
import time
from pathlib import Path
from typing import Any

import pytest

from alignedserve.batches.driver import BatchDriver
from alignedserve.batches.line_scheduling import ModelShares
from alignedserve.batches.run import BatchRun
from tests.gateway.batches.batch_support import BatchGateway, batch_gateway, eventually
from tests.gateway.support import error_of, saying
from tests.support.batch_samples import chat_lines
from tests.support.marks import each


async def test_a_batch_waits_for_its_hour_and_says_until_when(tmp_path: Path) -> None:
    async with batch_gateway(tmp_path) as served:
        waiting = await served.submit(not_before=time.time() + 3600.0, priority=-3)
        await eventually(lambda: _has_status(served, waiting["id"], "in_progress"))
        shown = (await served.client.get(f"/v1/batches/{waiting['id']}")).json()
        done = await served.wait_for((await served.submit(hours="00:00-24:00 Europe/Berlin"))["id"])
        late = await served.create(waiting["input_file_id"], window="1m", not_before=time.time() + 3600.0)
    assert shown["alignedserve"]["paused"].startswith("waits until 20")
    assert shown["alignedserve"]["priority"] == -3
    assert shown["alignedserve"]["quote"]["expected_at"] >= shown["alignedserve"]["not_before"]
    assert (done["status"], done["alignedserve"]["hours"]) == ("completed", "00:00-24:00 Europe/Berlin")
    assert error_of(late, 400)["param"] == "completion_window"
    assert "The shortest is 61m" in error_of(late, 400)["message"]


async def _has_status(served: BatchGateway, batch_id: str, status: str) -> bool:
    return bool((await served.client.get(f"/v1/batches/{batch_id}")).json()["status"] == status)


@each(
    ("fields", "param", "named"),
    [
        ({"hours": "22:00-06:00 Mars/Olympus"}, "hours", "Mars/Olympus"),
        ({"hours": "22:00-06:00"}, "hours", "time zone"),
        ({"not_before": "tomorrow"}, "not_before", "tomorrow"),
        ({"not_before": "2026-11-25T22:00:00"}, "not_before", "zone"),
        ({"not_before": -1}, "not_before", "too far"),
        ({"priority": 1001}, "priority", "1000"),
    ],
)
async def test_what_cannot_be_read_is_refused_by_name(
    tmp_path: Path, fields: dict[str, Any], param: str, named: str
) -> None:
    async with batch_gateway(tmp_path, is_driven=False) as served:
        file_id = (await served.upload(chat_lines(1))).json()["id"]
        refused = error_of(await served.create(file_id, **fields), 400)
    assert refused["param"] == param
    assert named in refused["message"]


async def test_many_batches_are_not_looked_at_for_every_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand left documents a fifth of their rate, and all gateways' records, on the same loop, no time."""
    drivers: set[BatchDriver] = set()
    start_lines, model_shares, num_looks = BatchDriver._start_lines, BatchRun.model_shares, 0

    def noted(driver: BatchDriver) -> None:
        drivers.add(driver)
        start_lines(driver)

    def counted(run: BatchRun) -> ModelShares:
        nonlocal num_looks
        num_looks += 1
        return model_shares(run)

    monkeypatch.setattr(BatchDriver, "_start_lines", noted)
    never = asyncio.Event()
    async with batch_gateway(tmp_path, saying("hello", held_until=never), max_in_flight=2) as served:
        file_id = (await served.upload(chat_lines(4))).json()["id"]
        made = [(await served.create(file_id)).json()["id"] for _ in range(30)]
        for batch_id in made:
            await served.wait_for(batch_id, "in_progress")
        (driver,) = drivers
        monkeypatch.setattr(driver, "_ordered_s", math.inf)  # it is not for each line anyhow
        monkeypatch.setattr(BatchRun, "model_shares", counted)
        for _ in range(10):
            start_lines(driver)
        num_in_all = num_looks
    assert num_in_all <= 10 * 2  # at those whose lines take the places
