"""The audit of pins: what it names, what was accepted, and that it needs no network."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import audit

PINS = {"torch": "2.13.0", "ray": "2.60.0"}
KNOWN = {"pins": PINS, "advisories": {"torch": ["PYSEC-1", "GHSA-2"], "ray": []}}


def test_a_pin_with_an_advisory_is_named_until_it_is_accepted_or_changes() -> None:
    assert audit.findings(KNOWN, PINS, set()) == ["torch 2.13.0: GHSA-2, PYSEC-1"]
    assert audit.findings(KNOWN, PINS, {"GHSA-2"}) == ["torch 2.13.0: PYSEC-1"]
    assert audit.findings(KNOWN, PINS, {"GHSA-2", "PYSEC-1"}) == []
    assert audit.findings(KNOWN, {**PINS, "torch": "2.14.1"}, set()) == []


def test_what_is_accepted_has_a_reason() -> None:
    assert audit.accepted_of("# words\nPYSEC-1 only on Windows\n") == {"PYSEC-1"}
    with pytest.raises(ValueError, match="PYSEC-1 has no reason"):
        audit.accepted_of("PYSEC-1\n")


def test_every_line_of_the_constraints_is_a_pin() -> None:
    lines = [line for line in audit.PINS.read_text().splitlines() if line and not line.startswith("#")]
    assert len(audit.pins_of(audit.PINS.read_text())) == len(lines)


def test_without_a_list_it_says_so_and_ends_well(tmp_path: Path) -> None:
    for path in (audit.PINS, audit.ACCEPTED, Path(audit.__file__)):
        copy = tmp_path / path.relative_to(audit.ROOT)
        copy.parent.mkdir(exist_ok=True)
        copy.write_text(path.read_text())
    command = [sys.executable, str(tmp_path / "scripts" / "audit.py")]
    without = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (without.returncode, "nothing was compared" in without.stdout) == (0, True)
    known = tmp_path / "build" / "audit" / "advisories.json"
    known.parent.mkdir(parents=True)
    known.write_text(
        json.dumps({"fetched_at": 0, "pins": audit.pins_of(audit.PINS.read_text()), "advisories": {"torch": ["X-1"]}})
    )
    bad = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert bad.returncode == 1
    assert "torch" in bad.stdout
    assert "X-1" in bad.stdout
    assert "days old" in bad.stdout
