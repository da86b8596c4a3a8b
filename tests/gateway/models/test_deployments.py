"""Several deployments behind one gateway: chosen by name, replaced under load, removed, and a gateway that restarts."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from alignedserve.api import deployments as gateway_deployments
from alignedserve.api.prefix_hasher import PrefixHasher
from alignedserve.cluster.starting import NotReady, ask_ready
from alignedserve.config.sections import GatewayConfig, PrefixCacheConfig
from alignedserve.gateway.server import GatewayServer
from alignedserve.messages.gateways import ClusterStatus
from alignedserve.runtime.model.served_model import DeploymentPhase, DeploymentState, ServedDeployment
from tests.gateway.deployment_support import EchoingDeployment, deployed, gateway_links
from tests.gateway.support import error_of, tokenizer, tokens_of, write_tokenizer
from tests.support.waiting import holds

pytestmark = pytest.mark.slow

PREPARING, SERVING, DRAINING = DeploymentPhase.PREPARING, DeploymentPhase.SERVING, DeploymentPhase.DRAINING
TEXT = "the quick brown fox"


@dataclass
class Door:
    """A gateway, a client of it, and the echoing deployments `a` and `b` behind it."""

    server: GatewayServer
    client: httpx.AsyncClient
    clusters: dict[str, EchoingDeployment]

    def serve(self, *listed: ServedDeployment) -> dict[str, DeploymentState]:
        return {state.deployment_id: state for state in self.server.serve_models(listed)}

    async def serve_until_ready(self, *listed: ServedDeployment) -> None:
        await holds(lambda: all(state.missing is None for state in self.serve(*listed).values()))

    async def complete(self, model: str) -> httpx.Response:
        return await self.client.post("/v1/completions", json={"model": model, "prompt": TEXT})

    async def stream(self, model: str) -> str:
        """Return the text of a stream, which must end well."""
        body = {"model": model, "prompt": TEXT, "stream": True}
        async with self.client.stream("POST", "/v1/completions", json=body) as response:
            events = [line.removeprefix("data: ") async for line in response.aiter_lines() if line]
        assert events[-1] == "[DONE]", events
        chunks = [json.loads(event) for event in events[:-1]]
        assert {chunk["model"] for chunk in chunks} == {model}
        return "".join(chunk["choices"][0]["text"] for chunk in chunks)


@asynccontextmanager
async def door(
    folder: Path, port: int, *listed: ServedDeployment, token_delay_s: float = 0.0, is_restarted: bool = False
) -> AsyncIterator[Door]:
    """The deployments "" and "2" run whether they are listed or not."""
    clusters = {one: await EchoingDeployment(folder, one, token_delay_s).start() for one in ("", "2")}
    config = GatewayConfig(port=port)
    links = gateway_links(folder)
    server = GatewayServer(links=links, deployments=listed, config=config, is_restarted=is_restarted)
    await server.start()
    try:
        async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
            yield Door(server, client, clusters)
    finally:
        await server.stop()
        for cluster in clusters.values():
            await cluster.close()


async def test_the_model_chooses_and_both_stream_at_once(tmp_path: Path, unused_tcp_port: int) -> None:
    a, b = deployed("a"), deployed("b", "2")
    async with door(tmp_path, unused_tcp_port, a, b, token_delay_s=0.005) as opened:
        await opened.serve_until_ready(a, b)
        assert (await opened.client.get("/ready")).status_code == 200
        texts = await asyncio.gather(*(opened.stream(name) for name in ("a", "b", "a", "b")))
        assert texts == [TEXT] * 4
        assert [len(opened.clusters[one].submitted) for one in ("", "2")] == [2, 2]
        assert error_of(await opened.complete("c"), 404)["code"] == "model_not_found"
        listed = (await opened.client.get("/v1/models")).json()["data"]
        assert [one["id"] for one in listed] == ["a", "b"]
        assert (await opened.client.get("/v1/models/b")).json()["id"] == "b"
        anthropic = await opened.client.get("/v1/models", headers={"anthropic-version": "2023-06-01"})
        assert [one["id"] for one in anthropic.json()["data"]] == ["a", "b"]
        text = (await opened.client.get("/metrics")).text
    for line in (
        'vllm:request_success_total{finished_reason="stop",model_name="a"} 2.0',
        'vllm:request_success_total{finished_reason="stop",model_name="b"} 2.0',
        'vllm:num_requests_running{model_name="a"} 0.0',
        'vllm:num_requests_running{deployment="2",model_name="b"} 0.0',
        'alignedserve_answers_total{deployment="2",model_name="b",worker="decode-0.2"} 3.0',
    ):
        assert line in text


async def test_every_api_goes_to_the_model_that_it_names(tmp_path: Path, unused_tcp_port: int) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    write_tokenizer(folder, "{% for message in messages %}{{ message['content'] }}{% endfor %}")
    a, b = deployed("a"), deployed("b", "2", folder=folder)
    talk = [{"role": "user", "content": TEXT}]
    async with door(tmp_path, unused_tcp_port, a, b) as opened:
        await opened.serve_until_ready(a, b)

        async def post(path: str, **body: Any) -> Any:
            response = await opened.client.post(path, json=body)
            assert response.status_code == 200, response.text
            return response.json()

        num_plain = len(tokens_of(TEXT))
        assert (await post("/tokenize", model="b", messages=talk))["count"] == num_plain
        assert (await post("/tokenize", model="a", messages=talk))["count"] > num_plain
        assert (await post("/tokenize", messages=talk))["count"] > num_plain  # the first one
        asked = {"messages": talk, "max_tokens": 4}
        assert (await post("/v1/messages/count_tokens", model="b", messages=talk))["input_tokens"] == num_plain
        assert (await post("/v1/messages", model="b", **asked))["model"] == "b"
        assert (await post("/v1/chat/completions", model="b", **asked))["model"] == "b"
        assert (await post("/v1/responses", model="b", input=TEXT))["model"] == "b"
        tokens = tokenizer().encode(TEXT, add_special_tokens=False)
        assert (await post("/detokenize", model="b", tokens=tokens))["prompt"] == TEXT
        assert len(opened.clusters["2"].submitted) == 3
        assert opened.clusters[""].submitted == []
        for path, body in (
            ("/v1/embeddings", {"input": TEXT}),
            ("/v1/score", {"text_1": TEXT, "text_2": TEXT}),
            ("/v1/rerank", {"query": TEXT, "documents": [TEXT]}),
            ("/v1/messages", asked),
            ("/v1/responses", {"input": TEXT}),
            ("/tokenize", {"prompt": TEXT}),
        ):
            response = await opened.client.post(path, json={"model": "c", **body})
            assert response.status_code == 404, response.text


async def test_a_replacement_under_load_fails_no_request(tmp_path: Path, unused_tcp_port: int) -> None:
    old, new = deployed("a"), deployed("a", "2", phase=PREPARING)
    async with door(tmp_path, unused_tcp_port, old, token_delay_s=0.01) as opened:
        await opened.serve_until_ready(old)
        opened.clusters["2"].is_ready = False
        answers: list[str] = []
        is_over = False

        async def ask_on() -> None:
            while not is_over:
                answers.append(await opened.stream("a"))

        clients = [asyncio.create_task(ask_on()) for _ in range(8)]
        await holds(lambda: len(answers) >= 8)
        states = opened.serve(old, new)
        assert states[""].missing is None
        assert states["2"].missing is not None
        await holds(lambda: len(answers) >= 16)
        assert opened.clusters["2"].submitted == []  # the old one goes on until the driver says so
        opened.clusters["2"].become_ready()
        await opened.serve_until_ready(old, new)
        await holds(lambda: opened.serve(old, new)[""].num_open > 0)  # all clients may be between two answers
        states = opened.serve(replace(new, phase=SERVING), replace(old, phase=DRAINING))
        assert states[""].num_open > 0
        num_old = len(opened.clusters[""].submitted)
        await holds(lambda: opened.serve(replace(new, phase=SERVING), replace(old, phase=DRAINING))[""].num_open == 0)
        opened.serve(replace(new, phase=SERVING))
        await opened.clusters[""].close()
        num_before = len(answers)
        await holds(lambda: len(answers) >= num_before + 16)
        is_over = True
        await asyncio.gather(*clients)
        assert set(answers) == {TEXT}
        assert len(answers) == len(opened.clusters[""].submitted) + len(opened.clusters["2"].submitted)
        # Those that held the old one when it was replaced, and none after.
        assert len(opened.clusters[""].submitted) <= num_old + 8
        text = (await opened.client.get("/metrics")).text
        assert 'vllm:num_requests_running{deployment="2",model_name="a"}' in text
        assert 'vllm:num_requests_running{model_name="a"}' not in text
        assert f'vllm:request_success_total{{finished_reason="stop",model_name="a"}} {len(answers)}.0' in text


async def test_a_model_that_computes_no_numbers_is_hopeless_and_says_why(tmp_path: Path, unused_tcp_port: int) -> None:
    a, b = deployed("a"), deployed("b", "2", phase=PREPARING)
    async with door(tmp_path, unused_tcp_port, a) as opened:
        opened.clusters["2"].fault = "the model gave no usable logits"
        await holds(lambda: opened.serve(a, b)["2"].is_hopeless)
        assert opened.serve(a, b)["2"].missing == "the canary token failed: the model gave no usable logits"
        opened.clusters["2"].fault = ""
        await holds(lambda: opened.serve(a, b)["2"].missing is None)
        assert not opened.serve(a, b)["2"].is_hopeless


async def test_a_start_does_not_wait_for_a_model_that_computes_no_numbers(tmp_path: Path, unused_tcp_port: int) -> None:
    a = deployed("a")
    assert ask_ready(f"http://127.0.0.1:{unused_tcp_port}") is not None
    async with door(tmp_path, unused_tcp_port) as opened:  # which asks for its first token with the fault there
        url = opened.server.url
        opened.clusters[""].fault = "the model gave no usable logits"
        await holds(lambda: opened.serve(a)[""].is_hopeless)
        lasting = NotReady("the canary token failed: the model gave no usable logits", is_lasting=True)
        assert await asyncio.to_thread(ask_ready, url) == lasting
        opened.clusters[""].fault = ""
        await holds(lambda: opened.serve(a)[""].missing is None)
        assert await asyncio.to_thread(ask_ready, url) is None
        opened.clusters[""].report(ClusterStatus())
        await holds(lambda: opened.serve(a)[""].missing is not None)
        missing = await asyncio.to_thread(ask_ready, url)
        assert missing == NotReady("no worker that decodes is registered")


async def test_a_model_whose_workers_do_not_start_is_503_until_one_does(tmp_path: Path, unused_tcp_port: int) -> None:
    a = deployed("a")
    async with door(tmp_path, unused_tcp_port, a) as opened:
        await opened.serve_until_ready(a)
        opened.serve(replace(a, is_failing=True))
        assert (await opened.complete("a")).status_code == 200  # a worker serves all the same
        opened.clusters[""].report(ClusterStatus())
        await holds(lambda: opened.serve(replace(a, is_failing=True))[""].missing is not None)
        refused = await opened.complete("a")
        assert "No worker of this model" in error_of(refused, 503)["message"]
        assert refused.headers["retry-after"] == "10"
        opened.clusters[""].become_ready()
        await opened.serve_until_ready(a)
        assert await opened.stream("a") == TEXT


async def test_a_model_is_removed_while_a_request_runs(tmp_path: Path, unused_tcp_port: int) -> None:
    a, b = deployed("a"), deployed("b", "2")
    async with door(tmp_path, unused_tcp_port, a, b, token_delay_s=0.05) as opened:
        await opened.serve_until_ready(a, b)
        running = asyncio.create_task(opened.stream("b"))
        await holds(lambda: len(opened.clusters["2"].submitted) == 1)
        gone = replace(b, phase=DRAINING)
        assert opened.serve(a, gone)["2"].num_open == 1
        assert error_of(await opened.complete("b"), 404)["code"] == "model_not_found"
        assert [one["id"] for one in (await opened.client.get("/v1/models")).json()["data"]] == ["a"]
        assert await running == TEXT
        await holds(lambda: opened.serve(a, gone)["2"].num_open == 0)
        opened.serve(a)
        assert (await opened.complete("a")).status_code == 200
        opened.serve(a, b)  # and comes back
        await opened.serve_until_ready(a, b)
        assert await opened.stream("b") == TEXT


async def test_a_gateway_without_any_model_says_so(tmp_path: Path, unused_tcp_port: int) -> None:
    async with door(tmp_path, unused_tcp_port, deployed("a")) as opened:
        opened.serve()
        assert (await opened.client.get("/v1/models")).json()["data"] == []
        anthropic = await opened.client.get("/v1/models", headers={"anthropic-version": "2023-06-01"})
        assert anthropic.json() == {"data": [], "has_more": False, "first_id": None, "last_id": None}
        assert "no model is served" in error_of(await opened.client.get("/ready"), 503)["message"]
        assert (await opened.complete("a")).status_code == 404
        assert (await opened.client.post("/tokenize", json={"prompt": TEXT})).status_code == 404


def test_deployments_share_no_cached_block() -> None:
    cached = PrefixCacheConfig()
    listed = [deployed(name, one, prefix_cache=cached) for name, one in (("a", ""), ("b", ""), ("a", "2"))]
    hashers = [PrefixHasher.of(one, key=b"k" * 32) for one in listed]
    assert len({hasher.root("anyone", None) for hasher in hashers if hasher is not None}) == 3


async def test_what_is_open_at_a_deployment_that_is_gone_fails(tmp_path: Path, unused_tcp_port: int) -> None:
    a, b = deployed("a"), deployed("b", "2")
    async with door(tmp_path, unused_tcp_port, a, b, token_delay_s=30.0) as opened:
        opened.clusters[""].token_delay_s = 0.0
        asking = asyncio.create_task(opened.complete("b"))
        await holds(lambda: len(opened.clusters["2"].submitted) == 1)
        opened.serve(a)
        assert "served no more" in error_of(await asking, 503)["message"]
        assert (await opened.complete("a")).status_code == 200


async def test_a_model_that_will_come_is_503_and_one_that_does_not_load_says_why(
    tmp_path: Path, unused_tcp_port: int
) -> None:
    a, b = deployed("a"), deployed("b", "2", phase=PREPARING)
    async with door(tmp_path, unused_tcp_port, a) as opened:
        await opened.serve_until_ready(a, b)
        coming = await opened.complete("b")
        assert error_of(coming, 503)["code"] == "unavailable"
        assert coming.headers["retry-after"] == "1"
        assert [one["id"] for one in (await opened.client.get("/v1/models")).json()["data"]] == ["a"]
        assert (await opened.client.get("/ready")).status_code == 200
        folder = tmp_path / "empty"
        folder.mkdir()
        broken = deployed("c", "3", folder=folder)
        await holds(lambda: "cannot be loaded" in str(opened.serve(a, broken)["3"].missing))
        assert opened.serve(a, broken)["3"].is_hopeless
        message = error_of(await opened.client.get("/ready"), 503)["message"]
        assert message.startswith("Not ready: model c: its tokenizer cannot be loaded")
        assert error_of(await opened.complete("c"), 503)["code"] == "unavailable"
        assert (await opened.complete("a")).status_code == 200


@pytest.mark.parametrize("is_told", [True, False])
async def test_a_restarted_gateway_refuses_no_model_for_good_before_it_is_told(
    tmp_path: Path, unused_tcp_port: int, monkeypatch: pytest.MonkeyPatch, is_told: bool
) -> None:
    monkeypatch.setattr(gateway_deployments, "_TOLD_AGAIN_S", 30.0 if is_told else 0.2)
    a, b = deployed("a"), deployed("b", "2")
    async with door(tmp_path, unused_tcp_port, a, is_restarted=True) as opened:
        if is_told:
            assert (await opened.complete("b")).status_code == 503
            await opened.serve_until_ready(a, b)
            assert await opened.stream("b") == TEXT
            assert (await opened.complete("c")).status_code == 404
            return
        async with asyncio.timeout(20):
            while (await opened.complete("b")).status_code != 404:  # noqa: ASYNC110  (in the gateway)
                await asyncio.sleep(0.02)
        assert (await opened.complete("a")).status_code == 200
