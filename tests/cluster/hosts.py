"""What tests on an emulated cluster need: to be root, on a machine that lets root make hosts."""

from __future__ import annotations

import os
import subprocess

import pytest


def _can_make_hosts() -> bool:
    if os.geteuid() != 0:
        return False
    try:  # in many containers, root may not
        command = ["unshare", "--net", "--mount", "--pid", "--fork", "--mount-proc", "true"]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return True  # the error that names the package is better


as_root = [
    pytest.mark.cluster,
    pytest.mark.skipif(
        not _can_make_hosts(), reason="needs a root that may make network namespaces"
    ),
]
