"""POST /v1/responses without state: fields, events, errors."""

from typing import Any, get_args

import httpx

from alignedserve.api.errors import Overloaded, TimedOut
from alignedserve.api.responses.bodies import Summary
from alignedserve.core.request import RequestClass
from tests.gateway.responses.responses_support import events_of, response_of, text_of
from tests.gateway.support import Gateway, error_of, gateway, saying, tokenizer, tokens_of
from tests.harnesses.scripted_backend import Script
from tests.support.marks import each


async def respond(served: Gateway, **fields: Any) -> httpx.Response:
    body = {"model": "tiny", "input": "hello", **fields}
    return await served.client.post("/v1/responses", json=body)


def prompt_of(served: Gateway) -> str:
    return tokenizer().decode(served.backend.submitted[-1].prompt_token_ids, skip_special_tokens=False)


async def test_a_whole_response() -> None:
    import openai

    async with gateway(saying("hello world", num_cached_tokens=2)) as served:
        response = response_of(await respond(served, metadata={"run": "7"}, top_p=0.5, user="u"))
    assert (response["status"], text_of(response), response["metadata"]) == ("completed", "hello world", {"run": "7"})
    assert (response["top_p"], response["user"], response["store"]) == (0.5, "u", False)
    usage = openai.types.responses.ResponseUsage.model_validate(response["usage"])
    assert (usage.input_tokens, usage.input_tokens_details.cached_tokens, usage.output_tokens) == (6, 2, 3)


async def test_an_answer_that_is_cut_is_incomplete() -> None:
    async with gateway(saying("the quick brown fox")) as served:
        response = response_of(await respond(served, max_output_tokens=2))
        events = events_of(await respond(served, max_output_tokens=2, stream=True))
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert response["output"][0]["status"] == "incomplete"
    assert events[-1]["type"] == "response.incomplete"


async def test_the_events_of_a_text() -> None:
    async with gateway() as served:
        events = events_of(await respond(served, stream=True))
    assert [event["type"].removeprefix("response.") for event in events] == [
        *("created", "in_progress", "output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.delta", "output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    deltas = [event["delta"] for event in events if event["type"].endswith(".delta")]
    final = events[-1]["response"]
    assert "".join(deltas) == text_of(final) == "hello world"
    assert events[0]["response"]["output"] == []
    assert {event["item_id"] for event in events if "item_id" in event} == {final["output"][0]["id"]}


async def test_logprobs_come_with_the_text() -> None:
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    async with gateway() as served:
        whole = response_of(await respond(served, **fields))
        events = events_of(await respond(served, **fields, stream=True))
    entries = whole["output"][0]["content"][0]["logprobs"]
    assert [len(entry["top_logprobs"]) for entry in entries] == [2] * len(entries)
    assert [entry for event in events if event["type"].endswith("text.delta") for entry in event["logprobs"]] == entries


async def test_items_become_one_conversation() -> None:
    items = [
        {"role": "developer", "content": "be brief"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_1",
            "status": "completed",
            "content": [{"type": "output_text", "text": "b", "annotations": [], "logprobs": []}],
        },
        {"role": "user", "content": [{"type": "input_text", "text": "c"}, {"type": "input_text", "text": "d"}]},
    ]
    async with gateway() as served:
        response_of(await respond(served, input=items, instructions="be kind"))
        assert prompt_of(served) == (
            "<|bos|><|system|>be kind\n\nbe brief<|end|>\n<|user|>a<|end|>\n"
            "<|assistant|>b<|end|>\n<|user|>c\nd<|end|>\n<|assistant|>"
        )


async def test_sampling_fields_reach_the_cluster() -> None:
    fields = {"temperature": 0.25, "top_p": 0.5, "max_output_tokens": 7, "seed": 11, "service_tier": "flex", "top_k": 3}
    async with gateway() as served:
        response = response_of(await respond(served, **fields))
        [request] = served.backend.submitted
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens, sampling.seed) == (0.25, 0.5, 7, 11)
    assert (sampling.top_k, request.request_class, response["service_tier"]) == (3, RequestClass.BEST_EFFORT, "flex")


async def test_truncation_leaves_out_whole_turns_from_the_beginning() -> None:
    system = {"role": "system", "content": "stay"}
    items = [system, *({"role": "user", "content": f"turn {turn:02}"} for turn in range(40))]
    async with gateway() as served:
        error_of(await respond(served, input=items), 400)
        response = response_of(await respond(served, input=items, truncation="auto", max_output_tokens=9))
        prompt = prompt_of(served)
        [request] = served.backend.submitted
    assert response["truncation"] == "auto"
    assert prompt.startswith("<|bos|><|system|>stay<|end|>\n<|user|>turn ")
    assert prompt.endswith("<|user|>turn 39<|end|>\n<|assistant|>")
    per_turn = len(tokens_of("<|user|>turn 39<|end|>\n"))
    assert 256 - 9 - per_turn < request.prompt_len <= 256 - 9  # one more turn would not fit


async def test_a_failure_in_the_middle_ends_the_stream() -> None:
    script = Script(tokens_of("hello world"), failure=TimedOut("The cluster is silent."))
    async with gateway(lambda _: script) as served:
        events = events_of(await respond(served, stream=True))
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"] == {"code": "server_error", "message": "The cluster is silent."}
    [item] = events[-1]["response"]["output"]
    assert (item["status"], item["content"][0]["text"]) == ("incomplete", "hello world")  # what there was of it


async def test_a_failure_before_the_first_token_is_an_http_error() -> None:
    script = Script((), failure=Overloaded("Too much.", retry_after_s=2.0))
    async with gateway(lambda _: script) as served:
        error_of(await respond(served, stream=True), 503)


async def test_unknown_fields_are_named_in_a_header() -> None:
    items = [{"role": "user", "content": [{"type": "input_text", "text": "a", "mood": 1}], "colour": 2}]
    async with gateway() as served:
        answer = await respond(served, input=items, flavour=3)
        assert answer.headers["x-alignedserve-ignored-fields"] == "flavour, input[].colour, input[].content[].mood"
    async with gateway(strict=True) as served:
        assert error_of(await respond(served, input=items), 400)["param"] == "input[0].colour"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model": None}, "model"),
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": 7}, "input"),
    ({"input": [{"type": "poem"}]}, "input[0].type"),
    ({"input": [{"type": ["message"]}]}, "input[0].type"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": []}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
    ({"input": [{"type": "computer_call"}]}, "input[0].type"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
    ({"temperature": 9.0}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 9999}, "input"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"include": ["everything"]}, "include[0]"),
    ({"metadata": {"k": "v" * 513}}, "metadata.k"),
    ({"metadata": {str(number): "v" for number in range(17)}}, "metadata"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"stop": ["x"]}, "stop"),
    ({"n": 2}, "n"),
    ({"max_tokens": 5}, "max_tokens"),
    ({"structured_outputs": {"regex": "a+"}}, "structured_outputs"),
    ({"regex": "a+"}, "regex"),
    ({"truncation": "some"}, "truncation"),
    ({"truncation": "auto", "input": "fox " * 300}, "input"),
    ({"text": {"verbosity": "chatty"}}, "text.verbosity"),
    ({"reasoning": {"summary": "long"}}, "reasoning.summary"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": 7}, "tools"),
    ({"tools": [7]}, "tools[0]"),
    ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "mcp"}]}]}, "tools[0].tools[0].type"),
    ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "namespace"}]}]}, "tools[0].tools[0].type"),
    ({"tool_choice": {"type": "mcp"}}, "tool_choice.type"),
    ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ({"store": True}, "store"),
    ({"background": True}, "background"),
    ({"background": True, "stream": True}, "background"),
    ({"background": True, "store": False}, "store"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
]


@each(("fields", "param"), REFUSED)
async def test_refused_fields_are_named(fields: dict[str, Any], param: str) -> None:
    async with gateway() as served:
        error = error_of(await respond(served, **fields), 400)
        assert error["param"] == param
        assert served.backend.submitted == []


@each(
    "fields",
    [
        {"n": 1},
        {"stop": None},
        {"logit_bias": {}},
        {"ignore_eos": False},
        {"length_penalty": 1},
        {"response_format": {"type": "text"}},
        *({"reasoning": {name: value}} for name in ("summary", "generate_summary") for value in get_args(Summary)),
    ],
)
async def test_fields_of_chat_that_ask_for_nothing_are_accepted(fields: dict[str, Any]) -> None:
    async with gateway() as served:
        response_of(await respond(served, **fields))


async def test_an_unknown_model_and_an_unknown_item() -> None:
    async with gateway() as served:
        error_of(await respond(served, model="other"), 404)
        error_of(await respond(served, input=[{"type": "item_reference", "id": "msg_1"}]), 404)


async def test_input_tokens_are_those_of_the_prompt() -> None:
    async with gateway() as served:
        counted = await served.client.post("/v1/responses/input_tokens", json={"input": "hello", "instructions": "be"})
        response = response_of(await respond(served, instructions="be"))
    assert counted.json() == {"object": "response.input_tokens", "input_tokens": response["usage"]["input_tokens"]}
