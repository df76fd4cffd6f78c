"""docs/hardware.md: a row for each self-test, and empty ones for cards without a file."""

from dataclasses import replace

from wanstream.benchmarks.pages.hardware import EXPECTED, PAGE, page, selftests

PLACE = "before\n<!-- selftests -->\n<!-- end -->\nafter\n"


def test_page_in_the_repository_is_that_of_the_results():
    text = PAGE.read_text(encoding="utf-8")
    assert page(text, selftests()) == text, "run python benchmarks/pages/hardware.py"
    devices = {result.figures["machine"]["computes_on"] for result in selftests()}
    assert "No GPU has been checked so far" in text or devices - {"cpu"}


def test_card_has_one_row_with_or_without_a_file():
    empty = page(PLACE, [])
    assert all(f"| {card} |  |" in empty for card in EXPECTED)
    cpu = next(each for each in selftests() if each.figures["machine"]["computes_on"] == "cpu")
    machine = {**cpu.figures["machine"], "computes_on": "cuda", "h2d_bytes_per_s": 25e9}
    described = {**cpu.figures["described"], "Device": "NVIDIA GeForce RTX 4090, 25.3 GB"}
    card = replace(cpu, figures={**cpu.figures, "machine": machine, "described": described})
    filled = page(PLACE, [card])
    assert filled.count("RTX 4090") == 1
    assert "| NVIDIA GeForce RTX 4090, 25.3 GB | 8 passed |" in filled
    assert "25.0 GB/s" in filled
    assert filled.startswith("before\n<!-- selftests -->\n")
    assert filled.endswith("<!-- end -->\nafter\n")
