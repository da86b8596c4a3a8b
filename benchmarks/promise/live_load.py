"""The traffic of the live table of policies, and the servers that it is sent to."""

from benchmarks.measuring.server import settings_of

CHAT, DOCUMENTS = "rt", "be"
LOADS = {"light": 1.0, "heavy": 2.0}  # chats per second
STEADY_S = 15.0  # of every run, before anything counts
BEST_EFFORT = "be: prompt=uniform(512,1024), output=uniform(32,128), outstanding=24, tier=flex"
_REAL_TIME = "rt: prompt=lognormal(100,300), output=lognormal(60,120), rate={rate}, ttft=0.4, tpot=0.2"
# Filled before anything counts: a virtual machine gets most of its memory at the first write, which takes 2.4 s for a
# GiB, and prompts that fill a cache for the first time took 1.3 times as long.
_CACHE = "decode.kv_cache_bytes=1536MiB"
# What a policy has here beside its own: the paper's form of it.
_SETTINGS_OF = {"alise": ("decode.swap_format=int8",)}


def real_time(load: str) -> str:
    """Return the line of this load's chat."""
    return _REAL_TIME.format(rate=LOADS[load])


def settings(policy: str, topology: str) -> list[str]:
    """Return the settings of a server with this policy, beside its name."""
    return [*settings_of(topology), _CACHE, *_SETTINGS_OF.get(policy, ())]
