"""What a request does not name is sampled as the model's makers say; what it names counts."""

from dataclasses import replace
from typing import Any

from alignedserve.api.models.model_services import ModelCard
from alignedserve.runtime.grammar.compiler import has_free_blanks
from alignedserve.runtime.model.sampling_defaults import SamplingDefaults
from tests.gateway.support import EOS, gateway, tokenizer_folder

MODEL = ModelCard("tiny", tokenizer_folder(), 256, (EOS,))
MAKERS = SamplingDefaults(0.2, 0.9, top_k=20, min_p=0.05, repetition_penalty=1.05, source="its makers")


async def _sampled(path: str, body: dict[str, Any], makers: SamplingDefaults = MAKERS) -> dict[str, float]:
    async with gateway(model=replace(MODEL, sampling=makers)) as served:
        response = await served.client.post(path, json={"model": "tiny", **body})
        assert response.status_code == 200, response.text
        sampling = served.backend.submitted[0].sampling
        if path == "/v1/responses":
            assert (response.json()["temperature"], response.json()["top_p"]) == (sampling.temperature, sampling.top_p)
    return {name: getattr(sampling, name) for name in makers.values}


BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
    "/v1/completions": {"prompt": "hello"},
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5},
}


async def test_every_api_takes_the_makers_values() -> None:
    for path, body in BODIES.items():
        assert await _sampled(path, body) == MAKERS.values, path
        assert await _sampled(path, body, SamplingDefaults()) == SamplingDefaults().values, path


async def test_what_a_request_names_counts() -> None:
    for path, body in BODIES.items():
        named = await _sampled(path, body | {"temperature": 0, "top_k": 0, "top_p": 1.0})
        assert named == {**MAKERS.values, "temperature": 0, "top_k": 0, "top_p": 1.0}, path
        assert await _sampled(path, body | {"temperature": None}) == MAKERS.values, path


async def test_clients_see_the_values_and_who_says_so() -> None:
    async with gateway(model=replace(MODEL, sampling=MAKERS)) as served:
        (listed,) = (await served.client.get("/v1/models")).json()["data"]
    assert listed["default_sampling"] == {**MAKERS.values, "source": "its makers"}


async def test_blanks_in_a_row_are_allowed_on_demand() -> None:
    regex = {"regex": "a *b"}
    own_pattern = {"json_object": True, "whitespace_pattern": " *"}
    async with gateway() as served:
        await served.chat(structured_outputs=regex)
        await served.chat(structured_outputs=regex, allow_blank_runs=True)
        await served.chat(structured_outputs=own_pattern)
        await served.chat(allow_blank_runs=True)
        free = [has_free_blanks(request.sampling.grammar) for request in served.backend.submitted]
    assert free == [False, True, True, False]
