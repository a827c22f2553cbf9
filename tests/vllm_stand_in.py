"""A program that behaves as a vLLM server does where it matters to who starts one: python vllm_stand_in.py MODE PORT.

It answers /health after a while, and has a child that has a child in a session of its own.
"""

from __future__ import annotations

import http.server
import os
import signal
import subprocess
import sys
import time

ENGINE_DIED = """\x1b[0;36m(EngineCore pid=9)\x1b[0;0m ERROR 11-30 00:25:50 [core.py:1510] EngineCore failed to start.
(EngineCore pid=9) ERROR 11-30 00:25:50 [core.py:1510]     raise ValueError(
(EngineCore pid=9) ERROR 11-30 00:25:50 [core.py:1510] ValueError: No room for the cache blocks.
Traceback (most recent call last):
  File "entry.py", line 1, in main
    raise RuntimeError(
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}
nanobind: leaked 514 functions!
"""
CHILD = "import subprocess, sys, time\nsubprocess.Popen(['sleep', '997'], start_new_session=True)\ntime.sleep(997)"


class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if sys.argv[1] == "garbage":
            self.wfile.write(b"\x00\xffno such protocol\r\n" * 3)
            return
        self.send_response(503 if sys.argv[1] == "never" else 200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        print("asked:", *args, flush=True)


def main(mode: str, port: int) -> None:
    print("loading", os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
    if mode == "dies":
        print(ENGINE_DIED, flush=True)
        sys.exit(1)
    if mode == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "mute":
        os._exit(3)
    if mode == "port":
        sys.exit("OSError: [Errno 98] Address already in use")
    if mode == "noise":
        os.write(1, os.urandom(100_000))
        sys.exit(4)
    if mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen([sys.executable, "-c", CHILD])
    time.sleep(1.5 if mode == "slow" else 0.2)
    http.server.HTTPServer(("127.0.0.1", port), Answers).serve_forever()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
