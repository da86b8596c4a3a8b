"""The promise: chat keeps its objectives beside documents, in every topology, with one worker and with two of each.

The small form of `alignedserve certify`, against real processes of the pocket model. Three phases: bursts of chat
alone, the same beside three batches, the batches alone.
"""

import asyncio
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from alignedserve.client.openai_client import CompletionApi
from alignedserve.config.sections import (
    MIB,
    ClusterConfig,
    DecodeWorkerConfig,
    EngineConfig,
    GatewayConfig,
    ModelSectionConfig,
    PoolConfig,
    PrefillWorkerConfig,
    Topology,
)
from alignedserve.runtime.model.named_models import pocket_folder
from alignedserve.scheduling.factory import resolve_policy
from benchmarks.chaos.rooms import Rooms
from lab.certification.certificate import Certificate, certificate_of
from lab.certification.protocol import Lengths, Wanted
from lab.certification.verdict import Bounds
from lab.commands.certify.live import LiveOptions, LiveRun

pytestmark = [pytest.mark.slow, pytest.mark.promise, pytest.mark.alone, pytest.mark.timeout(240)]


@dataclass(frozen=True)
class Shape:
    """A cluster to certify."""

    topology: Topology
    num_workers: int  # of separate ones so many of each

    def configure(self, port: int) -> ClusterConfig:
        """Return its configuration."""
        return resolve_policy(
            ClusterConfig(
                topology=self.topology,
                model=ModelSectionConfig(path=str(pocket_folder()), served_model_name="pocket", dtype="float32"),
                gateway=GatewayConfig(port=port),
                engine=EngineConfig(device="cpu", threads_per_worker=1, calibration_s=0.3),
                pool=PoolConfig(memory_bytes=128 * MIB),
                prefill=PrefillWorkerConfig(
                    count=self.num_workers, kv_cache_bytes=64 * MIB, candidate_buffer_bytes=16 * MIB
                ),
                decode=DecodeWorkerConfig(count=self.num_workers, kv_cache_bytes=64 * MIB, max_running_requests=32),
            )
        )


SHAPES = [Shape(topology, count) for topology in Topology for count in (1, 2)]
# Two cores do all of it, client included, and may be busy with more: what is bounded is what a broken promise breaks by
# far. Before class order, 37 of 100 chats missed their objectives, and the latest came after 30 times its objective.
BOUNDS = Bounds(max_attainment_loss=10.0, max_ttft_ratio=3.0, min_documents_share=0.2, min_beside=0.3)
WANTED = Wanted(
    burst_s=5.0,
    idle_s=2.0,
    num_bursts=1,
    chat=Lengths(64, 32),
    documents=Lengths(256, 128),
    rate=6.0,
    num_lines=None,  # as many as last beside chat, however quick the machine is
    ttft_s=1.5,
    tpot_s=0.5,
)
_FEWEST_CHATS = 8


@pytest.fixture(params=SHAPES, ids=lambda shape: f"{shape.topology.value}-{shape.num_workers}")
def rooms(request: pytest.FixtureRequest) -> Iterator[Rooms]:
    with tempfile.TemporaryDirectory(prefix="c") as folder:
        rooms = Rooms(Path(folder), configure=request.param.configure)
        try:
            rooms.start()
            yield rooms
        finally:
            rooms.stop()


def certify(url: str) -> Certificate:
    """Measure, and judge by the bounds."""
    options = LiveOptions(
        url=url,
        api_key=None,
        model=None,
        api=CompletionApi.CHAT,
        outstanding=64,
        streams=False,
        patience_s=60.0,
        stage_s=0.5,
        settles_s=0.2,
    )
    measured = asyncio.run(LiveRun(options, WANTED, lambda words: None).run())
    return certificate_of(
        title="Certificate",
        about=(),
        protocol=measured.protocol,
        speed=measured.speed,
        evidence=measured.evidence,
        bounds=BOUNDS,
    )


def test_chat_keeps_its_objectives_beside_documents(rooms: Rooms) -> None:
    certificate = certify(rooms.url)
    figures = certificate.figures
    assert [(check.name, check.measured) for check in certificate.missed] == []
    assert figures.beside is not None
    assert figures.beside.num_sent >= _FEWEST_CHATS
