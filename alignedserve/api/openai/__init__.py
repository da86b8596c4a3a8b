"""OpenAI's generation API.

A request passes parsing, translation, request_builder and generation to the backend; its tokens come back through
generation, choice_decoder and response_format. A token has five forms: SampledToken (engine), TokenDelta (message),
GeneratedTokens (backend), ChoiceDelta (choice_decoder), bytes (response_format)."""
