"""What `serve` and `up` do about the file of keys: they refuse to start with a bad one, and look at it on SIGHUP."""

from alignedserve.cli.console import counted, notes
from alignedserve.config.environment import API_KEYS_VARIABLE, api_keys
from alignedserve.config.sections import GatewayConfig
from alignedserve.core.errors import ConfigError
from alignedserve.core.plugins import load_plugin
from alignedserve.keys.file import read_keys

_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def warn_of_strangers(config: GatewayConfig) -> None:
    """Say so where others than this host reach the gateways, and need no key. Raises ConfigError."""
    if not api_keys() and not config.keys_file and config.host not in _LOOPBACK:
        notes().print(f"warning: anyone who reaches the gateways may use them; set {API_KEYS_VARIABLE}", soft_wrap=True)


def check_keys(config: GatewayConfig) -> None:
    """Raise ConfigError for a file of keys that cannot be used, clients' or an issuer's, and for issuers without the
    plugin."""
    path = config.keys_path
    try:
        if path is not None:
            read_keys(path)
    except ConfigError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise ConfigError(f"{error}; `alignedserve keys add NAME --file {path}` makes it") from error
        raise
    for issuer in config.jwt:
        load_plugin("jwt").check_file(issuer)


def show_keys(config: GatewayConfig) -> None:
    """Say how the file is, on SIGHUP: every process reads it by itself within a second."""
    path = config.keys_path
    if path is None:
        return
    try:
        notes().print(f"{path}: {counted(len(read_keys(path)), 'key')}, good within a second", soft_wrap=True)
    except ConfigError as error:
        notes().print(f"error: the keys stay as they were: {error}", soft_wrap=True, markup=False)
