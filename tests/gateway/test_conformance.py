"""Answers against OpenAI's own API description."""

from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]

from tests.gateway.support import chunks_of, gateway, saying

DESCRIPTION = Path(__file__).with_name("openai-openapi-trimmed.yaml")


@cache
def schemas() -> dict[str, Any]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    described = yaml.load(DESCRIPTION.read_text(encoding="utf-8"), loader)
    found: dict[str, Any] = _with_null_types(described["components"]["schemas"])
    return found


def _with_null_types(node: Any) -> Any:
    """`nullable: true` is OpenAPI 3.0; JSON schema says it by anyOf."""
    if isinstance(node, list):
        return [_with_null_types(child) for child in node]
    if not isinstance(node, dict):
        return node
    plain = {key: _with_null_types(child) for key, child in node.items() if key not in ("nullable", "discriminator")}
    return {"anyOf": [plain, {"type": "null"}]} if node.get("nullable") is True else plain


def validator(name: str, *, is_stream: bool = False) -> Any:
    known = deepcopy(schemas())
    if is_stream and name == "CreateCompletionResponse":
        # Streams send null before the end, as the service itself does although its description does not allow it.
        for owner, member in ((known[name], "usage"), (known[name]["properties"]["choices"]["items"], "finish_reason")):
            properties = owner["properties"]
            properties[member] = {"anyOf": [properties[member], {"type": "null"}]}
    return Draft202012Validator({"components": {"schemas": known}, "$ref": f"#/components/schemas/{name}"})


CHAT_FIELDS: list[dict[str, Any]] = [
    {},
    {"n": 2, "logprobs": True, "top_logprobs": 2, "service_tier": "priority"},
    {"logprobs": True, "stop": " fox", "max_tokens": 3},
]


@pytest.mark.parametrize("fields", CHAT_FIELDS)
async def test_chat(fields: dict[str, Any]) -> None:
    async with gateway(saying("the € fox jumps")) as served:
        validator("CreateChatCompletionResponse").validate((await served.chat(**fields)).json())
        chunks = chunks_of(await served.chat(**fields, stream=True, stream_options={"include_usage": True}))
    checker = validator("CreateChatCompletionStreamResponse")
    for chunk in chunks:
        checker.validate(chunk)


@pytest.mark.parametrize("fields", [{}, {"n": 2, "logprobs": 2}, {"echo": True, "prompt": ["a", "b"]}])
async def test_completions(fields: dict[str, Any]) -> None:
    async with gateway(saying("the € fox jumps")) as served:
        validator("CreateCompletionResponse").validate((await served.complete(**fields)).json())
        chunks = chunks_of(await served.complete(**fields, stream=True, stream_options={"include_usage": True}))
    checker = validator("CreateCompletionResponse", is_stream=True)
    for chunk in chunks:
        checker.validate(chunk)


async def test_models_and_errors() -> None:
    async with gateway(api_keys=("right",)) as served:
        headers = {"authorization": "Bearer right"}
        models = (await served.client.get("/v1/models", headers=headers)).json()
        validator("ListModelsResponse").validate(models)
        validator("Model").validate(models["data"][0])
        failures = [
            await served.chat(),
            await served.chat(headers=headers, temperature=9),
            await served.client.get("/nothing", headers=headers),
            await served.client.put("/v1/models", headers=headers),
        ]
    for failure in failures:
        assert failure.status_code >= 400
        validator("ErrorResponse").validate(failure.json())


@pytest.mark.parametrize("schema", ["CreateChatCompletionRequest", "CreateCompletionRequest"])
async def test_every_described_field_is_known(schema: str) -> None:
    """A field of OpenAI's is either served or refused by name, never called unrecognized."""
    names = _field_names({"$ref": f"#/components/schemas/{schema}"})
    assert len(names) > 15
    async with gateway(strict=True) as served:
        for name in sorted(names - {"model", "messages", "prompt"}):
            ask = served.chat if "Chat" in schema else served.complete
            odd: dict[str, Any] = {name: {"odd": ["value"]}}
            response = await ask(**odd)
            assert response.status_code == 400
            assert not response.json()["error"]["message"].endswith(f"argument: {name}.")


def _field_names(schema: dict[str, Any]) -> set[str]:
    if "$ref" in schema:
        return _field_names(schemas()[schema["$ref"].rpartition("/")[2]])
    names = set(schema.get("properties", {}))
    for part in schema.get("allOf", []):
        names |= _field_names(part)
    return names
