"""A workload line at another rate."""

import pytest

from alignedserve.core.errors import ConfigError
from alignedserve.workload.rates import at_rate
from tests.support.marks import each


@each(
    ("line", "expected"),
    [
        ("sharegpt, rate=2, cv=3", "sharegpt, rate=6, cv=3"),
        ("azure_conv, arrivals=recorded", "azure_conv, arrivals=recorded, rate=6"),
        ("rt: rate=2, prompt=uniform(1,9), output=3;", "rt: rate=6, prompt=uniform(1,9), output=3"),
        ("rt: sharegpt, rate = 1; be: sharegpt, rate=3", "rt: sharegpt, rate =1.5; be: sharegpt, rate=4.5"),
        ("rt: sharegpt, rate=2; be: sharegpt, outstanding=4", "rt: sharegpt, rate=6; be: sharegpt, outstanding=4"),
    ],
)
def test_open_loops_are_scaled_together(line: str, expected: str) -> None:
    assert at_rate(line, 6.0) == expected


@each(
    ("line", "message"),
    [
        ("be: sharegpt, outstanding=4", "closed loops only"),
        ("a: azure_conv, arrivals=recorded; b: sharegpt, rate=1", "a rate= of its own"),
        ("sharegpt, rate=x", "rate"),
    ],
)
def test_what_cannot_be_scaled_is_said(line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        at_rate(line, 6.0)
