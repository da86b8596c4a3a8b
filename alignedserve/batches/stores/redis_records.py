"""Records in Redis: a value is a string, an ordered list a sorted set, a commit one WATCH/MULTI/EXEC.

Values come back as bytes only, no script is ever sent, and keys are generated here."""

import ssl
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import redis as blocking_redis
import redis.asyncio as redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, RedisError, ResponseError, WatchError
from redis.exceptions import ConnectionError as ConnectionLost
from redis.exceptions import TimeoutError as TimeoutExpired

from alignedserve.batches.interfaces import Page
from alignedserve.batches.records import RECORDS_VERSION
from alignedserve.batches.stores.namespace_claim import CLAIM, WATCH_S, is_of_other
from alignedserve.batches.stores.redis_location import RedisLocation
from alignedserve.core.errors import StoreUnavailable
from alignedserve.messages.state import AddToIndex, Change, DeleteValue, RemoveFromIndex, SetValue

# One immediate retry: a connection from before the server's restart is lost, a new one may work. Further retries are
# up to the caller; a server that is silent (stopped, or its disk hangs) is asked once.
_RETRY = Retry(NoBackoff(), 1, supported_errors=(ConnectionLost,))
_LOOK_S = 0.2
_VERSION = "version"  # the key of RECORDS_VERSION


class RedisRecords:
    """Implements RecordStore. Connects when first used, and after every loss."""

    def __init__(self, location: RedisLocation, *, namespace: str) -> None:
        self._prefix = f"{namespace}:"
        self._client: Any = redis.Redis.from_url(location.url, retry=_RETRY, **location.options())

    async def read(self, keys: Sequence[str]) -> list[bytes | None]:
        if not keys:
            return []
        values: list[bytes | None] = await self._send(self._client.mget([self._key(key) for key in keys]))
        return values

    async def commit(self, changes: Sequence[Change], *, unchanged: Mapping[str, bytes | None]) -> bool:
        done: bool = await self._send(self._commit(changes, unchanged))
        return done

    async def page(self, index: str, *, after: str | None, limit: int, newest_first: bool) -> Page | None:
        key = self._key(index)
        first = 0
        if after is not None:
            rank = await self._send((self._client.zrevrank if newest_first else self._client.zrank)(key, after))
            if rank is None:
                return None
            first = rank + 1
        members = await self._send(self._client.zrange(key, first, first + limit, desc=newest_first))
        return Page(tuple(member.decode() for member in members[:limit]), len(members) > limit)

    async def close(self) -> None:
        await self._client.aclose()

    def _key(self, key: str) -> str:
        return self._prefix + key

    async def _commit(self, changes: Sequence[Change], unchanged: Mapping[str, bytes | None]) -> bool:
        async with self._client.pipeline(transaction=True) as pipe:
            if unchanged:
                keys = [self._key(key) for key in unchanged]
                await pipe.watch(*keys)
                if await pipe.mget(keys) != list(unchanged.values()):
                    return False
                pipe.multi()
            for change in changes:
                self._add(pipe, change)
            try:
                await pipe.execute()
            except WatchError as error:
                if isinstance(error.__context__, (ConnectionLost, TimeoutExpired)):
                    raise StoreUnavailable("It is not known whether the change was made.") from error
                return False  # EXEC reports that a value has changed
        return True

    def _add(self, pipe: Any, change: Change) -> None:
        match change:
            case SetValue(key, value, lifetime_s):
                pipe.set(self._key(key), value, px=None if lifetime_s is None else max(1, int(lifetime_s * 1000)))
            case DeleteValue(key):
                pipe.delete(self._key(key))
            case AddToIndex(index, member, score):
                pipe.zadd(self._key(index), {member: score})
            case RemoveFromIndex(index, member):
                pipe.zrem(self._key(index), member)

    async def _send(self, command: Any) -> Any:
        try:
            return await command
        except (TimeoutError, RedisError, OSError) as error:
            raise StoreUnavailable("The state of batches cannot be reached now.") from error


def check_redis(location: RedisLocation) -> str | None:
    """Return why no process will be able to use this Redis; None: it answers, or may when it is started."""
    try:
        with _blocking(location) as client:
            client.ping()
    except (AuthenticationError, ResponseError) as error:
        return f"it refuses the user or password ({str(error)[:100]})"
    except (RedisError, OSError) as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, ssl.SSLError):
            cause = cause.__cause__ or cause.__context__
        return None if cause is None else f"no TLS connection: {str(cause)[:150]}"
    return None


def newer_version(location: RedisLocation, namespace: str) -> int | None:
    """Return the version of this namespace's records if it is newer than ours, else mark them as of ours. None, too,
    where the Redis does not answer."""
    key = f"{namespace}:{_VERSION}"
    with suppress(RedisError), _blocking(location) as client:
        stored = client.get(key)
        version = int(stored) if stored is not None and stored.isdigit() else 0
        if version > RECORDS_VERSION:
            return version
        if version < RECORDS_VERSION:
            client.set(key, RECORDS_VERSION)
    return None


def is_claimed_by_other(location: RedisLocation, namespace: str, claimant: str) -> bool:
    """Return whether a cluster with another state folder runs in this namespace. A key with a recent writer is watched
    for seconds. False where the Redis does not answer."""
    key = f"{namespace}:{CLAIM}"
    with suppress(RedisError), _blocking(location) as client:
        first = latest = client.get(key)
        ends_s = time.monotonic() + WATCH_S
        while is_of_other(latest, claimant) and latest == first and time.monotonic() < ends_s:
            time.sleep(_LOOK_S)
            latest = client.get(key)
        return latest != first and is_of_other(latest, claimant)
    return False


def _blocking(location: RedisLocation) -> Any:
    return blocking_redis.Redis.from_url(location.url, **location.options())
