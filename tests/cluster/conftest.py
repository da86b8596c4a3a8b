"""One served cluster that the tests of this folder share: starting one takes ten seconds, more on a busy machine."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.serving import EXACT, Serving, serving, write_random_model


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder; serve it with EXACT."""
    return write_random_model(tmp_path_factory.mktemp("models") / "model")


@pytest.fixture(scope="session")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory, random_model: Path) -> Iterator[Serving]:
    """The default cluster, with a second worker for when one is lost. Its end is a test too: nothing may be left."""
    yield from _served(tmp_path_factory.mktemp("run"), random_model, "decode.count=2", "1 router, 2 elastic workers")


@pytest.fixture(scope="session")
def shared_separate_cluster(tmp_path_factory: pytest.TempPathFactory, random_model: Path) -> Iterator[Serving]:
    """A cluster with a prefill worker, a pool and a decode worker."""
    workers = "1 router, 1 KV pool, 1 prefill and 1 decode workers"
    yield from _served(tmp_path_factory.mktemp("separate"), random_model, "topology=disaggregated", workers)


def _served(run_dir: Path, model: Path, setting: str, workers: str) -> Iterator[Serving]:
    with serving(run_dir, str(model), *EXACT, "--set", setting) as served:
        served.wait_ready()
        yield served
        code, out, err = served.stop()
        assert (code, served.leftovers(), served.arenas()) == (0, [], []), err
        assert workers in out


@pytest.fixture
def cluster(shared_cluster: Serving) -> Serving:
    """The shared cluster, whole and idle."""
    shared_cluster.wait_ready()
    shared_cluster.wait_idle()
    return shared_cluster


@pytest.fixture
def separate_cluster(shared_separate_cluster: Serving) -> Serving:
    """The shared cluster of separate workers, whole and idle."""
    shared_separate_cluster.wait_ready()
    shared_separate_cluster.wait_idle()
    return shared_separate_cluster
