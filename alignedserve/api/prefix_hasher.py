"""Roots and block hashes of requests: what may be shared, and by whom (docs/prefix-cache.md).

A request shares cached blocks with those of the same root. The root is made of the client's API key, as a digest of it,
of the `cache_salt` that the client sent, and of the form of the cached values, and it is keyed: nothing of these can be
told from it, and no client can make another's."""

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from itertools import islice

from alignedserve.core.request import Request
from alignedserve.messages.prefixes import BLOCK_NAME_BYTES, MAX_BLOCK_NAMES
from alignedserve.prefix_cache.block_hashes import BlockHasher, prefix_root
from alignedserve.runtime.model.served_model import ServedDeployment, ServedModel

_FORM_BYTES = 32
_NUM_KEPT = 16


class PrefixHasher:
    """Maker of roots and block hashes for one cluster's requests."""

    def __init__(self, key: bytes, *, form: bytes, block_size: int, is_shared_between_keys: bool = False) -> None:
        """`key`: the cluster's; `form`: digest of the model and of the form of its cache."""
        self._key = key
        self._form = form
        self._hasher = BlockHasher(block_size)
        self._is_shared = is_shared_between_keys
        # Of a prompt, whose blocks are named beside the loop before it is sent, and once for all of its choices.
        self.prompt_names = lru_cache(_NUM_KEPT)(self._names)

    @classmethod
    def of(cls, deployed: ServedDeployment, *, key: bytes) -> "PrefixHasher | None":
        """Return the hasher of a deployment, with the cluster's key. None: its prefix cache is off, or it is an
        encoder, whose tokens depend on later tokens."""
        config, block_size = deployed.prefix_cache, deployed.block_size
        if not config.enabled or deployed.served.encoder is not None:
            return None
        form = cache_form(deployed.served, block_size, deployed.deployment_id)
        return cls(key, form=form, block_size=block_size, is_shared_between_keys=config.shared_between_keys)

    def root(self, tenant: str, salt: str | None, adapter_digest: bytes = b"") -> bytes:
        """Return the root for the requests of one tenant (KeyEntry.owner) with this salt and adapter.

        `salt`: None: there is none; `adapter_digest`: empty likewise."""
        form = self._form + adapter_digest
        return prefix_root(self._key, tenant="" if self._is_shared else tenant, salt=salt or "", form=form)

    def block_names(self, request: Request, generated_token_ids: Sequence[int] = ()) -> bytes:
        """Return the names of the full blocks of a request's context, one after the other; of as many as are sent."""
        if not request.prefix_root:
            return b""
        if not generated_token_ids:
            return self.prompt_names(request.prefix_root, request.cache_keys)
        return self._names(request.prefix_root, (*request.cache_keys, *generated_token_ids))

    def _names(self, root: bytes, token_ids: tuple[int, ...]) -> bytes:
        blocks = islice(self._hasher.named(root, token_ids), MAX_BLOCK_NAMES)
        return b"".join([block.block_hash[:BLOCK_NAME_BYTES] for block in blocks])


def cache_form(served: ServedModel, block_size: int, deployment_id: str = "") -> bytes:
    """Return a digest of what cached values depend on beside tokens: model, types, layout of blocks. Two deployments
    share none: the files of a model may have changed between them."""
    names = (served.name, str(served.folder), deployment_id)
    facts = (*names, served.dtype, served.quantization, served.has_random_weights)
    digest = hashlib.blake2b(served.block_layout(block_size).digest(), digest_size=_FORM_BYTES)
    digest.update(repr(facts).encode("utf-8", "surrogatepass"))
    return digest.digest()
