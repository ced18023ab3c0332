"""Variables of ``mpirun``: rank and number of ranks, in all and on this node, by the names of ``torchrun``."""

from collections.abc import Mapping
from typing import Final

__all__ = ["ranks_of_mpi"]

_NAMES: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_OF_MPI: Final = (
    # Open MPI
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    # MPICH, Intel MPI
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    # MVAPICH
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
)


def ranks_of_mpi(environ: Mapping[str, str]) -> dict[str, str]:
    """What ``torchrun`` would have set in place of the ``mpirun`` that started this process; empty: none did."""
    for theirs in _OF_MPI:
        if theirs[0] in environ and theirs[1] in environ:
            return {name: environ[its] for name, its in zip(_NAMES, theirs, strict=True) if its in environ}
    return {}
