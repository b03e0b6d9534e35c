"""How fast the service is, and how it behaves when it gets more than it can hold.

Starts one server per method and measures them in turns, so that what else the machine does falls on
all of them alike: only ratios within one run mean something. `wrk` gives the throughput and the
percentiles; a client of our own, which sends on a schedule whatever comes back, gives the overload.

    python benchmarks/serve.py                      # the shipped digits-vit
    python benchmarks/serve.py --model NAME --weights FILE --images FOLDER --tenants 1 10 100
"""

from __future__ import annotations

import argparse
import asyncio
import atexit
import io
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from dataclasses import astuple, dataclass
from pathlib import Path

from PIL import Image

from moetta.data import embedded
from moetta.data.corruptions import CLASSICAL

EVERY = ("--learn-queue", "1000000")
VARIANTS = {
    "noadapt": ("--method", "noadapt"),
    "moetta": ("--method", "moetta", "--no-guard", *EVERY),
    "moetta, guard": ("--method", "moetta", *EVERY),
}
LUA = """
local bodies = {}
for i = 0, COUNT - 1 do
  local f = io.open("FOLDER/" .. i .. ".png", "rb"); bodies[i + 1] = f:read("*a"); f:close()
end
local n = os.time() * 131 % COUNT -- every turn begins elsewhere
request = function()
  n = n + 1
  return wrk.format("POST", "/v1/predict", {["Content-Type"] = "image/png"}, bodies[n % COUNT + 1])
end
done = function(summary, latency, requests)
  io.write(string.format("RESULT %d %d %d %.3f %.3f %.3f\\n", summary.requests,
    summary.errors.status, summary.duration, latency:percentile(50) / 1000,
    latency:percentile(95) / 1000, latency:percentile(99) / 1000))
end
"""


class Server:
    """`moetta serve` in a process."""

    def __init__(self, *options: str, environment: dict[str, str] | None = None) -> None:
        self.state = tempfile.mkdtemp(prefix="moetta-bench-")
        command = [sys.executable, "-m", "moetta", "serve", "--port", "0", "--threads", "1"]
        begun = time.monotonic()
        self.process = subprocess.Popen(
            [*command, "--state", self.state, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
        )
        atexit.register(self.process.kill)
        assert self.process.stdout is not None
        found = re.search(r"http://\S+", self.process.stdout.readline())
        if found is None:
            raise SystemExit(f"the server did not start: moetta serve {' '.join(options)}")
        self.url = found[0]
        self.port = int(self.url.rpartition(":")[2])
        self.seconds_to_ready = time.monotonic() - begun

    def metrics(self) -> dict[str, float]:
        """All metrics by name with labels."""
        text = urllib.request.urlopen(self.url + "/metrics", timeout=60).read().decode()
        rows = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in rows}

    def batches(self) -> tuple[float, float]:
        """Batches so far: all, and those that were learnt from at once or in a pool."""
        found = self.metrics()
        by = {
            kind: found.get(f'moetta_batches_total{{learning="{kind}"}}', 0.0)
            for kind in ("learnt", "pooled", "pressure", "paused", "guard", "fixed", "failed")
        }
        return sum(by.values()), by["learnt"] + by["pooled"]

    def memory(self) -> float:
        """Resident megabytes."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

    def cpu(self) -> float:
        """Seconds of CPU time so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> int:
        """End it; returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(120)
        shutil.rmtree(self.state, ignore_errors=True)
        return code


def bodies(folder: Path | None, each: int = 96) -> list[bytes]:
    """Image files: those of a folder, or the embedded test images under 15 corruptions, shuffled.

    They are many and different. A model that sees a few images again and again learns these by
    heart, the guard stops trusting it, and what is measured is no service that anybody runs.
    """
    if folder is not None:
        kinds = (".png", ".jpg", ".jpeg", ".webp")
        found = sorted(path for path in folder.rglob("*") if path.suffix.lower() in kinds)
        return [path.read_bytes() for path in found[:256]]
    domains = [embedded.domain(f"c/{name}", severity=5, count=each) for name in CLASSICAL]
    out = []
    for image in (image for domain in domains for image in domain.images):
        file = io.BytesIO()
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(file, "PNG")
        out.append(file.getvalue())
    random.Random(0).shuffle(out)
    return out


def wrk(server: Server, script: Path, clients: int, seconds: int) -> tuple[float, list[float]]:
    """Answers per second, and p50, p95, p99 in ms."""
    command = ["wrk", "-t1", f"-c{clients}", f"-d{seconds}s", "--timeout", "30s"]
    done = subprocess.run(
        [*command, "-s", str(script), server.url], capture_output=True, text=True, check=True
    )
    found = re.search(r"RESULT (.*)", done.stdout)
    assert found is not None, done.stdout
    requests, errors, micros, *percentiles = map(float, found[1].split())
    return (requests - errors) / (micros / 1e6), percentiles


async def one_request(port: int, body: bytes, timeout: float) -> tuple[str, float]:
    """The status of one request on a connection of its own, and the seconds it took."""
    begun = time.monotonic()
    try:
        async with asyncio.timeout(timeout):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(
                b"POST /v1/predict HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: image/png\r\n"
                b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body
            )
            status = (await reader.read(65536))[9:12].decode()
            writer.close()
    except TimeoutError:
        status = "hang"
    except OSError:
        status = "cut"
    return status or "cut", time.monotonic() - begun


async def on_schedule(
    server: Server, files: list[bytes], rate: float, seconds: float
) -> tuple[Counter[str], float, list[float]]:
    """Send ``rate`` requests a second, whatever comes back."""
    tasks: list[asyncio.Task[tuple[str, float]]] = []
    begun = time.monotonic()
    while (now := time.monotonic() - begun) < seconds:
        while len(tasks) < now * rate:
            body = files[len(tasks) % len(files)]
            tasks.append(asyncio.create_task(one_request(server.port, body, 60)))
        await asyncio.sleep(0.005)
    sent = len(tasks) / (time.monotonic() - begun)
    results = await asyncio.gather(*tasks)
    answered = sorted(took for status, took in results if status == "200")
    return Counter(status for status, _ in results), sent, answered


@dataclass(frozen=True)
class Measured:
    """One turn of one server.

    Attributes:
        rate: answers per second.
        p50: median latency in ms, and so on.
        cpu: the server's CPU time per answer in ms; other work on the machine hardly changes it.
        learnt: share of the batches that were learnt from, at once or in a pool.
    """

    rate: float
    p50: float
    p95: float
    p99: float
    cpu: float
    learnt: float


def turn(server: Server, script: Path, clients: int, seconds: int) -> Measured:
    """Load one server for some seconds."""
    cpu, (batches, learnt) = server.cpu(), server.batches()
    rate, (p50, p95, p99) = wrk(server, script, clients, seconds)
    after = server.batches()
    return Measured(
        rate,
        p50,
        p95,
        p99,
        1000 * (server.cpu() - cpu) / max(1.0, rate * seconds),
        (after[1] - learnt) / max(1.0, after[0] - batches),
    )


def throughput(options: argparse.Namespace, common: list[str], files: list[bytes]) -> None:
    """The table of requests per second, and the ratios to noadapt in the same round."""
    folder = Path(tempfile.mkdtemp(prefix="moetta-bodies-"))
    for number, body in enumerate(files):
        (folder / f"{number}.png").write_bytes(body)
    script = folder / "post.lua"
    script.write_text(LUA.replace("COUNT", str(len(files))).replace("FOLDER", str(folder)))
    servers = {name: Server(*common, *given) for name, given in VARIANTS.items()}
    ready = ", ".join(f"{name} {s.seconds_to_ready:.1f} s" for name, s in servers.items())
    print("time to ready:", ready)
    print(
        "| clients | method | req/s | p50 ms | its best turn | p95 | p99 | CPU ms | learnt from |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    said: list[str] = []
    for clients in options.clients:
        for server in servers.values():
            wrk(server, script, clients, 1)
        rows: dict[str, list[Measured]] = {name: [] for name in servers}
        for _ in range(options.rounds):
            for name, server in servers.items():
                rows[name].append(turn(server, script, clients, options.seconds))
        for name, found in rows.items():
            m = Measured(*map(statistics.median, zip(*map(astuple, found), strict=True)))
            best = min(row.p50 for row in found)  # the turn least disturbed by other work
            print(
                f"| {clients} | {name} | {m.rate:.1f} | {m.p50:.1f} | {best:.1f} | {m.p95:.1f} | "
                f"{m.p99:.1f} | {m.cpu:.2f} | {m.learnt:.0%} |",
                flush=True,
            )
            if name != "noadapt":
                pairs = list(zip(found, rows["noadapt"], strict=True))
                rate, p50, cpu = (
                    statistics.median(getattr(a, what) / getattr(b, what) for a, b in pairs)
                    for what in ("rate", "p50", "cpu")
                )
                said.append(
                    f"{name} against noadapt at {clients} client(s): req/s {rate:.2f} x, p50 "
                    f"{p50:.2f} x, CPU {cpu:.2f} x"
                )
    print("\n".join(said))
    print("aims: req/s at least 0.45 x at saturation, p50 at most 1.15 x at one client")
    for server in servers.values():
        assert server.stop() == 0
    shutil.rmtree(folder)


def overload(options: argparse.Namespace, common: list[str], files: list[bytes]) -> None:
    """Five times what it can hold: answers, refusals, memory."""
    server = Server(*common, "--method", "moetta", "--max-queue", "128")
    asyncio.run(on_schedule(server, files, 20, 2))
    best, rate = 0.0, 25.0
    while True:  # raise the rate until it no longer keeps up
        found, _, _ = asyncio.run(on_schedule(server, files, rate, options.seconds))
        goodput = found["200"] / options.seconds
        best = max(best, goodput)
        print(f"offered {rate:6.0f}/s: answered {goodput:6.1f}/s {dict(found)}")
        if goodput < 0.8 * rate:
            break
        rate *= 1.6
    before, batches = server.memory(), server.batches()
    codes, latencies = Counter[str](), list[float]()
    ratios, goodputs, offered = [], [], []
    cores: dict[str, list[float]] = {"server": [], "client": []}
    for _ in range(options.rounds):  # in turns with the load that it holds, for the same reason
        held, _, _ = asyncio.run(on_schedule(server, files, best, options.seconds))
        used, ours, begun = server.cpu(), time.process_time(), time.monotonic()
        found, sent, took = asyncio.run(on_schedule(server, files, 5 * best, options.seconds))
        passed = time.monotonic() - begun
        cores["server"].append((server.cpu() - used) / passed)
        cores["client"].append((time.process_time() - ours) / passed)
        ratios.append(found["200"] / max(1, held["200"]))
        goodputs.append(found["200"] / options.seconds)
        offered.append(sent)
        codes += found
        latencies += took
    latencies.sort()
    after = server.batches()
    print(
        f"overload: offered {statistics.median(offered):.0f}/s, answered "
        f"{statistics.median(goodputs):.0f}/s = {statistics.median(ratios):.2f} of what it answers "
        f"when offered {best:.0f}/s (aim 0.90); {dict(codes)}; answered ones: "
        f"p50 {latencies[len(latencies) // 2]:.2f} s, "
        f"p99 {latencies[int(len(latencies) * 0.99)]:.2f} s; learnt from "
        f"{(after[1] - batches[1]) / max(1, after[0] - batches[0]):.0%} of batches; "
        f"memory {before:.0f} -> {server.memory():.0f} MB; cores in use: server "
        f"{statistics.median(cores['server']):.2f}, this client "
        f"{statistics.median(cores['client']):.2f}"
    )
    assert codes["hang"] == 0, "a request hangs"
    assert server.stop() == 0


def tenants(options: argparse.Namespace, common: list[str], files: list[bytes]) -> None:
    """Memory with several tenants, each of which has learnt something."""
    for count in options.tenants:
        server = Server(
            *common, "--method", "moetta", "--tenants-in-memory", str(max(count, 1)),
            "--learn-samples", "2", "--max-wait-ms", "0",
        )  # fmt: skip
        base = server.memory()
        begun = time.monotonic()
        for tenant in range(count):
            for body in files[:2]:
                request = urllib.request.Request(
                    server.url + "/v1/predict",
                    body,
                    {"Content-Type": "image/png", "X-Stream-Id": f"tenant-{tenant}"},
                )
                urllib.request.urlopen(request, timeout=120).read()
        took = (time.monotonic() - begun) / count
        print(
            f"{count:>4} tenants: ready in {server.seconds_to_ready:.1f} s, {base:.0f} MB at "
            f"start, {server.memory():.0f} MB with all of them "
            f"({(server.memory() - base) / count:.2f} MB each), first two images {took:.2f} s each"
        )
        server.stop()


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="digits-vit")
    parser.add_argument("--weights")
    parser.add_argument("--images", type=Path, help="folder of image files to send")
    parser.add_argument("--clients", type=int, nargs="*", default=[1, 16, 256])
    parser.add_argument("--seconds", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tenants", type=int, nargs="*", default=[])
    parser.add_argument("--skip", nargs="*", default=[], choices=["throughput", "overload"])
    options = parser.parse_args()
    common = ["--model", options.model, "--queue-timeout", "30", "--max-queue", "1024"]
    if options.weights:
        common += ["--weights", options.weights]
    files = bodies(options.images)
    print(f"{options.model}, load before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    if "throughput" not in options.skip:
        throughput(options, common, files)
    if "overload" not in options.skip:
        overload(options, common[:-2], files)
    tenants(options, common, files)
    print(f"load after: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
