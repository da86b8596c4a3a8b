"""Applies to every test of components."""

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
