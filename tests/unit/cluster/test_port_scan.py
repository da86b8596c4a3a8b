"""The scan of a cluster's ports: purposes and refusals; the documentation says the same."""

import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from tests.harnesses.hosts.port_scan import (
    GATEWAY,
    LINKS,
    LOOPBACK,
    RAY_PORTS,
    RAY_WORKER_PORTS,
    RAY_WORKERS,
    Listener,
    listeners_of,
    probe,
    purpose_of,
)
from tests.support.marks import each

NODE = "10.77.0.2"
LISTING = """\
LISTEN 0      128          127.0.0.1:6384       0.0.0.0:*    users:(("ray::DashboardA",pid=107,fd=38))
LISTEN 0      4096                 *:10819            *:*    users:(("ray::DecodeActor",pid=214,fd=26))
LISTEN 0      128          10.77.0.2:41234      0.0.0.0:*    users:(("ray::DecodeActo",pid=214,fd=30))
LISTEN 0      4096 [::ffff:10.77.0.2]:10001            *:*
"""


def test_a_listing_is_read_with_programs_where_they_are_known() -> None:
    assert listeners_of(LISTING) == [
        Listener("127.0.0.1", 6384, "ray::DashboardA"),
        Listener("*", 10819, "ray::DecodeActor"),
        Listener(NODE, 41234, "ray::DecodeActo"),
        Listener("[::ffff:10.77.0.2]", 10001, ""),
    ]
    assert listeners_of("garbage\n\n") == []


@each(
    ("listener", "purpose"),
    [
        (Listener("127.0.0.1", 5000, "x"), LOOPBACK),
        (Listener("[::ffff:127.0.0.1]", 10001, "x"), LOOPBACK),
        (Listener("*", 6379, "gcs_server"), RAY_PORTS[6379]),
        (Listener("*", 10500, "ray::IDLE"), RAY_WORKERS),
        (Listener(NODE, 8000, "ray::GatewayActo"), GATEWAY),
        (Listener(NODE, 41234, "ray::DecodeActor"), LINKS),
        (Listener(NODE, 41234, "python"), None),
        (Listener("10.1.1.1", 41234, "ray::DecodeActor"), None),  # another network of the host
        (Listener("*", 41234, "ray::DecodeActor"), None),
        (Listener("0.0.0.0", 8000, "ray::GatewayActo"), None),
    ],
)
def test_a_listener_has_a_purpose_or_no_business_there(listener: Listener, purpose: str | None) -> None:
    assert purpose_of(listener, NODE, 8000) == purpose


def test_the_documentation_lists_every_port() -> None:
    page = (Path(__file__).parents[3] / "docs" / "hosts.md").read_text(encoding="utf-8")
    table = page.partition("## Ports")[2].partition("\n## ")[0]
    workers = f"{RAY_WORKER_PORTS.start} to {RAY_WORKER_PORTS.stop - 1}"
    assert [port for port in (*map(str, RAY_PORTS), workers, "`gateway.port`") if f"| {port} |" not in table] == []


@contextmanager
def server(reply: bytes) -> Iterator[int]:
    """Listen and send every connection this reply."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:

        def answer() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(64)
                    connection.sendall(reply)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(5.0)


@each(
    ("reply", "is_refused"),
    [
        (b"", True),
        (b"HTTP/1.1 401 Unauthorized\r\n\r\n", True),
        (b"HTTP/1.0 200 OK\r\n\r\nsecrets", False),
        (b"\x15\x03\x03\x00\x02\x02\x28", True),  # a TLS alert
        (b"\x00\x00\x00\x04\x00\x00\x00\x00\x00", True),  # the settings of HTTP/2
        (b"\x00\x00\x01\x00\x00\x00\x00\x00\x01x", False),  # data of HTTP/2
        (b"+PONG\r\n", False),
    ],
)
def test_an_answer_is_no_refusal(reply: bytes, is_refused: bool) -> None:
    with server(reply) as port:
        found = {one.kind: one.is_refused for one in probe("127.0.0.1", port)}
    assert found["garbage"] is found["HTTP GET"] is is_refused
