# Every target does its own set-up. PYTHON may name an interpreter; any Python 3.9 or newer starts the installer,
# which looks for a 3.11 or 3.12 for the environment.
PYTHON ?= python3
VENV := $(CURDIR)/.venv
RUN := $(VENV)/bin
MODEL := models/SmolLM2-135M-Instruct
DATA := datasets/stdlib_pairs.jsonl
SOURCES := openrlhf_ebft tests scripts benchmarks

# DeepSpeed looks for ninja on PATH when it compiles its extension.
WITH_PATH := PATH="$(RUN):$$PATH"

.PHONY: help install quickstart test lint docs chaos clean

help:
	@echo "make install     make .venv with the CPU or the GPU stack (repeatable)"
	@echo "make quickstart  fine-tune a small real model on real data, set-up included"
	@echo "make test        run the tests, set-up included"
	@echo "make chaos       harm runs (killed, stopped, full disk, ...) and show what became of them, set-up included"
	@echo "make lint        ruff and mypy, set-up included"
	@echo "make docs        write docs/configuration.md from the configuration classes"
	@echo "make docs-site   build the documentation site into site/; a broken link is an error"
	@echo "make clean       remove caches and build leftovers; keeps .venv, models, datasets and runs"

install:
	@$(PYTHON) scripts/install.py

$(MODEL)/config.json: | install
	$(RUN)/openrlhf-ebft prepare-model smollm2-135m --out $(MODEL)

$(DATA): | install
	$(RUN)/openrlhf-ebft prepare-data stdlib --out $(DATA)

quickstart: install $(MODEL)/config.json $(DATA)
	$(WITH_PATH) $(RUN)/openrlhf-ebft train examples/quickstart.yaml

test: install
	$(WITH_PATH) $(RUN)/python -m pytest

lint: install
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy

chaos: install
	$(WITH_PATH) HF_HUB_OFFLINE=1 $(RUN)/python -m scripts.chaos $(CASES)

docs: install
	$(RUN)/python scripts/config_reference.py

docs-site: install
	NO_MKDOCS_2_WARNING=1 $(RUN)/mkdocs build --strict

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache
	find $(wildcard $(SOURCES)) -name __pycache__ -type d -prune -exec rm -rf {} +
