"""The Hydra groups: in the examples, in an application of a user, and on several ranks."""

import dataclasses
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import hydra
import pytest
from hydra.core.hydra_config import HydraConfig
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf
from torch.distributed import TCPStore

from smp_strategy.config.config import SMPConfig
from smp_strategy.config.recipe import parse_recipe
from smp_strategy.errors import ConfigError
from smp_strategy.integrations.hydra import schema
from smp_strategy.integrations.hydra.resolvers import agreed_start_time, divide, global_rank, with_rank
from tests.interpreters import forked_interpreters

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"


@pytest.fixture
def compose(tmp_path):
    """Compose ``configs/train.yaml``, or a user's own ``config.yaml``, as an application would."""

    def run(*overrides, folder=CONFIGS, name="train"):
        with hydra.initialize_config_dir(str(folder), version_base="1.3"):
            config = hydra.compose(name, overrides=list(overrides), return_hydra_config=True)
        config.hydra.runtime.output_dir = str(tmp_path)  # what the application would have set
        HydraConfig.instance().set_config(config)
        return config

    return run


@pytest.fixture
def user_app(tmp_path):
    """A folder with the configuration of somebody else's application."""
    (tmp_path / "conf" / "trainer").mkdir(parents=True)
    (tmp_path / "conf" / "config.yaml").write_text("defaults:\n  - trainer: default\n  - smp: null\n  - _self_\n")
    (tmp_path / "conf" / "trainer" / "default.yaml").write_text("max_steps: 7\nstrategy: ddp\ndevices: 3\n")
    return tmp_path


# --- the examples' configuration ------------------------------------------------------------------------------------


FILES = ["pp2", "pp4", "sdp2", "sdp4", "mics2x2", "pp2_sdp2", "zero1", "tp2", "tp2_pp2", "tp2_sdp2"]


@pytest.mark.parametrize("smp", [*FILES, "single", "base", "pp2_mb16", "pp4_zbv_mb32"])
@pytest.mark.parametrize("rest", [[], ["model=gpt2_hf"], ["model=vit_hf", "data=digits"]], ids=" ".join)
def test_every_layout_composes_with_every_model(compose, smp, rest):
    config = compose(f"smp={smp}", *rest)
    OmegaConf.resolve(config.trainer)
    OmegaConf.resolve(config.data)
    assert config.model._target_


def test_a_file_of_sagemakers_library_is_a_layout(compose, tmp_path):
    file = tmp_path / "parameters.json"
    file.write_text(json.dumps({"partitions": 2, "microbatches": 4, "ddp": True}))
    config = compose("smp=sagemaker", f"smp.file={file}", "smp.active_microbatches=3")
    OmegaConf.resolve(config.trainer)
    OmegaConf.resolve(config.smp)
    assert config.trainer.devices == 2
    assert (config.smp.pipeline_parallel_degree, config.smp.microbatches, config.smp.optimize) == (2, 4, "memory")
    strategy = hydra.utils.instantiate(config.smp)
    assert strategy.config.active_microbatches == 3
    assert strategy.config.microbatches == 4


@pytest.mark.parametrize("rest", [[], ["model=gpt2_hf"], ["model=vit_hf", "data=digits"]], ids=" ".join)
def test_every_model_and_its_data_can_be_built(compose, rest):
    config = compose("smp=single", *rest)
    module = hydra.utils.instantiate(config.model)
    data = hydra.utils.instantiate(config.data)
    trainer = hydra.utils.instantiate(config.trainer)
    assert 100_000 < sum(parameter.numel() for parameter in module.parameters()) < 5_000_000
    assert data.batch_size == 2
    assert trainer.accumulate_grad_batches == 8


@pytest.mark.parametrize("group", sorted(path.name for path in CONFIGS.iterdir() if path.is_dir()))
def test_every_file_opens_with_a_sentence_about_it(group):
    for path in (CONFIGS / group).glob("*.yaml"):
        lines = path.read_text().splitlines()
        assert any(line.startswith("# ") and not line.startswith("# @") for line in lines[:2]), path


@pytest.mark.parametrize(
    ("overrides", "devices"),
    [
        (["smp=pp4"], 4),
        (["smp=pp2", "trainer.devices=4"], 4),
        (["smp=pp2", "smp.pipeline_parallel_degree=3"], 3),
        (["smp=sdp2"], 2),
        (["smp=sdp4"], 4),
        (["smp=mics2x2"], 4),
        (["smp=pp2_mics2x4_mb8"], 16),
        (["smp=pp2_sdp2"], 4),
        (["smp=zero1"], 2),
        (["smp=tp2"], 2),
        (["smp=tp2_pp2"], 4),
        (["smp=tp2_sdp2"], 4),
        (["smp=base", "smp.tensor_parallel_degree=2"], 2),
        (["smp=zero1", "trainer.devices=4"], 4),
        (["smp=pp2_zero1"], 4),
        (["smp=base"], None),
        (["smp=base", "smp.sharded_data_parallel_degree=2"], 2),
        (["smp=base", "smp.shard_optimizer_state=true"], 2),
    ],
    ids=str,
)
def test_devices_follow_the_layout_unless_they_are_given(compose, overrides, devices):
    assert compose(*overrides).trainer.devices == devices


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["smp=[pp2,zero1]"], "Name one: `smp=pp2_zero1`"),
        (["smp=[pp2, mics2x2, zero1]"], "names 3 layouts"),
        (["smp=pp2", "+smp._args_=[1]"], "every option has a name"),
        (["smp=mics2x0"], "0 replicas"),
    ],
)
def test_a_layout_that_would_be_taken_otherwise_than_said_is_refused(compose, overrides, message):
    with pytest.raises(Exception, match="(?s)" + re.escape(message)):
        compose(*overrides).trainer.devices  # noqa: B018
    assert compose("smp=[pp2]").trainer.devices == 2


def test_devices_follow_the_layout_also_where_hydra_does_not_run_the_application(monkeypatch):
    monkeypatch.setattr(HydraConfig.instance(), "cfg", None)
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
        assert hydra.compose("train", overrides=["smp=pp2_sdp2"]).trainer.devices == 4


def test_the_strategy_of_the_trainer_is_the_node_of_the_group(compose):
    strategy = compose("smp=pp2", "smp.microbatches=16").trainer.strategy
    assert strategy._target_ == "smp_strategy.SMPStrategy"
    assert (strategy.pipeline_parallel_degree, strategy.microbatches) == (2, 16)


def test_the_partition_is_written_to_the_run_directory(compose, tmp_path):
    assert compose().smp.partition_file == f"{tmp_path}/partition.json"


def test_the_reference_has_nothing_of_this_package_in_it(compose):
    config = compose("smp=single", "smp.microbatches=4")
    trainer = OmegaConf.to_container(config.trainer, resolve=True)
    assert trainer["strategy"] == "auto"
    assert trainer["devices"] == 1
    assert trainer["accumulate_grad_batches"] == 4
    assert config.data.batch_size == config.batch_size // 4
    assert "smp_strategy" not in str(trainer)


def test_the_reference_refuses_microbatches_of_different_sizes(compose):
    with pytest.raises(Exception, match="16 does not divide into 3 equal parts"):
        compose("smp=single", "smp.microbatches=3").data.batch_size  # noqa: B018


# --- recipe names and the schema ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FILES)
def test_a_file_says_the_same_as_its_name(compose, name):
    node = compose(f"smp={name}", "smp.partition_file=null").smp
    assert OmegaConf.to_container(node) == OmegaConf.to_container(schema(**parse_recipe(name)))


def test_any_recipe_is_an_option_of_the_group(compose):
    node = compose("smp=pp3_mb5").smp
    assert (node.pipeline_parallel_degree, node.microbatches) == (3, 5)


def test_a_schedule_and_virtual_stages_are_options_of_the_group(compose):
    node = compose("smp=pp4_1f1b_v2").smp
    assert (node.pipeline, node.virtual_pipeline_degree, node.microbatches) == ("1f1b", 2, None)


def test_limits_and_speeds_are_given_on_the_command_line(compose):
    assert compose("smp=pp2", "smp.memory_limit=16GiB").smp.memory_limit == "16GiB"
    node = compose("smp=pp2", "smp.memory_limit=[16GiB,1024]", "smp.stage_speeds=[1,2]").smp
    assert (node.memory_limit, node.stage_speeds) == (["16GiB", 1024], [1.0, 2.0])


@pytest.mark.parametrize("name", ["sdp2", "sdp4", "mics2x2", "pp2_sdp2"])
def test_layouts_that_shard_are_options_of_the_config(compose, name):
    options = OmegaConf.to_container(compose(f"smp={name}").smp)
    del options["_target_"]
    assert SMPConfig(**options).sharded_data_parallel_degree == (4 if name == "sdp4" else 2)


def test_patterns_of_split_layers_are_given_on_the_command_line(compose):
    node = compose("smp=tp2", "smp.tensor_parallel={*.mlp.up:column,*.mlp.down:row}").smp
    options = OmegaConf.to_container(node)
    del options["_target_"]
    assert SMPConfig(**options).tensor_parallel == {"*.mlp.up": "column", "*.mlp.down": "row"}


@pytest.mark.parametrize(("given", "meant"), [("dynamic", "dynamic"), ("1024", 1024), ("0.5", 0.5), ("null", None)])
def test_a_loss_scale_is_a_word_or_a_number(compose, given, meant):
    options = OmegaConf.to_container(compose("smp=pp2", f"smp.loss_scale={given}").smp)
    del options["_target_"]
    assert SMPConfig(**options).loss_scale == meant


def test_options_that_contradict_each_other_compose_and_are_refused_by_the_config(compose):
    options = OmegaConf.to_container(compose("smp=pp2", "smp.fp16=true", "smp.bf16=true").smp)
    del options["_target_"]
    with pytest.raises(ConfigError, match="`fp16` and `bf16` contradict each other"):
        SMPConfig(**options)


@pytest.mark.parametrize(("name", "part"), [("pp2typo", "pp2typo"), ("pp2_mbx", "mbx"), ("singel", "singel")])
def test_a_wrong_recipe_name_is_refused_with_the_part_that_is_wrong(compose, name, part):
    with pytest.raises(ConfigCompositionException, match=f"`smp={name}`: the part '{part}' is not understood"):
        compose(f"smp={name}")


def test_the_schema_has_every_option_with_its_default():
    node = OmegaConf.to_container(schema())
    assert node.pop("_target_") == "smp_strategy.SMPStrategy"
    assert node.keys() == dataclasses.asdict(SMPConfig()).keys()
    assert SMPConfig(**node) == SMPConfig()


def test_lists_of_the_command_line_reach_the_config(compose):
    node = OmegaConf.to_container(compose("smp=pp2", "smp.unit_classes=[Block,package.Head]").smp)
    node.pop("_target_")
    assert SMPConfig(**node).unit_classes == ("Block", "package.Head")


def test_the_schema_refuses_a_wrong_type(compose):
    with pytest.raises(ConfigCompositionException) as caught:
        compose("smp=pp2", "smp.microbatches=many")
    assert "Value 'many'" in str(caught.value.__cause__)


def test_the_schema_refuses_an_unknown_option(compose):
    with pytest.raises(ConfigCompositionException, match="Could not override 'smp.microbatch'"):
        compose("smp=pp2", "smp.microbatch=4")


# --- an application of a user ---------------------------------------------------------------------------------------


def test_a_users_application_composes_the_trainer_on_its_own_default(compose, user_app):
    config = compose("trainer=smp", "smp=pp2", folder=user_app / "conf", name="config")
    assert config.trainer.max_steps == 7
    assert config.trainer.devices == 2
    assert config.trainer.strategy.pipeline_parallel_degree == 2


def test_a_users_application_may_put_the_node_where_it_wants(compose, user_app):
    (user_app / "conf" / "config.yaml").write_text("defaults:\n  - smp@trainer.strategy: pp4_mb32\n")
    config = compose(folder=user_app / "conf", name="config")
    assert config.trainer.strategy.microbatches == 32


def test_a_users_file_wins_over_a_recipe_of_the_same_name(compose, user_app):
    (user_app / "conf" / "smp").mkdir()
    (user_app / "conf" / "smp" / "pp2.yaml").write_text("mine: true\n")
    assert compose("smp=pp2", folder=user_app / "conf", name="config").smp == {"mine": True}


APP = """
import sys, hydra
@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg):
    print(f"degree={cfg.smp.pipeline_parallel_degree} torch={'torch' in sys.modules}")
    print(f"dir={hydra.core.hydra_config.HydraConfig.get().runtime.output_dir}")
main()
"""


def run_app(folder, *command, **environ):
    (folder / "app.py").write_text(APP)
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_an_application_elsewhere_finds_the_groups_without_importing_torch(user_app):
    result = run_app(user_app, "app.py", "smp=pp2_mb4")
    assert "degree=2 torch=False" in result.stdout, result.stderr


def test_a_wrong_recipe_name_ends_an_application_with_one_sentence(user_app):
    result = run_app(user_app, "app.py", "smp=pp2_mbx")
    assert result.returncode != 0
    assert result.stderr.startswith("`smp=pp2_mbx`: the part 'mbx' is not understood.")


# --- one run directory for all ranks --------------------------------------------------------------------------------


@pytest.fixture
def agent_store():
    """What torchrun's agent serves."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def under_torchrun(store, **more):
    return {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        **more,
    }


def test_ranks_under_torchrun_agree_on_the_moment_of_the_first_that_asks(agent_store):
    first = agreed_start_time(under_torchrun(agent_store, RANK="1"))
    time.sleep(0.01)
    assert agreed_start_time(under_torchrun(agent_store, RANK="0")) == first
    assert abs(first - time.time()) < 10


def test_a_restart_under_torchrun_keeps_the_moment_whatever_its_node_has_counted(agent_store):
    first = agreed_start_time(under_torchrun(agent_store))
    time.sleep(0.01)
    assert agreed_start_time(under_torchrun(agent_store, TORCHELASTIC_RESTART_COUNT="1")) == first


def test_the_start_time_may_be_given_or_come_from_slurm():
    assert agreed_start_time({"SMP_START_TIME": "12.5", "SLURM_JOB_START_TIME": "7"}) == 12.5
    assert agreed_start_time({"SLURM_JOB_START_TIME": "7"}) == 7.0
    assert abs(agreed_start_time({}) - time.time()) < 10


@pytest.mark.parametrize("given", ["noon", "nan", "inf"])
def test_a_start_time_that_is_no_number_is_refused(given):
    with pytest.raises(ConfigError, match=f"SMP_START_TIME must be seconds since the epoch, but is '{given}'"):
        agreed_start_time({"SMP_START_TIME": given})


@pytest.mark.parametrize(
    ("environ", "rank"),
    [({}, 0), ({"RANK": "3", "LOCAL_RANK": "1"}, 3), ({"SLURM_PROCID": "2"}, 2), ({"LOCAL_RANK": "1"}, 1)],
)
def test_the_rank_comes_from_whoever_launched(environ, rank):
    assert global_rank(environ) == rank


def test_the_rank_is_put_behind_a_name_once():
    assert with_rank("train", 0) == "train"
    assert with_rank("train", 1) == "train_rank1"
    assert with_rank("train_rank1", 1) == "train_rank1"


def test_two_ranks_under_torchrun_share_one_run_directory(user_app):
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    with forked_interpreters():
        result = run_app(user_app, *torchrun, "app.py", "+smp_rundir=shared", "smp=pp2")
    folders = {line for line in result.stdout.splitlines() if line.startswith("dir=")}
    assert len(folders) == 1, result.stderr
    [folder] = (user_app / "outputs").glob("*/*")
    assert (folder / ".hydra" / "config.yaml").exists()
    assert sorted(path.name for path in folder.glob("*.log")) == ["app.log", "app_rank1.log"]


def test_divide_leaves_no_remainder():
    assert divide(16, 8) == 2
    for whole, parts in ((16, 3), (16, 0)):
        with pytest.raises(ConfigError, match="does not divide"):
            divide(whole, parts)
