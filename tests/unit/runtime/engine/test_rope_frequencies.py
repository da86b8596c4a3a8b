"""Frequencies of rotary position embeddings against those of transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.runtime.engine.forward.decoder import Decoder, inverse_frequencies
from alignedserve.runtime.model.decoder.model_config import ModelConfig
from alignedserve.runtime.model.model_files import parse_model_config
from tests.support.models.tiny_engines import LogitsProbe, random_tokens, tiny_decoder
from tests.support.models.tiny_models import make_tiny_model, transformers_library

_SIZES: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 8}
factors = st.floats(1.0, 64.0)
lengths = st.integers(8, 1 << 17)
yarn = st.fixed_dictionaries(
    {"rope_type": st.just("yarn"), "factor": factors, "original_max_position_embeddings": lengths},
    optional={
        "beta_fast": st.floats(4.0, 64.0),
        "beta_slow": st.floats(0.1, 3.0),
        "truncate": st.booleans(),
        "mscale": st.floats(0.0, 2.0),
        "mscale_all_dim": st.floats(0.0, 2.0),
        "attention_factor": st.floats(0.1, 3.0),
    },
)
llama3 = st.fixed_dictionaries(
    {
        "rope_type": st.just("llama3"),
        "factor": factors,
        "original_max_position_embeddings": lengths,
        "low_freq_factor": st.floats(0.5, 2.0),
        "high_freq_factor": st.floats(2.5, 8.0),
    }
)
divisors = st.lists(st.floats(1.0, 50.0), min_size=16, max_size=16)
longrope = st.fixed_dictionaries(
    {"rope_type": st.just("longrope"), "original_max_position_embeddings": lengths}
    | {"short_factor": divisors, "long_factor": divisors},
    optional={"factor": factors, "attention_factor": st.floats(0.1, 3.0)},
)
linear = st.fixed_dictionaries({"rope_type": st.just("linear"), "factor": factors})


def parsed(config: Any) -> ModelConfig:
    return parse_model_config(config.to_dict())


@settings(max_examples=100)
@given(section=st.one_of(yarn, llama3, longrope, linear), theta=st.floats(100.0, 1e7), max_len=lengths)
def test_every_scaling(section: dict[str, Any], theta: float, max_len: int) -> None:
    rope_parameters = {**section, "rope_theta": theta}
    config = transformers_library().LlamaConfig(
        **_SIZES, max_position_embeddings=max_len, rope_parameters=rope_parameters
    )
    served = parsed(config)
    assert served.rope is not None
    original = section.get("original_max_position_embeddings", max_len)
    for context_len in (original, original + 1):
        expected, factor = transformers_library().modeling_rope_utils.ROPE_INIT_FUNCTIONS[section["rope_type"]](
            config, "cpu", seq_len=context_len
        )
        rope = served.for_context(context_len).rope
        assert rope is not None
        torch.testing.assert_close(inverse_frequencies(rope), expected, rtol=2e-5, atol=0.0)
        assert rope.angle_factor == pytest.approx(factor)


@pytest.mark.parametrize("kind", ["su", "yarn"])
def test_old_names_of_longrope(kind: str) -> None:
    section: dict[str, Any] = {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
    config = {**_SIZES, "model_type": "phi3", "vocab_size": 100, "max_position_embeddings": 640}
    old = parse_model_config(
        {**config, "original_max_position_embeddings": 64, "rope_scaling": {"type": kind, **section}}
    )
    section["original_max_position_embeddings"] = 64
    assert old == parse_model_config({**config, "rope_parameters": {"rope_type": "longrope", **section}})
    assert old.rope is not None
    assert old.rope.is_long
    assert old.rope.long_divisors == (2.0,) * 16


def test_yarn_stretches_the_context() -> None:
    section = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    config = {**_SIZES, "model_type": "qwen2", "vocab_size": 100, "num_key_value_heads": 2}
    assert parse_model_config({**config, "max_position_embeddings": 40960}).max_position_embeddings == 40960
    stretched = parse_model_config({**config, "max_position_embeddings": 40960, "rope_scaling": section})
    assert stretched.max_position_embeddings == 131072
    del section["original_max_position_embeddings"]
    unknown = parse_model_config({**config, "max_position_embeddings": 40960, "rope_scaling": section})
    assert unknown.max_position_embeddings == 40960


def test_short_contexts_of_longrope(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "phi3_long_rope")
    path = tmp_path / "config.json"
    path.write_text(
        path.read_text().replace('"original_max_position_embeddings": 5', '"original_max_position_embeddings": 50')
    )
    reference = transformers_library().AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    decoder = tiny_decoder(tmp_path)
    prompts = {50: random_tokens(1, 50), 51: random_tokens(1, 51)}
    for context_len, tokens in prompts.items():
        own = Decoder(decoder.config.for_context(context_len), decoder._weights)
        probe = LogitsProbe(own)
        probe.add("a", tokens)
        probe.step(a=context_len)
        with torch.no_grad():
            expected = reference(torch.tensor([tokens])).logits[0]
        torch.testing.assert_close(probe.logits("a"), expected, rtol=0.0, atol=1e-5)
