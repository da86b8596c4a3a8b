"""The protocol on modelled accelerators: the same phases, chats and lines, in the simulator."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec

from alignedserve.config.loading import load_config
from alignedserve.config.sections import ClusterConfig, Topology
from alignedserve.config.unset_sizes import with_fixed_sizes
from alignedserve.core.errors import ConfigError
from alignedserve.core.request import RequestClass, Slo
from lab.certification.protocol import (
    Fitting,
    Lengths,
    Phase,
    PlannedBatch,
    PlannedRequest,
    Protocol,
    Speed,
    Wanted,
)
from lab.certification.records import BatchRecord, Evidence, PhaseRecord, StreamRecord
from lab.commands.certify.options import CertifyOptions
from lab.commands.simulation.simulate_cases import (
    DEFAULT_HARDWARE,
    DEFAULT_MODEL,
    SERVER_SIZES,
    machines_of,
    with_degree,
)
from lab.costmodel.choice import FITTED
from lab.sim.config import SimConfig
from lab.sim.policies import as_predicted_for, simulated_policy, with_policy
from lab.sim.records import RequestEnding, RequestRecord
from lab.sim.simulation import BEGIN_S, Simulation
from lab.workload.requests import ClosedLoop, TimedRequest, Workload, WorkloadDescription

_CHAT, _DOCUMENTS = "chat", "documents"
_LEAD_S = 2.0  # between the first documents and the first chat
_FILLS_S = (30.0, 120.0, 480.0)  # of measuring: longer ones for answers that take as long
_MOST_CHATS_IN_AIR = 256  # of a worker, while it is filled
_LINES_IN_AIR = 2  # for each place of a worker, as the batch worker has them


def simulated_config(options: CertifyOptions) -> SimConfig:
    """Configure the cluster that the options name. Raises ConfigError."""
    sizes = () if options.config is not None else SERVER_SIZES
    cluster = with_degree(with_fixed_sizes(load_config(options.config, (*sizes, *options.overrides))))
    topology = cluster.topology if options.topology is None else Topology(options.topology)
    scheduling = cluster.scheduling
    cluster = with_policy(cluster, scheduling.policy, scheduling.policy_params, topology=topology or Topology.ELASTIC)
    machines = machines_of(options.costs, options.modelled, options.hardware, cluster.engine.tensor_parallel)
    return replace(simulated_policy(machines, _sized(cluster, options)), seed=options.seed)


def model_words(options: CertifyOptions, cluster: ClusterConfig) -> str:
    if options.costs.startswith(FITTED):
        return options.costs
    accelerator, degree = options.hardware or DEFAULT_HARDWARE, cluster.engine.tensor_parallel
    worker = f"{degree} x {accelerator} a worker" if degree > 1 else accelerator
    return f"{options.modelled or DEFAULT_MODEL} on {worker}"


def _sized(cluster: ClusterConfig, options: CertifyOptions) -> ClusterConfig:
    if options.num_workers == 1 and options.config is not None:
        return cluster
    changed = msgspec.structs.replace
    return changed(
        cluster,
        prefill=changed(cluster.prefill, count=options.num_workers),
        decode=changed(cluster.decode, count=options.num_workers),
    )


@dataclass(frozen=True, slots=True)
class _Numbered:
    lengths: Lengths
    request_class: RequestClass

    def __getitem__(self, number: int) -> TimedRequest:
        prompt_len, output_len = self.lengths.prompt_len, self.lengths.output_len
        return TimedRequest(0.0, prompt_len, output_len, output_len, "fill", self.request_class)


@dataclass(frozen=True, slots=True)
class _Listed:
    requests: Sequence[TimedRequest]

    def __getitem__(self, number: int) -> TimedRequest:
        return self.requests[number]


class SimulatedRun:
    """One certificate's run in the simulator."""

    def __init__(self, config: SimConfig, wanted: Wanted, say: Callable[[str], None]) -> None:
        self._config = config
        self._wanted = wanted
        self._say = say
        self._places = config.cluster.decode.count * config.cluster.decode.max_running_requests

    def run(self) -> tuple[Protocol, Speed, Evidence]:
        """Run everything. Raises ConfigError where a request could never be served."""
        self._say("measuring the modelled server, by which the protocol is fitted to it")
        fitting = Fitting(self._wanted, self._speed())
        while (documents := fitting.next_documents()) is not None:
            fitting.measured(self._filled(documents, RequestClass.BEST_EFFORT))
        protocol, speed = fitting.protocol, fitting.speed
        phases = []
        for number, phase in enumerate(Phase, start=1):
            self._say(f"phase {number} of {len(Phase)}: {phase.value}")
            phases.append(self._phase(phase, protocol))
        return protocol, speed, Evidence(tuple(phases), speed.chats_per_s)

    # --- measuring

    def idle_times_s(self) -> tuple[float, float]:
        """Return TTFT and TPOT of a chat that is alone on the server. Raises ConfigError where it is not served."""
        idle = self._simulated([_timed(PlannedRequest("idle", *_both(self._wanted.chat)), 0.0, Slo())], ())
        record = idle.records()[0]
        if record.ttft_s is None:
            raise ConfigError("the simulated server does not answer a single chat")
        return record.ttft_s, record.tpot_s or 0.001

    def _speed(self) -> Speed:
        return Speed(
            *self.idle_times_s(),
            self._filled(self._wanted.chat, RequestClass.REAL_TIME),
            self._filled(self._wanted.documents, RequestClass.BEST_EFFORT),
        )

    def _filled(self, lengths: Lengths, request_class: RequestClass) -> float:
        workers = self._config.cluster.decode.count
        size = min(_MOST_CHATS_IN_AIR * workers, self._places)
        loop = ClosedLoop("fill", size, is_wave=False, stream=_Numbered(lengths, request_class))
        for fill_s in _FILLS_S:
            records = self._simulated([], (loop,), ends_s=fill_s).records()
            begin_s = min((record.arrival_s for record in records), default=0.0)
            has_ended = any(record.ended_s < begin_s + fill_s for record in records)
            # The first third is left out: all were sent at once.
            num_tokens = sum(_tokens_between(record, begin_s + fill_s / 3, begin_s + fill_s) for record in records)
            if num_tokens and (has_ended or fill_s == _FILLS_S[-1]):
                return num_tokens / lengths.output_len / (fill_s * 2 / 3)
        raise ConfigError(f"no token comes from the simulated server within {_FILLS_S[-1]:g} s; shorten the lengths")

    # --- phases

    def _phase(self, phase: Phase, protocol: Protocol) -> PhaseRecord:
        lead_s = _LEAD_S if phase.has_documents else 0.0
        chats = protocol.chats(phase) if phase.has_chat else ()
        requests = [_timed(chat, chat.arrival_s + lead_s, protocol.slo) for chat in chats]
        batches = protocol.batches(phase) if phase.has_documents else ()
        lines = [(batch, _document(line.request, batch.window_s)) for batch in batches for line in batch.lines]
        loops: tuple[ClosedLoop, ...] = ()
        if lines:
            size = min(len(lines), _LINES_IN_AIR * self._places)
            stream = _Listed([timed for _, timed in lines])
            loops = (ClosedLoop(_DOCUMENTS, size, is_wave=False, stream=stream),)
        simulation = self._simulated(requests, loops, max_closed=len(lines))
        return _phase_record(phase, simulation, [batch for batch, _ in lines], batches, lead_s)

    def _simulated(
        self, requests: Sequence[TimedRequest], loops: tuple[ClosedLoop, ...], *, ends_s: float | None = None,
        max_closed: int | None = None,
    ) -> Simulation:  # fmt: skip
        description = WorkloadDescription("certify", self._wanted.seed)
        workload = Workload(description, tuple(requests), loops, ends_s, max_closed if loops else None)
        simulation = Simulation(self._config, as_predicted_for(self._config.cluster.scheduling, workload))
        simulation.run()
        return simulation


def _both(lengths: Lengths) -> tuple[int, int]:
    return lengths.prompt_len, lengths.output_len


def _timed(request: PlannedRequest, arrival_s: float, slo: Slo) -> TimedRequest:
    return TimedRequest(arrival_s, request.prompt_len, request.output_len, request.output_len, _CHAT, slo=slo)


def _document(request: PlannedRequest, window_s: float) -> TimedRequest:
    return TimedRequest(
        0.0, request.prompt_len, request.output_len, request.output_len, _DOCUMENTS, RequestClass.BEST_EFFORT,
        Slo(deadline_s=window_s),
    )  # fmt: skip


# --- what came of it


def _phase_record(
    phase: Phase, simulation: Simulation, batch_of: Sequence[PlannedBatch], batches: Sequence[PlannedBatch],
    lead_s: float,
) -> PhaseRecord:  # fmt: skip
    records = sorted(simulation.records(), key=_number)
    zero_s = BEGIN_S + lead_s
    chats = [record for record in records if record.class_name == _CHAT]
    documents = [record for record in records if record.class_name == _DOCUMENTS]
    gaps = simulation.gaps().get(_CHAT)
    of_documents = simulation.gaps().get(_DOCUMENTS)
    ends_s = sorted(record.ended_s - zero_s for record in documents)
    return PhaseRecord(
        phase=phase,
        duration_s=max(record.ended_s for record in records) - zero_s,
        chats=tuple(_stream(record, zero_s) for record in chats),
        gaps_s=() if gaps is None else tuple(gaps.values()),
        batches=tuple(_batch(batch, documents, batch_of, zero_s) for batch in batches),
        documents=tuple(_stream(record, zero_s) for record in documents),
        document_gaps_s=() if of_documents is None else tuple(of_documents.values()),
        documents_began_s=-lead_s,
        documents_ended_s=ends_s[-1] if ends_s else None,
        progress=tuple((at_s, count) for count, at_s in enumerate([-lead_s, *ends_s])) if ends_s else (),
    )


def _tokens_between(record: RequestRecord, begin_s: float, end_s: float) -> float:
    if record.ttft_s is None:
        return 0.0
    first_s, rest = record.arrival_s + record.ttft_s, record.num_tokens - 1
    share = max(min(record.ended_s, end_s) - max(first_s, begin_s), 0.0) / max(record.ended_s - first_s, 1e-9)
    return (begin_s <= first_s < end_s) + rest * share


def _number(record: RequestRecord) -> int:
    return record.number


def _stream(record: RequestRecord, zero_s: float) -> StreamRecord:
    return StreamRecord(
        sent_s=record.arrival_s - zero_s,
        ended_s=record.ended_s - zero_s,
        num_tokens=record.num_tokens,
        ttft_s=record.ttft_s,
        tpot_s=record.tpot_s,
        longest_gap_s=record.max_tbt_s,
        failure=None if record.ending is RequestEnding.COMPLETED else record.ending.value,
    )


def _batch(
    batch: PlannedBatch, documents: Sequence[RequestRecord], batch_of: Sequence[PlannedBatch], zero_s: float
) -> BatchRecord:
    records = [record for record, of in zip(documents, batch_of, strict=False) if of is batch]
    failures = Counter(record.ending.value for record in records if record.ending is not RequestEnding.COMPLETED)
    began_s = min((record.arrival_s for record in documents), default=zero_s) - zero_s
    return BatchRecord(
        name=batch.name,
        window_s=batch.window_s,
        num_lines=len(batch.lines),
        began_s=began_s,
        ended_s=max((record.ended_s - zero_s for record in records), default=None),
        num_answered=len(records) - sum(failures.values()),
        num_lost=len(batch.lines) - len(records),
        num_prompt_tokens=sum(record.prompt_len for record in records),
        num_output_tokens=sum(record.num_tokens for record in records),
        failures=dict(failures),
    )
