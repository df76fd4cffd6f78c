"""Parts added to exported workflows by ComfyUI's frontend, and settings similar to them."""

import pytest

from wanstream.tests.support.host.embedded import run_workflow
from wanstream.tests.support.host.shipped import node

from .test_validate import GOOD, changed, validate

__all__ = ["validate"]


WIDGETS = {
    "choose file to upload": "image",
    "image_upload": True,
    "videopreview": {"hidden": False, "paused": False, "params": {}},
    "$$comfy_animation_preview": 3,
    "control_after_generate": "randomize",
    "control_before_generate": "fixed",
    "speak_and_recognation": {"__value__": [False, True]},
    "__value__": [False, True],
    "Refresh": None,
    "➕ Add Lora": "",
}
SETTINGS = [
    ({"scael": "2.0"}, "did you mean scale"),
    ({"sc-ale": None}, "did you mean scale"),
    ({"zzz": 1}, "zzz: it has a, b, scale"),
    ({"prefix": "x"}, "prefix: it has a, b"),
    ({"image_preview": ["1", 0]}, "image_preview: it has"),
]


@pytest.mark.parametrize("name", WIDGETS)
def test_widget_of_the_frontend_is_ignored_with_a_note(validate, name):
    verdict = validate(changed("2", **{name: WIDGETS[name]}))
    assert (verdict.error, verdict.node_errors) == (None, {})
    assert verdict.notes == (f"node 2 (Add): ignored: {name} is a widget of the frontend",)


@pytest.mark.parametrize(("extra", "reason"), SETTINGS)
def test_possible_setting_stays_refused(validate, extra, reason):
    (fault,) = validate(changed("2", **extra)).node_errors["2"]["errors"]
    assert fault["type"] == "unknown_input"
    assert reason in fault["details"]


IDLE = {
    "note": {"n": node("Note")},
    "preview": {"n": node("PreviewImage", images=["2", 0])},
    "text": {"n": node("ShowText|pysssss", text=["2", 0])},
    "primitive": {"n": node("PrimitiveInt", value=3)},
    "a loader that nothing reads": {"n": node("CLIPLoader", clip_name="x", type="wan")},
    "a chain": {"m": node("VAEDecode", samples=["1", 0], vae=["l", 0]), "l": node("VAELoader"),
                "n": node("PreviewImage", images=["m", 0])},
}  # fmt: skip
NEEDED = {
    "saved": ({"n": node("SaveImage", images=["2", 0])}, "SaveImage"),
    "combined": ({"n": node("VHS_VideoCombine", images=["2", 0])}, "VHS_VideoCombine"),
    "read by ours": (
        {"2": node("Add", a=["n", 0], b=4), "n": node("PrimitiveInt", value=3)},
        "PrimitiveInt",
    ),
    "mistyped": ({"n": node("Number_", value=3)}, "Did you mean Number"),
    "above a saving node": (
        {"n": node("PreviewImage", images=["2", 0]), "m": node("SaveX", a=["n", 0])},
        "Preview",
    ),
}


@pytest.mark.parametrize("more", IDLE.values(), ids=IDLE)
def test_foreign_node_that_no_result_reads_is_skipped(validate, nodes, tmp_path, more):
    places = {"models": tmp_path, "input_dir": tmp_path, "output": tmp_path}
    expected = run_workflow(GOOD, nodes=nodes.all, **places)
    verdict = validate({**GOOD, **more})
    assert len(verdict.notes) == len(more)
    assert all("skipped" in note for note in verdict.notes)
    found = run_workflow({**GOOD, **more}, nodes=nodes.all, **places)
    assert found.outputs == expected.outputs


@pytest.mark.parametrize(("more", "reason"), NEEDED.values(), ids=NEEDED)
def test_foreign_node_that_may_be_wanted_is_refused(validate, more, reason):
    verdict = validate({**GOOD, **more})
    assert verdict.error is not None
    assert verdict.error["type"] == "missing_node_type"
    assert reason in verdict.error["message"]
