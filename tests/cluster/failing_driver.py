"""`alignedserve serve` whose driver meets an error of its own, when it has served and a file asks for it.

python -m tests.cluster.failing_driver FILE SECONDS serve ...

SECONDS: for which the nodes' processes go on without a driver.
"""

import sys
from pathlib import Path

from alignedserve.cli.main import main
from alignedserve.cluster import serving_cluster
from alignedserve.cluster.hosts import succession
from alignedserve.cluster.serving_cluster import ServingCluster

asked, patience_s = Path(sys.argv.pop(1)), float(sys.argv.pop(1))
check = ServingCluster.check


def failing_check(self: ServingCluster) -> bool:
    """Look after the cluster until it is asked to fail."""
    if asked.exists():
        raise KeyError("node-7")
    return check(self)


if __name__ == "__main__":
    ServingCluster.check = failing_check  # type: ignore[method-assign]
    serving_cluster._SETTLED_S = 0.0  # it need not serve for half a minute first
    succession._ORPHANED_S = patience_s
    main()
