"""Default objectives: those of real-time requests that name none.

`auto` follows from the speed of workers, the best of their start and of the last hour: a first token within three times
a prompt of 1 024 tokens, a further token within twice a token of four requests together. People read 6.7 tokens a
second, and wait for no first token longer than 5 s."""

from collections.abc import Iterator

from alignedserve.api.backend.interface import CompletionBackend
from alignedserve.config.sections import AUTO, GatewayConfig
from alignedserve.core.request import Slo
from alignedserve.messages.cluster_view import WorkerSpeed

_LEAST_TTFT_S, _MOST_TTFT_S, _PROMPTS = 1.0, 5.0, 3.0
_LEAST_TPOT_S, _MOST_TPOT_S, _SHARED_TOKENS = 0.15, 1.0, 2.0


def default_slo(config: GatewayConfig, speed: WorkerSpeed | None) -> Slo:
    """Return the default objectives. `speed`: None, as long as no router tells: what is auto is none then."""
    known = automatic_slo(speed) if speed is not None else Slo()
    named = config.named_slo
    return Slo(
        ttft_s=known.ttft_s if config.default_ttft_s == AUTO else named.ttft_s,
        tpot_s=known.tpot_s if config.default_tpot_s == AUTO else named.tpot_s,
    )


def automatic_slo(speed: WorkerSpeed) -> Slo:
    """Return what the machine can hold with a margin, and people like; None of what was not measured."""
    ttft_s = min(max(_LEAST_TTFT_S, _PROMPTS * speed.prompt_s), _MOST_TTFT_S)
    tpot_s = min(max(_LEAST_TPOT_S, _SHARED_TOKENS * speed.shared_token_s), _MOST_TPOT_S)
    return Slo(
        ttft_s=round(ttft_s, 2) if speed.prompt_s else None, tpot_s=round(tpot_s, 3) if speed.shared_token_s else None
    )


def default_slo_at(config: GatewayConfig, backend: CompletionBackend) -> Slo:
    status = backend.status()
    return default_slo(config, status.speed if status is not None else None)


def unholdable(slo: Slo, speed: WorkerSpeed) -> Iterator[str]:
    """Yield a warning for each default objective that requests of this machine cannot hold, however idle it is."""
    if slo.ttft_s is not None and slo.ttft_s < speed.short_prompt_s:
        yield (
            f"gateway.default_ttft_s={slo.ttft_s:g} cannot be held: even a prompt of 64 tokens alone takes "
            f"{speed.short_prompt_s:.2f} s here"
        )
    elif slo.ttft_s == _MOST_TTFT_S < _PROMPTS * speed.prompt_s:
        yield (
            f"gateway.default_ttft_s=auto is {slo.ttft_s:g} at most, though a prompt of 1 024 tokens alone takes "
            f"{speed.prompt_s:.1f} s here: long prompts may miss it"
        )
    if slo.tpot_s is not None and slo.tpot_s < speed.token_s:
        yield (
            f"gateway.default_tpot_s={slo.tpot_s:g} cannot be held: a token of a single request takes "
            f"{speed.token_s:.3f} s here"
        )


def in_words(slo: Slo) -> str:
    """Return objectives for the start screen."""
    parts = []
    if slo.ttft_s is not None:
        parts.append(f"first token within {slo.ttft_s:g} s")
    if slo.tpot_s is not None:
        parts.append(f"a token every {slo.tpot_s:g} s ({1.0 / slo.tpot_s:.1f}/s)")
    return ", then ".join(parts) or "none"
