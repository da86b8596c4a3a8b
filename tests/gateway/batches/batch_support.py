"""A gateway with files and batches, and their driver, over a scripted cluster: everything in this process."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
from starlette.applications import Starlette

from alignedserve.api.models.model_services import ModelCard
from alignedserve.batch_worker.lines import ClusterLineRunner
from alignedserve.batches.driver import BatchDriver
from alignedserve.batches.location import DriverStores, stores_in
from alignedserve.batches.records import client_of
from alignedserve.config.sections import BatchesConfig, GatewayConfig
from alignedserve.core.request import Request
from alignedserve.gateway.app import build_app
from alignedserve.gateway.files.files_api import FilesApi
from alignedserve.gateway.services import Services
from tests.gateway.support import EOS, saying, services_for, tokens_of
from tests.harnesses.scripted_backend import Script, ScriptedBackend
from tests.support.batch_samples import chat_lines
from tests.support.memory_records import MemoryRecords

OVER = ("completed", "failed", "expired", "cancelled")


def slowly(request: Request) -> Script:
    """Say hello after a twentieth of a second."""
    return Script((*tokens_of("hello"), EOS), first_token_delay_s=0.05)


async def eventually(holds: Callable[[], Awaitable[bool]], timeout_s: float = 20.0) -> None:
    """Wait until this holds."""
    async with asyncio.timeout(timeout_s):
        while not await holds():  # noqa: ASYNC110  (what is waited for may be in another process)
            await asyncio.sleep(0.02)


@dataclass
class BatchGateway:
    """A gateway, its stores, and a driver that can be killed and started again."""

    app: Starlette
    client: httpx.AsyncClient
    backend: ScriptedBackend
    records: MemoryRecords
    stores: DriverStores
    config: BatchesConfig
    runner: ClusterLineRunner
    services: Services
    max_in_flight: int | None = 8
    driving: asyncio.Task[None] | None = None

    def start_driver(self) -> None:
        driver = BatchDriver(
            stores=self.stores,
            runner=self.runner,
            config=self.config,
            models=self.services.models,
            max_in_flight=self.max_in_flight,
            weight_of=lambda owner: self.services.keys.ring.owned_by(client_of(owner)).weight,
        )
        self.driving = asyncio.create_task(driver.run())

    async def stop_driver(self) -> None:
        assert self.driving is not None
        self.driving.cancel()
        await asyncio.gather(self.driving, return_exceptions=True)

    async def upload(
        self,
        content: bytes,
        *,
        name: str = "in.jsonl",
        headers: dict[str, str] | None = None,
        fields: dict[str, str] | None = None,
    ) -> httpx.Response:
        data = {"purpose": "batch", **(fields or {})}
        return await self.client.post("/v1/files", files={"file": (name, content)}, data=data, headers=headers)

    async def create(
        self, file_id: str, *, endpoint: str = "/v1/chat/completions", window: str = "24h", **fields: Any
    ) -> httpx.Response:
        headers = fields.pop("headers", None)
        body = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": window, **fields}
        return await self.client.post("/v1/batches", json=body, headers=headers)

    async def submit(self, content: bytes | None = None, **fields: Any) -> dict[str, Any]:
        """Upload and create; the batch as it was answered."""
        uploaded = await self.upload(chat_lines(3) if content is None else content)
        assert uploaded.status_code == 200, uploaded.text
        created = await self.create(uploaded.json()["id"], **fields)
        assert created.status_code == 200, created.text
        batch: dict[str, Any] = created.json()
        return batch

    async def batch(self, batch_id: str) -> dict[str, Any]:
        response = await self.client.get(f"/v1/batches/{batch_id}")
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found

    async def wait_for(self, batch_id: str, *states: str, timeout_s: float = 20.0) -> dict[str, Any]:
        async def is_there() -> bool:
            return (await self.batch(batch_id))["status"] in (states or OVER)

        await eventually(is_there, timeout_s)
        return await self.batch(batch_id)

    async def wait_for_lines(self, batch_id: str, count: int) -> dict[str, Any]:
        """Wait until so many have been answered."""

        async def are_there() -> bool:
            return bool((await self.batch(batch_id))["request_counts"]["completed"] >= count)

        await eventually(are_there)
        return await self.batch(batch_id)

    async def results(self, file_id: str) -> list[str]:
        response = await self.client.get(f"/v1/files/{file_id}/content")
        assert response.status_code == 200, response.text
        return response.text.splitlines()


@asynccontextmanager
async def batch_gateway(
    folder: Path,
    script: Callable[[Request], Script] | None = None,
    *,
    api_keys: tuple[str, ...] = (),
    is_driven: bool = True,
    max_in_flight: int | None = 8,
    gateway_config: GatewayConfig | None = None,
    model: ModelCard | None = None,
    records: MemoryRecords | None = None,
    **config: Any,
) -> AsyncIterator[BatchGateway]:
    records = records or MemoryRecords()
    stores = stores_in(folder, records)
    backend = ScriptedBackend(script or saying("hello world"))
    batches = BatchesConfig(**config)
    services = replace(
        services_for(backend, gateway_config or GatewayConfig(), api_keys, model=model),
        files_api=FilesApi(stores, batches),
    )
    app = build_app(services)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        runner = ClusterLineRunner(services, stores.responses.events)
        served = BatchGateway(app, client, backend, records, stores, batches, runner, services, max_in_flight)
        if is_driven:
            served.start_driver()
        try:
            yield served
        finally:
            if served.driving is not None:
                await served.stop_driver()
