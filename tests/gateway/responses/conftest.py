"""Every answer that a test of this folder gets is held to OpenAI's own description."""

from collections.abc import Iterator

import pytest
from starlette.applications import Starlette

from tests.gateway.responses.conformance import Answer, check, recording


@pytest.fixture(autouse=True)
def _answers_are_as_described(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Looks at answers when the test is over: an error inside of a server would not reach the test."""
    answers: list[Answer] = []
    monkeypatch.setattr(Starlette, "__call__", recording(Starlette.__call__, answers))
    yield
    for answer in answers:
        check(answer)
