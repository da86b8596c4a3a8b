"""Sizes that are not set, worked out from machine and model."""

from dataclasses import replace
from typing import Any

import pytest

from alignedserve.cluster.memory_planner import Machine
from alignedserve.cluster.sizing import SizeChoice, choose_sizes
from alignedserve.config.sections import MIB, ClusterConfig, ModelSectionConfig, Topology
from alignedserve.config.unset_sizes import DefaultSize, from_mapping
from alignedserve.core.errors import NotEnoughMemory
from alignedserve.runtime.model.served_model import ServedModel, resolve_model

GIB = 1024 * MIB
POCKET = resolve_model(ModelSectionConfig())
MACHINE = Machine(available_bytes=22 * GIB, shared_bytes=22 * GIB, num_cores=2, has_bfloat16=True)


def llama(hidden: int, inner: int, layers: int, heads: tuple[int, int], vocab: int, context: int) -> ServedModel:
    config = replace(
        POCKET.config,
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
    return choose_sizes(from_mapping(sections), served, machine)


def test_the_pocket_model_keeps_the_defaults() -> None:
    choice = chosen(POCKET)
    default = ClusterConfig()
    assert (choice.config.pool, choice.config.prefill, choice.config.decode) == (
        default.pool,
        default.prefill,
        default.decode,
    )
    assert (choice.config.topology, choice.served, choice.warnings) == (Topology.DISAGGREGATED, POCKET, ())


def test_whatever_is_chosen_is_a_plain_number() -> None:
    config = chosen(SMALL, topology="colocated").config
    for section in (config.pool, config.prefill, config.decode):
        assert not [name for name in section.__struct_fields__ if isinstance(getattr(section, name), DefaultSize)]


@pytest.mark.parametrize("served", [SMALL, MEDIUM])
def test_a_small_model_has_its_whole_context_and_a_batch_of_ordinary_requests(served: ServedModel) -> None:
    choice = chosen(served)
    assert choice.config.topology is Topology.DISAGGREGATED
    assert choice.served.max_context_len == served.config.max_position_embeddings
    assert choice.config.decode.kv_cache_bytes // served.config.kv_token_bytes("bfloat16") >= 64 * 768
    assert choice.warnings == ()


def test_weights_that_fit_only_once_are_shared_by_both_phases_in_a_shorter_context() -> None:
    choice = chosen(LARGEST)
    assert choice.config.topology is Topology.COLOCATED
    assert choice.served.max_context_len == 16384
    colocated, shortened = choice.warnings
    assert colocated.startswith("topology=colocated was chosen: separate prefill and decode workers hold the weights")
    assert shortened == (
        "the context is shortened from 131072 to 16384 tokens: 131072 need 16.0 GiB of cache in each memory, 41.3 GiB "
        "available in all, and 22.0 GiB are; model.max_context_len=34816 is the most that can be set"
    )


def test_what_a_shortened_context_would_need_is_enough() -> None:
    choice = chosen(LARGEST, replace(MACHINE, available_bytes=int(41.4 * GIB)))
    assert (choice.config.topology, choice.served.max_context_len) == (Topology.COLOCATED, 131_072)


def taken_bytes(choice: SizeChoice) -> int:
    config = choice.config
    memories = [config.decode.kv_cache_bytes, config.decode.swap_space_bytes, choice.served.weight_bytes]
    if config.topology is Topology.DISAGGREGATED:
        memories[1] = config.prefill.kv_cache_bytes + config.prefill.candidate_buffer_bytes + config.pool.memory_bytes
        memories[2] *= 2
    return sum(memories)


@pytest.mark.parametrize("gib", [2, 3, 5, 8, 11, 16, 22, 64, 200])
@pytest.mark.parametrize("served", [SMALL, MEDIUM, LARGE, LARGEST])
def test_a_quarter_stays_free_but_for_a_context_that_would_be_short(served: ServedModel, gib: int) -> None:
    machine = replace(MACHINE, available_bytes=gib * GIB, shared_bytes=gib * GIB)
    try:
        choice = chosen(served, machine)
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


def test_separate_workers_are_kept_where_their_context_is_long_enough() -> None:
    choice = chosen(LARGE)
    assert choice.config.topology is Topology.DISAGGREGATED
    assert 16384 < choice.served.max_context_len < 40960


@pytest.mark.parametrize("section", [{"prefill": {"count": 2}}, {"pool": {"memory_bytes": GIB}}])
def test_settings_of_separate_workers_keep_them(section: dict[str, Any]) -> None:
    assert chosen(SMALL, replace(MACHINE, shared_bytes=64 * MIB), **section).config.topology is Topology.DISAGGREGATED


def test_a_policy_for_separate_workers_keeps_them() -> None:
    with pytest.raises(NotEnoughMemory, match=r"2 x 15\.0 GiB of weights"):
        chosen(LARGEST, scheduling={"policy": "aligned"})


def test_a_small_memory_file_system_makes_workers_share() -> None:
    choice = chosen(SMALL, replace(MACHINE, shared_bytes=64 * MIB))
    assert (choice.config.topology, choice.served.max_context_len) == (Topology.COLOCATED, 8192)
    shared = replace(MACHINE, shared_bytes=700 * MIB)
    config = chosen(SMALL, shared).config
    assert config.topology is Topology.DISAGGREGATED
    assert config.pool.memory_bytes + config.prefill.candidate_buffer_bytes < 700 * MIB


def test_sizes_that_are_set_stay() -> None:
    given: dict[str, Any] = {
        "decode": {"kv_cache_bytes": 5 * MIB, "max_running_requests": 7},
        "prefill": {"max_num_batched_tokens": 100},
    }
    config = chosen(LARGEST, **given).config
    assert config.decode.kv_cache_bytes == 5 * MIB
    assert (config.decode.max_running_requests, config.prefill.max_num_batched_tokens) == (7, 100)


def test_a_context_that_is_set_is_not_shortened() -> None:
    wanted = replace(LARGEST, max_context_len=100_000)
    with pytest.raises(NotEnoughMemory, match=r"for a context of 100000 tokens .*; set model\.max_context_len=34816"):
        chosen(wanted, model={"max_context_len": 100_000})


@pytest.mark.parametrize(
    ("served", "sections", "remedy"),
    [
        (LARGEST, {"topology": "disaggregated"}, "set topology=colocated"),
        (LARGEST, {"decode": {"count": 2}}, r"set decode\.count=1 and prefill\.count=1"),
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
    chunks = [chosen(served).config.prefill.max_num_batched_tokens for served in (SMALL, MEDIUM, LARGE)]
    assert chunks == [512, 128, 64]
    assert chosen(MEDIUM, replace(MACHINE, num_cores=16)).config.prefill.max_num_batched_tokens == 512


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
    assert with_hidden >= plain >= SMALL.config.kv_token_bytes("bfloat16") * 8208


def test_a_gpu_gives_its_memory_to_weights_and_blocks() -> None:
    machine = replace(MACHINE, gpu_bytes=(80 * GIB,))
    config = chosen(LARGEST, machine, topology="colocated").config
    assert 50 * GIB < config.decode.kv_cache_bytes < 0.85 * 80 * GIB - LARGEST.weight_bytes + 1
    assert config.decode.max_num_batched_tokens == 2048
    both = chosen(LARGEST, replace(MACHINE, available_bytes=64 * GIB, shared_bytes=64 * GIB, gpu_bytes=(80 * GIB,)))
    assert both.config.topology is Topology.DISAGGREGATED
    assert both.config.decode.kv_cache_bytes < 40 * GIB


def test_one_line_says_what_was_chosen_and_what_changes_it() -> None:
    assert chosen(SMALL).line == (
        "Sizes: bfloat16, context 8192, 1.05 GiB of cache per decode worker (49152 tokens), pool 1.05 GiB, prompts in "
        "chunks of 512; change with --set decode.kv_cache_bytes=..., pool.memory_bytes=..., model.max_context_len=... "
        "or model.dtype=..."
    )
    colocated = chosen(replace(SMALL, quantization="int8"), topology="colocated").line
    assert colocated.startswith("Sizes: int8 and bfloat16, context 8192, ")
    assert "pool" not in colocated
