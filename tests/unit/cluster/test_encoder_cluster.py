"""A cluster that serves an encoder: its topology and its sizes."""

from pathlib import Path

import msgspec
import pytest

from alignedserve.cluster.memory_planner import Machine, choose_sizes
from alignedserve.cluster.preflight import check_configuration
from alignedserve.config.loading import load_config
from alignedserve.config.sections import ClusterConfig, LoraConfig, ModelSectionConfig, Topology
from alignedserve.core.errors import ConfigError, UnsupportedModel
from alignedserve.runtime.model.model_files import read_model_config
from alignedserve.runtime.model.served_model import ServedModel, resolve_model
from alignedserve.scheduling.factory import resolve_policy
from tests.support.models.tiny_encoders import make_tiny_encoder

GIB = 1 << 30
MACHINE = Machine(available_bytes=8 * GIB, shared_bytes=4 * GIB, num_cores=4, has_bfloat16=True)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    folder = tmp_path_factory.mktemp("encoder")
    make_tiny_encoder(folder, "bert")
    return resolve_model(ModelSectionConfig(path=str(folder)))


def test_workers_that_do_both_phases_serve_it(served: ServedModel) -> None:
    config = resolve_policy(load_config(None))
    choice = choose_sizes(config, served, MACHINE)
    check_configuration(choice.config, choice.served)
    assert choice.served.max_context_len == 128
    assert not choice.config.prefix_cache.enabled
    one_text = served.block_layout(config.engine.block_size).token_bytes * 128
    assert choice.config.decode.kv_cache_bytes >= choice.config.decode.max_running_requests * one_text


def test_separate_workers_are_refused(served: ServedModel) -> None:
    config = msgspec.structs.replace(ClusterConfig(), topology=Topology.DISAGGREGATED)
    with pytest.raises(ConfigError, match="topology"):
        check_configuration(config, served)


def test_adapters_are_refused(served: ServedModel, tmp_path: Path) -> None:
    config = msgspec.structs.replace(ClusterConfig(), lora=LoraConfig(allowed_folder=str(tmp_path)))
    with pytest.raises(ConfigError, match="lora"):
        check_configuration(config, served)


def test_what_needs_a_decoder_says_so(served: ServedModel) -> None:
    with pytest.raises(UnsupportedModel, match="decoder"):
        read_model_config(Path(served.folder))
