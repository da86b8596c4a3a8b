"""The page about a sweep: its sections, and a few lines of script that show one rate at a time."""

from collections.abc import Sequence
from html import escape

from lab.sim.report import plots, tables
from lab.sim.report.document import document, figure, named_values, table
from lab.sim.report.runs import WINDOW_S, Report, ReportedRun
from lab.sim.report.svg import element, shown, swatch
from lab.sim.result import ALL

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
            plots.against_rate(report, name, "requests that met their objectives", lambda one: one.attainment,
                               is_share=True),
            plots.against_rate(report, name, "goodput, requests per second", lambda one: one.goodput_per_s,
                               is_share=False),
            plots.against_rate(report, name, "throughput, tokens per second", lambda one: one.tokens_per_s,
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
        figure(plots.timeline(run), run.policy, is_wide=True)
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
        + figure(plots.utilisation(report, finished), is_wide=True)
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
        plots.distribution(report, runs, class_name, "seconds to the first token", lambda one: one.ttft_s),
        plots.distribution(report, runs, class_name, "seconds between tokens", lambda one: one.tbt_s),
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
    boxes = [(f"k{number}", words) for number, words in enumerate(plots.KINDS)]
    entries = [
        element("li", element("span", class_=f"{kind} box"), words) for kind, words in [*boxes, ("none", "idle")]
    ]
    return element("ul", *entries, class_="legend", aria_label="iterations")
