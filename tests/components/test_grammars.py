"""Answers under grammars go on where they were when a worker is lost or a request moves; recordings hold none."""

import asyncio
import re
import threading
from pathlib import Path

import pytest
from llguidance import LLMatcher

from alignedserve.config.sections import RecordingConfig, Topology
from alignedserve.core.errors import FailureKind
from alignedserve.core.request import FinishReason, SamplingParams
from alignedserve.messages.gateways import RequestFailed
from alignedserve.runtime.grammar.compiler import GrammarCompiler
from lab.replay.component_replay import recordings_in
from tests.harnesses.clusters.in_process import RoomCluster, running, small_config
from tests.replay.recorded import replays
from tests.support.grammars import byte_vocabulary, regex_grammar, text_of
from tests.support.waiting import holds

pytestmark = pytest.mark.slow

VOCAB_SIZE = 128  # of the tiny model
REGEX = "((ab|[c-k]{2})-){10,15}!!"
SAMPLING = SamplingParams(max_tokens=70, temperature=1.0, seed=3, ignore_eos=True, grammar=regex_grammar(REGEX))
PROMPTS = [[5 + number, 6, 7, 8 + number] for number in range(4)]


@pytest.fixture(autouse=True)
def _vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny model has no tokenizer."""
    monkeypatch.setattr(
        "alignedserve.runtime.engine.model_executor.load_vocabulary", lambda _: byte_vocabulary(VOCAB_SIZE)
    )


async def check(cluster: RoomCluster, lost: str | None) -> None:
    answers = [cluster.gateway.submit(prompt, SAMPLING) for prompt in PROMPTS]
    if lost is not None:
        await holds(lambda: all(len(answer.token_ids) >= 8 for answer in answers))
        await cluster.stop(lost)
        await cluster.start_decode(lost)
    async with asyncio.timeout(40):
        await asyncio.gather(*(answer.done.wait() for answer in answers))
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert answer.failure is None
        assert answer.token_ids == cluster.reference(prompt, SAMPLING)
        assert answer.finish_reason is FinishReason.STOP
        assert re.fullmatch(REGEX, text_of(answer.token_ids, VOCAB_SIZE))
    await cluster.gateway.idle()


@pytest.mark.parametrize(
    ("topology", "lost"),
    [(Topology.COLOCATED, None), (Topology.DISAGGREGATED, "decode-0"), (Topology.ELASTIC, "decode-0")],
)
async def test_answers_go_on_and_are_decided_again(topology: Topology, lost: str | None, tmp_path: Path) -> None:
    recording = RecordingConfig(folder=str(tmp_path / "run"))
    config = small_config(tmp_path / "model", topology=topology, recording=recording)
    async with running(config, tmp_path) as cluster:
        await check(cluster, lost)
    assert not any(REGEX.encode() in path.read_bytes() for path in recordings_in(tmp_path / "run"))
    assert [one.name for one in replays(tmp_path / "run") if one.difference is not None] == []


@pytest.mark.parametrize("topology", [Topology.DISAGGREGATED, Topology.ELASTIC])
async def test_a_grammar_that_cannot_be_followed_fails_its_request_alone(topology: Topology, tmp_path: Path) -> None:
    async with running(small_config(tmp_path / "model", topology=topology), tmp_path) as cluster:
        bad = cluster.gateway.submit([5, 6, 7], SamplingParams(max_tokens=9, grammar="no grammar"))
        await check(cluster, None)
        await bad.done.wait()
        assert isinstance(bad.failure, RequestFailed)
        assert bad.failure.kind is FailureKind.GRAMMAR
        assert "no grammar" not in bad.failure.reason


async def test_nobody_waits_while_a_grammar_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_go_on = threading.Event()
    compile_now = GrammarCompiler._compile

    def compile_slowly(self: GrammarCompiler, grammar: str) -> LLMatcher:
        may_go_on.wait(timeout=30)
        return compile_now(self, grammar)

    monkeypatch.setattr(GrammarCompiler, "_compile", compile_slowly)
    async with running(small_config(tmp_path / "model", topology=Topology.ELASTIC), tmp_path) as cluster:
        slow = cluster.gateway.submit([5, 6, 7], SAMPLING)
        others = [cluster.gateway.submit(prompt, SamplingParams(max_tokens=20)) for prompt in PROMPTS]
        async with asyncio.timeout(20):
            await asyncio.gather(*(answer.done.wait() for answer in others))
        assert not slow.token_ids
        may_go_on.set()
        async with asyncio.timeout(20):
            await slow.done.wait()
        assert re.fullmatch(REGEX, text_of(slow.token_ids, VOCAB_SIZE))
