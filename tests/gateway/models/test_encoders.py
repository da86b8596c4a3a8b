"""Encoders over HTTP: what they serve, what they refuse, prompts, shortening, pairs."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import httpx
import numpy as np
import pytest

from alignedserve.api.models.model_services import ModelCard
from alignedserve.core.request import RequestClass
from alignedserve.gateway.routes import request_bodies
from alignedserve.runtime.model.decoder.decoder_parts import Activation
from alignedserve.runtime.model.encoder.encoder_config import (
    EmbeddingConfig,
    EncoderConfig,
    EncoderFamily,
    HeadActivation,
)
from tests.gateway.batches.batch_support import batch_gateway
from tests.gateway.support import Gateway, error_of, gateway
from tests.support.marks import each
from tests.support.models.tiny_encoders import VOCABULARY, write_tokenizer

CONFIG = EncoderConfig(
    family=EncoderFamily.BERT,
    vocab_size=len(VOCABULARY),
    hidden_size=4,
    intermediate_size=8,
    num_layers=1,
    num_heads=1,
    num_positions=24,
    position_offset=0,
    num_token_types=2,
    activation=Activation.GELU,
    norm_eps=1e-12,
    dtype="float32",
    max_position_embeddings=24,
)
CROSS_ENCODER = replace(CONFIG, score=HeadActivation.SIGMOID)
PROMPTS = (("query", "ask "), ("passage", "say "), ("plain", "x "))


@cache
def folder() -> Path:
    made = Path(mkdtemp(prefix="alignedserve-test-encoder-"))
    write_tokenizer(made, has_types=True)
    return made


def card(config: EncoderConfig = CONFIG) -> ModelCard:
    return ModelCard("tiny", folder(), config.max_position_embeddings, vocab_size=config.vocab_size, encoder=config)


def card_with(**embedding: Any) -> ModelCard:
    return card(replace(CONFIG, embedding=EmbeddingConfig(**embedding)))


def ids(text: str) -> tuple[int, ...]:
    """Return the token ids of words of letters, with special tokens around."""
    words = [[letter if not place else f"##{letter}" for place, letter in enumerate(word)] for word in text.split()]
    return (0, *(VOCABULARY.index(piece) for word in words for piece in word), 2)


async def post(served: Gateway, path: str, **body: Any) -> httpx.Response:
    return await served.client.post(path, json={"model": "tiny"} | body)


@pytest.fixture(params=["read here", "read in another process"])
def _readers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param != "read here":
        monkeypatch.setattr(request_bodies, "LONG_LEN", -1)


async def test_texts_have_special_tokens_around_them() -> None:
    async with gateway(model=card()) as served:
        body = (await post(served, "/v1/embeddings", input=["ab c", "d"])).json()
        submitted = [request.prompt_token_ids for request in served.backend.submitted]
        assert all(not request.prefix_root for request in served.backend.submitted)
    assert submitted == [ids("ab c"), ids("d")]
    assert body["usage"]["prompt_tokens"] == 8


@each(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/responses", {"input": "a"}),
    ],
)
async def test_nothing_is_generated(path: str, body: dict[str, Any]) -> None:
    async with gateway(model=card()) as served:
        error = error_of(await post(served, path, **body), 400)
        assert served.backend.submitted == []
    assert "/v1/embeddings" in error["message"]


async def test_what_a_model_can_do_is_listed() -> None:
    for model, tasks in ((card(), ["embed", "score"]), (card(CROSS_ENCODER), ["score"])):
        async with gateway(model=model) as served:
            body = (await served.client.get("/v1/models")).json()
        assert body["data"][0]["supported_tasks"] == tasks


async def test_a_long_text_is_refused_or_cut_at_its_end() -> None:
    async with gateway(model=card()) as served:
        assert error_of(await post(served, "/v1/embeddings", input="a" * 30), 400)["param"] == "input"
        for truncate_to, letters in ((-1, 22), (5, 3), (99, 22)):
            await post(served, "/v1/embeddings", input="b" * 30, truncate_prompt_tokens=truncate_to)
            assert served.backend.submitted[-1].prompt_token_ids == ids("b" * letters)
        await post(served, "/v1/embeddings", input=[4, 5, 6, 7], truncate_prompt_tokens=2)
        assert served.backend.submitted[-1].prompt_token_ids == (4, 5)
        for wrong in (0, 2, -2):
            answer = await post(served, "/v1/embeddings", input="b" * 30, truncate_prompt_tokens=wrong)
            assert error_of(answer, 400)["param"] == "truncate_prompt_tokens"


@pytest.mark.usefixtures("_readers")
async def test_prompts_of_the_model_are_put_before_texts() -> None:
    async with gateway(model=card_with(prompts=PROMPTS, default_prompt="plain")) as served:
        for fields, expected in (
            ({"prompt_name": "query"}, ids("ask a")),
            ({}, ids("x a")),
        ):
            await post(served, "/v1/embeddings", input="a", **fields)
            assert served.backend.submitted[-1].prompt_token_ids == expected
        error = error_of(await post(served, "/v1/embeddings", input="a", prompt_name="other"), 400)
        assert error["param"] == "prompt_name"
        assert "query, passage, plain" in error["message"]
        await post(served, "/v1/rerank", query="a", documents=["b", "c"])
        submitted = [request.prompt_token_ids for request in served.backend.submitted[-3:]]
    assert submitted == [ids("ask a"), ids("say b"), ids("say c")]


async def test_vectors_are_cut_where_the_model_was_trained_for_it() -> None:
    async with gateway(model=card_with(is_matryoshka=True)) as served:
        whole = (await post(served, "/v1/embeddings", input="abc")).json()["data"][0]["embedding"]
        cut = (await post(served, "/v1/embeddings", input="abc", dimensions=2)).json()["data"][0]["embedding"]
        assert error_of(await post(served, "/v1/embeddings", input="abc", dimensions=5), 400)["param"] == "dimensions"
    assert cut == pytest.approx((np.array(whole[:2]) / np.linalg.norm(whole[:2])).tolist())


@each("embedding", [{}, {"is_matryoshka": True, "dimensions": (3,)}])
async def test_other_lengths_are_refused(embedding: dict[str, Any]) -> None:
    async with gateway(model=card_with(**embedding)) as served:
        assert error_of(await post(served, "/v1/embeddings", input="abc", dimensions=2), 400)["param"] == "dimensions"


@pytest.mark.usefixtures("_readers")
async def test_a_cross_encoder_reads_pairs() -> None:
    async with gateway(model=card(CROSS_ENCODER)) as served:
        scores = (await post(served, "/v1/score", text_1="a", text_2=["bc", "d"])).json()
        first, second = served.backend.submitted
        ranking = (await post(served, "/v1/rerank", query="a", documents=["b", "cde"], top_n=1)).json()
    assert first.prompt_token_ids == (*ids("a"), *ids("bc")[1:])
    assert (first.second_text_at, second.second_text_at) == (3, 3)
    assert first.sampling.wants_embedding
    # The scripted backend's first number is the length of the prompt.
    assert [entry["score"] for entry in scores["data"]] == [6.0, 5.0]
    assert scores["usage"]["prompt_tokens"] == 11
    assert [(result["index"], result["relevance_score"]) for result in ranking["results"]] == [(1, 7.0)]


async def test_pairs_are_cut_at_the_end_of_the_longer_text() -> None:
    async with gateway(model=card(CROSS_ENCODER)) as served:
        fields = {"text_1": "abc", "text_2": ["b" * 30]}
        assert error_of(await post(served, "/v1/score", **fields), 400)["param"] == "text_2"
        await post(served, "/v1/score", **fields, truncate_prompt_tokens=-1)
        (request,) = served.backend.submitted
    assert request.prompt_token_ids == (*ids("abc"), *ids("b" * 18)[1:])


async def test_a_cross_encoder_has_no_vectors() -> None:
    async with gateway(model=card(CROSS_ENCODER)) as served:
        error = error_of(await post(served, "/v1/embeddings", input="a"), 400)
        empty = error_of(await post(served, "/v1/score", text_1="a", text_2=[""]), 400)
        many = error_of(await post(served, "/v1/score", text_1="a", text_2=["b"] * 1025), 400)
    assert "/v1/rerank" in error["message"]
    assert (empty["param"], many["param"]) == ("text_2", "text_2")


async def records_of(folder: Path, endpoint: str, *bodies: dict[str, Any], model: ModelCard) -> list[dict[str, Any]]:
    """Return the responses of the lines of one batch, in their order."""
    lines = [
        json.dumps({"custom_id": str(place), "method": "POST", "url": endpoint, "body": {"model": "tiny"} | body})
        for place, body in enumerate(bodies)
    ]
    async with batch_gateway(folder, model=model) as served:
        batch = await served.submit("\n".join(lines).encode(), endpoint=endpoint)
        done = await served.wait_for(batch["id"])
        files = [done[name] for name in ("output_file_id", "error_file_id") if done.get(name)]
        records = [json.loads(record) for file_id in files for record in await served.results(file_id)]
        assert all(request.request_class is RequestClass.BEST_EFFORT for request in served.backend.submitted)
    return [record["response"] for record in sorted(records, key=lambda record: int(record["custom_id"]))]


async def test_a_batch_of_texts(tmp_path: Path) -> None:
    model = card_with(prompts=PROMPTS, is_matryoshka=True)
    bodies = (
        {"input": ["ab c", "d"]},
        {"input": "ab", "prompt_name": "query", "dimensions": 2},
        {"input": "b" * 30, "truncate_prompt_tokens": 5},
        {"input": "b" * 30},
        {"input": "ab", "prompt_name": "other"},
    )
    plain, cut, short, *refused = await records_of(tmp_path, "/v1/embeddings", *bodies, model=model)
    assert [entry["index"] for entry in plain["body"]["data"]] == [0, 1]
    assert plain["body"]["usage"]["prompt_tokens"] == 8
    assert len(cut["body"]["data"][0]["embedding"]) == 2
    assert cut["body"]["usage"]["prompt_tokens"] == len(ids("ask ab"))
    assert short["body"]["usage"]["prompt_tokens"] == 5
    assert [(one["status_code"], one["body"]["error"]["param"]) for one in refused] == [
        (400, "input"),
        (400, "prompt_name"),
    ]


async def test_a_line_that_generates_fails_alone_at_an_encoder(tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "a"}]}
    (answer,) = await records_of(tmp_path, "/v1/chat/completions", chat, model=card())
    assert answer["status_code"] == 400
    assert "/v1/embeddings" in answer["body"]["error"]["message"]


async def test_a_batch_of_vectors_from_a_cross_encoder_is_refused(tmp_path: Path) -> None:
    (answer,) = await records_of(tmp_path, "/v1/embeddings", {"input": "a"}, model=card(CROSS_ENCODER))
    assert answer["status_code"] == 400
    assert "/v1/rerank" in answer["body"]["error"]["message"]
