"""LoRA files opened by header: matched parameters, scales and refusals."""

import logging

import pytest
import torch
from safetensors.torch import load_file

from wanstream.wan.checkpoint.files import CheckpointError
from wanstream.wan.lora.changes import Change
from wanstream.wan.lora.file import open_lora
from wanstream.wan.lora.keys import LYCORIS_ROLES

Q = "diffusion_model.blocks.1.self_attn.q"
WEIGHT = "blocks.1.attn1.to_q.weight"


def layer(rows=256, columns=256, *, rank=4, name=Q):
    shapes = {"down": (rank, columns), "up": (rows, rank)}
    return {f"{name}.lora_{end}.weight": torch.ones(shape) for end, shape in shapes.items()}


def products(lora):
    """Return the change that is a product of factors, by parameter."""
    changes = ((name, each) for name, found in lora.changes.items() for each in found)
    return {name: change for name, change in changes if change.is_product}


def differences(lora):
    changes = ((name, each) for name, found in lora.changes.items() for each in found)
    return {name: change for name, change in changes if change.is_difference}


def test_contents_of_a_lightning_lora(lora_file, caplog):
    path = lora_file()
    lora = open_lora(str(path))
    assert lora.path == path
    assert len(products(lora)) == 4 * 10
    factors = (f"{Q}.lora_up.weight", f"{Q}.lora_down.weight")
    assert products(lora)[WEIGHT] == Change(first=factors, scale=0.5)
    bias = Change(first=("diffusion_model.blocks.0.self_attn.q.diff_b",), scale=1.0)
    assert differences(lora)["blocks.0.attn1.to_q.bias"] == bias
    assert (lora.unmatched, caplog.records) == ((), [])
    assert {key for key in load_file(path) if not key.endswith(".alpha")} == set(lora.tensors)


@pytest.mark.parametrize(
    ("alpha", "scale"),
    [(None, 1.0), (torch.ones(1).bfloat16(), 0.25), (torch.tensor(8), 2.0), (torch.zeros(()), 0.0)],
)
def test_scale_is_alpha_by_rank(lora_file, alpha, scale):
    """Only the header and the alphas are read: a non-finite factor is refused when it is read."""
    tensors = layer() | ({} if alpha is None else {f"{Q}.alpha": alpha})
    tensors[f"{Q}.lora_up.weight"][:] = float("nan")
    assert products(open_lora(lora_file(tensors)))[WEIGHT].scale == scale


def test_layers_may_have_different_ranks(lora_file):
    other = "diffusion_model.blocks.1.self_attn.k"
    alphas = {f"{Q}.alpha": torch.tensor(4.0), f"{other}.alpha": torch.tensor(4.0)}
    lora = open_lora(lora_file(layer(rank=2) | layer(rank=16, name=other) | alphas))
    assert sorted(change.scale for change in products(lora).values()) == [0.25, 2.0]


def test_bias_of_up_is_scaled_like_up(lora_file):
    name = "transformer.blocks.1.attn1.to_q"
    more = {f"{name}.lora_B.bias": torch.ones(256), f"{name}.alpha": torch.tensor(2.0)}
    lora = open_lora(lora_file(layer(name=name) | more))
    assert differences(lora)["blocks.1.attn1.to_q.bias"].scale == 0.5


def test_identity_follows_the_file(lora_file):
    path = lora_file()
    lora = open_lora(path)
    assert open_lora(path.parent / ".." / path.parent.name / path.name).identity == lora.identity
    assert hash(lora.identity) == hash(open_lora(path).identity)
    assert lora.is_current()
    lora_file(seed=1, biases=False).replace(path)
    assert not lora.is_current()
    assert open_lora(path).identity != lora.identity
    path.unlink()
    assert not lora.is_current()


AUDIO = "diffusion_model.blocks.0.audio_attn"
OTHERS = (
    *(f"{AUDIO}.k.lora_down.weight", f"{AUDIO}.k.lora_up.weight", f"{AUDIO}.norm_k.diff"),
    "diffusion_model.audio_emb.proj.1.diff_b",
)
LAYERS = f"diffusion_model.audio_emb.proj.1, {AUDIO}.k, {AUDIO}.norm_k"


def test_keys_of_no_parameter_are_listed_once(lora_file, lightning, caplog):
    caplog.set_level(logging.WARNING, logger="wanstream.lora")
    path = lora_file(lightning() | {key: torch.ones(4, 4) for key in OTHERS})
    lora = open_lora(path)
    assert open_lora(path) is lora  # a graph opens it in its check too: one line in the log
    assert (set(lora.unmatched), len(products(lora))) == ({*OTHERS}, 4 * 10)
    [record] = caplog.records
    message = record.getMessage()
    assert (record.name, (message,)) == ("wanstream.lora", lora.warnings)
    used = "lora_0.safetensors is used in part: 3 of 43 layers do not belong to a Wan expert"
    assert message.startswith(used)
    assert message.endswith("are left out: " + LAYERS)


@pytest.mark.parametrize("key", ["diffusion_model.blocks.2.self_attn.q.alpha", f"{Q}.diff_m"])
def test_one_number_is_no_layer(lora_file, key):
    lora = open_lora(lora_file(layer() | {key: torch.ones(())}))
    assert (lora.unmatched, lora.warnings) == ((key,), ())


@pytest.mark.parametrize("key", ["anything", f"{Q}.diff_m"])
def test_layer_or_part_of_one_is_counted(lora_file, key):
    lora = open_lora(lora_file(layer() | {key: torch.ones(2)}))
    assert lora.unmatched == (key,)
    assert "1 of 2 layers do not belong to a Wan expert" in lora.warnings[0]
    assert f"left out: {key}" in lora.warnings[0]


DOWN = f"{Q}.lora_down.weight"
UP = f"{Q}.lora_up.weight"
B = "blocks.1.attn1.to_q"
FACTORS = {f"{Q}.lora_A": (4, 256), f"{Q}.lora_B": (256, 4)}
HADA = tuple(f"{Q}.hada_{matrix}" for matrix in ("w1_a", "w1_b", "w2_a", "w2_b"))
LOKR = tuple(f"{Q}.lokr_{matrix}" for matrix in ("w1", "w2_a", "w2_b", "t2"))
REFUSED = [
    ({DOWN: (8, 256), UP: (256, 4)}, r"mixed ranks: .*up\S+ \[256, 4\] has rank 4, .* rank 8"),
    ({DOWN: (4, 256)}, rf"{DOWN} has no up factor"),
    ({f"{Q}.lora_B.weight": (256, 4)}, rf"{Q}.lora_B.weight has no down factor"),
    ({DOWN: (256,), UP: (256, 1)}, r"lora_down.weight is \[256\]: matrices are expected"),
    ({DOWN: (0, 256), UP: (256, 0)}, r"is \[0, 256\]: matrices are expected"),
    (
        {f"{Q}.diff": (256, 256), f"transformer.{B}.diff": (256, 256)},
        rf"q.diff and transformer.{B}.diff mean the same: give one file for each expert",
    ),
    ({DOWN: (4, 256), UP: (256, 4), f"{Q}.alpha": (4,)}, r"alpha is \[4\]; an alpha is one number"),
    ({}, "holds no tensors"),
    (
        {"lora_unet_double_blocks_0_img_attn_qkv.lora_up.weight": (9216, 4)},
        r"none of its 1 keys belongs to a Wan expert \(lora_unet_double_blocks_0_img_attn_qkv.*\): "
        "it was probably made for Flux or HunyuanVideo",
    ),
    ({"layers.0.q.lora_A.weight": (4, 8), "b": (1,)}, "its 2 keys .* made for another model"),
    ({"blocks.0.self_attn.q.weight": (256, 256)}, "holds whole weights: choose it as an expert"),
    ({f"{Q}.dora_scale": (256, 1)}, "is the magnitude of a DoRA without the factors"),
    (
        {f"{Q}.lokr_w1": (16, 16), f"{Q}.lokr_w2_a": (16, 4)},
        "needs lokr_w2 or lokr_w2_a and lokr_w2_b and lokr_t2 or lokr_w2_a and lokr_w2_b of the ",
    ),
    (
        {f"{Q}.lokr_w1": (16, 16), f"{Q}.lokr_w2": (16, 16), **FACTORS},
        rf"has two algorithms for one layer: {Q}.lora_B and {Q}.lokr_w1",
    ),
    (
        dict(zip(HADA, [(256, 4), (4, 8), (128, 4), (4, 8)], strict=True)),
        r"belong to matrices of \[256, 8\] and \[128, 8\]",
    ),
    (dict(zip(HADA, [(256, 4), (3, 8), (256, 4), (4, 8)], strict=True)), "mixed ranks"),
    (
        dict(zip(LOKR, [(4, 4), (2, 64), (3, 64), (3, 2)], strict=True)),
        r"lokr_t2 is \[3, 2\]; \[2, 3, ...\] is expected",
    ),
    (
        {**FACTORS, f"{Q}.dora_scale": (255, 1)},
        r"dora_scale is \[255, 1\]; a magnitude for each of 256 rows or 256 columns",
    ),
    (
        {f"foo.blocks.1.self_attn.q.{factor}": (4, 4) for factor in ("lora_A", "lora_B")},
        r"unknown prefix 'foo.' before blocks.1.self_attn.q: rename its keys without it",
    ),
    ({"lora_unet_foo_blocks_1_ffn_0.lora_A": (4, 256)}, "unknown prefix 'lora_unet_foo_'"),
    ({f"{Q}.oft_blocks": (4, 8, 8)}, "is an OFT"),
    ({f"{B}.diff_b": (256,), f"{B}.lora_B.bias": (256,)}, "diff_b and .*bias mean the same"),
    ({"single_transformer_blocks.0.x": (4, 256), "transformer.proj_out.diff_b": (64,)}, "for Flux"),
]


@pytest.mark.parametrize(("shapes", "message"), REFUSED, ids=[row[1] for row in REFUSED])
def test_wrong_tensors_are_refused(lora_file, shapes, message):
    with pytest.raises(CheckpointError, match=message):
        open_lora(lora_file({key: torch.zeros(shape) for key, shape in shapes.items()}))


@pytest.mark.parametrize("role", LYCORIS_ROLES)
def test_lycoris_role_alone_is_refused(lora_file, role):
    name = "LoKr" if role.startswith("lokr") else "LoHa"
    message = f"is a {name} with a part missing: {Q}.{role} needs {role[:4]}_"
    with pytest.raises(CheckpointError, match=message):
        open_lora(lora_file({f"{Q}.{role}": torch.zeros(4, 4)}))


@pytest.mark.parametrize("alpha", [float("nan"), float("inf")])
def test_alpha_that_is_no_number_is_refused(lora_file, alpha):
    with pytest.raises(CheckpointError, match=rf"{Q}.alpha is (nan|inf)"):
        open_lora(lora_file(layer() | {f"{Q}.alpha": torch.tensor(alpha)}))


def test_whole_numbers_are_refused(lora_file):
    tensors = {key: tensor.to(torch.int8) for key, tensor in layer().items()}
    with pytest.raises(CheckpointError, match=r"is torch.int8; .* floating-point"):
        open_lora(lora_file(tensors))
