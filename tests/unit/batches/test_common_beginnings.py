"""Lines that begin alike run one after the other; the others stay where they are."""

import json
import random
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from alignedserve.batches.input_lines import CommonBeginnings
from alignedserve.batches.line_tracker import LineTracker


def line(number: int, *texts: str) -> bytes:
    messages = [{"role": "user", "content": text} for text in texts]
    return json.dumps({"custom_id": f"c{number}", "body": {"temperature": number, "messages": messages}}).encode()


def order_of(*lines: bytes) -> list[int]:
    beginnings = CommonBeginnings()
    for text in lines:
        beginnings.add(text)
    return list(beginnings.order())


def document(name: str, num_chars: int = 400) -> str:
    return name * num_chars


def test_lines_of_one_document_stand_together() -> None:
    lines = [line(number, document("ab"[number % 2]), f"question {number}") for number in range(6)]
    assert order_of(*lines) == [0, 2, 4, 1, 3, 5]


def test_longer_beginnings_stand_together_within_shorter_ones() -> None:
    common = document("x", 1100)
    lines = [line(number, common + document("ab"[number % 2], 4000)) for number in range(4)]
    lines.insert(2, line(9, common))
    lines.insert(1, line(8, document("y")))
    assert order_of(*lines) == [0, 4, 2, 5, 3, 1]


def test_different_lines_stay_in_the_order_of_the_file() -> None:
    assert order_of(*(line(number, f"{number}" * 100) for number in range(5))) == [0, 1, 2, 3, 4]
    assert order_of(b"no prompt at all", b"nor here") == [0, 1]
    assert order_of() == []


def test_prompts_of_completions_are_compared_as_well() -> None:
    prompts = [[7] * 200, [8] * 200, [7] * 200]
    assert order_of(*(json.dumps({"id": n, "prompt": prompt}).encode() for n, prompt in enumerate(prompts))) == [
        0,
        2,
        1,
    ]


@given(seed=st.integers(0, 10**6))
def test_an_order_has_every_line_once_and_keeps_groups_together(seed: int) -> None:
    rng = random.Random(seed)
    documents = [document(chr(97 + rng.randrange(4)), 300) for _ in range(rng.randrange(1, 20))]
    order = order_of(*(line(number, text) for number, text in enumerate(documents)))
    assert sorted(order) == list(range(len(documents)))
    in_order = [documents[number] for number in order]
    assert sum(one != other for one, other in pairwise(in_order)) == len(set(documents)) - 1


def test_lines_are_leased_in_that_order_but_for_those_that_are_done() -> None:
    tracker = LineTracker(4, settled=[2], max_attempts=2, order=[3, 2, 0, 1])
    assert [tracker.lease(0.0) for _ in range(4)] == [3, 0, 1, None]
