"""Environment variables of SageMaker's containers: parameters, hosts, and the ranks that ``mpirun`` gives.

SageMaker's toolkit passes the ``parameters`` of an estimator as ``SM_HP_MP_PARAMETERS``, and as ``mp_parameters`` among
all hyperparameters in ``SM_HPS``. It starts one process per device with MPI. Hosts stand in ``SM_HOSTS``.
Hyperparameters (``SM_HP_*``), data channels (``SM_CHANNEL_*``) and ``SM_MODEL_DIR`` are read by scripts themselves.
"""

import json
from collections.abc import Mapping, MutableMapping
from typing import Any, Final

from smp_strategy.errors import ConfigError

__all__ = ["given_parameters", "set_launch_variables"]

_PARAMETERS, _ALL = "SM_HP_MP_PARAMETERS", "SM_HPS"
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
        ConfigError: a variable has no JSON.
    """
    text = environ.get(_PARAMETERS, "").strip()
    if not text:
        all_given = _json_in(environ, _ALL, {})
        if not isinstance(all_given, Mapping):
            raise ConfigError(f"{_ALL} must be a dict as JSON, but is {environ[_ALL]!r}. SageMaker's toolkit sets it.")
        return _parsed(all_given.get("mp_parameters") or None)
    return _parsed(text)


def _parsed(given: Any) -> Any:
    """Parameters that may be text: JSON or a path."""
    if not isinstance(given, str) or not given.startswith(("{", '"')):
        return given
    try:
        return json.loads(given)
    except ValueError as error:
        raise ConfigError(f"{_PARAMETERS} must be a dict as JSON, or the path of a JSON file: {error}.") from error


def set_launch_variables(environ: MutableMapping[str, str]) -> None:
    """Set the variables of ``torchrun`` where ``mpirun`` has started the ranks.

    Raises:
        ConfigError: a variable of the toolkit has no JSON.
    """
    if "RANK" in environ or _OF_MPI["RANK"] not in environ:
        return
    for name, theirs in _OF_MPI.items():
        if theirs in environ:
            environ[name] = environ[theirs]
    environ.setdefault("LOCAL_WORLD_SIZE", environ.get("SM_NUM_GPUS", "1"))
    hosts = _json_in(environ, "SM_HOSTS", [])
    environ.setdefault("MASTER_ADDR", hosts[0] if hosts else "127.0.0.1")
    environ.setdefault("MASTER_PORT", _PORT)


def _json_in(environ: Mapping[str, str], name: str, default: Any) -> Any:
    try:
        return json.loads(environ.get(name, "").strip() or "null") or default
    except ValueError as error:
        raise ConfigError(f"{name} must be JSON, as SageMaker's toolkit sets it: {error}.") from error
