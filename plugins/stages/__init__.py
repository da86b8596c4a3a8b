"""Pipeline stages: a model divided by its layers among processes or hosts, on CPUs."""

from plugins.stages.block_lender import num_stage_loans
from plugins.stages.far_stages import far_stages
from plugins.stages.loading import load_stages, make_engine
from plugins.stages.stage_service import start_stage

__all__ = ["far_stages", "load_stages", "make_engine", "num_stage_loans", "start_stage"]
