"""These tests run in an environment of their own, with vLLM: `make test-vllm`. Elsewhere none is collected."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("vllm") else ["*.py"]
