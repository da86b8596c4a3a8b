"""Fixtures for every test of the gateway."""

import pytest

from alignedserve.batches import driver, run


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver of batches looks at its store now and then; tests wait for what it sees, not for its pauses."""
    for name in ("_POLL_S", "_SAVE_S", "_START_S", "_LOCK_S"):
        monkeypatch.setattr(driver, name, 0.02)
    monkeypatch.setattr(driver, "_FULL_S", 0.1)
    monkeypatch.setattr(run, "_POLL_S", 0.02)
    monkeypatch.setattr("alignedserve.batches.line_tracker._FIRST_PAUSE_S", 0.05)
