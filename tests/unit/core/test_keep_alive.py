import math

import pytest

from alignedserve.config.sections import ModelSectionConfig
from alignedserve.core.errors import ConfigError
from alignedserve.core.keep_alive import parse_keep_alive
from tests.support.marks import each


@each(
    ("given", "seconds"),
    [(0, 0.0), (90, 90.0), ("90", 90.0), ("5m", 300.0), ("1h30m", 5400.0), ("1.5s", 1.5), ("250ms", 0.25),
     (-1, math.inf), ("-1", math.inf), ("-1m", math.inf)],
)  # fmt: skip
def test_times_are_those_of_ollama(given: str | float, seconds: float) -> None:
    assert parse_keep_alive(given) == seconds


@each("given", ["", "m", "5x", "5m5", " 5m", "1e3", "nan", float("nan"), True, 10**9, "999999999h"])
def test_others_are_refused(given: str | float) -> None:
    with pytest.raises(ValueError, match="must be"):
        parse_keep_alive(given)


def test_the_configuration_names_the_field() -> None:
    assert ModelSectionConfig(keep_alive="5m").keep_alive_s == 300.0
    assert ModelSectionConfig().keep_alive_s is None
    with pytest.raises(ConfigError, match=r"model\.keep_alive must be"):
        ModelSectionConfig(keep_alive="soon")
    with pytest.raises(ConfigError, match=r"model\.aliases must be"):
        ModelSectionConfig(aliases=("",))
