"""The executor of a worker that counts what it does, and whose blocks may lie on stand-ins for devices."""

from typing_extensions import override

from alignedserve.core.ids import RequestId
from alignedserve.core.picture import Picture, whole_runs
from alignedserve.core.request import LoraAdapter, Request, SamplingParams
from alignedserve.messages.iterations import IterationCompleted, RunIteration
from alignedserve.process.links import Identity
from alignedserve.runtime.engine.model_executor import ModelExecutor
from alignedserve.runtime.kv.candidate_memory import BlockCopier
from alignedserve.runtime.kv.staged_copies import CopyLanes
from alignedserve.runtime.pictures import rope_places
from tests.support.devices.device_stand_in import Machine, StandInStorage
from tests.support.devices.rank_devices import RanksOnDevices
from tests.support.models.tiny_engines import generate_alone


class CountingEngine(ModelExecutor):
    """Counts the tokens that it computes, the caches that it swaps, and the requests that enter with a hidden one."""

    num_computed = num_swapped_out = num_swapped_in = num_added = num_added_hidden = 0

    @override
    def run_iteration(self, command: RunIteration) -> IterationCompleted:
        self.num_computed += sum(num_tokens for _, num_tokens in command.slices)
        if command.swaps is not None:
            self.num_swapped_out += len(command.swaps.outs)
            self.num_swapped_in += len(command.swaps.ins)
        self.num_added += len(command.additions)
        self.num_added_hidden += sum(addition.is_hidden for addition in command.additions)
        return super().run_iteration(command)

    def put_on(self, machine: Machine, name: str) -> None:
        """Let its blocks lie on this device, for all that copies them, and those of its other ranks on theirs."""
        self._on_device = StandInStorage(self._storage, machine.device(name))
        if isinstance(self._ranks, RanksOnDevices):
            self._ranks.put_on(machine, name)

    _on_device: StandInStorage | None = None

    @property
    @override
    def lanes(self) -> CopyLanes | None:
        return super().lanes if self._on_device is None else self._on_device.lanes

    @override
    def copier(self, identity: Identity, *, transport: str = "auto") -> BlockCopier:
        storage = self._on_device or self._storage
        ranks = None if self._ranks is None or self._moves_all else self._ranks.copies
        return BlockCopier(storage, self._threads, identity, transport=transport, ranks=ranks)

    def answer_alone(
        self, prompt: list[int], sampling: SamplingParams, adapter: LoraAdapter | None, pictures: tuple[Picture, ...]
    ) -> list[int]:
        """Return the tokens of a request that no other one runs beside."""
        alone = RequestId("alone")
        matrices = None if adapter is None else self._adapters.cache.acquire(adapter, alone, is_real_time=True)
        ends = frozenset[int]() if sampling.ignore_eos and not sampling.grammar else self.eos_token_ids
        request = Request(alone, tuple(prompt), sampling, "", 0.0, pictures=pictures)
        shown = self._pictures.add(request, 0)
        places = rope_places(len(prompt), pictures) if self._has_axes else None
        runs, engine = whole_runs(pictures), self._engine
        return generate_alone(
            engine, prompt, sampling, ends, adapter=matrices, pictures=shown, places=places, whole_runs=runs
        )
