"""Embeddings, scores and rankings over HTTP."""

import asyncio
import base64
import contextlib
import struct
from typing import Any

import httpx
import httpx2
import pytest

from alignedserve.api.embeddings.response_format import cosines
from tests.gateway.support import Gateway, error_of, gateway, tokens_of
from tests.harnesses.scripted_backend import Script
from tests.support.marks import each


async def post(served: Gateway, path: str, **body: Any) -> httpx.Response:
    return await served.client.post(path, json={"model": "tiny"} | body)


def direction(token_ids: tuple[int, ...]) -> list[float]:
    """Return what the scripted backend computes, at length 1."""
    vector = (len(token_ids), token_ids[0], token_ids[-1])
    length = sum(value * value for value in vector) ** 0.5
    return [value / length for value in vector]


@each("given", ["hello", ["hello", "the dog"], [40, 41], [[40, 41], [42]]])
async def test_a_vector_of_length_one_for_every_text(given: Any) -> None:
    import openai

    async with gateway() as served:
        body = (await post(served, "/v1/embeddings", input=given)).json()
        requests = served.backend.submitted
    openai.types.CreateEmbeddingResponse.model_validate(body, strict=True)
    assert [entry["index"] for entry in body["data"]] == list(range(len(requests)))
    for entry, request in zip(body["data"], requests, strict=True):
        assert entry["embedding"] == pytest.approx(direction(request.prompt_token_ids), abs=1e-6)
    assert body["usage"]["prompt_tokens"] == sum(request.prompt_len for request in requests)


async def test_base64_holds_the_same_numbers() -> None:
    async with gateway() as served:
        body = (await post(served, "/v1/embeddings", input="hello", encoding_format="base64")).json()
    raw = base64.b64decode(body["data"][0]["embedding"])
    assert list(struct.unpack("<3f", raw)) == pytest.approx(direction(tokens_of("hello")), abs=1e-6)


async def test_best_effort_by_service_tier() -> None:
    async with gateway() as served:
        await post(served, "/v1/embeddings", input="hello", service_tier="flex")
        assert served.backend.submitted[0].request_class.value == "be"


async def test_openais_sdk_reads_them() -> None:
    import openai

    async with gateway() as served, httpx2.AsyncClient(transport=httpx2.ASGITransport(served.app)) as http:
        client = openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="none", http_client=http)
        answer = await client.embeddings.create(model="tiny", input=["hello", "the dog"])
    assert answer.data[1].embedding == pytest.approx(direction(tokens_of("the dog")), abs=1e-6)


@each(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": ["hello", ""]}, "input[1]"),
        ({"input": ["hello", "the " * 300]}, "input[1]"),
        ({"input": ["hello", "fox " * 9000]}, "input[1]"),  # too long to be tokenized
        ({"input": [[1], [9999]]}, "input[1]"),
        ({"input": []}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": [9999]}, "input"),
        ({"input": 3}, "input"),
        ({"input": "the " * 300}, "input"),
        ({"input": ["a"] * 1025}, "input"),
        ({"input": "a", "dimensions": 2}, "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({}, "input"),
    ],
)
async def test_refusals(fields: dict[str, Any], param: str) -> None:
    async with gateway() as served:
        assert error_of(await post(served, "/v1/embeddings", **fields), 400)["param"] == param


async def test_scores_are_cosines() -> None:
    async with gateway() as served:
        one = (await post(served, "/v1/score", text_1="hello", text_2=["hello", "the quick dog"])).json()
        pairs = (await post(served, "/v1/score", text_1=["hello", "the dog"], text_2=["hello", "the dog"])).json()
    assert [entry["score"] for entry in pairs["data"]] == pytest.approx([1.0, 1.0])
    assert one["data"][0]["score"] == pytest.approx(1.0)
    first, second = direction(tokens_of("hello")), direction(tokens_of("the quick dog"))
    assert one["data"][1]["score"] == pytest.approx(sum(a * b for a, b in zip(first, second, strict=True)), abs=1e-6)


async def test_pairs_that_do_not_match_are_refused() -> None:
    async with gateway() as served:
        response = await post(served, "/v1/score", text_1=["a", "b"], text_2=["a", "b", "c"])
    assert error_of(response, 400)["param"] == "text_1"


@each(
    ("path", "texts", "param"),
    [
        ("/v1/score", {"text_1": ["a", ""], "text_2": ["a", "b"]}, "text_1[1]"),
        ("/v1/score", {"text_1": "a", "text_2": ["a", ""]}, "text_2[1]"),
        ("/v1/rerank", {"query": "", "documents": ["a"]}, "query"),
        ("/v1/rerank", {"query": "a", "documents": [""]}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": [{"title": "c"}]}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b", {"text": 7}]}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b", {"text": ""}]}, "documents[1]"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "fox " * 300, "documents": ["a"]}, "query"),
    ],
)
async def test_the_side_that_is_wrong_is_named(path: str, texts: dict[str, Any], param: str) -> None:
    async with gateway() as served:
        assert error_of(await post(served, path, **texts), 400)["param"] == param


@each(
    ("path", "texts"),
    [
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
    ],
)
async def test_objectives_are_reported_and_not_taken_at_best_effort(path: str, texts: dict[str, Any]) -> None:
    headers, body = {"x-slo-ttft-ms": "500"}, {"model": "tiny", **texts}
    async with gateway() as served:
        answer = (await served.client.post(path, json=body, headers=headers)).json()
        refusal = await served.client.post(path, json=body | {"service_tier": "flex"}, headers=headers)
    assert answer["alignedserve"]["slo"]["ttft"]["target_ms"] == 500.0
    assert error_of(refusal, 400)["param"] == "service_tier"


def test_no_cosine_is_beyond_one() -> None:
    vector = struct.pack("<4f", 0.3, 0.05, 0.1, 0.05)  # its product with itself is 1 + 1.2e-7 in float32
    assert cosines([vector, vector], 1) == [1.0]


@each("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
@each(
    ("documents", "ignored"),
    [
        ("the dog", None),
        (["the dog", "hello"], None),
        (["the dog", {"text": "hello", "title": "t", "url": {"a": 1}}], "documents[].title, documents[].url"),
    ],
)
async def test_rankings_answer_at_every_path_and_ignore_further_fields_of_documents(
    path: str, documents: Any, ignored: str | None
) -> None:
    async with gateway() as served:
        answer = await post(served, path, query="hello", documents=documents, top_n=0, max_tokens_per_doc=4096)
    assert answer.status_code == 200, answer.text
    results = answer.json()["results"]
    assert (len(results), results[0]["index"]) == ((1, 0) if isinstance(documents, str) else (2, 1))
    assert results[0]["document"]["text"] == ("the dog" if isinstance(documents, str) else "hello")
    named = filter(None, ["max_tokens_per_doc", ignored])
    assert answer.headers["x-alignedserve-ignored-fields"] == ", ".join(named)


async def test_a_ranking_begins_with_the_likest() -> None:
    async with gateway() as served:
        body = (
            await post(
                served,
                "/v1/rerank",
                query="hello",
                documents=["the quick dog", {"text": "hello"}, "hello world"],
                top_n=2,
            )
        ).json()
    first = body["results"][0]
    assert (first["index"], first["document"]) == (1, {"text": "hello"})
    assert first["relevance_score"] == pytest.approx(1.0)
    assert len(body["results"]) == 2


async def test_of_many_texts_a_few_are_open_at_once_and_all_are_answered() -> None:
    """A thousand at once held up the router and a worker for a second, and every chat that came then."""
    texts = [[number % 100 + 1] for number in range(200)]
    async with gateway() as served:
        answer = await post(served, "/v1/embeddings", input=texts)
        assert answer.status_code == 200
        requests = served.backend.submitted
        assert [request.prompt_token_ids for request in requests] == [tuple(text) for text in texts]
        vectors = [entry["embedding"] for entry in answer.json()["data"]]
        assert vectors == [pytest.approx(direction(tuple(text)), abs=1e-6) for text in texts]


async def test_a_client_that_goes_leaves_none_of_many_texts() -> None:
    async with gateway(lambda request: Script((), first_token_delay_s=60.0)) as served:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                await post(served, "/v1/embeddings", input=[[number + 1] for number in range(200)])
        assert (len(served.backend.submitted), len(served.backend.aborted)) == (64, 64)
