"""docs/kubernetes: the manifests follow the published schemas, and agree with the image.

The schema of pods and of Kubeflow Trainer is that of the package kubeflow-trainer-api. That of an
MPIJob is below: the fields of mpi-operator's API v2beta1, by its Go types. No cluster is needed.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml

pytest.importorskip("kubeflow_trainer_api")
from kubeflow_trainer_api import models
from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel

from tests import pages

FOLDER = pages.ROOT / "docs" / "kubernetes"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, alias_generator=to_camel)


class _SchedulingPolicy(_Strict):
    min_available: int | None = None
    min_resources: dict[str, str] | None = None
    priority_class: str | None = None
    queue: str | None = None
    schedule_timeout_seconds: int | None = None


class _RunPolicy(_Strict):
    active_deadline_seconds: int | None = None
    backoff_limit: int | None = None
    clean_pod_policy: Literal["All", "Running", "None"] | None = None
    managed_by: str | None = None
    scheduling_policy: _SchedulingPolicy | None = None
    suspend: bool | None = None
    ttl_seconds_after_finished: int | None = None


class _ReplicaSpec(_Strict):
    replicas: int | None = None
    restart_policy: Literal["Always", "OnFailure", "Never", "ExitCode"] | None = None
    template: dict[str, Any]


class _MPIJobSpec(_Strict):
    launcher_creation_policy: Literal["AtStartup", "WaitForWorkersReady"] | None = None
    mpi_implementation: Literal["OpenMPI", "Intel", "MPICH"] | None = None
    mpi_replica_specs: dict[Literal["Launcher", "Worker"], _ReplicaSpec]
    run_launcher_as_worker: bool | None = None
    run_policy: _RunPolicy | None = None
    slots_per_worker: int | None = None
    ssh_auth_mount_path: str | None = None


class _MPIJob(_Strict):
    api_version: Literal["kubeflow.org/v2beta1"]
    kind: Literal["MPIJob"]
    metadata: dict[str, Any]
    spec: _MPIJobSpec


def _follow(model: Any, document: dict[str, Any]) -> None:
    """A model of the package drops fields that it does not know: what comes back lacks them."""
    assert model.from_dict(document).to_dict() == document


def _mpi_job(document: dict[str, Any]) -> None:
    _MPIJob.model_validate(document)
    _follow(models.IoK8sApimachineryPkgApisMetaV1ObjectMeta, document["metadata"])
    for replicas in document["spec"]["mpiReplicaSpecs"].values():
        _follow(models.IoK8sApiCoreV1PodTemplateSpec, replicas["template"])


SCHEMAS: dict[str, Callable[[dict[str, Any]], None]] = {
    "MPIJob": _mpi_job,
    "TrainingRuntime": lambda found: _follow(models.TrainerV1alpha1TrainingRuntime, found),
    "TrainJob": lambda found: _follow(models.TrainerV1alpha1TrainJob, found),
}
DOCUMENTS = {
    document["kind"]: document
    for path in sorted(FOLDER.glob("*.yaml"))
    for document in yaml.safe_load_all(path.read_text())
}


def _places(value: Any) -> Iterator[dict[str, Any]]:
    """Every mapping of a document, whose keys a schema may know."""
    if isinstance(value, dict):
        yield value
    for each in value.values() if isinstance(value, dict) else value:
        if isinstance(each, dict | list):
            yield from _places(each)


@pytest.mark.parametrize("kind", SCHEMAS)
def test_a_manifest_follows_its_schema(kind: str) -> None:
    assert set(DOCUMENTS) == set(SCHEMAS)
    SCHEMAS[kind](DOCUMENTS[kind])


@pytest.mark.parametrize("kind", SCHEMAS)
def test_a_field_that_no_schema_knows_is_refused_everywhere(kind: str) -> None:
    free = ("labels", "limits")  # their keys are the user's
    for number in range(len(list(_places(DOCUMENTS[kind])))):
        document = copy.deepcopy(DOCUMENTS[kind])  # one without YAML's shared places
        place = list(_places(document))[number]
        if any(place is each.get(name) for each in _places(document) for name in free):
            continue
        place["replica"] = 1
        with pytest.raises((AssertionError, ValueError)):
            SCHEMAS[kind](document)


@pytest.mark.parametrize("kind", SCHEMAS)
def test_a_value_of_another_type_is_refused(kind: str) -> None:
    text = yaml.safe_dump(DOCUMENTS[kind])
    for right, wrong in (("- node", "- 3"), ("numNodes: 2", "numNodes: two"), ("'2222'", "2222")):
        changed = text.replace(right, wrong)
        if changed != text:
            with pytest.raises(ValueError, match="validation error"):
                SCHEMAS[kind](yaml.safe_load(changed))


def _containers(kind: str) -> list[dict[str, Any]]:
    return [
        container
        for place in _places(DOCUMENTS[kind])
        for container in place.get("containers", [])
    ]


def _variable(name: str) -> str:
    """What the image sets."""
    (value,) = re.findall(rf"\b{name}=(\S+)", (pages.ROOT / "docker/Dockerfile.cpu").read_text())
    return value


def _launcher(path: Path) -> tuple[list[str], int]:
    """The words of the launcher, and the slots that its hostfile will have."""
    if path.stem == "mpijob":
        spec = DOCUMENTS["MPIJob"]["spec"]
        slots = spec["slotsPerWorker"] * spec["mpiReplicaSpecs"]["Worker"]["replicas"]
        return _containers("MPIJob")[0]["args"], slots
    trainer = DOCUMENTS["TrainJob"]["spec"]["trainer"]
    policy = DOCUMENTS["TrainingRuntime"]["spec"]["mlPolicy"]["mpi"]
    return trainer["args"], policy["numProcPerNode"] * trainer["numNodes"]


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_launcher_fills_its_slots_and_finds_sshd_and_the_script(path: Path) -> None:
    words, slots = _launcher(path)
    assert words[0] == "horovodrun"
    assert words[words.index("-np") + 1] == str(slots)
    assert words[words.index("-p") + 1] == _variable("SSH_PORT")
    script = re.fullmatch(r"/opt/hvd_pipe/(.+)", words[-1])
    assert script is not None
    assert (pages.ROOT / script[1]).is_file()


@pytest.mark.parametrize("kind", ["MPIJob", "TrainingRuntime"])
def test_pods_agree_with_the_image(kind: str) -> None:
    spec = DOCUMENTS[kind]["spec"]
    mounted = spec.get("sshAuthMountPath") or spec["mlPolicy"]["mpi"]["sshAuthMountPath"]
    assert mounted == _variable("SSH_KEYS")
    for container in _containers(kind):
        assert container["image"] == "hvd_pipe:cpu"
        assert "command" not in container  # would be run in place of the image's entrypoint
        assert set(container["resources"]["limits"]) == {"cpu", "memory"}
    (node,) = [each for each in _containers(kind) if each.get("args") == ["node"]]
    assert node["readinessProbe"]["tcpSocket"]["port"] == int(_variable("SSH_PORT"))
    assert [mount["mountPath"] for mount in node["volumeMounts"]] == ["/dev/shm"]
    groups = {place["fsGroup"] for place in _places(spec) if "fsGroup" in place}
    user = re.findall(r"useradd --uid (\d+)", (pages.ROOT / "docker/Dockerfile.cpu").read_text())
    assert groups <= {int(each) for each in user}


def test_a_failed_job_ends_as_the_page_says() -> None:
    """Kubernetes starts a failed job six times more where nothing is set."""
    job = DOCUMENTS["MPIJob"]["spec"]
    assert job["runPolicy"]["backoffLimit"] == 0
    assert {each["restartPolicy"] for each in job["mpiReplicaSpecs"].values()} == {"Never"}
    for replicated in DOCUMENTS["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"]:
        one = replicated["template"]["spec"]
        assert one["backoffLimit"] == 0
        assert one["template"]["spec"]["restartPolicy"] == "Never"
