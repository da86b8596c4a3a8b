"""The server that `certify` starts where no URL is given: the pocket model, on free ports, with a state of its own."""

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

from alignedserve.cluster.local_ray.worker_template import WorkerTemplate
from alignedserve.config.model_settings import load_models
from alignedserve.config.overrides import override_of
from lab.commands.certify.cluster_words import cluster_words
from lab.commands.certify.options import CertifyOptions
from lab.commands.own_cluster import on_free_port, own_cluster


@dataclass(frozen=True, slots=True)
class Started:
    """A server that was started."""

    url: str
    words: str  # topology and workers


@contextlib.contextmanager
def started_server(options: CertifyOptions, template: WorkerTemplate | None) -> Iterator[Started]:
    """Run a server, of processes that the template forks, as long as the context.

    Raises an error of the tree, with nothing left running.
    """
    with tempfile.TemporaryDirectory(prefix="certify-state-") as folder:
        settings = load_models(options.config, _overrides(options, folder), ())
        with own_cluster(settings, template, called="server") as cluster:
            yield Started(cluster.url, cluster_words(cluster.config))


def _overrides(options: CertifyOptions, folder: str) -> list[str]:
    overrides = [override_of("batches.folder", folder)]
    if options.config is None:
        overrides.append(on_free_port())
    if options.topology is not None:
        overrides.append(f"topology={options.topology}")
    if options.num_workers != 1:
        overrides.append(f"decode.count={options.num_workers}")
        if options.topology == "disaggregated":
            overrides.append(f"prefill.count={options.num_workers}")
    return [*overrides, *options.overrides]
