"""The sentences of a plan."""

from types import SimpleNamespace
from typing import cast

from lab.planning.confidence import Interval
from lab.planning.plan import Plan
from lab.planning.report import summary
from lab.planning.trials import Outcome


def test_why_the_nearest_plan_failed_is_said() -> None:
    outcome = Outcome(0.0, holds=False, keeps_up=False, result=None, error="OverflowError: too large")
    nearest = SimpleNamespace(candidate=SimpleNamespace(label="1 x h100"), outcome=outcome)
    plan = SimpleNamespace(
        goals=SimpleNamespace(share=0.99), chosen=None, nearest=nearest, variations=(), interval=Interval(0.0, 1.0),
        simulated_only=None,
    )  # fmt: skip
    lines = summary(cast("Plan", plan))
    assert lines[0].endswith("Nearest: 1 x h100, failed.")
    assert lines[1] == "Why it failed: OverflowError: too large"
