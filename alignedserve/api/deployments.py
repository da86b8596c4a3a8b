"""The deployments that a gateway, or the batch worker, serves: as the cluster's driver lists them.

The life of a deployment here:
1. The list names it: its router is dialled and its tokenizer loaded in a thread; a batch worker waits for a line.
2. A probe's token comes through, and another after every loss.
3. In the phase SERVING requests find the deployment by the name of its model.
4. DRAINING: requests under way go on, new requests do not find it.
5. The list names it no more: its links are closed."""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from alignedserve.api.backend.cluster import ClusterBackend
from alignedserve.api.backend.connection import ClusterConnection
from alignedserve.api.models.model_registry import RegisteredModel
from alignedserve.api.models.model_services import AdapterDirectory, ModelCard, ModelServices, Uses
from alignedserve.api.prefix_hasher import PrefixHasher
from alignedserve.api.services import ApiServices
from alignedserve.core.errors import ModelError
from alignedserve.core.request import RequestClass
from alignedserve.messages.gateways import ClusterStatus
from alignedserve.process.background_tasks import start_background
from alignedserve.runtime.lora.loaded_adapters import loaded_file
from alignedserve.runtime.model.served_model import DeploymentPhase, DeploymentState, ServedDeployment
from alignedserve.text.tokenizer import Tokenizer, TokenizerOnUse

logger = logging.getLogger(__name__)

_TOLD_AGAIN_S = 10.0  # within which the driver of a cluster lists the deployments to a process that restarted


class Deployments:
    """Keeps the registry of models as the driver's last list says. All methods run on one loop."""

    def __init__(
        self,
        services: ApiServices,
        connection: ClusterConnection,
        waiting_lines: Callable[[], Collection[str]] | None = None,
    ) -> None:
        """`waiting_lines`: returns the models for which lines of batches wait, where this process runs lines."""
        self._services = services
        self._connection = connection
        self._waiting_lines = waiting_lines
        self._deployments: dict[str, _Deployment] = {}  # by id, in the order of the list, like the next
        self._sleeping: dict[str, ServedDeployment] = {}
        self._order: tuple[str, ...] = ()
        self._told = asyncio.Event()
        self._waiting: asyncio.Task[None] | None = None

    async def load(self, deployments: Sequence[ServedDeployment]) -> None:
        """Serve the first list, with every tokenizer loaded. Raises ModelError."""
        self.serve(deployments)
        for deployment in self._deployments.values():
            await deployment.loaded()

    def serve_until_told(self, deployments: Sequence[ServedDeployment]) -> None:
        """Serve a list that may be of old, as a process that restarted has it, until the driver sends the current one.
        Meanwhile, but not for long, an unknown model is one that may come."""
        self.serve(deployments)
        self._told.clear()
        self._services.models.is_complete = False
        self._waiting = start_background(self._wait_to_be_told(), "waiting for the list of models")

    def serve(self, deployments: Sequence[ServedDeployment]) -> tuple[DeploymentState, ...]:
        """Serve exactly these from now on, in this order; return how each stands. May be repeated. Of one that is new
        the tokenizer is loaded and the router dialled in the background. Requests that still hold one that is gone
        fail."""
        self._services.models.is_complete = True
        self._told.set()
        self._order = tuple(deployed.deployment_id for deployed in deployments)
        is_asleep = DeploymentPhase.SLEEPING
        self._sleeping = {item.deployment_id: item for item in deployments if item.phase is is_asleep}
        listed = {item.deployment_id: item for item in deployments if item.phase is not is_asleep}
        for deployment_id, known in tuple(self._deployments.items()):
            if deployment_id not in listed or not known.is_of(listed[deployment_id]):
                self._deployments.pop(deployment_id).stop("The model is served no more.")
                self._services.metrics.remove_deployment(deployment_id)
        for deployment_id, deployed in listed.items():
            deployment = self._deployments.pop(deployment_id, None)
            if deployment is None:
                runs_lines = self._waiting_lines is not None
                deployment = _Deployment(
                    deployed, self._services, self._connection, self._register, reads_late=runs_lines
                )
            deployment.phase, deployment.backend.is_failing = deployed.phase, deployed.is_failing
            self._deployments[deployment_id] = deployment
        self._register()
        return tuple(map(self._state, self._order))

    def _state(self, deployment_id: str) -> DeploymentState:
        lines = self._waiting_lines() if self._waiting_lines is not None else ()
        sleeping = self._sleeping.get(deployment_id)
        if sleeping is not None:
            name, waited_s = sleeping.served.name, self._services.line.waited_s
            return DeploymentState(
                deployment_id,
                None,
                0,
                has_lines=name in lines,
                waited_s=waited_s(name, RequestClass.REAL_TIME),
                documents_waited_s=waited_s(name, RequestClass.BEST_EFFORT),
            )
        deployment = self._deployments[deployment_id]
        state = replace(deployment.state(), has_lines=deployment.card.name in lines)
        return replace(state, num_documents=state.num_open) if self._waiting_lines is not None else state

    async def told(self) -> None:
        """Return once the list is the driver's current one, or no driver tells."""
        await self._told.wait()

    def first_status(self) -> ClusterStatus | None:
        """Return the last report of the first deployment's router; None while that is not connected."""
        return next((deployment.backend.status() for deployment in self._deployments.values()), None)

    def statuses(self) -> dict[str, ClusterStatus]:
        """Return the last report of every deployment's router that is connected, by deployment."""
        statuses = {key: deployment.backend.status() for key, deployment in self._deployments.items()}
        return {key: status for key, status in statuses.items() if status is not None}

    def close(self) -> None:
        """Close every deployment; open requests fail. May be repeated."""
        if self._waiting is not None:
            self._waiting.cancel()
        for deployment in self._deployments.values():
            deployment.stop("The gateway is shutting down.")
        self._deployments = {}

    def _register(self) -> None:
        preparing = [item for item in self._deployments.values() if item.phase is DeploymentPhase.PREPARING]
        registered = [self._registered(deployment_id) for deployment_id in self._order]
        models = [model for model in registered if model is not None]
        self._services.models.replace_all(models, [item.card.name for item in preparing])
        self._services.line.changed()

    def _registered(self, deployment_id: str) -> RegisteredModel | None:
        sleeping, deployment = self._sleeping.get(deployment_id), self._deployments.get(deployment_id)
        if sleeping is not None:
            served, problem = sleeping.served, sleeping.problem
            return RegisteredModel(ModelCard.of(served), problem=problem, is_asleep=True, adapters=served.adapters)
        is_serving = deployment is not None and deployment.phase is DeploymentPhase.SERVING
        return deployment.registered() if deployment is not None and is_serving else None

    async def _wait_to_be_told(self) -> None:
        try:
            async with asyncio.timeout(_TOLD_AGAIN_S):
                await self._told.wait()
        except TimeoutError:
            self._services.models.is_complete = True
            self._told.set()


class _Deployment:
    def __init__(
        self,
        deployed: ServedDeployment,
        services: ApiServices,
        connection: ClusterConnection,
        on_change: Callable[[], None],
        *,
        reads_late: bool,
    ) -> None:
        self.phase = deployed.phase
        self.card = ModelCard.of(deployed.served)
        self._deployed = deployed
        self._services = services
        self._on_change = on_change
        self._reads_late = reads_late
        self._hasher = PrefixHasher.of(deployed, key=connection.links.prefix_key)
        self.backend = ClusterBackend(connection, services.config, deployed.router, self._hasher)
        self._adapters = None
        if deployed.served.lora.is_enabled and deployed.served.encoder is None:
            file = loaded_file(connection.links.book.folder, deployed.deployment_id)
            self._adapters = AdapterDirectory(deployed.served, file)
        self._model: ModelServices | None = None
        self._error: ModelError | None = None
        self.backend.start()
        self._loading = start_background(self._load(), f"loading the tokenizer of {self.card.name}")
        self._probing: asyncio.Task[None] | None = None

    def is_of(self, deployed: ServedDeployment) -> bool:
        known = self._deployed
        return replace(deployed, phase=known.phase, is_failing=known.is_failing) == known

    async def loaded(self) -> None:
        await self._loading
        if self._error is not None:
            raise self._error

    def registered(self) -> RegisteredModel:
        if self._error is not None:
            return RegisteredModel(self.card, problem=f"its tokenizer cannot be loaded: {self._error}")
        return RegisteredModel(self.card, self._model)

    def state(self) -> DeploymentState:
        uses = self._model.uses if self._model is not None else Uses()
        is_hopeless = self._model.readiness_probe.is_hopeless if self._model is not None else self._error is not None
        return DeploymentState(
            self._deployed.deployment_id,
            self.registered().missing(),
            uses.num_open,
            idle_s=None if uses.last_used_s is None else max(time.monotonic() - uses.last_used_s, 0.0),
            keep_alive_s=uses.keep_alive_s,
            is_hopeless=is_hopeless,
        )

    def stop(self, reason: str) -> None:
        self._loading.cancel()
        if self._probing is not None:
            self._probing.cancel()
        if self._model is not None:
            self._model.grammars.close()
        self.backend.stop(reason)

    async def _load(self) -> None:
        try:
            if self._reads_late:
                tokenizer: Tokenizer = TokenizerOnUse(self.card.load_tokenizer)
            else:
                tokenizer = await asyncio.to_thread(self.card.load_tokenizer)
        except ModelError as error:
            logger.error("the tokenizer of %s cannot be loaded: %s", self.card.name, error)
            self._error = error
        else:
            deployment_id = self._deployed.deployment_id
            shared = (self.card, self.backend, tokenizer, self._hasher, deployment_id, self._adapters)
            self._model = self._services.make_model(*shared)
            self._probing = start_background(self._model.readiness_probe.run(), "the readiness probe")
        self._on_change()
