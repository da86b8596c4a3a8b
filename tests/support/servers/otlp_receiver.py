"""A collector of traces: takes OTLP over HTTP, decodes it by OpenTelemetry's own types, and keeps the spans."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from typing_extensions import override


@dataclass
class ReceivedSpan:
    """A span, and the instance of the service that it is from."""

    span: Span
    instance: str

    @property
    def attributes(self) -> dict[str, Any]:
        return plain(self.span.attributes)


@dataclass
class Collector:
    """What came, and what is answered."""

    url: str
    spans: list[ReceivedSpan] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)  # of the next answers; then 200
    hangs: threading.Event | None = None  # nothing is answered until it is set

    def named(self, name: str) -> list[ReceivedSpan]:
        return [one for one in self.spans if one.span.name == name]


def plain(attributes: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in attributes if isinstance(pair, KeyValue)}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, str(kind))


@contextmanager
def collecting() -> Iterator[Collector]:
    """Serve a collector on a free port."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if collector.hangs is not None:
                collector.hangs.wait(60)
            status = collector.statuses.pop(0) if collector.statuses else 200
            collector.headers.append({name.lower(): value for name, value in self.headers.items()})
            if status == 200 and self.path == "/v1/traces":
                _keep(body, collector)
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(status)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        @override
        def log_message(self, format: str, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    collector = Collector(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        if collector.hangs is not None:
            collector.hangs.set()
        server.shutdown()
        server.server_close()
        thread.join()


def _keep(body: bytes, collector: Collector) -> None:
    for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
        instance = plain(resource.resource.attributes)["service.instance.id"]
        for scope in resource.scope_spans:
            collector.spans += [ReceivedSpan(span, instance) for span in scope.spans]
