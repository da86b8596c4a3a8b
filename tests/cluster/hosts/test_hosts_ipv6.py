"""A cluster of two hosts that have nothing but IPv6 addresses: `ray start` on each, and `alignedserve up`."""

import asyncio
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from alignedserve.client.openai_client import CompletionApi, CompletionCall, CompletionOutcome, OpenAiClient
from alignedserve.cluster.ray_node import RAY_ENVIRONMENT
from tests.harnesses.hosts.namespace_hosts import BRIDGE, NamespaceHosts, call, obstacle
from tests.harnesses.hosts.rehearsal import PORT, SETTINGS, Rehearsal

REASON = obstacle()
ADDRESSES = ("fd77::1", "fd77::2")
TOKEN = secrets.token_hex(16)
START = "ray start --object-store-memory=83886080 --disable-usage-stats --include-log-monitor=false"
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.alone,
    pytest.mark.timeout(300),
    pytest.mark.skipif(REASON is not None, reason=f"no hosts can be made: {REASON}"),
]


@pytest.fixture
def ipv6(hosts_folder: Path) -> Iterator[Rehearsal]:
    """Two hosts without any IPv4 address but the loopback's."""
    hosts = NamespaceHosts(2, hosts_folder, [Path(entry) for entry in sys.path if Path(entry).is_dir()])
    made = Rehearsal(hosts, SETTINGS)
    made.prepare()
    with hosts:
        for host, address in zip(hosts.hosts, ADDRESSES, strict=True):
            for change in (
                ("-4", "address", "flush", "dev", "eth0"),
                ("-6", "address", "add", f"{address}/64", "dev", "eth0", "nodad"),
                ("-6", "route", "add", "default", "dev", "eth0"),
            ):
                assert host.run("ip", *change).returncode == 0
        call("ip", "-6", "address", "add", "fd77::fe/64", "dev", BRIDGE, "nodad")  # for those who ask
        yield made


def on_host(rehearsal: Rehearsal, index: int, command: str) -> str:
    variables = RAY_ENVIRONMENT | {"RAY_AUTH_TOKEN": TOKEN, "RAY_ADDRESS": f"[{ADDRESSES[0]}]:6379"}
    exported = " ".join(f"{name}={value}" for name, value in variables.items())
    return rehearsal.on_host(index, f"export {exported}; {command}", timeout_s=200.0)


async def chat(rehearsal: Rehearsal, url: str) -> str:
    body = {"model": "pocket", "messages": [{"role": "user", "content": "spell otter"}], "temperature": 0}
    async with OpenAiClient(url=url, api_key=rehearsal.api_key) as client:
        return (await client.complete(CompletionCall(CompletionApi.CHAT, body), CompletionOutcome())).text


def test_a_cluster_of_ipv6_alone_answers(ipv6: Rehearsal) -> None:
    head = f"{START} --head --port=6379 --include-dashboard=false --node-ip-address={ADDRESSES[0]}"
    assert "Ray runtime started" in on_host(ipv6, 0, f"env -u RAY_ADDRESS {head}")
    worker = f"{START} --address='[{ADDRESSES[0]}]:6379' --node-ip-address={ADDRESSES[1]}"
    assert "Ray runtime started" in on_host(ipv6, 1, f"env -u RAY_ADDRESS {worker}")
    options = " ".join(f"--set {setting}" for setting in SETTINGS)
    said = on_host(ipv6, 0, f"cd {Path.cwd()} && alignedserve up --nodes 2 {options}")
    for address in ADDRESSES:
        assert f"http://[{address}]:{PORT}" in said, said
        assert asyncio.run(chat(ipv6, f"http://[{address}]:{PORT}")) == "o t t e r"
