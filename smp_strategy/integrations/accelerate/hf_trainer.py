"""Hugging Face's Trainer, whose model is spread over ranks.

``transformers.Trainer`` trains and evaluates through an Accelerator that it makes itself, so nearly all of it works
without knowing of stages. What does not is done by the methods below: files that the first process writes out of what
it holds itself, and values that it reads from files into a whole model.

They are put in front of ``transformers.Trainer`` for one Trainer only, by replacing the class of the object: behind
the classes of the user, whose methods find ours where they call ``super()``, and before Transformers' own::

    MyTrainer -> Seq2SeqTrainer -> SMPTrainer -> Trainer

[Note: whose Accelerator] An Accelerator is told of its plugin only, never of the Trainer that makes it, and a Trainer
offers nothing that is called in between with both of them at hand. So the plugin looks for a Trainer among the callers
of the Accelerator's ``__init__``, rather than replace anything in a class that other Trainers use.

What Hugging Face's ``TrainingArguments`` say of processes, where several of them read the same samples.

``TrainingArguments`` ask the process group for the world size and the rank, and the Trainer takes these for the number
of processes that read samples of their own and for the number of this one: it counts batches by them, numbers the
seeds of data workers and the files of random states. Where stages read alike, both have to be those of the replica,
as they are for Accelerate. (For SageMaker's library Transformers itself has them so.) What is done once for all
processes, saving and logging, is still done by the first of the world.
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
from transformers.trainer_utils import TrainOutput

from smp_strategy.checkpoint.storage.atomic_commit import replacing
from smp_strategy.config.config import SMPConfig
from smp_strategy.errors import ConfigError, UnsupportedError
from smp_strategy.integrations.accelerate.saving import OWN_FILE

__all__ = ["SMPTrainer", "adopt", "count_replicas", "trainer_above"]


class ReplicaArguments:
    """Stands in front of the class of one ``TrainingArguments`` object.

    Attributes:
        num_data_ranks, data_rank: processes that read samples of their own, and which of them this one reads with.
        stock: the class before.
    """

    num_data_ranks: int
    data_rank: int
    stock: type

    @property
    def world_size(self) -> int:
        """Processes that read samples of their own."""
        return self.num_data_ranks

    @property
    def process_index(self) -> int:
        """Which of them this one is, or reads with."""
        return self.data_rank

    @property
    def should_log(self) -> bool:
        """Whether this is the one process (of its machine, if so asked) that logs."""
        return self._is_first(everywhere=self.log_on_each_node)  # type: ignore[attr-defined]

    @property
    def should_save(self) -> bool:
        """Whether this is the one process that writes files."""
        return self._is_first(everywhere=self.save_on_each_node)  # type: ignore[attr-defined]

    @property
    def place_model_on_device(self) -> bool:
        """The engine moves this rank's share, when it is known; the whole model may not fit."""
        return False

    @contextmanager
    def main_process_first(self, local: bool = True, desc: str = "work") -> Iterator[None]:
        """Let the first process of the world, or of the machine, do something before the others."""
        state = self.distributed_state  # type: ignore[attr-defined]
        with state.local_main_process_first() if local else state.main_process_first():
            yield

    def _is_first(self, *, everywhere: bool) -> bool:
        state = self.distributed_state  # type: ignore[attr-defined]
        return state.is_local_main_process if everywhere else state.is_main_process

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Saved with the model and copied: both give plain arguments, which another Trainer may take.
        return copyreg._reconstructor, (self.stock, object, None), dict(vars(self))  # type: ignore[attr-defined]


def count_replicas(args: Any, num_data_ranks: int, data_rank: int) -> None:
    """Let ``args`` count processes that read samples of their own.

    Args:
        args: ``TrainingArguments``.
        num_data_ranks: how many there are.
        data_rank: which of them this one is, or reads with.
    """
    stock = getattr(type(args), "stock", type(args))
    names = {
        "num_data_ranks": num_data_ranks,
        "data_rank": data_rank,
        "stock": stock,
        "__module__": stock.__module__,
        "__qualname__": stock.__qualname__,
        "__doc__": stock.__doc__,
    }
    args.__class__ = type(stock.__name__, (ReplicaArguments, stock), names)


TESTED = "5.23"


class SMPTrainer(Trainer):
    """What a Trainer does otherwise when its model is spread over ranks. See the module docstring."""

    # Processes

    def is_world_process_zero(self) -> bool:
        """Whether this is the first process of the world; the arguments count replicas."""
        return bool(self.accelerator.is_main_process)

    def store_flos(self) -> None:
        """Add up what all processes have counted: those of a replica have counted the same."""
        session = self.accelerator.smp
        self.current_flos *= session.num_data_ranks / session.shape.world_size
        super().store_flos()

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> TrainOutput:
        """Train. The Trainer first lets go of what is prepared, and so meets a whole model. Collective."""
        session = self.accelerator.smp
        if session.has_engine:
            session.engine.restore_everywhere()
        return super()._inner_training_loop(*args, **kwargs)

    # Saving. The Trainer comes to these methods on all ranks.

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Write the whole model on the first process. Collective."""
        if state_dict is None:
            state_dict = self.accelerator.get_written_state_dict(self.model)
        super()._save(output_dir, state_dict=state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Write the optimizer's state as one process has it, on the first one. Collective."""
        state = self.accelerator.get_optimizer_state_dict(self.optimizer)
        if self.args.should_save:
            _save_file(state, Path(output_dir, OPTIMIZER_NAME))
            scheduler: Any = self.lr_scheduler
            _save_file(scheduler.state_dict(), Path(output_dir, SCHEDULER_NAME))

    def _save_rng_state(self, output_dir: str) -> None:
        """Write the random states once for each replica, whose ranks draw alike, and our own streams. Collective."""
        session = self.accelerator.smp
        ours = self.accelerator.get_own_state()
        if session.rank == session.data_ranks()[session.data_rank][0]:
            super()._save_rng_state(output_dir)
        if self.args.should_save:
            _save_file(ours, Path(output_dir, OWN_FILE))

    # Loading. All ranks read the files.

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Take this rank's share of the optimizer's state."""
        if checkpoint is None:
            return
        of_optimizer, of_scheduler = Path(checkpoint, OPTIMIZER_NAME), Path(checkpoint, SCHEDULER_NAME)
        if of_optimizer.is_file() and of_scheduler.is_file():
            # Into host memory: on the device there may be room for a share only.
            state = torch.load(of_optimizer, map_location="cpu", weights_only=True)
            self.accelerator.load_optimizer_state_dict(self.optimizer, state)
            scheduler: Any = self.lr_scheduler
            scheduler.load_state_dict(torch.load(of_scheduler, weights_only=True))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Continue the random streams of the run that has saved ``checkpoint``, those of the engine, too."""
        super()._load_rng_state(checkpoint)
        if checkpoint is not None and (ours := Path(checkpoint, OWN_FILE)).is_file():
            self.accelerator.load_own_state(load(ours))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load the weights, of which this rank may have its share only, from an earlier run of this Trainer."""
        with self._names_known():
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        """Load the weights that were best."""
        with self._names_known():
            super()._load_best_model()

    @contextmanager
    def _names_known(self) -> Iterator[None]:
        """In here all ranks have a state dict: PEFT looks at its names and shapes before it loads an adapter."""
        model: Any = self.model
        with ExitStack() as stack:
            for calls in self.accelerator.smp.state_calls:
                stack.enter_context(calls.collected(model.state_dict(keep_vars=True)))
            yield

    # What cannot be served

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: its backends let the first process of each replica decide."""
        raise UnsupportedError(
            "`Trainer.hyperparameter_search` is not built yet for smp_strategy: the search runs on one process, and "
            "those of a replica would try different values. Search around the launch: one launch for each trial."
        )


def trainer_above() -> Trainer | None:
    """The Trainer in one of whose methods this is called, if there is one. See [Note: whose Accelerator]."""
    frame = inspect.currentframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, Trainer):
            return owner
        frame = frame.f_back
    return None


def adopt(trainer: Trainer, session: Any) -> None:
    """Let ``trainer`` know that its Accelerator spreads the model.

    Args:
        trainer: is making its Accelerator just now.
        session: the :class:`~smp_strategy.integrations.accelerate.session.Session` of that Accelerator.

    Raises:
        ConfigError: this version of Transformers lacks what we build on, or arguments cannot be served.
    """
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
    """Refuse a Trainer that does not have the methods that we replace; warn if it is one that is not tested."""
    if transformers.__version__.startswith(f"{TESTED}."):
        return
    found = f"Transformers {transformers.__version__}, while smp_strategy is tested with {TESTED}"
    ours = {name: each for name, each in vars(SMPTrainer).items() if inspect.isfunction(each)}
    others = [name for name, each in ours.items() if not _is_alike(each, getattr(Trainer, name, None))]
    others.remove("_names_known")
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
    """Refuse arguments that are about one whole model on a process, and options for checkpoints of other forms."""
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


def _save_file(state: Any, path: Path) -> None:
    with replacing(path, is_folder=False) as staging:
        torch.save(state, staging)
