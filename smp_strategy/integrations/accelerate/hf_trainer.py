"""Hugging Face's Trainer on a partitioned model: overridden methods of one Trainer and of its ``TrainingArguments``.

``transformers.Trainer`` trains and evaluates through an Accelerator that it makes itself, so nearly all of it works
unchanged. The methods below replace the rest: files that the first process would write from its own memory, and values
that are read from files into a whole model. They are added to a single Trainer, by replacing the class of the object:
behind the user's classes, whose ``super()`` calls reach them, and before Transformers' own::

    MyTrainer -> Seq2SeqTrainer -> SMPTrainer -> Trainer

[Note: whose Accelerator] An Accelerator gets its plugin only, never the Trainer that makes it, and a Trainer offers no
callback in between that has both at hand. So the plugin looks for a Trainer among the callers of the Accelerator's
``__init__``, rather than patch a class that other Trainers use.

``TrainingArguments`` take world size and rank from the process group, and the Trainer uses them as number and index of
the processes that read samples: for counting batches, seeding data workers and naming files of random states. The
stages of a pipeline read alike, so both are replaced by number and index of data ranks, as in Accelerate.
(For SageMaker's library Transformers does this itself.) Saving and logging are still done by the first process of the
world.
"""

import copyreg
import inspect
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.utils import load
from transformers import Trainer
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from smp_strategy.config.config import SMPConfig
from smp_strategy.engine.saving.saved_models.state_folders import save_file
from smp_strategy.errors import ConfigError, UnsupportedError
from smp_strategy.integrations.accelerate import state_files
from smp_strategy.integrations.accelerate.optimizer import leave_file, unwrapped
from smp_strategy.integrations.accelerate.saving import OWN_FILE
from smp_strategy.model.patching import subclass_of

__all__ = ["SMPTrainer", "adopt", "count_replicas", "trainer_above"]


class ReplicaArguments:
    """Mixin for the class of one ``TrainingArguments`` object, which counts data ranks; ``stock`` is its own class."""

    num_data_ranks: int
    data_rank: int
    stock: type

    @property
    def world_size(self) -> int:
        """Number of processes that read samples of their own."""
        return self.num_data_ranks

    @property
    def process_index(self) -> int:
        """Index of the process whose samples this one reads."""
        return self.data_rank

    @property
    def should_log(self) -> bool:
        """Whether this is the one process (of the world, or of its machine with ``log_on_each_node``) that logs."""
        return self._is_first(everywhere=self.log_on_each_node)  # type: ignore[attr-defined]

    @property
    def should_save(self) -> bool:
        """Whether this is the one process that writes files."""
        return self._is_first(everywhere=self.save_on_each_node)  # type: ignore[attr-defined]

    @property
    def place_model_on_device(self) -> bool:
        """False: the engine moves this rank's part, once it is known; the whole model may not fit."""
        return False

    @contextmanager
    def main_process_first(self, local: bool = True, desc: str = "work") -> Iterator[None]:
        """Context that the first process of the world, or of the machine, runs before the others."""
        state = self.distributed_state  # type: ignore[attr-defined]
        with state.local_main_process_first() if local else state.main_process_first():
            yield

    def _is_first(self, *, everywhere: bool) -> bool:
        state = self.distributed_state  # type: ignore[attr-defined]
        return state.is_local_main_process if everywhere else state.is_main_process

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Pickled with the model, or copied: both yield plain arguments, which another Trainer may take.
        return copyreg._reconstructor, (self.stock, object, None), dict(vars(self))  # type: ignore[attr-defined]


def count_replicas(args: Any, num_data_ranks: int, data_rank: int) -> None:
    """Let ``TrainingArguments`` count data ranks; this process reads the samples of ``data_rank``."""
    stock = getattr(type(args), "stock", type(args))
    counts = {"num_data_ranks": num_data_ranks, "data_rank": data_rank}
    args.__class__ = subclass_of(stock, ReplicaArguments, stock=stock, **counts)


TESTED = "5.23"


class SMPTrainer(Trainer):
    """Methods of a Trainer that differ if its model is partitioned."""

    # Processes

    def is_world_process_zero(self) -> bool:
        """Whether this is the first process of the world, since the arguments count data ranks."""
        return bool(self.accelerator.is_main_process)

    def store_flos(self) -> None:
        """Sum the operations of all processes, counting each replica once."""
        session = self.accelerator.smp
        self.current_flos *= session.num_data_ranks / session.shape.world_size
        super().store_flos()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, with the figures of an ``SMPMonitor`` beside the loss. Collective if there is one."""
        if "loss" in logs:
            logs.update(self.accelerator.smp.figures())
        super().log(logs, start_time)

    # Evaluation

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate; see :meth:`evaluation_loop`."""
        with _sharded_for_a_while(self):
            return super().evaluate(*args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Predict; see :meth:`evaluation_loop`."""
        with _sharded_for_a_while(self):
            return super().predict(*args, **kwargs)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Run over a data loader; a subclass that goes on after that learns that ranks need each other.

        The Trainer of sentence-transformers deals the texts of its evaluators out over ranks then, unless the model is
        sharded, for which it asks this attribute of FSDP's.
        """
        output = super().evaluation_loop(*args, **kwargs)
        shape = self.accelerator.smp.shape
        self.is_fsdp_enabled = shape.pp * shape.tp * shape.dp_shard > 1
        return output

    # Saving. The Trainer calls these methods on all ranks.

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save on all processes. Collective."""
        # Not by the Trainer's own method: in Transformers 5.17 it calls `_save` on the first process only.
        self._save(output_dir)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Write the model: all processes write files of weights, the first one all others. Collective."""
        if state_dict is None and self._saves_together():
            if self.args.should_save:
                super()._save(output_dir)  # calls `save_pretrained`
            else:  # which Transformers would not call here
                model: Any = self.model
                model.save_pretrained(output_dir or self.args.output_dir, is_main_process=False)
            return
        if state_dict is None:
            state_dict = self.accelerator.get_written_state_dict(self.model)
        if self.args.should_save:
            super()._save(output_dir, state_dict=state_dict)

    def _saves_together(self) -> bool:
        """Whether ``save_pretrained`` of the model takes all processes."""
        calls = self.accelerator.smp.pretrained_calls
        return any(each.model is self.model and each.are_collective for each in calls)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Write the full optimizer state, of which no process ever has all. Collective."""
        self.accelerator.write_optimizer_state_dict(self.optimizer, Path(output_dir, OPTIMIZER_NAME))
        if self.args.should_save:
            scheduler: Any = self.lr_scheduler
            save_file(scheduler.state_dict(), Path(output_dir, SCHEDULER_NAME))

    def _save_rng_state(self, output_dir: str) -> None:
        """Write the random states once for each replica, whose ranks draw alike, and our own streams. Collective."""
        session = self.accelerator.smp
        ours = self.accelerator.get_own_state()
        if session.rank == session.data_ranks()[session.data_rank][0]:
            super()._save_rng_state(output_dir)
        if self.args.should_save:
            save_file(ours, Path(output_dir, OWN_FILE))

    # Loading. All ranks read the files.

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load this rank's shard of the optimizer state."""
        if checkpoint is None:
            return
        of_optimizer, of_scheduler = Path(checkpoint, OPTIMIZER_NAME), Path(checkpoint, SCHEDULER_NAME)
        if of_optimizer.is_file() and of_scheduler.is_file():
            # Mapped into host memory: this rank reads its shard only.
            state = state_files.mapped(of_optimizer)
            self.accelerator.load_optimizer_state_dict(self.optimizer, state)
            leave_file(unwrapped([self.optimizer])[0])
            scheduler: Any = self.lr_scheduler
            scheduler.load_state_dict(torch.load(of_scheduler, weights_only=True))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Restore the random streams of the run that saved ``checkpoint``, including those of the engine."""
        super()._load_rng_state(checkpoint)
        if checkpoint is not None and (ours := Path(checkpoint, OWN_FILE)).is_file():
            self.accelerator.load_own_state(load(ours))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load the weights of an earlier run of this Trainer; each rank takes its shard."""
        with self._names_known():
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        """Load the best weights."""
        with self._names_known():
            super()._load_best_model()

    @contextmanager
    def _names_known(self) -> Iterator[None]:
        """Context in which all ranks have a state dict: PEFT reads names and shapes before it loads an adapter."""
        model: Any = self.model
        with ExitStack() as stack:
            for calls in self.accelerator.smp.state_calls:
                stack.enter_context(calls.collected(model.state_dict(keep_vars=True)))
            yield

    # Unsupported

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: its backends let the first process of each replica decide."""
        raise UnsupportedError(
            "`Trainer.hyperparameter_search` is not built yet for smp_strategy: the search runs on one process, and "
            "those of a replica would try different values. Search around the launch: one launch for each trial."
        )


@contextmanager
def _sharded_for_a_while(trainer: Trainer) -> Iterator[None]:
    """Context after which ``trainer`` is no longer said to be sharded, if :meth:`SMPTrainer.evaluation_loop` did."""
    try:
        yield
    finally:
        trainer.is_fsdp_enabled = False


def trainer_above() -> Trainer | None:
    """Return the Trainer whose method is calling, if any. See [Note: whose Accelerator]."""
    frame = inspect.currentframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, Trainer):
            return owner
        frame = frame.f_back
    return None


def adopt(trainer: Trainer, session: Any) -> None:
    """Add :class:`SMPTrainer` and :class:`ReplicaArguments` to a Trainer that is constructing its Accelerator."""
    _check_version()
    _check_arguments(trainer.args, session.config)
    count_replicas(trainer.args, session.num_data_ranks, session.data_rank)
    stock = type(trainer)
    if issubclass(stock, SMPTrainer):
        return
    bases = (SMPTrainer,) if stock is Trainer else (stock, SMPTrainer)
    names = {"__module__": stock.__module__, "__qualname__": stock.__qualname__, "__doc__": stock.__doc__}
    trainer.__class__ = type(stock.__name__, bases, names)


def _check_version() -> None:
    """Refuse a Trainer without the methods that are overridden; warn if the version is untested."""
    if transformers.__version__.startswith(f"{TESTED}."):
        return
    found = f"Transformers {transformers.__version__}, while smp_strategy is tested with {TESTED}"
    ours = {name: each for name, each in vars(SMPTrainer).items() if inspect.isfunction(each)}
    others = [name for name, each in ours.items() if not _is_alike(each, getattr(Trainer, name, None))]
    for own in ("_names_known", "_saves_together"):
        others.remove(own)
    if others:
        raise ConfigError(
            f"`transformers.Trainer` is that of {found}: its methods {', '.join(others)} differ, so that the model "
            f"might be saved wrongly. Install transformers=={TESTED}.*, or write the training loop with Accelerate."
        )
    warnings.warn(
        f"`transformers.Trainer` is that of {found}. The methods that smp_strategy replaces are there; whether saving "
        "and resuming are right is not tested.",
        stacklevel=2,
    )


def _is_alike(ours: Any, theirs: Any) -> bool:
    if theirs is None:
        return False
    if "kwargs" in (mine := list(inspect.signature(ours).parameters)):
        return True
    return mine == list(inspect.signature(theirs).parameters)


def _check_arguments(args: Any, config: SMPConfig) -> None:
    """Refuse arguments that need a whole model on a process, and options for other checkpoint forms."""
    problems = []
    for name, value, default in (
        ("state_dict_type", config.state_dict_type, "full"),
        ("async_save", config.async_save, False),
    ):
        if value != default:
            problems.append(
                f"`{name}={value!r}` is not offered under `transformers.Trainer`, whose checkpoints are those of "
                "Transformers: files of one process, there when the next step begins. Leave it out, or write the "
                "training loop with Accelerate."
            )
    if args.save_on_each_node:
        problems.append(
            "`save_on_each_node=True` would write the model on one process of each machine, but it is collected on the "
            "first process of all. Leave it out, and use a folder that all machines see, or copy it."
        )
    if args.auto_find_batch_size:
        problems.append(
            "`auto_find_batch_size=True` tries again when a process runs out of memory, of which the other stages know "
            "nothing. Leave it out; `microbatches` decides what a stage keeps."
        )
    for name in ("fp16_full_eval", "bf16_full_eval"):
        if getattr(args, name):
            problems.append(
                f"`{name}=True` converts the whole model in place, of which a rank has a share. Use "
                f"`{name.split('_')[0]}=True`, which computes in that type in training and evaluation."
            )
    if (optim := getattr(args.optim, "value", args.optim)) in ("lomo", "adalomo"):
        problems.append(
            f"`optim={optim}` updates each parameter while backward runs, before all microbatches have added to "
            "its gradient. Use another optimizer; `shard_optimizer_state` saves memory, too."
        )
    if problems:
        raise ConfigError(problems)
