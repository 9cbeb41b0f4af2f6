# Everything runs in environments that `make env` builds here (.venv, .venv-vllm, .venv-sglang); nothing is installed elsewhere.
PYTHON ?= python3
ENGINE ?= vllm
PUSHES ?= 500
ROUNDS ?= 0
STEPS ?= 10000
ARGS ?=
# Both engines, unless one was asked for.
ASKED = $(if $(filter file,$(origin ENGINE)),,--engine $(ENGINE))
WITH_RAY = RAY_USAGE_STATS_ENABLED=0 PYTHONPATH=$(shell $(PYTHON) tools/versions.py folder ray)

.PHONY: env test test-slow test-versions test-frameworks check-all lint demo grpo bench bench-transports bench-sharded bench-sizes bench-waits bench-fleet bench-metrics bench-deltas bench-far-deltas bench-files bench-hosts bench-nodes bench-memory bench-pauses bench-lora bench-load bench-actors gpu faults faults-hosts faults-ray scenarios soak streams clean

env:  ## build the three virtual environments; a second time it only reinstalls what changed
	@$(PYTHON) tools/env.py all

test: env  ## the tests, with both engines running, in two processes
	.venv/bin/python -m pytest -m "not slow and not versions and not frameworks" -n 2 --no-loadscope-reorder $(ARGS)

test-slow: env  ## the tests that take long or much memory
	.venv/bin/python -m pytest -m slow $(ARGS)

test-versions: env  ## every supported version of both engines, and the table of docs/versions.md
	@$(PYTHON) tools/versions.py engines
	.venv/bin/python -m pytest tests/versions --shown benchmarks/results/versions.json $(ARGS)
	@$(PYTHON) tools/versions.py table

test-frameworks: env  ## trainers of TRL, Hugging Face, vLLM's own protocol, DeepSpeed, Megatron-Core, Ray, verl and others, and the table of docs/versions.md
	@$(PYTHON) tools/versions.py frameworks
	.venv/bin/python -m pytest -m frameworks tests/frameworks tests/trainers tests/ray tests/verl --shown benchmarks/results/frameworks.json $(ARGS)
	@$(PYTHON) tools/versions.py table

check-all:  ## all there is to check, which takes hours
	$(MAKE) lint
	$(MAKE) test
	$(MAKE) test-slow
	$(MAKE) test-versions
	$(MAKE) test-frameworks
	$(MAKE) scenarios
	$(MAKE) scenarios STEPS=500 ENGINE=vllm
	$(MAKE) scenarios STEPS=500 ENGINE=sglang
	$(MAKE) faults ROUNDS=100
	$(MAKE) faults ENGINE=vllm ARGS=--stays
	$(MAKE) faults ENGINE=vllm ARGS=--quantised
	$(MAKE) faults ENGINE=drafts
	$(MAKE) faults ENGINE=reference ARGS=--adapters
	$(MAKE) faults ENGINE=reference ARGS=--changes
	$(MAKE) faults-ray ROUNDS=100
	$(MAKE) faults-ray ROUNDS=10 ARGS="--engines real"
	$(MAKE) soak
	$(MAKE) streams

lint:
	@$(PYTHON) tools/env.py trainer
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy --strict common vllm_weightsync sglang_weightsync
	.venv/bin/lint-imports

demo:  ## push new weights into a running engine: make demo ENGINE=vllm|sglang
	@$(PYTHON) tools/env.py trainer $(ENGINE)
	.venv/bin/python examples/demo.py --engine $(ENGINE) $(ARGS)

grpo: env  ## a tiny model learns by GRPO on this CPU: make grpo ENGINE=vllm|sglang, ARGS=compare with stale and reloaded weights beside it
	@$(PYTHON) tools/versions.py frameworks
	.venv/bin/python -m benchmarks.grpo --engine $(ENGINE) $(ARGS)

bench: env  ## pushes into the engines beside their own ways to load
	.venv/bin/python benchmarks/bench.py $(ARGS)

bench-transports: env  ## transports beside the bare libraries below them, and how cost grows: make bench-transports ARGS=scale
	.venv/bin/python benchmarks/transports.py $(ARGS)

bench-sharded: env  ## a model that FSDP2 has sharded, beside gathering it first; ARGS="--engine sglang": into two ranks
	.venv/bin/python benchmarks/sharded.py $(ARGS)

bench-sizes: env  ## what a push costs by the size of a model and by the number of its tensors
	.venv/bin/python benchmarks/sizes.py $(ARGS)

bench-waits: env  ## how long a trainer waits in push_async, and what casting costs
	.venv/bin/python benchmarks/waits.py $(ARGS)

bench-fleet: env  ## what each engine costs a trainer, extrapolated to 1,000 engines
	.venv/bin/python -m benchmarks.fleet $(ARGS)

bench-metrics: env  ## what it costs to tell of a push in metrics and logs, as a share of the push
	.venv/bin/python -m benchmarks.metrics $(ARGS)

bench-deltas: env  ## finding, making and applying what changed in a tensor, and the bytes of each change
	.venv/bin/python -m benchmarks.deltas $(ARGS)

bench-far-deltas: env  ## pushes of what has changed to another host over a slow link; as root
	.venv/bin/python -m benchmarks.far_deltas $(ARGS)

bench-files: env  ## files of ours that a warm push into SGLang executes: make bench-files ARGS="--against COMMIT"
	.venv/bin/python benchmarks/files.py $(ARGS)

bench-hosts: env  ## pushes between hosts over slow links, beside one TCP stream; as root
	.venv/bin/python benchmarks/hosts.py $(ARGS)

bench-nodes: env  ## pushes over slow links into one SGLang over two hosts, and the bytes that they take; as root
	.venv/bin/python -m benchmarks.nodes $(ARGS)

bench-memory: env  ## the memory that a push adds to every process of a trainer of four
	.venv/bin/python -m benchmarks.memory $(ARGS)

bench-pauses: env  ## the pause of a push and rollbacks, in every way that weights get served
	.venv/bin/python -m benchmarks.pauses $(ARGS)

bench-lora: env  ## pushes of a LoRA adapter, beside a folder that the engine loads: make bench-lora ENGINE=vllm|sglang
	.venv/bin/python -m benchmarks.lora $(ASKED) $(ARGS)

bench-actors: env  ## pushes into an engine in a Ray actor, beside one that is a server
	@$(PYTHON) tools/versions.py frameworks
	$(WITH_RAY) .venv/bin/python -m benchmarks.actors $(ARGS)

gpu:  ## what one GPU can show, in a Python that has torch for CUDA: make gpu PYTHON=python3 [WHEELS=folder]
	@$(PYTHON) tools/gpu.py $(if $(WHEELS),--wheels $(WHEELS))

faults: env  ## every fault at every place, and ROUNDS more at random instants: make faults ROUNDS=100 ENGINE=vllm|sglang
	.venv/bin/python -m tests.faults --results benchmarks/results --rounds $(ROUNDS) $(ASKED) $(ARGS)

faults-hosts: env  ## random faults during pushes between many hosts: make faults-hosts ROUNDS=200, ARGS="--mbit 400"; as root
	.venv/bin/python -m tests.hosts.faults --results benchmarks/results --rounds $(ROUNDS) $(ARGS)

faults-ray: env  ## processes of Ray actors die during pushes: make faults-ray ROUNDS=100, or ROUNDS=10 ARGS="--engines real"
	@$(PYTHON) tools/versions.py frameworks
	$(WITH_RAY) .venv/bin/python -m tests.ray.faults --results benchmarks/results --rounds $(ROUNDS) $(ARGS)

scenarios: env  ## random sequences of all that may happen: make scenarios STEPS=10000, or with STEPS=500 ENGINE=vllm|sglang
	.venv/bin/python -m tests.scenarios --results benchmarks/results --steps $(STEPS) $(or $(ASKED),--engine reference) $(ARGS)

soak: env  ## push 500 times and see that no process grows: make soak PUSHES=500 ENGINE=vllm|sglang (default: both)
	.venv/bin/python benchmarks/soak.py --pushes $(PUSHES) $(ASKED) $(ARGS)

bench-load: env  ## pushes of 1.19 GB without a break while clients read streams: make bench-load ARGS="--nice 19"
	.venv/bin/python -m benchmarks.under_load $(ARGS)

streams: env  ## push while clients read streams: make streams ENGINE=vllm|sglang (default: both)
	.venv/bin/python benchmarks/streams.py $(ASKED) $(ARGS)

clean:
	rm -rf .venv .venv-gpu .venv-vllm .venv-sglang .work dist build
