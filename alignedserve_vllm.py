"""The name under which vLLM finds AlignedServe's scheduler: `--scheduler-cls alignedserve_vllm.AlignedScheduler`."""

from plugins.vllm.scheduler import AlignedScheduler

__all__ = ["AlignedScheduler"]
