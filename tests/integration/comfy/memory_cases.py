"""Runs in ComfyUI's Python: the memory manager loads and evicts our experts on a simulated device.

`answers(high, low)` returns one JSON value per case, for experts with 12 blocks. `test_memory.py`
checks the values. Each case sets the device capacity in bytes, and loaded models use it up. The
experts compute on the CPU.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import comfy.model_management as mm
import comfy.model_patcher
import torch
from installed_pack import load_pack
from native_families import results_of

load_pack()
from wanstream.host.auto_policy import AutoPlanner  # noqa: E402
from wanstream.host.comfy.adapter.comfy_host import ComfyHost  # noqa: E402
from wanstream.host.comfy.experts.patcher import make_room_for_probes  # noqa: E402
from wanstream.host.machine_profile import PROBE_BYTES  # noqa: E402
from wanstream.nodes.runs.decode import (  # noqa: E402
    DecodeSettings,
    TileNotes,
    _first_tiling,
)
from wanstream.plan import AutoOffload, Bus, Machine  # noqa: E402
from wanstream.plan.programs import BlockSize  # noqa: E402
from wanstream.sampling import denoise, lane_names, run_shape, working_bytes  # noqa: E402
from wanstream.sampling.cache import Stage  # noqa: E402
from wanstream.sampling.inputs import DenoiseRequest  # noqa: E402
from wanstream.sampling.steps import Side  # noqa: E402
from wanstream.schema import OffloadPolicy  # noqa: E402
from wanstream.schema.refs.experts import ExpertsRef  # noqa: E402
from wanstream.shapes import RunShape  # noqa: E402
from wanstream.wan.experts.open import open_pair  # noqa: E402
from wanstream.wan.vae.memory import DecodeNeeds  # noqa: E402

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
PLENTY = 100 * 2**30
WORKING = 3 * 2**30
SCALE = 1000
"""A tiny block counts as 0.8 GB, because ComfyUI's own margins are as large."""
UNGUIDED = {"high": (0,), "low": (0,)}
BLOCK_SWAP, LAYERWISE, RESIDENT = (
    OffloadPolicy.block_swap(6),
    OffloadPolicy.layerwise(1),
    OffloadPolicy.resident(),
)


class OnCpu:
    """Experts that ComfyUI sees on the made-up device.

    Every byte counts as a thousand (SCALE).
    """

    def __init__(self, pair: Any) -> None:
        self._pair = pair
        self.locked = 0
        self.fails: Exception | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pair, name)

    def engine(self, policy: OffloadPolicy, device: torch.device) -> Any:
        engine = self._pair.engine(policy, CPU)
        if self.fails is not None:
            raise self.fails
        return engine

    def device_bytes(self, policy: OffloadPolicy, *, device: object = None) -> int:
        return SCALE * int(self._pair.device_bytes(policy))

    @property
    def loaded_bytes(self) -> int:
        return SCALE * int(self._pair.loaded_bytes)

    def release_memory(self, nbytes: int) -> int:
        return SCALE * int(self._pair.release_memory(-(-nbytes // SCALE)))

    @property
    def pinned_bytes(self) -> int:
        return self.locked if self._pair.loaded_bytes else 0


class Neighbour(comfy.model_patcher.ModelPatcher):
    """Another model with `nbytes`, which loads and gives back any number of bytes."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(torch.nn.Module(), GPU, CPU, size=nbytes)

    def partially_load(
        self, device_to: torch.device, extra_memory: float = 0, force_patch_weights: bool = False
    ) -> int:
        return self._take(min(int(extra_memory), self.size - self.loaded_size()))

    def partially_unload(
        self, device_to: torch.device, memory_to_free: float = 0, force_patch_weights: bool = False
    ) -> int:
        return -self._take(-min(int(memory_to_free) + 1, self.loaded_size()))

    def detach(self, unpatch_all: bool = True) -> Any:
        if unpatch_all:
            self._take(-self.loaded_size())
        return self.model

    def model_mmap_residency(self, free: bool = False) -> tuple[int, int]:
        return self.size, self.size

    def pinned_memory_size(self) -> int:
        return self.size

    def _take(self, nbytes: int) -> int:
        self.model.model_loaded_weight_memory += nbytes
        self.model.device = GPU if self.model.model_loaded_weight_memory else CPU
        return nbytes


class World:
    """A device with `capacity` bytes, an empty list of loaded models, and a door."""

    def __init__(self, high: str, low: str, capacity: int = PLENTY) -> None:
        self.ref = ExpertsRef(high_noise=Path(high), low_noise=Path(low), compute_dtype="float32")
        self.other = ExpertsRef(high_noise=Path(low), low_noise=Path(high), compute_dtype="float32")
        self.capacity = capacity
        self.pairs: list[OnCpu] = []
        self.neighbours: list[Any] = []
        self.host = ComfyHost(self._open)

    def _open(self, ref: ExpertsRef) -> OnCpu:
        self.pairs.append(OnCpu(open_pair(ref)))
        return self.pairs[-1]

    @property
    def pair(self) -> OnCpu:
        return self.pairs[-1]

    @property
    def taken(self) -> int:
        return sum(pair.loaded_bytes for pair in self.pairs) + sum(
            n.loaded_size() for n in self.neighbours
        )

    def free(self, dev: object = None, torch_free_too: bool = False) -> Any:
        free = self.capacity - self.taken
        return (free, 0) if torch_free_too else free

    def neighbour(self, nbytes: int) -> Neighbour:
        self.neighbours.append(Neighbour(nbytes))
        mm.load_models_gpu([self.neighbours[-1]], memory_required=0)
        return self.neighbours[-1]

    def load(self, policy: OffloadPolicy, ref: ExpertsRef | None = None) -> Any:
        return self.host.models.load_experts(ref or self.ref, policy, working_bytes=WORKING)

    def run(self, policy: OffloadPolicy, ref: ExpertsRef | None = None, on_step: Any = None) -> Any:
        loaded = self.load(policy, ref)
        noise = torch.randn(1, 16, 1, 4, 4, generator=torch.Generator().manual_seed(0))
        text = torch.randn(1, 5, 4096, generator=torch.Generator().manual_seed(1))
        request = DenoiseRequest(noise, text, steps=4, switch_step=2, solver="euler")
        return denoise(loaded.pair, request, policy=loaded.policy, device="cpu", on_step=on_step)

    def planned(self, policy: OffloadPolicy) -> int:
        return int(self.host.models.experts(self.ref).device_bytes(policy))

    @property
    def block(self) -> int:
        return self.planned(LAYERWISE) - self.planned(OffloadPolicy.layerwise(0))

    @property
    def wanted(self) -> float:
        """Free bytes that ComfyUI requires in addition to the weights."""
        return max(mm.minimum_inference_memory(), WORKING + mm.extra_reserved_memory())


@contextmanager
def world(
    files: tuple[str, str], capacity: int = PLENTY, **settings: Any
) -> Iterator[tuple[World, list[str]]]:
    """A world with these memory manager settings, and our log messages in it."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("wanstream.memory")
    made = World(*files, capacity)
    settings = {"vram_state": mm.VRAMState.NORMAL_VRAM, "MIN_WEIGHT_MEMORY_RATIO": 0.0, **settings}
    settings |= {
        "get_free_memory": made.free,
        "get_torch_device": lambda: GPU,
        "current_loaded_models": [],
    }
    before = {name: getattr(mm, name) for name in settings}
    for name, value in settings.items():
        setattr(mm, name, value)
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield made, messages
    finally:
        log.removeHandler(handler)
        made.host.open_experts.free()
        for name, value in before.items():
            setattr(mm, name, value)


Files = tuple[str, str]
CASES: dict[str, Callable[[Files], Any]] = {}


def case(function: Callable[[Files], Any]) -> Callable[[Files], Any]:
    CASES[function.__name__] = function
    return function


@case
def room_for_what_is_planned(files: Files) -> Any:
    """Plan next to a neighbour, with the room ComfyUI requires, or a thousand bytes less."""
    found = []
    for short in (0, 1000):
        with world(files) as (here, _):
            neighbour = here.neighbour(2**30)
            here.capacity = 2**30 + int(here.planned(BLOCK_SWAP) * 1.1 + here.wanted) + 1 - short
            loaded = here.load(BLOCK_SWAP)
            found.append(
                [loaded.policy == BLOCK_SWAP, 2**30 - neighbour.loaded_size(), str(loaded.device)]
            )
    return found


@case
def weights_stay_for_the_next_run(files: Files) -> Any:
    with world(files) as (here, messages):
        neighbour = here.neighbour(2**30)
        first = here.run(RESIDENT)
        here.capacity = here.taken + int(here.wanted) + 1
        second = here.run(RESIDENT)
        return {
            "equal": torch.equal(first.latents, second.latents),
            "bytes": [run.timeline.bytes_moved for run in (first, second)],
            "outer": [run.timeline.non_block_bytes > 0 for run in (first, second)],
            "listed": len(mm.current_loaded_models),
            "as planned": here.pair.loaded_bytes == here.planned(RESIDENT),
            "neighbour": neighbour.loaded_size() == 2**30,
            "messages": messages,
        }


@case
def evicted_block_by_block(files: Files) -> Any:
    """Another model needs a little more than there is, thrice, with a run after each."""
    with world(files) as (here, messages):
        whole = here.run(BLOCK_SWAP)
        full, found = here.pair.loaded_bytes, []
        for blocks in (0.5, 4.5, 7.5):
            here.capacity = here.taken + int(
                2**30 * 1.1 + mm.minimum_inference_memory() - blocks * here.block
            )
            neighbour = here.neighbour(2**30)
            left = here.pair.loaded_bytes
            listed = len(mm.current_loaded_models)
            here.capacity = PLENTY
            again = here.run(BLOCK_SWAP)
            found.append(
                {
                    "blocks gone": (full - left) / here.block,
                    "listed": listed,
                    "neighbour": neighbour.loaded_size() == 2**30,
                    "equal": torch.equal(again.latents, whole.latents),
                    "back": here.pair.loaded_bytes == full,
                }
            )
            mm.current_loaded_models[:] = [
                m for m in mm.current_loaded_models if m.model is not neighbour
            ]
            here.neighbours.clear()
        return {"found": found, "messages": messages}


@case
def evicted_as_a_whole(files: Files) -> Any:
    with world(files) as (here, messages):
        first = here.run(BLOCK_SWAP)
        here.capacity = int(2**31 * 1.1 + mm.minimum_inference_memory()) + 1
        neighbour = here.neighbour(2**31)
        found: dict[str, Any] = {
            "left": here.pair.loaded_bytes,
            "listed": len(mm.current_loaded_models),
        }
        here.capacity = PLENTY
        found["equal"] = torch.equal(here.run(BLOCK_SWAP).latents, first.latents)
        found["neighbour"] = neighbour.loaded_size() == 2**31
        mm.unload_all_models()
        found["after /free"] = [here.pair.loaded_bytes, len(mm.current_loaded_models)]
        found["again"] = torch.equal(here.run(BLOCK_SWAP).latents, first.latents)
        return {**found, "messages": messages}


@case
def flags(files: Files) -> Any:
    """Policy in half the free memory it needs, and residency after a small model loads."""
    states = mm.VRAMState
    settings: dict[str, dict[str, Any]] = {
        "normal": {},
        "low": {"vram_state": states.LOW_VRAM},
        "high": {"vram_state": states.HIGH_VRAM},
        "none": {"vram_state": states.NO_VRAM},
        "not smart": {"DISABLE_SMART_MEMORY": True},
        "reserve": {"EXTRA_RESERVED_VRAM": 5 * 2**30},
    }
    found = {}
    for name, setting in settings.items():
        with world(files, **setting) as (here, messages):
            here.capacity = int(here.planned(OffloadPolicy.block_swap(9)) + here.wanted) + 1
            loaded = here.load(BLOCK_SWAP)
            reloaded = here.load(BLOCK_SWAP)
            here.capacity = PLENTY
            here.neighbour(1000)
            found[name] = {
                "policy": [
                    loaded.policy.kind,
                    loaded.policy.blocks_to_swap,
                    loaded.policy.prefetch_blocks,
                ],
                "same again": reloaded.policy == loaded.policy,
                "stays": here.pair.loaded_bytes > 0,
                "messages": messages,
            }
    return found


@case
def reserve_counts(files: Files) -> Any:
    """Policy loaded with a reserve of several blocks.

    The device has free memory for exactly the requested policy.
    """
    found = []
    for blocks in (0, 2, 20):
        with world(files) as (here, _):
            reserve = mm.EXTRA_RESERVED_VRAM
            here.capacity = int(here.planned(BLOCK_SWAP) + here.wanted) + 1
            mm.EXTRA_RESERVED_VRAM = reserve + blocks * here.block
            loaded = here.load(BLOCK_SWAP)
            mm.EXTRA_RESERVED_VRAM = reserve
            found.append([loaded.policy.kind, loaded.policy.blocks_to_swap])
    return found


@case
def room_that_comes_back(files: Files) -> Any:
    """Less free memory, then plenty again: each load's policy, and whether latents are equal."""
    with world(files) as (here, _):
        kinds, latents = [], []
        for policy in (BLOCK_SWAP, OffloadPolicy.block_swap(10), LAYERWISE, BLOCK_SWAP):
            here.capacity = (
                PLENTY if policy is BLOCK_SWAP else int(here.planned(policy) + here.wanted) + 1
            )
            if policy is not BLOCK_SWAP:
                # Older ComfyUI versions do not shrink a loaded model.
                mm.unload_all_models()
            latents.append(here.run(BLOCK_SWAP).latents)
            kinds.append(here.load(BLOCK_SWAP).policy == policy)
        here.load(BLOCK_SWAP)
        patcher = mm.current_loaded_models[0].model
        taken = patcher.partially_load(GPU, -3.5 * here.block)
        return {
            "as fits": kinds,
            "equal": all(torch.equal(each, latents[0]) for each in latents),
            "less": [patcher.loaded_experts().policy.blocks_to_swap, taken < 0],
        }


@case
def a_dynamic_model_evicts_us(files: Files) -> Any:
    """A model with dynamic VRAM, which needs room to compute in, loads after us."""
    if not hasattr(comfy.model_patcher, "ModelPatcherDynamic"):
        return {"skip_reason": "this ComfyUI has no dynamic VRAM"}

    class Dynamic(comfy.model_patcher.ModelPatcherDynamic):
        """Everything but the pages, which need a device."""

        def load(self, device_to: Any = None, *_: Any, **__: Any) -> None:
            self.model.device = device_to

    with ExitStack() as stack:
        if (
            "comfy_aimdo.host_buffer" in sys.modules
            and sys.modules["comfy_aimdo.control"].lib is None
        ):
            # Without a GPU, the library for pinned buffers is not loaded.
            stack.enter_context(
                patch("comfy_aimdo.host_buffer.HostBuffer", lambda *_: SimpleNamespace(size=0))
            )
        here, messages = stack.enter_context(world(files))
        here.run(BLOCK_SWAP)
        full = here.pair.loaded_bytes
        requester = Dynamic(torch.nn.Linear(1, 1), GPU, CPU)
        needed = 4 * 2**30
        here.capacity = here.taken + needed + mm.EXTRA_RESERVED_VRAM - int(2.5 * here.block)
        mm.load_models_gpu([requester], memory_required=needed)
        return {
            "dynamic": requester.is_dynamic(),
            "blocks gone": (full - here.pair.loaded_bytes) / here.block,
            "listed": [type(m.model).__name__ for m in mm.current_loaded_models],
            "messages": messages,
        }


@case
def other_experts(files: Files) -> Any:
    """Loaded experts after other experts were loaded.

    In one case a guider still references the first experts.
    """
    with world(files) as (here, _):
        first = here.run(LAYERWISE).latents
        here.load(LAYERWISE, here.other)
        listed = [m.model.ref.high_noise.parent.name for m in mm.current_loaded_models]
        taken = [pair.loaded_bytes > 0 for pair in here.pairs]
        guider = here.host.open_experts.patcher(here.ref, BLOCK_SWAP, flow_shift=5.0)
        for _turn in range(2):
            mm.load_models_gpu([guider])
            shift = guider.model.model_sampling.shift
            here.load(LAYERWISE, here.other)
        mm.load_models_gpu([guider])
        names = [m.model.ref.high_noise.parent.name for m in mm.current_loaded_models]
        dead = [m.is_dead() for m in mm.current_loaded_models]
        current = guider.loaded_experts()
        del guider
        again = here.run(LAYERWISE)
        return {
            "listed": listed,
            "taken": taken,
            "with guider": sorted(names),
            "dead": dead,
            "guider": [current.policy == BLOCK_SWAP, current.pair is here.pair, shift],
            "after": [m.model.ref.high_noise.parent.name for m in mm.current_loaded_models],
            "default shift": here.host.open_experts.patcher(
                here.ref, LAYERWISE
            ).model.model_sampling.shift,
            "equal": torch.equal(again.latents, first),
        }


@case
def pins(files: Files) -> Any:
    """ComfyUI's count of page-locked bytes, starting with 100 foreign bytes."""
    if not hasattr(mm, "TOTAL_PINNED_MEMORY"):
        return None
    pinned = OffloadPolicy.layerwise(1, source="pinned")
    with world(files, TOTAL_PINNED_MEMORY=100) as (here, messages):
        counts = {}
        here.load(pinned)
        here.pair.locked = 5000
        here.neighbour(1000)
        counts["after a run, when another model loads"] = mm.TOTAL_PINNED_MEMORY
        here.load(pinned)
        counts["again"] = mm.TOTAL_PINNED_MEMORY
        (ours,) = [m.model for m in mm.current_loaded_models if m.model_memory() != 1000]
        counts["ours"] = [ours.pinned_memory_size(), *ours.model_mmap_residency()]
        del ours  # experts are counted only as long as their patcher is referenced
        mm.free_memory(0, None, pins_required=2**60)
        counts["when RAM is short"] = mm.TOTAL_PINNED_MEMORY
        # Since 0.33 or before, ComfyUI frees locked RAM only for models with dynamic VRAM.
        counts["every model is asked"] = not hasattr(mm, "models_for_pin_eviction")
        for gone in (
            mm.unload_all_models,
            here.host.open_experts.free,
            lambda: here.load(LAYERWISE, here.other),
            here.host.open_experts.free,
            lambda: here.host.open_experts.patcher(here.other, LAYERWISE),
        ):
            here.load(pinned)
            here.pair.locked = 5000
            here.load(pinned)
            counts["there"] = mm.TOTAL_PINNED_MEMORY
            gone()
            counts[f"gone {len(counts)}"] = mm.TOTAL_PINNED_MEMORY
        return {**counts, "messages": messages}


@case
def evicted_while_running(files: Files) -> Any:
    """A request for all memory in mid-run: the models listed after it, and the bytes they free."""
    found = {}
    for name, setting in {"smart": {}, "not smart": {"DISABLE_SMART_MEMORY": True}}.items():
        if setting and "pins_required" not in signature(mm.free_memory).parameters:
            found[name] = (
                None  # ComfyUI 0.3.64 drops every model then, without a request to free memory
            )
            continue
        with world(files, **setting) as (here, messages):

            def want_all(step: Any, here: World = here) -> None:
                if step.done == 2:
                    mm.free_memory(1e30, GPU)

            whole, disturbed = here.run(BLOCK_SWAP), here.run(BLOCK_SWAP, on_step=want_all)
            listed = len(mm.current_loaded_models)
            mm.unload_all_models()
            equal = torch.equal(whole.latents, disturbed.latents)
            found[name] = {
                "equal": equal,
                "listed": listed,
                "left": here.pair.loaded_bytes,
                "messages": messages[0],
            }
    return found


@case
def experts_of_a_guider_that_is_gone(files: Files) -> Any:
    """Length of the loaded-model list after a new guider, a refused policy, and a deletion.

    The deleted guider has other experts.
    """
    with world(files) as (here, _):
        guider = here.host.open_experts.patcher(here.other, BLOCK_SWAP, flow_shift=5.0)
        here.run(LAYERWISE)
        here.host.open_experts.patcher(here.other, LAYERWISE)  # made, and not loaded yet
        try:
            here.load(OffloadPolicy.block_swap(99))
        except ValueError as err:
            refused = str(err)
        found = [len(mm.current_loaded_models)]
        here.run(LAYERWISE)
        mm.load_models_gpu([guider])
        del guider
        found.append(len(mm.current_loaded_models))
        mm.unload_all_models()
        return {
            "listed": found,
            "left": [pair.loaded_bytes for pair in here.pairs],
            "refused": refused,
        }


@case
def out_of_memory(files: Files) -> Any:
    """Out of memory while we load, and in a run, after which everything is unloaded."""
    found: dict[str, Any] = {}
    with world(files) as (here, _):
        whole = here.run(BLOCK_SWAP)
        mm.unload_all_models()
        here.pair.fails = mm.OOM_EXCEPTION("made up")
        try:
            here.load(BLOCK_SWAP)
        except mm.OOM_EXCEPTION:
            found["loading"] = [here.pair.loaded_bytes, len(mm.current_loaded_models)]
        here.pair.fails = None

        def fail(step: Any) -> None:
            raise mm.OOM_EXCEPTION("made up")

        try:
            here.run(BLOCK_SWAP, on_step=fail)
        except mm.OOM_EXCEPTION:
            found["held"] = here.pair.loaded_bytes > 0
            mm.unload_all_models()
        found["running"] = [here.pair.loaded_bytes, len(mm.current_loaded_models)]
        found["equal"] = torch.equal(here.run(BLOCK_SWAP).latents, whole.latents)
    return found


@case
def short_of_memory_in_a_step(files: Files) -> Any:
    """Out of memory twice in one run.

    The values are the loaded-model count, the loaded bytes, and the next load's policy.
    """
    with world(files) as (here, _):
        whole = here.run(BLOCK_SWAP)
        uses = iter(range(10**6))

        def fail(*_: object) -> None:
            if next(uses) in {14, 20}:
                raise mm.OOM_EXCEPTION("made up")

        blocks = here.pair.engine(BLOCK_SWAP, CPU).models.blocks.values()
        hooks = [block.register_forward_pre_hook(fail) for stack in blocks for block in stack]
        disturbed = here.run(BLOCK_SWAP)
        for hook in hooks:
            hook.remove()
        return {
            "equal": torch.equal(whole.latents, disturbed.latents),
            "changes": len(disturbed.timeline.changes),
            "smaller": here.pair.loaded_bytes < here.planned(BLOCK_SWAP) - here.block,
            "listed": len(mm.current_loaded_models),
            "back": [
                here.load(BLOCK_SWAP).policy == BLOCK_SWAP,
                torch.equal(here.run(BLOCK_SWAP).latents, whole.latents),
            ],
        }


@case
def chosen_by_the_planner(files: Files) -> Any:
    """Resident blocks in the chosen policy next to an evictable neighbour.

    The reserve is zero or four blocks.
    """
    found = []
    machine = Machine(
        name="made up",
        origin="made up",
        vram_bytes=PLENTY,
        ram_bytes=10**12,
        # Slow enough to make as many blocks resident as fit.
        bus=Bus(h2d_bytes_per_s=1e6, h2d_pageable_bytes_per_s=1e6, d2h_bytes_per_s=1e6),
        disk_bytes_per_s=1e6,
        flops_per_s=1e12,
        decode_bytes_per_s=1e12,
        copy_bytes_per_s=1e12,
        quantise_bytes_per_s=1e12,
    )
    for reserve in (0, 4):
        with world(files) as (here, _):
            here.host = ComfyHost(here._open, AutoPlanner(lambda *_: machine))
            here.neighbour(2**30)
            pair = here.host.models.experts(here.ref)
            here.capacity = int(here.planned(BLOCK_SWAP) + mm.minimum_inference_memory() + 2**29)
            mm.EXTRA_RESERVED_VRAM += reserve * here.block
            experts = ["high"] * 4 + ["low"] * 4
            names = lane_names(1, (Side.POSITIVE,))
            lanes = {step: (Stage(expert), names) for step, expert in enumerate(experts)}
            shape = _scaled(run_shape(pair, (1, 16, 1, 4, 4), GPU, lanes=lanes, sides=UNGUIDED))
            choice = here.host.memory.choose_policy(pair, here.ref, AutoOffload(), shape)
            loaded = here.host.models.load_experts(here.ref, choice.policy, working_bytes=0)
            mm.EXTRA_RESERVED_VRAM -= reserve * here.block
            residents = (
                12 - choice.policy.blocks_to_swap if choice.policy.kind == "block_swap" else 0
            )
            found.append([residents, loaded.policy == choice.policy, choice.revise is not None])
    return found


@case
def room_to_measure(files: Files) -> Any:
    """A neighbour that fills the device makes room for the probes.

    The value is the surplus bytes, and whether some of the neighbour remains.
    """
    with world(files) as (here, _):
        neighbour = here.neighbour(10 * 2**30)
        here.capacity = here.taken + 2**30
        make_room_for_probes()
        return here.free() - PROBE_BYTES, neighbour.loaded_size() > 0


@case
def room_for_a_decode(files: Files) -> Any:
    """Decode next to a 4 GB neighbour or experts, with some bytes less than whole frames need.

    Reports the tile size, the surplus of free bytes, and the bytes freed by the other models.
    """
    vae = SimpleNamespace(weight_bytes=2**29)
    needs = DecodeNeeds(
        height=60, width=104, frames=5, pixel_bytes=2**20, value_bytes=4, keeps_frames=True
    )
    settings = DecodeSettings(vae=Path(), tiling=None, memory_bytes=0)
    whole = vae.weight_bytes + needs.device_bytes(None) + int(mm.minimum_inference_memory())
    found: dict[str, Any] = {"neighbour": []}
    # One byte more than needed, because ComfyUI 0.3.64 frees memory unless more than the requested
    # bytes are free.
    for lacking in (-1, 1000, 2**30, 5 * 2**30):
        with world(files) as (here, _):
            neighbour, notes = here.neighbour(2**32), TileNotes()
            here.capacity = here.taken + whole - lacking
            tiling = _first_tiling(here.host.memory, settings, vae, needs, notes)
            pixels = None if tiling is None else tiling.pixels
            found["neighbour"].append(
                [pixels, here.free() - whole, 2**32 - neighbour.loaded_size(), len(notes)]
            )
    with world(files) as (here, _):
        here.run(RESIDENT)
        before = here.pair.loaded_bytes
        here.capacity = here.taken + whole - here.block // 2
        whole_frames = _first_tiling(here.host.memory, settings, vae, needs, TileNotes()) is None
        found["experts"] = [whole_frames, (before - here.pair.loaded_bytes) / here.block]
    return found


def _scaled(shape: RunShape) -> RunShape:
    """Return the shape with a thousand times the bytes per block."""
    costs = shape.blocks
    scaled = {
        name: SCALE * getattr(costs, name)
        for name in ("stored_bytes", "file_bytes", "computed_bytes")
    }
    sizes = tuple(BlockSize(*(SCALE * nbytes for nbytes in size)) for size in costs.sizes)
    return replace(shape, blocks=replace(costs, sizes=sizes, **scaled))


@case
def as_a_model(files: Files) -> Any:
    """The model interface used by ComfyUI's samplers and nodes."""
    from comfy_extras.nodes_model_advanced import ModelSamplingSD3

    with world(files) as (here, _):
        patcher = here.host.open_experts.patcher(here.ref, LAYERWISE)
        (shifted,) = ModelSamplingSD3().patch(patcher, 3.0)
        try:
            patcher.model.apply_model(None, None)
        except ValueError as err:
            refusal = str(err)
        latent = torch.randn(1, 16, 1, 2, 2)
        returned = patcher.model.process_latent_out(patcher.model.process_latent_in(latent))
        sizes = [patcher.model.memory_required([n, 16, 3, 60, 104]) for n in (1, 2)]
        return {
            "clones": [
                shifted.is_clone(patcher),
                shifted.clone().policy == LAYERWISE,
                shifted.ref == here.ref,
            ],
            "shift": [p.get_model_object("model_sampling").shift for p in (patcher, shifted)],
            "refusal": refusal,
            "latent": torch.allclose(latent, returned, atol=1e-5),
            "dtype": str(patcher.model_dtype()),
            "memory grows": 0 < sizes[0] < sizes[1] < 2 * sizes[0],
            "both lanes": sizes[0] == working_bytes(here.pair, [1, 16, 3, 60, 104], sides=(0, 0)),
            "parameters": len(list(patcher.model.parameters())),
        }


def answers(high: str, low: str) -> dict[str, Any]:
    return results_of({name: partial(function, (high, low)) for name, function in CASES.items()})
