"""Layout for the shipped workflows on the canvas.

Nodes in a group are placed below each other. A node with a source in the same group is placed to
the right of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from .graphs import Prompt, links_of
from .model_files import MODEL_FILES, ModelFile

GAP = 50.0
PADDING = 20.0
BADGE = 32.0
"""Space above each node for a badge, which does not shrink when the canvas is zoomed out."""
TITLE = 30.0
"""Height of a node's title bar, above the node position."""
GROUP_TITLE = 36.0


class Size(NamedTuple):
    """Width and height of a node without title bar, in canvas pixels."""

    width: float
    height: float


class Box(NamedTuple):
    """Rectangle on the canvas."""

    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True, kw_only=True)
class Group:
    """Titled frame. `ranks` are node ids, in sub-columns from left to right."""

    title: str
    ranks: Sequence[Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Positions for all nodes (below their title bars), and group frames by title."""

    nodes: Mapping[str, tuple[float, float]]
    frames: Mapping[str, Box]


def place(columns: Sequence[Sequence[Group]], sizes: Mapping[str, Size]) -> Layout:
    """Stack the groups in each column, equally wide, and put columns side by side from (0, 0)."""
    nodes: dict[str, tuple[float, float]] = {}
    frames: dict[str, Box] = {}
    left = 0.0
    for column in columns:
        top = 0.0
        right = left
        for group in column:
            beside = left + PADDING
            bottom = top
            for rank in group.ranks:
                below = top + GROUP_TITLE
                for node in rank:
                    nodes[node] = (beside, below + BADGE + TITLE)
                    below += BADGE + TITLE + sizes[node].height
                beside += max(sizes[node].width for node in rank) + GAP
                bottom = max(bottom, below)
            # The last rank has added one gap too many.
            right = max(right, beside - GAP + PADDING)
            # The width follows below, when the widest group in the column is placed.
            frames[group.title] = Box(left, top, 0, bottom + PADDING - top)
            top = bottom + PADDING + GAP
        frames |= {
            group.title: frames[group.title]._replace(width=right - left) for group in column
        }
        left = right + GAP
    return Layout(nodes=nodes, frames=frames)


NOTES = Path(__file__).parent / "notes"
NOTE_TYPE = "MarkdownNote"


NOTE = "Read me"


class Place(NamedTuple):
    """Place for a group's nodes: column, minimum width, and minimum height by class."""

    column: int
    width: float
    heights: Mapping[str, float]


GROUPS = {
    NOTE: Place(0, 470, {NOTE_TYPE: 320}),
    "Models": Place(
        0,
        470,
        dict.fromkeys(
            ["WanStreamExperts", "WanStreamOneExpert", "WanStreamLora", "CLIPLoader", "VAELoader"],
            0,
        )
        | {"WanStreamLayerwise": 0, "WanStreamBlockSwap": 0, "WanStreamLoadDiffusionModel": 0}
        | {
            "CheckpointLoaderSimple": 0,
            "WanStreamStreamModel": 0,
            "WanStreamJoinExperts": 0,
            "WanStreamLoadCheckpoint": 0,
            "WanStreamLoadCLIP": 0,
            "LoraLoaderModelOnly": 0,
            "DualCLIPLoader": 0,
        }
        | {"CLIPVisionLoader": 0, "LTXAVTextEncoderLoader": 0, "LTXVAudioVAELoader": 0},
    ),
    "Prompts": Place(
        1,
        400,
        {
            "WanStreamTextEncode": 260,
            "CLIPTextEncode": 130,
            "FluxGuidance": 0,
            "ConditioningZeroOut": 0,
        },
    ),
    "Size": Place(
        1,
        400,
        dict.fromkeys(["WanStreamEmptyLatent", "EmptyHunyuanLatentVideo", "EmptySD3LatentImage"], 0)
        | {"EmptyLTXVLatentVideo": 0, "LTXVEmptyLatentAudio": 0, "LTXVConcatAVLatent": 0},
    ),
    "Pictures": Place(1, 400, {"LoadImage": 340, "LoadVideo": 340, "GetVideoComponents": 0}),
    "Start": Place(
        2,
        320,
        {"WanStreamFunControl": 0, "WanStreamBernini": 0}
        | {
            "WanStreamImageToVideo": 0,
            "CLIPVisionEncode": 0,
            "WanVaceToVideo": 0,
            "WanAnimateToVideo": 0,
        }
        | {"LTXVConditioning": 0},
    ),
    "Workers": Place(2, 320, {"WanStreamWorkers": 0}),
    "Sampling": Place(
        3,
        320,
        dict.fromkeys(
            [
                "RandomNoise",
                "KSamplerSelect",
                "WanStreamSigmas",
                "WanStreamGuider",
                "WanStreamGuidance",
            ],
            0,
        )
        | {
            "WanStreamPreview": 0,
            "SamplerCustomAdvanced": 0,
            "WanStreamSampler": 0,
            "ModelSamplingSD3": 0,
            "ModelSamplingAuraFlow": 0,
        }
        | {
            "KSampler": 0,
            "KSamplerAdvanced": 0,
            "LTXVScheduler": 0,
            "CFGGuider": 0,
            "WanStreamContinueVideo": 0,
        },
    ),
    "Video": Place(
        4,
        320,
        {
            "WanStreamVAEDecode": 0,
            "VAEDecode": 0,
            "CreateVideo": 0,
            "WanStreamSaveVideo": 260,
            "SaveVideo": 260,
        }
        | {
            "TrimVideoLatent": 0,
            "LTXVSeparateAVLatent": 0,
            "VAEDecodeTiled": 0,
            "LTXVAudioVAEDecode": 0,
        }
        | {
            "SaveImage": 320,
            "WanStreamJoinClips": 0,
            "WanStreamSaveLatent": 0,
            "WanStreamDecodeVideo": 260,
        },
    ),
    "Measuring": Place(4, 520, {"WanStreamBenchmark": 640}),
}
"""Every possible group in a shipped workflow, by title."""
GROUP_OF = {class_type: title for title, place in GROUPS.items() for class_type in place.heights}
"""Group by class. A class missing here is a KeyError in the builder."""

CHAINS = {
    *(
        "WanStreamContinueVideo",
        "WanStreamLora",
        "LoraLoaderModelOnly",
        "WanStreamLoadDiffusionModel",
        "WanStreamStreamModel",
    ),
    *(
        "GetVideoComponents",
        "LTXVConcatAVLatent",
        "FluxGuidance",
        "ConditioningZeroOut",
        "TrimVideoLatent",
        "SaveImage",
    ),
    *(
        "VAEDecode",
        "VAEDecodeTiled",
        "LTXVAudioVAEDecode",
        "CreateVideo",
        "WanStreamSaveVideo",
        "SaveVideo",
    ),
}
"""Classes placed below their source, instead of to the right, within a group."""


def columns(prompt: Prompt) -> list[list[Group]]:
    """Return a graph's groups by column, left to right, with nodes in file order."""
    groups: dict[str, list[list[str]]] = {}
    ranks: dict[str, int] = {}
    for node_id, node in prompt.items():
        title = GROUP_OF[node["class_type"]]
        sources = [
            source
            for source in links_of(node).values()
            if GROUP_OF[prompt[source]["class_type"]] == title
        ]
        below = node["class_type"] in CHAINS
        # Sources come before this node in the file, so they have a rank.
        ranks[node_id] = rank = max((ranks[source] + (not below) for source in sources), default=0)
        of_group = groups.setdefault(title, [])
        # Lists are added for all ranks up to this one, because a lower rank may still be empty.
        of_group += [[] for _ in range(len(of_group), rank + 1)]
        of_group[rank].append(node_id)
    by_column: dict[int, list[Group]] = {}
    for title, nodes in groups.items():
        by_column.setdefault(GROUPS[title].column, []).append(Group(title=title, ranks=nodes))
    return [by_column[column] for column in sorted(by_column)]


def least_size(class_type: str) -> Size:
    """Return the minimum size for a node with this class."""
    place = GROUPS[GROUP_OF[class_type]]
    return Size(place.width, place.heights[class_type])


def models_of(node: Mapping[str, Any]) -> list[ModelFile]:
    """Return the model files named by a node's widgets."""
    values = [value for value in node["inputs"].values() if isinstance(value, str)]
    return [MODEL_FILES[value] for value in values if value in MODEL_FILES]


def note(stem: str, prompt: Prompt) -> str:
    """Return a workflow's note: the text in `notes/`, then links to model files."""
    text = (NOTES / f"{stem}.md").read_text(encoding="utf-8").rstrip()
    return "\n".join([text, "", "### Files, below ComfyUI/models/", "", *_file_lines(prompt), ""])


def _file_lines(prompt: Prompt) -> Iterator[str]:
    files = dict.fromkeys(file for node in prompt.values() for file in models_of(node))
    for file in files:
        yield f"- **{file.directory}/** [{file.name}]({file.url})"
