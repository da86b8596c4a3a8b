"""The loop of `alignedserve top`: asks the gateway, draws, waits."""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from datetime import datetime
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from urllib.parse import urlsplit

import msgspec
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from typing_extensions import override

from alignedserve.cli.console import DEFAULT_URL, WIDEST, print_json, print_table, printable, results
from alignedserve.client.unreachable import trust_for, unreachable
from alignedserve.cluster.deployments.admin_api import find_cluster, has_cluster, show_status
from alignedserve.config.environment import client_api_key
from alignedserve.core.errors import AlignedServeError, ConfigError, PeerError, ProtocolError
from alignedserve.core.metrics import in_percent


class _Tier(msgspec.Struct, frozen=True):
    num_queued: int
    num_prefilling: int
    num_pooled: int
    num_decoding: int
    oldest_queued_s: float


class _BatchLengths(msgspec.Struct, frozen=True):
    num_requests: int
    shortest: int
    mean_len: float
    longest: int


class _Worker(msgspec.Struct, frozen=True):
    worker: str
    node: str
    can_prefill: bool
    can_decode: bool
    is_elastic: bool
    is_draining: bool
    lean: float
    num_waiting: int
    num_running: int
    num_places: int
    num_blocks: int
    num_blocks_used: int
    num_prompt_tokens: int
    num_tokens: int
    wall_s: float
    compute_s: float
    batch: _BatchLengths


class _Pools(msgspec.Struct, frozen=True):
    num_blocks: int
    num_blocks_used: int
    num_blocks_kept: int


class _Prefixes(msgspec.Struct, frozen=True):
    num_query_tokens: int
    num_hit_tokens: int
    num_blocks: int


class _Totals(msgspec.Struct, frozen=True):
    num_prompt_tokens: int
    num_tokens: int


class _Load(msgspec.Struct, frozen=True):
    tiers: dict[str, _Tier]
    num_at_risk: int
    queue_wait_s: float
    pool: _Pools
    workers: list[_Worker]
    prefixes: _Prefixes
    totals: _Totals
    time: dict[str, float]  # seconds and counts of the iteration logs


class _Objective(msgspec.Struct, frozen=True):
    tier: str
    objective: str
    held: int
    missed: int


class _Model(msgspec.Struct, frozen=True):
    name: str
    problem: str | None
    load: _Load | None
    objectives: list[_Objective] = []


class _Batches(msgspec.Struct, frozen=True):
    num_waiting: int
    num_in_flight: int
    completed: int
    failed: int
    num_at_risk: int
    is_paused: bool
    num_batches: dict[str, int]


class LiveDocument(msgspec.Struct, frozen=True):
    """The whole document."""

    time_s: float
    not_ready: str | None
    models: list[_Model]
    batches: _Batches | None


class LiveReading:
    """The latest document and an earlier one, by which rates are told; None: there is none yet."""

    def __init__(self, latest: LiveDocument, earlier: LiveDocument | None) -> None:
        self.latest = latest
        self._earlier = earlier

    def gained(self, model: str, counter: Callable[[_Load], float | None]) -> float | None:
        """Return by how much a counter of a model has grown; None: it cannot be told, or its process restarted."""
        now = _read(self.latest, model, counter)
        before = _read(self._earlier, model, counter) if self._earlier is not None else None
        return None if now is None or before is None or now < before else now - before

    def rate(self, model: str, counter: Callable[[_Load], float | None]) -> float | None:
        gained = self.gained(model, counter)
        if gained is None or self._earlier is None or self.latest.time_s <= self._earlier.time_s:
            return None
        return gained / (self.latest.time_s - self._earlier.time_s)


def of_worker(name: str, counter: Callable[[_Worker], float]) -> Callable[[_Load], float | None]:
    return lambda load: next((counter(worker) for worker in load.workers if worker.worker == name), None)


def _read(document: LiveDocument, model: str, counter: Callable[[_Load], float | None]) -> float | None:
    load = next((served.load for served in document.models if served.name == model), None)
    return counter(load) if load is not None else None


_TIERS = {"real_time": "real-time", "best_effort": "best effort"}
_OBJECTIVES = {"ttft": "first token", "tpot": "mean gap", "deadline": "deadline"}
_PARTS = (  # of the workers' time: name, its fields, its style
    ("computing", ("forward_s",), "green"),
    ("sampling", ("sampling_s",), "cyan"),
    ("preparing, deciding", ("prepare_s", "turnaround_s"), "magenta"),
    ("waiting for prefill, prefetch", ("waiting_for_prefill_s", "prefetch_not_ready_s"), "yellow"),
    ("nothing to do", ("nothing_to_do_s",), "bright_black"),
)
_BAR_LEN = 40
_WRAPPED = "objectives held"  # the column that gives way in a narrow terminal; figures are not cut


def drawn(reading: LiveReading) -> RenderableType:
    parts: list[RenderableType] = []
    for model in reading.latest.models:
        parts += [*_model(model, reading), Text()]
    if not reading.latest.models:
        parts.append(Text("No model is served."))
    if reading.latest.batches is not None:
        batches = reading.latest.batches
        states = ", ".join(f"{count} {printable(state)}" for state, count in sorted(batches.num_batches.items()))
        lines = f"{batches.num_waiting} lines waiting, {batches.num_in_flight} at work, {batches.completed} done"
        text = Text.assemble(("batches", "bold"), f"  {states or 'none open'} · {lines}, {batches.failed} failed")
        if batches.num_at_risk:
            text.append(f" · {batches.num_at_risk} late", style="yellow")
        if batches.is_paused:
            text.append(" · paused: results cannot be written", style="red")
        parts.append(text)
    return Group(*parts)


def _model(model: _Model, reading: LiveReading) -> Iterator[RenderableType]:
    state = "ready" if model.problem is None else f"not ready: {printable(model.problem)}"
    style = "green" if model.problem is None else "yellow"
    yield Text.assemble((printable(model.name), "bold"), "  ", (state, style))
    if model.load is None:
        yield Text("no report: its router is not connected")
        return
    yield _rates(model.name, model.load, reading)
    yield _tiers(model)
    yield _workers(model.name, model.load, reading)
    yield from _ledger(model.name, reading)


def _rates(name: str, load: _Load, reading: LiveReading) -> Text:
    hits, queried = load.prefixes.num_hit_tokens, load.prefixes.num_query_tokens
    parts = [
        f"{_number(reading.rate(name, lambda sample: sample.totals.num_tokens))} tokens/s",
        f"{_number(reading.rate(name, lambda sample: sample.totals.num_prompt_tokens))} prompt tokens/s",
        f"prefix hits {_share(hits, queried)}",
    ]
    if load.pool.num_blocks:
        parts.append(f"pool {load.pool.num_blocks_used} of {load.pool.num_blocks} blocks")
    if load.queue_wait_s > 0:
        parts.append(f"queue through in {load.queue_wait_s:.1f} s, {load.num_at_risk} at risk")
    return Text(" · ".join(parts))


def _tiers(model: _Model) -> Table:
    table = _table("class", "queued", "oldest", "prefilling", "in a pool", "decoding", _WRAPPED)
    assert model.load is not None, "drawn without a report"
    for name, tier in model.load.tiers.items():
        counts = (tier.num_prefilling, tier.num_pooled, tier.num_decoding)
        oldest = f"{tier.oldest_queued_s:.1f} s" if tier.num_queued else "-"
        table.add_row(
            escape(_TIERS.get(name, printable(name))),
            str(tier.num_queued),
            oldest,
            *map(str, counts),
            _held(model, name),
        )
    return table


def _held(model: _Model, tier: str) -> str:
    held = [
        f"{_OBJECTIVES.get(objective.objective, printable(objective.objective))} "
        f"{_share(objective.held, objective.held + objective.missed)}"
        for objective in model.objectives
        if objective.tier == tier
    ]
    return escape(", ".join(held)) or "-"


def _workers(name: str, load: _Load, reading: LiveReading) -> Table:
    columns = (
        "worker",
        "node",
        "role",
        "running",
        "waiting",
        "blocks",
        "lean",
        "contexts",
        "tokens/s",
        "prompt/s",
        "busy",
    )
    has_nodes = any(worker.node for worker in load.workers)
    table = _table(*(column for column in columns if has_nodes or column != "node"))
    for worker in load.workers:
        wall = reading.gained(name, of_worker(worker.worker, lambda counters: counters.wall_s))
        compute = reading.gained(name, of_worker(worker.worker, lambda counters: counters.compute_s))
        cells = [
            printable(worker.worker),
            *([printable(worker.node) or "-"] if has_nodes else []),
            _role(worker),
            f"{worker.num_running}/{worker.num_places}",
            str(worker.num_waiting),
            f"{worker.num_blocks_used}/{worker.num_blocks}",
            in_percent(worker.lean, 0) if worker.is_elastic else "-",
            f"{worker.batch.shortest}-{worker.batch.longest}" if worker.batch.num_requests else "-",
            _number(reading.rate(name, of_worker(worker.worker, lambda counters: counters.num_tokens))),
            _number(reading.rate(name, of_worker(worker.worker, lambda counters: counters.num_prompt_tokens))),
            in_percent(compute / wall, 0) if wall and compute is not None else "-",
        ]
        table.add_row(*(escape(cell) for cell in cells))
    return table


def _role(worker: _Worker) -> str:
    both = worker.can_prefill and worker.can_decode
    role = "elastic" if worker.is_elastic else "both" if both else "prefill" if worker.can_prefill else "decode"
    return f"{role}, drains" if worker.is_draining else role


def _ledger(name: str, reading: LiveReading) -> Iterator[Text]:
    parts = [(label, _seconds(name, reading, keys), style) for label, keys, style in _PARTS]
    total = sum(seconds for _, seconds, _ in parts)
    if not total:
        return
    bar = Text("time  ")
    for _, seconds, style in parts:
        bar.append("█" * round(_BAR_LEN * seconds / total), style=style)
    yield bar
    yield Text.assemble("      ", *((f"{label} {seconds / total:.0%}  ", style) for label, seconds, style in parts))


def _seconds(name: str, reading: LiveReading, keys: tuple[str, ...]) -> float:
    return reading.gained(name, lambda load: sum(load.time.get(key, 0.0) for key in keys)) or 0.0


class _FittingTable(Table):
    @override
    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = options.update(max_width=WIDEST)
        self.collapse_padding = console.measure(self, options=wide).maximum > options.max_width
        return super().__rich_console__(console, options)


def _table(*headings: str) -> Table:
    table = _FittingTable(box=None, pad_edge=False, header_style="bright_black")
    for heading in headings:
        table.add_column(heading, no_wrap=heading != _WRAPPED)
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _share(part: float, whole: float) -> str:
    return in_percent(part / whole, 0) if whole else "-"


_PATH = "/v1/alignedserve/live"
_PATIENCE_S = 10.0
_MAX_BYTES = 16 * 1024 * 1024
_ONCE_S = 2.2  # between the two documents of --once: routers report once a second
_RATES_S = 5.0  # over which rates are told


def top(url: str | None, *, is_once: bool, every_s: float) -> None:
    """Draw until Ctrl-C, or once. Raises ConfigError, PeerError or PeerLost; those of later looks are shown instead."""
    url = _address(url)
    console = results()
    first = _look(url)
    if is_once:
        time.sleep(_ONCE_S)
        print_table(drawn(LiveReading(_look(url), first)))
        return
    with contextlib.suppress(KeyboardInterrupt):
        _go_on(url, first, console, every_s)


def show_once(url: str, *, json_output: bool) -> bool:
    """Print one document of a gateway, without rates; return whether every model is ready. Raises as `top`."""
    document = _look(_address(url))
    if json_output:
        print_json(msgspec.to_builtins(document))
    else:
        print_table(drawn(LiveReading(document, None)))
    return document.not_ready is None


def _go_on(url: str, first: LiveDocument, console: Console, every_s: float) -> None:
    documents = deque([first])
    with contextlib.ExitStack() as stack:
        is_redrawn = console.is_terminal and not console.is_dumb_terminal
        live = stack.enter_context(Live(console=console, screen=True, auto_refresh=False)) if is_redrawn else None
        while True:
            problem = _look_again(url, documents)
            picture = Group(_heading(url, problem), drawn(LiveReading(documents[-1], documents[0])))
            if live is not None:
                live.update(picture, refresh=True)
            else:
                console.print(picture)
            time.sleep(every_s)


def _look_again(url: str, documents: deque[LiveDocument]) -> str | None:
    try:
        documents.append(_look(url))
    except AlignedServeError as error:
        return str(error)
    while len(documents) > 2 and documents[-1].time_s - documents[1].time_s >= _RATES_S:
        documents.popleft()
    return None


def _heading(url: str, problem: str | None) -> Text:
    heading = Text.assemble(("alignedserve top", "bold"), f"  {url}  {datetime.now():%H:%M:%S}")
    if problem is not None:
        heading.append(f"  {printable(problem)}; trying again", style="red")
    return heading


def _address(url: str | None) -> str:
    if url is None:
        url = show_status(find_cluster(None, option="--url")).url if has_cluster() else DEFAULT_URL
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"--url {url}: must be the address of a server, such as {DEFAULT_URL}")
    return url.rstrip("/").removesuffix("/v1")


def _look(url: str) -> LiveDocument:
    try:
        status, body = _get(url)
    except (HTTPException, OSError) as error:
        raise unreachable(url, error) from error
    if status != HTTPStatus.OK:
        raise PeerError(_refusal(status))
    try:
        return msgspec.json.decode(body, type=LiveDocument)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ProtocolError(f"{url} does not answer as AlignedServe does") from error


def _get(url: str) -> tuple[int, bytes]:
    parts, key = urlsplit(url), client_api_key()
    trust, host = trust_for(url), parts.netloc
    opened = (
        HTTPConnection(host, timeout=_PATIENCE_S)
        if trust is None
        else HTTPSConnection(host, timeout=_PATIENCE_S, context=trust)
    )
    with contextlib.closing(opened) as connection:
        connection.request("GET", parts.path + _PATH, headers={"Authorization": f"Bearer {key}"} if key else {})
        response = connection.getresponse()
        return response.status, response.read(_MAX_BYTES)


def _refusal(status: int) -> str:
    if status == 401:
        return "the server needs an API key: set ALIGNEDSERVE_API_KEY"
    if status == 403:
        return "this key may not see what others use: it needs may_see_usage (docs/keys.md)"
    if status == 404:
        return "the server has no such page: it is older than this command, or not AlignedServe"
    return f"the server answers with status {status}"
