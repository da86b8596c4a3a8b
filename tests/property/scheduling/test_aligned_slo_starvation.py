"""aligned_slo beside more chats than can be served: documents have what their floor gives, and end."""

from functools import cache

import pytest

from alignedserve.scheduling.policies import make_policy
from alignedserve.scheduling.policy import DeviceMemory, IterationLimits
from tests.harnesses.policy_run import Arrival, Course, PolicyRun
from tests.harnesses.scheduling import request_of

COMES_S = 1.0
CHATS_S = 32.0  # for so long chats come


@cache
def _courses(prompt_lens: tuple[int, ...], floor: float) -> dict[str, Course]:
    """Run documents on a worker of 40 blocks beside chats that would fill it, 12 a second."""
    fields = {"prompt_len": 60, "max_tokens": 20, "ttft_s": 0.2, "tpot_s": 0.1}
    chats = [request_of(f"chat-{number:03}", fields | {"arrival_s": 0.08 * number}) for number in range(400)]
    as_document = {"max_tokens": 20, "be": True, "arrival_s": COMES_S}
    documents = [
        request_of(f"document-{number}", as_document | {"prompt_len": length})
        for number, length in enumerate(prompt_lens)
    ]
    policy = make_policy("aligned_slo", {"best_effort_floor": floor})
    run = PolicyRun(policy, DeviceMemory(40, 40, 16), IterationLimits(16, 512))
    return run.run([Arrival(request, 20, 20.0) for request in [*chats, *documents]])


@pytest.mark.parametrize(("floor", "least_s", "most_s"), [(0.05, COMES_S + 5.9, 30.0), (0.0, CHATS_S, 100.0)])
def test_a_large_document_has_memory_kept_for_it_and_ends(floor: float, least_s: float, most_s: float) -> None:
    """It needs half of the memory, and takes 0.3 s: 5 % of 5.9 s in which prompts of chat compute, half of the time.

    Then no newcomer has memory, and chats that hold some end within 2 s. Its tokens take 0.1 s: 5 % of 2 s. Twice: it
    may be evicted.
    """
    assert least_s < _courses((300,), floor)["document-0"].token_times_s[-1] < most_s


def test_who_has_a_guarantee_is_not_evicted_for_the_growth_of_chats() -> None:
    course = _courses((300,), floor=0.05)["document-0"]
    assert course.num_preemptions == 0
    assert course.token_times_s[-1] < 17.0


def test_all_documents_end_in_turn() -> None:
    courses = _courses((100, 150, 60), floor=0.05)
    ends_s = [courses[f"document-{number}"].token_times_s[-1] for number in range(3)]
    assert ends_s == sorted(ends_s)
    assert ends_s[-1] < CHATS_S
