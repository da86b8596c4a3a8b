"""The course of a line of a batch, for the key that made the batch."""

from alignedserve.batch_worker.lines import ClusterLineRunner
from alignedserve.batches.interfaces import LineRequest
from alignedserve.batches.records import Endpoint
from tests.gateway.support import error_of, gateway
from tests.support.marks import each

LINE_ID = "batch_req_64a4cd267c3a7822aa944f58000000"


@each("wanted", [LINE_ID, "64a4cd267c3a7822aa944f58000000-91b8", "cmpl-64a4cd267c3a7822aa944f58000000-91b8"])
async def test_a_line_is_explained_by_its_id_and_by_that_of_its_response(wanted: str) -> None:
    async with gateway(api_keys=("ours", "theirs")) as served:
        owner = served.services.keys.ring.owners[0]
        line = LineRequest(
            Endpoint.COMPLETION,
            "64a4cd267c3a7822aa944f58000000-91b8",
            {"model": "tiny", "prompt": "hello"},
            owner,
            line_id=LINE_ID,
        )
        assert (await ClusterLineRunner(served.services).run(line)).status_code == 200
        path = f"/v1/alignedserve/requests/{wanted}"
        shown = await served.client.get(path, headers={"authorization": "Bearer ours"})
        hidden = await served.client.get(path, headers={"authorization": "Bearer theirs"})
    assert shown.json()["service_tier"] == "flex"
    assert shown.json()["state"] == "ended"
    error_of(hidden, 404)
