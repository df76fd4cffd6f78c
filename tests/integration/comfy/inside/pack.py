"""Runs in ComfyUI's own Python: this pack named as an installed one would be."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

ROOT = Path(__file__).parents[4]


def load_pack() -> None:
    """Import the pack as `wanstream`, once, whatever the folder's name and location."""
    if "wanstream" in sys.modules:
        return
    spec = spec_from_file_location(
        "wanstream", ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
    )
    module = module_from_spec(spec)
    sys.modules["wanstream"] = module
    spec.loader.exec_module(module)
