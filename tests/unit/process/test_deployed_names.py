"""Names of processes in a cluster of several deployments."""

from pathlib import Path

from alignedserve.messages.handshake import Role
from alignedserve.process.addresses import FIRST_DEPLOYMENT, AddressBook, deployed_name
from alignedserve.process.process_spec import ProcessSpec


def spec(deployment_id: str) -> ProcessSpec:
    book = AddressBook(Path("/run/x"))
    return ProcessSpec(
        role=Role.DECODE_WORKER,
        name=deployed_name("decode-0", deployment_id),
        cluster_id="x",
        secret=bytes(32),
        peer_timeout_s=1.0,
        addresses=book,
        log_folder=Path("/run/x/logs"),
        deployment_id=deployment_id,
    )


def test_the_first_deployment_has_plain_names() -> None:
    assert (spec(FIRST_DEPLOYMENT).name, spec(FIRST_DEPLOYMENT).router_name) == ("decode-0", "router")


def test_processes_of_another_deployment_have_names_and_sockets_of_their_own() -> None:
    other = spec("2")
    assert (other.name, other.router_name) == ("decode-0.2", "router.2")
    assert other.addresses.of(other.router_name) == "unix:/run/x/router.2.sock"
