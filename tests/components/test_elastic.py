"""Elastic workers on one event loop: requests move between them while they decode, and answers stay exact."""

import asyncio
from dataclasses import replace as changed
from pathlib import Path

import pytest
from msgspec.structs import replace

from alignedserve.config.sections import Topology
from alignedserve.core.request import SamplingParams, Slo
from tests.support.in_process import running, small_config

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(max_tokens=300, temperature=0.0, ignore_eos=True)
SHORTER = changed(GREEDY, max_tokens=100)
TOO_TIGHT = Slo(tpot_s=1e-6)  # its decodes leave a worker no time for prompts
PROMPTS = [[5 + number, 6, 7, 8 + number] for number in range(3)]


async def test_a_worker_that_comes_takes_over_from_one_that_has_no_time(tmp_path: Path) -> None:
    config = small_config(tmp_path / "model", topology=Topology.ELASTIC)
    async with running(config, tmp_path) as cluster:
        answers = [cluster.gateway.submit(prompt, GREEDY, TOO_TIGHT) for prompt in PROMPTS]
        await answers[0].first_token.wait()
        await cluster.start_decode("decode-1")
        await asyncio.gather(*(answer.done.wait() for answer in answers))
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            assert answer.token_ids == cluster.reference(prompt, GREEDY)
            assert answer.num_repeats == 0
        status = await cluster.gateway.idle()
    assert status.num_handoffs_verified > 0
    assert status.num_handoffs_refused == 0


async def test_when_one_is_lost_the_other_goes_on_with_its_requests(tmp_path: Path) -> None:
    config = small_config(tmp_path / "model", topology=Topology.ELASTIC)
    config = replace(config, decode=replace(config.decode, count=2))
    async with running(config, tmp_path) as cluster:
        answers = [cluster.gateway.submit(prompt, SHORTER, TOO_TIGHT) for prompt in PROMPTS]
        await asyncio.gather(*(answer.first_token.wait() for answer in answers))
        await cluster.stop("decode-0")
        async with asyncio.timeout(20):
            await asyncio.gather(*(answer.done.wait() for answer in answers))
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            assert answer.token_ids == cluster.reference(prompt, SHORTER)
