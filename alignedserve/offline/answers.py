"""Answers of the Python API while they are computed: decoded by what decodes the gateway's."""

from collections.abc import Callable, Mapping, Sequence

from alignedserve.api.backend.interface import GeneratedTokens
from alignedserve.api.openai.choice_decoder import ChoiceDecoder
from alignedserve.api.tools.call_parser import ToolCallDelta, whole_tool_calls
from alignedserve.core.ids import RequestId
from alignedserve.core.request import FinishReason, Request
from alignedserve.messages.gateways import PromptScored, TokenDelta, TokensEmitted
from alignedserve.messages.wire import Message
from alignedserve.offline.progress import ProgressLine
from alignedserve.offline.request_output import RequestOutput


class Answer:
    """Collects what is computed for one request. Without `make_decoder` its text is not wanted."""

    def __init__(
        self, request: Request, make_decoder: Callable[[], ChoiceDecoder] | None = None, *, has_stops: bool = False
    ) -> None:
        self.request = request
        self.output = RequestOutput()
        self._make_decoder = make_decoder  # only where it is needed: there may be many thousand answers
        self._decoder: ChoiceDecoder | None = None
        self._has_stops = has_stops
        self._calls: list[ToolCallDelta] = []

    @property
    def has_ended(self) -> bool:
        return self.output.finish_reason is not None

    def add(self, delta: TokenDelta) -> None:
        """Add new tokens. Those behind a stop string are no part of the answer, which ends before the worker's then."""
        output = self.output
        output.token_ids += delta.token_ids
        output.logprobs += delta.logprobs
        output.finish_reason = delta.finish_reason
        output.num_cached_tokens += delta.num_cached_tokens
        output.embedding = delta.embedding
        if self._make_decoder is None:
            return
        if self._has_stops:
            self._decoder = self._decoder or self._make_decoder()
            self._decode(self._decoder, delta.token_ids, delta.finish_reason)
        elif self.has_ended:
            self._decode(self._make_decoder(), output.token_ids, delta.finish_reason)

    def add_scores(self, message: PromptScored) -> None:
        known = self.output.prompt_logprobs
        known += message.entries[max(len(known) + 1 - message.first_position, 0) :]

    def _decode(self, decoder: ChoiceDecoder, token_ids: Sequence[int], finish_reason: FinishReason | None) -> None:
        output = self.output
        new = decoder.decode(GeneratedTokens(tuple(token_ids), finish_reason=finish_reason))
        output.text += new.text
        output.reasoning += new.reasoning
        output.finish_reason = new.finish_reason
        self._calls += new.tool_calls
        if self.has_ended:
            output.tool_calls = whole_tool_calls(self._calls)
            del output.token_ids[decoder.num_tokens :], output.logprobs[decoder.num_tokens :]
            self._decoder = None


def collect(
    message: Message, answers: Mapping[RequestId, Answer], progress: ProgressLine | None = None
) -> list[RequestId]:
    """Give what a message tells to the answers; return those that a stop string has ended, which no worker knows.

    Other messages than of tokens and scores are dropped.
    """
    stopped: list[RequestId] = []
    if isinstance(message, PromptScored):
        answers[message.request_id].add_scores(message)
    for delta in message.deltas if isinstance(message, TokensEmitted) else ():
        answer = answers[delta.request_id]
        if answer.has_ended:
            continue
        answer.add(delta)
        if answer.has_ended and delta.finish_reason is None:
            stopped.append(delta.request_id)
        if progress is not None:
            progress.add(len(delta.token_ids), has_ended=answer.has_ended)
    return stopped
