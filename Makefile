# Every target that needs the virtual environment makes it first: scripts/install.sh says how.
# PYTHON names the interpreter it is made with (default python3).

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
# Tests run offline: nothing is looked up on a model hub.
# A file goes to one of two workers as a whole, so that its fixtures are made once.
PYTEST = HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help install demo test test-slow lint format types imports check bench-decode bench-adapt bench-drafters bench-batch bench-heads clean distclean

help: ## Say what each target does
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(STAMP) ## Make .venv with foredraft, its development tools and the embedded model

$(STAMP): pyproject.toml constraints.txt scripts/install.sh
	@PYTHON='$(PYTHON)' scripts/install.sh

demo: $(STAMP) ## Generate with n-gram drafting on the embedded model, beside plain decoding
	$(BIN)/foredraft generate --method ngram --num-speculative-tokens 8 --temperature 0 \
		--max-tokens 160 --chat --compare --prompt-file docs/demo-prompt.txt

test: $(STAMP) ## Run the default tests (not slow, not bench); ARGS='-k name' passes options on
	$(PYTEST) $(ARGS)

test-slow: $(STAMP) ## Run the tests marked slow
	$(PYTEST) -m 'slow and not bench' --timeout 1800 $(ARGS)

lint: $(STAMP) ## Check lint rules and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP) ## Apply formatting and the lint fixes that are safe
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(STAMP) ## Check types
	$(BIN)/mypy

imports: $(STAMP) ## Check the import contracts
	$(BIN)/lint-imports --no-logo

check: lint types imports ## lint, types and imports

bench-decode: $(STAMP) ## Measure decoding on this machine, each drafter beside plain decoding
	$(BIN)/foredraft bench decode $(ARGS)

bench-adapt: $(STAMP) ## Measure the controller: auto beside plain and every fixed number (half an hour)
	$(BIN)/foredraft bench adapt --rounds 2 $(ARGS)

bench-drafters: $(STAMP) ## Replay recorded answers through the methods that need no weights
	$(BIN)/foredraft bench drafters --rounds 3 $(ARGS)

bench-batch: $(STAMP) ## Serve many requests at once, plain and auto, beside Transformers
	$(BIN)/foredraft bench batch --rounds 3 $(ARGS)

bench-heads: $(STAMP) ## Measure the heads that ship on Spec-Bench's questions
	$(BIN)/foredraft bench heads --rounds 5 $(ARGS)

clean: ## Remove caches and build outputs (not .venv)
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache build dist
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## clean, and remove .venv
	rm -rf .venv

.PHONY: figures
figures: $(STAMP) ## Draw the figures of the documentation again
	$(BIN)/python -m foredraft.bench.figures docs/figures
