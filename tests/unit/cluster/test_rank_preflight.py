"""Workers of several ranks that this machine cannot have are refused by name, before anything is started."""

import warnings
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from alignedserve.cluster import preflight
from alignedserve.cluster.placement import DeploymentPlacement, NodeCapacity, engines_of
from alignedserve.config.sections import EngineConfig, ModelSectionConfig
from alignedserve.config.unset_sizes import from_mapping
from alignedserve.core.errors import ConfigError
from alignedserve.runtime.model.served_model import resolve_model
from alignedserve.scheduling.factory import resolve_policy

TOO_OLD = "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver."


def gpus(monkeypatch: pytest.MonkeyPatch, *names: str, warning: str | None = None) -> None:
    """PyTorch as it would be beside GPUs of these names."""

    def is_available() -> bool:
        if warning is not None:
            warnings.warn(warning, stacklevel=1)
        return warning is None

    def properties(gpu: Any) -> SimpleNamespace:
        return SimpleNamespace(name=names[torch.device(gpu).index])

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)


def refusal(size: int, device: str = "cuda") -> str:
    """Return why the preflight refuses workers of so many ranks."""
    sections = {"engine": {"device": device, "tensor_parallel": size}, "topology": "colocated"}
    config = resolve_policy(from_mapping(sections | {"prefix_cache": {"host_bytes": 0}}))
    served = replace(resolve_model(ModelSectionConfig()), has_random_weights=True)
    with pytest.raises(ConfigError) as caught:
        preflight.check(config, served)
    return str(caught.value)


def test_two_ranks_on_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, "H100")
    assert refusal(2) == (
        "engine.tensor_parallel is 2 from cuda:0 on, but there are 1 GPUs here, and NCCL takes no two ranks on one "
        "GPU; set it lower"
    )


def test_more_ranks_than_gpus_behind_the_one_that_was_named(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, "H100", "H100")
    assert refusal(2, "cuda:1").startswith("engine.tensor_parallel is 2 from cuda:1 on, but there are 2 GPUs here")


def test_gpus_of_two_kinds_in_any_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, "H100", "H100", "H100", "L4")
    assert refusal(2) == (
        "engine.tensor_parallel: the ranks' GPUs (cuda:2, cuda:3) are of different kinds: H100, L4; leave out the odd "
        "ones by CUDA_VISIBLE_DEVICES"
    )
    assert "(cuda:2, cuda:3)" in refusal(2, "cuda:2")


def test_copies_between_gpus_are_not_for_several_ranks() -> None:
    engine = {"device": "cuda", "kv_transport": "cuda_ipc", "tensor_parallel": 2}
    served = replace(resolve_model(ModelSectionConfig(max_context_len=256)), has_random_weights=True)
    config = resolve_policy(from_mapping({"engine": engine, "topology": "colocated"}))
    with pytest.raises(ConfigError, match=r"engine.kv_transport is cuda_ipc, .* of several ranks"):
        preflight.check_configuration(config, served)


@pytest.mark.parametrize("topology", ["colocated", "elastic", "disaggregated"])
def test_workers_of_several_gpus_are_served_in_every_topology(topology: str) -> None:
    """What the machine has does not matter."""
    sections = {"engine": {"device": "cuda", "tensor_parallel": 2}, "topology": topology}
    served = replace(resolve_model(ModelSectionConfig(max_context_len=256)), has_random_weights=True)
    preflight.check_configuration(resolve_policy(from_mapping(sections)), served)


def test_a_driver_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, "H100", "H100", warning=TOO_OLD)
    assert refusal(2) == f"engine.device is cuda, but {TOO_OLD}"


def test_heads_that_do_not_divide() -> None:
    with pytest.raises(ConfigError, match=r"engine\.tensor_parallel is 3, but the model's \d+ attention heads cannot"):
        resolve_model(ModelSectionConfig(), EngineConfig(tensor_parallel=3))


def test_a_node_with_fewer_gpus_than_ranks() -> None:
    config = resolve_policy(from_mapping({"engine": {"tensor_parallel": 4}, "decode": {"count": 1}}))
    node = NodeCapacity("node-0", "here", 16, ("cuda:0", "cuda:1"))
    with pytest.raises(
        ConfigError, match=r"tensor_parallel is 4, but of the GPUs .* no 4 are neighbours; set it lower"
    ):
        engines_of(DeploymentPlacement(config).place([node])[0], config.engine, node)
