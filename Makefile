# make setup            .venv with rmvdb and everything that its tests need, in the versions of constraints.txt
# make check            the inner loop, two minutes: lint, types, import contracts, unit tests, and each store but the server
# make test             all checks, and all tests but the long ones; JOBS=2 TMPDIR=/var/tmp if memory is short
# make long             the long tests: outages, kills at each call, every state of the protocol; then two short stress runs.
#                       MINUTES=15 SEED=any begins no further file after 15 minutes, in an order by the seed
# make slices           the two short stress runs alone, side by side, five minutes
# make demo [DATA=dir]  an upgrade from the first command to the last, on pictures made here or on those of a folder
# make curves DATA=dir   what an upgrade is worth at each moment, on models that others trained: 20 minutes on two idle cores
# make others DATA=dir  rmvdb beside embedflow, isotrieve and a switch of an alias, on one gallery
# make bench            what rmvdb adds to its parts, beside the targets: ten minutes; make bench ROWS="search" RECORDS=1000000 DIM=768 T=0.9
# make docs             the documentation in site/; a broken link, or a page that mkdocs.yml does not name, fails
# make stress           upgrades under load and faults: make stress SECONDS=3600 ENGINE=server REGISTRY=postgres SEED=7 ROLL_BACK=1
# make clean            take away what the others made
#
# PYTHON=python3.12 chooses the interpreter that .venv is made with. Packages come from wherever pip is told to look.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
DOCS_READY := .venv/.docs-ready
CURVES_READY := .venv/.curves-ready
OTHERS_READY := .venv/.others-ready

# Hundreds of processes start in a run, and each would compile rmvdb and the tests again.
unexport PYTHONDONTWRITEBYTECODE

JOBS = 7
LONG_JOBS = 4

.PHONY: setup lint check test long slices slice-lite slice-server demo curves others bench docs stress clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("rmvdb needs Python 3.11 or newer; name one: make setup PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1' # the first that knows --group
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable . --group test
	@touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

check: lint
	$(BIN)/python -m pytest -n 2 -m "not server and not postgres and not bench" tests/unit tests/contract

# More processes than cores, since the tests mostly wait: for leases, graces and servers. A process takes a file, or a single test of
# a few long files (tests/support/spread.py). The folders run in their order, since the unit tests at the end are short: xdist would
# begin with the file of the most tests, which is not the longest. A failure is shown at once, since a run that is cut off shows
# nothing at its end. A process that dies ends the run, since xdist would begin its test again.
SPREAD = --instafail --dist loadfile --no-loadscope-reorder --max-worker-restart 0

test: lint
	$(BIN)/python -m pytest -n $(JOBS) $(SPREAD) -m "not bench and not long"
	@echo "== all of it passed; make long runs the long tests"

# What tests/support/long_tests.py names, and then the two short stress runs. These tests compute more and start processes of their
# own, so fewer run at a time.
long: setup
	$(BIN)/python -m pytest -n $(LONG_JOBS) $(SPREAD) -m "long and not bench" \
		$(if $(MINUTES),--minutes $(MINUTES)) $(if $(SEED),--seed $(SEED))
	@$(MAKE) --no-print-directory slices

# Two short stress runs side by side: make slices
slices:
	@$(MAKE) --no-print-directory -j 2 slice-lite slice-server

slice-lite: setup
	$(BIN)/python -m tests.stress --engine lite --registry sqlite --records 2000 --seconds 30 --seed 295

slice-server: setup
	$(BIN)/python -m tests.stress --engine server --registry postgres --records 6000 --seconds 120 --seed 182

demo: setup
	$(BIN)/python examples/demo.py --out demo $(if $(DATA),--data "$(DATA)")

$(CURVES_READY): $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --group curves
	@touch $@

curves: $(CURVES_READY)
	$(BIN)/python -m tests.bench.curves $(if $(DATA),--data "$(DATA)") $(if $(CASES),--cases $(CASES)) --page docs/research/curves.md

$(OTHERS_READY): $(CURVES_READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --group others
	@touch $@

others: $(OTHERS_READY)
	$(BIN)/python -m tests.bench.others $(if $(DATA),--data "$(DATA)") $(if $(RECORDS),--records $(RECORDS)) \
		--page docs/research/others.md

bench: setup
	@$(BIN)/python -m tests.bench.speed $(if $(ROWS),--rows $(ROWS)) $(if $(RECORDS),--records $(RECORDS)) $(if $(DIM),--dim $(DIM)) \
		$(if $(T),--t $(T)) $(if $(CALLS),--calls $(CALLS)) $(if $(SMALL),--small)

$(DOCS_READY): $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --group docs
	@touch $@

docs: $(DOCS_READY)
	$(BIN)/python docs/generate.py
	$(BIN)/zensical build --clean --strict

stress: setup
	$(BIN)/python -m tests.stress $(if $(SECONDS),--seconds $(SECONDS)) $(if $(ENGINE),--engine $(ENGINE)) \
		$(if $(REGISTRY),--registry $(REGISTRY)) $(if $(RECORDS),--records $(RECORDS)) $(if $(SEED),--seed $(SEED)) \
		$(if $(INSTANT),--instant-rollback) $(if $(ROLL_BACK),--roll-back) $(if $(METHOD),--method $(METHOD))

clean:
	rm -rf "/dev/shm/rmvdb-tests-$$(id -u)"
	rm -rf .venv build dist demo site docs/reference .cache .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
