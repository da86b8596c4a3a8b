"""Batches on a cluster whose processes are killed and stopped at random: is any line lost, doubled or wrong?

    python -m benchmarks.batches.kills --schedules 200            # seeds 0 to 199, about 40 minutes
    python -m benchmarks.batches.kills --schedules 1 --first 17   # one of them again

Every schedule is one batch of 500 short tasks of the pocket model, each with one right answer, and one to three faults
while it runs: gateway, batch driver, router, prefill worker, decode worker, pool, `serve` alone or all processes
at once, by SIGKILL, or by SIGSTOP and SIGCONT up to seven seconds later. One cluster serves many schedules; it is
started again only where `serve` itself was killed. Targets: lines lost, duplicated and wrong 0, batches
that do not end 0. Results of other seeds that were recorded before are kept.
"""

import contextlib
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from alignedserve.pocket.tasks import PocketTask, Skill, is_correct, make_task
from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.batch_client import BatchHttpClient, chat_file
from benchmarks.measuring.kill_cluster import KillCluster, kill_cluster
from benchmarks.measuring.kill_schedules import KillSchedule, make_schedule
from benchmarks.measuring.recording import RESULTS, commit, write_result

NUM_LINES = 500
_SKILLS = (Skill.SPELLING, Skill.SUMS, Skill.REVERSING)
_NAME = "batches/batch_kills"
_MODEL = "pocket"
_ENDPOINT = "/v1/chat/completions"


class Verdict(NamedTuple):
    """Result of one batch."""

    num_lost: int
    num_duplicated: int
    num_wrong: int
    status: str

    @property
    def is_clean(self) -> bool:
        """Return True if every line ended once, with the right answer."""
        return (self.num_lost, self.num_duplicated, self.num_wrong, self.status) == (0, 0, 0, "completed")


def make_tasks(count: int) -> dict[str, PocketTask]:
    rng = random.Random(1)
    return {f"line-{number}": make_task(rng.choice(_SKILLS), rng) for number in range(count)}


def answered_alone(client: BatchHttpClient, tasks: dict[str, PocketTask], count: int) -> dict[str, PocketTask]:
    """Return the first `count` tasks that the model answers rightly without faults."""
    batch = client.wait(_submit(client, tasks, list(tasks)))
    answers = {line["custom_id"]: _answer(line) for line in client.lines(batch.get("output_file_id"))}
    right = [custom_id for custom_id, task in tasks.items() if is_correct(task, answers[custom_id])]
    assert len(right) >= count, f"the model answers only {len(right)} of {len(tasks)} tasks"
    return {custom_id: tasks[custom_id] for custom_id in right[:count]}


def run_schedule(cluster: KillCluster, schedule: KillSchedule, tasks: dict[str, PocketTask]) -> dict[str, Any]:
    client = BatchHttpClient(cluster.url)
    order = list(tasks)
    random.Random(schedule.seed).shuffle(order)
    began_s = time.monotonic()
    batch_id = _submit(client, tasks, order)
    hits = []
    for fault in schedule.faults:
        time.sleep(fault.pause_s)
        hits.append((time.time(), cluster.hit(fault)))
    try:
        batch = client.wait(batch_id)
        verdict = judge(
            batch, client.lines(batch.get("output_file_id")), client.lines(batch.get("error_file_id")), tasks
        )
    except (TimeoutError, OSError) as error:
        batch, verdict = {"completed_at": None}, Verdict(len(tasks), 0, 0, f"did not end: {error}")
    end_s = batch["completed_at"]
    faults = [
        {
            "target": fault.target.value,
            "hit": fault.hit.value,
            "pause_s": fault.pause_s,
            "stopped_s": fault.stopped_s,
            "was_there": was_there,
            "batch_ran": end_s is None or at_s < end_s + 1,
        }
        for fault, (at_s, was_there) in zip(schedule.faults, hits, strict=True)
    ]
    took_s = round(time.monotonic() - began_s, 1)
    return {
        "seed": schedule.seed,
        "commit": commit(),
        "is_clean": verdict.is_clean,
        **verdict._asdict(),
        "took_s": took_s,
        "faults": faults,
    }


def judge(
    batch: dict[str, Any], output: list[dict[str, Any]], errors: list[dict[str, Any]], tasks: dict[str, PocketTask]
) -> Verdict:
    seen = Counter(line["custom_id"] for line in (*output, *errors))
    num_lost = sum(custom_id not in seen for custom_id in tasks)
    num_duplicated = sum(count - 1 for count in seen.values())
    wrong = {line["custom_id"] for line in output if not _is_right(line, tasks)}
    num_wrong = len(wrong | {line["custom_id"] for line in errors})
    counts = {"total": len(tasks), "completed": len(output), "failed": len(errors)}
    status = batch["status"] if batch["request_counts"] == counts else f"counts {batch['request_counts']}"
    return Verdict(num_lost, num_duplicated, num_wrong, status)


def _is_right(line: dict[str, Any], tasks: dict[str, PocketTask]) -> bool:
    task = tasks.get(line["custom_id"])
    return task is not None and is_correct(task, _answer(line))


def _answer(line: dict[str, Any]) -> str:
    return str(line["response"]["body"]["choices"][0]["message"]["content"])


def _submit(client: BatchHttpClient, tasks: dict[str, PocketTask], order: list[str]) -> str:
    prompts = [(custom_id, tasks[custom_id].prompt) for custom_id in order]
    return client.submit(chat_file(prompts, _MODEL), _ENDPOINT)


def run_all(folder: Path, seeds: range, records: dict[str, dict[str, Any]]) -> None:
    """Run every seed on one cluster; its result goes into `records` at once, and on the disk."""
    with kill_cluster(folder) as cluster:
        tasks = answered_alone(BatchHttpClient(cluster.url), make_tasks(NUM_LINES * 6 // 5), NUM_LINES)
        for seed in seeds:
            record = run_schedule(cluster, make_schedule(seed), tasks)
            records[str(seed)] = record
            write_result(_NAME, figures_of(records))
            print(_told(record), flush=True)


def figures_of(records: dict[str, dict[str, Any]]) -> dict[str, Any]:
    ordered = [records[seed] for seed in sorted(records, key=int)]
    faults = [fault for record in ordered for fault in record["faults"] if fault["batch_ran"] and fault["was_there"]]
    return {
        "num_schedules": len(ordered),
        "lines_per_batch": NUM_LINES,
        "num_lost": sum(record["num_lost"] for record in ordered),
        "num_duplicated": sum(record["num_duplicated"] for record in ordered),
        "num_wrong": sum(record["num_wrong"] for record in ordered),
        "num_not_completed": sum(record["status"] != "completed" for record in ordered),
        "faults_in_running_batches": dict(Counter(f"{fault['target']} {fault['hit']}" for fault in faults)),
        "slowest_s": max((record["took_s"] for record in ordered), default=0.0),
        "schedules": {str(record["seed"]): record for record in ordered},
    }


def _told(record: dict[str, Any]) -> str:
    faults = ", ".join(f"{fault['target']} {fault['hit']}" for fault in record["faults"])
    return f"{record['seed']:>4} {'ok' if record['is_clean'] else record['status']} {record['took_s']:6.1f} s  {faults}"


def _recorded() -> dict[str, dict[str, Any]]:
    path = RESULTS / f"{_NAME}.json"
    known: dict[str, dict[str, Any]] = json.loads(path.read_text())["figures"]["schedules"] if path.exists() else {}
    return known


def main() -> None:
    """Run, and record."""
    parser = parser_of(__doc__)
    parser.add_argument("--schedules", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="for state and logs, kept afterwards; by default a temporary one")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the cluster is ended
    records = _recorded()
    seeds = range(arguments.first, arguments.first + arguments.schedules)
    with contextlib.ExitStack() as stack:
        folder = arguments.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kills-")))
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        run_all(folder, seeds, records)
    figures = figures_of({str(seed): records[str(seed)] for seed in seeds})
    print({name: value for name, value in figures.items() if name != "schedules"})
    if not all(records[str(seed)]["is_clean"] for seed in seeds):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
