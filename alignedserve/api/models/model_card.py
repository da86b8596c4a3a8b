"""What clients, prompt builders and answer parsers need to know about a model."""

import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from alignedserve.api.picture_reader import PictureReader
from alignedserve.api.work_lanes import WorkLanes
from alignedserve.config.sections import GatewayConfig
from alignedserve.core.errors import InvalidRequest
from alignedserve.core.request import LoraAdapter
from alignedserve.core.seeing import PictureForm
from alignedserve.runtime.grammar.trials import ALONE, TrialTurn
from alignedserve.runtime.model.encoder.encoder_config import EncoderConfig
from alignedserve.runtime.model.sampling_defaults import SamplingDefaults
from alignedserve.runtime.model.served_model import ServedModel
from alignedserve.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ModelCard:
    """One model under the name that clients use."""

    name: str
    folder: Path  # holds tokenizer.json
    max_context_len: int  # tokens, prompt and answer together
    eos_token_ids: tuple[int, ...] = ()
    created: int = field(default_factory=lambda: int(time.time()))  # Unix time, for /v1/models
    vocab_size: int | None = None  # rows of the embedding; None: as many as the tokenizer has tokens
    tool_format: str | None = None  # of tool calls; None: found in the chat template
    reasoning_format: str | None = None  # of thoughts; None: found in the chat template
    chat_template: str | None = None  # instead of the model's own
    aliases: tuple[str, ...] = ()  # further names of it
    alias_of: str | None = None  # the model's first name; None: this is no alias
    parent: str | None = None  # the adapted model; None: this is no adapter
    encoder: EncoderConfig | None = None  # None: the model is a decoder
    picture_form: PictureForm | None = None  # how it sees pictures; None: it does not
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)  # of requests that name nothing

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        """Return what the model can be asked for, in vLLM's words."""
        if self.encoder is None:
            return ("generate", "embed", "score")
        return ("score",) if self.encoder.score is not None else ("embed", "score")

    def require_generation(self, param: str) -> None:
        """Raise InvalidRequest naming `param` unless the model writes text."""
        if self.encoder is not None:
            raise InvalidRequest(
                f"This model is an encoder: it writes no text. It serves {self._endpoints}.",
                param=param,
                code="unsupported_model",
            )

    @property
    def _endpoints(self) -> str:
        paths = {"embed": "/v1/embeddings", "score": "/v1/score and /v1/rerank"}
        return ", ".join(paths[task] for task in self.supported_tasks)

    def load_tokenizer(self) -> Tokenizer:
        """Load the model's tokenizer. Raises ModelError."""
        return Tokenizer.load(self.folder, self.vocab_size, self.chat_template)

    def of_adapter(self, adapter: LoraAdapter) -> "ModelCard":
        """Return the card of an adapter of this model."""
        return replace(self, name=adapter.name, aliases=(), parent=self.name)

    @property
    def of_aliases(self) -> "tuple[ModelCard, ...]":
        """Return the card of each alias."""
        return tuple(replace(self, name=alias, aliases=(), alias_of=self.name) for alias in self.aliases)

    @classmethod
    def of(cls, served: ServedModel) -> "ModelCard":
        """Return the card of a resolved model."""
        config = served.config
        return cls(
            served.name,
            served.folder,
            served.max_context_len,
            config.eos_token_ids,
            vocab_size=config.vocab_size,
            tool_format=served.tool_format,
            reasoning_format=served.reasoning_format,
            chat_template=served.chat_template,
            encoder=served.encoder,
            picture_form=None if served.vision is None else served.vision.form,
            sampling=served.sampling,
            aliases=served.aliases,
        )


class GrammarCheck(Protocol):
    """Checks grammars before answers are decoded under them."""

    async def check(self, grammar: str, turn: TrialTurn = ALONE) -> None:
        """Return once the grammar is known to work; it is tried in its turn. Raises InvalidRequest."""


class PromptModel(Protocol):
    """A model for which prompts are made."""

    @property
    def model(self) -> ModelCard:
        """Return the names of its formats, and the tokens that end its answers."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Return its tokenizer, which has its chat template."""


class PromptServices(PromptModel, Protocol):
    """The part of ModelServices that encodes prompts, within the limits of a gateway."""

    @property
    def config(self) -> GatewayConfig:
        """Return the limits."""

    @property
    def lanes(self) -> WorkLanes:
        """Return where long prompts are encoded."""

    @property
    def pictures(self) -> PictureReader:
        """Return what decodes pictures."""


class ChatModel(PromptModel, Protocol):
    """A model that answers conversations."""

    @property
    def lanes(self) -> WorkLanes:
        """Return where long grammars are written."""

    @property
    def grammars(self) -> GrammarCheck:
        """Return what checks grammars."""
