"""The batch routes over HTTP: from upload to the last line, and all that a client may ask on the way."""

import asyncio
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from alignedserve.api.errors import GenerationFailed, Overloaded, Unavailable
from alignedserve.batches import run
from alignedserve.config.sections import GatewayConfig
from alignedserve.core.request import FinishReason, Request, RequestClass
from tests.gateway.batches.batch_support import batch_gateway, eventually, slowly
from tests.gateway.support import EOS, error_of, gateway, saying, tokens_of
from tests.harnesses.scripted_backend import Script
from tests.support.batch_samples import chat_line, chat_lines


def custom_ids(lines: list[str]) -> list[str]:
    return sorted(json.loads(line)["custom_id"] for line in lines)


async def test_a_batch_from_upload_to_results(tmp_path: Path) -> None:
    async with batch_gateway(tmp_path) as served:
        created = await served.submit(metadata={"team": "a"})
        assert created["status"] == "validating"
        assert created["alignedserve"]["quote"]["verdict"] == "fits"
        done = await served.wait_for(created["id"])
        assert done["status"] == "completed"
        assert done["request_counts"] == {"total": 3, "completed": 3, "failed": 0}
        assert done["metadata"] == {"team": "a"}
        assert done["usage"]["total_tokens"] == done["usage"]["input_tokens"] + done["usage"]["output_tokens"] > 0
        assert "error_file_id" not in done
        lines = await served.results(done["output_file_id"])
        file = (await served.client.get(f"/v1/files/{done['output_file_id']}")).json()
    assert custom_ids(lines) == ["line-0", "line-1", "line-2"]
    first = json.loads(lines[0])
    assert first["response"]["status_code"] == 200
    assert first["response"]["body"]["choices"][0]["message"]["content"] == "hello world"
    assert "alignedserve" not in first["response"]["body"]
    assert first["error"] is None
    assert file["bytes"] == sum(len(line) + 1 for line in lines)
    assert (file["purpose"], "expires_at" in file) == ("batch_output", True)


async def test_lines_are_best_effort_requests_with_a_deadline(tmp_path: Path) -> None:
    async with batch_gateway(tmp_path) as served:
        await served.wait_for((await served.submit(window="2h"))["id"])
        requests = served.backend.submitted
    assert {request.request_class for request in requests} == {RequestClass.BEST_EFFORT}
    assert all(0 < (request.slo.deadline_s or 0) <= 7200 for request in requests)


async def test_bad_lines_do_not_stop_the_others(tmp_path: Path) -> None:
    content = b"\n".join(
        [
            chat_line("good"),
            chat_line("field", n=0),
            chat_line("long", content="fox " * 400),
            chat_line("stream", stream=True),
            chat_line("tier", service_tier="priority"),
            chat_line("deep", messages=json.loads("[" * 40 + "]" * 40)),
            chat_line("schema", structured_outputs={"json": {"not": {}}}),
            chat_line("also good", structured_outputs={"json": {"type": "object"}}),
        ]
    )
    async with batch_gateway(tmp_path) as served:
        done = await served.wait_for((await served.submit(content))["id"])
        assert done["status"] == "completed"
        assert done["request_counts"] == {"total": 8, "completed": 2, "failed": 6}
        assert custom_ids(await served.results(done["output_file_id"])) == ["also good", "good"]
        errors = {one["custom_id"]: one for one in map(json.loads, await served.results(done["error_file_id"]))}
    codes = {name: error["response"]["body"]["error"]["code"] for name, error in errors.items()}
    assert codes == {
        "field": "invalid_value",
        "long": "context_length_exceeded",
        "stream": "unsupported_parameter",
        "tier": "unsupported_parameter",
        "deep": "invalid_json",
        "schema": "invalid_json_schema",
    }
    assert {error["response"]["status_code"] for error in errors.values()} == {400}


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/v1/messages", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 9}),
        ("/v1/embeddings", {"input": "hello"}),
    ],
)
async def test_lines_of_every_api_name_their_ignored_fields(
    tmp_path: Path, endpoint: str, body: dict[str, Any]
) -> None:
    line = {"custom_id": "a", "method": "POST", "url": endpoint, "body": {"model": "tiny", "mood": "good", **body}}
    async with batch_gateway(tmp_path) as served:
        made = await served.submit(json.dumps(line).encode(), endpoint=endpoint)
        done = await served.wait_for(made["id"])
        (result,) = [json.loads(line) for line in await served.results(done["output_file_id"])]
    assert result["response"]["body"]["alignedserve"] == {"ignored_fields": ["mood"]}


@pytest.mark.parametrize("strict", [False, True])
async def test_lines_name_their_ignored_fields(tmp_path: Path, strict: bool) -> None:
    content = chat_line("a", nonsense=1, mood="good") + b"\n" + chat_line("b")
    async with batch_gateway(tmp_path, gateway_config=GatewayConfig(strict=strict)) as served:
        done = await served.wait_for((await served.submit(content))["id"])
        results = [json.loads(line) for line in await served.results(done["output_file_id"])]
    bodies = {one["custom_id"]: one["response"]["body"] for one in results}
    assert done["request_counts"]["failed"] == strict
    assert ("a" in bodies) != strict
    assert strict or bodies["a"]["alignedserve"] == {"ignored_fields": ["nonsense", "mood"]}
    assert "alignedserve" not in bodies["b"]


@pytest.mark.parametrize(
    ("content", "codes"),
    [
        (b"{\n" + chat_line(), [("invalid_json_line", 1)]),
        (chat_line("a") + b"\n" + chat_line("a"), [("duplicate_custom_id", 2)]),
        (b"\n \r\n", [("empty_file", None)]),
        (chat_lines(6), [("too_many_requests", 6)]),
        (chat_line("x" * 400, content="y" * 3000), [("line_too_long", 1)]),
    ],
)
async def test_a_file_that_fails_validation(tmp_path: Path, content: bytes, codes: list[tuple[str, Any]]) -> None:
    async with batch_gateway(tmp_path, max_lines=5, max_line_bytes=2000) as served:
        done = await served.wait_for((await served.submit(content))["id"])
        assert done["status"] == "failed"
        assert [(one["code"], one["line"]) for one in done["errors"]["data"]] == codes
        assert done["request_counts"] == {"total": 0, "completed": 0, "failed": 0}
        assert not served.backend.submitted


async def test_partial_results_while_it_runs(tmp_path: Path) -> None:
    async with batch_gateway(tmp_path, slowly, max_in_flight=4) as served:
        batch = await served.submit(chat_lines(60))
        seen = await served.wait_for_lines(batch["id"], 1)
        assert seen["status"] == "in_progress"
        early = await served.results(seen["output_file_id"])
        assert 0 < len(early) < 60
        file = (await served.client.get(f"/v1/files/{seen['output_file_id']}")).json()
        assert "expires_at" not in file
        deleted = await served.client.delete(f"/v1/files/{seen['output_file_id']}")
        assert error_of(deleted, 409)["code"] == "file_in_use"
        done = await served.wait_for(batch["id"])
        lines = await served.results(done["output_file_id"])
    assert lines[: len(early)] == early
    assert len(set(custom_ids(lines))) == len(lines) == 60


async def test_cancel_keeps_what_is_done(tmp_path: Path) -> None:
    async with batch_gateway(tmp_path, slowly, max_in_flight=2) as served:
        batch = await served.submit(chat_lines(100))
        await served.wait_for_lines(batch["id"], 3)
        answer = (await served.client.post(f"/v1/batches/{batch['id']}/cancel")).json()
        assert (answer["status"], answer["alignedserve"]["quote"]) == ("cancelling", None)  # no line starts any more
        done = await served.wait_for(batch["id"])
        assert done["status"] == "cancelled"
        kept = await served.results(done["output_file_id"])
        errors = [json.loads(line) for line in await served.results(done["error_file_id"])]
        again = await served.client.post(f"/v1/batches/{batch['id']}/cancel")
        assert error_of(again, 409)["code"] == "batch_is_over"
    assert len(kept) >= 3
    assert len(kept) + len(errors) == 100 == len({*custom_ids(kept), *(one["custom_id"] for one in errors)})
    assert {one["error"]["code"] for one in errors} == {"batch_cancelled"}
    assert {one["response"] for one in errors} == {None}
    assert done["request_counts"] == {"total": 100, "completed": len(kept), "failed": len(errors)}
    assert done["alignedserve"]["lines_cancelled"] == len(errors)


async def test_a_window_that_ends_keeps_what_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with batch_gateway(tmp_path, slowly, max_in_flight=1) as served:
        batch = await served.submit(chat_lines(200), window="24h")
        await served.wait_for_lines(batch["id"], 1)
        a_day_later = SimpleNamespace(time=lambda: time.time() + 86_400.0, monotonic=time.monotonic)
        monkeypatch.setattr(run, "time", a_day_later)
        done = await served.wait_for(batch["id"])
        assert done["status"] == "expired"
        kept = await served.results(done["output_file_id"])
        errors = [json.loads(line) for line in await served.results(done["error_file_id"])]
    assert {one["error"]["code"] for one in errors} == {"batch_expired"}
    assert kept
    assert len(kept) + len(errors) == 200 == len({*custom_ids(kept), *(one["custom_id"] for one in errors)})


class Failing:
    """Fails every line this often before it answers."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = failures
        self.calls: dict[tuple[int, ...], int] = {}

    def __call__(self, request: Request) -> Script:
        count = self.calls.get(request.prompt_token_ids, 0)
        self.calls[request.prompt_token_ids] = count + 1
        failure = self.failures[count] if count < len(self.failures) else None
        return Script((*tokens_of("hello"), EOS), failure=failure)  # type: ignore[arg-type]


async def test_transient_failures_are_tried_again(tmp_path: Path) -> None:
    script = Failing(
        Overloaded("full", retry_after_s=0.05), Unavailable("lost"), Overloaded("full", retry_after_s=0.05)
    )
    async with batch_gateway(tmp_path, script) as served:
        done = await served.wait_for((await served.submit(chat_line("only")))["id"])
        lines = await served.results(done["output_file_id"])
    assert (done["status"], done["request_counts"]["completed"]) == ("completed", 1)
    assert json.loads(lines[0])["response"]["body"]["choices"][0]["message"]["content"] == "hello"


async def test_what_breaks_again_and_again_is_recorded(tmp_path: Path) -> None:
    script = Failing(*[GenerationFailed("The request failed inside the cluster.")] * 9)
    async with batch_gateway(tmp_path, script, max_attempts=2) as served:
        done = await served.wait_for((await served.submit(chat_line("only")))["id"])
        error = json.loads((await served.results(done["error_file_id"]))[0])
    assert (done["status"], done["request_counts"]["failed"]) == ("completed", 1)
    assert (error["custom_id"], error["response"], error["error"]["code"]) == ("only", None, "request_failed")


async def test_tries_count_across_drivers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # No driver begins a second try, however late it is stopped: one that is cut short has not failed, and counts for
    # nothing, so the cluster would see more of them than are counted.
    monkeypatch.setattr("alignedserve.batches.line_tracker._FIRST_PAUSE_S", 60.0)
    script = Failing(*[GenerationFailed("The request failed inside the cluster.")] * 9)
    async with batch_gateway(tmp_path, script, max_attempts=3) as served:
        batch = await served.submit(chat_line("only"))
        for num_attempts in (1, 2):

            async def are_written(expected: int = num_attempts) -> bool:
                log = tmp_path / "results" / f"{batch['id']}.log"
                return log.exists() and log.read_bytes().count(b" 0 b 0 0 ") >= expected

            await eventually(are_written)
            await served.stop_driver()
            served.start_driver()
        done = await served.wait_for(batch["id"])
    assert (done["status"], done["request_counts"]["failed"], [*script.calls.values()]) == ("completed", 1, [3])


async def test_a_driver_that_dies_is_followed_by_another(tmp_path: Path) -> None:
    async with batch_gateway(tmp_path, slowly, max_in_flight=4) as served:
        batch = await served.submit(chat_lines(60))
        for _ in range(4):
            await asyncio.sleep(0.15)
            await served.stop_driver()
            served.start_driver()
        done = await served.wait_for(batch["id"])
        lines = await served.results(done["output_file_id"])
    assert len(lines) == 60 == len(set(custom_ids(lines)))


async def test_running_work_goes_on_while_the_store_is_away(tmp_path: Path) -> None:
    async with batch_gateway(tmp_path, slowly, max_in_flight=4) as served:
        uploaded = (await served.upload(chat_lines(3))).json()
        batch = await served.submit(chat_lines(40))
        await served.wait_for(batch["id"], "in_progress")
        served.records.is_down = True
        refused = await served.create(uploaded["id"])
        assert error_of(refused, 503)["code"] == "storage_unavailable"
        assert refused.headers["retry-after"]
        log = tmp_path / "results" / f"{batch['id']}.log"

        async def is_whole() -> bool:
            return log.exists() and len(log.read_bytes().splitlines()) == 41

        await eventually(is_whole)
        served.records.is_down = False
        done = await served.wait_for(batch["id"])
    assert done["request_counts"] == {"total": 40, "completed": 40, "failed": 0}


async def test_the_same_idempotency_key_makes_one_batch(tmp_path: Path) -> None:
    async with batch_gateway(tmp_path, is_driven=False) as served:
        file_id = (await served.upload(chat_lines(2))).json()["id"]
        headers = {"idempotency-key": "once"}
        answers = await asyncio.gather(*(served.create(file_id, headers=headers) for _ in range(5)))
        assert len({answer.json()["id"] for answer in answers}) == 1
        sent_again = (await served.upload(chat_lines(2))).json()["id"]
        assert (await served.create(sent_again, headers=headers)).json()["id"] == answers[0].json()["id"]
        changed = (await served.upload(chat_lines(3))).json()["id"]
        assert error_of(await served.create(changed, headers=headers), 409)["code"] == "idempotency_key_reused"
        other = await served.create(file_id, headers=headers, window="2h")
        assert error_of(other, 409)["code"] == "idempotency_key_reused"
        listed = (await served.client.get("/v1/batches")).json()
    assert len(listed["data"]) == 1


async def test_lists_are_paged(tmp_path: Path) -> None:
    async with batch_gateway(tmp_path, is_driven=False) as served:
        made = [(await served.submit())["id"] for _ in range(5)]
        first = (await served.client.get("/v1/batches?limit=2")).json()
        second = (await served.client.get(f"/v1/batches?limit=4&after={first['last_id']}")).json()
        for path in ("/v1/batches", "/v1/files"):
            for after in ("batch_nothing", "x" * 1000):
                bad = await served.client.get(f"{path}?after={after}")
                assert error_of(bad, 400)["param"] == "after"
        assert error_of(await served.client.get("/v1/batches?limit=101"), 400)["param"] == "limit"
    assert [one["id"] for one in first["data"] + second["data"]] == made[::-1]
    assert (first["has_more"], second["has_more"]) == (True, False)


BAD_FIELDS: list[tuple[dict[str, Any], int, str]] = [
    ({"endpoint": "/v1/moderations"}, 400, "endpoint"),
    ({"window": "59s"}, 400, "completion_window"),
    ({"window": "8d"}, 400, "completion_window"),
    ({"window": "24 h"}, 400, "completion_window"),
    ({"window": ""}, 400, "completion_window"),
    ({"metadata": {"a" * 65: "b"}}, 400, "metadata"),
    ({"metadata": {str(n): "b" for n in range(17)}}, 400, "metadata"),
    ({"metadata": {"a": 1}}, 400, "metadata"),
    ({"output_expires_after": {"anchor": "created_at", "seconds": 10}}, 400, "output_expires_after.seconds"),
    ({"nonsense": 1}, 400, "nonsense"),
    ({"headers": {"idempotency-key": "x" * 256}}, 400, "Idempotency-Key"),
]


@pytest.mark.parametrize(("fields", "status", "param"), BAD_FIELDS)
async def test_bad_fields(tmp_path: Path, fields: dict[str, Any], status: int, param: str) -> None:
    async with batch_gateway(tmp_path, is_driven=False) as served:
        file_id = (await served.upload(chat_lines(1))).json()["id"]
        error = error_of(await served.create(file_id, **fields), status)
    assert error["param"].startswith(param)


@pytest.mark.parametrize("window", ["60s", "1m", "90m", "24h", "7d"])
async def test_windows(tmp_path: Path, window: str) -> None:
    async with batch_gateway(tmp_path, is_driven=False) as served:
        batch = await served.submit(window=window)
    assert batch["completion_window"] == window


async def test_another_keys_batches_and_files_are_not_there(tmp_path: Path) -> None:
    mine, yours = {"authorization": "Bearer mine"}, {"authorization": "Bearer yours"}
    async with batch_gateway(tmp_path, api_keys=("mine", "yours"), is_driven=False) as served:
        file_id = (await served.upload(chat_lines(1), headers=mine)).json()["id"]
        batch_id = (await served.create(file_id, headers=mine)).json()["id"]
        for method, path in (
            ("GET", f"/v1/files/{file_id}"),
            ("GET", f"/v1/files/{file_id}/content"),
            ("DELETE", f"/v1/files/{file_id}"),
            ("GET", f"/v1/batches/{batch_id}"),
            ("POST", f"/v1/batches/{batch_id}/cancel"),
        ):
            assert error_of(await served.client.request(method, path, headers=yours), 404)["code"] == "not_found"
            assert error_of(await served.client.request(method, path), 401)["code"] == "invalid_api_key"
        assert error_of(await served.create(file_id, headers=yours), 404)["param"] == "input_file_id"
        assert (await served.client.get("/v1/files", headers=yours)).json()["data"] == []
        assert (await served.client.get("/v1/batches", headers=yours)).json()["data"] == []
        assert len((await served.client.get("/v1/files", headers=mine)).json()["data"]) == 1


async def test_completions(tmp_path: Path) -> None:
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 2}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    async with batch_gateway(tmp_path, saying("world and more")) as served:
        done = await served.wait_for((await served.submit(json.dumps(line).encode(), endpoint="/v1/completions"))["id"])
        answer = json.loads((await served.results(done["output_file_id"]))[0])["response"]["body"]
    assert (answer["object"], answer["choices"][0]["finish_reason"]) == ("text_completion", FinishReason.LENGTH.value)


async def test_embeddings_are_best_effort(tmp_path: Path) -> None:
    bodies = [{"model": "tiny", "input": ["hello", "the dog"]}, {"model": "tiny", "input": ""}]
    lines = [
        json.dumps({"custom_id": f"a{place}", "method": "POST", "url": "/v1/embeddings", "body": body})
        for place, body in enumerate(bodies)
    ]
    async with batch_gateway(tmp_path) as served:
        batch = await served.submit("\n".join(lines).encode(), endpoint="/v1/embeddings")
        done = await served.wait_for(batch["id"])
        answer = json.loads((await served.results(done["output_file_id"]))[0])["response"]["body"]
        refused = json.loads((await served.results(done["error_file_id"]))[0])["response"]["body"]
        assert {request.request_class for request in served.backend.submitted} == {RequestClass.BEST_EFFORT}
    assert [entry["index"] for entry in answer["data"]] == [0, 1]
    assert refused["error"]["param"] == "input"


async def test_without_batches_the_routes_say_so(tmp_path: Path) -> None:
    async with gateway() as without:
        assert error_of(await without.client.get("/v1/batches"), 404)["code"] == "batches_disabled"


async def test_metrics(tmp_path: Path) -> None:
    async with batch_gateway(tmp_path) as served:
        await served.wait_for((await served.submit(chat_line("a") + b"\n" + chat_line("b", n=0)))["id"])

        async def are_told() -> bool:
            text = (await served.client.get("/metrics")).text
            # Lines that ended one after the other may be told so.
            states = [f'alignedserve_batch_lines_total{{state="{state}"}} 1.0' for state in ("failed", "completed")]
            return all(state in text for state in states)

        await eventually(are_told)
        assert 'alignedserve_batch_tokens_total{kind="output"}' in (await served.client.get("/metrics")).text
        served.records.is_down = True
        away = await served.client.get("/metrics")
    assert (away.status_code, "alignedserve_batch_lines_total" in away.text) == (200, False)
