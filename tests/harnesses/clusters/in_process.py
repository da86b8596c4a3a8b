"""All components of a cluster on one event loop, over real sockets, with a small model of random weights."""

import contextlib
import dataclasses
import itertools
import json
import os
from collections.abc import AsyncIterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from alignedserve.config.sections import (
    BatchingConfig,
    ClusterConfig,
    DecodeWorkerConfig,
    EngineConfig,
    LinksConfig,
    ModelSectionConfig,
    PoolConfig,
    PrefillWorkerConfig,
    Topology,
)
from alignedserve.core.picture import Picture
from alignedserve.core.request import LoraAdapter, SamplingParams
from alignedserve.messages.handshake import Role
from alignedserve.messages.workers import WorkerRegistered
from alignedserve.process.addresses import ROUTER, AddressBook
from alignedserve.process.links import Identity
from alignedserve.process.process_spec import POOL, ProcessSpec
from alignedserve.process.tls import CertificateAuthority
from alignedserve.runtime.engine.engine_sizes import EngineSizes, hidden_block_tokens
from alignedserve.runtime.engine.model_executor import ModelExecutor
from alignedserve.runtime.kv.arena_files import arena_folder
from alignedserve.runtime.kv.buffer_budget import BufferBudget
from alignedserve.runtime.kv.candidate_memory import CandidateMemory
from alignedserve.runtime.kv.transfers.kv_transfer import lends_device_memory
from alignedserve.runtime.lora.loaded_adapters import with_adapters
from alignedserve.runtime.model.served_model import ServedModel, resolve_model
from alignedserve.worker_core import factory as colocated_factory
from alignedserve.worker_core.factory import max_held, memory_of
from alignedserve.worker_core.router_link import registration_of
from alignedserve.worker_core.service import Worker
from decode_worker import factory as decode_factory
from decode_worker.logic import DecodeLogic
from kvpool.service import KvPool
from prefill_worker import logic as prefill_logic
from router.service import RouterService
from tests.harnesses.client_gateway import ClientGateway
from tests.support.devices.counting_engine import CountingEngine
from tests.support.devices.device_stand_in import Machine
from tests.support.models.folder_digests import contents_of
from tests.support.models.tiny_llama import TINY_LLAMA

_CLUSTERS = itertools.count()
_REFERENCES: dict[tuple[object, ...], list[int]] = {}  # the tokens of every request that was computed alone


def small_config(
    folder: Path, *, pool_blocks: int = 256, decode_blocks: int = 256, buffer_blocks: int = 128, **changes: object
) -> ClusterConfig:
    """Configure the tiny model; sizes are given in blocks of 8 tokens. Four requests make a batch.

    Prompts and decodes have workers of their own unless `changes` name another topology.
    """
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(TINY_LLAMA))
    block_bytes = 2 * 2 * 8 * 2 * 8 * 4
    changes.setdefault("topology", Topology.DISAGGREGATED)
    changes.setdefault("batching", BatchingConfig(min_requests=4, starvation_s=0.5))
    changes.setdefault("links", LinksConfig(peer_timeout_s=60.0))  # one loop, which tests hold up
    return ClusterConfig(
        model=ModelSectionConfig(path=str(folder), random_weights=True),
        engine=EngineConfig(block_size=8, threads_per_worker=1),
        pool=PoolConfig(memory_bytes=pool_blocks * block_bytes),
        prefill=PrefillWorkerConfig(
            kv_cache_bytes=256 * block_bytes,
            candidate_buffer_bytes=buffer_blocks * block_bytes,
            max_num_batched_tokens=64,
        ),
        decode=DecodeWorkerConfig(kv_cache_bytes=decode_blocks * block_bytes, max_running_requests=16),
        **changes,  # type: ignore[arg-type]
    )


class RoomCluster:
    """Router, pool, workers and a client gateway; each can be stopped and started again alone."""

    def __init__(
        self,
        config: ClusterConfig,
        folder: Path,
        machine: Machine | None = None,
        gpus: Mapping[str, str] | None = None,
    ) -> None:
        """`machine`: stand-ins for devices that workers are on; `gpus`: the GPU of each worker; None of both: they are
        on the CPU, or on the GPU of the configuration. References are computed there, but for `gpus` on the CPU."""
        self.config = config
        self.machine = machine
        self.gpus = gpus
        engine = config.engine
        resolved = resolve_model(
            config.model,
            EngineConfig(
                device="cpu",
                kv_cache_dtype=engine.kv_cache_dtype,
                tensor_parallel=engine.tensor_parallel,
                expert_parallel=engine.expert_parallel,
                window_cache=engine.window_cache,
            ),
            states_apart=True,
        )
        self.served: ServedModel = with_adapters(resolved, config.lora)
        self.addresses = AddressBook(folder)
        self.folder = folder
        self.cluster_id = f"test-{os.getpid()}-{next(_CLUSTERS)}"
        self.arena_path = folder / "test.arena"
        self.gateway = ClientGateway(
            self.addresses.of("gateway-0"), self.addresses.of(ROUTER), self._identity(Role.GATEWAY, "gateway-0")
        )
        self.books: dict[str, AddressBook] = {}  # of processes on nodes of their own
        self.authority: CertificateAuthority | None = None  # for TLS between nodes
        self.pools: dict[str, str] = {}  # of their nodes
        self.components: dict[str, RouterService | KvPool | Worker] = {}
        self.engines: dict[str, CountingEngine] = {}

    async def start(self) -> None:
        await self.start_router()
        if self.config.node_pool is not None:
            await self.start_pool()
        if self.config.chosen_topology is Topology.DISAGGREGATED:
            for index in range(self.config.prefill.count):
                await self.start_prefill(f"prefill-{index}")
        for index in range(self.config.decode.count):
            await self.start_decode(f"decode-{index}")
        await self.gateway.start()

    async def start_router(self) -> None:
        router = RouterService(
            config=self.config.router,
            batching=self.config.batching,
            served=self.served,
            process_spec=self._process_spec(Role.ROUTER, ROUTER),
        )
        await router.start(listen_at=ROUTER)
        self.components[ROUTER] = router

    async def start_pool(self) -> None:
        assert self.config.node_pool is not None, "a cluster without a pool"
        pool = KvPool(
            config=self.config.node_pool,
            batching=self.config.batching,
            layout=self.served.block_layout(self.config.engine.block_size),
            arena_path=self.arena_path,
            process_spec=self._process_spec(Role.KV_POOL, POOL),
            takes_requests=self.config.chosen_topology.is_separate,
        )
        await pool.start(listen_at=POOL, router_at=ROUTER)
        self.components[POOL] = pool

    async def start_prefill(self, name: str) -> None:
        section = self.config.prefill
        executor = self._engine(name, section.kv_cache_bytes, section.max_running_requests)
        layout = self.served.block_layout(self.config.engine.block_size)
        decoders = [f"decode-{index}" for index in range(self.config.decode.count)]
        budget = BufferBudget(section.candidate_buffer_bytes // layout.block_bytes, decoders)
        process_spec = self._process_spec(Role.PREFILL_WORKER, name)
        self.engines[name] = executor
        make = partial(
            prefill_logic.make_logic,
            registered=self._registered(executor, section.max_running_requests, can_prefill=True, can_decode=False),
            config=section,
            scheduling=self.config.scheduling,
            eos_token_ids=executor.eos_token_ids,
            measured=executor.measure_iterations(0.02, 512),
            prefix_cache=self.config.prefix_cache,
            state_blocks=layout.state_blocks,
        )
        worker = Worker(
            make=make,
            executor=executor,
            memory=CandidateMemory(
                layout,
                budget,
                process_spec,
                transport=self.config.engine.kv_transport,
                lanes=executor.lanes if lends_device_memory(self.config.engine) else None,
            ),
            pool_at=POOL,
            process_spec=process_spec,
        )
        await worker.start(listen_at=name, router_at=ROUTER)
        self.components[name] = worker

    async def start_decode(self, name: str) -> None:
        section = self.config.decode
        if not self.config.chosen_topology.is_separate:
            await self._start_colocated(name)
            return
        block_tokens = hidden_block_tokens(self.served, self.config.scheduling, self.config.engine.block_size)
        self.engines[name] = executor = self._engine(
            name,
            section.kv_cache_bytes,
            decode_factory.engine_places(section, self.config.scheduling),
            has_int8_swaps=section.has_int8_swaps,
            hidden_block_tokens=block_tokens,
            jumps_ahead=True,
        )
        make = partial(
            decode_factory.make_logic,
            registered=self._registered(
                executor, section.max_running_requests, self.pools.get(name, POOL), can_prefill=False, can_decode=True
            ),
            config=section,
            batching=self.config.batching,
            scheduling=self.config.scheduling,
            memory=memory_of(
                section, executor.layout, num_blocks=executor.num_blocks, hidden_block_tokens=block_tokens
            ),
            eos_token_ids=executor.eos_token_ids,
            measured=executor.measure_iterations(0.02, 512),
        )
        worker = Worker(
            make=make,
            executor=executor,
            process_spec=self._process_spec(Role.DECODE_WORKER, name),
            pool_at=self.pools.get(name, POOL),
            transport=self.config.engine.kv_transport,
        )
        await worker.start(router_at=ROUTER)
        self.components[name] = worker

    async def _start_colocated(self, name: str) -> None:
        section = self.config.decode
        is_elastic = self.config.chosen_topology is Topology.ELASTIC
        block_tokens = hidden_block_tokens(self.served, self.config.scheduling, self.config.engine.block_size)
        self.engines[name] = executor = self._engine(
            name,
            section.kv_cache_bytes,
            max_held(section),
            has_int8_swaps=section.has_int8_swaps,
            hidden_block_tokens=block_tokens,
            jumps_ahead=True,
        )
        make = partial(
            colocated_factory.make_colocated_logic,
            registered=replace(
                self._registered(executor, max_held(section), can_prefill=True, can_decode=True), can_move=is_elastic
            ),
            memory=memory_of(
                section, executor.layout, num_blocks=executor.num_blocks, hidden_block_tokens=block_tokens
            ),
            config=section,
            scheduling=self.config.scheduling,
            eos_token_ids=executor.eos_token_ids,
            measured=executor.measure_iterations(0.02, 512),
            prefix_cache=self.config.prefix_cache,
            prefix_pool=self.pools.get(name, POOL) if self.config.prefix_cache.pool_bytes else None,
            decode_pool=self.pools.get(name, POOL) if self.config.decode.pool_bytes else None,
            num_layers=executor.layout.num_layers,
        )
        process_spec, transport = self._process_spec(Role.DECODE_WORKER, name), self.config.engine.kv_transport
        memory = None
        if is_elastic:
            peers = [f"decode-{index}" for index in range(self.config.decode.count) if name != f"decode-{index}"]
            budget = BufferBudget(executor.layout.blocks_in(self.config.prefill.candidate_buffer_bytes), peers)
            lanes = executor.lanes if lends_device_memory(self.config.engine) else None
            memory = CandidateMemory(executor.layout, budget, process_spec, transport=transport, lanes=lanes)
        worker = Worker(
            make=make,
            executor=executor,
            process_spec=process_spec,
            memory=memory,
            pool_at=self.pools.get(name, POOL) if self.config.node_pool is not None else None,
            transport=transport,
        )
        await worker.start(router_at=ROUTER, listen_at=name if is_elastic else None)
        self.components[name] = worker

    def iteration_log_path(self, name: str) -> Path:
        return self.arena_path.with_name(f"{name}.iterations.jsonl")

    def num_buffer_blocks_used(self) -> int:
        """Count the blocks of all decode workers in all prefill workers' memory."""
        logics = [one._driver._logic for one in self.components.values() if isinstance(one, Worker)]
        return sum(logic._candidates.space.num_used for logic in logics if isinstance(logic, DecodeLogic))

    def files_in_memory(self) -> list[Path]:
        """Return the arenas of this cluster that lie in the machine's memory file system."""
        return list(arena_folder().glob(f"*{self.cluster_id}*"))

    async def stop(self, name: str) -> None:
        await self.components.pop(name).close()

    async def start_again(self, name: str) -> None:
        if name in (ROUTER, POOL):
            await (self.start_router() if name == ROUTER else self.start_pool())
        else:
            await (self.start_prefill(name) if name.startswith("prefill") else self.start_decode(name))

    async def close(self) -> None:
        await self.gateway.close()
        for name in list(self.components):
            await self.stop(name)

    def reference(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        adapter: LoraAdapter | None = None,
        pictures: tuple[Picture, ...] = (),
    ) -> list[int]:
        """Compute the same request alone, by one engine in one process; once for all tests that ask the same."""
        model, engine = self.config.model, self.config.engine
        digest = None if adapter is None else adapter.digest
        sections = repr((model, engine, sampling)).replace(str(model.path), "")
        asked = (contents_of(Path(str(model.path))), sections, tuple(prompt), digest, pictures)
        if asked not in _REFERENCES:
            _REFERENCES[asked] = self._compute_alone(prompt, sampling, adapter, pictures)
        return list(_REFERENCES[asked])

    def _compute_alone(
        self, prompt: list[int], sampling: SamplingParams, adapter: LoraAdapter | None, pictures: tuple[Picture, ...]
    ) -> list[int]:
        worker = self._engine("", 1 << 22, 1, served=one_rank(self.served))
        tokens = worker.answer_alone(prompt, sampling, adapter, pictures)
        worker.close()
        return tokens

    def _engine(
        self, name: str, kv_cache_bytes: int, max_sequences: int, *, served: ServedModel | None = None, **options: Any
    ) -> CountingEngine:
        device = self.config.engine.device if self.config.engine.device.startswith("cuda") else "cpu"
        if self.gpus is not None:
            device = self.gpus.get(name, "cpu")
        block_size = self.config.engine.block_size
        sizes = EngineSizes(kv_cache_bytes, max_sequences, block_size, 1, device=device, **options)
        engine = CountingEngine(served or self.served, sizes)
        if self.machine is not None:
            engine.put_on(self.machine, name)
        return engine

    def _registered(
        self,
        executor: ModelExecutor,
        max_running_requests: int,
        pool_name: str = POOL,
        *,
        can_prefill: bool,
        can_decode: bool,
    ) -> WorkerRegistered:
        return registration_of(
            executor.layout,
            executor.num_blocks,
            max_running_requests,
            pool_name,
            can_prefill=can_prefill,
            can_decode=can_decode,
        )

    def _process_spec(self, role: Role, name: str) -> ProcessSpec:
        timeout_s, recording = self.config.links.peer_timeout_s, self.config.recording
        book, pool_name = self.books.get(name, self.addresses), self.pools.get(name, POOL)
        return ProcessSpec(
            role,
            name,
            self.cluster_id,
            b"t" * 32,
            timeout_s,
            book,
            self.folder,
            recording,
            pool_name=pool_name,
            notes_requests=True,
            credentials=self.authority.issue(name) if self.authority is not None else None,
        )

    def _identity(self, role: Role, name: str) -> Identity:
        return Identity(role, name, b"t" * 32, self.config.links.peer_timeout_s)


def one_rank(served: ServedModel) -> ServedModel:
    return dataclasses.replace(served, tensor_parallel=1, expert_parallel=1)


@contextlib.asynccontextmanager
async def running(
    config: ClusterConfig, folder: Path, machine: Machine | None = None, gpus: Mapping[str, str] | None = None
) -> AsyncIterator[RoomCluster]:
    cluster = RoomCluster(config, folder, machine, gpus)
    await cluster.start()
    try:
        yield cluster
    finally:
        await cluster.close()
