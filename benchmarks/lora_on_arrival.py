"""Cost for a rank 64 LoRA, a LoKr, a LoHa and a DoRA when a Wan2.2 A14B block arrives.

python benchmarks/lora_on_arrival.py [cpu|cuda]
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch
from record import record

from wanstream.devices import DeviceEvent, clock_for, runtime_for
from wanstream.offload import BlockPatch, Hadamard, Kronecker, Product, Rescaled, WeightPatch
from wanstream.offload.formats.decode import decode_block
from wanstream.offload.formats.layout import BlockFormat, allocate_flat, block_format, tensor_views
from wanstream.offload.transfers.patches import StagedPatches
from wanstream.plan.programs import BlockKey

RANK = 64
FACTOR = 8
TIMES = 9
WIDTH = 5120
FFN = 13824
ATTENTION = {
    f"{part}.{name}.weight": (WIDTH, WIDTH)
    for part in ("attn1", "attn2")
    for name in ("q", "k", "v", "out")
}
MATRICES = {**ATTENTION, "ffn.up.weight": (FFN, WIDTH), "ffn.down.weight": (WIDTH, FFN)}
KEY = BlockKey("high", 0)
FORMATS = {
    "bf16": block_format(
        {name: (shape, torch.bfloat16) for name, shape in MATRICES.items()}, torch.bfloat16
    ),
    "fp8_scaled": block_format(
        {name: (shape, torch.float8_e4m3fn) for name, shape in MATRICES.items()},
        torch.bfloat16,
        scaled=MATRICES,
    ),
}


def product(rows: int, columns: int, rank: int = RANK) -> Product:
    return Product(up=torch.randn(rows, rank) / 100, down=torch.randn(rank, columns) / 100)


def lora(rows: int, columns: int) -> WeightPatch:
    return WeightPatch(up=product(rows, columns).up, down=product(rows, columns).down)


def lokr(rows: int, columns: int) -> WeightPatch:
    second = torch.randn(rows // FACTOR, columns // FACTOR) / 100
    return WeightPatch(
        kronecker=(Kronecker(first=torch.randn(FACTOR, FACTOR) / 100, second=second),)
    )


def loha(rows: int, columns: int) -> WeightPatch:
    return WeightPatch(
        # Two products of rank 32 have as many factor values as one of rank 64.
        hadamard=(Hadamard(one=product(rows, columns, 32), other=product(rows, columns, 32)),)
    )


def dora(rows: int, columns: int) -> WeightPatch:
    return WeightPatch(
        rescaled=(
            Rescaled(change=lora(rows, columns), magnitude=torch.ones(rows, 1), strength=1.0),
        )
    )


KINDS: dict[str, Callable[[int, int], WeightPatch]] = {
    "lora": lora,
    "lokr": lokr,
    "loha": loha,
    "dora": dora,
}


def stage_patch(fmt: BlockFormat, device: torch.device, kind: str) -> StagedPatches:
    """Stage a patch for every matrix in the block."""
    weights = {name: KINDS[kind](*shape) for name, shape in MATRICES.items()}
    patches = StagedPatches({KEY: fmt}, lock=runtime_for(device))
    patches.replace(patches.prepare({KEY: BlockPatch(identity=RANK, weights=weights)}))
    return patches


def time_in_turns(
    works: dict[str, Callable[[], None]], device: torch.device
) -> dict[str, dict[str, float]]:
    """Return milliseconds per task after a warm-up: GPU time, or one thread's CPU time."""
    clock = clock_for(device)
    mark: Callable[[], DeviceEvent] = clock.mark if device.type == "cuda" else time.thread_time
    marks: dict[str, list[tuple[DeviceEvent, DeviceEvent]]] = {name: [] for name in works}
    for _ in range(TIMES + 1):
        for name, work in works.items():
            began = mark()
            work()
            marks[name].append((began, mark()))
    clock.settle()
    milli = {
        name: [1e3 * clock.seconds(*pair) for pair in pairs[1:]] for name, pairs in marks.items()
    }
    return {
        name: {
            "median": round(statistics.median(ms), 2),
            "min": round(min(ms), 2),
            "max": round(max(ms), 2),
        }
        for name, ms in milli.items()
    }


def measure(fmt: BlockFormat, device: torch.device) -> dict[str, dict[str, float]]:
    """Measure decoding one block with stored bytes on the device, and applying its patch."""
    raw = allocate_flat(fmt.stored.nbytes, device)
    for stored in tensor_views(raw, fmt.stored).values():
        stored.copy_((torch.randn(stored.shape, device=device) / 50).to(stored.dtype))
    into = allocate_flat(fmt.computed.nbytes, device)
    scales = {name: torch.tensor(0.5, device=device) for name in fmt.scaled}

    def decode() -> None:
        decode_block(raw, into, fmt, scales)

    def patch(kind: str) -> Callable[[], None]:
        held = stage_patch(fmt, device, kind).get(KEY)
        assert held is not None
        # On a CPU, the factors are read in place and need no slot.
        slot = allocate_flat(held.layout.nbytes, device) if device.type == "cuda" else None

        def add() -> None:
            if slot is not None:
                slot.copy_(held.memory, non_blocking=True)
            held.add_to(into, fmt.computed, slot)

        return add

    return time_in_turns({"decode": decode, **{kind: patch(kind) for kind in KINDS}}, device)


def main(device: str) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with torch.inference_mode():
        figures = {name: measure(fmt, torch.device(device)) for name, fmt in FORMATS.items()}
    method = (
        f"one block of A14B ({len(MATRICES)} matrices, computed in bf16) whose stored bytes are on "
        "the device; its decoding (for bf16 a copy) and the addition to all matrices of a LoRA of "
        f"rank {RANK}, a LoKr of factor {FACTOR} with whole matrices, a LoHa of rank 32 and a DoRA "
        f"of rank {RANK} (on cuda with their copy from locked memory), in turns, {TIMES} times "
        "after a first one; on cpu the processor time of one thread"
    )
    figures = {"milliseconds_per_block": figures, "factor_mb": round(_factor_bytes() / 1e6, 1)}
    print(
        record(f"lora-on-arrival-{device}", method=method, figures=figures).read_text(
            encoding="utf-8"
        )
    )


def _factor_bytes() -> int:
    # A bf16 value has 2 bytes. `up` has `rows` x RANK values, `down` RANK x `columns`.
    return sum(2 * RANK * (rows + columns) for rows, columns in MATRICES.values())


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "cpu")
