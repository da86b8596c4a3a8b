"""GET /v1/usage: what was used by bucket of time, key, model and class, in the shape of OpenAI's usage API."""

import time
from typing import Any

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from alignedserve.api.errors import NotFound
from alignedserve.api.work_lanes import NODE_LEN
from alignedserve.core.errors import InvalidRequest
from alignedserve.gateway.json_response import JsonResponse
from alignedserve.gateway.routes.dependencies import key_of, rate_limited_services
from alignedserve.gateway.routes.request_parameters import positive
from alignedserve.usage.records import DAY_S, GROUPS, HOUR_S, UsageResult, grouped

router = APIRouter()

_WIDTHS = {"1h": HOUR_S, "1d": DAY_S}
_NAMES = {"api_key_id": "key", "service_tier": "class"}  # of OpenAI's, beside ours
_DEFAULT_BUCKETS, _MAX_BUCKETS = 31, 24 * 31


@router.get("/v1/usage", response_model=None)
async def get_usage(http: Request) -> Response:
    """Return what the caller's key has used, or all keys where its entry says `may_see_usage`."""
    services, entry = await rate_limited_services(http), key_of(http)
    if services.files_api is None:
        raise NotFound("Usage is not kept here (batches.enabled is false).", code="usage_disabled")
    width = http.query_params.get("bucket_width", "1d")
    if width not in _WIDTHS:
        raise InvalidRequest("bucket_width must be 1h or 1d.", param="bucket_width", code="invalid_value")
    bucket_s = _WIDTHS[width]
    asked_s, now_s = _time_of(http, "start_time", None), int(time.time()) + 1
    start_s, end_s = asked_s // bucket_s * bucket_s, _time_of(http, "end_time", max(asked_s, now_s))
    if end_s < asked_s:
        raise InvalidRequest("end_time must be after start_time.", param="end_time", code="invalid_value")
    limit = positive(http, "limit", default=_DEFAULT_BUCKETS, at_most=_MAX_BUCKETS)
    stop_s = min(end_s, start_s + limit * bucket_s)
    store = services.files_api.repository.usage
    await services.usage.write(store)
    by, key = _groups(http), None if entry.may_see_usage else entry.name
    rows = await (store.rows(start_s, stop_s) if key is None else store.rows_of_key(key, start_s, stop_s))

    def written() -> bytes:
        found = grouped(rows, bucket_s=bucket_s, by=by, key=key)
        return orjson.dumps(_page(found, start_s, stop_s, bucket_s, has_more=stop_s < end_s))

    num_items = sum(map(len, rows.values())) + (stop_s - start_s) // bucket_s  # of all keys there may be a million
    return JsonResponse(await services.lanes.run(NODE_LEN * num_items, written, is_bounded=False))


def _time_of(http: Request, name: str, default: int | None) -> int:
    text = http.query_params.get(name)
    if text is None and default is not None:
        return default
    if text is None or not (text.isascii() and text.isdigit() and len(text) <= 10):
        raise InvalidRequest(f"{name} must be a time in Unix seconds.", param=name, code="invalid_value")
    return int(text)


def _groups(http: Request) -> list[str]:
    given = [*http.query_params.getlist("group_by"), *http.query_params.getlist("group_by[]")]
    names = [_NAMES.get(name, name) for text in given for name in text.split(",") if name]
    unknown = [name for name in names if name not in GROUPS]
    if unknown:
        known = ", ".join(GROUPS)
        raise InvalidRequest(f"group_by must be some of {known}.", param="group_by", code="invalid_value")
    return names


def _page(found: list[UsageResult], start_s: int, stop_s: int, bucket_s: int, *, has_more: bool) -> dict[str, Any]:
    """Build the page. Buckets in which nothing was used have no results."""
    results: dict[int, list[dict[str, Any]]] = {}
    for result in found:
        results.setdefault(result.start_s, []).append(_result(result))
    buckets = [
        {
            "object": "bucket",
            "start_time": at_s,
            "end_time": at_s + bucket_s,
            "results": results.get(at_s, []),
        }
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
