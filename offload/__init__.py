"""Weight streaming for the blocks in any module, independent of models, samplers and ComfyUI."""

from .core.pages import host_bytes, map_memory
from .engine.attach import attach_offload, hook_module
from .engine.binding import AbsentWeightError
from .engine.calls import PassCalls, StackCalls, StackPass, StepCalls
from .engine.engine import OffloadEngine
from .engine.lockstep import Lockstep
from .engine.session import SessionState, StreamSession
from .engine.streamed_weights import StreamedWeights
from .host_memory.in_place import LockedTensors
from .host_memory.shared_segment import SharedSegment, sweep
from .sharding.group import GatherBrokenError, Sharded, StoppedTogether, shard_bytes
from .transfers.patches import BlockPatch
from .transfers.weight_patch import (
    ComputedPatch,
    Hadamard,
    Kronecker,
    Product,
    Rescaled,
    WeightPatch,
    patch_work_bytes,
    write_sum,
)

__all__ = [
    "AbsentWeightError",
    "BlockPatch",
    "ComputedPatch",
    "GatherBrokenError",
    "Hadamard",
    "Kronecker",
    "LockedTensors",
    "Lockstep",
    "OffloadEngine",
    "PassCalls",
    "Product",
    "Rescaled",
    "SessionState",
    "Sharded",
    "SharedSegment",
    "StackCalls",
    "StackPass",
    "StepCalls",
    "StoppedTogether",
    "StreamSession",
    "StreamedWeights",
    "WeightPatch",
    "attach_offload",
    "hook_module",
    "host_bytes",
    "map_memory",
    "patch_work_bytes",
    "shard_bytes",
    "sweep",
    "write_sum",
]
