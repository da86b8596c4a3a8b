"""Requests with pictures through a whole cluster: each is answered as if alone, also when its worker is lost."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from alignedserve.api.prefix_hasher import PrefixHasher
from alignedserve.config.sections import ClusterConfig, RecordingConfig, Topology
from alignedserve.core.picture import Picture, picture_digest
from alignedserve.core.request import SamplingParams
from alignedserve.messages.gateways import RequestFailed
from lab.replay.component_replay import recordings_in
from plugins.vision.mobile_config import ARCHITECTURES
from tests.harnesses.client_gateway import Answer
from tests.harnesses.clusters.in_process import RoomCluster, running, small_config
from tests.replay.recorded import replays
from tests.support.models.tiny_llama import TINY_LLAMA
from tests.support.models.tiny_mobile import CONFIG as TINY_MOBILE
from tests.support.models.tiny_vision import picture
from tests.support.waiting import holds

pytestmark = pytest.mark.slow

IMAGE = 120
SAMPLING = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
HASHER = PrefixHasher(b"k" * 32, form=b"form", block_size=8)
TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
TOPOLOGIES = [Topology.COLOCATED, Topology.ELASTIC, Topology.DISAGGREGATED]


def seeing_config(folder: Path, topology: Topology, family: str = "smolvlm", **changes: Any) -> ClusterConfig:
    """Configure a tiny model of random weights: 20 tokens of a picture that is about square."""
    config = small_config(folder / "model", topology=topology, **changes)
    fields = {"model_type": family, "text_config": TINY_LLAMA, "image_token_id": IMAGE, "eos_token_id": 2}
    images: dict[str, Any] = {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}}
    if family == "smolvlm":
        fields |= {"vision_config": {**TOWER, "image_size": 16, "patch_size": 4}, "scale_factor": 2}
    elif family == "gemma3":
        fields |= {"vision_config": {**TOWER, "image_size": 32, "patch_size": 4}, "mm_tokens_per_image": 16}
        own = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 9}  # shorter than a picture
        fields |= {"text_config": {**TINY_LLAMA, **own, "layer_types": ["sliding_attention", "full_attention"]}}
        images = {}
    elif family == "llama4":
        tower = {**TOWER, "image_size": 16, "patch_size": 4, "intermediate_size": 128}
        tower |= dict.fromkeys(("projector_input_dim", "projector_output_dim", "vision_output_dim"), 24)
        experts = {"num_local_experts": 3, "intermediate_size_mlp": 48, "moe_layers": [1], "attention_chunk_size": 9}
        fields |= {"vision_config": tower, "text_config": {**TINY_LLAMA, "head_dim": 8, **experts}}
        images = {"size": {"height": 16, "width": 16}, "max_patches": 4}
    elif family == "gemma4":
        fields |= {"vision_config": {**TOWER, "head_dim": 16, "num_key_value_heads": 2, "patch_size": 4}}
        short = {"hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 128, "sliding_window": 9}
        heads = {"head_dim": 8, "global_head_dim": 16, "layer_types": ["sliding_attention", "full_attention"]}
        fields |= {"text_config": {**TINY_LLAMA, **short, **heads}}
        images = {"patch_size": 4, "max_soft_tokens": 20}
    elif family == "gemma3n":  # its encoder is as small as a test makes it
        fields |= {"vision_config": {"hidden_size": 16, "vocab_offset": 118, "vocab_size": 2}, "eoi_token_id": 119}
        short = {"hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 118, "sliding_window": 9}
        layers = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
        streams = {"num_kv_shared_layers": 2, "laurel_rank": 4, "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.5]}
        fields |= {"text_config": {**TINY_LLAMA, "head_dim": 8, **short, **layers, **streams}}
        images = {"size": {"height": 256, "width": 256}}
    else:
        text = {**TINY_LLAMA, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}
        tower = {**TOWER, "depth": 2, "num_heads": 2, "patch_size": 4, "window_size": 16, "out_hidden_size": 32}
        fields |= {"text_config": text, "vision_config": {**tower, "fullatt_block_indexes": [1]}}
        images = {"min_pixels": 64, "max_pixels": 1280, "patch_size": 4, "merge_size": 2}
    (folder / "model" / "config.json").write_text(json.dumps(fields))
    (folder / "model" / "preprocessor_config.json").write_text(json.dumps(images))
    return config


def shown(content: bytes) -> tuple[list[int], tuple[Picture, ...]]:
    """Return a prompt with this picture: the same tokens whatever it shows."""
    prompt = [5, 6, 7, *[IMAGE] * 12, 8, *[IMAGE] * 8, 9, 10, 11]
    return prompt, (Picture(content, picture_digest(content), ((3, 12), (16, 8))),)


Work = list[tuple[list[int], tuple[Picture, ...]]]
WORK: Work = [shown(picture(30, 30, seed)) for seed in (1, 2, 3)]


def submit(cluster: RoomCluster, work: tuple[list[int], tuple[Picture, ...]], prefix_root: bytes = b"") -> Answer:
    prompt, pictures = work
    return cluster.gateway.submit(prompt, SAMPLING, prefix_root=prefix_root, pictures=pictures)


def in_cells(content: bytes) -> tuple[list[int], tuple[Picture, ...]]:
    """Return a prompt with this picture of 4 rows and 4 columns."""
    return [5, 6, 7, *[IMAGE] * 16, 9, 10, 11], (Picture(content, picture_digest(content), ((3, 16),), (4, 4)),)


async def check(cluster: RoomCluster, answers: list[Answer], work: Work = WORK) -> None:
    async with asyncio.timeout(40):
        await asyncio.gather(*(answer.done.wait() for answer in answers))
    right = [cluster.reference(prompt, SAMPLING, None, pictures) for prompt, pictures in work]
    assert len({tuple(tokens) for tokens in right}) == len(work)  # they see
    assert [answer.failure for answer in answers] == [None] * len(answers)
    assert [answer.token_ids for answer in answers] == [right[number % len(work)] for number in range(len(answers))]


@pytest.mark.parametrize("topology", TOPOLOGIES)
async def test_answers_are_those_of_their_pictures(topology: Topology, tmp_path: Path) -> None:
    recording = RecordingConfig(folder=str(tmp_path / "run"))
    config = seeing_config(tmp_path, topology, recording=recording)
    root = HASHER.root("tenant", None)
    async with running(config, tmp_path) as cluster:
        await check(cluster, [submit(cluster, work, root) for work in (*WORK, *WORK)])
        before = sum(engine.num_computed for engine in cluster.engines.values())
        await check(cluster, [submit(cluster, work, root) for work in WORK])  # from the prefix cache, each its own
        computed = sum(engine.num_computed for engine in cluster.engines.values()) - before
        assert computed < len(WORK) * (SAMPLING.max_tokens + len(WORK[0][0]) - 8)
        await cluster.gateway.idle()
    content = WORK[0][1][0].content
    assert not any(content[:64] in path.read_bytes() for path in recordings_in(tmp_path / "run"))
    assert [one.name for one in replays(tmp_path / "run") if one.difference is not None] == []


@pytest.mark.parametrize("topology", [Topology.ELASTIC, Topology.DISAGGREGATED])
async def test_a_lost_workers_requests_still_have_their_pictures(topology: Topology, tmp_path: Path) -> None:
    async with running(seeing_config(tmp_path, topology), tmp_path) as cluster:
        answers = [submit(cluster, work) for work in WORK]
        await holds(lambda: all(len(answer.token_ids) >= 5 for answer in answers))
        await cluster.stop("decode-0")
        await cluster.start_decode("decode-0")
        await check(cluster, answers)
        await cluster.gateway.idle()


@pytest.mark.parametrize("topology", [Topology.ELASTIC, Topology.DISAGGREGATED])
async def test_places_of_rows_and_columns_outlive_a_worker(topology: Topology, tmp_path: Path) -> None:
    work = [in_cells(picture(32, 32, seed)) for seed in (1, 2)]
    async with running(seeing_config(tmp_path, topology, "qwen2_5_vl"), tmp_path) as cluster:
        answers = [submit(cluster, one) for one in work]
        await holds(lambda: all(len(answer.token_ids) >= 5 for answer in answers))
        await cluster.stop("decode-0")
        await cluster.start_decode("decode-0")
        await check(cluster, answers, work)


@pytest.mark.parametrize(
    ("topology", "family", "num_tokens"),
    [(Topology.ELASTIC, "llama4", 20), (Topology.ELASTIC, "gemma4", 16), (Topology.DISAGGREGATED, "gemma3n", 257)],
)
async def test_later_families_answer_by_their_pictures(
    topology: Topology, family: str, num_tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also from the prefix cache, in small chunks, and where a worker is lost."""
    monkeypatch.setitem(ARCHITECTURES, "mobilenetv5_300m_enc", TINY_MOBILE.stages)
    config = seeing_config(tmp_path, topology, family)
    config = replace(config, decode=replace(config.decode, max_num_batched_tokens=7))
    work: Work = []
    for seed in (1, 2):
        file = picture(30, 30, seed)
        shown = Picture(file, picture_digest(file), ((3, num_tokens),))
        work.append(([5, 6, 7, *[IMAGE] * num_tokens, 9, 10, 11], (shown,)))
    root = HASHER.root("tenant", None)
    async with running(config, tmp_path) as cluster:
        await check(cluster, [submit(cluster, one, root) for one in (*work, *work)], work)
        answers = [submit(cluster, one, root) for one in work]
        await holds(lambda: all(len(answer.token_ids) >= 5 for answer in answers))
        await cluster.stop("decode-0")
        await cluster.start_decode("decode-0")
        await check(cluster, answers, work)


async def test_a_file_that_cannot_be_decoded_fails_its_request_alone(tmp_path: Path) -> None:
    async with running(seeing_config(tmp_path, Topology.ELASTIC), tmp_path) as cluster:
        bad = submit(cluster, shown(picture(30, 30)[:99]))
        await check(cluster, [submit(cluster, work) for work in WORK])
        async with asyncio.timeout(20):
            await bad.done.wait()
        assert isinstance(bad.failure, RequestFailed)
        assert "truncated or damaged" in bad.failure.reason


def both_ways(content: bytes, *words: int) -> tuple[list[int], tuple[Picture, ...]]:
    """Return a prompt with this picture, whose 16 tokens read one another, and words behind it."""
    shown = Picture(content, picture_digest(content), ((3, 16),), is_whole=True)
    return [5, 6, 7, *[IMAGE] * 16, 9, 10, *words], (shown,)


@pytest.mark.parametrize(
    ("topology", "family"), [*((one, "gemma3") for one in TOPOLOGIES), (Topology.DISAGGREGATED, "gemma4")]
)
async def test_pictures_that_are_read_both_ways_are_computed_whole(
    topology: Topology, family: str, tmp_path: Path
) -> None:
    """However prompts are cut, also where half a picture is in the prefix cache, and where a worker is lost."""
    config = seeing_config(tmp_path, topology, family)
    if family == "gemma4":
        path = tmp_path / "model" / "config.json"
        fields = json.loads(path.read_text())
        fields["text_config"] |= {"use_bidirectional_attention": "vision", "sliding_window": 24}
        path.write_text(json.dumps(fields))
    shorter = {name: replace(getattr(config, name), max_num_batched_tokens=7) for name in ("prefill", "decode")}
    config = replace(config, **shorter)
    files = [picture(32, 32, seed) for seed in (1, 2)]
    work = [both_ways(file, *range(first, first + 9)) for first in (20, 40) for file in files]
    root = HASHER.root("tenant", None)
    async with running(config, tmp_path) as cluster:
        await check(cluster, [submit(cluster, one, root) for one in work[:2]], work[:2])
        await check(cluster, [submit(cluster, one, root) for one in work], work)
        if topology is not Topology.COLOCATED:
            answers = [submit(cluster, one, root) for one in work]
            await holds(lambda: all(len(answer.token_ids) >= 5 for answer in answers))
            await cluster.stop("decode-0")
            await cluster.start_decode("decode-0")
            await check(cluster, answers, work)
        await cluster.gateway.idle()
