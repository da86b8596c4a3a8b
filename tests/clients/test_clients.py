"""Clients of the field, each in its own environment, against a served model: what they show is the model's answer."""

import json
from pathlib import Path

import pytest

from alignedserve.runtime.model.named_models import pocket_folder
from tests.clients.environments import HERE, openai_package
from tests.clients.running import RunDriver, run_client
from tests.cluster.serving import Serving

pytestmark = [pytest.mark.clients, pytest.mark.timeout(1200)]

ANSWER = "c a t"


def test_langchain(run_python: RunDriver) -> None:
    told = run_python("langchain_chat")
    assert told["whole"] == told["streamed"] == told["batch"][0] == ANSWER
    assert told["whole_usage"] == told["streamed_usage"]
    assert told["num_pieces"] > 3
    assert told["with_stop"] == "c "


def test_litellm(run_python: RunDriver) -> None:
    told = run_python("litellm_chat")
    assert told["whole"] == told["streamed"] == ANSWER
    assert told["usage"] > 0
    assert 0 < told["text_tokens"] <= 4
    assert told["refused"] == "BadRequestError"


@pytest.mark.parametrize("version", ["1.109.1", "2.9.0", "2.54.0", "3.57.0"])
def test_openai_of_any_age_reads_streamed_calls(
    version: str, server: Serving, python_clients: Path, tmp_path: Path
) -> None:
    words = (python_clients / "python", HERE / "drivers/openai_tool_stream.py")
    printed = run_client(*words, url=server.url, cwd=tmp_path, PYTHONPATH=str(openai_package(version)))
    told = json.loads(printed)
    assert told["version"] == version
    assert len(told["whole"]) > 0
    assert told["whole"] == told["streamed"] == told["ended"]


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_openai_agents(run_python: RunDriver, api: str) -> None:
    told = run_python("openai_agents", api)
    assert told["whole"] == told["streamed"] == ANSWER
    assert told["num_events"] > 3
    assert told["tokens"] > 0


def test_langchain_tools_objects_and_embeddings(run_python: RunDriver) -> None:
    told = run_python("langchain_tools")
    assert told["call"] == ["spell", ["word"], "str"]
    assert told["answered"]
    for animal in (*told["forms"].values(), told["streamed"]):
        assert (animal["name"] in ("cat", "dog"), animal["legs"] in (2, 4)) == (True, True)
    assert told["vectors"] == [3, 256, True, False]
    assert told["anthropic"] == told["anthropic_streamed"] == ANSWER


def test_llama_index(run_python: RunDriver) -> None:
    told = run_python("llama_index_chat")
    assert told["whole"] == told["streamed"] == ANSWER
    assert (told["completed"], told["vectors"]) == (True, [3, True, False])


def test_pydantic_ai(run_python: RunDriver) -> None:
    told = run_python("pydantic_agents")
    objects = {"by_tool": ["legs", "name"], "by_schema": ["legs", "name"]}
    text = {"whole": ANSWER, "streamed": ANSWER}
    assert told == {"chat": text | objects, "messages": text | {"by_tool": ["legs", "name"]}}


def test_instructor(run_python: RunDriver) -> None:
    told = run_python("instructor_objects")
    assert told.keys() == {"tool_call", "tools_strict"}
    assert all((animal["name"] in ("cat", "dog"), animal["legs"] in (2, 4)) == (True, True) for animal in told.values())


def test_vercel_ai(run_node: RunDriver) -> None:
    told = run_node("vercel_ai")
    every = {"whole": ANSWER, "streamed": ANSWER, "object": ["legs", "name"], "result": ANSWER}
    assert told.pop("embeddings") == [2, True]
    assert told == dict.fromkeys(("responses", "chat", "compatible", "messages"), every)


def test_responses_for_node(run_node: RunDriver) -> None:
    told = run_node("openai_responses")
    assert told["whole"] == told["streamed"] == ANSWER
    assert (told["last"], told["longer"]) == ("response.completed", True)
    assert told["background"] == ["queued", "completed", ANSWER]
    assert told["gone"] == ["NotFoundError", 404]


def test_openai_for_node(run_node: RunDriver) -> None:
    told = run_node("openai_sdk")
    assert told["whole"] == told["streamed"] == ANSWER
    assert (told["requestId"], told["ignored"]) == ("of-node", "made_up")
    assert told["refused"] == ["BadRequestError", 400, "temperature"]


def test_anthropic_for_node(run_node: RunDriver) -> None:
    told = run_node("anthropic_sdk")
    assert told["whole"] == ANSWER
    assert (told["stopReason"], told["models"]) == ("end_turn", ["pocket"])
    assert (told["streamed"], told["stopSequence"]) == ("c a ", "t")
    assert told["inputTokens"] == told["counted"] > 0
    assert told["refused"][:3] == ["BadRequestError", 400, "invalid_request_error"]


def test_lm_eval(server: Serving, python_clients: Path, tmp_path: Path) -> None:
    driver = Path(__file__).parent / "drivers/lm_eval_tasks.py"
    words = (python_clients / "python", driver, pocket_folder())
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    told = json.loads(run_client(*words, url=server.url, cwd=tmp_path, **offline).splitlines()[-1])
    assert told == {"spelling": 1.0, "choosing": 1.0}


def test_guidellm(server: Serving, python_clients: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    arguments = (
        f"run --backend kind=openai_http,target={server.url} --profile kind=concurrent,streams=8 "
        f"--constraint kind=max_requests,count=64 --tokenizer kind=hf_auto,model={pocket_folder()} "
        "--data kind=synthetic_text,prompt_tokens=64,output_tokens=32 --disable-progress "
        f"--output kind=json,path={report}"
    )
    run_client(python_clients / "guidellm", *arguments.split(), url=server.url, cwd=tmp_path, HF_HUB_OFFLINE="1")
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"], totals["incomplete"]) == (64, 0, 0)


def test_aiperf(server: Serving, python_clients: Path, tmp_path: Path) -> None:
    arguments = (
        f"profile --model pocket --url {server.url} --endpoint-type chat --streaming --concurrency 4 "
        f"--request-count 16 --tokenizer {pocket_folder()} --synthetic-input-tokens-mean 30 "
        f"--output-tokens-mean 16 --ui none --artifact-dir {tmp_path}"
    )
    run_client(python_clients / "aiperf", *arguments.split(), url=server.url, cwd=tmp_path)
    (report,) = tmp_path.rglob("profile_export_aiperf.json")
    found = json.loads(report.read_text())
    assert found["request_count"]["avg"] == 16
    assert found.get("error_request_count", {"avg": 0})["avg"] == 0
