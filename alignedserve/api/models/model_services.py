"""The objects that every request to one model shares: its backend, tokenizer, grammars, limits. No HTTP here.

What clients, prompt builders and answer parsers need to know about a model.

The adapters that requests may name, from the configuration or loaded while serving.

Loaded adapters are in a file of the node (`runtime/lora/loaded_adapters.py`), which its gateways and its batch worker
share: a restarted process knows them again. The meaning of a name is in memory; the file is read after a change.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Protocol

from alignedserve.api.backend.interface import CompletionBackend, ReadinessProbe
from alignedserve.api.errors import Forbidden, NotFound, Overloaded, ResourceUnavailable, Unavailable
from alignedserve.api.metrics.gateway_metrics import ModelMetrics
from alignedserve.api.objectives import default_slo_at
from alignedserve.api.picture_reader import PictureReader
from alignedserve.api.prefix_hasher import PrefixHasher
from alignedserve.api.timelines.timeline import Timelines
from alignedserve.api.work_lanes import SHORT_LEN, WorkLanes
from alignedserve.config.sections import GatewayConfig
from alignedserve.core.errors import AdapterError, InvalidRequest, ModelError
from alignedserve.core.request import LoraAdapter, Request, RequestClass, Slo
from alignedserve.core.seeing import PictureForm
from alignedserve.disk.durable import LastSeen
from alignedserve.keys.entry import ANYONE, KeyEntry
from alignedserve.process.background_tasks import outlived
from alignedserve.runtime.grammar.compiler import GrammarError
from alignedserve.runtime.grammar.trials import ALONE, ClientExhausted, GrammarTrials, TrialTurn
from alignedserve.runtime.grammar.vocabulary import token_table
from alignedserve.runtime.lora.loaded_adapters import (
    Changes,
    changing_loaded,
    find_adapter,
    loaded_of,
    read_changes,
    with_loaded,
    without_loaded,
    write_changes,
)
from alignedserve.runtime.model.encoder.encoder_config import EncoderConfig
from alignedserve.runtime.model.sampling_defaults import SamplingDefaults
from alignedserve.runtime.model.served_model import ServedModel
from alignedserve.text.tokenizer import Tokenizer, TokenizerOnUse
from alignedserve.usage.ledger import UsageLedger

logger = logging.getLogger(__name__)

_MAX_LOADED = 1000  # of all keys
_MAX_OF_KEY = 250  # of a key without sight of all adapters


class AdapterDirectory:
    """The adapters of one deployment. `load` and `unload` block: they read and write files."""

    def __init__(self, served: ServedModel, path: Path) -> None:
        """`path`: of the file, which need not exist."""
        self._served = served
        self._path = path
        self._configured = {adapter.name: adapter for adapter in served.adapters}
        self._changes: Changes = {}
        self._loaded: dict[str, LoraAdapter] = {}  # by these
        self._file = LastSeen(path)
        self._lock = threading.RLock()  # of both, which belong together

    @property
    def all(self) -> tuple[LoraAdapter, ...]:
        """Return all adapters, those of the configuration first."""
        self._refresh()
        return (*self._configured.values(), *self._loaded.values())

    def find(self, name: str) -> LoraAdapter | None:
        """Return the adapter of this name."""
        if name in self._configured:
            return self._configured[name]
        self._refresh()
        return self._loaded.get(name)

    def load(self, name: str, path: str, *, replaces: bool = False, key: KeyEntry = ANYONE) -> LoraAdapter:
        """Read and check an adapter, and let requests name it. `replaces`: one of that name may be there.

        `key`: whose it is from then on. Raises InvalidRequest."""
        if not name.isprintable() or name in self._configured or name == self._served.name:
            raise InvalidRequest("lora_name is a name of the configuration, or not printable.", param="lora_name")
        try:
            adapter = find_adapter(name, path, self._served.lora, self._served.decoder)
        except AdapterError as error:
            raise InvalidRequest(str(error), param="lora_path", code="invalid_adapter") from error
        with self._changing():
            self._check_owner(name, key)
            if name in self._loaded and not replaces:
                raise InvalidRequest("An adapter of this name is loaded already; set load_inplace.", param="lora_name")
            check_room(self._changes, name, key)
            self._changes = with_loaded(self._changes, adapter, key.owner)
        logger.info("loaded adapter %r", name)
        return adapter

    def unload(self, name: str, key: KeyEntry = ANYONE) -> None:
        """Let no new request name the adapter; requests that have it go on. Raises NotFound, InvalidRequest."""
        if name in self._configured:
            raise InvalidRequest("An adapter of the configuration is not unloaded.", param="lora_name")
        with self._changing():
            if name not in self._loaded:
                raise NotFound("No adapter of this name is loaded.", param="lora_name", code="adapter_not_found")
            self._check_owner(name, key)
            self._changes = without_loaded(self._changes, name)
        logger.info("unloaded adapter %r", name)

    def _check_owner(self, name: str, key: KeyEntry) -> None:
        if name in self._loaded and not key.may_change(self._changes[name].owner):
            message = "Another key has loaded the adapter of this name."
            raise Forbidden(message, param="lora_name", code="adapter_not_allowed")

    @contextmanager
    def _changing(self) -> Iterator[None]:
        with changing_loaded(self._path), self._lock:
            self._refresh()
            yield
            write_changes(self._path, self._changes)
            self._loaded = loaded_of(self._changes)
            self._file.has_changed()  # as this process knows

    def _refresh(self) -> None:
        with self._lock:
            if not self._file.has_changed():
                return
            try:
                self._changes = read_changes(self._path)
                self._loaded = loaded_of(self._changes)
            except AdapterError:
                logger.exception("the adapters in %s cannot be read", self._path)


def check_room(changes: Changes, name: str, key: KeyEntry) -> None:
    """Raise InvalidRequest where the key, or all keys together, may not have one more adapter loaded, of this name."""
    others = [adapter for adapter in changes.values() if adapter.is_loaded and adapter.name != name]
    if len(others) >= _MAX_LOADED:
        raise InvalidRequest(f"At most {_MAX_LOADED} adapters can be loaded.", param="lora_name")
    if not key.sees_all and sum(adapter.owner == key.owner for adapter in others) >= _MAX_OF_KEY:
        message = f"The key {key.name} has {_MAX_OF_KEY} adapters loaded, and may have no more; unload one."
        raise InvalidRequest(message, param="lora_name")


@dataclass(frozen=True, slots=True)
class ModelCard:
    """One model under the name that clients use."""

    name: str
    folder: Path  # holds tokenizer.json
    max_context_len: int  # tokens, prompt and answer together
    eos_token_ids: tuple[int, ...] = ()
    created: int = field(default_factory=lambda: int(time.time()))  # Unix time, for /v1/models
    vocab_size: int | None = None  # rows of the embedding; None: as many as the tokenizer has tokens
    tool_format: str | None = None  # of tool calls; None: found in the chat template
    reasoning_format: str | None = None  # of thoughts; None: found in the chat template
    chat_template: str | None = None  # instead of the model's own
    aliases: tuple[str, ...] = ()  # further names of it
    alias_of: str | None = None  # the model's first name; None: this is no alias
    parent: str | None = None  # the adapted model; None: this is no adapter
    encoder: EncoderConfig | None = None  # None: the model is a decoder
    picture_form: PictureForm | None = None  # how it sees pictures; None: it does not
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)  # of requests that name nothing

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        """Return what the model can be asked for, in vLLM's words."""
        if self.encoder is None:
            return ("generate", "embed", "score")
        return ("score",) if self.encoder.score is not None else ("embed", "score")

    def require_generation(self, param: str) -> None:
        """Raise InvalidRequest naming `param` unless the model writes text."""
        if self.encoder is not None:
            raise InvalidRequest(
                f"This model is an encoder: it writes no text. It serves {self._endpoints}.",
                param=param,
                code="unsupported_model",
            )

    @property
    def _endpoints(self) -> str:
        paths = {"embed": "/v1/embeddings", "score": "/v1/score and /v1/rerank"}
        return ", ".join(paths[task] for task in self.supported_tasks)

    def load_tokenizer(self) -> Tokenizer:
        """Load the model's tokenizer. Raises ModelError."""
        return Tokenizer.load(self.folder, self.vocab_size, self.chat_template)

    def of_adapter(self, adapter: LoraAdapter) -> "ModelCard":
        """Return the card of an adapter of this model."""
        return replace(self, name=adapter.name, aliases=(), parent=self.name)

    @property
    def of_aliases(self) -> "tuple[ModelCard, ...]":
        """Return the card of each alias."""
        return tuple(replace(self, name=alias, aliases=(), alias_of=self.name) for alias in self.aliases)

    @classmethod
    def of(cls, served: ServedModel) -> "ModelCard":
        """Return the card of a resolved model."""
        config = served.config
        return cls(
            served.name,
            served.folder,
            served.max_context_len,
            config.eos_token_ids,
            vocab_size=config.vocab_size,
            tool_format=served.tool_format,
            reasoning_format=served.reasoning_format,
            chat_template=served.chat_template,
            encoder=served.encoder,
            picture_form=None if served.vision is None else served.vision.form,
            sampling=served.sampling,
            aliases=served.aliases,
        )


class GrammarCheck(Protocol):
    """Checks grammars before answers are decoded under them."""

    async def check(self, grammar: str, turn: TrialTurn = ALONE) -> None:
        """Return once the grammar is known to work; it is tried in its turn. Raises InvalidRequest."""


class PromptModel(Protocol):
    """A model for which prompts are made."""

    @property
    def model(self) -> ModelCard:
        """Return the names of its formats, and the tokens that end its answers."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Return its tokenizer, which has its chat template."""


class PromptServices(PromptModel, Protocol):
    """The part of ModelServices that encodes prompts, within the limits of a gateway."""

    @property
    def config(self) -> GatewayConfig:
        """Return the limits."""

    @property
    def lanes(self) -> WorkLanes:
        """Return where long prompts are encoded."""

    @property
    def pictures(self) -> PictureReader:
        """Return what decodes pictures."""


class ChatModel(PromptModel, Protocol):
    """A model that answers conversations."""

    @property
    def lanes(self) -> WorkLanes:
        """Return where long grammars are written."""

    @property
    def grammars(self) -> GrammarCheck:
        """Return what checks grammars."""


class NextTurn:
    """Calls functions in the next turn of the event loop, all by one callback. Waking a stream's task costs the loop a
    callback, a future and a step: as much as the work on the token itself."""

    def __init__(self) -> None:
        self._due: dict[Callable[[], None], None] = {}

    def call(self, function: Callable[[], None]) -> None:
        """Call this in the next turn, once, in the order in which functions were first asked for. A stream of a
        thousand choices is asked for by each of them, and looks at all."""
        if not self._due:
            asyncio.get_running_loop().call_soon(self._call_all)
        self._due[function] = None

    def _call_all(self) -> None:
        due, self._due = iter(self._due), {}
        try:
            for function in due:
                function()
        finally:
            for function in due:  # after an exception the remaining functions still run
                self.call(function)


_CLOSED = "The model is served no more."
_EXHAUSTED = "Grammars of this key (tools, response_format and the like) take too long to compile; try again later."
_EXHAUSTED_RETRY_S = 10.0


class GrammarChecker:
    """Starts its process when the first grammar comes, and remembers the grammars that were used last."""

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Sequence[int]) -> None:
        self._load = lambda: token_table(tokenizer, vocab_size=tokenizer.vocab_size, eos_token_ids=eos_token_ids)
        self._trials: GrammarTrials | None = None
        self._is_closed = False
        self._lock = Lock()

    async def check(self, grammar: str, turn: TrialTurn = ALONE) -> None:
        """Return once a grammar has been compiled in its turn, in another process. Raises InvalidRequest if it cannot
        be, or not within seconds; ResourceUnavailable where grammars of this client have taken too long; Unavailable
        after `close`."""
        try:
            trial = self._started().start(grammar, turn)
        except ClientExhausted as error:
            raise ResourceUnavailable(_EXHAUSTED, retry_after_s=_EXHAUSTED_RETRY_S) from error
        try:
            await outlived(asyncio.wrap_future(trial))
        except GrammarError as error:
            raise InvalidRequest(str(error), code="invalid_grammar") from error
        except asyncio.CancelledError:
            if trial.cancelled():
                raise Unavailable(_CLOSED) from None
            raise

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            if self._trials is not None:
                self._trials.close()

    def _started(self) -> GrammarTrials:
        with self._lock:
            if self._is_closed:
                raise Unavailable(_CLOSED)
            if self._trials is None:
                self._trials = GrammarTrials(self._load)
            return self._trials


BEST_EFFORT_RETRY_S = 30.0  # until a place of another document is likely to be free


class RequestLimiter:
    """Counts the requests that this gateway has open in the cluster and bounds them, each class by itself. So documents
    that wait, however many, take no place of chat."""

    def __init__(self, max_real_time: int, max_best_effort: int) -> None:
        self._most = {RequestClass.REAL_TIME: max_real_time, RequestClass.BEST_EFFORT: max_best_effort}
        self._open = dict.fromkeys(RequestClass, 0)

    @property
    def num_open(self) -> int:
        return sum(self._open.values())

    def acquire(self, request_class: RequestClass, count: int) -> None:
        """Open requests. Raises Overloaded when that would be too many of this class."""
        if self._open[request_class] + count > self._most[request_class]:
            if request_class is RequestClass.BEST_EFFORT:
                message = "The gateway has too many best-effort requests open."
                raise ResourceUnavailable(message, retry_after_s=BEST_EFFORT_RETRY_S)
            raise Overloaded("The gateway has too many requests open.", retry_after_s=1.0)
        self._open[request_class] += count

    def release(self, request_class: RequestClass, count: int) -> None:
        self._open[request_class] -= count
        assert self._open[request_class] >= 0, "more requests closed than opened"


@dataclass(slots=True)
class Uses:
    """Who holds a model, and since when nobody does."""

    num_open: int = 0  # requests that hold it
    last_used_s: float | None = None  # on the monotonic clock; None: never
    keep_alive_s: float | None = None  # from then on, by the last request with a wish


@dataclass(frozen=True, slots=True)
class ModelServices:
    """The objects that all requests to one model share. ModelRegistry finds them."""

    model: ModelCard
    backend: CompletionBackend
    tokenizer: Tokenizer
    grammars: GrammarChecker
    metrics: ModelMetrics
    readiness_probe: ReadinessProbe
    config: GatewayConfig
    limiter: RequestLimiter  # of all models' requests
    lanes: WorkLanes  # likewise
    pictures: PictureReader  # likewise
    reply_to: str  # address where workers send tokens
    timelines: Timelines  # of all models' requests
    usage: UsageLedger  # likewise
    prefix_hasher: PrefixHasher | None = None  # None: the prefix cache is off
    uses: Uses = field(default_factory=Uses)
    readers: NextTurn = field(default_factory=NextTurn)  # of streams, called when tokens have come
    adapters: AdapterDirectory | None = None  # that requests may name instead of the model; None: none
    adapter: LoraAdapter | None = None  # that these requests have

    def with_adapter(self, name: str) -> "ModelServices | None":
        """Return the shared objects of requests to an adapter; None: there is no such adapter."""
        adapter = self.adapters.find(name) if self.adapters is not None else None
        if adapter is None:
            return None
        return replace(self, model=self.model.of_adapter(adapter), adapter=adapter)

    def default_slo(self) -> Slo:
        """Return the objectives of real-time requests that name none."""
        return default_slo_at(self.config, self.backend)

    def prefix_root(self, tenant: str, salt: str | None) -> bytes:
        """Return the root of the block hashes of a client's request; empty: it shares nothing."""
        if self.prefix_hasher is None:
            return b""
        return self.prefix_hasher.root(tenant, salt, self.adapter.digest if self.adapter is not None else b"")

    async def name_blocks(self, request: Request) -> None:
        """Name the blocks of a long prompt beside the loop, so that they are known when it is submitted."""
        hasher, length = self.prefix_hasher, request.prompt_len
        if hasher is not None and request.prefix_root and length > SHORT_LEN:
            await self.lanes.run(length, partial(hasher.prompt_names, request.prefix_root, request.cache_keys))

    async def read_tokenizer(self) -> None:
        """Return once the tokenizer has been read, beside the loop. Raises Unavailable."""
        if isinstance(self.tokenizer, TokenizerOnUse):
            try:
                await asyncio.to_thread(self.tokenizer.read)
            except ModelError as error:
                raise Unavailable(f"The model's tokenizer cannot be read: {error}") from error

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep the deployment from being stopped inside the `with` block, except by a kill."""
        self.uses.num_open += 1
        try:
            yield
        finally:
            self.uses.num_open -= 1
            self.uses.last_used_s = time.monotonic()
