"""The running router: its logic, its links and the length predictor."""

import secrets
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

import msgspec

from alignedserve.config.sections import BatchingConfig, RouterConfig
from alignedserve.messages.events import Send
from alignedserve.messages.links import RouterInbound
from alignedserve.messages.request_notes import AskStandings, AskTimeline, StandingsTold, TimelineTold
from alignedserve.messages.wire import Codec, Message
from alignedserve.process.logic_driver import LogicDriver
from alignedserve.process.process_spec import ProcessSpec
from alignedserve.runtime.model.served_model import ServedModel
from router.async_predictor import AsyncLengthPredictor, PredictingLogic
from router.logic import RouterEvent, make_logic
from router.prediction import learnt_lengths, make_length_predictor
from router.request_notes import RouterNotes, standings_of
from router.request_registry import RouterRecords
from router.state import DrainRequested, LengthPredicted


class TimelineRelay:
    """A Relay (process.logic_driver) without a memory: an answer names its gateway."""

    def __init__(self, records: RouterRecords) -> None:
        self._records = records
        self._gateways = records.gateways

    def relay(self, peer: str, message: Message, now: float) -> Sequence[Send] | None:
        """Pass a question to every other gateway, its answer back; say where requests stand; leave the rest to the
        logic."""
        match message:
            case AskTimeline():
                return self._ask(peer, message)
            case TimelineTold():
                answer = msgspec.structs.replace(message, num_asked=None)
                return [Send(message.asker, answer)] if message.asker in self._gateways else []
            case AskStandings():
                standings = standings_of(self._records, message.request_ids, now)
                return [Send(peer, StandingsTold(message.number, standings))]
        return None

    def _ask(self, peer: str, message: AskTimeline) -> list[Send]:
        question = msgspec.structs.replace(message, asker=peer)
        questions = [Send(gateway, question) for gateway in self._gateways if gateway != peer]
        return [Send(peer, TimelineTold(message.number, peer, num_asked=len(questions))), *questions]


class RouterService:
    """The one router of a cluster. Gateways, workers and pools connect to it."""

    def __init__(
        self,
        *,
        config: RouterConfig,
        batching: BatchingConfig,
        served: ServedModel,
        process_spec: ProcessSpec,
        state_folder: Path | None = None,
    ) -> None:
        """Raise ConfigError or ModelError for policies that cannot be built. `state_folder`: of what outlives this
        process."""
        self._epoch = secrets.token_hex(4)
        make = partial(make_logic, config=config, batching=batching)
        logic = self._logic = make()
        predictor = make_length_predictor(config, served)
        self._predictor: AsyncLengthPredictor | None = None
        if predictor is not None:
            journal = learnt_lengths(config, served, predictor, state_folder) if state_folder is not None else None
            self._predictor = AsyncLengthPredictor(predictor, self._predicted, journal)
        decides = logic if self._predictor is None else PredictingLogic(logic, self._predictor)
        self._driver: LogicDriver[RouterEvent, NoReturn] = LogicDriver(
            decides,
            process_spec,
            Codec(RouterInbound),
            self._perform,
            process_spec.recorder(make),
            observer=RouterNotes(logic.records) if process_spec.notes_requests else None,
            relay=TimelineRelay(logic.records),
        )

    async def start(self, *, listen_at: str) -> None:
        await self._driver.links.listen(listen_at)

    async def drain(self, draining: tuple[str, ...], moved: tuple[str, ...]) -> dict[str, int]:
        self._driver.dispatch(DrainRequested(draining, moved))
        return self._logic.num_left(draining)

    async def num_left(self, names: tuple[str, ...]) -> dict[str, int]:
        return self._logic.num_left(names)

    async def registrations(self) -> dict[str, str]:
        """Return what tells each worker's registration from any other, also at another router."""
        return {name: f"{self._epoch}-{number}" for name, number in self._logic.registrations.items()}

    async def close(self) -> None:
        await self._driver.close()
        if self._predictor is not None:
            self._predictor.close()

    def _predicted(self, event: LengthPredicted) -> None:
        self._driver.dispatch(event)

    def _perform(self, command: NoReturn) -> None:
        raise AssertionError("the router only sends messages")
