"""Default objectives: from the speed of the machine, from the configuration, and those that nobody can hold."""

from typing import Any

import pytest

from alignedserve.api.objectives import default_slo, in_words, unholdable
from alignedserve.config.sections import GatewayConfig
from alignedserve.core.errors import ConfigError
from alignedserve.core.request import Slo
from alignedserve.messages.cluster_view import WorkerSpeed
from tests.support.marks import each

SLOW = WorkerSpeed(short_prompt_s=0.2, prompt_s=1.5, token_s=0.1, shared_token_s=0.12)
FAST = WorkerSpeed(short_prompt_s=0.002, prompt_s=0.02, token_s=0.004, shared_token_s=0.005)
PREFILL_ONLY = WorkerSpeed(short_prompt_s=0.2, prompt_s=1.5)


@each(
    ("speed", "expected"),
    [
        (FAST, Slo(ttft_s=1.0, tpot_s=0.15)),  # as people like it, not as fast as the machine can
        (SLOW, Slo(ttft_s=4.5, tpot_s=0.24)),  # with a margin to what it can
        (PREFILL_ONLY, Slo(ttft_s=4.5)),
        (WorkerSpeed(1.0, 80.4, 2.0, 5.7), Slo(ttft_s=5.0, tpot_s=1.0)),  # nobody waits longer
        (WorkerSpeed(), Slo()),  # nothing was measured
        (None, Slo()),
    ],
)
def test_automatic_objectives_follow_from_the_speed(speed: WorkerSpeed | None, expected: Slo) -> None:
    assert default_slo(GatewayConfig(), speed) == expected


@each(
    ("config", "expected"),
    [
        ({"default_ttft_s": "none", "default_tpot_s": "none"}, Slo()),
        ({"default_ttft_s": 2.0}, Slo(ttft_s=2.0, tpot_s=0.24)),
        ({"default_ttft_s": 2.0, "default_tpot_s": "none"}, Slo(ttft_s=2.0)),
        ({"default_ttft_s": "none", "default_tpot_s": 0.2}, Slo(tpot_s=0.2)),
    ],
)
def test_the_configuration_names_each_or_none(config: dict[str, Any], expected: Slo) -> None:
    assert default_slo(GatewayConfig(**config), SLOW) == expected


@each("value", ["", "fast", 0.0, -1.0, 3601.0])
@each("field", ["default_ttft_s", "default_tpot_s"])
def test_what_is_neither_is_refused_by_name(field: str, value: float | str) -> None:
    with pytest.raises(ConfigError, match=rf"gateway\.{field} must be auto, none or seconds"):
        GatewayConfig(**{field: value})  # type: ignore[arg-type]


def test_objectives_that_nobody_can_hold_are_named_with_what_the_machine_can() -> None:
    assert list(unholdable(Slo(ttft_s=0.1, tpot_s=0.05), SLOW)) == [
        "gateway.default_ttft_s=0.1 cannot be held: even a prompt of 64 tokens alone takes 0.20 s here",
        "gateway.default_tpot_s=0.05 cannot be held: a token of a single request takes 0.100 s here",
    ]
    cut = WorkerSpeed(short_prompt_s=0.2, prompt_s=2.5, token_s=0.1, shared_token_s=0.12)
    (warning,) = unholdable(default_slo(GatewayConfig(), cut), cut)
    assert "is 5 at most, though a prompt of 1 024 tokens alone takes 2.5 s here" in warning
    for speed in (SLOW, FAST):
        assert list(unholdable(default_slo(GatewayConfig(), speed), speed)) == []
    assert list(unholdable(Slo(ttft_s=0.1, tpot_s=0.05), WorkerSpeed())) == []


@each(
    ("slo", "words"),
    [
        (Slo(ttft_s=1.0, tpot_s=0.15), "first token within 1 s, then a token every 0.15 s (6.7/s)"),
        (Slo(tpot_s=0.2), "a token every 0.2 s (5.0/s)"),
        (Slo(), "none"),
    ],
)
def test_objectives_in_words(slo: Slo, words: str) -> None:
    assert in_words(slo) == words


def test_what_a_client_names_stays_and_a_deadline_stands_for_all() -> None:
    default = Slo(ttft_s=1.0, tpot_s=0.15)
    assert Slo().completed_by(default) == default
    assert Slo(ttft_s=9.0).completed_by(default) == Slo(ttft_s=9.0, tpot_s=0.15)
    assert Slo(tpot_s=9.0).completed_by(default) == Slo(ttft_s=1.0, tpot_s=9.0)
    assert Slo(deadline_s=9.0).completed_by(default) == Slo(deadline_s=9.0)
