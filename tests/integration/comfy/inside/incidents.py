"""Runs in ComfyUI's own Python: incidents inside the blocks of a running model."""

import os
from contextlib import contextmanager

import comfy.model_management
import torch

Interrupt = comfy.model_management.InterruptProcessingException


class Incident:
    """Action done `times` times, from call number `at` on. Counts the calls after it."""

    def __init__(self, does, at, times=1):
        self.does = does
        self.wait = at
        self.left = times
        self.later = 0

    def __call__(self, _):
        self.wait -= 1
        self.later += not self.left
        if self.wait <= 0 and self.left:
            self.left -= 1
            self.does()


@contextmanager
def in_blocks(model, does):
    """Call `does` with a layer's input in each block, for each condition or pass through it."""
    hooks = []
    for path in model.model.weights.blocks:
        modules = model.model.diffusion_model.get_submodule(path).modules()
        layer = next(each for each in modules if isinstance(each, torch.nn.Linear))
        hooks.append(layer.register_forward_pre_hook(lambda _, inputs: does(inputs[0])))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def is_cut(path, model, at):
    """Cut a file when a model computes block number `at` of a run. Put it back at the end."""
    content = path.read_bytes()
    times = (path.stat().st_atime_ns, path.stat().st_mtime_ns)
    cut = Incident(lambda: os.truncate(path, 1000), at)
    with in_blocks(model, cut):
        yield
    assert not cut.left
    path.write_bytes(content)
    os.utime(path, ns=times)


def failing(model, error, at, times=1):
    """Raise `error` in a block `times` times, from one condition's pass through block `at` on."""

    def fail():
        raise error()

    return in_blocks(model, Incident(fail, at, times))


def out_of_memory():
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
