"""LightningCLI builds the strategy from its command line and its files."""

import inspect

import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
from lightning_toy import on_ranks, quiet

from smp_strategy import SMPConfig, SMPStrategy
from smp_strategy.config.config import option_types
from smp_strategy.config.option_signature import option_texts
from smp_strategy.pytorch_lightning import SMPStrategy as OtherStrategy

PLAIN = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}


class Deep(BoringModel):
    def __init__(self, width: int = 16):
        super().__init__()
        torch.manual_seed(3)
        self.layer = torch.nn.Sequential(torch.nn.Linear(32, width), torch.nn.Tanh(), torch.nn.Linear(width, 2))


def command_line(folder, ranks, strategy, *arguments):
    file = folder / "config.yaml"
    trainer = {**PLAIN, "devices": ranks, "max_epochs": 1, "limit_train_batches": 4, "strategy": strategy}
    callback = {"class_path": "ModelCheckpoint", "init_args": {"dirpath": str(folder), "filename": "end"}}
    file.write_text(yaml.safe_dump({"model": {"width": 8}, "trainer": {**trainer, "callbacks": [callback]}}))
    cli = LightningCLI(
        Deep, BoringDataModule, args=["fit", "--config", str(file), *arguments], save_config_callback=None
    )
    config = getattr(cli.trainer.strategy, "config", None)
    return config, torch.load(folder / "end.ckpt", weights_only=True)["state_dict"]


def by_path(**options):
    return {"class_path": "smp_strategy.SMPStrategy", "init_args": options}


def folders(path, *names):
    for name in names:
        (path / name).mkdir()
    return [path / name for name in names]


@pytest.mark.parametrize(
    ("strategy", "arguments", "options"),
    [
        ("smp", (), {}),
        (by_path(pipeline_parallel_degree=2, pipeline="zb-h1"), (), {"pipeline": "zb-h1"}),
        (
            by_path(sharded_data_parallel_degree=1, unit_classes=["Linear"], memory_limit="1GiB"),
            ("--trainer.strategy.microbatches=1",),
            {"microbatches": 1, "unit_classes": ("Linear",), "memory_limit": "1GiB"},
        ),
    ],
    ids=["by name", "by path", "on the command line"],
)
def test_command_lines_and_files_train_as_plain_lightning_does(strategy, arguments, options, tmp_path):
    one, two = folders(tmp_path, "one", "two")
    _, expected = on_ranks(command_line, 1, one, 1, "auto")[0]
    for config, weights in on_ranks(command_line, 2, two, 2, strategy, *arguments):
        assert {name: getattr(config, name) for name in options} == options
        assert all(torch.equal(weights[key], value) for key, value in expected.items())


def test_an_unknown_option_is_refused_by_name(tmp_path, capsys):
    with quiet(), pytest.raises(SystemExit):
        command_line(tmp_path, 2, by_path(microbatchs=4))
    assert "microbatchs" in capsys.readouterr().err


def test_help_has_a_sentence_for_each_option(capsys):
    with quiet(), pytest.raises(SystemExit) as ended:
        LightningCLI(BoringModel, args=["fit", "--trainer.strategy.help", "smp_strategy.SMPStrategy"])
    assert ended.value.code == 0
    told = " ".join(capsys.readouterr().out.split())
    for name, text in option_texts().items():
        told_of_option = told.rpartition(f" --trainer.strategy.{name} ")[2].partition(" (type: ")[0]
        # argparse breaks lines at hyphens, and so may put a space after one.
        assert text.replace(" ", "")[:60] in told_of_option.replace(" ", ""), name


@pytest.mark.parametrize("strategy", [SMPStrategy, OtherStrategy])
def test_the_signature_names_all_options_with_their_defaults(strategy):
    parameters = inspect.signature(strategy).parameters
    types = option_types()
    assert {name: parameters[name].annotation for name in types} == types
    assert strategy(**{name: parameters[name].default for name in types}).config == SMPConfig()
