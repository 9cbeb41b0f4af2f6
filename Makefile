# Everything runs in environments that `make env` builds here (.venv, .venv-vllm, .venv-sglang); nothing is installed elsewhere.
PYTHON ?= python3
ENGINE ?= vllm
ARGS ?=

.PHONY: env test lint demo bench clean

env:  ## build the three virtual environments; a second time it only reinstalls what changed
	@$(PYTHON) tools/env.py all

test: env  ## all tests, with both engines running
	.venv/bin/python -m pytest $(ARGS)

lint:
	@$(PYTHON) tools/env.py trainer
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy --strict common
	.venv/bin/lint-imports

demo:  ## push new weights into a running engine: make demo ENGINE=vllm|sglang
	@$(PYTHON) tools/env.py trainer $(ENGINE)
	.venv/bin/python examples/demo.py --engine $(ENGINE) $(ARGS)

bench: env
	.venv/bin/python benchmarks/bench.py $(ARGS)

clean:
	rm -rf .venv .venv-vllm .venv-sglang .work dist build
