"""Load the configuration: one YAML file, then `--set section.field=value` on top."""

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from fractions import Fraction
from pathlib import Path
from typing import Any, get_args

import msgspec
import yaml

from alignedserve.config.sections import ClusterConfig, Topology
from alignedserve.config.unset_sizes import from_mapping
from alignedserve.core.errors import ConfigError
from alignedserve.disk.plain_yaml import load_yaml, mistake_of, required_kind

_SECTIONS = {
    one.name: one.type for one in msgspec.structs.fields(ClusterConfig) if hasattr(one.type, "__struct_fields__")
}

_PLACE = re.compile(r"(?P<problem>.*?)(?: - at (?P<key>`key` in )?`\$\.?(?P<place>[^`]*)`)?", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<name>.*)`", re.DOTALL)
_MAX_SHOWN = 60  # characters of a value
_MAX_ELSEWHERE = 3  # sections that are named where a field is not


def refusal_of(error: msgspec.ValidationError, values: Mapping[str, Any]) -> str:
    if isinstance(error.__cause__, ConfigError):  # of a section's own check, which names the field
        return str(error.__cause__)
    match = _PLACE.fullmatch(str(error))
    assert match is not None, "the pattern matches every text"
    problem, path = match["problem"], match["place"] or ""
    before = f"{path}: " if path else ""
    if unknown := _UNKNOWN.fullmatch(problem):
        return f"{before}unknown field `{unknown['name']}`{_hint(unknown['name'], path)}"
    if missing := _MISSING.fullmatch(problem):
        return f"{before}the field `{missing['name']}` is missing"
    if match["key"] is not None:
        return f"{before}a name is not a text; quote words that mean something in YAML, such as on and yes"
    if path == "topology":
        return f"topology must be one of {', '.join(kind.value for kind in Topology)} (it is {_shown(values, path)})"
    if path in _SECTIONS and values.get(path) is None:  # as where every line below it is a comment
        return f"{path} is there without a field; leave it out as well"
    if path and (required := required_kind(problem)):
        return f"{path} {required} (it is {_shown(values, path)})"
    return f"{before}{problem}"


def _hint(name: str, path: str) -> str:
    meant = [f"`{section}.{name}`" for section, kind in _SECTIONS.items() if name in _names(kind)]
    if not 0 < len(meant) <= _MAX_ELSEWHERE:
        meant = [f"`{close_match}`" for close_match in get_close_matches(name, _fields_at(path), n=1)]
    return f"; did you mean {' or '.join(meant)}?" if meant else "; docs/settings.md has all"


def _fields_at(path: str) -> tuple[str, ...]:
    kind: Any = ClusterConfig
    for name in re.findall(r"[^.\[\]]+", re.sub(r"\[[^]]*\]", "", path)):
        of_field = next((field.type for field in msgspec.structs.fields(kind) if field.name == name), None)
        kind = next((arg for arg in (of_field, *get_args(of_field)) if hasattr(arg, "__struct_fields__")), None)
        if kind is None:
            return ()
    return _names(kind)


def _names(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in msgspec.structs.fields(kind))


def _shown(values: Mapping[str, Any], path: str) -> str:
    value: Any = values
    for name, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", path):
        try:
            value = value[name] if name else value[int(index)]
        except (KeyError, IndexError, TypeError):
            return "another"
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"


MAX_CONFIG_BYTES = 1024 * 1024
MODELS = "models"  # the list of the file, in which each model has sections of its own
_MOST = 2**63 - 1  # of a number, as messages hold it
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
_SIZE = re.compile(r"^\s*([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([kmg]i?)?b?\s*$", re.IGNORECASE)
# Errors of PyYAML on bad text: a date such as 2024-13-45 raises ValueError.
_YAML_ERRORS = (yaml.YAMLError, ValueError, RecursionError)


def load_config(path: Path | None, overrides: Sequence[str] = ()) -> ClusterConfig:
    """Parse the file (none: all defaults) and apply `a.b=c` overrides. Raises ConfigError naming the field."""
    values = read_values(path)
    if MODELS in values:
        raise ConfigError(
            f"{MODELS}: the file lists models, and this command takes one; give a file with a section model"
        )
    for override in overrides:
        apply_override(values, override)
    return config_of(values)


def read_values(path: Path | None) -> dict[str, Any]:
    """Return the sections of the file; none: none. Raises ConfigError."""
    return _read_yaml(path) if path is not None else {}


def config_of(values: dict[str, Any]) -> ClusterConfig:
    """Return the configuration of plain values, whose sizes may be text. Raises ConfigError naming the field."""
    try:
        parsed = _with_parsed_sizes(values, "")
        config = from_mapping(parsed)
        _require_sendable(parsed, "")
        return config
    except RecursionError as error:
        raise ConfigError("a section of the configuration refers to itself") from error
    except ConfigError as error:
        if isinstance(error.__cause__, msgspec.ValidationError):
            raise ConfigError(refusal_of(error.__cause__, values)) from error
        raise


def parse_size(text: str) -> int:
    """Return the bytes in a size such as 256MiB or 1.5G. Raises ConfigError."""
    match = _SIZE.match(text)
    if match is None:
        raise ConfigError(f"not a size: {text[:40]!r} (write for example 256MiB)")
    return int(Fraction(match[1]) * _UNITS[(match[2] or "").lower()])


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        is_too_large = path.stat().st_size > MAX_CONFIG_BYTES
        text = path.read_text(encoding="utf-8") if not is_too_large else ""
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: cannot be read as YAML: it is no text in UTF-8") from error
    if is_too_large:
        raise ConfigError(f"{path}: larger than {MAX_CONFIG_BYTES} bytes")
    try:
        values = load_yaml(text)
    except _YAML_ERRORS as error:
        raise ConfigError(f"{path}: cannot be read as YAML: {mistake_of(text, error)}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: the file must be a mapping of sections")
    return values


def apply_override(values: dict[str, Any], override: str) -> None:
    """Set one field of plain values by `section.field=value`. Raises ConfigError."""
    name, separator, text = override.partition("=")
    keys = name.strip().split(".")
    if not separator or not all(keys):
        raise ConfigError(f"--set {override!r}: write section.field=value")
    try:
        value = load_yaml(text)
    except _YAML_ERRORS as error:
        raise ConfigError(f"--set {override!r}: the value is not valid YAML") from error
    section = values
    for key in keys[:-1]:
        if section.get(key) is None:  # also a section of the file that has no field yet
            section[key] = {}
        section = section[key]
        if not isinstance(section, dict):
            raise ConfigError(f"--set {override!r}: {key} is not a section")
    section[keys[-1]] = value


def _with_parsed_sizes(values: dict[str, Any], section: str) -> dict[str, Any]:
    """Parse sizes such as `x_bytes: 256MiB` into integers. `section`: its name and a dot, for
    messages."""
    parsed: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            parsed[key] = _with_parsed_sizes(value, f"{section}{key}.")
        elif isinstance(value, str) and str(key).endswith("_bytes"):
            parsed[key] = _parsed_size(f"{section}{key}", value)
        else:
            parsed[key] = value
    return parsed


def _require_sendable(values: dict[str, Any], section: str) -> None:
    for key, value in values.items():
        if isinstance(value, dict):
            _require_sendable(value, f"{section}{key}.")
        elif isinstance(value, int) and abs(value) > _MOST:
            raise ConfigError(f"{section}{key} must be below 2^63")


def _parsed_size(name: str, text: str) -> int:
    try:
        return parse_size(text)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error
