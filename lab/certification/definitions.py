"""The parts of a certificate's page that say what was run, and how its figures are defined."""

from collections.abc import Iterator

from alignedserve.core.metrics import READABLE_GAP_S
from lab.certification.certificate import Certificate
from lab.certification.protocol import Protocol
from lab.certification.words import duration, seconds
from lab.sim.report.document import named_values
from lab.sim.report.svg import element, shown

_READING = (
    (
        "In time",
        "A chat that was answered, with its first token and its mean time per token within its objectives. A failed "
        "chat is not in time.",
    ),
    (
        f"Gap over {READABLE_GAP_S:g} s",
        "Chats that began and were then silent for longer once, whether they were in time or not: a mean hides that.",
    ),
    ("Beside", "Chats that were sent while there were documents."),
    (
        "Left over",
        "What documents have alone, less the share of the time that a server with nothing else to do needs for the "
        "chats that were answered. It needs the least for them when it is full of chats, so this is a strict measure.",
    ),
    (
        "Lost",
        "A line with no record in the output or the error file when its batch had ended. Doubled: a second record. "
        "Expired: one whose window ended first.",
    ),
    (
        "Wrong",
        "A record that belongs to no line, or a probe whose answer is not the one that it got alone on the idle "
        "server, at temperature 0. Where answers depend on what shares their batches, --max-wrong allows for it.",
    ),
    (
        "Broken off",
        "A 504, a time-out of the client, or an error or a lost connection amid an answer.",
    ),
)


def protocol_section(certificate: Certificate) -> str:
    protocol, speed = certificate.protocol, certificate.speed
    chat, documents = protocol.chat, protocol.documents
    windows = ", ".join(map(duration, protocol.windows_s))
    took = ", ".join(f"{phase.phase.value} {duration(phase.duration_s)}" for phase in certificate.evidence.phases)
    rows = (
        (
            "bursts",
            f"{protocol.num_bursts} of {duration(protocol.burst_s)} at {shown(protocol.rate)} chats/s (Poisson, seed "
            f"{protocol.seed}), {duration(protocol.idle_s)} of nothing after each",
        ),
        (
            "chat",
            f"prompts of {chat.prompt_len} tokens, answers of {chat.output_len}: each from half to 1.5 times that",
        ),
        ("batches", f"{len(protocol.windows_s)} of {protocol.num_lines:,} lines, windows {windows}"),
        ("documents", f"prompts of {documents.prompt_len} tokens, answers of {documents.output_len}, likewise"),
        *_pictures(protocol),
        ("idle server", f"first token after {seconds(speed.ttft_s)}, then {seconds(speed.tpot_s)} a token"),
        ("full server", f"{shown(speed.chats_per_s)} chats/s, or {shown(speed.documents_per_s)} documents/s"),
        ("phases took", took),
    )
    return element("h2", "The protocol, at this server's scale") + named_values(rows)


def _pictures(protocol: Protocol) -> Iterator[tuple[str, str]]:
    chat, documents = protocol.chat, protocol.documents
    if not chat.picture_share and not documents.picture_share:
        return
    edge, per_s = chat.picture_edge, protocol.rate * chat.picture_share
    yield (
        "pictures",
        f"{chat.picture_share:.0%} of chats and {documents.picture_share:.0%} of documents carry one of {edge} x "
        f"{edge} pixels, each its own: {shown(per_s)} a second with the chats of a burst",
    )


def reading_section() -> str:
    return element("h2", "How the figures are defined") + named_values(_READING)
