# Needs only Python 3.11 or newer with pip. Everything goes into .venv; Flower, which needs older
# versions of some packages, into .venv-flower.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
INSTALL := $(RUN) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

FLOWER := .venv-flower
FLOWER_INSTALL := $(FLOWER)/bin/python -m pip install --quiet --disable-pip-version-check --constraint $(FLOWER)/constraints.txt

.PHONY: demo test test-flower bench lint docs clean

demo: $(VENV)/.demo  ## train a small private model on real digits
	$(RUN) -m dpkfc demo

test: $(VENV)/.test test-flower  ## all tests, on two cores
	$(RUN) -m pytest -n 2

test-flower: $(FLOWER)/.test  ## the tests with Flower, in an environment of their own
	$(FLOWER)/bin/python -m pytest tests/integrations/flower
	$(FLOWER)/bin/python -m pytest tests/test_examples.py -k flower_app

lint: $(VENV)/.lint
	$(RUN) -m ruff check .
	$(RUN) -m mypy
	$(VENV)/bin/lint-imports

bench: $(VENV)/.bench  ## step time and memory beside ordinary training and Opacus; how time grows with size; noise; plans
	mkdir -p benchmarks/results
	$(RUN) -m benchmarks.speed --json benchmarks/results/speed.json --plot benchmarks/results/speed.png
	$(RUN) -m benchmarks.growth --json benchmarks/results/growth.json --plot benchmarks/results/growth.png
	$(RUN) -m benchmarks.noise
	$(RUN) -m benchmarks.planning
	$(RUN) -m benchmarks.sampling
	$(RUN) -m benchmarks.distributed --json benchmarks/results/distributed.json
	$(RUN) -m benchmarks.scaling_model

docs: $(VENV)/.docs  ## the documentation as pages, in site/
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict
	@echo "open site/index.html, or serve it with its search: $(RUN) -m http.server --directory site"

clean:
	rm -rf $(VENV) $(FLOWER) site

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# torch first, by its pinned version: left to itself, a resolver may choose a build with gigabytes of CUDA.
$(VENV)/.torch: $(VENV)/bin/python constraints.txt
	$(INSTALL) torch
	touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	$(INSTALL) --editable '.[demo]'
	touch $@

# curvlinops without its own dependencies: one of them asks for torchvision, which has no build beside this torch.
$(VENV)/.test: $(VENV)/.torch pyproject.toml
	$(INSTALL) --editable '.[test]'
	$(INSTALL) --no-deps curvlinops-for-pytorch backpack-for-pytorch
	touch $@

$(VENV)/.lint $(VENV)/.bench $(VENV)/.docs: $(VENV)/.%: $(VENV)/.torch pyproject.toml
	$(INSTALL) --editable '.[$*]'
	touch $@

# Flower's own versions of typer and rich.
$(FLOWER)/.test: constraints.txt pyproject.toml
	$(PYTHON) -m venv $(FLOWER)
	sed '/^typer==/d;/^rich==/d' constraints.txt > $(FLOWER)/constraints.txt
	$(FLOWER_INSTALL) torch
	$(FLOWER_INSTALL) --editable '.[cli,flower]' pytest pytest-timeout scikit-learn matplotlib
	touch $@
