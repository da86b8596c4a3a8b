"""What is wanted of a cluster comes true, whatever its nodes and workers do meanwhile: random wishes and reports."""

import random
from dataclasses import replace

from alignedserve.cluster.deployments.logic import (
    PROVING_S,
    DeploymentsLogic,
    DeploymentStage,
    Failed,
    ModelAct,
    ModelStep,
    Prepared,
    SeenModels,
    View,
)
from alignedserve.cluster.deployments.orders import AddModel, ModelOrder, RemoveModel, ReplaceModel
from alignedserve.cluster.desired import (
    RETURN_S,
    Act,
    ClusterStep,
    Health,
    ProcessDrain,
    ProcessState,
    RollingRestart,
    SeenCluster,
    SeenNode,
    WantedCluster,
    reconcile,
)
from tests.support.marks import each

UP, FAILED = Health(ProcessState.UP), Health(ProcessState.FAILED, "no room")


class World:
    """Nodes with two workers each: performs steps, now and then too late or in vain, and reports what is so."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.now = 0.0
        self.wanted = WantedCluster()
        self.alive = {"head": ("head", "10.0.0.1")}
        self.members: dict[str, SeenNode] = {"head": node_of("head", self.alive["head"])}
        self.preparing: set[str] = set()
        self.healths: dict[str, Health] = {}
        self.registered: dict[str, str] = {}
        self.busy: dict[str, float] = {}  # until when a worker that drains has requests
        self.orders: list[str] = []  # restarts that have not been answered
        self.num_drawn = 0
        self.appear(self.members["head"])

    def appear(self, node: SeenNode) -> None:
        for worker in node.workers:
            self.serve(worker)

    def serve(self, worker: str) -> None:
        self.num_drawn += 1
        self.healths[worker], self.registered[worker] = UP, f"r-{self.num_drawn}"

    def vanish(self, worker: str) -> None:
        self.healths.pop(worker, None)
        self.registered.pop(worker, None)

    @property
    def workers(self) -> list[str]:
        return [worker for node in self.members.values() for worker in node.workers]

    def seen(self) -> SeenCluster:
        left = {name: int(self.busy.get(name, 0.0) > self.now) for name in self.wanted.workers}
        return SeenCluster(
            dict(self.alive), dict(self.members), set(self.preparing), left, self.healths, self.registered, ("router",)
        )

    def look(self, *, is_calm: bool = False) -> list[ClusterStep]:
        steps = reconcile(self.wanted, self.seen(), self.now)
        for step in steps:
            may_fail = step.act in (Act.PREPARE, Act.START_AGAIN)  # as Ray may hold what was there before
            if is_calm or not may_fail or self.rng.random() < 0.7:
                self.perform(step)
        return steps

    def perform(self, step: ClusterStep) -> None:
        name = step.subject
        match step.act:
            case Act.PREPARE:
                assert name in self.alive
                assert name not in {*self.members, *self.preparing, *self.wanted.refused}
                self.preparing.add(name)
            case Act.CANCEL:
                self.preparing.remove(name)
            case Act.FORGET | Act.END_NODE:
                assert (step.act is Act.FORGET) == (name not in self.alive)
                for worker in self.members.pop(name).workers:
                    self.vanish(worker)
            case Act.END_WORKER:
                self.vanish(name)
                self.members = {key: node_without(node, name) for key, node in self.members.items()}
            case Act.RESTART:
                self.registered.pop(name, None)
                self.healths[name] = Health()
            case Act.START_AGAIN if name in self.healths:  # else its node ends with the same look
                assert self.healths[name] in (FAILED, Health())
                self.healths[name] = Health()
            case Act.DONE | Act.REFUSE:
                self.orders.remove(name)

    def wish(self) -> None:
        kind, workers = self.rng.randrange(5), self.workers
        others = [node_id for node_id in self.members if node_id != "head"]
        if kind == 0 and others:
            node = self.members[self.rng.choice(others)]
            self.drain(node.name, node.workers, is_given_back=self.rng.random() < 0.3)
        elif kind == 1 and workers:
            worker = self.rng.choice(workers)
            if self.wanted.restart is None and worker not in self.wanted.workers:  # else it is refused
                self.drain(worker, (worker,))
        elif kind == 2 and workers and self.wanted.restart is None:
            able = [worker for worker in workers if worker not in self.wanted.workers]
            self.num_drawn += 1
            self.wanted.restart = RollingRestart(f"order-{self.num_drawn}", able, dict.fromkeys(able, 20.0))
            self.orders.append(self.wanted.restart.order_id)
        elif kind == 3 and self.wanted.drained:
            node_id = self.rng.choice(sorted(self.wanted.drained))
            self.wanted.use_again(node_id, self.wanted.drained[node_id].name)
        elif kind == 4:
            self.wanted.resume(self.now)

    def drain(self, name: str, workers: tuple[str, ...], *, is_given_back: bool = False) -> None:
        self.wanted.drains[name] = ProcessDrain(workers, (), self.now + 20.0, is_given_back)
        self.busy |= {worker: self.now + self.rng.uniform(0.0, 60.0) for worker in workers}

    def happen(self) -> None:
        kind = self.rng.randrange(4)
        if kind == 0:
            node_id = f"{self.rng.choice('abc')}.{self.rng.randrange(2)}"
            if node_id in self.alive:
                del self.alive[node_id]
            else:
                self.alive[node_id] = (node_id.partition(".")[0], "10.0.0.2")
        elif kind == 1 and self.healths:
            self.healths[self.rng.choice(sorted(self.healths))] = FAILED
        else:
            self.settle()

    def settle(self, *, is_calm: bool = False) -> None:
        """Let preparations end, and processes that start be up."""
        for node_id in sorted(self.preparing & self.alive.keys()):
            self.preparing.remove(node_id)
            chance = 0.0 if is_calm else self.rng.random()
            if chance < 0.6:
                self.members[node_id] = node_of(node_id, self.alive[node_id])
                self.appear(self.members[node_id])
                self.wanted.joined(node_id)
            elif chance < 0.8:
                self.wanted.postpone(node_id, self.now)
            else:
                self.wanted.refuse(node_id, "it differs")
        for worker in [worker for worker, health in self.healths.items() if health == Health()]:
            self.serve(worker)


def node_of(node_id: str, host: tuple[str, str]) -> SeenNode:
    return SeenNode(f"node-{node_id}", host, tuple(f"decode-{node_id.replace('.', '')}{index}" for index in range(2)))


def node_without(node: SeenNode, worker: str) -> SeenNode:
    return node._replace(workers=tuple(name for name in node.workers if name != worker))


@each("seed", range(60))
def test_random_wishes_come_true_once_nothing_more_happens(seed: int) -> None:
    world = World(random.Random(seed))
    for _ in range(300):
        world.now += world.rng.uniform(0.1, 3.0)
        if world.rng.random() < 0.15:
            world.wish()
        if world.rng.random() < 0.3:
            world.happen()
        world.look()
    ends_s = world.now + 2 * RETURN_S
    while world.now < ends_s:
        world.now += 1.0
        world.look(is_calm=True)
        world.settle(is_calm=True)
    wanted = world.wanted
    assert world.look() == []
    assert (wanted.drains, wanted.restart, world.orders) == ({}, None, [])
    out = {row.node_id for row in wanted.drained.values()} | set(wanted.refused) | set(wanted.given_back)
    assert set(world.members) == set(world.alive) - out
    assert world.healths == dict.fromkeys(world.workers, UP)


@each("seed", range(30))
def test_a_look_that_nothing_follows_gives_the_same_steps_again(seed: int) -> None:
    """A driver that dies before it performs a step leaves it to the next driver."""
    world = World(random.Random(seed))
    for _ in range(100):
        world.now += world.rng.uniform(0.1, 3.0)
        if world.rng.random() < 0.3:
            world.happen()
        seen = world.seen()
        first = reconcile(world.wanted, seen, world.now)
        again = reconcile(world.wanted, replace(seen), world.now)
        lasting = [step for step in first if step.act in (Act.PREPARE, Act.CANCEL, Act.FORGET)]
        assert [step for step in again if step.act in (Act.PREPARE, Act.CANCEL, Act.FORGET)] == lasting
        for step in first:
            world.perform(step)


class ModelsWorld:
    """Models that come and go by order: each step succeeds or fails some time later, and is reported."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.now = 0.0
        self.logic = DeploymentsLogic.of_start({"": "a"})
        self.jobs: dict[str, ModelAct] = {}  # by deployment
        self.processes = {""}
        self.waiting: set[str] = set()  # orders without a last answer
        self.num_orders = 0

    def order(self) -> None:
        name, within_s = self.rng.choice("abc"), self.rng.choice((None, 5.0))
        orders: tuple[ModelOrder, ...] = (
            *(AddModel("/m", name), ReplaceModel(name, "/m", (), within_s)),
            RemoveModel(name, within_s),
        )
        self.num_orders += 1
        self.waiting.add(f"order-{self.num_orders}")
        self.perform(self.logic.order(f"order-{self.num_orders}", self.rng.choice(orders), self.now))

    def perform(self, steps: list[ModelStep]) -> None:
        for step in steps:
            match step.act:
                case ModelAct.PREPARE | ModelAct.START | ModelAct.END:
                    self.jobs[step.subject] = step.act
                    self.processes |= {step.subject} if step.act is ModelAct.START else set()
                case ModelAct.DONE | ModelAct.REFUSE:
                    assert step.text
                    self.waiting.remove(step.subject)
                case ModelAct.SAY:
                    assert step.subject in self.waiting

    def look(self, *, is_calm: bool = False) -> None:
        prepared, up, failed, gone = dict[str, Prepared](), list[str](), dict[str, Failed](), list[str]()
        for key in [key for key in self.jobs if is_calm or self.rng.random() < 0.4]:
            act = self.jobs.pop(key)
            if act is ModelAct.END:
                self.processes.discard(key)
                gone.append(key)
            elif not is_calm and self.rng.random() < 0.3:
                failed[key] = Failed("no room", is_full=True)
            elif act is ModelAct.START:
                up.append(key)
            else:
                prepared[key] = Prepared(self.logic.of(key).name)
        is_heard = is_calm or self.rng.random() < 0.7
        views = {row.deployment_id: self.view(is_calm=is_calm) for row in self.logic.rows} if is_heard else {}
        self.perform(self.logic.reconcile(SeenModels(prepared, up, failed, views, gone), self.now))

    def view(self, *, is_calm: bool) -> View:
        is_ready = is_calm or self.rng.random() < 0.4
        return View(None if is_ready else "no token yet", 0 if is_calm else self.rng.randrange(3))

    def succeed(self) -> None:
        """Let another driver take over: orders that have no row are forgotten."""
        self.jobs.clear()
        self.logic = DeploymentsLogic(self.logic.left, self.logic.num_named)
        self.perform(self.logic.resume(self.now))
        self.waiting = {row.order_id for row in self.logic.rows if row.order_id is not None}


@each("seed", range(60))
def test_every_order_about_models_is_answered_once_and_leaves_models_that_serve(seed: int) -> None:
    world = ModelsWorld(random.Random(seed))
    for _ in range(200):
        world.now += world.rng.uniform(0.1, PROVING_S / 4)
        chance = world.rng.random()
        if chance < 0.2:
            world.order()
        elif chance < 0.22:
            world.succeed()
        world.look()
    for _ in range(100):
        world.now += 1.0
        world.look(is_calm=True)
    rows = world.logic.rows
    assert not world.waiting
    assert {row.phase for row in rows} == {DeploymentStage.SERVING}
    assert {row.deployment_id for row in rows} == world.processes
    assert len({row.name for row in rows}) == len(rows) >= 1
