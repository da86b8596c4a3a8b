"""Penalties counted on a device: what the host's counts give, for a few bytes a step."""

import random
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from alignedserve.core.ids import RequestId
from alignedserve.core.request import SamplingParams
from alignedserve.runtime.attention.sequence_table import NewSequence
from alignedserve.runtime.device.arrays import to_device
from alignedserve.runtime.engine.sampling import logits_processors
from alignedserve.runtime.engine.sampling.logits_processors import LogitsProcessor, TokenCounts

VOCABULARY = 12
KINDS = (
    SamplingParams(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.7, presence_penalty=0.3),
    SamplingParams(temperature=0.0, frequency_penalty=1.1),
    SamplingParams(temperature=0.0, logit_bias=((3, 1.5),)),
)


def processor(*, on_device: bool, vocab_size: int = VOCABULARY) -> LogitsProcessor:
    return LogitsProcessor(max_sequences=5, vocab_size=vocab_size, eos_token_ids=(2,), on_device=on_device)


def random_logits(rows: int, vocabulary: int, seed: int) -> Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 2.0


class Pair:
    """Two processors of the same rows, one with counts on a device."""

    def __init__(self, seed: int) -> None:
        self.on_host, self.on_device = (processor(on_device=on_device) for on_device in (False, True))
        self.lengths: dict[int, int] = {}
        self._random = random.Random(seed)

    def change_rows(self) -> None:
        """End some sequences and begin others in their rows."""
        for row in range(5):
            if row in self.lengths and self._random.random() < 0.06:
                del self.lengths[row]
                self.on_host.remove(row)
                self.on_device.remove(row)
            elif row not in self.lengths and self._random.random() < 0.4:
                tokens = tuple(self._random.choices(range(VOCABULARY), k=self._random.choice((1, 5, 40))))
                own = NewSequence(RequestId("a"), tokens, 1 + len(tokens) // 2, 0, (), self._random.choice(KINDS))
                self.lengths[row] = len(tokens)
                self.on_host.add(row, own)
                self.on_device.add(row, own)

    def step(self, seed: int, *, is_ahead: bool) -> bool:
        """Choose tokens for some rows, then change the next logits; return whether there was something to change.

        `is_ahead`: the tokens are on the device alone when that is planned.
        """
        rows = np.array([row for row in self.lengths if self._random.random() < 0.8], np.int64)
        last = np.array(self._random.choices(range(VOCABULARY), k=len(rows)), np.int64)
        num_tokens = np.array([self.lengths[row] + 1 for row in rows.tolist()], np.int64)
        self.on_host.record(rows, last)
        if not is_ahead:
            self.on_device.record(rows, last)
        expected, found = (one.plan(rows, num_tokens) for one in (self.on_host, self.on_device))
        if is_ahead:
            self.on_device.record(rows, last)
        self.lengths.update(zip(rows.tolist(), num_tokens.tolist(), strict=True))
        assert (found is None) == (expected is None)
        if found is None or expected is None:
            return False
        logits = random_logits(len(rows), VOCABULARY, seed)
        changed = found.apply(logits, torch.from_numpy(last) if is_ahead else None)
        assert changed.tolist() == expected.apply(logits).tolist()
        return True


@pytest.mark.parametrize("seed", range(4))
def test_counts_on_a_device_penalise_exactly_as_those_of_the_host(seed: int) -> None:
    """Rows come, wait, end and are replaced; of some steps the last tokens are on the device alone."""
    pair, num_changed = Pair(seed), 0
    for step in range(80):
        pair.change_rows()
        num_changed += pair.step(step, is_ahead=step % 3 > 0)
    assert num_changed > 40


def test_a_plan_that_nothing_comes_of_leaves_the_counts_as_they_were() -> None:
    """As of a step that was launched ahead and dropped: its token on the device was counted for it alone."""
    rows, logits = np.array([0]), random_logits(1, VOCABULARY, 1)
    made = processor(on_device=True)
    made.add(0, NewSequence(RequestId("a"), (3, 4, 4), 1, 0, (), KINDS[0]))
    found = []
    for last in (None, torch.tensor([4]), None):
        changes = made.plan(rows, np.array([3]))
        assert changes is not None
        found.append(changes.apply(logits, last).tolist())
    assert found[0] == found[2] != found[1]


def test_the_tokens_of_a_long_sequence_are_brought_to_a_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []

    def noted(arrays: list[Any], device: torch.device) -> list[Tensor]:
        sent.append(sum(array.nbytes for array in arrays))
        return to_device(arrays, device)

    monkeypatch.setattr(logits_processors, "to_device", noted)
    made, length = processor(on_device=True, vocab_size=4000), 3000
    made.add(0, NewSequence(RequestId("a"), tuple(range(length)), length, 0, (), KINDS[0]))
    for step in range(3):
        changes = made.plan(np.array([0]), np.array([length + step]))
        assert changes is not None
        changes.apply(random_logits(1, 4000, 0))
        made.record(np.array([0]), np.array([7]))
    assert sent[0] > 8 * length
    assert max(sent[1:]) < 100


def test_a_long_prompt_joins_a_step_in_a_few_calls() -> None:
    prompt, answer = tuple(range(3, 20_003)), (7, 5, 7)
    num_calls = 0

    def note(_: object, event: str, __: object) -> None:
        nonlocal num_calls
        num_calls += event == "call"

    sys.setprofile(note)
    try:
        joined = TokenCounts(prompt + answer, len(prompt))
    finally:
        sys.setprofile(None)
    assert num_calls < 100
    grown = TokenCounts(prompt, len(prompt))
    for token_id in answer:
        grown.record(token_id)
    for ours, theirs in zip((*joined.all, *joined.take_changed()), (*grown.all, *grown.take_changed()), strict=True):
        np.testing.assert_array_equal(ours, theirs)
