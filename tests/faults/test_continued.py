"""A chain of ten rows, with clients killed at seeded points: no row is lost, doubled or changed."""

import random
import zlib

import pytest
import torch
from PIL import Image

from wanstream.batch.output_store import check_media
from wanstream.cli.arguments import DONE
from wanstream.tests.faults.points import Points, kill
from wanstream.tests.faults.replaced import computing_replaced, latent_of, named_models
from wanstream.tests.faults.stage import Stage
from wanstream.tests.support.batch.command import shipped, videos
from wanstream.tests.support.marks import FORKED
from wanstream.wan.latents.file import read_latent

SEED = 19
COUNT = 8
ROWS = 10

pytestmark = FORKED


def rows():
    """Return a shuffled chain, with a branch from the middle."""
    chain = [{"name": f"r{number}", "sampler.seed": number} for number in range(ROWS)]
    for number in range(1, ROWS):
        chain[number]["continues"] = f"r{number - 1 if number < ROWS - 1 else 4}"
    random.Random(SEED).shuffle(chain)
    return chain


@pytest.fixture(scope="module")
def make_stage(tmp_path_factory):
    # A child forked from a process with a thread pool would wait for threads it lacks.
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("continued")
    workflow = shipped("continue_video")
    models = named_models(folder / "named", workflow)
    Image.new("RGB", (32, 32)).save(folder / "example.png")
    where = ["--models", str(models), "--input", str(folder)]
    with computing_replaced():
        yield lambda name: Stage(folder / name, workflow, rows(), where)


@pytest.fixture(scope="module")
def undisturbed(make_stage):
    """All files' contents after an undisturbed run, and the number of crash points."""
    stage = make_stage("undisturbed")
    points = stage.count_points()
    assert stage.findings.codes == [DONE], stage.stderr()
    return contents(stage.out), points


def contents(folder):
    """Return whole files: videos as bytes, latents as values because the metadata order varies."""
    latents = [*folder.glob("*.latent")]
    for path in (*folder.glob("*.mp4"), *latents):
        check_media(path)
    values = {path.name: read_latent(path).samples.numpy().tobytes() for path in latents}
    return videos(folder) | values


def test_every_row_follows_from_the_row_before(undisturbed):
    made, _ = undisturbed
    seeds = [0]
    for number in range(1, ROWS):
        before = seeds[4] if number == ROWS - 1 else seeds[-1]
        seeds.append(zlib.crc32(latent_of(before).numpy().tobytes(), number))
    latents = {f"r{n}~1.latent": latent_of(seed).numpy().tobytes() for n, seed in enumerate(seeds)}
    names = {f"r{number}~2.mp4" for number in range(ROWS)}
    assert made.keys() == {*latents, *names}
    assert {name: made[name] for name in latents} == latents
    assert len({made[name] for name in names}) == ROWS


@pytest.mark.timeout(900)
@pytest.mark.parametrize("index", range(COUNT))
def test_a_kill_costs_no_row(make_stage, undisturbed, index):
    expected, points = undisturbed
    chance = random.Random(f"{SEED}/{index}")
    stage = make_stage(f"killed{index}")
    # Spread over the run, and twice in every other case.
    ats = [chance.randrange(index * points // COUNT, (index + 1) * points // COUNT)]
    ats += [chance.randrange(points // 2)] if index % 2 else []
    for at in ats:
        stage.run(Points(at, kill, after=chance.random() < 0.5).install)
    stage.finish()
    assert not stage.findings.lost, stage.findings
    assert -9 in stage.findings.codes
    assert contents(stage.out) == expected
    assert "Traceback" not in stage.stderr()
    left = {path.name for path in (stage.out / ".wanstream").rglob("*") if path.is_file()}
    assert left <= {"lock"}, "nothing is left behind"
    stage.clear()
