"""The gpu tests' device: the checked device, or a real one if present."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch

from wanstream.devices import DeviceRuntime, gpu_count, runtime_for

from .checked_device import Machine, checked_machine

LONG = 4_000_000
"""Cycles for some milliseconds, as long as several copies."""

_ONCE = "once per run"
_LOOKED_UP = "once, when a model is looked up"
_STEP_ENDS = "frames and weights of windows, at the ends of a step, where the host waits anyway"
_HELPER = "in helper threads and probes, never in a run"
HOST_WAITS = {
    "devices/clock.py settle": "once per step",
    "devices/clock.py wait_for": "the host is at most `PACE` visits ahead",
    "offload/engine/binding.py _copy": "attaching and detaching",
    "offload/formats/layout.py copy_together": _LOOKED_UP,
    "offload/core/pages.py copy_to_device": "from memory whose page lock was refused",
    "offload/host_memory/device_slots.py reserve": "the read thread waits until it was gathered",
    "offload/host_memory/ram_slots.py read": "the read thread waits until a slot was copied",
    "offload/transfers/cuda.py settle": "between runs",
    "offload/transfers/weight_patch.py _add_rows": _LOOKED_UP,
    "offload/transfers/weight_patch.py write_sum": _LOOKED_UP,
    "offload/probes/machine.py decoded": _HELPER,
    "offload/probes/machine.py typical_s": _HELPER,
    "cli/selftest/device_checks.py check_copies": _HELPER,
    "sampling/cache/easycache.py _changes": "the decision depends on values",
    "sampling/cache/first_block.py choose": "the decision depends on values",
    "sampling/steps/context_windows.py _merged": _STEP_ENDS,
    "sampling/steps/context_windows.py cut": _STEP_ENDS,
    "sampling/denoise.py denoise_steps": _ONCE,
    "sampling/inputs/extra_tokens.py mapped": _ONCE,
    "sampling/loop/denoiser.py __init__": _ONCE,
    "sampling/loop/denoiser.py _accept": "once per step: NaN ends a run",
    "sampling/loop/lanes.py samples": _ONCE,
    "sampling/steps/solvers.py step": "diffusers' solvers move their noise levels once per step",
    "wan/transformer/embedders.py _digest": "once per text",
    "wan/transformer/embedders.py _text_row": "once, with all texts of a run",
    "wan/transformer/embedders.py _time_row": "once, with all timesteps of a run",
    "wan/transformer/embedders.py rows": "timesteps that a caller keeps on the device",
    "wan/experts/models.py __getitem__": _LOOKED_UP,
    "wan/experts/models.py _load": _LOOKED_UP,
    "wan/image_encoder.py encode": _ONCE,
    "wan/lora/apply.py set": _LOOKED_UP,
    "wan/text/encoder.py encode": _ONCE,
    "wan/transformer/token_parts.py _axis_tables": "once per model and size of a part",
    "wan/transformer/forward.py forward_lanes": "timesteps that a caller keeps on the device",
    "block_kernels/choice.py fault_of": "tests of kernels, once per process",
    "block_kernels/math_choice.py _computed": "tests of kernels, once per process",
    "block_kernels/multiplication.py _products": "tests of kernels, once per process",
    "wan/vae/vae.py _decode_video": "frames that leave the device",
    "wan/vae/vae.py _load": _LOOKED_UP,
}
"""Product functions in which a thread may wait for the device, with the reason."""

REAL_ONLY = {
    "tests/gpu/distributed/test_driver_gpu.py": "workers in processes of their own, over NCCL",
    "tests/gpu/distributed/test_splits_cuda.py": "NCCL",
    "tests/gpu/sampling/test_kernels_gpu.py": "torch.compile and kernels of attention packages",
    "tests/integration/comfy/test_memory_gpu.py": (
        "a ComfyUI server on CUDA; inside/host/adapter.py has its memory manager"
    ),
    "tests/integration/ray/test_ray_pool.py": "Ray assigns GPUs",
}
"""Files with tests that run only on a GPU, and the reason. Other such tests call
`Accelerator.need_kernels`."""

HAS_REAL = gpu_count() > 0

SHARED = "PYTEST_XDIST_WORKER" in os.environ
"""True if other test processes use the same GPU."""

LONGEST_S = 100
"""Time limit for a test on a real device. The self-test takes 51 s on an otherwise unused H100."""

CAPACITY = 2**30
"""Bytes on a checked device."""

DTYPE = torch.bfloat16 if HAS_REAL else torch.float32
"""Compute dtype: bf16 products take 50 times as long as fp32 products on a CPU without AVX-512."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Accelerator:
    """Device under test."""

    runtime: DeviceRuntime
    machine: Machine | None
    """The checked device's machine, or None for a real device."""

    @property
    def other(self) -> torch.device:
        """A second device. Skips the test if there is none."""
        if self.runtime.count() < 2:
            pytest.skip("needs two devices")
        return torch.device(self.device.type, 1)

    @property
    def device(self) -> torch.device:
        return self.runtime.device

    def delay(self, times: int = 1) -> None:
        """Keep the current stream busy: for some milliseconds, or until the host waits for it."""
        if self.machine is None:
            torch.cuda._sleep(times * LONG)
        else:
            self.machine.current_stream(self.machine.current_device).delay()

    def need_kernels(self, reason: str) -> None:
        """Skip a test on the checked device if it proves something only with real kernels."""
        if self.machine is not None:
            pytest.skip(f"needs real kernels: {reason}")

    def need_alone(self, reason: str) -> None:
        """Skip a test on a real device used by other processes too."""
        if self.machine is None and SHARED:
            pytest.skip(f"needs a GPU without other processes: {reason}")

    def need_fake(self, reason: str) -> Machine:
        """Return the checked device's machine, or skip a test on a real device."""
        if self.machine is None:
            pytest.skip(f"needs the checked device: {reason}")
        return self.machine

    def empty_cache(self) -> None:
        """Return cached memory to the device."""
        if self.machine is None:
            torch.cuda.empty_cache()
        else:
            for device in self.machine.devices:
                device.empty_cache()

    def is_locked(self, memory: torch.Tensor) -> bool:
        """Return True if all of `memory` is page-locked."""
        return memory.is_pinned() if self.machine is None else self.machine.is_locked(memory)


def _accelerator(device: torch.device, machine: Machine | None) -> Accelerator:
    runtime = runtime_for(device)
    assert runtime is not None
    return Accelerator(runtime=runtime, machine=machine)


@contextmanager
def checked_accelerator(seed: int) -> Iterator[Accelerator]:
    """Provide a checked device inside the `with`, as from `checked_machine`."""
    # Two devices, so a thread that has set none is reported.
    with checked_machine(seed, devices=2, capacity=CAPACITY) as machine:
        machine.set_device(0)
        yield _accelerator(torch.device("checked", 0), machine)
    unlisted = machine.host_waits - HOST_WAITS.keys()
    names = ", ".join(sorted(unlisted))
    assert not unlisted, f"a thread waits for the device in {names}: remove it, or list it"


REAL = [pytest.mark.gpu, pytest.mark.timeout(LONGEST_S)]
DEVICES = {"checked": pytest.mark.checked, "real": REAL}


@pytest.fixture(params=[pytest.param(name, marks=marks) for name, marks in DEVICES.items()])
def gpu(request: pytest.FixtureRequest) -> Iterator[Accelerator]:
    """The device for a test. At the end of a test on the checked device, everything is checked."""
    if request.param == "real":
        if not HAS_REAL:
            pytest.skip("needs a GPU")
        if SHARED:
            torch.set_num_threads(2)  # one process per two cores
        yield _accelerator(torch.device("cuda", 0), None)
        return
    # The seed depends on the test's name: every run of a test takes the same order.
    with checked_accelerator(sum(request.node.name.encode())) as accelerator:
        yield accelerator
        request.node.funcargs.clear()  # the test's other fixtures have tensors on the device
