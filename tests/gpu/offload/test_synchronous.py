"""Device without streams: the checked device without a runtime, as torch serves Apple GPUs.

Work still runs late, until the host waits. Use by a second thread is reported, and so is a
non-blocking copy.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from torch import nn

from wanstream.cli import main
from wanstream.cli.arguments import DONE
from wanstream.devices import clock_for, compute_device, compute_dtype, free_bytes, runtime_for
from wanstream.devices.compute_dtype import auto_dtype
from wanstream.offload import BlockPatch, ComputedPatch, WeightPatch, attach_offload
from wanstream.plan.programs import step_visits
from wanstream.schema import OffloadPolicy
from wanstream.tests.support.checked_device import Machine, checked_machine
from wanstream.tests.support.offload.device_scenarios import (
    COUNT,
    KEYS,
    WIDTH,
    MemorySource,
    add_product,
)

pytestmark = pytest.mark.checked

POLICIES = {
    "layerwise": OffloadPolicy.layerwise(1),
    "deep, from RAM": OffloadPolicy.layerwise(3, source="pinned"),
    "block swap": OffloadPolicy.block_swap(3, 1),
    "resident": OffloadPolicy.resident(),
}
PATCHES = ["plain", "patched", "computed"]
CPU = torch.device("cpu")


def stand_in() -> torch.device:
    """Return the device. Its type has this name only once a machine was there."""
    return torch.device("checked", 0)


@pytest.fixture
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    with checked_machine(sum(request.node.name.encode()), streams=False) as opened:
        yield opened
        request.node.funcargs.clear()  # the test's other fixtures have tensors on the device


def weights_of_visits(device, policy, *, fp8, patch, stop_at) -> list[torch.Tensor]:
    """Stream blocks twice, first up to visit `stop_at`, and return the weights found by visits."""
    source = MemorySource(fp8=fp8, growing=True, longest_s=0.001)
    rows = [source.formats[key].computed.tensors[0].shape[0] for key in KEYS]
    blocks = [nn.Linear(WIDTH, count, bias=False, device="meta") for count in rows]
    given = {"policy": policy, "device": device, "follow_forward": False}
    engine = attach_offload({"high": blocks}, source=source, **given)
    change = WeightPatch(down=torch.full((2, WIDTH), 0.5), up=torch.ones(rows[0], 2))
    if patch == "computed":
        change = ComputedPatch(parts=change.parts, compute=partial(add_product, []))
    if patch != "plain":
        engine.set_patches({KEYS[0]: BlockPatch(identity=1, weights={"weight": change})})
    seen: list[torch.Tensor] = []
    visits = step_visits(["high"] * 2, engine.block_counts)
    for stop in (stop_at, None):
        with torch.inference_mode(), suppress(KeyError), engine.run(visits) as run:
            for number, visit in enumerate(visits):
                with run.visit(*visit):
                    weight = blocks[visit.block].weight
                    assert weight.device == device
                    seen.append(weight * 1)  # computed late: an overwritten buffer would change it
                    if number == stop:
                        raise KeyError
    assert engine.pinned_bytes == 0, "nothing can lock pages"
    assert engine.loaded_bytes > 0
    engine.detach()
    assert engine.loaded_bytes == 0
    return [weight.cpu() for weight in seen]


@pytest.mark.parametrize(("fp8", "stop_at"), [(False, 2), (True, None)], ids=["raw", "fp8"])
@pytest.mark.parametrize(
    ("policy", "patch"),
    [
        *(("layerwise", patch) for patch in PATCHES),
        *(("deep, from RAM", patch) for patch in PATCHES),
        ("block swap", "computed"),
        ("resident", "patched"),
    ],
)
def test_visits_find_the_bits_of_the_cpu(machine, policy, fp8, patch, stop_at):
    how = {"fp8": fp8, "patch": patch, "stop_at": stop_at}
    expected = weights_of_visits(CPU, POLICIES[policy], **how)
    assert machine.devices[0].allocations == 0
    found = weights_of_visits(stand_in(), POLICIES[policy], **how)
    assert len(found) == 4 * COUNT if stop_at is None else 2 * COUNT + stop_at + 1
    assert all(map(torch.equal, found, expected))
    assert machine.copies >= COUNT
    assert machine.devices[0].peak_allocated >= WIDTH * WIDTH
    assert machine.devices[0].allocated == 0


def test_the_clock_waits_for_the_device(machine):
    clock = clock_for(stand_in())
    values = torch.zeros(3, device=stand_in())
    machine.current_stream(0).delay()
    values.add_(1)
    start = clock.mark()
    assert machine.current_stream(0).query()
    assert clock.seconds(start, clock.mark()) > 0


def test_it_counts_as_a_device_whose_memory_is_ram(machine):
    assert compute_device("checked") == stand_in()
    assert runtime_for(stand_in()) is None
    assert free_bytes(stand_in()) is None
    assert auto_dtype(stand_in()) == torch.float16
    message = "checked:1 does not exist, torch finds 1: use a device up to checked:0"
    with pytest.raises(ValueError, match=message):
        compute_device("checked:1")


def test_second_thread_and_async_copy_are_reported():
    memory = []
    values = torch.zeros(4)
    with pytest.raises(AssertionError, match="uses a device of another thread") as raised:
        with checked_machine(streams=False):
            memory.append(torch.empty(4, device=stand_in()))
            memory[0].copy_(values, non_blocking=True)
            run_in_thread = threading.Thread(target=memory[0].copy_, args=(values,))
            run_in_thread.start()
            run_in_thread.join()
            memory.clear()
    assert "a copy does not block on a device without streams" in str(raised.value)


def test_a_workflow_gives_the_video_of_the_cpu(machine, sample_models, tmp_path, monkeypatch):
    """Text encoder, experts, VAE and command line."""
    monkeypatch.setattr(compute_dtype, "DTYPE_WITHOUT_STREAMS", auto_dtype("cpu"))
    workflow = Path(__file__).parents[3] / "workflows" / "api" / "t2v.json"
    videos = []
    # The other kernels round elsewhere on a CPU than on a device.
    small = ("latent.width=32", "latent.height=32", "latent.frames=5", "sampler.steps=3")
    changes = [part for each in (*small, "experts.kernels=exact") for part in ("--set", each)]
    for device in ("cpu", "checked"):
        out = tmp_path / device
        folders = ["--out", str(out), "--models", str(sample_models), "--input", str(tmp_path)]
        assert main(["run", str(workflow), *folders, *changes, "--device", device]) == DONE
        with av.open(out / "video" / "wan2.2_t2v_00001_.mp4") as container:
            frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        videos.append(np.stack(frames))
    assert machine.devices[0].peak_allocated > 0
    assert videos[0].std() > 10
    assert np.array_equal(*videos)
