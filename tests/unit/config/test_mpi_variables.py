"""Ranks that ``mpirun`` gives."""

import pytest

from smp_strategy.config.mpi_variables import ranks_of_mpi

RANKS = {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"}


@pytest.mark.parametrize(
    "names",
    [
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ],
)
def test_ranks_have_the_names_of_torchrun(names):
    environ = dict(zip(names, RANKS.values(), strict=True))
    assert ranks_of_mpi(environ | {"PATH": "/bin"}) == RANKS
    del environ[names[3]]
    assert ranks_of_mpi(environ) == {name: RANKS[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}


@pytest.mark.parametrize("environ", [{}, {"PMI_RANK": "0"}, {"RANK": "0", "WORLD_SIZE": "2"}])
def test_other_processes_have_none(environ):
    assert ranks_of_mpi(environ) == {}
