"""One choice of an answer: token ids in, text and the log-probabilities to show out."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from alignedserve.core.request import FinishReason, Request, TokenLogprob
from alignedserve.gateway.backend.interface import Output
from alignedserve.gateway.openai.stop_strings import StopFinder
from alignedserve.runtime.model.tokenizer import Tokenizer


class ShownToken(NamedTuple):
    """A token of the shown text, with the place in the text where it begins."""

    logprob: TokenLogprob
    text_offset: int


class Piece(NamedTuple):
    """What became visible of one choice."""

    text: str
    tokens: tuple[ShownToken, ...] = ()
    finish_reason: FinishReason | None = None
    prompt_scores: tuple[TokenLogprob, ...] = ()


class ChoiceText:
    """Assembles one choice. `num_tokens` counts what was generated, hidden end tokens included."""

    def __init__(
        self, tokenizer: Tokenizer, request: Request, *, stops: Sequence[str] = (), eos_token_ids: Sequence[int] = ()
    ) -> None:
        sampling = request.sampling
        self.num_tokens = 0
        self.is_stopped = False  # a stop string was found: the worker need not go on
        self._stream = tokenizer.stream()
        self._stops = StopFinder(stops)
        self._min_tokens = sampling.min_tokens
        # A token that ends the answer is not part of its text.
        self._end_token_ids = frozenset(sampling.stop_token_ids) | frozenset(
            () if sampling.ignore_eos else eos_token_ids
        )
        self._is_plain = not stops and sampling.num_logprobs is None
        self._held_tokens: deque[ShownToken] = deque()
        self._num_decoded = 0  # characters
        self._num_shown = 0

    def take(self, output: Output) -> Piece:
        """Add output; returns what becomes visible by it."""
        if self.is_stopped:
            return Piece("")
        token_ids = self._without_end_token(output)
        if self._is_plain:
            self.num_tokens += len(output.token_ids)
            text = self._stream.push(token_ids)
            if output.finish_reason is not None:
                text += self._stream.end()
            return Piece(text, (), output.finish_reason, output.prompt_scores)
        text = self._take_one_by_one(token_ids, output.logprobs)
        finish_reason = FinishReason.STOP if self.is_stopped else output.finish_reason
        if finish_reason is not None and not self.is_stopped:
            self.num_tokens += len(output.token_ids) - len(token_ids)
            text += self._finish()
        return Piece(text, self._released(is_all=output.finish_reason is not None), finish_reason, output.prompt_scores)

    def _without_end_token(self, output: Output) -> tuple[int, ...]:
        token_ids = output.token_ids
        is_ended = output.finish_reason is FinishReason.STOP and token_ids and token_ids[-1] in self._end_token_ids
        return token_ids[:-1] if is_ended else token_ids

    def _take_one_by_one(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> str:
        shown = []
        for place, token_id in enumerate(token_ids):
            if place < len(logprobs):
                self._held_tokens.append(ShownToken(logprobs[place], self._num_decoded))
            self.num_tokens += 1
            shown.append(self._show(self._stream.push((token_id,))))
            if self._stops.is_found:
                self.is_stopped = True
                break
        return "".join(shown)

    def _show(self, piece: str) -> str:
        self._num_decoded += len(piece)
        visible = self._stops.push(piece) if self.num_tokens > self._min_tokens else piece
        self._num_shown += len(visible)
        return visible

    def _finish(self) -> str:
        text = self._show(self._stream.end())
        rest = self._stops.end()
        self._num_shown += len(rest)
        return text + rest

    def _released(self, *, is_all: bool) -> tuple[ShownToken, ...]:
        """Tokens whose text is shown. Those of a stop string never are."""
        released = []
        is_all = is_all and not self.is_stopped
        while self._held_tokens and (is_all or self._held_tokens[0].text_offset < self._num_shown):
            released.append(self._held_tokens.popleft())
        return tuple(released)
