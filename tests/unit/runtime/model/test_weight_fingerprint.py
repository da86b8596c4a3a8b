"""Weights that are changed on disk under a model that is served."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from alignedserve.config.sections import ModelSectionConfig
from alignedserve.core.errors import ModelError, ModelNotFound
from alignedserve.runtime.engine.engine_sizes import EngineSizes
from alignedserve.runtime.executor import make_executor
from alignedserve.runtime.model.model_files import fingerprint_of, unchanged_weights
from alignedserve.runtime.model.served_model import ServedModel, resolve_model
from tests.support.models.tiny_encoders import make_tiny_encoder
from tests.support.models.tiny_gguf import write_tiny_gguf

OTHERS = "not the weights with which the model began to be served"


def start(served: ServedModel) -> None:
    """Load the model as a worker does that starts, or starts again."""
    make_executor(served, EngineSizes(1 << 22, 4, 16, num_threads=1)).close()


def served_at(path: Path) -> ServedModel:
    return resolve_model(ModelSectionConfig(path=str(path), dtype="float32"))


def test_a_worker_that_starts_again_does_not_load_other_weights(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "a.gguf")
    served = served_at(path)
    start(served)
    write_tiny_gguf(path, seed=1)  # of the same names, shapes and size
    with pytest.raises(ModelError, match=OTHERS):
        start(served)
    start(served_at(path))  # as `models replace` serves it
    write_tiny_gguf(path)
    start(served)


def test_nor_does_that_of_an_encoder(tmp_path: Path) -> None:
    make_tiny_encoder(tmp_path, "bert")
    served = served_at(tmp_path)
    start(served)
    weights = tmp_path / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-4:] = b"\0\0\0\1"
    weights.write_bytes(content)
    with pytest.raises(ModelError, match=OTHERS):
        start(served)


def test_weights_that_change_while_they_are_loaded_are_noticed(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "a.gguf")
    with pytest.raises(ModelError, match=OTHERS), unchanged_weights(path, fingerprint_of(path)):
        write_tiny_gguf(path, seed=1)


def test_a_copy_on_another_host_has_the_same_fingerprint(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "a.gguf")
    served = served_at(path)
    (tmp_path / "copy").mkdir()
    start(replace(served, folder=Path(shutil.copyfile(path, tmp_path / "copy" / "a.gguf"))))


def test_one_layer_of_many_is_noticed(tmp_path: Path) -> None:
    weights = {f"layers.{layer}.weight": np.full((128, 128), layer, np.float32) for layer in range(64)}
    save_file(weights, tmp_path / "model.safetensors")
    before = fingerprint_of(tmp_path)
    weights["layers.40.weight"] += 1.0
    save_file(weights, tmp_path / "model.safetensors")
    assert fingerprint_of(tmp_path) not in ("", before)


def test_weights_that_are_gone_or_cut_off_are_named(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "a.gguf")
    served = served_at(path)
    path.write_bytes(path.read_bytes()[:-4096])
    with pytest.raises(ModelError, match=r"a\.gguf.*truncated"):
        start(served)
    path.unlink()
    with pytest.raises(ModelNotFound, match=r"a\.gguf"):
        start(served)
