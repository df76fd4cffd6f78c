"""Model lists in ComfyUI: the usual lists without unreadable files, plus GGUF files for experts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.comfy

NAMES = """
from pathlib import Path
from installed_pack import load_pack

load_pack()
models = Path(arguments[0])
from wanstream.host import current_host
host = current_host()

def names():
    return {
        kind: host.files.model_names(kind)
        for kind in ("diffusion_models", "vae", "loras", "text_encoders")
    }

for kind in ("diffusion_models", "vae", "loras", "text_encoders"):
    folder_paths.folder_names_and_paths[kind][0][:] = [
        str(models / kind),
        str(models / f"more {kind}"),
    ]
before = names()
for kind in ("more diffusion_models", "vae"):
    (models / kind / "later").mkdir(parents=True)
    (models / kind / "later" / "new.gguf").touch()
answer = [
    before,
    names(),
    str(host.files.model_path("later/new.gguf", "diffusion_models")),
    type(host).__name__,
]
"""


def test_gguf_is_listed_beside_what_comfyui_lists(
    in_comfyui: Callable[..., Any], tmp_path: Path
) -> None:
    for kind in ("diffusion_models", "vae", "loras", "text_encoders"):
        (tmp_path / kind / "sub").mkdir(parents=True)
        for name in ("a.safetensors", "b.gguf", "sub/c.gguf", "d.pt"):
            (tmp_path / kind / name).touch()
    before, after, place, host = in_comfyui(NAMES, str(tmp_path))
    assert host == "ComfyHost"
    listed = ["a.safetensors", "b.gguf", "sub/c.gguf"]
    others = {"text_encoders": listed, **{kind: ["a.safetensors"] for kind in ("vae", "loras")}}
    assert before == {"diffusion_models": listed, **others}
    assert after == {
        "diffusion_models": ["a.safetensors", "b.gguf", "later/new.gguf", "sub/c.gguf"],
        **others,
    }
    assert place == str(tmp_path / "more diffusion_models" / "later" / "new.gguf")
