"""ComfyUI nodes: they translate between the host and the packages above, without algorithms."""

from __future__ import annotations

from ..host import ComfyExtension, io
from .batch_sampler import WanStreamLane, WanStreamLaneLatent, WanStreamLaneSampler
from .benchmark import REPORT, WanStreamBenchmark, WanStreamModelRun
from .cache import WanStreamCache, WanStreamCacheCalibration
from .clips.continue_video import WanStreamContinueVideo
from .clips.join import WanStreamJoinClips
from .clips.latent_files import WanStreamLoadLatent, WanStreamSaveLatent
from .context_windows import WanStreamContextWindows
from .decode import WanStreamDecodeVideo, WanStreamPreview, WanStreamSaveVideo, WanStreamVAEDecode
from .guidance import WanStreamGuidance
from .guider import WanStreamGuider, WanStreamSigmas
from .latents import WanStreamEmptyLatent, WanStreamImageToVideo
from .loaders import WanStreamExperts, WanStreamLora, WanStreamOneExpert
from .native.checkpoints import WanStreamLoadCheckpoint
from .native.clip import (
    WanStreamDualCLIP,
    WanStreamLoadCLIP,
    WanStreamQuadrupleCLIP,
    WanStreamStreamCLIP,
    WanStreamTripleCLIP,
)
from .native.experts import WanStreamJoinExperts, WanStreamSplitExperts
from .native.models import WanStreamLoadDiffusionModel, WanStreamStreamModel
from .offload import WanStreamAutoOffload, WanStreamBlockSwap, WanStreamLayerwise
from .runs.notices import WARNINGS
from .sampler import TIMELINE, WanStreamSampler
from .text import WanStreamTextEncode
from .variants.bernini import WanStreamBernini
from .variants.fun_control import WanStreamFunControl
from .workers import WanStreamWorkers


# ComfyUI would ignore this entry point if the pack also had NODE_CLASS_MAPPINGS.
class WanStreamExtension(ComfyExtension):
    """All nodes, in the order in which a graph is built."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [
            WanStreamExperts,
            WanStreamOneExpert,
            WanStreamLora,
            WanStreamLoadDiffusionModel,
            WanStreamLoadCheckpoint,
            WanStreamStreamModel,
            WanStreamJoinExperts,
            WanStreamSplitExperts,
            WanStreamLoadCLIP,
            WanStreamDualCLIP,
            WanStreamTripleCLIP,
            WanStreamQuadrupleCLIP,
            WanStreamStreamCLIP,
            WanStreamLayerwise,
            WanStreamBlockSwap,
            WanStreamAutoOffload,
            WanStreamWorkers,
            WanStreamCache,
            WanStreamTextEncode,
            WanStreamEmptyLatent,
            WanStreamImageToVideo,
            WanStreamFunControl,
            WanStreamBernini,
            WanStreamContinueVideo,
            WanStreamLoadLatent,
            WanStreamGuidance,
            WanStreamContextWindows,
            WanStreamPreview,
            WanStreamSampler,
            WanStreamLane,
            WanStreamLaneSampler,
            WanStreamLaneLatent,
            WanStreamSigmas,
            WanStreamGuider,
            WanStreamVAEDecode,
            WanStreamJoinClips,
            WanStreamSaveVideo,
            WanStreamDecodeVideo,
            WanStreamSaveLatent,
            WanStreamModelRun,
            WanStreamBenchmark,
            WanStreamCacheCalibration,
        ]


__all__ = ["REPORT", "TIMELINE", "WARNINGS", "WanStreamExtension"]
