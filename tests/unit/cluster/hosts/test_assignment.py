"""Models are assigned to nodes: against all ways to do it, for small clusters."""

import itertools
import random

from alignedserve.cluster.deployments.division import AssignableModel, AssignableNode, assign_models
from tests.support.marks import each

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
