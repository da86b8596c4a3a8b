import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from alignedserve.pocket.tasks import PocketTask, Skill
from lab.commands import demo as demo_module
from lab.commands.demo import demo
from lab.commands.options import DemoOptions
from lab.evaluation.checked_trace import (
    LONGEST_READING,
    WrongAnswer,
    WrongAnswerCause,
    parse_metrics,
    plan_checked_trace,
)
from lab.evaluation.fault_injector import plan_faults
from lab.evaluation.pocket_calls import MAX_PROMPT_LEN, MIN_PROMPT_LEN, pocket_tokenizer
from lab.workload.traces import shipped_trace
from tests.support.marks import each
from tests.support.servers.fake_server import FakeServer, Script, running

pytestmark = pytest.mark.slow

COUNT_TOKENS = pocket_tokenizer()
DURATION_S, RATE = 0.2, 75.0
CHECKED = plan_checked_trace(shipped_trace(), duration_s=DURATION_S, rate=RATE, seed=0, count_tokens=COUNT_TOKENS)
ANSWERS = {task.prompt: task.answer for task in CHECKED.tasks}
Respond = Callable[[dict[str, Any], int], Script]


class Cluster:
    """A scripted cluster that counts: verified handoffs, and blocks that never come back."""

    def __init__(self, respond: Respond | None = None, num_leaked: int = 0) -> None:
        self._respond = respond or (lambda body, times_asked: right(body))
        self._num_leaked = num_leaked
        self._times_asked: dict[str, int] = {}
        self.server = FakeServer(respond=self._answer, metrics_page=self._metrics)

    def _answer(self, body: dict[str, Any]) -> Script:
        prompt = body["messages"][-1]["content"]
        self._times_asked[prompt] = self._times_asked.get(prompt, 0) + 1
        return self._respond(body, self._times_asked[prompt])

    def _metrics(self) -> str:
        return (
            "# HELP alignedserve_pool_blocks_used Blocks.\n"
            f'alignedserve_pool_blocks_used{{pool="pool 0"}} {float(self.server.num_open)}\n'
            f'alignedserve_worker_blocks_used{{worker="decode-0"}} {self._num_leaked}\n'
            'alignedserve_worker_blocks_used{worker="prefill-0"} 0\n'
            f"alignedserve_handoffs_verified_total {10 + len(self.server.requests)}\n"
            "alignedserve_handoffs_refused_total 3.0\n"
        )


def right(body: dict[str, Any]) -> Script:
    return Script(pieces=(ANSWERS[body["messages"][-1]["content"]],))


def is_first_task(body: dict[str, Any]) -> bool:
    return bool(body["messages"][-1]["content"] == CHECKED.tasks[0].prompt)


@pytest.fixture(autouse=True)
def _settle_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_module, "_SETTLE_S", 0.0)


def run_demo(cluster: Cluster, *, json_output: bool = True) -> int:
    options = DemoOptions(
        duration_s=DURATION_S, rate=RATE, url="", config=None, overrides=(), seed=0, json_output=json_output
    )
    with running(cluster.server) as server:
        return demo(replace(options, url=server.url))


def test_plan_follows_the_trace() -> None:
    rows = shipped_trace()
    checked = plan_checked_trace(rows, duration_s=30.0, rate=2.0, seed=0, count_tokens=COUNT_TOKENS)
    requests = checked.plan.open_requests
    assert len(requests) == pytest.approx(60, abs=12)
    assert checked.stretch == pytest.approx(6.26 / 2.0, rel=0.01)
    for row, request, task in zip(rows, requests, checked.tasks, strict=False):
        wanted = min(max(row.prompt_len, MIN_PROMPT_LEN), MAX_PROMPT_LEN)
        assert COUNT_TOKENS(task.prompt) == pytest.approx(wanted, rel=0.06, abs=4)
        assert request.arrival_s == pytest.approx(row.arrival_s * checked.stretch)
        if row.output_len <= LONGEST_READING:
            assert task.skill is not Skill.COUNTING or request.output_len <= 61
    assert checked.num_clamped_prompts == sum(
        not MIN_PROMPT_LEN <= row.prompt_len <= MAX_PROMPT_LEN for row in rows[: len(requests)]
    )


def test_faults_hit_the_kinds_of_processes_that_there_are() -> None:
    separate, elastic = (plan_faults(70.0, 1, is_separate=is_separate) for is_separate in (True, False))
    kinds = ("DecodeWorker", "KvPool", "PrefillWorker")
    assert sorted((one.victim, one.is_killed) for one in separate) == [
        (kind, is_killed) for kind in kinds for is_killed in (False, True)
    ]
    assert [one.at_s for one in separate] == [10.0, 20.0, 30.0, 40.0, 50.0, 60.0]
    assert [one.victim for one in elastic] == ["ColocatedWorker"] * 4
    assert sum(one.is_killed for one in elastic) == 2
    assert elastic == plan_faults(70.0, 1, is_separate=False)


def test_passes_when_all_is_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_demo(Cluster()) == 0
    report = json.loads(capsys.readouterr().out)
    num_sent = report["load"]["total"]["num_sent"]
    assert (report["num_correct"], report["handoffs_verified"], report["handoffs_refused"]) == (num_sent, num_sent, 0)
    assert (report["blocks_leaked"], report["problems"], report["wrong"]) == (0, [], [])


def test_lost_request_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_demo(Cluster(lambda body, _: Script(cut_after=0) if is_first_task(body) else right(body))) == 1
    assert json.loads(capsys.readouterr().out)["problems"] == ["1 requests were lost"]


@pytest.mark.parametrize("json_output", [False, True])
def test_what_came_before_ctrl_c_is_reported(capsys: pytest.CaptureFixture[str], json_output: bool) -> None:
    def respond(body: dict[str, Any], _: int) -> Script:
        if body["messages"][-1]["content"] != CHECKED.tasks[-1].prompt:
            return right(body)
        os.kill(os.getpid(), signal.SIGINT)
        return Script(first_delay_s=30.0)

    assert run_demo(Cluster(respond), json_output=json_output) == 130
    told = capsys.readouterr().out
    if json_output:
        report = json.loads(told)
        assert (report["num_unjudged"], report["problems"], report["load"]["num_interrupted"] >= 1) == (0, [], True)
    else:
        assert "the requests in the air" in told
        assert "of counting" not in told
        assert told.endswith("interrupted: nothing was asked again, so nothing is judged\n")


def test_ctrl_c_while_wrong_answers_are_asked_again_keeps_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    def respond(body: dict[str, Any], times_asked: int) -> Script:
        if not is_first_task(body):
            return right(body)
        if times_asked == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return Script(pieces=("wrong",), first_delay_s=30.0 * (times_asked == 2))

    assert run_demo(Cluster(respond)) == 130
    report = json.loads(capsys.readouterr().out)
    assert (report["num_unjudged"], report["wrong"], report["blocks_leaked"]) == (1, [], None)
    assert report["load"]["total"]["num_completed"] == len(CHECKED.tasks)


def test_leaked_block_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(demo_module, "DRAIN_TIMEOUT_S", 0.0)
    assert run_demo(Cluster(num_leaked=2)) == 1
    assert json.loads(capsys.readouterr().out)["problems"] == ["2 blocks leaked"]


def test_corrupted_answer_fails(capsys: pytest.CaptureFixture[str]) -> None:
    def respond(body: dict[str, Any], times_asked: int) -> Script:
        return Script(pieces=("spoilt",)) if is_first_task(body) and times_asked == 1 else right(body)

    assert run_demo(Cluster(respond)) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["problems"] == ["1 answers were corrupted"]
    assert report["wrong"][0]["answered_alone"] == CHECKED.tasks[0].answer


def test_wrong_model_passes(capsys: pytest.CaptureFixture[str]) -> None:
    cluster = Cluster(lambda body, _: Script(pieces=("wrong",)) if is_first_task(body) else right(body))
    assert run_demo(cluster, json_output=False) == 0
    shown = capsys.readouterr().out
    assert "wrong (model), request 0" in shown
    assert "passed: nothing lost" in shown


def test_server_that_tells_nothing_fails(capsys: pytest.CaptureFixture[str]) -> None:
    cluster = Cluster()
    cluster.server.metrics_page = lambda: "up 1\n"
    assert run_demo(cluster) == 1
    assert "lacks" in json.loads(capsys.readouterr().out)["problems"][0]


@each(
    ("alone", "cause"),
    [("x", WrongAnswerCause.MODEL_WRONG), ("y", WrongAnswerCause.CORRUPTED), (None, WrongAnswerCause.CORRUPTED)],
)
def test_the_cause_is_decided_by_the_second_run(alone: str | None, cause: WrongAnswerCause) -> None:
    assert WrongAnswer(0, PocketTask(Skill.SUMS, "p", "a"), "x", alone).cause is cause


def test_metrics_are_summed_over_labels() -> None:
    page = '# TYPE a gauge\na{x="1 }"} 2\na{x="2"} 3.5 1700000000\nb 1e3\nbroken\nc{x="1"} nonsense\n'
    assert parse_metrics(page) == {"a": 5.5, "b": 1000.0}
