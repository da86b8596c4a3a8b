"""The process that reads long bodies: what it reads is answered as what the gateway reads; and it may be lost."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import httpx
import psutil
import pytest
from typing_extensions import override

from alignedserve.core.request import Request
from alignedserve.gateway import services
from alignedserve.gateway.routes import request_bodies
from alignedserve.gateway.services import WorkProcess
from alignedserve.process.child_process import ChildProcess
from tests.gateway.support import EOS, Gateway, error_of, gateway
from tests.gateway.tool_support import HERMES, USER, called, function, model_with, result
from tests.harnesses.scripted_backend import Script
from tests.support.waiting import holds, wait_until

pytestmark = pytest.mark.slow

Find = Callable[[], psutil.Process | None]

MODULE = "alignedserve.gateway.long_bodies.process"
LONG_TEXT = "hello world " * 30_000
SYSTEM = {"role": "system", "content": "be brief"}
DEFERRED = {"name": "rare", "description": "d", "input_schema": {"type": "object"}, "defer_loading": True}
TOOL = {"name": "get_weather", "description": "d", "input_schema": {"type": "object", "properties": {}}}

CHATS: list[dict[str, Any]] = [
    {},
    {"messages": [SYSTEM, USER], "seed": 3, "stop": "x", "logprobs": True, "top_logprobs": 2, "n": 2},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi", "mood": "good"}]}], "mood": "bad"},
    {"messages": [USER, {"role": "assistant", "content": "well"}], "continue_final_message": True}
    | {"add_generation_prompt": False},
    {"messages": [USER, called(), result()], "tools": [function()], "tool_choice": "required"},
    {"messages": [{**USER, "content": "<|end|> is text"}], "chat_template_kwargs": {"mood": "fine"}},
    {"truncate_prompt_tokens": 5},
    {"max_completion_tokens": 5000},
    {"messages": [{**USER, "content": "hello " * 3000}]},
    {"messages": []},
    {"messages": [result()]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
    {"model": "unknown"},
    {"temperature": "warm"},
    {"stream": True, "stream_options": {"include_usage": True}},
]
COMPLETIONS: list[dict[str, Any]] = [
    {},
    {"prompt": ["hello", "world"], "echo": True, "logprobs": 1, "max_tokens": 2},
    {"prompt": [40, 41, 42], "echo": True},
    {"prompt": [[40], [41, 42]], "n": 2},
    {"prompt": [40, 4000]},
    {"prompt": "", "echo": True, "max_tokens": 0},
    {"prompt": "hello " * 3000},
    {"prompt": "hello " * 3000, "truncate_prompt_tokens": 4, "echo": True},
    {"prompt": ["hello"] * 2000},
    {"prompt": [[]]},
    {"prompt": 7},
]
MESSAGES: list[dict[str, Any]] = [
    {},
    {"system": "be brief", "messages": [USER, {"role": "assistant", "content": "well,"}], "temperature": 0.5},
    {"system": [{"type": "text", "text": "a", "mood": 1}], "tools": [TOOL], "tool_choice": {"type": "any"}},
    {"tools": [TOOL, DEFERRED]},
    {"max_tokens": 100_000},
    {"messages": [{**USER, "content": "hello " * 3000}]},
    {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
    {"stop_sequences": ["x"], "thinking": {"type": "enabled"}},
]
EMBEDDINGS: list[dict[str, Any]] = [
    {"input": "hello"},
    {"input": ["hello", "world"], "encoding_format": "base64"},
    {"input": [[40], [41, 42]]},
    {"input": "hello " * 3000, "truncate_prompt_tokens": 3},
    {"input": "hello " * 3000},
    {"input": ["hello", ""]},
    {"input": "hello", "dimensions": 2},
]
SCORES: list[dict[str, Any]] = [
    {"text_1": "hello", "text_2": "world"},
    {"text_1": "hello", "text_2": ["hello", "world", "a"]},
    {"text_1": ["hello", "a"], "text_2": ["world", "b"]},
    {"text_1": ["hello", "a"], "text_2": "world"},
    {"text_1": "hello", "text_2": ["hello", ""]},
    {"text_1": "hello", "text_2": ["hello " * 3000]},
    {"text_1": "hello", "text_2": ["hello " * 3000], "truncate_prompt_tokens": 7},
    {"text_1": "hello", "text_2": ["a"] * 2000},
    {"text_1": "hello", "text_2": []},
]
RANKINGS: list[dict[str, Any]] = [
    {"query": "hello", "documents": ["hello", "world", "a"]},
    {"query": "hello", "documents": ["hello", "world", "a"], "return_documents": False, "top_n": 2, "mood": 1},
    {"query": "hello", "documents": ["hello " * 3000], "truncate_prompt_tokens": -1},
    {"query": "hello", "documents": ["hello " * 3000]},
    {"query": "", "documents": ["hello"]},
    {"query": "hello", "documents": "hello", "top_n": 0},
]
RESPONSES: list[dict[str, Any]] = [
    {"input": "hello"},
    {"input": [{"role": "user", "content": "hello", "mood": 1}], "instructions": "be brief", "mood": 1},
    {"input": "hello " * 3000},
    {"input": "hello " * 3000, "truncation": "auto"},
    {"input": [{"type": "item_reference", "id": "msg_" + "0" * 32 + "i0"}]},
    {"input": [{"type": "function_call_output", "call_id": "c", "output": "o"}]},
    {"input": "hello", "previous_response_id": "resp_" + "0" * 32},
]
TOKENIZE: list[dict[str, Any]] = [
    {"prompt": "hello <|end|>", "add_special_tokens": False},
    {"prompt": "hello " * 3000},
    {"messages": [SYSTEM, USER], "tools": [function()]},
    {"prompt": "hello", "messages": [USER]},
    {"messages": [USER], "chat_template_kwargs": {"messages": []}},
]
DETOKENIZE: list[dict[str, Any]] = [{"tokens": [40, 1, 41]}, {"tokens": [40, 4000]}, {"tokens": []}, {"tokens": "x"}]
CASES: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "/v1/chat/completions": ({"messages": [USER], "max_tokens": 4}, CHATS),
    "/v1/completions": ({"prompt": "hello", "max_tokens": 4}, COMPLETIONS),
    "/v1/messages": ({"messages": [USER], "max_tokens": 4}, MESSAGES),
    "/v1/messages/count_tokens": ({"messages": [USER]}, [one for one in MESSAGES if "max_tokens" not in one]),
    "/v1/embeddings": ({}, EMBEDDINGS),
    "/v1/score": ({}, SCORES),
    "/v1/rerank": ({}, RANKINGS),
    "/v1/responses": ({"max_output_tokens": 4}, RESPONSES),
    "/v1/responses/input_tokens": ({}, RESPONSES),
    "/tokenize": ({}, TOKENIZE),
    "/detokenize": ({}, DETOKENIZE),
}


@pytest.fixture
def _all_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every body counts as a long one."""
    monkeypatch.setattr(request_bodies, "LONG_LEN", -1)


@pytest.fixture(scope="module")
def lasting() -> Iterator[WorkProcess]:
    """A process that outlives gateways."""

    class Lasting(WorkProcess):
        @override
        def close(self) -> None:
            """See WorkProcess; a gateway's end is not this one's."""

    process = Lasting(MODULE)
    yield process
    WorkProcess.close(process)


def _echo(request: Request) -> Script:
    """Answer with the prompt's last tokens: another prompt has another answer."""
    return Script((*request.prompt_token_ids[-3:], EOS))


def _seen(response: httpx.Response) -> tuple[int, str | None, Any]:
    """Return what a client sees of a response, but for what is new each time."""
    text = response.text
    if not text.startswith("{"):
        return response.status_code, None, [line[:6] for line in text.splitlines()]
    body = json.loads(text)
    for name in ("id", "request_id", "created", "created_at", "completed_at", "output"):
        if isinstance(body.get(name), list):
            body[name] = [{**item, "id": ""} for item in body[name]]
        else:
            body.pop(name, None)
    for choice in body.get("choices", ()):
        for call in choice.get("message", {}).get("tool_calls") or ():
            call.pop("id")
    return response.status_code, response.headers.get("x-alignedserve-ignored-fields"), body


async def _answers(path: str, bodies: list[dict[str, Any]], **config: Any) -> list[tuple[Any, Any]]:
    model = model_with(HERMES)
    async with gateway(_echo, model=model, **config) as served:
        seen = []
        for body in bodies:
            answer = await served.client.post(path, json={"model": "tiny"} | body)
            prompts = [request.prompt_token_ids for request in served.backend.submitted]
            served.backend.submitted.clear()
            seen.append((_seen(answer), prompts))
    return seen


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("path", CASES)
async def test_bodies_of_every_kind_are_answered_alike(
    path: str, strict: bool, lasting: WorkProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, cases = CASES[path]
    bodies: list[dict[str, Any]] = [base | case for case in cases]
    here = await _answers(path, bodies, strict=strict)
    monkeypatch.setattr(request_bodies, "LONG_LEN", -1)
    monkeypatch.setattr(services, "WorkProcess", lambda _: lasting)
    elsewhere = await _answers(path, bodies, strict=strict)
    for body, one, other in zip(bodies, here, elsewhere, strict=True):
        assert one == other, body
    assert {seen[0] for seen, _ in here} >= {200, 400}


async def _tokenize(served: Gateway, text: str) -> httpx.Response:
    return await served.client.post("/tokenize", json={"model": "tiny", "prompt": text})


@pytest.fixture
def find_process() -> Find:
    """Return what finds the process that a test's gateway started."""

    def all_processes() -> set[psutil.Process]:
        return {child for child in psutil.Process().children() if MODULE in child.cmdline()}

    others = all_processes()
    return lambda: next(iter(all_processes() - others), None)


def found(find: Find) -> psutil.Process:
    process = find()
    assert process is not None
    return process


async def test_only_long_bodies_start_the_process_and_the_gateway_ends_it(find_process: Find) -> None:
    async with gateway() as served:
        assert (await _tokenize(served, "hello")).status_code == 200
        assert find_process() is None
        assert (await _tokenize(served, LONG_TEXT)).json()["count"] > 30_000
        process = found(find_process)
    assert not process.is_running()


async def test_a_lost_process_is_started_anew(find_process: Find, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, answer_of = threading.Event(), ChildProcess.answer

    def noting(child: ChildProcess, *frames: bytes) -> bytes | None:
        asked.set()
        return answer_of(child, *frames)

    async with gateway() as served:
        assert (await _tokenize(served, LONG_TEXT)).status_code == 200
        first = found(find_process)
        first.suspend()
        monkeypatch.setattr(ChildProcess, "answer", noting)
        reading = asyncio.create_task(_tokenize(served, LONG_TEXT))
        await holds(asked.is_set)  # from then on nobody looks whether it runs
        first.kill()
        answer = await reading
        assert error_of(answer, 503)["code"] == "overloaded"
        assert answer.headers["retry-after"] == "5"
        assert (await _tokenize(served, LONG_TEXT)).status_code == 200
        idle = found(find_process)
        idle.kill()
        can_be_waited_for = os.WEXITED | os.WNOHANG | os.WNOWAIT
        await holds(lambda: os.waitid(os.P_PID, idle.pid, can_be_waited_for) is not None)
        assert (await _tokenize(served, LONG_TEXT)).status_code == 200


async def test_a_process_that_hangs_is_ended(
    served: Gateway, find_process: Find, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await _tokenize(served, LONG_TEXT)).status_code == 200
    found(find_process).suspend()
    with monkeypatch.context() as patch:  # a new one imports much before it answers
        patch.setattr(served.services.work_process._process, "_max_wall_s", 0.5)
        answer, health = await asyncio.gather(_tokenize(served, LONG_TEXT), served.client.get("/health"))
    assert health.status_code == 200
    error_of(answer, 503)
    assert (await _tokenize(served, LONG_TEXT)).status_code == 200


@pytest.mark.usefixtures("_all_elsewhere")
async def test_an_error_of_ours_is_answered_as_one_of_the_gateway(served: Gateway) -> None:
    """The gateway reads what the process cannot."""
    gone = served.services.models.all[0].card.folder / "tokenizer.json"
    kept = gone.read_bytes()
    gone.unlink()
    try:
        assert (await served.chat()).status_code == 200
    finally:
        gone.write_bytes(kept)


def test_the_process_ends_with_its_parent() -> None:
    script = f"""
import sys
from alignedserve.process.child_process import ChildProcess
child = ChildProcess({MODULE!r}, 9)
child.start()
print(child._process.pid, flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        os.kill(parent.pid, signal.SIGKILL)

    def has_ended() -> bool:
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(child).status() == psutil.STATUS_ZOMBIE
        return True

    wait_until(has_ended, 20, lambda: child, poll_s=0.05)
