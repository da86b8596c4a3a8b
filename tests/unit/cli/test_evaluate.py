import json
import os
import signal
from dataclasses import replace
from typing import Any

import pytest

from alignedserve.core.errors import ConfigError
from alignedserve.pocket.tasks import OFFERED_SKILLS, Skill
from lab.commands.evaluate import evaluate
from lab.commands.options import EvalOptions
from lab.evaluation.accuracy import CONTEXT_BUCKETS, EvalAnswer, make_items, score
from lab.evaluation.pocket_calls import CONTEXT_LEN, pocket_tokenizer
from lab.evaluation.questions import make_questions
from tests.support.marks import each
from tests.support.servers.fake_server import FakeServer, Script, running

COUNT_TOKENS = pocket_tokenizer()
ITEMS = make_items(3, 0, COUNT_TOKENS)
ANSWERS = {item.task.prompt: item.task.answer for item in ITEMS}


def options(url: str) -> EvalOptions:
    return EvalOptions(
        suite="pocket",
        url=url,
        num_per_skill=3,
        seed=0,
        concurrency=8,
        threshold=0.9,
        show_failures=0,
        json_output=False,
    )


def answer_right(body: dict[str, Any]) -> Script:
    return Script(pieces=(ANSWERS[body["messages"][-1]["content"]],))


def answer_sums_wrong(body: dict[str, Any]) -> Script:
    prompt = body["messages"][-1]["content"]
    is_sum = any(item.task.prompt == prompt and item.group == "sums" for item in ITEMS)
    return Script(pieces=("nonsense",)) if is_sum else answer_right(body)


def test_items_cover_skills_and_lengths() -> None:
    groups = {item.group for item in ITEMS}
    assert groups == {skill.value for skill in OFFERED_SKILLS} | {
        f"prompt up to {length}" for length in CONTEXT_BUCKETS
    }
    for item in ITEMS:
        if item.group.startswith("prompt up to "):
            assert COUNT_TOKENS(item.task.prompt) <= 1.05 * int(item.group.rpartition(" ")[2])


def test_score_counts_failures_as_wrong() -> None:
    (first, second, third) = (item for item in ITEMS if item.group == Skill.SUMS.value)
    answers = [
        EvalAnswer(first, f" {first.task.answer}\n"),
        EvalAnswer(second, "?"),
        EvalAnswer(third, third.task.answer, "http 503: full"),
    ]
    report = score(answers)
    (sums,) = report.skills
    assert (sums.num_tasks, sums.num_correct, sums.num_failed) == (3, 1, 1)
    assert report.below(0.5) == (sums,)
    assert report.below(0.3) == ()
    assert len(report.wrong) == 2


def test_all_right(capsys: pytest.CaptureFixture[str]) -> None:
    with running(FakeServer(respond=answer_right)) as server:
        assert evaluate(options(server.url)) == 0
    assert "every skill reaches 90%" in capsys.readouterr().out
    for body in server.requests:
        assert body["temperature"] == 0
        assert COUNT_TOKENS(body["messages"][0]["content"]) + body["max_tokens"] <= CONTEXT_LEN


def test_one_skill_below_the_threshold(capsys: pytest.CaptureFixture[str]) -> None:
    with running(FakeServer(respond=answer_sums_wrong)) as server:
        assert evaluate(replace(options(server.url), show_failures=1)) == 1
    shown = capsys.readouterr().out
    assert "sums: below 90%" in shown
    assert shown.count("answered: nonsense") == 1


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    with running(FakeServer(respond=answer_sums_wrong)) as server:
        assert evaluate(replace(options(server.url), json_output=True, show_failures=9)) == 1
    written = json.loads(capsys.readouterr().out)
    assert written["below_threshold"] == ["sums"]
    assert len(written["wrong"]) == 3


@pytest.mark.parametrize("json_output", [False, True])
def test_what_was_answered_before_ctrl_c_is_reported(capsys: pytest.CaptureFixture[str], json_output: bool) -> None:
    asked = list[object]()

    def respond(body: dict[str, Any]) -> Script:
        asked.append(body)
        if len(asked) <= 4:
            return answer_right(body)
        os.kill(os.getpid(), signal.SIGINT)
        return Script(first_delay_s=30.0)

    with running(FakeServer(respond=respond)) as server:
        assert evaluate(replace(options(server.url), concurrency=1, json_output=json_output)) == 130
    told = capsys.readouterr().out
    if json_output:
        report = json.loads(told)
        assert (report["interrupted"], [row["correct"] for row in report["skills"]]) == (True, [3, 1])
    else:
        assert told.endswith(f"interrupted: 4 of {len(ITEMS)} tasks were answered\n")
        assert "every skill" not in told


def test_failing_server_is_below_every_threshold() -> None:
    with running(FakeServer(respond=lambda body: Script(status=503))) as server:
        assert evaluate(options(server.url)) == 1


def test_unknown_suite() -> None:
    with pytest.raises(ConfigError, match="there are: pocket, smollm2"):
        replace(options("http://127.0.0.1:1"), suite="mmlu")


QUESTIONS = {question.prompt: question for question in make_questions()}


def answer_questions(body: dict[str, Any]) -> Script:
    return Script(pieces=("Well: it is ", QUESTIONS[body["messages"][-1]["content"]].answer, "."))


def test_questions(capsys: pytest.CaptureFixture[str]) -> None:
    asked = EvalOptions(suite="smollm2", num_per_skill=4)
    with running(FakeServer(respond=answer_questions)) as server:
        assert evaluate(replace(asked, url=server.url)) == 0
    assert "every skill reaches 20%" in capsys.readouterr().out
    assert len(server.requests) == 4 * len({question.group for question in QUESTIONS.values()})


@each(
    ("prompt", "text", "is_right"),
    [
        ("What is the capital of France?", "The capital of France is paris.", True),
        ("What is the capital of France?", "The capital of France is Lyon. Parisians disagree.", False),
        ("What is 2 + 2?", "2 + 2 = 4", True),
        ("What is 2 + 2?", "2 + 2 = 44, or 3.4", False),
        ("Is water wet? Answer with yes or no.", "Yes, water is wet; no doubt.", True),
        ("Is water wet? Answer with yes or no.", "No. Yes.", False),
        ("Is water wet? Answer with yes or no.", "Yesterday", False),
    ],
)
def test_what_counts_as_right(prompt: str, text: str, is_right: bool) -> None:
    assert QUESTIONS[prompt].accepts(text) == is_right


def test_thresholds_by_suite() -> None:
    assert (EvalOptions().least_share, EvalOptions(suite="smollm2").least_share) == (0.9, 0.2)
    assert EvalOptions(threshold=0.0).least_share == 0.0
