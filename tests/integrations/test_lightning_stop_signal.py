"""SIGTERM ends training on all ranks before the same step, whichever rank gets it."""

import io
import os
import signal
from importlib import import_module

import pytest
import torch.distributed as dist
from lightning_toy import NEWER, OLDER, on_ranks, toy_loader, toy_module, toy_trainer

from smp_strategy.integrations.lightning import sigterm as stop_signal
from smp_strategy.integrations.lightning.sigterm import is_at_terminal
from smp_strategy.integrations.lightning.tree import Tree

LAYOUTS = {
    "pp2": {"pipeline_parallel_degree": 2, "microbatches": 2},
    "two replicas": {"pipeline_parallel_degree": 1, "microbatches": 1},
}


def ended(folder, root, smp, victim, moment, batch=1, **options):
    """Steps that each rank has done, and those in the checkpoint that is saved of the exception."""

    def stop(module, *given):
        # The hook's `batch_idx` is its last argument.
        if dist.get_rank() == victim and given[-1] == batch:
            os.kill(os.getpid(), signal.SIGTERM)

    module = toy_module(root, **{moment: stop})
    checkpoint = import_module(f"{root}.callbacks").ModelCheckpoint(folder, filename="ended", save_on_exception=True)
    trainer = toy_trainer(folder, root, smp=smp, callbacks=[checkpoint], enable_checkpointing=True, **options)
    exceptions = import_module(f"{root}.utilities.exceptions")
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(exceptions.SIGTERMException) as caught:
        trainer.fit(module, toy_loader(batch_size=4), toy_loader(shuffle=False))
    assert signal.getsignal(signal.SIGTERM) == handler
    # Nobody is at a terminal here.
    assert caught.value.code == 143
    return trainer.global_step, sorted(path.name for path in folder.glob("*.ckpt"))


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_ranks_stop_before_the_same_step(layout, victim, tmp_path):
    found = on_ranks(ended, 2, tmp_path, NEWER, LAYOUTS[layout], victim, "on_train_batch_end")
    # The signal comes in step 1; before step 2 all are told, and look at it before step 3.
    assert [steps for steps, _ in found] == [3, 3]
    assert len(found[0][1]) == 1


def test_it_is_noticed_in_validation(tmp_path):
    everything = {"num_sanity_val_steps": -1}
    found = on_ranks(ended, 2, tmp_path, NEWER, LAYOUTS["pp2"], 1, "on_validation_batch_end", **everything)
    # In the sanity check, before training.
    assert [steps for steps, _ in found] == [0, 0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_follows_training_where_the_signal_comes_in_the_last_step(layout, tmp_path):
    options = {"batch": 3, "limit_train_batches": 4, "limit_val_batches": 0, "max_epochs": 1}
    found = on_ranks(ended, 2, tmp_path, NEWER, LAYOUTS[layout], 1, "on_train_batch_end", **options)
    assert [steps for steps, _ in found] == [4, 4]


def test_nothing_follows_training_where_the_signal_comes_in_the_last_validation(tmp_path):
    options = {"batch": 0, "limit_train_batches": 4, "limit_val_batches": 1, "num_sanity_val_steps": 0, "max_epochs": 1}
    found = on_ranks(ended, 2, tmp_path, NEWER, LAYOUTS["pp2"], 1, "on_validation_batch_end", **options)
    assert [steps for steps, _ in found] == [4, 4]


def test_in_the_other_tree(tmp_path):
    found = on_ranks(ended, 2, tmp_path, OLDER, LAYOUTS["pp2"], 1, "on_train_batch_end")
    assert [steps for steps, _ in found] == [3, 3]


def evaluated(folder, function, smp, victim):
    """Batches until a signal in the second has ended it, and what ended it; of one process or of a rank."""
    seen = []

    def stop(module, *given):
        seen.append(given[-1])
        if (dist.get_rank() if smp else 0) == victim and len(seen) == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    hook = {"validate": "validation"}.get(function, function)
    module = toy_module(NEWER, **{f"on_{hook}_batch_start": stop})
    try:
        getattr(toy_trainer(folder, NEWER, smp=smp), function)(module, toy_loader(batch_size=2, shuffle=False))
    except SystemExit as end:
        return len(seen), end.code
    return len(seen), None


@pytest.mark.parametrize("smp", [LAYOUTS["pp2"], {"tensor_parallel_degree": 2}])
@pytest.mark.parametrize(("function", "victim"), [("validate", 0), ("test", 1), ("predict", 1)])
def test_evaluation_stops_and_prediction_does_not_as_in_one_process(function, victim, smp, tmp_path):
    (plain,) = on_ranks(evaluated, 1, tmp_path, function, None, 0)
    found = on_ranks(evaluated, 2, tmp_path, function, smp, victim)
    if function == "predict":
        assert found == [plain] * 2
        assert plain[1] is None
    else:
        assert plain == (2, None)  # plain Lightning knows of no scheduler
        # All ranks are told before the third batch, and look at it before the fourth.
        assert found == [(3, 143)] * 2


@pytest.mark.parametrize("function", ["validate", "predict"])
def test_replicas_end_what_they_evaluate(function, tmp_path):
    counts = on_ranks(evaluated, 2, tmp_path, function, LAYOUTS["two replicas"], 1)
    assert counts[0] == counts[1]
    assert counts[0][1] is None


class Stream(io.StringIO):
    """As much of a terminal as is asked for."""

    def isatty(self):
        return True


def closed():
    stream = Stream()
    stream.close()
    return stream


@pytest.mark.parametrize(
    ("environ", "streams", "expected"),
    [
        ({}, [Stream(), None, None], True),
        ({}, [io.StringIO(), io.StringIO(), Stream()], True),  # `train.py > log < /dev/null`
        ({"SLURM_JOB_ID": "1"}, [Stream(), Stream(), Stream()], False),  # `srun --pty`
        ({}, [io.StringIO(), io.StringIO(), io.StringIO()], False),
        ({}, [None, None, None], False),  # a service
        ({}, [closed(), None, None], False),
    ],
)
def test_somebody_is_at_a_terminal_if_one_of_the_streams_is_one(environ, streams, expected):
    assert is_at_terminal(environ, streams) == expected


def end_of(code, is_there):
    """The exit code of the exception that ends training, where somebody is at a terminal or nobody is."""
    stop_signal.is_at_terminal = lambda environ, streams: is_there
    exception = import_module(f"{NEWER}.utilities.exceptions").SIGTERMException(*code)
    stop_signal.end_as_stopped(exception, Tree(NEWER))
    other = SystemExit()
    stop_signal.end_as_stopped(other, Tree(NEWER))
    return exception.code, other.code


@pytest.mark.parametrize(
    ("code", "is_there", "expected"), [((), False, 143), ((), True, None), ((7,), False, 7), ((0,), False, 0)]
)
def test_the_exit_code_is_that_of_a_signal_where_nobody_is_at_a_terminal(code, is_there, expected):
    assert on_ranks(end_of, 1, code, is_there) == [(expected, None)]
