"""The traffic of the live table of policies, and the servers that it is sent to."""

from benchmarks.measuring.server import CACHE_FILLED_SOON, CHAT_FIELDS, settings_of

CHAT, DOCUMENTS = "rt", "be"
LOADS = {"light": 1.0, "heavy": 2.0}  # chats per second
STEADY_S = 15.0  # of every run, before anything counts
SEED = 0  # of arrivals and lengths, live and simulated
BEST_EFFORT = "be: prompt=uniform(512,1024), output=uniform(32,128), outstanding=24, tier=flex"
# What a policy has here beside its own: the paper's form of it.
_SETTINGS_OF = {"alise": ("decode.swap_format=int8",)}


def real_time(load: str) -> str:
    return f"{CHAT}: {CHAT_FIELDS.format(rate=LOADS[load])}"


def settings(policy: str, topology: str) -> list[str]:
    return [*settings_of(topology), CACHE_FILLED_SOON, *_SETTINGS_OF.get(policy, ())]
