"""The router at work: its logic and its links, joined."""

from functools import partial
from typing import NoReturn

from alignedserve.config.sections import BatchingConfig, RouterConfig
from alignedserve.messages.links import RouterInbound
from alignedserve.messages.wire import Codec
from alignedserve.runtime.model.served_model import ServedModel
from alignedserve.runtime.process.logic_driver import LogicDriver
from alignedserve.runtime.process.process_spec import ProcessSpec
from router.factory import make_logic
from router.logic import RouterEvent
from router.prediction import make_length_predictor
from router.prediction.runner import AsyncLengthPredictor, PredictingLogic
from router.state import LengthPredicted


class Router:
    """The one router of a cluster. Everybody dials it."""

    def __init__(
        self, *, config: RouterConfig, batching: BatchingConfig, served: ServedModel, process_spec: ProcessSpec
    ) -> None:
        """Raises ConfigError or ModelError where the configured policies cannot be had."""
        make = partial(make_logic, config=config, batching=batching)
        logic = make()
        predictor = make_length_predictor(config, served)
        self._runner = AsyncLengthPredictor(predictor, self._tell) if predictor is not None else None
        decides = logic if self._runner is None else PredictingLogic(logic, self._runner)
        self._room: LogicDriver[RouterEvent, NoReturn] = LogicDriver(
            decides, process_spec.identity(), Codec(RouterInbound), _nothing_else, process_spec.recorder(make)
        )

    async def start(self, *, listen_at: str) -> None:
        """Accept gateways, workers and pools."""
        await self._room.links.listen(listen_at)

    async def close(self) -> None:
        """Drop the links."""
        await self._room.close()
        if self._runner is not None:
            self._runner.close()

    def _tell(self, event: LengthPredicted) -> None:
        self._room.dispatch(event)


def _nothing_else(command: NoReturn) -> None:
    raise AssertionError("the router only sends messages")
