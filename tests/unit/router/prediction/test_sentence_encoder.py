"""The BERT network in numpy against `transformers`, and what is refused."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from alignedserve.core.errors import ModelError, UnsupportedModel
from alignedserve.runtime.model.built_in import pocket_folder
from alignedserve.text.tokenizer import Tokenizer
from router.prediction.encoders import KEY_LEN
from router.prediction.sentence_encoder import BertNetwork, SentenceEncoder

_library: Any = transformers  # which imports the code of a model when that is first asked for


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small random BERT with the pocket model's tokenizer."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 4000, "hidden_size": 24, "intermediate_size": 40}
    layers: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 3, "max_position_embeddings": 32}
    _library.BertModel(_library.BertConfig(**sizes, **layers)).save_pretrained(tmp_path)
    shutil.copy(pocket_folder() / "tokenizer.json", tmp_path)
    return tmp_path


def test_hidden_states_are_those_of_transformers(folder: Path) -> None:
    ids = [1, 5, 900, 30, 2]
    with torch.no_grad():
        expected = _library.BertModel.from_pretrained(folder)(torch.tensor([ids]))  # in eval mode
    assert BertNetwork(folder).hidden_states(ids) == pytest.approx(expected.last_hidden_state[0].numpy(), abs=1e-5)


def test_a_prompt_is_encoded_by_its_text_and_a_long_one_by_its_beginning(folder: Path) -> None:
    served = Tokenizer.load(pocket_folder())
    encoder = SentenceEncoder(folder, served.decode)
    code = encoder.encode(served.encode("spell otter"))
    assert (code.features.shape, code.key.shape) == ((24,), (KEY_LEN,))
    assert np.linalg.norm(code.key) == pytest.approx(1.0)
    assert np.isfinite(encoder.encode(served.encode("count from 1 to 200 " * 20)).key).all()


def test_another_network_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "roberta"}')
    with pytest.raises(UnsupportedModel, match="must be a bert with gelu, not a roberta with gelu"):
        BertNetwork(folder)


def test_sizes_that_are_not_those_of_the_tensors_are_refused(folder: Path) -> None:
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"hidden_size": 24', '"hidden_size": 27'))
    with pytest.raises(ModelError, match=r"do not have the sizes that config\.json says"):
        BertNetwork(folder)
