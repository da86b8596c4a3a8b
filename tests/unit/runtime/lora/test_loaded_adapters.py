"""What was loaded while serving goes on with a replacement of its model, as far as it fits."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from alignedserve.config.sections import LoraConfig
from alignedserve.core.errors import AdapterError
from alignedserve.core.request import LoraAdapter
from alignedserve.runtime.lora.loaded_adapters import (
    Changes,
    carry_over,
    exchange,
    find_adapter,
    loaded_file,
    loaded_of,
    merged,
    read_changes,
    read_loaded,
    settle_carried,
    with_adapters,
    with_loaded,
    without_loaded,
    write_changes,
)
from alignedserve.runtime.model.served_model import ServedModel
from tests.gateway.deployment_support import served_model
from tests.support.marks import each
from tests.support.models.lora_folders import write_adapter


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
