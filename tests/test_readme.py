"""The examples of the README run unchanged on a small model."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from wanstream.nodes import WanStreamExtension

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


def test_every_node_and_every_workflow_is_in_its_table() -> None:
    pages = [(ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("nodes", "workflows")]
    rows = [[line.split("|")[1] for line in page.splitlines() if line.startswith("| ")] for page in pages]
    nodes = {name.strip() for cell in rows[0][1:] for name in cell.split(",")}
    assert nodes == {node.define_schema().display_name for node in asyncio.run(WanStreamExtension().get_node_list())}
    workflows = {name for cell in rows[1] for name in re.findall(r"\(\.\./workflows/(\w+)\.json\)", cell)}
    assert workflows == {path.stem for path in (ROOT / "workflows").glob("*.json")}


def test_every_file_the_readme_names_is_there() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    commands = re.findall(r"`?\b(scripts/\w+|workflows/api/\w*(?:\.json)?)", README)
    assert "scripts/demo" in commands
    assert links
    for name in {*links, *commands}:
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.stem)
def test_every_file_a_page_links_to_is_there(page: Path) -> None:
    for name, anchor in re.findall(r"\]\(([^)#:]*)#?([^):]*)\)", page.read_text(encoding="utf-8")):
        target = page.parent / name if name else page
        assert target.exists(), name
        if anchor:
            headings = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}, anchor
