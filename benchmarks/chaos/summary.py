"""Sums up records of schedules: how many showed each row of the table of promises."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

_LONGEST = 5  # recoveries that are named


def summary_of(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    faults = [(record, fault) for record in records for fault in record["faults"] if fault["was_there"]]
    endings: Counter[str] = Counter()
    for record in records:
        endings.update(record["outcome"]["endings"])
    failed = [record for record in records if not record["is_survived"]]
    recoveries = sorted((record["outcome"]["recovered_s"] or 0.0 for record in records), reverse=True)
    return {
        "num_schedules": len(records),
        "num_not_survived": len(failed),
        "num_faults": len(faults),
        "num_faults_impossible_here": sum(len(record["faults"]) for record in records) - len(faults),
        "num_streams": endings.total(),
        "lines_lost": sum(record["outcome"]["lines_lost"] for record in records),
        "lines_doubled": sum(record["outcome"]["lines_doubled"] for record in records),
        "lines_wrong": sum(record["outcome"]["lines_wrong"] for record in records),
        "endings": dict(endings),
        "recovered_s": {
            "median": recoveries[len(recoveries) // 2] if recoveries else None,
            "longest": recoveries[:_LONGEST],
        },
        "by_fault": _rows(faults),
        "by_phase": dict(Counter(fault["phase"] for _, fault in faults)),
        "phases_hit": dict(Counter(name for _, fault in faults for name in fault["phases_hit"])),
        "not_survived": [{name: value for name, value in record.items() if name != "logs"} for record in failed],
    }


def _rows(faults: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Return a row for each target and hit: how many schedules had it, how many of those were survived, and endings.

    Endings are of schedules whose only fault it was.
    """
    rows: dict[str, dict[str, Any]] = {}
    for record, fault in faults:
        row = rows.setdefault(
            f"{fault['target']}: {fault['hit']}", {"schedules": 0, "survived": 0, "endings_alone": Counter()}
        )
        row["schedules"] += 1
        row["survived"] += record["is_survived"]
        if len(record["faults"]) == 1:
            row["endings_alone"].update(record["outcome"]["endings"])
    return {name: row | {"endings_alone": dict(row["endings_alone"])} for name, row in sorted(rows.items())}
