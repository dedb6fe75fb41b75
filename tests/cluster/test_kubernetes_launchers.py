"""docs/kubernetes on emulated hosts: the image's entrypoint, with keys as Kubeflow gives them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from hosts import as_root

from benchmarks.cluster import Cluster

pytestmark = as_root
ROOT = Path(__file__).resolve().parents[2]

# A pod: a home folder of its own for root, in /etc/ssh what the image has, and no key but its own.
POD = f"""
set -e
mkdir /run/home
sed 's#:/root:#:/run/home:#' /etc/passwd >/run/passwd && mount --bind /run/passwd /etc/passwd
cp {shlex.quote(str(ROOT))}/docker/sshd_config /etc/ssh/hvd_pipe_sshd_config
sed -i /IdentityFile/d /etc/ssh/ssh_config
"""
READY = "until (exec 3<>/dev/tcp/{host}/2222) 2>/dev/null; do sleep 0.2; done"


def _launchers() -> dict[str, tuple[dict[str, Any], list[str]]]:
    """Of each manifest: the launcher's container, and the hosts of its hostfile.

    Under mpi-operator the launcher, h1, has no rank; with `runLauncherAsNode` it has one.
    """
    read = {
        path.stem: list(yaml.safe_load_all(path.read_text()))
        for path in (ROOT / "docs" / "kubernetes").glob("*.yaml")
    }
    launcher = read["mpijob"][0]["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]
    return {
        "mpijob": (launcher["containers"][0], ["h2", "h3"]),
        "trainjob": (read["trainjob"][1]["spec"]["trainer"], ["h1", "h2"]),
    }


@pytest.fixture(scope="module")
def cluster() -> Any:
    with Cluster(3) as made:
        for host in made.hosts:
            made.run(host, ["bash", "-c", POD], check=True, timeout=30)
        yield made


@pytest.fixture(scope="module")
def nodes(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both workers' sshd, with the files of the operators' secret; returns where these are."""
    keys = tmp_path_factory.mktemp("keys")
    kind = ["-t", "ecdsa", "-b", "521", "-m", "PEM"]  # in a file that is called id_rsa
    subprocess.run(["ssh-keygen", "-q", *kind, "-N", "", "-f", keys / "id_rsa"], check=True)
    (keys / "authorized_keys").write_text((keys / "id_rsa.pub").read_text())
    for file in keys.iterdir():
        file.chmod(0o644)
    for host in ("h2", "h3"):
        cluster.popen(host, _entrypoint("node"), env={"SSH_KEYS": str(keys)})
        ready = ["timeout", "60", "bash", "-c", READY.format(host=host)]
        cluster.run("h1", ready, check=True, timeout=90)
    return keys


def _entrypoint(*words: str) -> list[str]:
    return ["bash", str(ROOT / "docker" / "entrypoint.sh"), *words]


@pytest.mark.parametrize("name", ["mpijob", "trainjob"])
def test_a_launcher_trains_on_its_nodes(
    name: str, cluster: Cluster, nodes: Path, tmp_path: Path
) -> None:
    container, hosts = _launchers()[name]
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("".join(f"{host} slots=1\n" for host in hosts))
    moved = {"/opt/hvd_pipe": str(ROOT), "/etc/mpi/hostfile": str(hostfile)}
    words = [re.sub("|".join(moved), lambda found: moved[found[0]], w) for w in container["args"]]
    operators = {
        "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
        "OMPI_MCA_orte_default_hostfile": str(hostfile),
        "OMPI_MCA_orte_set_default_slots": "1",
        "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
    }
    env = {each["name"]: each["value"] for each in container["env"]}
    before = cluster.traffic()
    path = {"PYTHONPATH": os.fspath(ROOT), "SSH_KEYS": str(nodes)}
    done = cluster.run("h1", _entrypoint(*words), env={**env, **operators, **path}, timeout=400)
    assert done.returncode == 0, done.stdout
    (*_, accuracy) = re.findall(r"test accuracy ([\d.]+)%", done.stdout)
    assert float(accuracy) > 70
    after = cluster.traffic()
    sent = {host: (after[host] - before[host]).sent for host in cluster.hosts}
    assert [host for host in cluster.hosts if sent[host] > 10**7] == hosts
