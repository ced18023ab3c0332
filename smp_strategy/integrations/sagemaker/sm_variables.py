"""Environment variables of SageMaker's containers: parameters, hosts, and the ranks that ``mpirun`` gives.

SageMaker's toolkit passes the ``parameters`` of an estimator as ``SM_HP_MP_PARAMETERS``, and starts one process per
device with MPI. Hosts stand in ``SM_HOSTS``. Hyperparameters (``SM_HP_*``), data channels (``SM_CHANNEL_*``) and
``SM_MODEL_DIR`` are read by scripts themselves.
"""

import json
from collections.abc import Mapping, MutableMapping
from typing import Any, Final

from smp_strategy.errors import ConfigError

__all__ = ["given_parameters", "set_launch_variables"]

_PARAMETERS: Final = "SM_HP_MP_PARAMETERS"
# The toolkit's port.
_PORT: Final = "7777"
_OF_MPI: Final = {
    "RANK": "OMPI_COMM_WORLD_RANK",
    "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
    "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
    "LOCAL_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
}


def given_parameters(environ: Mapping[str, str]) -> Any:
    """Parameters that the launcher gives: a dict, the path of a JSON file, or ``None``.

    Raises:
        ConfigError: the variable has no JSON.
    """
    text = environ.get(_PARAMETERS, "").strip()
    if not text:
        return None
    if not text.startswith(("{", '"')):
        return text
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{_PARAMETERS} must be a dict as JSON, or the path of a JSON file: {error}.") from error


def set_launch_variables(environ: MutableMapping[str, str]) -> None:
    """Set the variables of ``torchrun`` where ``mpirun`` has started the ranks."""
    if "RANK" in environ or _OF_MPI["RANK"] not in environ:
        return
    for name, theirs in _OF_MPI.items():
        if theirs in environ:
            environ[name] = environ[theirs]
    environ.setdefault("LOCAL_WORLD_SIZE", environ.get("SM_NUM_GPUS", "1"))
    hosts = json.loads(environ.get("SM_HOSTS", "[]"))
    environ.setdefault("MASTER_ADDR", hosts[0] if hosts else "127.0.0.1")
    environ.setdefault("MASTER_PORT", _PORT)
