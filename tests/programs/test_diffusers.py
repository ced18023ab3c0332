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


def train(smp=None, averages=False, unchanged=False):
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
    losses = []
    for number, clean in enumerate(loader):
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
        if accelerator.sync_gradients and averages:
            average = partial(ema.step, model.parameters())
            average() if smp is None or unchanged else accelerator.smp.with_weights(average)
        losses.append(accelerator.reduce(loss.detach(), "mean"))
    return losses, whole_weights(accelerator, model), [each.clone() for each in ema.shadow_params] if averages else None


@pytest.mark.parametrize("averages", [False, True])
@pytest.mark.parametrize("layout", ["pp2", "sdp2"])
def test_a_denoiser_trains_as_in_one_process(layout, averages):
    expected = alone(train, averages=averages)
    for found in on_ranks(train, 2, LAYOUTS[layout], averages=averages):
        assert_alike(found, expected)


@pytest.mark.parametrize("layout", ["pp2", "sdp2"])
def test_an_average_that_reads_weights_between_steps_is_refused_with_the_remedy(layout):
    with pytest.raises(RuntimeError, match=r"UnsupportedError: `sub` .*accelerator\.smp\.with_weights"):
        on_ranks(train, 2, LAYOUTS[layout], averages=True, unchanged=True)
