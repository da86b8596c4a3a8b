"""What a reader of a certificate should know before its figures."""

from collections.abc import Iterator

from alignedserve.core.metrics import in_percent
from lab.certification.certificate import Certificate
from lab.certification.words import percent, seconds

_FEW_CHATS = 200
_MOSTLY_IN_TIME = 0.9  # of chats: fewer, and it says little that none is lost beside documents
_MUCH_BESIDE = 0.9
_LATE_OF_TTFT = 0.2  # of the median time to a first token
_LATE_S = 0.02
_MUCH_MORE = 1.15  # than is left over: the machine was not the same in both phases


def held_words(certificate: Certificate) -> str:
    """Return what a certificate whose bounds hold says of chat and of lines, by figures alone: bounds may be wide."""
    figures = certificate.figures
    alone, beside = (None if phase is None else phase.attainment for phase in (figures.alone, figures.beside))
    num_lost = sum(line.num_lost for line in figures.lines.values())
    lines = "no line of a batch was" if not num_lost else f"{num_lost} lines of batches were"
    return f"{percent(beside)} of chats were in time beside documents, {percent(alone)} alone, and {lines} lost"


def own_notes(certificate: Certificate) -> Iterator[str]:
    """Yield them."""
    for phase in certificate.evidence.phases:
        if phase.failure is not None:
            yield f"The phase “{phase.phase.value}” ended early: {phase.failure}"
    yield from _of_chat(certificate)
    yield from _of_pictures(certificate)
    yield from _of_noise(certificate)


def _of_chat(certificate: Certificate) -> Iterator[str]:
    share, beside = certificate.figures.share_of_chats_beside, certificate.figures.beside
    alone = None if certificate.figures.alone is None else certificate.figures.alone.attainment
    if alone is not None and alone < _MOSTLY_IN_TIME:
        yield (
            f"Alone, {percent(alone)} of chats were in time: the objectives are too tight for this server at this "
            "rate, and what is lost beside documents says little. --min-attainment bounds the share itself."
        )
    if share is not None and share < _MUCH_BESIDE:
        yield (
            "Documents were through before the last chats came: only those chats count as beside documents that were "
            f"sent before, {in_percent(share, 0)} of them."
        )
    if certificate.is_simulated and share is not None and share < 1.0:
        yield (
            "Percentiles of gaps with documents on are of all chats, of which the last came after the documents; the "
            "longest gap is of chats beside documents only."
        )
    if beside is not None and 0 < beside.num_sent < _FEW_CHATS:
        yield (
            f"{beside.num_sent} chats beside documents: one of them is {100 / beside.num_sent:.1f} points of "
            "attainment. Longer or more bursts say more."
        )


def _of_pictures(certificate: Certificate) -> Iterator[str]:
    figures, protocol = certificate.figures, certificate.protocol
    for phase, pictured in figures.pictured.items():
        ttft, plain = pictured.ttft_s, figures.plain.get(phase)
        edge, per_s = protocol.chat.picture_edge, protocol.rate * protocol.chat.picture_share
        others = "" if plain is None else f"; of those without {percent(plain.attainment)}"
        yield (
            f"{phase}: {pictured.num_sent} chats carried a picture of {edge} x {edge} pixels, {per_s:.1f} a second in "
            f"bursts: {percent(pictured.attainment)} were in time (TTFT p99 "
            f"{seconds(None if ttft is None else ttft.p99)}){others}."
        )


def _of_noise(certificate: Certificate) -> Iterator[str]:
    figures = certificate.figures
    for phase, chat in zip(certificate.evidence.phases, (figures.alone, figures.beside), strict=False):
        late_s, ttft = phase.client_late_s, None if chat is None else chat.ttft_s
        if late_s is None or ttft is None:
            continue
        if late_s > max(_LATE_S, _LATE_OF_TTFT * ttft.p50):
            yield (
                f"The client itself was late by {seconds(late_s)} (p99) in “{phase.phase.value}”: its machine is too "
                "busy to measure finely."
            )
    share = None if figures.left_over is None else figures.left_over.share
    if share is not None and share > _MUCH_MORE and not certificate.is_simulated:
        yield (
            f"Documents had {percent(share)} of what chat leaves over: the server was slower while it was measured, or "
            "while it had documents alone. On a quiet machine the figure is near or below 100 %."
        )
