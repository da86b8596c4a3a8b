"""The base of all sections: a wrong value raises ConfigError naming the field."""

import re

import msgspec

from alignedserve.core.errors import ConfigError

MIB = 1024 * 1024


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all sections."""

    def _require(self, holds: bool, field: str, problem: str) -> None:
        if not holds:
            raise ConfigError(f"{self._section_name()}.{field} {problem} (it is {getattr(self, field)!r})")

    @classmethod
    def _section_name(cls) -> str:
        name = cls.__name__.removesuffix("Config").removesuffix("Worker")
        return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()

    def _require_positive(self, *fields: str) -> None:
        for field in fields:
            self._require(getattr(self, field) > 0, field, "must be above 0")
