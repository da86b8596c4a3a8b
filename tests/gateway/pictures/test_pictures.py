"""Pictures as clients send them: every API's form becomes the same request, and bad ones are refused by name."""

import base64
import sys
from typing import Any

import httpx
import pytest

from alignedserve.api.models.model_services import ModelCard
from alignedserve.core.plugins import load_plugin
from alignedserve.core.request import Request
from alignedserve.text.tokenizer import Tokenizer
from plugins.vision.forms import Scaling, TiledForm
from tests.gateway.support import EOS, Gateway, error_of, gateway, write_tokenizer
from tests.support.models.tiny_vision import MARKS, TEMPLATE, TILES, picture

HALVES = (0.5, 0.5, 0.5)
GOOD = picture(20, 20)
Part = dict[str, Any]


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> ModelCard:
    folder = tmp_path_factory.mktemp("seeing")
    write_tokenizer(folder, TEMPLATE, (*MARKS, *TILES))
    token_id = Tokenizer.load(folder).encode("<image>", add_special_tokens=False)[0]
    form = TiledForm(token_id, 16, 32, 4, Scaling(1 / 255, HALVES, HALVES), 1)
    return ModelCard("tiny", folder, 256, (EOS,), picture_form=form)


def data_url(content: bytes = GOOD) -> str:
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def image(url: str | None = None) -> Part:
    return {"type": "image_url", "image_url": {"url": url or data_url()}}


def text(words: str) -> Part:
    return {"type": "text", "text": words}


async def chat(served: Gateway, *parts: Part, **message: Any) -> httpx.Response:
    return await served.chat(messages=[{"role": "user", "content": list(parts), **message}])


async def sent(served: Gateway, *parts: Part) -> Request:
    answer = await chat(served, *parts)
    assert answer.status_code == 200, answer.text
    return served.backend.submitted[-1]


async def test_every_api_and_a_long_body_make_the_same_request(seeing: ModelCard) -> None:
    async with gateway(model=seeing) as served:
        request = await sent(served, text("hello "), image(), text(" world <image>"))
        (shown,) = request.pictures
        assert isinstance(seeing.picture_form, TiledForm)
        places = [at for at, token in enumerate(request.prompt_token_ids) if token == seeing.picture_form.token_id]
        assert shown.positions == places  # what the user spells out is text
        assert (shown.content, len(places), len(shown.runs)) == (GOOD, 20, 5)
        for path, body in (
            ("/v1/messages", {"max_tokens": 9, "messages": [{"role": "user", "content": anthropic_parts()}]}),
            ("/v1/responses", {"store": False, "input": [{"role": "user", "content": response_parts()}]}),
        ):
            answer = await served.client.post(path, json={"model": "tiny", **body})
            assert answer.status_code == 200, answer.text
            other = served.backend.submitted[-1]
            assert (other.prompt_token_ids, other.pictures) == (request.prompt_token_ids, request.pictures)
        large = picture(400, 400, file_format="JPEG", seed=5)
        assert len(data_url(large)) > 60_000
        other = await sent(served, text("hello "), image(data_url(large)), text(" world <image>"))
        assert other.prompt_token_ids == request.prompt_token_ids
        assert other.cache_keys[: places[0]] == request.cache_keys[: places[0]]
        assert not {other.cache_keys[place] for place in places} & set(request.cache_keys)


def anthropic_parts() -> list[Part]:
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(GOOD).decode()}
    return [text("hello "), {"type": "image", "source": source}, text(" world <image>")]


def response_parts() -> list[Part]:
    picture_part = {"type": "input_image", "image_url": data_url(), "detail": "high"}
    return [{"type": "input_text", "text": "hello "}, picture_part, {"type": "input_text", "text": " world <image>"}]


async def test_texts_reach_a_template_that_knows_parts_alone(seeing: ModelCard) -> None:
    async with gateway(model=seeing) as served:
        answer = await served.chat()
        assert answer.status_code == 200
        prompt = served.services.find_model(None).tokenizer.decode(served.backend.submitted[-1].prompt_token_ids)
        assert "hello" in prompt


async def test_bad_pictures_are_refused_by_name_and_never_shown(seeing: ModelCard) -> None:
    secret = "c2VjcmV0" * 4
    cases: list[tuple[str, str]] = [
        ("https://pictures.example/secret.png", "not fetched"),
        ("http://169.254.169.254/secret", "not fetched"),
        ("file:///etc/secret", "data URL"),
        (f"data:text/html;base64,{secret}", "data URL"),
        ("data:image/png;base64,secret!!", "base64"),
        ("data:image/png;base64,", "empty"),
        (f"data:image/png;base64,{secret}", "not a picture"),
        (data_url(GOOD[: len(GOOD) // 2]), "truncated"),
        (data_url(picture(300, 300)), "too many pixels"),
    ]
    async with gateway(model=seeing, max_picture_pixels=80_000, max_pictures=2) as served:
        for url, problem in cases:
            error = error_of(await chat(served, image(url)), 400)
            assert error["param"] == "messages[0].content[0].image_url.url"
            assert problem in error["message"]
            assert "secret" not in error["message"]
        assert "2 pictures" in error_of(await chat(served, image(), image(), image()), 400)["message"]
        assert error_of(await chat(served, image(), role="assistant"), 400)["param"] == "messages[0].content"
        truncated = await served.chat(
            messages=[{"role": "user", "content": [image()]}], truncate_prompt_tokens=20, max_tokens=3
        )
        assert error_of(truncated, 400)["param"] == "truncate_prompt_tokens"
        assert served.backend.submitted == []
        await sent(served, image())  # and others go on


async def test_a_model_that_does_not_see_says_so() -> None:
    async with gateway() as served:
        error = error_of(await chat(served, image()), 400)
        assert (error["param"], error["code"]) == ("messages[0].content[0].type", "unsupported_parameter")
        assert "does not see" in error["message"]


async def test_a_server_without_the_plugin_says_what_to_install(
    seeing: ModelCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_plugin.cache_clear()
    monkeypatch.delitem(sys.modules, "plugins.vision")
    monkeypatch.setitem(sys.modules, "PIL", None)
    try:
        async with gateway(model=seeing) as served:
            assert "alignedserve[vision]" in error_of(await chat(served, image()), 400)["message"]
            assert (await chat(served, text("hello"))).status_code == 200
    finally:
        load_plugin.cache_clear()
