"""Processes that torchrun starts: when they are done, no thread of the process group is left that could abort them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

RANK = """
import os
from evenhand.cli.processes import joined

def threads():
    return [open(f"/proc/self/task/{task}/comm").read().strip() for task in os.listdir("/proc/self/task")]

with joined(lambda: "cpu"):
    import torch._dynamo  # as every optimizer does
    assert any("gloo" in name for name in threads())
assert not any("gloo" in name for name in threads()), threads()
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are counted in /proc")
def test_the_threads_of_the_process_group_end_with_it() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "test"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
