"""Two API keys never share a cached block: the second finds nothing of the first, and all of its prompt is computed."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from alignedserve.api.backend.cluster import ClusterBackend
from alignedserve.api.backend.connection import ClusterConnection, ClusterLinks
from alignedserve.api.models.model_services import ModelCard
from alignedserve.api.prefix_hasher import PrefixHasher
from alignedserve.config.sections import GatewayConfig, PrefixCacheConfig, Topology
from alignedserve.gateway.app import build_app
from alignedserve.gateway.services import build_services
from alignedserve.keys.ring import CurrentKeys, KeyRing
from alignedserve.messages.handshake import Role
from alignedserve.runtime.model.served_model import ServedDeployment
from tests.gateway.support import tokenizer, tokenizer_folder
from tests.harnesses.clusters.in_process import RoomCluster, running, small_config
from tests.support.waiting import holds

pytestmark = pytest.mark.slow

PROMPT = list(range(40, 105))  # eight blocks of eight tokens, and one token


class Client:
    """A client of a gateway with API keys, before one colocated worker."""

    def __init__(self, http: httpx.AsyncClient, cluster: RoomCluster) -> None:
        self._http = http
        self._engine = cluster.engines["decode-0"]

    async def ask(self, key: str, **fields: Any) -> tuple[int, int]:
        """Return how many tokens of the prompt were cached, as the answer tells, and how many the worker computed."""
        before = self._engine.num_computed
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 1, "temperature": 0, **fields}
        answer = await self._http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
        assert answer.status_code == 200, answer.text
        cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return cached, self._engine.num_computed - before


@asynccontextmanager
async def client_of(folder: Path, **prefix_cache: Any) -> AsyncIterator[Client]:
    settings = PrefixCacheConfig(**prefix_cache)
    config = small_config(folder / "model", topology=Topology.COLOCATED, prefix_cache=settings)
    async with running(config, folder) as cluster:
        spec = cluster._process_spec(Role.GATEWAY, "gateway-1")
        hasher = PrefixHasher.of(ServedDeployment(cluster.served, 8, settings), key=spec.prefix_key())
        connection = ClusterConnection(ClusterLinks.of(spec))
        await connection.start()
        backend = ClusterBackend(connection, GatewayConfig(), prefix_hasher=hasher)
        backend.start()
        services = build_services(GatewayConfig(), keys=CurrentKeys(KeyRing(("mine", "yours"))), reply_to="gateway-1")
        services.add_model(ModelCard("tiny", tokenizer_folder(), 256), backend, tokenizer(), hasher)
        try:
            await holds(lambda: backend._router is not None)
            transport = httpx.ASGITransport(build_app(services))
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
                yield Client(http, cluster)
        finally:
            backend.stop()
            await connection.close()


async def test_a_second_key_pays_for_a_miss(tmp_path: Path) -> None:
    async with client_of(tmp_path) as client:
        assert await client.ask("mine") == (0, 65)
        assert await client.ask("mine") == (64, 1)
        assert await client.ask("yours") == (0, 65)
        assert await client.ask("yours") == (64, 1)


async def test_a_salt_keeps_requests_of_one_key_apart(tmp_path: Path) -> None:
    async with client_of(tmp_path) as client:
        assert await client.ask("mine", cache_salt="a") == (0, 65)
        assert await client.ask("mine", cache_salt="b") == (0, 65)
        assert await client.ask("mine") == (0, 65)
        assert await client.ask("mine", cache_salt="a") == (64, 1)
        assert await client.ask("yours", cache_salt="a") == (0, 65)


@pytest.mark.parametrize(
    ("settings", "second"), [({"shared_between_keys": True}, (64, 1)), ({"enabled": False}, (0, 65))]
)
async def test_configurations(tmp_path: Path, settings: dict[str, bool], second: tuple[int, int]) -> None:
    async with client_of(tmp_path, **settings) as client:
        assert await client.ask("mine") == (0, 65)
        assert await client.ask("yours") == second
