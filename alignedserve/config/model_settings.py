"""The settings of a cluster of several models: common ones, and each model's own."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any

from alignedserve.config.loading import MODELS, apply_override, config_of, read_values
from alignedserve.config.sections import ClusterConfig, ModelSectionConfig
from alignedserve.core.errors import ConfigError

MAX_MODELS = 64  # of one cluster
OWN_SECTIONS = (
    *("topology", "model", "router", "scheduling", "batching", "pool", "prefill", "decode", "engine"),
    *("prefix_cache", "lora"),
)
_GGUF = ".gguf"
# Fields of `model` that say something of one model alone.
_NOT_INHERITED = (
    "path",
    "served_model_name",
    "chat_template",
    "tool_format",
    "reasoning_format",
    "max_context_len",
    "sampling",
    "aliases",
)


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Plain values, checked when they become configurations."""

    common: Mapping[str, Any]  # sections of all models
    own: tuple[Mapping[str, Any], ...]  # each model's sections, which win

    @property
    def configs(self) -> tuple[ClusterConfig, ...]:
        """Return each model's configuration. Raises ConfigError naming the field."""
        configs = tuple(self._config(number) for number in range(len(self.own)))
        names = [name_of(sections) for sections in self.own]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ConfigError(f"two models are called {twice}; name them apart: serve NAME=MODEL NAME=MODEL")
        require_adapters_apart(dict(zip(names, configs, strict=True)))
        return configs

    def _config(self, number: int) -> ClusterConfig:
        sections = self.own[number]
        try:
            return config_of(_merged(self.common, sections))
        except ConfigError as error:
            if len(self.own) == 1 or str(error) == _mistake(self.common):
                raise
            raise ConfigError(f"the model {number + 1}, {name_of(sections)}: {error}") from error

    def check(self) -> None:
        """Raise ConfigError naming the field that is wrong in a model's configuration."""
        _ = self.configs

    def another(
        self, path: str, name: str | None, settings: Sequence[str] = (), like: Mapping[str, Any] | None = None
    ) -> Mapping[str, Any]:
        """Return the own sections of one more model. `name`: for clients; None: by its path. `settings`:
        section.field=value. `like`: the sections of a model in whose place it comes; its workers are as that one's, its
        `model` section is not. Raises ConfigError."""
        sections = {section: copy.deepcopy(fields) for section, fields in (like or {}).items() if section != "model"}
        sections["model"] = {"path": path} | ({"served_model_name": name} if name is not None else {})
        for setting in settings:
            apply_override(sections, setting)
        _require_own(sections, name or path)
        return sections

    def with_local(self, models: Sequence[ModelSectionConfig]) -> "ModelSettings":
        merged = [
            _merged(sections, {"model": {"path": model.path, "served_model_name": model.served_model_name}})
            for sections, model in zip(self.own, models, strict=True)
        ]
        return replace(self, own=tuple(merged))

    def with_models(self, sections: Sequence[Mapping[str, Any]]) -> "ModelSettings":
        return replace(self, own=tuple(sections))


def load_models(path: Path | None, overrides: Sequence[str], models: Sequence[str]) -> ModelSettings:
    """Parse the file (none: all defaults), models of the command line and overrides. Raises ConfigError. `models`:
    MODEL or NAME=MODEL each; none: those of the file's `models`, or its `model`. `overrides`: section.field=value for
    all models, NAME.section.field=value for one."""
    values = read_values(path)
    listed = _listed(values.pop(MODELS, None))
    if listed and models:
        raise ConfigError("models are given in the file and on the command line; leave one of them out")
    if len(models) > MAX_MODELS or len(listed) > MAX_MODELS:
        raise ConfigError(f"a cluster serves {MAX_MODELS} models at most")
    sections: list[dict[str, Any]] = listed or [{"model": named_model(model)} for model in models]
    if len(sections) == 1 and not listed:  # as if the file named it
        values = _merged(values, sections[0])
    if len(models) <= 1 and not listed:
        sections = [{}]
    for override in overrides:
        _apply(values, sections, override)
    if len(sections) > 1 or listed:
        _require_apart(values)
        return ModelSettings(values, tuple(sections))
    return ModelSettings(*_apart(values, sections[0]))


def name_of(sections: Mapping[str, Any]) -> str:
    """Return how a model's settings call it: the name for clients, or the last part of its path."""
    model = sections.get("model") or {}
    if model.get("served_model_name"):
        return str(model["served_model_name"])
    last = PurePath(str(model.get("path", "pocket"))).name
    return last.removesuffix(_GGUF)


def _mistake(common: Mapping[str, Any]) -> str | None:
    try:
        config_of(dict(common))
    except ConfigError as error:
        return str(error)
    return None


def _listed(listed: Any) -> list[dict[str, Any]]:
    if listed is None:
        return []
    if not isinstance(listed, list) or not listed or not all(isinstance(settings, dict) for settings in listed):
        raise ConfigError(f"{MODELS}: a list with a mapping of sections for each model")
    for number, sections in enumerate(listed, start=1):
        _require_own(sections, f"{MODELS}: the model {number}")
        if not isinstance(sections.get("model"), dict) or not sections["model"].get("path"):
            raise ConfigError(f"{MODELS}: the model {number} has no model.path")
    return listed


def named_model(argument: str) -> dict[str, str]:
    """Return the `model` section of an argument: MODEL or NAME=MODEL. Raises ConfigError."""
    name, separator, path = argument.partition("=")
    if not separator or "/" in name or Path(argument).exists():
        return {"path": argument}
    if not name or not path:
        raise ConfigError(f"{argument!r}: write MODEL or NAME=MODEL")
    return {"path": path, "served_model_name": name}


def _apply(values: dict[str, Any], sections: list[dict[str, Any]], override: str) -> None:
    key = override.partition("=")[0].strip()
    if key.partition(".")[0] not in OWN_SECTIONS:
        names = [name_of(_merged(values, settings)) for settings in sections]
        name = max((name for name in names if key.startswith(f"{name}.")), key=len, default=None)
        if name is not None:
            target = sections[names.index(name)]
            apply_override(target, override.strip().removeprefix(f"{name}."))
            _require_own(target, name)
            return
    apply_override(values, override)


def _require_own(sections: Mapping[str, Any], subject: str) -> None:
    for section in sections:
        if section not in OWN_SECTIONS:
            raise ConfigError(f"{subject}: {section} is of the whole cluster, not of one model")


def _require_apart(values: Mapping[str, Any]) -> None:
    model = values.get("model")
    for field in ("path", "served_model_name"):
        if isinstance(model, dict) and model.get(field) is not None:
            raise ConfigError(f"model.{field} is one model's; several are served: leave it out, or set it for each")
    lora = values.get("lora")
    if isinstance(lora, dict) and lora.get("adapters"):
        raise ConfigError("lora.adapters are one model's; several are served: set NAME.lora.adapters for theirs")


def require_adapters_apart(models: Mapping[str, ClusterConfig]) -> None:
    """Refuse an adapter whose name another model, or an adapter of another, has as well. Raises ConfigError."""
    taken = set(models)
    for name, config in models.items():
        alias = next((aliase for aliase in config.model.aliases if aliase in taken), None)
        if alias is not None:
            raise ConfigError(f"the alias {alias} of {name} is the name of another model or alias; name them apart")
        taken.update(config.model.aliases)
    for name, config in models.items():
        twice = next((adapter for adapter in config.lora.adapters if adapter in taken), None)
        if twice is not None:
            raise ConfigError(f"the adapter {twice} of {name} is called as another model or adapter; name them apart")
        taken.update(config.lora.adapters)


def _apart(values: Mapping[str, Any], sections: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[dict[str, Any]]]:
    model = values.get("model")
    if "lora" in values:
        lora = values["lora"]
        values = {section: fields for section, fields in values.items() if section != "lora"}
        sections = _merged({"lora": lora}, sections)
    if not isinstance(model, dict):
        return dict(values), (_merged({"model": {}}, sections),)
    fields = {name: value for name, value in model.items() if name in _NOT_INHERITED}
    common = {name: value for name, value in model.items() if name not in _NOT_INHERITED}
    return {**values, "model": common}, (_merged({"model": fields}, sections),)


def _merged(common: Mapping[str, Any], sections: Mapping[str, Any]) -> dict[str, Any]:
    merged = copy.deepcopy(dict(common))
    for section, fields in sections.items():
        former = merged.get(section)
        if isinstance(former, dict) and isinstance(fields, dict):
            merged[section] = {**former, **fields}
        else:
            merged[section] = copy.deepcopy(fields)
    return merged
