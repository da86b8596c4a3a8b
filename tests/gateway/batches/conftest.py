"""Commands of batches that neither pause long nor poll seldom."""

import sys

import pytest


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alignedserve.cli.batch.client._FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr("alignedserve.cli.batch.client._LONGEST_PAUSE_S", 0.02)
    for module in ("client", "commands"):
        monkeypatch.setattr(f"alignedserve.cli.batch.{module}.POLL_S", 0.05)
    monkeypatch.setattr(sys, "argv", sys.argv)
