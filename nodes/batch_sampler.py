"""Nodes for several videos in one run. Every block is fetched once per step for all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..host import current_host, io, search_aliases
from ..sampling.inputs import DenoiseRequest, merge_requests, native_latent
from ..sampling.steps import RequestError
from ..schema.refs import ExpertsRef
from . import sockets
from .inputs import EXPERTS_INPUT, POSITIVE_INPUT, limits
from .runs.run_experts import run_experts
from .sampler import (
    SEED_INPUT,
    SETTING_INPUTS,
    SamplerSettings,
    SamplerValues,
    WanStreamSampler,
    sampler_inputs,
    sampler_output,
    show_sampler_notices,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack  # `typing` has it from Python 3.11 on

MAX_LANES = 1000


# `eq=False`: a comparison of tensors has no single truth value.
@dataclass(frozen=True, kw_only=True, eq=False)
class VideoLane:
    """Inputs for one video, as native CONDITIONING and LATENT values."""

    positive: Sequence[Any]
    negative: Sequence[Any]
    latent: Mapping[str, Any]
    seed: int


class WanStreamLane(io.ComfyNode):
    """Lanes with one more video."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanStreamLane",
            display_name="Wan Add Video",
            category="WanStream/sampling",
            **search_aliases("batch, several videos, several prompts"),
            description="Adds a video with its own texts, image and seed to Wan Batch Sampler. "
            "Connect one node per video in a row: all share one pass over the weights.",
            inputs=[
                POSITIVE_INPUT,
                io.Conditioning.Input(
                    "negative",
                    tooltip="Like positive. Costs nothing if a guidance is 1; may be the same for "
                    "all lanes.",
                ),
                io.Latent.Input(
                    "latent",
                    tooltip="Of the same size as those of the other lanes. Each video costs its "
                    "full compute time, and 0.7 GB of device memory at 832x480x81, 1.6 GB at "
                    "1280x720x81 (bf16; half of it without guidance); its weights cost nothing "
                    "more.",
                ),
                SEED_INPUT,
                sockets.Lanes.Input(
                    "lanes",
                    optional=True,
                    tooltip="The lanes before this one, from another Wan Add Video.",
                ),
            ],
            outputs=[sockets.Lanes.Output(display_name="lanes")],
        )

    @classmethod
    def execute(
        cls,
        positive: Sequence[Any],
        negative: Sequence[Any],
        latent: Mapping[str, Any],
        seed: int,
        lanes: tuple[VideoLane, ...] = (),
    ) -> io.NodeOutput:
        return io.NodeOutput(
            (*lanes, VideoLane(positive=positive, negative=negative, latent=latent, seed=seed))
        )


class WanStreamLaneSampler(io.ComfyNode):
    """Runs both experts for several videos at once.

    Each result is bit-equal to a separate run.
    """

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanStreamLaneSampler",
            display_name="Wan Batch Sampler",
            category="WanStream/sampling",
            **search_aliases("batch, several videos, ksampler"),
            description="Wan Sampler for all videos of a row of Wan Add Video: the weights move "
            "once per step for all of them. Each video is the same as from Wan Sampler alone.",
            inputs=[
                EXPERTS_INPUT,
                sockets.Lanes.Input(
                    "lanes",
                    tooltip="From the last Wan Add Video of a row. Compute time is proportional to "
                    "their number, bytes read and copied are those of one.",
                ),
                *SETTING_INPUTS,
            ],
            outputs=[
                sockets.LaneLatents.Output(display_name="latents"),
                sockets.Run.Output(display_name="run"),
            ],
            hidden=[io.Hidden.unique_id],
        )

    # The method stays bound to the other class. Both nodes have all inputs that it checks.
    validate_inputs = WanStreamSampler.validate_inputs

    @classmethod
    def execute(
        cls, experts: ExpertsRef, lanes: Sequence[VideoLane], **values: Unpack[SamplerValues]
    ) -> io.NodeOutput:
        host = current_host()
        settings = SamplerSettings.of(experts, values)
        requests = [_request(number, lane, settings) for number, lane in enumerate(lanes, 1)]
        reads_reference = host.models.experts(experts).reads_reference
        merged = merge_requests(requests, reads_reference=reads_reference)
        shown = show_sampler_notices(host, experts, merged, values)
        run = run_experts(
            host,
            sampler_inputs(experts, merged, values),
            node_id=cls.hidden.unique_id,
            preview=values.get("preview"),
        )
        # A latent may have several videos, so lanes differ in batch size.
        samples = run.result.latents.split([request.batch for request in requests])
        latents = tuple(  # each with the size of its input
            native_latent(part, lane.latent, sigma=run.result.sigma)
            for part, lane in zip(samples, lanes, strict=True)
        )
        return io.NodeOutput(latents, run, ui=sampler_output(run, shown))


class WanStreamLaneLatent(io.ComfyNode):
    """Latent for one lane."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanStreamLaneLatent",
            display_name="Wan Pick Video",
            category="WanStream/sampling",
            **search_aliases("batch, select video"),
            description="Picks one video from the result of Wan Batch Sampler.",
            inputs=[
                sockets.LaneLatents.Input("latents", tooltip="From Wan Batch Sampler."),
                io.Int.Input(
                    "index",
                    default=0,
                    **limits(0, MAX_LANES - 1),
                    tooltip="Lane: 0 is the first Wan Add Video of the row. Costs nothing.",
                ),
            ],
            outputs=[io.Latent.Output(display_name="latent")],
        )

    @classmethod
    def execute(cls, latents: Sequence[Mapping[str, Any]], index: int) -> io.NodeOutput:
        if index >= len(latents):
            raise RequestError(
                f"lane {index} of {len(latents)} lanes: give 0 to {len(latents) - 1}"
            )
        return io.NodeOutput(latents[index])


def _request(number: int, lane: VideoLane, settings: SamplerSettings) -> DenoiseRequest:
    """Return the request Wan Sampler would make for this lane alone."""
    try:
        return settings.request(lane.positive, lane.negative, lane.latent, lane.seed)
    except RequestError as err:
        raise RequestError(f"lane {number}: {err}") from err
