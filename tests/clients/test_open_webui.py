"""Open WebUI's own server before a served model, asked as its page asks; and the requests that its source shows.

Those hold what a page's settings can add (`routers/openai.py` there): a model's parameters, marks for caching.
"""

import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.clients.environments import open_webui_environment
from tests.cluster.serving import Serving
from tests.support.ports import free_port

pytestmark = [pytest.mark.clients, pytest.mark.timeout(1200)]

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


START_TIMEOUT_S = 240.0
CHAT = [{"role": "user", "content": "Spell cat."}]
ANSWERED = [*CHAT, {"role": "assistant", "content": "c a t"}]


@pytest.fixture(scope="module")
def page(server: Serving, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """Open WebUI, started without a network or accounts, and signed in to as its page does."""
    folder, port = tmp_path_factory.mktemp("open-webui"), free_port()
    words: list[str | Path] = [
        open_webui_environment() / "open-webui",
        "serve",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            words, cwd=folder, env=settings(folder, server.url), stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120.0) as client:
                wait_started(client, process, folder / "log")
                signed_in = client.post("/api/v1/auths/signin", json={"email": "", "password": ""}).json()
                client.headers["Authorization"] = f"Bearer {signed_in['token']}"
                client.get("/api/models").raise_for_status()
                yield client
        finally:
            process.terminate()
            process.wait(60.0)


def settings(folder: Path, url: str) -> dict[str, str]:
    """Return the variables of a server that keeps its files in this folder and knows one connection."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    connection = {"OPENAI_API_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "none", "ENABLE_OLLAMA_API": "false"}
    alone = {"OFFLINE_MODE": "true", "HF_HUB_OFFLINE": "1", "RAG_EMBEDDING_ENGINE": "openai", "WEBUI_AUTH": "false"}
    return inherited | connection | alone | {"DATA_DIR": str(folder / "data"), "WEBUI_SECRET_KEY": "none"}


def wait_started(client: httpx.Client, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until its server answers."""
    began_s = time.monotonic()
    while True:
        assert process.poll() is None, log.read_text()[-4000:]
        assert time.monotonic() - began_s < START_TIMEOUT_S, log.read_text()[-4000:]
        try:
            if client.get("/health").status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            time.sleep(0.2)


def test_its_page_lists_the_served_model(page: httpx.Client) -> None:
    (model,) = page.get("/api/models").json()["data"]
    assert (model["id"], model["openai"]["owned_by"]) == ("pocket", "alignedserve")


def test_its_page_streams_an_answer(page: httpx.Client) -> None:
    parameters = {"temperature": 0, "max_tokens": 24, "custom_params": {"custom_of_a_user": "x"}}
    body = {"model": "pocket", "stream": True, "messages": CHAT, "params": parameters}
    events = page.post("/api/chat/completions", json=body).text.split("\n\n")
    pieces = [json.loads(event.removeprefix("data: ")) for event in events if event.startswith("data: {")]
    assert "data: [DONE]" in events
    texts = [piece["choices"][0]["delta"].get("content") or "" for piece in pieces]
    assert "".join(texts) == "c a t"
    assert len([text for text in texts if text]) > 1


@pytest.mark.parametrize("task", ["title", "follow_up", "tags"])
def test_its_own_tasks_are_answered(page: httpx.Client, task: str) -> None:
    """The prompts are its own, a thousand tokens that the pocket model was not trained for: any answer is one."""
    told = page.post(f"/api/v1/tasks/{task}/completions", json={"model": "pocket", "messages": ANSWERED})
    assert told.status_code == httpx.codes.OK, told.text
    answer = told.json()
    assert answer["choices"][0]["message"]["content"]
    assert answer["usage"]["prompt_tokens"] > 500


def test_its_requests_with_all_parameters(server: Serving) -> None:
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
