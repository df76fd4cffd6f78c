"""Warnings about suspicious inputs: on their node, in the log, and as errors in strict mode."""

import logging

import pytest
from safetensors.torch import load_file, save_file

from wanstream.cli import main
from wanstream.cli.arguments import DONE, FAILED, INVALID
from wanstream.host.comfy.adapter.user_settings import STRICT, setting_is_on
from wanstream.host.embedded.run import NodeFailedError
from wanstream.host.embedded.workflow.validate import InvalidWorkflowError
from wanstream.nodes.runs.notices import NOTICES, StrictError
from wanstream.tests.support.host.embedded import embedded_host
from wanstream.tests.support.host.shipped import WORKFLOWS, node, shipped

HIGH, LOW = (f"wan2.2_t2v_{place}_noise_14B_fp8_scaled.safetensors" for place in ("high", "low"))
LIGHTNING = "wan2.2_t2v_lightx2v_4steps_lora_v1.1_{}_noise.safetensors"
LORA_HIGH = LIGHTNING.format("high")
LORA_LOW = LIGHTNING.format("low")
IMAGE_LORA = "wan2.2_i2v_lightx2v_4steps_lora_v1_high_noise.safetensors"


def graph(high=HIGH, low=LOW, loras=None):
    """Loaders only: experts, and a LoRA pair on them."""
    inputs = {"high_noise": high, "low_noise": low, "compute_dtype": "fp32"}
    nodes = {"experts": node("WanStreamExperts", **inputs)}
    if loras is not None:
        given = {"high_noise": loras[0], "low_noise": loras[1]}
        strengths = {"strength_high": 1.0, "strength_low": 1.0}
        nodes["lora"] = node("WanStreamLora", experts=["experts", 0], **given, **strengths)
    return nodes | {"shown": node("Shown", value=[[*nodes][-1], 0])}


CASES = [
    ({"high": LOW, "low": HIGH}, "experts", "the experts look swapped"),
    ({"loras": (LORA_LOW, LORA_HIGH)}, "lora", "the LoRAs look swapped"),
    ({"loras": (IMAGE_LORA, "none")}, "lora", "is a LoRA for image to video"),
]


@pytest.mark.parametrize(("files", "node_id", "message"), CASES)
def test_suspicious_files_are_warned_of_and_strictly_refused(run, caplog, files, node_id, message):
    with caplog.at_level(logging.WARNING, "wanstream.nodes"):
        ui = run(graph(**files)).outputs[node_id]
    (shown,) = ui["text"]
    assert shown.startswith("Warning: ")
    assert message in shown
    (notice,) = ui[NOTICES]
    assert (notice["level"], notice["text"]) == ("wrong", shown.removeprefix("Warning: "))
    places = ("high_noise", "low_noise")
    assert notice["exchange"] == (places if "swapped" in message else None)
    given = graph(**files)[node_id]["inputs"]
    assert notice["values"] == {name: given[name] for name in places}
    logged = [each.getMessage() for each in caplog.records if each.name == "wanstream.nodes"]
    assert logged == [line.removeprefix("Warning: ") for line in shown.splitlines()]

    embedded_host.free_experts()
    with pytest.raises(NodeFailedError, match=message) as failed:
        run(graph(**files), strict=True)
    assert isinstance(failed.value.__cause__, StrictError)
    assert failed.value.node_id == node_id
    assert not embedded_host.settings().strict, "only that run"


def write_spelt(models, spell):
    """Write a LoRA `part.safetensors` with keys made by `spell`."""
    tensors = load_file(models / "loras" / LORA_HIGH)
    renamed = {spell(key): tensor for key, tensor in tensors.items()}
    save_file(renamed, models / "loras" / "part.safetensors")


def test_lora_used_in_part_is_on_the_node(run, own_loras):
    write_spelt(own_loras, lambda key: f"foo.{key}" if ".1." in key else key)
    prompt = graph(loras=("part.safetensors", "none"))
    (shown,) = run(prompt, models=own_loras).outputs["lora"]["text"]
    assert shown.startswith("Warning: part.safetensors is used in part: ")
    embedded_host.free_experts()
    with pytest.raises(NodeFailedError, match=r"unknown prefix 'foo\.") as failed:
        run(prompt, models=own_loras, strict=True)
    assert (failed.value.node_id, type(failed.value.__cause__)) == ("lora", StrictError)


def test_lora_without_a_used_key_is_refused_at_the_start(run, own_loras):
    write_spelt(own_loras, lambda key: f"foo.{key}")
    with pytest.raises(InvalidWorkflowError, match=r"unknown prefix 'foo\..*' before blocks\.0\."):
        run(graph(loras=("part.safetensors", "none")), models=own_loras)


LOADERS = {"WanStreamExperts", "WanStreamOneExpert", "WanStreamLora"}


@pytest.mark.parametrize("name", sorted(path.stem for path in WORKFLOWS.glob("*.json")))
def test_no_shipped_workflow_is_suspicious(run, name):
    nodes = shipped(name)
    kept = {node_id: each for node_id, each in nodes.items() if each["class_type"] in LOADERS}
    if not kept:
        pytest.skip("opens no experts of ours")
    ends = {f"end {node_id}": node("Shown", value=[node_id, 0]) for node_id in kept}
    assert not any("text" in shown for shown in run(kept | ends, strict=True).outputs.values())


@pytest.mark.slow  # runs whole workflows
@pytest.mark.parametrize(("strict", "code"), [(True, FAILED), (False, DONE)])
def test_command_line_warns_or_fails(sample_models, tmp_path, capfd, strict, code):
    changes = {"latent.width": 32, "latent.height": 32, "latent.frames": 1, "sampler.steps": 1}
    changes |= {"experts.high_noise": LOW, "experts.low_noise": HIGH}
    command = ["run", str(WORKFLOWS / "t2v.json"), "--models", str(sample_models)]
    command += ["--out", str(tmp_path / "out"), *["--strict"] * strict]
    command += [part for name, value in changes.items() for part in ("--set", f"{name}={value}")]
    assert main(command) == code
    said = capfd.readouterr().err
    assert "the experts look swapped" in said
    assert ("warning: experts: the experts look swapped" in said) == (not strict)


def test_strict_server_needs_its_own_setting(tmp_path, capsys):
    (tmp_path / "jobs.csv").write_text("sampler.seed\n1\n")
    command = ["batch", str(tmp_path / "jobs.csv"), "--workflow", str(WORKFLOWS / "t2v.json")]
    command += ["--out", str(tmp_path / "out"), "--server", "http://127.0.0.1:9", "--strict"]
    assert main(command) == INVALID
    assert "enable its setting" in capsys.readouterr().err


def test_setting_is_read_from_the_file_of_comfyui(tmp_path):
    file = tmp_path / "settings.json"
    assert not setting_is_on(file, STRICT), "no file"
    values = [f'{{"WanStream.Strict": {value}}}' for value in ("true", "false", '"true"')]
    for content in (*values, "{}", "[]", "{"):
        file.write_text(content)
        assert setting_is_on(file, STRICT) == (content == values[0])
