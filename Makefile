# Every target sets up what it needs by itself: a fresh Debian machine needs nothing but make and python3 (>= 3.10).
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.set-up

.PHONY: help setup prometheus demo check test acceptance lint proto console plugin docs rules dashboards chart bench fuzz dist images lock audit clean

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
check test acceptance: export PYTHONDONTWRITEBYTECODE =

check: lint  ## format, lint, types and unit tests, in four minutes: before every commit
	@tools/setup_grafana_schema.sh
	@echo "==> unit tests"
	@$(BIN)/python -m pytest -q -n 3 --dist worksteal tests/unit

test: setup prometheus  ## check, then each real component once, in fifteen minutes; SUITE=chart for one suite
	@tools/setup_grafana_schema.sh
	@$(BIN)/python -m tools.run_tests test $(SUITE)

acceptance: setup prometheus  ## how well and how fast: real jobs of every framework and fault, attacks, hangs, Slurm; two hours; SUITE=hangs for one suite
	@$(BIN)/python -m tools.run_tests acceptance $(SUITE)

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
	@echo "==> tables of what acceptance measured"
	@$(BIN)/python -m tools.acceptance_results --check
	@$(BIN)/python -m tests.frameworks.matrix --check
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

plugin: setup  ## build the NCCL plugin into the package, for x86_64 and aarch64
	@$(BIN)/python -m tools.nccl_plugin

docs: setup  ## regenerate docs/metrics.md from the exporters, and the tables of docs/acceptance.json
	@$(BIN)/python -m tools.generate_metrics_page
	@$(BIN)/python -m tools.acceptance_results
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
	rm -rf console/node_modules .venv .venv-frameworks .venv-hta .old-protobuf .venv-release .image-wheels dist .prometheus .slurm .helm .grafana-schema .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
