"""Codex over the Responses API: an agent whose model (a script) runs one command and reads what it printed.

Its prompt is longer than the context of the models that tests serve, hence the script.
"""

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.gateway.batch_server import listening
from tests.gateway.batch_support import batch_gateway
from tests.gateway.test_responses_tools import prompts_of, saying
from tests.gateway.tool_support import HERMES, model_with

pytestmark = [pytest.mark.clients, pytest.mark.timeout(300)]

_CALL = '<tool_call>\n{"name": "exec_command", "arguments": {"cmd": "echo from-the-tool"}}\n</tool_call>'
_PROVIDER = 'model_providers.local={{name="local",base_url="{url}/v1",wire_api="responses",env_key="LOCAL_KEY"}}'


async def test_codex_runs_a_tool(node_clients: Path, tmp_path: Path) -> None:
    model = replace(model_with(HERMES), max_context_len=200_000)
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    async with (
        batch_gateway(tmp_path / "state", saying(model, "I look.\n" + _CALL, "All done."), model=model) as served,
        listening(served.app) as url,
    ):
        codex = await asyncio.create_subprocess_exec(
            *(node_clients / "node_modules/.bin/codex", "exec", "--skip-git-repo-check", "-m", "tiny"),
            *("-c", "web_search=disabled", "-c", "model_provider=local", "-c", _PROVIDER.format(url=url), "say hello"),
            cwd=work,
            env={"PATH": os.environ["PATH"], "HOME": str(home), "CODEX_HOME": str(home), "LOCAL_KEY": "none"},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        printed, complaints = await asyncio.wait_for(codex.communicate(), 120.0)
        last_prompt = prompts_of(served, model)[-1]
    assert printed.decode().strip().endswith("All done."), complaints.decode()[-2000:]
    assert "<|tool|>" in last_prompt
    assert "from-the-tool" in last_prompt.rpartition("<|tool|>")[2]
