#!/usr/bin/env python3
"""Check the files of images, containers and Kubernetes, without an engine: for ``make lint``.

hadolint and shellcheck read each file by itself. This reads them together: pins and build
arguments, both Dockerfiles, what they copy, compose.yaml and docs/kubernetes, whose manifests must
follow the published schemas: those of pods and of Kubeflow Trainer, of the package
kubeflow-trainer-api. An MPIJob has none there, so only its pods are compared. Each check gives a
line for each thing that is wrong.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from kubeflow_trainer_api import models

sys.path.append(str(Path(__file__).resolve().parent / "matrix"))
import matrix

ROOT = Path(__file__).resolve().parents[1]
DOCKER = ROOT / "docker"
MANIFESTS = ROOT / "docs" / "kubernetes"
IMAGES = {kind: (DOCKER / f"Dockerfile.{kind}").read_text() for kind in ("cpu", "cuda")}
CONSTRAINTS = [
    line
    for line in (DOCKER / "constraints.txt").read_text().splitlines()
    if line and not line.startswith("#")
]
PINS = dict(line.split("==", 1) for line in CONSTRAINTS if "==" in line)
NAMED = {"TORCH": "torch", "TENSORFLOW": "tensorflow-cpu", "MPI4PY": "mpi4py", "NUMPY": "numpy"}
"""The build arguments of versions, and the packages that they name."""

# All that differs between the two Dockerfiles: the base, --cuda, and what NVIDIA's runtime needs.
DIFFERENCES = [
    "-ARG BASE_IMAGE",
    "+ARG BASE_IMAGE",
    "+ARG RUNTIME_IMAGE",
    "-&& if ! python3 docker/setup_env.py --image; then \\",
    "+&& if ! python3 docker/setup_env.py --image --cuda; then \\",
    "-FROM ${BASE_IMAGE}",
    "+FROM ${RUNTIME_IMAGE}",
    "+ENV NVIDIA_VISIBLE_DEVICES",
]


def pins() -> Iterator[str]:
    """Every version is pinned once, and each place that repeats it says the same."""
    for line in CONSTRAINTS:
        if line.count("==") != 1 or "*" in line:
            yield f"docker/constraints.txt: no exact version: {line}"
    cells = {(cell.torch, cell.tensorflow) for cell in matrix.CELLS}
    torch, tensorflow = PINS.get("torch"), PINS.get("tensorflow-cpu")
    if not {(torch, None), (None, tensorflow), (torch, tensorflow)} <= cells:
        yield f"docker/matrix: no cell has torch {torch} or TensorFlow {tensorflow}, alone or both"
    project = (ROOT / "pyproject.toml").read_text()
    for name in ("torch", "tensorflow"):
        least = dict(re.findall(r'"(\w+)>=([\d.]+)"', project))[name]
        if not any((getattr(cell, name) or "").startswith(f"{least}.") for cell in matrix.CELLS):
            yield f"docker/matrix: no cell has the oldest {name}, {least}"
    if len({cell.name for cell in matrix.CELLS}) != len(matrix.CELLS):
        yield "docker/matrix: a cell is there twice"


def dockerfiles() -> Iterator[str]:
    """Versions are build arguments with the pins as defaults; the last step tries the image."""
    for kind, text in IMAGES.items():
        where = f"docker/Dockerfile.{kind}"
        arguments = dict(re.findall(r"^ARG (\w+)_VERSION=(.+)$", text, re.MULTILINE))
        if set(arguments) != set(NAMED):
            yield f"{where}: arguments of versions: {sorted(arguments)}, not {sorted(NAMED)}"
        for name, package in NAMED.items():
            if arguments.get(name) != PINS.get(package):
                yield f"{where}: {name}_VERSION is {arguments.get(name)}, not {PINS.get(package)}"
            if f's/^{package}==.*/{package}==${{{name}_VERSION}}/"' not in text:
                yield f"{where}: {name}_VERSION does not change docker/constraints.txt"
        bases = dict(re.findall(r"^ARG (\w+_IMAGE)=?(.*)$", text, re.MULTILINE))
        for base in re.findall(r"^FROM (?:--\S+ )?(\S+)", text, re.MULTILINE):
            image = bases.get(base.strip("${}"), base)
            if not re.fullmatch(r"\S+[:@](?!latest$)\S+", image):
                yield f"{where}: FROM {base}: {image!r} names no version"
        steps = re.findall(r"^(?:RUN|USER) .*", text, re.MULTILINE)
        trained = "&& horovodrun -np 2 python" in text.partition("RUN hvd-pipe doctor")[2]
        if steps[-2:] != ["USER 10001", "RUN hvd-pipe doctor \\"] or not trained:
            yield f"{where}: the last step must be `hvd-pipe doctor` and a run, as USER 10001"
        if "/etc/ssh/ssh_host_*" not in text or "ssh-keygen" in text:
            yield f"{where}: there must be no key of a host in the image"
        ignored = (ROOT / ".dockerignore").read_text().splitlines()
        let_in = {line[1:] for line in ignored if line.startswith("!")}
        if "*" not in ignored:
            yield ".dockerignore must begin with all files: *"
        copied = re.findall(r"^COPY (?!--from)(?:--\S+ )?(.+) \S+$", text, re.MULTILINE)
        for name in " ".join(copied).split():
            if not {name, name.split("/")[0]} & let_in:
                yield f"{where}: .dockerignore hides {name}"
    lines = [
        [line for line in text.splitlines() if line and not line.startswith("#")]
        for text in IMAGES.values()
    ]
    changed = [line for line in difflib.ndiff(*lines) if line[0] in "+-"]
    if (found := [line[0] + line[2:].strip().split("=")[0] for line in changed]) != DIFFERENCES:
        yield f"the Dockerfiles differ in other lines than docker/check.py lists: {found}"


def compose() -> Iterator[str]:
    """docker/compose.yaml agrees with the image."""
    services = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    build, command = services["keys"]["build"], services["node1"]["command"]
    example = re.search(r"/opt/hvd_pipe/(\S+)", command)
    port = variable("SSH_PORT")
    for good, what in (
        ((DOCKER / build["context"]).resolve() == ROOT, "the build's context is not the project"),
        ((ROOT / build["dockerfile"]).is_file(), f"there is no {build['dockerfile']}"),
        (
            {service["image"] for service in services.values()} == {"${IMAGE:-hvd_pipe:cpu}"},
            "services have other images than ${IMAGE:-hvd_pipe:cpu}",
        ),
        (f"-p {port} " in command, f"node1 asks for another port than {port}"),
        (
            services["node2"]["healthcheck"]["test"][-1].endswith(f"/{port}"),
            f"node2's check asks for another port than {port}",
        ),
        (
            all(services[node]["volumes"] == ["keys:/keys:ro"] for node in ("node1", "node2")),
            "nodes must read the keys, and no more",
        ),
        ("ports" not in str(services), "sshd is for the nodes, not for the world: no ports"),
        (example and (ROOT / example[1]).is_file(), f"no such example: {command}"),
    ):
        if not good:
            yield f"docker/compose.yaml: {what}"


def variable(name: str) -> str:
    """What both images set."""
    (value,) = {each for text in IMAGES.values() for each in re.findall(rf"\b{name}=(\S+)", text)}
    return value


# Kubernetes -----------------------------------------------------------------------------------


MODELS = {
    "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
    "TrainJob": models.TrainerV1alpha1TrainJob,
}


def unknown(kind: str, document: dict[str, Any]) -> Iterator[str]:
    """What a schema refuses in a manifest, and the fields that it does not know."""
    parts: list[tuple[Any, dict[str, Any]]] = []
    try:
        if kind == "MPIJob":
            parts.append((models.IoK8sApimachineryPkgApisMetaV1ObjectMeta, document["metadata"]))
            for replicas in document["spec"]["mpiReplicaSpecs"].values():
                parts.append((models.IoK8sApiCoreV1PodTemplateSpec, replicas["template"]))
        else:
            parts.append((MODELS[kind], document))
        for model, part in parts:
            # A model drops fields that it does not know: what comes back lacks them.
            if (known := model.from_dict(part).to_dict()) != part:
                lines = difflib.ndiff(*(yaml.safe_dump(x).splitlines() for x in (known, part)))
                yield f"its schema does not know: {[x for x in lines if x.startswith('+ ')]}"
    except ValueError as error:
        yield str(error)


def places(value: Any) -> Iterator[dict[str, Any]]:
    """Every mapping of a document."""
    if isinstance(value, dict):
        yield value
    for each in value.values() if isinstance(value, dict) else value:
        if isinstance(each, dict | list):
            yield from places(each)


def manifests() -> Iterator[str]:
    """Manifests follow their schemas, and agree with the image and with docs/kubernetes.md."""
    documents = {
        document["kind"]: document
        for path in sorted(MANIFESTS.glob("*.yaml"))
        for document in yaml.safe_load_all(path.read_text())
    }
    if set(documents) != {"MPIJob", *MODELS}:
        yield f"docs/kubernetes: kinds: {sorted(documents)}"
        return
    for kind, document in documents.items():
        yield from (f"docs/kubernetes: {kind}: {wrong}" for wrong in unknown(kind, document))
    job, runtime = documents["MPIJob"]["spec"], documents["TrainingRuntime"]["spec"]
    trainer, policy = documents["TrainJob"]["spec"]["trainer"], runtime["mlPolicy"]["mpi"]
    launcher = job["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]
    slots = job["slotsPerWorker"] * job["mpiReplicaSpecs"]["Worker"]["replicas"]
    yield from launches("MPIJob", launcher["args"], slots)
    yield from launches(
        "TrainJob", trainer["args"], policy["numProcPerNode"] * trainer["numNodes"]
    )
    yield from pods("MPIJob", job, job["sshAuthMountPath"])
    yield from pods("TrainingRuntime", runtime, policy["sshAuthMountPath"])
    # Kubernetes starts a failed job six times more where nothing is set.
    jobs = [one["template"]["spec"] for one in runtime["template"]["spec"]["replicatedJobs"]]
    limits = [job["runPolicy"]["backoffLimit"], *(one["backoffLimit"] for one in jobs)]
    again = [each["restartPolicy"] for each in job["mpiReplicaSpecs"].values()]
    again += [one["template"]["spec"]["restartPolicy"] for one in jobs]
    if any(limits) or set(again) != {"Never"}:
        yield f"docs/kubernetes: a failed job must end: backoffLimit {limits}, {again}"


def launches(kind: str, words: list[str], slots: int) -> Iterator[str]:
    """The launcher fills its slots, and finds sshd and the script."""
    after = dict(zip(words, [*words[1:], ""], strict=True))
    asked = (words[0], after.get("-np"), after.get("-p"))
    wanted = ("horovodrun", str(slots), variable("SSH_PORT"))
    if asked != wanted:
        yield f"docs/kubernetes: {kind}: launcher, -np and -p are {asked}, not {wanted}"
    script = re.fullmatch(r"/opt/hvd_pipe/(.+)", words[-1])
    if script is None or not (ROOT / script[1]).is_file():
        yield f"docs/kubernetes: {kind}: the image has no {words[-1]}"


def pods(kind: str, spec: dict[str, Any], mounted: str) -> Iterator[str]:
    containers = [one for place in places(spec) for one in place.get("containers", [])]
    nodes = [one for one in containers if one.get("args") == ["node"]]
    users = {int(uid) for uid in re.findall(r"useradd --uid (\d+)", IMAGES["cpu"])}
    groups = {place["fsGroup"] for place in places(spec) if "fsGroup" in place}
    for good, what in (
        (mounted == variable("SSH_KEYS"), f"keys are mounted at {mounted}"),
        ({one["image"] for one in containers} == {"hvd_pipe:cpu"}, "images"),
        # It would be run in place of the image's entrypoint.
        (not any("command" in one for one in containers), "a container has a command"),
        (
            all(set(one["resources"]["limits"]) == {"cpu", "memory"} for one in containers),
            "each container must limit cpu and memory",
        ),
        (len(nodes) == 1, f"{len(nodes)} containers are nodes"),
        (
            all(
                one["readinessProbe"]["tcpSocket"]["port"] == int(variable("SSH_PORT"))
                for one in nodes
            ),
            "the port of the readiness probe is not that of sshd",
        ),
        (
            all([at["mountPath"] for at in one["volumeMounts"]] == ["/dev/shm"] for one in nodes),
            "a node mounts /dev/shm, and no more",
        ),
        (groups <= users, f"fsGroup {groups} is not the image's user, {users}"),
    ):
        if not good:
            yield f"docs/kubernetes: {kind}: {what}"


def main() -> int:
    checks = (pins, dockerfiles, compose, manifests)
    wrong = [line for check in checks for line in check()]
    print("\n".join(wrong) or "docker: pins, Dockerfiles, compose.yaml and manifests are good")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
