"""Models that requests may name: asleep until their first request, and found while the list of models changes."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
from typing_extensions import override

from alignedserve.api.errors import Overloaded, ResourceUnavailable, Unavailable, UnknownModel
from alignedserve.api.models.model_registry import ModelRegistry, RegisteredModel, WaitingLine
from alignedserve.api.models.model_services import ModelCard, ModelServices
from alignedserve.core.request import LoraAdapter, RequestClass

CHAT, DOCUMENTS = RequestClass.REAL_TIME, RequestClass.BEST_EFFORT
CARD = ModelCard("b", Path("/b"), 64, aliases=("small",))


class _Services:
    adapters = None
    model = CARD

    def with_adapter(self, name: str) -> None:
        return None


class _AdaptedServices:
    adapters = None
    model = CARD

    def with_adapter(self, name: str) -> "_AdaptedServices | None":
        return self if name == "terse" else None


LOADED = RegisteredModel(CARD, cast(ModelServices, _Services()))
ADAPTED = RegisteredModel(CARD, cast(ModelServices, _AdaptedServices()))


def _asleep(problem: str = "") -> RegisteredModel:
    return RegisteredModel(CARD, problem=problem, is_asleep=True)


def _registry(*models: RegisteredModel) -> tuple[ModelRegistry, WaitingLine]:
    registry = ModelRegistry()
    registry.replace_all(models)
    return registry, WaitingLine(most=2)


async def test_a_request_waits_until_its_model_is_there() -> None:
    registry, line = _registry(_asleep())
    assert registry.is_asleep("small")
    assert registry.missing() is None  # whoever asks gets an answer
    waiting = asyncio.create_task(registry.awake("small", CHAT, line, 60.0))
    await asyncio.sleep(0)
    assert line.waited_s("b", CHAT) is not None
    registry.replace_all([], ["b"])  # it serves, and its tokenizer is not loaded here yet
    registry.replace_all([RegisteredModel(CARD)], [])
    registry.replace_all([LOADED])
    line.changed()
    assert await waiting is LOADED.services
    assert line.waited_s("b", CHAT) is None
    assert await registry.awake("b", CHAT, line, 60.0) is LOADED.services  # no waiting for one that is there


async def test_an_adapter_of_a_model_that_sleeps_has_it_loaded() -> None:
    adapters = (LoraAdapter("terse", "/adapters/terse", b"d" * 16),)
    registry, line = _registry(RegisteredModel(CARD, problem="", is_asleep=True, adapters=adapters))
    assert [card.name for card in registry.cards] == ["b", "small", "terse"]
    assert "terse" in registry
    assert registry.base_of("terse") == "b"
    assert registry.is_asleep("terse")
    waiting = asyncio.create_task(registry.awake("terse", CHAT, line, 60.0))
    await asyncio.sleep(0)
    assert line.waited_s("b", CHAT) is not None
    registry.replace_all([ADAPTED])
    line.changed()
    assert await waiting is ADAPTED.services


async def test_one_that_cannot_be_loaded_says_why_at_once() -> None:
    registry, line = _registry(_asleep())
    waiting = asyncio.create_task(registry.awake("b", CHAT, line, 60.0))
    await asyncio.sleep(0)
    registry.replace_all([_asleep("it needs 9 MiB")])
    line.changed()
    with pytest.raises(Unavailable, match="it needs 9 MiB"):
        await waiting
    registry.replace_all([])
    with pytest.raises(UnknownModel):
        await registry.awake("b", CHAT, line, 60.0)


async def test_patience_and_places_are_bounded() -> None:
    registry, line = _registry(_asleep())
    with pytest.raises(Unavailable, match="could not be loaded within"):
        await registry.awake("b", CHAT, line, 0.001)
    waiting = [asyncio.create_task(registry.awake("b", CHAT, line, 60.0)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await registry.awake("b", CHAT, line, 60.0)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert line.waited_s("b", CHAT) is None


async def test_documents_take_no_place_of_chat() -> None:
    registry, line = _registry(_asleep())
    waiting = [asyncio.create_task(registry.awake("b", DOCUMENTS, line, 60.0)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(ResourceUnavailable):
        await registry.awake("b", DOCUMENTS, line, 60.0)
    assert line.waited_s("b", CHAT) is None
    waiting.append(asyncio.create_task(registry.awake("b", CHAT, line, 60.0)))
    await asyncio.sleep(0)
    assert line.waited_s("b", CHAT) is not None
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


def test_an_alias_is_another_name_of_its_model() -> None:
    registry, _ = _registry(LOADED)
    assert [card.name for card in registry.cards] == ["b", "small"]
    assert (registry.card("small").name, registry.card("small").alias_of) == ("small", "b")
    assert registry.find("small") is LOADED.services
    assert registry.base_of("small") == "b"
    assert "small" in registry
    assert "other" not in registry


def test_a_model_that_stays_is_found_at_every_moment() -> None:
    """Threads look for models while the loop changes the list: a message batch would be refused as a whole."""
    registry, seen = ModelRegistry(), list[bool]()

    class Models(list[RegisteredModel]):
        @override
        def __iter__(self) -> Iterator[RegisteredModel]:
            for model in super().__iter__():
                seen.append("a" in registry and "alias" in registry)
                yield model

    models = Models(RegisteredModel(ModelCard(name, Path("/m"), 64)) for name in "bc")
    models.append(RegisteredModel(ModelCard("a", Path("/m"), 64, aliases=("alias",))))
    registry.replace_all(models)
    seen.clear()
    registry.replace_all(models)
    assert seen
    assert all(seen)
