# Every target sets up what it needs by itself: a fresh Debian machine needs nothing but make and python3 (>= 3.10).
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.set-up

.PHONY: help setup prometheus demo check test frameworks captures hangs slurm kube ship lint proto console docs rules dashboards chart bench fuzz dist images lock audit clean

help:  ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(STAMP)  ## make .venv with everything for development

$(STAMP): pyproject.toml constraints.txt tools/setup.sh
	@PYTHON="$(PYTHON)" tools/setup.sh
	@touch $(STAMP)

prometheus:  ## Prometheus, Alertmanager and their tools in .prometheus, for tests (nothing is installed)
	@tools/setup_prometheus.sh

demo: setup  ## a real 4-rank job with a slow rank, and Rankscope finding it
	@$(BIN)/rankscope demo

# Rewritten test modules are cached where the environment asks Python to write no bytecode: ten seconds per process.
check test: export PYTHONDONTWRITEBYTECODE =

check: lint  ## format, lint, types and unit tests, in about two minutes: before every commit
	@tools/setup_grafana_schema.sh
	@echo "==> unit tests"
	@$(BIN)/python -m pytest -q -n 3 --dist worksteal tests/unit

test: setup prometheus  ## everything: lint and all test suites, in about forty minutes
	@tools/setup_grafana_schema.sh
	@$(BIN)/python -m tools.run_tests

frameworks: setup  ## real jobs of every framework, each with every fault, in an environment of their own (.venv-frameworks, 1.2 GB); takes an hour
	@tools/setup_frameworks.sh
	@$(BIN)/python -m tools.awake_cores $(BIN)/python -m pytest -q tests/frameworks

captures: setup  ## captures of real jobs in namespaces of their own, and the demo's faults by the job's own numbers; needs root, takes eight minutes
	@$(BIN)/python -m tools.awake_cores $(BIN)/python -m pytest -q tests/captures

hangs: setup  ## real jobs that hang, each for one reason, and jobs that only take long; takes four minutes
	@$(BIN)/python -m tools.awake_cores $(BIN)/python -m pytest -q tests/hangs tests/integration/test_hangs.py

slurm: setup  ## a training job on a real Slurm of two nodes (unpacked into .slurm, nothing is installed); needs root, takes two minutes
	@tools/setup_slurm.sh
	@$(BIN)/python -m tools.awake_cores $(BIN)/python -m pytest -q tests/slurm

kube: setup  ## the operator against a real API server (built once, six minutes); needs root, takes eight minutes
	@tools/setup_kube.sh
	@$(BIN)/python -m pytest -q tests/kube

ship: setup  ## the chart with a real helm on a real API server; takes three minutes
	@tools/setup_kube.sh
	@tools/setup_helm.sh
	@$(BIN)/python -m pytest -q tests/ship

lint: setup  ## ruff, mypy --strict, the layer contract, fresh generated files
	@echo "==> ruff"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@echo "==> mypy --strict"
	@$(BIN)/mypy
	@echo "==> layer contract"
	@$(BIN)/lint-imports
	@echo "==> generated protobuf code"
	@$(BIN)/python tools/generate_protos.py --check
	@echo "==> generated page of metrics"
	@$(BIN)/python -m tools.generate_metrics_page --check
	@echo "==> thresholds in the rules and docs"
	@$(BIN)/python -m tools.generate_rules --check
	@echo "==> generated dashboards"
	@$(BIN)/python -m deploy.grafana.dashboards --check
	@echo "==> generated files of the chart"
	@$(BIN)/python -m tools.generate_chart_files --check
	@echo "==> the console's types and built pages"
	@$(BIN)/python -m tools.generate_console_types --check
	@tools/build_console.sh --check

proto: setup  ## regenerate the Python code of proto/
	@$(BIN)/python tools/generate_protos.py

console: setup  ## regenerate the types of console/ from the API, and build its pages into the package
	@$(BIN)/python -m tools.generate_console_types
	@tools/build_console.sh

docs: setup  ## regenerate docs/metrics.md from the exporters and the table of docs/frameworks.md
	@$(BIN)/python -m tools.generate_metrics_page
	@$(BIN)/python -m tests.frameworks.matrix

dashboards: setup  ## regenerate deploy/grafana/json
	@$(BIN)/python -m deploy.grafana.dashboards

rules: setup  ## write the thresholds into rules/ and docs/ from analysis/rankscope/analysis/verdicts/thresholds.py
	@$(BIN)/python -m tools.generate_rules

chart: setup  ## regenerate the chart's README and what it takes from elsewhere (kinds, webhooks, rules, dashboards)
	@$(BIN)/python -m tools.generate_chart_files

bench: setup prometheus  ## measure what it costs; prints a table
	@$(BIN)/python -m tools.awake_cores $(BIN)/python -m benchmarks

fuzz: setup  ## ten minutes of hostile input for every parser; FUZZ_SECONDS=60 for less
	@$(BIN)/python -m tests.fuzz --seconds $(or $(FUZZ_SECONDS),600) --state .fuzz-state

dist:  ## wheel and source archive, built with locked tools
	@tools/setup_release.sh
	@rm -rf dist && .venv-release/bin/uv build --no-config --build-constraints deploy/docker/build.lock --require-hashes

images:  ## build the container images for both platforms (needs docker; deploy/docker/README.md)
	@VERSION=$$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml) REVISION=$$(git rev-parse HEAD) \
	    SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) docker buildx bake -f deploy/docker/bake.hcl $(BAKE)

lock: setup  ## regenerate deploy/docker/*.lock from pyproject.toml and constraints.txt
	@tools/setup_release.sh
	@$(BIN)/python -m tools.lock_images

audit: setup  ## hold the images' locks against known vulnerabilities; needs a network
	@tools/setup_release.sh
	@$(BIN)/python -m tools.audit_dependencies

clean:  ## remove the virtual environment and caches
	rm -rf console/node_modules .venv .venv-frameworks .venv-hta .venv-release .image-wheels dist .prometheus .slurm .helm .grafana-schema .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
