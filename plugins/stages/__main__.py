"""The process of a stage behind the first: python -m plugins.stages COMMANDS RESULTS LIFELINE, started by LocalStage.

The process ends with its parent, by the lifeline, a pipe.
"""

import logging
import socket
import sys

from alignedserve.process.connected_process import end_with_parent
from alignedserve.process.heap import freeze_heap
from plugins.stages.stage_process import serve_stage
from plugins.stages.stage_wire import StageWire

logger = logging.getLogger(f"alignedserve.{__name__}")


def main(commands: int, results: int, lifeline: int) -> int:
    """Serve the worker at the other end of the sockets until it closes them; returns the process's exit status."""
    end_with_parent(lifeline)
    incoming, outgoing = (StageWire(socket.socket(fileno=descriptor)) for descriptor in (commands, results))
    try:
        serve_stage(incoming, outgoing, freeze_heap)
    except OSError:
        logger.info("the first stage of this worker has ended")
    return 0


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
