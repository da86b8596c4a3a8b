"""AlignedServe's scheduling inside vLLM: `vllm serve MODEL --scheduler-cls alignedserve_vllm.AlignedScheduler`.

Who imports `alignedserve_vllm` gets what stands here; docs/vllm.md is for teams that run vLLM. Nothing here loads torch
or Ray: vLLM's own processes do.
"""
