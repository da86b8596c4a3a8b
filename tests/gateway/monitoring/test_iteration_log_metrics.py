"""The decode workers' ledgers, and deployments, as they appear under /metrics."""

import msgspec

from alignedserve.api.metrics.gateway_metrics import GatewayMetrics
from alignedserve.messages.cluster_view import WorkerStatus
from tests.gateway.support import gateway, saying
from tests.harnesses.scripted_backend import IDLE_STATUS, ScriptedBackend
from tests.support.samples import TOTALS

BUSY = msgspec.structs.replace(IDLE_STATUS, iteration_log=TOTALS)


async def scraped() -> list[str]:
    async with gateway() as served:
        served.backend.set_status(BUSY)
        text = (await served.client.get("/metrics")).text
    return text.splitlines()


async def test_where_the_time_went() -> None:
    lines = await scraped()
    for line in (
        'alignedserve_decode_wall_seconds_total{model_name="tiny"} 8.0',
        'alignedserve_decode_seconds_total{model_name="tiny",part="waiting"} 5.5',
        'alignedserve_decode_seconds_total{model_name="tiny",part="turnaround"} 0.25',
        'alignedserve_decode_seconds_total{model_name="tiny",part="prepare"} 0.125',
        'alignedserve_decode_seconds_total{model_name="tiny",part="forward"} 2.0',
        'alignedserve_decode_seconds_total{model_name="tiny",part="sampling"} 0.125',
        'alignedserve_bubble_seconds_total{cause="misaligned",model_name="tiny"} 0.0625',
        'alignedserve_bubble_seconds_total{cause="prefetch_not_ready",model_name="tiny"} 0.5',
        'alignedserve_bubble_seconds_total{cause="waiting_for_prefill",model_name="tiny"} 1.0',
        'alignedserve_bubble_seconds_total{cause="nothing_to_do",model_name="tiny"} 4.0',
        "# TYPE alignedserve_bubble_seconds_total counter",
    ):
        assert line in lines


async def test_how_many_iterations_of_which_batches() -> None:
    lines = await scraped()
    for line in (
        'alignedserve_iterations_total{model_name="tiny"} 10.0',
        'alignedserve_switch_iterations_total{model_name="tiny"} 2.0',
        'alignedserve_ahead_iterations_total{model_name="tiny"} 7.0',
        'alignedserve_straggler_share_total{model_name="tiny"} 2.5',
        'alignedserve_iteration_requests_total{model_name="tiny"} 320.0',
        "# TYPE alignedserve_batch_spread histogram",
        'alignedserve_batch_spread_count{model_name="tiny"} 10.0',
        'alignedserve_batch_spread_sum{model_name="tiny"} 13.5',
    ):
        assert line in lines
    buckets = dict(line.split() for line in lines if line.startswith("alignedserve_batch_spread_bucket"))
    edges = ",".join(name.split('"')[1] for name in buckets)
    assert edges == "1.0,1.02,1.05,1.1,1.2,1.3,1.4,1.5,1.75,2.0,2.5,3.0,4.0,6.0,8.0,16.0,+Inf"
    assert list(map(float, buckets.values())) == [1, 1, 3, 3, 3, 3, 6, 6, 6, 6, 6, 10, 10, 10, 10, 10, 10]


async def test_without_a_router_there_are_none() -> None:
    async with gateway() as served:
        served.backend.set_status(None)
        assert "alignedserve_iterations" not in (await served.client.get("/metrics")).text


def test_a_model_that_wakes_again_and_again_has_the_series_that_it_had() -> None:
    metrics, found = GatewayMetrics(), []
    for woken in ("2", "3", "44"):
        status = msgspec.structs.replace(IDLE_STATUS, workers=(WorkerStatus(f"worker-0.{woken}"),))
        metrics.add_model("chat", ScriptedBackend(saying("hello")))
        metrics.add_model("docs", ScriptedBackend(saying("hello"), status), woken)
        metrics.add_model("docs", ScriptedBackend(saying("hello"), status), woken)  # read again
        text = metrics.render().decode()
        found.append({line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#")})
        metrics.remove_deployment(woken)
    assert found[0] == found[1] == found[2]
    assert 'alignedserve_worker_tokens_total{deployment="2",model_name="docs",worker="decode-0.2"}' in found[0]


def test_a_lost_worker_takes_nothing_from_what_was_counted() -> None:
    metrics, backend, told = GatewayMetrics(), ScriptedBackend(saying("hello")), []
    metrics.add_model("chat", backend)
    for num_evictions in (200, 100, 150, 0, 10):  # of two workers, of one, ...
        backend.set_status(msgspec.structs.replace(IDLE_STATUS, num_evictions=num_evictions))
        (line,) = [
            line for line in metrics.render().decode().splitlines() if line.startswith("alignedserve_evictions_total{")
        ]
        told.append(float(line.split()[-1]))
    assert told == [200.0, 200.0, 250.0, 250.0, 260.0]


def test_restarts_of_workers_are_counted_and_waking_models_have_none() -> None:
    metrics, told = GatewayMetrics(), []
    for woken, tokens in (("2", (0, 9, 4, 12)), ("3", (3, 8, 0))):
        for num_tokens in tokens:
            status = msgspec.structs.replace(
                IDLE_STATUS, workers=(WorkerStatus(f"worker-0.{woken}", num_tokens=num_tokens),)
            )
            metrics.add_model("docs", ScriptedBackend(saying("hello"), status), woken)
            (line,) = [
                line
                for line in metrics.render().decode().splitlines()
                if line.startswith("alignedserve_worker_restarts_total{")
            ]
            told.append(float(line.split()[-1]))
        metrics.remove_deployment(woken)
    assert told == [0, 0, 1, 1, 0, 0, 1]
