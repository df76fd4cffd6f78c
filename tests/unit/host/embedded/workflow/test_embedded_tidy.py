"""Parts added to exported workflows by ComfyUI's frontend, and settings similar to them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from wanstream.host.embedded.workflow.validate import Verdict
from wanstream.tests.support.embedded import run_workflow, validate_workflow

from .test_embedded_validate import GOOD


@pytest.fixture
def validate(nodes: SimpleNamespace, tmp_path: Path) -> Callable[[Any], Verdict]:
    return lambda prompt: validate_workflow(prompt, nodes.all, models=tmp_path, input_dir=tmp_path)


WIDGETS: dict[str, Any] = {
    "upload": "image",
    "choose file to upload": "image",
    "choose video to upload": "image",
    "image_upload": True,
    "image_preview": None,
    "videopreview": {"hidden": False, "paused": False, "params": {}},
    "$$canvas-image-preview": "",
    "$$comfy_animation_preview": 3,
    "control_after_generate": "randomize",
    "control_before_generate": "fixed",
    "control after generate": "randomize",
    "speak_and_recognation": {"__value__": [False, True]},
    "__value__": [False, True],
    "audioUI": "",
    "Refresh": None,
    "➕ Add Lora": "",
}
SETTINGS: dict[str, tuple[Any, str]] = {
    "mistyped": ({"scael": "2.0"}, "did you mean scale"),
    "capitals": ({"Scale": "2.0"}, "did you mean scale"),
    "a plural": ({"modes": "odd"}, "did you mean mode"),
    "a hyphen": ({"sc-ale": None}, "did you mean scale"),
    "a number": ({"zzz": 1}, "zzz: it has a, b, scale"),
    "a setting of another node": ({"prefix": "x"}, "prefix: it has a, b"),
    "a link": ({"image_preview": ["1", 0]}, "image_preview: it has"),
}


@pytest.mark.parametrize("name", WIDGETS)
def test_a_widget_of_the_frontend_is_ignored_with_a_note(
    validate: Callable[[Any], Verdict], name: str
) -> None:
    prompt = copy.deepcopy(GOOD)
    prompt["2"]["inputs"][name] = WIDGETS[name]
    verdict = validate(prompt)
    assert (verdict.error, verdict.node_errors) == (None, {})
    assert verdict.notes == (f"node 2 (Add): ignored: {name} is a widget of the frontend",)


@pytest.mark.parametrize(("extra", "reason"), SETTINGS.values(), ids=SETTINGS)
def test_what_may_be_a_setting_stays_refused(
    validate: Callable[[Any], Verdict], extra: dict[str, Any], reason: str
) -> None:
    prompt = copy.deepcopy(GOOD)
    prompt["2"]["inputs"] |= extra
    (fault,) = validate(prompt).node_errors["2"]["errors"]
    assert fault["type"] == "unknown_input"
    assert reason in fault["details"]


def _node(class_type: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": class_type, "inputs": inputs}


IDLE = {
    "note": {"n": _node("Note")},
    "markdown": {"n": _node("MarkdownNote", text="# hello")},
    "preview": {"n": _node("PreviewImage", images=["2", 0])},
    "any": {"n": _node("PreviewAny", source=["2", 0])},
    "text": {"n": _node("ShowText|pysssss", text=["2", 0])},
    "primitive": {"n": _node("PrimitiveInt", value=3)},
    "a loader that nothing reads": {"n": _node("CLIPLoader", clip_name="x", type="wan")},
    "a chain": {"m": _node("VAEDecode", samples=["1", 0], vae=["l", 0]), "l": _node("VAELoader"),
                "n": _node("PreviewImage", images=["m", 0])},
}  # fmt: skip
NEEDED = {
    "saved": ({"n": _node("SaveImage", images=["2", 0])}, "SaveImage"),
    "combined": ({"n": _node("VHS_VideoCombine", images=["2", 0])}, "VHS_VideoCombine"),
    "read by ours": (
        {"2": _node("Add", a=["n", 0], b=4), "n": _node("PrimitiveInt", value=3)},
        "PrimitiveInt",
    ),
    "mistyped": ({"n": _node("Number_", value=3)}, "Did you mean Number"),
    "above a saving node": (
        {"n": _node("PreviewImage", images=["2", 0]), "m": _node("SaveX", a=["n", 0])},
        "Preview",
    ),
}


@pytest.mark.parametrize("more", IDLE.values(), ids=IDLE)
def test_a_foreign_node_that_no_result_depends_on_is_skipped(
    nodes: SimpleNamespace, tmp_path: Path, more: dict[str, Any]
) -> None:
    folders: dict[str, Any] = {
        "nodes": nodes.all,
        "models": tmp_path,
        "input_dir": tmp_path,
        "output": tmp_path,
    }
    expected = run_workflow(GOOD, **folders)
    verdict = validate_workflow({**GOOD, **more}, nodes.all, models=tmp_path, input_dir=tmp_path)
    assert len(verdict.notes) == len(more)
    assert all("skipped" in note for note in verdict.notes)
    assert run_workflow({**GOOD, **more}, **folders).outputs == expected.outputs


@pytest.mark.parametrize(("more", "reason"), NEEDED.values(), ids=NEEDED)
def test_a_foreign_node_that_may_be_wanted_is_refused(
    validate: Callable[[Any], Verdict], more: dict[str, Any], reason: str
) -> None:
    verdict = validate({**GOOD, **more})
    assert verdict.error is not None
    assert verdict.error["type"] == "missing_node_type"
    assert reason in verdict.error["message"]
