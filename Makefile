# `make demo` shows a wrong gradient become right; `make test` runs the test suite. Both build .venv first if it is
# missing or older than what pins it.

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip --disable-pip-version-check install --quiet --constraint constraints.txt
INSTALLED := .venv/.installed

.PHONY: demo test

demo: $(INSTALLED)
	$(BIN)/ds-gradfix verify examples/zero3_sequence_parallel.json

test: $(INSTALLED)
	$(BIN)/python -m pytest --quiet --durations=10 --numprocesses 2 --dist loadfile

# torch comes first and alone, in exactly this spelling: another package that asks for torch in its own words may be
# given a different build of it. DeepSpeed's own setup imports torch, so it is built without isolation, and none of its
# operators is compiled ahead of use.
$(INSTALLED): Makefile constraints.txt pyproject.toml setup.py ds_gradfix_startup.pth ds_gradfix_startup.start
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo 'ds-gradfix needs Python 3.10 or later: make PYTHON=python3.11'; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) torch==2.13.0
	$(PIP) wheel numpy packaging setuptools ninja pybind11
	DS_BUILD_OPS=0 $(PIP) --no-build-isolation deepspeed==0.19.8
	$(PIP) --no-build-isolation --editable '.[test,examples]'
	touch $@
