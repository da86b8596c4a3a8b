"""Parses bodies of the Messages API: unsupported fields, types, then each tool and each block of content."""

from collections.abc import Sequence
from typing import Any, NoReturn, TypeVar

from alignedserve.api.anthropic.errors import THREAD_UNSUPPORTED
from alignedserve.api.anthropic.schemas import Block, BlockTypes, PromptFields, TextBlock, Tool
from alignedserve.api.openai.parsing import parse, without_neutral
from alignedserve.api.openai.schemas.ignored_fields import IgnoredFields
from alignedserve.api.openai.schemas.unsupported_fields import NeutralValues
from alignedserve.core.errors import InvalidRequest

# Fields that are not supported, each with the values that ask for nothing, as in unsupported_fields.py.
_BODY: NeutralValues = {
    "compaction": (),
    "container": (),
    "context_management": ({}, {"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
    "diagnostics": ({"previous_message_id": None},),
    "fallbacks": ([],),
    "inference_geo": (),
    "mcp_servers": ([],),
    "speed": ("standard",),
}
_TOOL: NeutralValues = {"allowed_callers": (["direct"], []), "input_examples": ([],)}
_BLOCK: NeutralValues = {"caller": ({"type": "direct"},), "citations": ([], {"enabled": False}), "toolset_name": ()}

Content = str | Sequence[dict[str, Any]]
PromptFieldsT = TypeVar("PromptFieldsT", bound=PromptFields)


class BodyParser:
    """Parses one body. `ignored` as OpenAI's `parse` takes it; every method raises InvalidRequest naming the field."""

    def __init__(self, ignored: IgnoredFields | None = None) -> None:
        self._ignored = ignored

    def fields(self, schema: type[PromptFieldsT], body: dict[str, Any]) -> PromptFieldsT:
        if body.get("thread") is not None:
            raise InvalidRequest("thread is not supported.", param="thread", code=THREAD_UNSUPPORTED)
        return parse(schema, without_neutral(body, _BODY), self._ignored)

    def tools(self, tools: Sequence[dict[str, Any]]) -> list[Tool]:
        return [self._tool(tool, f"tools[{place}].") for place, tool in enumerate(tools)]

    def blocks(self, content: Content, known: BlockTypes, path: str) -> list[tuple[Block, str]]:
        """Check the blocks of a content, a text being one; return each with its path."""
        if isinstance(content, str):
            return [(TextBlock(type="text", text=content), path)]
        paths = [f"{path}[{place}]" for place in range(len(content))]
        return [(self._block(block, known, at), at) for block, at in zip(content, paths, strict=True)]

    def _tool(self, tool: dict[str, Any], path: str) -> Tool:
        if tool.get("type") not in (None, "custom"):
            _refuse(f"{path}type", "only tools of the type 'custom', which the client runs, are supported")
        return parse(Tool, without_neutral(tool, _TOOL, path), self._ignored, parent=path)

    def _block(self, block: dict[str, Any], known: BlockTypes, path: str) -> Block:
        kind = block.get("type")
        schema = known.get(kind) if isinstance(kind, str) else None
        if schema is None:
            _refuse(f"{path}.type", f"the blocks supported here are {', '.join(known)}")
        return parse(schema, without_neutral(block, _BLOCK, f"{path}."), self._ignored, parent=f"{path}.")


def _refuse(path: str, reason: str) -> NoReturn:
    raise InvalidRequest(f"Invalid value for {path}: {reason}.", param=path)
