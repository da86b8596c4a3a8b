"""A hub on this machine with one tiny model."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from alignedserve.runtime.model.hub.repository import Hub
from tests.support.servers.hub_samples import REPO, model_files
from tests.support.servers.hub_server import HubServer


@pytest.fixture
def server() -> Iterator[HubServer]:
    with HubServer() as running:
        running.add(REPO, model_files())
        yield running


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "hub"


@pytest.fixture
def hub(server: HubServer, cache: Path) -> Hub:
    return Hub(endpoint=server.url, cache=cache)


@pytest.fixture
def blobs(cache: Path) -> Callable[[], dict[str, int]]:
    """Names and sizes of what lies among the blobs."""

    def listed() -> dict[str, int]:
        return {path.name: path.stat().st_size for path in cache.glob("*/blobs/*")}

    return listed
