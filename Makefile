# make demo   set up and run the main job on the embedded images
# make test   set up and run all tests
# make check  formatting, lint, types
# make docs   the documentation site, into build/site
# make bench  run a benchmark file: BENCH=benchmarks/NAME.toml
VENV ?= .venv
OUT ?= fedgist-demo
BENCH ?= benchmarks/fedkt_csd_fashion.toml
BIN := $(VENV)/bin

.PHONY: demo test check docs fmt bench clean

demo: $(VENV)/.run
	$(BIN)/fedgist run --out $(OUT)

test: $(VENV)/.dev
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

fmt: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.dev
	$(BIN)/fedgist bench $(BENCH)

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache

$(VENV)/.run: pyproject.toml constraints.txt scripts/setup.sh
	scripts/setup.sh $(VENV)
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt scripts/setup.sh
	scripts/setup.sh $(VENV) codecs,encoders,flower,onnx,docs,dev
	$(BIN)/pip -q install --no-deps animal-shape-mnist==0.39  # its readers want TensorFlow
	touch $@ $(VENV)/.run
