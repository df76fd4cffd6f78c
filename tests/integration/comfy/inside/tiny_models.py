"""Runs in ComfyUI's own Python: checkpoints of tiny native models, ComfyUI's MODELs and ours."""

import gc
import json
import logging
import math
import threading
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace
from unittest.mock import patch

import torch
from comfy import model_base, model_management, ops

from wanstream.host import ModelStreaming, ShareVisits, current_host
from wanstream.host.comfy import versions
from wanstream.host.comfy.native import load
from wanstream.schema import OffloadPolicy

from . import families
from .families import FAMILIES

LIMITS = {"smallest_block": 20_000, "smallest_model": 1_000}
"""Size limits for blocks in the tiny models."""
LAYERWISE = OffloadPolicy.layerwise(1)
POLICIES = {
    "layerwise": lambda _: LAYERWISE,
    "block swap": lambda blocks: OffloadPolicy.block_swap(blocks // 2),
    "resident": lambda _: OffloadPolicy.resident(),
    "RAM": lambda _: OffloadPolicy.layerwise(1, source="pinned"),
}
"""Policies by block count."""
FORMATS = {"fp8 kept": ("fp8", "fp8_e4m3fn")}
"""A file's number format and the weight type to load it with, where that is not the default."""
SHARED = "the conditions share each visit"
WAN = FAMILIES["wan_t2v"]
FLUX = FAMILIES["flux"]


def load_native(path, weight_dtype, policy, share="auto", **limits):
    """Return a MODEL whose blocks stream. See `load.load_native` and `ModelStreaming`."""
    streaming = ModelStreaming(policy=policy, share_visits=ShareVisits(share))
    return load.load_native(path, weight_dtype, streaming, current_host(), limits)


class Files:
    """Checkpoints, written once, and the models loaded from them."""

    def __init__(self, folder):
        self.folder = folder
        self._natives = {}

    def path(self, family, dtype="fp32"):
        path = self.folder / f"{family.name}_{dtype}.safetensors"
        if not path.exists():
            family.write(path, dtype)
        return path

    def native(self, family, form="fp32"):
        """Return ComfyUI's MODEL, the same one for each call."""
        dtype, weight_dtype = FORMATS.get(form, (form, "default"))
        if (family.name, form) not in self._natives:
            path = self.path(family, dtype)
            loaded = families.native(path, family, weight_dtype=weight_dtype)
            self._natives[family.name, form] = loaded
        return self._natives[family.name, form]

    def forget(self):
        """Drop all native models."""
        self._natives.clear()
        gc.collect()

    def streamed(self, family, form="fp32", policy="layerwise", share="auto", **limits):
        """Return a new streamed MODEL, under a policy or one that `POLICIES` has."""
        dtype, weight_dtype = FORMATS.get(form, (form, "default"))
        named = isinstance(policy, str)
        path = self.path(family, dtype)
        first = LAYERWISE if named else policy
        with families.given_configuration(family):
            model = load_native(path, weight_dtype, first, share, **{**LIMITS, **limits})
        if named:
            chosen = POLICIES[policy](len(model.model.weights.blocks))
            model.with_settings(replace(model.streaming, policy=chosen))
        return model

    def pair(self, run, family, form="fp32", **settings):
        """Return ComfyUI's result and a new streamed MODEL."""
        return run(self.native(family, form)), self.streamed(family, form, **settings)

    def lora(self, family=WAN, kind="lora"):
        """Return a LoRA from `families.LORAS`."""
        path = self.folder / f"{family.name}_{kind}.safetensors"
        if not path.exists():
            families.write_lora(kind, path, family.weights())
        return path


def empty_network(path, **settings):
    """Return the shapes in a network of ComfyUI, by key."""
    module, _, name = path.rpartition(".")
    settings |= {"dtype": torch.float16, "device": "meta", "operations": ops.disable_weight_init}
    with torch.device("meta"):
        network = getattr(import_module(module), name)(**settings)
    return {key: list(tensor.shape) for key, tensor in network.state_dict().items()}


def write_header(path, tensors, metadata):
    """Write a safetensors header and a hole in place of tensors. Return the hole's bytes.

    Tensors have a dtype, a shape, and bytes per value.
    """
    header = {"__metadata__": {**metadata}}
    end = 0
    for key, (dtype, shape, itemsize) in tensors.items():
        begin = end
        end = end + math.prod(shape) * itemsize
        header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        file.truncate(file.tell() + end)
    return end


def room_for_one(_, input_shape, **__):
    """Activation bytes, so many for a batch that ComfyUI computes conditions one by one."""
    return 1e30 if input_shape[0] > 1 else 1e6


def one_by_one():
    """Let ComfyUI compute conditions one by one."""
    return patch.object(model_base.BaseModel, "memory_required", room_for_one)


def with_free(nbytes):
    """Let the device seem to have free memory."""

    def free(_=None, torch_free_too=False):
        return (nbytes, 0) if torch_free_too else nbytes

    return patch.object(model_management, "get_free_memory", free)


def figures(model):
    """Return the counts from a streamed model's last run."""
    run = model.model.runs.last
    steps = run.shown.timeline.steps
    return SimpleNamespace(
        bytes=[step.bytes_moved for step in steps],
        experts=[step.expert for step in steps],
        visits=run.session.visits,
        fetches=run.session.fetches,
        recompiled=run.session.recompiled,
        notes=run.policy.notes,
        steps=len(steps),
    )


@contextmanager
def counted_patches():
    """Count the weights that get patches in the last value of the list."""
    counts = [0]
    patched = versions.patched_weight

    def counting(*args, **settings):
        counts[-1] += 1
        return patched(*args, **settings)

    with patch.object(versions, "patched_weight", counting):
        yield counts


@contextmanager
def logged(name=""):
    """Yield the lines that are logged."""
    lines = []
    log = logging.getLogger(name)
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    level = log.level
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    try:
        yield lines
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def threads(*, readers=False):
    """Return the run threads, with `readers` those that read parts of blocks too.

    They belong to the source, which lives longer.
    """
    names = [each.name for each in threading.enumerate() if each.name.startswith("wanstream-")]
    return [name for name in names if readers or not name.startswith("wanstream-read_")]


def same(run, model, expected, runs=1):
    """Check that all runs have ComfyUI's result. Return the notes of the last one."""
    for _ in range(runs):
        assert torch.equal(run(model), expected)
    return list(figures(model).notes)


def has_ended(run, model, expected):
    """Check that nothing is left of a run, and that the next one is right."""
    assert not model.weights.running
    assert threads() == []
    same(run, model, expected)
