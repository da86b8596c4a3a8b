"""The objects that every request of one gateway (or batch worker) shares. No HTTP here."""

from collections.abc import Sequence
from dataclasses import dataclass

from alignedserve.config.sections import GatewayConfig
from alignedserve.gateway.api_keys import ApiKeys
from alignedserve.gateway.backend.interface import CompletionBackend
from alignedserve.gateway.backend.readiness_probe import ReadinessProbe
from alignedserve.gateway.errors import Overloaded, UnknownModel
from alignedserve.gateway.files.files_api import FilesApi
from alignedserve.gateway.grammar_checker import GrammarChecker
from alignedserve.gateway.metrics.gateway_metrics import GatewayMetrics
from alignedserve.gateway.model_card import ModelCard
from alignedserve.gateway.prefix_hasher import PrefixHasher
from alignedserve.gateway.request_quotas import RequestQuotas
from alignedserve.runtime.model.tokenizer import Tokenizer


class RequestLimiter:
    """Counts the requests that this gateway has open in the cluster and bounds them."""

    def __init__(self, max_open: int) -> None:
        self._max_open = max_open
        self.num_open = 0

    def acquire(self, count: int) -> None:
        """Open requests. Raises Overloaded when that would be too many."""
        if self.num_open + count > self._max_open:
            raise Overloaded("The gateway has too many requests open.", retry_after_s=1.0)
        self.num_open += count

    def release(self, count: int) -> None:
        """Close requests."""
        self.num_open -= count
        assert self.num_open >= 0, "more requests closed than opened"


@dataclass(frozen=True, slots=True)
class Services:
    """Shared objects, made once by `build_services`; routes find them in the app's state."""

    backend: CompletionBackend
    tokenizer: Tokenizer
    model: ModelCard
    config: GatewayConfig
    reply_to: str  # address where workers send tokens
    api_keys: ApiKeys
    quotas: RequestQuotas
    metrics: GatewayMetrics
    limiter: RequestLimiter
    readiness_probe: ReadinessProbe
    grammars: GrammarChecker
    files_api: FilesApi | None = None  # None: files and batches are not served
    prefix_hasher: PrefixHasher | None = None  # None: the prefix cache is off

    def prefix_root(self, tenant: str, salt: str | None) -> bytes:
        """Return the root of the block hashes of a client's request; empty: it shares nothing."""
        return self.prefix_hasher.root(tenant, salt) if self.prefix_hasher is not None else b""

    def check_model(self, name: str | None) -> None:
        """Raise UnknownModel unless this is the served model; None means that one."""
        if name is not None and name != self.model.name:
            raise UnknownModel("The requested model does not exist here; see /v1/models.", param="model")


def build_services(
    *,
    backend: CompletionBackend,
    tokenizer: Tokenizer,
    model: ModelCard,
    config: GatewayConfig,
    api_keys: Sequence[str] = (),
    reply_to: str = "",
    files_api: FilesApi | None = None,
    quotas: RequestQuotas | None = None,
    prefix_hasher: PrefixHasher | None = None,
) -> Services:
    """Build the shared objects around one backend. `quotas`: None: this process alone counts requests."""
    keys = ApiKeys(api_keys)
    probe_token_id = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else 0
    return Services(
        backend=backend,
        tokenizer=tokenizer,
        model=model,
        config=config,
        reply_to=reply_to,
        api_keys=keys,
        quotas=quotas or RequestQuotas(config.requests_per_minute, keys.num_owners),
        metrics=GatewayMetrics(model.name, backend.status, backend.num_answers),
        limiter=RequestLimiter(config.max_concurrent_requests),
        readiness_probe=ReadinessProbe(backend, token_id=probe_token_id, reply_to=reply_to),
        grammars=GrammarChecker(tokenizer, model.eos_token_ids),
        files_api=files_api,
        prefix_hasher=prefix_hasher,
    )
