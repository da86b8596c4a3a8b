"""Links and block transfers between two hosts, in clear and encrypted, and what networks do to them.

The hosts are network namespaces, so each test needs root. Peers must be noticed as lost within their timeout.
"""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from alignedserve.process.tls import CertificateAuthority
from tests.harnesses.block_peer import PeerProcess
from tests.harnesses.link_peer import CREDENTIALS
from tests.harnesses.two_hosts import TwoHosts, require_namespaces

pytestmark = pytest.mark.slow

TIMEOUT_S = 1.5
PLUS_S = 1.5  # above the timeout: a loaded machine, and the rest of a piece
DELAY_S = 0.05
KINDS = ("tcp", "tls")


class Ends:
    """Processes on the two hosts, ended with the test."""

    def __init__(self, hosts: TwoHosts) -> None:
        self.hosts = hosts
        self._started: list[PeerProcess] = []

    def start(self, host: int, module: str, *arguments: str) -> PeerProcess:
        process = PeerProcess(*arguments, prefix=self.hosts.within(host), module=f"tests.harnesses.{module}")
        self._started.append(process)
        return process

    def relay(self, address: str) -> str:
        """Return where the address of host 1 is reached over a long way."""
        kind, _, place = address.partition(":")
        host, _, port = place.rpartition(":")
        relay = self.start(1, "slow_relay", host, host, port, str(DELAY_S))
        return f"{kind}:{host}:{relay.said}"

    def close(self) -> None:
        for process in self._started:
            process.close()
        self.hosts.close()


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    authority = CertificateAuthority.new("test")
    for name in ("prefill-0", "decode-0", "router"):
        (tmp_path / name).write_bytes(msgspec.json.encode(authority.issue(name)))
    monkeypatch.setenv(CREDENTIALS, str(tmp_path))
    return str(request.param)


@pytest.fixture(params=[4])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    require_namespaces()
    made = Ends(TwoHosts(request.param))
    yield made
    made.close()


def owner_on(ends: Ends, kind: str, folder: Path) -> str:
    there = ends.start(1, "block_peer", "owner", f"{kind}:{ends.hosts.address(1)}:0", str(TIMEOUT_S), str(folder))
    return there.said


def rounds(process: PeerProcess, count: int) -> None:
    """Wait for so many rounds of transfers, whose bytes the process compares."""
    said = [process.said, *(process.line() for _ in range(count - 1))]
    assert said == ["round"] * count


def lost_at_s(process: PeerProcess) -> float:
    while not (said := process.line()).startswith("lost"):
        assert said, "the process has ended"
    return float(said.split()[1])


def until(process: PeerProcess, wanted: Sequence[str]) -> None:
    while (said := process.line()) not in wanted:
        assert said, "the process has ended"


# --- block transfers


@pytest.mark.parametrize("ends", [4, 6], indirect=True, ids=["IPv4", "IPv6 alone"])
def test_blocks_arrive_whole(ends: Ends, kind: str, tmp_path: Path) -> None:
    client = ends.start(0, "block_peer", "client", owner_on(ends, kind, tmp_path), str(TIMEOUT_S), "decode-0", "tcp")
    rounds(client, 2)


@pytest.mark.parametrize("how", ["packets dropped", "cable cut"])
def test_a_peer_that_is_cut_off_in_the_middle_of_a_transfer_is_lost(
    ends: Ends, kind: str, how: str, tmp_path: Path
) -> None:
    address = owner_on(ends, kind, tmp_path)
    client = ends.start(0, "block_peer", "client", address, str(TIMEOUT_S), "decode-0", "tcp")
    rounds(client, 1)
    began_s = ends.hosts.cut() if how == "cable cut" else ends.hosts.drop_packets()
    assert lost_at_s(client) - began_s < TIMEOUT_S + PLUS_S
    ends.hosts.mend()
    ends.hosts.drop_none()
    rounds(ends.start(0, "block_peer", "client", address, str(TIMEOUT_S), "decode-0", "tcp"), 1)


def test_blocks_arrive_whole_though_some_packets_are_lost(ends: Ends, kind: str, tmp_path: Path) -> None:
    address = owner_on(ends, kind, tmp_path)
    ends.hosts.drop_packets(0.02)
    rounds(ends.start(0, "block_peer", "client", address, "20", "decode-0", "tcp"), 1)


def test_blocks_arrive_whole_over_a_long_way(ends: Ends, kind: str, tmp_path: Path) -> None:
    far = ends.relay(owner_on(ends, kind, tmp_path))
    rounds(ends.start(0, "block_peer", "client", far, "5", "decode-0", "tcp"), 1)


# --- links


def linked(ends: Ends, kind: str, *, is_far: bool = False) -> tuple[PeerProcess, PeerProcess]:
    """A router on host 1, and a decode worker on host 0 that sends it messages."""
    router = ends.start(1, "link_peer", "listen", f"{kind}:{ends.hosts.address(1)}:0", str(TIMEOUT_S), "router")
    address = ends.relay(router.said) if is_far else router.said
    dialler = ends.start(0, "link_peer", "dial", address, str(TIMEOUT_S), "decode-0")
    assert dialler.said == "linked"
    until(router, ["message 100"])
    return router, dialler


@pytest.mark.parametrize("ends", [6], indirect=True, ids=["IPv6 alone"])
def test_messages_arrive_in_order(ends: Ends, kind: str) -> None:
    linked(ends, kind)


@pytest.mark.parametrize("how", ["packets dropped", "cable cut"])
def test_a_peer_that_is_cut_off_is_noticed_by_both_and_comes_back(ends: Ends, kind: str, how: str) -> None:
    router, dialler = linked(ends, kind)
    began_s = ends.hosts.cut() if how == "cable cut" else ends.hosts.drop_packets()
    for end in (router, dialler):
        assert lost_at_s(end) - began_s < TIMEOUT_S + PLUS_S
    ends.hosts.mend()
    ends.hosts.drop_none()
    until(dialler, ["linked"])
    until(router, ["message 100"])


def test_a_link_holds_while_a_tenth_of_the_packets_is_lost(ends: Ends, kind: str) -> None:
    router, _ = linked(ends, kind)
    ends.hosts.drop_packets(0.1)
    began_s = time.monotonic()
    until(router, ["message 400"])  # in order, by the peer's own check
    assert time.monotonic() - began_s < 30.0


def test_a_link_holds_over_a_long_way(ends: Ends, kind: str) -> None:
    router, _ = linked(ends, kind, is_far=True)
    until(router, ["message 300"])
