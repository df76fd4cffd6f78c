"""Transfer and RAM slot programs: compiled from visits, verified and simulated."""

from .buffer_sizes import BufferSizes, plan_buffers
from .ram_program import (
    DIRECT,
    STAGING_SLOTS,
    RamProgram,
    RamResidency,
    RunPrograms,
    compile_ram,
    plan_ram,
)
from .simulator import RAW_SLOTS, BlockSize
from .transfer_program import (
    IMMEDIATE,
    KEPT,
    Fetch,
    TransferProgram,
    compile_program,
    eviction_order,
)
from .verify import check_program, check_ram
from .visits import (
    TRAIN_TIMESTEPS,
    BlockKey,
    PassOrders,
    SkipRule,
    Visit,
    expert_at,
    predict_visits,
    skipped_steps,
    split_at_boundary,
    step_visits,
)

__all__ = [
    "DIRECT",
    "IMMEDIATE",
    "KEPT",
    "RAW_SLOTS",
    "STAGING_SLOTS",
    "TRAIN_TIMESTEPS",
    "BlockKey",
    "BlockSize",
    "BufferSizes",
    "Fetch",
    "PassOrders",
    "RamProgram",
    "RamResidency",
    "RunPrograms",
    "SkipRule",
    "TransferProgram",
    "Visit",
    "check_program",
    "check_ram",
    "compile_program",
    "compile_ram",
    "eviction_order",
    "expert_at",
    "plan_buffers",
    "plan_ram",
    "predict_visits",
    "skipped_steps",
    "split_at_boundary",
    "step_visits",
]
