"""The models that a key may use; others look to its client as if they were not there."""

from alignedserve.api.errors import Unavailable, UnknownModel
from alignedserve.api.models.model_card import ModelCard
from alignedserve.api.models.model_registry import ModelRegistry, unknown_model
from alignedserve.api.models.model_services import ModelServices
from alignedserve.keys.entry import KeyEntry


def usable_model(models: ModelRegistry, name: str | None, key: KeyEntry) -> ModelServices:
    """Find the model of this name; None: the first one that the key may use. Raises UnknownModel, Unavailable."""
    return models.find(usable_name(models, name, key))


def usable_name(models: ModelRegistry, name: str | None, key: KeyEntry) -> str | None:
    """Return the name by which a key's request finds its model; None: the first model. Raises UnknownModel."""
    if key.models is None:
        return name
    if name is None:
        first = next(iter(usable_cards(models, key)), None)
        if first is None:
            raise unknown_model()
        return first.name
    check_usable(models, name, key)
    return name


def usable_cards(models: ModelRegistry, key: KeyEntry) -> tuple[ModelCard, ...]:
    """Return the models and adapters that the key may use, in the order in which clients see them."""
    return tuple(card for card in models.cards if _may_use(key, card))


def check_usable(models: ModelRegistry, name: str, key: KeyEntry) -> None:
    """Raise UnknownModel for a model that the key may not use; an alias is as good as the name it stands for."""
    if key.may_use(name):
        return
    try:
        may_use = _may_use(key, models.card(name))
    except UnknownModel:
        may_use = False
    if not may_use:
        raise unknown_model()


def _may_use(key: KeyEntry, card: ModelCard) -> bool:
    return key.may_use(card.name) or (card.alias_of is not None and key.may_use(card.alias_of))


def is_usable(models: ModelRegistry, name: str, key: KeyEntry) -> bool:
    """Return whether the key may use the model of this name, as far as is known now."""
    try:
        check_usable(models, name, key)
    except (UnknownModel, Unavailable):
        return False
    return True
