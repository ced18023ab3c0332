"""A run that goes on reads what an uninterrupted one reads next, also in the middle of a pass."""

import pytest
from accelerate import DataLoaderConfiguration
from accelerate.utils import set_seed
from accelerate_checks import BATCH, Samples, adamw, assert_same, fresh_accelerator, on_ranks, toy, whole_state
from test_accelerate_saving import LAYOUTS, PP2
from torch.utils.data import DataLoader

PASSES, LENGTH = 3, 4


def passes(smp, folder, saves_at, resume, seedable):
    """Train, save in pass 1 after ``saves_at`` batches, and go on; or go on from there. What was read, and weights."""
    config = DataLoaderConfiguration(use_seedable_sampler=seedable)
    accelerator = fresh_accelerator(smp, dataloader_config=config, gradient_accumulation_steps=2)
    set_seed(3)
    model = toy(dropout=0.1)
    share = BATCH // accelerator.num_processes
    loader = DataLoader(Samples(LENGTH * BATCH), batch_size=share, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, adamw(model), loader)
    if resume:
        accelerator.load_state(folder)
    seen = []
    for epoch in range(1 if resume else 0, PASSES):
        first = saves_at if resume and epoch == 1 else 0
        loader.set_epoch(epoch)
        rest = accelerator.skip_first_batches(loader, first) if first else loader
        for number, batch in enumerate(rest, first):
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch)["loss"])
                optimizer.step()
                optimizer.zero_grad()
            if (epoch, number) >= (1, saves_at):
                seen.append(batch["targets"].tolist())
            if not resume and (epoch, number) == ((1, saves_at - 1) if saves_at else (0, LENGTH - 1)):
                accelerator.save_state(folder)
    return seen, whole_state(accelerator)


def saves_and_resumes(*args):
    return [passes(*args[:3], resume, args[3]) for resume in (False, True)]


@pytest.mark.parametrize(
    ("layout", "saves_at", "seedable"),
    [("pp2", 2, True), ("pp2 with replicas", 2, True), ("pp2 with replicas", 0, False)],
)
def test_what_is_read_next_is_what_would_have_been_read(layout, saves_at, seedable, tmp_path):
    world_size, smp = LAYOUTS[layout]
    runs = on_ranks(saves_and_resumes, world_size, smp, tmp_path / "state", saves_at, seedable)
    for (expected, _), (found, _) in runs:
        assert found == expected
        assert len(found) == 2 * LENGTH - saves_at
    (_, expected), (_, found) = runs[0]
    assert_same(found, expected)


def test_a_pass_that_has_begun_is_continued_under_another_layout(tmp_path):
    expected = on_ranks(passes, 2, PP2, tmp_path / "state", 2, False, True)
    found = on_ranks(passes, 4, LAYOUTS["pp4"][1], tmp_path / "state", 2, True, True)
    assert found[0][0] == expected[0][0]
    assert_same(found[0][1], expected[0][1])
