"""Result lines that come in pieces, over connections that break."""

import io
import random
from pathlib import Path

import pytest

from alignedserve.cli.batch.commands import NotWritten, ResultsChanged, ResultTail, open_tail
from alignedserve.cli.batch.formatting import Rate, clock, duration, outlook
from alignedserve.core.errors import ConfigError
from tests.support.marks import each

CONTENT = b"".join(b'{"line": %d, "text": "%s"}\n' % (number, b"x" * (number % 40)) for number in range(60))


@each("seed", range(20))
def test_every_line_once_whatever_breaks(seed: int) -> None:
    rng, sink = random.Random(seed), io.BytesIO()
    tail = ResultTail(sink)
    while tail.num_bytes < len(CONTENT):
        tail.begin()
        rest = CONTENT[tail.offset() :][: rng.randrange(1, 400)]
        while rest:
            length = rng.randrange(1, 60)
            tail.take(rest[:length])
            rest = rest[length:]
        assert CONTENT.startswith(sink.getvalue())
        assert sink.getvalue()[-1:] in (b"", b"\n")
    assert (sink.getvalue(), tail.num_lines) == (CONTENT, 60)


def test_other_results_are_noticed() -> None:
    tail = ResultTail(io.BytesIO())
    tail.take(b"one\ntwo\n")
    tail.begin()
    assert tail.offset() == 4
    with pytest.raises(ResultsChanged):
        tail.take(b"tw0\nthree\n")


def test_a_full_disk_is_no_lost_connection() -> None:
    with open("/dev/full", "wb", buffering=0) as full, pytest.raises(NotWritten, match="No space left"):
        ResultTail(full).take(b"one\n")


@pytest.mark.parametrize("num_bytes", [0, 27, 28, 30, 900, len(CONTENT) - 1, len(CONTENT)])
def test_a_file_goes_on(tmp_path: Path, num_bytes: int) -> None:
    path = tmp_path / "out"
    path.write_bytes(CONTENT[:num_bytes])
    if 0 < num_bytes < CONTENT.index(b"\n") + 1:
        with pytest.raises(ConfigError, match="other than results"):
            open_tail(path)
        return
    tail, file = open_tail(path)
    with file:
        tail.take(CONTENT[tail.offset() :])
    assert path.read_bytes() == CONTENT


def test_a_line_longer_than_a_block(tmp_path: Path) -> None:
    content = b"first\n" + b"y" * 200_000 + b"\n"
    (tmp_path / "out").write_bytes(content + b"half")
    tail, file = open_tail(tmp_path / "out")
    with file:
        assert (tail.num_bytes, tail.offset()) == (len(content), 6)
        tail.take(content[6:] + b"third\n")
    assert (tmp_path / "out").read_bytes() == content + b"third\n"


@each(("seconds", "text"), [(0, "0 s"), (59.4, "59 s"), (61, "1 min 1 s"), (7500, "2 h 5 min"), (180_000, "2 d 2 h")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_rate_is_of_the_last_half_minute() -> None:
    rate = Rate()
    rate.add(0.0, 0)
    assert rate.per_s is None
    for second in range(1, 101):
        rate.add(float(second), second if second < 60 else 60 + (second - 60) * 3)
    assert rate.per_s == pytest.approx(3.0, rel=0.05)


def test_an_outlook() -> None:
    quote = {"verdict": "at_risk", "expected_at": 1060, "slack_s": -30.0}
    batch = {"status": "in_progress", "alignedserve": {"quote": quote, "paused": None}}
    assert outlook(batch, 1000.0).startswith("at risk, ends ")
    assert outlook(batch, 1000.0).endswith("(in 1 min 0 s), 30 s too late")
    assert outlook({"status": "in_progress"}, 1000.0) == ""
    batch["alignedserve"] = {"paused": "waits for its hours until 2026-11-25T21:00:00Z"}
    assert outlook(batch, 1000.0) == f"waits for its hours until {clock(1_795_640_400.0)}"
    batch["alignedserve"] = {"paused": "waits until 2026-13-25T21:00:00Z"}
    assert outlook(batch, 1000.0) == "waits until 2026-13-25T21:00:00Z"
    batch["alignedserve"] = {"paused": "no room is left\x1b[2J"}
    assert outlook(batch, 1000.0) == "paused: no room is left[2J"
