"""The smallest use of the engine, as in `docs/examples/`."""

import runpy
from pathlib import Path

EXAMPLE = Path(__file__).parents[4] / "docs" / "examples" / "minimal_streaming.py"


def test_example_streams_with_equal_results(capsys):
    runpy.run_path(str(EXAMPLE))["main"]()
    printed = capsys.readouterr().out
    assert printed.startswith("3 buffers for 8 blocks: 6.29 MB")
    assert printed.count("equal to the model in memory, bit by bit") == 2
