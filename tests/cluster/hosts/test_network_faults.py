"""The faults that rehearsals put into their network are what they say."""

import socket
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.harnesses.hosts.namespace_hosts import NamespaceHost, NamespaceHosts, obstacle
from tests.harnesses.hosts.network_faults import (
    SLOW_MBIT_S,
    DelayedPackets,
    cut_off,
    drop_port,
    heal,
    limit_rate,
    lose_packets,
    unlimit_rate,
)

REASON = obstacle()
SSH = 22
DELAY_S = 0.05
_MOST_TRIES = 200  # half of the packets come through: among so many both are sure, and ten are enough most often
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.alone,
    pytest.mark.skipif(REASON is not None, reason=f"no hosts can be made: {REASON}"),
]


@pytest.fixture(scope="module")
def hosts(hosts_folder: Path) -> Iterator[NamespaceHosts]:
    with NamespaceHosts(2, hosts_folder, [Path(entry) for entry in sys.path if Path(entry).is_dir()]) as made:
        yield made


def reach_s(address: str, port: int = SSH, timeout_s: float = 0.5) -> float | None:
    """Return how long a connection takes; None: there is none."""
    began_s = time.monotonic()
    try:
        socket.create_connection((address, port), timeout_s).close()
    except OSError:
        return None
    return time.monotonic() - began_s


def test_a_host_that_is_cut_off_is_silent_until_it_heals(hosts: NamespaceHosts) -> None:
    first, second = hosts.hosts
    cut_off(second)
    assert reach_s(second.address) is None
    assert reach_s(first.address) is not None
    heal(second)
    assert reach_s(second.address) is not None


def test_a_dropped_port_is_silent_and_no_other(hosts: NamespaceHosts) -> None:
    host = hosts.hosts[1]
    drop_port(host, SSH)
    assert reach_s(host.address) is None
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host.address, SSH + 1), 1.0)
    heal(host)


def test_a_slow_link_carries_its_rate_and_no_more(hosts: NamespaceHosts) -> None:
    host, num_bytes = hosts.hosts[1], 1_500_000
    with socket.create_server(("10.77.0.254", 0)) as listener, ThreadPoolExecutor() as pool:
        port = listener.getsockname()[1]

        def send() -> None:
            opened = f"exec 3<>/dev/tcp/10.77.0.254/{port}"
            host.run("bash", "-c", f"{opened}; head -c 1 <&3; head -c {num_bytes} /dev/zero >&3")

        limit_rate(host, SLOW_MBIT_S)
        sending = pool.submit(send)
        connection, _ = listener.accept()
        with connection:
            began_s, left = time.monotonic(), num_bytes
            connection.sendall(b"!")  # nothing comes before the clock runs, however late this process is
            while content := connection.recv(left):
                left -= len(content)
            assert left == 0
            assert time.monotonic() - began_s > 0.8 * (num_bytes * 8 / (SLOW_MBIT_S * 1e6))
        sending.result()
    assert "tbf" in host.run("tc", "qdisc", "show", "dev", "eth0").stdout
    unlimit_rate(host)
    assert "tbf" not in host.run("tc", "qdisc", "show", "dev", "eth0").stdout


def test_a_firewall_between_hosts_is_named_before_a_start(hosts: NamespaceHosts) -> None:
    first, second = hosts.hosts
    code = (
        f"import sys; sys.path.insert(0, {str(Path.cwd())!r})\n"
        "from alignedserve.cluster.nodes.admission import unreached\n"
        f"print(unreached({{'closed': ({second.address!r}, {SSH + 1}), 'open': ({second.address!r}, {SSH})}}))"
    )
    assert first.run(sys.executable, "-c", code).stdout.strip() == "{'closed': 'Connection refused'}"
    drop_port(second, SSH)
    said = first.run(sys.executable, "-c", code).stdout
    heal(second)
    assert "'open': 'no answer in 5 s: a firewall on the way?'" in said


def test_a_share_of_packets_is_lost(hosts: NamespaceHosts) -> None:
    host = hosts.hosts[1]
    lose_packets(host, 0.5)
    found: list[float | None] = []
    while len(found) < _MOST_TRIES and not 2 < found.count(None) < len(found):
        found.append(reach_s(host.address, timeout_s=0.1))  # before a first retry
    heal(host)
    assert 2 < found.count(None) < len(found)


def test_delayed_packets_arrive_whole_and_late(hosts: NamespaceHosts) -> None:
    host = hosts.hosts[1]
    before_s = reach_s(host.address)
    with DelayedPackets(host, DELAY_S):
        found_s = reach_s(host.address)
        assert before_s is not None
        assert found_s is not None
        assert found_s > DELAY_S
        # A long stream, both ways: in segments, with checksums that the kernel leaves to the last receiver.
        for sender, receiver in (hosts.hosts, hosts.hosts[::-1]):
            assert stream(sender, receiver) == 4 << 20
    assert reach_s(host.address) is not None


def stream(sender: NamespaceHost, receiver: NamespaceHost) -> int:
    """Return how many bytes arrive of as many as are sent, all the same."""
    receiving = (
        "import socket; c = socket.create_server(('0.0.0.0', 9000)).accept()[0]; n = 0\n"
        "while part := c.recv(1 << 16): n += part.count(7)\n"
        "print(n)"
    )
    sending = (
        "import socket, time\nfor _ in range(100):\n"
        f"    try: s = socket.create_connection(('{receiver.address}', 9000)); break\n"
        "    except OSError: time.sleep(0.05)\n"
        "s.sendall(bytes([7]) * (4 << 20))"
    )
    with ThreadPoolExecutor(1) as pool:
        received = pool.submit(receiver.run, sys.executable, "-c", receiving)
        assert sender.run(sys.executable, "-c", sending).returncode == 0
        return int(received.result().stdout)
