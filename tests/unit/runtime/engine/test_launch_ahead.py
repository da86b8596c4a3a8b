"""Steps launched before the tokens of the one before are known: the same tokens, whatever happens between."""

import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from alignedserve.core.ids import RequestId
from alignedserve.core.request import SampledToken, SamplingParams
from alignedserve.costmodel.iteration_points import Point
from alignedserve.runtime.attention.sequence_table import IntArray, NewSequence
from alignedserve.runtime.engine.forward.decoder import Decoder
from alignedserve.runtime.engine.measured_iterations import IterationTimer
from alignedserve.runtime.engine.steps.next_step import ChunkGuess, NextStep
from alignedserve.runtime.engine.steps.step import StepLaunch
from tests.support.devices.checked_streams import CheckedEvent, CheckedStream, CheckedStreams
from tests.support.marks import many, slow
from tests.support.models.tiny_engines import GREEDY, TinyEngine, random_tokens, tiny_decoder
from tests.support.models.tiny_models import make_tiny_model

SEEDED = SamplingParams(temperature=1.0, top_p=0.9, seed=3, max_tokens=100)
PENALISED = SamplingParams(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.4, max_tokens=100)
WITH_LOGPROBS = SamplingParams(temperature=1.0, seed=4, num_logprobs=3, max_tokens=100)
BAD_WORDS = SamplingParams(temperature=0.0, bad_words=((7, 8), (9,)), max_tokens=100)
BIASED = SamplingParams(temperature=0.0, logit_bias=((5, 4.0),), min_tokens=50, max_tokens=100)
SHORT = SamplingParams(temperature=0.0, max_tokens=3)
KINDS = (GREEDY, SEEDED, PENALISED, WITH_LOGPROBS, BAD_WORDS, BIASED, SHORT)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder: Path = tmp_path_factory.mktemp("llama")
    make_tiny_model(folder, "llama")
    return tiny_decoder(folder)


def ahead(decoder: Decoder, seed: int = 0, streams: CheckedStreams | None = None, *, num_lent: int = 3) -> TinyEngine:
    return TinyEngine(decoder, launches_ahead=True, streams=streams or CheckedStreams(seed), num_lent=num_lent)


def launched(tiny: TinyEngine) -> list[str] | None:
    """Return the requests of the step that was launched ahead; None: there is none."""
    step = tiny.engine._next._launched
    return None if step is None else [tiny.engine._table.request_ids[row] for row in step.step.rows.tolist()]


def alone(decoder: Decoder, prompt: list[int], sampling: SamplingParams, count: int) -> list[SampledToken]:
    tiny = TinyEngine(decoder)
    tiny.add("alone", prompt, sampling)
    return tiny.generate("alone", count)


def same(tokens: list[SampledToken], expected: list[SampledToken]) -> bool:
    return [(token.token_id, token.logprob) for token in tokens] == [(one.token_id, one.logprob) for one in expected]


class NotedStreams(CheckedStreams):
    """Streams that note the order in which the host enqueues work and waits."""

    def __init__(self) -> None:
        super().__init__(0)
        self.seen: list[str] = []

    @override
    def stream(self, name: str) -> CheckedStream:
        stream = super().stream(name)
        run, record = stream.run, stream.record

        def noted_run(operation: Callable[[], object]) -> None:
            self.seen.append("run")
            run(operation)

        def noted_record() -> CheckedEvent:
            event = record()
            wait = event.synchronize

            def noted_wait() -> None:
                self.seen.append("wait")
                wait()

            event.synchronize = noted_wait  # type: ignore[method-assign]
            return event

        stream.run, stream.record = noted_run, noted_record  # type: ignore[method-assign]
        return stream


def test_a_step_is_enqueued_before_the_host_waits_for_the_one_before(decoder: Decoder) -> None:
    streams = NotedStreams()
    tiny = ahead(decoder, streams=streams)
    tiny.add("a", random_tokens(1, 5))
    tiny.step(a=5)
    assert streams.seen == ["run", "run", "wait"]
    tiny.step(a=1)
    tiny.step(a=1)
    assert streams.seen[3:] == ["run", "wait"] * 2  # one step of each call, that of the next


def test_what_needs_the_token_on_the_host_is_not_launched_ahead(decoder: Decoder) -> None:
    tiny = ahead(decoder)
    tiny.add("a", random_tokens(1, 5), BAD_WORDS)
    tiny.step(a=5)
    assert launched(tiny) is None


def test_steps_go_ahead_again_once_a_sequence_has_left_that_fills_blocks_from_the_end(decoder: Decoder) -> None:
    tiny = ahead(decoder)
    tiny.add("a", random_tokens(1, 5))
    blocks = (tiny.free_blocks.pop(), tiny.free_blocks.pop())
    tokens = tuple(random_tokens(2, 5))
    tiny.engine.add_sequence(NewSequence(RequestId("b"), tokens, 5, 0, blocks, GREEDY, is_reversed=True))
    tiny.step(a=5, b=5)
    assert launched(tiny) is None
    tiny.engine.remove_sequence(RequestId("b"))
    tiny.step(a=1)
    assert launched(tiny) == ["a"]


def test_a_prompt_goes_on_ahead_until_a_guess_was_wrong(decoder: Decoder) -> None:
    tiny = ahead(decoder, num_lent=8)
    tiny.add("a", random_tokens(1, 90))
    tiny.add("b", random_tokens(2, 1))
    seen = []
    for slices in ({"b": 1}, {"b": 1, "a": 10}, {"b": 1, "a": 10}, {"b": 1}, {"b": 1, "a": 10}, {"b": 1, "a": 9}):
        tiny.step(**slices)
        seen.append(launched(tiny))
    assert seen == [["b"], ["b", "a"], ["b", "a"], ["b"], None, ["b", "a"]]
    tiny.step(b=1, a=51)  # more than was expected: the rest is computed beside it, and the first token
    assert launched(tiny) == ["b", "a"]
    expected = alone(decoder, random_tokens(1, 90), GREEDY, 2)
    assert same(tiny.step(b=1, a=1).sampled[1:], expected[1:])
    assert tiny.tokens("a")[90] == expected[0].token_id


def test_without_room_or_a_block_to_lend_nothing_is_launched(decoder: Decoder) -> None:
    tiny = ahead(decoder, num_lent=1)
    for name in "ab":
        tiny.add(name, random_tokens(ord(name), 8), spare_tokens=0)  # two whole blocks of four
    tiny.step(a=8, b=8)
    assert launched(tiny) is None
    for name in "ab":
        tiny.make_room(name, 1)
    tiny.step(a=1, b=1)
    assert sorted(launched(tiny) or []) == ["a", "b"]


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operations on tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_results_of_a_step_ahead_are_taken_without_work_on_the_device(decoder: Decoder) -> None:
    tiny = ahead(decoder)
    for name in "ab":
        tiny.add(name, random_tokens(ord(name), 5))
    tiny.step(a=5, b=5)
    launch, rest = tiny.engine._next.take_launched([(RequestId("b"), 1)])  # of two sequences, one goes on
    assert launch is not None
    assert not rest
    launch.computed.synchronize()
    with Operations() as operations:
        sampled, _ = tiny.engine._collect(launch)
    assert set(operations.seen) <= {"aten.detach.default"}, "more than a view of tokens on the host"
    assert same(sampled, alone(decoder, random_tokens(ord("b"), 5), GREEDY, 2)[1:])


def test_a_sequence_in_the_place_of_another_takes_none_of_its_tokens(decoder: Decoder) -> None:
    tiny = ahead(decoder)
    prompt = random_tokens(1, 5)
    tiny.add("a", prompt)
    (token,) = tiny.step(a=5).sampled
    assert launched(tiny) == ["a"]
    tiny.engine.remove_sequence(RequestId("a"))
    other = (*prompt, (token.token_id + 1) % 100)  # as many tokens, with the same cache before the last
    cached = NewSequence(RequestId("b"), other, 6, 5, tiny.blocks["a"], GREEDY)
    tiny.engine.add_sequence(cached)
    assert same(tiny.step(b=1).sampled, alone(decoder, list(other), GREEDY, 1))


def test_nothing_is_launched_ahead_while_another_model_wants_the_device(decoder: Decoder) -> None:
    tiny = ahead(decoder)
    tiny.add("a", random_tokens(1, 5))
    tiny.engine.execute([(RequestId("a"), 5)], may_go_on=False)
    assert launched(tiny) is None
    tiny.engine.execute([(RequestId("a"), 1)], may_go_on=True)
    assert launched(tiny) == ["a"]
    tiny.engine.execute([(RequestId("a"), 1)], may_go_on=False)  # the step that had been launched
    assert launched(tiny) is None
    assert tiny.tokens("a")[5:] == [one.token_id for one in alone(decoder, random_tokens(1, 5), GREEDY, 3)]


def test_a_block_that_is_replaced_drops_the_step_that_reads_it(decoder: Decoder) -> None:
    tiny = ahead(decoder)
    tiny.add("a", random_tokens(1, 9))
    tiny.step(a=9)
    (block,) = tiny.take_blocks(1)
    tiny.storage.bytes[block] = tiny.storage.bytes[tiny.blocks["a"][0]]
    tiny.engine.replace_block(RequestId("a"), 0, block)
    assert launched(tiny) is None
    tiny.storage.bytes[tiny.blocks["a"][0]] = 0xFF
    tiny.step(a=1)
    assert tiny.tokens("a")[9:] == [token.token_id for token in alone(decoder, random_tokens(1, 9), GREEDY, 2)]


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count what becomes of chunks that are launched ahead, whatever became of those before."""
    counts: Counter[str] = Counter()
    take = NextStep._taken

    def noted(self: NextStep, launched: StepLaunch, rows: IntArray, asked: IntArray) -> tuple[IntArray, IntArray]:
        taken, sampled = take(self, launched, rows, asked)
        guessed = dict(zip(launched.step.rows.tolist(), launched.step.counts.tolist(), strict=True))
        for row, count, own, place in zip(rows.tolist(), asked.tolist(), taken.tolist(), sampled.tolist(), strict=True):
            if guessed.get(row, 1) > 1:
                kind = "part" if own < guessed[row] else "too short" if own < count else "all"
                counts[kind] += 1
                counts["begins"] += place >= 0
        return taken, sampled

    monkeypatch.setattr(NextStep, "_taken", noted)
    monkeypatch.setattr(ChunkGuess, "is_trusted", property(lambda _: True, lambda *_: None), raising=False)
    return counts


@pytest.mark.parametrize("num_histories", [6, *slow(many(300))])
def test_random_histories(decoder: Decoder, num_histories: int, chunks: Counter[str]) -> None:
    """Sequences of every kind come, wait, stop, are cancelled and resumed; blocks go from one to another at once."""
    num_tokens = 0
    for seed in range(num_histories):
        num_tokens += _history(decoder, seed)
    assert num_tokens > 20 * num_histories
    assert min(chunks[kind] for kind in ("all", "part", "too short", "begins")) > 0, chunks


def _history(decoder: Decoder, seed: int) -> int:
    rng, tiny = random.Random(seed), ahead(decoder, seed, num_lent=3 if seed % 2 else 12)
    left: dict[str, int] = {}  # tokens to compute
    made: dict[str, tuple[list[int], SamplingParams, list[SampledToken]]] = {}
    for step in range(16):
        if len(left) < 5 and rng.random() < 0.5:
            name, prompt = f"r{step}", random_tokens(rng.randrange(9), rng.randrange(1, rng.choice((12, 90))))
            made[name] = (prompt, KINDS[rng.randrange(len(KINDS))], [])
            tiny.add(name, prompt, made[name][1], spare_tokens=-len(prompt))  # no block yet
            left[name] = len(prompt)
        budget = rng.choice((6, 60))
        slices = {
            name: rng.choice((rng.randrange(1, count + 1), min(count, budget)))
            for name, count in left.items()
            if rng.random() < 0.9
        }
        if not slices:
            continue
        for name, count in slices.items():
            tiny.make_room(name, count)
        for token in tiny.step(**slices).sampled:
            made[token.request_id][2].append(token)
        left = {name: max(1, count - slices.get(name, 0)) for name, count in left.items()}
        for name in list(left):
            tokens, most = made[name][2], made[name][1].max_tokens
            is_stopped = len(tokens) >= most or (tokens and tokens[-1].token_id % 17 == 0) or rng.random() < 0.05
            if is_stopped:
                tiny.engine.remove_sequence(RequestId(name))
                tiny.free_blocks = [*tiny.free_blocks, *tiny.blocks.pop(name)]  # the next to be taken
                del left[name]
    for name, (prompt, sampling, tokens) in made.items():
        if tokens:
            assert same(tokens, alone(decoder, prompt, sampling, len(tokens))), (seed, name, sampling)
    return sum(len(tokens) for _, _, tokens in made.values())


def test_a_measurement_leaves_no_step_behind_that_the_next_would_wait_for(decoder: Decoder) -> None:
    streams = NotedStreams()
    tiny = ahead(decoder, streams=streams)
    timer = IterationTimer(tiny.engine, block_ids=range(64), clock=time.perf_counter)
    assert timer.measure(Point("decodes", contexts=(9, 12)), 1) > 0.0
    assert launched(tiny) is None
    last_run = len(streams.seen) - 1 - streams.seen[::-1].index("run")
    assert streams.seen[last_run:].count("wait") == 2, "for the tokens of the step, then for all that was launched"
