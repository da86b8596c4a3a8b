"""Decodes one choice of a response: token ids in; text, thoughts, tool calls and visible log-probabilities out."""

from collections import deque
from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

from typing_extensions import override

from alignedserve.api.backend.interface import GeneratedTokens
from alignedserve.api.openai.output_parser import OutputFormat, TextOptions, unmarked
from alignedserve.api.text_markers import StopStringFinder
from alignedserve.api.tools.call_parser import OutputRun, ToolCallDelta
from alignedserve.core.request import FinishReason, Request, TokenLogprob
from alignedserve.text.tokenizer import Tokenizer


class OffsetLogprob(NamedTuple):
    """A visible token's log-probability and the offset in the content where the token begins."""

    logprob: TokenLogprob
    text_offset: int


class HeldLogprobs:
    """Log-probabilities of one choice, in the order of their tokens. Those of thoughts and calls are never shown."""

    def __init__(self) -> None:
        self._undivided: deque[OffsetLogprob] = deque()  # offsets in the whole answer
        self._in_content: deque[OffsetLogprob] = deque()
        self._num_decoded = 0  # characters given to a parser, like the next
        self._num_divided = 0
        self._num_content = 0
        self._is_in_content = True

    def hold(self, logprob: TokenLogprob) -> None:
        self._undivided.append(OffsetLogprob(logprob, self._num_decoded))

    def decoded(self, length: int) -> None:
        self._num_decoded += length

    def add_text(self, length: int, content_length: int) -> None:
        """Divide the next characters of the answer: they are content, or nothing of them is. A token with any character
        of the content belongs to the content, even if its space is hidden."""
        self._is_in_content = content_length > 0 or (length == 0 and self._is_in_content)
        end = self._num_divided + length
        while self._undivided and self._undivided[0].text_offset < end:
            if not self._is_in_content and self._first_end() > end:
                break
            held = self._undivided.popleft()
            if self._is_in_content:
                offset = self._num_content + max(held.text_offset - self._num_divided, 0)
                self._in_content.append(OffsetLogprob(held.logprob, offset))
        self._num_divided = end
        self._num_content += content_length

    def _first_end(self) -> int:
        return self._undivided[1].text_offset if len(self._undivided) > 1 else self._num_decoded

    def release(self, num_visible: int, *, is_all: bool) -> tuple[OffsetLogprob, ...]:
        """Return those before a place in the content; `is_all`: at its end, tokens without text as well."""
        if is_all and self._is_in_content:
            self._in_content += [held._replace(text_offset=self._num_content) for held in self._undivided]
            self._undivided.clear()
        released = []
        while self._in_content and (is_all or self._in_content[0].text_offset < num_visible):
            released.append(self._in_content.popleft())
        return tuple(released)


class EveryLogprob(HeldLogprobs):
    """Log-probabilities of one choice where each token has its own, whatever it is a part of. None is held back."""

    @override
    def add_text(self, length: int, content_length: int) -> None:
        """Do nothing: it is not asked what is content."""

    @override
    def release(self, num_visible: int, *, is_all: bool) -> tuple[OffsetLogprob, ...]:
        released = tuple(self._undivided)
        self._undivided.clear()
        return released


_PLAIN_TEXT = TextOptions()
_PLAIN_CONTENT = OutputFormat()


class ChoiceDelta(NamedTuple):
    """New visible output of one choice, in the order reasoning, text, tool calls, unless it has `pieces`."""

    text: str
    logprobs: tuple[OffsetLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    stop_string: str | None = None  # the one that ended the choice
    token_ids: tuple[int, ...] = ()  # the new tokens, visible or not
    pieces: tuple["ChoiceDelta", ...] = ()  # where it came in another order: the same in that

    @property
    def in_order(self) -> tuple["ChoiceDelta", ...]:
        return self.pieces or (self,)


class ChoiceDecoder:
    """Decodes one choice. `num_tokens` counts generated tokens, hidden end tokens included."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        request: Request,
        *,
        stops: Sequence[str] = (),
        eos_token_ids: Sequence[int] = (),
        output_format: OutputFormat = _PLAIN_CONTENT,
        options: TextOptions = _PLAIN_TEXT,
    ) -> None:
        """Make a decoder. Stop strings end the content; they are not looked for in thoughts and calls."""
        sampling = request.sampling
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        self.is_stopped = False  # a stop string was found: the worker may stop
        self._parser = parser = output_format.parser(tokenizer)
        self._shows_stop, self._shows_special_tokens = options.shows_stop, options.shows_special_tokens
        shown = tokenizer.control_token_ids(output_format.texts())
        before = request.prompt_token_ids if output_format.is_continued else ()
        self._stream = tokenizer.stream(shown, before=before, skip_special_tokens=not options.shows_special_tokens)
        self._stops = StopStringFinder(stops, is_shown=options.shows_stop)
        self._min_tokens = sampling.min_tokens
        # A token that ends the answer is not part of its text.
        self._end_token_ids = frozenset(sampling.stop_token_ids) | frozenset(
            () if sampling.ignore_eos else eos_token_ids
        )
        self._is_plain = not stops and sampling.num_logprobs is None and parser is None
        self._has_every_logprob = options.has_every_logprob
        self._logprobs = EveryLogprob() if options.has_every_logprob else HeldLogprobs()
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
            return ChoiceDelta(text, (), new.finish_reason, new.prompt_logprobs, token_ids=new.token_ids)
        num_before, num_visible_before = self.num_tokens, self._num_visible
        runs = self._decode_one_by_one(token_ids, new.logprobs)
        if new.finish_reason is not None and not self.is_stopped:
            self.num_tokens += len(new.token_ids) - len(token_ids)
            runs += self._flush()
            if self._has_every_logprob:
                for logprob in new.logprobs[len(token_ids) :]:  # of the end token
                    self._logprobs.hold(logprob)
            self.is_stopped = self._stops.found is not None
        is_all = new.finish_reason is not None and not self.is_stopped
        shown = _delta_of(runs, self._logprobs.release(self._num_visible, is_all=is_all))
        return shown._replace(
            finish_reason=self._finish_reason(new),
            prompt_logprobs=new.prompt_logprobs,
            stop_string=self._stops.found,
            token_ids=new.token_ids[: self.num_tokens - num_before],  # what came behind a stop string is no part of it
            pieces=_pieces(runs, shown.logprobs, num_visible_before),
        )

    def _finish_reason(self, new: GeneratedTokens) -> FinishReason | None:
        if self.is_stopped:
            return FinishReason.STOP
        has_calls = self._parser is not None and self._parser.has_calls
        return FinishReason.TOOL_CALLS if has_calls and new.finish_reason is FinishReason.STOP else new.finish_reason

    def _without_end_token(self, new: GeneratedTokens) -> tuple[int, ...]:
        token_ids = new.token_ids
        if self._shows_stop:
            return token_ids
        is_ended = new.finish_reason is FinishReason.STOP and token_ids and token_ids[-1] in self._end_token_ids
        return token_ids[:-1] if is_ended else token_ids

    def _decode_one_by_one(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> list[OutputRun]:
        visible: list[OutputRun] = []
        for index, token_id in enumerate(token_ids):
            if index < len(logprobs):
                self._logprobs.hold(logprobs[index])
            self.num_tokens += 1
            visible += self._visible(self._parsed(self._stream.push((token_id,))))
            if self._stops.found is not None:
                self.is_stopped = True
                break
        return visible

    def _parsed(self, text: str) -> Sequence[OutputRun]:
        self._logprobs.decoded(len(text))
        if self._parser is None:
            return (OutputRun(len(text), text),)
        was_reasoning = self._parser.is_reasoning
        runs = self._parser.push(text)
        self.num_reasoning_tokens += was_reasoning or self._parser.is_reasoning
        return runs

    def _visible(self, runs: Sequence[OutputRun]) -> list[OutputRun]:
        shown = [piece for run in runs for piece in unmarked(run, shows_names=self._shows_special_tokens)]
        return [run._replace(content=self._filter_stops(run)) for run in shown]

    def _filter_stops(self, run: OutputRun) -> str:
        self._logprobs.add_text(run.length, len(run.content))
        if self._stops.found is not None:
            return ""
        visible = self._stops.push(run.content) if self.num_tokens > self._min_tokens else run.content
        if self._stops.found is None and (run.tool_calls or (run.length and not run.content)):
            visible += self._stops.flush()  # no stop string reaches across a call or a thought
        self._num_visible += len(visible)
        return visible

    def _flush(self) -> list[OutputRun]:
        rest = self._stream.end()
        if self._parser is None:
            runs = [OutputRun(len(rest), rest)]
        else:
            runs = [*self._parser.push(rest), *self._parser.end()]
        visible = self._visible(runs)
        held = self._stops.flush()
        self._num_visible += len(held)
        return [*visible, OutputRun(0, held)]


def _delta_of(runs: Sequence[OutputRun], logprobs: tuple[OffsetLogprob, ...]) -> ChoiceDelta:
    return ChoiceDelta(
        "".join([run.content for run in runs]),
        logprobs,
        reasoning="".join([run.reasoning for run in runs]),
        tool_calls=_by_call([call for run in runs for call in run.tool_calls]),
    )


def _by_call(deltas: Sequence[ToolCallDelta]) -> tuple[ToolCallDelta, ...]:
    """Return one delta of each call: many clients read no more than one from a chunk."""
    if len(deltas) < 2:
        return tuple(deltas)
    calls = [list(group) for _, group in groupby(deltas, attrgetter("call_index"))]
    return tuple([call[0]._replace(arguments="".join([delta.arguments for delta in call])) for call in calls])


def _pieces(runs: Sequence[OutputRun], logprobs: Sequence[OffsetLogprob], start: int) -> tuple[ChoiceDelta, ...]:
    """Return the runs as deltas in their order, where one delta has another; `start`: of their text in the content. Of
    an answer in channels a thought may follow words to the user, and both may follow a call."""
    groups: list[list[OutputRun]] = [[]]
    last = 0  # of reasoning, content, calls: which the group has come to
    for run in runs:
        kinds = [kind for kind, shown in enumerate((run.reasoning, run.content, run.tool_calls)) if shown]
        if kinds and kinds[0] < last:
            groups.append([])
        groups[-1].append(run)
        last = kinds[-1] if kinds else last
    if len(groups) == 1:
        return ()
    pieces, end, rest = [], start, list(logprobs)
    for number, group in enumerate(groups, 1):
        end += sum(len(run.content) for run in group)
        is_last = number == len(groups)
        covered = tuple(rest) if is_last else tuple(logprob for logprob in rest if logprob.text_offset < end)
        pieces.append(_delta_of(group, covered))
        rest = rest[len(covered) :]
    return tuple(pieces)
