"""Anthropic's Messages API, as a translation over OpenAI's chat completions.

A body passes parsing and chat_body to the same requests as a chat completion's (message_request); the deltas of its
answer come back through content_blocks and message_format.
"""
