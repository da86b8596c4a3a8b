"""The request that the options of `alignedserve plan` make: workload, hardware, policies, objectives."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from alignedserve.config.environment import data_dir
from alignedserve.config.loading import load_config
from alignedserve.config.sections import ClusterConfig, Topology
from alignedserve.config.unset_sizes import DefaultSize, with_fixed_sizes
from alignedserve.core.block_layout import BlockLayout
from alignedserve.core.errors import ConfigError, RecordingError
from alignedserve.core.request import RequestClass, Slo
from alignedserve.costmodel.model import AttentionKernel
from alignedserve.costmodel.model_shapes import MODEL_SHAPES, ModelShape, model_shape
from alignedserve.scheduling.policies import policy_config
from lab.commands.simulation.options import PlanOptions
from lab.commands.simulation.replay import replay_folder
from lab.commands.simulation.simulate_cases import DEFAULT_MODEL, SERVER_SIZES, parse_variant
from lab.costmodel.choice import COST_MODELS, FITTED, attention_kernel
from lab.costmodel.profile_file import MachineProfile, read_profile
from lab.planning.candidates import Choices, PolicyChoice
from lab.planning.experts import EXPERTS, expert_degrees, expert_words
from lab.planning.hardware_list import RECORDED, Offer, parse_hardware
from lab.planning.plan import PlanRequest
from lab.planning.trials import Machines, Traffic
from lab.replay.component_replay import read_run_metadata
from lab.replay.fitting import MachineFit, fit_machine
from lab.replay.simulated import OTHERS, requests_of, workload_of
from lab.sim.config import NO_SLOWDOWNS, Slowdowns
from lab.sim.sweep import WorkloadLine
from lab.workload.catalogue import TOKENS_OF, Library
from lab.workload.grammar import RECORDED as RECORDED_ARRIVALS
from lab.workload.grammar import parse_classes
from lab.workload.rates import as_recorded, at_rate, with_objectives
from lab.workload.recordings import TraceSource
from lab.workload.requests import TimedRequest, Workload

_FAMILIES = ("llama-2", "llama-3", "opt", "bloom")  # models whose names begin alike have one tokenizer


def warnings_of(line: str, model: str, data_dir: Path | None) -> list[str]:
    """Return a warning for each source of lengths that names another model, or none. Raises ConfigError."""
    library, counts = Library(data_dir), []
    for name in dict.fromkeys(spec.source for spec in parse_classes(line)):
        if name is None:
            continue
        source = library.source(name)
        named = TOKENS_OF.get(name) or _named_in(source)
        if named is None:
            counts.append(f"{name} does not say whose tokens its lengths are; for {model} they may be others.")
        else:
            counts += other_tokens(name, named, model)
    return counts


def other_tokens(source: str, named: str, model: str) -> list[str]:
    """Return a warning where the lengths of a source are tokens of another model, or none."""
    if _family(named) == _family(model):
        return []
    return [f"The lengths of {source} are tokens of {named}; the same texts have other lengths in {model}."]


def _named_in(source: object) -> str | None:
    return ", ".join(source.models) or None if isinstance(source, TraceSource) else None


def _family(model: str) -> str:
    lowered = model.rpartition("/")[2].lower().removeprefix("meta-")
    return next((family for family in _FAMILIES if lowered.startswith(family)), lowered)


_DEFAULT_DURATION_S = 600.0  # of traffic that is no recording
_PLANNED = (
    "topology",
    "scheduling",
    "prefill.count",
    "decode.count",
    "scaling",
    "model.path",
    "engine.tensor_parallel",
    "engine.pipeline_parallel",
    "engine.expert_parallel",
)


@dataclass(frozen=True, slots=True)
class Asked:
    """A request for a plan, with names and values that describe it."""

    request: PlanRequest
    about: Mapping[str, str]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Recorded:
    workload: Workload
    profile: MachineProfile
    cluster: ClusterConfig
    slowdowns: Slowdowns


def asked_for(options: PlanOptions) -> Asked:
    """Return the request. Raises ConfigError or RecordingError for whatever could never be planned."""
    if (options.workload is None) is (options.recorded is None):
        raise ConfigError("give one of --workload LINE and --from DIR")
    run = None if options.recorded is None else _recorded(options, options.recorded)
    offers = _offers(options, run)
    machines = _machines(options, offers, run)
    line = None if options.workload is None else _line(options, options.workload)
    if run is None:
        assert line is not None, "one of the two was given"
        traffic = Traffic(WorkloadLine(line, options.seed, duration_s=_duration_s(options, line), data_dir=data_dir()))
    else:
        traffic = Traffic(run.workload)
    request = PlanRequest(traffic, options.attain / 100.0, _choices(options, offers, machines), machines, options.seed)
    return Asked(request, _about(options, line, machines, offers), tuple(_warnings(line, machines, run)))


def _warnings(line: str | None, machines: Machines, run: _Recorded | None) -> list[str]:
    profiled = [profile.shape.name for profile in machines.profiles.values()]
    models = profiled if machines.model is None else [machines.model]
    if line is not None:
        return list(dict.fromkeys(warning for model in models for warning in warnings_of(line, model, data_dir())))
    if run is None or machines.model is None:
        return []
    return other_tokens("the recorded run", run.cluster.model.path, machines.model)


def _about(options: PlanOptions, line: str | None, machines: Machines, offers: tuple[Offer, ...]) -> dict[str, str]:
    prices = [f" @{offer.price_per_hour:g}" if offer.price_per_hour is not None else "" for offer in offers]
    listed = [f"{offer.count}x {offer.name}{price}" for offer, price in zip(offers, prices, strict=True)]
    return {
        "workload": line or f"recorded in {options.recorded}",
        "asked for": f"{options.attain:g} % of every class with objectives, seed {options.seed}",
        "hardware": ", ".join(listed),
        "model": machines.model or "as profiled",
        "costs": machines.costs if machines.model is not None else "measured",
        **_about_experts(options, machines, offers),
    }


def _about_experts(options: PlanOptions, machines: Machines, offers: Sequence[Offer]) -> dict[str, str]:
    degrees = _expert_degrees(options, offers, machines)
    return {
        f"{EXPERTS} {size} processes of {offer.label}": expert_words(machines.profiles[offer.name], size)
        for offer in offers
        for size in degrees[offer.name]
        if 1 < size <= offer.count
    }


# --- traffic


def _line(options: PlanOptions, given: str) -> str:
    line = as_recorded(given)
    if options.rate is not None:
        line = at_rate(line, options.rate)
    if any(spec.turns > 1 for spec in parse_classes(line)):
        raise ConfigError("turns= is for `alignedserve simulate`: a plan needs the time of every request")
    if any(spec.starts is not None for spec in parse_classes(line)):
        raise ConfigError("hours= and not_before= are for `alignedserve simulate`: a plan has the load of all hours")
    return with_objectives(line, ttft_s=options.ttft_s, tpot_s=options.tpot_s)


def _duration_s(options: PlanOptions, line: str) -> float | None:
    is_recording = all(spec.arrivals == RECORDED_ARRIVALS for spec in parse_classes(line) if not spec.is_closed)
    is_endless = any(spec.is_closed for spec in parse_classes(line))
    return options.duration_s or (None if is_recording and not is_endless else _DEFAULT_DURATION_S)


def _recorded(options: PlanOptions, folder: Path) -> _Recorded:
    if options.rate is not None or options.duration_s is not None:
        raise ConfigError("--from plays the run as it was: --rate and --duration are for --workload")
    metadata = read_run_metadata(folder)
    checks, run = replay_folder(folder)
    differing = [check.file for check in checks if check.difference is not None]
    if differing:
        raise RecordingError(f"{folder / differing[0]} decides otherwise today; see `alignedserve replay {folder}`")
    requests = requests_of(run)
    if not requests:
        raise RecordingError(f"{folder} has no request that got a token")
    workload = workload_of(requests, {})
    slo = Slo(options.ttft_s, options.tpot_s)
    workload = replace(workload, requests=tuple(_with_objectives(request, slo) for request in workload.requests))
    fit = fit_machine(run, metadata.layout.block_bytes)
    cluster = metadata.config
    return _Recorded(workload, _profile(metadata.layout, fit), cluster, fit.slowdowns)


def _with_objectives(request: TimedRequest, slo: Slo) -> TimedRequest:
    if request.class_name == OTHERS:
        return replace(request, slo=Slo())  # it counts as load alone: no client waited for all of it
    if request.request_class is RequestClass.BEST_EFFORT:
        return request
    own = request.slo
    ttft_s = slo.ttft_s if own.ttft_s is None else own.ttft_s
    tpot_s = slo.tpot_s if own.tpot_s is None else own.tpot_s
    return replace(request, slo=Slo(ttft_s, tpot_s, own.deadline_s))


def _profile(layout: BlockLayout, fit: MachineFit) -> MachineProfile:
    width = layout.num_kv_heads * layout.head_dim
    shape = ModelShape(
        name=RECORDED,
        num_layers=layout.num_layers,
        hidden_size=2 * width,  # a hidden cache of this width saves nothing: none is planned with
        num_heads=layout.num_kv_heads,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        ffn_size=0,
        vocab_size=0,
        is_gated=False,
        ties_embeddings=True,
        dtype=layout.dtype,
        unlike=layout.unlike,
    )
    return MachineProfile(shape, fit.decode.costs.coefficients, fit.links.host)


# --- hardware


def _offers(options: PlanOptions, run: _Recorded | None) -> tuple[Offer, ...]:
    if options.hardware is None:
        if run is None:
            raise ConfigError("--hardware is missing: write for example '4x h100 @2.5'")
        return (Offer(RECORDED, run.cluster.num_workers),)
    offers = parse_hardware(options.hardware)
    if run is None and any(offer.name == RECORDED for offer in offers):
        raise ConfigError(f"hardware {RECORDED!r} is the machine of a recorded run: it goes with --from")
    return offers


def _machines(options: PlanOptions, offers: tuple[Offer, ...], run: _Recorded | None) -> Machines:
    if options.costs not in COST_MODELS:
        raise ConfigError(f"cost model {options.costs!r} is none of {', '.join(COST_MODELS)}")
    profiles = {
        offer.name: read_profile(Path(offer.name.removeprefix(FITTED)))
        for offer in offers
        if offer.name.startswith(FITTED)
    }
    if run is not None:
        profiles[RECORDED] = run.profile
    named, kernel = [offer for offer in offers if not offer.is_profiled], attention_kernel(options.kernel)
    if not named and kernel is not AttentionKernel.LOAD_BALANCED:
        raise ConfigError(f"--kernel {options.kernel}: a measured machine was measured with its own")
    if options.model is not None:
        model_shape(options.model)
    if named and len(named) < len(offers):
        raise ConfigError("--hardware: measured machines and named accelerators cannot be in one plan")
    if not named and options.model is not None:
        raise ConfigError(f"--model {options.model}: a measured machine says itself which model it was measured with")
    if named and run is not None and options.model is None:
        raise ConfigError(
            f"--model is missing: the recorded run served {run.cluster.model.path}; which of "
            f"{', '.join(MODEL_SHAPES)} is to run on {named[0].name}?"
        )
    is_as_recorded = run is not None and not named
    cluster = run.cluster if run is not None and is_as_recorded else _cluster(options, bool(named))
    return Machines(
        cluster=with_fixed_sizes(cluster),
        model=(options.model or DEFAULT_MODEL) if named else None,
        costs=options.costs,
        kernel=kernel,
        profiles=profiles,
        slowdowns=run.slowdowns if run is not None and is_as_recorded else NO_SLOWDOWNS,
        seed=options.seed,
        runs_what_fits=isinstance(cluster.decode.max_running_requests, DefaultSize),
    )


def _cluster(options: PlanOptions, is_named: bool) -> ClusterConfig:
    for override in options.overrides:
        field = override.partition("=")[0].strip()
        if any(field == name or field.startswith(f"{name}.") for name in _PLANNED):
            raise ConfigError(f"--set {field}: that is what the plan is to say")
    sizes = SERVER_SIZES if options.config is None and is_named else ()
    # What follows from the accelerators' memory is chosen for each plan.
    running_sizes = [size for size in sizes if not size.startswith("decode.max_running_requests")]
    return load_config(options.config, (*running_sizes, *options.overrides))


def _choices(options: PlanOptions, offers: tuple[Offer, ...], machines: Machines) -> Choices:
    policies = []
    for text in options.policies or ("aligned_slo",):
        variant = parse_variant(text)
        policy_config(variant.name, variant.settings)
        policies.append(PolicyChoice(variant.label, variant.name, variant.settings))
    if len({policy.label for policy in policies}) < len(policies):
        raise ConfigError("a policy was named twice")
    if options.max_cost is not None and any(offer.price_per_hour is None for offer in offers):
        raise ConfigError("--max-cost needs prices in --hardware, such as '4x h100 @2.5'")
    topologies = [_topology(name) for name in options.topologies] or list(Topology)
    degrees = _degrees("--tensor-parallel", options.degrees)
    num_heads = 0 if machines.model is None else model_shape(machines.model).num_heads
    if any(num_heads % degree for degree in degrees or ()):
        raise ConfigError(
            f"--tensor-parallel {options.degrees} must divide the {num_heads} heads of {machines.model!r}"
        )
    return Choices(offers, policies, topologies, degrees, options.max_cost, _expert_degrees(options, offers, machines))


def _expert_degrees(options: PlanOptions, offers: Sequence[Offer], machines: Machines) -> Mapping[str, Sequence[int]]:
    degrees = _degrees("--expert-parallel", options.expert_degrees)
    measured = {offer.name: machines.profiles.get(offer.name) if offer.name != RECORDED else None for offer in offers}
    return {name: expert_degrees(degrees, profile, name) for name, profile in measured.items()}


def _topology(name: str) -> Topology:
    try:
        return Topology(name)
    except ValueError:
        known = ", ".join(topology.value for topology in Topology)
        raise ConfigError(f"--topology {name!r} is none of {known}") from None


def _degrees(option: str, text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and len(part) <= 2 and 1 <= int(part) <= 64 for part in parts):
        raise ConfigError(f"{option} {text!r} is no list of numbers from 1 to 64")
    return tuple(int(part) for part in parts)
