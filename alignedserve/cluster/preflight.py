"""Checks a configuration before anything is started, so that a mistake is reported at once and in one line."""

import errno
import os
import socket
from collections.abc import Iterable

import psutil

from alignedserve.config.sections import ClusterConfig, Topology
from alignedserve.core.block_layout import FP8, INT8
from alignedserve.core.errors import AddressInUse, ConfigError, NotEnoughMemory
from alignedserve.gguf.file import is_gguf
from alignedserve.process.tls import ServerCertificate
from alignedserve.runtime.device.devices import CUDA, check_ranks, worker_devices
from alignedserve.runtime.engine.engine_sizes import engine_mechanisms, hidden_block_tokens, storage_blocks
from alignedserve.runtime.kv.arena_files import arena_folder
from alignedserve.runtime.kv.transfers.kv_transfer import check_transport
from alignedserve.runtime.model.model_files import check_weight_files
from alignedserve.runtime.model.served_model import AUTO, WHOLE, ServedModel, load_tokenizer, no_rings
from alignedserve.scheduling.factory import check_yielding, resolve_policy
from alignedserve.scheduling.policies import policy_entry, require_policy, wanted_mechanisms, wants_shared_blocks
from alignedserve.scheduling.policy import Mechanism
from kvpool.policies import make_batch_former
from router.policies import make_prefill_order
from router.prediction import make_length_predictor

_MIB = 1024 * 1024


def check(config: ClusterConfig, served: ServedModel) -> None:
    """Check everything. Raises ConfigError, ModelError, NotEnoughMemory or AddressInUse saying what to change."""
    worker_devices(config.engine.device, 1)
    check_configuration(config, served)
    check_machine(config, served, range(config.gateway.port, config.gateway.port + config.gateway.num_ports))


def check_configuration(config: ClusterConfig, served: ServedModel) -> None:
    """Check what does not depend on the machine. Raises ConfigError or ModelError."""
    config = resolve_policy(config)
    if served.encoder is not None:
        _check_encoder(config)
    make_prefill_order(config.router.prefill_order or "")
    make_length_predictor(config.router, served)
    make_batch_former(
        config.batching.policy or "", block_size=config.engine.block_size, starvation_s=config.batching.starvation_s
    )
    block_tokens = hidden_block_tokens(served, config.scheduling, config.engine.block_size)
    if served.encoder is None and served.decoder.state is not None:
        _check_states(config, served.decoder.state.title)
    obstacle = _obstacle_to_rings(config)
    if served.has_rings and obstacle is not None:
        raise no_rings(obstacle)
    if served.encoder is None and served.decoder.extras is not None:
        _check_extras(config, served.decoder.extras.title)
    if served.pipeline_parallel > 1:
        _check_stages(config, served.num_hosts)
    _check_policy(config, block_tokens)
    _check_yielding(config, served)
    if config.lora.is_enabled and block_tokens is not None:
        raise ConfigError(
            f"lora: policy {config.scheduling.policy!r} recomputes keys and values from layer inputs, which is not "
            "done with adapters; choose another policy, or scheduling.policy_params.hybrid_cache=false"
        )
    if served.vision is not None and served.vision.needs_caches and block_tokens is not None:
        raise ConfigError(
            f"policy {config.scheduling.policy!r} recomputes keys and values from layer inputs, which is not done with "
            f"pictures of {served.decoder.family}; choose another, or scheduling.policy_params.hybrid_cache=false"
        )
    check_transport(config.engine)
    if config.engine.kv_cache_dtype in (INT8, FP8):
        _check_rounded_cache(config)
    load_tokenizer(served)
    if not served.has_random_weights and not is_gguf(served.folder):  # whose config is in its header: that was read
        check_weight_files(served.folder)
    _check_blocks(config, served, block_tokens)


def check_machine(config: ClusterConfig, served: ServedModel, ports: Iterable[int]) -> None:
    """Check this machine: its memory for the workers, cores or GPUs for their ranks, and these ports for gateways.
    Raises NotEnoughMemory, AddressInUse or ConfigError."""
    num_stages = config.engine.pipeline_parallel if served.num_hosts == 1 else 1
    check_ranks(config.engine.device, config.engine.tensor_parallel, num_stages, config.engine.expert_parallel)
    if config.gateway.tls_certificate is not None and config.gateway.tls_key is not None:
        ServerCertificate(config.gateway.tls_certificate, config.gateway.tls_key)
    _check_ports(config.gateway.host, ports)
    _check_memory(config, served)


def _check_encoder(config: ClusterConfig) -> None:
    if config.chosen_topology.is_separate:
        raise ConfigError("an encoder's workers compute whole prompts; set topology to elastic or colocated")
    if config.lora.adapters or config.lora.allowed_folder is not None:
        raise ConfigError("lora has no effect on an encoder: adapters are for decoders; leave it out")


def _check_stages(config: ClusterConfig, num_hosts: int) -> None:
    setting = f"engine.pipeline_parallel={config.engine.pipeline_parallel}"
    if config.lora.is_enabled and num_hosts > 1:
        raise ConfigError(f"lora: stages of other hosts load no adapters of their layers ({setting}); leave it out")
    _refuse_layer_inputs(config, f"which stages do not ({setting})")


def _refuse_layer_inputs(config: ClusterConfig, reason: str) -> None:
    if Mechanism.HIDDEN_CACHE in wanted_mechanisms(config.scheduling):
        raise ConfigError(
            f"policy {config.scheduling.policy!r} keeps layer inputs in place of keys and values, {reason}; choose "
            "another policy, or scheduling.policy_params.hybrid_cache=false"
        )


def _check_states(config: ClusterConfig, title: str) -> None:
    if config.decode.has_int8_swaps:
        raise ConfigError(
            f"decode.swap_format=int8 rounds what it copies, and blocks of a model with {title} hold states as well, "
            "which are not rounded; leave it at exact"
        )
    _refuse_layer_inputs(config, f"and a model with {title} keeps states")
    if config.lora.is_enabled:
        raise ConfigError(f"lora: a model with {title} has no adapters; leave it out")


def window_cache_of(config: ClusterConfig) -> str:
    choice = config.engine.window_cache
    return WHOLE if choice == AUTO and _obstacle_to_rings(resolve_policy(config)) is not None else choice


def _obstacle_to_rings(config: ClusterConfig) -> str | None:
    if config.decode.has_int8_swaps:
        return "decode.swap_format=int8 rounds what it copies, also what says how far rings are"
    if Mechanism.HIDDEN_CACHE in wanted_mechanisms(config.scheduling):
        return f"policy {config.scheduling.policy!r} keeps layer inputs in place of keys and values"
    return None


def _check_extras(config: ClusterConfig, title: str) -> None:
    _refuse_layer_inputs(config, f"which a model with {title} cannot")
    if config.lora.is_enabled:
        raise ConfigError(f"lora: a model with {title} has no adapters; leave it out")


def _check_policy(config: ClusterConfig, block_tokens: int | None) -> None:
    if Mechanism.HIDDEN_CACHE in wanted_mechanisms(config.scheduling) and block_tokens is None:
        raise ConfigError(
            f"policy {config.scheduling.policy!r} keeps layer inputs where keys and values take more room, but this "
            "model's take no less; choose another policy, a model whose query heads all have keys of their own, or "
            "scheduling.policy_params.hybrid_cache=false"
        )
    if block_tokens is not None and config.decode.has_int8_swaps:
        raise ConfigError(
            f"decode.swap_format=int8 is for keys and values, and policy {config.scheduling.policy!r} keeps layer "
            "inputs and swaps nothing; leave it out"
        )
    has_int8_swaps, can_move = config.decode.has_int8_swaps, config.chosen_topology is not Topology.COLOCATED
    mechanisms = engine_mechanisms(
        has_int8_swaps=has_int8_swaps,
        has_hidden_cache=block_tokens is not None,
        has_shared_blocks=wants_shared_blocks(config.scheduling, can_move=can_move, has_int8_swaps=has_int8_swaps),
    )
    require_policy(config.scheduling, config.chosen_topology, mechanisms)
    check_yielding(config.scheduling, config.chosen_topology, mechanisms)


def _check_yielding(config: ClusterConfig, served: ServedModel) -> None:
    is_on_gpu, layout = config.engine.device.startswith(CUDA), served.block_layout(config.engine.block_size)
    obstacles = {
        "an encoder's passes are short, and stop nowhere": served.encoder is not None,
        "ranks go through the layers of a pass together": served.tensor_parallel > 1,
        "stages go through the layers of several passes at once": served.pipeline_parallel > 1,
        "on a GPU, models with states or with caches of windows run passes to their end": (
            is_on_gpu and (layout.has_states or layout.ring_layers > 0)
        ),
    }
    scheduling = config.scheduling
    is_floor_set = scheduling.best_effort_floor not in (None, config.router.best_effort_floor)
    for obstacle in (words for words, is_there in obstacles.items() if is_there):
        if scheduling.yield_between_layers:
            raise ConfigError(f"scheduling.yield_between_layers cannot be had: {obstacle}; leave it out")
        if is_floor_set:
            raise ConfigError(f"scheduling.best_effort_floor has no effect, as no pass stops: {obstacle}; leave it out")
    if is_floor_set and is_on_gpu and not scheduling.yield_between_layers:
        raise ConfigError(
            "scheduling.best_effort_floor has no effect on a GPU, where passes stop only with "
            "scheduling.yield_between_layers=true; set that, or leave it out"
        )


def _check_rounded_cache(config: ClusterConfig) -> None:
    setting, is_on_gpu = f"engine.kv_cache_dtype={config.engine.kv_cache_dtype}", config.engine.device.startswith(CUDA)
    if config.engine.kv_cache_dtype == FP8 and not is_on_gpu:
        raise ConfigError(f"{setting} is computed on GPUs, not on {config.engine.device}; int8 is as small there")
    if config.engine.kv_cache_dtype == INT8 and is_on_gpu:
        raise ConfigError(f"{setting} is computed on CPUs alone, not on {config.engine.device}; fp8 is as small there")
    if Mechanism.HIDDEN_CACHE in wanted_mechanisms(config.scheduling):
        raise ConfigError(
            f"{setting} rounds keys and values, and policy {config.scheduling.policy!r} keeps layer inputs, which are "
            "not rounded; leave it at auto, or choose another policy"
        )
    if config.decode.has_int8_swaps:
        raise ConfigError(
            f"decode.swap_format=int8 would round what {setting} has rounded already; leave it at exact, which copies "
            "the 8 bits as they are"
        )


def _check_ports(host: str, ports: Iterable[int]) -> None:
    for port in ports:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                raise AddressInUse(f"cannot listen on {host}:{port} ({error.strerror}); {_advice(error)}") from error


def _advice(error: OSError) -> str:
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return "no such address is on this host; gateway.host=node stands for each host's own"
    return "is another server running there? Choose another with --port or --set gateway.port=N"


def _check_blocks(config: ClusterConfig, served: ServedModel, block_tokens: int | None) -> None:
    layout = served.block_layout(config.engine.block_size)
    needed = layout.token_bytes * (served.max_context_len + config.engine.block_size) + layout.context_bytes
    decode_bytes = config.decode.kv_cache_bytes
    if block_tokens is not None:
        decode_bytes = layout.block_bytes * storage_blocks(layout, decode_bytes, block_tokens)
    sizes = {"decode.kv_cache_bytes": decode_bytes}
    if config.chosen_topology.is_separate:
        sizes |= {
            "pool.memory_bytes": config.pool.memory_bytes,
            "prefill.kv_cache_bytes": config.prefill.kv_cache_bytes,
        }
    for name, size in sizes.items():
        if size < needed:
            raise ConfigError(
                f"{name} is {size // _MIB} MiB, but one request of {served.max_context_len} tokens needs "
                f"{-(-needed // _MIB)} MiB of cache; set it higher, or model.max_context_len lower"
            )


def _check_memory(config: ClusterConfig, served: ServedModel) -> None:
    is_separate = config.chosen_topology.is_separate
    weights = served.weight_bytes
    pool = config.node_pool.memory_bytes if config.node_pool is not None else 0
    workers = 0
    if not config.engine.device.startswith(CUDA):  # on GPUs each worker checks its own memory
        workers = config.decode.count * (weights + config.decode.kv_cache_bytes) + config.decode.standby * weights
        workers //= served.num_hosts
        workers += config.prefill.count * (weights + config.prefill.kv_cache_bytes) if is_separate else 0
    if pool:
        folder = arena_folder()
        stats = os.statvfs(folder)
        free = stats.f_bavail * stats.f_frsize
        if pool > free:
            raise NotEnoughMemory(
                f"the KV pool needs {pool // _MIB} MiB in {folder}, where {free // _MIB} MiB are free; "
                f"set {'pool.memory_bytes' if is_separate else 'prefix_cache.host_bytes'} lower"
            )
    available = psutil.virtual_memory().available
    if workers + pool > available:
        raise NotEnoughMemory(
            f"{(workers + pool) // _MIB} MiB are needed (workers {workers // _MIB}, KV pool {pool // _MIB}), "
            f"{available // _MIB} MiB are available; {_cheaper(config)}"
        )


def _cheaper(config: ClusterConfig) -> str:
    if not config.chosen_topology.is_separate:
        return "set decode.count or decode.kv_cache_bytes lower"
    remedy = "set pool.memory_bytes, prefill.kv_cache_bytes and decode.kv_cache_bytes lower"
    together = policy_entry(config.scheduling.policy).topology_together
    return remedy if together is None else f"{remedy}, or use topology={together.value}"
