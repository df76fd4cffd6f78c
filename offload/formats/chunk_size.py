"""Number of values to convert at once, given the device memory."""

from __future__ import annotations

import functools

import torch

from ...devices import runtime_for

# Scaled and quantised values are converted through fp32 in chunks of about this size. This bounds
# the extra memory to 8 MB for a matrix of any size, plus the same for integers if it is quantised.
# On a CPU it takes half the time of converting the matrix at once, and 64 Ki to 4 Mi values perform
# equally.
CHUNK_VALUES = 2 * 1024**2

# On a device without Triton, a piece of quantised values takes 2 to 20 kernel launches, so pieces
# of `CHUNK_VALUES` would take thousands per block. Larger ones take work memory: at most 0.5 % of
# the device memory.
WORK_BYTES_PER_VALUE = 8
VRAM_PER_VALUE = 200 * WORK_BYTES_PER_VALUE


def values_at_once(device: torch.device) -> int:
    """Return the number of quantised values to decode at once on `device`.

    Devices with much memory are fast, and a launch costs more of a block's time there. A card with
    24 GB decodes 16 Mi values at once, and one with 80 GB the largest Wan2.2 A14B matrix.
    """
    return max(CHUNK_VALUES, _vram_bytes(device) // VRAM_PER_VALUE)


@functools.cache  # the driver takes long to return it
def _vram_bytes(device: torch.device) -> int:
    runtime = runtime_for(device)
    if runtime is None or not runtime.count():
        return 0
    return runtime.memory().total
