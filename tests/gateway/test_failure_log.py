"""Requests that fail are told in lines that whoever reaches the port cannot multiply."""

import pytest

from alignedserve.api.errors import NotFound, Unauthorized
from alignedserve.gateway.logs import MAX_LINES, PERIOD_S, FailureLog
from tests.gateway.support import gateway


async def test_a_burst_of_refused_requests_writes_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    async with gateway(api_keys=("right",)) as served:
        answers = [await served.client.get("/v1/models") for _ in range(MAX_LINES + 5)]
        metrics = (await served.client.get("/metrics", headers={"authorization": "Bearer right"})).text
    assert {answer.status_code for answer in answers} == {401}
    assert f'alignedserve_rejected_total{{reason="invalid_api_key"}} {MAX_LINES + 5}.0' in metrics
    assert caplog.text.count("failed with 401") == MAX_LINES


def test_what_had_no_line_is_told_by_its_number_and_other_statuses_have_theirs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = 1000.0
    log = FailureLog(clock=lambda: now)
    for _ in range(MAX_LINES + 7):
        log.note("r", "/v1/models", Unauthorized("No key."))
    log.note("of-another", "/v1/models", NotFound("No model."))
    assert caplog.text.count("failed with 401") == MAX_LINES
    assert "request of-another to '/v1/models' failed with 404: 'No model.'" in caplog.text
    now += PERIOD_S
    log.note("last", "/v1/models", Unauthorized("No key."))
    lines = [record.getMessage() for record in caplog.records[-2:]]
    assert lines[0] == "7 more requests failed with 401, without lines here"
    assert lines[1].startswith("request last ")
