"""Answers against OpenAI's own API description."""

from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

from tests.gateway.completions.api_description import ApiDescription, described_values, field_names, validator_of
from tests.gateway.support import chunks_of, gateway, saying
from tests.support.marks import each


@cache
def described() -> ApiDescription:
    return ApiDescription(Path(__file__).with_name("openai-openapi-trimmed.yaml"))


def validator(name: str, *, is_stream: bool = False) -> Any:
    if not (is_stream and name == "CreateCompletionResponse"):
        return described().validator(name)
    # Streams send null before the end, as the service itself does although its description does not allow it.
    known = deepcopy(described().schemas)
    for owner, member in ((known[name], "usage"), (known[name]["properties"]["choices"]["items"], "finish_reason")):
        properties = owner["properties"]
        properties[member] = {"anyOf": [properties[member], {"type": "null"}]}
    return validator_of(known, name)


CHAT_FIELDS: list[dict[str, Any]] = [
    {},
    {"n": 2, "logprobs": True, "top_logprobs": 2, "service_tier": "priority"},
    {"logprobs": True, "stop": " fox", "max_tokens": 3},
]


@each("fields", CHAT_FIELDS)
async def test_chat(fields: dict[str, Any]) -> None:
    async with gateway(saying("the € fox jumps")) as served:
        validator("CreateChatCompletionResponse").validate((await served.chat(**fields)).json())
        chunks = chunks_of(await served.chat(**fields, stream=True, stream_options={"include_usage": True}))
    checker = validator("CreateChatCompletionStreamResponse")
    for chunk in chunks:
        checker.validate(chunk)


@each("fields", [{}, {"n": 2, "logprobs": 2}, {"echo": True, "prompt": ["a", "b"]}])
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


@each("schema", ["CreateChatCompletionRequest", "CreateCompletionRequest"])
async def test_every_described_field_is_known(schema: str) -> None:
    """A field of OpenAI's is either served or refused by name, never called unrecognized."""
    names = field_names(described().schemas, {"$ref": f"#/components/schemas/{schema}"})
    assert len(names) > 15
    async with gateway(strict=True) as served:
        for name in sorted(names - {"model", "messages", "prompt"}):
            ask = served.chat if "Chat" in schema else served.complete
            odd: dict[str, Any] = {name: {"odd": ["value"]}}
            response = await ask(**odd)
            assert response.status_code == 400
            assert not response.json()["error"]["message"].endswith(f"argument: {name}.")


@each("field", ["reasoning_effort", "verbosity", "service_tier", "prompt_cache_retention"])
async def test_every_described_value_is_known(field: str) -> None:
    """A value of OpenAI's is either served or refused by name, never called invalid."""
    values = described_values(described().schemas, "CreateChatCompletionRequest", field)
    assert len(values) > 1
    async with gateway() as served:
        for value in values:
            response = await served.chat(**{field: value})
            assert response.status_code == 200 or response.json()["error"]["code"] == "unsupported_parameter", value
