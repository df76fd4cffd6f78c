"""Messages begin with the reason and the file names. Folders come last."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from wanstream.host.embedded.run import NodeFailedError
from wanstream.host.error_names import plainly_named
from wanstream.host.error_texts import folders_last
from wanstream.offload.formats import CheckpointFileError

FIRST = 120
"""Characters shown by ComfyUI's panel in any case."""
REASON = "is of another model: choose the one of Wan2.2"


PACKAGES = ("schema", "plan", "devices", "telemetry", "bench", "offload", "wan", "sampling")


def _error_classes() -> Iterator[type[Exception]]:
    """Yield all project exceptions made from one text, or from a path and a reason."""
    for package in (*PACKAGES, "host.folders"):
        module = importlib.import_module(f"wanstream.{package}")
        below = pkgutil.walk_packages(getattr(module, "__path__", ()), f"{module.__name__}.")
        for name in [module.__name__, *(each.name for each in below)]:
            for each in vars(importlib.import_module(name)).values():
                is_error = isinstance(each, type) and issubclass(each, ValueError | OSError)
                if is_error and "wanstream" in each.__module__:
                    yield each


def _made(kind: type[Exception], path: Path) -> Exception | None:
    for arguments in ((path, REASON), (f"{path}: {REASON}",)):
        try:
            error = kind(*arguments)
        except (TypeError, AttributeError):
            continue
        if str(path) in str(error) and REASON in str(error):
            return error
    return None


PLACES = ["models/diffusion_models", "My Models/wan 2.2", "模型/二", "gone/a/b/c/d", "gone (1)/x"]


@pytest.mark.parametrize("place", PLACES)
def test_error_names_the_file_first_and_the_folder_last(tmp_path, place):
    folder = tmp_path / place
    if not place.startswith("gone"):
        folder.mkdir(parents=True)
    path = folder / "wan2.2_i2v_low_noise_14B_fp8_scaled.safetensors"
    checked = 0
    for kind in {*_error_classes()}:
        error = _made(kind, path)
        if error is None:
            continue
        checked += 1
        in_node = str(NodeFailedError("experts", "WanStreamExperts", error))

        @plainly_named
        def fails(error: Exception = error) -> None:
            raise error

        with pytest.raises(kind) as raised:
            fails()
        for text in (str(raised.value), in_node):
            first, _, last = text.rpartition("\n")
            assert path.name in first[:FIRST]
            assert str(tmp_path) not in first, text
            assert REASON in first
            assert last.startswith("folder: ")
            assert f"{last.removeprefix('folder: ')}/" in f"{folder}/"
    assert checked > 20, "the classes are no longer found"


UNCHANGED = [
    "70 is not a multiple of 16: use 64",
    "see https://huggingface.co/a/b/c.safetensors",
    "wan22/high.safetensors: is truncated",
    "1/2, 3 / 4 and and/or, 24/7.5",
    "./a/b.c, ~/a/b.c and *.py/x",
    'path_map is a list of lines like "/models -> /mnt/models"',
    "GET /wanstream/runs",
    "no room. The latent is kept in /out/latents/x.latent: load it",
    "it failed\n/a/b/c.py, line 7",
    "/x.safetensors: is truncated",
    "/nowhere/prompt answers with 404: see v1.2",
    "/nowhere/prompt has no answer, see v1.2 (http://host/view?file=/no/such/x.png) and "
    "docs/api.md",
]


def test_texts_without_folders_stay_as_they_are():
    assert [folders_last(text) for text in UNCHANGED] == UNCHANGED


def test_several_paths():
    changed = {
        "'/no/such/x.sft' is gone": "'x.sft' is gone\nfolder: /no/such",
        "C:\\models\\wan\\x.sft: is cut": "x.sft: is cut\nfolder: C:\\models\\wan",
        "/a/b/x.sft, /a/b/y.sft and /c/z.sft": "x.sft, y.sft and z.sft\nfolders: /a/b, /c",
        "/no/such/my x (1).sft: bad": "my x (1).sft: bad\nfolder: /no/such",
        "/a/x.sft: bad\nmore of it": "x.sft: bad\nmore of it\nfolder: /a",
    }
    assert {text: folders_last(text) for text in changed} == changed


def test_long_text_costs_little(tmp_path):
    error = CheckpointFileError(tmp_path / "x.sft", "/".join("ab" * 5000))
    assert folders_last(str(error)).startswith("x.sft: a/b/")
