# The same targets serve a developer and CI. PY is the interpreter of the environment in use.
PY ?= python

.PHONY: install lint types test test-avx2 test-full documented wheel golden

install:  ## the package and its development tools; CPU torch first, so that no CUDA build is pulled
	$(PY) -m pip install --quiet "torch==2.13.0"
	$(PY) -m pip install --quiet -e ".[dev]"

lint:
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types:
	$(PY) -m mypy

# Two processes of one thread each are almost twice as fast here as one process of two.
test:
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist loadfile

test-avx2:  ## the numeric subset as a laptop without AVX-512 would run it
	ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist loadfile tests/parity tests/model --ignore tests/parity/test_generation_equals_oracle.py --ignore tests/model/kernels

test-full:  ## with as many random cases as the docs name
	DGEMMA_FULL=1 OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist loadfile tests/engine/test_batch_equals_alone.py tests/generation/test_same_seed_same_text.py

wheel:
	$(PY) -m build --wheel --outdir dist .

documented:  ## the README word for word: wheel, empty environment, every block, every example
	$(PY) tools/run_documented.py README.md

golden:  ## write the golden tensors of `dgemma selfcheck` anew from the oracle
	$(PY) -m tools.make_golden
