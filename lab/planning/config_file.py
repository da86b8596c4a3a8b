"""The configuration file that starts a plan: `alignedserve serve --config FILE`."""

from typing import Any

import msgspec
import yaml

from alignedserve.config.sections import ClusterConfig, RecordingConfig, Section
from lab.planning.candidates import Candidate
from lab.planning.hardware_list import RECORDED
from lab.planning.trials import Machines

# Where a model of that shape is found. Others are given by hand.
MODEL_PATHS = {
    "opt-125m": "facebook/opt-125m",
    "opt-2.7b": "facebook/opt-2.7b",
    "opt-6.7b": "facebook/opt-6.7b",
    "opt-13b": "facebook/opt-13b",
    "opt-30b": "facebook/opt-30b",
    "opt-66b": "facebook/opt-66b",
    "llama-2-7b": "meta-llama/Llama-2-7b-hf",
    "llama-2-13b": "meta-llama/Llama-2-13b-hf",
    "llama-2-70b": "meta-llama/Llama-2-70b-hf",
    "llama-3-8b": "meta-llama/Meta-Llama-3-8B",
    "llama-3-70b": "meta-llama/Meta-Llama-3-70B",
    "bloom-176b": "bigscience/bloom",
}
_MEMORY = {"kv_cache_bytes", "candidate_buffer_bytes"}  # of an accelerator: `serve` asks it for its own
_LIMITS = {"max_running_requests", "max_num_batched_tokens"}
# Sizes that `serve` would work out where they are unset, so that they are written even if they are the default.
_SIZES = {"pool": {"memory_bytes"}, "prefill": _LIMITS | _MEMORY, "decode": _LIMITS | {"swap_space_bytes"} | _MEMORY}


def config_file(candidate: Candidate, machines: Machines, remarks: list[str]) -> str:
    """Return the file's text, with `remarks` as comments above it. Raises ConfigError as a simulation does.

    It states what was simulated and differs from the defaults. The caches of named accelerators stay unset, so that
    `serve` works them out from the memory that is there.
    """
    config = machines.configured(candidate).cluster
    config = msgspec.structs.replace(config, recording=RecordingConfig())
    values: dict[str, Any] = {"topology": candidate.topology.value}
    values |= _model_and_engine(candidate, machines)
    for name, section in _changed_sections(config, keeps_memory=candidate.offer.is_profiled).items():
        if name in ("batching", "pool", "prefill") and not candidate.topology.is_separate:
            continue
        values[name] = {**section, **values.get(name, {})}
    values.setdefault("decode", {})["count"] = candidate.num_decode
    if candidate.topology.is_separate:
        values.setdefault("prefill", {})["count"] = candidate.num_prefill
    policy = candidate.policy
    values["scheduling"] = {"policy": policy.name}
    if policy.params:
        values["scheduling"]["policy_params"] = dict(policy.params)
    comments = "".join(f"# {' '.join(line.split())}\n" for line in remarks)
    return comments + yaml.safe_dump(values, sort_keys=False)


def _model_and_engine(candidate: Candidate, machines: Machines) -> dict[str, Any]:
    """Return the model to be served, and what its workers are: as they were measured, or GPUs.

    A recorded run's configuration says both itself. By how much workers are divided stands in what was simulated.
    """
    if candidate.offer.name == RECORDED:
        return {}
    profile = machines.profiles.get(candidate.offer.name)
    if profile is None:
        assert machines.model is not None, "named accelerators have no model of their own"
        return {"model": {"path": _model_path(machines.model)}, "engine": {"device": "cuda"}}
    section: dict[str, Any] = {"model": {"path": _model_path(profile.shape.name), "dtype": profile.shape.dtype}}
    if profile.num_threads is not None:
        section["engine"] = {"threads_per_worker": profile.num_threads * candidate.expert_parallel}
    return section


def _model_path(name: str) -> str:
    return MODEL_PATHS.get(name, name)


def _changed_sections(config: ClusterConfig, *, keeps_memory: bool) -> dict[str, dict[str, Any]]:
    defaults = ClusterConfig()
    sections: dict[str, dict[str, Any]] = {}
    for name in ClusterConfig.__struct_fields__:
        section = getattr(config, name)
        if not isinstance(section, Section):
            continue
        plain, default = msgspec.to_builtins(section), getattr(defaults, name)
        left_out = set() if keeps_memory else _MEMORY
        settings = {
            field: value
            for field, value in plain.items()
            if field not in left_out
            and (field in _SIZES.get(name, ()) or getattr(section, field) != getattr(default, field))
        }
        if settings:
            sections[name] = settings
    return sections
