"""A child for the supervisor's tests: answers /health like an engine or a gateway, and misbehaves on request."""

from __future__ import annotations

import argparse
import http.server
import os
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
from pathlib import Path

SLEEPER = "import signal, time; [signal.signal(s, signal.SIG_IGN) for s in (15, 2, 1)]; time.sleep(600)"
LEAVER = """
import subprocess, sys
p = subprocess.Popen(
    [sys.executable, "-c", sys.argv[1]], start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
)
print(p.pid)
p.returncode = 0
"""


class Answer(http.server.BaseHTTPRequestHandler):
    sick_file: Path | None = None

    def do_GET(self) -> None:
        sick = self.sick_file is not None and self.sick_file.exists()
        self.send_response(503 if sick else 200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        return

    def address_string(self) -> str:
        return "client"


class UnixServer(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True


def server(args: argparse.Namespace) -> socketserver.BaseServer:
    if args.socket:
        return UnixServer(args.socket, Answer)
    http.server.ThreadingHTTPServer.address_family = socket.AF_INET
    return http.server.ThreadingHTTPServer(("127.0.0.1", args.port), Answer)


def note(pids: Path, *found: int) -> None:
    with pids.open("a") as file:
        file.write("".join(f"{pid}\n" for pid in found))


def leave_grandchildren(pids: Path) -> None:
    """One in the same group, one in a session of its own, one whose parent is gone; all ignore SIGTERM."""
    own = subprocess.Popen([sys.executable, "-c", SLEEPER])
    apart = subprocess.Popen([sys.executable, "-c", SLEEPER], start_new_session=True)
    orphan = subprocess.run([sys.executable, "-c", LEAVER, SLEEPER], capture_output=True, text=True, check=True)
    note(pids, own.pid, apart.pid, int(orphan.stdout))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket")
    parser.add_argument("--port", type=int)
    parser.add_argument("--pids", type=Path, required=True)
    parser.add_argument("--say", default="INFO 01-01 00:00:00 [core.py:1] Loading the weights")
    parser.add_argument("--exit", type=int)
    parser.add_argument("--start-after", type=float, default=0.0)
    parser.add_argument("--stubborn", action="store_true")
    parser.add_argument("--grandchildren", action="store_true")
    parser.add_argument("--sick-file", type=Path)
    args = parser.parse_args()
    print(args.say, flush=True)
    note(args.pids, os.getpid())
    if args.exit is not None:
        sys.exit(args.exit)
    signal.signal(signal.SIGTERM, signal.SIG_IGN if args.stubborn else lambda *_: os._exit(0))
    if args.grandchildren:
        leave_grandchildren(args.pids)
    time.sleep(args.start_after)
    Answer.sick_file = args.sick_file
    running = server(args)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    while True:
        time.sleep(600)


if __name__ == "__main__":
    main()
