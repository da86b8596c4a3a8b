"""`alignedserve doctor`: checks this machine and shows its devices."""

import importlib.metadata
import json
import os
import platform
import shutil
from dataclasses import asdict, dataclass, replace

import psutil
import torch
from rich.table import Table

from alignedserve.cli.console import results
from alignedserve.cluster.machine import this_machine
from alignedserve.cluster.memory_planner import GPU_SHARE
from alignedserve.config.environment import thread_waiting
from alignedserve.core.errors import AlignedServeError
from alignedserve.costmodel.gpu_limits import running_requests
from alignedserve.costmodel.model_shapes import model_shape
from alignedserve.costmodel.roofline import RooflineModel
from alignedserve.runtime.attention.backend import TORCH
from alignedserve.runtime.attention.libraries import FLASH_4
from alignedserve.runtime.attention.registry import describe_gpu_attention
from alignedserve.runtime.device.cores import num_cores, threads_per_worker
from alignedserve.runtime.device.devices import AUTO, CPU, CUDA, cuda_obstacle, describe_gpus, machine_remarks
from alignedserve.runtime.device.dtypes import torch_dtype
from alignedserve.runtime.device_check.choice import choose_device
from alignedserve.runtime.kv.arena_files import arena_folder
from alignedserve.runtime.kv.transfers.registry import available_transports
from alignedserve.runtime.model.named_models import pocket_folder
from alignedserve.text.tokenizer import Tokenizer
from kernels.cpu.native import supported_levels
from kernels.cpu.packed_linear import INT8, packed_levels
from kernels.linear import ONEDNN, packing

_GIB = 1024**3
_EXAMPLE = "llama-3-8b"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    topic: str
    found: str
    is_fine: bool = True


def doctor(json_output: bool) -> bool:
    findings = [*_machine(), *_engine(), *_cluster()]
    if json_output:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        table = Table(title="AlignedServe on this machine", show_header=False)
        for finding in findings:
            mark = "[green]ok[/]" if finding.is_fine else "[red]missing[/]"
            table.add_row(mark, finding.topic, finding.found)
        results().print(table)
    return all(finding.is_fine for finding in findings)


def _machine() -> list[Finding]:
    memory = psutil.virtual_memory()
    return [
        Finding("Python", platform.python_version()),
        Finding("Cores", f"{num_cores()} usable of {os.cpu_count()}; {_instruction_sets()}"),
        Finding(
            "Memory",
            f"{memory.available / _GIB:.1f} GiB available of {memory.total / _GIB:.1f} GiB",
            memory.available > 3 * _GIB,
        ),
    ]


def _instruction_sets() -> str:
    wanted = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16")
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            flags = next((line.split() for line in file if line.startswith("flags")), [])
    except OSError:
        return "instruction sets unknown"
    return ", ".join(name for name in wanted if name in flags) or "no vector extensions beyond the base"


def _engine() -> list[Finding]:
    return [
        Finding("PyTorch", torch.__version__),
        Finding("Device", _device()),
        Finding("Threads", _threads()),
        Finding("Weights", _weights()),
        Finding("Attention", _attention()),
        Finding("KV cache", _kv_cache()),
        *_gpu(),
        _pocket(),
    ]


def _device() -> str:
    obstacle = cuda_obstacle()
    if obstacle is not None:
        return f"CPU ({obstacle})"
    choice = choose_device(AUTO)
    if choice.device == CPU:
        return f"{choice.remark} ({'; '.join(describe_gpus())})"
    return f"{'; '.join(describe_gpus())}; the self-check has passed"


def _gpu() -> list[Finding]:
    flash = _installed(FLASH_4) or "not installed"
    if cuda_obstacle() is not None:
        return [Finding("flash-attn", f"{flash} (not needed on a CPU)")]
    choice = describe_gpu_attention(torch.device("cuda"))
    return [
        *(Finding("GPUs", remark) for remark in machine_remarks()),
        Finding("GPU attention", choice.decodes),
        Finding("Prompts on a GPU", f"{choice.prompts}; flash-attn: {flash}"),
        Finding("Requests at a time", _requests_at_a_time()),
    ]


def _requests_at_a_time() -> str:
    shape, machine = replace(model_shape(_EXAMPLE), dtype="bfloat16"), this_machine(CUDA)
    cache_bytes = int(min(machine.gpu_bytes) * GPU_SHARE) - shape.weight_bytes
    if cache_bytes <= 0:
        return f"{_EXAMPLE} in bfloat16 does not fit; serve says what its model has room for"
    num_tokens = cache_bytes // shape.kv_token_bytes
    count = running_requests(num_tokens, None if machine.gpu is None else RooflineModel(shape, machine.gpu))
    by = "by memory alone" if machine.gpu is None else "by memory and estimated times"
    return f"{_EXAMPLE} in bfloat16: up to {count} a worker ({by}, room for {num_tokens} tokens); serve says its own"


def _installed(distribution: str) -> str | None:
    try:
        return f"{distribution} {importlib.metadata.version(distribution)}"
    except importlib.metadata.PackageNotFoundError:
        return None


def _attention() -> str:
    best, *others = (*supported_levels(), TORCH)
    if not others:
        return "plain PyTorch: the native kernels are not built (needs a C++ compiler, then install again)"
    return f"native, straight from blocks: {best}; engine.attention_backend also takes {', '.join(others)}"


def _kv_cache() -> str:
    is_native = "in native attention" if supported_levels() else "in plain PyTorch"
    return f"the model's dtype; engine.kv_cache_dtype=int8: 8 bits, with a scale per token and head, {is_native}"


def _threads() -> str:
    alone, paired = threads_per_worker(1), threads_per_worker(2)
    return f"{alone} in one worker, {paired} in each of two; not pinned; waiting for each other {thread_waiting()}"


def _weights() -> str:
    cpu = torch.device("cpu")
    forms = {name: packing(torch_dtype(name), cpu) for name in ("float32", "bfloat16")}
    int8 = (*packed_levels(INT8, cpu), ONEDNN)[0]
    named = [f"{name} {form}" for name, form in forms.items() if form is not None]
    if not named:
        return "plain linear layers"
    return f"linear layers packed once: {', '.join(named)}; int8 {int8} where asked for"


def _pocket() -> Finding:
    try:
        Tokenizer.load(pocket_folder())
    except AlignedServeError as error:
        return Finding("Pocket model", str(error), is_fine=False)
    has_weights = (pocket_folder() / "model.safetensors").exists()
    return Finding("Pocket model", "installed" if has_weights else "weights are missing", has_weights)


def _transports() -> str:
    on_cpu = ", ".join(available_transports(has_device=False))
    if cuda_obstacle() is not None:
        return on_cpu
    return f"{on_cpu}; with engine.device=cuda {', '.join(available_transports(has_device=True))}"


def _cluster() -> list[Finding]:
    try:
        folder = arena_folder()
    except AlignedServeError as error:
        return [Finding("KV transfer", str(error), is_fine=False)]
    free = shutil.disk_usage(folder).free
    return [
        Finding("KV transfer", f"shm: shared memory in {folder}, {free / _GIB:.1f} GiB free", free > _GIB // 4),
        Finding("Transports", f"{_transports()}; on one host the first is used"),
        Finding("Tokens", "Unix sockets of this host"),
    ]
