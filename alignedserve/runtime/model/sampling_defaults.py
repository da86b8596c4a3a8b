"""How a model's makers want its answers to be sampled, for requests that do not say.

The first source that names a value gives all of them: the configuration (`model.sampling`), `generation_config.json` or
a GGUF file's `general.sampling.*` keys, and a table of families whose makers say it on the model's page alone.
Without any, OpenAI's defaults hold."""

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from alignedserve.config.sections import SAMPLING_FIELDS
from alignedserve.core.errors import ConfigError, InvalidRequest
from alignedserve.core.json_fields import read_json_object
from alignedserve.core.request import SamplingParams
from alignedserve.gguf.file import GgufFile
from alignedserve.runtime.model.model_files import GENERATION_CONFIG, MAX_CONFIG_BYTES
from alignedserve.text.tokenizer_files import read_tokenizer_config, templates_of

logger = logging.getLogger(__name__)

_GGUF_KEYS = {
    "temperature": "general.sampling.temp",
    "top_p": "general.sampling.top_p",
    "top_k": "general.sampling.top_k",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What is taken where a request names nothing. The defaults of the fields are OpenAI's."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    source: str = ""  # who says so; empty: nobody, and OpenAI's defaults hold

    @property
    def values(self) -> dict[str, float]:
        return {name: value for name, value in asdict(self).items() if name != "source"}

    def in_words(self) -> str:
        """Return the differences from OpenAI's defaults, such as `temperature 0.2, top_p 0.9`, and their source."""
        plain = SamplingDefaults().values
        named = [f"{name} {value:g}" for name, value in self.values.items() if value != plain[name]]
        shown = ", ".join(named) or "temperature 1"
        return f"{shown} ({self.source or 'nobody says how: the defaults of the OpenAI API'})"


class _Family(NamedTuple):
    mark: str  # a text in the chat template that no other family has
    values: Mapping[str, float]
    source: str


_FAMILIES = (
    _Family(
        "named SmolLM,",
        {"temperature": 0.2, "top_p": 0.9},
        "SmolLM2's makers, https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct",
    ),
)


def sampling_defaults(
    wanted: str | Mapping[str, float], files: Path | GgufFile, template: str | None = None
) -> SamplingDefaults:
    """Return the defaults of a model. `wanted`: `model.sampling`: auto, none, or values that win. `template`: its
    chat template where the files have none. Raises ConfigError."""
    if wanted == "none":
        return SamplingDefaults()
    defaults = _of_files(files) or _of_family(template or _template_of(files)) or SamplingDefaults()
    if isinstance(wanted, str):
        return defaults
    try:
        SamplingParams(**_plain(wanted))
    except InvalidRequest as error:
        raise ConfigError(f"model.sampling: {error}") from error
    others = f", and {defaults.source}" if defaults.source else ""
    return replace(defaults, **_plain(wanted), source=f"model.sampling{others}")


def _of_files(files: Path | GgufFile) -> SamplingDefaults | None:
    if isinstance(files, GgufFile):
        fields = {name: files.metadata.get(key) for name, key in _GGUF_KEYS.items()}
        return _checked(fields, f"{files.path.name}")
    path = files / GENERATION_CONFIG
    if not path.exists():
        return None
    fields = read_json_object(path, MAX_CONFIG_BYTES)
    if fields.get("do_sample") is False:
        fields = {"temperature": 0.0, "repetition_penalty": fields.get("repetition_penalty")}
    return _checked(fields, path.name)


def _checked(fields: Mapping[str, Any], source: str) -> SamplingDefaults | None:
    values: dict[str, Any] = {}
    for name in SAMPLING_FIELDS:
        value = fields.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        field = _plain({name: value})
        try:
            SamplingParams(**field)
        except InvalidRequest as error:
            logger.warning("%s: %s It is left out.", source, error)
        else:
            values |= field
    return SamplingDefaults(**values, source=source) if values else None


def _of_family(template: str | None) -> SamplingDefaults | None:
    families = (family for family in _FAMILIES if template is not None and family.mark in template)
    return next((SamplingDefaults(**_plain(family.values), source=family.source) for family in families), None)


def _template_of(files: Path | GgufFile) -> str | None:
    if isinstance(files, GgufFile):
        template = files.metadata.get("tokenizer.chat_template")
        return template if isinstance(template, str) else None
    return templates_of(files, read_tokenizer_config(files))[0]


def _plain(values: Mapping[str, float]) -> dict[str, Any]:
    rounded: dict[str, Any] = {name: round(float(value), 6) for name, value in values.items()}
    if "top_k" in rounded:
        rounded["top_k"] = max(int(rounded["top_k"]), 0)
    return rounded
