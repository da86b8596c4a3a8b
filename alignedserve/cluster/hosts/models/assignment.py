"""Assigns models to the nodes of a cluster: pure, by what fits together.

1. Every model gets one node, the largest model first: the node with the fewest models, of those the strongest. Where
   that leaves a model without a node, other ways are tried, up to a limit.
2. What is left is filled: again and again the model with the fewest nodes gets one more, chosen as in 1, until no model
   fits anywhere else or has as many nodes as it may have.

So where everything fits every model is on every node, and where it does not the models spread. Example: two nodes with
room for two models each, of three: the first and the third are on node 0, the second and then the first on node 1.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

_MAX_TRIES = 2000  # in the search for a way in which every model has a node


@dataclass(frozen=True, slots=True)
class AssignableModel:
    """A model as its assignment sees it."""

    deployment_id: str
    num_bytes: int  # of its weights: larger models choose first
    most_nodes: int | None = None  # its workers are so many; None: they follow the nodes


@dataclass(frozen=True, slots=True)
class AssignableNode:
    """A node as the assignment sees it."""

    name: str
    weight: int  # its strength among others of its kind


Fits = Callable[[str, tuple[str, ...]], bool]  # whether a node has room for all these models at once
Assignment = Mapping[str, tuple[str, ...]]  # the nodes of each model, in the nodes' order


def assign_models(models: Sequence[AssignableModel], nodes: Sequence[AssignableNode], fits: Fits) -> Assignment:
    """Return the nodes of each model, by deployment id; a model that fits nowhere has none.

    `fits` must be true of fewer models where it is true of more.
    """
    assigning = _Assigning(models, nodes, fits)
    assigning.place_each()
    assigning.fill()
    return assigning.found()


class _Assigning:
    def __init__(self, models: Sequence[AssignableModel], nodes: Sequence[AssignableNode], fits: Fits) -> None:
        self._models = models
        self._nodes = nodes
        self._fits = fits
        self._placed: dict[str, list[str]] = {node.name: [] for node in nodes}  # models by node
        self._num_tries = 0

    def place_each(self) -> None:
        ordered = sorted(self._models, key=lambda model: -model.num_bytes)
        if not self._place_from(ordered):
            for model in ordered:
                self._place(model.deployment_id)

    def _place_from(self, models: Sequence[AssignableModel]) -> bool:
        if not models:
            return True
        wanted = models[0].deployment_id
        for node in self._preferred():
            if self._num_tries > _MAX_TRIES:
                return False
            self._num_tries += 1
            of_node = self._placed[node.name]
            if self._fits(node.name, (*of_node, wanted)):
                of_node.append(wanted)
                if self._place_from(models[1:]):
                    return True
                of_node.remove(wanted)
        return False

    def fill(self) -> None:
        left = {model.deployment_id: model.most_nodes or len(self._nodes) for model in self._models}
        counts = {wanted: sum(wanted in found for found in self._placed.values()) for wanted in left}
        while left:
            wanted = min(left, key=lambda one: counts[one])
            if counts[wanted] < left[wanted] and self._place(wanted):
                counts[wanted] += 1
            else:
                del left[wanted]  # nodes only become fuller

    def _place(self, wanted: str) -> bool:
        for node in self._preferred():
            of_node = self._placed[node.name]
            if wanted not in of_node and self._fits(node.name, (*of_node, wanted)):
                of_node.append(wanted)
                return True
        return False

    def _preferred(self) -> list[AssignableNode]:
        return sorted(self._nodes, key=lambda node: (len(self._placed[node.name]), -node.weight))

    def found(self) -> Assignment:
        return {
            model.deployment_id: tuple(
                node.name for node in self._nodes if model.deployment_id in self._placed[node.name]
            )
            for model in self._models
        }
