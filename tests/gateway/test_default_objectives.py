"""Objectives of requests that name none: as the deployment's speed and the configuration have it."""

from typing import Any

import msgspec

from alignedserve.core.request import Slo
from alignedserve.messages.cluster_view import WorkerSpeed
from tests.gateway.support import Gateway, gateway, saying
from tests.harnesses.scripted_backend import IDLE_STATUS
from tests.support.marks import each

SPEED = WorkerSpeed(short_prompt_s=0.1, prompt_s=0.6, token_s=0.08, shared_token_s=0.1)
DEFAULT = Slo(ttft_s=1.8, tpot_s=0.2)


def measured(served: Gateway) -> Gateway:
    served.backend.set_status(msgspec.structs.replace(IDLE_STATUS, speed=SPEED))
    return served


async def slo_of(served: Gateway, **asked: Any) -> Slo:
    assert (await served.chat(**asked)).status_code == 200
    return served.backend.submitted[-1].slo


async def test_chat_that_names_none_has_what_the_machine_can_hold() -> None:
    async with gateway() as served:
        assert await slo_of(served) == Slo()  # no router has told a speed
        assert await slo_of(measured(served)) == DEFAULT
        assert await slo_of(served, service_tier="priority") == DEFAULT
        assert await slo_of(served, headers={"x-slo-ttft-ms": "500"}) == Slo(ttft_s=0.5, tpot_s=0.2)
        assert await slo_of(served, headers={"x-slo-deadline-ms": "500"}) == Slo(deadline_s=0.5)
        assert await slo_of(served, service_tier="flex") == Slo()
        message = {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": "hello"}]}
        await served.client.post("/v1/messages", json=message)
        assert served.backend.submitted[-1].slo == DEFAULT
        await served.client.post("/v1/responses", json={"model": "tiny", "input": "hello", "store": False})
        assert served.backend.submitted[-1].slo == DEFAULT


@each(
    ("config", "expected"),
    [
        ({"default_ttft_s": "none", "default_tpot_s": "none"}, Slo()),
        ({"default_ttft_s": 3.0, "default_tpot_s": "none"}, Slo(ttft_s=3.0)),
    ],
)
async def test_the_configuration_says_which(config: dict[str, Any], expected: Slo) -> None:
    async with gateway(**config) as served:
        assert await slo_of(measured(served)) == expected
        shown = (await served.client.get("/metrics")).text
    line = 'alignedserve_default_objective_seconds{model_name="tiny",objective="ttft"} 3.0'
    assert (line in shown) == (expected.ttft_s is not None)
    assert 'objective="tpot"} 0' not in shown


async def test_metrics_tell_them_and_whether_they_are_held() -> None:
    async with gateway() as served:
        await measured(served).chat()
        shown = (await served.client.get("/metrics")).text
    for objective, seconds in (("ttft", 1.8), ("tpot", 0.2)):
        labels = f'model_name="tiny",objective="{objective}"'
        assert f"alignedserve_default_objective_seconds{{{labels}}} {seconds}" in shown
        held = f'alignedserve_objectives_total{{model_name="tiny",objective="{objective}",outcome="held"'
        assert held in shown.replace('outcome="held",tier="default"', 'outcome="held"')


async def test_a_response_reports_on_what_its_client_named_alone() -> None:
    async with gateway() as served:
        plain = (await measured(served).chat()).json()
        named = (await served.chat(headers={"x-slo-ttft-ms": "60000"})).json()
    assert "alignedserve" not in plain
    assert named["alignedserve"]["slo"].keys() == {"ttft"}


async def test_of_a_body_of_a_thousand_prompts_the_first_few_are_chat() -> None:
    async with gateway(saying("the"), max_choices=16) as served:
        response = await measured(served).complete(prompt=["hello"] * 1000, max_tokens=1)
        assert response.status_code == 200
        slos = [request.slo for request in served.backend.submitted]
        assert slos == [DEFAULT] * 16 + [Slo()] * 984
        served.backend.submitted.clear()
        await served.complete(prompt=["hello"] * 100, max_tokens=1, headers={"x-slo-ttft-ms": "9000"})
        named = [request.slo for request in served.backend.submitted]
    assert named == [Slo(ttft_s=9.0, tpot_s=0.2)] * 16 + [Slo(ttft_s=9.0)] * 84


async def test_embeddings_have_none() -> None:
    async with gateway() as served:
        await measured(served).client.post("/v1/embeddings", json={"model": "tiny", "input": "hello"})
        assert [request.slo for request in served.backend.submitted] == [Slo()]
