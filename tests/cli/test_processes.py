"""Commands that torchrun starts in several processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

JOINED = """
import sys
from pathlib import Path

from evenhand.cli.processes import joined

with joined(lambda: "cpu"):
    import torch

    torch.distributed.barrier()
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1).zero_grad()
print(*sorted(task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm")), flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="threads are listed by Linux")
def test_no_thread_of_the_group_outlives_it(tmp_path: Path) -> None:
    """A process that ends while threads of gloo still run may be aborted, after all that it did was right."""
    (tmp_path / "joined.py").write_text(JOINED)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "joined.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=300, cwd=tmp_path, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(done.stdout.splitlines()) == 2
    assert "gloo" not in done.stdout
