"""Protocols of a model whose prompts are made, and that answers conversations, in a gateway or without one."""

from typing import Protocol

from alignedserve.api.models.model_card import ModelCard
from alignedserve.api.work_lanes import WorkLanes
from alignedserve.config.sections import GatewayConfig
from alignedserve.text.tokenizer import Tokenizer


class GrammarCheck(Protocol):
    """Checks grammars before answers are decoded under them."""

    async def check(self, grammar: str, tenant: str = "") -> None:
        """Return once the grammar is known to work; tenants take turns. Raises InvalidRequest."""


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


class ChatModel(PromptModel, Protocol):
    """A model that answers conversations."""

    @property
    def grammars(self) -> GrammarCheck:
        """Return what checks grammars."""
