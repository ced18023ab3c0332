"""Scripts as users start them: Lightning's launcher, torchrun, Hydra sweeps, and what happens when a rank fails.

Real interpreters run under torchrun, where it restarts them, in a sweep, and where the end of an interpreter matters
(Lightning's own launcher starts them for the script of the README, ``tests/examples/test_readme.py``); elsewhere they
are forked.
"""

import json
import os
import random
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer

from smp_strategy import ConfigError
from tests.interpreters import forked_interpreters

TRAINING = """
import sys, warnings
from importlib import import_module
warnings.filterwarnings("ignore")
from lightning_toy import toy_loader, toy_module

def train(folder, root="lightning.pytorch", overrides={}, **options):
    module = toy_module(root, **overrides)
    quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False)
    trainer = import_module(root).Trainer(accelerator="cpu", max_epochs=1, default_root_dir=folder, **quiet, **options)
    trainer.fit(module, toy_loader())
    results = trainer.test(module, toy_loader(shuffle=False), verbose=False)
    # One write: the ranks share the pipe.
    sys.stdout.write(f"RANK {trainer.global_rank} OF {trainer.num_devices}: {results[0]['test_loss']:.6f}\\n")
"""


def run_forked(*arguments, **options):
    """As ``run``, in forks of this process."""
    with forked_interpreters():
        return run(*arguments, **options)


def run(
    folder: Path,
    body: str,
    *arguments: str,
    before: tuple[str, ...] = (),
    launcher: tuple[str, ...] = (),
    **environment: str,
):
    """Run a script that trains; returns its exit code, its lines, and the seconds that it took.

    A launcher is a module of Python or a program ``before`` it.
    """
    (folder / "toy_training.py").write_text(TRAINING)
    script = folder / "script.py"
    script.write_text(textwrap.dedent(body))
    here = Path(__file__).parent
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SMP_", "LOCAL_", "RANK"))}
    paths = [str(folder), str(here), str(here.parents[1]), *sys.path]
    begin = time.monotonic()
    done = subprocess.run(
        [*before, sys.executable, *launcher, str(script), *arguments],
        cwd=folder,
        env={**inherited, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        text=True,
        timeout=280,
        check=False,
    )
    return done.returncode, done.stdout, time.monotonic() - begin


def results_in(output: str) -> list[tuple[int, int, str]]:
    found = re.findall(r"RANK (\d+) OF (\d+): (\S+)", output)
    return sorted((int(rank), int(world), loss) for rank, world, loss in found)


BY_NAME = """
    import smp_strategy
    from toy_training import train
    train("out", strategy="smp", devices=2, root={root!r})
"""


@pytest.mark.parametrize("root", ["lightning.pytorch", "pytorch_lightning"])
def test_the_strategy_is_found_by_name_and_starts_its_ranks(root, tmp_path):
    code, output, _ = run_forked(tmp_path, BY_NAME.format(root=root), SMP_MICROBATCHES="2")
    assert code == 0, output
    (first, second) = results_in(output)
    assert (first[:2], second[:2]) == ((0, 2), (1, 2))
    assert first[2] == second[2]
    assert output.count("Process mesh: 2 ranks") == 1


def test_a_profiling_run_measures_writes_the_partition_and_ends_after_its_first_step(tmp_path):
    body = """
        import sys
        from smp_strategy.cli import main
        from toy_training import train

        def count(*args):
            sys.stdout.write("STEP\\n")

        if sys.argv[1] == "profile":
            sys.exit(main(["profile", "partition.json", "--", sys.executable, __file__, "train"]))
        train("out", overrides={"on_train_batch_start": count}, strategy="smp_pp2_mb2", devices=2)
    """
    code, output, _ = run_forked(tmp_path, body, "profile")
    assert code == 0, output
    assert output.count("STEP") == 2  # one on each rank
    assert output.count("Measured: times and activations of") == 1
    assert results_in(output) == []
    assert output.splitlines()[-1].startswith("Train with `load_partition=True, partition_file='partition.json'`")
    units = json.loads((tmp_path / "partition.json").read_text())["units"]
    code, output, _ = run_forked(tmp_path, body, "train", SMP_PARTITION_FILE="partition.json", SMP_LOAD_PARTITION="1")
    assert code == 0, output
    assert len(results_in(output)) == 2
    for stage in (0, 1):
        names = [unit["name"] for unit in units if unit["stage"] == stage]
        shown = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"
        assert re.search(rf"^{stage}      {1 - stage}      {re.escape(shown)} ", output, re.MULTILINE), output


@pytest.mark.one_in(1)
def test_torchrun_says_how_many_ranks_there_are(tmp_path):
    body = """
        from smp_strategy import SMPStrategy
        from toy_training import train
        train("out", strategy=SMPStrategy(microbatches=2))  # no `devices`
    """
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone")
    code, output, _ = run(tmp_path, body, launcher=launcher)
    assert code == 0, output
    assert [row[:2] for row in results_in(output)] == [(0, 2), (1, 2)]


LEAVING = """
    import atexit, os, sys

    def tell():
        names = [open(f"/proc/self/task/{thread}/comm").read() for thread in os.listdir("/proc/self/task")]
        sys.stdout.write(f"THREADS {sum('gloo' in name for name in names)}\\n")
        sys.stdout.flush()

    atexit.register(tell)  # first in, last out
    from lightning.pytorch import Trainer
    from lightning_toy import toy_loader, toy_module
    from smp_strategy import SMPStrategy
    from smp_strategy.distributed.deadlock import watch_of
    import torch.distributed as dist
    quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False)
    for layout in (
        dict(microbatches=2),
        dict(sharded_data_parallel_degree=2),
        dict(tensor_parallel_degree=2),
    ):
        trainer = Trainer(strategy=SMPStrategy(**layout), devices=2, accelerator="cpu", max_epochs=1, **quiet)
        module = toy_module("lightning.pytorch")
        trainer.fit(module, toy_loader())
        trainer.test(module, toy_loader(shuffle=False), verbose=False)
        tell()
    # The last look of the watch fell into a wait.
    watch_of().close()
    with watch_of().waiting(list, dist.group.WORLD, "others"):
        watch_of().look()
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted as Linux shows them")
def test_no_thread_of_gloo_outlives_the_interpreter(tmp_path):
    """One that wants to drop a tensor then aborts the process, now and then, after all is done."""
    code, output, _ = run(tmp_path, LEAVING)
    assert code == 0, output
    (*during, first, second) = [int(count) for count in re.findall(r"THREADS (\d+)", output)]
    assert len(during) == 2 * 3
    assert min(during) > 0
    assert (first, second) == (0, 0)


FAILING = """
    import os
    from smp_strategy import SMPStrategy
    from toy_training import train

    def training_step(self, batch, batch_idx):
        if batch_idx == 2 and os.environ.get("LOCAL_RANK", "0") == "{rank}":
            raise ValueError("a mistake of the user")
        return self.loss(batch)

    train("out", strategy=SMPStrategy({layout}), devices=2, overrides=dict(training_step=training_step))
"""


@pytest.mark.daily
# Which rank fails matters for who starts the other; the layout, for what the other waits for.
@pytest.mark.parametrize(
    ("rank", "layout"),
    [
        (0, "microbatches=2"),
        (1, "microbatches=2"),
        (1, "sharded_data_parallel_degree=2"),
        (0, "tensor_parallel_degree=2"),
    ],
)
def test_a_failure_on_one_rank_ends_all_with_its_traceback(rank, layout, tmp_path):
    code, output, seconds = run_forked(tmp_path, FAILING.format(rank=rank, layout=layout))
    assert code != 0
    assert seconds < 150  # on a machine that may be busy
    first_error = re.search(r"^.*Error: .*$", output, re.MULTILINE)
    assert first_error is not None, output
    assert "ValueError: a mistake of the user" in first_error[0]
    # Told once: one traceback, and a line of another rank.
    assert output.count("Traceback (most recent call last)") == 1
    assert output.count("raise ValueError") == 1
    if rank == 1:
        assert "PeerFailedError: rank 1 failed first:" in output
    assert len(output.splitlines()) <= 60


SIGNALLED = """
    import os, signal
    from smp_strategy import SMPStrategy
    from toy_training import train

    def training_step(self, batch, batch_idx):
        if batch_idx == 2 and os.environ.get("LOCAL_RANK", "0") == "{rank}":
            {fault}
        return self.loss(batch)

    train("out", strategy=SMPStrategy({layout}), devices={devices}, overrides=dict(training_step=training_step))
"""
GONE = "Rank 0 is gone: it was killed, or has ended|which has started this one, is gone"
KILLED = r"rank {} failed first: its process \(\d+\) was killed by {} \(signal {}\)"


# With three ranks, one of them has no connection to the one that is gone.
@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("rank", "fault", "layout", "devices", "said", "code"),
    [
        (2, "os.kill(os.getpid(), signal.SIGKILL)", "microbatches=2", 3, KILLED.format(2, "SIGKILL", 9), 1),
        (1, "os.kill(os.getpid(), 11)", "sharded_data_parallel_degree=2", 2, KILLED.format(1, "SIGSEGV", 11), 1),
        (1, "os._exit(7)", "tensor_parallel_degree=2", 2, r"rank 1 failed first: its process .* exit code 7", 1),
        (0, "os.kill(os.getpid(), signal.SIGKILL)", "microbatches=2", 3, GONE, -9),
        (1, "os.kill(os.getpid(), signal.SIGTERM)", "microbatches=2", 2, "SIGTERM has ended this run", 143),
        (0, "os.killpg(0, signal.SIGINT)", "microbatches=2", 2, "Detected KeyboardInterrupt", 1),
    ],
)
def test_a_signal_ends_all_ranks_and_is_named_in_few_lines(rank, fault, layout, devices, said, code, tmp_path):
    body = SIGNALLED.format(rank=rank, fault=fault, layout=layout, devices=devices)
    done, output, seconds = run_forked(tmp_path, body)
    assert done == code, output
    assert re.search(said, output), output
    assert "Traceback" not in output
    assert len(output.splitlines()) <= 60, output
    assert seconds < 150


HYDRA = """
    import sys
    import hydra
    from hydra.core.hydra_config import HydraConfig

    @hydra.main(config_path=None, config_name="app", version_base="1.3")
    def main(config):
        from smp_strategy import SMPStrategy
        from toy_training import train
        folder = HydraConfig.get().runtime.output_dir
        train(folder, strategy=SMPStrategy(microbatches=2), devices=config.devices)
        # One write: the ranks share the pipe.
        sys.stdout.write(f"JOB {HydraConfig.get().job.num} {config.seed} {folder}\\n")

    if __name__ == "__main__":
        main()
"""


@pytest.mark.one_in(1)
def test_a_hydra_sweep_runs_each_job_once_on_as_many_ranks_as_it_asks_for(tmp_path):
    (tmp_path / "app.yaml").write_text("devices: 2\nseed: 0\n")
    arguments = ("--config-dir=.", "-m", "devices=2,1", "seed=7", "hydra.sweep.dir=sweep")
    code, output, _ = run(tmp_path, HYDRA, *arguments)
    assert code == 0, output
    assert [row[:2] for row in results_in(output)] == [(0, 1), (0, 2), (1, 2)]
    assert sorted(path.name for path in (tmp_path / "sweep").iterdir()) == ["0", "1", "multirun.yaml"]
    assert not (tmp_path / "outputs").exists()
    assert not (tmp_path / "multirun").exists()
    jobs = set(re.findall(r"JOB (\d) (\d) (\S+)", output))
    assert jobs == {(str(number), "7", str(tmp_path / "sweep" / str(number))) for number in (0, 1)}


def start_by_submitit(monkeypatch, *, rank, num_ranks):
    variables = {"GLOBALID": rank, "LOCALID": rank, "NTASKS": num_ranks, "NODEID": 0, "JOB_ID": 4711}
    for name, value in variables.items():
        monkeypatch.setenv(f"SUBMITIT_LOCAL_{name}", str(value))


def test_submitit_tasks_are_recognised(monkeypatch):
    from smp_strategy.integrations.lightning import make_strategy

    start_by_submitit(monkeypatch, rank=1, num_ranks=2)
    environment = make_strategy("lightning.pytorch")().cluster_environment
    assert environment.creates_processes_externally
    assert (environment.global_rank(), environment.local_rank(), environment.world_size()) == (1, 1, 2)
    assert 15_000 <= environment.main_port < 35_000


@pytest.mark.parametrize(("num_ranks", "devices"), [(1, 2), (2, 4)])
def test_another_number_of_tasks_of_submitit_is_refused_with_its_setting(num_ranks, devices, monkeypatch):
    start_by_submitit(monkeypatch, rank=0, num_ranks=num_ranks)
    said = rf"devices={devices}.*hydra.launcher.tasks_per_node\), but that is {num_ranks}. .* start {devices} processes"
    with pytest.raises(ConfigError, match=said):
        Trainer(strategy="smp", accelerator="cpu", devices=devices, logger=False)


def test_tasks_of_submitit_are_the_devices_of_a_trainer_that_is_told_none(monkeypatch):
    start_by_submitit(monkeypatch, rank=0, num_ranks=2)
    assert Trainer(strategy="smp", accelerator="cpu", logger=False).num_devices == 2


def test_nodes_that_the_launcher_has_not_started_are_refused(monkeypatch):
    start_by_submitit(monkeypatch, rank=0, num_ranks=2)
    trainer = Trainer(strategy="smp", accelerator="cpu", devices=2, num_nodes=2, logger=False)
    with pytest.raises(ConfigError, match=r"num_nodes=2\)` needs 4 processes, but the launcher has started 2"):
        trainer.strategy.launcher.launch(pytest.fail)


ELASTIC = """
    import os, random, signal, sys, warnings
    warnings.filterwarnings("ignore")
    import torch
    from lightning.pytorch import Callback, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning_toy import toy_loader, toy_module
    from smp_strategy import SMPStrategy

    class Dying(Callback):
        # One rank, once, at a step that it draws.
        def on_train_batch_end(self, trainer, module, outputs, batch, index):
            step, rank = map(int, os.environ.get("DIES", "-1 0").split())
            if trainer.global_step == step and os.environ["RANK"] == str(rank) and not os.path.exists("dead"):
                open("dead", "w").close()
                os.kill(os.getpid(), signal.SIGKILL)

    kept = ModelCheckpoint(dirpath="kept", save_last=True, every_n_train_steps=2)
    module = toy_module()
    trainer = Trainer(
        strategy=SMPStrategy(microbatches=2, state_dict_type="sharded"), max_epochs=int(sys.argv[1]),
        callbacks=[Dying(), kept], accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, toy_loader(), ckpt_path="last")
    if trainer.is_global_zero:
        torch.save(module.state_dict(), "end.pt")
"""


def test_torchrun_restarts_a_run_that_goes_on_from_its_last_checkpoint_and_with_fewer_ranks_later(tmp_path):
    def train(start, folder, epochs, ranks, **environment):
        (tmp_path / folder).mkdir(exist_ok=True)
        launcher = ("-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone", "--max-restarts=2")
        code, output, _ = start(tmp_path / folder, ELASTIC, str(epochs), launcher=launcher, **environment)
        assert code == 0, output
        return output

    step, rank = random.Random(int(time.time())).randint(3, 11), int(time.time()) % 2
    output = train(run, "restarted", 2, 2, DIES=f"{step} {rank}")  # an agent that has forked does not restart
    assert (tmp_path / "restarted" / "dead").exists(), output
    assert "Restored all states from the checkpoint" in output
    assert "Restored all states from the checkpoint" in train(run_forked, "restarted", 3, 1)
    train(run_forked, "undisturbed", 3, 1)
    ends = [torch.load(tmp_path / folder / "end.pt") for folder in ("restarted", "undisturbed")]
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items()), (step, rank)
