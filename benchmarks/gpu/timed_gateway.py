"""A gateway without HTTP that notes when tokens come, and requests with what became of them."""

import time
from dataclasses import dataclass, field
from itertools import pairwise

from typing_extensions import override

from alignedserve.core.request import FinishReason, RequestClass, SamplingParams, Slo
from alignedserve.messages.gateways import TokensEmitted
from alignedserve.messages.wire import Message
from alignedserve.process.links import Identity, Peer
from tests.harnesses.client_gateway import Answer, ClientGateway


@dataclass(slots=True)
class SentRequest:
    """One request, and its tokens as they came."""

    answer: Answer
    due_s: float  # when it was to be sent; objectives count from here
    prompt_len: int
    answer_len: int
    is_chat: bool
    stamps: list[tuple[float, int]] = field(default_factory=list)  # when so many tokens came at once

    @property
    def is_done(self) -> bool:
        return self.answer.done.is_set()

    @property
    def is_wrong(self) -> bool:
        answer = self.answer
        if answer.failure is not None:
            return True
        has_all = answer.finish_reason is FinishReason.LENGTH and len(answer.token_ids) == self.answer_len
        return self.is_done and (not has_all or bool(answer.early))

    @property
    def ttft_s(self) -> float:
        """Return the seconds to its first token, endless without one."""
        return self.stamps[0][0] - self.due_s if self.stamps else float("inf")

    @property
    def tpot_s(self) -> float:
        """Return the mean seconds of a token after the first, endless where it has not ended."""
        if not self.is_done or self.is_wrong:
            return float("inf")
        return (self.stamps[-1][0] - self.stamps[0][0]) / max(self.answer_len - 1, 1)

    @property
    def longest_gap_s(self) -> float:
        times = [when for when, _ in self.stamps]
        return max((later - earlier for earlier, later in pairwise(times)), default=0.0)


class TimedGateway(ClientGateway):
    """Notes the time of every token of the requests that it has sent."""

    def __init__(self, address: str, router_at: str, identity: Identity) -> None:
        super().__init__(address, router_at, identity)
        self._sent: dict[str, SentRequest] = {}

    def send(self, prompt: list[int], answer_len: int, *, due_s: float, slo: Slo | None) -> SentRequest:
        """Send a request; `slo`: its objectives, a chat's; None: it is a document, at best effort."""
        sampling = SamplingParams(max_tokens=answer_len, temperature=0.0, ignore_eos=True)
        request_class = RequestClass.BEST_EFFORT if slo is None else RequestClass.REAL_TIME
        answer = self.submit(prompt, sampling, slo, request_class=request_class)
        sent = SentRequest(answer, due_s, len(prompt), answer_len, slo is not None)
        self._sent[next(reversed(self.answers))] = sent  # as it was added last
        return sent

    @override
    def on_message(self, peer: Peer, message: Message) -> None:
        if isinstance(message, TokensEmitted):
            now = time.monotonic()
            for delta in message.deltas:
                if delta.token_ids:
                    self._sent[delta.request_id].stamps.append((now, len(delta.token_ids)))
        super().on_message(peer, message)
