"""Appearance of a shipped workflow on the canvas: group and minimum size of each node, and the note."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .graphs import Prompt, links_of
from .layout import Group, Size
from .model_files import MODEL_FILES, ModelFile

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
