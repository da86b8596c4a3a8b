"""Two hosts as far as networks go: namespaces joined by a pair of virtual interfaces, and what can go wrong between."""

import os
import shutil
import subprocess
import time

import pytest


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


class TwoHosts:
    """Addresses are 10.123.45.N, or fd00:123::N where there is no other kind (`version` 6); N is 1 or 2."""

    def __init__(self, version: int = 4) -> None:
        self._version = version
        mark = f"as{os.getpid()}"
        self.names = (f"{mark}a", f"{mark}b")
        self._made: list[str] = []
        for name in self.names:
            run("ip", "netns", "add", name)
            self._made.append(name)
        run("ip", "link", "add", self.names[0], "type", "veth", "peer", "name", self.names[1])
        for number, name in enumerate(self.names):
            run("ip", "link", "set", name, "netns", name)
            network = ("24",) if version == 4 else ("64", "nodad")
            run("ip", "-n", name, "addr", "add", f"{self.address(number)}/{network[0]}", "dev", name, *network[1:])
            run("ip", "-n", name, "link", "set", name, "up")
            run("ip", "-n", name, "link", "set", "lo", "up")

    def address(self, number: int) -> str:
        """Return the address of host 0 or 1."""
        return f"10.123.45.{number + 1}" if self._version == 4 else f"fd00:123::{number + 1}"

    def cut(self) -> float:
        """Cut the cable, and return the time of it."""
        run("ip", "-n", self.names[0], "link", "set", self.names[0], "down")
        return time.monotonic()

    def mend(self) -> None:
        run("ip", "-n", self.names[0], "link", "set", self.names[0], "up")

    def drop_packets(self, share: float = 1.0) -> float:
        """Drop so many of the packets from now on, both ways, and return the time of it."""
        for chain in ("INPUT", "OUTPUT"):
            some = () if share == 1.0 else ("-m", "statistic", "--mode", "random", "--probability", str(share))
            run(*self.within(0), "iptables", "-A", chain, "-p", "tcp", *some, "-j", "DROP")
        return time.monotonic()

    def drop_none(self) -> None:
        run(*self.within(0), "iptables", "-F")

    def within(self, number: int) -> list[str]:
        """Return the words before a command that is to run on host 0 or 1."""
        return ["ip", "netns", "exec", self.names[number]]

    def close(self) -> None:
        for name in self._made:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def require_namespaces() -> None:
    """Skip the test where there can be no such hosts."""
    for tool in ("ip", "iptables"):
        if shutil.which(tool) is None:
            pytest.skip(f"needs `{tool}` (Debian: iproute2, iptables)")
    probe = f"as{os.getpid()}p"
    if subprocess.run(["ip", "netns", "add", probe], capture_output=True, check=False).returncode != 0:
        pytest.skip("needs the right to make network namespaces")
    subprocess.run(["ip", "netns", "del", probe], check=True)
