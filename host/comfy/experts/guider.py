"""GUIDER for streamed experts. ComfyUI's samplers call the model.

The samplers keep their history across the expert switch.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import comfy.model_management
import comfy.samplers
import torch

from ....plan import AutoOffload
from ....sampling import (
    LaneInputs,
    ModelCalls,
    RunPolicy,
    check_fits,
    predicted_calls,
    working_bytes,
)
from ....sampling.inputs import (
    DenoiseRequest,
    ExtraTokens,
    RequestOptions,
    native_inputs,
    side_tokens,
)
from ....sampling.steps import (
    Guidance,
    NonFiniteLatentError,
    RequestError,
    SamplingCancelled,
    Side,
    StepSettings,
)
from ....schema import OffloadPolicy
from ....schema.records import Timeline
from ....wan import ExpertPair
from ...api import Host, telemetry_options
from ...auto_policy import PolicyChoice
from ...error_names import plainly_named
from ...models import GuiderSettings
from ...run_events import run_settings
from .. import versions
from ..samplers import common_sigma, predicted_sigmas, sampler_name
from ..shown_run import ShownRun
from .guider_steps import GuiderSteps
from .patcher import ExpertsPatcher

HIGHEST_SIGMA = 1 + 1e-4
"""Slightly above 1, because some schedules round."""

UNGUIDED = (Side.POSITIVE,)
GUIDED = (Side.POSITIVE, Side.NEGATIVE)
"""CFG sides in a call without and with a negative."""

logger = logging.getLogger("wanstream.host")


class ExpertsGuider(comfy.samplers.CFGGuider):  # type: ignore[misc]
    """A CFGGuider whose model is a pair of streamed experts. See `Models.guider`.

    Args:
        host: chooses an automatic policy before each run, and announces the run.
        patcher: the experts in ComfyUI's memory manager.
        settings: boundary, guidance, cache and context windows.
        policy: the requested policy.
    """

    def __init__(
        self,
        host: Host,
        patcher: ExpertsPatcher,
        settings: GuiderSettings,
        policy: OffloadPolicy | AutoOffload,
    ) -> None:
        super().__init__(patcher)
        self.host = host
        self.settings = settings
        self.requested = policy
        # Runs execute in a sampler node but are shown on the guider's node.
        self.shown_at = host.events.executing().node_id
        # A placeholder until `_choose_policy`.
        self.choice = PolicyChoice(policy=OffloadPolicy.layerwise())
        self.timeline: Timeline | None = None
        """Timeline of the last run, with one step per model call."""
        self.recompiled = 0
        """Number of calls in the last run that differed from the prediction."""
        self._conditioning: dict[str, Sequence[Any]] = {}
        self._tokens: tuple[ExtraTokens, ...] = ()
        self._run: _GuiderRun | None = None

    def set_conds(self, positive: Sequence[Any], negative: Sequence[Any]) -> None:
        self._conditioning = {"positive": positive, "negative": negative}
        # Refused here, before ComfyUI converts it.
        self._tokens = tuple(side_tokens(side, given) for side, given in self._conditioning.items())
        super().set_conds(positive, negative)

    @plainly_named  # called by a ComfyUI node
    def sample(
        self,
        noise: Any,
        latent_image: Any,
        sampler: Any,
        sigmas: torch.Tensor,
        *run: Any,
        **settings: Any,
    ) -> torch.Tensor:
        # True for ComfyUI's NestedTensor. In versions without it, this is torch's False.
        if latent_image.is_nested:
            raise RequestError(
                "the latent has several parts, but Wan generates only video: use an empty video "
                "latent"
            )
        steps = self._steps_of(noise.shape, sigmas)
        if isinstance(self.requested, AutoOffload) and steps.steps > 0:
            self._choose_policy(steps)
        chunk_tokens = self.model_patcher.policy.chunk_tokens

        cache = self.settings.options.cache

        def activation_bytes(pair: ExpertPair, shape: Sequence[int]) -> int:
            return working_bytes(
                pair,
                replace(steps, shape=tuple(shape)).computed_shape,
                sides=steps.extra_tokens(pair, GUIDED),
                chunk_tokens=chunk_tokens,
                cache=cache,  # not through `self`: the model keeps this function
            )

        self.model_patcher.model.activation_bytes = activation_bytes
        samples: torch.Tensor = super().sample(
            noise, latent_image, sampler, sigmas, *run, **settings
        )
        return samples

    def _steps_of(self, shape: Sequence[int], sigmas: torch.Tensor) -> GuiderSteps:
        """Return the steps for a run with one model call per step."""
        levels = tuple(sigmas.tolist())
        return GuiderSteps(
            settings=self.settings,
            sigmas=levels,
            shape=tuple(shape),
            levels=levels[:-1],
            tokens=self._tokens,
        )

    def _choose_policy(self, steps: GuiderSteps) -> None:
        """Choose the policy before ComfyUI makes room for it."""
        patcher = self.model_patcher
        patcher.model.open(patcher.ref)
        pair = patcher.model.pair
        shape = steps.run_shape(pair, patcher.load_device)
        choice = self.host.memory.choose_policy(pair, patcher.ref, self.requested, shape)
        self.choice = replace(choice, policy=self.settings.options.policy(choice.policy))
        patcher.policy = self.choice.policy

    def inner_sample(  # noqa: PLR0913, PLR0917 (ComfyUI's arguments)
        self,
        noise: torch.Tensor,
        latent_image: torch.Tensor,
        device: torch.device,
        sampler: Any,
        sigmas: torch.Tensor,
        denoise_mask: torch.Tensor | None,
        callback: Any,
        disable_pbar: bool,
        seed: int | None,
        **more: Any,
    ) -> torch.Tensor:
        """Run the sampler.

        ComfyUI calls this after loading the model and preparing all tensors.
        """
        arguments = noise, latent_image, device, sampler, sigmas, denoise_mask
        self.timeline = None
        name = sampler_name(sampler)
        steps = self._steps_of(noise.shape, sigmas)
        steps = replace(steps, levels=self._predict_sigmas(sampler, sigmas, seed, steps))
        run = self._run = _GuiderRun(self, self._request(noise, denoise_mask), steps, name)
        try:
            with run.shown.events:
                with run.model_calls as calls:
                    if steps.levels:
                        run.inputs.prefetch(calls.engine, steps.ahead)
                    samples: torch.Tensor = super().inner_sample(
                        *arguments, callback, disable_pbar, seed, **more
                    )
                # After `model_calls` has ended the session, so the timeline is complete. Inside
                # `events`, whose exit announces it.
                self.timeline = run.shown.ended(run.policy.changes)
        except SamplingCancelled:
            # ComfyUI reports all exceptions except the interrupt as node errors.
            comfy.model_management.throw_exception_if_processing_interrupted()
            raise
        except AttributeError as err:
            if err.obj is not self.inner_model:
                raise
            raise RequestError(
                f"the sampler {name} reads the attribute {err.name} of the model, which streamed "
                "experts do not have: choose one of ComfyUI's samplers (KSamplerSelect)"
            ) from err
        finally:
            self._run = None
            self.recompiled = run.model_calls.recompiled
        return samples

    def predict_noise(
        self,
        x: torch.Tensor,
        timestep: torch.Tensor,
        model_options: Mapping[str, Any] = {},
        seed: int | None = None,
    ) -> torch.Tensor:
        """Return the x0 estimate [B, 16, T, h, w] for `x`.

        `timestep` [B] contains sigmas, despite the name.
        """
        assert self._run is not None, "ComfyUI calls the model inside inner_sample"
        run = self._run
        sigma = common_sigma(timestep)
        key = versions.CONDITIONS_FUNCTION
        if key in model_options:
            raise RequestError(
                f"another node overrides the computation of conditions ({key}): remove it"
            )

        def conditions(arguments: Mapping[str, Any]) -> list[torch.Tensor]:
            # At scale 1, the negative is None, unless a sampler such as CFG++ needs it.
            latents, (_, negative) = versions.conditions_call(arguments)
            return run.denoised(latents, sigma, with_negative=negative is not None)

        denoised: torch.Tensor = comfy.samplers.sampling_function(
            self.inner_model,
            x,
            timestep,
            self.conds["negative"],
            self.conds["positive"],
            run.steps.scale(sigma),
            model_options={**model_options, key: conditions},
            seed=seed,
        )
        return denoised

    def _request(self, noise: torch.Tensor, denoise_mask: torch.Tensor | None) -> DenoiseRequest:
        """Return the inputs for this run, with the same checks as in our own sampler."""
        if denoise_mask is not None:
            denoise_mask = denoise_mask.cpu()
        # Only the shape is read. The noise replaces these zeros below.
        latent = {"samples": torch.zeros(noise.shape), "noise_mask": denoise_mask}
        inputs = native_inputs(
            self._conditioning["positive"], self._conditioning["negative"], latent
        )
        # ComfyUI restores the masked frames itself. TI2V-5B needs the mask for per-frame
        # timesteps.
        if not self.model_patcher.model.keeps_frames:
            inputs = replace(inputs, mask=None)
        return DenoiseRequest.of(
            replace(inputs, noise=noise.float(), add_noise=True),
            # Without steps, cache and windows. `GuiderSteps` applies these to each model call.
            StepSettings(boundary_ratio=self.settings.boundary_ratio),
            Guidance(scales=self.settings.guidance.scales),
            RequestOptions(),
        )

    def _predict_sigmas(
        self, sampler: Any, sigmas: torch.Tensor, seed: int | None, steps: GuiderSteps
    ) -> Sequence[float]:
        """Return the predicted noise level for each model call by the sampler."""
        highest = float(sigmas.max())
        if highest > HIGHEST_SIGMA:
            raise RequestError(
                f"a sigma is {highest:g}, but flow models have none above 1: make the SIGMAS with "
                "Wan Sigmas"
            )
        name = sampler_name(sampler)
        levels = predicted_sigmas(self, sampler, sigmas, seed)
        steps.check_calls(levels, name)
        if levels is None:
            logger.info("the sampler %s was not dry-run: expecting one model call per step", name)
            return steps.levels
        return levels


class _GuiderRun:
    """State for one run, shared by all model calls. Nothing is fetched before the first one.

    Args:
        guider: the guider, whose experts ComfyUI has loaded.
        request: run inputs.
        steps: steps and predicted model calls.
        sampler: sampler name.
    """

    def __init__(
        self, guider: ExpertsGuider, request: DenoiseRequest, steps: GuiderSteps, sampler: str
    ) -> None:
        host = guider.host
        settings = guider.settings
        ref = guider.model_patcher.ref
        pair, policy, device = guider.model_patcher.loaded_experts()
        check_fits(request, pair)
        self.steps = steps
        self._sampler = sampler
        engine = pair.engine(policy, device)
        experts = [settings.expert(sigma) for sigma in steps.levels]
        self.inputs = LaneInputs(request, engine.device, reads_reference=pair.reads_reference)
        self.policy = RunPolicy(
            pair,
            policy,
            engine.device,
            shape=steps.computed_shape,
            sides=steps.extra_tokens(pair, max(steps.sides.values(), key=len)),
            cache=settings.options.cache,
            revise=guider.choice.revise_under(policy),
        )
        self.policy.refuse_without_ram()
        cache = None
        if settings.options.cache is not None:
            cache = settings.options.cache.start(steps.calls)
        predicted = None
        if steps.levels:
            shape = steps.run_shape(pair, device)
            if cache is not None:
                shape = shape.skipping(cache.skipped)
            machine = host.memory.planner.known_machine(device, shape.expert, ref.high_noise)
            if machine is not None:
                predicted = predicted_calls(
                    pair, shape, steps.levels, policy, machine=machine, device=device
                )
        self.shown = ShownRun(
            host.events,
            engine.device,
            observe=telemetry_options(host),
            steps=steps.steps,
            calls=experts,
            block_counts=pair.block_counts,
            settings=run_settings(ref, guider.requested, policy, steps.shape, device),
            notes=[guider.choice.reason],
            predicted=predicted,
            shown_at=guider.shown_at,
        )
        self.model_calls = ModelCalls(
            self.policy,
            experts,
            recorder=self.shown.recorder,
            should_stop=comfy.model_management.processing_interrupted,
            nag=settings.guidance.nag,
            cache=cache,
        )

    def denoised(self, x: torch.Tensor, sigma: float, *, with_negative: bool) -> list[torch.Tensor]:
        """Return x0 for the positive and the negative, each [B, 16, T, h, w] float32.

        For an omitted negative, x0 is zeros.
        """
        if x.shape != self.steps.shape:
            raise RequestError(
                f"the sampler {self._sampler} changes the size of the latent from "
                f"{list(self.steps.shape)} to {list(x.shape)}, but the image condition and the "
                "memory of the run are for the first: choose another sampler"
            )
        self.steps.check_call(self.model_calls.calls, sigma)
        settings = self.steps.settings
        windows = self.steps.windows(sigma)
        expert = settings.expert(sigma)
        attach_nag = self.steps.scale(sigma) == 1 and settings.guidance.nag is not None
        given = GUIDED if with_negative else UNGUIDED
        lanes = self.inputs.lanes(x, given, attach_nag=attach_nag, windows=windows)
        velocities = self.model_calls.forward(expert, lanes, sigma)
        self.shown.step(self.policy.changes)
        # Shape [sides * B, C, T, h, w], one side after the other.
        velocity = torch.cat(velocities if windows is None else windows.whole(velocities)).float()
        if not velocity.isfinite().all():
            source = "the result"
            if not x.isfinite().all():
                source = f"the latent from the sampler {self._sampler}"
            raise NonFiniteLatentError(
                f"{source} is NaN or infinite at sigma {sigma:.4f} ({expert}-noise expert): choose "
                "another sampler or other sigmas; if that does not help, an input or a weight is "
                "broken"
            )
        # x0 = x - sigma * velocity, the rectified flow.
        sides = [x - each * sigma for each in velocity.split(len(x))]
        return sides if with_negative else [*sides, torch.zeros_like(x)]
