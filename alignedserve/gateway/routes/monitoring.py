"""GET /health, /ready, /metrics, /version, and /v1/usage in the shape of OpenAI's usage API."""

import time
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import orjson
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from alignedserve.api.errors import NotFound, error_json
from alignedserve.api.work_lanes import NODE_LEN
from alignedserve.core.errors import InvalidRequest
from alignedserve.gateway.call import Call, RouteTable
from alignedserve.gateway.json_response import JsonResponse
from alignedserve.gateway.routes.request_parameters import positive
from alignedserve.gateway.storage_metrics import batch_metrics
from alignedserve.usage.records import DAY_S, GROUPS, HOUR_S, UsageResult, grouped

ROUTES = RouteTable()

_WIDTHS = {"1h": HOUR_S, "1d": DAY_S}
_NAMES = {"api_key_id": "key", "service_tier": "class"}  # of OpenAI's, beside ours
_DEFAULT_BUCKETS, _MAX_BUCKETS = 31, 24 * 31


@ROUTES.add("GET", "/health", is_counted=False)
async def health(_: Call) -> Response:
    return JsonResponse({"status": "alive"})


@ROUTES.add("GET", "/ready", is_counted=False)
async def ready(call: Call) -> Response:
    readiness = call.services.readiness
    missing = readiness.missing()
    if missing is None:
        return JsonResponse({"status": "ready"})
    code = "model_fails" if readiness.is_hopeless else "not_ready"
    body = error_json(f"Not ready: {missing}.", "server_error", code=code)
    return JsonResponse(body, 503, headers={"Retry-After": "1"})


@ROUTES.add("GET", "/metrics", is_counted=False)
async def metrics(call: Call) -> Response:
    """Return the metrics that Prometheus scrapes, to a key that may see what all keys use."""
    call.check_sees_all()
    services = call.services
    text = await services.lanes.report(partial(services.metrics.collected().render, services.own_labels))
    text += await services.disks.metrics()
    if services.files_api is not None:
        text += batch_metrics(await services.files_api.totals.read(services.files_api.repository))
    return Response(text, media_type=CONTENT_TYPE_LATEST)


@ROUTES.add("GET", "/version", is_counted=False)
async def get_version(_: Call) -> Response:
    return JsonResponse({"version": _VERSION})


def _installed_version() -> str:
    try:
        return version("alignedserve")
    except PackageNotFoundError:  # run from a checkout
        return "unknown"


_VERSION = _installed_version()


@ROUTES.add("GET", "/v1/usage")
async def get_usage(call: Call) -> Response:
    """Return what the caller's key has used, or all keys where its entry says `may_see_usage`."""
    services, query = call.services, call.http.query_params
    if services.files_api is None:
        raise NotFound("Usage is not kept here (batches.enabled is false).", code="usage_disabled")
    width = query.get("bucket_width", "1d")
    if width not in _WIDTHS:
        raise InvalidRequest("bucket_width must be 1h or 1d.", param="bucket_width", code="invalid_value")
    bucket_s = _WIDTHS[width]
    wanted_s, now_s = _time_of(call, "start_time", None), int(time.time()) + 1
    start_s, end_s = wanted_s // bucket_s * bucket_s, _time_of(call, "end_time", max(wanted_s, now_s))
    if end_s < wanted_s:
        raise InvalidRequest("end_time must be after start_time.", param="end_time", code="invalid_value")
    limit = positive(call, "limit", default=_DEFAULT_BUCKETS, at_most=_MAX_BUCKETS)
    stop_s = min(end_s, start_s + limit * bucket_s)
    store = services.files_api.repository.usage
    await services.usage.write(store)
    by, key = _groups(call), None if call.key.may_see_usage else call.key.name
    rows = await (store.rows(start_s, stop_s) if key is None else store.rows_of_key(key, start_s, stop_s))

    def written() -> bytes:
        results = grouped(rows, bucket_s=bucket_s, by=by, key=key)
        return orjson.dumps(_page(results, start_s, stop_s, bucket_s, has_more=stop_s < end_s))

    num_items = sum(map(len, rows.values())) + (stop_s - start_s) // bucket_s  # of all keys there may be a million
    return JsonResponse(await services.lanes.run(NODE_LEN * num_items, written, is_bounded=False))


def _time_of(call: Call, name: str, default: int | None) -> int:
    text = call.http.query_params.get(name)
    if text is None and default is not None:
        return default
    if text is None or not (text.isascii() and text.isdigit() and len(text) <= 10):
        raise InvalidRequest(f"{name} must be a time in Unix seconds.", param=name, code="invalid_value")
    return int(text)


def _groups(call: Call) -> list[str]:
    values = [*call.http.query_params.getlist("group_by"), *call.http.query_params.getlist("group_by[]")]
    names = [_NAMES.get(name, name) for text in values for name in text.split(",") if name]
    if not set(names).issubset(GROUPS):
        known = ", ".join(GROUPS)
        raise InvalidRequest(f"group_by must be some of {known}.", param="group_by", code="invalid_value")
    return names


def _page(results: list[UsageResult], start_s: int, stop_s: int, bucket_s: int, *, has_more: bool) -> dict[str, Any]:
    """Build the page. Buckets in which nothing was used have no results."""
    by_bucket: dict[int, list[dict[str, Any]]] = {}
    for result in results:
        by_bucket.setdefault(result.start_s, []).append(_result(result))
    buckets = [
        {"object": "bucket", "start_time": at_s, "end_time": at_s + bucket_s, "results": by_bucket.get(at_s, [])}
        for at_s in range(start_s, stop_s, bucket_s)
    ]
    return {"object": "page", "data": buckets, "has_more": has_more, "next_page": stop_s if has_more else None}


def _result(result: UsageResult) -> dict[str, Any]:
    key, model, request_class = result.group
    return {
        "object": "usage.result",
        "input_tokens": result.counts.input_tokens,
        "input_cached_tokens": result.counts.cached_tokens,
        "output_tokens": result.counts.output_tokens,
        "num_model_requests": result.counts.requests,
        "compute_seconds": result.counts.compute_us / 1e6,
        "key": key,
        "model": model,
        "class": request_class,
    }
