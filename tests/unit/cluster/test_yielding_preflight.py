"""Engines that cannot stop a pass between layers are refused by name."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from alignedserve.cluster.preflight import check_configuration
from alignedserve.config.sections import ClusterConfig, EngineConfig, ModelSectionConfig, SchedulingConfig
from alignedserve.core.errors import ConfigError
from alignedserve.runtime.model.served_model import resolve_model
from tests.support.models.tiny_hybrids import MAMBA2
from tests.support.models.tiny_llama import TINY_LLAMA

STOPPING = SchedulingConfig(yield_between_layers=True)


@pytest.mark.parametrize(
    ("engine", "reason"), [(EngineConfig(tensor_parallel=2), "ranks go through the layers of a pass together")]
)
def test_such_an_engine_is_refused(engine: EngineConfig, reason: str) -> None:
    config = ClusterConfig(engine=engine, scheduling=STOPPING)
    served = replace(resolve_model(ModelSectionConfig()), tensor_parallel=engine.tensor_parallel)
    with pytest.raises(ConfigError, match=f"yield_between_layers cannot be had: {reason}"):
        check_configuration(config, served)
    floored = ClusterConfig(engine=engine, scheduling=SchedulingConfig(best_effort_floor=0.2))
    with pytest.raises(ConfigError, match=f"best_effort_floor has no effect, as no pass stops: {reason}"):
        check_configuration(floored, served)
    check_configuration(ClusterConfig(engine=engine), served)


def test_on_a_gpu_passes_stop_where_that_is_asked_for(tmp_path: Path) -> None:
    engine, floored = EngineConfig(device="cuda:0"), SchedulingConfig(best_effort_floor=0.2)
    stopping = ClusterConfig(
        engine=engine, scheduling=SchedulingConfig(yield_between_layers=True, best_effort_floor=0.2)
    )
    check_configuration(stopping, resolve_model(ModelSectionConfig()))
    with pytest.raises(ConfigError, match="best_effort_floor has no effect on a GPU, where passes stop only with"):
        check_configuration(ClusterConfig(engine=engine, scheduling=floored), resolve_model(ModelSectionConfig()))
    (tmp_path / "config.json").write_text(json.dumps(TINY_LLAMA | MAMBA2 | {"num_hidden_layers": 3}))
    hybrid = resolve_model(ModelSectionConfig(path=str(tmp_path), random_weights=True))
    with pytest.raises(ConfigError, match="on a GPU, models with states or with caches of windows"):
        check_configuration(stopping, hybrid)
