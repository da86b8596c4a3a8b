"""The process that reads long bodies. Two frames come for each, ReadingTask and body; one goes, the Outcome."""

import asyncio
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from alignedserve.api.endpoints import ENDPOINTS, TOKEN_ENDPOINTS
from alignedserve.api.errors import NeedsGateway
from alignedserve.api.models.model_services import ModelCard
from alignedserve.api.openai.parsing import parse_json
from alignedserve.api.picture_reader import PictureReader
from alignedserve.api.schema import IgnoredFields
from alignedserve.api.work_lanes import WorkLanes
from alignedserve.config.sections import GatewayConfig
from alignedserve.core.errors import InvalidRequest, ModelError
from alignedserve.gateway.long_bodies.messages import (
    CountedTokens,
    EncodedPrompt,
    NotRead,
    Outcome,
    ReadBody,
    ReadingTask,
    Refusal,
    decode_task,
    encode,
)
from alignedserve.process.frames import read_frame, write_frame
from alignedserve.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)
_NICENESS = 5  # streams go first where cores are few
_MAX_TOKENIZERS = 8


@dataclass(frozen=True, slots=True)
class ReadingModel:
    """A model, as far as prompts need it."""

    model: ModelCard
    tokenizer: Tokenizer
    config: GatewayConfig
    lanes: WorkLanes
    pictures: PictureReader


FindModel = Callable[[str | None], ReadingModel | None]


class BodyReading:
    """Reads one body."""

    def __init__(self, path: str, config: GatewayConfig, find: FindModel) -> None:
        """`path`: of the endpoint. `find`: returns the model of a name; None: only the gateway may know it."""
        self._path = path
        self._config = config
        self._find_model = find
        self._ignored = None if config.strict else IgnoredFields()

    async def read(self, raw: bytes) -> Outcome:
        try:
            return await self._read(parse_json(raw, self._config))
        except InvalidRequest as error:
            return Refusal.of(error, self._ignored_names)
        except NeedsGateway:
            return NotRead()

    async def _read(self, body: dict[str, Any]) -> Outcome:
        if self._path in TOKEN_ENDPOINTS:
            counted = TOKEN_ENDPOINTS[self._path]
            fields = counted.parse(body, self._ignored)
            answer = await counted.answer(fields, self._find(fields.model), self._ignored)
            return CountedTokens(answer, self._ignored_names)
        endpoint = ENDPOINTS[self._path]
        fields = endpoint.parse(body, self._ignored)
        prompts = await endpoint.prompts(fields, self._find(fields.model), self._ignored)
        if endpoint.short is None:
            return NotRead()
        packed = tuple(EncodedPrompt.of(prompt, keeps_text=bool(body.get("echo"))) for prompt in prompts)
        return ReadBody(orjson.dumps(body | endpoint.short(fields)), packed, self._ignored_names)

    def _find(self, name: str | None) -> ReadingModel:
        model = self._find_model(name)
        if model is None:
            raise NeedsGateway
        return model

    @property
    def _ignored_names(self) -> tuple[str, ...]:
        return self._ignored.names if self._ignored is not None else ()


def main() -> None:
    os.nice(_NICENESS)
    source, target = sys.stdin.buffer, sys.stdout.buffer
    models = _Models()
    with asyncio.Runner() as runner:
        while (described := read_frame(source)) is not None and (raw := read_frame(source)) is not None:
            write_frame(target, encode(runner.run(_outcome(decode_task(described), raw, models))))


async def _outcome(order: ReadingTask, raw: bytes, models: "_Models") -> Outcome:
    def find(name: str | None) -> ReadingModel | None:
        first = order.first if name is None else order.names.get(name)
        return None if first is None else models.get(order.cards[first], order.config)

    try:
        return await BodyReading(order.path, order.config, find).read(raw)
    except Exception:
        logger.exception("a long body could not be read")
        return NotRead()


class _Models:
    def __init__(self) -> None:
        self._tokenizers: dict[tuple[Path, int | None, str | None], Tokenizer] = {}
        self._lanes = WorkLanes()
        self._pictures = PictureReader(fetches=False)

    def get(self, card: ModelCard, config: GatewayConfig) -> ReadingModel | None:
        key = (card.folder, card.vocab_size, card.chat_template)
        tokenizer = self._tokenizers.pop(key, None)
        try:
            tokenizer = tokenizer or card.load_tokenizer()
        except ModelError:
            return None
        self._tokenizers[key] = tokenizer
        while len(self._tokenizers) > _MAX_TOKENIZERS:
            del self._tokenizers[next(iter(self._tokenizers))]
        return ReadingModel(card, tokenizer, config, self._lanes, self._pictures)
