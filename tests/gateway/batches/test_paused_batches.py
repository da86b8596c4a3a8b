"""A batch that its owner pauses and resumes, over HTTP."""

import asyncio
from pathlib import Path

import pytest

from alignedserve.batches.repository import BatchSnapshot
from tests.gateway.batches.batch_support import BatchGateway, batch_gateway, eventually, slowly
from tests.gateway.support import error_of
from tests.support.batch_samples import chat_lines
from tests.support.waiting import holds

pytestmark = pytest.mark.slow


async def test_a_paused_batch_goes_on_when_it_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_looks = 0
    async with batch_gateway(tmp_path, slowly, max_in_flight=1) as served:
        active_batches = served.stores.repository.active_batches

        async def look() -> list[BatchSnapshot]:
            nonlocal num_looks
            num_looks += 1
            return await active_batches()

        batch = await served.submit(chat_lines(12))
        await eventually(lambda: _has_ended_lines(served, batch["id"]))
        paused = await served.client.post(f"/v1/batches/{batch['id']}/pause")
        assert paused.json()["alignedserve"]["paused"] == "paused by its owner"
        monkeypatch.setattr(served.stores.repository, "active_batches", look)
        await holds(lambda: num_looks >= 2)  # the driver has taken what it saw at the first; what runs may end
        num_submitted = len(served.backend.submitted)
        await asyncio.sleep(0.3)
        assert len(served.backend.submitted) == num_submitted < 12
        assert (await served.client.post(f"/v1/batches/{batch['id']}/resume")).status_code == 200
        done = await served.wait_for(batch["id"])
        again = await served.client.post(f"/v1/batches/{batch['id']}/pause")
    assert done["request_counts"] == {"total": 12, "completed": 12, "failed": 0}
    assert error_of(again, 409)["code"] == "batch_is_over"


async def _has_ended_lines(served: BatchGateway, batch_id: str) -> bool:
    counts = (await served.client.get(f"/v1/batches/{batch_id}")).json()["request_counts"]
    return bool(counts["completed"])
