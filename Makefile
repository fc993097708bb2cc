# make test, make demo: each makes .venv and installs what it needs; nothing else has to be done.
# make PYTHON=python3.12 test      another Python
# make TORCH=torch==2.11.0 test    another torch, put into .venv in place of the one there
# make versions                    the suite on the oldest and the newest torch, each in its own venv

PYTHON ?= python3
TORCH ?= torch==2.13.0
# What `make versions` tests beside it.
VERSIONS ?= 2.11.0 2.15.0
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
# Compilers are run in parallel with the tests, so two workers keep about four cores busy.
JOBS ?= 2

ifneq ($(filter environment% command%,$(origin CXX)),)
COMPILER := $(CXX)
endif
export CXX := $(or $(COMPILER),$(shell command -v c++ || command -v g++ || command -v clang++))

.PHONY: help test versions sweep operators demo bench page lint types format clean check

help:
	@echo "make test | versions | demo | bench | sweep | operators | page | lint | types | format | clean"

test: $(VENV)/test.stamp
	$(BIN)/pytest -n $(JOBS) $(ARGS)

versions: $(VERSIONS:%=version-%)

version-%:
	$(MAKE) test VENV=build/venv-$* TORCH=torch==$*

sweep: $(VENV)/test.stamp
	$(BIN)/pytest -n $(JOBS) -m sweep $(ARGS)

# PyTorch's operator database compiled without the rules and with them: fails if they break anything.
operators: $(VENV)/test.stamp
	$(BIN)/python tests/operator_database.py --jobs $(JOBS) --summary expect/operators.txt $(ARGS)

demo: $(VENV)/demo.stamp
	$(BIN)/normpass demo $(ARGS)

bench: $(VENV)/bench.stamp
	$(BIN)/normpass bench $(ARGS)

page: $(VENV)/test.stamp
	$(BIN)/normpass coverage --page docs/rules.md

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/dev.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# mypy finds packages by their folders, and normpass.decomps lies in decomps/: a folder of links
# shows it the layout that is installed.
TYPED := build/types/normpass
types: $(VENV)/dev.stamp
	@rm -rf $(TYPED) && mkdir -p $(TYPED)
	@ln -s $(CURDIR)/api/* $(CURDIR)/decomps $(CURDIR)/passes $(CURDIR)/backend \
	    $(CURDIR)/benchmarks $(TYPED)/
	cd build/types && $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml normpass $(ARGS)

clean:
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache .hypothesis

# A stamp per extra: pip runs again only when pyproject.toml, setup.py or TORCH has changed.
$(VENV)/%.stamp: pyproject.toml setup.py $(VENV)/torch.txt | check
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@# torch first and by its version: resolved as a dependency it could be any newer one
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[$*]" "$(TORCH)"
	@touch $@

# What TORCH was; written anew, and so newer than the stamps, only where it is another now.
$(VENV)/torch.txt: always
	@mkdir -p $(VENV)
	@echo "$(TORCH)" | cmp -s - $@ || echo "$(TORCH)" > $@

.PHONY: always
always:

check:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
	  echo "normpass needs Python 3.10 or newer, and '$(PYTHON)' is not: make PYTHON=/path/to/python3"; \
	  exit 1; }
	@test -n "$(CXX)" && command -v $(firstword $(CXX)) >/dev/null || { \
	  echo "normpass needs a C++ compiler (c++, g++ or clang++ on the PATH, or CXX set to one) and found none."; \
	  exit 1; }
