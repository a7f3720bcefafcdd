"""What the gateway adds to the time to first token: the same engine through it and directly, in turns, in one run.

Eight closed-loop clients stream completions, each request by lot through the gateway or directly, so that whatever the
machine does falls on both. The result is JSON: median and 99th percentile of each way, their differences, and an
interval that holds the difference of the medians in 95 of 100 such runs (bootstrap).

    python bench/gateway_latency.py --serve      # `manylora serve` on the tests' tiny model, with one adapter
    python bench/gateway_latency.py --fake       # an engine that only waits, and a gateway, both started here
    python bench/gateway_latency.py --engine-socket S --engine-model M --gateway URL --key sk-… --model N

With `--fake` the gateway serves a real registry (SQLite) in a temporary folder. The engine's tokens come from timers:
the difference is the gateway's own work. The result then also tells the processor time that the gateway took for a
request, which neighbours on the machine disturb least.
"""

# Draws are for variety only, and every command and URL is this file's own.
# ruff: noqa: S310, S311, S603

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from manylora.adapter import Selector
from manylora.registry.catalog import Catalog
from manylora.settings import Settings

RESULT = Path(__file__).parent / "results" / "gateway-latency.json"
FAKE_BASE = "Fake-Base"
START_TIMEOUT_S = 30.0
RESAMPLES = 1000


@dataclass(frozen=True, slots=True)
class Way:
    """One way to the engine."""

    name: str
    url: str
    model: str
    headers: dict[str, str]
    socket: Path | None = None
    pid: int | None = None
    """The process that is this way's own, where it is known."""

    def session(self) -> aiohttp.ClientSession:
        connector = aiohttp.UnixConnector(str(self.socket), limit=0) if self.socket else aiohttp.TCPConnector(limit=0)
        return aiohttp.ClientSession(connector=connector, headers=self.headers)


@dataclass(frozen=True, slots=True)
class Measured:
    """What was found, by the name of the way."""

    seconds: dict[str, list[float]]
    """To the first token, of every request."""
    cpu_s: dict[str, float]
    """Processor time that the way's own process took for all of them."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is asked."""

    streams: int
    requests: int
    max_tokens: int
    seed: int = 42


async def first_token_s(session: aiohttp.ClientSession, way: Way, prompt: str, max_tokens: int) -> float:
    """Send one streamed completion, read it to its end, and return the seconds to its first event."""
    body = {"model": way.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
    body["ignore_eos"] = True
    started = time.perf_counter()
    first = None
    async with session.post(f"{way.url}/v1/completions", json=body) as response:
        tail = b""
        async for chunk in response.content.iter_any():
            first = first or time.perf_counter() - started
            tail = (tail + chunk)[-64:]
        if response.status != 200 or first is None or not tail.rstrip().endswith(b"[DONE]"):
            raise SystemExit(f"{way.name}: {response.status} {tail!r}")
    return first


async def measure(ways: Sequence[Way], plan: Plan) -> Measured:
    """Closed-loop clients that send each request one way or the other by lot; the first requests are thrown away.

    Both ways see the same engine, the same load and the same neighbours at every moment: what is left between their
    medians is the way itself.
    """
    draw = random.Random(plan.seed)
    jobs = [(way, draw.randint(1, plan.max_tokens)) for way in ways for _ in range(plan.requests)]
    draw.shuffle(jobs)
    warm_up = [(way, plan.max_tokens) for way in (ways[0], *ways * plan.streams)]
    seconds: dict[str, list[float]] = {way.name: [] for way in ways}
    async with contextlib.AsyncExitStack() as stack:
        sessions = {way.name: await stack.enter_async_context(way.session()) for way in ways}
        for way, tokens in warm_up:
            await first_token_s(sessions[way.name], way, "Warm up.", tokens)
        cpu_before = {way.name: _cpu_s(way.pid) for way in ways if way.pid}

        async def client() -> None:
            while jobs:
                way, tokens = jobs.pop()
                prompt = f"Request {draw.random()}: count on."
                seconds[way.name].append(await first_token_s(sessions[way.name], way, prompt, tokens))

        async with asyncio.TaskGroup() as group:
            for _ in range(plan.streams):
                group.create_task(client())
        cpu_s = {way.name: _cpu_s(way.pid) - cpu_before[way.name] for way in ways if way.pid}
    return Measured(seconds, cpu_s)


def _cpu_s(pid: int) -> float:
    """User and system time of a process so far."""
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(after_name[11]) + int(after_name[12])) / os.sysconf("SC_CLK_TCK")


def summary(measured: Measured, plan: Plan, what: str) -> dict[str, object]:
    seconds = measured.seconds
    ways = {name: _quantiles(values) for name, values in seconds.items()}
    added: dict[str, object] = {
        key: round(ways["gateway"][key] - ways["direct"][key], 3) for key in ("median_ms", "p99_ms")
    }
    added["median_ms_95"] = median_difference_interval_ms(seconds["gateway"], seconds["direct"], plan.seed)
    for name, cpu_s in measured.cpu_s.items():
        ways[name]["cpu_ms_per_request"] = round(1000 * cpu_s / len(seconds[name]), 3)
    return {
        "what": what,
        "streams": plan.streams,
        "requests_each": plan.requests,
        "machine": {"cpus": os.cpu_count(), "python": platform.python_version(), "system": platform.machine()},
        **ways,
        "added": added,
    }


def median_difference_interval_ms(more: list[float], less: list[float], seed: int) -> list[float]:
    """The middle 95 % of the differences that samples drawn again from these, with replacement, would have shown."""
    draw = random.Random(seed)
    differences = sorted(
        statistics.median(draw.choices(more, k=len(more))) - statistics.median(draw.choices(less, k=len(less)))
        for _ in range(RESAMPLES)
    )
    low, high = round(RESAMPLES * 0.025), round(RESAMPLES * 0.975) - 1
    return [round(1000 * differences[low], 3), round(1000 * differences[high], 3)]


def _quantiles(seconds: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return {"median_ms": round(1000 * statistics.median(seconds), 3), "p99_ms": round(1000 * cuts[98], 3)}


# ---- an engine that only waits


async def _fake_completion(request: Request) -> Response:
    body = await request.json()

    async def events() -> AsyncIterator[bytes]:
        await asyncio.sleep(random.uniform(0.015, 0.025))
        for number in range(body["max_tokens"]):
            choice = {"index": 0, "text": f" {number}", "logprobs": None, "finish_reason": None}
            event = {
                "id": "cmpl-1",
                "object": "text_completion",
                "created": 1,
                "model": body["model"],
                "choices": [choice],
            }
            yield b"data: " + json.dumps(event).encode() + b"\n\n"
            await asyncio.sleep(random.uniform(0.025, 0.035))
        yield b"data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


def serve_fake_engine(socket: Path) -> None:
    routes = [
        Route("/v1/completions", _fake_completion, methods=["POST"]),
        Route("/health", lambda request: Response()),
    ]
    uvicorn.run(Starlette(routes=routes), uds=str(socket), access_log=False, log_level="error")


@contextlib.contextmanager
def fake_ways(folder: Path, port: int) -> Iterator[list[Way]]:
    """A fake engine and a real gateway process in `folder`, gone at the end."""
    socket = folder / "engine.sock"
    env = {**os.environ, "MANYLORA_HOME": str(folder), "MANYLORA_PORT": str(port)}
    settings = replace(Settings.from_env(env), port=port)
    with contextlib.closing(Catalog.open(settings)) as catalog:
        catalog.create_tenant("bench", actor="bench")
        key, _ = catalog.create_key("bench", actor="bench")
    engine = [sys.executable, __file__, "--serve-fake-engine", str(socket)]
    gateway = [sys.executable, "-m", "manylora.gateway", "--engine-socket", str(socket), "--base-model", FAKE_BASE]
    url = f"http://127.0.0.1:{port}"
    with _child(engine, env, folder / "engine.log"), _child(gateway, env, folder / "gateway.log") as process:
        _wait_ready(f"{url}/readyz", folder / "gateway.log")
        yield [
            Way("gateway", url, FAKE_BASE, {"authorization": f"Bearer {key}"}, pid=process.pid),
            Way("direct", "http://engine", FAKE_BASE, {}, socket),
        ]


@contextlib.contextmanager
def _child(argv: list[str], env: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as out:
        process = subprocess.Popen(argv, env=env, stdout=out, stderr=out)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def _wait_ready(url: str, log: Path, timeout_s: float = START_TIMEOUT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with contextlib.suppress(urllib.error.URLError, ConnectionError), urllib.request.urlopen(url, timeout=2):
            return
        time.sleep(0.1)
    raise SystemExit(f"the gateway did not become ready:\n{log.read_text()}")


# ---- a real engine

VLLM_FLAGS = ("--max-model-len", "256", "--max-num-seqs", "16", "--max-lora-rank", "16")
SERVE_TIMEOUT_S = 300.0


@contextlib.contextmanager
def served_ways(folder: Path, model: str, adapter: str, port: int) -> Iterator[list[Way]]:
    """`manylora serve` on `model`, and `adapter` (a PEFT folder) through the gateway and on the engine directly."""
    cli = [sys.executable, "-m", "manylora", "--home", str(folder)]
    serve = [*cli, "serve", model, "--served-model-name", "base", "--port", str(port), "--", *VLLM_FLAGS]
    log = folder / "serve.log"
    with _child(serve, dict(os.environ), log):
        _wait_ready(f"http://127.0.0.1:{port}/readyz", log, SERVE_TIMEOUT_S)
        push = [*cli, "adapter", "push", adapter, "default/bench", "--force"]
        subprocess.run(push, check=True, stdout=subprocess.DEVNULL)
        settings = Settings.from_env({"MANYLORA_HOME": str(folder)})
        with contextlib.closing(Catalog.open(settings)) as catalog:
            key, _ = catalog.create_key("default", actor="bench")
            name = catalog.resolve("default", Selector.parse("default/bench")).ref.engine_name
        yield [
            Way("gateway", f"http://127.0.0.1:{port}", "default/bench", {"authorization": f"Bearer {key}"}),
            Way("direct", "http://engine", name, {}, settings.run_dir / "engine.sock"),
        ]


# ---- command line


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--fake", action="store_true", help="start a waiting engine and a gateway for it")
    parser.add_argument(
        "--serve", metavar="DIR", nargs="?", const="", help="start `manylora serve` on this model folder"
    )
    parser.add_argument("--adapter", metavar="DIR", help="with --serve DIR: the PEFT folder to ask")
    parser.add_argument("--port", type=int, default=18080, help="the gateway's port with --fake or --serve")
    parser.add_argument("--engine-socket", type=Path, help="Unix socket of a running engine")
    parser.add_argument("--engine-model", help="model name to use on the engine directly")
    parser.add_argument("--gateway", help="base URL of a running gateway")
    parser.add_argument("--key", help="API key for the gateway")
    parser.add_argument("--model", help="model name to use on the gateway")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--requests", type=int, default=2000, help="requests each way, after some to warm up")
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--fail-over-ms", type=float, help="exit with 1 if the median grows by more than this")
    parser.add_argument("--serve-fake-engine", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    running = (args.engine_socket, args.engine_model, args.gateway, args.key, args.model)
    if args.serve and not args.adapter:
        parser.error("--serve DIR needs --adapter")
    if not args.fake and args.serve is None and not args.serve_fake_engine and not all(running):
        parser.error("give --serve, --fake, or all of --engine-socket --engine-model --gateway --key --model")
    return args


def real_ways(args: argparse.Namespace) -> list[Way]:
    return [
        Way("gateway", args.gateway.rstrip("/"), args.model, {"authorization": f"Bearer {args.key}"}),
        Way("direct", "http://engine", args.engine_model, {}, args.engine_socket),
    ]


def _model(args: argparse.Namespace) -> tuple[str, str]:
    """The model folder and the adapter of --serve; by default the tests' tiny ones, whose steps are short."""
    if args.serve:
        return args.serve, args.adapter
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "e2e"))
    from harness.zoo import open_zoo

    cache = Path(__file__).parents[1] / ".cache" / "model-zoo"
    cache.mkdir(parents=True, exist_ok=True)
    zoo = open_zoo(cache)
    return str(zoo.base_path), str(zoo.adapter("r16-bf16"))


def _what(args: argparse.Namespace) -> str:
    if args.fake:
        return "an engine that waits"
    if args.serve:
        return f"vLLM on the CPU, {Path(args.serve).name}, adapter {Path(args.adapter).name}"
    return "vLLM on the CPU, the tests' tiny Llama, one adapter" if args.serve is not None else str(args.model)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    if args.serve_fake_engine:
        serve_fake_engine(args.serve_fake_engine)
        return 0
    plan = Plan(args.streams, args.requests, args.max_tokens)
    with contextlib.ExitStack() as stack:
        if args.fake:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="manylora-bench-")))
            ways = stack.enter_context(fake_ways(folder, args.port))
        elif args.serve is not None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="manylora-bench-")))
            ways = stack.enter_context(served_ways(folder, *_model(args), args.port))
        else:
            ways = real_ways(args)
        measured = asyncio.run(measure(ways, plan))
    result = summary(measured, plan, _what(args))
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    seconds = measured.seconds
    added = statistics.median(seconds["gateway"]) - statistics.median(seconds["direct"])
    return 1 if args.fail_over_ms is not None and added * 1000 > args.fail_over_ms else 0


if __name__ == "__main__":
    sys.exit(main())
