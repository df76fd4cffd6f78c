"""Fourteen faults from the campaign, all of different kinds.

`python -m wanstream.tests.faults` runs all faults.
"""

from contextlib import closing

import pytest

from wanstream.tests.faults.campaign import Campaign
from wanstream.tests.faults.cases import SkippedError
from wanstream.tests.support.marks import FORKED

SEED = 14
COUNT = 14

pytestmark = FORKED


@pytest.fixture(scope="module")
def campaign(tmp_path_factory):
    with closing(Campaign(tmp_path_factory.mktemp("faults"), seed=SEED)) as campaign:
        yield campaign


@pytest.mark.timeout(900)
@pytest.mark.parametrize("index", range(COUNT))
def test_a_fault_costs_nothing(campaign, index):
    case = campaign.sample(COUNT)[index]
    try:
        findings = campaign.run(case)
    except SkippedError as err:
        pytest.skip(f"{case.kind.name}: {err}")
    assert findings.clean, (case.kind.name, case.number, findings)
