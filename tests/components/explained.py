"""Gateways with HTTP over the rooms of a small cluster, all on one event loop."""

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from alignedserve.api.backend.connection import ClusterLinks
from alignedserve.config.sections import GatewayConfig, Observing
from alignedserve.gateway.server import GatewayServer
from alignedserve.messages.handshake import Role
from alignedserve.process.links import Identity
from alignedserve.runtime.model.served_model import ServedDeployment
from tests.gateway.support import EOS, write_tokenizer
from tests.harnesses.clusters.in_process import RoomCluster, running, small_config
from tests.support.models.tiny_llama import TINY_LLAMA
from tests.support.ports import free_port


@dataclass
class Explained:
    """Rooms, and clients of their gateways."""

    rooms: RoomCluster
    clients: list[httpx.AsyncClient]

    async def complete(self, *, gateway: int = 0, headers: dict[str, str] | None = None, **fields: Any) -> Any:
        body = {"model": "model", "prompt": "hello world", "max_tokens": 6, "ignore_eos": True, **fields}
        response = await self.clients[gateway].post("/v1/completions", json=body, headers=headers)
        assert response.status_code == 200, response.text
        return response.json()

    async def explain(self, wanted: str, *, gateway: int = 0, headers: dict[str, str] | None = None) -> httpx.Response:
        return await self.clients[gateway].get(f"/v1/alignedserve/requests/{wanted}", headers=headers)


@asynccontextmanager
async def explained(
    folder: Path,
    *,
    num_gateways: int = 1,
    observing: Observing | None = None,
    api_keys: tuple[str, ...] = (),
    **config: Any,
) -> AsyncIterator[Explained]:
    """Serve a model of random weights; its name is that of its folder, `model`."""
    cluster_config = small_config(folder / "model", **config)
    (folder / "model" / "config.json").write_text(json.dumps({**TINY_LLAMA, "vocab_size": 512, "eos_token_id": EOS}))
    write_tokenizer(folder / "model")
    async with AsyncExitStack() as stack:
        rooms = await stack.enter_async_context(running(cluster_config, folder))
        clients = []
        for index in range(1, num_gateways + 1):  # gateway-0 is that of the rooms
            server = _gateway(rooms, f"gateway-{index}", observing, api_keys)
            await server.start()
            stack.push_async_callback(server.stop)
            clients.append(await stack.enter_async_context(httpx.AsyncClient(base_url=server.url, timeout=60)))
            await _await_ready(clients[-1])
        yield Explained(rooms, clients)


def _gateway(rooms: RoomCluster, name: str, observing: Observing | None, api_keys: tuple[str, ...]) -> GatewayServer:
    config = rooms.config
    identity = Identity(Role.GATEWAY, name, b"t" * 32, config.links.peer_timeout_s)
    links = ClusterLinks(identity, name, rooms.addresses)
    deployment = ServedDeployment(rooms.served, config.engine.block_size, config.prefix_cache)
    return GatewayServer(
        links=links,
        deployments=[deployment],
        config=GatewayConfig(port=free_port()),
        api_keys=api_keys,
        observing=observing,
    )


async def _await_ready(client: httpx.AsyncClient) -> None:
    for _ in range(2000):
        if (await client.get("/ready")).status_code == 200:
            return
    raise AssertionError("the gateway is not ready")
