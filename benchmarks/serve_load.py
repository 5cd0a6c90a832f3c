"""Measure requests per second, memory and threads of the reward server, with a trivial reward.

    python benchmarks/serve_load.py [--before COMMIT]

Each server is a separate process; the server of another commit is taken from git.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
NEW = """
from lightning_rlhf.rewards.server import RewardServer, listening_socket
server = RewardServer(score, listening_socket("127.0.0.1", 0))
print(server.port, flush=True)
server.run()
"""
OLD = """
from lightning_rlhf.rewards.server import serve
serve(score, "127.0.0.1", 0, ready=lambda url: print(url.split(":")[2].split("/")[0], flush=True))
"""
SCORE = "score = lambda prompts, responses, columns: [0.0] * len(responses)\n"
BODY = json.dumps(
    {"prompts": [[{"role": "user", "content": "p" * 200}]] * 32, "responses": ["r" * 200] * 32}
).encode()


class Served:
    """A server process and its use of resources."""

    def __init__(self, source: Path, program: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SCORE + program], stdout=subprocess.PIPE, text=True,
            stderr=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": str(source)},
        )  # fmt: skip
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def status(self, key: str) -> int:
        """Return a number of /proc/PID/status."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def requests_a_second(server: Served, clients: int, seconds: float = 4.0) -> float:
    """Return answered requests per second, with 32 responses each.

    Every client sends its next request as soon as the last one is answered.
    """
    end, counts = time.monotonic() + seconds, [0] * clients

    def client(i: int) -> None:
        while time.monotonic() < end:
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
            try:
                while time.monotonic() < end:
                    connection.request("POST", "/score", BODY)
                    answer = connection.getresponse()
                    answer.read()
                    counts[i] += answer.status == 200
            except OSError:
                pass

    threads = [threading.Thread(target=client, args=(i,)) for i in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / seconds


def peak_mib(server: Served) -> float:
    """Return the peak memory in MiB while four clients send 54 MiB of empty lists each."""
    body = b'{"prompts": [' + b"[]," * (18 * 2**20) + b"[]]}"

    def client() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
        try:
            connection.request("POST", "/score", body)
            connection.getresponse().read()
        except OSError:
            pass

    threads = [threading.Thread(target=client) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return server.status("VmHWM") / 1024


def threads_under(server: Served, connections: int = 1000) -> int:
    """Return the number of threads while `connections` idle clients are connected."""
    held = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(connections)]
    time.sleep(1)
    found = server.status("Threads")
    for connection in held:
        connection.close()
    return found


def main() -> None:
    """Measure both servers in turn and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", default="c26bfaf", help="commit beside which it is measured")
    before = parser.parse_args().before
    rows: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(
            ["git", "archive", before, "src"], cwd=ROOT, check=True, capture_output=True
        )
        subprocess.run(["tar", "x", "-C", folder], input=archive.stdout, check=True)
        for source, program in ((Path(folder) / "src", OLD), (ROOT / "src", NEW)):
            server = Served(source, program)
            try:
                for clients in (1, 8, 64):
                    name = f"requests/s, {clients} clients"
                    rows.setdefault(name, []).append(requests_a_second(server, clients))
                rows.setdefault("threads, 1,000 idle connections", []).append(threads_under(server))
                rows.setdefault("peak MiB, four 54 MiB bodies", []).append(peak_mib(server))
            finally:
                server.process.kill()
                server.process.wait()
    print(f"| | {before} | now | ratio |\n|---|---|---|---|")
    for name, (old, new) in rows.items():
        print(f"| {name} | {old:,.0f} | {new:,.0f} | {new / old:.2f} |")


if __name__ == "__main__":
    main()
