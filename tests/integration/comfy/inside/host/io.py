"""Runs in ComfyUI's own Python: the embedded host's files and pictures against ComfyUI's own.

`test_server.py` compares the `io` module by the nodes that it describes.
"""

from __future__ import annotations

import inspect
import os
from functools import partial
from pathlib import Path

import folder_paths
import torch
from PIL import Image

import nodes
from wanstream.host.embedded.files import Folders
from wanstream.host.embedded.load_image import LoadImage
from wanstream.host.folders import diffusers_folders, output_file
from wanstream.tests.support.host.embedded import embedded_host

from ..checks import refused


def check_output_files(folder):
    """They are named and refused as ComfyUI does."""
    output = folder / "saved"
    for name in (
        "clip_00004_.mp4",
        "video/clip_00001_.png",
        "video/clip_x_.png",
        "832/c_480_00011_.mp4",
        "video_00002_",
    ):
        (output / name).parent.mkdir(parents=True, exist_ok=True)
        (output / name).touch()

    def theirs(prefix: str) -> list[str]:
        place = folder_paths.get_save_image_path
        found = place(os.path.normpath(prefix), str(output), 832, 480)
        directory, name, counter, subfolder, _ = found
        return [os.path.normpath(directory), f"{name}_{counter:05}_.mp4", subfolder]

    def ours(prefix: str) -> list[str]:
        file = output_file(output, prefix, "mp4", width=832, height=480)
        return [str(file.path.parent), file.filename, file.subfolder]

    more = ["./clip", "video/", "%width%/c_%height%", "other"]
    for prefix in ("clip", "video/clip", "video/../clip", *more):
        assert ours(prefix) == theirs(prefix)
    for prefix in ("../clip", "/clip", "a/../../clip"):
        refused(partial(theirs, prefix), "not allowed", kind=Exception)
        refused(partial(ours, prefix), "leaves the folder")


def check_loaded_images(folder):
    """Small pictures, one for every kind with special treatment."""
    given = Path(folder_paths.get_input_directory())
    colors = Image.effect_noise((6, 4), 90).convert("RGB")
    exif = Image.Exif()
    exif[0x0112] = 8
    colors.save(given / "plain.png")
    colors.save(given / "turned.jpg", exif=exif)
    Image.merge("RGBA", (*colors.split(), colors.getchannel(0))).save(given / "alpha.png")
    colors.quantize(8).save(given / "palette.png", transparency=2)
    colors.convert("I").point(lambda grey: grey * 200).save(given / "deep.tif")
    turned = [colors.rotate(180), colors.rotate(90)]
    colors.save(given / "frames.gif", save_all=True, append_images=turned)
    names = ["plain.png", "alpha.png", "palette.png", "plain.png [input]"]
    # Newer versions read pictures as videos: small GIFs fail there, and 32-bit greys and JPEGs have
    # other values.
    if "VideoFromFile" not in inspect.getsource(nodes.LoadImage.load_image):
        names += ["turned.jpg", "deep.tif", "frames.gif"]
    with embedded_host.opened(Folders(models=folder, output=folder, input=given)):
        found = {name: LoadImage.execute(name).args for name in names}
    for name in names:
        expected = nodes.LoadImage().load_image(name)
        if name == "deep.tif":  # these versions cut to 8 bits, ours keeps the rest
            image, cut = (each[0] * 255 for each in (found[name], expected))
            assert torch.equal((image + 1e-3).floor(), cut.round())
        else:
            assert all(map(torch.equal, found[name], expected)), name


def check_pipelines(_):
    place = folder_paths.get_folder_paths("diffusers")[0]
    walked = os.walk(place, followlinks=True)
    found = [os.path.relpath(at, place) for at, _, files in walked if "model_index.json" in files]
    assert "wan" in found
    assert sorted(diffusers_folders(Path(place))) == sorted(found)
