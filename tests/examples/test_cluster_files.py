"""The files of ``examples/cluster`` have what their schedulers need."""

from math import prod
from pathlib import Path

import yaml

from smp_strategy.config.recipe import parse_recipe

CLUSTER = Path(__file__).parents[2] / "examples" / "cluster"


def test_a_job_of_kubeflow_has_pods_for_its_layout():
    job = yaml.safe_load((CLUSTER / "pytorchjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert replicas.keys() == {"Master", "Worker"}
    assert replicas["Master"]["replicas"] == 1  # it is where ranks meet
    nodes = sum(each["replicas"] for each in replicas.values())
    per_node = int(job["spec"]["nprocPerNode"])
    for each in replicas.values():
        pod = each["template"]["spec"]
        (container,) = pod["containers"]
        assert container["name"] == "pytorch"
        assert container["resources"]["limits"]["nvidia.com/gpu"] == per_node
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
        assert any(mount["mountPath"] == "/dev/shm" for mount in container["volumeMounts"])
        words = container["command"]
        assert words[0] == "torchrun"
        assert (CLUSTER.parents[1] / words[1]).exists()
        assert "trainer.accelerator=gpu" in words
        given = dict(word.lstrip("+").split("=") for word in words[2:])
        assert (given["trainer.devices"], given["trainer.num_nodes"]) == (str(per_node), str(nodes))
        degrees = [number for name, number in parse_recipe(given["smp"]).items() if name.endswith("_degree")]
        assert nodes * per_node % prod(degrees) == 0
