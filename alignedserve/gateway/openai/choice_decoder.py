"""Decodes one choice of a response: token ids in, text and visible log-probabilities out."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from alignedserve.core.request import FinishReason, Request, TokenLogprob
from alignedserve.gateway.backend.interface import GeneratedTokens
from alignedserve.gateway.openai.stop_strings import StopStringFinder
from alignedserve.runtime.model.tokenizer import Tokenizer


class OffsetLogprob(NamedTuple):
    """A visible token's log-probability and the offset in the text where the token begins."""

    logprob: TokenLogprob
    text_offset: int


class ToolCallDelta(NamedTuple):
    """A tool call that begins, or more of the arguments of one that has begun."""

    call_index: int  # of the call among those of its choice
    arguments: str = ""  # JSON text, to be appended to what came before
    call_id: str | None = None  # with the first delta of a call, as the name
    name: str | None = None


class ChoiceDelta(NamedTuple):
    """What becomes visible of one choice, in the order reasoning, text, tool calls."""

    text: str
    logprobs: tuple[OffsetLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    stop_string: str | None = None  # the one that ended the choice


class ChoiceDecoder:
    """Decodes one choice. `num_tokens` counts generated tokens, hidden end tokens included."""

    def __init__(
        self, tokenizer: Tokenizer, request: Request, *, stops: Sequence[str] = (), eos_token_ids: Sequence[int] = ()
    ) -> None:
        sampling = request.sampling
        self.num_tokens = 0
        self.is_stopped = False  # a stop string was found: the worker may stop
        self._stream = tokenizer.stream()
        self._stops = StopStringFinder(stops)
        self._min_tokens = sampling.min_tokens
        # A token that ends the answer is not part of its text.
        self._end_token_ids = frozenset(sampling.stop_token_ids) | frozenset(
            () if sampling.ignore_eos else eos_token_ids
        )
        self._is_plain = not stops and sampling.num_logprobs is None
        self._held_logprobs: deque[OffsetLogprob] = deque()
        self._num_decoded = 0  # characters, like the next
        self._num_visible = 0

    def decode(self, new: GeneratedTokens) -> ChoiceDelta:
        """Add new tokens and return the text that becomes visible."""
        if self.is_stopped:
            return ChoiceDelta("")
        token_ids = self._without_end_token(new)
        if self._is_plain:
            self.num_tokens += len(new.token_ids)
            text = self._stream.push(token_ids)
            if new.finish_reason is not None:
                text += self._stream.end()
            return ChoiceDelta(text, (), new.finish_reason, new.prompt_logprobs)
        text = self._decode_one_by_one(token_ids, new.logprobs)
        finish_reason = FinishReason.STOP if self.is_stopped else new.finish_reason
        if finish_reason is not None and not self.is_stopped:
            self.num_tokens += len(new.token_ids) - len(token_ids)
            text += self._flush()
        logprobs = self._visible_logprobs(is_all=new.finish_reason is not None)
        return ChoiceDelta(text, logprobs, finish_reason, new.prompt_logprobs, stop_string=self._stops.found)

    def _without_end_token(self, new: GeneratedTokens) -> tuple[int, ...]:
        token_ids = new.token_ids
        is_ended = new.finish_reason is FinishReason.STOP and token_ids and token_ids[-1] in self._end_token_ids
        return token_ids[:-1] if is_ended else token_ids

    def _decode_one_by_one(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> str:
        visible = []
        for index, token_id in enumerate(token_ids):
            if index < len(logprobs):
                self._held_logprobs.append(OffsetLogprob(logprobs[index], self._num_decoded))
            self.num_tokens += 1
            visible.append(self._filter_stops(self._stream.push((token_id,))))
            if self._stops.found is not None:
                self.is_stopped = True
                break
        return "".join(visible)

    def _filter_stops(self, text: str) -> str:
        self._num_decoded += len(text)
        visible = self._stops.push(text) if self.num_tokens > self._min_tokens else text
        self._num_visible += len(visible)
        return visible

    def _flush(self) -> str:
        text = self._filter_stops(self._stream.end())
        rest = self._stops.flush()
        self._num_visible += len(rest)
        return text + rest

    def _visible_logprobs(self, *, is_all: bool) -> tuple[OffsetLogprob, ...]:
        """Release the log-probabilities of tokens whose text is visible. Those of a stop string never are."""
        released = []
        is_all = is_all and not self.is_stopped
        while self._held_logprobs and (is_all or self._held_logprobs[0].text_offset < self._num_visible):
            released.append(self._held_logprobs.popleft())
        return tuple(released)
