"""Gateways with files and batches."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.gateway.batches.batch_support import BatchGateway, batch_gateway


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
