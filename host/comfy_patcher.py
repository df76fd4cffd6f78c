"""A streamed pair of experts as ComfyUI's memory manager sees it: a model that it loads, evicts and measures."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import comfy.model_base
import comfy.model_management
import comfy.model_patcher
import comfy.supported_models
import torch

from ..plan import OffloadPolicy, fit_policy, plan_residency
from ..wan import ExpertPair

LOG = logging.getLogger("wanstream.memory")
GB = 1e9


class ExpertsModel(torch.nn.Module):
    """Stands where ComfyUI expects the model: Wan's settings and no parameters; the weights are the pair's own.

    All patchers of one pair share it, and by it ComfyUI knows them for clones of each other.
    """

    def __init__(self, pair: ExpertPair) -> None:
        super().__init__()
        self.pair = pair
        self.policy: OffloadPolicy | None = None
        """What the weights were loaded for: the policy that was asked for, or one that takes less."""
        self.model_config = comfy.supported_models.WAN21_T2V({"image_model": "wan2.1", "model_type": "t2v"})
        self.model_type = comfy.model_base.ModelType.FLOW
        self.latent_format = self.model_config.latent_format
        self.model_sampling = comfy.model_base.model_sampling(self.model_config, self.model_type)
        self.device: torch.device | None = None
        self.current_patcher: ExpertsPatcher | None = None
        self._counted_pins = 0
        # A guider may hold the last patcher of a pair that the registry has let go of.
        weakref.finalize(self, pair.close).atexit = False

    @property
    def block_counts(self) -> Mapping[str, int]:
        """Blocks of each expert."""
        return {name: expert.config.num_layers for name, expert in (("high", self.pair.high), ("low", self.pair.low))}

    def load(self, policy: OffloadPolicy, device: torch.device) -> None:
        """Make the engine for `policy` on `device`, or find it there."""
        self.pair.engine(policy, device)
        self.policy = policy
        self.count_pins()

    def release(self) -> None:
        """Give all memory back."""
        self.pair.close()
        self.count_pins()

    def count_pins(self) -> None:
        """Count what the pair has page-locked now in ComfyUI's budget, which pins less for that (0.16 and later)."""
        pinned = self.pair.pinned_bytes
        management = comfy.model_management
        if hasattr(management, "TOTAL_PINNED_MEMORY"):
            management.TOTAL_PINNED_MEMORY = max(0, management.TOTAL_PINNED_MEMORY + pinned - self._counted_pins)
        self._counted_pins = pinned

    def get_dtype(self) -> torch.dtype:
        return self.pair.compute_dtype

    def get_dtype_inference(self) -> torch.dtype:
        return self.pair.compute_dtype

    def memory_required(self, input_shape: Sequence[int], cond_shapes: Mapping[str, Any] | None = None) -> int:
        """Bytes beside the weights for latents of that shape; each sample is a lane, and lanes go one by one."""
        from ..sampling import working_bytes

        return working_bytes(self.pair, input_shape, guided=False)

    def process_latent_in(self, latent: torch.Tensor) -> torch.Tensor:
        processed: torch.Tensor = self.latent_format.process_in(latent)
        return processed

    def process_latent_out(self, latent: torch.Tensor) -> torch.Tensor:
        processed: torch.Tensor = self.latent_format.process_out(latent)
        return processed

    def scale_latent_inpaint(
        self, sigma: torch.Tensor, noise: torch.Tensor, latent_image: torch.Tensor, **_: object
    ) -> torch.Tensor:
        """What a mask keeps, at the noise level `sigma` [B]."""
        per_sample = sigma.reshape([sigma.shape[0]] + [1] * (noise.ndim - 1))
        scaled: torch.Tensor = self.model_sampling.noise_scaling(per_sample, noise, latent_image)
        return scaled

    def extra_conds(self, **_: object) -> dict[str, Any]:
        """Nothing: the guider reads the conditioning itself."""
        return {}

    def extra_conds_shapes(self, **_: object) -> dict[str, Any]:
        return {}

    def apply_model(self, *_: object, **__: object) -> torch.Tensor:
        raise ValueError(
            "the streamed experts cannot be run as a MODEL: which expert runs is known to their guider only. "
            "Use Wan Guider with SamplerCustomAdvanced, or Wan Sampler"
        )


class ExpertsPatcher(comfy.model_patcher.ModelPatcher):  # type: ignore[misc]
    """What ComfyUI's list of loaded models holds for a pair. `policy` says how much it may load."""

    def __init__(
        self,
        model: ExpertsModel,
        load_device: torch.device,
        offload_device: torch.device,
        size: int = 0,
        weight_inplace_update: bool = False,
        *,
        policy: OffloadPolicy | None = None,
    ) -> None:
        self.policy = policy or OffloadPolicy.layerwise()  # before the base class, which asks for the size
        super().__init__(model, load_device, offload_device, size, weight_inplace_update)

    def clone(self, *args: Any, **settings: Any) -> ExpertsPatcher:
        cloned: ExpertsPatcher = super().clone(*args, **settings)
        cloned.policy = self.policy
        return cloned

    def with_policy(self, policy: OffloadPolicy) -> ExpertsPatcher:
        """A clone that loads for `policy`."""
        cloned = self.clone()
        cloned.policy = policy
        return cloned

    def is_dynamic(self) -> bool:
        return False

    def model_size(self) -> int:
        """Device bytes that the policy takes, which is what ComfyUI frees for it; more if more is there."""
        return max(self.model.pair.device_bytes(self.policy), self.loaded_size())

    def loaded_size(self) -> int:
        loaded: int = self.model.pair.loaded_bytes
        return loaded

    def lowvram_patch_counter(self) -> int:
        return 0

    def pinned_memory_size(self) -> int:
        self.model.count_pins()
        pinned: int = self.model.pair.pinned_bytes
        return pinned

    def model_mmap_residency(self, free: bool = False) -> tuple[int, int]:
        """(host bytes there, host bytes wanted): equal, because nothing has to be freed in RAM before we load."""
        pinned = self.pinned_memory_size()
        return pinned, pinned

    def partially_load(
        self, device_to: torch.device, extra_memory: float = 0, force_patch_weights: bool = False
    ) -> int:
        """Take up to `extra_memory` bytes more than are taken now, for as much of the policy as that allows."""
        before = self.loaded_size()
        with self.use_ejected(skip_and_inject_on_exit_only=True):
            self.unpatch_model(self.offload_device, unpatch_weights=False)
            self.patch_model(load_weights=False)
        try:
            self.model.load(self._fitted(before + extra_memory), device_to)
        except BaseException:
            self.detach()  # not in ComfyUI's list yet, so nobody else would
            raise
        self.model.device = device_to
        return self.loaded_size() - before

    def partially_unload(
        self, device_to: torch.device, memory_to_free: float = 0, force_patch_weights: bool = False
    ) -> int:
        """Free whole blocks; returns the bytes freed, 0 where blocks alone would not do."""
        pair, before = self.model.pair, self.loaded_size()
        one = pair.device_bytes(OffloadPolicy.layerwise(1)) - pair.device_bytes(OffloadPolicy.layerwise(0))
        outside = pair.device_bytes(OffloadPolicy.layerwise(0)) - one
        if memory_to_free > before - outside:
            return 0  # ComfyUI detaches the whole then
        freed: int = pair.give_back(int(memory_to_free) + 1)
        LOG.info("freed %.1f GB of %.1f GB for another model: %d blocks", freed / GB, before / GB, round(freed / one))
        return freed

    def partially_unload_ram(self, ram_to_unload: float) -> None:
        """Blocks in page-locked RAM go all at once: an engine keeps one mapping of them."""
        if self.policy.source == "pinned" and ram_to_unload > 0 and self.model.pair.pinned_bytes:
            self.detach()

    def detach(self, unpatch_all: bool = True) -> ExpertsModel:
        """Give everything back, or with `unpatch_all` False (ComfyUI is about to load us again) nothing."""
        if unpatch_all:
            before = self.loaded_size()
            self.model.release()
            if before:
                LOG.info("freed all %.1f GB of the experts", before / GB)
        model: ExpertsModel = super().detach(unpatch_all)
        return model

    def _fitted(self, budget: float) -> OffloadPolicy:
        """The policy, or less of it where `budget` bytes for all weights are not enough; told in the log."""
        pair, counts = self.model.pair, self.model.block_counts
        fitted = fit_policy(self.policy, counts, budget=budget, device_bytes=pair.device_bytes)
        if fitted != self.policy:
            LOG.info(
                "%.1f GB of device memory for the experts are free, %.1f GB were planned: %s instead of %s, %.1f GB",
                max(0.0, budget) / GB,
                pair.device_bytes(self.policy) / GB,
                _described(fitted, counts),
                _described(self.policy, counts),
                pair.device_bytes(fitted) / GB,
            )
        return fitted


def _described(policy: OffloadPolicy, counts: Mapping[str, int]) -> str:
    residency, buffers = plan_residency(policy, counts)
    resident = min(len(blocks) for blocks in residency.residents.values())
    return f"{resident} of {min(counts.values())} blocks resident in {buffers} buffers"
