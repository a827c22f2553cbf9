"""Files that only live processes need go with their process, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from sync_kit import files

from agentrl.train import scratch

LEAVE = """
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
spec = spec_from_file_location("scratch", sys.argv[3])  # alone: its package takes seconds to import
scratch = module_from_spec(spec)
spec.loader.exec_module(scratch)
folder = scratch.Scratch(Path(sys.argv[1]), "agentrl-weights-")
(folder.path / "0.safetensors").write_bytes(b"weights")
print("ready", flush=True)
if sys.argv[2] == "wait":
    input()
elif sys.argv[2] == "raise":
    raise RuntimeError
"""


def test_files_go_with_their_process_however_it_ends(tmp_path: Path) -> None:
    folder = tmp_path / "left"

    def start(how: str) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            [sys.executable, "-c", LEAVE, str(folder), how, scratch.__file__],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        return child

    for how in ("end", "raise"):
        start(how).wait(20)
        assert list(folder.iterdir()) == []
    killed, alive = start("wait"), start("wait")
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait(20)
    assert len(files(folder)) == 2
    mine = scratch.Scratch(folder, "agentrl-weights-")  # the next run
    assert len(files(folder)) == 1 and alive.poll() is None
    alive.communicate("\n", timeout=20)
    mine.close()
    assert list(folder.iterdir()) == []
