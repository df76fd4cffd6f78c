"""Layout of the shipped workflows on the canvas.

The nodes of a group are placed below each other; a node with a source in the same group is placed to its right.
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
"""Space above each node for its badge, which does not shrink when the canvas is zoomed out."""
TITLE = 30.0
"""Height of a node's title bar, which is above its position."""
GROUP_TITLE = 36.0


class Size(NamedTuple):
    """Width and height of a node without its title bar, in pixels of the canvas."""

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
    """Titled frame; `ranks` are the ids of its nodes, in sub-columns from left to right."""

    title: str
    ranks: Sequence[Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Positions of all nodes (below their title bars), and the frames of the groups by title."""

    nodes: Mapping[str, tuple[float, float]]
    frames: Mapping[str, Box]


def place(columns: Sequence[Sequence[Group]], sizes: Mapping[str, Size]) -> Layout:
    """Put the groups of each column below each other and the columns side by side, from (0, 0)."""
    nodes: dict[str, tuple[float, float]] = {}
    frames: dict[str, Box] = {}
    left = 0.0
    for column in columns:
        top = 0.0
        for group in column:
            placed = _inside(group, sizes, left + PADDING, top + GROUP_TITLE)
            nodes |= placed
            right = max(placed[node][0] + sizes[node].width for node in placed)
            bottom = max(placed[node][1] + sizes[node].height for node in placed)
            frames[group.title] = Box(left, top, right + PADDING - left, bottom + PADDING - top)
            top = bottom + PADDING + GAP
        left = max(frames[group.title].x + frames[group.title].width for group in column) + GAP
        _widen(column, frames, left - GAP)
    return Layout(nodes=nodes, frames=frames)


def _inside(group: Group, sizes: Mapping[str, Size], left: float, top: float) -> dict[str, tuple[float, float]]:
    """Return the positions of a group's nodes, starting at (left, top) within the frame."""
    placed = {}
    for rank in group.ranks:
        below = top
        for node in rank:
            placed[node] = (left, below + BADGE + TITLE)
            below += BADGE + TITLE + sizes[node].height
        left += max(sizes[node].width for node in rank) + GAP
    return placed


def _widen(column: Sequence[Group], frames: dict[str, Box], right: float) -> None:
    """Make all frames of a column equally wide."""
    for group in column:
        frame = frames[group.title]
        frames[group.title] = frame._replace(width=right - frame.x)


NOTES = Path(__file__).parent / "notes"
NOTE_TYPE = "MarkdownNote"


class Place(NamedTuple):
    """Column and group of a node, and the minimum size that shows its content."""

    column: int
    group: str
    size: Size = Size(0, 0)


NOTE, MODELS, PROMPTS, SIZE, PICTURES, START, WORKERS, SAMPLING, VIDEO, MEASURING = (
    *("Read me", "Models", "Prompts", "Size", "Pictures", "Start", "Workers", "Sampling", "Video", "Measuring"),
)
WIDE, NARROW = Size(470, 0), Size(320, 0)

PLACES = {
    NOTE_TYPE: Place(0, NOTE, Size(470, 320)),
    "WanStreamExperts": Place(0, MODELS, WIDE),
    "WanStreamOneExpert": Place(0, MODELS, WIDE),
    "WanStreamLora": Place(0, MODELS, WIDE),
    "WanStreamLayerwise": Place(0, MODELS, WIDE),
    "WanStreamBlockSwap": Place(0, MODELS, WIDE),
    "CLIPLoader": Place(0, MODELS, WIDE),
    "VAELoader": Place(0, MODELS, WIDE),
    "WanStreamTextEncode": Place(1, PROMPTS, Size(400, 260)),
    "CLIPTextEncode": Place(1, PROMPTS, Size(400, 130)),
    "WanStreamEmptyLatent": Place(1, SIZE, Size(400, 0)),
    "EmptyHunyuanLatentVideo": Place(1, SIZE, Size(400, 0)),
    "LoadImage": Place(1, PICTURES, Size(400, 340)),
    "WanStreamImageToVideo": Place(2, START, NARROW),
    "WanStreamWorkers": Place(2, WORKERS, NARROW),
    "RandomNoise": Place(3, SAMPLING, NARROW),
    "KSamplerSelect": Place(3, SAMPLING, NARROW),
    "WanStreamSigmas": Place(3, SAMPLING, NARROW),
    "WanStreamGuider": Place(3, SAMPLING, NARROW),
    "SamplerCustomAdvanced": Place(3, SAMPLING, NARROW),
    "WanStreamSampler": Place(3, SAMPLING, NARROW),
    "WanStreamVAEDecode": Place(4, VIDEO, NARROW),
    "VAEDecode": Place(4, VIDEO, NARROW),
    "CreateVideo": Place(4, VIDEO, NARROW),
    "WanStreamSaveVideo": Place(4, VIDEO, Size(320, 260)),
    "SaveVideo": Place(4, VIDEO, Size(320, 260)),
    "WanStreamBenchmark": Place(4, MEASURING, Size(520, 640)),
}
"""Every class that a shipped workflow may use; one that is missing here is a KeyError of the builder."""

CHAINS = {"WanStreamLora", "VAEDecode", "CreateVideo", "WanStreamSaveVideo", "SaveVideo"}
"""Classes that are placed below their source, instead of to its right, within a group."""


def columns(prompt: Prompt) -> list[list[Group]]:
    """Return the groups of a graph by column from left to right, with nodes in the order of the file."""
    groups: dict[Place, list[list[str]]] = {}
    ranks: dict[str, int] = {}
    for node_id, node in prompt.items():
        place = _place(node)
        mates = [ranks[source] for source in links_of(node).values() if _place(prompt[source]) == place]
        rank = max(mates, default=-1) + (node["class_type"] not in CHAINS) if mates else 0
        ranks[node_id] = rank
        of_group = groups.setdefault(place, [])
        of_group += [[] for _ in range(len(of_group), rank + 1)]
        of_group[rank].append(node_id)
    by_column: dict[int, list[Group]] = {}
    for place, nodes in groups.items():
        by_column.setdefault(place.column, []).append(Group(title=place.group, ranks=nodes))
    return [by_column[column] for column in sorted(by_column)]


def _place(node: Mapping[str, Any]) -> Place:
    """Return column and group without the size, which differs within a group."""
    return PLACES[node["class_type"]]._replace(size=Size(0, 0))


def least_size(class_type: str) -> Size:
    """Return the minimum size of a node of that class."""
    return PLACES[class_type].size


def models_of(node: Mapping[str, Any]) -> list[ModelFile]:
    """Return the model files that a node's widgets name."""
    values = [value for value in node["inputs"].values() if isinstance(value, str)]
    return [MODEL_FILES[value] for value in values if value in MODEL_FILES]


def note(stem: str, prompt: Prompt) -> str:
    """Return the text of a workflow's note: its file in `notes/`, then the links of its model files."""
    text = (NOTES / f"{stem}.md").read_text(encoding="utf-8").rstrip()
    return "\n".join([text, "", "### Files, below ComfyUI/models/", "", *_file_lines(prompt), ""])


def _file_lines(prompt: Prompt) -> Iterator[str]:
    files = dict.fromkeys(file for node in prompt.values() for file in models_of(node))
    for file in files:
        yield f"- **{file.directory}/** [{file.name}]({file.url})"
