"""Sizes that are not set, worked out from machine and model."""

from dataclasses import replace
from typing import Any

import pytest

from alignedserve.cluster import memory_planner
from alignedserve.cluster.memory_planner import (
    Kept,
    Machine,
    MemoryPlanner,
    SizeChoice,
    choose_sizes,
    worker_grammar_bytes,
)
from alignedserve.config.sections import MIB, ClusterConfig, ModelSectionConfig, Topology
from alignedserve.config.unset_sizes import DefaultSize, from_mapping
from alignedserve.core.errors import NotEnoughMemory
from alignedserve.runtime.model.model_files import StoredWeights
from alignedserve.runtime.model.served_model import ServedModel, resolve_model
from alignedserve.scheduling.factory import resolve_policy
from tests.support.marks import each

GIB = 1024 * MIB
POCKET = resolve_model(ModelSectionConfig())
MACHINE = Machine(available_bytes=22 * GIB, shared_bytes=22 * GIB, num_cores=2, has_bfloat16=True)


def llama(hidden: int, inner: int, layers: int, heads: tuple[int, int], vocab: int, context: int) -> ServedModel:
    config = replace(
        POCKET.decoder,
        hidden_size=hidden,
        embedding_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=hidden // heads[0],
        vocab_size=vocab,
        max_position_embeddings=context,
        ties_embeddings=vocab > 150_000 or hidden < 1000,
    )
    return replace(POCKET, name="shape", config=config, dtype="bfloat16", max_context_len=context)


SMALL = llama(576, 1536, 30, (9, 3), 49152, 8192)  # 135M
MEDIUM = llama(896, 4864, 24, (14, 2), 151_936, 32768)  # 0.5B
LARGE = llama(2048, 6144, 28, (16, 8), 151_936, 40960)  # 1.7B
LARGEST = llama(4096, 14336, 32, (32, 8), 128_256, 131_072)  # 8B


def chosen(served: ServedModel, machine: Machine = MACHINE, **sections: Any) -> SizeChoice:
    return choose_sizes(resolve_policy(from_mapping(sections)), served, machine)


def separate(served: ServedModel, machine: Machine = MACHINE, **sections: Any) -> SizeChoice:
    return chosen(served, machine, topology="disaggregated", **sections)


def test_the_pocket_model_keeps_the_defaults() -> None:
    choice = chosen(POCKET)
    default = ClusterConfig()
    assert (choice.config.pool, choice.config.prefill, choice.config.decode) == (
        default.pool,
        default.prefill,
        default.decode,
    )
    assert (choice.config.topology, choice.served, choice.warnings) == (Topology.ELASTIC, POCKET, ())


def test_whatever_is_chosen_is_a_plain_number() -> None:
    config = chosen(SMALL, topology="colocated").config
    for section in (config.pool, config.prefill, config.decode):
        assert not [name for name in section.__struct_fields__ if isinstance(getattr(section, name), DefaultSize)]


@pytest.mark.parametrize("topology", ["elastic", "disaggregated"])
@pytest.mark.parametrize("served", [SMALL, MEDIUM])
def test_a_small_model_has_its_whole_context_and_a_batch_of_ordinary_requests(
    served: ServedModel, topology: str
) -> None:
    choice = chosen(served, topology=topology)
    assert choice.served.max_context_len == served.config.max_position_embeddings
    assert choice.config.decode.kv_cache_bytes // served.decoder.kv_token_bytes("bfloat16") >= 64 * 768
    assert choice.warnings == ()


def test_where_memory_is_short_so_is_the_context() -> None:
    choice = chosen(LARGEST)
    assert choice.served.max_context_len == 16384
    (shortened,) = choice.warnings
    assert shortened == (
        "the context is shortened from 131072 to 16384 tokens: 131072 need 16.0 GiB of cache in each memory, 41.3 GiB "
        "available in all, and 22.0 GiB are; model.max_context_len=34816 is the most that can be set"
    )


def test_what_a_shortened_context_would_need_is_enough() -> None:
    choice = chosen(LARGEST, replace(MACHINE, available_bytes=int(41.4 * GIB)))
    assert choice.served.max_context_len == 131_072


def taken_bytes(choice: SizeChoice) -> int:
    config = choice.config
    memories = [config.decode.kv_cache_bytes, config.decode.swap_space_bytes, choice.served.weight_bytes]
    if config.topology is Topology.DISAGGREGATED:
        memories[1] += config.prefill.kv_cache_bytes + config.prefill.candidate_buffer_bytes + config.pool.memory_bytes
        memories[2] *= 2
    return sum(memories)


@each("topology", ["elastic", "disaggregated"])
@each("gib", [2, 3, 5, 8, 11, 16, 22, 64, 200])
@each("served", [SMALL, MEDIUM, LARGE, LARGEST])
def test_a_quarter_stays_free_but_for_a_context_that_would_be_short(
    served: ServedModel, gib: int, topology: str
) -> None:
    machine = replace(MACHINE, available_bytes=gib * GIB, shared_bytes=gib * GIB)
    try:
        choice = chosen(served, machine, topology=topology)
    except NotEnoughMemory:
        return
    taken = taken_bytes(choice)
    assert taken <= gib * GIB * 7 // 8
    if taken > gib * GIB * 3 // 4:
        assert choice.served.max_context_len <= 16384


def test_a_context_that_is_set_may_take_more() -> None:
    wanted = replace(LARGEST, max_context_len=34816)
    choice = chosen(wanted, model={"max_context_len": 34816})
    assert choice.served.max_context_len == 34816
    assert 22 * GIB * 3 // 4 < taken_bytes(choice) <= 22 * GIB * 7 // 8


def test_weights_that_lie_in_memory_twice_leave_room_for_less() -> None:
    assert 16384 < separate(LARGE).served.max_context_len < chosen(LARGE).served.max_context_len == 40960


def test_caches_that_leave_have_room_where_the_policy_has_them_leave() -> None:
    sizes = [chosen(SMALL, scheduling={"policy": name}).config.decode for name in ("aligned_slo", "aligned")]
    assert [one.swap_space_bytes for one in sizes] == [sizes[0].kv_cache_bytes // 2, 128 * MIB]
    assert separate(SMALL).config.decode.swap_space_bytes == sizes[0].swap_space_bytes


def test_memory_is_lent_where_there_is_a_worker_beside() -> None:
    alone, pair = (chosen(SMALL, decode={"count": count}).config.prefill for count in (1, 2))
    assert alone.candidate_buffer_bytes == ClusterConfig().prefill.candidate_buffer_bytes < pair.candidate_buffer_bytes


def test_a_policy_for_separate_workers_keeps_them() -> None:
    with pytest.raises(NotEnoughMemory, match=r"2 x 15\.0 GiB of weights"):
        chosen(LARGEST, scheduling={"policy": "aligned"})


def test_pool_and_buffers_share_the_memory_file_system() -> None:
    config = separate(SMALL, replace(MACHINE, shared_bytes=700 * MIB)).config
    assert config.pool.memory_bytes + config.prefill.candidate_buffer_bytes < 700 * MIB


def test_sizes_that_are_set_stay() -> None:
    given: dict[str, Any] = {
        "decode": {"kv_cache_bytes": 5 * MIB, "max_running_requests": 7},
        "prefill": {"max_num_batched_tokens": 100},
    }
    config = separate(LARGEST, **given).config
    assert config.decode.kv_cache_bytes == 5 * MIB
    assert (config.decode.max_running_requests, config.prefill.max_num_batched_tokens) == (7, 100)


def test_a_context_that_is_set_is_not_shortened() -> None:
    wanted = replace(LARGEST, max_context_len=100_000)
    with pytest.raises(NotEnoughMemory, match=r"for a context of 100000 tokens .*; set model\.max_context_len=34816"):
        chosen(wanted, model={"max_context_len": 100_000})


@pytest.mark.parametrize(
    ("served", "sections", "remedy"),
    [
        (LARGEST, {"topology": "disaggregated"}, "set topology=elastic"),
        (LARGEST, {"decode": {"count": 2}}, r"set decode\.count=1"),
        (LARGE, {"topology": "disaggregated", "decode": {"count": 5}}, r"set decode\.count=1 and prefill\.count=1"),
        (replace(LARGEST, dtype="float32"), {}, r"set model\.quantization=int8"),
        (replace(llama(8192, 28672, 80, (64, 8), 100_000, 4096), dtype="float32"), {}, "choose a smaller model"),
    ],
)
def test_a_model_that_cannot_fit_is_refused_with_the_smallest_change(
    served: ServedModel, sections: dict[str, Any], remedy: str
) -> None:
    with pytest.raises(NotEnoughMemory, match=rf"^shape needs \d+\.\d GiB .* are available.*; {remedy}$"):
        chosen(served, **sections)


def test_chunks_are_shorter_the_larger_the_model_and_the_fewer_the_cores() -> None:
    chunks = [separate(served).config.prefill.max_num_batched_tokens for served in (SMALL, MEDIUM, LARGE)]
    assert chunks == [512, 128, 64]
    assert separate(MEDIUM, replace(MACHINE, num_cores=16)).config.prefill.max_num_batched_tokens == 512
    assert [chosen(served).config.decode.max_num_batched_tokens for served in (MEDIUM, LARGE)] == [256, 64]


def test_a_short_cache_runs_fewer_requests() -> None:
    limit = chosen(SMALL, replace(MACHINE, available_bytes=int(1.35 * GIB))).config.decode
    assert limit.kv_cache_bytes < 300 * MIB
    assert limit.max_running_requests < 64


def test_a_policy_with_hidden_caches_gets_the_room_in_which_they_are_recomputed() -> None:
    config = from_mapping({"topology": "colocated", "model": {"max_context_len": 8192}})
    machine = replace(MACHINE, available_bytes=int(1.5 * GIB))
    block_bytes = SMALL.block_layout(16).block_bytes
    plain = choose_sizes(config, SMALL, machine).config.decode.kv_cache_bytes
    with_hidden = choose_sizes(config, SMALL, machine, recomputing_bytes=block_bytes // 30).config.decode.kv_cache_bytes
    assert with_hidden >= plain >= SMALL.decoder.kv_token_bytes("bfloat16") * 8208


def test_a_gpu_gives_its_memory_to_weights_and_blocks() -> None:
    machine = replace(MACHINE, gpu_bytes=(80 * GIB,))
    config = chosen(LARGEST, machine, topology="colocated").config
    assert 50 * GIB < config.decode.kv_cache_bytes < 0.85 * 80 * GIB - LARGEST.weight_bytes + 1
    assert config.decode.max_num_batched_tokens == 8192
    stored = StoredWeights(LARGEST.weight_bytes, 0, "int4", unpacking_bytes=GIB)  # has room to unpack a product in
    less = chosen(replace(LARGEST, stored=stored), machine, topology="colocated").config
    assert config.decode.kv_cache_bytes - less.decode.kv_cache_bytes == pytest.approx(GIB, abs=MIB)
    small = chosen(LARGEST, replace(MACHINE, gpu_bytes=(24 * GIB,)), topology="colocated").config
    assert small.decode.max_num_batched_tokens == 4096
    both = separate(LARGEST, replace(MACHINE, available_bytes=64 * GIB, shared_bytes=64 * GIB, gpu_bytes=(80 * GIB,)))
    assert both.config.decode.kv_cache_bytes < 40 * GIB


def test_ranks_bring_the_memory_of_their_gpus_to_a_worker() -> None:
    gpu = int(LARGEST.weight_bytes * 0.7)  # holds no more than a part of the model
    config = from_mapping({"topology": "colocated", "engine": {"tensor_parallel": 2}, "decode": {"count": 1}})
    machine = replace(MACHINE, gpu_bytes=(gpu,) * 2)
    ranked = replace(LARGEST, tensor_parallel=2)
    cache_bytes = choose_sizes(config, ranked, machine).config.decode.kv_cache_bytes
    assert 0 < cache_bytes <= 2 * int(gpu * 0.85) - ranked.weight_bytes


def test_candidate_buffers_are_in_the_memory_of_gpus_where_workers_have_them() -> None:
    gpu = int((LARGEST.weight_bytes + 9 * GIB) / 0.85)
    machine = replace(MACHINE, available_bytes=64 * GIB, shared_bytes=64 * GIB, gpu_bytes=(gpu, gpu))
    base = {"topology": "disaggregated", "model": {"max_context_len": 8192}, "prefill": {"kv_cache_bytes": 8 * GIB}}

    def lent(transport: str) -> int:
        config = from_mapping(base | {"engine": {"kv_transport": transport}})
        return choose_sizes(config, LARGEST, machine).config.prefill.candidate_buffer_bytes

    assert 0 < lent("auto") <= GIB < lent("shm")


def test_every_worker_has_memory_for_structured_output(monkeypatch: pytest.MonkeyPatch) -> None:
    config = resolve_policy(from_mapping({"decode": {"count": 3}}))
    tight = MemoryPlanner(config, SMALL, replace(MACHINE, available_bytes=4 * GIB), 0)
    needed = tight.needed_bytes(256, Kept.AT_LEAST)
    own = worker_grammar_bytes(SMALL)
    assert 80 * MIB < own < 100 * MIB
    monkeypatch.setattr(memory_planner, "worker_grammar_bytes", lambda _: 0)
    assert needed - tight.needed_bytes(256, Kept.AT_LEAST) == 3 * own


def test_one_line_says_what_was_chosen_and_what_changes_it() -> None:
    assert separate(SMALL).line() == (
        "Sizes: bfloat16, context 8192, 1.05 GiB of cache per decode worker (49152 tokens), pool 1.05 GiB, prompts in "
        "chunks of 512, up to 92 MiB per worker for grammars; change with --set decode.kv_cache_bytes=..., "
        "pool.memory_bytes=..., model.max_context_len=... or model.dtype=..."
    )
    assert chosen(replace(SMALL, quantization="int8")).line() == (
        "Sizes: int8 and bfloat16, context 8192, 1.05 GiB of cache per worker (49152 tokens), prompts in chunks of "
        "512, up to 92 MiB per worker for grammars; change with --set decode.kv_cache_bytes=..., "
        "model.max_context_len=... or model.dtype=..."
    )
