"""Command line interface ``smp`` (``python -m smp_strategy.cli``): arguments and exit status of its commands.

Commands import their modules late, so that ``--help`` does not wait for PyTorch.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version

from smp_strategy.config.sizes import parse_bytes
from smp_strategy.errors import SMPError, printable

__all__ = ["main"]

FAILED = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: Arguments of the command line; ``None``: those of this process.

    Returns:
        Exit status: 0 for success, 1 for damage found by ``smp verify`` or a machine on which no ranks can
        train (``smp doctor``), 2 for a failed command, 130 for an interrupt.
        Errors of the script of ``smp run`` are raised.
    """
    given = _parser().parse_args(arguments)
    if given.command == "run":
        return import_module("smp_strategy.integrations.sagemaker.run_script").run(given)
    try:
        return import_module(f"smp_strategy.{given.run}").run(given)
    except (SMPError, OSError) as error:
        status, told = FAILED, " ".join((str(error), *getattr(error, "__notes__", ())))
    except RecursionError:
        status, told = FAILED, "something in the checkpoint is nested too deeply, or in itself."
    except KeyboardInterrupt:
        status, told = 130, "interrupted; nothing was written."
    print(printable(f"smp {given.command}: {told}", lines=False), file=sys.stderr)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="smp",
        description="Checkpoints: write them as other programs want them, take theirs over, look, verify. "
        "Layouts: plan them, estimate one. Partitions: explain them. The machine: examine it. Scripts of SageMaker's "
        "libraries: run them.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version, and that of PyTorch")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_export(commands)
    _add_import(commands)
    _add_inspect(commands)
    _add_verify(commands)
    _add_explain(commands)
    _add_plan(commands)
    _add_profile(commands)
    _add_estimate(commands)
    _add_doctor(commands)
    _add_run(commands)
    return parser


class _Version(argparse.Action):
    """Option that prints the versions of this package and of PyTorch, and exits."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        ours = import_module("smp_strategy").__version__
        print(f"smp_strategy {ours} (PyTorch {version('torch')})")
        parser.exit()


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on.")
    return int(text)


def _path(text: str) -> str:
    if not text:  # of a variable that is not set, perhaps; it would stand for the folder of this process
        raise argparse.ArgumentTypeError("the path is empty. Give a file or a folder.")
    return text


def _size(text: str) -> int:
    try:
        size = parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no room for a tensor. Write 5GB, for example.")
    return size


def _add_export(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "export",
        help="write a checkpoint as safetensors, as a directory of Hugging Face, or in the other form",
        description="Write a checkpoint, sharded or full, as other programs want it.",
    )
    parser.add_argument(
        "checkpoint", type=_path, help="what is read: a sharded or a full checkpoint, or what `smp import` reads"
    )
    parser.add_argument("out", type=_path, help="what is written: a directory, or a file with --form full")
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--form",
        choices=("safetensors", "full", "sharded"),
        default="safetensors",
        help="safetensors: weights only (default); full: one file of Lightning; sharded: a directory of PyTorch's "
        "distributed checkpoints. The last two keep the state of optimizers and all the rest",
    )
    form.add_argument(
        "--hf",
        metavar="DIR",
        help="write what `from_pretrained` reads: DIR, of the same model, has config.json and maybe a tokenizer",
    )
    parser.add_argument(
        "--prefix",
        help="take the weights whose names begin with this, and leave it away (model. for example); with --hf it is "
        "found where there is one only",
    )
    parser.add_argument(
        "--max-shard-size", type=_size, default="5GB", metavar="SIZE", help="of a safetensors file (default: 5GB)"
    )
    parser.add_argument(
        "--merge-adapters",
        metavar="DIR",
        help="add LoRA adapters of PEFT to the weights that they adapt: DIR has adapter_config.json and, unless the "
        "checkpoint has the adapters, adapter_model.safetensors",
    )
    parser.add_argument("--dtype", help="write floating point weights in this: bfloat16, float16, float32")
    _add_common(parser)
    parser.set_defaults(run="checkpoint.tools.export")


def _add_import(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "import",
        help="make a checkpoint of weights of others: Hugging Face, FSDP, DCP, Lightning, SageMaker",
        description="Make a checkpoint that a Trainer takes as ckpt_path, of what other programs have written.",
    )
    parser.add_argument(
        "checkpoint",
        type=_path,
        metavar="source",
        help="a Lightning or torch.save'd file, safetensors (a file, or a directory with an index), a directory of "
        "PyTorch's distributed checkpoints, or one of SageMaker's model_0_0.pt, model_0_1.pt, ...",
    )
    parser.add_argument("out", type=_path, help="what is written: a directory, or a file with --form full")
    parser.add_argument(
        "--form", choices=("sharded", "full"), default="sharded", help="of what is written (default: sharded)"
    )
    parser.add_argument(
        "--prefix",
        default="",
        help="put this in front of the names of weights (model. for a LightningModule with the attribute `model`)",
    )
    parser.add_argument(
        "--like",
        metavar="CHECKPOINT",
        help="a checkpoint of the same model with whole tensors, which tells how SageMaker's parts of split layers go "
        "together, and which names are of the same tensor",
    )
    _add_common(parser)
    parser.set_defaults(run="checkpoint.tools.import_")


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--weights", metavar="KEY", help="where the weights are in what is read, if it is unusual: ema.model"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace what is there under the name of the output")
    parser.add_argument("--quiet", action="store_true", help="show no progress")


def _add_inspect(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("inspect", help="list tensors, what has written them, and whether they are intact")
    parser.add_argument("checkpoint", type=_path, help="a checkpoint, or anything that `smp import` reads")
    parser.add_argument("--json", action="store_true", help="as data")
    parser.add_argument("--verify", action="store_true", help="read everything and compare it with its digests")
    parser.add_argument("--summary", action="store_true", help="leave out the list of tensors")
    parser.add_argument("--weights", metavar="KEY", help="where the weights are, if it is unusual: ema.model")
    parser.set_defaults(run="checkpoint.tools.inspect")


def _add_verify(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "verify",
        help="compare every byte of checkpoints with their digests",
        description="Exit status: 0 all are intact; 1 one is damaged; 2 one cannot be verified.",
    )
    parser.add_argument("checkpoints", type=_path, nargs="+", metavar="checkpoint", help="sharded or full")
    parser.set_defaults(run="checkpoint.tools.verify")


def _add_explain(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("explain", help="say which units each stage has, and why")
    parser.add_argument("partition", type=_path, help="what `partition_file` or `save_partition` has written")
    parser.add_argument(
        "out", type=_path, nargs="?", help="a file: .txt, .json or .html; without it the explanation is printed"
    )
    parser.set_defaults(run="reports.explain.command")


def _add_plan(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "plan",
        help="say which degrees of parallelism train a model fastest on a cluster",
        description="Search pipeline, tensor and sharded parallelism, microbatches and recomputation within the memory "
        "of a device. No process group, no weights: a laptop will do.",
    )
    _add_job(parser)
    parser.add_argument(
        "--show", type=_count, default=8, metavar="N", help="layouts that are planned in full (default: 8)"
    )
    parser.set_defaults(run="engine.commands.plan_command")


def _add_estimate(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("estimate", help="say how long a step of one layout takes, and what memory it needs")
    _add_job(parser)
    parser.add_argument(
        "--layout", required=True, metavar="RECIPE", help="pp4_tp2_sdp8_mb16, for example; replicas fill the rest"
    )
    parser.add_argument("--recompute", action="store_true", help="units compute their activations again")
    parser.set_defaults(run="engine.commands.plan_command")


def _add_job(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a folder or file with a config.json of Hugging Face, or module:function")
    parser.add_argument(
        "--cluster", required=True, help="64xa100, 4x8xh100 (nodes, devices of each), or a YAML file (docs/planner.md)"
    )
    parser.add_argument(
        "--global-batch", required=True, type=_count, metavar="N", help="samples of a step of all devices"
    )
    parser.add_argument(
        "--sequence", type=_count, metavar="S", help="tokens of a sample (default: the model's positions)"
    )
    parser.add_argument("--precision", choices=("bf16", "fp16", "float32"), default="bf16", help="default: bf16")
    parser.add_argument(
        "--memory-limit", type=_size, metavar="SIZE", help="of a device (default: all of it, less 8 %%)"
    )
    parser.add_argument("--json", action="store_true", help="print the layouts as data")
    parser.add_argument("--hydra", metavar="FILE", help="write the best layout as a configuration of the group smp")
    parser.add_argument("--accelerate", metavar="FILE", help="write the best layout for `accelerate launch`")


def _add_profile(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "profile",
        help="run one training step of a job, measure its units, and write the partition that fits them",
        description="The command trains as ever, with its own launcher and options, and ends after its first step.",
    )
    parser.add_argument("partition", type=_path, help="file to write, for `partition_file` of the job that trains")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="command", help="that trains, with arguments")
    parser.set_defaults(run="engine.commands.profiling_run")


def _add_doctor(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "doctor",
        help="say what is installed, which devices and transports there are, what works here, what to install",
        description="Two processes try the transports, for some seconds. Exit status: 0 if two ranks can train here, "
        "else 1.",
    )
    parser.add_argument("--quick", action="store_true", help="do not try the transports")
    parser.set_defaults(run="engine.commands.doctor")


def _add_run(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "run",
        help="run a script that imports SageMaker's libraries, without an edit",
        description="Give the names `smdistributed.*` to this package and run the script. With several ranks: torchrun "
        "--nproc-per-node 2 -m smp_strategy.smp script.py",
    )
    parser.add_argument("script", help="a Python file")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")


if __name__ == "__main__":
    sys.exit(main())
