"""Folders: shards and their index, the only variant, refusals."""

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from wanstream.tests.support.offload.edited_files import prefixed, rewrite
from wanstream.tests.support.wan.opened_experts import assert_holds
from wanstream.wan.checkpoint.files import INDEX, WEIGHTS, CheckpointError
from wanstream.wan.checkpoint.open import open_expert

DEEP = "[" * 100_000
SMALL = {"layers": 1, "heads": 1, "ffn_dim": 128, "text_dim": 64}


@pytest.fixture
def plain(tiny_expert_folder):
    return tiny_expert_folder(**SMALL)


@pytest.fixture
def folder(plain, tmp_path):
    return shutil.copytree(plain, tmp_path / "variant")


@pytest.fixture
def sharded(tiny_expert_folder, tmp_path):
    return shutil.copytree(tiny_expert_folder(**SMALL, shards=3), tmp_path / "sharded")


def _index(folder):
    return json.loads((folder / INDEX).read_text())["weight_map"]


def _write_index(folder, places, name=INDEX):
    (folder / name).write_text(json.dumps({"weight_map": places}))


@pytest.mark.parametrize(
    ("in_shards", "in_index"), [("", "model."), ("model.", ""), ("model.diffusion_model.", "a.")]
)
def test_prefixes_in_shards_and_index(sharded, plain, in_shards, in_index):
    for shard in sharded.glob("*.safetensors"):
        rewrite(shard, shard, prefixed(in_shards))
    _write_index(sharded, {in_index + key: shard for key, shard in _index(sharded).items()})
    assert_holds(open_expert(sharded), open_expert(plain))


@pytest.mark.parametrize(
    "name", ["diffusion_pytorch_model.bf16.safetensors", "wan2.2_high.safetensors"]
)
def test_only_file_is_opened(folder, plain, name):
    (folder / WEIGHTS).rename(folder / name)
    assert_holds(open_expert(folder), open_expert(plain))


@pytest.mark.parametrize(
    ("index", "shard"),
    [
        (f"{WEIGHTS}.index.fp16.json", "diffusion_pytorch_model.fp16-0000{}-of-00002.safetensors"),
        (
            "diffusion_pytorch_model.fp16.safetensors.index.json",
            "diffusion_pytorch_model-0000{}-of-00002.fp16.safetensors",
        ),
    ],
)
def test_only_index_is_opened(folder, plain, index, shard):
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    places = {key: shard.format(1 + key.startswith("blocks.")) for key in tensors}
    for name in set(places.values()):
        save_file({key: tensors[key] for key in tensors if places[key] == name}, folder / name)
    _write_index(folder, places, index)
    assert_holds(open_expert(folder), open_expert(plain))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            ["a.bf16.safetensors", "b.fp16.safetensors"],
            f"holds a.bf16.safetensors and b.fp16.safetensors: .* to {WEIGHTS}",
        ),
        ([f"{INDEX}.bak"], f"holds neither {WEIGHTS} nor {INDEX}"),
        (
            ["x-00001-of-00002.safetensors"],
            f"holds x-00001-of-00002.safetensors, one of 1 shards, .*{INDEX} is missing",
        ),
        (["pytorch_model.bin"], r"holds pickles \(pytorch_model.bin\), which are never read"),
        (["transformer/x"], "is a pipeline folder"),
    ],
)
def test_folder_without_one_choice_is_refused(folder, names, message):
    (folder / WEIGHTS).unlink()
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    with pytest.raises(CheckpointError, match=message):
        open_expert(folder)


def test_missing_shard_is_refused(sharded):
    shard = sorted(set(_index(sharded).values()))[1]
    (sharded / shard).unlink()
    with pytest.raises(CheckpointError, match=f"{shard}.*missing"):
        open_expert(sharded)


@pytest.mark.parametrize(
    ("key", "shard", "message"),
    [
        ("blocks.0.invented", "any", "does not hold blocks.0.invented"),
        ("proj_out.bias", None, "proj_out.bias"),
        ("proj_out.bias", "../elsewhere.safetensors", "in the same folder"),
        ("proj_out.bias", 7, "in the same folder"),
    ],
)
def test_wrong_place_in_the_index_is_refused(sharded, key, shard, message):
    places = _index(sharded)
    if key not in places:
        shard = next(iter(places.values()))
    places[key] = shard
    _write_index(sharded, {key: shard for key, shard in places.items() if shard is not None})
    with pytest.raises(CheckpointError, match=message):
        open_expert(sharded)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "not JSON"), (DEEP, "not JSON"), ("[]", "not a JSON object"), ("{}", "no weight_map")],
)
def test_damaged_index_is_refused(sharded, text, message):
    (sharded / INDEX).write_text(text)
    with pytest.raises(CheckpointError, match=message):
        open_expert(sharded)
