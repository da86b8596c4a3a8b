"""OpenAI's own API description, trimmed, as validators of answers."""

from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]


class ApiDescription:
    """A file of OpenAPI: its paths, and validators of its schemas."""

    def __init__(self, path: Path) -> None:
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        described = yaml.load(path.read_text(encoding="utf-8"), loader)
        self.paths: dict[str, Any] = described["paths"]
        self.schemas: dict[str, Any] = _with_null_types(described["components"]["schemas"])
        self._validators: dict[str, Any] = {}

    def validator(self, name: str) -> Any:
        """Return the validator of a schema by its name."""
        if name not in self._validators:
            self._validators[name] = validator_of(self.schemas, name)
        return self._validators[name]


def validator_of(schemas: dict[str, Any], name: str) -> Any:
    return Draft202012Validator({"components": {"schemas": schemas}, "$ref": f"#/components/schemas/{name}"})


def _with_null_types(node: Any) -> Any:
    """`nullable: true` is OpenAPI 3.0; JSON schema says it by anyOf."""
    if isinstance(node, list):
        return [_with_null_types(child) for child in node]
    if not isinstance(node, dict):
        return node
    plain = {key: _with_null_types(child) for key, child in node.items() if key not in ("nullable", "discriminator")}
    return {"anyOf": [plain, {"type": "null"}]} if node.get("nullable") is True else plain


def field_names(schemas: dict[str, Any], schema: dict[str, Any]) -> set[str]:
    """Return the names of an object's fields, those of the parts that it consists of included."""
    if "$ref" in schema:
        return field_names(schemas, schemas[schema["$ref"].rpartition("/")[2]])
    names = set(schema.get("properties", {}))
    for part in schema.get("allOf", []):
        names |= field_names(schemas, part)
    return names


def described_values(schemas: dict[str, Any], schema: str, field: str) -> list[Any]:
    """Return the values that a field of an object may have, of those that are listed."""
    found: list[Any] = []
    nodes = [schemas[schema]]
    while nodes:
        node = nodes.pop()
        parts = [*node.get("allOf", []), *node.get("anyOf", []), *node.get("oneOf", [])]
        parts += [schemas[node["$ref"].rpartition("/")[2]]] if "$ref" in node else []
        parts += [node["properties"][field]] if field in node.get("properties", {}) else []
        nodes += parts
        found += node.get("enum", [])
    return found
