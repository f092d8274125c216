# Each target does all its own set-up: a .venv beside this file, with the versions of constraints.txt.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip
CONSTRAINED := -c constraints.txt
# Python compiles what is imported, once, and keeps it; pip would compile all, which is most of an installation's time.
INSTALL := $(PIP) install -q --no-compile $(CONSTRAINED)
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test oldest eager lint wheel bench notebooks docs docs-version clean
demo: $(VENV)/.demo
	OMP_WAIT_POLICY=passive $(BIN)/sparseconv demo

test: $(VENV)/.tests
	$(BIN)/python -m pytest -n auto --dist worksteal

# with the least versions that pyproject.toml allows, in an environment beside .venv; make oldest TESTS=tests/backends
# make oldest TORCH=2.11.0 takes another torch; where it goes with an older Triton, tests of kernels get 3.6 all the same
TORCH  ?= $(shell sed -n 's/^torch==//p' oldest.txt)
OLDEST ?= .venv-oldest-$(TORCH)
oldest: $(OLDEST)/.tests
	$(OLDEST)/bin/python -m pytest $(if $(TESTS),$(TESTS),-n auto --dist worksteal)

# what every torch from 2.6 on does: make eager TORCH=2.8.0
EAGER := "tests/docs/test_documentation.py::test_a_page_runs[README.md]" tests/test_torch_private.py tests/test_tensor.py
EAGER += $(addprefix tests/nn/test_,convolution.py networks.py normalization.py training.py)
EAGER += $(addprefix tests/interop/,test_checkpoints.py test_spconv.py minkowski/test_layers.py)
EAGER += $(addprefix tests/interop/,torchsparse/test_layers.py flex_gemm fvdb) tests/backends/test_every_backend.py
eager: $(OLDEST)/.tests
	$(OLDEST)/bin/python -m pytest -n 0 -k "not triton and not numpy" $(EAGER)

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/mypy

wheel: $(VENV)/.build
	$(BIN)/python -m build

bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks cpu --quick --json build/bench/cpu.json

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "read it with its search: $(BIN)/python -m http.server -d site, then http://localhost:8000"

# the pages as one version among others, on the local branch gh-pages: make docs-version VERSION=0.1.0
# a release is named by its minor version, 0.1, and is then `latest`; any other name, such as dev, is just that
RELEASE = $(shell echo "$(VERSION)" | grep -oE '^[0-9]+\.[0-9]+')
docs-version: $(VENV)/.docs
	test -n "$(VERSION)"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mike deploy $(MIKE) $(if $(RELEASE),--update-aliases $(RELEASE) latest,$(VERSION))
	$(if $(RELEASE),$(BIN)/mike set-default $(MIKE) latest)
	@echo "read the versions: $(BIN)/mike serve, then http://localhost:8000"

notebooks: $(VENV)/.notebooks
	OMP_WAIT_POLICY=passive $(BIN)/python notebooks/execute.py

clean:
	rm -rf $(VENV) $(OLDEST) dist build site

$(VENV)/.base: constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) --upgrade pip
	touch $@

$(VENV)/.demo: $(VENV)/.base pyproject.toml
	$(INSTALL) -e ".[demo]"
	touch $@

$(VENV)/.tests: $(VENV)/.base pyproject.toml
	$(INSTALL) -e ".[demo,interop]" --group tests
	touch $@

$(OLDEST)/.tests: oldest.txt pyproject.toml
	test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install -q --upgrade pip
	sed 's/^torch==.*/torch==$(TORCH)/' oldest.txt > $(OLDEST)/constraints.txt
	$(OLDEST)/bin/python -m pip install -q --no-compile -c $(OLDEST)/constraints.txt -e ".[demo,interop]" --group tests
	$(OLDEST)/bin/python -c "import triton; assert (3, 6) <= tuple(map(int, triton.__version__.split('.')[:2]))" \
		|| $(OLDEST)/bin/python -m pip install -q --no-deps triton==3.6.0
	touch $@

$(VENV)/.lint: $(VENV)/.base pyproject.toml
	$(INSTALL) -e . --group lint
	touch $@

$(VENV)/.build: $(VENV)/.base
	$(INSTALL) build hatchling
	touch $@

$(VENV)/.bench: $(VENV)/.base pyproject.toml
	$(INSTALL) -e ".[demo]" --group bench
	touch $@

# reads the sources and imports nothing of them, so that torch is not needed; ruff sets the signatures
$(VENV)/.docs: $(VENV)/.base pyproject.toml
	$(INSTALL) --group docs
	touch $@

$(VENV)/.notebooks: $(VENV)/.base pyproject.toml
	$(INSTALL) -e ".[notebooks,interop]" --group tests
	touch $@
