"""Reads long bodies, whichever endpoint they are for."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

from alignedserve.api.endpoints import ENDPOINTS, TOKEN_ENDPOINTS, NeedsGateway
from alignedserve.api.models.model_card import ModelCard
from alignedserve.api.openai.parsing import parse_json
from alignedserve.api.openai.schemas.ignored_fields import IgnoredFields
from alignedserve.api.work_lanes import WorkLanes
from alignedserve.config.sections import GatewayConfig
from alignedserve.core.errors import InvalidRequest
from alignedserve.gateway.long_bodies.messages import Answer, EncodedPrompt, NotRead, Outcome, ReadBody, Refusal
from alignedserve.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model, as far as prompts need it."""

    model: ModelCard
    tokenizer: Tokenizer
    config: GatewayConfig
    lanes: WorkLanes


FindModel = Callable[[str | None], LoadedModel | None]


class BodyReading:
    """Reads one body."""

    def __init__(self, path: str, config: GatewayConfig, find: FindModel) -> None:
        """`path`: of the endpoint. `find`: returns the model of a name; None: only the gateway may know it."""
        self._path = path
        self._config = config
        self._find_model = find
        self._ignored = None if config.strict else IgnoredFields()

    async def read(self, raw: bytes) -> Outcome:
        """Return what becomes of the body."""
        try:
            return await self._read(parse_json(raw, self._config))
        except InvalidRequest as error:
            return Refusal.of(error, self._ignored_names)
        except NeedsGateway:
            return NotRead()

    async def _read(self, body: dict[str, Any]) -> Outcome:
        if self._path in TOKEN_ENDPOINTS:
            counted = TOKEN_ENDPOINTS[self._path]
            asked = counted.parse(body, self._ignored)
            answer = await counted.answer(asked, self._find(asked.model), self._ignored)
            return Answer(answer, self._ignored_names)
        endpoint = ENDPOINTS[self._path]
        asked = endpoint.parse(body, self._ignored)
        prompts = await endpoint.prompts(asked, self._find(asked.model), self._ignored)
        if endpoint.short is None:
            return NotRead()
        packed = tuple(EncodedPrompt.of(prompt, keeps_text=bool(body.get("echo"))) for prompt in prompts)
        return ReadBody(orjson.dumps(body | endpoint.short(asked)), packed, self._ignored_names)

    def _find(self, name: str | None) -> LoadedModel:
        model = self._find_model(name)
        if model is None:
            raise NeedsGateway
        return model

    @property
    def _ignored_names(self) -> tuple[str, ...]:
        return self._ignored.names if self._ignored is not None else ()
