"""Small evidence that tests change in one place."""

from alignedserve.core.request import Slo
from lab.certification.protocol import Lengths, Phase, Protocol, Speed
from lab.certification.records import BatchRecord, Evidence, PhaseRecord, StreamRecord

SLO = Slo(ttft_s=1.0, tpot_s=0.1)
PROTOCOL = Protocol(
    rate=2.0,
    burst_s=5.0,
    idle_s=5.0,
    num_bursts=2,
    chat=Lengths(64, 32),
    documents=Lengths(256, 128),
    num_lines=20,
    windows_s=(60.0, 600.0),
    slo=SLO,
)
SPEED = Speed(ttft_s=0.1, tpot_s=0.01, chats_per_s=5.0, documents_per_s=2.0)


def chat(
    sent_s: float = 0.0,
    ttft_s: float | None = 0.2,
    tpot_s: float = 0.02,
    failure: str | None = None,
) -> StreamRecord:
    return StreamRecord(sent_s, sent_s + 1.0, 10, ttft_s, tpot_s, 0.05, failure)


def batch(name: str = "a", **fields: object) -> BatchRecord:
    sizes = {"num_lines": 20, "num_answered": 20, "num_output_tokens": 2000, "ended_s": 20.0, "window_s": 60.0}
    return BatchRecord(name=name, **{**sizes, **fields})  # type: ignore[arg-type]


def phase(
    kind: Phase,
    chats: tuple[StreamRecord, ...] = (),
    batches: tuple[BatchRecord, ...] = (),
    ended_s: float | None = 20.0,
    failure: str | None = None,
) -> PhaseRecord:
    return PhaseRecord(
        phase=kind,
        duration_s=20.0,
        chats=chats,
        gaps_s=(0.02, 0.03, 0.05) if chats else (),
        batches=batches,
        documents_ended_s=ended_s if batches else None,
        progress=((0.0, 0), (10.0, 15), (20.0, 40)) if batches else (),
        failure=failure,
    )


def evidence(
    alone: tuple[StreamRecord, ...] = (chat(),) * 10,
    beside: tuple[StreamRecord, ...] = (chat(),) * 10,
    batches: tuple[BatchRecord, ...] = (batch("a"), batch("b")),
    beside_ended_s: float | None = 22.0,
) -> Evidence:
    return Evidence(
        (
            phase(Phase.CHAT_ALONE, alone),
            phase(Phase.BESIDE, beside, batches, beside_ended_s),
            phase(Phase.DOCUMENTS_ALONE, (), (batch("a"), batch("b"))),
        ),
        chats_per_s=5.0,
    )
