"""Gemma 3n's pictures: its encoder equals timm's, prompt tokens and logits are those of transformers."""

import json
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from alignedserve.core.errors import ModelError
from alignedserve.runtime.pictures import SequenceEmbeddings
from plugins.vision.families import read_vision
from plugins.vision.forms import Size
from plugins.vision.mobile_config import MobileConfig
from plugins.vision.mobile_tower import MobileTower, MobileWeights, load_mobile_weights
from plugins.vision.tower import Steps
from tests.support.models.tiny_engines import LogitsProbe, random_tokens, tiny_decoder
from tests.support.models.tiny_mobile import (
    CONFIG,
    IMAGE,
    STEP,
    random_pixels,
    random_tensors,
    recorded_map,
    timm_map,
    timm_shapes,
    timm_tower,
)
from tests.support.models.tiny_models import make_tiny_model, transformers_library

GEMMA3N: dict[str, Any] = {
    "model_type": "gemma3n",
    "text_config": {"hidden_size": 2048},
    "vision_config": {"architecture": "mobilenetv5_300m_enc", "model_args": None},
}
SQUARE = {"size": {"height": 768, "width": 768}, "do_normalize": False}


def weights() -> MobileWeights:
    return MobileWeights(random_tensors(CONFIG.tower_shapes(), 1), random_tensors(CONFIG.connector_shapes(), 2))


@torch.inference_mode()
def ended(steps: Steps) -> Tensor:
    while True:
        try:
            next(steps)
        except StopIteration as stopped:
            result: Tensor = stopped.value
            return result


def test_the_map_of_a_picture_is_timms() -> None:
    made = ended(MobileTower(CONFIG, weights()).map_steps(random_pixels()))
    torch.testing.assert_close(made[:, ::STEP], recorded_map(), rtol=0.0, atol=1e-4)


@pytest.mark.skipif(find_spec("timm") is None, reason="timm is not installed")
def test_the_record_is_what_timm_makes(tmp_path: Path) -> None:
    torch.testing.assert_close(timm_map(timm_tower())[:, ::STEP], recorded_map(), rtol=0.0, atol=1e-5)
    config = config_of(tmp_path, GEMMA3N, SQUARE)
    assert config.tower_shapes() == timm_shapes("mobilenetv5_300m_enc")


def test_in_bfloat16_it_is_close() -> None:
    tower, connector = (
        {name: own.bfloat16() for name, own in part.items()} for part in (weights().tower, weights().connector)
    )
    made = ended(MobileTower(CONFIG, MobileWeights(tower, connector)).map_steps(random_pixels()))
    assert float((made[:, ::STEP].float() - recorded_map()).abs().mean()) < 0.05 * float(recorded_map().abs().mean())


def test_prompt_tokens_and_logits_equal_transformers(tmp_path: Path) -> None:
    reference = make_tiny_model(tmp_path, "gemma3n_text")
    tower = MobileTower(CONFIG, weights())
    with torch.inference_mode():
        places = ended(tower.map_steps(random_pixels()))
        own = tower.tokens(places)
    soft = _embedder()(inputs_embeds=places[None] * CONFIG.hidden_size**0.5)[0]
    end = _embedder()(input_ids=torch.tensor([[500 + CONFIG.end_mark]]))[0]
    torch.testing.assert_close(own, torch.cat((soft, end)), rtol=1e-4, atol=1e-5)
    words = random_tokens(3, 30, 180)
    prompt = [*words[:9], *[IMAGE] * len(own), *words[9:]]
    where = np.flatnonzero(np.array(prompt) == IMAGE)
    probe = LogitsProbe(tiny_decoder(tmp_path))
    probe.add("a", prompt, pictures=SequenceEmbeddings(where, own))
    probe.add("b", words)
    for counts in ({"a": 11, "b": 5}, {"a": 1}, {"a": 1, "b": 9}, {"a": len(prompt) - 13, "b": 1}):  # in chunks
        probe.step(**counts)
    ids = torch.tensor([prompt])
    with torch.no_grad():
        inputs = reference.get_input_embeddings()(ids).masked_scatter((ids == IMAGE)[..., None], own)
        of_layers = reference.model.get_per_layer_inputs(ids)
        expected = reference(inputs_embeds=inputs, per_layer_inputs=of_layers).logits[0].double()
    torch.testing.assert_close(probe.logits("a").double(), expected, rtol=0.0, atol=1e-4)


def _embedder() -> Any:
    """Return what makes prompt tokens of maps and of marks from 500 on."""
    library, module = transformers_library(), import_module("transformers.models.gemma3n.modeling_gemma3n")
    vision = library.Gemma3nVisionConfig(hidden_size=CONFIG.hidden_size, vocab_size=CONFIG.num_marks, vocab_offset=500)
    embedder = module.Gemma3nMultimodalEmbedder(vision, library.Gemma3nTextConfig(hidden_size=CONFIG.out_width))
    embedder.load_state_dict(weights().connector)
    return embedder.requires_grad_(False)


def config_of(folder: Path, model: dict[str, Any], images: dict[str, Any]) -> MobileConfig:
    (folder / "config.json").write_text(json.dumps(model))
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    config = read_vision(folder, "gemma3n")
    assert isinstance(config, MobileConfig), "it does not see"
    return config


def test_a_folder_says_how_its_model_sees(tmp_path: Path) -> None:
    config = config_of(tmp_path, GEMMA3N, SQUARE)
    assert config.num_parameters == 294126912 + 2048 * (128 + 1 + 1 + 2048)
    form, size = config.form, Size(1600, 900)
    assert form.scaled(size) == Size(768, 768)
    assert (form.scaling.mean, form.scaling.deviation) == ((0.0,) * 3, (1.0,) * 3)
    assert form.num_tokens(size) == form.text(size).count(form.mark) == 257
    assert config_of(tmp_path, GEMMA3N, {}).form.scaling.mean == (0.5,) * 3
    seen = config.with_work(2_000_000_000).form.work
    assert seen is not None
    assert 50 < seen.num_tokens(257) < 500  # prompt tokens of 2 billion weights


def test_what_is_not_seen_is_text_alone_or_refused(tmp_path: Path) -> None:
    for tower in (None, {"architecture": "mobilenetv5_base"}, {"model_args": {"stem_size": 8}}):
        (tmp_path / "config.json").write_text(json.dumps({**GEMMA3N, "vision_config": tower}))
        assert read_vision(tmp_path, "gemma3n") is None
    with pytest.raises(ModelError, match="size must be multiples of 256"):
        config_of(tmp_path, GEMMA3N, {"size": {"height": 300, "width": 300}})
    with pytest.raises(ModelError, match="image_token_id that has layer embeddings"):
        config_of(tmp_path, {**GEMMA3N, "image_token_id": 7}, SQUARE)


def test_random_weights_of_a_whole_tower_are_loaded() -> None:
    loaded = load_mobile_weights(None, CONFIG, torch.bfloat16, torch.device("cpu"))
    assert ended(MobileTower(CONFIG, loaded).steps(random_pixels())).shape == (5, CONFIG.out_width)
