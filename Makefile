# neptrio: `make run` serves the example repository, `make test` proves it works.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
CEXT := $(shell find cext -name '*.p[yx][xd]' -o -name '*.[ch]') setup.py pyproject.toml

.PHONY: help help-all build run check test test-all test-console test-clients test-frontends test-sanitized fuzz test-versions test-ray test-backends test-deploy test-image mutants test-gpu gpu-wheels bench-gpu soak soak-many lint format lock proto bench bench-open bench-frontends bench-scale bench-many bench-neighbours bench-start bench-perf-analyzer bench-readme bench-peers bench-instructions clean wheel wheel-test wheels docs release stubs

# what most people need, in the order in which they need it
FIRST := run check test test-all lint format build bench wheel clean

help: ## List the ten targets that most people need
	@for target in $(FIRST); do $(MAKE) -s help-all | grep "^$$target "; done
	@echo; echo "All others: make help-all, and CONTRIBUTING.md"

help-all: ## List every target in a sentence
	@grep -hE '^[a-z][a-z-]*:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 20

# what running needs, and what testing needs beside it: `make run` on a fresh clone installs the first only
build: $(VENV)/.built-test ## Create the environment, install pinned dependencies and build the Cython modules

$(VENV)/.system:
	@$(PYTHON) -c 'import sys; sys.exit("neptrio needs Python >= 3.11, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	@test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	@sh tools/system_libraries.sh
	@touch $@

# packages are those of requirements/ (make lock), by their hashes; LOCK=no: the newest that pyproject.toml allows
$(VENV)/.deps: $(VENV)/.system pyproject.toml requirements/run.txt
	@$(BIN)/python tools/install.py run examples
	@touch $@

$(VENV)/.deps-test: $(VENV)/.deps requirements/test.txt
	@$(BIN)/python tools/install.py test
	@touch $@

# not every platform has a wheel of the fuzzer: tools/fuzz.py says then what is not run
$(VENV)/.deps-fuzz: $(VENV)/.built-test pyproject.toml
	@-$(BIN)/python tools/install.py fuzz
	@touch $@

$(VENV)/.built: $(VENV)/.deps $(CEXT)
	@$(BIN)/pip install -q --disable-pip-version-check --no-build-isolation --no-deps -e .
	@touch $@

$(VENV)/.built-test: $(VENV)/.deps-test $(CEXT)
	@$(BIN)/pip install -q --disable-pip-version-check --no-build-isolation --no-deps -e .
	@touch $(VENV)/.built $@

run: $(VENV)/.built ## Serve examples/model_repository with everything on: 8000 (REST), 8001 (gRPC), 8002 (metrics, console); ARGS='...' overrides flags
	@$(BIN)/python examples/prepare.py
	@$(BIN)/neptrio demo --model-repository examples/model_repository $(ARGS)

# a process that ends with a test, as one does that hangs for long, ends the run: loadfile would start that test again
BOUND := --max-worker-restart=0

# what Python has compiled is kept, whatever the environment says: the tests start some thousand interpreters
check test test-all test-console test-clients test-frontends test-sanitized test-versions: export PYTHONDONTWRITEBYTECODE :=
check test test-all test-console test-clients test-frontends test-sanitized test-versions: export PYTHONPYCACHEPREFIX := $(CURDIR)/build/pycache

# one more than cores: many tests wait for a server to start or for a time limit
WORKERS := from neptrio.cores import usable_cores; print(min(usable_cores() + 1, 4))

PYTEST := $(BIN)/python -m pytest -n $$($(BIN)/python -c "$(WORKERS)") --dist loadfile $(BOUND)

check: build ## Lint, check types and run the tests that belong to what has changed (a minute)
	$(CODE)
	@$(BIN)/python -m pytest -n 2 --dist loadfile -m 'not slow' $(BOUND) $$($(BIN)/python tools/changed_tests.py) $(ARGS)

test: build lint ## Set up, lint, type-check and run every test that takes no longer than a moment (5 minutes)
	@$(BIN)/python examples/prepare.py
	@$(PYTEST) -m 'not slow' $(ARGS)

test-all: build lint ## Run every test, those marked slow included; ARGS='-m slow' runs what `make test` leaves out
	@sh tools/test_browser.sh
	@$(BIN)/python examples/prepare.py
	@$(PYTEST) $(ARGS)

test-console: build ## Draw the console and trace pages in a real browser (chromium is installed where that is possible) and run what belongs to them
	@sh tools/test_browser.sh
	@$(BIN)/python -m pytest -rs -n 2 --dist loadfile $(BOUND) tests/browser tests/console tests/transport/test_console.py tests/commands/test_trace_view_browser.py $(ARGS)

test-versions: build ## Run the tests of the loop and the transports with the oldest packages and the newest Python; ARGS='oldest newest' chooses
	@$(BIN)/python tools/test_versions.py $(ARGS)

test-clients: build ## Drive the server with other people's clients of PyPI and npm, and with schemathesis from /openapi.json
	@$(BIN)/python examples/prepare.py
	@$(BIN)/python tools/test_clients.py $(ARGS)

$(VENV)/.deps-deploy: $(VENV)/.built-test requirements/deploy.txt
	@$(BIN)/python tools/install.py deploy
	@sh tools/deploy_tools.sh
	@touch $@

test-deploy: $(VENV)/.deps-deploy ## Render the Helm chart and check it against Kubernetes' schemas, test the rules for Prometheus and the balancer, lint the container file
	@$(BIN)/python -m pytest -rs tests/deploy $(ARGS)

test-image: build ## Build the container image with buildah, run it read-only and without rights, and ask it something (needs root; 10 minutes)
	@$(BIN)/python tools/image_test.py $(ARGS)

test-ray: build ## Run tests/ray with a real Ray on this machine, in an environment of its own (100 MB to fetch)
	@$(BIN)/python tools/test_ray.py $(ARGS)

test-backends: build ## Run the tests of the backends pytorch and transformers, in an environment of their own (200 MB to 3 GB to fetch, as pip chooses)
	@$(BIN)/python tools/test_backends.py $(ARGS)

test-frontends: build ## Run every test that starts a server with two front ends (12 minutes); ARGS='...' narrows it
	@NEPTRIO_TEST_FRONTENDS=2 $(BIN)/python -m pytest -q -n 2 --dist loadfile $(BOUND) \
		$(if $(ARGS),$(ARGS),$(addprefix tests/,wire client frontend sequences transport service clients backends loop observe \
		repository scheduling execution commands config console browser embedded testing compat examples traces sweep \
		test_server.py test_cli.py test_logs.py))

test-sanitized: build ## Build the compiled modules with AddressSanitizer and UndefinedBehaviorSanitizer and run what reaches them (15 minutes at most)
	@$(BIN)/python tools/sanitized.py $(ARGS)

fuzz: $(VENV)/.deps-fuzz ## Fuzz what strangers may send, guided by coverage, 10 minutes for each reader; ARGS='--seconds 60 http1' narrows it
	@$(BIN)/python tools/fuzz.py $(ARGS)

# these tests take as long as they are told to
LONG := -o faulthandler_timeout=0

soak: build ## Run the long load tests: 200 clients for 60 s with cancels and errors, 200 cycles of load and unload, 20,000 live sequences, 1,000 crashes of a backend, a million wrong requests, and 100,000 answers compared with numpy
	@NEPTRIO_SOAK_SECONDS=60 NEPTRIO_SOAK_REQUESTS=1000000 $(BIN)/python -m pytest -s $(LONG) tests/soak $(ARGS)
	@NEPTRIO_MEMORY_CYCLES=200 NEPTRIO_FUZZ_EXAMPLES=2000 $(BIN)/python -m pytest -s $(LONG) tests/repository/test_memory.py tests/repository/test_hostile.py $(ARGS)
	@NEPTRIO_DIFFERENTIAL_REQUESTS=100000 $(BIN)/python -m pytest -s $(LONG) tests/differential $(ARGS)
	@NEPTRIO_CRASHES=1000 $(BIN)/python -m pytest -s $(LONG) tests/backends/compiled/test_crashes.py $(ARGS)
	@NEPTRIO_SOAK=1 $(BIN)/python -m pytest -s $(LONG) tests/scheduling/test_slot_exploration.py tests/sequences/test_soak.py $(ARGS)

mutants: build ## Break the batcher's decision code in ninety small ways and name the changes that no test notices
	@$(BIN)/python tools/mutants.py $(ARGS)

# NVRTC and all of CUDA's headers; a machine without a driver has not had them from `run`
$(VENV)/.deps-cuda: $(VENV)/.built-test requirements/cuda.txt
	@$(BIN)/python tools/install.py cuda
	@touch $@

test-gpu: $(VENV)/.deps-cuda ## Run the tests that need a GPU (skipped, saying why, where there is none) and those of the compiler of kernels, with the extra `cuda`
	@$(BIN)/python -m pytest -m 'gpu or nvrtc' -rs $$(grep -rlE --include='test_*.py' '^(pytestmark = \[?| +)pytest\.mark\.(gpu|nvrtc)' tests) $(ARGS)

gpu-wheels: $(VENV)/.deps ## Fetch what tools/gpu_run.sh needs on a GPU machine without a network into build/gpu-wheels; ARGS='--without numpy' leaves out what it has
	@$(BIN)/python tools/gpu_wheels.py $(ARGS)

bench-gpu: $(VENV)/.deps-cuda ## Measure kernel models on a GPU and print Markdown (benchmarks/gpu.md)
	@$(BIN)/python -m benchmarks.gpu $(ARGS)

define CODE
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
endef

lint: build ## Check formatting, lint rules and types, and known vulnerabilities of what running needs where a service answers
	$(CODE)
	@$(BIN)/python tools/audit.py

format: build ## Rewrite the Python sources in the project's format
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

lock: build ## Write requirements/ again after a change of pyproject.toml; ARGS=--upgrade takes the newest versions
	@$(BIN)/python tools/install.py lock
	@$(BIN)/python tools/lock.py $(ARGS)

proto: build ## Regenerate src/neptrio/_proto from proto/
	@$(BIN)/python tools/gen_proto.py

stubs: build ## Write the stubs (.pyi) of the compiled modules again from their sources
	@$(BIN)/python tools/make_stubs.py

bench-instructions: build ## Count the hot paths' instructions against the stored baseline (needs valgrind)
	@$(BIN)/python -m benchmarks.instructions $(ARGS)

bench-peers: build ## Install the benchmark's peers (tritonserver, MLServer, KServe), each in its own environment
	@$(BIN)/python -m benchmarks.peers

bench: build ## Measure this server beside its peers (20 minutes) into benchmarks/results; ARGS='--only binary' narrows it
	@$(BIN)/python -m benchmarks.run $(ARGS)

bench-open: build ## Measure latency at half of the saturation rate only (open loop)
	@$(BIN)/python -m benchmarks.run --parts open --servers neptrio,tritonserver $(ARGS)

bench-frontends: build ## Measure one server with 0, 1, 2 and more front ends beside tritonserver, on the cores that there are
	@$(BIN)/python -m benchmarks.run --parts frontends $(ARGS)

bench-scale: build ## Measure what more of something brings: instances, connections, 10,000 idle connections, front ends
	@$(BIN)/python -m benchmarks.run --parts scale,frontends $(ARGS)

bench-many: build ## Measure 100 models in the memory of about 20, loaded on demand
	@$(BIN)/python -m benchmarks.many $(ARGS)

soak-many: build ## Ask for 1,000 models within a budget for 100, for 30 minutes, while they are unloaded, killed and replaced; ARGS='--seconds 600' narrows it, '--tritonserver 120' measures the peer beside it (needs bench-peers)
	@$(BIN)/python -m benchmarks.many_soak $(ARGS)

bench-neighbours: build ## Measure tiny requests beside one heavy client of another model; ARGS='--only json' narrows it
	@$(BIN)/python -m benchmarks.neighbours $(ARGS)

bench-start: build ## Measure how fast 50 Python models start and what a further instance needs, beside tritonserver
	@$(BIN)/python -m benchmarks.python_start $(ARGS)

bench-perf-analyzer: build ## Measure with perf_analyzer beside our own generator (Linux on x86-64; fetches it)
	@$(BIN)/python -m benchmarks.perf_analyzer $(ARGS)

bench-readme: build ## Put the last results into README.md
	@$(BIN)/python -m benchmarks.report $(ARGS)

# auditwheel puts libnghttp2 into the wheel and finds out which systems it fits
wheel: build ## Build a manylinux wheel into dist/ that installs without a compiler (fits the glibc it is built on, or newer), and its bill of materials
	@$(BIN)/python tools/install.py wheel
	@rm -rf build/wheel && $(BIN)/python -m build --wheel --no-isolation --outdir build/wheel . >/dev/null 2>&1
	@PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/auditwheel repair --wheel-dir dist build/wheel/*.whl 2>build/wheel/log || { cat build/wheel/log; exit 1; }
	@$(BIN)/python tools/sbom.py $$(ls -1t dist/*.whl | head -n 1)
	@ls -1t dist/*.whl | head -n 1

wheel-test: wheel ## Install the newest wheel into an empty environment and serve a model from there
	@$(BIN)/python tools/wheel_test.py

wheels: build ## Build wheels for Python 3.11 to 3.14 (those that are here) and the source distribution, and try each in an empty environment; ARGS='3.12 --no-sdist' narrows it
	@$(BIN)/python tools/wheels.py $(ARGS)

docs: $(VENV)/.system ## Build the documentation as a site that can be searched, in build/docs/site; ARGS='--serve localhost:8008' shows it
	@$(BIN)/python tools/docs.py $(ARGS)

release: build ## Make what a release consists of in dist/ without publishing anything: wheels, source, chart, image, notes, checksums; ARGS='3.13' narrows the wheels
	@$(BIN)/python tools/release.py $(ARGS)

clean: ## Remove the environment and everything built
	@rm -rf $(VENV) build dist src/*.egg-info
	@find src -name '*.so' -delete
