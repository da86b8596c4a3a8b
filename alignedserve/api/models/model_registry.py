"""The models that requests may name."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from alignedserve.api.errors import Unavailable, UnknownModel
from alignedserve.api.models.model_card import ModelCard
from alignedserve.api.models.model_services import ModelServices
from alignedserve.api.models.waiting_line import WaitingLine
from alignedserve.core.request import LoraAdapter, RequestClass


@dataclass(frozen=True, slots=True)
class RegisteredModel:
    """A model that requests may name."""

    card: ModelCard
    services: ModelServices | None = None  # None: it is not loaded here
    problem: str = "its tokenizer is being loaded"  # why it is not
    is_asleep: bool = False  # a request that names it has it loaded; `problem`: why it cannot be, or empty
    adapters: tuple[LoraAdapter, ...] = ()  # of one that is asleep: those that it has once it is loaded

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
        """Return one of its adapters as a model that requests may name; None: it has none of this name."""
        if self.services is not None:
            services = self.services.with_adapter(name)
            return None if services is None else RegisteredModel(services.model, services)
        adapter = next((one for one in self.adapters if one.name == name), None)
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
        """Return the models, each followed by its adapters, as clients see them."""
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
        """Let requests name these models and no others. `expected`: names of others that will be served.

        Threads that read bodies look here meanwhile: they find a model that stays at every moment.
        """
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
        """Return the model of this name as clients see it. Raises UnknownModel, Unavailable."""
        found = self._registered(name).card
        return next((one for one in found.of_aliases if one.name == name), found)

    def base_of(self, name: str) -> str:
        """Return the name of the model that an adapter or an alias belongs to; any other name itself."""
        name = self._names.get(name, name)
        if name in self._models:
            return name
        adapted = self._adapted(name)
        return name if adapted is None or adapted.card.parent is None else adapted.card.parent

    def is_asleep(self, name: str | None) -> bool:
        """Return whether a request that names this waits until its model is loaded. Raises like `find`."""
        found = self._registered(name)
        return found.services is None and found.is_asleep

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
        found = self._models.get(name)
        is_asleep = found is not None and found.services is None and (found.is_asleep or name in self._expected)
        return (found.problem if found is not None and found.is_asleep else "") if is_asleep else None

    def find(self, name: str | None) -> ModelServices:
        """Return the model of this name; None means the first one. Raises UnknownModel.

        Raises Unavailable for one that is still loaded.
        """
        services = self._registered(name).services
        if services is None:
            raise Unavailable("The model is not loaded yet.")
        return services

    def _registered(self, name: str | None) -> RegisteredModel:
        name = self._names.get(name, name) if name is not None else None
        found = next(iter(self._models.values()), None) if name is None else self._models.get(name)
        if found is None and name is not None:
            found = self._adapted(name)
        if found is None and (name in self._expected or not self.is_complete):
            raise Unavailable("The model is not served yet.")
        if found is None:
            raise unknown_model()
        return found

    def _adapted(self, name: str) -> RegisteredModel | None:
        adapted = (model.with_adapter(name) for model in self.all)
        return next((one for one in adapted if one is not None), None)


def unknown_model() -> UnknownModel:
    """Return the error for a model that is not there, or not for this client."""
    return UnknownModel("The requested model does not exist here; see /v1/models.", param="model")
