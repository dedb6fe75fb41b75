"""Turn the answers of probes into rows: each is good, or says how to mend what is not."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvd_pipe import strategy
from hvd_pipe.cli._probe import Answer

__all__ = [
    "Row",
    "built_rows",
    "cuda_rows",
    "environment_rows",
    "host_row",
    "machine_rows",
    "mpi_rows",
    "network_rows",
    "parse_hosts",
    "self_test_row",
    "tool_rows",
    "version_rows",
]

BUILD = "hvd-pipe build-horovod"
VARIABLES = (
    "HVD_PIPE_CHECK",
    "HVD_PIPE_CHECK_SEED",
    "HVD_PIPE_STRATEGY",
    "HVD_PIPE_PROFILE",
    "HVD_PIPE_TIMELINE",
    "HVD_PIPE_TIMELINE_MB",
    "HVD_PIPE_TIMEOUT",
    "HVD_PIPE_CACHE",
)

_PREFIXES = ("HOROVOD_", "HVD_PIPE_", "OMPI_MCA_", "OMPI_ALLOW_", "NCCL_", "UCX_")
_NAMES = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
_SECRET = re.compile("SECRET|TOKEN|PASSWORD|_KEY")
_HOST = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)(:(?P<slots>[1-9][0-9]*))?")
_GIB = 2**30

# What ssh and the far shell say -> what mends it.
_SSH = (
    ("ssh: no such file", "apt-get install openssh-client"),
    ("host key verification", "ssh-keyscan -H {host} >> ~/.ssh/known_hosts"),
    ("permission denied", "ssh-copy-id {host}"),
    ("could not resolve", "check the host's spelling, or add it to /etc/hosts"),
    ("connection refused", "start sshd on {host}, or give its port with --ssh-port"),
    ("no module named", "install hvd_pipe on {host}: the same environment at the same path"),
    ("no such file", "install on {host} the same environment at the same path as here"),
    ("not found", "install on {host} the same environment at the same path as here"),
)


@dataclass(frozen=True)
class Row:
    """One thing looked at."""

    section: str
    name: str
    good: bool | None
    found: str = ""
    todo: str = ""
    required: bool = False


def parse_hosts(text: str) -> tuple[str, ...]:
    """Return the names in ``h1:4,h2:4``; the numbers of slots may be left out.

    Example:
        >>> parse_hosts("h1:4,h2:4")
        ('h1', 'h2')
    """
    names = []
    for part in text.split(","):
        match = _HOST.fullmatch(part.strip())
        if match is None:
            raise ValueError(
                f"-H takes hosts as horovodrun does, 'h1:4,h2:4': {part.strip()!r} is none"
            )
        names.append(match["name"])
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"-H names a host once, but these occur twice: {', '.join(twice)}")
    return tuple(names)


def version_rows(answer: Answer) -> list[Row]:
    """Rows for what is installed."""
    section = "Versions"
    if answer.error:
        return [Row(section, "versions", False, answer.error, required=True)]
    need = {
        "hvd_pipe": "pip install -e . in hvd_pipe's checkout",
        "numpy": "pip install numpy",
        "horovod": BUILD,
    }
    want = {"mpi4py": "pip install mpi4py (only pipelines need it)"}
    if answer.found.get("tensorflow") is None:
        want["torch"] = "pip install torch, then build Horovod again: " + BUILD
    rows = []
    for name, version in answer.found.items():
        absent = need | want
        rows.append(
            Row(
                section,
                name,
                version is not None,
                version or "not installed",
                "" if version else absent.get(name, ""),
                name in need,
            )
        )
    return rows


def built_rows(torch: Answer, tensorflow: Answer, installed: Mapping[str, Any]) -> list[Row]:
    """Rows for Horovod's frameworks, controllers and operations, as ``--check-build`` has them."""
    alone = installed.get("tensorflow") is not None and installed.get("torch") is None
    frameworks = []
    for name, package, answer in (
        ("PyTorch", "torch", torch),
        ("TensorFlow", "tensorflow", tensorflow),
    ):
        there = installed.get(package) is not None
        frameworks.append(
            Row(
                "Frameworks",
                name,
                not answer.error,
                ("" if not answer.error else answer.error if there else "not installed"),
                _mend(answer.error, package) if answer.error and there else "",
                package == ("tensorflow" if alone else "torch"),
            )
        )
    built = torch.found or tensorflow.found
    absent = "" if built else "unknown: Horovod does not load"
    controllers = [
        Row("Controllers", label, bool(built.get(key)), absent)
        for key, label in (("mpi", "MPI"), ("gloo", "Gloo"))
    ]
    if built and not any(row.good for row in controllers):
        todo = "apt-get install openmpi-bin libopenmpi-dev; " + BUILD
        controllers = [Row(r.section, r.name, False, "", todo, True) for r in controllers]
    operations = [
        Row("Tensor operations", key.upper() if key != "gloo" else "Gloo", bool(built.get(key)))
        for key in ("nccl", "ddl", "ccl", "mpi", "gloo")
    ]
    return [*frameworks, *controllers, *operations]


def _mend(error: str, package: str) -> str:
    if "no answer" in error:
        statement = f"import hvd_pipe.{package}"
        return f"python -X importtime -c '{statement}' shows where it hangs; or more --timeout"
    return BUILD


def mpi_rows(answer: Answer) -> list[Row]:
    """Rows for the MPI library and the threads that it allows."""
    if answer.error:
        todo = "apt-get install openmpi-bin libopenmpi-dev"
        if "mpi4py" in answer.error:
            todo = "pip install mpi4py (only pipelines need it)"
        return [Row("MPI", "library", False, answer.error, todo)]
    level, name = answer.found["threads"], "MPI_THREAD_MULTIPLE"
    rows = [Row("MPI", "library", True, answer.found["library"] or "loaded by Horovod")]
    todo = "use an MPI built with thread support: mpi4py beside Horovod (pipelines) needs it"
    good = level == name
    return [*rows, Row("MPI", name, good, "" if good else f"{level} only", "" if good else todo)]


def tool_rows(found: Mapping[str, str | None], hosts: bool) -> list[Row]:
    """Rows for the commands that start jobs."""
    mend = {
        "horovodrun": BUILD,
        "mpirun": "apt-get install openmpi-bin (or horovodrun --gloo, where Gloo is built)",
        "ssh": "apt-get install openssh-client" if hosts else "",
    }
    return [
        Row(
            "Launchers",
            name,
            path is not None,
            path or "not found on PATH",
            "" if path else mend[name],
            name == "horovodrun" or (name == "ssh" and hosts),
        )
        for name, path in found.items()
    ]


def cuda_rows(answer: Answer, nccl_built: bool) -> list[Row]:
    """Rows for GPUs and NCCL."""
    if answer.error:
        return [Row("GPUs", "CUDA", False, answer.error)]
    found = answer.found
    if not found["devices"]:
        if found["driver"] and found["torch_cuda"] is None:
            todo = "pip install a CUDA build of torch, then hvd-pipe build-horovod --cuda"
            return [Row("GPUs", "CUDA", False, "a driver, but torch is a CPU build", todo)]
        if found["torch_cuda"] is None:
            return [Row("GPUs", "CUDA", False, "torch is a CPU build, and there is no driver")]
        todo = "nvidia-smi says whether the driver works; see CUDA_VISIBLE_DEVICES, too"
        return [Row("GPUs", "CUDA", False, f"torch has CUDA {found['torch_cuda']}, no GPU", todo)]
    rows = [Row("GPUs", "CUDA", True, f"{found['torch_cuda']}, NCCL {found['nccl']}")]
    for number, device in enumerate(found["devices"]):
        memory = f"{device['memory_bytes'] / _GIB:.1f} GiB"
        rows.append(Row("GPUs", f"GPU {number}", True, f"{device['name']}, {memory}"))
    if not nccl_built:
        todo = "hvd-pipe build-horovod --cuda: without NCCL gradients go through the host's memory"
        rows.append(Row("GPUs", "NCCL in Horovod", False, "not built", todo))
    return rows


def network_rows(answer: Answer) -> list[Row]:
    """Rows for the interfaces that are up; their speed is what the driver says."""
    if answer.error:
        return [Row("Network", "interfaces", False, answer.error, "pip install psutil")]
    rows = []
    for interface in answer.found["interfaces"]:
        speed = "loopback" if interface["loopback"] else "speed unknown"
        if interface["bits_per_s"]:
            speed = f"{interface['bits_per_s'] / 1e9:g} Gbit/s"
        addresses = ", ".join(interface["addresses"])
        rows.append(Row("Network", interface["name"], None, f"{addresses} ({speed})"))
    if all(interface["loopback"] for interface in answer.found["interfaces"]):
        rows.append(Row("Network", "to other hosts", False, "only a loopback interface is up"))
    return rows


def machine_rows(answer: Answer) -> list[Row]:
    """Rows for cores and memory."""
    if answer.error:
        return [Row("Machine", "machine", False, answer.error)]
    found = answer.found
    return [
        Row("Machine", "host", None, f"{found['host']} ({found['system']})"),
        Row("Machine", "cores", None, str(found["cores"])),
        Row("Machine", "memory", None, f"{found['memory_bytes'] / _GIB:.1f} GiB"),
    ]


def environment_rows(environment: Mapping[str, str]) -> list[Row]:
    """Rows for the variables that change what jobs do; ours are checked."""
    rows = []
    for name in sorted(environment):
        if not name.startswith(_PREFIXES) and name not in _NAMES:
            continue
        value = environment[name]
        shown = "(set, not shown)" if _SECRET.search(name) else value
        good, todo = None, ""
        if name.startswith("HVD_PIPE_") and name not in VARIABLES:
            near = difflib.get_close_matches(name, VARIABLES, 1)
            good, todo = False, f"unset {name}: hvd_pipe reads {', '.join(near or VARIABLES)}"
        if name == "HVD_PIPE_STRATEGY":
            try:
                strategy.parse(value)
            except (ValueError, TypeError) as error:
                good, todo = False, f"unset {name}, or mend it: {' '.join(str(error).split())}"
        rows.append(
            Row("Environment", name, good, shown, todo, good is False and name in VARIABLES)
        )
    return rows


def host_row(host: str, answer: Answer, here: Mapping[str, Any], seconds: int) -> Row:
    """The row of another host: reachable, with the versions that are here."""
    name = f"ssh {host}"
    if answer.error:
        lower = answer.error.lower()
        todo = next((do for words, do in _SSH if words in lower), "")
        todo = todo or f"make `ssh -o BatchMode=yes {host} true` work within {seconds} s"
        return Row("Hosts", name, False, answer.error, todo.format(host=host), True)
    there = answer.found
    other = [
        f"{key} {there.get(key) or 'missing'} (here {here.get(key) or 'missing'})"
        for key in here
        if there.get(key) != here[key]
    ]
    if other:
        todo = f"give {host} the same environment as this machine"
        return Row("Hosts", name, False, "; ".join(other), todo, True)
    return Row("Hosts", name, True, "reachable, the same versions")


def self_test_row(answer: Answer, ranks: int, seconds: int, hosts: Sequence[str] = ()) -> Row:
    """The row of the all-reduce that was really made."""
    name = f"all-reduce on {ranks} ranks"
    if not answer.error and answer.found["right"]:
        found = answer.found
        where = f" on {', '.join(hosts)}" if hosts else ""
        return Row("Self-test", name, True, f"{found['controller']}, {found['device']}{where}")
    error = answer.error or "a wrong sum"
    todo = f"horovodrun -np {ranks} --verbose hvd-pipe bench --budget 1 shows more"
    if hosts:
        addresses = "--network-interfaces"
        todo = f"see that the hosts reach each other; horovodrun {addresses} names the network"
    if "no answer" in error and not hosts:
        todo += f"; a slow machine may need --timeout {4 * seconds}"
    return Row("Self-test", name, False, error, todo, True)
