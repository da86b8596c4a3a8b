"""Roots and block hashes of requests: what may be shared, and by whom (docs/prefix-cache.md).

A request shares cached blocks with those of the same root. The root is made of the client's API key, as a digest of it,
of the `cache_salt` that the client sent, and of the form of the cached values, and it is keyed: nothing of these can be
told from it, and no client can make another's.
"""

import hashlib
from collections.abc import Sequence
from itertools import islice

from alignedserve.config.sections import PrefixCacheConfig
from alignedserve.core.request import Request
from alignedserve.messages.prefixes import BLOCK_NAME_BYTES, MAX_BLOCK_NAMES
from alignedserve.prefix_cache.block_hashes import BlockHasher, prefix_root
from alignedserve.runtime.model.served_model import ServedModel

_FORM_BYTES = 32


class PrefixHasher:
    """Maker of roots and block hashes for one cluster's requests."""

    def __init__(self, key: bytes, *, form: bytes, block_size: int, is_shared_between_keys: bool = False) -> None:
        """`key`: the cluster's; `form`: digest of the model and of the form of its cache."""
        self._key = key
        self._form = form
        self._hasher = BlockHasher(block_size)
        self._is_shared = is_shared_between_keys

    @classmethod
    def of(
        cls, served: ServedModel, config: PrefixCacheConfig, *, block_size: int, key: bytes
    ) -> "PrefixHasher | None":
        """Return the hasher of a cluster that serves this model; None: its prefix cache is off."""
        if not config.enabled:
            return None
        form = cache_form(served, block_size)
        return cls(key, form=form, block_size=block_size, is_shared_between_keys=config.shared_between_keys)

    def root(self, tenant: str, salt: str | None) -> bytes:
        """Return the root for the requests of one tenant (ApiKeys.owner) with this salt; None: they have none."""
        return prefix_root(self._key, tenant="" if self._is_shared else tenant, salt=salt or "", form=self._form)

    def block_names(self, request: Request, generated_token_ids: Sequence[int] = ()) -> bytes:
        """Return the names of the full blocks of a request's context, one after the other; of as many as are sent."""
        if not request.prefix_root:
            return b""
        token_ids = (*request.prompt_token_ids, *generated_token_ids)
        blocks = islice(self._hasher.named(request.prefix_root, token_ids), MAX_BLOCK_NAMES)
        return b"".join([block.block_hash[:BLOCK_NAME_BYTES] for block in blocks])


def cache_form(served: ServedModel, block_size: int) -> bytes:
    """Return a digest of what cached values depend on beside tokens: model, types, layout of blocks."""
    facts = (served.name, str(served.folder), served.dtype, served.quantization, served.has_random_weights)
    digest = hashlib.blake2b(served.block_layout(block_size).digest(), digest_size=_FORM_BYTES)
    digest.update(repr(facts).encode("utf-8", "surrogatepass"))
    return digest.digest()
