"""Fourteen faults from the campaign, all of different kinds, and eight in a chain of rows.

`python -m wanstream.tests.faults` runs all faults.
"""

from contextlib import closing

import pytest

from wanstream.tests.faults.campaign import Campaign
from wanstream.tests.faults.cases import CONTINUED, SkippedError
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
    kind, number = campaign.sample(COUNT)[index]
    try:
        findings = campaign.run(kind, number)
    except SkippedError as err:
        pytest.skip(f"{kind.name}: {err}")
    assert findings.clean, (kind.name, number, findings)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", range(8))
def test_kills_in_a_chain_of_rows_cost_nothing(campaign, number):
    findings = campaign.run(CONTINUED, number)
    assert findings.clean, findings
    assert -9 in findings.codes
