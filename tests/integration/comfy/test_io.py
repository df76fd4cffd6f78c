"""The embedded `io` module and folders against ComfyUI's own."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from wanstream.host import io
from wanstream.host.embedded.files import Folders
from wanstream.host.embedded.load_image import LoadImage
from wanstream.host.folders import diffusers_folders, output_file
from wanstream.tests.support.embedded import embedded_host

pytestmark = pytest.mark.comfy

WIDGETS = ["Boolean", "Int", "Float", "String", "Combo"]
SOCKETS = ["Conditioning", "Guider", "Image", "Latent", "Mask", "Model", "Sigmas", "Vae", "Video"]

# Read by both sides.
INPUTS = """[
    io.Boolean.Input("a"),
    io.Boolean.Input("b", default=True, **common),
    io.Int.Input("c"),
    io.Int.Input("d", default=3, min=1, max=9, step=2, control_after_generate=True),
    io.Float.Input("e"),
    io.Float.Input("f", default=0.5, min=0.0, max=1.0, step=0.1),
    io.String.Input("g"),
    io.String.Input("h", multiline=True, default="text", **common),
    io.Combo.Input("i", ["x", "y"]),
    io.Combo.Input("j", ["x"], default="x", upload=io.UploadType.image, **common),
    io.Image.Input("l"),
    io.Latent.Input("m", **common),
    io.Custom("WANSTREAM_X").Input("n", tooltip="tip"),
]"""

NODE = f"""
class Node(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        common = {{"display_name": "name", "optional": True, "tooltip": "tip"}}
        return io.Schema(
            node_id="Node",
            inputs={INPUTS},
            outputs=[
                io.Image.Output(),
                io.Custom("WANSTREAM_X").Output("o", display_name="O", tooltip="t"),
            ],
            hidden=[io.Hidden.unique_id, io.Hidden.prompt],
            is_output_node=True,
        )

    @classmethod
    def execute(cls):
        pass
"""

DESCRIBE = """
import dataclasses, inspect
widgets, sockets = arguments
answer = {
    "arguments": {
        name: list(inspect.signature(getattr(io, name).Input.__init__).parameters)
        for name in widgets
    },
    "sockets": {name: getattr(io, name).io_type for name in sockets},
    "schema": [field.name for field in dataclasses.fields(io.Schema)],
    "hidden": {
        name: getattr(io.Hidden, name).value
        for name in ("unique_id", "prompt", "extra_pnginfo")
    },
    "inputs": Node.INPUT_TYPES(),
    "kinds": Node.RETURN_TYPES,
}
"""


@pytest.fixture(scope="module")
def real(in_comfyui: Callable[..., Any]) -> dict[str, Any]:
    description: dict[str, Any] = in_comfyui(NODE + DESCRIBE, WIDGETS, SOCKETS)
    return description


@pytest.mark.parametrize("widget", WIDGETS)
def test_arguments_are_comfyuis(real: dict[str, Any], widget: str) -> None:
    theirs = real["arguments"][widget][1:]
    ours = inspect.signature(getattr(io, widget).Input).parameters.values()
    by_place = [
        argument.name for argument in ours if argument.kind is argument.POSITIONAL_OR_KEYWORD
    ]
    assert theirs[: len(by_place)] == by_place
    assert {argument.name for argument in ours} <= set(theirs)


def test_types_and_schema_fields_are_comfyuis(real: dict[str, Any]) -> None:
    assert {name: getattr(io, name).io_type for name in SOCKETS} == real["sockets"]
    fields = [field.name for field in dataclasses.fields(io.Schema)]
    assert [name for name in real["schema"] if name in fields] == [
        name for name in fields if name in real["schema"]
    ]
    assert {*fields} - {*real["schema"]} <= {"search_aliases"}, (
        "`search_aliases` leaves that one out"
    )
    assert {member.name: member.value for member in io.Hidden} == real["hidden"]


def test_input_types_are_equal(real: dict[str, Any]) -> None:
    scope: dict[str, Any] = {"io": io}
    exec(NODE, scope)  # noqa: S102 (the same source that ComfyUI was given)
    node = scope["Node"]
    assert json.loads(json.dumps(node.INPUT_TYPES())) == real["inputs"]
    assert [output.io_type for output in node.define_schema().outputs] == real["kinds"]


PREFIXES = [
    "clip",
    "video/clip",
    "video/../clip",
    "./clip",
    "video/",
    "%width%/c_%height%",
    "other",
]
OUTSIDE = ["../clip", "/clip", "a/../../clip"]

SAVE = """
import os
output, prefixes, outside = arguments
def place(prefix):
    folder, name, counter, subfolder, _ = folder_paths.get_save_image_path(
        os.path.normpath(prefix), output, 832, 480
    )
    return [os.path.normpath(folder), f"{name}_{counter:05}_.mp4", subfolder]
def refused(prefix):
    try:
        place(prefix)
    except Exception as error:
        return "not allowed" in str(error)
    return False
answer = [[place(prefix) for prefix in prefixes], [refused(prefix) for prefix in outside]]
"""


def test_files_are_named_and_refused_as_comfyui_does(
    in_comfyui: Callable[..., Any], tmp_path: Path
) -> None:
    for name in (
        "clip_00004_.mp4",
        "video/clip_00001_.png",
        "video/clip_x_.png",
        "832/c_480_00011_.mp4",
        "video_00002_",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    placed, refused = in_comfyui(SAVE, str(tmp_path), PREFIXES, OUTSIDE)
    ours = [output_file(tmp_path, prefix, "mp4", width=832, height=480) for prefix in PREFIXES]
    assert [[str(file.path.parent), file.filename, file.subfolder] for file in ours] == placed
    assert refused == [True] * len(OUTSIDE)
    for prefix in OUTSIDE:
        with pytest.raises(ValueError, match="leaves the folder"):
            output_file(tmp_path, prefix, "mp4", width=832, height=480)


LOAD = """
import inspect
def load(name):
    image, mask = nodes.LoadImage().load_image(name)
    return [image.tolist(), mask.tolist()]
# Newer versions read pictures as videos: small GIFs fail there, and 32-bit greys and JPEGs have
# other values.
by_av = "VideoFromFile" in inspect.getsource(nodes.LoadImage.load_image)
answer = {name: load(name) for name in arguments if not by_av or ".png" in name}
"""


def test_images_are_loaded_as_comfyui_loads_them(
    in_comfyui: Callable[..., Any], base: Path
) -> None:
    names = _write_pictures(base / "input")
    with embedded_host.opened(
        Folders(models=base / "models", output=base / "output", input=base / "input")
    ):
        ours = {
            name: [tensor.tolist() for tensor in LoadImage.execute(name).args] for name in names
        }
    theirs = in_comfyui(LOAD, *names)
    assert len(theirs) >= 4
    for name in theirs:
        if name == "deep.tif":  # these versions cut to 8 bits, ours keeps the rest
            found, expected = (torch.tensor(each[name][0]) * 255 for each in (ours, theirs))
            assert torch.equal((found + 1e-3).floor(), expected.round())
            continue
        assert ours[name] == theirs[name], name


def _write_pictures(folder: Path) -> list[str]:
    """Small pictures, one for every kind with special treatment."""
    colors = Image.effect_noise((6, 4), 90).convert("RGB")
    exif = Image.Exif()
    exif[0x0112] = 8
    colors.save(folder / "plain.png")
    colors.save(folder / "turned.jpg", exif=exif)
    Image.merge("RGBA", (*colors.split(), colors.getchannel(0))).save(folder / "alpha.png")
    colors.quantize(8).save(folder / "palette.png", transparency=2)
    colors.convert("I").point(lambda grey: grey * 200).save(folder / "deep.tif")
    colors.save(
        folder / "frames.gif", save_all=True, append_images=[colors.rotate(180), colors.rotate(90)]
    )
    return [
        "plain.png",
        "turned.jpg",
        "alpha.png",
        "palette.png",
        "deep.tif",
        "frames.gif",
        "plain.png [input]",
    ]


FOLDERS = """
import os
place = folder_paths.get_folder_paths("diffusers")[0]
walked = os.walk(place, followlinks=True)
answer = [os.path.relpath(root, place) for root, _, files in walked if "model_index.json" in files]
"""


def test_pipelines_are_found_where_comfyui_looks(
    in_comfyui: Callable[..., Any], base: Path
) -> None:
    assert in_comfyui(FOLDERS) == list(diffusers_folders(base / "models" / "diffusers")) == ["wan"]
