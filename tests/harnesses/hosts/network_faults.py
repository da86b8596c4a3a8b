"""Faults of the network of namespace hosts: a host cut off, packets lost or delayed, little bandwidth.

Packets are dropped by iptables inside the host's own network namespace, both ways, so neither end gets an answer or an
error. Bandwidth is limited by a token bucket (`tc` tbf) at both ends of the host's link. This kernel may have no
`netem`, so delays are made by a relay of its own process (`delay_relay.py`) between the host's interface and the
bridge.
"""

import contextlib
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from alignedserve.core.errors import ResourceError
from tests.harnesses.hosts.namespace_hosts import BRIDGE, NamespaceHost, NamespaceHosts, call

_INTERFACE = "eth0"
_CHAINS = (("INPUT", "-i"), ("OUTPUT", "-o"))
_READY = "ready"
LOST_SHARE = 0.1
DELAY_S = 0.05
SLOW_MBIT_S = 20
_BURST_BYTES = 32 * 1024  # at full speed
_QUEUE_MS = 100  # that a packet waits at most; more are dropped, as switches do


def cut_off(host: NamespaceHost) -> None:
    """Drop every packet from and to the host, as a pulled cable does. Its own processes reach each other."""
    for chain, direction in _CHAINS:
        _iptables(host, "-A", chain, direction, _INTERFACE, "-j", "DROP")


def lose_packets(host: NamespaceHost, share: float) -> None:
    """Drop this share of the packets that reach the host, at random."""
    match = ("-m", "statistic", "--mode", "random", "--probability", str(share))
    _iptables(host, "-A", "INPUT", "-i", _INTERFACE, *match, "-j", "DROP")


def drop_port(host: NamespaceHost, port: int) -> None:
    """Drop what comes to this TCP port of the host, as a firewall between hosts does."""
    _iptables(host, "-A", "INPUT", "-i", _INTERFACE, "-p", "tcp", "--dport", str(port), "-j", "DROP")


def heal(host: NamespaceHost) -> None:
    """Drop nothing any more."""
    for chain, _ in _CHAINS:
        _iptables(host, "-F", chain)


def limit_rate(host: NamespaceHost, mbit_s: float) -> None:
    """Let the host's link carry so much and no more, in each direction."""
    limit = ("rate", f"{mbit_s:g}mbit", "burst", str(_BURST_BYTES), "latency", f"{_QUEUE_MS}ms")
    call("tc", "qdisc", "replace", "dev", f"{BRIDGE}-{host.name}", "root", "tbf", *limit)
    done = host.run("tc", "qdisc", "replace", "dev", _INTERFACE, "root", "tbf", *limit)
    if done.returncode:
        unlimit_rate(host)
        raise ResourceError(f"tc on {host.name}: {done.stderr.strip()}")


def unlimit_rate(host: NamespaceHost) -> None:
    """Let the host's link carry what it can."""
    call("tc", "qdisc", "delete", "dev", f"{BRIDGE}-{host.name}", "root")
    host.run("tc", "qdisc", "delete", "dev", _INTERFACE, "root")


class DelayedPackets:
    """Delays every packet that leaves the host, until it is closed; used as a context manager."""

    def __init__(self, host: NamespaceHost, delay_s: float) -> None:
        self._outer = f"{BRIDGE}-{host.name}"
        self._inner = f"{BRIDGE}d-{host.name}"
        call("ip", "tuntap", "add", "dev", self._inner, "mode", "tap", "vnet_hdr")
        try:
            self._relay = self._start(delay_s)
        except BaseException:
            call("ip", "link", "delete", self._inner)
            raise

    def __enter__(self) -> "DelayedPackets":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Connect the host to the bridge directly again."""
        _end(self._relay)
        call("ip", "link", "delete", self._inner)
        with contextlib.suppress(ResourceError):  # a host that was killed meanwhile has no interface
            call("ip", "link", "set", self._outer, "master", BRIDGE)

    def _start(self, delay_s: float) -> "subprocess.Popen[str]":
        module = "tests.harnesses.hosts.delay_relay"
        relay = subprocess.Popen(
            [sys.executable, "-m", module, self._outer, self._inner, str(delay_s)], stdout=subprocess.PIPE, text=True
        )
        assert relay.stdout is not None, "a pipe was asked for"
        if relay.stdout.readline().strip() != _READY:
            _end(relay)
            raise ResourceError(f"the relay of {self._outer} did not start")
        call("ip", "link", "set", self._outer, "nomaster")
        call("ip", "link", "set", self._inner, "master", BRIDGE, "up")
        return relay


class HostFault(Protocol):
    """A fault of a rehearsal. `begin` once, `end` once."""

    def begin(self) -> str:
        """Bring it about; return what happened, in a sentence."""

    def end(self) -> None:
        """Undo it."""


class KilledHost:
    """The last host without power: everything on it ends at once."""

    def __init__(self, hosts: NamespaceHosts) -> None:
        self._hosts, self._host = hosts, hosts.hosts[-1]

    def begin(self) -> str:
        """See HostFault."""
        self._hosts.kill(self._host)
        return f"{self._host} is killed with all its processes"

    def end(self) -> None:
        """Boot it again."""
        self._hosts.boot(self._host)


class CutHost:
    """The last host without network, on which everything goes on."""

    def __init__(self, hosts: NamespaceHosts) -> None:
        self._host = hosts.hosts[-1]

    def begin(self) -> str:
        """See HostFault."""
        cut_off(self._host)
        return f"{self._host} is cut off: every packet is dropped, both ways"

    def end(self) -> None:
        """See HostFault."""
        heal(self._host)


@dataclass(frozen=True, slots=True)
class SpoiltLinks:
    """A fault of every host's link."""

    hosts: Sequence[NamespaceHost]
    said: str
    spoil: Callable[[NamespaceHost], None]
    mend: Callable[[NamespaceHost], None]

    def begin(self) -> str:
        """See HostFault."""
        for host in self.hosts:
            self.spoil(host)
        return self.said

    def end(self) -> None:
        """See HostFault."""
        for host in self.hosts:
            self.mend(host)


def lossy_network(hosts: NamespaceHosts) -> HostFault:
    """Return the fault that every host loses 10 % of the packets that reach it."""
    said = f"every host loses {LOST_SHARE:.0%} of the packets that reach it"
    return SpoiltLinks(hosts.hosts, said, lambda host: lose_packets(host, LOST_SHARE), heal)


def slow_network(hosts: NamespaceHosts) -> HostFault:
    """Return the fault that every host's link carries 20 Mbit/s in each direction."""
    said = f"every host's link carries {SLOW_MBIT_S} Mbit/s in each direction"
    return SpoiltLinks(hosts.hosts, said, lambda host: limit_rate(host, SLOW_MBIT_S), unlimit_rate)


class DelayingNetwork:
    """Every packet between two hosts takes 50 ms."""

    def __init__(self, hosts: NamespaceHosts) -> None:
        self._hosts = hosts.hosts
        self._delays: list[DelayedPackets] = []

    def begin(self) -> str:
        """See HostFault."""
        self._delays = [DelayedPackets(host, DELAY_S) for host in self._hosts]
        return f"every packet between two hosts takes {DELAY_S * 1e3:.0f} ms longer"

    def end(self) -> None:
        """See HostFault."""
        for delay in self._delays:
            delay.close()


FAULTS: Mapping[str, Callable[[NamespaceHosts], HostFault]] = {
    "kill": KilledHost,
    "cut": CutHost,
    "loss": lossy_network,
    "delay": DelayingNetwork,
    "slow": slow_network,
}


def _end(relay: "subprocess.Popen[str]") -> None:
    relay.kill()
    relay.communicate()


def _iptables(host: NamespaceHost, *arguments: str) -> None:
    done = host.run("iptables", "-w", *arguments)
    if done.returncode:
        raise ResourceError(f"iptables {' '.join(arguments)} on {host.name}: {done.stderr.strip()}")
