"""LoRA scales without alpha tensors: header fields, PEFT's adapter_config.json next to the file."""

import json

import pytest
import torch
from safetensors.torch import save_file

from wanstream.wan.checkpoint.files import CheckpointError
from wanstream.wan.lora.file import open_lora

RSLORA = {"r": 4, "lora_alpha": 16, "use_rslora": True}
PLAIN = {"r": 4, "lora_alpha": 16}
PIPELINE = {f"transformer.{name}": value for name, value in RSLORA.items()}
PEFT_FIELD = "lora_adapter_metadata"
NATIVE = "diffusion_model.blocks.0.self_attn.q"
DIFFUSERS = "base_model.model.blocks.1.attn1.to_q"


def write(folder, *, name="adapter_model", config=None, metadata=None, kohya=False, alpha=None):
    """Write a LoRA with two layers and rank 4, and return the path."""
    folder.mkdir(exist_ok=True)
    down, up = ("lora_down", "lora_up") if kohya else ("lora_A", "lora_B")
    tensors = {f"{layer}.{down}.weight": torch.ones(4, 256) for layer in (NATIVE, DIFFUSERS)}
    tensors |= {f"{layer}.{up}.weight": torch.ones(256, 4) for layer in (NATIVE, DIFFUSERS)}
    if alpha is not None:
        tensors[f"{NATIVE}.alpha"] = torch.tensor(alpha)
    path = folder / f"{name}.safetensors"
    save_file(tensors, path, {"format": "pt", **(metadata or {})})
    if config is not None:
        text = config if isinstance(config, str) else json.dumps(config)
        (folder / "adapter_config.json").write_text(text)
    return path


def scales(path):
    return [open_lora(path).changes[f"blocks.{n}.attn1.to_q.weight"][0].scale for n in (0, 1)]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (RSLORA, [8.0, 8.0]),
        (PLAIN, [4.0, 4.0]),
        ({"r": 4, "lora_alpha": 2.5, "use_rslora": False, "bias": "none"}, [0.625, 0.625]),
        ({**PLAIN, "r": 64, "rank_pattern": {"to_q": 4}}, [4.0, 4.0]),
        ({**PLAIN, "alpha_pattern": {"diffusion_model.blocks.0.self_attn.q": 8}}, [2.0, 4.0]),
        ({**PLAIN, "alpha_pattern": {"self_attn.q": 8, "to_q": 1}}, [2.0, 2.0]),
        ({**PLAIN, "alpha_pattern": {r"^blocks\.1\.attn1\.to_q$": 8}}, [4.0, 2.0]),
        ({**PLAIN, "alpha_pattern": {r"^blocks\.1\d?\..*q$": 8}}, [4.0, 2.0]),
        ({**PLAIN, "alpha_pattern": {"o_q": 8, "other.layer": 1}}, [4.0, 4.0]),
        ({**PLAIN, "alpha_pattern": {r"blocks\.[0-9]+\.attn1\..*": 8}}, [2.0, 2.0]),
        ({**PLAIN, "alpha_pattern": {"blocks.(0|3).self_attn.(q|k)": 8, ".*": 1}}, [2.0, 0.25]),
        ({**PLAIN, "init_lora_weights": True}, [4.0, 4.0]),
        ({**PLAIN, "init_lora_weights": "gaussian"}, [4.0, 4.0]),
        ({"r": 4}, [1.0, 1.0]),
        ({"alpha_pattern": {"blocks.0.attn1.to_q": 2}}, [0.5, 1.0]),
    ],
)
def test_config_next_to_the_file_and_in_the_header(tmp_path, config, expected):
    assert scales(write(tmp_path, config=config)) == expected
    assert scales(write(tmp_path / "header", metadata={PEFT_FIELD: json.dumps(config)})) == expected


@pytest.mark.parametrize(
    ("metadata", "settings", "expected"),
    [
        ({PEFT_FIELD: json.dumps(PIPELINE)}, {}, 8.0),
        ({"lora_config": json.dumps(RSLORA)}, {}, 8.0),
        ({"lora_alpha": "2.0"}, {}, 0.5),
        ({"ss_network_alpha": "16", "ss_network_dim": "4"}, {"kohya": True}, 4.0),
        ({"ss_network_alpha": "Dynamic"}, {"kohya": True}, 1.0),
        ({"ss_network_alpha": "16"}, {}, 1.0),
        ({"lora_alpha": "16"}, {"config": RSLORA}, 4.0),
        ({}, {"config": RSLORA, "name": "style"}, 8.0),
    ],
)
def test_header_fields_count_before_the_config(tmp_path, metadata, settings, expected):
    assert scales(write(tmp_path, metadata=metadata, **settings)) == [expected, expected]


def test_alpha_tensors_count_first(tmp_path):
    path = write(tmp_path, metadata={"lora_config": json.dumps(PLAIN)}, alpha=2.0)
    assert scales(path) == [0.5, 4.0]
    path = write(tmp_path, config=RSLORA, alpha=2.0)
    assert scales(path) == [0.5, 1.0], "a file with alphas is not one of PEFT's"


def test_config_that_may_be_another_files_is_noted(tmp_path):
    write(tmp_path, name="one")
    path = write(tmp_path, name="two", config=RSLORA)
    assert scales(path) == [1.0, 1.0]
    [note] = open_lora(path).notes
    assert note.startswith("two.safetensors: adapter_config.json next to it is not used")
    [note] = open_lora(write(tmp_path / "converted", metadata={"ss_network_alpha": "16"})).notes
    assert "ss_network_alpha 16 in its header is not used" in note


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ('{"lora_alpha": 1' + "0" * 5000 + "}", "is not JSON"),
        ('{"lora_alpha": 1' + "0" * 400 + "}", "lora_alpha is 10000"),
        ("[]", "is not a JSON object"),
        ({"lora_alpha": "16"}, "lora_alpha is '16'; a number is expected"),
        ({"lora_alpha": True}, "lora_alpha is True"),
        ({"lora_alpha": float("nan")}, "lora_alpha is nan"),
        ({"lora_alpha": 1, "r": [4]}, r"r is \[4\]"),
        ({"lora_alpha": 1, "r": -4}, "r is -4; a number from 1 on is expected"),
        *(
            ({"init_lora_weights": name}, f"is '{name}', which changes the model")
            for name in ("pissa_niter_16", "OLoRA", "corda", "loftq", "lora_ga")
        ),
        ({"lora_alpha": 1, "rank_pattern": {"to_q": 0}}, "rank_pattern: to_q is 0; a number from"),
        ({"lora_alpha": 1, "rank_pattern": [4]}, r"rank_pattern is \[4\]; numbers by layer"),
        ({"alpha_pattern": {"blocks.0.attn1.to_q": None}}, "blocks.0.attn1.to_q is None"),
        *(
            ({"alpha_pattern": {pattern: 1}}, "only names of layers and simple expressions")
            for pattern in ("(a|b)+", "((a*)*)*", "(?=a)a", "(a", "(" * 9999, "a{2}", r"\w*", "a**")
        ),
        *(
            ({"alpha_pattern": patterns}, "ways to match; only names of layers and simple")
            for patterns in ({".?" * 30: 1}, {"(.|.)" * 20: 1}, {f".*a.*{n}": 1 for n in range(21)})
        ),
        ({"use_rslora": "false"}, "use_rslora is 'false'; true or false is expected"),
        ({"use_dora": True}, r"is a DoRA by its settings \(use_dora\), but has no magnitudes"),
    ],
)
def test_unreadable_settings_are_refused(tmp_path, config, message):
    text = config if isinstance(config, str) else json.dumps(config)
    for path, where in (
        (write(tmp_path / "file", config=text), "adapter_config.json"),
        (write(tmp_path / "header", metadata={PEFT_FIELD: text}), PEFT_FIELD),
    ):
        with pytest.raises(CheckpointError, match=message) as error:
            open_lora(path)
        assert where in str(error.value) or "DoRA" in message


def test_large_config_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="has 1048578 bytes; PEFT writes at most 1048576"):
        open_lora(write(tmp_path, config=" " * 1024**2 + "{}"))
