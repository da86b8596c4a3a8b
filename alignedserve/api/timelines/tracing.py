"""Makes what keeps and traces calls, as configured."""

from alignedserve.api.timelines.exporter import TraceExporter
from alignedserve.api.timelines.timelines import Timelines
from alignedserve.config.sections import Observing


def make_exporter(observing: Observing, gateway: str) -> TraceExporter | None:
    """Return the exporter of traces; None: there is no collector."""
    if observing.tracing.endpoint is None:
        return None
    return TraceExporter(observing.tracing, gateway, dict(observing.headers))


def make_timelines(observing: Observing, exporter: TraceExporter | None) -> Timelines:
    """Return the timelines of a gateway."""
    if exporter is None:
        return Timelines(observing.explain)
    return Timelines(observing.explain, traced_ratio=observing.tracing.sample_ratio, trace=exporter.add)
