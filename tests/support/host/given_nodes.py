"""Graphs around one node of ours: any latent, video and conditioning before, an output behind."""

from __future__ import annotations

import asyncio
from typing import ClassVar

import torch

from wanstream.host import io
from wanstream.nodes import WanStreamExtension
from wanstream.nodes.sampler import WanStreamSampler
from wanstream.schema.refs import ExpertsRef


class Given(io.ComfyNode):
    """Inputs for the node under test."""

    ran: ClassVar[list[int]] = []
    """Frames by execution, to test what runs."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        outputs = [
            io.Latent.Output(),
            io.Image.Output(),
            io.Conditioning.Output(),
            io.Custom("*").Output(),
        ]
        return io.Schema(node_id="Given", inputs=[io.Int.Input("frames")], outputs=outputs)

    @classmethod
    def execute(cls, frames: int) -> io.NodeOutput:
        cls.ran.append(frames)
        latent = torch.zeros(1, 16, (frames + 3) // 4, 4, 4)
        video = torch.zeros(1, 1, 1, 1).expand(frames, 32, 32, 3)
        return io.NodeOutput({"samples": latent}, video, [[torch.zeros(1, 1, 4096), {}]], None)


class Shown(io.ComfyNode):
    """Output node for any value."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="Shown", inputs=[io.Custom("*").Input("value")], outputs=[], is_output_node=True
        )

    @classmethod
    def execute(cls, value: object) -> io.NodeOutput:
        return io.NodeOutput()


def constant(node_id: str, output, value: object) -> type[io.ComfyNode]:
    """Return a node class with one output, which has this value."""

    class Constant(io.ComfyNode):
        @classmethod
        def define_schema(cls) -> io.Schema:
            return io.Schema(node_id=node_id, outputs=[output])

        @classmethod
        def execute(cls) -> io.NodeOutput:
            return io.NodeOutput(value)

    return Constant


VAE = "wan_2.1_vae.safetensors"
CLIP = "clip_vision_h.safetensors"
UMT5 = "umt5_xxl_fp8_e4m3fn_scaled.safetensors"
PACK = asyncio.run(WanStreamExtension().get_node_list())
NODES = [*PACK, Given, Shown]
LATENT = ["given", 0]
VIDEO = ["given", 1]
ANYTHING = ["given", 3]
PROMPTS = {"positive": ["given", 2], "negative": ["given", 2]}
_OUTPUTS = ("WanStreamDecodeVideo", "WanStreamSaveVideo")


def graph_around(class_type: str, inputs, *, frames: int):
    """Return a graph with the node "node", which may have links to "given"."""
    given = {"class_type": "Given", "inputs": {"frames": frames}}
    graph = {"given": given, "node": {"class_type": class_type, "inputs": inputs}}
    if class_type not in _OUTPUTS:
        graph["shown"] = {"class_type": "Shown", "inputs": {"value": ["node", 0]}}
    return graph


SETTINGS = {
    "seed": 1,
    "steps": 3,
    "solver": "unipc",
    "schedule": "wan",
    "flow_shift": 5.0,
    "boundary_ratio": 0.875,
    "switch_step": -1,
    "start_step": 0,
    "guidance_high": 5.0,
    "guidance_low": 1.0,
}
"""Inputs of Wan Sampler, apart from links."""


def sampled(ref: ExpertsRef, given, **changes) -> torch.Tensor:
    """Return the latents of Wan Sampler on both prompts and a latent."""
    latent, _ = WanStreamSampler.execute(ref, *given, **{**SETTINGS, **changes}).args
    return latent["samples"]
