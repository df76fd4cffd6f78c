"""GUIDER for streamed experts: ComfyUI's samplers call the model, and keep their history across the expert switch."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import comfy.model_management
import comfy.samplers
import torch

from ...plan import TRAIN_TIMESTEPS, AutoOffload
from ...sampling import (
    DenoiseRequest,
    LaneInputs,
    ModelCalls,
    NonFiniteLatentError,
    RequestError,
    RunPolicy,
    SamplingCancelled,
    StepCache,
    check_fits,
    native_inputs,
    policy_with_cache,
    predicted_calls,
    single_entry,
)
from ...schema import OffloadPolicy, Timeline
from ...telemetry import Recorder
from ...wan import ExpertPair
from ..api import HostApi
from ..auto_policy import MemoryEstimateInputs, PolicyChoice
from ..error_names import plainly_named
from ..run_events import RunEvents, run_settings
from .guider_session import (
    GuiderRunState,
    GuiderSettings,
    GuiderSteps,
    guider_job,
)
from .samplers import common_sigma, predicted_sigmas, sampler_name

if TYPE_CHECKING:
    from .patcher import ExpertsPatcher


HIGHEST_SIGMA = 1 + 1e-4
"""Slightly above 1, because of rounding in some schedules."""

CONDITIONS = "sampler_calc_cond_batch_function"
"""ComfyUI's model option for a function that computes the predictions of all conditions of a call."""

logger = logging.getLogger("wanstream.host")


class ExpertsGuider(comfy.samplers.CFGGuider):  # type: ignore[misc]
    """A CFGGuider whose model is a pair of streamed experts. See `ComfyHost.guider`.

    Args:
        host: chooses an automatic policy before each run, and announces the run.
        patcher: the experts in ComfyUI's memory manager.
        settings: boundary, guidance, cache and context windows.
        policy: the requested policy.
    """

    def __init__(
        self,
        host: HostApi,
        patcher: ExpertsPatcher,
        settings: GuiderSettings,
        policy: OffloadPolicy | AutoOffload,
    ) -> None:
        super().__init__(patcher)
        self.host, self.settings, self.requested = host, settings, policy
        self._shown_at = host.executing_node()  # runs execute in a sampler node, but are shown at the guider's
        self._choice = PolicyChoice(policy=OffloadPolicy.layerwise())  # placeholder until `_choose_policy`
        self.timeline: Timeline | None = None
        """Timeline of the last run, one step per model call."""
        self.recompiled = 0
        """Number of calls in the last run that differed from the prediction."""
        self._conditioning: dict[str, Sequence[Any]] = {}
        self._run: GuiderRunState | None = None

    def set_conds(self, positive: Sequence[Any], negative: Sequence[Any]) -> None:
        self._conditioning = {"positive": positive, "negative": negative}
        for side, conditioning in self._conditioning.items():
            single_entry(side, conditioning)  # refused here, before ComfyUI converts it
        super().set_conds(positive, negative)

    @plainly_named  # a node of ComfyUI calls it
    def sample(
        self, noise: Any, latent_image: Any, sampler: Any, sigmas: torch.Tensor, *run: Any, **settings: Any
    ) -> torch.Tensor:
        if latent_image.is_nested:
            raise RequestError("the latent has several parts, but Wan generates only video: use an empty video latent")
        guider_steps = self._guider_steps_of(noise.shape, sigmas)
        if isinstance(self.requested, AutoOffload) and guider_steps.steps > 0:
            self._choose_policy(noise.shape, guider_steps)
        self.model_patcher.model.memory_inputs = MemoryEstimateInputs(
            chunk_tokens=self.model_patcher.policy.chunk_tokens,
            cache=self.settings.cache,
            windows=self.settings.windows,
            steps=max(1, guider_steps.steps),
        )
        samples: torch.Tensor = super().sample(noise, latent_image, sampler, sigmas, *run, **settings)
        return samples

    def _guider_steps_of(self, shape: Sequence[int], sigmas: torch.Tensor) -> GuiderSteps:
        return GuiderSteps(settings=self.settings, sigmas=tuple(sigmas.tolist()), frames=shape[2])

    def _choose_policy(self, shape: Sequence[int], guider_steps: GuiderSteps) -> None:
        """Choose the policy for one model call per step, before ComfyUI makes room for it."""
        patcher = self.model_patcher
        patcher.model.open(patcher.ref)
        job = guider_job(patcher.model.pair, guider_steps, guider_steps.sigmas[:-1], shape, patcher.load_device)
        choice = self.host.choose_policy(patcher.ref, self.requested, job)
        self._choice = replace(choice, policy=policy_with_cache(choice.policy, self.settings.cache))
        patcher.policy = self._choice.policy

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
        """Run the sampler. ComfyUI calls this after it has loaded the model and prepared all tensors."""
        self.timeline = None
        guider_steps = self._guider_steps_of(noise.shape, sigmas)
        levels = self._predict_sigmas(sampler, sigmas, seed, guider_steps)
        run = self._run = self._start_run(noise, denoise_mask, levels, guider_steps, sampler_name(sampler))
        try:
            with run.events:
                with run.model_calls as calls:
                    if levels:
                        needs_negative = guider_steps.needs_negative(levels)
                        ahead = [(self.settings.expert(sigma), sigma) for sigma in levels]
                        run.inputs.prefetch(
                            calls.engine,
                            [(expert, sigma * TRAIN_TIMESTEPS, needs_negative[expert]) for expert, sigma in ahead],
                        )
                    samples: torch.Tensor = super().inner_sample(
                        *(noise, latent_image, device, sampler, sigmas, denoise_mask, callback, disable_pbar, seed),
                        **more,
                    )
                notes = tuple(filter(None, (self._choice.reason, *run.policy.changes)))
                self.timeline = replace(run.recorder.timeline(), changes=notes)
                run.events.ended(self.timeline)
        except SamplingCancelled:
            comfy.model_management.throw_exception_if_processing_interrupted()
            raise
        except AttributeError as err:
            if err.obj is not self.inner_model:
                raise
            raise RequestError(
                f"the sampler {sampler_name(sampler)} reads the attribute {err.name} of the model, which streamed "
                "experts do not have: choose one of ComfyUI's samplers (KSamplerSelect)"
            ) from err
        finally:
            self._run, self.recompiled = None, run.model_calls.recompiled
        return samples

    def _start_run(
        self,
        noise: torch.Tensor,
        denoise_mask: torch.Tensor | None,
        levels: Sequence[float],
        guider_steps: GuiderSteps,
        sampler: str,
    ) -> GuiderRunState:
        """Return the state of a run with calls at the noise levels `levels`, in that order; fetches nothing yet."""
        pair, policy, device = self.model_patcher.loaded_experts()
        request = self._request(noise, denoise_mask)
        check_fits(request, pair)
        engine, experts = pair.engine(policy, device), [self.settings.expert(sigma) for sigma in levels]
        cache = self.settings.cache
        run_policy = RunPolicy(
            pair,
            policy,
            engine.device,
            shape=guider_steps.computed_shape(noise.shape),
            guided=any(guider_steps.guided(levels).values()),
            cache=cache,
            revise=self._choice.revise_under(policy),
        )
        run_policy.refuse_without_ram()
        running = None if cache is None else cache.start(guider_steps.calls(levels, len(noise)))
        recorder = Recorder(engine.device, observe=self.host.telemetry_options())
        model_calls = ModelCalls(
            run_policy,
            experts,
            recorder=recorder,
            should_stop=comfy.model_management.processing_interrupted,
            nag=self.settings.more_guidance.nag,
            cache=running,
        )
        predicted = self._predict(pair, policy, guider_steps, levels, noise.shape, running)
        events = RunEvents(
            self.host.announce,
            prompt_id=self.host.run_id(),
            node_id=self.host.executing_node(),
            shown_at=self._shown_at,
            experts=experts,
            predicted=predicted,
            settings=run_settings(self.model_patcher.ref, self.requested, policy, noise.shape, device),
        )
        return GuiderRunState(
            inputs=LaneInputs(request, engine.device),
            model_calls=model_calls,
            policy=run_policy,
            recorder=recorder,
            events=events,
            shape=noise.shape,
            guider_steps=guider_steps,
            sampler=sampler,
        )

    def _predict(
        self,
        pair: ExpertPair,
        policy: OffloadPolicy,
        guider_steps: GuiderSteps,
        levels: Sequence[float],
        shape: Sequence[int],
        cache: StepCache | None,
    ) -> Timeline | None:
        """Simulate calls at `levels` on latents of `shape`; None without calls or without a profile of this machine."""
        if not levels:
            return None
        device = self.model_patcher.load_device
        job = guider_job(pair, guider_steps, levels, shape, device)
        if cache is not None:
            job = replace(job, skipped_steps=cache.skipped)
        machine = self.host.known_machine(self.model_patcher.ref, job.expert)
        return None if machine is None else predicted_calls(pair, job, levels, policy, machine=machine, device=device)

    def predict_noise(
        self, x: torch.Tensor, timestep: torch.Tensor, model_options: Mapping[str, Any] = {}, seed: int | None = None
    ) -> torch.Tensor:
        """Return the estimate of x0 [B, 16, T, h, w] for `x`; `timestep` [B] contains sigmas in spite of its name."""
        assert self._run is not None, "ComfyUI calls the model inside inner_sample"
        sigma, run = common_sigma(timestep), self._run
        if CONDITIONS in model_options:
            raise RequestError(f"another node overrides the computation of conditions ({CONDITIONS}): remove it")

        def conditions(call: Mapping[str, Any]) -> list[torch.Tensor]:
            with_negative = call["conds"][1] is not None
            return self._denoised(run, call["input"], sigma, with_negative=with_negative)

        denoised: torch.Tensor = comfy.samplers.sampling_function(
            self.inner_model,
            x,
            timestep,
            self.conds["negative"],
            self.conds["positive"],
            run.guider_steps.scale(sigma),
            model_options={**model_options, CONDITIONS: conditions},
            seed=seed,
        )
        return denoised

    def _denoised(
        self, run: GuiderRunState, x: torch.Tensor, sigma: float, *, with_negative: bool
    ) -> list[torch.Tensor]:
        """Return x0 of the positive and the negative, each [B, 16, T, h, w] float32; zeros for an omitted negative."""
        if x.shape != run.shape:
            raise RequestError(
                f"the sampler {run.sampler} changes the size of the latent from {list(run.shape)} to {list(x.shape)}, "
                "but the image condition and the memory of the run are for the first: choose another sampler"
            )
        run.guider_steps.check_call(run.model_calls.calls, sigma)
        expert, windows = self.settings.expert(sigma), run.guider_steps.windows(sigma)
        attach_nag = run.guider_steps.scale(sigma) == 1 and self.settings.more_guidance.nag is not None
        lanes = run.inputs.lanes(x, with_negative=with_negative, attach_nag=attach_nag, windows=windows)
        velocities = run.model_calls.forward(expert, lanes, sigma)
        run.events.step(run.recorder.last)
        velocity = torch.cat(velocities if windows is None else windows.whole(velocities)).float()
        if not velocity.isfinite().all():
            source = "the result" if x.isfinite().all() else f"the latent from the sampler {run.sampler}"
            raise NonFiniteLatentError(
                f"{source} is NaN or infinite at sigma {sigma:.4f} ({expert}-noise expert): choose another sampler or "
                "other sigmas; if that does not help, an input or a weight is broken"
            )
        sides = [x - each * sigma for each in velocity.split(len(x))]
        return sides if with_negative else [*sides, torch.zeros_like(x)]

    def _request(self, noise: torch.Tensor, denoise_mask: torch.Tensor | None) -> DenoiseRequest:
        """Return the inputs of this run, with the same checks as in our own sampler."""
        mask = None if denoise_mask is None else denoise_mask.cpu()
        latent = {"samples": torch.zeros(noise.shape), "noise_mask": mask}
        inputs = native_inputs(self._conditioning["positive"], self._conditioning["negative"], latent)
        return DenoiseRequest(
            noise.float(),
            inputs.positive,
            negative=inputs.negative,
            image_condition=inputs.image_condition,
            image_embedding=inputs.image_embedding,
            # ComfyUI restores the masked frames itself; TI2V-5B needs the mask for its per-frame timesteps.
            mask=inputs.mask if self.model_patcher.model.keeps_frames else None,
            boundary_ratio=self.settings.boundary_ratio,
            guidance=self.settings.guidance,
        )

    def _predict_sigmas(
        self, sampler: Any, sigmas: torch.Tensor, seed: int | None, guider_steps: GuiderSteps
    ) -> Sequence[float]:
        """Return the predicted noise level of each model call of the sampler."""
        highest = float(sigmas.max())
        if highest > HIGHEST_SIGMA:
            raise RequestError(
                f"a sigma is {highest:g}, but flow models have none above 1: make the SIGMAS with Wan Sigmas"
            )
        levels, name = predicted_sigmas(self, sampler, sigmas, seed), sampler_name(sampler)
        guider_steps.check_calls(levels, name)
        if levels is None:
            logger.info("the sampler %s was not dry-run: expecting one model call per step", name)
            return guider_steps.sigmas[:-1]
        return levels
