"""OpenAI's Responses API: a translation over chat completions, with state of its own.

A body passes `parsing` (its fields and input items), `context` (items of earlier responses) and `chat_body` (the chat
completion that answers it); what is generated comes back through `output` (items and events) and `formatter`. `state`
keeps responses, `background` runs them as batches of one line, `responses_api` is what the routes call.
"""
