"""Whatever sizes are chosen for a model on a machine pass the checks before the start, or what would help is named."""

from dataclasses import replace
from typing import Any, NamedTuple

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.cluster import preflight
from alignedserve.cluster.memory_planner import Machine, choose_sizes
from alignedserve.config.sections import MIB, ModelSectionConfig
from alignedserve.config.unset_sizes import from_mapping
from alignedserve.core.errors import NotEnoughMemory
from alignedserve.runtime.model.served_model import ServedModel, resolve_model

POCKET = resolve_model(ModelSectionConfig())


class Free(NamedTuple):
    """Stands for the answer of `os.statvfs`."""

    f_bavail: int
    f_frsize: int = 1


@st.composite
def models(draw: st.DrawFn) -> ServedModel:
    num_kv_heads = draw(st.sampled_from([1, 2, 8, 32]))
    hidden = draw(st.sampled_from([64, 576, 2048, 4096, 8192]))
    config = replace(
        POCKET.decoder,
        hidden_size=hidden,
        embedding_size=hidden,
        intermediate_size=hidden * draw(st.integers(1, 5)),
        num_layers=draw(st.integers(1, 90)),
        num_heads=num_kv_heads * draw(st.integers(1, 8)),
        num_kv_heads=num_kv_heads,
        head_dim=draw(st.sampled_from([16, 64, 128])),
        vocab_size=draw(st.integers(100, 260_000)),
        max_position_embeddings=draw(st.sampled_from([20, 512, 2048, 8192, 40_000, 131_072, 1_000_000])),
        ties_embeddings=draw(st.booleans()),
    )
    dtype = draw(st.sampled_from(["float32", "bfloat16"]))
    quantization = draw(st.sampled_from([None, "int8"]))
    context_len = config.max_position_embeddings
    return replace(POCKET, config=config, dtype=dtype, quantization=quantization, max_context_len=context_len)


MACHINES = st.builds(
    Machine,
    available_bytes=st.integers(500, 2**18).map(lambda size: size * MIB),
    shared_bytes=st.integers(0, 2**18).map(lambda size: size * MIB),
    num_cores=st.integers(1, 128),
    has_bfloat16=st.booleans(),
)
SECTIONS = st.fixed_dictionaries(
    {},
    optional={
        "topology": st.sampled_from(["colocated", "disaggregated"]),
        "decode": st.fixed_dictionaries({"count": st.integers(1, 4)}),
        "prefill": st.fixed_dictionaries({"count": st.integers(1, 4)}),
        "engine": st.fixed_dictionaries({"block_size": st.sampled_from([8, 16, 128])}),
        "scheduling": st.fixed_dictionaries({"policy": st.sampled_from(["aligned_slo", "aligned", "fcfs"])}),
    },
)


@settings(max_examples=120, deadline=None)
@given(served=models(), machine=MACHINES, sections=SECTIONS)
def test_chosen_sizes_pass_the_checks_or_a_remedy_is_named(
    served: ServedModel, machine: Machine, sections: dict[str, Any]
) -> None:
    config = from_mapping(sections)
    choice, refusal = None, ""
    try:
        choice = choose_sizes(config, served, machine)
    except NotEnoughMemory as error:
        refusal = str(error)
    if choice is None:
        assert "; set " in refusal or "; choose a smaller model" in refusal
        return
    real = psutil.virtual_memory()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(psutil, "virtual_memory", lambda: real._replace(available=machine.available_bytes))
        patch.setattr("alignedserve.cluster.preflight.os.statvfs", lambda _: Free(machine.shared_bytes))
        preflight._check_blocks(choice.config, choice.served, None)
        preflight._check_memory(choice.config, choice.served)
    assert min(256, served.max_context_len) <= choice.served.max_context_len <= served.max_context_len
    assert (choice.served.max_context_len < served.max_context_len) == any(
        "shortened" in one for one in choice.warnings
    )
    assert choice.config.decode.max_running_requests >= 1
    assert choice.line().count("\n") == 0
