"""Decisions: which weights move when, under which policy, and on which workers. Standard library only."""

from __future__ import annotations

from ..schema import OffloadPolicy
from .block_times import ArithmeticChoice, BlockRates, BlockTimes, choose_arithmetic
from .candidates import CHUNKS
from .machine import Machine, expected_machine
from .measured_policy import WORTH, MeasuredBlocks, MeasuredPolicy, choose_measured
from .memory import RAM_SHARE, RAW_SLOTS, STAGING_SLOTS, VRAM_RESERVE, DoesNotFitError
from .offload_job import AutoOffload, Budgets, OffloadJob
from .planner import (
    Alternative,
    Candidate,
    OffloadPlan,
    describe_policy,
    describe_precision,
    describe_ram,
    plan_alternatives,
    plan_offload,
)
from .predict import limit_seconds, predict
from .profile_update import calibrate_machine
from .ram_program import DIRECT, RamProgram, RamResidency, RunPrograms, compile_ram, plan_ram
from .shrink import bytes_to_free, eviction_order, keep_near_policy, next_smaller_policy, shrink_to_budget
from .transfer_program import IMMEDIATE, KEPT, Fetch, TransferProgram, compile_program
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
from .workers.jobs import Assignment, GroupId, JobSchedule
from .workers.layout import (
    check_layout,
    choose_layout,
    describe_layout,
    describe_wire,
    part_sizes,
    stage_boundaries,
    wire_traffic,
    worker_share,
)
from .workers.machines import RankPart, nested_sizes, order_groups, plan_machines
from .workers.weights import PlacementChoice, WeightFigures, choose_weight_placement

__all__ = [
    "CHUNKS",
    "DIRECT",
    "IMMEDIATE",
    "KEPT",
    "RAM_SHARE",
    "RAW_SLOTS",
    "STAGING_SLOTS",
    "TRAIN_TIMESTEPS",
    "VRAM_RESERVE",
    "WORTH",
    "Alternative",
    "ArithmeticChoice",
    "Assignment",
    "AutoOffload",
    "BlockKey",
    "BlockRates",
    "BlockTimes",
    "Budgets",
    "Candidate",
    "DoesNotFitError",
    "Fetch",
    "GroupId",
    "JobSchedule",
    "Machine",
    "MeasuredBlocks",
    "MeasuredPolicy",
    "OffloadJob",
    "OffloadPlan",
    "OffloadPolicy",
    "PassOrders",
    "PlacementChoice",
    "RamProgram",
    "RamResidency",
    "RankPart",
    "RunPrograms",
    "SkipRule",
    "TransferProgram",
    "Visit",
    "WeightFigures",
    "bytes_to_free",
    "calibrate_machine",
    "check_layout",
    "check_program",
    "check_ram",
    "choose_arithmetic",
    "choose_layout",
    "choose_measured",
    "choose_weight_placement",
    "compile_program",
    "compile_ram",
    "describe_layout",
    "describe_policy",
    "describe_precision",
    "describe_ram",
    "describe_wire",
    "eviction_order",
    "expected_machine",
    "expert_at",
    "keep_near_policy",
    "limit_seconds",
    "nested_sizes",
    "next_smaller_policy",
    "order_groups",
    "part_sizes",
    "plan_alternatives",
    "plan_machines",
    "plan_offload",
    "plan_ram",
    "predict",
    "predict_visits",
    "shrink_to_budget",
    "skipped_steps",
    "split_at_boundary",
    "stage_boundaries",
    "step_visits",
    "wire_traffic",
    "worker_share",
]
