"""Marks that many tests set, and how much of what is random they try."""

import functools
import inspect
import os
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import pytest

Test = TypeVar("Test", bound=Callable[..., Any])

_ALL_HISTORIES = "ALIGNEDSERVE_ALL_HISTORIES"


def slow(*values: object) -> list[Any]:
    """Mark parameters that only the slow tests run with; the default ones keep a handful of others."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def many(count: int) -> int:
    """Return how many random histories a slow test plays: a tenth of `count`; all if ALIGNEDSERVE_ALL_HISTORIES is 1.

    The default tests find every deliberate fault (tests/faults) with far fewer; more histories are for faults that
    nobody has thought of, and `make test-histories` plays all.
    """
    return count if os.environ.get(_ALL_HISTORIES) == "1" else max(1, count // 10)


def each(names: str | tuple[str, ...], values: Iterable[Any], ids: object = None) -> Callable[[Test], Test]:
    """Run a test for each of `values` as a subtest of one test, where `parametrize` would make a test of each.

    For long tables of cheap cases in one process, whose fixtures and reports would cost more than they do. `names` and
    `ids` are as of `parametrize`; a subtest is named by its values.
    """
    known = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    cases = [value if len(known) > 1 else (value,) for value in values]

    def decorate(test: Test) -> Test:
        is_nested = "subtests" in inspect.signature(test).parameters

        def arguments_of(case: Iterable[Any]) -> dict[str, Any]:
            return dict(zip(known, case, strict=True))

        def run(subtests: pytest.Subtests, **fixtures: object) -> None:
            fixtures |= {"subtests": subtests} if is_nested else {}
            for case in cases:
                with subtests.test(**arguments_of(case)):
                    test(**arguments_of(case), **fixtures)

        async def run_async(subtests: pytest.Subtests, **fixtures: object) -> None:
            fixtures |= {"subtests": subtests} if is_nested else {}
            for case in cases:
                with subtests.test(**arguments_of(case)):
                    await test(**arguments_of(case), **fixtures)

        chosen: Callable[..., Any] = run_async if inspect.iscoroutinefunction(test) else run
        signature = inspect.signature(test)
        fixtures = [value for name, value in signature.parameters.items() if name not in known and name != "subtests"]
        own = inspect.Parameter("subtests", inspect.Parameter.KEYWORD_ONLY)
        functools.update_wrapper(chosen, test)
        del chosen.__wrapped__  # type: ignore[attr-defined]  # pytest would ask for its arguments as fixtures
        chosen.__signature__ = signature.replace(parameters=[*fixtures, own])  # type: ignore[attr-defined]
        return chosen  # type: ignore[return-value]

    return decorate
