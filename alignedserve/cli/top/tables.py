"""Draws a reading for the terminal."""

from collections.abc import Iterator

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from typing_extensions import override

from alignedserve.cli.console import WIDEST, printable
from alignedserve.cli.top.document import Batches, Load, Model, Reading, Worker, of_worker
from alignedserve.core.metrics import in_percent

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


def drawn(reading: Reading) -> RenderableType:
    parts: list[RenderableType] = []
    for model in reading.latest.models:
        parts += [*_model(model, reading), Text()]
    if not reading.latest.models:
        parts.append(Text("No model is served."))
    if reading.latest.batches is not None:
        parts.append(_batches(reading.latest.batches))
    return Group(*parts)


def _model(model: Model, reading: Reading) -> Iterator[RenderableType]:
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


def _rates(name: str, load: Load, reading: Reading) -> Text:
    hits, asked = load.prefixes.num_hit_tokens, load.prefixes.num_query_tokens
    parts = [
        f"{_number(reading.rate(name, lambda one: one.totals.num_tokens))} tokens/s",
        f"{_number(reading.rate(name, lambda one: one.totals.num_prompt_tokens))} prompt tokens/s",
        f"prefix hits {_share(hits, asked)}",
    ]
    if load.pool.num_blocks:
        parts.append(f"pool {load.pool.num_blocks_used} of {load.pool.num_blocks} blocks")
    if load.queue_wait_s > 0:
        parts.append(f"queue through in {load.queue_wait_s:.1f} s, {load.num_at_risk} at risk")
    return Text(" · ".join(parts))


def _tiers(model: Model) -> Table:
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


def _held(model: Model, tier: str) -> str:
    held = [
        f"{_OBJECTIVES.get(objective.objective, printable(objective.objective))} "
        f"{_share(objective.held, objective.held + objective.missed)}"
        for objective in model.objectives
        if objective.tier == tier
    ]
    return escape(", ".join(held)) or "-"


def _workers(name: str, load: Load, reading: Reading) -> Table:
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
        wall = reading.gained(name, of_worker(worker.worker, lambda found: found.wall_s))
        compute = reading.gained(name, of_worker(worker.worker, lambda found: found.compute_s))
        cells = [
            printable(worker.worker),
            *([printable(worker.node) or "-"] if has_nodes else []),
            _role(worker),
            f"{worker.num_running}/{worker.num_places}",
            str(worker.num_waiting),
            f"{worker.num_blocks_used}/{worker.num_blocks}",
            in_percent(worker.lean, 0) if worker.is_elastic else "-",
            f"{worker.batch.shortest}-{worker.batch.longest}" if worker.batch.num_requests else "-",
            _number(reading.rate(name, of_worker(worker.worker, lambda found: found.num_tokens))),
            _number(reading.rate(name, of_worker(worker.worker, lambda found: found.num_prompt_tokens))),
            in_percent(compute / wall, 0) if wall and compute is not None else "-",
        ]
        table.add_row(*(escape(cell) for cell in cells))
    return table


def _role(worker: Worker) -> str:
    both = worker.can_prefill and worker.can_decode
    role = "elastic" if worker.is_elastic else "both" if both else "prefill" if worker.can_prefill else "decode"
    return f"{role}, drains" if worker.is_draining else role


def _ledger(name: str, reading: Reading) -> Iterator[Text]:
    parts = [(label, _seconds(name, reading, keys), style) for label, keys, style in _PARTS]
    total = sum(seconds for _, seconds, _ in parts)
    if not total:
        return
    bar = Text("time  ")
    for _, seconds, style in parts:
        bar.append("█" * round(_BAR_LEN * seconds / total), style=style)
    yield bar
    yield Text.assemble("      ", *((f"{label} {seconds / total:.0%}  ", style) for label, seconds, style in parts))


def _seconds(name: str, reading: Reading, keys: tuple[str, ...]) -> float:
    return reading.gained(name, lambda load: sum(load.time.get(key, 0.0) for key in keys)) or 0.0


def _batches(batches: Batches) -> Text:
    states = ", ".join(f"{count} {printable(state)}" for state, count in sorted(batches.num_batches.items()))
    lines = f"{batches.num_waiting} lines waiting, {batches.num_in_flight} at work, {batches.completed} done"
    text = Text.assemble(("batches", "bold"), f"  {states or 'none open'} · {lines}, {batches.failed} failed")
    if batches.num_at_risk:
        text.append(f" · {batches.num_at_risk} late", style="yellow")
    if batches.is_paused:
        text.append(" · paused: results cannot be written", style="red")
    return text


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
