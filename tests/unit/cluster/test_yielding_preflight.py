"""Engines that cannot stop a pass between layers are refused by name."""

from dataclasses import replace

import pytest

from alignedserve.cluster.preflight import check_configuration
from alignedserve.config.sections import ClusterConfig, EngineConfig, ModelSectionConfig, SchedulingConfig
from alignedserve.core.errors import ConfigError
from alignedserve.runtime.model.served_model import resolve_model

STOPPING = SchedulingConfig(yield_between_layers=True)


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        (EngineConfig(device="cuda:0"), "a GPU runs what is queued on it to its end"),
        (EngineConfig(tensor_parallel=2), "ranks go through the layers of a pass together"),
    ],
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
