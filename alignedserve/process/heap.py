"""The interpreter's garbage collection in a process that makes many objects for every request."""

import gc

_YOUNG = 20_000  # objects more than there were before, at which the young ones are looked at; the interpreter's is 700
_OLDER = 20  # such looks before those that have survived are looked at again


def settle_heap() -> None:
    """Look at nothing that exists now in any later collection, and collect less often. To be called after the start.

    Without this a tenth of the router's time goes into looking at requests that are still queued, and at modules. A
    worker stops for 130 ms, a gateway for 80, whenever the objects of its start are looked at, a quarter of a million
    of torch, Ray and others. They are not looked at here either: that would delay the start, and loading a model leaves
    no cycles behind.
    """
    gc.collect(1)
    gc.freeze()
    gc.set_threshold(_YOUNG, _OLDER, _OLDER)
