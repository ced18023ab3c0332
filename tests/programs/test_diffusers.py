"""diffusers: the loop of its example for unconditional image generation, on random images."""

from functools import partial

import pytest
import torch
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel
from loops import accelerator as accelerator_of
from loops import whole_weights
from program_checks import LAYOUTS, alone, assert_alike, on_ranks
from torch import nn

STEPS, BATCH = 4, 8


def unet():
    torch.manual_seed(1)
    return UNet2DModel(
        **{"sample_size": 8, "in_channels": 1, "out_channels": 1, "layers_per_block": 1, "norm_num_groups": 4},
        **{"block_out_channels": (8, 16), "dropout": 0.0, "attention_head_dim": 4},
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )


def train(smp=None, averages="", folder=None, resumes=False):
    """The example's loop.

    Args:
        averages: where the average of weights is made: "" (nowhere), "with weights", "everywhere", "main process".
        folder: of the state that the main process alone writes after half of the steps.
        resumes: whether to begin with that state.
    """
    accelerator = accelerator_of(smp)
    model = unet()
    ema = EMAModel(model.parameters(), decay=0.9, use_ema_warmup=True, model_cls=UNet2DModel, model_config=model.config)
    noises = DDPMScheduler(num_train_timesteps=100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)
    images = torch.randn(STEPS * BATCH, 1, 8, 8, generator=torch.Generator().manual_seed(2))
    readers = accelerator.num_processes
    loader = torch.utils.data.DataLoader(images, batch_size=BATCH // readers)
    schedule = get_scheduler("cosine", optimizer, num_warmup_steps=2 * readers, num_training_steps=STEPS * readers)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    if resumes:
        accelerator.load_state(str(folder))
    losses = []
    for number, clean in enumerate(loader):
        if resumes and number < STEPS // 2:
            continue
        generator = torch.Generator().manual_seed(number)
        noise = torch.randn((BATCH, 1, 8, 8), generator=generator)
        timesteps = torch.randint(0, noises.config.num_train_timesteps, (BATCH,), generator=generator)
        mine = slice(accelerator.process_index * len(clean), (accelerator.process_index + 1) * len(clean))
        noise, timesteps = noise[mine], timesteps[mine]
        noisy = noises.add_noise(clean, noise, timesteps)
        with accelerator.accumulate(model):
            predicted = model(noisy, timesteps).sample
            loss = nn.functional.mse_loss(predicted.float(), noise.float())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            average = partial(ema.step, model.parameters())
            if averages == "with weights" and smp is not None:
                accelerator.smp.with_weights(average)
            elif accelerator.is_main_process if averages == "main process" else averages:
                average()
            if accelerator.is_main_process and folder is not None and not resumes and number == STEPS // 2 - 1:
                accelerator.save_state(str(folder))
        losses.append(accelerator.reduce(loss.detach(), "mean"))
    weights = whole_weights(accelerator, model)
    has_average = averages and (accelerator.is_main_process or averages != "main process")
    return losses, weights, [each.clone() for each in ema.shadow_params] if has_average else None


@pytest.mark.parametrize("averages", ["", "with weights", "everywhere"])
@pytest.mark.parametrize("layout", ["pp2", "sdp2"])
def test_a_denoiser_trains_as_in_one_process(layout, averages):
    expected = alone(train, averages=averages)
    for found in on_ranks(train, 2, LAYOUTS[layout], averages=averages):
        assert_alike(found, expected)


@pytest.mark.parametrize("layout", ["pp2", "sdp2"])
def test_the_main_process_averages_and_saves_alone(layout, tmp_path):
    losses, weights, average = alone(train, averages="main process")
    main, other = on_ranks(train, 2, LAYOUTS[layout], averages="main process", folder=tmp_path)
    assert_alike(main, (losses, weights, average))
    assert_alike(other, (losses, weights, None))
    for found in on_ranks(train, 2, LAYOUTS[layout], folder=tmp_path, resumes=True):
        assert_alike(found, (losses[STEPS // 2 :], weights, None))
