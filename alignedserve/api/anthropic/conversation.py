"""Translates the conversation of a body into messages of a chat completion."""

from collections.abc import Iterator, Sequence
from typing import Any

import orjson

from alignedserve.api.anthropic.parsing import BodyParser, Content
from alignedserve.api.anthropic.schemas import (
    ASSISTANT_BLOCKS,
    RESULT_BLOCKS,
    SYSTEM_BLOCKS,
    USER_BLOCKS,
    InputMessage,
    TextBlock,
    ThinkingBlock,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from alignedserve.core.errors import InvalidRequest

ChatMessage = dict[str, Any]


class Conversation:
    """Messages for chat completions. Turns of one role in a row become one, as templates expect."""

    def __init__(self, system: Content, messages: Sequence[InputMessage], parser: BodyParser) -> None:
        """Raises InvalidRequest naming the field."""
        self.messages: list[ChatMessage] = []
        self.paths: list[str] = []  # of the field that each message came from
        self.referenced_tools: set[str] = set()  # deferred tools that results have made known
        self._parser = parser
        if system:
            self._add({"role": "system", "content": self._text_parts(system, "system")}, "system")
        for place, message in enumerate(messages):
            path = f"messages[{place}]"
            for translated in self._translate(message, f"{path}.content"):
                self._add(translated, path)
        if messages[-1].role == "assistant":
            path = f"messages[{len(messages) - 1}].role"
            raise InvalidRequest(f"{path}: prefilling an answer is not supported.", param=path)

    def _translate(self, message: InputMessage, path: str) -> Iterator[ChatMessage]:
        if message.role == "assistant":
            yield self._assistant_message(message, path)
        elif message.role == "system":
            yield {"role": "system", "content": self._text_parts(message.content, path)}
        else:
            yield from self._user_messages(message, path)

    def _user_messages(self, message: InputMessage, path: str) -> Iterator[ChatMessage]:
        parts = []
        for block, at in self._parser.blocks(message.content, USER_BLOCKS, path):
            if isinstance(block, TextBlock):
                parts.append(_text_part(block))
            elif isinstance(block, ToolResultBlock):
                if parts:
                    raise InvalidRequest(f"{at} must stand before the text of its message.", param=at)
                yield self._tool_message(block, at)
        if parts:
            yield {"role": "user", "content": parts}

    def _tool_message(self, result: ToolResultBlock, path: str) -> ChatMessage:
        texts = []
        for block, _ in self._parser.blocks(result.content, RESULT_BLOCKS, f"{path}.content"):
            if isinstance(block, TextBlock):
                texts.append(block.text)
            elif isinstance(block, ToolReferenceBlock):
                self.referenced_tools.add(block.tool_name)
                texts.append(f"The tool {block.tool_name} is available now.")
        content = "\n".join(texts)
        return {
            "role": "tool",
            "tool_call_id": result.tool_use_id,
            "content": f"Error: {content}" if result.is_error else content,
        }

    def _assistant_message(self, message: InputMessage, path: str) -> ChatMessage:
        """Return the message; redacted thoughts, which only their author can read, are left out."""
        parts, thoughts, calls = [], [], []
        for block, _ in self._parser.blocks(message.content, ASSISTANT_BLOCKS, path):
            if isinstance(block, TextBlock):
                parts.append(_text_part(block))
            elif isinstance(block, ThinkingBlock):
                thoughts.append(block.thinking)
            elif isinstance(block, ToolUseBlock):
                calls.append(_tool_call(block))
        translated: ChatMessage = {"role": "assistant", "content": parts or (None if calls else "")}
        translated |= {"tool_calls": calls} if calls else {}
        return translated | ({"reasoning_content": "\n".join(thoughts)} if any(thoughts) else {})

    def _text_parts(self, content: Content, path: str) -> list[dict[str, str]]:
        return [_text_part(block) for block, _ in self._parser.blocks(content, SYSTEM_BLOCKS, path)]

    def _add(self, message: ChatMessage, path: str) -> None:
        if self.messages and self.messages[-1]["role"] == message["role"] in ("user", "assistant"):
            self.messages[-1] = _joined(self.messages[-1], message)
        else:
            self.messages.append(message)
            self.paths.append(path)


def _joined(first: ChatMessage, second: ChatMessage) -> ChatMessage:
    joined = first | second
    for name in first.keys() & second.keys() - {"role"}:
        one, other = first[name], second[name]
        joined[name] = one + other if one and other and type(one) is type(other) else one or other
    return joined


def _tool_call(block: ToolUseBlock) -> dict[str, Any]:
    arguments = orjson.dumps(block.input).decode()
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}


def _text_part(block: Any) -> dict[str, str]:
    return {"type": "text", "text": block.text}
