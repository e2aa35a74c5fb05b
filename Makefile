# Everything happens in .venv; nothing is installed twice unless what it depends on has changed.
PYTHON ?= python3
JOBS ?= 2
VENV := .venv
BIN := $(VENV)/bin
BUILD_INPUTS := pyproject.toml CMakeLists.txt constraints.txt $(shell find native -name '*.[ch]pp')

.PHONY: train test test-slow test-frameworks pytorch-suite check docs bench clean

train: $(VENV)/train.stamp  ## train a small GPT on two ranks; again, to go on (ARGS=--fresh: anew)
	$(BIN)/python examples/train_gpt.py $(ARGS)

test: $(VENV)/test.stamp  ## run the tests
	$(BIN)/python -m pytest -n $(JOBS) -m "not slow"

test-slow: $(VENV)/test.stamp  ## run the tests of benchmarks, examples, launchers and hosts
	$(BIN)/python -m pytest -n $(JOBS) -m slow

test-frameworks: $(VENV)/frameworks.stamp $(VENV)/test.stamp  ## Accelerate, Lightning, Ray
	$(BIN)/python -m pytest tests/test_replace_frameworks.py tests/test_ray.py

pytorch-suite: $(VENV)/suite.stamp  ## run PyTorch's own tests on Phalanx (ARGS=package-3: one run)
	PYTHONPATH=tests $(BIN)/python -m pytorch_suite $(ARGS)

check: $(VENV)/dev.stamp  ## lint, formats, types
	scripts/check

docs: $(VENV)/docs.stamp  ## build the site of the documentation into build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

bench: $(VENV)/bench.stamp  ## compare with Gloo, MPI and torch's threaded group
	$(BIN)/python -m benchmarks.collectives --docs docs
	$(BIN)/python -m benchmarks.training --docs docs
	$(BIN)/python -m benchmarks.torch_backend --docs docs
	$(BIN)/python -m benchmarks.testing --docs docs
	$(BIN)/python -m benchmarks.hosts --docs docs

clean:
	rm -rf $(VENV) build out src/phalanx/_native*.so

$(VENV)/build.stamp: Makefile
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip scikit-build-core nanobind cmake ninja
	touch $@

# One stamp per set of extras. Without isolation, so that only changed native files are compiled.
$(VENV)/%.stamp: $(VENV)/build.stamp $(BUILD_INPUTS)
	$(BIN)/pip install --quiet --no-build-isolation --constraint constraints.txt --editable .[$*]
	touch $@

.PRECIOUS: $(VENV)/%.stamp
