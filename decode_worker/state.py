"""The decode worker's records."""

from dataclasses import dataclass

from alignedserve.core.ids import BlockId
from alignedserve.core.request import Request
from alignedserve.messages.links import Handoff, PrefillRequest


@dataclass(slots=True)
class RunningRequest:
    """One request in the running batch."""

    request: Request
    attempt: int
    generated_token_ids: list[int]
    block_ids: list[BlockId]
    num_computed: int  # tokens whose cache lies in its blocks
    num_in_flight: int = 0  # tokens that the current iteration computes
    is_prefilling: bool = False  # its prompt is computed here, and the router waits to hear that it is done
    is_aborted: bool = False

    @property
    def context_len(self) -> int:
        """Prompt and generated tokens; the next iteration reads or computes all of them."""
        return self.request.prompt_len + len(self.generated_token_ids)

    @property
    def num_remaining(self) -> int:
        """Tokens to compute before the next one can be sampled: 1 while decoding, more while a prompt is prefilled."""
        return self.context_len - self.num_computed


@dataclass(frozen=True, slots=True)
class Candidate:
    """A request granted to this worker that has not entered the running batch.

    With a handoff its cache lies in the arena; with a prefill it is computed here (colocated workers only).
    """

    request: Request
    attempt: int
    generated_token_ids: tuple[int, ...]
    handoff: Handoff | None = None

    @classmethod
    def of_handoff(cls, handoff: Handoff) -> "Candidate":
        """From the pool."""
        return cls(handoff.request, handoff.attempt, handoff.generated_token_ids, handoff)

    @classmethod
    def of_prefill(cls, message: PrefillRequest) -> "Candidate":
        """From the router."""
        return cls(message.request, message.attempt, message.generated_token_ids)

    @property
    def context_len(self) -> int:
        """Prompt and generated tokens."""
        return self.request.prompt_len + len(self.generated_token_ids)
