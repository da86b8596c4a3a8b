"""The models that requests may name."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from alignedserve.api.errors import Overloaded, ResourceUnavailable, Unavailable, UnknownModel
from alignedserve.api.models.model_services import ModelCard, ModelServices
from alignedserve.core.request import LoraAdapter, RequestClass
from alignedserve.keys.entry import KeyEntry

_RETRY_S = 5.0


class WaitingLine:
    """The requests of one process that wait, by the names of their models. All methods run on one loop. Each class has
    places of its own: documents that wait, however many, take none of chat's."""

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._clock = clock
        self._num_waiting = Counter[RequestClass]()
        self._since: dict[tuple[str, RequestClass], list[float]] = {}
        self._changed = asyncio.Event()

    def waited_s(self, name: str, request_class: RequestClass) -> float | None:
        """Return how long the first request of a class to a model has waited; None: none waits."""
        since = self._since.get((name, request_class))
        return self._clock() - min(since) if since else None

    def changed(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def wait(
        self, name: str, request_class: RequestClass, problem: Callable[[], str | None], patience_s: float
    ) -> None:
        """Return once the model is no more asleep.

        `problem`: returns None then, and an empty text while it sleeps; any other text is why it cannot be loaded.
        Raises Unavailable with that, or when the patience is over; where too many of its class wait, Overloaded or
        ResourceUnavailable."""
        with self._waiting(name, request_class):
            try:
                async with asyncio.timeout(patience_s):
                    while (reason := problem()) is not None:
                        if reason:
                            raise Unavailable(f"The model cannot be loaded at present: {reason}")
                        await self._changed.wait()
            except TimeoutError as error:
                message = f"The model could not be loaded within {patience_s:.0f} s: others are in use."
                raise Unavailable(message) from error

    @contextmanager
    def _waiting(self, name: str, request_class: RequestClass) -> Iterator[None]:
        if self._num_waiting[request_class] >= self._most:
            kind = ResourceUnavailable if request_class is RequestClass.BEST_EFFORT else Overloaded
            raise kind("Too many requests wait for models to be loaded.", retry_after_s=_RETRY_S)
        since, key = self._clock(), (name, request_class)
        self._since.setdefault(key, []).append(since)
        self._num_waiting[request_class] += 1
        try:
            yield
        finally:
            self._num_waiting[request_class] -= 1
            self._since[key].remove(since)
            if not self._since[key]:
                del self._since[key]


@dataclass(frozen=True, slots=True)
class RegisteredModel:
    """A model that requests may name."""

    card: ModelCard
    services: ModelServices | None = None  # None: not loaded here
    problem: str = "its tokenizer is being loaded"  # why it is not
    is_asleep: bool = False  # its first request loads it; `problem`: why loading fails, or empty
    adapters: tuple[LoraAdapter, ...] = ()  # of a sleeping model, once it is loaded

    def missing(self) -> str | None:
        """Return the reason why it does not answer; None when it does, or will once it is asked to."""
        if self.is_asleep:
            return None
        return self.problem if self.services is None else self.services.readiness_probe.missing()

    @property
    def is_hopeless(self) -> bool:
        """Return whether it is loaded, and fails at every try."""
        return self.services is not None and self.services.readiness_probe.is_hopeless

    def adapter_cards(self) -> tuple[ModelCard, ...]:
        """Return its adapters as clients see them."""
        known = self.adapters
        if self.services is not None:
            known = () if self.services.adapters is None else self.services.adapters.all
        return tuple(self.card.of_adapter(adapter) for adapter in known)

    def with_adapter(self, name: str) -> "RegisteredModel | None":
        """Return the adapter of this name as a model; None: there is no such adapter."""
        if self.services is not None:
            services = self.services.with_adapter(name)
            return None if services is None else RegisteredModel(services.model, services)
        adapter = next((adapter for adapter in self.adapters if adapter.name == name), None)
        return None if adapter is None else replace(self, card=self.card.of_adapter(adapter), adapters=())


class ModelRegistry:
    """Finds the services of the model that a request names. The first model serves requests that name none."""

    def __init__(self) -> None:
        self._models: dict[str, RegisteredModel] = {}
        self._names: dict[str, str] = {}  # of models, by their aliases
        self._expected: frozenset[str] = frozenset()
        self.is_complete = True  # False: there may be models of which this process has not been told yet

    def __contains__(self, name: object) -> bool:
        """Return whether requests may name this model, now or once it is served."""
        known = (self._models, self._names, self._expected)
        return any(name in names for names in known) or (isinstance(name, str) and self._adapted(name) is not None)

    @property
    def cards(self) -> tuple[ModelCard, ...]:
        """The cards of all models, each before its aliases and adapters."""
        return tuple(
            card for model in self.all for card in (model.card, *model.card.of_aliases, *model.adapter_cards())
        )

    @property
    def all(self) -> tuple[RegisteredModel, ...]:
        """Return the models in the order in which clients see them."""
        return tuple(self._models.values())

    def add(self, model: RegisteredModel) -> None:
        """Let requests name one more model."""
        self._models[model.card.name] = model
        self._names |= dict.fromkeys(model.card.aliases, model.card.name)

    def replace_all(self, models: Sequence[RegisteredModel], expected: Collection[str] = ()) -> None:
        """Replace all models. `expected`: names of further models, served soon. Threads that read bodies look here
        meanwhile: they find a model that stays at every moment."""
        self._expected |= frozenset(expected)
        self._names = {alias: model.card.name for model in models for alias in model.card.aliases}
        self._models = {model.card.name: model for model in models}
        self._expected = frozenset(expected)

    def missing(self) -> str | None:
        """Return which model does not answer, and why; None when all do."""
        reasons = {model.card.name: why for model in self.all if (why := model.missing()) is not None}
        if len(self._models) == 1:
            return next(iter(reasons.values()), None)
        if not self._models:
            return "no model is served"
        return "; ".join(f"model {name}: {why}" for name, why in reasons.items()) or None

    @property
    def is_hopeless(self) -> bool:
        """Return whether what is missing does not come by waiting."""
        return any(model.is_hopeless for model in self.all)

    def card(self, name: str) -> ModelCard:
        """Return the card of this name. Raises UnknownModel, Unavailable."""
        card = self._registered(name).card
        return next((alias for alias in card.of_aliases if alias.name == name), card)

    def base_of(self, name: str) -> str:
        """Return the name of the model that an adapter or an alias belongs to; any other name itself."""
        name = self._names.get(name, name)
        if name in self._models:
            return name
        adapted = self._adapted(name)
        return name if adapted is None or adapted.card.parent is None else adapted.card.parent

    def is_asleep(self, name: str | None) -> bool:
        """Return whether a request that names this waits until its model is loaded. Raises like `find`."""
        model = self._registered(name)
        return model.services is None and model.is_asleep

    async def awake(
        self, name: str | None, request_class: RequestClass, line: WaitingLine, patience_s: float
    ) -> ModelServices:
        """Return the model of this name, once it has been loaded if it sleeps. Raises like `find`, and WaitingLine."""
        if self.is_asleep(name):
            card = self._registered(name).card
            asleep = card.parent or card.name
            await line.wait(asleep, request_class, lambda: self._sleep_of(asleep), patience_s)
        return self.find(name)

    def _sleep_of(self, name: str) -> str | None:
        model = self._models.get(name)
        is_asleep = model is not None and model.services is None and (model.is_asleep or name in self._expected)
        return (model.problem if model is not None and model.is_asleep else "") if is_asleep else None

    def find(self, name: str | None) -> ModelServices:
        """Return the model of this name; None means the first one. Raises UnknownModel. Raises Unavailable for one that
        is still loaded."""
        services = self._registered(name).services
        if services is None:
            raise Unavailable("The model is not loaded yet.")
        return services

    def _registered(self, name: str | None) -> RegisteredModel:
        name = self._names.get(name, name) if name is not None else None
        model = next(iter(self._models.values()), None) if name is None else self._models.get(name)
        if model is None and name is not None:
            model = self._adapted(name)
        if model is None and (name in self._expected or not self.is_complete):
            raise Unavailable("The model is not served yet.")
        if model is None:
            raise unknown_model()
        return model

    def _adapted(self, name: str) -> RegisteredModel | None:
        adapted = (model.with_adapter(name) for model in self.all)
        return next((model for model in adapted if model is not None), None)


def unknown_model() -> UnknownModel:
    """Return the error for a model that is not there, or not for this client."""
    return UnknownModel("The requested model does not exist here; see /v1/models.", param="model")


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
