"""Experts that are named by value, opened once and found open by the next run."""

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
    """Open the experts that `ref` names, without its LoRAs: reads headers only. `shared` as for `open_experts`."""
    dtype: ComputeDtype = AUTO if ref.compute_dtype == AUTO else getattr(torch, ref.compute_dtype)
    if ref.single:
        return open_one_expert(ref.high_noise, compute_dtype=dtype, storage=ref.storage, shared=shared)
    return open_experts(ref.high_noise, ref.low_noise, compute_dtype=dtype, storage=ref.storage, shared=shared)


def set_loras(pair: ExpertPair, refs: Sequence[LoraRef]) -> None:
    """Let `pair` run with the LoRAs that `refs` name: reads headers only."""
    pair.set_loras(
        high=[(open_lora(ref.high_noise), ref.strength_high) for ref in refs if ref.high_noise is not None],
        low=[(open_lora(ref.low_noise), ref.strength_low) for ref in refs if ref.low_noise is not None],
    )


def kernels_of(ref: ExpertsRef) -> Kernels:
    """What `ref` has the blocks computed with."""
    return Kernels(attention=ref.attention, compiler=INDUCTOR if ref.compile else None)


class ExpertsRegistry:
    """Holds at most one open pair of experts, by value. Thread-safe.

    A second run of the same graph, whatever its seed, finds its pair open, unless its files were replaced; another pair
    closes the former one first, so that two pairs never share the device. A pair stays open when only its LoRAs or what
    computes its blocks are others.
    """

    def __init__(self, open_pair: Callable[[ExpertsRef], ExpertPair] = open_pair) -> None:
        self._open_pair = open_pair
        self._lock = threading.Lock()
        self._held: tuple[ExpertsRef, ExpertPair] | None = None
        self._loras: tuple[LoraRef, ...] = ()
        self._kernels = Kernels()

    def get(self, ref: ExpertsRef) -> ExpertPair:
        """The pair that `ref` names, opened if it is not the one at hand, with its LoRAs and kernels set.

        Raises what opening the pair or its LoRAs raises, and KernelsError for kernels that are not installed. LoRAs
        and kernels that are refused leave a pair at hand as it was.
        """
        kernels = kernels_of(ref)
        check_installed(kernels)
        with self._lock:
            if self._held is None or self._held[0] != ref.opened or not self._held[1].is_current():
                self._close()
                self._held = (ref.opened, self._open_pair(ref.opened))
            pair = self._held[1]
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
        """Bytes of the device that the open pair holds; 0 where none is open."""
        held = self._held
        return 0 if held is None else held[1].loaded_bytes

    def _close(self) -> None:
        held, self._held = self._held, None
        self._loras, self._kernels = (), Kernels()
        if held is not None:
            held[1].close()
