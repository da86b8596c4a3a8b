"""The simulator runs the live logics: each is built in one place, which both import."""

import ast
from pathlib import Path

import pytest

import alignedserve.worker_core.factory
import alignedserve.worker_core.service
import decode_worker.factory
import decode_worker.service
import kvpool.logic
import kvpool.service
import prefill_worker.logic
import prefill_worker.service
import router.logic
import router.service
from alignedserve.worker_core.logic import ColocatedLogic
from decode_worker.logic import DecodeLogic
from kvpool.logic import PoolLogic
from lab.sim import simulation
from lab.sim.simulation import Simulation
from prefill_worker.logic import PrefillLogic
from router.logic import RouterLogic
from tests.harnesses.simulation import colocated, disaggregated, workload_of

ROOT = Path(simulation.__file__).parents[2]
LOGICS = ("RouterLogic", "PoolLogic", "PrefillLogic", "DecodeLogic", "ColocatedLogic")
COMPONENTS = ("alignedserve", "router", "kvpool", "prefill_worker", "decode_worker")


def _calls(path: Path) -> list[str]:
    """Return the names of what a file calls, if it may call one of the logics."""
    text = path.read_text()
    if not any(f"{logic}(" in text for logic in LOGICS):
        return []
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    return [node.func.id for node in nodes if isinstance(node.func, ast.Name)]


@pytest.fixture(scope="module")
def calls() -> dict[str, list[str]]:
    """Return the names of what every file of the components calls."""
    return {
        path.relative_to(ROOT).as_posix(): _calls(path)
        for component in COMPONENTS
        for path in (ROOT / component).rglob("*.py")
    }


@pytest.mark.parametrize("logic", LOGICS)
def test_a_logic_is_made_in_one_file(logic: str, calls: dict[str, list[str]]) -> None:
    makers = [path for path, called in calls.items() if logic in called]
    assert len(makers) == 1
    assert makers[0].endswith(("/factory.py", "/logic.py"))


def test_both_use_that_file() -> None:
    live = [
        (router.service, router.logic, "make_logic"),
        (kvpool.service, kvpool.logic, "make_logic"),
        (prefill_worker.service, prefill_worker.logic, "make_logic"),
        (decode_worker.service, decode_worker.factory, "make_logic"),
        (alignedserve.worker_core.service, alignedserve.worker_core.factory, "make_colocated_logic"),
    ]
    assert all(vars(user)[name] is vars(factory)[name] for user, factory, name in live)
    assembly_names = ("router_logic", "pool_logic", "prefill_logic", "decode_factory", "colocated_factory")
    assemblies = [vars(simulation)[name] for name in assembly_names]
    live_assemblies = [router.logic, kvpool.logic, prefill_worker.logic, decode_worker.factory]
    assert assemblies == [*live_assemblies, alignedserve.worker_core.factory]


def test_the_simulated_components_hold_them() -> None:
    separate = Simulation(disaggregated(), workload_of()).logics()
    assert [type(logic) for logic in separate.values()] == [RouterLogic, PoolLogic, PrefillLogic, DecodeLogic]
    together = Simulation(colocated(), workload_of()).logics()
    assert [type(logic) for logic in together.values()] == [RouterLogic, ColocatedLogic]
