"""L7: the nodes. They translate between ComfyUI and the rooms above; there is no algorithm in here."""

from __future__ import annotations

from ..host import ComfyExtension, io
from .auto_offload import WanStreamAutoOffload
from .benchmark import WanStreamBenchmark
from .cache import WanStreamCache, WanStreamCacheCalibration
from .context_windows import WanStreamContextWindows
from .decode_video import WanStreamDecodeVideo
from .guidance import WanStreamGuidance
from .guider import WanStreamGuider, WanStreamSigmas
from .lanes import WanStreamLane, WanStreamLaneLatent, WanStreamLaneSampler
from .latent import WanStreamEmptyLatent
from .latent_from_image import WanStreamImageToVideo
from .load import WanStreamExperts
from .lora import WanStreamLora
from .offload import WanStreamBlockSwap, WanStreamLayerwise
from .one_expert import WanStreamOneExpert
from .sample import WanStreamSampler
from .text import WanStreamTextEncode
from .video import WanStreamSaveVideo, WanStreamVAEDecode
from .workers import WanStreamWorkers


class WanStreamExtension(ComfyExtension):
    """The table of contents, in the order in which a graph is built."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [
            WanStreamExperts,
            WanStreamOneExpert,
            WanStreamLora,
            WanStreamLayerwise,
            WanStreamBlockSwap,
            WanStreamAutoOffload,
            WanStreamWorkers,
            WanStreamCache,
            WanStreamTextEncode,
            WanStreamEmptyLatent,
            WanStreamImageToVideo,
            WanStreamGuidance,
            WanStreamContextWindows,
            WanStreamSampler,
            WanStreamLane,
            WanStreamLaneSampler,
            WanStreamLaneLatent,
            WanStreamSigmas,
            WanStreamGuider,
            WanStreamVAEDecode,
            WanStreamSaveVideo,
            WanStreamDecodeVideo,
            WanStreamBenchmark,
            WanStreamCacheCalibration,
        ]
