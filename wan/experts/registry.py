"""Registry of the open expert pair, which later runs reuse."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from ...devices import AUTO, ComputeDtype
from ...schema import ExpertsRef, LoraRef
from ..lora.file import open_lora
from ..transformer.kernels import INDUCTOR, Kernels, check_installed
from .open import open_experts, open_one_expert
from .pair import ExpertPair


def open_pair(ref: ExpertsRef, *, shared: bool = False) -> ExpertPair:
    """Open the experts of `ref` without its LoRAs; only headers are read. `shared` is that of `open_experts`."""
    dtype: ComputeDtype = AUTO if ref.compute_dtype == AUTO else getattr(torch, ref.compute_dtype)
    if ref.single:
        return open_one_expert(ref.high_noise, compute_dtype=dtype, storage=ref.storage, shared=shared)
    return open_experts(ref.high_noise, ref.low_noise, compute_dtype=dtype, storage=ref.storage, shared=shared)


def set_loras(pair: ExpertPair, refs: Sequence[LoraRef]) -> None:
    """Open the LoRAs of `refs` and set them on `pair`; only headers and alphas are read."""
    pair.set_loras(
        high=[(open_lora(ref.high_noise), ref.strength_high) for ref in refs if ref.high_noise is not None],
        low=[(open_lora(ref.low_noise), ref.strength_low) for ref in refs if ref.low_noise is not None],
    )


def _kernels(ref: ExpertsRef) -> Kernels:
    """Return the compute kernels of `ref`."""
    return Kernels(attention=ref.attention, compiler=INDUCTOR if ref.compile else None)


class ExpertsRegistry:
    """Thread-safe registry of at most one open pair, looked up by value.

    A later run of the same graph reuses the open pair unless its files have changed. Another pair closes the open one
    first, so that two pairs never share the device. New LoRAs or kernels do not close the pair.
    """

    def __init__(self, open_pair: Callable[[ExpertsRef], ExpertPair] = open_pair) -> None:
        self._open_pair = open_pair
        self._lock = threading.Lock()
        self._entry: tuple[ExpertsRef, ExpertPair] | None = None
        self._loras: tuple[LoraRef, ...] = ()
        self._kernels = Kernels()

    def get(self, ref: ExpertsRef) -> ExpertPair:
        """Return the pair of `ref` with its LoRAs and kernels set; opens it unless it is open.

        If the LoRAs or kernels are refused, an open pair is unchanged.

        Raises:
            KernelsError: the kernels are not installed.
            OSError: as `open_pair` and `set_loras`.
            ValueError: as `open_pair` and `set_loras`.
        """
        kernels = _kernels(ref)
        check_installed(kernels)
        with self._lock:
            if self._entry is None or self._entry[0] != ref.opened or not self._entry[1].is_current():
                self._close()
                self._entry = (ref.opened, self._open_pair(ref.opened))
            pair = self._entry[1]
            if self._loras != ref.loras or not pair.loras_are_current():
                set_loras(pair, ref.loras)
                self._loras = ref.loras
            if self._kernels != kernels:
                pair.kernels = self._kernels = kernels
            return pair

    def free(self) -> None:
        """Close the open pair, if any."""
        with self._lock:
            self._close()

    @property
    def loaded_bytes(self) -> int:
        """Bytes of device memory of the open pair; 0 if none is open."""
        entry = self._entry  # a copy without the lock, because `get` keeps it while a pair is opened
        return 0 if entry is None else entry[1].loaded_bytes

    def _close(self) -> None:
        entry, self._entry = self._entry, None
        self._loras, self._kernels = (), Kernels()
        if entry is not None:
            entry[1].close()
