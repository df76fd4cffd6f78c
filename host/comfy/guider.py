"""GUIDER for streamed experts: ComfyUI's samplers call the model, and keep their history across the expert switch."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import comfy.model_management
import comfy.samplers
import torch

from ...devices import thread_notes
from ...plan import TRAIN_TIMESTEPS, AutoOffload
from ...sampling import (
    DenoiseRequest,
    ExtraTokens,
    LaneInputs,
    ModelCalls,
    NonFiniteLatentError,
    RequestError,
    RunPolicy,
    SamplingCancelled,
    check_fits,
    native_inputs,
    native_tokens,
    policy_with_cache,
    predicted_calls,
    sides_at,
    single_entry,
    working_bytes,
)
from ...schema import OffloadPolicy, Timeline
from ...telemetry import Recorder
from ...wan import ExpertPair
from ..api import HostApi
from ..auto_policy import PolicyChoice
from ..error_names import plainly_named
from ..run_events import RunEvents, run_settings
from .guider_session import GuiderSettings, GuiderSteps
from .patcher import ExpertsPatcher
from .samplers import common_sigma, predicted_sigmas, sampler_name

HIGHEST_SIGMA = 1 + 1e-4
"""Slightly above 1, because of rounding in some schedules."""

CONDITIONS = "sampler_calc_cond_batch_function"
"""ComfyUI's model option for a function that computes the predictions of all conditions of a call."""

UNGUIDED, GUIDED = sides_at(1), sides_at(0)
"""CFG sides of a call without and with a negative."""

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
        self.shown_at = host.executing_node()  # runs execute in a sampler node, but are shown at the guider's
        self.choice = PolicyChoice(policy=OffloadPolicy.layerwise())  # placeholder until `_choose_policy`
        self.timeline: Timeline | None = None
        """Timeline of the last run, one step per model call."""
        self.recompiled = 0
        """Number of calls in the last run that differed from the prediction."""
        self._conditioning: dict[str, Sequence[Any]] = {}
        self._tokens: tuple[ExtraTokens, ...] = ()
        self._run: _GuiderRun | None = None

    def set_conds(self, positive: Sequence[Any], negative: Sequence[Any]) -> None:
        self._conditioning = {"positive": positive, "negative": negative}
        # Refused here, before ComfyUI converts it.
        self._tokens = tuple(
            native_tokens(side, single_entry(side, given)[1]) for side, given in self._conditioning.items()
        )
        super().set_conds(positive, negative)

    @plainly_named  # a node of ComfyUI calls it
    def sample(
        self, noise: Any, latent_image: Any, sampler: Any, sigmas: torch.Tensor, *run: Any, **settings: Any
    ) -> torch.Tensor:
        if latent_image.is_nested:
            raise RequestError("the latent has several parts, but Wan generates only video: use an empty video latent")
        steps = self._steps_of(noise.shape, sigmas)
        if isinstance(self.requested, AutoOffload) and steps.steps > 0:
            self._choose_policy(steps)
        chunk_tokens = self.model_patcher.policy.chunk_tokens

        def activation_bytes(pair: ExpertPair, shape: Sequence[int]) -> int:
            computed = replace(steps, shape=tuple(shape)).computed_shape
            return working_bytes(
                pair,
                computed,
                sides=steps.extra_tokens(pair, GUIDED),
                chunk_tokens=chunk_tokens,
                cache=steps.settings.cache,
            )

        self.model_patcher.model.activation_bytes = activation_bytes
        samples: torch.Tensor = super().sample(noise, latent_image, sampler, sigmas, *run, **settings)
        return samples

    def _steps_of(self, shape: Sequence[int], sigmas: torch.Tensor) -> GuiderSteps:
        """Return the steps of a run with one model call per step."""
        levels = tuple(sigmas.tolist())
        return GuiderSteps(
            settings=self.settings, sigmas=levels, shape=tuple(shape), levels=levels[:-1], tokens=self._tokens
        )

    def _choose_policy(self, steps: GuiderSteps) -> None:
        """Choose the policy before ComfyUI makes room for it."""
        patcher = self.model_patcher
        patcher.model.open(patcher.ref)
        job = steps.job(patcher.model.pair, patcher.load_device)
        choice = self.host.choose_policy(patcher.ref, self.requested, job)
        self.choice = replace(choice, policy=policy_with_cache(choice.policy, self.settings.cache))
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
        """Run the sampler. ComfyUI calls this after it has loaded the model and prepared all tensors."""
        self.timeline = None
        name = sampler_name(sampler)
        steps = self._steps_of(noise.shape, sigmas)
        steps = replace(steps, levels=self._predict_sigmas(sampler, sigmas, seed, steps))
        run = self._run = _GuiderRun(self, self._request(noise, denoise_mask), steps, name)
        try:
            with run.events:
                with run.model_calls as calls:
                    if steps.levels:
                        needs_negative = steps.needs_negative
                        ahead = [(self.settings.expert(sigma), sigma) for sigma in steps.levels]
                        run.inputs.prefetch(
                            calls.engine,
                            [(expert, sigma * TRAIN_TIMESTEPS, needs_negative[expert]) for expert, sigma in ahead],
                        )
                    samples: torch.Tensor = super().inner_sample(
                        *(noise, latent_image, device, sampler, sigmas, denoise_mask, callback, disable_pbar, seed),
                        **more,
                    )
                notes = tuple(filter(None, (self.choice.reason, *run.policy.changes)))
                self.timeline = replace(run.recorder.timeline(), changes=notes)
                run.events.ended(self.timeline)
        except SamplingCancelled:
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
            self._run, self.recompiled = None, run.model_calls.recompiled
        return samples

    def predict_noise(
        self, x: torch.Tensor, timestep: torch.Tensor, model_options: Mapping[str, Any] = {}, seed: int | None = None
    ) -> torch.Tensor:
        """Return the estimate of x0 [B, 16, T, h, w] for `x`; `timestep` [B] contains sigmas in spite of its name."""
        assert self._run is not None, "ComfyUI calls the model inside inner_sample"
        sigma, run = common_sigma(timestep), self._run
        if CONDITIONS in model_options:
            raise RequestError(f"another node overrides the computation of conditions ({CONDITIONS}): remove it")

        def conditions(call: Mapping[str, Any]) -> list[torch.Tensor]:
            return run.denoised(call["input"], sigma, with_negative=call["conds"][1] is not None)

        denoised: torch.Tensor = comfy.samplers.sampling_function(
            self.inner_model,
            x,
            timestep,
            self.conds["negative"],
            self.conds["positive"],
            run.steps.scale(sigma),
            model_options={**model_options, CONDITIONS: conditions},
            seed=seed,
        )
        return denoised

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
            tokens=inputs.tokens,
            negative_tokens=inputs.negative_tokens,
            boundary_ratio=self.settings.boundary_ratio,
            guidance=self.settings.guidance,
        )

    def _predict_sigmas(
        self, sampler: Any, sigmas: torch.Tensor, seed: int | None, steps: GuiderSteps
    ) -> Sequence[float]:
        """Return the predicted noise level of each model call of the sampler."""
        highest = float(sigmas.max())
        if highest > HIGHEST_SIGMA:
            raise RequestError(
                f"a sigma is {highest:g}, but flow models have none above 1: make the SIGMAS with Wan Sigmas"
            )
        levels, name = predicted_sigmas(self, sampler, sigmas, seed), sampler_name(sampler)
        steps.check_calls(levels, name)
        if levels is None:
            logger.info("the sampler %s was not dry-run: expecting one model call per step", name)
            return steps.levels
        return levels


class _GuiderRun:
    """State of one run, shared by its model calls; fetches nothing before the first one.

    Args:
        guider: the guider, whose experts ComfyUI has loaded.
        request: inputs of the run.
        steps: steps and predicted model calls.
        sampler: name of the sampler.
    """

    def __init__(self, guider: ExpertsGuider, request: DenoiseRequest, steps: GuiderSteps, sampler: str) -> None:
        host, settings, ref = guider.host, guider.settings, guider.model_patcher.ref
        pair, policy, device = guider.model_patcher.loaded_experts()
        check_fits(request, pair)
        self.steps, self._sampler = steps, sampler
        engine, experts = pair.engine(policy, device), [settings.expert(sigma) for sigma in steps.levels]
        self.inputs = LaneInputs(request, engine.device, reads_reference=pair.reads_reference)
        self.policy = RunPolicy(
            pair,
            policy,
            engine.device,
            shape=steps.computed_shape,
            sides=steps.extra_tokens(pair, max(steps.sides.values(), key=len)),
            cache=settings.cache,
            revise=guider.choice.revise_under(policy),
        )
        self.policy.refuse_without_ram()
        cache = None if settings.cache is None else settings.cache.start(steps.calls)
        options = replace(host.telemetry_options(), on_visits=self._report_visits)
        self.recorder = Recorder(engine.device, observe=options)
        self.model_calls = ModelCalls(
            self.policy,
            experts,
            recorder=self.recorder,
            should_stop=comfy.model_management.processing_interrupted,
            nag=settings.more_guidance.nag,
            cache=cache,
        )
        predicted = None
        if steps.levels:
            job = replace(steps.job(pair, device), skipped_steps=frozenset() if cache is None else cache.skipped)
            machine = host.known_machine(ref, job.expert)
            if machine is not None:
                predicted = predicted_calls(pair, job, steps.levels, policy, machine=machine, device=device)
        node_id = host.executing_node()
        self.events = RunEvents(
            host.announce,
            prompt_id=host.run_id(),
            node_id=node_id,
            shown_at=guider.shown_at,
            experts=experts,
            predicted=predicted,
            settings=run_settings(ref, guider.requested, policy, steps.shape, device),
            notes=[guider.choice.reason, *thread_notes(device)],
        )
        self._block_counts = pair.block_counts
        self._bar = host.progress(max(1, steps.steps), node_id)
        self._calls_per_step = max(1.0, len(steps.levels) / max(1, steps.steps))

    def _report_visits(self, expert: str, done: int) -> None:
        step, share = self.events.visits(done, self._block_counts[expert])
        if step == 0:  # later steps belong to ComfyUI's sampler, which moves the bar itself
            self._bar.advance(share / self._calls_per_step)

    def denoised(self, x: torch.Tensor, sigma: float, *, with_negative: bool) -> list[torch.Tensor]:
        """Return x0 of the positive and the negative, each [B, 16, T, h, w] float32; zeros for an omitted negative."""
        if x.shape != self.steps.shape:
            raise RequestError(
                f"the sampler {self._sampler} changes the size of the latent from {list(self.steps.shape)} to "
                f"{list(x.shape)}, but the image condition and the memory of the run are for the first: choose another "
                "sampler"
            )
        self.steps.check_call(self.model_calls.calls, sigma)
        settings, windows = self.steps.settings, self.steps.windows(sigma)
        expert = settings.expert(sigma)
        attach_nag = self.steps.scale(sigma) == 1 and settings.more_guidance.nag is not None
        given = GUIDED if with_negative else UNGUIDED
        lanes = self.inputs.lanes(x, given, attach_nag=attach_nag, windows=windows)
        velocities = self.model_calls.forward(expert, lanes, sigma)
        self.events.step(self.recorder.last, self.policy.changes)
        velocity = torch.cat(velocities if windows is None else windows.whole(velocities)).float()
        if not velocity.isfinite().all():
            source = "the result" if x.isfinite().all() else f"the latent from the sampler {self._sampler}"
            raise NonFiniteLatentError(
                f"{source} is NaN or infinite at sigma {sigma:.4f} ({expert}-noise expert): choose another sampler or "
                "other sigmas; if that does not help, an input or a weight is broken"
            )
        sides = [x - each * sigma for each in velocity.split(len(x))]
        return sides if with_negative else [*sides, torch.zeros_like(x)]
