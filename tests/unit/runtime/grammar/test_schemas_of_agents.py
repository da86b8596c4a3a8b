"""Keywords that the tools of coding agents have, and that say nothing here or have room."""

from typing import Any

import pytest

from alignedserve.core.errors import InvalidRequest
from alignedserve.runtime.grammar.json_schema import normalize_schema


@pytest.mark.parametrize("names", [{"type": "string"}, {}, True])
def test_any_property_names_are_no_constraint(names: Any) -> None:
    assert "propertyNames" not in normalize_schema({"type": "object", "propertyNames": names})


@pytest.mark.parametrize("names", [{"pattern": "^a"}, {"type": "string", "maxLength": 3}, False, 1])
def test_other_property_names_are_refused(names: Any) -> None:
    with pytest.raises(InvalidRequest, match="propertyNames"):
        normalize_schema({"type": "object", "propertyNames": names})


def test_texts_may_be_long() -> None:
    assert normalize_schema({"type": "string", "maxLength": 524_288})["maxLength"] == 524_288
    with pytest.raises(InvalidRequest, match="minLength"):
        normalize_schema({"type": "string", "minLength": 524_288})
