"""Simulated pictures: a request waits for its encoder, whose turns a chat beside it can live with."""

from dataclasses import replace

import pytest

from alignedserve.core.request import RequestClass, Slo
from lab.sim.simulation import Simulation
from lab.workload.requests import TimedRequest
from tests.harnesses.simulation import MESSAGE_S, colocated, disaggregated, timed, workload_of

PREFILL_S = 0.010 + 0.001 * 40
TOKEN_S = (0.010 + 0.001 * 512) / 512  # of a long prompt


def shown(arrival_s: float = 0.0, tokens: int = 200, **fields: object) -> TimedRequest:
    return replace(timed(arrival_s, **fields), num_encoder_tokens=tokens, class_name="pictures")  # type: ignore[arg-type]


@pytest.mark.parametrize("config", [colocated(), disaggregated()])
def test_alone_it_waits_as_long_as_its_encoder_computes(config: object) -> None:
    result = Simulation(config, workload_of(shown())).run().classes["pictures"]  # type: ignore[arg-type]
    assert result.ttft_s is not None
    assert result.ttft_s.distribution.max == pytest.approx(3 * MESSAGE_S + PREFILL_S + 200 * TOKEN_S)


def test_a_chat_keeps_its_objective_beside_pictures() -> None:
    """Iterations of 10 ms and turns of up to 20: as the promise allows."""
    gaps = []
    for tpot_s in (0.1, 0.020):
        chat = replace(timed(output_len=200, slo=Slo(tpot_s=tpot_s)), class_name="chat")
        seen = [shown(0.1 + 0.1 * number, 40, output_len=1) for number in range(10)]
        run = Simulation(colocated(), workload_of(chat, *seen)).run()
        assert run.classes["pictures"].num_by_ending["completed"] == 10
        assert run.classes["chat"].attainment == 1.0
        gap = run.classes["chat"].max_tbt_s
        assert gap is not None
        gaps.append(gap.distribution.max)
    assert gaps[1] < gaps[0]


def test_a_documents_picture_gives_way() -> None:
    chat = replace(timed(output_len=100, slo=Slo(tpot_s=0.2)), class_name="chat")
    slow = shown(0.05, 400, request_class=RequestClass.BEST_EFFORT, output_len=1)
    run = Simulation(colocated(), workload_of(chat, slow)).run()
    ended = run.classes["pictures"].ttft_s
    assert ended is not None
    assert ended.distribution.max > 2 * 400 * TOKEN_S
