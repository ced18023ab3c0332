"""The scripts with SageMaker's functions as under ``torchrun``, each beside a plain loop of one process."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from scripts import run_script
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler
from transformers import GPT2LMHeadModel

import sagemaker_digits
import sagemaker_gpt
import sagemaker_vit
from tests.interpreters import forked_interpreters

EXAMPLES = Path(__file__).parents[2] / "examples"
LOSS = re.compile(r"^(?:epoch|step) .*loss (\S+)", re.MULTILINE)


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("SM_MODEL_DIR", str(tmp_path))

    def started(script, *arguments, ranks=2):
        return run_script(tmp_path, EXAMPLES / script, *arguments, ranks=ranks)

    return started


def torchrun(folder, script, *arguments):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "SM_MODEL_DIR": str(folder)}
    with forked_interpreters():
        done = subprocess.run(
            [*command, str(EXAMPLES / script), *arguments],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
        )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def losses_in(text):
    return [float(loss) for loss in LOSS.findall(text)]


def last(text, word):
    [found] = re.findall(rf"{word} loss (\S+)", text)[-1:]
    return float(found)


def assert_close(found, expected, rel=1e-5):
    assert len(found) == len(expected)
    assert found == pytest.approx(expected, rel=rel)


# --- digits ---------------------------------------------------------------------------------------------------------


def plain_digits(epochs=1):
    torch.manual_seed(1)
    trained, tested = sagemaker_digits.datasets()
    sampler = DistributedSampler(trained, 1, 0, seed=1)
    loader = DataLoader(trained, 64, sampler=sampler, drop_last=True)
    model = sagemaker_digits.Net()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    losses = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for number, (data, target) in enumerate(loader):
            optimizer.zero_grad()
            loss = F.nll_loss(model(data), target)
            loss.backward()
            optimizer.step()
            losses += [loss.item()] if number % 4 == 0 else []
    with torch.no_grad():
        images, labels = tested.tensors
        test = F.nll_loss(model(images), labels).item()
    return losses, test, model.state_dict()


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_convolution_net_trains_as_in_one_process(tmp_path, run, ranks):
    arguments = ["sagemaker_digits.py", "--partitions", "2", "--epochs", "1"]
    told = torchrun(tmp_path, *arguments) if ranks == 2 else run(*arguments, ranks=ranks)
    losses, test, weights = plain_digits()
    if ranks == 2:  # otherwise those of the first replica are printed
        assert_close(losses_in(told), losses)
    assert_close([last(told, "test")], [test], rel=1e-4)
    found = torch.load(tmp_path / "digits.pt", weights_only=True)
    for name, value in weights.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-4)


# --- GPT-2 ----------------------------------------------------------------------------------------------------------


def plain_gpt(*arguments):
    args = sagemaker_gpt.parsed(list(arguments))
    torch.manual_seed(args.seed)
    model = GPT2LMHeadModel(sagemaker_gpt.model_config(args))
    optimizer = torch.optim.AdamW(sagemaker_gpt.parameter_groups(model), lr=args.lr, eps=1e-5)
    scheduler = LambdaLR(optimizer, lambda step: 1 - step / (2 * args.max_steps))
    losses = []
    windows = sagemaker_gpt.batches(args, 0, 1)
    for _ in range(args.max_steps):
        optimizer.zero_grad()
        found = []
        for _ in range(args.gradient_accumulation):
            ids, mask = next(windows)
            loss = model(input_ids=ids, attention_mask=mask, labels=ids).loss
            loss.backward()
            found.append(loss.detach())
        if args.fp16:
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip)
        optimizer.step()
        scheduler.step()
        losses.append(torch.stack(found).mean().item())
    return losses


@pytest.mark.parametrize(
    "arguments",
    [
        ["--gradient_accumulation", "2"],
        ["--pipeline_parallel_degree", "1", "--sharded_data_parallel_degree", "2", "--train_batch_size", "2"],
        ["--pipeline_parallel_degree", "1", "--tensor_parallel_degree", "2"],
    ],
    ids=["pp2", "sdp2", "tp2"],
)
def test_the_language_model_trains_as_in_one_process(run, arguments):
    told = run("sagemaker_gpt.py", *arguments)
    if "--sharded_data_parallel_degree" in arguments:
        # The first replica prints the loss of its own samples, and gradients are clipped as SageMaker does.
        assert len(losses_in(told)) == 6
        assert losses_in(told)[-1] < losses_in(told)[0]
        return
    assert_close(losses_in(told), plain_gpt(*arguments))


def test_the_language_model_trains_in_float16_and_goes_on_from_a_checkpoint(tmp_path, run):
    arguments = ["--fp16", "1", "--checkpoint_freq", "3"]
    told = run("sagemaker_gpt.py", *arguments)
    assert_close(losses_in(told), plain_gpt(*arguments), rel=5e-3)
    assert "scale 4096" in told
    assert {path.name for path in tmp_path.iterdir()} >= {"newest", "step_3_partial", "step_6_partial"}
    (tmp_path / "newest").write_text("step_3")
    again = run("sagemaker_gpt.py", *arguments, "--load_partial", "1")
    assert_close(losses_in(again), losses_in(told)[3:], rel=1e-7)
    assert last(again, "validation") == last(told, "validation")


# --- ViT ------------------------------------------------------------------------------------------------------------


def plain_vit():
    torch.manual_seed(0)
    model = sagemaker_vit.vit()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5)
    data = sagemaker_vit.dataset()
    sampler = DistributedSampler(data, num_replicas=1, rank=0)
    losses = []
    for images, labels in DataLoader(data, 64, sampler=sampler, drop_last=True):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(pixel_values=images).logits, labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def test_the_image_classifier_trains_as_in_one_process(tmp_path):
    told = torchrun(tmp_path, "sagemaker_vit.py")
    losses, weights = plain_vit()
    assert_close(losses_in(told), losses)
    found = torch.load(tmp_path / "vit.pth", weights_only=True)
    assert found.keys() == weights.keys()
    for name, value in weights.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-4)
