"""The page of a certificate: verdict, figures, plots, and how each figure is defined. It loads nothing."""

from collections.abc import Sequence
from html import escape

from alignedserve.core.metrics import READABLE_GAP_S, Distribution, in_percent
from lab.certification import plots
from lab.certification.certificate import Certificate
from lab.certification.definitions import protocol_section, reading_section
from lab.certification.notes import held_words, own_notes
from lab.certification.protocol import Phase
from lab.certification.records import PhaseRecord
from lab.certification.statistics import Compared, LeftOver, StreamFigures
from lab.certification.verdict import Check
from lab.certification.words import bound_of, duration, measured_of, percent, seconds
from lab.sim.report.document import document, figure, named_values, table
from lab.sim.report.svg import element, shown
from lab.sim.report.tables import Table

_STYLE = """
.verdict { padding: .9rem 1.1rem; border-radius: .5rem; border-left: .4rem solid; background: var(--card); }
.verdict p { margin: .2rem 0 0; } .verdict strong { font-size: 1.15rem; }
.held { border-color: var(--s2); } .held strong, td.yes { color: var(--s2); font-weight: 600; }
.broken { border-color: var(--s1); } .broken strong, td.no { color: var(--s1); font-weight: 600; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr)); gap: .75rem; margin: 1rem 0; }
.tile { background: var(--card); border: 1px solid var(--line); border-radius: .5rem; padding: .6rem .8rem; }
.tile b { display: block; font-size: 1.35rem; font-variant-numeric: tabular-nums; }
.tile span { color: var(--soft); font-size: .8125rem; }
.two { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(28rem, 100%), 1fr)); gap: 1rem; }
.dot { fill: currentColor; opacity: .65; } .missed { fill: none; stroke: currentColor; stroke-width: 1.6; opacity: 1; }
.objective { stroke: var(--ink); stroke-dasharray: 4 3; } .span { stroke: currentColor; stroke-width: 3; }
path.curve { stroke: currentColor; } .s0.box, .s1.box, .s2.box { background: currentColor; }
table.plain { font-size: .875rem; margin: .5rem 0 1rem; }
tr.ratio td { font-weight: 600; border-bottom-color: var(--soft); }
.free { fill: var(--track); stroke: var(--soft); }
"""
_PERCENTILES = (("p50", "p50"), ("p90", "p90"), ("p99", "p99"), ("longest", "max"))


def certificate_page(certificate: Certificate) -> str:
    """Render the whole document."""
    sections = (
        _verdict(certificate),
        _tiles(certificate),
        _checks(certificate.checks),
        _notes(certificate),
        _chat(certificate),
        _documents(certificate),
        protocol_section(certificate),
        element("h2", "What was certified") + named_values(certificate.about),
        reading_section(),
    )
    return document(certificate.title, "".join(sections), more_style=_STYLE)


# --- the verdict


def _verdict(certificate: Certificate) -> str:
    missed = certificate.missed
    if not missed:
        words = f"Held: all {len(certificate.checks)} bounds"
        more = f"{held_words(certificate)}."
    else:
        words = f"Not held: {len(missed)} of {len(certificate.checks)} bounds"
        more = "; ".join(f"{check.name} {measured_of(check)} (bound {bound_of(check)})" for check in missed) + "."
    inner = element("strong", escape(words)) + element("p", escape(more))
    return element("div", inner, class_="verdict held" if not missed else "verdict broken", role="status")


def _tiles(certificate: Certificate) -> str:
    figures, lines = certificate.figures, certificate.figures.lines.get(Phase.BESIDE.value)
    share = None if figures.left_over is None else figures.left_over.share
    beside, alone = figures.beside, figures.alone
    attained, alone_attained = (None if phase is None else phase.attainment for phase in (beside, alone))
    p99, alone_p99 = (None if phase is None or phase.ttft_s is None else phase.ttft_s.p99 for phase in (beside, alone))
    answered = "-" if lines is None else f"{lines.num_answered:,} of {lines.num_lines:,}"
    windows = "-" if lines is None else f"{lines.num_windows_held} of {lines.num_windows}"
    tiles = (
        (percent(attained), f"of chats in time beside documents; alone {percent(alone_attained)}"),
        (seconds(p99), f"TTFT p99 beside documents; alone {seconds(alone_p99)}"),
        (percent(share), "of what chat leaves over went to documents"),
        (answered, "lines answered beside chat"),
        (windows, "windows held beside chat"),
    )
    return element(
        "div",
        *(
            element("div", element("b", escape(value)), element("span", escape(words)), class_="tile")
            for value, words in tiles
        ),
        class_="tiles",
    )


def _checks(checks: Sequence[Check]) -> str:
    rows = [
        element(
            "tr",
            element("td", escape(check.name), class_="word"),
            element("td", escape(measured_of(check))),
            element("td", escape(bound_of(check))),
            element("td", "held" if check.holds else "not held", class_="word yes" if check.holds else "word no"),
        )
        for check in checks
    ]
    return element("h2", "Bounds") + _plain_table(("bound on", "measured", "bound", ""), rows)


def _plain_table(headings: Sequence[str], rows: Sequence[str]) -> str:
    head = element("tr", *(element("th", escape(words), scope="col", class_="word" if not column else "number")
                           for column, words in enumerate(headings)))  # fmt: skip
    inner = element("table", element("thead", head), element("tbody", *rows), class_="plain")
    return element("div", inner, class_="scroll")


def _notes(certificate: Certificate) -> str:
    notes = [*certificate.evidence.notes, *own_notes(certificate)]
    if not notes:
        return ""
    return element("h2", "Done otherwise, and what to know") + element(
        "ul", *(element("li", escape(note)) for note in notes)
    )


# --- chat


def _chat(certificate: Certificate) -> str:
    figures, slo = certificate.figures, certificate.protocol.slo
    phases = [phase for phase in certificate.evidence.phases if phase.phase.has_chat]
    intro = (
        f"Objectives: first token within {seconds(slo.ttft_s)}, then {seconds(slo.tpot_s)} per token in the mean. Each "
        "chat is streamed, and its times are its client's. Shaded: bursts. Rings: chats that missed an objective or "
        "failed."
    )
    return (
        element("h2", "Chat, with documents off and on")
        + element("p", escape(intro), class_="soft")
        + element(
            "div",
            element("div", _compared(figures.compared())),
            element("div", _attainment(figures.alone, figures.beside)),
            class_="two",
        )
        + _pictures(certificate)
        + _legend((Phase.CHAT_ALONE, Phase.BESIDE))
        + element(
            "div",
            *(figure(plot, phase.phase.value) for phase, plot in _first_tokens(certificate, phases)),
            class_="two",
        )
        + element("div", *map(figure, _distributions(certificate, phases)), class_="plots")
    )


def _first_tokens(certificate: Certificate, phases: Sequence[PhaseRecord]) -> list[tuple[PhaseRecord, str]]:
    firsts = [chat.ttft_s for phase in phases for chat in phase.chats if chat.ttft_s is not None]
    highest_s = max([*firsts, 1.2 * (certificate.protocol.slo.ttft_s or 0.1)])
    lasts_s = max([certificate.protocol.chat_s, *(chat.sent_s for phase in phases for chat in phase.chats)])
    return [(phase, plots.first_tokens(certificate, phase, highest_s, lasts_s)) for phase in phases]


def _distributions(certificate: Certificate, phases: Sequence[PhaseRecord]) -> tuple[str, ...]:
    slo = certificate.protocol.slo
    ttfts = [(phase.phase, [chat.ttft_s for chat in phase.chats_beside if chat.ttft_s is not None]) for phase in phases]
    tpots = [(phase.phase, [chat.tpot_s for chat in phase.chats_beside if chat.tpot_s is not None]) for phase in phases]
    return (
        plots.distribution(ttfts, "seconds to the first token", slo.ttft_s),
        plots.distribution(tpots, "mean seconds a token of each chat", slo.tpot_s),
        plots.distribution([(phase.phase, phase.gaps_s) for phase in phases], "seconds between two tokens", None),
    )


def _compared(compared: Sequence[Compared]) -> str:
    rows = []
    for phase in compared:
        for words, of_one in (("off", phase.off), ("on", phase.on)):
            cells = [element("td", escape(seconds(_at(of_one, field)))) for _, field in _PERCENTILES]
            name = f"{phase.measure}, documents {words}"
            rows.append(element("tr", element("td", escape(name), class_="word"), *cells))
        ratios = [phase.ratio(field) for _, field in _PERCENTILES]
        cells = [element("td", "-" if ratio is None else f"{shown(ratio)} x") for ratio in ratios]
        name = element("td", f"{phase.measure}, on to off", class_="word")
        rows.append(element("tr", name, *cells, class_="ratio"))
    return _plain_table(("chat", *(words for words, _ in _PERCENTILES)), rows)


def _attainment(alone: StreamFigures | None, beside: StreamFigures | None) -> str:
    rows = []
    for words, figures in (("documents off", alone), ("documents on", beside)):
        if figures is None:
            continue
        interval = figures.attainment_interval
        between = "-" if interval is None else f"{in_percent(interval[0])} to {in_percent(interval[1])}"
        failures = ", ".join(f"{count} x {kind}" for kind, count in figures.reasons.items()) or "none"
        shares = (percent(figures.attainment), between, percent(figures.stalled))
        values = (str(figures.num_sent), str(figures.num_answered), *shares, failures)
        cells = [element("td", escape(value)) for value in values]
        rows.append(element("tr", element("td", words, class_="word"), *cells))
    stalled = f"gap over {READABLE_GAP_S:g} s"
    return _plain_table(("chat", "sent", "answered", "in time", "95 % interval", stalled, "failed"), rows)


def _pictures(certificate: Certificate) -> str:
    figures, rows = certificate.figures, []
    for words, by_phase in (("with a picture", figures.pictured), ("without", figures.plain)):
        for phase, one in by_phase.items():
            firsts = [seconds(_at(one.ttft_s, field)) for field in ("p50", "p99")]
            values = (str(one.num_sent), str(one.num_answered), percent(one.attainment), *firsts)
            cells = [element("td", escape(value)) for value in values]
            rows.append(element("tr", element("td", escape(f"{words}, {phase}"), class_="word"), *cells))
    return _plain_table(("chats", "sent", "answered", "in time", "TTFT p50", "p99"), rows) if figures.pictured else ""


def _at(distribution: Distribution | None, field: str) -> float | None:
    return None if distribution is None else getattr(distribution, field)


def _legend(phases: Sequence[Phase]) -> str:
    entries = [
        element("li", element("span", class_=f"s{plots.STYLES[phase]} box"), escape(phase.value)) for phase in phases
    ]
    return element("ul", *entries, class_="legend", aria_label="phases")


# --- documents


def _documents(certificate: Certificate) -> str:
    figures = certificate.figures
    phases = [phase for phase in certificate.evidence.phases if phase.batches]
    if not phases:
        return element("h2", "Documents") + element("p", "No phase with documents was reached.", class_="soft")
    streamed = _compared_documents(figures.documents_compared()) if figures.documents_beside is not None else ""
    return (
        element("h2", "Documents, alone and beside chat")
        + (_left_over(figures.left_over) if figures.left_over is not None else "")
        + _legend((Phase.BESIDE, Phase.DOCUMENTS_ALONE))
        + element("div", *_document_plots(certificate), class_="two")
        + _batches(phases)
        + _lines(certificate)
        + streamed
    )


def _document_plots(certificate: Certificate) -> list[str]:
    left, sections = certificate.figures.left_over, [figure(plots.progress(certificate), "lines that had ended")]
    if left is not None:
        sections.append(figure(plots.capacity(left), "tokens of documents per second"))
    return sections


def _left_over(left: LeftOver) -> str:
    words = (
        f"Alone, documents had {shown(left.alone_tokens_per_s)} tokens/s. Beside chat they took "
        f"{duration(left.beside_s)}. A server with nothing else to do would have needed "
        f"{in_percent(left.chat_share, 0)} of that time for the same chats, which leaves "
        f"{shown(left.left_tokens_per_s)} tokens/s over. Documents had {shown(left.beside_tokens_per_s)} tokens/s: "
        f"{percent(left.share)} of it."
    )
    return element("p", escape(words))


def _batches(phases: Sequence[PhaseRecord]) -> str:
    rows = []
    for phase in phases:
        for batch in phase.batches:
            took_s = None if batch.ended_s is None else batch.ended_s - batch.began_s
            values = (
                duration(batch.window_s), "-" if took_s is None else duration(took_s), batch.status,
                "yes" if batch.has_held_window else "no", f"{batch.num_lines:,}", f"{batch.num_answered:,}",
                f"{batch.num_output_tokens:,}",
            )  # fmt: skip
            cells = [element("td", escape(value)) for value in values]
            name = f"batch {batch.name}, {phase.phase.value}"
            rows.append(element("tr", element("td", escape(name), class_="word"), *cells))
    return _plain_table(("batch", "window", "took", "status", "in time", "lines", "answered", "tokens"), rows)


def _lines(certificate: Certificate) -> str:
    rows = []
    for name, lines in certificate.figures.lines.items():
        failures = ", ".join(f"{count} x {kind}" for kind, count in lines.failures.items()) or "none"
        values = (
            lines.num_lines,
            lines.num_answered,
            lines.num_lost,
            lines.num_doubled,
            lines.num_wrong,
            lines.num_expired,
        )
        cells = [element("td", f"{value:,}") for value in values] + [element("td", escape(failures))]
        rows.append(element("tr", element("td", escape(name), class_="word"), *cells))
    wrong = [words for phase in certificate.evidence.phases for batch in phase.batches for words in batch.wrong]
    shown_wrong = element("ul", *(element("li", escape(words)) for words in wrong)) if wrong else ""
    return (
        _plain_table(("lines", "sent", "answered", "lost", "doubled", "wrong", "expired", "failed"), rows) + shown_wrong
    )


def _compared_documents(compared: Sequence[Compared]) -> str:
    rows = tuple(
        (f"{phase.measure} of documents, {words}", *(seconds(_at(of_one, field)) for _, field in _PERCENTILES))
        for phase in compared
        for words, of_one in (("alone", phase.off), ("beside chat", phase.on))
    )
    return table(
        Table(("documents", *(words for words, _ in _PERCENTILES)), rows, 1), "First tokens and gaps of documents"
    )
