"""The only reader of environment variables: addresses, secrets, folders of this machine, how its threads wait."""

import os
import re
from pathlib import Path
from urllib.parse import unquote

from alignedserve.core.errors import ConfigError

API_KEYS_VARIABLE = "ALIGNEDSERVE_API_KEYS"
RUN_DIR_VARIABLE = "ALIGNEDSERVE_RUN_DIR"
CLIENT_KEY_VARIABLE = "ALIGNEDSERVE_API_KEY"
UPSTREAM_KEY_VARIABLE = "ALIGNEDSERVE_UPSTREAM_KEY"
AUTHORITY_VARIABLE = "ALIGNEDSERVE_CA"
LOG_FORMAT_VARIABLE = "ALIGNEDSERVE_LOG_FORMAT"
RAY_ADDRESS_VARIABLE = "RAY_ADDRESS"
STATE_DIR_VARIABLE = "ALIGNEDSERVE_STATE_DIR"
REDIS_URL_VARIABLE = "ALIGNEDSERVE_REDIS_URL"
REDIS_CA_VARIABLE = "ALIGNEDSERVE_REDIS_CA"
DATA_VARIABLE = "ALIGNEDSERVE_DATA"
NODE_LOSSES_VARIABLE = "ALIGNEDSERVE_NODE_LOSSES"
SPIN_VARIABLE = "GOMP_SPINCOUNT"
WAIT_POLICY_VARIABLE = "OMP_WAIT_POLICY"
TRACE_HEADERS_VARIABLE = "OTEL_EXPORTER_OTLP_HEADERS"
_AWS_VARIABLES = (
    *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"),
    *("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL"),
)

_HEADER_NAME = re.compile(r"[a-z0-9!#$%&'*+.^_`|~-]{1,100}", re.ASCII)

# About ten microseconds: longer than from one product to the next, shorter than anyone else notices.
SHORT_SPINS = "1000"


def api_keys() -> tuple[str, ...]:
    """Return the keys that clients must present, comma-separated in ALIGNEDSERVE_API_KEYS. None: the gateway is open.
    Raises ConfigError where there is something in it and no key, as in a secret gone wrong."""
    text = os.environ.get(API_KEYS_VARIABLE, "")
    keys = tuple(key.strip() for key in text.split(",") if key.strip())
    if text and not keys:
        raise ConfigError(f"{API_KEYS_VARIABLE} is set and holds no key; unset it where anyone may call")
    return keys


def client_api_key(variable: str = CLIENT_KEY_VARIABLE) -> str | None:
    """Return the key that our own client commands present, from another variable where the user names one."""
    return os.environ.get(variable) or None


def authority_path() -> Path | None:
    """Return the file of the authorities that our own client commands believe beside the system's, in PEM."""
    named = os.environ.get(AUTHORITY_VARIABLE)
    return Path(named) if named else None


def log_format() -> str:
    """Return how the processes of a cluster that starts here write their logs: text or json, from
    ALIGNEDSERVE_LOG_FORMAT."""
    return os.environ.get(LOG_FORMAT_VARIABLE) or "text"


def set_log_format(name: str) -> None:
    """Set `log_format` for this process and its children."""
    os.environ[LOG_FORMAT_VARIABLE] = name


def ray_address() -> str | None:
    """Return the Ray cluster to join, in Ray's own RAY_ADDRESS; None: start one on this machine."""
    return os.environ.get(RAY_ADDRESS_VARIABLE) or None


def node_losses() -> int:
    """Return how often in a row Ray was lost before this process was started in the place of another. Set by `serve`
    for its successor alone."""
    noted = os.environ.get(NODE_LOSSES_VARIABLE, "")
    return int(noted) if noted.isascii() and noted.isdigit() and len(noted) < 4 else 0


def data_dir() -> Path | None:
    """Return the folder of public traces and length data that do not ship with us, named by ALIGNEDSERVE_DATA."""
    named = os.environ.get(DATA_VARIABLE)
    return Path(named) if named else None


def run_root() -> Path:
    """Return the absolute folder for sockets and logs of running clusters; private to the user."""
    named = os.environ.get(RUN_DIR_VARIABLE)
    if named:
        return Path(named).absolute()  # Ray takes no other
    runtime_dir = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime_dir) / "alignedserve" if runtime_dir else Path(f"/tmp/alignedserve-{os.getuid()}")  # noqa: S108


def state_root() -> Path:
    """Return the absolute folder for what outlives restarts: uploaded files, batches and their results; private to the
    user. Raises ConfigError where nothing says where it is."""
    named = os.environ.get(STATE_DIR_VARIABLE)
    if named:
        return Path(named).absolute()
    state_home = os.environ.get("XDG_STATE_HOME")
    try:
        return (Path(state_home) if state_home else Path.home() / ".local" / "state") / "alignedserve"
    except RuntimeError as error:  # as in a container whose user has no entry in its list of users
        raise ConfigError(f"this user has no home folder; set {STATE_DIR_VARIABLE}, or HOME") from error


def redis_url() -> str | None:
    """Return the Redis that keeps the state of batches (it may hold a password); None: a file does."""
    return os.environ.get(REDIS_URL_VARIABLE) or None


def redis_authority_path() -> Path | None:
    """Return the file that ALIGNEDSERVE_REDIS_CA names; None: it names none."""
    named = os.environ.get(REDIS_CA_VARIABLE)
    return Path(named) if named else None


def redis_authority() -> str | None:
    """Return the certificates (PEM) that sign the Redis' own, from the file named by ALIGNEDSERVE_REDIS_CA. None: this
    system's trusted certificates. Raises ConfigError when the file cannot be read."""
    named = redis_authority_path()
    if named is None:
        return None
    try:
        return named.read_text()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{REDIS_CA_VARIABLE} names {named}, which cannot be read") from error


def object_store_settings() -> dict[str, str]:
    """Return what the usual AWS_ variables say of an object store: credentials, region, endpoint. Without any, each
    host asks its own environment and the cloud's metadata service."""
    return {name: os.environ[name] for name in _AWS_VARIABLES if os.environ.get(name)}


def trace_headers() -> tuple[tuple[str, str], ...]:
    """Return the headers (secrets, perhaps) that a collector of traces wants, from OTEL_EXPORTER_OTLP_HEADERS. They are
    written NAME=VALUE,NAME=VALUE with percent signs before hexadecimal codes, as OpenTelemetry says. Raises ConfigError
    when they are not."""
    headers = []
    for part in filter(None, map(str.strip, os.environ.get(TRACE_HEADERS_VARIABLE, "").split(","))):
        name, separator, value = part.partition("=")
        header = name.strip().lower(), unquote(value.strip())
        if not separator or not _HEADER_NAME.fullmatch(header[0]) or not header[1].isprintable():
            raise ConfigError(f"{TRACE_HEADERS_VARIABLE} must be NAME=VALUE,NAME=VALUE")
        headers.append(header)
    return tuple(headers)


def limit_thread_spinning() -> None:
    """Let threads that wait for each other spin for some microseconds and then sleep, in this process and its children.
    Call it before PyTorch is loaded. A setting of the environment stays as it is. By default they spin for
    milliseconds. Where another process has one of the cores, as gateway and router do on a small machine, each of some
    hundred waits per pass then lasts until the kernel takes the spinner's core away. Not spinning at all costs a system
    call per wait: 2.18 s where it is 1.86 s (64 prompts of 32 tokens, 64 answered each, bfloat16, the 125M shape, two
    cores)."""
    if WAIT_POLICY_VARIABLE not in os.environ:
        os.environ.setdefault(SPIN_VARIABLE, SHORT_SPINS)


def thread_waiting() -> str:
    if WAIT_POLICY_VARIABLE in os.environ:
        return f"as {WAIT_POLICY_VARIABLE}={os.environ[WAIT_POLICY_VARIABLE]} says"
    spins = os.environ.get(SPIN_VARIABLE)
    if spins is None:
        return "spinning"
    return "asleep" if spins == "0" else f"after {spins} spins asleep"
