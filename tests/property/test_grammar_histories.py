"""Answers under grammars are valid, and those that the same requests have alone, whatever happens to them meanwhile:
others in their batches, prompts in chunks, preemption, another worker, a worker that is lost.
"""

import json
import random
import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from typing_extensions import override

from alignedserve.core.ids import RequestId
from alignedserve.core.request import SamplingParams
from alignedserve.runtime.engine.forward.decoder import Decoder
from tests.support.grammars import EOS, PERSON, byte_masks, regex_grammar, text_of
from tests.support.marks import many, slow
from tests.support.models.tiny_engines import TinyEngine, random_tokens, tiny_decoder
from tests.support.models.tiny_models import make_tiny_model

MAX_TOKENS = 70
GRAMMARS = (PERSON, regex_grammar("(ab|true|12){3,20}!"), regex_grammar("yes|no"), "")
NUM_KINDS = 8


@dataclass(slots=True, eq=False)
class Answer:
    """One request and its answer so far."""

    name: str
    kind: int
    token_ids: list[int] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return len(self.token_ids) == MAX_TOKENS or (bool(self.token_ids) and self.token_ids[-1] == EOS)


def prompt_of(kind: int) -> list[int]:
    return random_tokens(kind, 3 + 5 * kind)


def sampling_of(kind: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=MAX_TOKENS, temperature=float(kind % 3), seed=kind, grammar=GRAMMARS[kind % len(GRAMMARS)]
    )


class Workers:
    """Two engines, and answers that move between them with nothing but their tokens."""

    def __init__(self, decoder: Decoder, *, jumps_ahead: bool = False) -> None:
        self._engines = [TinyEngine(decoder, seed=seed, masks=byte_masks(jumps_ahead=jumps_ahead)) for seed in range(2)]
        self.running: list[dict[str, Answer]] = [{}, {}]

    def start(self, answer: Answer, place: int) -> None:
        engine, prompt = self._engines[place], prompt_of(answer.kind)
        spare = MAX_TOKENS - len(answer.token_ids)
        tokens = (*prompt, *answer.token_ids)
        engine.add(answer.name, tokens, sampling_of(answer.kind), prompt_len=len(prompt), spare_tokens=spare)
        self.running[place][answer.name] = answer

    def stop(self, answer: Answer, place: int) -> None:
        engine = self._engines[place]
        engine.engine.remove_sequence(RequestId(answer.name))
        engine.free_blocks += engine.blocks.pop(answer.name)
        del self.running[place][answer.name]

    def iterate(self, place: int, rng: random.Random) -> None:
        engine = self._engines[place].engine
        slices = []
        for name in self.running[place]:
            request_id = RequestId(name)
            left = engine.num_tokens(request_id) - engine.num_computed(request_id)
            if rng.random() < 0.8:
                slices.append((request_id, rng.randint(1, left)))
        if not slices:
            return
        output = engine.execute(slices)
        assert not output.failed, output.reasons
        for token in output.sampled:
            answer = self.running[place][token.request_id]
            answer.token_ids.append(token.token_id)
            if answer.is_done:
                self.stop(answer, place)


def run_history(decoder: Decoder, seed: int, *, jumps_ahead: bool) -> list[Answer]:
    """Run requests of all kinds, and disturb them until they have ended."""
    workers, rng = Workers(decoder, jumps_ahead=jumps_ahead), random.Random(seed)
    answers = [Answer(f"r{number}", number % NUM_KINDS) for number in range(2 * NUM_KINDS)]
    waiting = list(answers)
    while waiting or any(workers.running):
        if waiting and rng.random() < 0.5:
            workers.start(waiting.pop(rng.randrange(len(waiting))), rng.randrange(2))
        place = rng.randrange(2)
        if workers.running[place] and rng.random() < 0.15:
            count = rng.choice((1, 1, len(workers.running[place])))  # one is preempted, or the worker is lost
            for answer in rng.sample(list(workers.running[place].values()), count):
                workers.stop(answer, place)
                waiting.append(answer)
        workers.iterate(place, rng)
    return answers


def alone(decoder: Decoder, kind: int) -> list[int]:
    workers, answer = Workers(decoder), Answer("alone", kind)
    workers.start(answer, 0)
    while not answer.is_done:
        workers.iterate(0, _Steady())
    return answer.token_ids


class _Steady(random.Random):
    """Never skips, and takes whole prompts."""

    @override
    def random(self) -> float:
        return 0.0

    @override
    def randint(self, a: int, b: int) -> int:
        return b


def check_valid(kind: int, token_ids: list[int]) -> None:
    text, place = text_of(token_ids) if GRAMMARS[kind % 4] else "", kind % 4
    if token_ids[-1] != EOS:  # cut by its limit
        return
    if place == 0:
        assert set(json.loads(text)) == {"name", "is_here", "tags"}
    elif place < 3:
        assert re.fullmatch(("(ab|true|12){3,20}!", "yes|no")[place - 1], text)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder: Path = tmp_path_factory.mktemp("model")
    make_tiny_model(folder, "llama")
    return tiny_decoder(folder)


@pytest.mark.parametrize("seeds", [range(1), *slow(range(1, 1 + many(24)))], ids=str)
def test_whatever_happens_answers_are_valid_and_the_same(decoder: Decoder, seeds: range) -> None:
    """Most of the histories jump ahead, while those that they are compared with never do."""
    expected = [alone(decoder, kind) for kind in range(NUM_KINDS)]
    for seed in seeds:
        for answer in run_history(decoder, seed, jumps_ahead=seed % 4 != 3):
            assert answer.token_ids == expected[answer.kind], f"seed {seed}, {answer.name}"
            check_valid(answer.kind, answer.token_ids)
