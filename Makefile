# `make demo` runs the whole pipeline here, `make test` all tests. Both make the environments first.
PYTHON ?= $(shell command -v python3.11 || command -v python3)


.PHONY: setup flags lock lint test bench chaos demo down

setup:                 ## the environments, as their locks say; make setup WITH=autoawq makes that one as well
	@$(PYTHON) environments/setup.py setup $(if $(WITH),--with "$(WITH)")

flags:                 ## what the vLLM of another environment can be told: make flags OF=/opt/vllm/bin/python
	@$(PYTHON) environments/setup.py flags $(if $(OF),--python "$(OF)")

lock:                  ## resolves the locks again; make lock UPGRADE=1 takes the newest versions
	@$(PYTHON) environments/setup.py lock $(if $(UPGRADE),--upgrade)

lint: setup            ## style, types, direction of dependencies, SQL
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports --no-cache
	.venv/bin/sqlfluff lint --disable-progress-bar sql

test: setup            ## make test ARGS="tests/ledger -k claim" runs some; JOBS=1 one file after the other
	.venv/bin/pytest -n $(or $(JOBS),3) --dist loadfile --no-loadscope-reorder $(ARGS)

bench: setup
	.venv/bin/python -m benchmarks

chaos: setup           ## the recovery matrix, resumable; ARGS="--stages run --events 'disk full'" runs some
	.venv/bin/python -m tests.chaos $(ARGS)

demo: setup            ## MODEL=tiny-qwen3.5 SCHEME=fp8 ROWS=60 SIM=dgx-a100 KEEP=1 choose; the rest is the demo's own default
	@.venv/bin/python -m demo up $(if $(MODEL),--model "$(MODEL)") $(if $(SCHEME),--scheme "$(SCHEME)") $(if $(ROWS),--rows "$(ROWS)") $(if $(SIM),--sim "$(SIM)") $(if $(KEEP),--keep)

down:                  ## ends what `make demo KEEP=1` left running
	@.venv/bin/python -m demo down
