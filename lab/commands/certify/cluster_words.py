"""A cluster in words, for the page."""

from alignedserve.config.sections import ClusterConfig


def cluster_words(config: ClusterConfig) -> str:
    topology, count = config.chosen_topology, config.decode.count
    workers = f"{count} worker{'s' if count > 1 else ''}"
    if topology.is_separate:
        workers = f"{config.prefill.count} prefill + {count} decode worker{'s' if count > 1 else ''}"
    return f"{topology.value}, {workers}, policy {config.scheduling.policy}"
