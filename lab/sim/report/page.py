"""The page about a sweep: its sections, and a few lines of script that show one rate at a time."""

from collections.abc import Callable, Sequence
from html import escape
from itertools import pairwise

from alignedserve.core.metrics import in_percent
from lab.sim.engine import IterationLine
from lab.sim.report import tables
from lab.sim.report.document import document, figure, named_values, table
from lab.sim.report.svg import (
    MAX_STYLES,
    PlotFrame,
    Scale,
    dash,
    element,
    from_zero,
    logarithmic,
    mark,
    number,
    path,
    picture,
    shown,
    swatch,
    text,
)
from lab.sim.report.tables import WINDOW_S, Report, ReportedRun, window_of
from lab.sim.result import ALL, CURVE_PERCENTS, ClassResult, Measure

_SCRIPT = """
const show = () => {
  const rate = document.querySelector('input[name=rate]:checked').value;
  for (const one of document.querySelectorAll('[data-rate]')) one.hidden = one.dataset.rate !== rate;
};
for (const one of document.querySelectorAll('input[name=rate]')) one.addEventListener('change', show);
if (document.querySelector('input[name=rate]')) show();
"""


def report_page(report: Report) -> str:
    """Render the whole document; it loads nothing, and its content security policy forbids loading."""
    return document(
        report.title,
        f"{named_values(report.about)}{_failures(report)}{_rates(report)}{_at_each_rate(report)}",
        _SCRIPT,
    )


# --- sections


def _failures(report: Report) -> str:
    failed = [f"{run.policy} at {shown(run.rate)}/s: {run.error}" for run in report.runs if run.error is not None]
    if not failed:
        return ""
    return element("h2", "Failed") + element("ul", *(element("li", escape(line)) for line in failed))


def _rates(report: Report) -> str:
    sections = []
    for name in report.classes:
        charts = (
            against_rate(report, name, "requests that met their objectives", lambda result: result.attainment,
                               is_share=True),
            against_rate(report, name, "goodput, requests per second", lambda result: result.goodput_per_s,
                               is_share=False),
            against_rate(report, name, "throughput, tokens per second", lambda result: result.tokens_per_s,
                               is_share=False),
        )  # fmt: skip
        heading = element("h3", f"class {escape(name)}") if name != ALL else ""
        sections.append(heading + element("div", *map(figure, charts), class_="plots"))
    intro = "A request without a complete answer misses its objectives; goodput counts the requests that met theirs."
    return (
        element("h2", "Against the rate")
        + element("p", intro, class_="soft")
        + _legend(report)
        + "".join(sections)
        + table(tables.headlines(report), "All figures", is_open=True)
        + table(tables.steadiness(report), "Stalls and queues", is_open=True)
    )


def _at_each_rate(report: Report) -> str:
    parts = [element("div", _at_rate(report, rate), data_rate=_key(rate)) for rate in report.rates]
    return element("h2", "At one rate") + _selector(report) + _legend(report) + "".join(parts)


def _selector(report: Report) -> str:
    rates = report.rates
    chosen = rates[len(rates) // 2] if rates else None
    choices = []
    for rate in rates:
        checked = {"checked": ""} if rate == chosen else {}
        button = element("input", type="radio", name="rate", value=_key(rate), **checked).removesuffix("</input>")
        choices.append(element("label", button, f" {shown(rate)}/s"))
    return element("fieldset", element("legend", "Offered rate", class_="soft"), *choices)


def _at_rate(report: Report, rate: float) -> str:
    runs = report.at_rate(rate)
    finished = [run for run in runs if run.result is not None]
    lines = [
        figure(timeline(run), run.policy, is_wide=True)
        for run in finished
        if run.result is not None and run.result.timeline
    ]
    intro = (
        f"{WINDOW_S:g} seconds in the middle of the run. Above, each iteration of the worker, coloured by what it "
        "computes; beneath, the blocks that its requests hold, as a share of its memory."
    )
    return (
        "".join(_distributions(report, runs, name) for name in report.classes)
        + element("h3", f"Utilisation of every worker at {shown(rate)}/s")
        + figure(utilisation(report, finished), is_wide=True)
        + table(tables.workers(finished), "Workers")
        + element("h3", f"Timeline of the first worker that decodes, at {shown(rate)}/s")
        + element("p", intro, class_="soft")
        + _legend_of_kinds()
        + "".join(lines)
        + table(tables.windows(finished), "What the timelines show")
    )


def _distributions(report: Report, runs: Sequence[ReportedRun], class_name: str) -> str:
    whose = "" if class_name == ALL else f", class {class_name}"
    charts = (
        distribution(report, runs, class_name, "seconds to the first token", lambda result: result.ttft_s),
        distribution(report, runs, class_name, "seconds between tokens", lambda result: result.tbt_s),
    )
    return (
        element("h3", f"First tokens and gaps between tokens{escape(whose)}")
        + element("div", *map(figure, charts), class_="plots")
        + table(tables.distributions(runs, class_name), "Percentiles")
    )


# --- pieces


def _key(rate: float) -> str:
    return repr(rate)


def _legend(report: Report) -> str:
    entries = [element("li", swatch(report.style_of(policy)), escape(policy)) for policy in report.policies]
    return element("ul", *entries, class_="legend", aria_label="policies")


def _legend_of_kinds() -> str:
    boxes = [(f"k{number}", words) for number, words in enumerate(KINDS)]
    entries = [
        element("li", element("span", class_=f"{kind} box"), words) for kind, words in [*boxes, ("none", "idle")]
    ]
    return element("ul", *entries, class_="legend", aria_label="iterations")


_ROW = 20  # of a bar


# --- against the rate


def against_rate(
    report: Report, class_name: str, y_label: str, value: Callable[[ClassResult], float | None], *, is_share: bool
) -> str:
    points: dict[str, list[tuple[float, float]]] = {policy: [] for policy in report.policies}
    for run in sorted(report.runs, key=lambda run: run.rate):
        result = run.of_class(class_name)
        measured = None if result is None else value(result)
        if measured is not None:
            points[run.policy].append((run.rate, measured))
    y = Scale(0.0, 1.0) if is_share else from_zero([level for line in points.values() for _, level in line])
    frame = PlotFrame(from_zero(report.rates), y, "offered requests per second", y_label)
    lines = [_marked_line(frame, policy, report.style_of(policy), line) for policy, line in points.items()]
    return frame.picture(f"{y_label} against rate", frame.axes(y_is_share=is_share), *lines)


def _marked_line(frame: PlotFrame, policy: str, style: int, points: Sequence[tuple[float, float]]) -> str:
    placed = [frame.at(x, y) for x, y in points]
    line = [_curve(style, placed)] if placed else []
    marks = [
        mark(style, *spot, f"{policy}: {shown(y)} at {shown(x)}/s") for spot, (x, y) in zip(placed, points, strict=True)
    ]
    return element("g", *line, *marks, class_=f"s{style % MAX_STYLES}")


def _curve(style: int, placed: Sequence[tuple[float, float]]) -> str:
    return element("path", d=path(placed), class_="curve", stroke_dasharray=dash(style))


# --- distributions


def distribution(
    report: Report, runs: Sequence[ReportedRun], class_name: str, x_label: str, measure: Callable[[ClassResult], object]
) -> str:
    curves = [(run.policy, spread.curve) for run in runs if (spread := _measured(run, class_name, measure)) is not None]
    frame = PlotFrame(
        logarithmic([curve[end] for _, curve in curves for end in (1, -1)]),
        Scale(0.0, 1.0),
        x_label,
        "share of values at or below",
    )
    lines = []
    for policy, curve in curves:
        style = report.style_of(policy)
        placed = [frame.at(value, percent / 100) for value, percent in zip(curve, CURVE_PERCENTS, strict=True)]
        lines.append(element("g", _curve(style, placed), class_=f"s{style % MAX_STYLES}"))
    return frame.picture(f"distribution of {x_label}", frame.axes(y_is_share=True), *lines)


def _measured(run: ReportedRun, class_name: str, measure: Callable[[ClassResult], object]) -> Measure | None:
    result = run.of_class(class_name)
    seconds = None if result is None else measure(result)
    assert seconds is None or isinstance(seconds, Measure)
    return seconds


# --- workers


def utilisation(report: Report, runs: Sequence[ReportedRun]) -> str:
    """Plot a bar per worker: the share of the run in which it computed."""
    rows = [(run.policy, worker) for run in runs if run.result is not None for worker in run.result.workers]
    left, width, parts = 270, 900, []
    for number_of_row, (policy, worker) in enumerate(rows):
        top, style = number_of_row * _ROW + 4, report.style_of(policy) % MAX_STYLES
        length = (width - left - 50) * worker.utilisation
        words = {"y": top + 12, "text_anchor": "end"}
        parts += [
            text(_shortened(policy), x=left - 78, **words),
            text(worker.name, x=left - 8, **words),
            element("rect", x=left, y=top, width=width - left - 50, height=_ROW - 6, class_="track"),
            element("rect", x=left, y=top, width=length, height=_ROW - 6, class_=f"bar s{style}"),
            text(in_percent(worker.utilisation, 0), x=width - 44, y=top + 12),
        ]
    return picture(width, len(rows) * _ROW + 6, "utilisation of every worker", *parts)


def _shortened(policy: str) -> str:
    return policy if len(policy) <= 28 else policy[:27] + "…"


# --- one worker

KINDS = ("prompt tokens only", "prompt tokens and decodes", "decodes only")


def timeline(run: ReportedRun) -> str:
    lines = window_of(run.result.timeline) if run.result is not None else []
    width, bars, floor = 900, 34, 96
    seconds = Scale(0.0, WINDOW_S)

    def x(moment: float) -> float:
        return 8 + (width - 16) * seconds.place(moment)

    shapes = [
        element(
            "path",
            d=_boxes([(x(iteration.started_s), x(iteration.ended_s)) for iteration in kind], bars),
            class_=f"k{number_of}",
        )
        for number_of, kind in enumerate(_by_kind(lines))
        if kind
    ]
    ticks = [
        text(f"{tick:g} s", x=x(tick), y=floor + 15, text_anchor=_anchor(tick)) for tick in range(int(WINDOW_S) + 1)
    ]
    most = max((line.num_blocks for line in lines), default=0)
    caption = f"blocks held: at most {most:,} of {run.num_blocks:,} here"
    return picture(
        width,
        floor + 34,
        f"timeline of one worker under {run.policy}",
        element("rect", x=8, y=0, width=width - 16, height=bars, class_="track"),
        *shapes,
        element("path", d=_area(lines, x, run.num_blocks, floor), class_="blocks"),
        element("line", x1=8, x2=width - 8, y1=floor, y2=floor, class_="axis"),
        *ticks,
        text(caption, x=8, y=floor + 30, class_="name"),
    )


def _anchor(tick: int) -> str:
    return "start" if tick == 0 else "end" if tick == WINDOW_S else "middle"


def _by_kind(lines: Sequence[IterationLine]) -> tuple[list[IterationLine], ...]:
    prompts = [line for line in lines if line.num_prompt_tokens and not line.num_decodes]
    mixed = [line for line in lines if line.num_prompt_tokens and line.num_decodes]
    decodes = [line for line in lines if not line.num_prompt_tokens]
    return prompts, mixed, decodes


def _boxes(spans: Sequence[tuple[float, float]], height: int) -> str:
    return "".join(
        f"M{begin:.2f} 0h{max(end - begin - 0.15, 0.1):.2f}v{height}h-{max(end - begin - 0.15, 0.1):.2f}z"
        for begin, end in spans
    )


def _area(lines: Sequence[IterationLine], x: Callable[[float], float], num_blocks: int, floor: int) -> str:
    if not lines:
        return ""
    top = 42

    def y(count: int) -> str:
        return number(floor - (floor - top) * min(count / num_blocks, 1.0))

    steps = "".join(f"H{number(x(after.started_s))}V{y(after.num_blocks)}" for _, after in pairwise(lines))
    first, last = lines[0], lines[-1]
    return f"M{number(x(first.started_s))} {floor}V{y(first.num_blocks)}{steps}H{number(x(last.ended_s))}V{floor}z"
