"""The running run in ComfyUI's top bar."""

from __future__ import annotations

import re

import pytest

from wanstream.tests.integration.browser.test_overlay import FIND, SAMPLER, WAIT_MS, classic
from wanstream.tools.frontend import GRAPH

pytestmark = [pytest.mark.comfy, pytest.mark.browser, pytest.mark.timeout(600)]

__all__ = ["classic"]  # a fixture

TEXT = "() => document.querySelector('.wanstream-chip')?.innerText.replaceAll('\\n', ' · ') ?? ''"


def test_chip_shows_a_run_and_jumps_to_its_node(classic):
    page = classic.page
    classic.load(steps=100)
    page.evaluate(
        f"title => {{ {FIND}; {GRAPH}.convertToSubgraph(new Set([find(title)])) }}", SAMPLER
    )
    assert page.evaluate(TEXT) == "", "nothing runs"
    classic.queue()
    page.wait_for_function(f"() => ({TEXT})().includes(' left')", timeout=WAIT_MS)
    text = page.evaluate(TEXT)
    assert re.fullmatch(
        r"layerwise, 1 ahead · [\d.]+ of [\d.]+ GB RAM · [\d.]+ s/step · \d+:\d\d left", text
    )
    page.locator(".wanstream-chip").press("Enter")
    shown = f"title => {{ {FIND}; return find(title).id in window.app.canvas.selected_nodes }}"
    assert page.evaluate(shown, SAMPLER)
    assert page.evaluate(f"() => window.app.canvas.graph !== {GRAPH}"), "the subgraph is open"
    page.wait_for_function(f"() => ({TEXT})() === ''", timeout=WAIT_MS)
