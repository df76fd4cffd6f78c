"""What the README shows runs as it stands, on a small model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_python_example_makes_frames(sample_models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    small = {'"cuda"': '"cpu"', "(1, 16, 21, 60, 104)": "(1, 16, 3, 6, 8)", "steps=20": "steps=3"}
    for written, smaller in small.items():
        assert code.count(written) == 1
        code = code.replace(written, smaller)
    monkeypatch.chdir(sample_models / "diffusers")
    names: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), names)  # noqa: S102 - our own example
    assert names["frames"].shape == (1, 9, 48, 64, 3)
    assert torch.isfinite(names["frames"]).all()
    assert [step.expert for step in names["result"].timeline.steps] == ["high", "high", "low"]


def test_every_file_the_readme_names_is_there() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    commands = re.findall(r"`?\b(scripts/\w+|workflows/api/\w*(?:\.json)?)", README)
    assert "scripts/demo" in commands
    assert links
    for name in {*links, *commands}:
        assert (ROOT / name).exists(), name
