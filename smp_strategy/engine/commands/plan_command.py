"""Commands ``smp plan`` and ``smp estimate``: the fastest layouts of a model on a cluster, or the figures of one.

The model is made from a configuration of Hugging Face, or by a function of the user, on the meta device. There is no
process group, and there are no weights.
"""

import importlib
import inspect
import json
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from torch import nn

from smp_strategy.config.config import SMPConfig
from smp_strategy.config.recipe import parse_recipe
from smp_strategy.engine.commands.layout_planning import LayoutPlanner
from smp_strategy.errors import ConfigError
from smp_strategy.planning.layouts.cluster import Cluster, JobLayout
from smp_strategy.planning.layouts.estimate import Estimate
from smp_strategy.planning.output_file import write_atomically
from smp_strategy.reports.layout_plan import layouts_text, plan_as_data, run_options

__all__ = ["run"]

PRECISIONS = {"bf16": {"bf16": True}, "fp16": {"fp16": True}, "float32": {}}


def run(given: Namespace) -> int:
    """Print the plan, write the files that are asked for; returns the exit status: 1 if nothing fits."""
    cluster = Cluster.read(given.cluster)
    layout = None if given.command == "plan" else _layout(given, cluster)  # before a model is built
    model = load_model(given.model, given.sequence)
    planner = LayoutPlanner(
        module=model.module,
        step=model.step,
        batch_of=model.batch_of,
        cluster=cluster,
        options=PRECISIONS[given.precision],
        memory_limit=given.memory_limit,
    )
    plan = planner.search(given.global_batch, finalists=given.show) if layout is None else planner.estimate(layout)
    best = plan.estimates[0]
    print(json.dumps(plan_as_data(plan), indent=2) if given.json else layouts_text(plan, sequence=model.sequence))
    if given.hydra is not None:
        write_atomically(given.hydra, _hydra(best, given))
    if given.accelerate is not None:
        write_atomically(given.accelerate, _accelerate(best, cluster, given))
    return 0 if best.fits else 1


def _layout(given: Namespace, cluster: Cluster) -> JobLayout:
    """JobLayout of a recipe such as ``pp4_tp2_sdp8_mb16``; the devices that are left over are replicas.

    Raises:
        ConfigError: The recipe is none, or does not fit the devices or the batch.
    """
    options = parse_recipe(given.layout)
    pp, tp, shards = (
        options.pop(f"{name}_degree", 1) for name in ("pipeline_parallel", "tensor_parallel", "sharded_data_parallel")
    )
    microbatches = options.pop("microbatches", None) or SMPConfig().num_microbatches(pp)
    if options:
        raise ConfigError(f"`--layout {given.layout}`: an estimate has no `{next(iter(options))}`. Leave it out.")
    replicas, left = divmod(cluster.num_devices, pp * tp * shards)
    if left:
        raise ConfigError(
            f"`--layout {given.layout}` needs a multiple of {pp * tp * shards} devices, but the cluster has "
            f"{cluster.num_devices}."
        )
    samples, left = divmod(given.global_batch, replicas * shards * microbatches)
    if left or not samples:
        raise ConfigError(
            f"`--global-batch {given.global_batch}` must be a multiple of {replicas * shards * microbatches}: "
            f"{replicas * shards} replicas of {microbatches} microbatches."
        )
    return JobLayout(pp, tp, shards, replicas, microbatches, samples, given.recompute)


def _about(given: Namespace) -> str:
    return f"# smp {given.command} {given.model} --cluster {given.cluster} --global-batch {given.global_batch}\n"


def _hydra(best: Estimate, given: Namespace) -> str:
    options = {**run_options(best), **PRECISIONS[given.precision]}
    return _about(given) + yaml.safe_dump({"defaults": ["base", "_self_"], **options}, sort_keys=False)


def _accelerate(best: Estimate, cluster: Cluster, given: Namespace) -> str:
    """Configuration of `accelerate launch`, to be started on each node with its own rank."""
    on_cpu = cluster.name == "cpu"
    found: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_CPU" if on_cpu else "MULTI_GPU",
        "use_cpu": on_cpu,
        "num_machines": cluster.nodes,
        "num_processes": cluster.num_devices,
        "machine_rank": 0,
        "mixed_precision": "no" if given.precision == "float32" else given.precision,
        "smp_config": run_options(best),
    }
    return _about(given) + yaml.safe_dump(found, sort_keys=False)


# On GPUs attention is fused with its dropout; the kernels of a CPU, which are counted here, are fused only without.
_ATTENTION_DROPOUT = ("attn_pdrop", "attention_dropout", "attention_probs_dropout_prob")


class PlannedModel(NamedTuple):
    """A model with its training step."""

    module: nn.Module
    step: Callable[[Any], Any]
    """Returns the loss of a microbatch."""
    batch_of: Callable[[int], Any]
    """A microbatch of so many samples."""
    sequence: int | None
    """Tokens of a sample; ``None``: samples are no sequences."""


def load_model(text: str, sequence: int | None) -> PlannedModel:
    """The model that ``text`` names.

    Args:
        text: A folder or file with a ``config.json`` of Hugging Face, or ``module:function``. The function returns such
            a model, or a module, its step and a function that makes a microbatch of n samples.
        sequence: Tokens of a sample; ``None``: as many as the model has positions.

    Raises:
        ConfigError: There is no such model, or it cannot be built.
    """
    path = Path(text)
    if path.exists():
        return _of_transformers(_from_config(path), sequence)
    if ":" not in text:
        raise ConfigError(f"`model` {text!r} is neither a folder with a config.json nor of the form module:function.")
    made = _called(text)
    if isinstance(made, nn.Module) and hasattr(made, "main_input_name"):
        return _of_transformers(made, sequence)
    if isinstance(made, tuple) and len(made) == 3 and isinstance(made[0], nn.Module):
        module, step, batch_of = made
        return PlannedModel(module, lambda batch: _checked(step(batch), text), batch_of, sequence)
    raise ConfigError(
        f"`{text}` returned a {type(made).__qualname__}. Return a model of Hugging Face, or a tuple of a module, its "
        "step, which returns the loss of a microbatch, and a function that makes a microbatch of n samples."
    )


def _checked(loss: Any, text: str) -> torch.Tensor:
    """``loss``, which the step of the model ``text`` has returned.

    Raises:
        ConfigError: It is none.
    """
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return loss
    what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__qualname__}"
    raise ConfigError(f"The step of `{text}` returned {what}. Let it return the loss, a tensor with one element.")


def _from_config(path: Path) -> nn.Module:
    try:
        transformers = importlib.import_module("transformers")
    except ImportError:
        raise ConfigError(f"{path} needs transformers: pip install 'smp-strategy[examples]'.") from None
    try:
        config = transformers.AutoConfig.from_pretrained(str(path), local_files_only=True)
        names: list[str] = list(getattr(config, "architectures", None) or [])
        found = getattr(transformers, str(names[0]), None) if names else transformers.AutoModelForCausalLM
        for name in _ATTENTION_DROPOUT:
            if hasattr(config, name):
                setattr(config, name, 0.0)
        if found is None:
            raise ConfigError(
                f"{path} names the architecture {', '.join(names)}, which this transformers does not have."
            )
        with torch.device("meta"):
            model: nn.Module = found(config) if names else found.from_config(config)
            return model
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is no configuration of a model: {error}") from None


def _called(text: str) -> Any:
    name, _, function = text.partition(":")
    sys.path.insert(0, "")
    try:
        made = getattr(importlib.import_module(name), function)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"`model` {text!r} cannot be imported: {error}.") from None
    finally:
        sys.path.remove("")
    with torch.device("meta"):
        return made()


def _of_transformers(model: Any, sequence: int | None) -> PlannedModel:
    """Step and batch of a model of Hugging Face by its main input: tokens or images.

    Raises:
        ConfigError: It has no loss of its own, or takes another input.
    """
    if "labels" not in inspect.signature(model.forward).parameters:
        raise ConfigError(
            f"{type(model).__name__} has no loss of its own. Name a class with a head in `architectures` of its "
            "config.json, or give `module:function` with a step."
        )
    if getattr(model.config, "is_encoder_decoder", False) and not hasattr(model.config, "decoder_start_token_id"):
        model.config.decoder_start_token_id = 0  # of which no cost depends

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = model(**batch).loss
        return loss

    if model.main_input_name == "pixel_values":
        size, channels = getattr(model.config, "image_size", 224), getattr(model.config, "num_channels", 3)
        return PlannedModel(
            model,
            step,
            lambda count: {
                "pixel_values": torch.zeros(count, channels, size, size),
                "labels": torch.zeros(count, dtype=torch.int64),
            },
            None,
        )
    if model.main_input_name != "input_ids":
        raise ConfigError(
            f"{type(model).__name__} takes `{model.main_input_name}`, of which no example can be made. Give "
            "`module:function` with a step and a batch."
        )
    length = sequence or getattr(model.config, "max_position_embeddings", None) or 1024

    def tokens(count: int) -> dict[str, torch.Tensor]:
        ids = torch.zeros(count, length, dtype=torch.int64)
        return {"input_ids": ids, "labels": ids.clone()}

    return PlannedModel(model, step, tokens, length)
