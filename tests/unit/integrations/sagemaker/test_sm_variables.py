"""Variables of SageMaker's containers."""

import json

import pytest

from smp_strategy import ConfigError
from smp_strategy.integrations.sagemaker.initialize import given_parameters, set_launch_variables


def test_parameters_are_a_dict_or_a_path():
    assert given_parameters({}) is None
    assert given_parameters({"SM_HP_MP_PARAMETERS": ""}) is None
    assert given_parameters({"SM_HP_MP_PARAMETERS": '{"partitions": 2}'}) == {"partitions": 2}
    assert given_parameters({"SM_HP_MP_PARAMETERS": "/opt/ml/input/a.json"}) == "/opt/ml/input/a.json"
    with pytest.raises(ConfigError, match="SM_HP_MP_PARAMETERS must be a dict as JSON"):
        given_parameters({"SM_HP_MP_PARAMETERS": "{partitions}"})


def test_parameters_may_be_among_the_hyperparameters():
    inside = {"epochs": 1, "mp_parameters": {"partitions": 2}}
    assert given_parameters({"SM_HPS": json.dumps(inside)}) == {"partitions": 2}
    as_text = {"mp_parameters": '{"partitions": 4}'}
    assert given_parameters({"SM_HPS": json.dumps(as_text)}) == {"partitions": 4}
    assert given_parameters({"SM_HPS": json.dumps(as_text), "SM_HP_MP_PARAMETERS": "{}"}) == {}
    for empty in ("", "{}", '{"mp_parameters": ""}', '{"epochs": 1}'):
        assert given_parameters({"SM_HPS": empty}) is None


@pytest.mark.parametrize("text", ["[1]", "{", "epochs"])
def test_hyperparameters_that_are_no_dict_are_refused(text):
    with pytest.raises(ConfigError, match="SM_HPS must be"):
        given_parameters({"SM_HPS": text})


def test_hosts_that_are_no_json_are_refused():
    mpi = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}
    with pytest.raises(ConfigError, match="SM_HOSTS must be JSON"):
        set_launch_variables(mpi | {"SM_HOSTS": "algo-1"})


def test_ranks_of_mpirun_become_those_of_torchrun():
    mpi = {
        "OMPI_COMM_WORLD_RANK": "9",
        "OMPI_COMM_WORLD_SIZE": "16",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "SM_NUM_GPUS": "8",
        "SM_HOSTS": '["algo-1", "algo-2"]',
    }
    environ = dict(mpi)
    set_launch_variables(environ)
    assert environ.items() - mpi.items() == {
        ("RANK", "9"),
        ("WORLD_SIZE", "16"),
        ("LOCAL_RANK", "1"),
        ("LOCAL_WORLD_SIZE", "8"),
        ("MASTER_ADDR", "algo-1"),
        ("MASTER_PORT", "7777"),
    }


def test_ranks_of_mpirun_on_one_machine_meet_there():
    environ = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    set_launch_variables(environ)
    found = (environ["RANK"], environ["LOCAL_WORLD_SIZE"], environ["MASTER_ADDR"], environ["MASTER_PORT"])
    assert found == ("1", "2", "127.0.0.1", "7777")


def test_ranks_of_mpirun_on_several_machines_must_be_told_where_they_meet():
    mpi = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    with pytest.raises(ConfigError, match=r"4 processes on several machines \(2 on this one\).*Set MASTER_ADDR"):
        set_launch_variables(dict(mpi))
    for address in ({"MASTER_ADDR": "node-a"}, {"SM_HOSTS": '["node-a", "node-b"]'}):
        environ = mpi | address
        set_launch_variables(environ)
        assert environ["MASTER_ADDR"] == "node-a"


def test_other_launchers_are_left_alone():
    for environ in ({}, {"RANK": "0", "OMPI_COMM_WORLD_RANK": "3"}):
        before = dict(environ)
        set_launch_variables(environ)
        assert environ == before
