"""OpenAI's Responses API, with state of its own.

A body passes `bodies` (its fields), `items` (its input), `context` (items of earlier responses) and `request_builder`
(the conversation); `formatter` makes items and events of the answer, `background_events` writes them to a log."""
