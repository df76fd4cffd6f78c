"""Runs in ComfyUI's own Python: progress, queue items, names and devices of the host.

The embedded host's output files are compared with ComfyUI's own. `test_server.py` compares
the `io` module by the nodes that it describes.
"""

import os
import sys
import threading
from functools import partial
from importlib.util import find_spec
from io import StringIO
from unittest.mock import patch

import comfy.model_management as mm
import folder_paths
import torch
from comfy_execution import progress
from comfy_execution.utils import CurrentNodeContext

from wanstream.devices.clock import DeviceError
from wanstream.host import current_host
from wanstream.host.comfy.adapter.comfy_host import ComfyHost
from wanstream.host.comfy.adapter.progress import NodeBar
from wanstream.host.folders import output_file
from wanstream.sampling import DenoiseRequest, denoise
from wanstream.schema import OffloadPolicy
from wanstream.schema.refs import ExpertsRef
from wanstream.tests.support.checked_device import checked_machine

from ..checks import for_each, refused
from ..families import _normal
from ..tiny_models import with_free

CPU = torch.device("cpu")


def _console(unit, steps, *, is_terminal):
    """Return what a run of two steps has written, before each step and at the end."""
    console = StringIO()
    said = []
    console.isatty = lambda: is_terminal
    with patch.object(sys, "stderr", console):
        bar = NodeBar(2, None, unit)
        for done in range(1, steps + 1):
            said.append(console.getvalue())
            bar.update(done)
        bar.close()
    return [*said, console.getvalue()]


# A cancelled run ends the line too.
@for_each((1, True), (1, False), (2, True), (2, False))
def check_console_line(_, done, is_terminal):
    start, *_, end = _console("step", done, is_terminal=is_terminal)
    assert "0/2 [00:00<?, ?step/s]" in start
    assert f"{done}/2 [" in end
    assert "step/s]" in end.splitlines()[-1] or "s/step]" in end.splitlines()[-1]
    assert end.endswith("\n"), "the next line of the log begins on a line of its own"


def check_no_console_line(_):
    """A run of other samplers has none."""
    assert _console(None, 2, is_terminal=True) == ["", "", ""]


def check_fractions_of_steps(_):
    """Another thread sends them to the page."""
    sent = []

    class Page(progress.ProgressHandler):
        def update_handler(self, node_id, value, max_value, *_):
            sent.append([node_id, value, max_value])

    progress.reset_progress_state("prompt", None)
    progress.add_progress_handler(Page("page"))
    bar = NodeBar(4, "7", None)
    steps = (0.0, 0.25, 0.5, 0.25)
    thread = threading.Thread(target=lambda: [bar.advance(done) for done in steps])
    thread.start()
    thread.join()
    assert sent == [["7", 0.25, 4], ["7", 0.5, 4]]


def check_queue_items(_):
    """Phases are kept by queue item."""
    events = current_host().events

    def phases():
        return [phase.name for phase in events.ledger().phases()]

    with events.ledger().phase("open", CPU):
        pass
    assert phases() == [], "a ledger outside a queue item is nobody's"
    assert events.executing().prompt_id is None
    for prompt, node, name, expected in (
        ("p1", "1", "open", ["open"]),
        ("p2", "1", "open", ["open"]),
        ("p1", "2", "text", ["open", "text"]),
    ):
        with CurrentNodeContext(prompt, node):
            assert events.executing().prompt_id == prompt
            with events.ledger().phase(name, CPU):
                pass
            assert phases() == expected
    assert events.executing().prompt_id is None


def check_dynamic_vram(_):
    assert current_host().memory.dynamic_bytes() is None, "a CPU has no dynamic VRAM"
    if find_spec("comfy.memory_management") is not None:
        # As main.py does where a GPU is there.
        with patch("comfy.memory_management.aimdo_enabled", new=True):
            assert current_host().memory.dynamic_bytes() == 0


def check_model_names(folder):
    """The usual lists without unreadable files, plus GGUF files for experts."""
    files = current_host().files
    kinds = ("diffusion_models", "vae", "loras", "text_encoders")
    for kind in kinds:
        (folder / kind / "sub").mkdir(parents=True)
        for name in ("a.safetensors", "b.gguf", "sub/c.gguf", "d.pt"):
            (folder / kind / name).touch()
        places = [str(folder / kind), str(folder / f"more {kind}")]
        folder_paths.folder_names_and_paths[kind][0][:] = places
    few = ["a.safetensors"]
    listed = ["a.safetensors", "b.gguf", "sub/c.gguf"]
    others = {"vae": few, "loras": few, "text_encoders": listed}
    names = {kind: files.model_names(kind) for kind in kinds}
    assert names == {"diffusion_models": listed, **others}
    for kind in ("more diffusion_models", "vae"):
        (folder / kind / "later").mkdir(parents=True)
        (folder / kind / "later" / "new.gguf").touch()
    names = {kind: files.model_names(kind) for kind in kinds}
    more = ["a.safetensors", "b.gguf", "later/new.gguf", "sub/c.gguf"]
    assert names == {"diffusion_models": more, **others}
    path = files.model_path("later/new.gguf", "diffusion_models")
    assert path == folder / "more diffusion_models" / "later" / "new.gguf"


def check_devices(folder):
    """Experts run on ComfyUI's device that is not CUDA: the checked one, with streams or not."""
    high, low = (folder / f"deep_{name}.safetensors" for name in ("high", "low"))
    ref = ExpertsRef(high_noise=high, low_noise=low, compute_dtype="float32")
    noise = _normal(1, 16, 1, 4, 4, seed=0)
    text = _normal(1, 5, 4096, seed=1)
    request = DenoiseRequest(noise, text, steps=4, switch_step=2, solver="euler")

    def run(device):
        host = ComfyHost()
        with patch.object(mm, "get_torch_device", lambda: device):
            policy = OffloadPolicy.layerwise(1)
            loaded = host.models.load_experts(ref, policy, working_bytes=0)
            own = {"policy": loaded.policy, "device": host.memory.device()}
            latents = denoise(loaded.pair, request, **own).latents.cpu()
            held = loaded.pair.loaded_bytes
            host.open_experts.free()
            mm.unload_all_models()
        return latents, held

    with with_free(2**33):
        expected, _ = run(CPU)
        for streams in (True, False):
            with checked_machine(streams=streams) as machine:
                # As ComfyUI names a device: with an index, but "mps" without.
                latents, held = run(torch.device("checked:0" if streams else "checked"))
                assert 0 < held <= machine.devices[0].peak_allocated
            assert torch.equal(latents, expected)
        unknown = "meta is not supported: use cpu or one of cuda, xpu, mps (ComfyUI: start it"
        refused(lambda: run(torch.device("meta")), unknown, kind=DeviceError)


def check_output_files(folder):
    """They are named and refused as ComfyUI does."""
    output = folder / "saved"
    for name in (
        "clip_00004_.mp4",
        "video/clip_00001_.png",
        "video/clip_x_.png",
        "832/c_480_00011_.mp4",
        "video_00002_",
    ):
        (output / name).parent.mkdir(parents=True, exist_ok=True)
        (output / name).touch()

    def theirs(prefix):
        place = folder_paths.get_save_image_path
        found = place(os.path.normpath(prefix), str(output), 832, 480)
        directory, name, counter, subfolder, _ = found
        return [os.path.normpath(directory), f"{name}_{counter:05}_.mp4", subfolder]

    def ours(prefix):
        file = output_file(output, prefix, "mp4", width=832, height=480)
        return [str(file.path.parent), file.filename, file.subfolder]

    more = ["./clip", "video/", "%width%/c_%height%", "other"]
    for prefix in ("clip", "video/clip", "video/../clip", *more):
        assert ours(prefix) == theirs(prefix)
    for prefix in ("../clip", "/clip", "a/../../clip"):
        refused(partial(theirs, prefix), "not allowed", kind=Exception)
        refused(partial(ours, prefix), "leaves the folder")


def setup(folder):
    assert isinstance(current_host(), ComfyHost)
    return folder
