"""Faults of the network of namespace hosts: a host cut off, packets lost, packets delayed.

Packets are dropped by iptables inside the host's own network namespace, both ways, so neither end gets an answer or an
error. This kernel may have no `netem`, so delays are made by a relay of its own process (`delay_relay.py`) between the
host's interface and the bridge.
"""

import contextlib
import subprocess
import sys
from types import TracebackType

from alignedserve.core.errors import ResourceError
from alignedserve.evaluation.namespace_hosts import BRIDGE, NamespaceHost, call

_INTERFACE = "eth0"
_CHAINS = (("INPUT", "-i"), ("OUTPUT", "-o"))
_READY = "ready"


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
        module = "alignedserve.evaluation.delay_relay"
        relay = subprocess.Popen(  # noqa: S603
            [sys.executable, "-m", module, self._outer, self._inner, str(delay_s)], stdout=subprocess.PIPE, text=True
        )
        assert relay.stdout is not None, "a pipe was asked for"
        if relay.stdout.readline().strip() != _READY:
            _end(relay)
            raise ResourceError(f"the relay of {self._outer} did not start")
        call("ip", "link", "set", self._outer, "nomaster")
        call("ip", "link", "set", self._inner, "master", BRIDGE, "up")
        return relay


def _end(relay: "subprocess.Popen[str]") -> None:
    relay.kill()
    relay.communicate()


def _iptables(host: NamespaceHost, *arguments: str) -> None:
    done = host.run("iptables", "-w", *arguments)
    if done.returncode:
        raise ResourceError(f"iptables {' '.join(arguments)} on {host.name}: {done.stderr.strip()}")
