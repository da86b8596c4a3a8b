"""Outputs of the Python API."""

from dataclasses import dataclass, field
from typing import Any

from alignedserve.core.request import FinishReason, TokenLogprob


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
    others: list["RequestOutput"] = field(default_factory=list)  # the further answers that `n` asks for

    @property
    def outputs(self) -> list["RequestOutput"]:
        return [self, *self.others]

    @property
    def message(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self.text or None if self.tool_calls else self.text}
        message |= {"reasoning_content": self.reasoning} if self.reasoning else {}
        return message | ({"tool_calls": self.tool_calls} if self.tool_calls else {})
