"""Builds the document of GET /v1/alignedserve/live: counters since the start and counts of now, never a request.

Rates are for those who read it to work out, from two documents and their `time_s`: a counter that became smaller
belongs to a process that restarted.
"""

import enum
from itertools import accumulate
from typing import Any

import msgspec
from prometheus_client import Histogram

from alignedserve.api.metrics.gateway_metrics import EDGES_S, ModelMetrics
from alignedserve.api.models.model_registry import RegisteredModel
from alignedserve.api.models.model_services import ModelServices
from alignedserve.batches.records import BatchTotals
from alignedserve.gateway.services import Services
from alignedserve.messages.gateways import ClusterStatus

_TOTALS = (
    *("num_prompt_tokens", "num_tokens", "num_preemptions", "num_evictions", "num_handoffs_verified"),
    *("num_handoffs_refused", "num_reused_tokens", "num_recomputed_tokens"),
)


def live_view(services: Services, totals: BatchTotals | None, now: float) -> dict[str, Any]:
    """Build the document. `totals`: of batches; None: they are not served, or their state cannot be reached."""
    return {
        "object": "live",
        "time_s": now,
        "not_ready": services.readiness.missing(),
        "has_batches": services.files_api is not None,
        "models": [_model(registered) for registered in services.models.all],
        "batches": plain(totals) if totals is not None else None,
    }


def plain(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        return {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, tuple | list):
        return [plain(one) for one in value]
    if isinstance(value, dict):
        return {str(name): plain(one) for name, one in value.items()}
    return value.value if isinstance(value, enum.Enum) else value


def _model(registered: RegisteredModel) -> dict[str, Any]:
    view: dict[str, Any] = {"name": registered.card.name, "problem": registered.missing(), "load": None}
    if registered.services is not None:
        view |= _of_gateway(registered.services)
        status = registered.services.backend.status()
        if status is not None:
            view["load"] = _load(status)
    return view


def _of_gateway(services: ModelServices) -> dict[str, Any]:
    metrics = services.metrics
    return {
        "num_open": services.uses.num_open,
        "objectives": _objectives(metrics),
        "ttft": _histogram(metrics.ttft_s),
        "gap": {"edges": EDGES_S, "counts": metrics.tbt_s.counts()},
    }


def _objectives(metrics: ModelMetrics) -> list[dict[str, Any]]:
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for tier, objective, outcome, count in metrics.objectives():
        row = rows.setdefault((tier, objective), {"tier": tier, "objective": objective, "held": 0, "missed": 0})
        row[outcome] = count
    return [rows[key] for key in sorted(rows)]


def _histogram(histogram: Histogram) -> dict[str, Any]:
    (metric,) = histogram.collect()
    buckets = [sample for sample in metric.samples if sample.name.endswith("_bucket")]
    edges = [float(sample.labels["le"]) for sample in buckets[:-1]]
    return {"edges": edges, "counts": [int(sample.value) for sample in buckets]}


def _load(status: ClusterStatus) -> dict[str, Any]:
    log = status.iteration_log
    return {
        "tiers": {"real_time": plain(status.real_time), "best_effort": plain(status.best_effort)},
        "queue_wait_s": status.demand.queue_wait_s,
        "num_at_risk": status.demand.num_at_risk,
        "num_prefill_workers": status.num_prefill_workers,
        "num_decode_workers": status.num_decode_workers,
        "pool": {
            "num_blocks": status.num_pool_blocks,
            "num_blocks_used": status.num_pool_blocks_used,
            "num_blocks_kept": status.num_pool_blocks_kept,
        },
        "block_size": status.block_size,
        "workers": plain(sorted(status.workers, key=lambda one: (one.node, one.worker))),
        "trees": plain(status.trees),
        "prefixes": plain(status.prefixes),
        "time": {name: value for name, value in plain(log).items() if name != "spread_counts"},
        "spread": {"counts": list(accumulate(log.spread_counts))},
        "totals": {name: getattr(status, name) for name in _TOTALS},
    }
