"""Stop strings against a reference that looks at every prefix of the whole text, and in deltas of several tokens."""

import random
import sys
from typing import Any

import pytest

from alignedserve.api.text_markers import StopStringFinder
from alignedserve.core.request import FinishReason
from tests.gateway.support import Gateway, chunks_of, gateway, saying, tokenizer, tokens_of
from tests.gateway.tool_support import HERMES, function, model_with
from tests.harnesses.scripted_backend import Script
from tests.support.marks import each

# Of a schema with long names nearly all of an answer is forced: jumps bring many of its tokens at once.
ANSWER = '{"quick_brown_fox":"hello","lazy_dog":7}'
SCHEMA = {
    "type": "object",
    "properties": {"quick_brown_fox": {"type": "string"}, "lazy_dog": {"type": "integer"}},
    "required": ["quick_brown_fox", "lazy_dog"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "forced", "schema": SCHEMA}}
STEPS = (2, 5, 100)
# In the midst of a jump, at its beginning, at the end of the answer, and at a border of tokens.
STOPS = ("brown", '{"', "}", "_fox", '":"h', "7}")


def reference(text: str, stops: list[str]) -> tuple[str, str | None]:
    for length in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:length].endswith(stop)]
        if ending:
            found = max(ending, key=len)
            return text[: length - len(found)], found
    return text, None


def test_where_pieces_are_cut_makes_no_difference() -> None:
    draw = random.Random(3)
    for _ in range(3000):
        text = "".join(draw.choices("abc", k=draw.randrange(1, 14)))
        stops = ["".join(draw.choices("abc", k=draw.randrange(1, 5))) for _ in range(draw.randrange(1, 4))]
        shown, found = reference(text, stops)
        finder, got, rest = StopStringFinder(stops), "", text
        while rest and finder.found is None:
            size = draw.randrange(1, 5)
            got += finder.push(rest[:size])
            rest = rest[size:]
            assert shown.startswith(got)  # never more than may be shown
        got += "" if finder.found is not None else finder.flush()
        assert (got, finder.found) == (shown, found), (text, stops)


def test_what_is_held_for_one_stop_string_is_not_compared_with_every_other_at_each_token() -> None:
    finder, num_comparisons = (
        StopStringFinder([" the" * 250 + "!", *["x" * 1000 + str(place) for place in range(15)]]),
        0,
    )

    def note(_: object, event: str, called: Any) -> None:
        nonlocal num_comparisons
        num_comparisons += event == "c_call" and called.__name__ == "endswith"

    sys.setprofile(note)
    try:
        shown = "".join(finder.push(" the") for _ in range(250))
    finally:
        sys.setprofile(None)
    assert num_comparisons <= 250 * 16 * len(" the")
    assert shown + finder.flush() == " the" * 250


def num_tokens_until(stop: str) -> int:
    """Return how many tokens of the answer it takes to complete this stop string."""
    end = ANSWER.index(stop) + len(stop)
    token_ids = tokens_of(ANSWER)
    return next(count for count in range(len(token_ids) + 1) if len(tokenizer().decode(token_ids[:count])) >= end)


async def ask(served: Gateway, path: str, **fields: Any) -> Any:
    response = await served.client.post(path, json={"model": "tiny"} | fields)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("tokens_per_step", STEPS)
async def test_a_stop_string_inside_of_a_jump(stop: str, tokens_per_step: int) -> None:
    shown, num_tokens = ANSWER[: ANSWER.index(stop)], num_tokens_until(stop)
    fields: dict[str, Any] = {"response_format": FORMAT, "stop": stop, "return_token_ids": True}
    async with gateway(saying(ANSWER, tokens_per_step=tokens_per_step)) as served:
        whole = (await served.chat(**fields)).json()
        with_stop = (await served.chat(**fields, include_stop_str_in_output=True)).json()
        chunks = chunks_of(await served.chat(**fields, stream=True, stream_options={"include_usage": True}))
    [choice] = whole["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (shown, "stop")
    assert with_stop["choices"][0]["message"]["content"] == shown + stop
    assert whole["usage"]["completion_tokens"] == chunks[-1]["usage"]["completion_tokens"] == num_tokens
    streamed = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    assert "".join(one["delta"].get("content") or "" for one in streamed) == shown
    assert [one["finish_reason"] for one in streamed if one["finish_reason"]] == ["stop"]
    streamed_ids = [token_id for one in streamed for token_id in one.get("token_ids") or ()]
    assert choice["token_ids"] == streamed_ids == list(tokens_of(ANSWER)[:num_tokens])


@each("tokens_per_step", STEPS)
async def test_a_limit_in_the_same_delta_does_not_hide_a_stop_string(tokens_per_step: int) -> None:
    """The last delta of a whole answer says `length`, and has the stop string too."""
    num_tokens = num_tokens_until("brown") + 1
    async with gateway(saying(ANSWER, tokens_per_step=tokens_per_step)) as served:
        found = (await served.chat(response_format=FORMAT, stop="brown", max_tokens=num_tokens)).json()
        cut = (await served.chat(response_format=FORMAT, stop="brown", max_tokens=num_tokens - 2)).json()
    assert found["choices"][0]["finish_reason"] == "stop"
    assert found["usage"]["completion_tokens"] == num_tokens - 1
    assert cut["choices"][0]["finish_reason"] == "length"
    assert ANSWER.startswith(cut["choices"][0]["message"]["content"])


@each("stop", ["<tool", "t"])
async def test_a_stop_string_in_text_that_was_held_back_until_the_end(stop: str) -> None:
    """What may begin a call is shown when none follows, and then it may have a stop string."""
    model = model_with(HERMES)
    script = Script(tuple(model.load_tokenizer().encode("see <tool", add_special_tokens=False)))
    async with gateway(lambda _: script, model=model) as served:
        answer = (await served.chat(tools=[function()], stop=stop, max_tokens=len(script.token_ids))).json()
    [choice] = answer["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("see <tool".partition(stop)[0], "stop")


@each("tokens_per_step", STEPS)
async def test_the_other_routes_stop_inside_of_a_jump(tokens_per_step: int) -> None:
    shown, num_tokens = ANSWER[: ANSWER.index("brown")], num_tokens_until("brown")
    turn = [{"role": "user", "content": "hello"}]
    async with gateway(saying(ANSWER, tokens_per_step=tokens_per_step)) as served:
        completion = await ask(served, "/v1/completions", prompt="a", guided_json=SCHEMA, stop="brown", max_tokens=99)
        message = await ask(served, "/v1/messages", messages=turn, max_tokens=99, stop_sequences=["brown"])
    [choice] = completion["choices"]
    assert (choice["text"], choice["finish_reason"]) == (shown, FinishReason.STOP.value)
    assert completion["usage"]["completion_tokens"] == message["usage"]["output_tokens"] == num_tokens
    assert (message["content"][0]["text"], message["stop_reason"]) == (shown, "stop_sequence")
    assert message["stop_sequence"] == "brown"
