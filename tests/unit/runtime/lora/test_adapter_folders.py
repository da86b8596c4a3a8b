"""PEFT folders as they come: what is refused, and how that is said."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from alignedserve.config.sections import LoraConfig, ModelSectionConfig
from alignedserve.core.errors import AdapterError, ConfigError
from alignedserve.core.request import LoraAdapter
from alignedserve.runtime.lora.adapter_weights import load_adapter
from alignedserve.runtime.lora.loaded_adapters import (
    Changes,
    carry_over,
    exchange,
    find_adapter,
    loaded_file,
    loaded_of,
    merged,
    read_adapter,
    read_changes,
    read_loaded,
    settle_carried,
    with_adapters,
    with_loaded,
    without_loaded,
    write_changes,
)
from alignedserve.runtime.model.decoder.model_config import ModelConfig
from alignedserve.runtime.model.model_files import read_config
from alignedserve.runtime.model.served_model import ServedModel, resolve_model
from tests.gateway.deployment_support import served_model
from tests.support.marks import each
from tests.support.models.lora_folders import write_adapter
from tests.support.models.tiny_models import make_tiny_model

Q_PROJ = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    write_adapter(folder / "adapter", make_tiny_model(folder, "llama"), rank=4)
    return folder


@pytest.fixture
def model(model_folder: Path) -> ModelConfig:
    return read_config(model_folder)


@pytest.fixture
def folder(model_folder: Path, tmp_path: Path) -> Path:
    """A copy of the adapter, to be changed."""
    for path in (model_folder / "adapter").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def change_config(folder: Path, **fields: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def find(folder: Path, model: ModelConfig, **options: Any) -> LoraAdapter:
    return find_adapter("mine", str(folder), LoraConfig(allowed_folder=str(folder), **options), model)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"peft_type": "IA3"}, "peft_type must be LORA"),
        ({"use_dora": True}, "DoRA is not supported"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is not supported"),
        ({"init_lora_weights": "pissa_niter_16"}, "changes the model's own weights"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is not supported"),
        ({"r": 100}, "above lora.max_rank"),
        ({"r": "4"}, "r must be a whole number"),
        ({"r": 5}, r"lora_A of .* has shape \[4, .*expected \[5, "),
        ({"lora_alpha": 1e300}, "lora_alpha must be between"),
        ({"target_modules": ["q_proj"]}, "which target_modules does not name"),
        ({"target_modules": "(" * 100}, "is not a regular expression"),
        ({"target_modules": "(?=q).*"}, "no look-around"),
        ({"layers_to_transform": [0]}, "which target_modules does not name"),
        ({"alpha_pattern": {"q_proj": "x"}}, "alpha_pattern must be a number"),
    ],
)
def test_a_config_that_is_not_supported_is_refused_by_name(
    fields: dict[str, Any], problem: str, folder: Path, model: ModelConfig
) -> None:
    change_config(folder, **fields)
    with pytest.raises(AdapterError, match=problem):
        find(folder, model)


def test_expressions_that_take_other_engines_for_ever_are_matched_at_once(folder: Path, model: ModelConfig) -> None:
    change_config(folder, target_modules="(([a-z_.0-9])*)*!", exclude_modules=None)
    with pytest.raises(AdapterError, match="does not name"):
        find(folder, model)


@pytest.mark.parametrize(
    ("name", "tensor", "problem"),
    [
        (f"{Q_PROJ}.lora_A.weight", None, "only one of the two"),
        (f"{Q_PROJ}.lora_A.weight", torch.zeros(4, 63), "expected"),
        (f"{Q_PROJ}.lora_A.weight", torch.zeros(4, 64, dtype=torch.int32), "must be a float"),
        (f"{Q_PROJ}.lora_magnitude_vector", torch.zeros(4), "is not a LoRA matrix"),
        ("base_model.model.lm_head.lora_A.weight", torch.zeros(4, 64), "lm_head is not a projection"),
        ("base_model.model.model.layers.9.mlp.up_proj.lora_A.weight", torch.zeros(4, 64), "is not a projection"),
        ("a\nb\x1b[31m", torch.zeros(1), "with a strange name"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    name: str, tensor: torch.Tensor | None, problem: str, folder: Path, model: ModelConfig
) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    tensors.pop(name, None)
    save_file(tensors if tensor is None else {**tensors, name: tensor}, path)
    with pytest.raises(AdapterError, match=problem):
        find(folder, model)


def test_numbers_that_are_not_finite_are_refused_when_they_are_read(folder: Path, model: ModelConfig) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    tensors[f"{Q_PROJ}.lora_B.weight"][0, 0] = torch.inf
    save_file(tensors, path)
    config = LoraConfig(allowed_folder=str(folder))
    files = read_adapter(find(folder, model), config)
    with pytest.raises(AdapterError, match="not finite"):
        load_adapter(files, model, torch.float32, torch.device("cpu"), max_rank=64)


@pytest.mark.parametrize("length", [0, 7, 100, -1])
def test_truncated_files_and_pickles_are_refused(length: int, folder: Path, model: ModelConfig) -> None:
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(AdapterError, match="truncated"):
        find(folder, model)
    path.rename(folder / "adapter_model.bin")
    with pytest.raises(AdapterError, match="pickle"):
        find(folder, model)


def test_only_allowed_folders_are_read(folder: Path, model: ModelConfig, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=r"lora\.allowed_folder is set"):
        find_adapter("mine", str(folder), LoraConfig(), model)
    inner = tmp_path / "allowed"
    inner.mkdir()
    (inner / "link").symlink_to(folder)
    for path in (folder, inner / "..", inner / "link"):
        with pytest.raises(AdapterError, match="not inside"):
            find_adapter("mine", str(path), LoraConfig(allowed_folder=str(inner)), model)
    assert find_adapter("mine", str(folder), LoraConfig(adapters={"other": str(folder)}), model).name == "mine"
    with pytest.raises(AdapterError, match="larger than"):
        find(folder, model, memory_bytes=1000)


def test_paths_that_lead_nowhere_are_refused(folder: Path, model: ModelConfig) -> None:
    (folder / "a").symlink_to(folder / "b")
    (folder / "b").symlink_to(folder / "a")
    for name in ("a", "a\0b", "n" * 300):
        with pytest.raises(AdapterError, match=r"leads nowhere|cannot be read"):
            find_adapter("mine", f"{folder}/{name}", LoraConfig(allowed_folder=str(folder)), model)


def test_files_that_have_changed_are_another_adapter(folder: Path, model: ModelConfig) -> None:
    config = LoraConfig(allowed_folder=str(folder))
    found = find(folder, model)
    assert read_adapter(found, config).digest == found.digest == find(folder, model).digest
    change_config(folder, lora_alpha=3.0)
    with pytest.raises(AdapterError, match="have changed"):
        read_adapter(found, config)
    assert find(folder, model).digest != found.digest


def test_an_empty_name_allows_no_folder() -> None:
    """Else everything below the folder in which the server was started would be allowed."""
    with pytest.raises(ConfigError, match=r"lora\.allowed_folder must name a folder"):
        with_adapters(resolve_model(ModelSectionConfig()), LoraConfig(allowed_folder=""))


# What was loaded while serving goes on with a replacement of its model, as far as it fits.


@pytest.fixture
def served(tmp_path: Path) -> ServedModel:
    return with_adapters(served_model("a", tmp_path), LoraConfig(allowed_folder=str(tmp_path)))


def load(served: ServedModel, folder: Path, *names: str) -> dict[str, LoraAdapter]:
    """Write adapters, and a list of them as the first deployment has it."""
    found = {}
    for seed, name in enumerate(names):
        write_adapter(folder / name, served.decoder, seed=seed)
        found[name] = find_adapter(name, str(folder / name), served.lora, served.decoder)
    changes: Changes = {}
    for adapter in found.values():
        changes = with_loaded(changes, adapter, f"owner of {adapter.name}")
    write_changes(loaded_file(folder, ""), changes)
    return found


def test_those_that_fit_are_carried_over_and_others_named(tmp_path: Path, served: ServedModel) -> None:
    found = load(served, tmp_path, "fits", "changed")
    write_adapter(tmp_path / "changed", served.decoder, seed=7)
    old, new = loaded_file(tmp_path, ""), loaded_file(tmp_path, "2")
    (problem,) = carry_over(old, new, served)
    assert problem == "the adapter changed is not carried over: its files have changed"
    assert read_loaded(new) == {"fits": found["fits"]}
    assert read_changes(new)["fits"].owner == "owner of fits"


def test_a_model_without_adapters_takes_none(tmp_path: Path, served: ServedModel) -> None:
    load(served, tmp_path, "one")
    (problem,) = carry_over(loaded_file(tmp_path, ""), loaded_file(tmp_path, "2"), replace(served, lora=LoraConfig()))
    assert "takes none" in problem
    assert read_loaded(loaded_file(tmp_path, "2")) == {}


def test_what_changed_while_the_replacement_came_up_is_settled(tmp_path: Path, served: ServedModel) -> None:
    found = load(served, tmp_path, "kept", "unloaded")
    old, new = loaded_file(tmp_path, ""), loaded_file(tmp_path, "2")
    assert carry_over(old, new, served) == ()
    late = replace(found["kept"], name="late")
    write_changes(old, without_loaded(with_loaded(read_changes(old), late), "unloaded"))
    assert settle_carried(old, new) == ("late",)
    assert read_loaded(new) == {"kept": found["kept"]}


def test_a_damaged_list_is_refused(tmp_path: Path) -> None:
    file = loaded_file(tmp_path, "")
    file.write_bytes(b"[{}]")
    with pytest.raises(AdapterError, match="cannot be read"):
        read_loaded(file)


def test_what_is_loaded_on_one_node_is_known_on_the_other_and_so_is_its_end(tmp_path: Path) -> None:
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    adapter = LoraAdapter("terse", "/terse", b"d" * 16)
    write_changes(one, with_loaded({}, adapter))
    exchange(other, exchange(one, ()))
    assert read_loaded(other) == {"terse": adapter}
    write_changes(other, without_loaded(read_changes(other), "terse"))
    exchange(one, exchange(other, exchange(one, ())))
    assert read_loaded(one) == {}
    write_changes(one, with_loaded(read_changes(one), adapter))
    assert "terse" in loaded_of({change.name: change for change in exchange(other, exchange(one, ()))})


@each("seed", range(50))
def test_nodes_agree_in_whatever_order_they_hear_of_each_other(seed: int) -> None:
    rng = random.Random(seed)
    nodes: list[Changes] = [{} for _ in range(3)]
    for _ in range(40):
        number, other = rng.randrange(3), rng.randrange(3)
        adapter = LoraAdapter(rng.choice("abc"), f"/{number}", bytes([number]) * 16)
        match rng.randrange(3):
            case 0:
                nodes[number] = with_loaded(nodes[number], adapter, rng.choice("xy"))
            case 1 if adapter.name in nodes[number]:
                nodes[number] = without_loaded(nodes[number], adapter.name)
            case _:
                nodes[number] = merged(nodes[number], nodes[other].values())
    orders = [rng.sample(nodes, 3) for _ in range(4)]
    ends = []
    for order in orders:
        changes: Changes = {}
        for node in order:
            changes = merged(changes, node.values())
        ends.append(changes)
    assert all(end == ends[0] for end in ends)
