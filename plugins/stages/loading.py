"""Loads the first stage of a worker while the others load theirs, and makes its engine."""

from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from alignedserve.runtime.engine.engine import Engine
from alignedserve.runtime.engine.ranks.rank_group import make_block_memory
from alignedserve.runtime.engine.ranks.rank_spec import PartSpec
from alignedserve.runtime.engine.worker_engine import ConnectStages, LoadedParts, noted_progress
from alignedserve.runtime.model.served_model import ServedModel
from plugins.stages.local_stages import start_stages
from plugins.stages.stage_group import StageGroup
from plugins.stages.stage_spec import StageSpec, close_blocks, load_stage, make_stage_storage, make_whole_storage
from plugins.stages.staged_engine import StagedEngine, Stages


def load_stages(
    served: ServedModel, part: PartSpec, progress_path: Path | None, connect: ConnectStages | None
) -> LoadedParts:
    """See StagesPlugin."""
    spec = StageSpec(**asdict(part))
    blocks = make_block_memory(spec.memory_bytes) if connect is None else None
    try:
        group = StageGroup(spec, start_stages(spec, blocks) if connect is None else connect(spec))
        try:
            storage = make_stage_storage(spec, 0, blocks)
            whole = storage if blocks is None else make_whole_storage(spec, blocks)
            with noted_progress(served, progress_path) as progress:
                decoder = load_stage(spec, 0, progress)
                group.wait()
        except BaseException:
            group.close()
            raise
    finally:
        close_blocks(blocks)
    return LoadedParts(decoder, storage, whole, group)


def make_engine(parts: LoadedParts, *, goes_ahead: bool, **engine: Any) -> Engine:
    """See StagesPlugin."""
    assert isinstance(parts.ranks, StageGroup), "a model that is not divided by its layers"
    return StagedEngine(stages=Stages(parts.ranks, parts.whole_storage, goes_ahead), **engine)
