# Two commands on a fresh machine: make demo, make test.
PYTHON ?= python3
VENV := .venv
INSTALL := $(VENV)/bin/pip install --quiet --disable-pip-version-check --editable '.[dev]'
INSTALLED := $(VENV)/.installed

.PHONY: demo test lint matrix clean

demo: $(INSTALLED)
	$(VENV)/bin/zerofix verify

test: $(INSTALLED)
	$(VENV)/bin/pytest -n 4 --dist loadfile

lint: $(INSTALLED)
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy zerofix

# Every release of DeepSpeed, which takes hours; parts of it (.venv/bin/nox --list shows them):
# .venv/bin/nox -s quick "verify(0.17.6)" "release(0.17.6)"
matrix: $(INSTALLED)
	$(VENV)/bin/nox

# torch for CUDA, which pip takes where it finds none for CPUs alone, asks for a triton of its own.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --constraint constraints.txt || { \
		grep -v '^triton' constraints.txt > $(VENV)/constraints.txt; \
		$(INSTALL) --constraint $(VENV)/constraints.txt; }
	touch $@

clean:
	rm -rf $(VENV) .deepspeed .nox
