"""The models that requests may name, while the list of them changes."""

from collections.abc import Iterator
from pathlib import Path

from typing_extensions import override

from alignedserve.api.models.model_card import ModelCard
from alignedserve.api.models.model_registry import ModelRegistry, RegisteredModel


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
