"""What `LLM` makes of stop strings, several answers, progress, `with` and forks, by its public names."""

import io
import os
import random
import secrets
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from typing_extensions import override

from alignedserve import LLM, SamplingParams
from alignedserve.core.errors import InvalidRequest, ModelError
from alignedserve.core.request import FinishReason

GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
PROMPT = "spell otter, "


class Terminal(io.StringIO):
    """Standard error as a terminal has it."""

    @override
    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("pocket", memory_bytes=16 * 2**20) as made:
        yield made


@pytest.mark.parametrize("is_alone", [True, False])
def test_a_stop_string_ends_the_text_and_is_no_part_of_it(llm: LLM, is_alone: bool) -> None:
    (whole,) = llm.generate(PROMPT, GREEDY)
    stop = whole.text[5:8]  # of several tokens
    (output,) = llm.generate(PROMPT, replace(GREEDY, stop=stop if is_alone else ["never said", stop], num_logprobs=0))
    assert (output.text, output.finish_reason) == (whole.text.partition(stop)[0], FinishReason.STOP)
    assert output.token_ids == whole.token_ids[: len(output.token_ids)]
    assert len(output.logprobs) == len(output.token_ids) < len(whole.token_ids)


def test_nothing_is_computed_behind_a_stop_string(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    compute, num_iterations = llm._executor.run_iteration, 0

    def counted(command: Any) -> Any:
        nonlocal num_iterations
        num_iterations += 1
        return compute(command)

    (whole,) = llm.generate(PROMPT, GREEDY)
    monkeypatch.setattr(llm._executor, "run_iteration", counted)
    (output,) = llm.generate(PROMPT, replace(GREEDY, max_tokens=500, stop=whole.text[4]))
    assert num_iterations <= len(output.token_ids) + 3  # one is planned before the text is looked at


def test_what_is_never_said_stops_nothing(llm: LLM) -> None:
    (whole,), (output,) = llm.generate(PROMPT, GREEDY), llm.generate(PROMPT, replace(GREEDY, stop="never said"))
    assert output == whole


def test_a_stop_string_ends_the_answer_of_a_chat(llm: LLM) -> None:
    (output,) = llm.chat("spell otter", SamplingParams(max_tokens=100, temperature=0.0, stop="e"))
    assert (output.text, output.finish_reason) == ("o t t ", FinishReason.STOP)


def test_a_prompt_has_as_many_answers_as_are_asked_for(llm: LLM) -> None:
    sampling = replace(GREEDY, temperature=1.5, seed=7)
    (one,) = llm.generate(PROMPT, sampling)
    first, second = llm.generate([PROMPT, "count from 3"], [replace(sampling, n=3), sampling])
    assert one.outputs == [one]
    assert first.text == first.outputs[0].text == one.text
    assert len({answer.text for answer in first.outputs}) == len(first.outputs) == 3
    assert second.outputs == [second]
    assert [answer.text for answer in llm.generate(PROMPT, replace(sampling, n=3))[0].outputs] == [
        answer.text for answer in first.outputs
    ]


def test_scores_of_a_prompt_come_once_though_it_makes_room_for_others(llm: LLM) -> None:
    """Both prompts fit, their answers do not."""
    sampling = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True, num_prompt_logprobs=0)
    prompts = [[token_id] * 60 for token_id in (40, 41)]
    with LLM("pocket", memory_bytes=12 * llm._executor.layout.block_bytes) as small:
        outputs = small.generate(prompts, sampling)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert [score.token_id for score in output.prompt_logprobs] == prompt[1:]


def test_answers_without_a_seed_differ(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "randbits", random.Random(7).getrandbits)  # two may draw the same answer by chance
    (output,) = llm.chat("spell otter", replace(GREEDY, temperature=1.5, n=3))
    assert len({answer.text for answer in output.outputs}) == 3


@pytest.mark.parametrize("given", [{"n": 0}, {"stop": ""}, {"stop": ["otter", ""]}])
def test_values_without_a_meaning_are_refused_by_name(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        SamplingParams(**given)
    assert refusal.value.param == next(iter(given))


def test_a_terminal_shows_how_far_a_call_is(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", shown := Terminal())
    llm.generate([PROMPT] * 2, GREEDY)
    assert "2/2" in shown.getvalue()
    assert "48 tokens" in shown.getvalue()
    monkeypatch.setattr(sys, "stderr", quiet := Terminal())
    llm.generate([PROMPT] * 2, GREEDY, use_tqdm=False)
    llm.chat("spell otter", use_tqdm=False)
    assert quiet.getvalue() == ""


def test_what_is_no_terminal_is_left_alone(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    llm.generate([PROMPT] * 2, GREEDY)
    llm.embed("otter")
    assert capfd.readouterr() == ("", "")


def test_the_end_of_with_closes_a_model() -> None:
    with LLM("pocket", memory_bytes=16 * 2**20) as closed:
        assert closed.generate(PROMPT, GREEDY)
    with pytest.raises(ModelError, match="closed"):
        closed.generate(PROMPT, GREEDY)
    closed.close()  # once more changes nothing


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # of newer Pythons: it has other threads
def test_a_forked_process_has_a_model_of_its_own(llm: LLM) -> None:
    (expected,) = llm.chat("spell otter")
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(60)  # where it waits for ever
        try:
            with LLM("pocket", memory_bytes=16 * 2**20) as own:
                os.write(writer, own.chat("spell otter")[0].text.encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        assert answer.read() == expected.text
    os.waitpid(child, 0)
