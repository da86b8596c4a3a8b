"""What tells tools to a model whose chat template cannot; `{tools}` stands for them."""

_INTRODUCTION = (
    "You have these tools, one JSON object per line:\n<tools>\n{tools}\n</tools>\n"
    "Use a tool when it is needed to answer. "
)
CALLS_PROMPT = _INTRODUCTION + (
    "To call one, write its name and arguments so, and nothing after it:\n"
    '<tool_call>\n{{"name": "the name", "arguments": {{"the argument": "its value"}}}}\n</tool_call>\n'
    "The result comes between <tool_response> and </tool_response>."
)
LIST_PROMPT = _INTRODUCTION + (
    "To call tools, write a list of calls so, and nothing after it:\n"
    '<tool_call>[{{"name": "the name", "arguments": {{"the argument": "its value"}}}}]</tool_call>\n'
    "The results come between <tool_response> and </tool_response>."
)
