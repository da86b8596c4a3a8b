"""What chat templates are found to know, what clients may give them, and control tokens in the text of answers."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from alignedserve.core.errors import InvalidRequest, UnsupportedModel
from alignedserve.text import chat_template
from alignedserve.text.chat_template import CallForm, ChatPrompt, ChatTemplate
from alignedserve.text.token_texts import control_mark
from alignedserve.text.tokenizer import Tokenizer
from tests.gateway.support import EOS, TEMPLATE, tokenizer, tokenizer_folder, write_tokenizer
from tests.gateway.tool_support import HERMES, TEXT_ARGUMENTS
from tests.support.marks import each

NOW = datetime(2026, 3, 4, 5, 6, 7)
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"x": "é"}}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "r", "tool_call_id": "a", "name": "f"},
]


def test_the_variables_of_a_template() -> None:
    template = ChatTemplate("{% if tools %}{{ enable_thinking }}{% endif %}{% set mine = 1 %}{{ mine }}", {})
    assert template.knows_tools
    assert "enable_thinking" in template.variables
    assert "mine" not in template.variables


def test_variables_never_replace_the_conversation() -> None:
    template = ChatTemplate("{{ messages[0].content }}{{ bos_token }}{{ x }}", {"bos_token": "B"})
    assert template.reserved >= {"messages", "tools", "bos_token", "add_generation_prompt", "raise_exception"}
    assert (
        template.render(ChatPrompt(MESSAGES[:1], variables={"messages": [], "bos_token": "evil", "x": 5}), now=NOW)
        == "hiB5"
    )


@pytest.mark.parametrize(
    ("source", "form"),
    [
        (HERMES, CallForm(has_text_arguments=False, has_null_content=False)),
        (TEXT_ARGUMENTS, CallForm(has_text_arguments=True, has_null_content=True)),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", None),
    ],
)
def test_the_form_in_which_calls_are_shown(source: str, form: CallForm | None) -> None:
    assert ChatTemplate(source, {}).call_form == form


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) if b < 0 %}{% endfor %}{% endfor %}",
        "{% macro twice(n) %}{% if n %}{{ twice(n - 1) }}{{ twice(n - 1) }}{% endif %}{% endmacro %}{{ twice(90) }}",
        "{{ 9 ** (9 ** 9) }}",
    ],
)
def test_a_template_that_never_ends_is_refused(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "RENDER_S", 0.01)
    monkeypatch.setattr(chat_template, "_PROBE_S", 0.01)
    with pytest.raises(InvalidRequest, match=r"too long to render|number that is too large"):
        ChatTemplate(source, {}).render(ChatPrompt(MESSAGES[:1]), now=NOW)


@pytest.mark.parametrize("doubled", ["x ~ x", "x + x", "x * 2"])
def test_a_template_that_doubles_a_text_for_ever_is_refused_before_memory_is_short(doubled: str) -> None:
    source = f"{{% set n = namespace(x='a') %}}{{% for i in range(99) %}}{{% set x = n.x %}}{{% set n.x = {doubled} %}}"
    with pytest.raises(InvalidRequest, match="cannot render these messages"):
        ChatTemplate(source + "{% endfor %}{{ n.x }}", {}).render(ChatPrompt(MESSAGES[:1]), now=NOW)


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{{ " + " + ".join(["1"] * 5000) + " }}",
        "{% for a in messages %}" * 30 + "{% endfor %}" * 30,
        "{% if messages %}" * 200 + "{% endif %}" * 200,
    ],
)
def test_a_template_that_is_nested_too_deeply_cannot_be_served(source: str) -> None:
    with pytest.raises(UnsupportedModel, match="nested too deeply"):
        ChatTemplate(source, {})


def test_bounds_change_nothing_in_what_loops_and_operators_make() -> None:
    source = (
        "{% for m in messages if m.role != 'tool' %}{{ loop.index ~ '/' ~ loop.length ~ m.role }}{% if loop.last %}."
        "{% endif %}{% else %}none{% endfor %}{{ 2 * 3 + 1 }}{{ 2 ** 8 }}{{ 'ab' * 2 }}{{ ([1] + [2])|length }}"
        "{{ 1 ~ x }}"
    )
    messages = [{"role": role, "content": "hi"} for role in ("user", "tool", "assistant")]
    assert ChatTemplate(source, {}).render(ChatPrompt(messages), now=NOW) == "1/2user2/2assistant.7256abab21"


@pytest.mark.parametrize("source", ["{{ messages[0].content|dictsort }}", "{{ 'x' * 10**14 }}", "{{ 1 // 0 }}"])
def test_what_a_template_cannot_render_is_the_fault_of_the_messages(source: str) -> None:
    with pytest.raises(InvalidRequest, match="cannot render these messages") as refusal:
        ChatTemplate(source, {}).render(ChatPrompt(MESSAGES[:1]), now=NOW)
    assert refusal.value.param == "messages"


def test_calls_that_a_template_does_not_show_are_refused() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {})
    with pytest.raises(InvalidRequest, match="does not show tool calls"):
        template.render(ChatPrompt(MESSAGES), now=NOW)


def test_a_template_of_its_own_for_conversations_with_tools(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    templates = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools | length }}"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    loaded = Tokenizer.load(tmp_path)
    assert loaded.render_chat(ChatPrompt(MESSAGES[:1]), now=NOW) == "plain"
    assert loaded.render_chat(ChatPrompt(MESSAGES[:1], [{"type": "function"}]), now=NOW) == "1"
    assert Tokenizer.load(tmp_path, chat_template="other").render_chat(ChatPrompt(MESSAGES[:1]), now=NOW) == "other"


def test_shown_control_tokens_are_marked_and_others_have_no_text() -> None:
    loaded = tokenizer()
    (bos,) = loaded.control_token_ids("<|bos|>")
    text = loaded.encode("ab", add_special_tokens=False)
    assert loaded.stream({bos}).push([*text, bos, EOS, *text]) == f"ab{control_mark('<|bos|>')}ab"
    assert loaded.stream().push([*text, bos, *text]) == "abab"


def test_a_text_is_split_at_its_control_tokens() -> None:
    assert tokenizer().split_control("a<|end|>b") == [("a", None), ("<|end|>", EOS), ("b", None)]
    assert tokenizer().marked("a<|end|>") == f"a{control_mark('<|end|>')}"


TRIMMED = "{% for message in messages %}<|{{ message.role }}|>\n{{ message.content | trim }} <|end|>{% endfor %}"
IN_PARTS = "{% for one in messages %}{% for part in one.content %}{{ part.text }}{% endfor %}<|end|>{% endfor %}"
UNSHOWN = [(TRIMMED, " "), ("{{ messages[0].content }}", "4"), ("{{ messages[1].content[:1] }}", "42")]


@each(
    ("template", "text", "expected"),
    [
        (TEMPLATE, "<", "<|bos|><|user|>say Answer: 4<|end|>\n<|assistant|><"),
        (TEMPLATE, "end", "<|bos|><|user|>say Answer: 4<|end|>\n<|assistant|>end"),
        (TEMPLATE, "Answer: ", "<|bos|><|user|>say Answer: 4<|end|>\n<|assistant|>Answer: "),
        (TEMPLATE, "\U000f0002 4", "<|bos|><|user|>say Answer: 4<|end|>\n<|assistant|> 4"),
        (TRIMMED, "Answer: ", "<|user|>\nsay Answer: 4 <|end|><|assistant|>\nAnswer:"),
        (TRIMMED, "\n4", "<|user|>\nsay Answer: 4 <|end|><|assistant|>\n4"),
        (IN_PARTS, "Answer: ", "say Answer: 4<|end|>Answer: "),
    ],
)
def test_a_message_that_is_left_open_ends_with_its_own_text(template: str, text: str, expected: str) -> None:
    loaded = Tokenizer.load(tokenizer_folder(), chat_template=template)
    messages = [{"role": "user", "content": "say Answer: 4"}, {"role": "assistant", "content": text}]
    prompt = loaded.encode_chat(ChatPrompt(messages, continue_final_message=True), now=NOW)
    assert loaded.decode(prompt, skip_special_tokens=False) == expected


@each(("template", "text"), UNSHOWN)
def test_a_message_that_the_template_does_not_show_cannot_be_left_open(template: str, text: str) -> None:
    loaded = Tokenizer.load(tokenizer_folder(), chat_template=template)
    messages = [{"role": "user", "content": "say 4"}, {"role": "assistant", "content": text}]
    with pytest.raises(InvalidRequest) as caught:
        loaded.encode_chat(ChatPrompt(messages, continue_final_message=True), now=NOW)
    assert caught.value.param == "continue_final_message"
