"""Pipeline over denoising steps: each process takes some of the steps of every video, with SVD's UNet.

python svd_stages.py 4

The UNet has a tiny random configuration; for the real one, load "stabilityai/stable-video-diffusion-img2vid" in
`make_step`, and give every process a device of its own. One video is in one stage at a time, so as many videos as
stages have to be in flight to keep all processes busy.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack

import torch
from diffusers import EulerDiscreteScheduler, UNetSpatioTemporalConditionModel

from wanstream.distributed import StepProcess, run_stages

STEPS, FRAMES, VIDEOS = 8, 3, 4
GUIDANCE = torch.linspace(1.0, 3.0, FRAMES).view(1, FRAMES, 1, 1, 1)  # SVD guides later frames more

# The state of one video. Both the video without noise and its conditions go from stage to stage.
State = dict[str, torch.Tensor]


def make_step(device: str) -> Callable[[State, int], State]:
    """Load the model, once in each process, and return the function that takes one step."""
    torch.set_num_threads(1)  # sums of the same number of threads are the same to the bit
    torch.manual_seed(0)  # the same random weights in every process
    unet = UNetSpatioTemporalConditionModel(
        in_channels=8,  # the noisy latent, and the latent of the image
        out_channels=4,  # the velocity: it is the solver's, and never the next input of the UNet
        block_out_channels=(32, 64),
        down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
        addition_time_embed_dim=32,
        projection_class_embeddings_input_dim=96,
        cross_attention_dim=32,
        num_attention_heads=(2, 4),
        layers_per_block=1,
    )
    unet.to(device).eval()
    scheduler = EulerDiscreteScheduler(
        beta_schedule="scaled_linear",
        prediction_type="v_prediction",
        use_karras_sigmas=True,
        sigma_min=0.002,
        sigma_max=700.0,
        timestep_type="continuous",
    )

    @torch.no_grad()
    def step(state: State, number: int) -> State:
        scheduler.set_timesteps(STEPS, device=device)  # forgets the last video, which was at another step
        timestep = scheduler.timesteps[number]
        latent, image = state["latent"].to(device), state["image"].to(device)
        noisy = scheduler.scale_model_input(torch.cat([latent, latent]), timestep)
        without, guided = unet(
            torch.cat([noisy, image], dim=2),
            timestep,
            encoder_hidden_states=state["embedding"].to(device),
            added_time_ids=state["time_ids"].to(device),
            return_dict=False,
        )[0].chunk(2)
        velocity = without + GUIDANCE.to(device) * (guided - without)
        return {**state, "latent": scheduler.step(velocity, timestep, latent, return_dict=False)[0].cpu()}

    return step


def new_video(seed: int) -> State:
    """Return noise, and random conditions in place of those that the VAE and CLIP make of an image."""
    generator = torch.Generator().manual_seed(seed)
    image, embedding = torch.randn(1, FRAMES, 4, 8, 8, generator=generator), torch.randn(1, 1, 32, generator=generator)
    return {
        "latent": 700.0 * torch.randn(1, FRAMES, 4, 8, 8, generator=generator),
        "image": torch.cat([torch.zeros_like(image), image]),
        "embedding": torch.cat([torch.zeros_like(embedding), embedding]),
        "time_ids": torch.tensor([[6.0, 127.0, 0.02]] * 2),  # frames per second, motion, added noise
    }


def main(workers: int) -> list[torch.Tensor]:
    """Denoise the videos with that many processes; return their latents, [1, frames, 4, height, width] each."""
    with ExitStack() as stack:
        stages = [stack.enter_context(StepProcess(make_step, "cpu")) for _ in range(workers)]
        ended = run_stages(stages, [new_video(seed) for seed in range(VIDEOS)], steps=STEPS, on_step=show)
    return [state["latent"] for state in ended]


def show(video: int, state: State) -> None:
    print(f"video {video}: norm {state['latent'].norm():.3f}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(int(sys.argv[1]))
