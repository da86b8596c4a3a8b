"""Router and workers tell a request's gateway its course, with the reasons of waits."""

import asyncio
from pathlib import Path

import pytest

from alignedserve.config.sections import Topology
from alignedserve.core.request import SamplingParams
from alignedserve.messages.request_notes import RequestNote, Step
from tests.support.in_process import RoomCluster, running, small_config
from tests.support.waiting import holds

pytestmark = pytest.mark.slow

PROMPT = list(range(3, 40))


def _sampling(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)


async def _course(cluster: RoomCluster, request_id: str) -> list[tuple[str, RequestNote]]:
    """Return its notes once its worker has told its end."""

    def notes() -> list[tuple[str, RequestNote]]:
        told = [(who, note) for who, note in cluster.gateway.notes if note.request_id == request_id]
        return sorted(told, key=lambda one: one[1].at_s)

    await holds(lambda: any(note.step is Step.FINISHED for _, note in notes()))
    await asyncio.sleep(0.6)  # two ticks, in which all others tell
    return notes()


async def test_an_elastic_worker_tells_prompt_and_decode(tmp_path: Path) -> None:
    async with running(small_config(tmp_path / "model", topology=Topology.ELASTIC), tmp_path) as cluster:
        await cluster.gateway.generate(PROMPT, _sampling(6))
        course = await _course(cluster, "r0")
    steps = [(who, note.step) for who, note in course if note.step is not Step.PREDICTED]
    assert steps == [
        ("router", Step.QUEUED),
        ("router", Step.DISPATCHED),
        ("decode-0", Step.ACCEPTED),
        ("decode-0", Step.STARTED),
        ("decode-0", Step.PREFILLED),
        ("decode-0", Step.JOINED),
        ("decode-0", Step.FINISHED),
    ]
    finished = course[-1][1]
    assert (finished.num_tokens, finished.num_iterations) == (6, 5)
    assert next(note for _, note in course if note.step is Step.DISPATCHED).peer == "decode-0"


async def test_separate_workers_tell_handoff_pool_and_batch(tmp_path: Path) -> None:
    async with running(small_config(tmp_path / "model"), tmp_path) as cluster:
        await cluster.gateway.generate(PROMPT, _sampling(6))
        course = await _course(cluster, "r0")
    steps = [note.step for _, note in course]
    wanted = [Step.QUEUED, Step.DISPATCHED, Step.ACCEPTED, Step.STARTED, Step.PREFILLED, Step.OFFERED]
    wanted += [Step.HANDED_OVER, Step.POOLED, Step.GRANTED, Step.ARRIVED, Step.LOADING, Step.JOINED, Step.FINISHED]
    assert [step for step in steps if step in wanted] == wanted
