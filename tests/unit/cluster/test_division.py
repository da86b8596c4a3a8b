"""One machine among several models."""

import itertools
import random
from dataclasses import replace

import msgspec
import pytest

from alignedserve.cluster.deployments import planning
from alignedserve.cluster.deployments.planning import (
    AssignableModel,
    AssignableNode,
    HeldMemory,
    assign_models,
    assigned_gpus,
    divide,
    holding_of,
    left_of,
    worker_bytes,
)
from alignedserve.cluster.memory_planner import Machine, worker_grammar_bytes
from alignedserve.config.sections import (
    MIB,
    ClusterConfig,
    DecodeWorkerConfig,
    EngineConfig,
    LoraConfig,
    ModelSectionConfig,
    PrefillWorkerConfig,
    Topology,
)
from alignedserve.runtime.model.served_model import resolve_model
from tests.support.marks import each

GIB = 1024 * MIB
MACHINE = Machine(16 * GIB, 8 * GIB, 4, has_bfloat16=False)


def test_each_model_has_its_weights_and_an_equal_part_of_the_rest() -> None:
    small, large = divide(MACHINE, (), [1 * GIB, 5 * GIB])
    assert (small.machine.available_bytes, large.machine.available_bytes) == (6 * GIB, 10 * GIB)
    assert small.machine.shared_bytes == large.machine.shared_bytes == 4 * GIB
    assert (small.gpus, small.machine.num_cores) == ((), 4)


def test_one_model_has_the_whole_machine() -> None:
    (only,) = divide(MACHINE, (), [1 * GIB])
    assert only.machine == MACHINE


def test_gpus_are_assigned_whole_where_there_are_enough() -> None:
    assert assigned_gpus(("cuda:0", "cuda:1", "cuda:2"), 2) == [("cuda:0", "cuda:2"), ("cuda:1",)]
    assert assigned_gpus(("cuda:0",), 2) == [("cuda:0",), ("cuda:0",)]
    assert assigned_gpus((), 2) == [(), ()]


def test_a_shared_gpu_has_its_memory_divided() -> None:
    machine = replace(MACHINE, gpu_bytes=(80 * GIB,))
    parts = divide(machine, ("cuda:0",), [1 * GIB, 5 * GIB])
    assert [part.machine.gpu_bytes for part in parts] == [(40 * GIB,), (40 * GIB,)]
    assert [part.machine.available_bytes for part in parts] == [8 * GIB, 8 * GIB]  # weights are not on the host


def test_memory_that_is_held_but_not_touched_yet_is_not_left() -> None:
    part = left_of(MACHINE, MACHINE, (), [HeldMemory(6 * GIB, 1 * GIB), HeldMemory(2 * GIB, 1 * GIB)])
    assert (part.machine.available_bytes, part.machine.shared_bytes) == (8 * GIB, 6 * GIB)


def test_what_other_programs_took_is_not_left_either() -> None:
    part = left_of(MACHINE, replace(MACHINE, available_bytes=3 * GIB), (), [HeldMemory(6 * GIB, 0)])
    assert part.machine.available_bytes == 3 * GIB


def test_one_more_model_gets_the_gpus_with_the_fewest() -> None:
    machine = replace(MACHINE, gpu_bytes=(80 * GIB, 80 * GIB))
    part = left_of(machine, machine, ("cuda:0", "cuda:1"), [HeldMemory(0, 0, ("cuda:0",), 30 * GIB)])
    assert (part.gpus, part.machine.gpu_bytes) == (("cuda:1",), (80 * GIB,))


def test_a_deployment_holds_weights_caches_and_processes() -> None:
    config, served = ClusterConfig(), resolve_model(ModelSectionConfig())
    held = holding_of(config, served, ())
    assert held.host_bytes > served.weight_bytes + config.decode.kv_cache_bytes + config.decode.swap_space_bytes
    assert (held.shared_bytes, held.gpu_bytes) == (config.prefix_cache.pool_bytes, 0)
    adapting = msgspec.structs.replace(config, lora=LoraConfig(allowed_folder="/adapters", memory_bytes=1 * GIB))
    assert holding_of(adapting, served, ()).host_bytes == held.host_bytes + config.decode.count * GIB
    on_gpu = holding_of(config, served, ("cuda:0",))
    assert on_gpu.gpu_bytes == served.weight_bytes + config.decode.kv_cache_bytes
    assert on_gpu.host_bytes < held.host_bytes


def test_candidate_buffers_are_held_where_they_lie() -> None:
    served = resolve_model(ModelSectionConfig())
    buffers = PrefillWorkerConfig(count=2, candidate_buffer_bytes=3 * GIB)
    gpus = ("cuda:0", "cuda:1")

    def held(transport: str, gpus: tuple[str, ...], prefill: PrefillWorkerConfig = buffers) -> HeldMemory:
        engine = EngineConfig(kv_transport=transport)
        return holding_of(ClusterConfig(topology=Topology.DISAGGREGATED, engine=engine, prefill=prefill), served, gpus)

    without = msgspec.structs.replace(buffers, candidate_buffer_bytes=0)
    for transport, on, on_host, on_gpu in (
        ("auto", gpus, 0, 3 * GIB),
        ("cuda_ipc", gpus, 0, 3 * GIB),
        ("shm", gpus, 6 * GIB, 0),
        ("auto", (), 6 * GIB, 0),
    ):
        more, less = held(transport, on), held(transport, on, without)
        assert more.host_bytes - less.host_bytes == more.shared_bytes - less.shared_bytes == on_host
        assert more.gpu_bytes - less.gpu_bytes == on_gpu


def test_a_deployment_holds_the_memory_of_its_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    config, served = (
        msgspec.structs.replace(ClusterConfig(), decode=DecodeWorkerConfig(count=2)),
        resolve_model(ModelSectionConfig()),
    )
    held = [holding_of(config, served, gpus) for gpus in ((), ("cuda:0",))]
    taken = worker_bytes(config, served)
    monkeypatch.setattr(planning, "worker_grammar_bytes", lambda _: 0)
    without = [holding_of(config, served, gpus) for gpus in ((), ("cuda:0",))]
    grammars = config.num_workers * worker_grammar_bytes(served)
    assert [one.host_bytes - other.host_bytes for one, other in zip(held, without, strict=True)] == [grammars, grammars]
    assert taken - worker_bytes(config, served) == worker_grammar_bytes(served) > 0


def test_a_deployment_holds_the_memory_of_its_adapters() -> None:
    served, lora = resolve_model(ModelSectionConfig()), LoraConfig(allowed_folder="/adapters")
    without, held = (holding_of(config, served, ()) for config in (ClusterConfig(), ClusterConfig(lora=lora)))
    assert held.host_bytes - without.host_bytes == lora.memory_bytes * ClusterConfig().num_workers


SIZES = {"a": 4, "b": 3, "c": 2, "d": 1}


def assigned(rooms: dict[str, int], sizes: dict[str, int], most: dict[str, int] | None = None) -> dict[str, str]:
    """Return the nodes of each model, as one word."""
    models = [AssignableModel(name, size, (most or {}).get(name)) for name, size in sizes.items()]
    nodes = [AssignableNode(name, room) for name, room in rooms.items()]

    def fits(node: str, found: tuple[str, ...]) -> bool:
        return sum(sizes[one] for one in found) <= rooms[node]

    return {name: "".join(nodes) for name, nodes in assign_models(models, nodes, fits).items()}


def test_where_everything_fits_every_model_is_on_every_node() -> None:
    assert assigned({"0": 10, "1": 10}, SIZES) == dict.fromkeys("abcd", "01")


def test_models_that_do_not_fit_together_spread() -> None:
    assert assigned({"0": 5, "1": 5}, {"a": 4, "b": 3}) == {"a": "0", "b": "1"}
    assert assigned({"0": 5, "1": 5, "2": 5}, {"a": 4, "b": 3}) == {"a": "02", "b": "1"}


def test_a_model_has_no_more_nodes_than_workers_and_two_such_models_do_not_share() -> None:
    assert assigned({"0": 10, "1": 10}, {"a": 1, "b": 1}, {"a": 1, "b": 1}) == {"a": "0", "b": "1"}


def test_a_model_that_fits_nowhere_has_no_node_and_the_others_have_theirs() -> None:
    assert assigned({"0": 3, "1": 3}, {"a": 4, "b": 3}) == {"a": "", "b": "01"}


def test_a_way_in_which_all_have_a_node_is_searched_for() -> None:
    # The largest alone would be on the strongest node.
    assert all(assigned({"0": 6, "1": 3}, {"a": 3, "b": 2, "c": 2, "d": 2}).values())


@each("seed", range(300))
def test_over_random_clusters_nothing_is_too_full_and_nothing_is_left_that_fits(seed: int) -> None:
    rng = random.Random(seed)
    rooms = {str(index): rng.randint(1, 9) for index in range(rng.randint(1, 4))}
    sizes = {name: rng.randint(1, 6) for name in "abcd"[: rng.randint(1, 4)]}
    most = {name: rng.randint(1, 3) for name in sizes if rng.random() < 0.3}
    found = assigned(rooms, sizes, most)
    left = {node: room - sum(sizes[name] for name in sizes if node in found[name]) for node, room in rooms.items()}
    assert min(left.values()) >= 0
    for name, nodes in found.items():
        assert len(nodes) <= most.get(name, 4)
        if len(nodes) < most.get(name, 4):
            assert all(left[node] < sizes[name] for node in rooms if node not in nodes)


def test_whatever_could_all_be_placed_is() -> None:
    num_possible = num_placed = 0
    for seed in range(300):
        rng = random.Random(seed)
        rooms = {str(index): rng.randint(3, 9) for index in range(3)}
        sizes = {name: rng.randint(1, 6) for name in "abcd"}
        ways = itertools.product(rooms, repeat=len(sizes))
        if any(
            all(sum(size for size, node in zip(sizes.values(), way, strict=True) if node == one) <= rooms[one]
                for one in rooms)
            for way in ways
        ):  # fmt: skip
            num_possible += 1
            num_placed += all(assigned(rooms, sizes).values())
    assert num_placed == num_possible > 100
