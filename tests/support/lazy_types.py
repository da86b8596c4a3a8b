"""Types of SDKs, by which tests check values. The SDKs take a second to import: whoever uses one, does so then."""

from functools import cached_property
from importlib import import_module
from typing import Any

from pydantic import TypeAdapter


class LazyType:
    """A type by the names of its module and its own; it is imported once a first value is checked."""

    def __init__(self, module: str, name: str) -> None:
        self._module, self._name = module, name

    @cached_property
    def _adapter(self) -> TypeAdapter[Any]:
        return TypeAdapter(getattr(import_module(self._module), self._name))

    def check(self, value: Any) -> None:
        """Raise ValidationError unless the value is of the type."""
        self._adapter.validate_python(value)
