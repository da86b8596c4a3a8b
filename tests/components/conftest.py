"""Applies to every test of components."""

import asyncio
from collections.abc import AsyncIterator

import pytest


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router tells gateways of its cluster once a second, which is what most tests would wait for.

    With such ticks the last notes of a call come sooner as well.
    """
    monkeypatch.setattr("alignedserve.process.logic_driver.TICK_S", 0.05)
    monkeypatch.setattr("router.logic._TICKS_PER_STATUS", 1)
    monkeypatch.setattr("alignedserve.worker_core.iteration_log._REPORT_PAUSE_S", 0.05)
    for module in ("exporter", "timeline"):
        monkeypatch.setattr(f"alignedserve.api.timelines.{module}.LAST_NOTES_S", 0.4)


@pytest.fixture(autouse=True)
async def faults_of_the_loop() -> AsyncIterator[list[str]]:
    """Whatever goes wrong in a callback or task would end a real process; a test that expects it clears them."""
    faults: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(str(context)))
    yield faults
    assert faults == []
