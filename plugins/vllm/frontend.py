"""What the plugin does in vLLM's front end: refuse bad terms with 400, and show the scheduler's counters.

vLLM finds both by entry points, in every environment that has AlignedServe; they do nothing for another scheduler.
"""

from collections.abc import Iterator
from typing import Any

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily
from typing_extensions import override

from plugins.vllm import names
from plugins.vllm.counters import path_of, read_counters
from plugins.vllm.terms import NO_SLO, BadTerms, read_terms

CLASS_NAME = "AlignedScheduler"
_Base: Any = names.load_logger_base()


def refuse_bad_terms() -> None:
    """Let vLLM's own check of parameters look at our terms too. May be called again."""
    names.check_params_by(_problem_of)


def _problem_of(xargs: dict[str, Any]) -> tuple[str, str] | None:
    try:
        read_terms(xargs, 0, NO_SLO)
    except BadTerms as error:
        return error.name, str(error)
    return None


class SchedulerMetrics(_Base):  # type: ignore[misc]
    """A stat logger that logs nothing itself: it adds the counters to what `/metrics` answers."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self._path = path_of(names.instance_of(vllm_config, engine_index))
        self._engine = str(engine_index)
        if names.uses_scheduler(vllm_config, CLASS_NAME):
            REGISTRY.register(self)

    def describe(self) -> list[Any]:
        return []

    def collect(self) -> Iterator[CounterMetricFamily]:
        for name, value in read_counters(self._path).items():
            family = CounterMetricFamily(f"alignedserve_scheduler_{name}", "See docs/vllm.md.", labels=["engine"])
            family.add_metric([self._engine], value)
            yield family

    @override
    def record(self, *args: Any, **kwargs: Any) -> None:
        """The counters are read when they are asked for."""

    @override
    def log_engine_initialized(self) -> None:
        """There is nothing to say."""
