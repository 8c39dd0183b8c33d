# `make test` and `make demo` work in a bare clone: they make their own .venv. See CONTRIBUTING.md.
#   PYTHON=python3.12     the interpreter to build .venv with
#   TORCH=torch==2.11.0   the torch to install, or "newest"; default: the interpreter's own, else the pinned one
#   ARGS="-k masks -x"    more arguments for pytest, the demo or the docs

PYTHON ?= python3
TORCH ?=
ARGS ?=
# The folder of the virtual environment; test-torch has one of its own.
VENV ?= .venv
export TORCH VENV
# Tests start hundreds of Python processes, which would each compile torch's sources again.
unexport PYTHONDONTWRITEBYTECODE
# The docs theme advertises another tool.
export NO_MKDOCS_2_WARNING := 1

RUN = $(VENV)/bin/python
# Beside the pinned Triton: the newest that `anyflex_triton.backend` names.
NEWEST_TRITON := $(CURDIR)/.venv/newest-triton/3.9.0
READY := @$(PYTHON) scripts/development_environment.py

.NOTPARALLEL:
.PHONY: help setup new-user test-transformers test test-torch test-newest-torch soak conformance conformance-cpu sanitize test-arm test-clang metal-compiler test-metal test-mps test-xpu test-nvidia bench-nvidia test-newest-triton triton-compiles demo check lint format types imports bench docs docs-serve wheels clean

help:
	@echo "make demo         train a small transformer on packed documents, about a minute"
	@echo "make test         the tests"
	@echo "make check        everything that CI runs: lint, types, imports, docs, test, test-newest-torch, test-newest-triton"
	@echo "make test-torch TORCH=torch==2.15.0  the tests with another torch, without CUDA; test-newest-torch: those that CI runs with the newest"
	@echo "make test-transformers TRANSFORMERS=4.57.6  plugins/transformers with another transformers, the oldest by default"
	@echo "make bench        what import, scan, front end, masks, kit and small CPU calls cost; fails above a limit"
	@echo "make conformance  every case of the conformance kit for the reference, a minute"
	@echo "make conformance-cpu  every case for the CPU backend at each level of this processor, a minute a level"
	@echo "make new-user     README's first commands in a fresh clone; fails above five minutes, on an idle machine"
	@echo "make soak         the tests in full: all random calls, masks and mods, whole kits and builds, all compiles"
	@echo "make sanitize     the CPU backend's native library under sanitizers; test-arm: on 64-bit ARM; test-clang: by clang"
	@echo "make test-metal   the kernels for Apple GPUs in the emulator, in full; metal-compiler: installs the Clang it needs"
	@echo "make test-mps     on a Mac with Apple silicon: tests, conformance kit, Apple's compiler and bench, in one report"
	@echo "make test-xpu     on a machine with an Intel GPU: its tests, and the conformance kit on it"
	@echo "make test-nvidia  on a machine with a Hopper GPU: kit, random calls, sanitizer, first calls; bench-nvidia: all peers"
	@echo "make test-newest-triton  what the newest Triton that was tried makes of the GPU kernels, without a GPU"
	@echo "make triton-compiles  what Triton makes of every configuration, without a GPU; fails where forward spills"
	@echo "make setup | lint | format | types | imports | docs | docs-serve | wheels | clean"

setup:
	$(READY) lint test docs demo

new-user:
	@bash scripts/new_user.sh

# Two at a time: most tests have one thread. ARGS="-n 0" is one after the other. In the files' order:
# those of the backends, few tests that take minutes, would else come last. CI makes a package of
# AOTInductor, whose C++ compiles for long, with the newest torch.
test:
	$(READY) test
	@$(RUN) -m pytest -n 2 --dist loadfile --no-loadscope-reorder --ignore=tests/compile/test_aoti.py $(ARGS)

# A torch for CUDA is made to run without, in a minute: scripts/torch_without_cuda.py.
test-torch test-newest-torch: VENV := .venv-torch
test-torch test-newest-torch: export WITHOUT_CUDA := 1
test-torch:
	$(if $(TORCH),,$(error name a torch: make test-torch TORCH=torch==2.15.0))
	$(READY) test
	@$(RUN) -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

# What another torch can break: tracing, autograd, compiling, export, routing, and which types calls take.
# `make test-torch` runs all.
test-newest-torch: TORCH := newest
test-newest-torch:
	$(READY) test
	@$(RUN) -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder $(addprefix tests/,core compile spellings/test_accepted.py spellings/test_compiled.py spellings/test_torch_derivatives.py registry/test_torch_bundle.py mods/test_gradients_stopped.py misuse/test_untraceable_mods.py torch_routing/test_switch.py) $(ARGS)
	@$(RUN) -m anyflex conformance --backend cpu --quick $(foreach part,backward compiled declared forward inputs precision run_time state,--case '$(part)/*')

# The tests in full, hours: of random calls, compiles and kits `make test` runs a part (tests/soak.py).
soak: $(NEWEST_TRITON)
	$(READY) test
	@CI=1 ANYFLEX_SOAK=1 $(RUN) -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)
	@ANYFLEX_SOAK=1 PYTHONPATH=$(NEWEST_TRITON) $(RUN) -m pytest -n 2 $(wildcard backends/cuda/tests/test_compiled_*.py) $(ARGS)
	@$(RUN) bench/triton_compiles.py --compare
	@PYTHONPATH=$(NEWEST_TRITON) $(RUN) bench/triton_compiles.py --compare

conformance:
	$(READY) test
	@$(RUN) -m anyflex conformance --backend reference --require all $(ARGS)

# One minute a level on two cores: ARGS="--jobs 1" is one process, ARGS="--case 'backward/*'" a part.
conformance-cpu:
	$(READY) test
	@bash scripts/cpu_conformance.sh $(RUN) --jobs 2 $(ARGS)

# The native library alone: a compiler and CMake are all they need.
sanitize:
	@bash scripts/native_checks.sh sanitize

test-arm:
	@bash scripts/native_checks.sh arm

test-clang:
	@bash scripts/native_checks.sh clang

# Clang 19 compiles Metal kernels for the emulator in backends/mps/tests.
metal-compiler:
	@bash scripts/metal_compiler.sh

# An hour on two cores, which METAL_SECONDS=3600 holds. ARGS goes to the kits: ARGS="--variant races-random --case 'decode/*'".
test-metal:
	$(READY) test
	@began=$$(date +%s) && \
	(cd backends/mps && CI=1 ANYFLEX_SOAK=1 ../../$(RUN) -m pytest -q -n 2 -m "not mps") && \
	$(RUN) backends/mps/tests/emulated_kits.py --jobs 2 $(ARGS) && \
	took=$$(($$(date +%s) - began)) && echo "== test-metal: $$took s" && \
	[ $$took -le $${METAL_SECONDS:-$$took} ]

# The report is build/mps/report.txt.
test-mps:
	$(READY) apple
	@bash scripts/apple_checks.sh $(RUN) build/mps

# Needs a torch for XPU: see docs/xpu.md.
test-xpu:
	$(READY) test
	@cd backends/xpu && ../../$(RUN) -m pytest -m xpu $(ARGS)
	@$(RUN) -m anyflex conformance --backend xpu --require all

# TORCH names a torch for CUDA. What they print and report is in build/nvidia.
test-nvidia:
	$(READY) test
	@bash scripts/nvidia_checks.sh $(RUN) check build/nvidia/check
	@bash scripts/nvidia_checks.sh $(RUN) first-calls build/nvidia/first-calls

bench-nvidia:
	$(READY) test
	@bash scripts/nvidia_checks.sh $(RUN) measure build/nvidia/measure

# The oldest transformers that plugins/transformers names, with the packages that it wants.
TRANSFORMERS ?= 4.57.6
test-transformers:
	$(READY) test
	@$(RUN) -m pip install -qq --upgrade --target $(VENV)/transformers/$(TRANSFORMERS) transformers==$(TRANSFORMERS)
	@PYTHONPATH=$(CURDIR)/$(VENV)/transformers/$(TRANSFORMERS) $(RUN) -m pytest -q -n 2 plugins/transformers/tests $(ARGS)

# A forward of Hopper's and of Blackwell's kernels, Hopper's decoding, and the portable forward: `make soak` compiles all,
# with the pinned Triton too.
test-newest-triton: $(NEWEST_TRITON)
	$(READY) test
	@PYTHONPATH=$(NEWEST_TRITON) $(RUN) -m pytest -q -n 2 $(filter-out %_backward.py %_once.py,$(wildcard backends/cuda/tests/test_compiled_*.py)) $(ARGS)
	@PYTHONPATH=$(NEWEST_TRITON) $(RUN) bench/triton_compiles.py --targets hopper,amd --types bfloat16 --dims 128 --patterns causal --kernels forward --compare --brief

$(NEWEST_TRITON):
	$(READY) test
	@$(RUN) -m pip install -qq --no-deps --target $@ triton==$(notdir $@)

# Three quarters of an hour; ARGS="--record" writes bench/results/triton_compiles.md, and all to build/results.
triton-compiles:
	$(READY) test
	@$(RUN) bench/triton_compiles.py $(ARGS)

demo:
	$(READY) demo
	@$(RUN) -m anyflex demo --plots demo-output $(ARGS)

check:
	@bash .ci/run

lint:
	$(READY) lint
	@$(RUN) -m ruff check --output-format concise .
	@$(RUN) -m ruff format --check .
	@$(VENV)/bin/lint-imports --no-logo --no-cache
	@$(RUN) scripts/prose.py

format:
	$(READY) lint
	@$(RUN) -m ruff check --fix .
	@$(RUN) -m ruff format .

types:
	$(READY) lint
	@$(RUN) -m mypy --no-error-summary

imports:
	$(READY) test
	@$(RUN) bench/import_time.py --processes 5

bench:
	$(READY) test
	@$(RUN) bench/import_time.py
	@$(RUN) bench/torch_import.py
	@$(RUN) bench/registry_scan.py
	@$(RUN) bench/front_end.py --rounds 10 --json bench/results/front_end.json
	@$(RUN) bench/serving_host.py --rounds 10 --json bench/results/serving_host.json
	@$(RUN) bench/warm_call.py
	@$(RUN) bench/paged_cache.py
	@$(RUN) bench/block_masks.py
	@$(RUN) bench/conformance_time.py
	@$(RUN) bench/cpu_first_calls.py
	@$(RUN) bench/cpu_precision.py

docs:
	$(READY) docs
	@$(RUN) -m mkdocs build --strict $(ARGS)

docs-serve:
	$(READY) docs
	@$(RUN) -m mkdocs serve $(ARGS)

wheels:
	$(READY) test
	@$(RUN) scripts/ready_kernels.py
	@ANYFLEX_RELEASE=1 ANYFLEX_CPU_REQUIRE_LIBRARY=1 $(RUN) -m pip wheel -qq --no-deps --wheel-dir dist . ./backends/cpu ./backends/triton ./backends/xpu ./backends/cuda ./backends/mps ./plugins/transformers ./plugins/vllm

clean:
	rm -rf .venv .venv-torch dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
