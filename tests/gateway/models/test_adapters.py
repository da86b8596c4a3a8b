"""Every API by an adapter's name: the request has the adapter, the answer its name."""

import json
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from alignedserve.api.errors import Unservable
from alignedserve.api.models.model_registry import RegisteredModel
from alignedserve.api.models.model_services import AdapterDirectory, ModelCard
from alignedserve.api.prefix_hasher import PrefixHasher
from alignedserve.api.work_lanes import LONG_LEN
from alignedserve.config.sections import LoraConfig
from alignedserve.core.request import Request
from alignedserve.gateway.routes import request_bodies
from alignedserve.keys.file import KeyRow, ring_of
from alignedserve.keys.ring import digest_of
from alignedserve.runtime.lora.loaded_adapters import with_adapters
from alignedserve.runtime.model.served_model import ServedModel
from tests.gateway.batches.batch_support import BatchGateway, batch_gateway
from tests.gateway.deployment_support import served_model
from tests.gateway.support import EOS, error_of, tokenizer, tokenizer_folder, tokens_of, write_tokenizer
from tests.harnesses.scripted_backend import Script
from tests.support.batch_samples import chat_line
from tests.support.models.lora_folders import write_adapter

MESSAGES = [{"role": "user", "content": "hello"}]
REASON = "its adapter cannot be loaded: The files of the adapter have changed since it was loaded."
CALLS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "hello"},
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 9},
}


def script_of(request: Request) -> Script:
    """Say which adapter the request has; one called broken cannot be loaded."""
    name = request.adapter.name if request.adapter is not None else "base"
    return Script((), failure=Unservable(REASON)) if name == "broken" else Script((*tokens_of(name), EOS))


def adapted_model(folder: Path, allowed_folder: str | None = None) -> ServedModel:
    (folder / "model").mkdir()
    write_tokenizer(folder / "model")
    base = served_model("based", folder / "model")
    for seed, name in enumerate(("terse", "broken")):
        write_adapter(folder / name, base.decoder, seed=seed)
    adapters = {name: str(folder / name) for name in ("terse", "broken")}
    return with_adapters(base, LoraConfig(adapters=adapters, allowed_folder=allowed_folder))


def add_adapted(served: BatchGateway, folder: Path, allowed_folder: str | None = None) -> None:
    """Serve a model with two adapters behind the gateway's own."""
    model = adapted_model(folder, allowed_folder)
    card, hasher = ModelCard.of(model), PrefixHasher(b"k" * 32, form=b"form", block_size=8)
    directory = AdapterDirectory(model, folder / "adapters.json")
    services = served.services.make_model(card, served.backend, tokenizer(), hasher, adapters=directory)
    served.services.models.add(RegisteredModel(card, services))


async def test_every_api_takes_an_adapter_for_a_model(tmp_path: Path) -> None:
    async with batch_gateway(tmp_path / "batches", script_of) as served:
        add_adapted(served, tmp_path)

        async def post(path: str, model: str) -> httpx.Response:
            return await served.client.post(path, json={"model": model, **CALLS[path]})

        listed = (await served.client.get("/v1/models")).json()["data"]
        assert [(one["id"], one.get("parent")) for one in listed][1:] == [
            ("based", None),
            ("terse", "based"),
            ("broken", "based"),
        ]
        roots = set()
        for path in CALLS:
            for name, said in (("based", "base"), ("terse", "terse")):
                answer = await post(path, name)
                assert answer.status_code == 200, answer.text
                assert answer.json()["model"] == name
                assert f'"{said}"' in answer.text
                roots.add((name, served.backend.submitted[-1].prefix_root))
            failure = await post(path, "broken")
            assert failure.status_code == 400, failure.text
            assert REASON in failure.text
        assert len(roots) == len({root for _, root in roots}) == 2
        assert error_of(await post("/v1/chat/completions", "nobody"), 404)["code"] == "model_not_found"


@pytest.mark.parametrize("long_len", [LONG_LEN, -1])
async def test_a_model_goes_before_an_adapter_of_its_name(
    tmp_path: Path, long_len: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the body is read."""
    monkeypatch.setattr(request_bodies, "LONG_LEN", long_len)
    async with batch_gateway(tmp_path / "batches", script_of) as served:
        add_adapted(served, tmp_path)
        longer = ModelCard("broken", tokenizer_folder(), max_context_len=4096)
        served.services.add_model(longer, served.backend, tokenizer())

        async def post(model: str) -> httpx.Response:
            return await served.client.post("/v1/completions", json={"model": model, "prompt": "hello " * 1000})

        assert error_of(await post("terse"), 400)["code"] == "context_length_exceeded"
        assert (await post("broken")).status_code == 200


async def test_lines_of_a_batch_name_adapters(tmp_path: Path) -> None:
    async with batch_gateway(tmp_path / "batches", script_of, max_attempts=1) as served:
        add_adapted(served, tmp_path)
        names = ("based", "terse", "broken", "terse")
        content = b"".join(chat_line(f"line-{place}", model=name) + b"\n" for place, name in enumerate(names))
        batch = await served.wait_for((await served.submit(content))["id"])
        assert batch["request_counts"] == {"total": 4, "completed": 3, "failed": 1}
        results = [json.loads(line) for line in await served.results(batch["output_file_id"])]
        bodies = {one["custom_id"]: one["response"]["body"] for one in results}
        assert {name: (body["model"], body["choices"][0]["message"]["content"]) for name, body in bodies.items()} == {
            "line-0": ("based", "base"),
            "line-1": ("terse", "terse"),
            "line-3": ("terse", "terse"),
        }
        (failed,) = await served.results(batch["error_file_id"])
        assert REASON in failed


async def test_a_key_neither_replaces_nor_unloads_the_adapter_of_another(tmp_path: Path) -> None:
    async with batch_gateway(tmp_path / "batches", script_of) as served:
        rows = [{"name": name, "secrets": [{"sha256": digest_of(name).hex()}]} for name in ("first", "second")]
        served.services.keys.ring = ring_of((), msgspec.convert(rows, list[KeyRow]))
        add_adapted(served, tmp_path, allowed_folder=str(tmp_path))

        async def post(key: str, action: str, **fields: Any) -> httpx.Response:
            body = {"lora_name": "new", "base_model_name": "based", **fields}
            headers = {"x-api-key": key}
            return await served.client.post(f"/v1/{action}_lora_adapter", json=body, headers=headers)

        path = str(tmp_path / "terse")
        assert (await post("first", "load", lora_path=path)).status_code == 200
        for refused in (
            await post("second", "load", lora_path=path, load_inplace=True),
            await post("second", "unload"),
        ):
            assert error_of(refused, 403)["code"] == "adapter_not_allowed"
        assert (await post("first", "load", lora_path=path, load_inplace=True)).status_code == 200
        assert (await post("first", "unload")).status_code == 200
