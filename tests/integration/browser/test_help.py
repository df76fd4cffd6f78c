"""The help pages in the side panel, in ComfyUI's own frontend."""

from __future__ import annotations

from pathlib import Path

import pytest

from wanstream.tools.comfyui import find_comfyui
from wanstream.tools.frontend import GRAPH, SharedFrontends
from wanstream.tools.templates import template

pytestmark = [pytest.mark.comfy, pytest.mark.browser]

ROOT = Path(__file__).parents[3]
HEADS = {"en": "Errors", "zh": "错误"}

SELECT = f"""kind => {{
    const {{ canvas }} = window.app
    const node = {GRAPH}.nodes.find(node => node.type === kind)
    canvas.ds.scale = 1
    canvas.ds.offset = [700 - node.pos[0], 200 - node.pos[1]]
    canvas.selectNodes([node])
    canvas.setDirty(true, true)
}}"""
# Elements wider than their panel.
TOO_WIDE = """head => {
    const title = [...document.querySelectorAll('h2')].find(found => found.textContent === head)
    const page = title.parentElement, right = page.getBoundingClientRect().right
    return [...page.querySelectorAll('table, li, p')]
        .filter(part => part.getBoundingClientRect().right > right + 1)
        .map(part => part.textContent.slice(0, 60))
}"""


@pytest.mark.parametrize("language", HEADS)
def test_the_page_of_the_sampler_is_shown_in_its_language_and_fits_the_panel(
    frontends: SharedFrontends, language: str
) -> None:
    if find_comfyui().version() < (0, 4):
        pytest.skip("the panel of this ComfyUI is opened in another way")
    frontend = frontends.get(settings={"Comfy.Locale": language})
    frontend.load_workflow(template("t2v"))
    frontend.page.evaluate(SELECT, "WanStreamSampler")
    frontend.page.locator('[data-testid="info-button"]').click()
    frontend.page.locator("h2", has_text=HEADS[language]).wait_for()
    assert frontend.page.evaluate(TOO_WIDE, HEADS[language]) == []
    # It stays open otherwise, also in another graph.
    frontend.page.locator('[data-testid="info-button"]').click()
