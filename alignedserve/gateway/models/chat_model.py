"""Protocols of a model that answers conversations, in a gateway or without one."""

from typing import Protocol

from alignedserve.gateway.models.model_card import ModelCard
from alignedserve.runtime.model.text.tokenizer import Tokenizer


class GrammarCheck(Protocol):
    """Checks grammars before answers are decoded under them."""

    async def check(self, grammar: str, tenant: str = "") -> None:
        """Return once the grammar is known to work; tenants take turns. Raises InvalidRequest."""


class ChatModel(Protocol):
    """A model that answers conversations."""

    @property
    def model(self) -> ModelCard:
        """Return the names of its formats, and the tokens that end its answers."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Return its tokenizer, which has its chat template."""

    @property
    def grammars(self) -> GrammarCheck:
        """Return what checks grammars."""
