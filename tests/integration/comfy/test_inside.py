"""Modules of checks in `inside`, each in a process of ComfyUI's own Python."""

import pytest

from wanstream.tests.integration.comfy.servers import HERE

pytestmark = [pytest.mark.comfy, pytest.mark.timeout(1800)]

MODULES = sorted(f"{path.parent.name}.{path.stem}" for path in HERE.glob("inside/*/*.py"))
OUTCOMES = """
from wanstream.tests.integration.comfy.inside import checks
answer = checks.outcomes(*arguments)
"""


@pytest.fixture
def experts(tmp_path, tiny_expert_file):
    """A folder with pairs of text-to-video experts, image-to-video experts, and deeper ones."""
    deep = {"layers": 12, "heads": 1, "ffn_dim": 256}
    for kind, shape in (("t2v", {}), ("i2v", {"in_channels": 36}), ("deep", deep)):
        for seed, name in enumerate(("high", "low"), start=1):
            file = tmp_path / f"{kind}_{name}.safetensors"
            file.symlink_to(tiny_expert_file(seed=seed, **shape))
    return tmp_path


@pytest.mark.parametrize("module", MODULES)
def test_checks_of_a_module(in_comfyui, experts, module):
    outcomes = in_comfyui(OUTCOMES, module, str(experts), seconds=1800)
    assert outcomes
    skipped = {name for name, text in outcomes.items() if text.startswith("skipped: ")}
    failed = {name: text for name, text in outcomes.items() if text and name not in skipped}
    if failed:
        shown = "\n\n".join(f"==== {name}\n{text}" for name, text in failed.items())
        pytest.fail(f"{len(failed)} of {len(outcomes)} checks failed\n{shown}", pytrace=False)
    if len(skipped) == len(outcomes):
        pytest.skip("not in this ComfyUI")
