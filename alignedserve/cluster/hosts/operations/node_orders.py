"""Carries out orders about nodes and their workers."""

from collections.abc import Callable, Mapping
from typing import Any

from alignedserve.cluster.hosts.operations.node_drains import NodeDrains
from alignedserve.cluster.hosts.operations.orders import Answer, DrainNode, ScaleWorkers, UndoDrain
from alignedserve.cluster.hosts.operations.worker_scaling import WorkerScaling
from alignedserve.cluster.hosts.record import ClusterRecord
from alignedserve.core.errors import AlignedServeError

NodeOrder = DrainNode | UndoDrain | ScaleWorkers


class NodeOrders:
    """The orders of one cluster, which are answered at once."""

    def __init__(
        self,
        drains: NodeDrains,
        workers: WorkerScaling,
        record: Callable[[], ClusterRecord],
        actors: Callable[[], Mapping[str, Any]],
    ) -> None:
        """`record`, `actors`: return the cluster's as they are now."""
        self._drains = drains
        self._workers = workers
        self._record = record
        self._actors = actors

    def obey(self, order: NodeOrder) -> Answer:
        """Begin what is ordered, or say why not."""
        try:
            match order:
                case DrainNode():
                    return Answer(self._drains.drain(order, self._record().nodes))
                case UndoDrain(name):
                    return Answer(self._drains.undo(name, self._record().nodes))
                case ScaleWorkers():
                    return Answer(self._workers.scale(order, self._actors()))
        except AlignedServeError as error:
            return Answer(str(error), is_refused=True)
