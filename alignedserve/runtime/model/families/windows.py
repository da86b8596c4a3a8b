"""Which layers of a decoder read a sliding window alone, and which are not rotated, by config.json."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from alignedserve.core.errors import UnsupportedModel
from alignedserve.core.json_fields import JsonFields
from alignedserve.runtime.model.hf_fields import MAX_LAYERS
from alignedserve.runtime.model.rope_fields import MAX_CONTEXT

Layers = tuple[int, ...]


def every_layer(fields: JsonFields, num_layers: int) -> Layers:
    return tuple(range(num_layers))


def _from_max_window_layer(default: int, fields: JsonFields, num_layers: int) -> Layers:
    return tuple(range(fields.integer("max_window_layers", 0, MAX_LAYERS, default), num_layers))


def from_max_window_layer(default: int) -> Callable[[JsonFields, int], Layers]:
    return partial(_from_max_window_layer, default)


def _all_but_every(nth: int, fields: JsonFields, num_layers: int) -> Layers:
    name = next(
        (name for name in ("_sliding_window_pattern", "sliding_window_pattern") if fields.has(name)),
        "sliding_window_pattern",
    )
    pattern = fields.integer(name, 1, MAX_LAYERS, nth)
    return tuple(layer for layer in range(num_layers) if (layer + 1) % pattern)


def all_but_every(nth: int) -> Callable[[JsonFields, int], Layers]:
    """Return the rule by which all layers have a window but the n-th, 2n-th …; a config may name another n."""
    return partial(_all_but_every, nth)


def all_but_first_of_four(fields: JsonFields, num_layers: int) -> Layers:
    return tuple(layer for layer in range(num_layers) if layer % 4)


def layers_without_rope(fields: JsonFields, num_layers: int, windowed: Layers = ()) -> Layers:
    if fields.has("no_rope_layers"):
        marks = fields.numbers("no_rope_layers", num_layers, 0.0, 1.0)
        return tuple(layer for layer in range(num_layers) if not marks[layer])
    interval = fields.integer("no_rope_layer_interval", 1, MAX_LAYERS, 4)
    return tuple(layer for layer in range(num_layers) if (layer + 1) % interval == 0)


def layers_without_window(fields: JsonFields, num_layers: int, windowed: Layers) -> Layers:
    return tuple(layer for layer in range(num_layers) if layer not in windowed)


def layers_beside_windows(fields: JsonFields, num_layers: int, windowed: Layers) -> Layers:
    return layers_without_window(fields, num_layers, windowed) if windowed else ()


@dataclass(frozen=True, slots=True)
class WindowRule:
    """How a config says which layers have a window, and how long it is."""

    layers: Callable[[JsonFields, int], Layers] | None  # without layer_types; None: the family knows no windows
    default_size: int | None = None  # without sliding_window; None: there is no window then
    is_on: bool = True  # without use_sliding_window
    name: str = "sliding_window"  # of its size
    kind: str = "sliding_attention"  # among layer_types

    def read(self, fields: JsonFields, num_layers: int) -> tuple[int | None, Layers]:
        if self.layers is None or not fields.flag("use_sliding_window", self.is_on):
            return None, ()
        if not fields.has(self.name) and (self.default_size is None or fields.is_present(self.name)):
            return None, ()
        window = fields.integer(self.name, 1, MAX_CONTEXT, self.default_size)
        layers = windowed_layers(fields, num_layers, self.kind)
        if layers is None:
            layers = self.layers(fields, num_layers)
        return (window, layers) if layers else (None, ())


NO_WINDOW = WindowRule(None)


def rotated_layers(fields: JsonFields, num_layers: int) -> Layers:
    unrotated = layers_without_rope(fields, num_layers)
    return tuple(layer for layer in range(num_layers) if layer not in unrotated)


def windowed_layers(fields: JsonFields, num_layers: int, kind: str = "sliding_attention") -> Layers | None:
    """Return the layers that `layer_types` gives a window; None: it is absent."""
    layer_types = fields.texts("layer_types", MAX_LAYERS)
    if not layer_types:
        return None
    if set(layer_types) - {"full_attention", kind} or len(layer_types) != num_layers:
        raise UnsupportedModel(f"layer_types must name full_attention or {kind} for every layer.")
    return tuple(layer for layer, own in enumerate(layer_types) if own == kind)


def layers_unless_rope(fields: JsonFields, num_layers: int, windowed: Layers) -> Layers:
    return () if fields.text("position_embedding_type", "nope") == "rope" else tuple(range(num_layers))
