"""A web page of any name reads nothing of a gateway that anyone on its host may call."""

import json
from typing import Any

import pytest

from alignedserve.config.sections import GatewayConfig
from alignedserve.core.errors import ConfigError
from tests.gateway.connections.test_limits import rest_of, serving
from tests.gateway.support import gateway
from tests.support.marks import each

ROUTES = ("/", "/dashboard", "/health", "/metrics", "/v1/models", "/v1/files", "/v1/alignedserve/live", "/nowhere")
_LOCAL = ("localhost", "LOCALHOST:8000", "127.0.0.1", "127.0.0.1:8000", "[::1]:8000", "[::1]", "192.168.0.7:80")
_FOREIGN = ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example", "localhost.", "")
_MADE_UP = ("evil@127.0.0.1", "127.0.0.1:80@evil", "127.0.0.1/", "[evil]", "127.1", "a b", "localhost:99999999", "::1")


@each(("host", "is_allowed"), [*((host, True) for host in _LOCAL), *((host, False) for host in (*_FOREIGN, *_MADE_UP))])
async def test_a_host_is_an_address_or_localhost_on_every_route(host: str, is_allowed: bool) -> None:
    async with gateway() as served:
        for route in ROUTES:
            answer = await served.client.get(route, headers={"host": host})
            assert (answer.status_code == 403) is not is_allowed, route
            if not is_allowed:
                assert answer.json()["error"]["code"] == "host_not_allowed"
                assert not host or host not in answer.text


@each(
    ("origin", "is_allowed"),
    [
        *((f"http://{host}", True) for host in _LOCAL),
        *((f"https://{host}", False) for host in (*_FOREIGN, *_MADE_UP)),
        ("null", False),
        ("file://", False),
        ("chrome-extension://abcdef", False),
        ("app://localhost", True),
    ],
)
async def test_so_is_an_origin(origin: str, is_allowed: bool) -> None:
    async with gateway() as served:
        chat = await served.chat(headers={"origin": origin})
        read = await served.client.get("/v1/models", headers={"origin": origin})
    assert (chat.status_code, read.status_code) == ((200, 200) if is_allowed else (403, 403))


@each(
    ("config", "headers"),
    [
        (
            {"host_names": ("box.example", "abcdef")},
            {"host": "Box.Example:8000", "origin": "chrome-extension://abcdef"},
        ),
        ({"cors_origins": ("https://chat.example",)}, {"origin": "https://chat.example"}),
        ({"cors_origins": ("*",)}, {"origin": "null"}),
        ({"host": "0.0.0.0"}, {"host": "box", "origin": "https://a.example"}),
        ({"api_keys": ("right",)}, {"host": "box", "origin": "https://a.example", "authorization": "Bearer right"}),
    ],
)
async def test_further_names_are_configured_and_keys_need_none(config: dict[str, Any], headers: dict[str, str]) -> None:
    async with gateway(**config) as served:
        assert (await served.chat(headers=headers)).status_code == 200


async def test_pages_of_any_origin_may_not_call_by_a_name_of_their_own() -> None:
    async with gateway(cors_origins=("*",)) as served:
        answer = await served.chat(headers={"host": "evil.example", "origin": "http://evil.example"})
    assert answer.status_code == 403


@each("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
async def test_every_way_to_listen_on_loopback_counts(host: str) -> None:
    async with gateway(host=host) as served:
        assert (await served.client.get("/health", headers={"host": "evil.example"})).status_code == 403


@each("name", ["box:8000", "http://box", "Box", "*", ""])
def test_names_are_configured_without_a_port(name: str) -> None:
    with pytest.raises(ConfigError, match="host_names"):
        GatewayConfig(host_names=(name,))


@each(
    ("head", "status"),
    [
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\n", 200),
        (b"GET /health HTTP/1.0\r\n", 200),
        (b"GET /health HTTP/1.1\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n", 400),
        (b"GET http://localhost/health HTTP/1.1\r\nHost: evil.example\r\n", 403),
    ],
)
async def test_a_request_of_http_1_1_has_one_host(head: bytes, status: int) -> None:
    async with serving() as connect:
        reader, writer = await connect()
        writer.write(head + b"Connection: close\r\n\r\n")
        answer = await rest_of(reader)
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    if status == 400:
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_host"
