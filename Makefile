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
# Compilers are run in parallel with the tests, so two workers keep about four cores busy. Slow tests
# stand side by side in their files: a worker that is done takes half of what another still has.
JOBS ?= 2
PARALLEL = -n $(JOBS) --dist worksteal

# Inductor precompiles its headers only for a compiler whose name says that it is GCC: with the same
# one called c++ every kernel reads torch's headers anew.
ifneq ($(filter environment% command%,$(origin CXX)),)
COMPILER := $(CXX)
endif
export CXX := $(or $(COMPILER),$(shell command -v g++ || command -v c++ || command -v clang++))

TARGETS := test versions accept sweep operators upstream models transforms examples notebooks \
    companions wheel dist docs demo bench page lint types format clean
.PHONY: help check $(TARGETS)

help:
	@sed -n 's/^\([a-z]*\):.*  ## \(.*\)/make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 18

test: $(VENV)/test.stamp  ## what every change passes; ARGS are pytest's
	$(BIN)/pytest $(PARALLEL) $(ARGS)

versions: $(VERSIONS:%=version-%)  ## the suite on the oldest and the newest PyTorch

version-%:
	$(MAKE) test VENV=build/venv-$* TORCH=torch==$*

# Snapshots as they are now, inline and in files; one process, because expecttest edits the tests.
accept: $(VENV)/test.stamp  ## takes snapshots as they are now; ARGS choose tests
	EXPECTTEST_ACCEPT=1 $(BIN)/pytest $(ARGS)
	@find tests -name '*.py.bak' -delete
	@git status --short expect tests

sweep: $(VENV)/test.stamp  ## what `make test` leaves out
	$(BIN)/pytest $(PARALLEL) -m sweep $(ARGS)

# Gradients of 34 model families of transformers and diffusers against eager.
models: $(VENV)/test,models.stamp  ## gradients of model families
	$(BIN)/pytest $(PARALLEL) -m "sweep or not sweep" tests/models $(ARGS)

# docs/transforms.md: which derivatives of which norms are right, stock and with the rules.
transforms: $(VENV)/test.stamp  ## writes docs/transforms.md anew
	$(BIN)/python tests/transform_matrix.py --jobs $(JOBS) $(ARGS)

# The programs of examples/ against eager, with the packages that they import.
examples: $(VENV)/test,examples.stamp  ## the programs of examples/, tested
	$(BIN)/pytest $(PARALLEL) -m "sweep or not sweep" tests/examples $(ARGS)

# The notebooks of examples/ anew from its scripts, with what they print: make notebooks ARGS=wgan_gp
notebooks: $(VENV)/test,examples.stamp  ## writes the notebooks of examples/ anew
	$(BIN)/python -m normpass.examples.notebooks.build $(ARGS)

# The packages of docs/companions.md train with the backend as in eager mode.
companions: $(VENV)/test,companions.stamp  ## the packages of docs/companions.md, tested
	$(BIN)/pytest $(PARALLEL) tests/companions $(ARGS)

# PyTorch's operator database compiled without the rules and with them: fails if they break anything.
operators: $(VENV)/test.stamp  ## PyTorch's operator database with the rules and without
	$(BIN)/python tests/operator_database.py --jobs $(JOBS) --summary expect/operators.txt $(ARGS)

# The wheel in dist/, tested in an empty environment. Of what build/lib holds from an earlier build,
# setuptools would put files into it that are gone.
wheel: $(VENV)/test.stamp  ## the wheel in dist/, tested
	rm -rf dist build/lib
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	NORMPASS_WHEEL="$$(echo dist/*.whl)" $(BIN)/pytest tests/test_installed.py -k wheel $(ARGS)

# What is published, in dist/: that wheel and the source archive, from which the same wheel is built.
dist: wheel $(VENV)/dev.stamp  ## the wheel and the source archive, tested
	$(BIN)/python -m build --quiet --sdist --no-isolation --outdir dist .
	$(BIN)/twine check --strict dist/*
	NORMPASS_DIST=dist $(BIN)/pytest tests/test_joining.py -k source_archive $(ARGS)

# PyTorch's own tests with the rules in eager mode and without: make upstream ARGS=path/to/pytorch/test
upstream: $(VENV)/test.stamp  ## PyTorch's own tests with the rules and without; ARGS=path/to/pytorch/test
	$(BIN)/python tests/upstream_tests.py --jobs $(JOBS) $(ARGS)

# The site in build/docs; what its pages take from the code is written into docs/generated first.
docs: $(VENV)/docs.stamp  ## the site in build/docs
	$(BIN)/python docs/generate.py
	$(BIN)/sphinx-build --fail-on-warning --keep-going --quiet docs build/docs $(ARGS)
	@echo "build/docs/index.html"

demo: $(VENV)/demo.stamp  ## a transformer with normpass and without
	$(BIN)/normpass demo $(ARGS)

bench: $(VENV)/bench.stamp  ## times the norms
	$(BIN)/normpass bench $(ARGS)

page: $(VENV)/test.stamp  ## writes docs/rules.md anew
	$(BIN)/normpass coverage --page docs/rules.md

lint: $(VENV)/dev.stamp  ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/dev.stamp  ## ruff, which edits
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# mypy finds packages by their folders, and normpass.decomps lies in decomps/: a folder of links
# shows it the layout that is installed.
TYPED := build/types/normpass
types: $(VENV)/dev.stamp  ## mypy and pyright
	@rm -rf $(TYPED) && mkdir -p $(TYPED)
	@ln -s $(CURDIR)/api/* $(CURDIR)/decomps $(CURDIR)/passes $(CURDIR)/backend \
	    $(CURDIR)/benchmarks $(CURDIR)/examples $(TYPED)/
	cd build/types && $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml normpass $(ARGS)
	@# What a user's checker sees: types of all public names, and no error in the public face.
	PYTHONPATH=build/types $(BIN)/python tests/public_types.py
	cd build/types && $(CURDIR)/$(BIN)/pyright --pythonpath $(CURDIR)/$(BIN)/python normpass

clean:  ## takes away .venv and what was built
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis

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
	@# A pull over the commit that made api/ leaves normpass/__pycache__ here, and Python would find
	@# that folder before the package.
	@test ! -d normpass || find normpass ! -type d ! -name '*.pyc' | grep -q . || rm -r normpass
	@test -n "$(CXX)" && command -v $(firstword $(CXX)) >/dev/null || { \
	  echo "normpass needs a C++ compiler (g++, c++ or clang++ on the PATH, or CXX set to one) and found none."; \
	  exit 1; }
