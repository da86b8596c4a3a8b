"""Items and events of thoughts, answers and calls, in whatever pieces they come."""

from collections.abc import Sequence
from typing import Any

from alignedserve.api.openai.choice_decoder import ChoiceDelta
from alignedserve.api.responses.formatter import OutputBuilder
from alignedserve.api.tools.call_parser import ToolCallDelta
from tests.support.lazy_types import LazyType
from tests.support.marks import each

_EVENT = LazyType("openai.types.responses", "ResponseStreamEvent")
_ITEM = LazyType("openai.types.responses", "ResponseOutputItem")
RESPONSE_ID = "resp_" + "0" * 32


def call(index: int, arguments: str, *, is_first: bool = False) -> ChoiceDelta:
    names = (f"call_{index}", f"f{index}") if is_first else (None, None)
    return ChoiceDelta("", tool_calls=(ToolCallDelta(index, arguments, *names),))


def built(deltas: Sequence[ChoiceDelta], *, is_complete: bool = True) -> tuple[list[dict[str, Any]], list[str]]:
    """The items and the types of the events; both as OpenAI's types accept them."""
    names_of_f1 = {"name": "f1", "namespace": "ns"}
    output = OutputBuilder(RESPONSE_ID, show_logprobs=lambda logprobs: [], function_names={"ns__f1": names_of_f1})
    names: list[str] = []
    for batch in [*map(output.add, deltas), output.end(is_complete=is_complete)]:
        for event in batch:
            _EVENT.check(event | {"sequence_number": len(names)})
            assert event["output_index"] == len(output.items) - 1
            names.append(event["type"].removeprefix("response."))
    for item in output.items:
        _ITEM.check(item)
    return output.items, names


def test_a_thought_an_answer_and_two_calls() -> None:
    deltas = [
        ChoiceDelta("", reasoning="I "),
        ChoiceDelta("well", reasoning="think"),
        call(0, "", is_first=True),
        call(0, '{"a":'),
        call(0, "1}"),
        call(1, "{}", is_first=True),
    ]
    items, names = built(deltas)
    assert [item["type"] for item in items] == ["reasoning", "message", "function_call", "function_call"]
    assert items[0]["content"] == [{"type": "reasoning_text", "text": "I think"}]
    assert items[1]["content"][0]["text"] == "well"
    calls = [(item["call_id"], item["name"], item["arguments"]) for item in items[2:]]
    assert calls == [("call_0", "f0", '{"a":1}'), ("call_1", "f1", "{}")]
    assert names == [
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done"),
    ]


def test_a_function_of_a_namespace_has_its_names_apart() -> None:
    [item], _ = built([ChoiceDelta("", tool_calls=(ToolCallDelta(0, "{}", "a", "ns__f1"),))])
    assert (item["name"], item["namespace"]) == ("f1", "ns")


def test_calls_in_one_delta() -> None:
    both = ChoiceDelta("", tool_calls=(ToolCallDelta(0, "{}", "a", "f"), ToolCallDelta(1, "[]", "b", "g")))
    items, _ = built([both])
    assert [(item["call_id"], item["arguments"], item["status"]) for item in items] == [
        ("a", "{}", "completed"),
        ("b", "[]", "completed"),
    ]


def test_nothing_at_all_is_an_empty_answer() -> None:
    [item], _ = built([ChoiceDelta("")])
    assert (item["type"], item["content"][0]["text"]) == ("message", "")


@each("deltas", [[ChoiceDelta("", reasoning="a")], [ChoiceDelta("a")], [call(0, "{", is_first=True)]])
def test_only_the_last_item_is_cut(deltas: list[ChoiceDelta]) -> None:
    items, _ = built([ChoiceDelta("b"), *deltas], is_complete=False)
    assert [item["status"] for item in items] == ["completed"] * (len(items) - 1) + ["incomplete"]


def test_ids_name_type_response_and_place() -> None:
    items, _ = built([ChoiceDelta("a", reasoning="b"), call(0, "{}", is_first=True)])
    assert [item["id"] for item in items] == [
        "rs_" + "0" * 32 + "o0",
        "msg_" + "0" * 32 + "o1",
        "fc_" + "0" * 32 + "o2",
    ]
