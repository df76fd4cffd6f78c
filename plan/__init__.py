"""L0: decides. Standard library only; values in, frozen dataclasses out."""

from __future__ import annotations

from .check import check_program, check_ram
from .correction import corrected
from .eviction import eviction_order
from .experts import split_at_boundary
from .experts_ref import Attention, ExpertsRef, LoraRef, Storage
from .fit import fit_policy, stay_near
from .hardware import Hardware
from .machine import Machine
from .memory_needs import DoesNotFitError
from .mesh import Coordinates, Mesh, MeshError
from .mesh_checks import check_mesh
from .offload_job import AutoOffload, Budgets, OffloadJob
from .planner import Candidate, OffloadPlan, plan_offload
from .program import AT_ONCE, KEPT, Fetch, ProgramError, TransferProgram, compile_program
from .ram import DIRECT, RamHomes, RamProgram, RunPrograms, compile_ram, plan_ram
from .residency import OffloadPolicy, Residency, SourceKind, plan_residency, spread_evenly
from .shapes import I2V_A14B, T2V_A14B, TI2V_5B, ExpertShape, VideoShape
from .simulate import simulate
from .stages import stage_boundaries
from .tenancies import buffers_needed
from .timeline import PHASES, MemorySample, PhaseRecord, StepRecord, Timeline
from .visits import BlockKey, Visit, step_visits
from .workers_ref import PathMap, WorkersRef

__all__ = [
    "AT_ONCE",
    "DIRECT",
    "I2V_A14B",
    "KEPT",
    "PHASES",
    "T2V_A14B",
    "TI2V_5B",
    "Attention",
    "AutoOffload",
    "BlockKey",
    "Budgets",
    "Candidate",
    "Coordinates",
    "DoesNotFitError",
    "ExpertShape",
    "ExpertsRef",
    "Fetch",
    "Hardware",
    "LoraRef",
    "Machine",
    "MemorySample",
    "Mesh",
    "MeshError",
    "OffloadJob",
    "OffloadPlan",
    "OffloadPolicy",
    "PathMap",
    "PhaseRecord",
    "ProgramError",
    "RamHomes",
    "RamProgram",
    "Residency",
    "RunPrograms",
    "SourceKind",
    "StepRecord",
    "Storage",
    "Timeline",
    "TransferProgram",
    "VideoShape",
    "Visit",
    "WorkersRef",
    "buffers_needed",
    "check_mesh",
    "check_program",
    "check_ram",
    "compile_program",
    "compile_ram",
    "corrected",
    "eviction_order",
    "fit_policy",
    "plan_offload",
    "plan_ram",
    "plan_residency",
    "simulate",
    "split_at_boundary",
    "spread_evenly",
    "stage_boundaries",
    "stay_near",
    "step_visits",
]
