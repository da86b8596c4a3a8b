"""The protocol of a certificate: bursts of chat, three batches of documents, three phases.

The shape is that of issue 491 of llm-d-batch-gateway: 90 s of chat at a rate, 90 s of nothing, four times, and three
batches of a thousand lines with windows of 30 minutes, two hours and a day. `scaled` fits rate, lengths and lines to
what a server was measured to do.
"""

import enum
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from alignedserve.core.errors import ConfigError
from alignedserve.core.request import Slo

WINDOW_SHARES = (2.5, 10.0, 120.0)  # of the seconds of chat: 30 min, 2 h and 24 h of 12 min
MIN_WINDOW_S, MAX_WINDOW_S = 60.0, 7 * 86_400.0
CHAT_SHARE = 0.4  # of what the server can do with chat alone: the rate within a burst
MARGIN = 1.3  # more lines than fit beside chat, so that documents are there to its end
LINES_AT_FULL_LENGTH = 3000  # of all batches, of the unscaled protocol
FULL_CHAT_S = 720.0
FEWEST_USUAL_LINES = 450  # of all batches: fewer are mostly beginning and end
MAX_LINES = 50_000  # of a batch, as OpenAI allows
MIN_LINES = 4
MAX_LENGTHENED = 1024  # tokens of an answer, of documents that are made longer rather than more
NUM_PROBES = 8  # lines whose answers are known
_TIMES_LENGTHENED = 3  # at most, each measured
_WORTH_LENGTHENING = 1.25  # times as many lines as usual; fewer are simply sent
_SPREAD = (0.5, 1.5)  # of lengths around their mean
_ROUNDING = 1e-9


class Phase(enum.Enum):
    """Phases of the protocol, in their order."""

    CHAT_ALONE = "chat alone"
    BESIDE = "chat beside documents"
    DOCUMENTS_ALONE = "documents alone"

    @property
    def has_chat(self) -> bool:
        return self is not Phase.DOCUMENTS_ALONE

    @property
    def has_documents(self) -> bool:
        """Return whether batches are sent."""
        return self is not Phase.CHAT_ALONE


@dataclass(frozen=True, slots=True)
class Lengths:
    """Mean lengths of prompts and answers, in tokens; each is between half and three halves of it. Some requests carry
    a picture, evenly among the others.

    Example: of a share of 0.3, requests 3, 6 and 9 of every ten, counted from 0.
    """

    prompt_len: int
    output_len: int
    picture_share: float = 0.0
    picture_edge: int = 96  # in pixels: pictures are squares

    def edge_of(self, number: int) -> int | None:
        """Return the edge of the picture that the request of a number carries; None: it carries none."""
        before, after = (math.floor(count * self.picture_share + _ROUNDING) for count in (number, number + 1))
        return self.picture_edge if after > before else None


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A chat or a line. Equal `text` means an equal prompt."""

    text: str
    prompt_len: int
    output_len: int
    arrival_s: float = 0.0  # of a chat, from the start of the phase's chat
    picture_edge: int | None = (
        None  # of the picture that it carries, of which `text` is the seed; None: it carries none
    )


@dataclass(frozen=True, slots=True)
class PlannedLine:
    """A line of a batch."""

    custom_id: str
    request: PlannedRequest
    probe: int | None = None  # of these the answer is known from before


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """A batch of documents."""

    name: str
    window_s: float
    lines: tuple[PlannedLine, ...]


@dataclass(frozen=True, slots=True)
class Protocol:
    """Sizes of the protocol."""

    rate: float  # chats per second within a burst
    burst_s: float
    idle_s: float
    num_bursts: int
    chat: Lengths
    documents: Lengths
    num_lines: int  # of each batch
    windows_s: tuple[float, ...]
    slo: Slo  # of chat
    seed: int = 0

    @property
    def chat_s(self) -> float:
        """Return how long the chat of a phase lasts."""
        return self.num_bursts * (self.burst_s + self.idle_s)

    @property
    def num_documents(self) -> int:
        """Return the lines of all batches."""
        return self.num_lines * len(self.windows_s)

    def chats(self, phase: Phase) -> tuple[PlannedRequest, ...]:
        """Return the chats of a phase: the same moments and lengths in each, with texts of its own."""
        rng = _rng(f"{self.seed}/chat")
        return tuple(
            replace(_planned(f"{phase.value}/chat {number}", self.chat, rng, number), arrival_s=arrival_s)
            for number, arrival_s in enumerate(self._arrivals())
        )

    def _arrivals(self) -> Iterator[float]:
        rng = _rng(f"{self.seed}/arrivals")
        for burst in range(self.num_bursts):
            begins_s = burst * (self.burst_s + self.idle_s)
            since_s = rng.expovariate(self.rate)
            while since_s < self.burst_s:
                yield begins_s + since_s
                since_s += rng.expovariate(self.rate)

    def batches(self, phase: Phase) -> tuple[PlannedBatch, ...]:
        """Return the batches of a phase: the same lengths in each, with texts of its own but for the probes."""
        rng = _rng(f"{self.seed}/documents")
        return tuple(
            PlannedBatch(name := chr(ord("a") + index), window_s, tuple(self._lines(f"{phase.value}/{name}", rng)))
            for index, window_s in enumerate(self.windows_s)
        )

    def _lines(self, name: str, rng: random.Random) -> Iterator[PlannedLine]:
        probes = self.probes()
        places = {rng.randrange(self.num_lines): number for number in range(len(probes))}
        for line in range(self.num_lines):
            planned = _planned(f"{name}/line {line}", self.documents, rng, line)
            number = places.get(line)
            custom_id = f"{name.replace(' ', '-')}/{line}"
            yield PlannedLine(custom_id, planned if number is None else probes[number], number)

    def probes(self) -> tuple[PlannedRequest, ...]:
        """Return the documents that are answered alone before, and then in every batch."""
        rng = _rng(f"{self.seed}/probes")
        count = max(1, min(NUM_PROBES, self.num_lines // 10))
        return tuple(_planned(f"probe {number}", self.documents, rng, number) for number in range(count))


def mean_request(text: str, lengths: Lengths, number: int) -> PlannedRequest:
    """Return the request of a number, of mean lengths."""
    return PlannedRequest(text, lengths.prompt_len, lengths.output_len, picture_edge=lengths.edge_of(number))


def _planned(text: str, lengths: Lengths, rng: random.Random, number: int) -> PlannedRequest:
    factors = rng.uniform(*_SPREAD), rng.uniform(*_SPREAD)
    prompt_len, output_len = (
        max(1, round(mean * factor)) for mean, factor in zip(_both(lengths), factors, strict=True)
    )
    return PlannedRequest(text, prompt_len, output_len, picture_edge=lengths.edge_of(number))


def _both(lengths: Lengths) -> tuple[int, int]:
    return lengths.prompt_len, lengths.output_len


def _rng(seed: str) -> random.Random:
    return random.Random(seed)  # noqa: S311 - a workload, not a secret


# --- sizes that nobody gave


@dataclass(frozen=True, slots=True)
class Speed:
    """What a server was measured to do."""

    ttft_s: float  # of a chat on the idle server
    tpot_s: float
    chats_per_s: float  # when there is nothing else to do
    documents_per_s: float  # likewise


@dataclass(frozen=True, slots=True)
class Wanted:
    """Sizes that were given; None: to be fitted to the server."""

    burst_s: float
    idle_s: float
    num_bursts: int
    chat: Lengths
    documents: Lengths
    rate: float | None = None
    num_lines: int | None = None
    windows_s: tuple[float, ...] | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    seed: int = 0

    @property
    def chat_s(self) -> float:
        """Return the seconds of a phase with chat."""
        return self.num_bursts * (self.burst_s + self.idle_s)


def lengthened(wanted: Wanted, speed: Speed) -> Wanted:
    """Return what is wanted with longer documents, for a server that would be through with the usual lines too soon.

    How fast it is with those has to be measured: a token costs less, the more of them an answer has.
    """
    num_usual = max(LINES_AT_FULL_LENGTH * wanted.chat_s / FULL_CHAT_S, FEWEST_USUAL_LINES)
    factor = _num_fitting(wanted, speed) / num_usual
    output_len = min(round(wanted.documents.output_len * factor), MAX_LENGTHENED)
    if wanted.num_lines is not None or factor < _WORTH_LENGTHENING or output_len <= wanted.documents.output_len:
        return wanted
    return replace(wanted, documents=replace(wanted.documents, output_len=output_len))


class Fitting:
    """Fits the protocol to a server, whose speed is measured anew whenever documents are made longer."""

    def __init__(self, wanted: Wanted, speed: Speed) -> None:
        """`speed`: with the documents that are wanted."""
        self._wanted, self.speed = wanted, speed
        self._times_left = _TIMES_LENGTHENED

    def next_documents(self) -> Lengths | None:
        """Make documents longer, and return what is to be measured before the next call; None: they are long enough."""
        longer = lengthened(self._wanted, self.speed)
        if not self._times_left or longer == self._wanted:
            return None
        self._wanted, self._times_left = longer, self._times_left - 1
        return longer.documents

    def measured(self, documents_per_s: float) -> None:
        """Take how fast the server is with the documents of `next_documents`."""
        self.speed = replace(self.speed, documents_per_s=documents_per_s)

    @property
    def protocol(self) -> Protocol:
        """Return the protocol for what was measured."""
        return scaled(self._wanted, self.speed)


def scaled(wanted: Wanted, speed: Speed) -> Protocol:
    """Return the protocol; what was not asked for is fitted to the server. Raises ConfigError where no chat comes."""
    windows_s = wanted.windows_s or tuple(_window(share * wanted.chat_s) for share in WINDOW_SHARES)
    num_lines = wanted.num_lines
    if num_lines is None:
        num_lines = min(MAX_LINES, max(MIN_LINES, math.ceil(_num_fitting(wanted, speed) / len(windows_s))))
    protocol = Protocol(
        rate=_rate(wanted, speed),
        burst_s=wanted.burst_s,
        idle_s=wanted.idle_s,
        num_bursts=wanted.num_bursts,
        chat=wanted.chat,
        documents=wanted.documents,
        num_lines=num_lines,
        windows_s=windows_s,
        slo=default_slo(wanted, speed),
        seed=wanted.seed,
    )
    if not protocol.chats(Phase.CHAT_ALONE):
        raise ConfigError(
            f"no chat comes within {wanted.num_bursts} bursts of {wanted.burst_s:g} s at {protocol.rate:g} a second: "
            "lengthen them with --burst, or raise --rate"
        )
    return protocol


def default_slo(wanted: Wanted, speed: Speed) -> Slo:
    """Return the objectives of chat: as given, or a second and a tenth of one, where an idle server is five and three
    times as fast."""
    return Slo(
        wanted.ttft_s or _rounded_up(max(1.0, 5.0 * speed.ttft_s)),
        wanted.tpot_s or _rounded_up(max(0.1, 3.0 * speed.tpot_s)),
    )


def _rate(wanted: Wanted, speed: Speed) -> float:
    return wanted.rate or _rounded_down(CHAT_SHARE * speed.chats_per_s)


def _num_fitting(wanted: Wanted, speed: Speed) -> float:
    chat_s = wanted.chat_s
    left_s = chat_s - _rate(wanted, speed) * wanted.num_bursts * wanted.burst_s / speed.chats_per_s
    return speed.documents_per_s * max(left_s, 0.1 * chat_s) * MARGIN


def _window(seconds: float) -> float:
    return float(round(min(max(seconds, MIN_WINDOW_S), MAX_WINDOW_S)))


def _rounded_down(value: float) -> float:
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return float(f"{max(1, math.floor(value / unit + 1e-9)) * unit:.6g}")


def _rounded_up(value: float) -> float:
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return float(f"{math.ceil(value / unit - 1e-9) * unit:.6g}")
