# The commands of the README; `.ci/run` calls the same ones.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Where tensors have shapes, which mypy cannot check. Checking every call of `rocket_core` would take three times as long.
SHAPED := rocket_core.allocation,rocket_core.calibration,rocket_core.evaluation,rocket_core.experts
SHAPED := $(SHAPED),rocket_core.layers,rocket_core.linalg,rocket_core.methods,rocket_core.models
# Where tests of the system are; collecting all others takes minutes.
SYSTEM := tests/docs tests/e2e tests/rocket_client tests/system
# Otherwise every process that a test starts would compile the sources again.
unexport PYTHONDONTWRITEBYTECODE
# One worker more than there are cores, as a third of the time passes waiting: for processes, servers and the disk.
PYTEST = $(BIN)/pytest -n $$(($$(getconf _NPROCESSORS_ONLN) + 1)) --dist loadfile --no-loadscope-reorder \
	--jaxtyping-packages=$(SHAPED),beartype.beartype

.PHONY: demo test test-all test-system check docs docs-links test-gpu test-engines bench bench-gpu soak lock lock-torch sbom pin-images format clean

demo: $(STAMP)
	@$(BIN)/python examples/demo.py

# Quick: no servers, no processes, no whole pipeline.
test: $(STAMP)
	$(PYTEST) -m "not gpu and not system and not soak and not slow and not engines"

# Everything that pip can install, with the representative cases of each sweep.
test-all: $(STAMP)
	$(PYTEST)

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python .ci/check_english.py
	$(BIN)/mypy
	$(BIN)/lint-imports

# Every warning is an error: broken links, anchors and references, and docstrings that cannot be read.
docs: $(STAMP)
	$(BIN)/python -m sphinx --builder html --nitpicky --fail-on-warning --keep-going --quiet docs build/docs

# Links to elsewhere; needs the network.
docs-links: $(STAMP)
	$(BIN)/python -m sphinx --builder linkcheck --nitpicky --fail-on-warning --keep-going docs build/docs-links

# What pip cannot bring: curl, for the README's walk-through, the parser of docker-compose.yml (no engine is needed), a
# browser for the pages, and bubblewrap to confine jobs; screenshots are left in build/screenshots.
test-system: $(STAMP)
	@command -v curl >/dev/null || { echo "make test-system needs curl: apt-get install curl"; exit 1; }
	@command -v docker-compose >/dev/null || { echo "make test-system needs docker-compose: apt-get install docker-compose"; exit 1; }
	@command -v chromium >/dev/null || { echo "make test-system needs chromium: apt-get install chromium"; exit 1; }
	@command -v bwrap >/dev/null || { echo "make test-system needs bubblewrap: apt-get install bubblewrap"; exit 1; }
	$(PYTEST) -m system $(SYSTEM)

test-gpu: $(STAMP)
	@$(BIN)/python .ci/check_gpu.py
	$(BIN)/pytest -m gpu

# Exports in the engines that they are for, in environments that are made on first use under ENGINES, of some gigabytes.
# llama.cpp is among what pip installs for every run of the tests.
test-engines: $(STAMP)
	$(BIN)/pytest -m engines tests/engines
	$(BIN)/pytest tests/rocket_core/exports/test_gguf_engine.py

bench: $(STAMP)
	$(BIN)/python -m benchmarks

# On a machine with a GPU: its tests, and the table of compressions at the sizes of real models, also if a test fails.
bench-gpu: $(STAMP)
	@$(BIN)/python .ci/check_gpu.py
	$(BIN)/pytest -m gpu; tests=$$?; \
	$(BIN)/python -m benchmarks.scale --model llama-3.2-1b --model qwen3-8b --model llama-3.3-70b --model qwen3-30b-a3b \
		--out build/scale --markdown build/scale/table.md && exit $$tests

# Slow proofs: the service under load and under kills, the other cases of each sweep, and more random inputs.
soak: $(STAMP)
	$(BIN)/python -m benchmarks.soak
	$(BIN)/python -m benchmarks.load
	$(PYTEST) -m soak
	$(BIN)/pytest --hypothesis-profile soak tests/app/api/test_life_cycle.py tests/app/api/test_contract.py tests/rocket_core/inspection/test_hostile_models.py tests/rocket_core/allocation

# What the images install, with hashes, from pyproject.toml and constraints.txt; asks the package index.
lock: $(STAMP)
	$(BIN)/python requirements/lock.py

# Torch from another index: make lock-torch TORCH_INDEX=URL TORCH_LOCK=torch-cpu.txt
lock-torch: $(STAMP)
	@test -n "$(TORCH_INDEX)" && test -n "$(TORCH_LOCK)" || { echo "name both: make lock-torch TORCH_INDEX=URL TORCH_LOCK=torch-cpu.txt"; exit 1; }
	$(BIN)/python requirements/lock.py --torch-index "$(TORCH_INDEX)" --output "requirements/$(TORCH_LOCK)"

# Bills of materials of the images, from the locked requirements; needs no network.
sbom: $(STAMP)
	$(BIN)/python requirements/sbom.py

# Digests of the images of others into .env; needs docker with buildx, and the network.
pin-images: $(STAMP)
	$(BIN)/python requirements/pin_images.py

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	# Modules are compiled when they are first imported; compiling all of them here would take as long as installing them.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[test]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) build dist *.egg-info
