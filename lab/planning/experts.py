"""Workers whose processes share experts, as a plan considers them: how many processes, and what is said of each."""

from collections.abc import Sequence
from dataclasses import replace

from alignedserve.core.errors import ConfigError
from alignedserve.costmodel.linear import LinearIterationModel
from alignedserve.costmodel.work import IterationWork
from lab.costmodel.profile_file import MachineProfile
from lab.costmodel.shared_experts import BATCH, ExpertSharing

EXPERTS = "experts shared by"  # begins the name of each line about them
_SIZES = (1, 2, 4, 8)  # processes that are considered unless others are asked for
_CHUNK, _CONTEXT = 512, 512  # tokens, of what iterations are said to take
_GIB = 1 << 30


def expert_degrees(asked: Sequence[int] | None, profile: MachineProfile | None, name: str) -> Sequence[int]:
    """Return how many processes are to share a worker's experts; 1: none are shared.

    `profile`: of the machine; None: it is no measured one, or a recorded run's, of which the experts are not known.
    Raises ConfigError for what was asked for and could never help.
    """
    shape = None if profile is None else profile.shape
    if asked is None:
        return (1,) if shape is None else [size for size in _SIZES if size <= max(shape.num_experts, 1)]
    if max(asked) > 1:
        option = f"--expert-parallel {','.join(map(str, asked))}"
        if shape is None:
            raise ConfigError(
                f"{option}: experts are shared by processes on CPUs alone, not on {name}; measure a host by "
                "`alignedserve profile MODEL --output FILE` and write fitted:FILE, or divide every layer "
                "by --tensor-parallel"
            )
        try:
            ExpertSharing(shape, max(asked)).check()
        except ConfigError as error:
            raise ConfigError(f"{option}: {error}") from error
    return asked


def with_shared_experts(profile: MachineProfile, size: int) -> MachineProfile:
    if size == 1:
        return profile
    sharing = ExpertSharing(profile.shape, size)
    sharing.check(profile.num_threads, profile.num_cores)
    shared = replace(profile, coefficients=sharing.shared(profile.coefficients))
    alone_s, together_s = _decodes_s(profile), _decodes_s(shared)
    if together_s >= alone_s:
        raise ConfigError(
            f"{size} processes that share experts take {together_s * 1e3:.1f} ms for {BATCH} decodes, "
            f"{sharing.exchange_s(BATCH) * 1e3:.1f} of them to exchange rows; one process takes {alone_s * 1e3:.1f}"
        )
    return shared


def expert_words(profile: MachineProfile, size: int) -> str:
    """Return the memory of each process, what their exchanges take, and what is gained; or why nothing is."""
    try:
        shared = with_shared_experts(profile, size)
    except ConfigError as error:
        return f"left out: {error}"
    sharing = ExpertSharing(profile.shape, size)
    first, *others = (f"{memory_byte / _GIB:.2f}" for memory_byte in sharing.memory_bytes)
    gains = [
        f"{words} {cost(profile) * 1e3:.1f} ms by one process and {cost(shared) * 1e3:.1f} by {size}"
        for words, cost in ((f"{BATCH} decodes", _decodes_s), (f"{_CHUNK} tokens of a prompt", _chunk_s))
    ]
    return (
        f"weights of {first} GiB in the first process, {' and '.join(others)} in the others; rows take "
        f"{sharing.layer_s(BATCH) * 1e6:.0f} us a layer and {sharing.exchange_s(BATCH) * 1e3:.2f} ms an iteration of "
        f"{BATCH} decodes, {sharing.exchange_s(_CHUNK) * 1e3:.2f} of {_CHUNK} tokens; {'; '.join(gains)} (calculated)"
    )


def _decodes_s(profile: MachineProfile) -> float:
    work = IterationWork()
    work.add_decodes(BATCH, BATCH * _CONTEXT, _CONTEXT)
    return LinearIterationModel(profile.coefficients).iteration_s(work)


def _chunk_s(profile: MachineProfile) -> float:
    work = IterationWork()
    work.add_chunk(_CHUNK, 0, is_last=True)
    return LinearIterationModel(profile.coefficients).iteration_s(work)
