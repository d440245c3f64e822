"""forward_backward.cpp, compiled on this machine at first use, and called through ctypes.

Where it is not available, `kernel()` is None and sampling/forward_backward.py does the same work with numpy.
"""

from __future__ import annotations

import ctypes
import logging
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dgemma.kernels.kernel_cache import NoKernelError, UnsafeCacheError, load_kernel

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_SOURCE = Path(__file__).with_name("forward_backward.cpp")
_FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-shared", "-fPIC")
_POINTER, _LONG, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
_ARRAYS = (
    "edge_from", "edge_to", "edge_class_set", "class_set_begins", "class_set_members", "begins",
    "transition_class", "transition_to",
)  # fmt: skip
_LOG = logging.getLogger(__name__)


class _Dfa(ctypes.Structure):
    """`Dfa` of the .cpp."""

    _fields_ = [
        *((name, _LONG) for name in ("states", "classes", "edges", "sets", "members")),
        *((name, _POINTER) for name in _ARRAYS),
    ]


@dataclass(frozen=True)
class ForwardBackward:
    """The compiled library. `dfa` is a `ClassDFA`, and arrays have the shapes of its module."""

    library: Any

    def sum_sets(self, dfa: Any, emissions: Floats, *, adds: bool) -> Floats:
        """The log mass of each class set, or that of its best class: [canvas, classes] -> [canvas, sets]."""
        emissions = np.ascontiguousarray(emissions)
        assert emissions.shape[1] == dfa.num_classes, emissions.shape
        sums = np.empty((len(emissions), len(dfa.class_set_begins)))
        self.library.sum_sets(_struct(dfa), emissions.ctypes.data, len(emissions), adds, sums.ctypes.data)
        return sums

    def backward(self, dfa: Any, sums: Floats, final: Floats, *, adds: bool) -> Floats:
        """`final` [states]: the last row."""
        betas = np.empty((len(sums) + 1, dfa.num_states))
        betas[-1] = final
        self.library.backward(_struct(dfa), sums.ctypes.data, len(sums), adds, betas.ctypes.data)
        return betas

    def marginals(self, dfa: Any, emissions: Floats, start_state: int, sums: Floats, betas: Floats) -> Floats:
        emissions, betas = np.ascontiguousarray(emissions), np.ascontiguousarray(betas)
        assert betas.shape == (len(emissions) + 1, dfa.num_states), betas.shape
        assert 0 <= start_state < dfa.num_states, start_state
        scratch = np.empty(dfa.num_states), np.empty(dfa.num_states), np.empty(sums.shape[1])
        found = np.empty_like(emissions)
        self.library.marginals(
            _struct(dfa),
            *(array.ctypes.data for array in (emissions, sums, betas)),
            len(emissions),
            start_state,
            *(array.ctypes.data for array in (*scratch, found)),
        )
        return found

    def best_path(self, dfa: Any, values: Floats, start_state: int, betas: Floats) -> Ints:
        values, betas = np.ascontiguousarray(values), np.ascontiguousarray(betas)
        assert betas.shape == (len(values) + 1, dfa.num_states), betas.shape
        assert 0 <= start_state < dfa.num_states, start_state
        path = np.empty(len(values), np.int64)
        done = self.library.best_path(
            _struct(dfa), values.ctypes.data, betas.ctypes.data, len(values), start_state, path.ctypes.data
        )
        if done < len(values):
            raise ValueError(f"position {done}: the state has no transitions")
        return path


def _struct(dfa: Any) -> Any:
    arrays = [getattr(dfa, name) for name in _ARRAYS]
    assert all(array.dtype == np.int64 and array.flags.c_contiguous for array in arrays)
    sizes = dfa.num_states, dfa.num_classes, *(len(arrays[index]) for index in (0, 3, 4))
    return ctypes.byref(_Dfa(*sizes, *(array.ctypes.data for array in arrays)))


@cache
def kernel() -> ForwardBackward | None:
    """The library, compiled if necessary; None where it is not available."""
    try:
        library = load_kernel(_SOURCE, _FLAGS, needs=("avx2", "fma3"), title="AVX2")
    except UnsafeCacheError as error:
        _LOG.warning("constraints are computed by numpy: %s", error)
        return None
    except NoKernelError:
        return None
    library.sum_sets.argtypes = [_POINTER, _POINTER, _LONG, _INT, _POINTER]
    library.backward.argtypes = library.sum_sets.argtypes
    library.marginals.argtypes = [*[_POINTER] * 4, *[_LONG] * 2, *[_POINTER] * 4]
    library.best_path.argtypes = [*[_POINTER] * 3, *[_LONG] * 2, _POINTER]
    for name in ("sum_sets", "backward", "marginals"):
        getattr(library, name).restype = None
    library.best_path.restype = _LONG
    return ForwardBackward(library)
