# Two commands do everything on a fresh machine: `make demo` and `make test`.
# Everything they need is installed by this file from pinned lists.

PY      := .venv/bin/python
ENGINE  := build/engine-venv/bin/python
SOURCES := sdk server integrations tests requirements
# Property tests draw the same examples on every machine; pytest by hand draws new ones.
SAME_EXAMPLES := --hypothesis-profile=ci
# Recipes must fail with the command, not with the pipe behind it.
SHELL   := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

# Runs a tier and says how long it took.
timed = @start=$$SECONDS; echo "== $(1)"; $(2); echo "== $(1): $$(( (SECONDS - start) / 60 )) min $$(( (SECONDS - start) % 60 )) s"

.PHONY: help
help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: setup
setup: ## make .venv: linters, type checker, fast tests
	@python3 requirements/setup_env.py dev

.PHONY: setup-engine
setup-engine: ## make build/engine-venv: real vLLM for the CPU, NIXL (3.7 GB)
	@python3 requirements/setup_env.py engine

.PHONY: models
models: setup-engine ## build the two small models into the cache folder
	@$(ENGINE) -m turncache_server.launch.models tiny smollm2

.PHONY: demo
demo: models ## run the main job on real engines and show what it brings (DEMO="--quick")
	@$(ENGINE) -m turncache_tools demo $(DEMO)

.PHONY: lint
lint: setup ## ruff, formatting, types, import contracts
	@.venv/bin/ruff check $(SOURCES)
	@.venv/bin/ruff format --check --quiet $(SOURCES)
	@.venv/bin/mypy
	@.venv/bin/lint-imports --no-cache | tail -n 3

.PHONY: test-fast
test-fast: setup ## fast tests: no engine
	$(call timed,fast tier,$(PY) -m pytest -q -n 2 --dist loadfile -m "not scheduler and not engine" \
		$(SAME_EXAMPLES) --ignore tests/integrations tests)

.PHONY: test-scheduler
test-scheduler: setup-engine ## vLLM's real scheduler, no model
	$(call timed,scheduler tier,$(ENGINE) -m pytest -q -m scheduler $(SAME_EXAMPLES) tests/scheduler)

.PHONY: test-engine
test-engine: models ## real engines, one stack at a time
	$(call timed,engine tier,$(ENGINE) -m pytest -q tests/engine)

.PHONY: test-openai
test-openai: setup ## the client on several versions of openai
	$(call timed,openai versions,$(PY) -m tests.contract.openai_versions)

.PHONY: test-foreign
test-foreign: setup ## the client inside other frameworks, in environments of their own
	$(call timed,LangGraph,$(PY) -m pytest -q -n 2 --dist loadfile $(SAME_EXAMPLES) tests/integrations)
	$(call timed,foreign tier,$(PY) -m tests.foreign.environments)

.PHONY: test
test: lint test-fast test-openai test-foreign test-scheduler test-engine ## everything that CI runs

.PHONY: perf-engine
perf-engine: setup-engine ## free queue, steps/s, peeks, traces: against vLLM, LRU and clairvoyance
	@$(ENGINE) -m tests.perf.bench_traces
	@$(ENGINE) tests/perf/bench_free_queue.py
	@$(ENGINE) -m tests.perf.bench_steps
	@$(ENGINE) -m tests.perf.bench_peek

.PHONY: perf-engine-pair
perf-engine-pair: models ## what is kept, returned and handed over, on real engines (PERF="kept")
	@$(ENGINE) -m tests.perf.bench_engines $(PERF)

.PHONY: twin
twin: setup-engine ## two schedulers that pull from each other, at random (TWIN_STEPS=1000000)
	@$(ENGINE) -m tests.scheduler.twin --steps $(or $(TWIN_STEPS),1000000) 2>/dev/null

.PHONY: soak
soak: models ## random agents on a real pair that is frozen, killed and switched (SOAK_S=480)
	@$(ENGINE) -m tests.engine.soak --seconds $(or $(SOAK_S),480)

.PHONY: drain
drain: models ## drain and restart every engine of two real pairs in turn, under load
	@$(ENGINE) -m tests.engine.drain

.PHONY: perf-client
perf-client: setup ## time the client against the stock one
	@$(PY) -m tests.perf.bench_client

.PHONY: perf-langgraph
perf-langgraph: setup ## time the LangGraph integration against the stock model
	@$(PY) -m tests.perf.bench_langgraph

.PHONY: perf-router
perf-router: setup ## time the router against vllm-router (PERF="--long")
	@$(PY) -m tests.perf.bench_router $(PERF)

.PHONY: perf-plan
perf-plan: setup ## the planner against published measurements, and its speed
	@$(PY) -m tests.perf.bench_plan

.PHONY: perf-plan-pair
perf-plan-pair: models ## calibrate a real pair, and the planner against what it measures (PERF="--resume")
	@$(ENGINE) -m tests.perf.bench_plan_pair $(PERF)

.PHONY: perf-aiperf
perf-aiperf: models ## aiperf, in an environment of its own, on our router and a real pair
	@$(ENGINE) -m tests.perf.bench_aiperf

.PHONY: perf-foreign-router
perf-foreign-router: models ## a real pair behind the real vllm-router, sessions found in Redis (PERF="--find peers")
	@$(ENGINE) -m tests.perf.foreign_router $(PERF)

.PHONY: perf-router-replicas
perf-router-replicas: setup ## two routers, same engines: agreement, and how often a source is unknown (PERF="--refused 0.05")
	@$(PY) -m tests.perf.bench_replicas $(PERF)

.PHONY: perf-admission
perf-admission: models ## admission at twice the working set: simulated, and on a real engine (PERF="simulated")
	@$(ENGINE) -m tests.perf.bench_admission $(PERF)

.PHONY: fuzz-router
fuzz-router: setup ## 100,000 malformed and hostile requests against the router (FUZZ="--requests 1000")
	@$(PY) -m tests.fuzz.router $(FUZZ)

.PHONY: bench
bench: models ## off against ours and stock's returns on real pairs (BENCH="--only 1 --rounds 1 --resume")
	@$(ENGINE) -m tests.perf.bench_pays $(BENCH)

.PHONY: perf-langgraph-shares
perf-langgraph-shares: models ## count what a LangGraph agent does not compute again, on real engines
	@$(ENGINE) -m tests.perf.langgraph_shares

.PHONY: clean
clean: ## remove what was built here; the cache of models stays
	@rm -rf build .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis
