"""Base directory for a ComfyUI server, with only this pack, the test model and a picture."""

from __future__ import annotations

from pathlib import Path

from ..testing import write_tiny_model
from .thumbnails import landscape

ROOT = Path(__file__).parent.parent
PACK = "WanStream"
"""Name of the pack's folder, which is the title of its section in the template browser."""


def furnish(base: Path) -> None:
    """Put this pack, the test model and a picture into a base directory."""
    for folder in ("custom_nodes", "input", "output"):
        (base / folder).mkdir()
    (base / "custom_nodes" / PACK).symlink_to(ROOT, target_is_directory=True)
    write_tiny_model(base / "models")
    landscape(832, 480).save(base / "input" / "example.png")
