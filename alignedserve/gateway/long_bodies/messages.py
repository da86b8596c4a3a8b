"""Messages between the gateway and the process that reads long bodies: a ReadingTask and a body, then an Outcome."""

from array import array
from pathlib import Path
from typing import Any

import msgspec

from alignedserve.api.models.model_services import ModelCard
from alignedserve.api.openai.prompt_encoding import Prompt, Prompts
from alignedserve.config.sections import GatewayConfig
from alignedserve.core.errors import ContextTooLong, InvalidRequest
from alignedserve.core.picture import Picture
from alignedserve.core.seeing import decode_seeing


class ReadingTask(msgspec.Struct, frozen=True):
    """How the body that follows is to be read."""

    path: str  # of its endpoint
    config: GatewayConfig
    cards: tuple[ModelCard, ...]  # of models whose tokenizers are loaded
    names: dict[str, int]  # the card's place for each name that a body may have, adapters' among them
    first: int | None = None  # the card's place for bodies that name none; None: that model is not loaded


class EncodedPrompt(msgspec.Struct, frozen=True):
    """A prompt on its way."""

    token_ids: bytes  # each as an unsigned int of this machine
    text: str
    second_text_at: int
    pictures: tuple[Picture, ...] = ()

    @classmethod
    def of(cls, prompt: Prompt, *, keeps_text: bool) -> "EncodedPrompt":
        text = prompt.text if keeps_text else ""
        return cls(array("I", prompt.token_ids).tobytes(), text, prompt.second_text_at, prompt.pictures)

    def unpacked(self) -> Prompt:
        return Prompt(tuple(array("I", self.token_ids)), self.text, self.second_text_at, self.pictures)


class ReadBody(msgspec.Struct, frozen=True, tag=True):
    """A body whose prompts are encoded."""

    body: bytes  # JSON: the body, with something short for a prompt
    prompts: tuple[EncodedPrompt, ...]
    ignored: tuple[str, ...]  # names of ignored fields

    def unpacked(self) -> Prompts:
        return tuple(prompt.unpacked() for prompt in self.prompts)


class CountedTokens(msgspec.Struct, frozen=True, tag=True):
    """The whole answer to a body that asks for no more than reading."""

    answer: bytes  # JSON
    ignored: tuple[str, ...]


class Refusal(msgspec.Struct, frozen=True, tag=True):
    """A body that is refused."""

    message: str
    param: str | None
    code: str | None
    is_too_long: bool
    num_tokens: int | None
    ignored: tuple[str, ...]

    @classmethod
    def of(cls, error: InvalidRequest, ignored: tuple[str, ...]) -> "Refusal":
        num_tokens = error.num_tokens if isinstance(error, ContextTooLong) else None
        return cls(str(error), error.param, error.code, isinstance(error, ContextTooLong), num_tokens, ignored)

    def error(self) -> InvalidRequest:
        if self.is_too_long:
            return ContextTooLong(self.message, param=self.param, code=self.code, num_tokens=self.num_tokens)
        return InvalidRequest(self.message, param=self.param, code=self.code)


class NotRead(msgspec.Struct, frozen=True, tag=True):
    """A body that only the gateway itself can read."""


Outcome = ReadBody | CountedTokens | Refusal | NotRead
_OUTCOMES: msgspec.msgpack.Decoder[Outcome] = msgspec.msgpack.Decoder(Outcome)


def encode(message: ReadingTask | Outcome) -> bytes:
    return msgspec.msgpack.encode(message, enc_hook=str)  # paths are the only ones it does not know


def decode_task(raw: bytes) -> ReadingTask:
    return msgspec.msgpack.decode(raw, type=ReadingTask, dec_hook=_decoded)


def decode_outcome(raw: bytes) -> Outcome:
    return _OUTCOMES.decode(raw)


def _decoded(kind: type, value: Any) -> Any:
    return Path(value) if kind is Path else decode_seeing(kind, value)
