"""Runs in ComfyUI's Python: a streamed native model's life, from errors to the end.

`answers(folder)` returns one JSON value per case. `test_native_life.py` checks the values.
"""

from __future__ import annotations

import gc
import logging
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import comfy.model_management as mm
import comfy.model_patcher
import torch
from native_cases import LIMITS, Files, halves
from native_families import FAMILIES, Family, results_of, sample
from native_loading import load_native

from wanstream.schema import OffloadPolicy

FLUX, TEXT_TO_VIDEO = FAMILIES["flux"], FAMILIES["wan_t2v"]
CPU = torch.device("cpu")
FREE = 64 * 2**30
"""Bytes the device seems to have free."""


READERS = "wanstream-read_"
"""Name prefix of threads that read parts of blocks. They stay as long as the engine."""


def threads(*, readers: bool = False) -> list[str]:
    """Return the names of run threads. With `readers`, include engine threads."""
    names = [
        thread.name for thread in threading.enumerate() if thread.name.startswith("wanstream-")
    ]
    return [name for name in names if readers or not name.startswith(READERS)]


def listed(model: Any) -> int:
    """Return how often a MODEL or a clone is in ComfyUI's list of loaded models."""
    return sum(
        entry.model is not None and entry.model.model is model.model
        for entry in mm.current_loaded_models
    )


def openings(path: Path) -> list[int]:
    """Return the number of open handles and the number of mappings for a file."""
    handles = 0
    for link in Path("/proc/self/fd").iterdir():
        try:
            handles += link.readlink() == path
        except FileNotFoundError:  # the handle for this very listing
            continue
    return [handles, Path("/proc/self/maps").read_text().count(str(path))]


@contextmanager
def messages() -> Iterator[list[str]]:
    """Collect warnings, and what ComfyUI logs about leaks."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger()
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield found
        found += [str(each.message) for each in caught if "hook" in str(each.message)]
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


class Incident:
    """A single event inside a given block and pass, both counted from 0.

    Also records the blocks that run after it.
    """

    def __init__(
        self, model: Any, *, in_pass: int, in_block: int, happens: Callable[[], None]
    ) -> None:
        self.later: list[int] = []
        self._passes, self._over = -1, False
        network = model.model.diffusion_model
        network.register_forward_pre_hook(self._begin)
        for index, path in enumerate(model.model.weights.blocks):
            layer = next(
                each
                for each in network.get_submodule(path).modules()
                if isinstance(each, torch.nn.Linear)
            )
            layer.register_forward_pre_hook(lambda *_, index=index: self._look(index))
        self._place, self._happens = (in_pass, in_block), happens

    def _begin(self, *_: Any) -> None:
        self._passes += 1

    def _look(self, index: int) -> None:
        if self._over:
            self.later.append(index)
        elif (self._passes, index) == self._place:
            self._over = True
            self._happens()


def _incident_case(
    files: Files, policy: str, in_pass: int, in_block: int, happens: Callable[[], None]
) -> Any:
    expected = sample(files.native(FLUX), FLUX, steps=4)
    model = files.streamed(FLUX, policy=policy)
    incident = Incident(model, in_pass=in_pass, in_block=in_block, happens=happens)
    raised = ""
    with messages() as said:
        try:
            sample(model, FLUX, steps=4)
        except BaseException as err:  # noqa: BLE001 - the test compares the name; newer interrupts are no `Exception`
            raised = type(err).__name__
    mm.interrupt_current_processing(False)
    found = {
        "raised": raised,
        "later": list(incident.later),
        "running": model.model.weights.running,
        "threads": threads(),
        "said": [line for line in said if "hook" in line],
        "listed": listed(model),
    }
    return {
        **found,
        "equal": [torch.equal(sample(model, FLUX, steps=4), expected) for _ in range(2)],
    }


def _fail() -> None:
    raise ZeroDivisionError("made up")


def incident_cases(files: Files) -> dict[str, Callable[[], Any]]:
    """Return cases with errors and interrupts: in the first pass, the block order is not known."""
    cases = {}
    for policy in ("layerwise", "block swap"):
        for number, (in_pass, in_block) in enumerate(((0, 1), (2, 5), (3, 6))):
            cases[f"error {number}, {policy}"] = partial(
                _incident_case, files, policy, in_pass, in_block, _fail
            )
            interrupt = partial(mm.interrupt_current_processing, True)
            case = partial(_incident_case, files, policy, in_pass, in_block, interrupt)
            cases[f"interrupt {number}, {policy}"] = case
    return cases


def retried_case(files: Files) -> dict[str, Any]:
    """Another pack's wrapper catches an error in a block and computes the pass again."""
    expected = sample(files.native(FLUX), FLUX, steps=4)
    model = files.streamed(FLUX)
    incident = Incident(model, in_pass=1, in_block=3, happens=_fail)
    clone = model.clone()

    def again(apply: Any, args: Any) -> torch.Tensor:
        try:
            return apply(args["input"], args["timestep"], **args["c"])
        except ZeroDivisionError:
            return apply(args["input"], args["timestep"], **args["c"])

    clone.set_model_unet_function_wrapper(again)
    result = sample(clone, FLUX, steps=4)
    return {
        "equal": torch.equal(result, expected),
        "later": len(incident.later) > 8,
        "threads": threads(),
    }


def free_case(files: Files) -> dict[str, Any]:
    """`/free` between two runs."""
    mm.unload_all_models()
    expected, model = sample(files.native(FLUX), FLUX), files.streamed(FLUX)
    equal, sizes = [], []
    for _ in range(2):
        equal.append(torch.equal(sample(model, FLUX), expected))
        sizes.append([listed(model), model.loaded_size() > 0])
        mm.unload_all_models()
        sizes.append([listed(model), model.loaded_size(), len(threads(readers=True))])
    equal.append(torch.equal(sample(model, FLUX), expected))
    return {"equal": equal, "sizes": sizes}


def evicted_case(files: Files, policy: str) -> dict[str, Any]:
    """Another model needs the memory of one block, then three, then everything."""
    expected, model = sample(files.native(FLUX), FLUX), files.streamed(FLUX, policy=policy)
    found: dict[str, Any] = {"equal": [], "freed": [], "listed": []}
    block = model.weights.device_bytes(model.policy) // 8

    def free(_device: object = None, torch_free_too: bool = False) -> Any:
        return (FREE, 0) if torch_free_too else FREE

    with patch.object(mm, "get_free_memory", free):
        for blocks in (1, 3, 100):
            found["equal"].append(torch.equal(sample(model, FLUX), expected))
            before = model.loaded_size()
            need = blocks * block if blocks < 100 else 2 * before
            mm.free_memory(FREE + need, CPU)
            freed = before - model.loaded_size()
            found["freed"].append([freed >= need, freed == before])
            found["listed"].append(listed(model))
        found["equal"].append(torch.equal(sample(model, FLUX), expected))
    return found


def _load_vae() -> Any:
    """Load another model with more memory than there is.

    ComfyUI itself frees nothing for a load on the CPU.
    """
    vae = comfy.model_patcher.ModelPatcher(torch.nn.Linear(64, 64), CPU, CPU)
    mm.free_memory(10**15, CPU)
    mm.load_models_gpu([vae])
    return vae


def neighbour_case(files: Files) -> dict[str, Any]:
    """A preview loads a VAE during the run, and requires more memory than there is."""
    expected, model = (
        sample(files.native(FLUX), FLUX),
        files.streamed(FLUX, policy="block swap").clone(),
    )
    neighbours, present = [], []

    def load(args: dict[str, Any]) -> torch.Tensor:
        neighbours.append(_load_vae())
        present.append(listed(model))
        return args["denoised"]

    model.set_model_sampler_post_cfg_function(load)
    equal = [torch.equal(sample(model, FLUX), expected) for _ in range(2)]
    after = listed(model)
    mm.unload_all_models()
    return {"equal": equal, "listed": present, "after": after, "left": model.loaded_size()}


def types_case(files: Files) -> dict[str, Any]:
    """Two models from one file with different types, run by turns."""
    expected = {form: sample(files.native(FLUX, form), FLUX) for form in ("fp8", "fp8 kept")}
    models = {form: files.streamed(FLUX, form) for form in expected}
    equal = [
        torch.equal(sample(models[form], FLUX), expected[form])
        for form in ("fp8", "fp8 kept", "fp8", "fp8 kept")
    ]
    both = [listed(each) for each in models.values()]
    engines = len({id(each.weights.loaded_engine) for each in models.values()})
    buffers = [each.weights.buffer_bytes for each in models.values()]
    del models["fp8"]
    gc.collect()
    equal.append(torch.equal(sample(models["fp8 kept"], FLUX), expected["fp8 kept"]))
    return {
        "equal": equal,
        "listed": both,
        "engines": engines,
        "buffers": buffers,
        "differ": not torch.equal(*expected.values()),
    }


def clones_case(files: Files) -> dict[str, Any]:
    """Clones share one engine and one entry in the list of loaded models."""
    expected, model = sample(files.native(FLUX), FLUX), files.streamed(FLUX)
    clones = [model.clone() for _ in range(3)]
    equal = [torch.equal(sample(each, FLUX), expected) for each in (*clones, model)]
    engines = {id(each.weights.loaded_engine) for each in (*clones, model)}
    return {"equal": equal, "listed": listed(model), "engines": len(engines)}


def deleted_case(files: Files, loaded: bool) -> dict[str, Any]:
    """Nobody holds the MODEL any more, while it is loaded or after it was unloaded."""
    path = files.path(TEXT_TO_VIDEO, "fp32")
    files.forget()
    before = openings(path)
    model = files.streamed(TEXT_TO_VIDEO)
    sample(model, TEXT_TO_VIDEO)
    while_loaded = openings(path)
    if not loaded:
        mm.unload_all_models()
    gone = weakref.ref(model.model), weakref.ref(model)
    with messages() as said:
        del model
        mm.load_models_gpu([comfy.model_patcher.ModelPatcher(torch.nn.Linear(8, 8), CPU, CPU)])
        gc.collect()
    return {
        "openings": [before, openings(path)],
        "opened": while_loaded,
        "gone": [each() is None for each in gone],
        "said": [line for line in said if "leak" in line],
        "threads": threads(readers=True),
        "listed": len([entry for entry in mm.current_loaded_models if entry.model is None]),
    }


def removed_case(files: Files) -> dict[str, Any]:
    """The file disappears during a run: open models go on, and the next load fails."""
    family: Family = TEXT_TO_VIDEO
    expected = sample(files.native(family, "fp16"), family)
    path, model = files.path(family, "fp16"), files.streamed(family, "fp16")
    incident = Incident(model, in_pass=1, in_block=1, happens=path.unlink)
    equal = [torch.equal(sample(model, family), expected) for _ in range(2)]
    mm.unload_all_models()
    refused = ""
    with messages() as said:
        try:
            sample(model, family)
        except OSError as err:
            refused = str(err)
    return {
        "equal": equal,
        "later": len(incident.later) > 0,
        "refused": refused,
        "said": [line for line in said if "hook" in line],
        "running": model.weights.running,
        "threads": threads(),
    }


def all_cases(files: Files) -> dict[str, Callable[[], Any]]:
    return {
        **incident_cases(files),
        "retried": partial(retried_case, files),
        "/free": partial(free_case, files),
        **{
            f"evicted, {policy}": partial(evicted_case, files, policy)
            for policy in ("block swap", "resident")
        },
        "neighbour": partial(neighbour_case, files),
        "two types": partial(types_case, files),
        "clones": partial(clones_case, files),
        "deleted while loaded": partial(deleted_case, files, True),
        "deleted when unloaded": partial(deleted_case, files, False),
        "file removed": partial(removed_case, files),
    }


def _resident_bytes() -> int:
    gc.collect()
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmRSS:")[2].split()[0])


def write_expert(path: Path | str) -> None:
    """Write a 200 MB file with six blocks."""
    sizes = {"dim": 1024, "ffn_dim": 4096, "num_heads": 8, "num_layers": 6}
    replace(TEXT_TO_VIDEO, settings={**TEXT_TO_VIDEO.settings, **sizes}).write(path, "fp16")


class Room:
    """A device with much room, until a VAE needs it."""

    def __init__(self) -> None:
        self.nbytes = FREE

    def free(self, _device: object = None, torch_free_too: bool = False) -> Any:
        return (self.nbytes, 0) if torch_free_too else self.nbytes


@torch.inference_mode()
def queue_items(folder: str, items: int) -> dict[str, Any]:
    """Return the process's resident bytes per queue item, with two experts loaded and without.

    Between items a VAE evicts the experts. After the second item, `/free` runs and the models are
    dropped.
    """
    torch.set_num_threads(1)
    family, path = TEXT_TO_VIDEO, Path(folder) / "expert.safetensors"
    write_expert(path)

    def experts() -> list[Any]:
        return [
            load_native(path, "default", OffloadPolicy.block_swap(4), **LIMITS) for _ in range(2)
        ]

    models, room = experts(), Room()
    found: dict[str, Any] = {"loaded": [], "evicted": [], "left": [], "results": []}
    with patch.object(mm, "get_free_memory", room.free):
        for item in range(items):
            room.nbytes = FREE
            found["results"].append(float(halves(*models, family).double().sum()))
            found["loaded"].append(_resident_bytes())
            room.nbytes = 0
            vae = _load_vae()
            found["left"].append(sum(model.loaded_size() for model in models))
            if item == 1:
                mm.unload_all_models()
                models = []
                gc.collect()
                mm.soft_empty_cache()
                models = experts()
            del vae
            found["evicted"].append(_resident_bytes())
    found["expert"] = path.stat().st_size
    return found


@torch.inference_mode()
def answers(folder: str) -> dict[str, object]:
    """Return one value per case."""
    torch.set_num_threads(1)
    return results_of(all_cases(Files(Path(folder))))
