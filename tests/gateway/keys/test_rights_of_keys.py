"""What a key may ask for: tiers, priorities, objectives, models; refusals name the key and the field."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, cast

import msgspec
import orjson
import pytest

from alignedserve.api.models.model_registry import RegisteredModel
from alignedserve.core.request import RequestClass
from alignedserve.gateway.long_bodies.messages import CountedTokens
from alignedserve.gateway.routes.request_bodies import read_if_long
from alignedserve.keys.file import KeyRow, ring_of
from alignedserve.keys.ring import digest_of
from tests.gateway.support import Gateway, error_of, gateway

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
ROWS: list[dict[str, Any]] = [
    {"name": "chat"},
    {"name": "documents", "tiers": ["flex"]},
    {"name": "urgent", "tiers": ["priority", "flex"], "default_tier": "flex", "priorities": [-5, 5]},
    {"name": "elsewhere", "models": ["other", "fine-*"]},
    {"name": "operator", "may_see_usage": True},
    {"name": "tiny", "models": ["tiny"]},
    {"name": "alias", "models": ["small"]},
]


@asynccontextmanager
async def served() -> AsyncIterator[Gateway]:
    rows = [msgspec.convert({"secrets": [{"sha256": digest_of(row["name"]).hex()}], **row}, KeyRow) for row in ROWS]
    async with gateway() as running:
        running.services.keys.ring = ring_of((), rows)
        yield running


async def ask(running: Gateway, key: str, headers: dict[str, str] | None = None, **fields: Any) -> Any:
    headers = {"authorization": f"Bearer {key}", **(headers or {})}
    return await running.client.post("/v1/chat/completions", json=CHAT | fields, headers=headers)


@pytest.mark.parametrize(
    ("key", "fields", "request_class", "tier"),
    [
        ("chat", {}, RequestClass.REAL_TIME, "default"),
        ("chat", {"service_tier": "flex", "priority": 3}, RequestClass.BEST_EFFORT, "flex"),
        ("documents", {}, RequestClass.BEST_EFFORT, "flex"),
        ("documents", {"service_tier": "auto"}, RequestClass.BEST_EFFORT, "flex"),
        ("urgent", {}, RequestClass.BEST_EFFORT, "flex"),
        ("urgent", {"service_tier": "fast", "priority": -5}, RequestClass.REAL_TIME, "priority"),
    ],
)
async def test_a_request_gets_the_tier_that_its_key_allows(
    key: str, fields: dict[str, Any], request_class: RequestClass, tier: str
) -> None:
    async with served() as running:
        response = await ask(running, key, **fields)
        assert response.status_code == 200
        assert response.json()["service_tier"] == tier
        (request,) = running.backend.submitted
        assert request.request_class is request_class
        assert request.priority == fields.get("priority", 0)


@pytest.mark.parametrize(
    ("key", "headers", "fields", "param", "code"),
    [
        ("chat", {}, {"service_tier": "priority"}, "service_tier", "service_tier_not_allowed"),
        ("chat", {}, {"service_tier": "fast"}, "service_tier", "service_tier_not_allowed"),
        ("chat", {}, {"priority": -1}, "priority", "priority_not_allowed"),
        ("urgent", {}, {"service_tier": "default"}, "service_tier", "service_tier_not_allowed"),
        ("urgent", {}, {"priority": 6}, "priority", "priority_not_allowed"),
        ("documents", {}, {"service_tier": "default"}, "service_tier", "service_tier_not_allowed"),
        ("documents", {"x-slo-ttft-ms": "100"}, {}, "x-slo-ttft-ms", "objectives_not_allowed"),
        ("documents", {"x-slo-tpot-ms": "100"}, {}, "x-slo-tpot-ms", "objectives_not_allowed"),
    ],
)
async def test_what_a_key_may_not_ask_for_is_named(
    key: str, headers: dict[str, str], fields: dict[str, Any], param: str, code: str
) -> None:
    async with served() as running:
        error = error_of(await ask(running, key, headers, **fields), 403)
        assert (error["param"], error["code"]) == (param, code)
        assert f"key {key} " in error["message"]
        assert running.backend.submitted == []


@pytest.mark.parametrize("header", ["x-slo-ttft-ms", "x-slo-tpot-ms"])
async def test_best_effort_has_no_objectives_of_somebody_who_waits_also_as_the_tier_of_a_key(header: str) -> None:
    async with served() as running:
        for fields in ({}, {"service_tier": "auto"}, {"service_tier": "flex"}):
            error = error_of(await ask(running, "urgent", {header: "100"}, **fields), 400)
            assert error["param"] == "service_tier"
        assert (await ask(running, "urgent", {header: "100"}, service_tier="priority")).status_code == 200
        assert (await ask(running, "urgent", {"x-slo-deadline-ms": "9000"})).status_code == 200


async def test_models_of_others_are_not_there() -> None:
    async with served() as running:
        absent = error_of(await ask(running, "chat", model="nothing"), 404)
        assert error_of(await ask(running, "elsewhere"), 404) == absent
        headers = {"authorization": "Bearer elsewhere"}
        assert (await running.client.get("/v1/models", headers=headers)).json()["data"] == []
        assert error_of(await running.client.get("/v1/models/tiny", headers=headers), 404) == absent
        long = CHAT | {"messages": [{"role": "user", "content": "hi " * 200_000}]}
        response = await running.client.post("/v1/chat/completions", json=long, headers=headers)
        assert error_of(response, 404) == absent


def with_alias(running: Gateway) -> None:
    """Let clients call the model `small` as well."""
    models = running.services.models
    models.replace_all([replace(one, card=replace(one.card, aliases=("small",))) for one in models.all])


@pytest.mark.parametrize(("key", "names"), [("tiny", {"tiny", "small"}), ("alias", {"small"})])
async def test_a_key_may_use_a_model_by_each_of_its_names(key: str, names: set[str]) -> None:
    async with served() as running:
        with_alias(running)
        headers = {"authorization": f"Bearer {key}"}
        listed = (await running.client.get("/v1/models", headers=headers)).json()["data"]
        assert {one["id"] for one in listed} == names
        asked = {name: (await ask(running, key, model=name)).status_code for name in ("tiny", "small")}
        assert {name for name, status in asked.items() if status == 200} == names


async def test_long_bodies_of_a_key_with_an_alias_alone_are_read_by_another_process() -> None:
    async with served() as running:
        with_alias(running)
        entry = running.services.keys.ring.find("alias", 0.0)
        assert entry is not None
        raw = orjson.dumps({"model": "small", "prompt": "hi " * 100_000})
        assert isinstance(await read_if_long(raw, "/tokenize", running.services, None, entry), CountedTokens)


async def test_keys_are_others_from_one_request_to_the_next() -> None:
    async with served() as running:
        assert (await ask(running, "chat")).status_code == 200
        running.services.keys.ring = ring_of(("plain",), ())
        error_of(await ask(running, "chat"), 401)
        assert (await ask(running, "plain", service_tier="priority", priority=-1000)).status_code == 200


async def test_a_key_has_no_model_loaded_that_it_may_not_use() -> None:
    async with served() as running:
        models = running.services.models
        models.add(RegisteredModel(replace(models.cards[0], name="sleeping", aliases=()), is_asleep=True))
        error_of(await ask(running, "elsewhere", model="sleeping"), 404)
        error_of(await ask(running, "chat", model="sleeping"), 503)  # whose rights suffice: it cannot be loaded here


async def test_openais_client_sees_what_is_refused() -> None:
    import openai

    async with served() as running:
        client = openai.AsyncOpenAI(
            api_key="documents", base_url="http://localhost/v1", http_client=cast(Any, running.client)
        )
        with pytest.raises(openai.PermissionDeniedError) as refused:
            await client.chat.completions.create(**CHAT, service_tier="priority")  # type: ignore[call-overload]
        assert (refused.value.param, refused.value.code) == ("service_tier", "service_tier_not_allowed")


@pytest.mark.parametrize("path", ["/metrics", "/v1/alignedserve/live"])
async def test_what_tells_of_all_keys_is_for_those_that_may_see_it(path: str) -> None:
    async with served() as running:
        error = error_of(await running.client.get(path, headers={"authorization": "Bearer chat"}), 403)
        assert error["code"] == "usage_not_allowed"
        assert (await running.client.get(path, headers={"authorization": "Bearer operator"})).status_code == 200
