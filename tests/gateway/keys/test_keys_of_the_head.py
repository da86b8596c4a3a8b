"""Gateways of other hosts go by the keys of the head's file, without a file of their own."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from alignedserve.api.backend.connection import ClusterLinks
from alignedserve.batches.location import BatchLocation, SharedState
from alignedserve.batches.remote import state_client
from alignedserve.config.sections import BatchesConfig, GatewayConfig
from alignedserve.gateway.api_keys import HeadKeys
from alignedserve.gateway.server import GatewayServer
from alignedserve.keys.edit import change_keys, revoked
from alignedserve.keys.file import KeyRow, SecretRow
from alignedserve.keys.ring import CurrentKeys, digest_of
from alignedserve.keys.watch import KeysFile, KeysWatch
from alignedserve.messages.handshake import Role
from tests.gateway.deployment_support import deployed
from tests.support.servers.state_links import StateHosts, identity, state_hosts
from tests.support.waiting import holds, holds_async

GATEWAYS = ("gateway-1", "gateway-2")
MANY = 6000  # a text of several parts


def key(name: str) -> KeyRow:
    return KeyRow(name, (SecretRow(digest_of(name).hex()),), tokens_per_minute=10**9, models=(f"model-of-{name}", "*"))


@asynccontextmanager
async def following(hosts: StateHosts, ports: Sequence[int], **config: Any) -> AsyncIterator[list[str]]:
    """Two gateways of another host, which share the head's state; their addresses."""
    state = SharedState(BatchLocation(BatchesConfig(), None, None), GATEWAYS)
    servers = [
        GatewayServer(
            links=ClusterLinks(identity(name, Role.GATEWAY), name, hosts.other_book),
            deployments=[deployed()],
            config=GatewayConfig(port=port, **config),
            state=state,
        )
        for name, port in zip(GATEWAYS, ports, strict=True)
    ]
    try:
        for server in servers:
            await server.start()
        yield [server.url for server in servers]
    finally:
        for server in servers:
            await server.stop()


async def test_a_change_on_the_heads_host_holds_on_other_hosts(
    tmp_path: Path, unused_tcp_port_factory: Any, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys.yaml"
    change_keys(path, lambda _: (key("a"), key("b")))
    async with state_hosts(tmp_path) as hosts:
        watch = KeysWatch(CurrentKeys(), (), KeysFile(path), hosts.keys)
        await watch.look()
        watching = asyncio.create_task(watch.run())
        ports = (unused_tcp_port_factory(), unused_tcp_port_factory())
        elsewhere = str(tmp_path / "not" / "on" / "this" / "host.yaml")
        async with following(hosts, ports, keys_file=elsewhere) as urls, httpx.AsyncClient() as client:

            async def statuses(secret: str) -> list[int]:
                headers = {"authorization": f"Bearer {secret}"}
                return [(await client.get(f"{url}/v1/models", headers=headers)).status_code for url in urls]

            async def are(secret: str, status: int) -> bool:
                return await statuses(secret) == [status] * 2

            assert [await statuses(secret) for secret in ("a", "b", "c")] == [[200] * 2, [200] * 2, [401] * 2]
            change_keys(path, lambda rows: (*revoked(rows, "b"), *(key(f"key-{n}") for n in range(MANY)), key("c")))
            began_s = time.monotonic()
            await holds_async(lambda: are("c", 200))
            assert time.monotonic() - began_s < 5.0  # a second or so on a machine that is not overloaded
            assert [await statuses(secret) for secret in ("a", "b")] == [[200] * 2, [401] * 2]
            path.write_text("keys: [{name: a, weight: -1}]")
            await holds(lambda: "weight" in caplog.text)
            assert [await statuses(secret) for secret in ("a", "b", "c")] == [[200] * 2, [401] * 2, [200] * 2]
        watching.cancel()


async def test_a_host_may_have_a_file_of_its_own(tmp_path: Path, unused_tcp_port_factory: Any) -> None:
    path = tmp_path / "keys.yaml"
    change_keys(path, lambda _: (key("own"),))
    async with state_hosts(tmp_path) as hosts:
        hosts.keys.take([key("heads")])
        ports = (unused_tcp_port_factory(), unused_tcp_port_factory())
        own = following(hosts, ports, keys_file=str(path), keys_from="host")
        async with own as urls, httpx.AsyncClient() as client:
            for secret, status in (("own", 200), ("heads", 401)):
                answer = await client.get(f"{urls[0]}/v1/models", headers={"x-api-key": secret})
                assert answer.status_code == status


async def test_while_the_head_is_away_the_keys_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with state_hosts(tmp_path) as hosts:
        keys = CurrentKeys()
        watch = KeysWatch(keys, (), HeadKeys(hosts.client()))
        assert keys.ring.find(None, 0.0) is None
        assert not await watch.look()  # the head has none yet
        hosts.keys.take([key("a")])
        assert await watch.look()
        assert not await watch.look()
        monkeypatch.setattr(state_client, "_LINK_S", 0.2)  # it is not to come back meanwhile
        await hosts.stop()
        for _ in range(2):
            assert not await watch.look()
        assert keys.ring.find("a", 0.0) is not None
        hosts.keys.take([key("b")])
        await hosts.start()
        await holds_async(watch.look)
        assert [keys.ring.find(secret, 0.0) is None for secret in ("a", "b")] == [True, False]
    assert [record.message for record in caplog.records if "keys stay" in record.message] == [
        "the keys stay as they were: the head's keys: The head, which keeps files and batches, cannot be reached now."
    ]
