"""A gateway before small servers over real HTTP: what a client sees when they answer, fail, lie and come back."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from alignedserve.config.sections import BatchesConfig, ClusterConfig, GatewayConfig
from alignedserve.core.errors import ConfigError
from alignedserve.gateway.server import HttpServer, bind
from alignedserve.upstream import proxy
from alignedserve.upstream.service import UpstreamServer, checked_urls
from tests.gateway.support import saying, services_for
from tests.harnesses.scripted_backend import ScriptedBackend
from tests.harnesses.upstream_server import Engine
from tests.harnesses.upstream_server import UpstreamServer as Scripted
from tests.support.ports import free_port

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}


@asynccontextmanager
async def servers(*named: Scripted) -> AsyncIterator[None]:
    for server in named:
        await server.start()
    try:
        yield
    finally:
        for server in named:
            await server.stop()


@asynccontextmanager
async def door(
    *named: Scripted, more: Sequence[str] = (), tmp_path: Path | None = None, keys: Sequence[str] = (), **gateway: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, UpstreamServer]]:
    async with servers(*named):
        batches = BatchesConfig(enabled=tmp_path is not None, folder=str(tmp_path))
        config = ClusterConfig(gateway=GatewayConfig(port=free_port(), **gateway), batches=batches)
        server = UpstreamServer([*(item.url for item in named), *more], config, api_keys=keys)
        await server.start()
        headers = {"Authorization": f"Bearer {keys[0]}"} if keys else {}
        try:
            async with httpx.AsyncClient(base_url=server.url, headers=headers, trust_env=False, timeout=20) as client:
                for item in named:
                    item.bodies.clear()
                yield client, server
        finally:
            await server.stop()


def said(text: str) -> str:
    """Return the words of a stream; raise AssertionError where an event is cut."""
    events = [event.removeprefix("data: ") for event in text.split("\n\n") if event.startswith("data: ")]
    chunks = [json.loads(event) for event in events if event != "[DONE]"]
    return "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk.get("choices", ()))


async def streamed(client: httpx.AsyncClient, **fields: Any) -> str:
    return (await client.post("/v1/chat/completions", json={**CHAT, "stream": True, **fields})).text


async def test_streams_and_whole_answers_pass_as_they_are() -> None:
    async with door(server := Scripted()) as (client, _):
        text = await streamed(client, user="me", odd_field=[1, {"a": 2}])
        whole = (await client.post("/v1/chat/completions", json=CHAT)).json()
        models = (await client.get("/v1/models")).json()
    assert said(text) == " one two three four five"
    assert text.endswith("data: [DONE]\n\n")
    assert '"usage"' not in text  # which was asked for by the gateway, not by the client
    assert whole["choices"][0]["message"]["content"] == "one two three four five"
    assert [model["id"] for model in models["data"]] == ["m"]
    assert server.bodies[0]["odd_field"] == [1, {"a": 2}]
    assert server.bodies[1] == CHAT


@pytest.mark.parametrize("fault", ["dies before", "closes", "500", "503", "no stream", "garbage", "401"])
async def test_what_fails_before_a_token_goes_elsewhere(fault: str) -> None:
    bad, good = Scripted(prefix="bad-"), Scripted(prefix="good-")
    async with door(bad, good) as (client, _):
        bad.fault = fault
        texts = [await streamed(client, max_tokens=3) for _ in range(4)]
        wholes = [(await client.post("/v1/chat/completions", json=CHAT)).json() for _ in range(2)]
    assert {said(text) for text in texts} == {" good-one good-two good-three"}
    assert all(whole["choices"][0]["message"]["content"].startswith("good-one") for whole in wholes)


@pytest.mark.parametrize("fault", ["dies", "half", "says error"])
async def test_what_fails_after_a_token_ends_with_an_error(fault: str) -> None:
    bad, good = Scripted(), Scripted()
    async with door(bad, good) as (client, _):
        bad.fault = good.fault = fault
        text = await streamed(client)
    assert said(text) == " one two three"
    assert "was lost while it answered" in text
    assert "secret words" not in text
    assert "[DONE]" not in text


@pytest.mark.parametrize(
    ("fault", "status", "code"),
    [
        ("400", 400, "refused"),
        ("422", 400, "refused"),
        ("404", 404, "unknown_url"),
        ("413", 413, "body_too_large"),
        ("429", 503, "overloaded"),
        ("500", 503, "unavailable"),
        ("garbage", 503, "unavailable"),
        ("closes", 503, "unavailable"),
    ],
)
async def test_errors_repeat_no_word_of_the_upstream(fault: str, status: int, code: str) -> None:
    async with door(server := Scripted()) as (client, _):
        server.fault = fault
        answer = await client.post("/v1/chat/completions", json=CHAT)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert "secret" not in answer.text
    assert "strange" not in answer.text


async def test_a_server_that_hangs_costs_a_bounded_time() -> None:
    async with door(server := Scripted(), first_token_timeout_s=0.2, token_timeout_s=0.2) as (client, _):
        server.fault = "answers nothing"
        answers = [
            await client.post("/v1/chat/completions", json=CHAT | {"stream": is_streamed}) for is_streamed in (0, 1)
        ]
    assert {answer.status_code for answer in answers} <= {400, 503, 504}


async def test_usage_that_cannot_be_true_is_counted_here() -> None:
    async with door(server := Scripted()) as (client, served):
        server.fault = "lies"
        text = await streamed(client, stream_options={"include_usage": True})
        used = dict(served._services.usage.totals) if served._services else {}
    assert '"completion_tokens": -7' in text  # the client's own to judge
    (counts,) = used.values()
    assert (counts.requests, counts.output_tokens) == (1, 5)
    assert 0 < counts.input_tokens < 100


async def test_additions_that_are_refused_are_left_out() -> None:
    async with door(server := Scripted(owner="vllm")) as (client, _):
        server.fault = "refuses additions"
        texts = [await streamed(client, service_tier="flex") for _ in range(2)]
    assert [said(text) for text in texts] == [" one two three four five"] * 2
    assert ["priority" in body for body in server.bodies] == [True, False, False]


async def test_a_clients_own_mistake_takes_no_additions_away_from_others() -> None:
    async with door(server := Scripted(owner="vllm")) as (client, _):
        server.fault = "400"
        await client.post("/v1/chat/completions", json=CHAT | {"service_tier": "flex"})
        server.fault = ""
        await client.post("/v1/chat/completions", json=CHAT | {"service_tier": "flex"})
    assert [body.get("priority") for body in server.bodies] == [10, None, 10]


async def test_our_scheduler_inside_gets_class_objectives_and_tenant() -> None:
    async with door(server := Scripted(owner="vllm")) as (client, made):
        for manners in made.door.proxy.manners.values():
            manners.takes_terms = True
        await streamed(client, vllm_xargs={"mine": 1})
        await client.post("/v1/chat/completions", json=CHAT | {"service_tier": "flex"})
    chat, document = (body["vllm_xargs"] for body in server.bodies)
    assert (chat["service_class"], chat["mine"], chat["slo_ttft_ms"] > 0, chat["slo_tpot_ms"] > 0) == ("chat", 1, 1, 1)
    assert document["service_class"] == "document"
    assert "slo_ttft_ms" not in document


async def test_documents_have_vllms_priority_and_chat_its_own() -> None:
    async with door(server := Scripted(owner="vllm")) as (client, _):
        for tier in ("flex", "default"):
            await client.post("/v1/chat/completions", json=CHAT | {"service_tier": tier})
    assert [body.get("priority") for body in server.bodies] == [10, None]
    assert all("service_tier" not in body for body in server.bodies)


async def test_a_client_that_leaves_ends_its_request_upstream() -> None:
    server = Scripted(engine=Engine(step_s=0.02))
    async with door(server) as (client, _):
        with pytest.raises(httpx.ReadTimeout):
            await client.post("/v1/chat/completions", json=CHAT | {"max_tokens": 500}, timeout=0.3)
        async with asyncio.timeout(5):
            while server.num_open or not server.num_aborted:  # noqa: ASYNC110  (a count of the harness)
                await asyncio.sleep(0.01)


async def test_two_models_under_one_name_are_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="serve different models under the name m"):
        async with door(Scripted(root="/models/a"), Scripted(root="/models/b")):
            pass
    with pytest.raises(ConfigError, match="serve different models"):  # by what they count of one text
        async with door(Scripted(), Scripted(tokens_per_word=2)):
            pass


async def test_a_server_that_comes_later_with_another_model_is_kept_apart() -> None:
    later = Scripted(prefix="other-", tokens_per_word=3, port=free_port())
    async with door(Scripted(), more=[later.url]) as (client, served), servers(later):
        upstream = served.door.proxy.logic.upstreams[later.url]
        async with asyncio.timeout(10):
            while "different models" not in (upstream.problem or ""):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert [said(await streamed(client, max_tokens=1)) for _ in range(3)] == [" one"] * 3


async def test_a_server_that_is_down_at_the_start_joins() -> None:
    later = Scripted(port=free_port())
    async with door(more=[later.url]) as (client, _):
        assert (await client.get("/ready")).status_code == 503
        answer = await client.post("/v1/chat/completions", json=CHAT)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
        async with servers(later):
            async with asyncio.timeout(10):
                while (await client.get("/ready")).status_code != 200:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            assert said(await streamed(client)) == " one two three four five"


async def test_a_chain_that_leads_back_is_refused() -> None:
    first, second = free_port(), free_port()
    config = ClusterConfig(batches=BatchesConfig(enabled=False))

    def server(port: int, *urls: str) -> UpstreamServer:
        gateway = msgspec.structs.replace(config.gateway, port=port)
        return UpstreamServer(urls, msgspec.structs.replace(config, gateway=gateway))

    async with servers(real := Scripted()):
        one, two = server(first, f"http://127.0.0.1:{second}", real.url), server(second, f"http://127.0.0.1:{first}")
        await one.start()
        await two.start()
        try:
            upstream = one.door.proxy.logic.upstreams[two.url]
            async with asyncio.timeout(10):
                while not upstream.is_refused:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            async with httpx.AsyncClient(base_url=one.url, trust_env=False) as client:
                assert said(await streamed(client)) == " one two three four five"
        finally:
            await one.stop()
            await two.stop()
    assert "leads back" in (upstream.problem or "")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("ftp://a", "must be an address"),
        ("http://", "must be an address"),
        ("http://a:99999", "must be an address"),
        ("http://user:secret@a", "ALIGNEDSERVE_UPSTREAM_KEY"),
        ("http://localhost:8000/v1", "is this server itself"),
        ("http://127.0.0.1:8000", "is this server itself"),
    ],
)
def test_addresses_that_are_no_upstreams(url: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        checked_urls([url], GatewayConfig())
    assert "secret@" not in str(refused.value)


async def test_keys_and_quotas_hold() -> None:
    async with door(Scripted(), keys=["k"], requests_per_minute=2) as (client, _):
        statuses = [(await client.post("/v1/chat/completions", json=CHAT)).status_code for _ in range(3)]
        stranger = await client.get("/v1/models", headers={"Authorization": "Bearer x"})
    assert statuses == [200, 200, 429]
    assert stranger.status_code == 401


async def test_a_batch_ends_each_line_once_though_an_upstream_dies(tmp_path: Path) -> None:
    dying, living = (Scripted(engine=Engine(step_s=0.002)) for _ in range(2))
    lines = [
        {"custom_id": f"line-{index}", "method": "POST", "url": "/v1/chat/completions", "body": CHAT}
        for index in range(60)
    ]
    async with door(dying, living, tmp_path=tmp_path) as (client, _):
        content = "\n".join(map(json.dumps, lines)).encode()
        uploaded = await client.post("/v1/files", files={"file": ("in.jsonl", content)}, data={"purpose": "batch"})
        body = {"input_file_id": uploaded.json()["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        batch = (await client.post("/v1/batches", json=body)).json()
        async with asyncio.timeout(30):
            while batch["status"] != "completed":
                await asyncio.sleep(0.05)
                batch = (await client.get(f"/v1/batches/{batch['id']}")).json()
                if dying.bodies and dying._server.is_serving():
                    await dying.stop()
        output = (await client.get(f"/v1/files/{batch['output_file_id']}/content")).text
        course = await client.get("/v1/usage?start_time=1&bucket_width=1d&limit=1")
    answered = [json.loads(line) for line in output.splitlines()]
    assert sorted(line["custom_id"] for line in answered) == sorted(str(line["custom_id"]) for line in lines)
    assert {line["response"]["body"]["choices"][0]["message"]["content"] for line in answered} == {
        "one two three four five"
    }
    assert dying.bodies
    assert course.status_code == 200


async def test_a_request_is_explained_up_to_the_upstreams_edge() -> None:
    async with door(server := Scripted()) as (client, _):
        await client.post("/v1/chat/completions", json=CHAT | {"stream": True}, headers={"x-request-id": "mine"})
        course = (await client.get("/v1/requests/mine")).json()
    assert (course["model"], course["state"]) == ("m", "ended")
    assert course["choices"][0]["output_tokens"] == 5
    assert course["choices"][0]["ttft_ms"] > 0
    phases = [phase["name"] for phase in course["choices"][0]["phases"]]
    assert phases == ["tokenise", "to router", "router queue", "to worker", "prefill", "decode"]
    assert server.url in json.dumps(course)


async def test_a_drain_lets_open_answers_end() -> None:
    async with door(Scripted(engine=Engine(step_s=0.02))) as (client, served):
        answering = asyncio.create_task(client.post("/v1/chat/completions", json=CHAT | {"max_tokens": 20}))
        await asyncio.sleep(0.1)
        draining = asyncio.create_task(served.drained())
        await asyncio.sleep(0.05)
        refused = await client.post("/v1/chat/completions", json=CHAT)
        assert (await answering).status_code == 200
        await draining
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_an_answer_without_an_end_is_cut(monkeypatch: pytest.MonkeyPatch, is_streamed: bool) -> None:
    monkeypatch.setattr(proxy, "MAX_BODY_BYTES", 2000)
    async with door(Scripted()) as (client, _):
        answer = await client.post("/v1/chat/completions", json=CHAT | {"max_tokens": 999, "stream": is_streamed})
    assert len(answer.content) < 4000
    assert "error" in answer.text


async def test_our_own_server_answers_every_api() -> None:
    backend = ScriptedBackend(saying("hello world"))
    services = services_for(backend, GatewayConfig())
    ours = HttpServer(services, bind("127.0.0.1", 0))
    await ours.start()
    user = [{"role": "user", "content": "hello"}]
    try:
        async with door(more=[f"http://127.0.0.1:{ours.port}"]) as (client, _):
            bodies: dict[str, dict[str, Any]] = {
                "/v1/chat/completions": {"messages": user},
                "/v1/completions": {"prompt": "hello"},
                "/v1/messages": {"messages": user, "max_tokens": 9},
                "/v1/responses": {"input": "hello", "store": False},
            }
            for path, body in bodies.items():
                for is_streamed in (False, True):
                    sent = {"model": "tiny", "stream": is_streamed, "service_tier": "default", **body}
                    if path == "/v1/messages":
                        sent["service_tier"] = "standard_only"
                    answer = await client.post(path, json=sent)
                    assert answer.status_code == 200, answer.text
                    assert "world" in answer.text
                    assert "error" not in answer.text or '"error":null' in answer.text
            stored = await client.post("/v1/responses", json={"model": "tiny", "input": "x", "background": True})
            counted = await client.post("/tokenize", json={"model": "tiny", "prompt": "hello"})
            unknown = await client.post("/v1/chat/completions", json={"model": "other", "messages": user})
    finally:
        await ours.stop()
    assert stored.json()["error"]["code"] == "unsupported_parameter"
    assert counted.json()["count"] > 0
    assert unknown.status_code == 404
