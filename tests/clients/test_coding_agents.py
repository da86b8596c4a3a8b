"""Coding agents of the field, with all their tools, over scripted answers: their prompts are long for small models.

Each is told by the script to run a command, and then to say what it has seen.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from alignedserve.api.models.model_services import ModelCard
from alignedserve.core.request import Request
from tests.clients.running import run_client
from tests.gateway.batches.batch_server import listening
from tests.gateway.support import EOS, gateway
from tests.gateway.tool_support import HERMES, model_with
from tests.harnesses.scripted_backend import Script

pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]

PROVIDER = 'model_providers.local={name="local",base_url="%s/v1",wire_api="responses",env_key="OPENAI_API_KEY"}'
RESULT = "<|tool|>"  # as the template marks the result of a call


def script_of(model: ModelCard, call: str) -> Callable[[Request], Script]:
    """Return a script that makes the call once, and then says that it was made."""
    tokenizer = model.load_tokenizer()

    def answer(request: Request) -> Script:
        prompt = tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
        text = "the command has run" if RESULT in prompt else f"<tool_call>\n{call}\n</tool_call>"
        return Script((*tokenizer.encode(text, add_special_tokens=False), EOS))

    return answer


@asynccontextmanager
async def agent_server(call: str) -> AsyncIterator[str]:
    """Serve a model that makes this call, with as long a context as agents need."""
    model = replace(model_with(HERMES), max_context_len=1_000_000)
    async with gateway(script_of(model, call), model=model) as served, listening(served.app) as url:
        yield url


async def test_codex(node_clients: Path, tmp_path: Path) -> None:
    command = node_clients / "node_modules/.bin/codex"
    call = json.dumps({"name": "exec_command", "arguments": {"cmd": f"touch {tmp_path}/made"}})
    words = ["exec", "--skip-git-repo-check", "--json", "--dangerously-bypass-approvals-and-sandbox", "-m", "tiny"]
    words += ["-c", "web_search=disabled", "-c", "model_provider=local"]
    home = tmp_path / "home"
    home.mkdir()
    async with agent_server(call) as url:
        words += ["-c", PROVIDER % url, "Make the file."]
        told = await asyncio.to_thread(run_client, command, *words, url=url, cwd=tmp_path, CODEX_HOME=str(home))
    events = [json.loads(line) for line in told.splitlines() if line.startswith("{")]
    texts = [event["item"]["text"] for event in events if event.get("item", {}).get("type") == "agent_message"]
    assert texts == ["the command has run"]
    assert (tmp_path / "made").exists()


async def test_claude_code(node_clients: Path, tmp_path: Path) -> None:
    command = node_clients / "node_modules/.bin/claude"
    arguments = {"command": f"touch {tmp_path}/made", "description": "Make the file"}
    words = ["-p", "Make the file.", "--model", "tiny", "--output-format", "json", "--allowedTools", "Bash(touch:*)"]
    settings = {"CLAUDE_CONFIG_DIR": str(tmp_path / "home"), "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
    async with agent_server(json.dumps({"name": "Bash", "arguments": arguments})) as url:
        told = await asyncio.to_thread(
            run_client, command, *words, url=url, cwd=tmp_path, HOME=str(tmp_path), **settings
        )
    answer = json.loads(told.splitlines()[-1])
    assert (answer["is_error"], answer["result"]) == (False, "the command has run")
    assert (tmp_path / "made").exists()
