"""HEAD requests, and pages of other origins."""

import pytest

from alignedserve.config.loading import load_config
from alignedserve.core.errors import ConfigError
from tests.gateway.support import Gateway, gateway
from tests.support.marks import each

PAGE = "https://chat.example"


@each("path", ["/", "/health", "/version", "/v1/models", "/v1/models/tiny", "/metrics"])
async def test_head_answers_as_get_without_the_body(path: str) -> None:
    async with gateway() as served:
        whole, head = await served.client.get(path), await served.client.head(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == whole.headers["content-type"]


async def test_head_of_what_is_not_there_or_needs_a_key() -> None:
    async with gateway(api_keys=("right",)) as served:
        right = {"authorization": "Bearer right"}
        statuses = [
            (await served.client.head("/v1/models")).status_code,
            (await served.client.head("/v1/models/other", headers=right)).status_code,
            (await served.client.head("/v1/chat/completions", headers=right)).status_code,
        ]
    assert statuses == [401, 404, 405]


@each(
    ("path", "allowed"),
    [
        ("/v1/chat/completions", "POST"),
        ("/v1/models", "GET, HEAD"),
        ("/v1/files", "GET, HEAD, POST"),
        ("/v1/conversations/conv_1", "DELETE, GET, HEAD, POST"),
    ],
)
async def test_other_methods_are_refused_with_those_there_are(path: str, allowed: str) -> None:
    async with gateway() as served:
        answer = await served.client.put(path)
    assert (answer.status_code, answer.headers["allow"]) == (405, allowed)


async def preflight(served: Gateway, origin: str) -> tuple[int, str | None]:
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    answer = await served.client.options("/v1/chat/completions", headers={"origin": origin, **asked})
    return answer.status_code, answer.headers.get("access-control-allow-origin")


async def test_no_other_origin_is_allowed_by_default(served: Gateway) -> None:
    status, allowed = await preflight(served, PAGE)
    answer = await served.chat(headers={"origin": PAGE})
    assert (status, allowed, answer.status_code) == (403, None, 403)
    assert "access-control-allow-origin" not in answer.headers


async def test_named_origins_may_call_even_where_keys_are_needed() -> None:
    async with gateway(api_keys=("right",), cors_origins=(PAGE,)) as served:
        assert await preflight(served, PAGE) == (200, PAGE)
        assert await preflight(served, "https://other.example") == (400, None)
        answer = await served.chat(headers={"origin": PAGE, "authorization": "Bearer right"}, mood="good")
        refused = await served.chat(headers={"origin": PAGE})
    assert (answer.status_code, refused.status_code) == (200, 401)
    assert answer.headers["access-control-allow-origin"] == refused.headers["access-control-allow-origin"] == PAGE
    assert "x-alignedserve-ignored-fields" in answer.headers["access-control-expose-headers"]
    assert "access-control-allow-credentials" not in answer.headers


def test_origins_are_configured_as_a_list() -> None:
    config = load_config(None, [f'gateway.cors_origins=["{PAGE}", "*"]'])
    assert config.gateway.cors_origins == (PAGE, "*")
    with pytest.raises(ConfigError, match="cors_origins"):
        load_config(None, ['gateway.cors_origins=["chat.example"]'])
