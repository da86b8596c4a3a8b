"""Tool calls: every family's way to write them is read back, however its text is cut into pieces."""

import json
from collections.abc import Sequence
from itertools import count, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.api.reasoning import FORMATS as REASONING
from alignedserve.api.reasoning import ReasoningParser, ThoughtPart, ThoughtStart, find_reasoning_format, thought_start
from alignedserve.api.tools.call_parser import CallRun, ToolCallParser, whole_tool_calls
from alignedserve.api.tools.formats import FORMATS, ToolFormat, find_tool_format
from alignedserve.config.sections import REASONING_FORMATS, TOOL_FORMATS

pytestmark = pytest.mark.slow

CALLS = [("get_weather", '{"city": "Paris \\"{[]}\\" é", "days": [1, {"a": null}]}'), ("stop", "{}")]
ARGUMENTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=12,  # nested as deep as with a hundred, of which drawing takes longer than what is tested
)


def parse(form: ToolFormat, pieces: Sequence[str]) -> tuple[str, list[tuple[str, str]], list[CallRun]]:
    ids = count()
    parser = ToolCallParser(form, lambda text: text, lambda: f"id{next(ids)}")
    runs = [run for piece in pieces for run in parser.push(piece)] + parser.end()
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    for delta in (delta for run in runs for delta in run.tool_calls):
        assert (delta.call_index in names) == (delta.name is None), "the name comes once, first"
        assert delta.call_id in (None, f"id{delta.call_index}")
        names.setdefault(delta.call_index, delta.name or "")
        arguments[delta.call_index] = arguments.get(delta.call_index, "") + delta.arguments
    assert list(names) == list(range(len(names)))
    assert parser.has_calls == bool(names)
    return "".join(run.content for run in runs), [(names[call], arguments[call]) for call in names], runs


def cut(text: str, places: Sequence[int]) -> list[str]:
    bounds = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in pairwise(bounds)]


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=30)
@given(places=st.lists(st.integers(min_value=0), max_size=60))
def test_any_pieces_give_the_same_calls(name: str, places: list[int]) -> None:
    form = FORMATS[name]
    content = "Let me <look> [at] it.\n" if form.begin else ""
    text = content + form.text_of(CALLS)
    shown, calls, runs = parse(form, cut(text, places))
    assert (shown, calls) == (content, CALLS)
    assert sum(run.length for run in runs) == len(text)


# Parameters between tags have names without tags, and are written anew as JSON: see test_parameters.
@pytest.mark.parametrize("name", [name for name in FORMATS if name not in ("qwen3_coder", "glm45")])
@settings(max_examples=15)  # of each format, by the same parser
@given(arguments=st.dictionaries(st.text(), ARGUMENTS))
def test_any_arguments_are_read(name: str, arguments: dict[str, object]) -> None:
    text = json.dumps(arguments, ensure_ascii=False)
    _, calls, _ = parse(FORMATS[name], list(FORMATS[name].text_of([("f", text)])))
    assert calls == [("f", text)]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("text", ["", " \n", "hello", "a < b, [x] and {y}", "<tool", "<tool_call", "a [TOOL_C"])
def test_text_without_calls_is_content(name: str, text: str) -> None:
    assert parse(FORMATS[name], list(text))[:2] == (text, [])


def test_calls_of_kimi_have_numbers() -> None:
    text = FORMATS["kimi_k2"].text_of([("f", "{}"), ("f", '{"a": 1}')])
    assert text.count("functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>") == 1
    assert text.count("functions.f:1<|tool_call_argument_begin|>") == 1
    assert parse(FORMATS["kimi_k2"], list(text.replace("f:1", "a:b:12")))[1] == [("f", "{}"), ("a:b", '{"a": 1}')]


def test_space_before_calls_is_no_content() -> None:
    assert parse(FORMATS["hermes"], ["\n", "<tool_call>", '\n{"name": "f", "arguments": {}}'])[:2] == (
        "",
        [("f", "{}")],
    )
    assert parse(FORMATS["llama3_json"], ["\n", ' {"name": "f", "parameters": {}}'])[:2] == ("", [("f", "{}")])


def test_arguments_come_piece_by_piece() -> None:
    _, _, runs = parse(FORMATS["hermes"], ["<tool_call>", '{"name": "f", ', '"arguments": {"a"', ': "bc', 'd"}', "}"])
    deltas = [(delta.name, delta.arguments) for run in runs for delta in run.tool_calls]
    assert deltas == [("f", ""), (None, '{"a"'), (None, ': "bc'), (None, 'd"}')]


def test_keys_in_any_order_and_arguments_as_text() -> None:
    text = '<tool_call>{"id": 7, "arguments": "{\\"a\\": 1}", "type": "function", "name": "f"}</tool_call>'
    assert parse(FORMATS["hermes"], list(text))[1] == [("f", '{"a": 1}')]


def test_an_object_without_a_name_counts_as_no_call() -> None:
    ids = iter("ab")
    parser = ToolCallParser(FORMATS["phi4_mini"], lambda text: text, lambda: next(ids))
    text = '<|tool_call|>[{"nam": "f"}, {"name": "g", "arguments": {}}]<|/tool_call|>'
    deltas = [delta for run in (*parser.push(text), *parser.end()) for delta in run.tool_calls]
    assert whole_tool_calls(deltas)[0]["function"] == {"name": "g", "arguments": "{}"}


def test_a_cut_call_keeps_what_came() -> None:
    assert parse(FORMATS["hermes"], ['<tool_call>{"name": "f", "arguments": {"a": [1, '])[1] == [("f", '{"a": [1, ')]
    assert parse(FORMATS["hermes"], ['<tool_call>{"na'])[1] == []


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("system You are SmolLM, named SmolLM, trained", "smollm2"),
        ("return a json object within <tool_call></tool_call> XML tags", "hermes"),
        ("[AVAILABLE_TOOLS] [TOOL_CALLS] [", "mistral"),
        ("[TOOL_CALLS]name[ARGS]{}", "mistral_args"),
        ("Environment: ipython <|python_tag|>", "llama3_json"),
        ("<function=example>{}</function>", "functionary"),
        ("<\uff5ctool\u2581calls\u2581begin\uff5c>", "deepseek_v31"),
        ("<\uff5ctool\u2581call\u2581begin\uff5c>' + tool['type'] + '<\uff5ctool\u2581sep\uff5c>'", "deepseek_v3"),
        ("in this format: <|tool_call|>{}<|/tool_call|>", "phi4_mini"),
        ("'<|start_of_role|>assistant<|end_of_role|><|tool_call|>' + message.tool_calls", "granite"),
        ("<|start|>assistant to=functions.f<|channel|>commentary json<|message|>", "gpt_oss"),
        ("<tool_call>\n<function=example>\n<parameter=example>\nvalue\n</parameter>", "qwen3_coder"),
        ("{{ '\n<tool_call>' + tc.name }}<arg_key>{{ k }}</arg_key>", "glm45"),
        ("<|tool_calls_section_begin|><|tool_call_begin|>{{ call['id'] }}<|tool_call_argument_begin|>", "kimi_k2"),
        ("{{ messages }}", None),
    ],
)
def test_the_template_tells_the_format(template: str, name: str | None) -> None:
    assert find_tool_format(None, template) == (FORMATS[name] if name is not None else None)
    assert find_tool_format("json", template) is FORMATS["json"]


def test_the_configuration_knows_all_formats() -> None:
    assert tuple(FORMATS) == TOOL_FORMATS
    assert tuple(REASONING) == REASONING_FORMATS


THINK = REASONING["think"]


@pytest.mark.parametrize(
    ("prompt", "start"),
    [
        ("<assistant>\n<think>\n", ThoughtStart.OPEN),
        ("<think>\n\n</think>\n\n", ThoughtStart.CLOSED),
        ("<think>a</think>b<assistant>", ThoughtStart.UNDECIDED),
    ],
)
def test_the_prompt_tells_how_an_answer_begins(prompt: str, start: ThoughtStart) -> None:
    assert thought_start(prompt, THINK) is start


@pytest.mark.parametrize(
    ("start", "text", "thought", "answer"),
    [
        (ThoughtStart.UNDECIDED, "<think>\nso < it\n</think>\n\nyes\n<think>", "so < it\n", "yes\n<think>"),
        (ThoughtStart.UNDECIDED, "\n<think></think>yes", "", "yes"),
        (ThoughtStart.UNDECIDED, " <thin", "", " <thin"),
        (ThoughtStart.UNDECIDED, "yes", "", "yes"),
        (ThoughtStart.OPEN, "so</think>yes", "so", "yes"),
        (ThoughtStart.OPEN, "so </think", "so </think", ""),
        (ThoughtStart.CLOSED, "\nyes</think>", "", "yes</think>"),
    ],
)
@settings(max_examples=30)
@given(places=st.lists(st.integers(min_value=0), max_size=30))
def test_a_thought_stands_apart(start: ThoughtStart, text: str, thought: str, answer: str, places: list[int]) -> None:
    parser = ReasoningParser(THINK, start)
    runs = [run for piece in cut(text, places) for run in parser.push(piece)] + parser.end()
    assert "".join(run.text for run in runs) == text
    assert "".join(run.text for run in runs if run.part is ThoughtPart.THOUGHT) == thought
    assert "".join(run.text for run in runs if run.part is ThoughtPart.ANSWER) == answer


def test_the_format_of_a_thought_is_in_the_template() -> None:
    assert find_reasoning_format(None, "x.split('</think>') <think>") == THINK
    assert find_reasoning_format(None, "<think> alone") is None
    assert find_reasoning_format("magistral", "") == REASONING["magistral"]
