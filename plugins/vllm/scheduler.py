"""The class that vLLM loads."""

import time
from typing import Any

from typing_extensions import override

from alignedserve.core.request import Slo
from plugins.vllm import names
from plugins.vllm.counters import Counters, path_of
from plugins.vllm.scheduling import Planner
from plugins.vllm.terms import DEFAULT_SLO, BadTerms, read_terms

_Base: Any = names.load_base()


class AlignedScheduler(_Base):  # type: ignore[misc]
    """vLLM's scheduler, whose queues lie as AlignedServe plans. All else is vLLM's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        names.check_scheduler(self)
        counters = Counters(path_of(names.instance_of(self.vllm_config)))
        self._planner = Planner(self, default_slo(names.options_of(self)), counters=counters)

    @override
    def schedule(self, throttle_prefills: bool = False) -> Any:
        now = time.monotonic()
        layout = self._planner.lay_out(now)
        if layout is None:
            output: Any = super().schedule(throttle_prefills)
        else:
            with names.laid_out(self, layout):
                output = super().schedule(throttle_prefills)
        self._planner.scheduled(output, now)
        return output

    @override
    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        now = time.monotonic()
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self._planner.completed(scheduler_output, now)
        return outputs

    @override
    def shutdown(self) -> None:
        super().shutdown()
        self._planner.counters.close()


def default_slo(options: dict[str, Any]) -> Slo:
    """Return the objectives of chats that name none, from `--additional-config`. Raises ValueError."""
    unknown = options.keys() - {"slo_ttft_ms", "slo_tpot_ms"}
    if unknown:
        raise ValueError(f"additional_config.alignedserve has no {', '.join(sorted(unknown))}")
    try:
        return read_terms(options, 0, DEFAULT_SLO).slo
    except BadTerms as error:
        raise ValueError(f"additional_config.alignedserve: {error}") from error
