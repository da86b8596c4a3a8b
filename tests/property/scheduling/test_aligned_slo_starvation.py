"""aligned_slo beside more small requests than can be served: a large one waits for its bound, and not much longer."""

from alignedserve.scheduling.policies import make_policy
from alignedserve.scheduling.policy import DeviceMemory, IterationLimits
from tests.harnesses.policy_run import Arrival, PolicyRun
from tests.harnesses.scheduling import request_of

SIZE = 16
COMES_S = 1.0


def _document_ends_s(starvation_s: float) -> float:
    """Return the end of a document that needs half of the memory, beside chats that would fill it."""
    fields = {"prompt_len": 60, "max_tokens": 20, "ttft_s": 0.2, "tpot_s": 0.1}
    chats = [Arrival(request_of(f"chat-{i:03}", fields | {"arrival_s": 0.08 * i}), 20, 20.0) for i in range(300)]
    document = request_of("document", {"prompt_len": 300, "max_tokens": 20, "be": True, "arrival_s": COMES_S})
    policy = make_policy("aligned_slo", {"starvation_s": starvation_s, "patience": 2.0})
    run = PolicyRun(policy, DeviceMemory(40, 40, SIZE), IterationLimits(16, 512))
    courses = run.run([*chats, Arrival(document, 20, 20.0)])
    return courses["document"].token_times_s[-1]


def test_a_large_request_has_memory_kept_for_it_after_its_bound() -> None:
    # Its class is owed its 300 tokens once 5 700 of chat are computed, 1 000 of which come each second.
    # It needs half of the memory, of which a tenth is its share: from then on it waits four times as long as it
    # runs alone, 0.56 s. Then no new request gets memory, and those that hold some end within about 2 s. At last it has
    # at least a tenth of the time.
    assert _document_ends_s(starvation_s=3.0) < COMES_S + 3.0 + 2 * 0.6 + 5.7 + 4 * 0.6 + 2.0 + 0.6 / 0.1
    assert _document_ends_s(starvation_s=1000.0) > 20.0
