"""Answers of the Python API, decoded while they are computed, and the line that shows their progress."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from alignedserve.api.backend.interface import GeneratedTokens
from alignedserve.api.openai.choice_decoder import ChoiceDecoder
from alignedserve.api.tools.call_parser import ToolCallDelta, whole_tool_calls
from alignedserve.core.errors import AlignedServeError
from alignedserve.core.ids import RequestId
from alignedserve.core.request import FinishReason, Request, TokenLogprob
from alignedserve.messages.gateways import PromptScored, TokenDelta, TokensEmitted
from alignedserve.messages.wire import Message


@dataclass(slots=True)
class RequestOutput:
    """The answer to one prompt. `token_ids` are all of its tokens, `text` what is content."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0  # of the prompt, that were not computed again
    reasoning: str = ""  # the thought before the content, of chats
    tool_calls: list[dict[str, Any]] = field(default_factory=list)  # of chats, in OpenAI's shape: id, type, function
    logprobs: list[TokenLogprob] = field(default_factory=list)  # of `token_ids`, where `num_logprobs` asks for them
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)  # of the prompt from its second token on, as well
    embedding: bytes = b""  # of the prompt, float32, where that was asked for instead of an answer
    error: AlignedServeError | None = None  # why there is no answer, where errors are returned
    others: list["RequestOutput"] = field(default_factory=list)  # the further answers that `n` asks for

    @property
    def outputs(self) -> list["RequestOutput"]:
        return [self, *self.others]

    @property
    def message(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self.text or None if self.tool_calls else self.text}
        message |= {"reasoning_content": self.reasoning} if self.reasoning else {}
        return message | ({"tool_calls": self.tool_calls} if self.tool_calls else {})


class ProgressLine:
    """A line on stderr while the context lasts; nothing where stderr is not a terminal."""

    def __init__(self, num_requests: int, *, is_shown: bool) -> None:
        console = Console(stderr=True, highlight=False)
        self._progress = Progress(
            TextColumn("Requests"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[tokens]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not (is_shown and console.is_terminal),
            transient=True,
            refresh_per_second=4,  # drawing takes time from the computing
        )
        self._task = self._progress.add_task("", total=num_requests, tokens="")
        self._num_tokens = 0

    def __enter__(self) -> "ProgressLine":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def add(self, num_tokens: int, *, has_ended: bool) -> None:
        """Count new tokens of a request, and the request if it has ended with them."""
        self._num_tokens += num_tokens
        tokens = f"{self._num_tokens} tokens" if self._num_tokens else ""  # embeddings have none
        self._progress.update(self._task, advance=int(has_ended), tokens=tokens)


class CollectedAnswer:
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
    message: Message, answers: Mapping[RequestId, CollectedAnswer], progress: ProgressLine | None = None
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
