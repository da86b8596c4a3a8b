"""engine.window_cache: rings where they pay, and refused by name where they cannot be."""

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from alignedserve.cluster.preflight import check_configuration, window_cache_of
from alignedserve.config.sections import ClusterConfig, EngineConfig, ModelSectionConfig, SchedulingConfig
from alignedserve.core.errors import ConfigError
from alignedserve.runtime.model.served_model import ServedModel, resolve_model
from tests.support.models.tiny_llama import TINY_LLAMA

WINDOWS = {
    "model_type": "gemma3_text", "head_dim": 8, "num_hidden_layers": 4, "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "max_position_embeddings": 8192,
}  # fmt: skip
RING = ClusterConfig(engine=replace(ClusterConfig().engine, window_cache="ring"))


def _resolved(folder: Path, choice: str, device: str = "cpu", *, ranks: int = 1, **changes: Any) -> ServedModel:
    (folder / "config.json").write_text(json.dumps({**TINY_LLAMA, **WINDOWS, **changes}))
    section = ModelSectionConfig(path=str(folder), random_weights=True)
    return resolve_model(section, EngineConfig(device=device, tensor_parallel=ranks, window_cache=choice))


@pytest.mark.parametrize(("window", "longest", "has_rings"), [(128, 8192, True), (128, 200, False), (900, 8192, False)])
def test_chosen_where_they_pay(window: int, longest: int, has_rings: bool, tmp_path: Path) -> None:
    """A long context takes far less by them, and an ordinary one no more."""
    served = _resolved(tmp_path, "auto", sliding_window=window, max_position_embeddings=longest)
    assert served.has_rings is has_rings
    assert not _resolved(tmp_path, "whole", sliding_window=window).has_rings
    for device in ("cpu", "cuda"):
        assert _resolved(tmp_path, "ring", device, sliding_window=window).has_rings
    assert not _resolved(tmp_path, "auto", "cuda").has_rings  # until they are measured there
    if has_rings:
        rings, whole = served.block_layout(16), _resolved(tmp_path, "whole").block_layout(16)
        assert rings.bytes_of(8000) < 0.6 * whole.bytes_of(8000)
        assert rings.digest() != whole.digest()


@pytest.mark.parametrize(
    ("reason", "changes"),
    [
        ("the ranks and stages of a worker have none", {"ranks": 2}),
        ("no layers with a window beside plain ones", {"model_type": "llama", "layer_types": None}),
        ("no layers with a window beside plain ones", {"layer_types": ["sliding_attention"] * 4}),
    ],
)
def test_refused_by_name_where_a_model_has_none(reason: str, changes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"engine\.window_cache=ring: .*{reason}.*; leave it at auto"):
        _resolved(tmp_path, "ring", **changes)
    assert not _resolved(tmp_path, "auto", **changes).has_rings


@pytest.mark.parametrize(
    "changes",
    [
        {"decode": replace(ClusterConfig().decode, swap_format="int8")},
        {"scheduling": SchedulingConfig(policy="apt_serve")},
    ],
)
def test_settings_that_exclude_them(changes: dict[str, Any], tmp_path: Path) -> None:
    config = replace(RING, **changes)
    assert window_cache_of(config) == "ring"
    with pytest.raises(ConfigError, match=r"engine\.window_cache=ring: "):
        check_configuration(config, _resolved(tmp_path, "ring"))
    assert window_cache_of(replace(config, engine=ClusterConfig().engine)) == "whole"
