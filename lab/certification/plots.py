"""The plots of a certificate."""

from collections.abc import Sequence

from alignedserve.core.metrics import percentile
from lab.certification.certificate import Certificate
from lab.certification.protocol import Phase, Protocol
from lab.certification.records import PhaseRecord
from lab.certification.statistics import LeftOver
from lab.sim.report.svg import PlotFrame, Scale, element, from_zero, logarithmic, path, picture, shown, text

STYLES = {Phase.CHAT_ALONE: 0, Phase.BESIDE: 1, Phase.DOCUMENTS_ALONE: 2}
_PERCENTS = (*range(100), 99.5, 99.9, 100)
_MAX_POINTS = 1500  # of a line


def first_tokens(certificate: Certificate, phase: PhaseRecord, highest_s: float, lasts_s: float) -> str:
    """Plot every chat of a phase: when it was sent, and how long its first token took. Bursts are shaded."""
    protocol = certificate.protocol
    y = logarithmic([0.9 * _least(certificate), highest_s])
    frame = PlotFrame(Scale(0.0, lasts_s), y, "seconds since the phase's chat began", "seconds to the first token",
                  width=560, height=250)  # fmt: skip
    points = []
    for chat in phase.chats:
        is_missed = not chat.has_met(protocol.slo)
        x, level = frame.at(chat.sent_s, highest_s if chat.ttft_s is None else chat.ttft_s)
        words = f"sent at {chat.sent_s:.1f} s: " + (chat.failure or f"{shown(chat.ttft_s or 0.0)} s")
        kind = "dot missed" if is_missed else "dot"
        points.append(
            element("circle", element("title", words), cx=x, cy=level, r=3.0 if is_missed else 2.2, class_=kind)
        )
    style = STYLES[phase.phase]
    return frame.picture(
        f"first tokens, {phase.phase.value}", _bursts(frame, protocol), frame.axes(), _documents_there(frame, phase),
        _objective(frame, protocol.slo.ttft_s), element("g", *points, class_=f"s{style}"),
    )  # fmt: skip


def _least(certificate: Certificate) -> float:
    firsts = [chat.ttft_s for phase in certificate.evidence.phases for chat in phase.chats if chat.ttft_s]
    return max(min(firsts, default=0.01), 0.001)


def _bursts(frame: PlotFrame, protocol: Protocol) -> str:
    parts = []
    for burst in range(protocol.num_bursts):
        begins_s = burst * (protocol.burst_s + protocol.idle_s)
        left, top = frame.at(begins_s, frame.y.high)
        right, bottom = frame.at(begins_s + protocol.burst_s, frame.y.low)
        parts.append(element("rect", x=left, y=top, width=right - left, height=bottom - top, class_="track"))
    return "".join(parts)


def _documents_there(frame: PlotFrame, phase: PhaseRecord) -> str:
    if not phase.phase.has_documents:
        return ""
    ended_s = phase.duration_s if phase.documents_ended_s is None else phase.documents_ended_s
    left, top = frame.at(max(phase.documents_began_s, 0.0), frame.y.high)
    right, _ = frame.at(ended_s, frame.y.high)
    line = element("line", x1=left, x2=right, y1=top - 4, y2=top - 4, class_="span")
    return element("g", line, text("documents", x=right, y=top - 8, text_anchor="end"), class_="s2")


def _objective(frame: PlotFrame, objective_s: float | None) -> str:
    if objective_s is None or not frame.y.low < objective_s < frame.y.high:
        return ""
    left, level = frame.at(frame.x.low, objective_s)
    right, _ = frame.at(frame.x.high, objective_s)
    line = element("line", x1=left, x2=right, y1=level, y2=level, class_="objective")
    return line + text(f"objective {shown(objective_s)} s", x=right, y=level - 4, text_anchor="end")


def distribution(series: Sequence[tuple[Phase, Sequence[float]]], x_label: str, objective_s: float | None) -> str:
    curves = []
    for phase, values in series:
        ascending = sorted(values)
        if ascending:
            curves.append((phase, [percentile(ascending, percent) for percent in _PERCENTS]))
    ends = [curve[end] for _, curve in curves for end in (1, -1)]
    frame = PlotFrame(logarithmic(ends), Scale(0.0, 1.0), x_label, "share at or below")
    lines = []
    for phase, curve in curves:
        placed = [frame.at(value, percent / 100) for value, percent in zip(curve, _PERCENTS, strict=True)]
        lines.append(element("path", d=path(placed), class_=f"curve s{STYLES[phase]}"))
    mark = ""
    if objective_s is not None and frame.x.low < objective_s < frame.x.high:
        x, top = frame.at(objective_s, 1.0)
        _, bottom = frame.at(objective_s, 0.0)
        mark = element("line", x1=x, x2=x, y1=top, y2=bottom, class_="objective")
    return frame.picture(f"distribution of {x_label}", frame.axes(y_is_share=True), mark, *lines)


def capacity(left: LeftOver) -> str:
    rows = (
        ("alone", left.alone_tokens_per_s, "bar s2"),
        ("left over by chat", left.left_tokens_per_s, "free"),
        ("beside chat", left.beside_tokens_per_s, "bar s1"),
    )
    width, start, height = 560, 130, 46
    scale = from_zero([value for _, value, _ in rows])
    parts = []
    for row, (name, value, kind) in enumerate(rows):
        top, length = row * height + 14, (width - start - 90) * scale.place(value)
        parts += [
            text(name, x=start - 8, y=top + 18, text_anchor="end", class_="name"),
            element("rect", x=start, y=top, width=length, height=height - 18, class_=kind),
            text(f"{shown(value)}/s", x=start + length + 8, y=top + 18),
        ]
    return picture(width, 3 * height + 106, "tokens of documents per second", *parts)


def progress(certificate: Certificate) -> str:
    phases = [phase for phase in certificate.evidence.phases if phase.progress]
    longest_s = max((phase.progress[-1][0] - phase.documents_began_s for phase in phases), default=1.0)
    highest = max((phase.progress[-1][1] for phase in phases), default=1)
    frame = PlotFrame(from_zero([longest_s]), from_zero([highest]), "seconds since the first batch", "lines ended",
                  width=560, height=250)  # fmt: skip
    lines = []
    for phase in phases:
        step = len(phase.progress) // _MAX_POINTS + 1
        points = [*phase.progress[::step], phase.progress[-1]]
        placed = [frame.at(at_s - phase.documents_began_s, count) for at_s, count in points]
        lines.append(element("path", d=path(placed), class_=f"curve s{STYLES[phase.phase]}"))
    return frame.picture("lines that had ended", frame.axes(), *lines)
