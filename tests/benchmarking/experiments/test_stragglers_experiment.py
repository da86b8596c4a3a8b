"""Elastic workers keep long contexts apart where attention waits for the longest."""

from experiments.alignedserve import further_figures
from experiments.common import run
from experiments.stragglers import case_of


def test_long_contexts_gather_where_attention_waits_for_them() -> None:
    cases = [case_of("flash-attention-2", system, 20.0) for system in ("aligned_slo", "sarathi")]
    ours, sarathi = run(cases, processes=2, also=further_figures)
    assert ours["all.loaded_tokens_per_s"] > 1.1 * sarathi["all.loaded_tokens_per_s"]
    assert ours["straggler_share"] < 0.8 * sarathi["straggler_share"]
