"""Requests that fit no worker are told so at once."""

from router.worker_orders import LongestContexts
from tests.harnesses.placement import placement
from tests.support.marks import each
from tests.support.samples import request, worker


def _longest(workers: LongestContexts, *, prompt_len: int) -> int:
    """Return the longest context that fits, of a request with this prompt; 0: none does."""
    fit = [count for count in range(1, 200) if workers.can_hold(request(prompt_len=prompt_len, max_tokens=count))]
    return prompt_len + fit[-1] if fit else 0


@each(("state_blocks", "longest"), [(0, 80), (3, 68), (20, 0)])
def test_a_request_must_fit_some_decode_worker_beside_its_states(state_blocks: int, longest: int) -> None:
    sizes = {
        name: {"num_blocks": num_blocks, "state_blocks": state_blocks}
        for name, num_blocks in (("decode_0", 20), ("decode_1", 10))
    }
    assert _longest(placement(**sizes).longest_contexts, prompt_len=4) == longest


def test_a_prompt_must_fit_some_prefill_worker_and_its_answer_need_not() -> None:
    where = placement(decode={})
    where.register("prefill-0", worker(can_prefill=True, can_decode=False, num_blocks=5))
    where.register("prefill-1", worker(can_prefill=True, can_decode=False, num_blocks=10))
    assert _longest(where.longest_contexts, prompt_len=40) == 80
    assert _longest(where.longest_contexts, prompt_len=41) == 0
    where.remove("prefill-1")
    assert _longest(where.longest_contexts, prompt_len=21) == 0
    where.remove("prefill-0")
    assert _longest(where.longest_contexts, prompt_len=41) == 80  # one may come
