"""Helpers of the gateway's tests: a small tokenizer, apps over scripts, and a reader of event streams."""

import asyncio
import atexit
import json
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import httpx
from starlette.applications import Starlette
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from alignedserve.api.backend.interface import ReadinessProbe
from alignedserve.api.models.model_services import ModelCard
from alignedserve.api.prefix_hasher import PrefixHasher
from alignedserve.config.sections import GatewayConfig
from alignedserve.core.request import Request, RequestClass
from alignedserve.gateway.app import build_app
from alignedserve.gateway.services import Services, build_services
from alignedserve.keys.ring import CurrentKeys, KeyRing
from alignedserve.text import tokenizer as ours
from tests.harnesses.scripted_backend import Script, ScriptedBackend

EOS = 1
CORPUS = ["the quick brown fox jumps over the lazy dog", "hello world, how are you today?", "stop here and now"] * 4
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@cache
def tokenizer_folder() -> Path:
    """A model folder with a small byte-level BPE and a chat template."""
    folder = Path(mkdtemp(prefix="alignedserve-test-tokenizer-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path, template: str | None = TEMPLATE, control_tokens: Sequence[str] = ()) -> None:
    special = ["<|bos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", *control_tokens]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(token, special=True) for token in special],
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|bos|>", "eos_token": "<|end|>"}
    config |= {"chat_template": template} if template is not None else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_sentencepiece(folder: Path) -> None:
    """Write a tokenizer whose words begin with their space, left out where a text begins. Its end token is 2."""
    words = ["\u2581the", "\u2581quick", "\u2581dog", "the", "\u2581"]
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *((word, -1.0) for word in words)]
    tokenizer = Tokenizer(models.Unigram(pieces, 0, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for message in messages %}{{ message.content }}</s>{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "chat_template": template}))


@cache
def tokenizer() -> ours.Tokenizer:
    return ours.Tokenizer.load(tokenizer_folder())


def tokens_of(text: str) -> tuple[int, ...]:
    return tuple(tokenizer().encode(text, add_special_tokens=False))


def saying(text: str, **fields: Any) -> Callable[[Request], Script]:
    """Return a script that says this and ends."""
    script = Script((*tokens_of(text), EOS), **fields)
    return lambda _: script


def documents_held(text: str, until: asyncio.Event) -> Callable[[Request], Script]:
    """Return a script that says this: at once to chat, to best-effort requests when the event is set."""
    at_once, later = saying(text), saying(text, held_until=until)
    return lambda request: (later if request.request_class is RequestClass.BEST_EFFORT else at_once)(request)


@dataclass
class Gateway:
    """An app over a scripted backend, and a client of it."""

    client: httpx.AsyncClient
    backend: ScriptedBackend
    services: Services
    app: Starlette

    async def chat(self, *, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], **fields}
        return await self.client.post("/v1/chat/completions", json=body, headers=headers)

    async def complete(self, *, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        body = {"model": "tiny", "prompt": "hello world", **fields}
        return await self.client.post("/v1/completions", json=body, headers=headers)


def probe_of(served: Gateway) -> ReadinessProbe:
    """Return the readiness probe of the one model."""
    return served.services.find_model(None).readiness_probe


def services_for(
    backend: ScriptedBackend,
    config: GatewayConfig,
    api_keys: tuple[str, ...] = (),
    prefix_hasher: PrefixHasher | None = None,
    model: ModelCard | None = None,
) -> Services:
    card = model or ModelCard("tiny", tokenizer_folder(), 256, (EOS,), created=1_700_000_000)
    services = build_services(config, keys=CurrentKeys(KeyRing(api_keys)), reply_to="unix:/nowhere")
    services.add_model(card, backend, tokenizer() if model is None else model.load_tokenizer(), prefix_hasher)
    return services


@asynccontextmanager
async def gateway(
    script: Callable[[Request], Script] | None = None,
    *,
    api_keys: tuple[str, ...] = (),
    prefix_hasher: PrefixHasher | None = None,
    model: ModelCard | None = None,
    **config: Any,
) -> AsyncIterator[Gateway]:
    backend = ScriptedBackend(script or saying("hello world"))
    services = services_for(backend, GatewayConfig(**config), api_keys, prefix_hasher, model)
    app = build_app(services)
    try:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            yield Gateway(client, backend, services, app)
    finally:
        services.close()


def chunks_of(response: httpx.Response) -> list[dict[str, Any]]:
    """Return the JSON of every event; the stream must end with [DONE], and no chunk have two pieces of one call."""
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    for choice in [choice for chunk in chunks for choice in chunk.get("choices", ())]:
        indices = [call["index"] for call in choice.get("delta", {}).get("tool_calls", ())]
        assert len(indices) == len(set(indices)), choice
    return chunks


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """Return the error object, which must be complete and alone."""
    assert response.status_code == status, response.text
    body = response.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    return error
