"""Ray's head keeps its state in the Redis that is named, by what its commands take."""

import subprocess
from pathlib import Path

import pytest

from alignedserve.cluster.hosts.ray_directory import RayStorage, ray_storage
from alignedserve.core.errors import ConfigError
from tests.support.marks import each

WAITS = {"RAY_gcs_rpc_server_reconnect_timeout_s": "600"}


def test_without_a_redis_nothing_is_added() -> None:
    assert ray_storage(None, "ray") == RayStorage({}, ())


@pytest.mark.parametrize(
    ("url", "address", "user", "password"),
    [
        ("redis://10.0.0.9", "10.0.0.9:6379", "", ""),
        ("redis://:p%40ss@10.0.0.9:7000/0", "10.0.0.9:7000", "", "p@ss"),
        ("rediss://me:secret@state.example:7001", "rediss://state.example:7001", "me", "secret"),
        ("redis://[fd00::1]:7000", "[fd00::1]:7000", "", ""),
    ],
)
def test_address_and_password_are_those_of_the_url(url: str, address: str, user: str, password: str) -> None:
    storage = ray_storage(url, "one")
    assert storage.environment == WAITS | {"RAY_REDIS_ADDRESS": address, "RAY_external_storage_namespace": "one"}
    assert storage.options == (f"--redis-username={user}", f"--redis-password={password}")


def test_ray_trusts_those_that_the_gateways_trust() -> None:
    found = [ray_storage(f"{scheme}://host", "one", Path("/etc/ca.pem")).environment for scheme in ("rediss", "redis")]
    assert [environment.get("RAY_REDIS_CA_CERT") for environment in found] == ["/etc/ca.pem", None]


@each(
    ("url", "said"),
    [
        ("unix:///run/redis.sock", "must be redis://HOST:PORT"),
        ("redis://", "must be redis://HOST:PORT"),
        ("redis://host:seven", "no port that can be one"),
        ("redis://host:99999", "no port that can be one"),
        ("redis://host/2", "database 0"),
        ("https://host", "must be redis://HOST:PORT"),
    ],
)
def test_what_ray_cannot_use_is_refused_without_the_password(url: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as raised:
        ray_storage(url.replace("://", "://:hidden@", 1), "one")
    assert "hidden" not in str(raised.value)


@pytest.mark.parametrize("password", ["plain", "with space", "$(touch x) `y` 'quoted' \"twice\""])
def test_a_shell_reads_what_was_meant(password: str) -> None:
    environment = {"RAY_REDIS_ADDRESS": "host:1", "RAY_external_storage_namespace": "a b"}
    line = RayStorage(environment, (f"--redis-password={password}", "two words")).shell()
    script = 'eval "$1"; printf "%s|" "$RAY_REDIS_ADDRESS" "$RAY_external_storage_namespace" "$@"'
    done = subprocess.run(["bash", "-c", script, "bash", line], capture_output=True, text=True, check=True)
    assert done.stdout == f"host:1|a b|--redis-password={password}|two words|"


def test_a_shell_without_a_redis_has_no_arguments() -> None:
    done = subprocess.run(
        ["bash", "-c", f'eval "{RayStorage({}, ()).shell()}"; echo $#', "bash", "one"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "0\n"
