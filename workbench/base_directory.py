"""A base directory for a ComfyUI server: this pack, the sample model and a picture, and nothing else."""

from __future__ import annotations

from pathlib import Path

from PIL import Image, ImageDraw

from ..cli.sample_model import write_sample_model

ROOT = Path(__file__).parent.parent
PACK = "WanStream"
"""The name of the pack's folder, and so of its section in the template browser."""


def furnish(base: Path) -> None:
    """Put this pack, the sample model and a picture into a base directory."""
    for folder in ("custom_nodes", "input", "output"):
        (base / folder).mkdir()
    (base / "custom_nodes" / PACK).symlink_to(ROOT, target_is_directory=True)
    write_sample_model(base / "models")
    _landscape(832, 480).save(base / "input" / "example.png")


def _landscape(width: int, height: int) -> Image.Image:
    """A sunset over the sea: the start image that the pictures show."""
    picture = Image.new("RGB", (width, height))
    draw = ImageDraw.Draw(picture)
    horizon = height * 3 // 5
    for y in range(height):
        part = y / horizon if y < horizon else (height - y) / (height - horizon) * 0.7
        draw.line([(0, y), (width, y)], fill=(int(40 + 200 * part), int(60 + 90 * part), int(120 - 30 * part)))
    radius = height // 8
    sun = (width // 2 - radius, horizon - radius, width // 2 + radius, horizon + radius)
    draw.pieslice(sun, 180, 360, fill=(255, 226, 150))
    return picture
