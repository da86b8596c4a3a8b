"""/metrics has what the endpoint picker of the Gateway API inference extension reads: names, types and meaning.

By its "Model Server Protocol", proposal 003 of github.com/kubernetes-sigs/gateway-api-inference-extension at commit
84436a96b9e6, in the names that it gives for vLLM.
"""

import time

from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from alignedserve.messages.cluster_view import AdapterLoad, AdapterLoads
from alignedserve.messages.gateways import ClusterStatus
from tests.gateway.support import gateway

BUSY = ClusterStatus(
    num_queued=3,
    num_prefilling=1,
    num_pooled=1,
    num_decoding=6,
    num_worker_blocks=200,
    num_worker_blocks_used=50,
    block_size=16,
)


async def gauges(status: ClusterStatus) -> dict[str, Sample]:
    """Return the gauges of a gateway whose router has reported this, each of one sample."""
    async with gateway() as served:
        served.backend.set_status(status)
        text = (await served.client.get("/metrics")).text
    found = {family.name: family for family in text_string_to_metric_families(text) if family.type == "gauge"}
    return {name: family.samples[0] for name, family in found.items() if len(family.samples) == 1}


async def test_load_is_told_in_the_protocols_names() -> None:
    found = await gauges(BUSY)
    assert found["vllm:num_requests_waiting"].value == 3 + 1
    assert found["vllm:num_requests_running"].value == 1 + 6
    assert found["vllm:kv_cache_usage_perc"].value == 0.25
    cache = found["vllm:cache_config_info"].labels
    assert (cache["block_size"], cache["num_gpu_blocks"]) == ("16", "200")
    assert "vllm:lora_requests_info" not in found


async def test_adapters_are_told_in_the_protocols_labels() -> None:
    loads = (AdapterLoad("terse", 2, 3), AdapterLoad("polite", 1), AdapterLoad("long", 0, 1), AdapterLoad("a,b", 1))
    sample = (await gauges(replace(BUSY, adapters=AdapterLoads(8, loads))))["vllm:lora_requests_info"]
    assert (sample.labels["max_lora"], sample.labels["running_lora_adapters"]) == ("8", "terse,polite")
    assert sample.labels["waiting_lora_adapters"] == "long"
    assert abs(sample.value - time.time()) < 60.0


async def test_adapters_that_rest_are_told_as_none() -> None:
    sample = (await gauges(replace(BUSY, adapters=AdapterLoads(8))))["vllm:lora_requests_info"]
    assert (sample.labels["running_lora_adapters"], sample.labels["waiting_lora_adapters"]) == ("", "")
