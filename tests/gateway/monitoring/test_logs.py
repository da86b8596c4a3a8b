"""Logs of a gateway: a line for every answer, bodies where they are asked for, one id in all lines of a request."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from alignedserve.config.sections import GatewayConfig
from alignedserve.core.errors import ConfigError
from alignedserve.gateway.logs import shown_body
from alignedserve.process.logs import JSON, TEXT, LogFileHandler, about_request, require_format
from tests.gateway.support import gateway, saying

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "my name is Ada"}], "user": "ada@example.org"}


async def lines_of(tmp_path: Path, *calls: Any, log_format: str = JSON, **config: Any) -> list[str]:
    """Return what a gateway logs about calls: (method, path, further arguments of the client)."""
    handler = LogFileHandler(tmp_path / "gateway-0.log", log_format)
    root = logging.getLogger()
    root.addHandler(handler)
    level = root.level
    root.setLevel(logging.INFO)
    for noisy in ("httpx", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    try:
        async with gateway(saying("the quick brown fox"), api_keys=("k-secret-1",), **config) as served:
            for method, path, arguments in calls:
                arguments = {"headers": {}} | arguments
                arguments["headers"] = {"authorization": "Bearer k-secret-1"} | arguments["headers"]
                await served.client.request(method, path, **arguments)
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
        handler.close()
    text = (tmp_path / "gateway-0.log").read_text()
    assert "k-secret-1" not in text
    return text.splitlines()


async def test_every_answer_has_a_line_with_what_it_was_and_came_to(tmp_path: Path) -> None:
    chat = ("POST", "/v1/chat/completions", {"json": CHAT, "headers": {"x-request-id": "mine-7"}})
    flex = ("POST", "/v1/chat/completions", {"json": {**CHAT, "stream": True, "service_tier": "flex"}})
    unknown: tuple[str, str, dict[str, Any]] = ("GET", "/v1/no%20such%0Apage=1", {})
    refused = ("GET", "/v1/models", {"headers": {"authorization": "Bearer k-other-secret"}})
    lines = await lines_of(tmp_path, chat, flex, unknown, refused, access_log=True)
    access = [line for line in map(json.loads, lines) if line["logger"] == "alignedserve.access"]
    assert [line["status"] for line in access] == [200, 200, 404, 401]
    first, second, third, fourth = access
    assert (first["client_id"], first["model"], first["class"]) == ("mine-7", "tiny", "real_time")
    assert first["completion_tokens"] == 5
    assert first["prompt_tokens"] > 0
    assert first["bytes"] > 100
    assert first["process"] == "gateway-0"
    assert second["class"] == "best_effort"
    assert len({line["request_id"] for line in access}) == 4
    assert "\n" not in third["path"]
    assert "key" not in fourth
    assert "k-other-secret" not in "".join(lines)


async def test_without_the_setting_answers_have_no_line(tmp_path: Path) -> None:
    assert await lines_of(tmp_path, ("POST", "/v1/chat/completions", {"json": CHAT})) == []


async def test_every_line_of_a_failed_request_has_its_id(tmp_path: Path) -> None:
    bad = ("POST", "/v1/chat/completions", {"json": {**CHAT, "n": 0}})
    lines = await lines_of(tmp_path, bad, access_log=True, log_format=TEXT)
    assert len(lines) == 2
    (request_id,) = {word for word in lines[1].split() if word.startswith("request_id=")}
    assert request_id.removeprefix("request_id=") in lines[0]


async def test_bodies_are_logged_where_asked_for_with_texts_by_their_lengths(tmp_path: Path) -> None:
    (line,) = await lines_of(
        tmp_path, ("POST", "/v1/chat/completions", {"json": CHAT}), request_log="redacted", log_format=JSON
    )
    body = json.loads(json.loads(line)["body"])
    assert body == {
        "model": "tiny",
        "messages": [{"role": "user", "content": "<14 characters>"}],
        "user": "<15 characters>",
    }


def shown(body: Any, keys: tuple[str, ...] = (), **config: Any) -> str:
    return shown_body(json.dumps(body).encode(), keys, GatewayConfig(**({"request_log": "full"} | config)))


def test_secrets_are_in_no_body_that_is_logged() -> None:
    body = {
        "messages": [{"role": "user", "content": "use sk-abcdefghijklmnop1234 or Bearer xyz, and key-of-mine"}],
        "metadata": {"api_key": "hunter2", "Password": "hunter3", "note": "kept"},
    }
    text = shown(body, ("key-of-mine",))
    for secret in ("sk-abc", "xyz", "key-of-mine", "hunter"):
        assert secret not in text
    assert "kept" in text
    assert "hunter" not in shown(body, request_log="redacted")


def test_tokens_of_a_prompt_are_text_that_people_have_written() -> None:
    body = {"prompt": [[15496, 995], [50]], "input": list(range(100)), "stop_token_ids": [], "n": 2}
    redacted = {"prompt": ["<2 numbers>", "<1 numbers>"], "input": "<100 numbers>", "stop_token_ids": [], "n": 2}
    assert json.loads(shown(body, request_log="redacted")) == redacted
    assert "15496" in shown(body)


def test_what_is_logged_of_a_body_has_bounds() -> None:
    assert len(shown({"input": "x" * 10_000}, max_request_log_bytes=100)) == 101
    assert shown({"input": "x" * 300_000}) == "<longer than 262144 bytes>"
    assert json.loads(shown({"input": [1] * 100}))["input"][-1] == "<36 more>"
    nested: Any = "deep secret"
    for _ in range(30):
        nested = {"a": nested}
    assert "deep secret" not in shown(nested)
    assert shown_body(b"{", (), GatewayConfig(request_log="full")) == "<not JSON>"


def test_a_log_of_json_has_an_object_per_line(tmp_path: Path) -> None:
    handler = LogFileHandler(tmp_path / "decode-0.log", JSON)
    log = logging.Logger("some.module")
    log.addHandler(handler)
    with about_request("ab12-0"):
        try:
            raise ValueError("two\nlines")
        except ValueError:
            log.exception("it failed: %s", "a\nb")
    log.info("idle")
    handler.close()
    first, second = map(json.loads, (tmp_path / "decode-0.log").read_text().splitlines())
    assert (first["process"], first["level"], first["request_id"]) == ("decode-0", "error", "ab12-0")
    assert first["message"] == "it failed: a\nb"
    assert "ValueError: two\nlines" in first["error"]
    assert "request_id" not in second


def test_unknown_formats_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="must be text or json, not 'yaml'"):
        require_format("yaml")
    with pytest.raises(ConfigError, match=r"request_log must be one of none, redacted, full"):
        GatewayConfig(request_log="all")
