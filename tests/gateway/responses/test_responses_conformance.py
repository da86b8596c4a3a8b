"""The check that every answer of this folder's tests goes through, and the fields that clients may send."""

import json
from typing import Any

import pytest

from tests.gateway.completions.api_description import field_names
from tests.gateway.responses.conformance import Answer, check, described
from tests.gateway.support import gateway


def answer(body: dict[str, Any], path: str = "/v1/responses") -> Answer:
    return Answer("POST", path, 200, "application/json", json.dumps(body).encode())


async def test_what_is_not_as_described_is_found() -> None:
    async with gateway() as served:
        body = {"model": "tiny", "input": "hello"}
        whole = (await served.client.post("/v1/responses", json=body)).json()
        stream = await served.client.post("/v1/responses", json=body | {"stream": True})
    check(answer(whole))
    [item] = whole["output"]
    for wrong, where in (
        (whole | {"created_at": "now"}, "created_at"),
        ({name: value for name, value in whole.items() if name != "tools"}, "tools"),
        (whole | {"output": [item | {"status": "thought over"}]}, "output/0"),
    ):
        with pytest.raises(AssertionError, match=where):
            check(answer(wrong))
    misspelt = Answer("POST", "/v1/responses", 200, "text/event-stream", stream.content.replace(b'"delta"', b'"part"'))
    with pytest.raises(AssertionError, match="delta"):
        check(misspelt)
    with pytest.raises(AssertionError, match="data"):
        check(answer({"object": "list"}, "/v1/conversations/conv_1/items"))


async def test_every_described_field_is_known() -> None:
    """A field of OpenAI's is either served or refused by name, never called unrecognized."""
    names = field_names(described().schemas, {"$ref": "#/components/schemas/CreateResponse"})
    assert len(names) > 20
    async with gateway(strict=True) as served:
        for name in sorted(names - {"model", "input"}):
            body = {"model": "tiny", "input": "hello", name: {"odd": ["value"]}}
            response = await served.client.post("/v1/responses", json=body)
            assert response.status_code == 400, name
            assert not response.json()["error"]["message"].endswith(f"argument: {name}."), name
