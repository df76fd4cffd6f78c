"""Decisions about policies and the order of weight transfers. Standard library only."""

from ..schema import OffloadPolicy
from .candidates import Candidates
from .costs import AutoOffload, BlockCosts, Budgets, RunCosts, StepCosts
from .describe import describe_policy, describe_ram
from .machine import BlockRates, Bus, Machine, expected_machine
from .memory import (
    AVAILABLE_SHARE,
    RAM_SHARE,
    VRAM_RESERVE,
    DoesNotFitError,
    memory_budget,
    memory_needs,
)
from .planner import WORTH, Candidate, OffloadPlan, PassPlan, plan_offload, plan_passes
from .predict import predict
from .profile_update import calibrate_machine
from .programs.visits import SkipRule
from .shrink import bytes_to_free, keep_near_policy, next_smaller_policy, shrink_to_budget

__all__ = [
    "AVAILABLE_SHARE",
    "RAM_SHARE",
    "VRAM_RESERVE",
    "WORTH",
    "AutoOffload",
    "BlockCosts",
    "BlockRates",
    "Budgets",
    "Bus",
    "Candidate",
    "Candidates",
    "DoesNotFitError",
    "Machine",
    "OffloadPlan",
    "OffloadPolicy",
    "PassPlan",
    "RunCosts",
    "SkipRule",
    "StepCosts",
    "bytes_to_free",
    "calibrate_machine",
    "describe_policy",
    "describe_ram",
    "expected_machine",
    "keep_near_policy",
    "memory_budget",
    "memory_needs",
    "next_smaller_policy",
    "plan_offload",
    "plan_passes",
    "predict",
    "shrink_to_budget",
]
