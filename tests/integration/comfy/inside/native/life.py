"""Runs in ComfyUI's own Python: streamed models in ComfyUI's hands, from errors to deletion."""

import gc
import warnings
import weakref
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import comfy.model_management as mm
import comfy.model_patcher
import torch

from ..checks import for_each, refused
from ..families import sample
from ..incidents import Incident, Interrupt, in_blocks, is_cut
from ..patches import run_function
from ..tiny_models import FLUX, WAN, Files, has_ended, logged, same, threads, with_free

setup = Files
CPU = torch.device("cpu")
FREE = 64 * 2**30
"""Bytes the device seems to have free."""
BLOCKS = 8
run = partial(sample, family=FLUX)


def listed(model):
    """Return how often a MODEL or a clone is in ComfyUI's list of loaded models."""
    return sum(
        entry.model is not None and entry.model.model is model.model
        for entry in mm.current_loaded_models
    )


def openings(path):
    """Return the number of open handles and the number of mappings for a file."""
    handles = 0
    for link in Path("/proc/self/fd").iterdir():
        try:
            handles += link.readlink() == path
        except FileNotFoundError:  # the handle for this very listing
            continue
    return [handles, Path("/proc/self/maps").read_text().count(str(path))]


@contextmanager
def messages():
    """Collect warnings, and what ComfyUI logs about leaks."""
    with logged() as found, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield found
    found += [str(each.message) for each in caught if "hook" in str(each.message)]


def _fail():
    raise ZeroDivisionError("made up")


HAPPENS = {
    "error": (_fail, ZeroDivisionError),
    "interrupt": (partial(mm.interrupt_current_processing, True), Interrupt),
}


# Passes and blocks are counted from 0.
@for_each(
    ("error", 0, 1, "layerwise"), ("interrupt", 0, 1, "block swap"), ("error", 2, 5, "block swap"),
    ("interrupt", 2, 5, "layerwise"), ("error", 3, 6, "layerwise"),
)  # fmt: skip
def check_a_run_ends(files, kind, in_pass, in_block, policy):
    """Before the next block, with the order known or in the first pass. The next run is right."""
    run = partial(sample, family=FLUX, steps=4)
    expected, model = files.pair(run, FLUX, policy=policy)
    does, error = HAPPENS[kind]
    incident = Incident(does, at=in_pass * BLOCKS + in_block + 1)
    with messages() as said, in_blocks(model, incident):
        refused(lambda: run(model), kind=error)
    mm.interrupt_current_processing(False)
    assert not incident.left
    assert not incident.later
    assert [line for line in said if "hook" in line] == []
    assert listed(model) == 1
    has_ended(run, model, expected)
    same(run, model, expected)


def check_an_error_that_a_wrapper_catches_does_not_end_the_run(files):
    run = partial(sample, family=FLUX, steps=4)
    expected, model = files.pair(run, FLUX)
    incident = Incident(_fail, at=BLOCKS + 4)
    clone = model.clone()

    def again(apply, args):
        try:
            return run_function(apply, args)
        except ZeroDivisionError:
            return run_function(apply, args)

    clone.set_model_unet_function_wrapper(again)
    with in_blocks(model, incident):
        assert torch.equal(run(clone), expected)
    assert incident.later > BLOCKS
    has_ended(run, model, expected)


@for_each("block swap", "resident")
def check_other_models_evict_blocks(files, policy):
    """Another model needs the memory of one block, then three, then everything."""
    expected, model = files.pair(run, FLUX, policy=policy)
    block = model.weights.device_bytes(model.policy) // 8
    with with_free(FREE):
        for blocks in (1, 3, 100):
            assert torch.equal(run(model), expected)
            before = model.loaded_size()
            everything = blocks == 100
            need = 2 * before if everything else blocks * block
            mm.free_memory(FREE + need, CPU)
            freed = before - model.loaded_size()
            assert freed == before if everything else need <= freed < before
            assert listed(model) == (0 if everything else 1)
        assert torch.equal(run(model), expected)


def load_vae():
    """Load another model with more memory than there is.

    ComfyUI itself frees nothing for a load on the CPU.
    """
    vae = comfy.model_patcher.ModelPatcher(torch.nn.Linear(64, 64), CPU, CPU)
    mm.free_memory(10**15, CPU)
    mm.load_models_gpu([vae])
    return vae


def check_a_vae_that_loads_during_a_run_evicts_nothing(files):
    """A preview loads a VAE, and requires more memory than there is."""
    expected, model = files.pair(run, FLUX, policy="block swap")
    model = model.clone()
    neighbours = []
    present = []

    def load(args):
        neighbours.append(load_vae())
        present.append(listed(model))
        return args["denoised"]

    model.set_model_sampler_post_cfg_function(load)
    same(run, model, expected, runs=2)
    assert present == [1] * 6
    for _ in range(2):
        assert listed(model) == 1
        mm.unload_all_models()
        assert listed(model) == model.loaded_size() == len(threads(readers=True)) == 0
        same(run, model, expected)


def check_two_types_of_one_file_are_two_models(files):
    expected = {form: run(files.native(FLUX, form)) for form in ("fp8", "fp8 kept")}
    assert not torch.equal(*expected.values())
    models = {form: files.streamed(FLUX, form) for form in expected}
    for form in ("fp8", "fp8 kept", "fp8", "fp8 kept"):
        assert torch.equal(run(models[form]), expected[form])
    decoded, kept = models.values()
    assert listed(decoded) == listed(kept) == 1
    assert decoded.weights.loaded_engine is not kept.weights.loaded_engine
    assert decoded.weights.buffer_bytes >= 2 * kept.weights.buffer_bytes
    del models, decoded
    gc.collect()
    assert torch.equal(run(kept), expected["fp8 kept"])


@for_each("while loaded", "when unloaded")
def check_a_model_that_nobody_holds_is_gone(files, when):
    path = files.path(WAN)
    files.forget()
    assert openings(path) == [0, 0]
    model = files.streamed(WAN)
    sample(model, WAN)
    handles, mappings = openings(path)
    assert handles
    assert not mappings, "a page of a file that is cut would end the process"
    if when == "when unloaded":
        mm.unload_all_models()
    gone = weakref.ref(model.model), weakref.ref(model)
    with messages() as said:
        del model
        mm.load_models_gpu([comfy.model_patcher.ModelPatcher(torch.nn.Linear(8, 8), CPU, CPU)])
        gc.collect()
    assert openings(path) == [0, 0]
    assert [each() for each in gone] == [None, None]
    assert [line for line in said if "leak" in line] == threads(readers=True) == []
    assert [entry for entry in mm.current_loaded_models if entry.model is None] == []


def check_a_file_that_is_removed(files):
    """A loaded model keeps the handle.

    After unloading, the next run names the file it cannot read.
    """
    run = partial(sample, family=WAN)
    path = files.path(WAN, "fp16")
    expected, model = files.pair(run, WAN, "fp16")
    away = path.with_suffix(".away")
    incident = Incident(lambda: path.rename(away), at=6)
    with in_blocks(model, incident):
        same(run, model, expected, runs=2)
    assert incident.later
    mm.unload_all_models()
    with messages() as said:
        refused(lambda: run(model), path.name, "No such file", kind=OSError)
    assert [line for line in said if "hook" in line] == []
    away.rename(path)
    has_ended(run, model, expected)


@for_each("layerwise", "block swap")
def check_a_file_that_is_cut_during_a_run(files, policy):
    run = partial(sample, family=WAN, cfg=1.0)
    path = files.path(WAN, "fp16")
    expected, model = files.pair(run, WAN, "fp16", policy=policy)
    with is_cut(path, model, at=len(model.model.weights.blocks) + 2):
        for _ in range(2):
            refused(lambda: run(model), path.name, kind=OSError)
    has_ended(run, model, expected)
