"""The harness of benchmarks/batches/kills.py: its judge always, runs of it where there is time."""

import random
from collections.abc import Iterator

import pytest

from alignedserve.pocket.tasks import PocketTask
from benchmarks.batches.kills import NUM_LINES, answered_alone, judge, make_tasks, run_schedule
from benchmarks.measuring.batch_client import BatchHttpClient
from benchmarks.measuring.kill_cluster import KillCluster, kill_cluster
from benchmarks.measuring.kill_schedules import Hit, KillFault, KillSchedule, Target, make_schedule

pytestmark = pytest.mark.cluster

SEEDS = (1144, 1161, 1188)  # of three faults each; none after which `serve` has to be started anew


@pytest.fixture(scope="module")
def fired_at(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KillCluster]:
    with kill_cluster(tmp_path_factory.mktemp("kills")) as cluster:
        yield cluster


def some_tasks(cluster: KillCluster, count: int) -> dict[str, PocketTask]:
    return answered_alone(BatchHttpClient(cluster.url), make_tasks(count * 6 // 5), count)


@pytest.mark.slow
@pytest.mark.promise
def test_no_line_is_lost_doubled_or_wrong(fired_at: KillCluster) -> None:
    faults = (
        KillFault(Target.DRIVER, Hit.KILL, 0.3),
        KillFault(Target.DRIVER, Hit.KILL, 1.0),
        KillFault(Target.DECODE, Hit.STOP, 0.2, 0.3),
    )
    record = run_schedule(fired_at, KillSchedule(0, faults), some_tasks(fired_at, 100))
    assert record["is_clean"], record


@pytest.mark.slow
@pytest.mark.promise
@pytest.mark.timeout(1200)
def test_three_schedules(fired_at: KillCluster) -> None:
    tasks = some_tasks(fired_at, NUM_LINES)
    schedules = [make_schedule(seed) for seed in SEEDS]
    assert {fault.target for schedule in schedules for fault in schedule.faults} == set(Target) - {Target.COMMAND}
    records = [run_schedule(fired_at, schedule, tasks) for schedule in schedules]
    assert not [record for record in records if not record["is_clean"]]


def test_a_seed_is_a_schedule() -> None:
    schedules = [make_schedule(seed) for seed in range(200)]
    assert schedules == [make_schedule(seed) for seed in range(200)]
    assert {fault.target for schedule in schedules for fault in schedule.faults} == set(Target)


def line(custom_id: str, text: str) -> dict[str, object]:
    return {"custom_id": custom_id, "response": {"body": {"choices": [{"message": {"content": text}}]}}}


def test_the_judge_sees_every_kind_of_wrong() -> None:
    tasks = make_tasks(4)
    first, second, third, _ = list(tasks)
    output = [line(first, tasks[first].answer), line(first, tasks[first].answer), line(second, "no")]
    errors = [{"custom_id": third}]
    batch = {"status": "completed", "request_counts": {"total": 4, "completed": 3, "failed": 1}}
    verdict = judge(batch, output, errors, tasks)
    assert verdict[:3] == (1, 1, 2)
    assert not verdict.is_clean
    random.Random(0).shuffle(whole := [line(name, task.answer) for name, task in tasks.items()])
    whole_batch = {"status": "completed", "request_counts": {"total": 4, "completed": 4, "failed": 0}}
    assert judge(whole_batch, whole, [], tasks).is_clean
