import pytest

from wanstream.bench.trial_matrix import MatrixError, Setting, TrialMatrix
from wanstream.plan import AutoOffload, Budgets
from wanstream.schema import OffloadPolicy

LAYERWISE = OffloadPolicy.layerwise()
PINNED = OffloadPolicy.block_swap(20, 2, source="pinned")


def names(policies="", prefetch="", steps="", base=LAYERWISE) -> list[str]:
    return [setting.name for setting in TrialMatrix.parse(policies, prefetch, steps).settings(base)]


def test_every_setting_comes_once_and_in_order():
    assert names() == ["layerwise, 1 ahead"]
    every = ["layerwise, 1 ahead", "block_swap 20, 1 ahead", "resident", "auto"]
    assert names("layerwise, block_swap 20, resident, auto") == every
    assert names(prefetch="0, 2") == ["layerwise, 0 ahead", "layerwise, 2 ahead"]
    assert names(steps="4, 8") == [f"layerwise, 1 ahead, {steps} steps" for steps in (4, 8)]
    ahead = [f"layerwise, {blocks} ahead, 4 steps" for blocks in (1, 2)]
    assert names("layerwise, resident", "1, 2", "4") == [*ahead, "resident, 4 steps"]
    spaced = names("  layerwise ,,\n block_swap   3,", " 1 ,")
    assert spaced == ["layerwise, 1 ahead", "block_swap 3, 1 ahead"]
    assert names("resident, resident", "", "4, 4") == ["resident, 4 steps"]


def test_ram_and_token_settings_of_the_run_apply_to_every_policy():
    settings = TrialMatrix.parse("layerwise, resident, block_swap 3", "", "").settings(PINNED)
    assert [setting.policy for setting in settings] == [
        OffloadPolicy.layerwise(2, source="pinned"),
        OffloadPolicy.resident(source="pinned"),
        OffloadPolicy.block_swap(3, 2, source="pinned"),
    ]


def test_auto_keeps_the_budgets_of_the_run():
    budgets = AutoOffload(budgets=Budgets(vram_bytes=8 * 10**9))
    settings = TrialMatrix.parse("auto, layerwise", "2", "").settings(budgets)
    assert settings == (Setting(policy=budgets), Setting(policy=OffloadPolicy.layerwise(2)))
    assert TrialMatrix.parse("auto", "", "").settings(PINNED) == (Setting(policy=AutoOffload()),)


def test_empty_matrix_is_the_run_itself():
    matrix = TrialMatrix.parse("", " , ", "\n")
    assert matrix.is_empty
    assert matrix.settings(PINNED) == (Setting(policy=PINNED),)
    assert not TrialMatrix.parse("", "1", "").is_empty


NO_NUMBER = "has no number of streamed blocks: write block_swap 20"
NO_NUMBERS = ("", "twenty", "-1", "\u0663", "9" * 5000)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("fsdp", "", ""), "'fsdp' names no policy: write layerwise, block_swap N, resident or"),
        (("layerwise resident", "", ""), "layerwise takes no 'resident' here"),
        (("layerwise 2", "", ""), "give the prefetch depth in prefetch"),
        (("auto 8", "", ""), "auto takes no '8'"),
        *(((f"block_swap {words}", "", ""), NO_NUMBER) for words in NO_NUMBERS),
        (("", "9", ""), "prefetch: '9' is not a number from 0 to 8"),
        (("", "1; 2", ""), "prefetch: '1; 2' is not a number"),
        (("", "-1", ""), "prefetch: '-1' is not a number"),
        (("", "", "0"), "steps: '0' is not a number from 1 to 1000"),
        (("", "", "many"), "steps: 'many' is not a number"),
        (("", "", "9" * 5000), "is not a number from 1 to 1000"),
        (("resident, auto", "1, 2", ""), "prefetch is 1, 2, but resident and auto fetch nothing"),
    ],
)
def test_other_words_are_refused(words, message):
    with pytest.raises(MatrixError, match=message):
        names(*words)
    with pytest.raises(MatrixError, match="leave prefetch empty"):
        names("", "1", base=OffloadPolicy.resident())
