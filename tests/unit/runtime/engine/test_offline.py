"""The engine in this process, by its public names."""

import json
import os
import random
import secrets
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from alignedserve import LLM, SamplingParams, StructuredOutputs
from alignedserve.core.errors import ContextTooLong, InvalidRequest, ModelError
from alignedserve.core.request import FinishReason
from alignedserve.messages.iterations import IterationCompleted, RunIteration
from alignedserve.offline import calling_process as forks
from alignedserve.runtime.model.named_models import pocket_folder
from alignedserve.text.tokenizer import Tokenizer
from tests.gateway.support import write_sentencepiece
from tests.support.models.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("pocket", memory_bytes=16 * 2**20)


def test_answers_end_by_themselves(llm: LLM) -> None:
    outputs = llm.chat(["who are you?", "count from 3 to 9"])
    assert all(output.finish_reason is FinishReason.STOP for output in outputs)
    assert all(output.text for output in outputs)


def test_what_was_computed_before_is_not_computed_again(llm: LLM) -> None:
    sampling = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    plain = LLM("pocket", memory_bytes=16 * 2**20, prefix_cache=False)
    prompt = "a conversation that goes on and on: " * 4
    for turn in range(4):
        (cached,), (right,) = llm.generate([prompt], sampling), plain.generate([prompt], sampling)
        assert cached.token_ids == right.token_ids
        assert right.num_cached_tokens == 0
        assert (cached.num_cached_tokens > 0) == (turn > 0)
        prompt += right.text + f" turn {turn}"
    plain.close()


def test_the_same_prompt_again_computes_one_token(llm: LLM) -> None:
    sampling = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    tokens = llm.generate(["a prompt of some length, which is given twice, and then"], sampling)[0].token_ids
    for num_tokens in range(15, 20):  # among them a multiple of the block's size, of which the last block is copied
        first, again = (llm.generate([[5, *tokens[:num_tokens]]], sampling)[0] for _ in range(2))
        assert first.token_ids == again.token_ids
        assert again.num_cached_tokens == min(16 * ((num_tokens + 1) // 16), num_tokens)


def test_equal_prompts_have_answers_of_their_own_unless_a_seed_is_given(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secrets, "randbits", random.Random(7).getrandbits)  # two may draw the same answer by chance
    sampling = SamplingParams(max_tokens=24, temperature=1.5, ignore_eos=True)
    free, seeded = sampling, replace(sampling, seed=7)
    assert len({tuple(one.token_ids) for one in llm.generate(["spell otter"] * 4, free)}) == 4
    assert len({tuple(one.token_ids) for one in llm.generate(["spell otter"] * 2, seeded)}) == 1


def test_log_probabilities_come_where_they_are_asked_for(llm: LLM) -> None:
    sampling = SamplingParams(max_tokens=5, temperature=0.0, num_logprobs=2, num_prompt_logprobs=0)
    (output,) = llm.generate(["spell otter"], sampling)
    assert [one.token_id for one in output.logprobs] == output.token_ids
    assert all(one.top[0] == (one.token_id, one.logprob) and len(one.top) == 2 for one in output.logprobs)
    prompt = Tokenizer.load(pocket_folder()).encode("spell otter")
    assert [one.token_id for one in output.prompt_logprobs] == prompt[1:]
    assert llm.generate(["spell otter"], SamplingParams(max_tokens=2))[0].logprobs == []


def test_a_token_that_ends_an_answer_is_not_of_its_text(llm: LLM) -> None:
    free = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    (plain,) = llm.generate(["spell otter, "], free)
    (stopped,) = llm.generate(["spell otter, "], replace(free, stop_token_ids=(plain.token_ids[-1],)))
    assert stopped.finish_reason is FinishReason.STOP
    (until,) = llm.generate(["spell otter, "], replace(free, max_tokens=len(stopped.token_ids) - 1))
    assert (until.token_ids, until.text) == (stopped.token_ids[:-1], stopped.text)


def test_demands_that_contradict_each_other_are_named(llm: LLM) -> None:
    (token_id,) = Tokenizer.load(pocket_folder()).encode("a")[-1:]
    sampling = SamplingParams(allowed_token_ids=(token_id,), bad_words=((token_id,),))
    with pytest.raises(ModelError, match="leave no token to choose"):
        llm.generate(["spell otter"], sampling)


@pytest.mark.parametrize(
    "field", [{"max_tokens": None}, {"logit_bias": {5: 1.0}}, {"seed": "x"}, {"stop": None}, {"n": "2"}]
)
def test_a_field_of_another_type_is_named(field: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(field))):
        SamplingParams(**field)


def test_of_several_prompts_the_one_that_fails_is_named(llm: LLM) -> None:
    one = SamplingParams(max_tokens=1, ignore_eos=True)
    nothing = replace(one, allowed_token_ids=(5,), bad_words=((5,),), n=2)
    for bad in ("a " * 3000, "\ud83d", ""):
        with pytest.raises(InvalidRequest, match=r"prompts\[1\]: "):
            llm.generate(["spell otter", bad], one)
    for bad_chat in ("a " * 3000, "\ud83d", None, [{"role": "user"}]):
        with pytest.raises(InvalidRequest, match=r"prompts\[1\]: "):
            llm.chat(["spell otter", bad_chat], one)
    with pytest.raises(ModelError, match=r"1 of 3 prompts failed: .* \(prompts\[1\]\)"):
        llm.generate(["a", "b", "c"], [one, nothing, one])


def test_errors_that_are_returned_cost_their_prompts_alone(llm: LLM) -> None:
    one = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    nothing = replace(one, allowed_token_ids=(5,), bad_words=((5,),), n=2)
    bad: list[Any] = ["a " * 3000, "\ud83d", "", [], [-1], 7]
    (right,) = llm.generate(["spell otter"], one)
    outputs = llm.generate([*bad, "spell otter", "a"], [one] * (len(bad) + 1) + [nothing], errors="return")
    assert [type(output.error) for output in outputs] == [ContextTooLong, *[InvalidRequest] * 5, type(None), ModelError]
    assert outputs[-2].token_ids == right.token_ids
    assert all(output.token_ids == [] and output.finish_reason is None for output in outputs if output.error)


def test_prompts_may_come_from_a_generator(llm: LLM) -> None:
    one = SamplingParams(max_tokens=2, temperature=0.0)
    words = ["otter", "tree"]
    from_generator = llm.generate((word for word in words), one)
    assert [output.token_ids for output in from_generator] == [output.token_ids for output in llm.generate(words, one)]
    nothing: Any = None
    for call in (llm.generate, llm.embed, partial(llm.score, "otter")):
        with pytest.raises(InvalidRequest):
            call(nothing)


def test_pairs_with_errors_have_no_score(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    texts: list[Any] = ["otter", "a " * 3000, "tree", ""]
    right = llm.score("otter", ["otter", "tree"])
    scores = llm.score("otter", texts, errors="return")
    assert (scores[0], scores[2], *np.isnan(scores)) == (*right, False, True, False, True)
    assert "2 of 4 pairs have no score: a text has" in caplog.text
    assert np.isnan(llm.score(texts, ["tree"] * 4, errors="return")).tolist() == [False, True, False, True]
    with pytest.raises(ContextTooLong):
        llm.score("otter", texts)


def test_so_do_those_of_chats(llm: LLM) -> None:
    one = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    chats: list[Any] = ["a " * 3000, "spell otter", None, [{"role": "user"}]]
    outputs = llm.chat(chats, one, errors="return")
    assert [output.error is None for output in outputs] == [False, True, False, False]
    assert outputs[1].token_ids == llm.chat("spell otter", one)[0].token_ids


def test_texts_with_errors_have_no_vector_and_the_others_theirs(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    right = llm.embed(["otter", "tree"])
    texts: list[Any] = ["a " * 3000, "otter", "", 7, "tree"]
    vectors = llm.embed(texts, errors="return")
    assert np.isnan(vectors).all(axis=1).tolist() == [True, False, True, True, False]
    assert (vectors[[1, 4]] == right).all()
    assert "3 of 5 texts have no vector; texts[0]: a text has" in caplog.text
    assert np.isnan(llm.embed([""], errors="return")).all()
    for bad in texts[0], *texts[2:4]:
        with pytest.raises(InvalidRequest, match=r"prompts\[1\]: "):
            llm.embed(["otter", bad])


def test_errors_are_raised_or_returned(llm: LLM) -> None:
    calls: list[Any] = [llm.generate, llm.chat, llm.embed]
    for call in calls:
        with pytest.raises(InvalidRequest, match="'raise' or 'return'"):
            call(["otter"], errors="ignore")


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(bad_words=["otter"]),
        SamplingParams(stop_token_ids="abc"),
        SamplingParams(num_logprobs=1.5),
        {"max_tokens": 3},
        [SamplingParams()] * 2,
    ],
)
def test_sampling_of_other_types_is_refused_and_the_next_call_answers(llm: LLM, sampling: Any) -> None:
    with pytest.raises(InvalidRequest, match="sampling"):
        llm.generate(["spell otter"], sampling)
    assert llm.generate(["spell otter"], SamplingParams(max_tokens=1, ignore_eos=True))[0].token_ids


def test_prompts_may_be_sampled_each_in_its_own_way(llm: LLM) -> None:
    samplings = [SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True) for count in (2, 5)]
    assert [len(one.token_ids) for one in llm.generate(["spell otter"] * 2, samplings)] == [2, 5]


def test_ctrl_c_ends_a_call_and_the_next_one_answers_as_before(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    questions = ["count from 3 to 9", "who are you?"]
    before = llm.chat(questions)
    compute, num_iterations = llm._executor.run_iteration, 0

    def interrupted(command: RunIteration) -> IterationCompleted:
        nonlocal num_iterations
        num_iterations += 1
        if num_iterations == 3:
            signal.raise_signal(signal.SIGINT)
        completed: IterationCompleted = compute(command)
        return completed

    with monkeypatch.context() as patched:
        patched.setattr(llm._executor, "run_iteration", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.chat(questions)
    assert num_iterations <= 4  # the next one is planned before the interrupt is looked at
    assert [one.text for one in llm.chat(questions)] == [one.text for one in before]


def test_ctrl_c_while_prompts_are_taken_leaves_nothing_to_the_next_call(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    (before,) = llm.generate(["spell otter"], sampling)
    take = llm._logic.on_event

    def interrupted(event: Any, now: float) -> Any:
        monkeypatch.undo()
        taken = take(event, now)
        signal.raise_signal(signal.SIGINT)
        return taken

    monkeypatch.setattr(llm._logic, "on_event", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["who are you?", "count from 3 to 9"], sampling)
    assert llm.generate(["spell otter"], sampling)[0].token_ids == before.token_ids


def test_a_call_that_ended_within_an_iteration_is_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = LLM("pocket", memory_bytes=16 * 2**20)
    with monkeypatch.context() as patched:
        patched.setattr(broken._executor, "run_iteration", mock.Mock(side_effect=MemoryError))
        with pytest.raises(MemoryError):
            broken.chat(["who are you?"])
    with pytest.raises(ModelError, match="make another"):
        broken.chat(["who are you?"])
    broken.close()


def test_threads_share_a_model(llm: LLM) -> None:
    words = ["otter", "tree", "lamp"] * 2
    alone = [llm.chat(f"spell {word}")[0].text for word in words]
    with ThreadPoolExecutor(len(words)) as threads:
        assert [one[0].text for one in threads.map(llm.chat, [f"spell {word}" for word in words])] == alone


def test_a_forked_process_is_told_that_the_model_is_not_its_own(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getpid", lambda: -1)  # as in a fork, where a call would wait for ever
    with pytest.raises(ModelError, match="spawn"):
        llm.chat("spell otter")


def test_a_process_whose_loops_never_end_says_why_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []
    ended = threading.Event()

    def exit_at_once(code: int) -> None:
        said.append(code)
        ended.set()

    monkeypatch.setattr(os, "_exit", exit_at_once)
    monkeypatch.setattr(os, "write", lambda file, text: said.append((file, text)))
    forks.require_loops()
    assert said == []
    monkeypatch.setattr(torch, "ones", lambda size: SimpleNamespace(mul_=lambda factor: ended.wait(10.0)))
    forks.require_loops(patience_s=0.01)  # as in a fork of a process that had computed before
    (file, text), code = said
    assert (file, code) == (2, 1)
    assert b"spawn" in text


def test_a_prompt_longer_than_the_context_is_refused(llm: LLM) -> None:
    with pytest.raises(ContextTooLong, match="2048"):
        llm.generate(["a " * 3000])


def test_a_cache_smaller_than_the_context_holds_what_fits() -> None:
    small = LLM("pocket", memory_bytes=4 * 2**20)
    assert small.chat(["spell otter"])[0].finish_reason is FinishReason.STOP
    with pytest.raises(InvalidRequest, match="more KV cache than memory_bytes allows"):
        small.generate(["a " * 1500])
    small.close()


def test_importing_the_package_loads_nothing() -> None:
    code = "import alignedserve, sys; assert not {'torch', 'ray', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_malformed_grammar_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="grammar"):
        llm.chat(["spell otter"], SamplingParams(grammar="start: nothing of the kind"))


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ({"regex": "("}, "regex: a pattern is not a regular expression, or too complex a one."),
        (
            {"regex": "((a{1000}){1000}){1000}"},
            "regex: it has over 100000 characters with repetitions written out.",
        ),
        ({"json": {"not": {}}}, "json: the JSON Schema keyword 'not' is not supported."),
    ],
)
def test_constraints_are_refused_in_the_words_of_the_http_api(llm: LLM, outputs: dict[str, Any], message: str) -> None:
    for ask in (llm.chat, llm.generate):
        with pytest.raises(InvalidRequest) as refusal:
            ask(["x"], structured_outputs=StructuredOutputs(**outputs))
        assert str(refusal.value) == f"Invalid value for structured_outputs.{message}"


def test_answers_match_what_they_are_held_to(llm: LLM) -> None:
    sampling = SamplingParams(max_tokens=40, temperature=1.0, seed=1)
    (text,) = llm.chat(["red or blue?"], sampling, structured_outputs=StructuredOutputs(choice=["red", "blue"]))
    assert text.text in ("red", "blue")
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
        "additionalProperties": False,
    }
    for output in llm.generate(["a", "b", "c"], sampling, structured_outputs=StructuredOutputs(json=schema)):
        assert output.finish_reason is FinishReason.STOP
        assert isinstance(json.loads(output.text)["n"], int)


@pytest.mark.slow
def test_the_first_word_of_sentencepiece_keeps_its_space(tmp_path: Path) -> None:
    write_sentencepiece(tmp_path)
    make_tiny_model(tmp_path, "llama", vocab_size=8)
    words = LLM(str(tmp_path), memory_bytes=2**20)
    (output,) = words.generate(["the"], structured_outputs=StructuredOutputs(choice=[" quick dog"]))
    words.close()
    assert output.text == " quick dog"


def test_one_text_is_one_prompt(llm: LLM) -> None:
    sampling = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    (output,), (expected,) = llm.generate("spell otter", sampling), llm.generate(["spell otter"], sampling)
    assert output.token_ids == expected.token_ids
    assert llm.embed("otter").shape == llm.embed(["otter"]).shape
    assert llm.score("otter", ["a", "b", "c", "d", "e"]) == llm.score(["otter"], ["a", "b", "c", "d", "e"])


def test_prompts_may_be_token_ids(llm: LLM) -> None:
    text = "spell otter"
    token_ids = Tokenizer.load(pocket_folder()).encode(text)
    first, second = llm.generate([text, token_ids], SamplingParams(temperature=0.0, max_tokens=4))
    assert first.token_ids == second.token_ids


@pytest.mark.parametrize("prompt", [[], [-1], [1 << 20], [1.5], [True], 7, [[1]], b"text"])
def test_token_ids_that_are_none_are_refused(llm: LLM, prompt: Any) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        llm.generate([prompt])
    assert refusal.value.param == "prompts"
    with pytest.raises(InvalidRequest):  # a prompt where a list of them belongs
        llm.generate([1, 2, 3])
