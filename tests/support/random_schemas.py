"""Random JSON schemas of the keywords that are supported, most of which some value matches."""

import json
import random
from collections.abc import Callable
from typing import Any

_NAMES = ("id", "name", "a", "b", "unit price", "größe", "x-y", "tags", "kind", "$n", "0")
_PATTERNS = ("^[a-c]{2,5}$", "x", "^\\d{3}-\\w+$", "(foo|bar)$", "^[^\\s]+$", "^$|^.{3}$", "é+", "^\\[[A-Z]*\\]$")
_NAME_PATTERNS = ("^p_", "^[0-9]+$", "^extra", "-z$")
_FORMATS = ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid")
_SCALARS = (
    None,
    True,
    False,
    0,
    -3,
    7,
    2.5,
    -0.25,
    1e-3,
    "",
    "a",
    'quo"te',
    "back\\slash",
    "new\nline",
    "snow ☃",
    "🦦",
)
_MAX_DEPTH = 4

Schema = dict[str, Any] | bool


class RandomSchemas:
    """Draws schemas from a seed; the same seed gives the same one."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._num_definitions = self._rng.choice((0, 0, 1, 2))

    def document(self) -> Schema:
        """Return a whole schema, with definitions that it may refer to."""
        root = self._schema(0)
        if not isinstance(root, dict) or not self._num_definitions:
            return root
        return root | {"$defs": {f"d{place}": self._schema(1) for place in range(self._num_definitions)}}

    def _schema(self, depth: int) -> Schema:
        kinds = _LEAVES if depth >= _MAX_DEPTH else (*_LEAVES, *_INNER)
        kind = self._rng.choice(kinds)
        if kind is RandomSchemas._reference and not self._num_definitions:
            kind = RandomSchemas._string
        return kind(self, depth)

    def _some(self) -> bool:
        return self._rng.random() < 0.5

    # --- schemas without others inside

    def _anything(self, depth: int) -> Schema:
        return self._rng.choice(({}, True, {"description": "anything"}))

    def _simple(self, depth: int) -> Schema:
        return {"type": self._rng.choice(("null", "boolean", "integer", "number", "string", ["string", "null"]))}

    def _integer(self, depth: int) -> Schema:
        low = self._rng.randint(-2000, 2000)
        schema: dict[str, Any] = {"type": "integer"}
        if self._some():
            schema[self._rng.choice(("minimum", "exclusiveMinimum"))] = low
        if self._some():
            schema[self._rng.choice(("maximum", "exclusiveMaximum"))] = low + self._rng.randint(0, 3000)
        if self._rng.random() < 0.3:
            schema["multipleOf"] = self._rng.choice((1, 2, 3, 5, 10, 25))
        return schema

    def _number(self, depth: int) -> Schema:
        low = round(self._rng.uniform(-50, 50), self._rng.randint(0, 4))
        schema: dict[str, Any] = {"type": "number"}
        if self._some():
            schema[self._rng.choice(("minimum", "exclusiveMinimum"))] = low
        if self._some():
            schema[self._rng.choice(("maximum", "exclusiveMaximum"))] = round(low + self._rng.uniform(0.001, 90), 4)
        if self._rng.random() < 0.2:
            schema["multipleOf"] = self._rng.choice((0.5, 0.25, 0.1, 0.01, 2, 3))
        return schema

    def _string(self, depth: int) -> Schema:
        schema: dict[str, Any] = {"type": "string"}
        kind = self._rng.random()
        if kind < 0.3:
            schema["pattern"] = self._rng.choice(_PATTERNS)
        elif kind < 0.6:
            schema["format"] = self._rng.choice(_FORMATS)
        if kind > 0.5 or self._rng.random() < 0.1:
            schema["minLength"] = self._rng.randint(0, 4)
            schema["maxLength"] = schema["minLength"] + self._rng.randint(0, 20)
        return schema

    def _enum(self, depth: int) -> Schema:
        values = [self._value(0) for _ in range(self._rng.randint(1, 5))]
        return {"enum": list({json.dumps(value): value for value in values}.values())}

    def _const(self, depth: int) -> Schema:
        return {"const": self._value(0)}

    def _reference(self, depth: int) -> Schema:
        return {"$ref": f"#/$defs/d{self._rng.randrange(self._num_definitions)}"}

    def _value(self, depth: int) -> Any:
        kind = self._rng.random()
        if depth < 2 and kind < 0.1:
            return [self._value(depth + 1) for _ in range(self._rng.randint(0, 3))]
        if depth < 2 and kind < 0.2:
            return {name: self._value(depth + 1) for name in self._rng.sample(_NAMES, self._rng.randint(0, 3))}
        return self._rng.choice(_SCALARS)

    # --- schemas with others inside

    def _array(self, depth: int) -> Schema:
        schema: dict[str, Any] = {"type": "array"}
        if self._some():
            schema["prefixItems"] = [self._schema(depth + 1) for _ in range(self._rng.randint(1, 3))]
        if self._rng.random() < 0.8:
            schema["items"] = self._schema(depth + 1) if self._rng.random() < 0.8 else False
        if self._some():
            schema["minItems"] = self._rng.randint(0, 3)
        if self._some():
            schema["maxItems"] = schema.get("minItems", 0) + self._rng.randint(0, 3)
        return schema

    def _object(self, depth: int) -> Schema:
        names = self._rng.sample(_NAMES, self._rng.randint(0, 5))
        schema: dict[str, Any] = {"type": "object", "properties": {name: self._schema(depth + 1) for name in names}}
        if self._rng.random() < 0.7:
            schema["required"] = self._rng.sample(names, self._rng.randint(0, len(names)))
        if self._rng.random() < 0.7:
            schema["additionalProperties"] = False if self._rng.random() < 0.7 else self._schema(depth + 1)
        if self._rng.random() < 0.2:
            schema["patternProperties"] = {self._rng.choice(_NAME_PATTERNS): self._schema(depth + 1)}
        if self._rng.random() < 0.1:
            schema["minProperties"] = 1
        return schema

    def _any_of(self, depth: int) -> Schema:
        return {"anyOf": [self._schema(depth + 1) for _ in range(self._rng.randint(1, 4))]}

    def _one_of(self, depth: int) -> Schema:
        tags = self._rng.sample(("cat", "dog", "fish", "bird"), self._rng.randint(2, 4))
        return {"oneOf": [self._tagged(tag, depth) for tag in tags]}

    def _tagged(self, tag: str, depth: int) -> Schema:
        own = {self._rng.choice(_NAMES): self._schema(depth + 1)}
        return {"type": "object", "properties": {"type": {"const": tag}} | own, "required": ["type"]}

    def _all_of(self, depth: int) -> Schema:
        return {"allOf": [self._object(depth + 1) for _ in range(self._rng.randint(1, 3))]}

    def _beside(self, depth: int) -> Schema:
        """Return an object with a constraint beside its own."""
        schema = self._object(depth)
        assert isinstance(schema, dict)
        return schema | {"anyOf": [self._object(depth + 1), self._object(depth + 1)]}


_LEAVES: tuple[Callable[[RandomSchemas, int], Schema], ...] = (
    RandomSchemas._anything,
    RandomSchemas._const,
    RandomSchemas._enum,
    RandomSchemas._integer,
    RandomSchemas._integer,
    RandomSchemas._number,
    RandomSchemas._reference,
    RandomSchemas._simple,
    RandomSchemas._string,
    RandomSchemas._string,
)
_INNER: tuple[Callable[[RandomSchemas, int], Schema], ...] = (
    RandomSchemas._all_of,
    RandomSchemas._any_of,
    RandomSchemas._array,
    RandomSchemas._array,
    RandomSchemas._beside,
    RandomSchemas._object,
    RandomSchemas._object,
    RandomSchemas._object,
    RandomSchemas._object,
    RandomSchemas._one_of,
)
