"""Fields that no API has: ignored by name, or refused where the gateway is strict; and values of a wrong kind."""

from typing import Any

from tests.gateway.support import error_of, gateway
from tests.support.marks import each

HEADER = "x-alignedserve-ignored-fields"


@each(
    ("fields", "named"),
    [
        ({"nonsense": 1}, "nonsense"),
        ({"max_token": 1, "temprature": 0}, "max_token, temprature"),
        ({"messages": [{"role": "user", "content": "a", "mood": 1}] * 3}, "messages[].mood"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "b": 1}]}]},
            "messages[].content[].b",
        ),
        ({"stream": True, "stream_options": {"include_all": True}}, "stream_options.include_all"),
        ({"a b\r\nx-evil: 1": 1}, "(a name that is not an identifier)"),
        ({"naïve": 1}, "na?ve"),
        ({"n" * 200: 1}, "n" * 64),
        ({"nonsense": None}, None),
    ],
)
async def test_unknown_fields_are_ignored_by_name(fields: dict[str, Any], named: str | None) -> None:
    async with gateway() as served:
        response = await served.chat(**fields)
    assert response.status_code == 200
    assert response.headers.get(HEADER) == named


async def test_only_so_many_are_named() -> None:
    fields: dict[str, Any] = {f"field_{number}": 1 for number in range(900)}
    async with gateway() as served:
        named = (await served.complete(**fields)).headers[HEADER]
    assert named.startswith("field_0, field_1, ")
    assert named.endswith("field_31, ...")


async def test_a_request_without_unknown_fields_has_no_header() -> None:
    async with gateway() as served:
        assert HEADER not in (await served.chat()).headers
        error = await served.chat(nonsense=1, n=99)
    assert error.headers[HEADER] == "nonsense"


async def test_a_strict_gateway_refuses_them() -> None:
    async with gateway(strict=True) as served:
        error = error_of(await served.chat(nonsense=1), 400)
        assert (error["code"], error["param"]) == ("unknown_parameter", "nonsense")
        message = {"role": "user", "content": "a", "mood": 1}
        error = error_of(await served.chat(messages=[message]), 400)
        assert (error["code"], error["param"]) == ("unknown_parameter", "messages[0].mood")
        assert error_of(await served.client.post("/tokenize", json={"prompt": "a", "b": 1}), 400)["param"] == "b"


async def test_no_unknown_field_hides_an_unsupported_one() -> None:
    async with gateway() as served:
        assert error_of(await served.chat(nonsense=1, audio={"voice": "alloy"}), 400)["param"] == "audio"


@each("own", ["a", "req_01J-x.y:z", "A" * 128])
async def test_a_clients_request_id_is_kept(own: str) -> None:
    async with gateway() as served:
        first, second = [await served.chat(headers={"x-request-id": own}) for _ in range(2)]
    assert first.headers.get_list("x-request-id") == second.headers.get_list("x-request-id") == [own]
    assert first.json()["id"] != second.json()["id"]  # inside, every request has an id of its own


@each("odd", ["", "A" * 129, "a b", "a\tb", "é", '"'])
async def test_an_odd_request_id_is_replaced(odd: str) -> None:
    async with gateway() as served:
        headers = {"x-request-id": odd.encode("latin-1")}
        response = await served.chat(headers=headers)  # type: ignore[arg-type]
    assert len(response.headers["x-request-id"]) == 32


@each(
    ("field", "value", "param"),
    [
        ("messages", ["hello"], "messages[0]"),
        ("stream_options", True, "stream_options"),
        ("tools", ["get_weather"], "tools[0]"),
    ],
)
async def test_what_must_be_an_object_is_told_in_words_of_json(field: str, value: Any, param: str) -> None:
    async with gateway() as served:
        error = error_of(await served.chat(stream=True, **{field: value}), 400)
    assert error["message"] == f"Invalid value for {param}: Input should be an object."
