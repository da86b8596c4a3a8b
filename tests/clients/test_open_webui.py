"""The requests that Open WebUI sends, read from its source: its package is gigabytes.

`routers/openai.py` there: the list of models, a streamed chat with a model's parameters, the title of a chat.
"""

import json

import httpx
import pytest

from tests.cluster.serving import Serving

pytestmark = [pytest.mark.clients, pytest.mark.timeout(300)]

HEADERS = {
    "Authorization": "Bearer none",
    "Content-Type": "application/json",
    "X-OpenWebUI-User-Name": "A%20B",
    "X-OpenWebUI-User-Id": "1",
    "X-OpenWebUI-Chat-Id": "2",
}
PARAMETERS = {
    "temperature": 0,
    "top_p": 1,
    "min_p": 0,
    "max_tokens": 24,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "seed": 1,
    "logit_bias": {},
    "custom_of_a_user": "x",
}
# Where caching marks are on, the last message becomes a list of parts.
QUESTION = {
    "role": "user",
    "content": [{"type": "text", "text": "Spell cat.", "cache_control": {"type": "ephemeral"}}],
}


def test_open_webui(server: Serving) -> None:
    with httpx.Client(base_url=f"{server.url}/v1", headers=HEADERS, timeout=60.0) as client:
        (model,) = client.get("/models").json()["data"]
        body = {"model": model["id"], "messages": [QUESTION], **PARAMETERS}
        chat = client.post("/chat/completions", json=body | {"stream": True, "stream_options": {"include_usage": True}})
        title = client.post(
            "/chat/completions",
            json={"model": model["id"], "messages": [{"role": "user", "content": "Spell cat."}], "stream": False}
            | {"max_completion_tokens": 24},
        )
    chunks = [json.loads(event.removeprefix("data: ")) for event in chat.text.split("\n\n")[:-2]]
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks[:-1]) == "c a t"
    assert chunks[-1]["usage"]["completion_tokens"] > 0
    assert chat.headers["x-alignedserve-ignored-fields"] == "custom_of_a_user, messages[].content[].cache_control"
    assert title.json()["choices"][0]["message"]["content"]
