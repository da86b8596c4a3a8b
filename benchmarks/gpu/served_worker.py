"""A router here and one elastic worker in a process of its own, configured, sized and started as `serve` does it,
without Ray and without HTTP."""

import asyncio
import contextlib
import json
import multiprocessing
import os
import secrets
import sys
import time
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import msgspec

from alignedserve.cluster.machine import this_machine
from alignedserve.cluster.memory_planner import choose_sizes, with_block_size
from alignedserve.config.environment import limit_thread_spinning
from alignedserve.config.sections import ClusterConfig, EngineConfig
from alignedserve.config.unset_sizes import from_mapping
from alignedserve.core.errors import AlignedServeError, ResourceError
from alignedserve.costmodel.linear import LinearCoefficients, LinearIterationModel
from alignedserve.costmodel.online import OnlineIterationModel
from alignedserve.messages.handshake import Role
from alignedserve.process.actor_host import ActorHost
from alignedserve.process.addresses import ROUTER, AddressBook
from alignedserve.process.heap import settle_heap
from alignedserve.process.links import Identity
from alignedserve.process.process_spec import ProcessSpec
from alignedserve.runtime.device.cores import num_cores
from alignedserve.runtime.model.decoder.model_config import ModelConfig
from alignedserve.runtime.model.model_files import read_config
from alignedserve.runtime.model.served_model import ServedModel, resolve_model
from alignedserve.scheduling.factory import resolve_policy
from alignedserve.worker_core.handoff import Lending
from alignedserve.worker_core.iteration_log import IterationRecord
from alignedserve.worker_core.logic import ColocatedLogic
from alignedserve.worker_core.service import Worker, start_colocated_worker
from benchmarks.gpu.timed_gateway import TimedGateway
from router.service import RouterService

WORKER, GATEWAY = "decode-0", "gateway-0"
STOPS = "stops"  # behind a policy's name: its passes stop between layers
_KEPT_OF_LOG = 60  # lines
_ENDS_S = 15.0


class WorkerEnded(ResourceError):
    """The worker's process did not start, or ended."""


class WorkerState(NamedTuple):
    """What a worker knows of its work."""

    iterations: list[IterationRecord]  # the latest, oldest first
    coefficients: LinearCoefficients  # what iterations cost, as far as it has learned


@dataclass(frozen=True, slots=True)
class Plan:
    """A configuration with all of its sizes."""

    config: ClusterConfig
    served: ServedModel
    line: str  # the sizes in words
    warnings: tuple[str, ...] = ()


def write_model(shape: ModelConfig, folder: Path) -> None:
    """Write the configuration of a Llama of this shape, which is all that random weights need."""
    assert shape.rope is not None, "a Llama rotates"
    folder.mkdir(parents=True, exist_ok=True)
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_position_embeddings,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope.theta,
        "hidden_act": "silu",
        "tie_word_embeddings": shape.ties_embeddings,
        "torch_dtype": shape.dtype,
        "eos_token_id": list(shape.eos_token_ids),
    }
    (folder / "config.json").write_text(json.dumps(fields))
    assert read_config(folder) == shape, "the shape is read as it was written"


def plan_worker(
    model: Path, device: str, policy: str, *, max_context_len: int, dtype: str, cache_bytes: int | None = None
) -> Plan:
    """Choose all sizes as `serve` does on this machine. `device`: cpu or cuda:N. `cache_bytes`: None: as it chooses.

    `policy`: its name, or that and "+stops".
    """
    name, _, option = policy.partition("+")
    assert option in ("", STOPS), f"nothing that a policy has: {option}"
    section = {"path": str(model), "random_weights": True, "dtype": dtype, "max_context_len": max_context_len}
    values = {
        "topology": "elastic",
        "model": section,
        "engine": {"device": device},
        "scheduling": {"policy": name, "yield_between_layers": option == STOPS or None},
        "decode": {"count": 1, "kv_cache_bytes": cache_bytes},
    }
    config = resolve_policy(from_mapping(values))
    machine = this_machine(device)
    served = resolve_model(
        config.model,
        EngineConfig(device=device, window_cache="whole"),
        has_bfloat16=machine.has_bfloat16,
        states_apart=True,
    )
    choice = choose_sizes(with_block_size(config, served), served, machine)
    engine = msgspec.structs.replace(choice.config.engine, threads_per_worker=num_cores() if device != "cpu" else 1)
    sized = msgspec.structs.replace(choice.config, engine=engine)
    return Plan(sized, choice.served, choice.line(), choice.warnings)


class Serving:
    """A router, a gateway without HTTP, and a worker's process."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        """`folder`: made here for sockets and logs; short, as paths of sockets are."""
        self.plan = plan
        folder.mkdir(mode=0o700)
        self._folder = folder
        self._book = AddressBook(folder)
        self._secret = secrets.token_bytes(32)
        self._peer_timeout_s = plan.config.links.peer_timeout_s
        identity = Identity(Role.GATEWAY, GATEWAY, self._secret, self._peer_timeout_s)
        self.gateway = TimedGateway(self._book.of(GATEWAY), self._book.of(ROUTER), identity)
        self._router: RouterService | None = None
        context = multiprocessing.get_context("spawn")
        self._pipe, self._far_pipe = context.Pipe()
        arguments = (plan.config, plan.served, self._spec(Role.DECODE_WORKER, WORKER), self._far_pipe)
        self._process = context.Process(target=run_worker, args=arguments, name=WORKER, daemon=True)

    async def start(self) -> float:
        """Return the seconds that the worker took. Raises WorkerEnded, AlignedServeError."""
        config, began_s = self.plan.config, time.monotonic()
        self._process.start()
        self._far_pipe.close()  # else its end here would keep the pipe open when the process is gone
        self._router = RouterService(
            config=config.router,
            batching=config.batching,
            served=self.plan.served,
            process_spec=self._spec(Role.ROUTER, ROUTER),
        )
        await self._router.start(listen_at=ROUTER)
        await self.gateway.start()
        failure = await self._answer()
        if failure is not None:
            raise WorkerEnded(f"the worker cannot start: {failure}")
        await self.gateway.idle(30.0)
        settle_heap()
        return time.monotonic() - began_s

    async def state(self) -> WorkerState:
        self.require_alive()
        self._pipe.send(None)
        state = await self._answer()
        assert isinstance(state, WorkerState), "an answer to what was asked"
        return state

    def require_alive(self) -> None:
        """Raise WorkerEnded with the end of its log where its process has ended."""
        if not self._process.is_alive():
            raise WorkerEnded(f"the worker ended with {self._process.exitcode}: {self.log_end()}")

    def log_end(self) -> str:
        path = self._folder / f"{WORKER}.log"
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        return "\n".join(deque(lines, _KEPT_OF_LOG))

    async def close(self) -> None:
        await self.gateway.close()
        self._pipe.close()  # at which the worker ends
        if self._process.pid is not None:
            await asyncio.to_thread(self._process.join, _ENDS_S)
            self._process.kill()
            self._process.join()
        if self._router is not None:
            await self._router.close()

    async def _answer(self) -> object:
        try:
            return await asyncio.to_thread(self._pipe.recv)
        except (EOFError, OSError) as error:
            self._process.join(_ENDS_S)
            raise WorkerEnded(f"the worker ended with {self._process.exitcode}: {self.log_end()}") from error

    def _spec(self, role: Role, name: str) -> ProcessSpec:
        own = (role, name, self._folder.name, self._secret, self._peer_timeout_s, self._book, self._folder)
        return ProcessSpec(*own, notes_requests=True)


@contextlib.asynccontextmanager
async def serving(plan: Plan, folder: Path) -> AsyncIterator[Serving]:
    made = Serving(plan, folder)
    try:
        yield made
    finally:
        await made.close()


# --- in the worker's process


def run_worker(config: ClusterConfig, served: ServedModel, spec: ProcessSpec, pipe: Connection) -> None:
    """Serve until the pipe is closed: tell once why it cannot start (None: it has), then its state when asked."""
    limit_thread_spinning()
    lending = Lending(config.prefill.candidate_buffer_bytes, ())
    started: list[Worker] = []

    async def build() -> Worker:
        arguments = (config.decode, config.scheduling, config.engine, served, lending, config.prefix_cache, spec)
        started.append(await start_colocated_worker(*arguments))
        return started[0]

    host = ActorHost(spec, build)
    failure: AlignedServeError | None = host.failure()
    pipe.send(None if failure is None else f"{type(failure).__name__}: {failure}")
    with contextlib.suppress(EOFError, OSError):
        while failure is None:
            pipe.recv()
            pipe.send(host.call(_state_of(started[0])))
    host.stop()
    sys.stdout.flush()
    os._exit(0)  # as Ray's processes end: nothing is left to tidy up, and native objects are not told apart from leaks


async def _state_of(worker: Worker) -> WorkerState:
    logic = worker._driver._logic
    assert isinstance(logic, ColocatedLogic), "a worker that does both"
    costs = logic._scheduler.costs
    assert isinstance(costs, OnlineIterationModel | LinearIterationModel), "costs that are a sum"
    return WorkerState(list(worker.iteration_log.records()), costs.coefficients)
