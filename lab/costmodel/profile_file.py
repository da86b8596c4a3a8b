"""The file that `alignedserve profile` writes: what iterations cost on a machine, and how well that is known."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from alignedserve.core.block_layout import LayerHeads
from alignedserve.core.errors import ConfigError
from alignedserve.costmodel.hardware import LinkModel
from alignedserve.costmodel.linear import LinearCoefficients, LinearIterationModel
from alignedserve.costmodel.model_shapes import ModelShape

_FORMAT = 1
_MAX_BYTES = 16 << 20
_MAX_COUNT = 4096


@dataclass(frozen=True, slots=True)
class MachineProfile:
    """The part of a machine's profile that a simulation needs; the file has more, for people."""

    shape: ModelShape
    coefficients: LinearCoefficients
    memory_link: LinkModel  # of cache blocks from one place in host memory to another
    num_threads: int | None = None  # of a worker, on a CPU; None: the file does not say, as of the next
    num_cores: int | None = None  # of the machine

    def cost_model(self) -> LinearIterationModel:
        """Return the fitted model; a swap is a copy within memory."""
        return LinearIterationModel(self.coefficients, self.shape.kv_token_bytes / self.memory_link.bytes_per_s)

    def as_fields(self) -> dict[str, Any]:
        """Return what `read_profile` needs, as plain JSON."""
        return {
            "format": _FORMAT,
            "shape": asdict(self.shape),
            "coefficients": asdict(self.coefficients),
            "memory_link": asdict(self.memory_link),
        }


def read_profile(path: Path) -> MachineProfile:
    """Return the profile in a file. Raises ConfigError naming the file and what is wrong with it."""
    content = _read_object(path)
    if content.get("format") != _FORMAT:
        raise ConfigError(f"{path} is no profile of format {_FORMAT}; `alignedserve profile` writes one.")
    link = LinkModel(**_numbers(content, "memory_link", LinkModel, path))
    if link.bytes_per_s <= 0.0:
        raise ConfigError(f"{path}: memory_link.bytes_per_s must be above 0.")
    sections = {"coefficients": _with_later_fields(content.get("coefficients"))}
    coefficients = LinearCoefficients(**_numbers(sections, "coefficients", LinearCoefficients, path))
    return MachineProfile(_shape(content, path), coefficients, link, **_machine(content))


def _machine(content: Mapping[str, Any]) -> dict[str, int | None]:
    machine = content.get("machine")
    described = machine if isinstance(machine, dict) else {}
    return {"num_threads": _count(described.get("threads")), "num_cores": _count(described.get("cores"))}


def _count(value: Any) -> int | None:
    return value if type(value) is int and 1 <= value <= _MAX_COUNT else None


def _read_object(path: Path) -> Mapping[str, Any]:
    try:
        with path.open("rb") as file:
            content = json.loads(file.read(_MAX_BYTES))
    except OSError as error:
        raise ConfigError(f"profile {path} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"profile {path} is not valid JSON.") from error
    if not isinstance(content, dict):
        raise ConfigError(f"profile {path} must hold a JSON object.")
    return content


def _section(content: Mapping[str, Any], name: str, kind: type, path: Path) -> dict[str, Any]:
    section = content.get(name)
    wanted = [field.name for field in fields(kind)]
    if not isinstance(section, dict) or sorted(section) != sorted(wanted):
        raise ConfigError(f"{path}: {name} must hold {', '.join(wanted)}.")
    return section


def _numbers(content: Mapping[str, Any], name: str, kind: type, path: Path) -> dict[str, float]:
    section = _section(content, name, kind, path)
    for field, value in section.items():
        if not isinstance(value, (int, float)) or not 0.0 <= value < float("inf"):
            raise ConfigError(f"{path}: {name}.{field} must be a number of at least 0.")
    return {field: float(value) for field, value in section.items()}


def _shape(content: Mapping[str, Any], path: Path) -> ModelShape:
    section = _section({"shape": _with_later_sizes(content.get("shape"))}, "shape", ModelShape, path)
    types = {field.name: field.type for field in fields(ModelShape)}
    unlike = _layer_heads(section.pop("unlike"), path)
    for field, value in section.items():
        if type(value) is not types[field]:
            raise ConfigError(f"{path}: shape.{field} must be of type {getattr(types[field], '__name__', '?')}.")
    return ModelShape(**section, unlike=unlike)


def _layer_heads(section: Any, path: Path) -> tuple[LayerHeads, ...]:
    sizes = section if isinstance(section, list) else [section]
    for own in sizes:
        if not isinstance(own, list) or len(own) != 3 or any(type(size) is not int or size < 1 for size in own):
            raise ConfigError(f"{path}: shape.unlike must hold lists of three whole numbers: layers, heads, elements.")
    return tuple(LayerHeads(*own) for own in sizes)


def _with_later_fields(section: Any) -> Any:
    if not isinstance(section, dict):
        return section
    later = ("constrained_s", "beyond_token_s", "bend_tokens", "straggler")
    without = {name: value for name, value in section.items() if name != "padded_token_s"}  # of files before straggler
    return {**dict.fromkeys(later, 0.0), **without}


def _with_later_sizes(section: Any) -> Any:
    names = ("num_experts", "num_chosen_experts", "expert_size", "num_expert_layers", "shared_expert_size")
    later = {**dict.fromkeys(names, 0), "kv_parts": 2, "attention_parameters": 0}
    later |= dict.fromkeys(("num_cached_layers", "num_state_layers", "state_layer_bytes"), 0)
    later |= dict.fromkeys(("num_windowed_layers", "window"), 0)
    return {**later, "unlike": [], **section} if isinstance(section, dict) else section
