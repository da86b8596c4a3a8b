"""How answers of a conversation are sampled: as the server says of its model, unless the person says otherwise."""

from collections.abc import Mapping

from alignedserve.client.openai_client import ListedModel
from alignedserve.config.sections import SAMPLING_FIELDS
from alignedserve.core.errors import ConfigError, InvalidRequest
from alignedserve.core.request import SamplingParams

# Of models whose makers name nothing. Small ones repeat themselves without end at the likeliest token.
_OWN = {"temperature": 0.2, "top_p": 0.9, "repetition_penalty": 1.1}
_OF_EVERY_SERVER = ("temperature", "top_p")  # the others are extensions of OpenAI's API
_DEFAULT = "default"


class ChatSampling:
    """What the person has set."""

    def __init__(self, temperature: float | None = None) -> None:
        self._set: dict[str, float] = {} if temperature is None else {"temperature": temperature}

    def fields(self, model: ListedModel) -> dict[str, float]:
        """Return the fields of a request; what the server takes by itself is left out."""
        if self._set.get("temperature") == 0.0:
            return dict(self._set)
        return {**self._beside_server(model), **self._set}

    def in_words(self, model: ListedModel) -> str:
        known = model.sampling if model.sampling_source else {}
        plain = {"temperature": 1.0, "top_p": 1.0, "top_k": 0.0, "min_p": 0.0, "repetition_penalty": 1.0}
        taken = {**plain, **known, **self.fields(model)}
        shown = [
            f"{name} {taken[name]:g}" for name in SAMPLING_FIELDS if name in self._set or taken[name] != plain[name]
        ]
        who = model.sampling_source or "this program's own, as the makers of the model name none"
        return f"{', '.join(shown) or 'temperature 1'} ({who}{'; changed here' if self._set else ''})"

    def change(self, argument: str) -> None:
        """Obey `NAME VALUE`, or `NAME default`. Raises ConfigError saying what is wrong."""
        name, _, text = argument.partition(" ")
        if name not in SAMPLING_FIELDS:
            raise ConfigError(f"/set takes one of {', '.join(SAMPLING_FIELDS)}, and a number or {_DEFAULT}")
        if text.strip() == _DEFAULT:
            self._set.pop(name, None)
            return
        try:
            value = int(text) if name == "top_k" else float(text)
            SamplingParams(**{name: value})  # type: ignore[arg-type]
        except InvalidRequest as error:
            raise ConfigError(str(error)) from error
        except ValueError as error:
            raise ConfigError(f"/set {name} takes a number, or {_DEFAULT}") from error
        self._set[name] = value

    def _beside_server(self, model: ListedModel) -> Mapping[str, float]:
        if model.sampling_source:
            return {}
        is_extended = model.max_context_len is not None
        return {name: value for name, value in _OWN.items() if is_extended or name in _OF_EVERY_SERVER}
