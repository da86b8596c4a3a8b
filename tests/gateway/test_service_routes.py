"""Keys, quotas, readiness, metrics, models, tokens, the page."""

import asyncio
import re
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from alignedserve.api.errors import Unavailable
from alignedserve.api.models.model_services import ModelCard
from alignedserve.keys.quotas import Bucket, Charge
from alignedserve.pocket.phrases import EXAMPLE_QUESTIONS
from alignedserve.runtime.model.named_models import pocket_folder
from tests.gateway.support import EOS, Gateway, error_of, gateway, probe_of, saying, tokenizer_folder, tokens_of
from tests.harnesses.scripted_backend import IDLE_STATUS, Script
from tests.support.marks import each
from tests.support.waiting import holds

CLOSED = [
    "/v1/models",
    "/v1/models/tiny",
    "/metrics",
    "/v1/nothing",
    "/tokenize",
    "/v1/tokenize",
    "/rerank",
    "/models",
    "/v1/chat/completions",
    "/v1/alignedserve/live",
]


@pytest.mark.parametrize("path", CLOSED)
@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Bearer wrong", "Basic right", "right", "Bearer ri\xe9"]
)
async def test_every_route_is_closed_once_a_key_is_set(path: str, header: str | None) -> None:
    async with gateway(api_keys=("right", "other")) as served:
        headers = {} if header is None else {"authorization": header.encode("latin-1")}
        response = await served.client.get(path, headers=headers)  # type: ignore[arg-type]
    error = error_of(response, 401)
    assert error["code"] == "invalid_api_key"
    assert response.headers["www-authenticate"] == "Bearer"


async def test_what_stays_open_and_what_a_key_opens() -> None:
    async with gateway(api_keys=("right", "other")) as served:
        for path, status in (("/", 200), ("/dashboard", 200), ("/health", 200), ("/ready", 503), ("/version", 200)):
            assert (await served.client.get(path)).status_code == status
        for scheme in ("Bearer right", "bearer other"):
            assert (await served.chat(headers={"authorization": scheme})).status_code == 200


async def test_a_quota_is_429_with_the_time_to_come_back() -> None:
    async with gateway(api_keys=("a", "b"), requests_per_minute=2) as served:
        for _ in range(2):
            assert (await served.chat(headers={"authorization": "Bearer a"})).status_code == 200
        response = await served.chat(headers={"authorization": "Bearer a"})
        assert error_of(response, 429)["code"] == "rate_limit_exceeded"
        assert int(response.headers["retry-after"]) in (29, 30)
        assert (await served.chat(headers={"authorization": "Bearer b"})).status_code == 200


def test_a_quota_refills() -> None:
    bucket, one = Bucket(1.0), (Charge("a", 1.0 / 60.0),)
    for _ in range(60):
        assert not bucket.take(one, 0.0).wait_s
    assert bucket.take(one, 0.0).wait_s == pytest.approx(1.0)
    assert not bucket.take(one, 1.0).wait_s


async def test_ready_only_after_a_token_came_through() -> None:
    is_lost = True

    def script(_: Any) -> Script:
        return Script((), failure=Unavailable("a worker was lost")) if is_lost else Script((5, EOS))

    async with gateway(script) as served:
        canary = asyncio.create_task(probe_of(served).run(pause_s=0.01))
        answers: list[httpx.Response] = []
        while not answers or answers[-1].status_code != 200:
            answers.append(await served.client.get("/ready"))
            is_lost = "a worker was lost" not in answers[-1].text and is_lost
            await asyncio.sleep(0.002)
        assert "no canary token" in error_of(answers[0], 503)["message"]
        assert answers[0].headers["retry-after"] == "1"
        assert any("a worker was lost" in answer.text for answer in answers)
        num_sent = len(served.backend.submitted)
        await asyncio.sleep(0.05)
        assert len(served.backend.submitted) == num_sent  # not repeated while ready
        served.backend.set_status(None)
        assert "the router is not connected" in error_of(await served.client.get("/ready"), 503)["message"]
        await holds(lambda: "since the cluster changed" in (probe_of(served)._problem or ""))
        served.backend.set_status(IDLE_STATUS)
        assert "since the cluster changed" in (probe_of(served).missing() or "")
        await holds(lambda: probe_of(served).missing() is None)
        assert (await served.client.get("/ready")).status_code == 200
        served.services.readiness.is_draining = True
        assert "draining" in error_of(await served.client.get("/ready"), 503)["message"]
        assert (await served.client.get("/v1/models")).status_code == 200  # what comes all the same is served
        served.services.readiness.is_draining = False
        assert (await served.client.get("/ready")).status_code == 200
        canary.cancel()
        await asyncio.gather(canary, return_exceptions=True)


async def test_not_ready_while_separate_workers_have_no_pool() -> None:
    async with gateway(lambda _: Script((5, EOS))) as served:
        canary = asyncio.create_task(probe_of(served).run(pause_s=0.01))
        await holds(lambda: probe_of(served).missing() is None)
        served.backend.set_status(replace(IDLE_STATUS, num_poolless_workers=1))
        assert "no KV pool" in error_of(await served.client.get("/ready"), 503)["message"]
        await holds(lambda: "since the cluster changed" in (probe_of(served)._problem or ""))
        served.backend.set_status(replace(IDLE_STATUS, num_prefill_workers=2, num_poolless_workers=1))
        await holds(lambda: probe_of(served).missing() is None)  # another node has its pool
        assert (await served.client.get("/ready")).status_code == 200
        canary.cancel()
        await asyncio.gather(canary, return_exceptions=True)


async def test_gateways_of_one_port_tell_their_metrics_apart() -> None:
    async with gateway(saying("hello"), shared_port=True) as served:
        await served.chat()
        text = (await served.client.get("/metrics")).text
    own = [line for line in text.splitlines() if line.startswith(("vllm:", "alignedserve_ready"))]
    assert len(own) > 100
    assert [line for line in own if 'gateway="gateway-0"' not in line] == []
    async with gateway() as alone:
        assert 'gateway="' not in (await alone.client.get("/metrics")).text


async def test_metrics_have_the_names_that_dashboards_read() -> None:
    async with gateway(saying("the quick brown")) as served:
        await served.chat()
        await served.chat(model="unknown")
        text = (await served.client.get("/metrics")).text
    for name in (
        'vllm:num_requests_running{model_name="tiny"} 0.0',
        'vllm:num_requests_waiting{model_name="tiny"} 0.0',
        'vllm:kv_cache_usage_perc{model_name="tiny"} 0.0',
        'vllm:prompt_tokens_total{model_name="tiny"}',
        'vllm:generation_tokens_total{model_name="tiny"} 4.0',
        'vllm:time_to_first_token_seconds_bucket{le="0.005",model_name="tiny"}',
        'vllm:time_to_first_token_seconds_bucket{le="2560.0",model_name="tiny"} 1.0',
        'alignedserve_time_to_first_token_seconds_count{model_name="tiny",tier="real_time"} 1.0',
        'alignedserve_time_to_first_token_seconds_count{model_name="tiny",tier="best_effort"} 0.0',
        'alignedserve_time_per_output_token_seconds_count{model_name="tiny",tier="real_time"} 1.0',
        'vllm:inter_token_latency_seconds_count{model_name="tiny"}',
        'vllm:request_time_per_output_token_seconds_count{model_name="tiny"} 1.0',
        'vllm:e2e_request_latency_seconds_count{model_name="tiny"} 1.0',
        'vllm:request_success_total{finished_reason="stop",model_name="tiny"} 1.0',
        'vllm:num_preemptions_total{model_name="tiny"} 0.0',
        'vllm:request_prompt_tokens_count{model_name="tiny"} 1.0',
        'vllm:request_prefill_kv_computed_tokens_count{model_name="tiny"} 1.0',
        'vllm:request_generation_tokens_sum{model_name="tiny"} 4.0',
        'vllm:request_max_num_generation_tokens_sum{model_name="tiny"} 4.0',
        'vllm:request_params_n_sum{model_name="tiny"} 1.0',
        'vllm:request_params_max_tokens_count{model_name="tiny"} 1.0',
        'vllm:request_decode_time_seconds_count{model_name="tiny"} 1.0',
        'vllm:request_queue_time_seconds_count{model_name="tiny"} 0.0',
        'vllm:request_prefill_time_seconds_bucket{le="+Inf",model_name="tiny"} 0.0',
        'vllm:request_inference_time_seconds_sum{model_name="tiny"} 0.0',
        'vllm:prompt_tokens_cached_total{model_name="tiny"} 0.0',
        'vllm:cache_config_info{block_size="0",model_name="tiny",num_gpu_blocks="64"} 1.0',
        'alignedserve_workers{model_name="tiny",role="decode"} 1.0',
        'alignedserve_requests{model_name="tiny",stage="queued",tier="real_time"} 0.0',
        'alignedserve_pool_blocks{model_name="tiny"} 64.0',
        'alignedserve_pool_blocks_used{model_name="tiny"} 0.0',
        'alignedserve_worker_blocks{model_name="tiny"} 64.0',
        'alignedserve_worker_blocks_used{model_name="tiny"} 0.0',
        'alignedserve_requests_pooled{model_name="tiny"} 0.0',
        'alignedserve_handoffs_verified_total{model_name="tiny"} 0.0',
        'alignedserve_handoffs_refused_total{model_name="tiny"} 0.0',
        'alignedserve_rejected_total{reason="model_not_found"} 1.0',
        'alignedserve_answers_total{model_name="tiny",worker="scripted"} 1.0',
    ):
        assert name in text
    assert not re.search(r"[0-9a-f]{32}", text)


async def test_models(served: Gateway) -> None:
    listed = (await served.client.get("/v1/models")).json()
    one = (await served.client.get("/v1/models/tiny")).json()
    assert listed == {"object": "list", "data": [one]}
    assert one["id"] == "tiny"
    assert one["max_model_len"] == 256


async def test_tokenize_and_detokenize(served: Gateway) -> None:
    asked = (await served.client.post("/tokenize", json={"prompt": "the dog"})).json()
    assert asked == {"count": 2, "max_model_len": 256, "tokens": list(tokens_of("the dog"))}
    text = await served.client.post("/detokenize", json={"tokens": asked["tokens"]})
    assert text.json() == {"prompt": "the dog"}
    messages = [{"role": "user", "content": "hello"}]
    chat = (await served.client.post("/tokenize", json={"messages": messages})).json()
    await served.chat(messages=messages)
    assert chat["tokens"] == list(served.backend.submitted[0].prompt_token_ids)
    for path, body in (
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": messages}),
        ("/detokenize", {"tokens": [10**6]}),
        ("/detokenize", {"tokens": "a"}),
    ):
        error_of(await served.client.post(path, json=body), 400)


@each(
    ("path", "body"),
    [
        ("/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
        ("/completions", {"prompt": "hello"}),
        ("/responses", {"input": "hello", "store": False}),
        ("/messages", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 9}),
        ("/embeddings", {"input": "hello"}),
        ("/embeddings", {"input": "hello " * 2000, "truncate_prompt_tokens": 9}),  # read in another process
        ("/score", {"text_1": "a", "text_2": "b"}),
        ("/tokenize", {"prompt": "hello"}),
        ("/detokenize", {"tokens": [7]}),
        ("/models", None),
        ("/models/tiny", None),
    ],
)
async def test_routes_answer_with_v1_and_without(path: str, body: dict[str, Any] | None, served: Gateway) -> None:
    for prefix in ("", "/v1"):
        asked = None if body is None else {"model": "tiny", **body}
        answer = await served.client.request("POST" if body else "GET", prefix + path, json=asked)
        assert answer.status_code == 200, answer.text
        assert ("request-id" in answer.headers) == (path == "/messages")  # as Anthropic's


async def test_the_model_that_ships_names_example_questions() -> None:
    for folder, questions in ((pocket_folder(), list(EXAMPLE_QUESTIONS)), (tokenizer_folder(), None)):
        async with gateway(model=ModelCard("some", folder, 2048)) as served:
            (listed,) = (await served.client.get("/v1/models")).json()["data"]
        assert listed.get("example_questions") == questions


@each("path", ["/", "/dashboard"])
async def test_a_page_has_every_file_it_names_and_nothing_inline(path: str) -> None:
    async with gateway(api_keys=("right",)) as served:
        page = (await served.client.get(path)).text
        named = re.findall(r'(?:src|href)="\./(page/[^"]+)"', page)
        for script in [name for name in named if name.endswith("page.js")]:
            source = (await served.client.get(f"/{script}")).text
            named += [f"page/{name}" for name in re.findall(r'from "\./(.+)"', source)]
        for response in [await served.client.get(name) for name in (path, *(f"/{name}" for name in named))]:
            policy = response.headers["content-security-policy"]
            assert (response.status_code, response.headers["x-content-type-options"]) == (200, "nosniff")
            assert policy.startswith("default-src 'none'; script-src 'self';")
            assert "unsafe" not in policy
            again = await served.client.get(response.url, headers={"if-none-match": response.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
        for name in ("nothing.js", "%2e%2e/routes/live.py", "vendor/README.md", "vendor"):
            error_of(await served.client.get(f"/page/{name}"), 404)
    assert len(named) >= 3
    assert not re.search(r"<script>|<style|https?://|\son\w+=|\sstyle=|javascript:", page)
