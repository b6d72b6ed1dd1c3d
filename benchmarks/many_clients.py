"""The read latency of a light client beside a heavy one, with turns by session and without.

    python benchmarks/many_clients.py [--seconds 5] [--json FILE]

The heavy client sends matrix products as fast as it can, and reads nothing. The light one adds two small tensors and
reads the sum. Both use the one worker of a server. Without turns the dispatcher plans instructions in the order in
which they arrive, and workers never reorder.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator

SERVER = """
import sys
from gt.dispatcher import fair_queue
if sys.argv.pop(1) == "without":
    fair_queue.FIRST_UNITS = fair_queue.MAX_UNITS = 1e15
    fair_queue.TARGET_NANOSECONDS = 1e18
from gt.server.__main__ import main
sys.exit(main())
"""
HEAVY = """
import gt
x = gt.randn(256, 256)
print("ready", flush=True)
while True:
    y = x @ x
"""
LIGHT = """
import sys, time, gt
x, y = gt.ones(8), gt.ones(8)
(x + y).sum().item()
print("ready", flush=True)
sys.stdin.readline()
end = time.monotonic() + float(sys.argv[1])
times = []
while time.monotonic() < end:
    start = time.perf_counter()
    (x + y).sum().item()
    times.append(time.perf_counter() - start)
    time.sleep(0.01)
times.sort()
print(times[len(times) // 2], times[int(0.95 * (len(times) - 1))], times[-1])
"""


@contextlib.contextmanager
def process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
    started = subprocess.Popen([sys.executable, *arguments], stdin=pipe, stdout=pipe, stderr=nowhere, text=True)
    try:
        yield started
    finally:
        started.terminate()
        started.wait()


def client(code: str, port: int, *arguments: str) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    return process("-c", f"import os; os.environ['GT_SERVER'] = 'localhost:{port}'\n{code}", *arguments)


def measure(turns: str, is_heavy: bool, seconds: float) -> dict[str, float]:
    """Milliseconds of the light client's reads."""
    with process("-c", SERVER, turns, "-p", "0", "--json") as server:
        assert server.stdout is not None
        port = json.loads(server.stdout.readline())["port"]
        with process("-m", "gt.worker", "-p", str(port), "--threads", "1", "--json") as worker:
            assert worker.stdout is not None
            worker.stdout.readline()
            with client(LIGHT, port, str(seconds)) as light, contextlib.ExitStack() as stack:
                assert light.stdin is not None and light.stdout is not None
                light.stdout.readline()
                if is_heavy:
                    heavy = stack.enter_context(client(HEAVY, port))
                    assert heavy.stdout is not None
                    heavy.stdout.readline()
                    time.sleep(1)  # it is at its full speed
                light.stdin.write("\n")
                light.stdin.flush()
                median, late, worst = map(float, light.stdout.readline().split())
                return {"median": 1e3 * median, "95 %": 1e3 * late, "worst": 1e3 * worst}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    found = {
        "alone": measure("with", is_heavy=False, seconds=options.seconds),
        "beside a heavy client, with turns": measure("with", is_heavy=True, seconds=options.seconds),
        "beside a heavy client, without turns": measure("without", is_heavy=True, seconds=options.seconds),
    }
    print("milliseconds of a read")
    for name, values in found.items():
        print(f"{name:40s}", "  ".join(f"{key} {value:.1f}" for key, value in values.items()))
    if options.json:
        with open(options.json, "w") as file:
            json.dump(found, file, indent=2)


if __name__ == "__main__":
    main()
