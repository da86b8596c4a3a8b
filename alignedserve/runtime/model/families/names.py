"""The names of tensors in the files of each family of decoders: rows of names.json, most of them like another row."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec

from alignedserve.runtime.model.weight_names import ParameterNames

_KNOWN = {"about", *(field.name for field in fields(ParameterNames))}


def _read(path: Path) -> dict[str, ParameterNames]:
    found: dict[str, dict[str, Any]] = {}
    for name, row in json.loads(path.read_text()).items():
        found[name] = {**found.get(row.pop("like", ""), {}), **row}
        assert found[name].keys() <= _KNOWN, f"unknown fields of {name}"
    return {name: msgspec.convert(row, ParameterNames) for name, row in found.items()}


NAMES = _read(Path(__file__).with_name("names.json"))
