"""How fast workers are, as they measured it at their start: what default objectives follow from."""

import msgspec

from alignedserve.messages.fields import Seconds


class WorkerSpeed(msgspec.Struct, frozen=True, array_like=True):
    """Seconds that a worker needs with nothing else to do; 0: it did not measure."""

    short_prompt_s: Seconds = 0.0  # of 64 tokens: no first token comes sooner
    prompt_s: Seconds = 0.0  # of 1 024 tokens, or half of what its memory holds
    token_s: Seconds = 0.0  # of one request: no gap is shorter
    shared_token_s: Seconds = 0.0  # of four together

    def slower(self, other: "WorkerSpeed") -> "WorkerSpeed":
        """Return the longer of each of the times."""
        return WorkerSpeed(
            max(self.short_prompt_s, other.short_prompt_s),
            max(self.prompt_s, other.prompt_s),
            max(self.token_s, other.token_s),
            max(self.shared_token_s, other.shared_token_s),
        )
