"""Readiness: one real token through the whole system, asked for until it comes and again after every loss."""

import asyncio
import secrets
import time

from alignedserve.core.ids import RequestId
from alignedserve.core.request import Request, SamplingParams
from alignedserve.gateway.backend.interface import CompletionBackend
from alignedserve.gateway.errors import GenerationError

_PAUSE_S = 0.5
_TIMEOUT_S = 30.0


class ReadinessProbe:
    """Knows whether a token gets through. `run` until cancelled."""

    def __init__(self, backend: CompletionBackend, *, token_id: int, reply_to: str) -> None:
        self._backend = backend
        self._token_id = token_id
        self._reply_to = reply_to
        self._problem: str | None = "no canary token has come through yet"

    def missing(self) -> str | None:
        """What keeps the system from being ready; None when nothing does."""
        status = self._backend.status()
        if status is None:
            return "the router is not connected"
        if status.num_decode_workers == 0:
            return "no decode worker is registered"
        if status.num_prefill_workers == 0:
            return "no prefill worker is registered"
        return self._problem

    async def run(self, pause_s: float = _PAUSE_S) -> None:
        """Ask for a token whenever the system is not known to be ready."""
        while True:
            if self._is_cluster_incomplete():
                self._problem = "no canary token has come through since the cluster changed"
            elif self._problem is not None:
                self._problem = await self._ask()
            await asyncio.sleep(pause_s)

    def _is_cluster_incomplete(self) -> bool:
        status = self._backend.status()
        return status is None or status.num_decode_workers == 0 or status.num_prefill_workers == 0

    async def _ask(self) -> str | None:
        request = Request(
            request_id=RequestId(f"canary-{secrets.token_hex(8)}"),
            prompt_token_ids=(self._token_id,),
            sampling=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
            reply_to=self._reply_to,
            arrival_s=time.monotonic(),
            priority=-1,
        )
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                stream = self._backend.submit(request)
                async for _ in stream:
                    return None
        except TimeoutError:
            return "the canary token did not come in time"
        except GenerationError as error:
            return f"the canary token failed: {error}"
        finally:
            self._backend.abort(request.request_id)
        return "the canary token did not come"
