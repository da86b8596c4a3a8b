"""Say which pinned packages have known vulnerabilities: `python scripts/audit.py [--fetch]`.

It compares constraints.txt with build/audit/advisories.json, which `--fetch` gets from OSV (https://osv.dev) and `make
audit` asks for. Without that file, or where it is of other pins, it says so and ends well: `make check` needs no
network. Ends with 1 where a pin has a vulnerability that scripts/audit_accepted.txt does not name with a reason.
"""

import argparse
import json
import re
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PINS = ROOT / "constraints.txt"
ACCEPTED = ROOT / "scripts" / "audit_accepted.txt"
KNOWN = ROOT / "build" / "audit" / "advisories.json"
OSV = "https://api.osv.dev/v1/querybatch"
PATIENCE_S = 20.0
MAX_BYTES = 16 << 20
MAX_AGE_S = 14 * 86_400
PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;#+]+)")


def pins_of(text: str) -> dict[str, str]:
    """Return the pinned version of each package."""
    found = (PIN.match(line) for line in text.splitlines())
    return {match[1]: match[2] for match in found if match}


def accepted_of(text: str) -> set[str]:
    """Return the advisories that were looked at: the first word of each line, behind which the reason stands.

    Raises ValueError for one without a reason.
    """
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line.strip() and not line.startswith("#")]
    without = [words[0] for words in lines if len(words) == 1]
    if without:
        raise ValueError(f"{ACCEPTED.name}: {without[0]} has no reason")
    return {words[0] for words in lines}


def fetched(pins: dict[str, str]) -> dict[str, Any]:
    """Return what OSV knows of these pins. Raises OSError or ValueError."""
    names = list(pins)
    queries = [{"package": {"name": name, "ecosystem": "PyPI"}, "version": pins[name]} for name in names]
    body = json.dumps({"queries": queries}).encode()
    asked = urllib.request.Request(OSV, body, {"content-type": "application/json"})
    with urllib.request.urlopen(asked, timeout=PATIENCE_S) as answer:
        results = json.loads(answer.read(MAX_BYTES))["results"]
    ids = {
        name: [one["id"] for one in result.get("vulns", ())]
        for name, result in zip(names, results, strict=True)
        if result
    }
    return {"fetched_at": int(time.time()), "pins": pins, "advisories": ids}


def findings(known: dict[str, Any], pins: dict[str, str], accepted: set[str]) -> list[str]:
    """Return a line for each pin with an advisory that nobody has accepted."""
    return [
        f"{name} {pins[name]}: {', '.join(left)}"
        for name, ids in sorted(known["advisories"].items())
        if pins.get(name) == known["pins"].get(name) and (left := sorted(set(ids) - accepted))
    ]


def main() -> int:
    """Audit; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fetch", action="store_true", help="ask OSV, and keep what it knows")
    is_fetched = parser.parse_args().fetch
    pins = pins_of(PINS.read_text())
    if is_fetched:
        try:
            known = fetched(pins)
        except (OSError, ValueError, KeyError) as error:
            print(f"audit: OSV gives no answer ({error}); nothing was compared")
            return 0
        KNOWN.parent.mkdir(parents=True, exist_ok=True)
        KNOWN.write_text(json.dumps(known))
    try:
        known = json.loads(KNOWN.read_text())
        found = findings(known, pins, accepted_of(ACCEPTED.read_text()))
        age_s = time.time() - known["fetched_at"]
    except FileNotFoundError:
        print("audit: no list of known vulnerabilities here, nothing was compared; `make audit` fetches one from OSV")
        return 0
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        print(f"audit: {KNOWN.relative_to(ROOT)} or {ACCEPTED.name} cannot be read: {error}")
        return 1
    num_new = sum(known["pins"].get(name) != version for name, version in pins.items())
    for line in found:
        print(f"audit: {line}")
    notes = [f"{num_new} pins are newer than the list"] * bool(num_new)
    notes += [f"the list is {age_s / 86_400:.0f} days old"] * (age_s > MAX_AGE_S)
    print("; ".join([f"audit: {len(pins)} pins, {len(found)} with known vulnerabilities", *notes]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
