"""The workflow of a release is one by GitHub's schema, pinned, with few rights, and about this checkout.

It has not run. `github_workflow_schema.json.gz` is that of schemastore.org (Apache License 2.0), as the package
check-jsonschema 0.39.0 has it.
"""

import gzip
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator  # type: ignore[import-untyped]

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / ".github/workflows/release.yml").read_text()
# YAML 1.1 reads the key `on` as true.
WORKFLOW: dict[str, Any] = {"on" if name is True else name: value for name, value in yaml.safe_load(TEXT).items()}
STEPS: list[dict[str, Any]] = [step for job in WORKFLOW["jobs"].values() for step in job["steps"]]


@pytest.fixture(scope="module")
def schema() -> Draft7Validator:
    packed = Path(__file__).with_name("github_workflow_schema.json.gz").read_bytes()
    return Draft7Validator(json.loads(gzip.decompress(packed)))


def test_it_is_a_workflow_by_githubs_schema(schema: Draft7Validator) -> None:
    assert [f"{error.json_path}: {error.message}" for error in schema.iter_errors(WORKFLOW)] == []
    assert not schema.is_valid(WORKFLOW | {"jobs": {"wheels": {"steps": [{"runs": "true"}]}}})


def test_every_action_is_pinned() -> None:
    used = [step["uses"] for step in STEPS if "uses" in step]
    assert [one for one in used if not re.fullmatch(r"[\w-]+/[\w-]+@(v\d+\.\d+\.\d+|[0-9a-f]{40})", one)] == []


def test_no_job_has_rights_by_default_and_each_ends() -> None:
    assert WORKFLOW["permissions"] == {}
    for job in WORKFLOW["jobs"].values():
        assert job["permissions"]
        assert job["timeout-minutes"] <= 120
    assert [name for name, job in WORKFLOW["jobs"].items() if job["permissions"].get("contents") == "write"] == [
        "draft"
    ]


def test_commands_can_be_read_and_have_nothing_put_into_them() -> None:
    for command in [step["run"] for step in STEPS if "run" in step]:
        assert "${{" not in command  # values come by the environment: a tag's name is no part of a command
        read = subprocess.run(["bash", "-n"], input=command, capture_output=True, text=True, check=False)
        assert read.stderr == ""


def test_tag_package_and_chart_are_compared_where_their_versions_are() -> None:
    (command,) = [step["run"] for step in WORKFLOW["jobs"]["versions"]["steps"] if "run" in step]
    subprocess.run(["bash", "-ec", command], cwd=ROOT, env={"TAG": "v0.1.0", "PATH": "/usr/bin:/bin"}, check=True)
    with pytest.raises(subprocess.CalledProcessError):
        subprocess.run(["bash", "-ec", command], cwd=ROOT, env={"TAG": "v9.9.9", "PATH": "/usr/bin:/bin"}, check=True)


def test_the_images_arguments_and_variants_are_the_dockerfiles() -> None:
    image = WORKFLOW["jobs"]["image"]
    (build,) = [step["with"] for step in image["steps"] if step.get("id") == "build"]
    dockerfile = (ROOT / "Dockerfile").read_text()
    named = [line.partition("=")[0] for line in build["build-args"].splitlines()]
    assert [name for name in named if f"ARG {name}=" not in dockerfile] == []
    assert [one for one in image["strategy"]["matrix"]["variant"] if f"{one})" not in dockerfile] == []
    assert (build["sbom"], build["provenance"]) == (True, "mode=max")
