"""Requests through router, prefill worker, pool and decode worker (or one colocated worker), on one event loop."""

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import astuple, replace

from alignedserve.config.sections import ClusterConfig, Topology
from alignedserve.core.request import FinishReason, SamplingParams
from tests.components.work import prompts
from tests.harnesses.clusters.in_process import running, small_config


@pytest.fixture(params=list(Topology))
def config(request: pytest.FixtureRequest, tmp_path: Path) -> ClusterConfig:
    return small_config(tmp_path / "model", topology=request.param)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
async def test_greedy_answers_equal_one_engine_alone(
    config: ClusterConfig, kv_cache_dtype: str, tmp_path: Path
) -> None:
    config = replace(config, engine=replace(config.engine, kv_cache_dtype=kv_cache_dtype))
    sampling = SamplingParams(max_tokens=30, temperature=0.0)
    async with running(config, tmp_path) as cluster:
        work = prompts(12, longest=150)
        answers = await asyncio.gather(*(cluster.gateway.generate(prompt, sampling) for prompt in work))
        for prompt, answer in zip(work, answers, strict=True):
            assert answer.token_ids == cluster.reference(prompt, sampling)
            assert answer.num_repeats == 0
        status = await cluster.gateway.idle()
    assert status.num_handoffs_refused == 0
    assert all(seconds > 0.0 for seconds in astuple(status.speed))  # measured at their start, in every topology
    if config.topology is Topology.DISAGGREGATED:
        num_handed_off = sum(len(answer.token_ids) > 1 for answer in answers)
        assert status.num_handoffs_verified == num_handed_off + status.num_evictions


async def test_seeded_sampling_is_independent_of_companions(config: ClusterConfig, tmp_path: Path) -> None:
    sampling = SamplingParams(max_tokens=20, temperature=1.0, seed=7, ignore_eos=True)
    async with running(config, tmp_path) as cluster:
        prompt = prompts(1, longest=150, seed=5)[0]
        alone = await cluster.gateway.generate(prompt, sampling)
        crowd = [cluster.gateway.submit(other, sampling) for other in prompts(10, longest=150, seed=6)]
        together = await cluster.gateway.generate(prompt, sampling)
        for answer in crowd:
            await answer.done.wait()
        await cluster.gateway.idle()
    assert alone.token_ids == together.token_ids
    assert len(alone.token_ids) == 20


async def test_one_token_and_prompt_scoring_end_at_the_prefill(config: ClusterConfig, tmp_path: Path) -> None:
    async with running(config, tmp_path) as cluster:
        one = await cluster.gateway.generate([5, 6, 7], SamplingParams(max_tokens=1, temperature=0.0))
        scored = await cluster.gateway.generate(
            [5, 6, 7, 8], SamplingParams(max_tokens=0, num_prompt_logprobs=2, num_logprobs=2)
        )
        await cluster.gateway.idle()
    assert len(one.token_ids) == 1
    assert one.finish_reason is FinishReason.LENGTH
    assert scored.token_ids == []
    assert [entry.token_id for entry in scored.prompt_scores] == [6, 7, 8]
    assert all(len(entry.top) == 2 for entry in scored.prompt_scores)


async def test_embeddings_are_the_same_whatever_is_computed_beside_them(config: ClusterConfig, tmp_path: Path) -> None:
    embedding = SamplingParams(max_tokens=0, wants_embedding=True)
    async with running(config, tmp_path) as cluster:
        work = prompts(6, seed=3)
        alone = [await cluster.gateway.generate(prompt, embedding) for prompt in work]
        crowd = [cluster.gateway.submit(other, SamplingParams(max_tokens=20)) for other in prompts(6, seed=4)]
        together = await asyncio.gather(*(cluster.gateway.generate(prompt, embedding) for prompt in work))
        for answer in crowd:
            cluster.gateway.abort(answer)
        await cluster.gateway.idle()
    assert all(answer.embedding and not answer.token_ids for answer in alone)
    assert [answer.embedding for answer in alone] == [answer.embedding for answer in together]
    assert len({answer.embedding for answer in alone}) == len(work)


async def test_abort_frees_everything(config: ClusterConfig, tmp_path: Path) -> None:
    sampling = SamplingParams(max_tokens=350, temperature=0.0, ignore_eos=True)
    async with running(config, tmp_path) as cluster:
        answers = [cluster.gateway.submit(prompt, sampling) for prompt in prompts(12, seed=2)]
        await answers[0].first_token.wait()
        for answer in answers:
            cluster.gateway.abort(answer)
        await cluster.gateway.idle()
        assert not any(answer.done.is_set() for answer in answers)


@pytest.mark.slow
async def test_more_requests_than_any_memory_holds_at_once(tmp_path: Path) -> None:
    config = small_config(tmp_path / "model", pool_blocks=24, decode_blocks=40)
    sampling = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    async with running(config, tmp_path) as cluster:
        work = [prompt[:120] for prompt in prompts(20, seed=3)]
        answers = await asyncio.gather(*(cluster.gateway.generate(prompt, sampling) for prompt in work))
        for prompt, answer in zip(work, answers, strict=True):
            assert answer.token_ids == cluster.reference(prompt, sampling)
        status = await cluster.gateway.idle()
    assert status.num_evictions > 0
    assert status.num_preemptions == 0


async def test_a_request_that_can_never_fit_is_refused(tmp_path: Path) -> None:
    config = small_config(tmp_path / "model", decode_blocks=4)
    async with running(config, tmp_path) as cluster:
        answer = await cluster.gateway.generate([5] * 40, SamplingParams(max_tokens=10))
    assert answer.failure is not None
