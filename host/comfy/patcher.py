"""A streamed pair of experts as ComfyUI's memory manager sees it: a model that it measures, loads and evicts."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import comfy.model_base
import comfy.model_management
import comfy.model_patcher
import comfy.supported_models
import torch

from ...plan import fit_policy, stay_near
from ...schema import ExpertsRef, OffloadPolicy, plan_residency
from ...wan import WAN22, ExpertPair
from ..api import LoadedExperts
from ..memory import MemoryEstimateInputs

logger = logging.getLogger("wanstream.memory")

WHILE_RUNNING = 10**40
"""What experts that run say they have loaded, in bytes. Whoever has less than ComfyUI asks for, which may be 1e32, is
detached and forgotten; experts that run cannot give anything back, and have to be on the list when the run is over."""


class ExpertsModel(torch.nn.Module):
    """Stands where ComfyUI expects the model: Wan's settings and no parameters; the weights are the pair's own.

    All patchers of the same files share it, and by it ComfyUI knows them for clones of each other.

    Args:
        ref: names the files.
        experts: opens pairs and keeps open the one that was asked for last.
    """

    def __init__(self, ref: ExpertsRef, experts: Callable[[ExpertsRef], ExpertPair]) -> None:
        super().__init__()
        self.ref = ref
        self._experts = experts
        self.pair = experts(ref)
        self.asked = OffloadPolicy.layerwise()
        """The policy that was asked for last."""
        self.policy: OffloadPolicy | None = None
        """What was loaded for it: the same, or one that takes less."""
        self.needs = MemoryEstimateInputs()
        """Of the run to come: ComfyUI asks how much it computes in before it loads the policy."""
        self.model_config = self._family({"image_model": "wan2.1", "model_type": "t2v"})
        self.model_type = comfy.model_base.ModelType.FLOW
        self.latent_format = self.model_config.latent_format
        self.model_sampling = comfy.model_base.model_sampling(self.model_config, self.model_type)
        self.device: torch.device | None = None
        self.current_patcher: ExpertsPatcher | None = None
        self._counted_pins = 0

    @property
    def keeps_frames(self) -> bool:
        """Whether what a mask keeps stays as it is and has timestep 0, as in TI2V-5B; others get it with noise."""
        return self.pair.in_channels == WAN22.channels

    @property
    def _family(self) -> Callable[[dict[str, str]], Any]:
        """ComfyUI's settings for models whose latents are like this one's."""
        supported = comfy.supported_models
        family: Callable[[dict[str, str]], Any] = supported.WAN22_T2V if self.keeps_frames else supported.WAN21_T2V
        return family

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as err:
            # Said so that whoever catches it knows whose attribute it is; torch does not.
            raise AttributeError(str(err), name=name, obj=self) from None

    @property
    def block_counts(self) -> Mapping[str, int]:
        """Blocks of each expert."""
        return self.pair.block_counts

    def open(self, ref: ExpertsRef) -> None:
        """Since the last run other experts may have been opened, or other LoRAs set."""
        self.pair = self._experts(ref)

    def load(self, asked: OffloadPolicy, budget: float, device: torch.device) -> None:
        """Have the engine on `device`, for as much of the policy as `budget` bytes for all weights allow."""
        device_bytes = self.pair.device_bytes
        fitted = fit_policy(asked, self.block_counts, budget=budget, device_bytes=device_bytes)
        if self.policy is not None and self.asked == asked and self.pair.loaded_bytes:
            fitted = stay_near(self.policy, fitted, budget=budget, device_bytes=device_bytes)
        if fitted != asked:
            logger.info(
                "%s are free for the experts: %s instead of %s",
                _size(max(0.0, budget)),
                self._described(fitted),
                self._described(asked),
            )
        self.pair.engine(fitted, device).take_buffers()  # ComfyUI reckons with them from now on
        self.asked, self.policy = asked, fitted
        self.count_pins()

    def release(self) -> None:
        """Give all memory back."""
        self.pair.close()
        self.count_pins()

    def count_pins(self) -> None:
        """Make ComfyUI's count of page-locked memory, where it keeps one, include what the pair has locked by now."""
        pinned = self.pair.pinned_bytes
        management = comfy.model_management
        if hasattr(management, "TOTAL_PINNED_MEMORY"):
            management.TOTAL_PINNED_MEMORY = max(0, management.TOTAL_PINNED_MEMORY + pinned - self._counted_pins)
        self._counted_pins = pinned

    def _described(self, policy: OffloadPolicy) -> str:
        residency, _ = plan_residency(policy, self.block_counts)
        resident = min(len(blocks) for blocks in residency.residents.values())
        blocks = min(self.block_counts.values())
        return f"{_size(self.pair.device_bytes(policy))} with {resident} of {blocks} blocks resident"

    def get_dtype(self) -> torch.dtype:
        return self.pair.compute_dtype

    def get_dtype_inference(self) -> torch.dtype:
        return self.pair.compute_dtype

    def memory_required(self, input_shape: Sequence[int], cond_shapes: Mapping[str, Any] | None = None) -> int:
        """Bytes to compute in, beside the weights, for latents of that shape, with a negative for each of them.

        ComfyUI reckons the least that a model needs without negatives, which it can compute in a pass of their own.
        Ours never are, and what is not in that least goes to blocks.
        """
        return self.needs.working_bytes(self.pair, input_shape)

    def process_latent_in(self, latent: torch.Tensor) -> torch.Tensor:
        normalised: torch.Tensor = self.latent_format.process_in(latent)
        return normalised

    def process_latent_out(self, latent: torch.Tensor) -> torch.Tensor:
        raw: torch.Tensor = self.latent_format.process_out(latent)
        return raw

    def scale_latent_inpaint(
        self, sigma: torch.Tensor, noise: torch.Tensor, latent_image: torch.Tensor, **_: object
    ) -> torch.Tensor:
        """What a mask keeps, at the noise level `sigma` [B]."""
        if self.keeps_frames:
            return latent_image
        per_sample = sigma.reshape([sigma.shape[0]] + [1] * (noise.ndim - 1))
        kept: torch.Tensor = self.model_sampling.noise_scaling(per_sample, noise, latent_image)
        return kept

    def extra_conds(self, **_: object) -> dict[str, Any]:
        """Nothing: the guider reads the conditioning itself."""
        return {}

    def extra_conds_shapes(self, **_: object) -> dict[str, Any]:
        return {}

    def apply_model(self, *_: object, **__: object) -> torch.Tensor:
        raise ValueError(
            "the streamed experts cannot run as a MODEL, because only their guider knows which of them is due: "
            "use Wan Guider with SamplerCustomAdvanced, or Wan Sampler"
        )


class ExpertsPatcher(comfy.model_patcher.ModelPatcher):  # type: ignore[misc]
    """What ComfyUI's list of loaded models holds.

    `ref` names experts and LoRAs, `policy` says how much of them to load; None: as much as was asked for last.
    """

    def __init__(
        self,
        model: ExpertsModel,
        load_device: torch.device,
        offload_device: torch.device,
        size: int = 0,
        weight_inplace_update: bool = False,
    ) -> None:
        # Before the base class, which asks for the size.
        self.ref = model.ref
        self.policy: OffloadPolicy | None = None
        super().__init__(model, load_device, offload_device, size, weight_inplace_update)

    def clone(self, *args: Any, **settings: Any) -> ExpertsPatcher:
        cloned: ExpertsPatcher = super().clone(*args, **settings)
        cloned.ref, cloned.policy = self.ref, self.policy
        return cloned

    def loaded_experts(self) -> LoadedExperts:
        """What to run with, once ComfyUI has loaded this patcher."""
        assert self.model.policy is not None, "ComfyUI has not loaded the experts"
        return LoadedExperts(pair=self.model.pair, policy=self.model.policy, device=self.load_device)

    def is_dynamic(self) -> bool:
        return False

    def model_size(self) -> int:
        """Device bytes that the policy takes, for which ComfyUI makes room; more if more is there."""
        pair: ExpertPair = self.model.pair
        return max(pair.device_bytes(self.policy or self.model.asked), pair.loaded_bytes)

    def loaded_size(self) -> int:
        """Device bytes taken now, and while a run goes on more than anybody needs.

        ComfyUI asks before all that it decides, so it reckons with the right pins then.
        """
        self.model.count_pins()
        pair: ExpertPair = self.model.pair
        return WHILE_RUNNING if pair.running else pair.loaded_bytes

    def lowvram_patch_counter(self) -> int:
        return 0

    def pinned_memory_size(self) -> int:
        pinned: int = self.model.pair.pinned_bytes
        return pinned

    def model_mmap_residency(self, free: bool = False) -> tuple[int, int]:
        """Host bytes that are there, and that are wanted: equal, so that nobody else's RAM is freed for us."""
        pinned = self.pinned_memory_size()
        return pinned, pinned

    def partially_load(
        self, device_to: torch.device, extra_memory: float = 0, force_patch_weights: bool = False
    ) -> int:
        """Take up to `extra_memory` bytes more than now, for as much of the policy as that allows."""
        with self.use_ejected(skip_and_inject_on_exit_only=True):
            self.unpatch_model(self.offload_device, unpatch_weights=False)
            self.patch_model(load_weights=False)
        before = self.loaded_size()
        try:
            self.model.open(self.ref)
            self.model.load(self.policy or self.model.asked, before + extra_memory, device_to)
        except BaseException:
            self.detach()  # ComfyUI does not list us yet, so nobody else would
            raise
        self.model.device = device_to
        return self.loaded_size() - before

    def partially_unload(
        self, device_to: torch.device, memory_to_free: float = 0, force_patch_weights: bool = False
    ) -> int:
        """Free whole blocks; returns the bytes freed, 0 where all blocks would not be enough.

        While a run goes on, which a preview may load its VAE into, nothing can be freed. ComfyUI is told that it was,
        or it would take us off its list with all that we hold; what it loads then makes do with the room there is.
        """
        pair: ExpertPair = self.model.pair
        before = pair.loaded_bytes
        if pair.running:
            logger.info("the experts are running, and their %s stay", _size(before))
            return math.ceil(memory_to_free)
        outside, block = self._outside_and_block()
        if memory_to_free > before - outside:
            return 0  # ComfyUI detaches us then
        freed: int = pair.give_back(math.ceil(memory_to_free))
        self.model.count_pins()
        logger.info("freed %s of %s for another model: %d blocks", _size(freed), _size(before), round(freed / block))
        return freed

    def partially_unload_ram(self, ram_to_unload: float) -> None:
        """Blocks in page-locked RAM go all at once, and what is on the device with them."""
        if ram_to_unload > 0 and self.model.asked.source == "pinned" and self.model.pair.pinned_bytes:
            self.detach()

    def detach(self, unpatch_all: bool = True) -> ExpertsModel:
        """Give everything back; with `unpatch_all` False, or while a run goes on, nothing.

        False means that ComfyUI is about to load us again.
        """
        model: ExpertsModel = self.model
        if unpatch_all and model.pair.running:
            logger.info("the experts are running and stay")
            return model
        if unpatch_all:
            before = self.loaded_size()
            self.model.release()
            if before:
                logger.info("freed %s: the experts are unloaded", _size(before))
        super().detach(unpatch_all)
        return model

    def _outside_and_block(self) -> tuple[int, int]:
        """Device bytes of what does not stream, and of one buffer."""
        one, two = (self.model.pair.device_bytes(OffloadPolicy.layerwise(ahead)) for ahead in (0, 1))
        return 2 * one - two, two - one


def _size(nbytes: float) -> str:
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.1f} MB"
