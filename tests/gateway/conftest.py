"""Fixtures for every test of the gateway."""

from collections.abc import AsyncIterator, Callable
from functools import lru_cache
from pathlib import Path

import msgspec
import pytest
from typing_extensions import override

from alignedserve.api.models import model_services
from alignedserve.batches import driver, run
from alignedserve.runtime.grammar.trials import GrammarTrials
from alignedserve.runtime.grammar.vocabulary import TokenTable
from tests.gateway.batches.batch_support import BatchGateway, batch_gateway
from tests.gateway.support import Gateway, gateway


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver of batches looks at its store now and then; tests wait for what it sees, not for its pauses."""
    for name in ("_POLL_S", "_SAVE_S", "_START_S", "_LOCK_S"):
        monkeypatch.setattr(driver, name, 0.02)
    monkeypatch.setattr(driver, "_FULL_S", 0.1)
    monkeypatch.setattr(run, "_POLL_S", 0.02)
    monkeypatch.setattr("alignedserve.batches.line_tracker._FIRST_PAUSE_S", 0.05)


class _LastingTrials(GrammarTrials):
    """Trials that outlive the gateway of a test: starting a process takes longer than most tests."""

    @override
    def close(self) -> None:
        """See GrammarTrials; the next gateway with this vocabulary goes on with the processes."""


@lru_cache(maxsize=3)
def _trials_of(table: bytes) -> GrammarTrials:
    return _LastingTrials(lambda: msgspec.msgpack.decode(table, type=TokenTable))


@pytest.fixture(autouse=True)
def _lasting_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    def trials(load: Callable[[], TokenTable]) -> GrammarTrials:
        return _trials_of(msgspec.msgpack.encode(load()))

    monkeypatch.setattr(model_services, "GrammarTrials", trials)


@pytest.fixture
async def served() -> AsyncIterator[Gateway]:
    """A gateway that says hello world."""
    async with gateway() as running:
        yield running


@pytest.fixture
async def driven(tmp_path: Path) -> AsyncIterator[BatchGateway]:
    """A gateway whose batches run."""
    async with batch_gateway(tmp_path) as running:
        yield running


@pytest.fixture
async def undriven(tmp_path: Path) -> AsyncIterator[BatchGateway]:
    """A gateway whose batches wait for a driver."""
    async with batch_gateway(tmp_path, is_driven=False) as running:
        yield running
