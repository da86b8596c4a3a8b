"""Batches where several models are served: lines that name two, one that nobody serves, a model that is removed."""

import asyncio
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from msgspec.structs import replace

from alignedserve.api.errors import Overloaded, Unavailable
from alignedserve.api.models.model_services import ModelCard
from alignedserve.batches.interfaces import ModelState
from alignedserve.core.request import Request
from tests.gateway.batches.batch_support import BatchGateway, batch_gateway
from tests.gateway.support import EOS, saying, tokenizer, tokenizer_folder
from tests.harnesses.scripted_backend import IDLE_STATUS, Script, ScriptedBackend
from tests.support.batch_samples import chat_line
from tests.support.waiting import holds


def add_model(served: BatchGateway, name: str, script: Any = None) -> ScriptedBackend:
    backend = ScriptedBackend(script or saying("good day"))
    served.services.add_model(ModelCard(name, tokenizer_folder(), 256, (EOS,)), backend, tokenizer())
    return backend


def lines_of(*models: str) -> bytes:
    return b"".join(chat_line(f"line-{place}", model=model) + b"\n" for place, model in enumerate(models))


async def test_every_line_runs_with_the_model_that_it_names(driven: BatchGateway) -> None:
    other = add_model(driven, "other")
    batch = await driven.wait_for((await driven.submit(lines_of("tiny", "other", "tiny", "other")))["id"])
    assert batch["status"] == "completed"
    assert "model" not in batch  # they name several
    results = [json.loads(line) for line in await driven.results(batch["output_file_id"])]
    bodies = {one["custom_id"]: one["response"]["body"] for one in results}
    said = {name: (body["model"], body["choices"][0]["message"]["content"]) for name, body in bodies.items()}
    assert said == {
        "line-0": ("tiny", "hello world"),
        "line-1": ("other", "good day"),
        "line-2": ("tiny", "hello world"),
        "line-3": ("other", "good day"),
    }
    assert len(other.submitted) == len(driven.backend.submitted) == 2
    one_model = await driven.wait_for((await driven.submit(lines_of("other", "other")))["id"])
    assert one_model["model"] == "other"


async def test_a_line_of_a_model_that_nobody_serves_fails_the_file(driven: BatchGateway) -> None:
    add_model(driven, "other")
    batch = await driven.wait_for((await driven.submit(lines_of("tiny", "another", "other")))["id"])
    assert batch["status"] == "failed"
    assert [(one["code"], one["line"]) for one in batch["errors"]["data"]] == [("model_not_found", 2)]


async def test_lines_of_a_model_that_is_removed_fail_with_its_error_and_those_that_run_end(tmp_path: Path) -> None:
    slow = Script((5,) * 40, token_delay_s=0.02)
    async with batch_gateway(tmp_path, max_in_flight=2) as served:
        other = add_model(served, "other", lambda _: slow)
        submitted = await served.submit(lines_of(*["other"] * 4, "tiny"))
        await holds(lambda: len(other.submitted) == 2)
        model = served.services.find_model("other")
        assert model.uses.num_open == 2
        served.services.models.replace_all([one for one in served.services.models.all if one.card.name == "tiny"])
        batch = await served.wait_for(submitted["id"])
        assert batch["status"] == "completed"
        assert batch["request_counts"] == {"total": 5, "completed": 3, "failed": 2}
        errors = [json.loads(line) for line in await served.results(batch["error_file_id"])]
        assert {one["response"]["status_code"] for one in errors} == {404}
        assert {one["response"]["body"]["error"]["code"] for one in errors} == {"model_not_found"}
        assert model.uses.num_open == 0


async def test_lines_of_a_model_that_takes_none_hold_up_no_others(tmp_path: Path) -> None:
    is_full = True

    def script(request: Request) -> Script:
        failure = Overloaded("full", retry_after_s=0.05) if is_full else None
        return saying("good day")(request) if failure is None else Script((), failure=failure)

    async with batch_gateway(tmp_path, max_in_flight=2) as served:
        add_model(served, "other", script)
        submitted = await served.submit(lines_of(*["other"] * 10, *["tiny"] * 10))
        await served.wait_for_lines(submitted["id"], 10)
        is_full = False
        batch = await served.wait_for(submitted["id"])
        assert batch["request_counts"] == {"total": 20, "completed": 20, "failed": 0}


async def test_lines_of_a_model_whose_workers_are_gone_hold_up_no_others(tmp_path: Path) -> None:
    async with batch_gateway(tmp_path, max_in_flight=None) as served:
        other = add_model(served, "other")
        other.set_status(replace(IDLE_STATUS, num_places=0))
        served.backend.set_status(replace(IDLE_STATUS, num_places=2))
        await _told_of_places(served)
        submitted = await served.submit(lines_of(*["other", "tiny"] * 10))
        await served.wait_for_lines(submitted["id"], 10)
        assert not other.submitted
        other.set_status(replace(IDLE_STATUS, num_places=2))
        batch = await served.wait_for(submitted["id"])
        assert batch["request_counts"] == {"total": 20, "completed": 20, "failed": 0}


async def test_lines_that_wait_in_a_model_whose_workers_are_gone_take_no_places_of_others(tmp_path: Path) -> None:
    async with batch_gateway(tmp_path, max_in_flight=None) as served:
        other = add_model(served, "other", saying("good day", held_until=asyncio.Event()))
        for backend in (other, served.backend):
            backend.set_status(replace(IDLE_STATUS, num_places=2))
        await _told_of_places(served)
        submitted = await served.submit(lines_of(*["other", "tiny"] * 10))
        await holds(lambda: len(other.submitted) >= 4)
        other.set_status(replace(IDLE_STATUS, num_places=0))
        await served.wait_for_lines(submitted["id"], 10)


async def test_lines_of_a_model_that_is_removed_after_its_workers_were_lost_fail_with_its_error(tmp_path: Path) -> None:
    async with batch_gateway(tmp_path, max_in_flight=None) as served:
        add_model(served, "other").set_status(replace(IDLE_STATUS, num_places=0))
        await _told_of_places(served)
        submitted = await served.submit(lines_of("other", "other"))
        await served.wait_for(submitted["id"], "in_progress")
        served.services.models.replace_all([one for one in served.services.models.all if one.card.name == "tiny"])
        batch = await served.wait_for(submitted["id"])
        assert batch["request_counts"] == {"total": 2, "completed": 0, "failed": 2}


async def _told_of_places(served: BatchGateway) -> None:
    """Wait until the driver has looked at the states of models."""
    run = served.runner.model_states
    num_looks = 0

    def counted() -> dict[str, ModelState]:
        nonlocal num_looks
        num_looks += 1
        return run()

    with mock.patch.object(served.runner, "model_states", counted):
        await holds(lambda: num_looks >= 2)


async def test_a_model_that_is_not_loaded_yet_is_waited_for(undriven: BatchGateway) -> None:
    undriven.services.models.replace_all(undriven.services.models.all, expected=["other"])
    undriven.services.models.is_complete = False
    undriven.start_driver()
    submitted = await undriven.submit(lines_of("tiny"))
    batch = await undriven.wait_for(submitted["id"])
    assert batch["status"] == "completed"
    refused = await undriven.client.post(
        "/v1/chat/completions", json={"model": "other", "messages": [{"role": "user", "content": "hello"}]}
    )
    assert refused.status_code == 503


async def test_lines_of_a_model_that_is_about_to_be_served_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Unavailable, "retry_after_s", 0.02)
    async with batch_gateway(tmp_path) as served:
        served.services.models.replace_all(served.services.models.all, expected=["other"])
        submitted = await served.submit(lines_of("tiny", "other"))
        await served.wait_for_lines(submitted["id"], 1)
        add_model(served, "other")
        batch = await served.wait_for(submitted["id"])
        assert batch["request_counts"] == {"total": 2, "completed": 2, "failed": 0}
