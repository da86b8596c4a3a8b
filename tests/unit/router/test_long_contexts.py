"""Where attention waits for the longest context, long contexts gather at one worker as far as objectives allow."""

from collections.abc import Iterator
from itertools import count

from alignedserve.core.request import Request, Slo
from alignedserve.messages.workers import DecodeDelay, PrefillRequest, WorkerLoad
from tests.harnesses.router import RouterHarness
from tests.support.marks import each
from tests.support.samples import request, worker

A, B, C = "decode-0", "decode-1", "decode-2"
EVEN = DecodeDelay(iteration_s=0.01, even_len=2_000, longer_token_s=1e-5, longest_len=900)
MIXED = DecodeDelay(iteration_s=0.02, even_len=2_000, longer_token_s=1e-5, longest_len=9_000, num_longer=3)
NUMBERS: Iterator[int] = count(1)


def fleet(*delays: DecodeDelay, num_free_blocks: int = 10_000) -> RouterHarness:
    made = RouterHarness()
    for name, delay in zip((A, B, C), delays, strict=False):
        made.hear(name, worker(can_prefill=True, max_running_requests=64, num_blocks=10_000))
        made.hear(name, WorkerLoad(num_free_blocks=num_free_blocks, prompt_tokens_per_s=10_000, delay=delay))
    return made


def sent(made: RouterHarness, prompt_len: int, **facts: Slo) -> str:
    of: Request = request(f"r{next(NUMBERS)}", prompt_len, max_tokens=200, **facts)
    (prompt,) = (send for send in made.submit(of) if isinstance(send.message, PrefillRequest))
    return prompt.peer


def test_long_contexts_gather_where_most_are_and_short_ones_leave() -> None:
    made = fleet(EVEN, MIXED, EVEN)
    assert [sent(made, prompt_len) for prompt_len in (4_000, 100, 4_000, 100)] == [B, A, B, C]


def test_the_first_long_contexts_stay_together() -> None:
    made = fleet(EVEN, EVEN)
    assert len({sent(made, 4_000) for _ in range(3)}) == 1


def test_without_a_delay_the_least_loaded_gets_any() -> None:
    made = fleet(DecodeDelay(), DecodeDelay())
    assert [sent(made, 4_000) for _ in range(4)] == [A, B, A, B]


@each(("prompt_len", "num", "ttft_s"), [(6_000, 2, None), (2_500, 3, 0.6), (2_500, 5, None)])
def test_a_prompt_waits_for_its_like_a_second_or_half_of_its_objective(
    prompt_len: int, num: int, ttft_s: float | None
) -> None:
    """At 10 000 tokens/s: 6 000 wait 0.6 s, the second 1.2 s. With an objective of 0.6 s a prompt has 0.35 s left."""
    made = fleet(EVEN, MIXED)
    facts = {} if ttft_s is None else {"slo": Slo(ttft_s=ttft_s)}
    places = [sent(made, prompt_len, **facts) for _ in range(num + 1)]
    assert B in places
    assert A in places


def test_a_worker_without_memory_for_it_is_no_home() -> None:
    made = fleet(EVEN, MIXED, num_free_blocks=100)
    assert sent(made, 4_000) == A
