"""What a worker's ranks are told of the first one's engine."""

from dataclasses import replace

from alignedserve.config.sections import ModelSectionConfig
from alignedserve.runtime.engine.engine_sizes import EngineSizes
from alignedserve.runtime.engine.steps.step_passes import graph_sizes
from alignedserve.runtime.engine.worker_engine import rank_spec_of
from alignedserve.runtime.model.served_model import resolve_model


def test_all_ranks_record_graphs_of_the_same_batches_where_a_worker_holds_more_than_it_computes() -> None:
    served = replace(resolve_model(ModelSectionConfig()), tensor_parallel=2)
    sizes = EngineSizes(1 << 20, max_sequences=1088, block_size=16, max_running=50)
    told = rank_spec_of(served, sizes, num_blocks=4).engine_options
    assert graph_sizes(told.most_running) == graph_sizes(sizes.most_running)
