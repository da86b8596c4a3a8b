"""Takes orders about models from commands on any host, and gives them their answers."""

from collections import deque

from alignedserve.cluster.deployments.driver import DeploymentsDriver, Site
from alignedserve.cluster.deployments.logic import DeploymentsLogic
from alignedserve.cluster.deployments.orders import (
    Answer,
    ModelOrder,
    Models,
    Refused,
    ShowModels,
    ShowStatus,
    problem_of,
)
from alignedserve.cluster.hosts.operations.orders import answer_model_order


class ModelOrders:
    """The orders of one cluster. An order stays in Ray's store until it is carried out, for the next driver too."""

    def __init__(self, cluster_id: str, url: str, site: Site, logic: DeploymentsLogic) -> None:
        """`url`: of the first gateway."""
        self._cluster_id = cluster_id
        self._url = url
        self._answers: deque[tuple[str, Answer]] = deque()  # that are to be written
        self.driver = DeploymentsDriver(site, logic, self.answer)

    def take(self, name: str, order: ModelOrder | ShowModels | ShowStatus) -> None:
        """Begin to carry out an order, unless that was begun."""
        if self.driver.logic.knows(name) or any(name == answered for answered, _ in self._answers):
            return
        problem = problem_of(order)
        if problem is not None:
            self.answer(name, Refused(problem))
        elif isinstance(order, ShowStatus):
            self.answer(name, Refused("a cluster of hosts is described by `alignedserve status` on any of them"))
        elif isinstance(order, ShowModels):
            self.answer(name, Models(self._url, tuple(self.driver.reports())))
        else:
            self.driver.order(name, order)

    def look(self) -> bool:
        """Go on as far as things have come; return whether anything has changed.

        Raises PeerLost when Ray's head does not answer; what is to be said then is said later.
        """
        before = self.driver.phases
        self.driver.look()
        while self._answers:
            answer_model_order(self._cluster_id, *self._answers[0])
            self._answers.popleft()
        return self.driver.phases != before

    def answer(self, name: str, answer: Answer) -> None:
        """Answer an order, as soon as Ray's head does; any but a Remark is the last answer."""
        self._answers.append((name, answer))
