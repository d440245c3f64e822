# The same targets serve a developer and CI. PY is the interpreter of the environment in use.
PY ?= python

.PHONY: install lint types test test-full documented newcomer docs editors others wheel dist lock sbom audit man golden web fuzz coverage

install:  ## the package and its development tools; CPU torch first, so that no CUDA build is pulled
	$(PY) -m pip install --quiet "torch==2.13.0" uv
	$(PY) -m uv pip install --quiet --python "$$($(PY) -c 'import sys; print(sys.executable)')" -e ".[dev]"

lint:
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types:
	$(PY) -m mypy

# Two processes of one thread each are almost twice as fast here as one process of two.
# A file stays in one process, which builds its oracles and models once; tests/conftest.py puts the slowest
# files first, so that none of them is left for the end.
PYTEST = OMP_NUM_THREADS=1 $(PY) -m pytest
TWO = -n 2 --dist loadfile --no-loadscope-reorder
AVX2 = ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2

test:
	$(PYTEST) $(TWO)

test-full:  ## with as many random cases as the docs name, and all numeric tests without AVX-512
	DGEMMA_FULL=1 $(PYTEST) $(TWO) $$(grep -rlE "^(from sizes )?import (sizes|IS_FULL|cases|full)" tests)
	$(AVX2) $(PYTEST) $(TWO) tests/parity tests/model --ignore tests/model/kernels

COVERED ?= tests

coverage:  ## lines and branches of dgemma that the tests run, as a dated result file; COVERED="tests/text tests/trace" for a part
	rm -rf build/coverage && mkdir -p build/coverage
	OMP_NUM_THREADS=1 $(PY) -m coverage run -m pytest $(TWO) $(COVERED)
	$(PY) -m coverage combine --quiet && $(PY) -m coverage json --quiet && $(PY) -m tools.coverage_figure $(COVERED)

# The page's files are part of the package: what is committed equals a build from the lock file.
WEB = src/dgemma/data/web

web:  ## build the playground from its sources, test it, and compare with what is committed
	cd web && npm ci --no-audit --no-fund && npm run check && npm test && npm run build
	git diff --exit-code --stat -- $(WEB)
	test -z "$$(git status --porcelain -- $(WEB))"

editors:  ## the VS Code extension: types, tests, package; the tests of both editors run with the others
	cd editors/vscode && npm ci --no-audit --no-fund && npm run check && npm test && npm run package

wheel:
	$(PY) -m build --wheel --outdir dist .

dist:  ## sdist, the wheel out of it, and their bytes once more from other directories
	$(PY) -m build --outdir dist .
	DGEMMA_FULL=1 $(PY) -m pytest tests/test_packaging.py
	sha256sum dist/*

documented:  ## the README word for word: wheel, empty environment, every block, every example
	$(PY) tools/run_documented.py README.md

newcomer:  ## a stranger's first hour: empty environment, README, tutorials, mistakes; writes docs/newcomer.md
	$(PY) -m tools.newcomer

docs:  ## the site in build/site: strict, no broken link, nothing loaded from another host
	$(PY) -m tools.build_docs

others:  ## mlx-vlm, an independent implementation, on tiny checkpoints and on our export for it; says so where it does not install
	$(PY) -m dgemma.cli.main conform mlx-vlm --geometries 3 || \
	{ status=$$?; test $$status -eq 3 && echo "mlx-vlm is not compared here: it cannot be installed"; }
	$(PY) -m tools.compare_mlx || { status=$$?; test $$status -eq 3; }

lock:  ## write the lock files anew: what is installed here, with the hashes of every platform
	$(PY) -m tools.make_lock

sbom:  ## the software bill of materials, in dist/
	$(PY) -m tools.make_sbom

audit:  ## known vulnerabilities of what is locked; a package that cannot be looked up is a failure
	$(PY) -m uv tool run --from pip-audit==2.10.1 pip-audit --strict --disable-pip --require-hashes -r locks/requirements.txt

man:  ## write the manual pages from the parsers
	$(PY) -m tools.make_man

FUZZ_MINUTES ?= 10

fuzz:  ## every kind of untrusted input, ten minutes each; corpora and findings in build/fuzz
	status=0; for target in $$($(PY) -m tools.fuzz --list | cut -d' ' -f1); do \
	    OMP_NUM_THREADS=1 $(PY) -m tools.fuzz $$target --minutes $(FUZZ_MINUTES) || status=1; done; exit $$status

golden:  ## write the golden tensors of `dgemma selfcheck` anew from the oracle
	$(PY) -m tools.make_golden
