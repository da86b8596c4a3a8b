"""Configs of GGUF files: what the metadata and the tensors say, and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from alignedserve.config.sections import ModelSectionConfig
from alignedserve.core.errors import ModelError, ModelNotFound, UnsupportedModel
from alignedserve.gguf.file import GgufFile
from alignedserve.runtime.model.gguf.config import gguf_config
from alignedserve.runtime.model.model_files import check_weight_files, read_config, stored_weights
from alignedserve.runtime.model.served_model import resolve_model
from tests.support.models.tiny_gguf import write_tiny_gguf as write


def test_tokens_that_end_an_answer(tmp_path: Path) -> None:
    config = read_config(write(tmp_path / "a.gguf"))
    assert config.eos_token_ids == (2, 0)  # the one named, and a control token of a known name
    named = write(tmp_path / "b.gguf", metadata={"tokenizer.ggml.eot_token_id": 7})
    assert set(read_config(named).eos_token_ids) == {2, 7, 0}


def test_a_list_of_layers_that_are_alike_and_ends_of_no_token(tmp_path: Path) -> None:
    plain = read_config(write(tmp_path / "a.gguf"))
    lists = {"attention.head_count_kv": [plain.num_kv_heads] * 2, "feed_forward_length": [plain.intermediate_size] * 2}
    ends = {"tokenizer.ggml.eot_token_id": 2**32 - 1, "tokenizer.ggml.eom_token_id": [7, 9]}
    listed = read_config(write(tmp_path / "b.gguf", metadata=lists | ends))
    assert listed == replace(plain, eos_token_ids=(2, 7, 9, 0))
    differ = write(tmp_path / "c.gguf", metadata={"attention.head_count_kv": [4, 2]})
    with pytest.raises(UnsupportedModel, match=r"llama\.attention\.head_count_kv differs by layer"):
        read_config(differ)


WRONG = yaml.safe_load((Path(__file__).parents[1] / "refused.yaml").read_text())["gguf"]


@pytest.mark.parametrize(("metadata", "problem"), WRONG)
def test_wrong_metadata(metadata: dict[str, Any], problem: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", metadata=metadata)
    with pytest.raises(ModelError, match=problem):
        gguf_config(GgufFile(path))


def test_unknown_architecture(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", "mamba")
    with pytest.raises(UnsupportedModel, match="'mamba' is not one of llama, qwen2, qwen3, qwen3moe, gemma3"):
        read_config(path)


def test_a_matrix_of_three_dimensions_in_a_model_without_experts(tmp_path: Path) -> None:
    file = GgufFile(write(tmp_path / "a.gguf"))
    stored = file.tensors["blk.1.ffn_up.weight"]
    file.tensors[stored.name] = replace(stored, shape=(1, *stored.shape))
    with pytest.raises(ModelError, match=r"a\.gguf: tensor blk\.1\.ffn_up\.weight has shape \[1, 512, 256\], in a"):
        stored_weights(file, "float32", "cpu")


def test_more_tokens_than_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", num_extra_tokens=3)
    with pytest.raises(ModelError, match=r"has 264 tokens, the embedding 261 rows"):
        read_config(path)


def test_served_under_the_files_name(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.Q4_K_M.gguf", "llama", ("Q4_K", "Q6_K"))
    served = resolve_model(ModelSectionConfig(path=str(path)))
    assert (served.name, served.folder) == ("tiny.Q4_K_M", path)
    assert resolve_model(ModelSectionConfig(path=str(path), served_model_name="it")).name == "it"


def test_weights_in_memory_are_those_of_the_file_and_the_embedding(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", "llama", ("Q8_0", "Q5_K"))
    on_gpu = stored_weights(GgufFile(path), "float32", "cuda")
    assert "; Q8_0 multiplied in groups; Q5_K unpacked" in on_gpu.description
    assert on_gpu.unpacking_bytes > 0
    served = resolve_model(ModelSectionConfig(path=str(path), dtype="float32"))
    assert served.stored is not None
    assert served.stored.description == (
        "matrices Q8_0 (8), Q5_K (7); Q8_0 multiplied in blocks; Q5_K unpacked to float32, which takes more memory and "
        "time"
    )
    tensors = GgufFile(path).tensors.values()
    unpacked = [tensor for tensor in tensors if tensor.type.name in ("Q5_K", "F32")]
    expected = sum(tensor.num_bytes for tensor in tensors if tensor.type.name == "Q8_0")
    expected += sum(4 * tensor.num_rows * tensor.shape[-1] for tensor in unpacked)
    looked_up = GgufFile(path).tensors["token_embd.weight"]
    assert looked_up.type.name == "Q8_0"
    assert served.weight_bytes == expected + looked_up.num_bytes  # in its blocks, beside the product with it
    assert served.stored is not None
    vectors = sum(4 * tensor.shape[0] for tensor in tensors if len(tensor.shape) == 1)
    assert served.stored.step_bytes == expected - vectors
    random = resolve_model(ModelSectionConfig(path=str(path), random_weights=True))
    assert random.weight_bytes == random.config.loaded_weight_bytes(random.dtype)


def test_paths_that_are_no_model(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"GGUF")
    with pytest.raises(ModelNotFound, match=r"is a file; a model is a folder or a \.gguf file"):
        read_config(tmp_path / "a.bin")
    with pytest.raises(ModelNotFound, match="does not exist"):
        read_config(tmp_path / "b.gguf")
    (tmp_path / "c.gguf").mkdir()
    with pytest.raises(ModelNotFound, match=r"config\.json"):
        read_config(tmp_path / "c.gguf")


def test_weight_files_are_checked_by_their_header(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf")
    check_weight_files(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match="may be truncated"):
        check_weight_files(path)
