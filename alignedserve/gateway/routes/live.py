"""The chat page, the live page and its document, counters and counts without a request, and the course of a request."""

import enum
import hashlib
import time
from functools import partial
from importlib.resources import files
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client import Histogram
from starlette.responses import Response

from alignedserve.api.errors import NotFound
from alignedserve.api.metrics.gateway_metrics import EDGES_S, ModelMetrics
from alignedserve.api.models.model_registry import RegisteredModel
from alignedserve.api.models.model_services import ModelServices
from alignedserve.api.timelines.timeline import plain_request_id
from alignedserve.batches.records import BatchTotals
from alignedserve.gateway.call import Call, RouteTable
from alignedserve.gateway.json_response import JsonResponse
from alignedserve.gateway.services import Services
from alignedserve.messages.gateways import ClusterStatus

_TOTALS = (
    *("num_prompt_tokens", "num_tokens", "num_preemptions", "num_evictions", "num_handoffs_verified"),
    *("num_handoffs_refused", "num_reused_tokens", "num_recomputed_tokens"),
)

ROUTES = RouteTable()


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
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {str(name): plain(item) for name, item in value.items()}
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
        "workers": plain(sorted(status.workers, key=lambda worker: (worker.node, worker.worker))),
        "trees": plain(status.trees),
        "prefixes": plain(status.prefixes),
        "time": {name: value for name, value in plain(log).items() if name != "spread_counts"},
        "spread": {"counts": list(accumulate(log.spread_counts))},
        "totals": {name: getattr(status, name) for name in _TOTALS},
    }


@ROUTES.add("GET", "/v1/alignedserve/live", is_counted=False)
async def live(call: Call) -> Response:
    call.check_sees_all()
    services, files_api = call.services, call.services.files_api
    totals = None if files_api is None else await files_api.totals.read(files_api.repository)
    document = live_view(services, totals, time.monotonic())
    return JsonResponse(document, headers={"Cache-Control": "no-store"})


_PAGES = Path(str(files("alignedserve.gateway"))) / "page"
_MEDIA_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
# Answers of models become elements by DOMPurify alone, and load nothing.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types dompurify"
)


def _page_file(path: Path) -> tuple[bytes, dict[str, str]]:
    content = path.read_bytes()
    return content, {
        "Content-Type": f"{_MEDIA_TYPES[path.suffix]}; charset=utf-8",
        "Content-Security-Policy": _POLICY,
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
        "ETag": f'"{hashlib.sha256(content).hexdigest()[:32]}"',
    }


_PAGE_FILES = {
    str(path.relative_to(_PAGES)): _page_file(path) for path in _PAGES.rglob("*") if path.suffix in _MEDIA_TYPES
}


@ROUTES.add("GET", "/page/{name:path}", is_counted=False)
async def page_file(call: Call, name: str) -> Response:
    if name not in _PAGE_FILES:
        raise NotFound("The page has no such file.", code="unknown_url")
    content, headers = _PAGE_FILES[name]
    if call.http.headers.get("if-none-match") == headers["ETag"]:
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers)


ROUTES.add("GET", "/", is_counted=False)(partial(page_file, name="index.html"))
ROUTES.add("GET", "/dashboard", is_counted=False)(partial(page_file, name="dashboard.html"))


@ROUTES.add("GET", "/v1/requests/{wanted}")
@ROUTES.add("GET", "/v1/alignedserve/requests/{wanted}")
async def explain(call: Call, wanted: str) -> Response:
    """Explain a request by the id of its response, or by the client's own, at whichever gateway it was made.

    Where it waits, with its place in the queue and when it is likely to start.
    """
    document = None
    if plain_request_id(wanted) is not None:
        document = await call.services.questions.explain(wanted, call.key.owner)
    if document is None:
        raise NotFound("There is no such request, or it ended too long ago.", code="request_not_found")
    return Response(document, media_type="application/json", headers={"cache-control": "no-store"})
