"""What a worker that computes prompts and tokens does unasked."""

import pytest

from alignedserve.config.sections import EngineConfig, ModelSectionConfig, SchedulingConfig
from alignedserve.runtime.model.served_model import resolve_model
from decode_worker.start import stops_unasked


@pytest.mark.parametrize(
    ("interference", "device", "stops"), [(None, "cpu", True), (1.1, "cpu", False), (None, "cuda:0", False)]
)
def test_passes_stop_unasked_on_cpus_where_gaps_are_not_bound(
    interference: float | None, device: str, stops: bool
) -> None:
    served = resolve_model(ModelSectionConfig())
    assert stops_unasked(SchedulingConfig(interference=interference), EngineConfig(device=device), served) is stops
