"""Runs in ComfyUI's Python: the memory manager loads and evicts our experts on a simulated device.

Each case sets the device capacity in bytes, and loaded models use it up. The experts have 12 blocks
and compute on the CPU.
"""

import re
import sys
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import comfy.model_management as mm
import comfy.model_patcher
import torch
from comfy_extras.nodes_model_advanced import ModelSamplingSD3

from wanstream.host.auto_policy import AutoPlanner
from wanstream.host.comfy.adapter.comfy_host import ComfyHost
from wanstream.host.comfy.experts.patcher import make_room_for_probes
from wanstream.host.machine_profile import PROBE_BYTES
from wanstream.nodes.runs.decode import DecodeSettings, TileNotes, _first_tiling
from wanstream.plan import AutoOffload, Bus, OffloadPolicy
from wanstream.plan.programs import BlockSize
from wanstream.sampling import DenoiseRequest, denoise, lane_names, run_shape, working_bytes
from wanstream.sampling.cache import Stage
from wanstream.sampling.steps import Side
from wanstream.schema.refs.experts import ExpertsRef
from wanstream.wan.experts.open import open_pair
from wanstream.wan.vae.memory import DecodeNeeds

from ..checks import for_each, refused, require
from ..experts.guider import slow_machine
from ..tiny_models import logged

GPU = torch.device("cuda", 0)
CPU = torch.device("cpu")
PLENTY = 100 * 2**30
WORKING = 3 * 2**30
SCALE = 1000
"""A tiny block counts as 0.8 GB, because ComfyUI's own margins are as large."""
UNGUIDED = {"high": (0,), "low": (0,)}
BLOCK_SWAP = OffloadPolicy.block_swap(6)
LAYERWISE = OffloadPolicy.layerwise(1)
RESIDENT = OffloadPolicy.resident()


class OnCpu:
    """Experts that ComfyUI sees on the made-up device.

    Every byte counts as a thousand (SCALE).
    """

    def __init__(self, pair):
        self._pair = pair
        self.locked = 0
        self.fails = None

    def __getattr__(self, name):
        return getattr(self._pair, name)

    def engine(self, policy, device):
        engine = self._pair.engine(policy, CPU)
        if self.fails is not None:
            raise self.fails
        return engine

    def device_bytes(self, policy, *, device=None):
        return SCALE * int(self._pair.device_bytes(policy))

    @property
    def loaded_bytes(self):
        return SCALE * int(self._pair.loaded_bytes)

    def release_memory(self, nbytes):
        return SCALE * int(self._pair.release_memory(-(-nbytes // SCALE)))

    @property
    def pinned_bytes(self):
        return self.locked if self._pair.loaded_bytes else 0


class Neighbour(comfy.model_patcher.ModelPatcher):
    """Another model with `nbytes`, which loads and gives back any number of bytes."""

    def __init__(self, nbytes):
        super().__init__(torch.nn.Module(), GPU, CPU, size=nbytes)

    def partially_load(self, device_to, extra_memory=0, force_patch_weights=False):
        return self._take(min(int(extra_memory), self.size - self.loaded_size()))

    def partially_unload(self, device_to, memory_to_free=0, force_patch_weights=False):
        return -self._take(-min(int(memory_to_free) + 1, self.loaded_size()))

    def detach(self, unpatch_all=True):
        if unpatch_all:
            self._take(-self.loaded_size())
        return self.model

    def model_mmap_residency(self, free=False):
        return self.size, self.size

    def pinned_memory_size(self):
        return self.size

    def _take(self, nbytes):
        self.model.model_loaded_weight_memory += nbytes
        self.model.device = GPU if self.model.model_loaded_weight_memory else CPU
        return nbytes


class World:
    """A device with `capacity` bytes, an empty list of loaded models, and a door."""

    def __init__(self, high, low, capacity=PLENTY):
        self.ref = ExpertsRef(high_noise=Path(high), low_noise=Path(low), compute_dtype="float32")
        self.other = ExpertsRef(high_noise=Path(low), low_noise=Path(high), compute_dtype="float32")
        self.capacity = capacity
        self.pairs = []
        self.neighbours = []
        self.host = ComfyHost(self._open)

    def _open(self, ref):
        self.pairs.append(OnCpu(open_pair(ref)))
        return self.pairs[-1]

    @property
    def pair(self):
        return self.pairs[-1]

    @property
    def taken(self):
        ours = sum(pair.loaded_bytes for pair in self.pairs)
        return ours + sum(each.loaded_size() for each in self.neighbours)

    def free(self, dev=None, torch_free_too=False):
        free = self.capacity - self.taken
        return (free, 0) if torch_free_too else free

    def neighbour(self, nbytes):
        self.neighbours.append(Neighbour(nbytes))
        mm.load_models_gpu([self.neighbours[-1]], memory_required=0)
        return self.neighbours[-1]

    def load(self, policy, ref=None):
        return self.host.models.load_experts(ref or self.ref, policy, working_bytes=WORKING)

    def run(self, policy, ref=None, on_step=None):
        loaded = self.load(policy, ref)
        noise = torch.randn(1, 16, 1, 4, 4, generator=torch.Generator().manual_seed(0))
        text = torch.randn(1, 5, 4096, generator=torch.Generator().manual_seed(1))
        request = DenoiseRequest(noise, text, steps=4, switch_step=2, solver="euler")
        return denoise(loaded.pair, request, policy=loaded.policy, device="cpu", on_step=on_step)

    def planned(self, policy):
        return int(self.host.models.experts(self.ref).device_bytes(policy))

    @property
    def block(self):
        return self.planned(LAYERWISE) - self.planned(OffloadPolicy.layerwise(0))

    @property
    def wanted(self):
        """Free bytes that ComfyUI requires in addition to the weights."""
        return max(mm.minimum_inference_memory(), WORKING + mm.extra_reserved_memory())


@contextmanager
def world(files, capacity=PLENTY, **settings):
    """A world with these memory manager settings, and our log messages in it."""
    made = World(*files, capacity)
    settings = {"vram_state": mm.VRAMState.NORMAL_VRAM, "MIN_WEIGHT_MEMORY_RATIO": 0.0, **settings}
    settings |= {"get_free_memory": made.free, "get_torch_device": lambda: GPU}
    settings["current_loaded_models"] = []
    with patch.multiple(mm, **settings), logged("wanstream.memory") as messages:
        try:
            yield made, messages
        finally:
            made.host.open_experts.free()


def check_room_for_planned_weights(files):
    """ComfyUI frees what is planned next to a neighbour, and no more."""
    for short in (0, 1000):
        with world(files) as (here, _):
            neighbour = here.neighbour(2**30)
            here.capacity = 2**30 + int(here.planned(BLOCK_SWAP) * 1.1 + here.wanted) + 1 - short
            loaded = here.load(BLOCK_SWAP)
            assert loaded.policy == BLOCK_SWAP
            assert str(loaded.device) == "cuda:0"
            assert neighbour.loaded_size() == 2**30 - short


def check_weights_of_next_run(files):
    """Weights stay for the next run."""
    with world(files) as (here, messages):
        neighbour = here.neighbour(2**30)
        first = here.run(RESIDENT)
        here.capacity = here.taken + int(here.wanted) + 1
        second = here.run(RESIDENT)
        assert first.timeline.bytes_moved > second.timeline.bytes_moved == 0
        assert first.timeline.non_block_bytes > second.timeline.non_block_bytes == 0
        assert torch.equal(first.latents, second.latents)
        assert here.pair.loaded_bytes == here.planned(RESIDENT)
        assert len(mm.current_loaded_models) == 2
        assert neighbour.loaded_size() == 2**30
        assert messages == []


def check_eviction_by_block(files):
    """Another model needs a little more than there is, thrice, with a run after each."""
    with world(files) as (here, messages):
        whole = here.run(BLOCK_SWAP)
        full = here.pair.loaded_bytes
        for lacking, blocks in ((0.5, 1), (4.5, 5), (7.5, 8)):
            needed = 2**30 * 1.1 + mm.minimum_inference_memory()
            here.capacity = here.taken + int(needed - lacking * here.block)
            neighbour = here.neighbour(2**30)
            assert full - here.pair.loaded_bytes == blocks * here.block
            assert len(mm.current_loaded_models) == 2
            assert neighbour.loaded_size() == 2**30
            here.capacity = PLENTY
            assert torch.equal(here.run(BLOCK_SWAP).latents, whole.latents)
            assert here.pair.loaded_bytes == full
            freed = rf"freed [\d.]+ [MG]B of 8.81 GB for another model: {blocks} blocks"
            assert re.fullmatch(freed, messages.pop())
            loaded = mm.current_loaded_models
            loaded[:] = [each for each in loaded if each.model is not neighbour]
            here.neighbours.clear()
        assert messages == []
        # Blocks do not make up for what another model needs.
        here.capacity = int(2**31 * 1.1 + mm.minimum_inference_memory()) + 1
        assert here.neighbour(2**31).loaded_size() == 2**31
        assert here.pair.loaded_bytes == 0
        assert len(mm.current_loaded_models) == 1
        here.capacity = PLENTY
        assert torch.equal(here.run(BLOCK_SWAP).latents, whole.latents)
        mm.unload_all_models()
        assert here.pair.loaded_bytes == len(mm.current_loaded_models) == 0
        assert len(messages) == 2
        assert all("the experts are unloaded" in line for line in messages)


# The policy in half the free memory it needs.
@for_each(
    ({}, "block_swap", 9),
    ({"vram_state": mm.VRAMState.LOW_VRAM}, "block_swap", 9),
    ({"vram_state": mm.VRAMState.HIGH_VRAM}, "block_swap", 6),
    ({"vram_state": mm.VRAMState.NO_VRAM}, "layerwise", 0),
    ({"DISABLE_SMART_MEMORY": True}, "block_swap", 9),
)
def check_flags(files, setting, kind, swapped):
    with world(files, **setting) as (here, messages):
        here.capacity = int(here.planned(OffloadPolicy.block_swap(9)) + here.wanted) + 1
        policy = here.load(BLOCK_SWAP).policy
        assert (policy.kind, policy.blocks_to_swap, policy.prefetch_blocks) == (kind, swapped, 1)
        assert here.load(BLOCK_SWAP).policy == policy
        here.capacity = PLENTY
        here.neighbour(1000)
        stays = here.pair.loaded_bytes > 0
        assert stays == ("DISABLE_SMART_MEMORY" not in setting), "beside a small model"
    lines = [line for line in messages if "are free for the experts" in line]
    assert len(lines) == (0 if policy == BLOCK_SWAP else 2)
    assert all(" instead of " in line and "6 of 12 blocks resident" in line for line in lines)


@for_each((0, "block_swap", 6), (2, "block_swap", 8), (20, "layerwise", 0))
def check_reserved_blocks(files, blocks, kind, swapped):
    """Reserved memory is not used. Without a reserve, the requested policy just fits."""
    with world(files) as (here, _):
        here.capacity = int(here.planned(BLOCK_SWAP) + here.wanted) + 1
        more = mm.EXTRA_RESERVED_VRAM + blocks * here.block
        with patch.object(mm, "EXTRA_RESERVED_VRAM", more):
            policy = here.load(BLOCK_SWAP).policy
        assert (policy.kind, policy.blocks_to_swap) == (kind, swapped)


def check_room_that_comes_back(files):
    """Less free memory, then plenty again."""
    with world(files) as (here, _):
        whole = here.run(BLOCK_SWAP)
        for policy in (OffloadPolicy.block_swap(10), LAYERWISE, BLOCK_SWAP):
            if policy is BLOCK_SWAP:
                here.capacity = PLENTY
            else:
                here.capacity = int(here.planned(policy) + here.wanted) + 1
                mm.unload_all_models()  # older ComfyUI versions do not shrink a loaded model
            assert torch.equal(here.run(BLOCK_SWAP).latents, whole.latents)
            assert here.load(BLOCK_SWAP).policy == policy
        patcher = mm.current_loaded_models[0].model
        assert patcher.partially_load(GPU, -3.5 * here.block) < 0
        assert patcher.loaded_experts().policy.blocks_to_swap == 10


def check_eviction_by_dynamic_model(files):
    """A model with dynamic VRAM, which needs room to compute in, loads after us."""
    require(hasattr(comfy.model_patcher, "ModelPatcherDynamic"), "dynamic VRAM")

    class Dynamic(comfy.model_patcher.ModelPatcherDynamic):
        """Everything but the pages, which need a device."""

        def load(self, device_to=None, *_, **__):
            self.model.device = device_to

    with ExitStack() as stack:
        # Without a GPU, the library for pinned buffers is not loaded.
        if "comfy_aimdo.host_buffer" in sys.modules and not sys.modules["comfy_aimdo.control"].lib:
            buffer = "comfy_aimdo.host_buffer.HostBuffer"
            stack.enter_context(patch(buffer, lambda *_: SimpleNamespace(size=0)))
        here, messages = stack.enter_context(world(files))
        here.run(BLOCK_SWAP)
        full = here.pair.loaded_bytes
        needed = 4 * 2**30
        requester = Dynamic(torch.nn.Linear(1, 1), GPU, CPU)
        assert requester.is_dynamic()
        here.capacity = here.taken + needed + mm.EXTRA_RESERVED_VRAM - int(2.5 * here.block)
        mm.load_models_gpu([requester], memory_required=needed)
        assert full - here.pair.loaded_bytes == 3 * here.block
        names = [type(each.model).__name__ for each in mm.current_loaded_models]
        assert names == ["Dynamic", "ExpertsPatcher"]
        assert len(messages) == 1


def check_other_experts(files):
    """Other experts take our place, also where a guider still references the first ones."""
    with world(files) as (here, _):
        first = here.run(LAYERWISE).latents
        here.load(LAYERWISE, here.other)
        assert len(mm.current_loaded_models) == 1, "experts that nobody holds leave the list"
        assert [pair.loaded_bytes > 0 for pair in here.pairs] == [False, True]
        guider = here.host.open_experts.patcher(here.ref, BLOCK_SWAP, flow_shift=5.0)
        for _turn in range(2):
            mm.load_models_gpu([guider])
            assert guider.model.model_sampling.shift == 5.0
            here.load(LAYERWISE, here.other)
        mm.load_models_gpu([guider])
        assert [each.is_dead() for each in mm.current_loaded_models] == [False]
        current = guider.loaded_experts()
        assert current.policy == BLOCK_SWAP
        assert current.pair is here.pair
        del guider
        assert torch.equal(here.run(LAYERWISE).latents, first)
        assert len(mm.current_loaded_models) == 1
        patcher = here.host.open_experts.patcher(here.ref, LAYERWISE)
        assert patcher.model.model_sampling.shift == 8.0


def check_page_locked_bytes(files):
    """ComfyUI's count of page-locked bytes, starting with 100 foreign bytes."""
    require(hasattr(mm, "TOTAL_PINNED_MEMORY"), "count of page-locked bytes")
    pinned = OffloadPolicy.layerwise(1, source="pinned")
    with world(files, TOTAL_PINNED_MEMORY=100) as (here, _):

        def lock():
            here.load(pinned)
            here.pair.locked = 5000
            here.load(pinned)
            assert mm.TOTAL_PINNED_MEMORY == 5100

        here.load(pinned)
        here.pair.locked = 5000
        here.neighbour(1000)
        assert mm.TOTAL_PINNED_MEMORY == 5100, "after a run, when another model loads"
        lock()
        (ours,) = [m.model for m in mm.current_loaded_models if m.model_memory() != 1000]
        assert [ours.pinned_memory_size(), *ours.model_mmap_residency()] == [5000] * 3
        del ours  # experts are counted only as long as their patcher is referenced
        mm.free_memory(0, None, pins_required=2**60)
        # Since 0.33 or before, ComfyUI frees locked RAM only for models with dynamic VRAM.
        assert (5100 if hasattr(mm, "models_for_pin_eviction") else 100) == mm.TOTAL_PINNED_MEMORY
        for release in (
            mm.unload_all_models,
            here.host.open_experts.free,
            lambda: here.load(LAYERWISE, here.other),
            lambda: here.host.open_experts.patcher(here.other, LAYERWISE),
        ):
            lock()
            release()
            assert mm.TOTAL_PINNED_MEMORY == 100


@for_each(False, True)
def check_eviction_of_running_experts(files, disabled):
    """They stay in a run, and can be evicted after it."""
    if disabled:  # ComfyUI 0.3.64 drops every model then
        require("pins_required" in signature(mm.free_memory).parameters, "request to free memory")
    with world(files, DISABLE_SMART_MEMORY=disabled) as (here, messages):

        def want_all(step):
            if step.done == 2:
                mm.free_memory(1e30, GPU)

        whole = here.run(BLOCK_SWAP)
        disturbed = here.run(BLOCK_SWAP, on_step=want_all)
        assert torch.equal(whole.latents, disturbed.latents)
        assert len(mm.current_loaded_models) == 1
        assert messages[0].startswith("the experts are running: their ")
        mm.unload_all_models()
        assert here.pair.loaded_bytes == 0


def check_experts_of_a_deleted_guider(files):
    """Experts stay on the list when their guider goes, and when a policy is refused."""
    with world(files) as (here, _):
        guider = here.host.open_experts.patcher(here.other, BLOCK_SWAP, flow_shift=5.0)
        here.run(LAYERWISE)
        here.host.open_experts.patcher(here.other, LAYERWISE)  # made, and not loaded yet
        refused(lambda: here.load(OffloadPolicy.block_swap(99)), "blocks_to_swap is 99")
        assert len(mm.current_loaded_models) == 1
        here.run(LAYERWISE)
        mm.load_models_gpu([guider])
        del guider
        assert len(mm.current_loaded_models) == 1
        mm.unload_all_models()
        assert [pair.loaded_bytes for pair in here.pairs] == [0, 0, 0]


def check_out_of_memory(files):
    """Nothing is left after it, while we load and in a run."""

    def fail(step):
        raise mm.OOM_EXCEPTION("made up")

    with world(files) as (here, _):
        whole = here.run(BLOCK_SWAP)
        mm.unload_all_models()
        here.pair.fails = mm.OOM_EXCEPTION("made up")
        refused(lambda: here.load(BLOCK_SWAP), kind=mm.OOM_EXCEPTION)
        assert here.pair.loaded_bytes == len(mm.current_loaded_models) == 0
        here.pair.fails = None
        refused(lambda: here.run(BLOCK_SWAP, on_step=fail), kind=mm.OOM_EXCEPTION)
        assert here.pair.loaded_bytes > 0, "it is ComfyUI that unloads all after a run"
        mm.unload_all_models()
        assert here.pair.loaded_bytes == len(mm.current_loaded_models) == 0
        assert torch.equal(here.run(BLOCK_SWAP).latents, whole.latents)


def check_step_short_of_memory(files):
    """Out of memory twice in one run: the steps are taken again, with fewer resident blocks."""
    with world(files) as (here, _):
        whole = here.run(BLOCK_SWAP)
        uses = iter(range(10**6))

        def fail(*_):
            if next(uses) in {14, 20}:
                raise mm.OOM_EXCEPTION("made up")

        blocks = here.pair.engine(BLOCK_SWAP, CPU).models.blocks.values()
        hooks = [block.register_forward_pre_hook(fail) for stack in blocks for block in stack]
        disturbed = here.run(BLOCK_SWAP)
        for hook in hooks:
            hook.remove()
        assert torch.equal(whole.latents, disturbed.latents)
        assert len(disturbed.timeline.changes) == 2
        assert here.pair.loaded_bytes < here.planned(BLOCK_SWAP) - here.block
        assert len(mm.current_loaded_models) == 1
        assert here.load(BLOCK_SWAP).policy == BLOCK_SWAP
        assert torch.equal(here.run(BLOCK_SWAP).latents, whole.latents)


def check_planned_policy(files):
    """Memory that a neighbour can free counts, reserved memory does not."""
    # Slow enough to make as many blocks resident as fit.
    bus = Bus(h2d_bytes_per_s=1e6, h2d_pageable_bytes_per_s=1e6, d2h_bytes_per_s=1e6)
    machine = replace(slow_machine(), bus=bus, vram_bytes=PLENTY)
    names = lane_names(1, (Side.POSITIVE,))
    experts = ["high"] * 4 + ["low"] * 4
    lanes = {step: (Stage(expert), names) for step, expert in enumerate(experts)}
    resident = []
    for reserve in (0, 4):
        with world(files) as (here, _):
            here.host = ComfyHost(here._open, AutoPlanner(lambda *_: machine))
            here.neighbour(2**30)
            pair = here.host.models.experts(here.ref)
            here.capacity = int(here.planned(BLOCK_SWAP) + mm.minimum_inference_memory() + 2**29)
            shape = run_shape(pair, (1, 16, 1, 4, 4), GPU, lanes=lanes, sides=UNGUIDED)
            more = mm.EXTRA_RESERVED_VRAM + reserve * here.block
            with patch.object(mm, "EXTRA_RESERVED_VRAM", more):
                given = (pair, here.ref, AutoOffload(), _scaled(shape))
                choice = here.host.memory.choose_policy(*given)
                loaded = here.host.models.load_experts(here.ref, choice.policy, working_bytes=0)
            assert choice.policy.kind == "block_swap"
            assert loaded.policy == choice.policy
            assert choice.revise is not None
            resident.append(12 - choice.policy.blocks_to_swap)
    assert resident[0] - 4 == resident[1]
    assert resident[0] >= 5


def check_room_to_measure(files):
    """A neighbour that fills the device makes room for the probes, and no more."""
    with world(files) as (here, _):
        neighbour = here.neighbour(10 * 2**30)
        here.capacity = here.taken + 2**30
        make_room_for_probes()
        assert 0 <= here.free() - PROBE_BYTES < 2**20
        assert neighbour.loaded_size() > 0


def check_room_for_a_decode(files):
    """Whole frames as long as other models can free the missing bytes, else tiles."""
    vae = SimpleNamespace(weight_bytes=2**29)
    size = {"height": 60, "width": 104, "frames": 5}
    needs = DecodeNeeds(**size, pixel_bytes=2**20, value_bytes=4, keeps_frames=True)
    settings = DecodeSettings(vae=Path(), tiling=None, memory_bytes=0)
    whole = vae.weight_bytes + needs.device_bytes(None) + int(mm.minimum_inference_memory())
    # One byte more than needed, because ComfyUI 0.3.64 frees memory unless more than the requested
    # bytes are free.
    for lacking in (-1, 1000, 2**30, 5 * 2**30):
        with world(files) as (here, _):
            neighbour = here.neighbour(2**32)
            notes = TileNotes()
            here.capacity = here.taken + whole - lacking
            tiling = _first_tiling(here.host.memory, settings, vae, needs, notes)
            given = 2**32 - neighbour.loaded_size()
            if lacking <= 2**30:
                assert tiling is None
                assert given == max(lacking + 1, 0)
                assert here.free() == whole + 1
                assert len(notes) == 0
            else:
                assert 64 <= tiling.pixels < 832
                assert given == 2**32
                assert here.free() == whole - 2**30
                assert len(notes) == 1
    with world(files) as (here, _):
        here.run(RESIDENT)
        before = here.pair.loaded_bytes
        here.capacity = here.taken + whole - here.block // 2
        assert _first_tiling(here.host.memory, settings, vae, needs, TileNotes()) is None
        assert before - here.pair.loaded_bytes == here.block


def _scaled(shape):
    """Return the shape with a thousand times the bytes per block."""
    costs = shape.blocks
    names = ("stored_bytes", "file_bytes", "computed_bytes")
    scaled = {name: SCALE * getattr(costs, name) for name in names}
    sizes = tuple(BlockSize(*(SCALE * nbytes for nbytes in size)) for size in costs.sizes)
    return replace(shape, blocks=replace(costs, sizes=sizes, **scaled))


def check_model_interface(files):
    """Attributes and methods of a model, as ComfyUI's samplers and nodes use them."""
    with world(files) as (here, _):
        patcher = here.host.open_experts.patcher(here.ref, LAYERWISE)
        (shifted,) = ModelSamplingSD3().patch(patcher, 3.0)
        assert shifted.is_clone(patcher)
        assert shifted.clone().policy == LAYERWISE
        assert shifted.ref == here.ref
        shifts = [each.get_model_object("model_sampling").shift for each in (patcher, shifted)]
        assert shifts == [8.0, 3.0]
        model = patcher.model
        refused(lambda: model.apply_model(None, None), "Wan Guider")
        latent = torch.randn(1, 16, 1, 2, 2)
        returned = model.process_latent_out(model.process_latent_in(latent))
        assert torch.allclose(latent, returned, atol=1e-5)
        assert patcher.model_dtype() == torch.float32
        assert not list(model.parameters())
        one, two = (model.memory_required([count, 16, 3, 60, 104]) for count in (1, 2))
        assert 0 < one < two < 2 * one
        # ComfyUI keeps room for the least, and the negative is computed in the same pass.
        assert one == working_bytes(here.pair, [1, 16, 3, 60, 104], sides=(0, 0))


def setup(folder):
    high, low = (f"{folder}/deep_{name}.safetensors" for name in ("high", "low"))
    return high, low
