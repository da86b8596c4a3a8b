"""Several stages compute what one process does, bit for bit: every family, form of weights and of cache."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from alignedserve.core.ids import RequestId
from alignedserve.core.request import SampledToken, SamplingParams
from alignedserve.runtime.grammar.constraints import StructuredOutputs, part_of, serialize_alone
from alignedserve.runtime.grammar.token_masks import TokenMasks
from tests.support.devices.staged_engines import StagedTinyEngine
from tests.support.grammars import byte_masks
from tests.support.models.quantized_checkpoints import FORMATS, quantize_folder
from tests.support.models.tiny_engines import GREEDY, TinyEngine, random_tokens, tiny_decoder
from tests.support.models.tiny_models import TINY_MODELS, make_tiny_model

SEEDED = SamplingParams(temperature=0.9, top_p=0.9, seed=7, max_tokens=100, presence_penalty=0.5)
SCORED = SamplingParams(temperature=0.0, max_tokens=100, num_logprobs=3, num_prompt_logprobs=2)
NUM_TOKENS = 8


@contextmanager
def staged(folder: Path, size: int = 2, **options: Any) -> Iterator[StagedTinyEngine]:
    engine = StagedTinyEngine(folder, size, **options)
    try:
        yield engine
    finally:
        engine.close()


def answers(engine: TinyEngine) -> dict[str, list[SampledToken]]:
    """Prompts whole and in chunks, answers alone and together: of each what was sampled."""
    engine.add("greedy", random_tokens(1, 16), GREEDY)
    engine.add("seeded", random_tokens(2, 130), SEEDED)
    engine.add("scored", random_tokens(3, 30), SCORED)
    engine.step(scored=11, greedy=5)
    found = {"scored": engine.generate("scored", 2)}
    found["greedy"] = engine.generate("greedy", NUM_TOKENS)
    found["seeded"] = engine.generate("seeded", NUM_TOKENS, "greedy")
    found["scored"] += engine.generate("scored", NUM_TOKENS, "seeded", "greedy")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("family", TINY_MODELS)
def test_two_stages_compute_what_one_process_does(family: str, tmp_path: Path) -> None:
    make_tiny_model(tmp_path, family)
    with staged(tmp_path) as engine:
        assert answers(engine) == answers(TinyEngine(tiny_decoder(tmp_path)))


@pytest.mark.slow
@pytest.mark.parametrize("form", [{"quantization": "int8"}, {"cache_dtype": "int8"}, {"dtype": "bfloat16"}], ids=str)
def test_other_forms_of_weights_and_caches(form: dict[str, Any], tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "llama")
    weights = {name: value for name, value in form.items() if name != "cache_dtype"}
    one = TinyEngine(tiny_decoder(tmp_path, **weights), cache_dtype=form.get("cache_dtype"))
    with staged(tmp_path, 2, **form) as engine:
        assert answers(engine) == answers(one)


@pytest.mark.slow
def test_stages_of_a_quantised_checkpoint(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "llama")
    quantize_folder(tmp_path, FORMATS["w8a8"])
    with staged(tmp_path) as engine:
        assert answers(engine) == answers(TinyEngine(tiny_decoder(tmp_path)))


def test_steps_go_on_without_a_sequence_whose_mask_takes_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tiny_model(tmp_path, "llama")
    rules = StructuredOutputs(grammar="root ::= s\ns ::= s s | [a-z]")
    sampling = replace(GREEDY, max_tokens=9, grammar=serialize_alone(part_of(rules)))
    may_go_on, write = Event(), TokenMasks._write_heavy

    def write_late(self: TokenMasks, answer: Any, heavy: Any) -> bool:
        assert may_go_on.wait(timeout=30)
        return write(self, answer, heavy)

    monkeypatch.setattr(TokenMasks, "_write_heavy", write_late)
    with staged(tmp_path, masks=byte_masks()) as engine:
        engine.add("late", random_tokens(1, 9), sampling)
        engine.add("chat", random_tokens(1, 9), GREEDY)
        engine.step(late=9, chat=9)
        output = engine.step(late=1, chat=1)
        assert ([token.request_id for token in output.sampled], output.skipped) == (["chat"], ("late",))
        output = engine.step(late=1)
        assert (output.sampled, output.skipped) == ([], ("late",))
        may_go_on.set()
        while engine.step(late=1).skipped:
            pass
        assert len(engine.tokens("late")) == 9 + 2


def left(engine: TinyEngine, name: RequestId) -> int:
    return engine.engine.num_tokens(name) - engine.engine.num_computed(name)


def crowd(engine: TinyEngine) -> dict[str, list[int]]:
    """Nine answers that begin and end at different times, whose blocks are given when they are needed."""
    names = [f"answer{number}" for number in range(9)]
    waiting, running, found = list(names), list[str](), dict[str, list[int]]()
    for turn in range(30):
        for name in waiting[: 1 + turn % 2]:
            waiting.remove(name)
            running.append(name)
            engine.add(name, random_tokens(names.index(name), 3 + names.index(name)), spare_tokens=0)
            engine.make_room(name, 20)
        asked = [name for name in running if turn % 7 != names.index(name) % 7]  # others wait
        counts = {
            name: engine.engine.num_tokens(RequestId(name)) - engine.engine.num_computed(RequestId(name))
            for name in asked
        }
        for name, count in counts.items():
            engine.make_room(name, count)
        if counts:
            engine.step(**counts)
        for name in [name for name in running if len(engine.tokens(name)) >= 20 + names.index(name)]:
            found[name] = engine.tokens(name)
            running.remove(name)
            engine.engine.remove_sequence(RequestId(name))
            engine.free_blocks += engine.blocks.pop(name)
    return found | {name: engine.tokens(name) for name in running}


@pytest.mark.parametrize(("size", "num_lent", "shares_memory"), [(2, 8, True), (2, 1, False), (3, 8, True)])
def test_sequences_that_come_and_go_and_wait(size: int, num_lent: int, shares_memory: bool, tmp_path: Path) -> None:
    """Parts that went ahead are dropped, in whole or in part, and blocks that they were lent settled."""
    make_tiny_model(tmp_path, "llama", num_hidden_layers=3)
    expected = crowd(TinyEngine(tiny_decoder(tmp_path)))
    with staged(tmp_path, size, num_lent=num_lent, shares_memory=shares_memory) as engine:
        assert crowd(engine) == expected


STATES: dict[str, dict[str, Any]] = {
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "attention", "mamba"]},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "lfm2": {"full_attn_idxs": [1, 2, 3]},
}


@pytest.mark.slow
@pytest.mark.parametrize("family", STATES)
@pytest.mark.parametrize("shares_memory", [True, False])
def test_each_stage_has_the_states_of_its_layers(family: str, shares_memory: bool, tmp_path: Path) -> None:
    """The second of LFM2's has none."""
    make_tiny_model(tmp_path, family, num_hidden_layers=4, **STATES[family])
    with staged(tmp_path, shares_memory=shares_memory) as engine:
        assert answers(engine) == answers(TinyEngine(tiny_decoder(tmp_path)))


def test_sequences_with_states_that_come_and_go(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "granitemoehybrid", num_hidden_layers=4, **STATES["granitemoehybrid"])
    expected = crowd(TinyEngine(tiny_decoder(tmp_path)))
    with staged(tmp_path) as engine:
        assert crowd(engine) == expected
