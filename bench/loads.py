"""Loads beside 32 running streams on one GPU, and many adapters over little memory; used by bench/decode.py.

The engine runs in this process. manylora's loads come as in `manylora serve`: a real agent packs and stages, the
worker is asked by its socket, and who may load when is decided by the account of the API server, which runs in a thread
here. Stock vLLM loads as it does: when a step needs the adapter.
"""

# The commands are this file's own.
# ruff: noqa: S603

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import queue
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LONG_STREAM_TOKENS = 1800
STREAMS = 32
STEPS_BEFORE, STEPS_AFTER = 25, 5
REPEATS = 3
HOST_MEMORY, CROWD_HOST_MEMORY = "5GiB", "24GiB"
CROWD_STREAMS, CROWD_ADAPTERS = 256, 128


class Tier:
    """Folders named by digest, as many as wanted of each rank: their weights are links to one file a rank."""

    def __init__(self, root: Path) -> None:
        self.root, self.folder = root, root / "tier"
        self._hashes: dict[int, bytes] = {}
        self._made = itertools.count(1)

    def version(self, rank: int) -> Path:
        """A version of that rank which nobody has seen: its dropout, which serving ignores, is another each time."""
        from manylora.peft_config import adapter_digest, canonical_config

        source = self.root / f"rank{rank}"
        config = json.loads((source / "adapter_config.json").read_text())
        raw = canonical_config({**config, "lora_dropout": next(self._made) / 1e6})
        weights = self._hashes.setdefault(rank, (source / "adapter_model.safetensors").read_bytes())
        folder = self.folder / adapter_digest(raw, [weights])
        folder.mkdir(parents=True)
        (folder / "adapter_config.json").write_bytes(raw)
        os.link(source / "adapter_model.safetensors", folder / "adapter_model.safetensors")
        return folder

    def forget_cache(self) -> None:
        """Have the kernel drop the packed files from the page cache."""
        for path in (self.folder / ".packed").glob("*/*"):
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


class Agent:
    """A real agent, started anew as often as wanted."""

    def __init__(self, tier: Tier) -> None:
        self.run_dir = tier.root / "run"
        self.run_dir.mkdir(exist_ok=True)
        self.socket = self.run_dir / "agent.sock"
        self._env = {
            **os.environ,
            "MANYLORA_HOME": str(tier.root / "home"),
            "MANYLORA_DISK_TIER": str(tier.folder),
        }
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, host_memory: str = HOST_MEMORY) -> None:
        self._env["MANYLORA_HOST_MEMORY"] = host_memory
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self.socket.unlink(missing_ok=True)
        flags = ["--socket", str(self.socket), "--http-socket", str(self.run_dir / "agent-http.sock")]
        self._process = subprocess.Popen([sys.executable, "-m", "manylora.agent", *flags], env=self._env)
        while not self.socket.exists():
            assert self._process.poll() is None
            time.sleep(0.05)

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


class Asker:
    """Asks a worker to load, from a thread of its own."""

    def __init__(self, path: str) -> None:
        from manylora.engine.load_channel import LoadClient

        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._client = LoadClient(Path(path))

    def load(self, lora_id: int, folder: Path) -> Future[tuple[float, Any]]:
        """The seconds that it took, and the worker's word."""

        async def timed() -> tuple[float, Any]:
            started = time.perf_counter()
            outcome = await self._client.load(lora_id, f"bench/a@v1-{folder.name[:16]}", folder)
            return time.perf_counter() - started, outcome

        return asyncio.run_coroutine_threadsafe(timed(), self._loop)


@dataclass(frozen=True, slots=True)
class Times:
    """Milliseconds of the repeats of one load: until it was usable, of steps without it, and its longest step each."""

    usable: list[float] = field(default_factory=list)
    quiet: list[float] = field(default_factory=list)
    longest: list[float] = field(default_factory=list)


def row(engine: str, source: str, rank: int, times: Times) -> dict[str, Any]:
    """A row of h200-loads.json: medians over the repeats, and the longest step of all of them."""
    return {
        "engine": engine,
        "source": source,
        "lora_rank": rank,
        "streams": STREAMS,
        "usable_ms": round(statistics.median(times.usable), 2),
        "median_step_ms": round(statistics.median(times.quiet), 3),
        "max_step_ms": round(max(times.longest), 3),
        "median_of_longest_steps_ms": round(statistics.median(times.longest), 3),
    }


def one_step(engine: Any) -> float:
    started = time.perf_counter()
    engine.step()
    return 1e3 * (time.perf_counter() - started)


def manylora_loads(bench: Any, tier: Tier, agent: Agent, ranks: Sequence[int]) -> list[dict[str, Any]]:
    """Loads of every rank from each source, beside streams of the base model and of adapters in memory."""
    [path] = bench.engine.collective_rpc("manylora_listen", args=(str(agent.run_dir),))
    asker, ids = Asker(path), iter(range(10_000, 20_000))
    folders = {rank: [tier.version(rank) for _ in range(REPEATS)] for rank in ranks}
    rows: list[dict[str, Any]] = []
    for source in ("folder", "host", "page-cache", "disk"):
        if source in {"page-cache", "disk"}:
            time.sleep(2)  # the last packed file is being written
            agent.start()
            if source == "disk":
                tier.forget_cache()
        with running_streams(bench):
            if source != "folder":  # connections, and the first pieces of memory pinned
                warm = asker.load(next(ids), tier.version(8))
                while not warm.done():
                    one_step(bench.engine)
            if source in {"page-cache", "disk"}:
                until = time.monotonic() + 9  # pinning ends
                while time.monotonic() < until and source == "page-cache":
                    one_step(bench.engine)
            for rank in ranks:
                times = Times()
                for folder in folders[rank]:
                    times.quiet.extend(one_step(bench.engine) for _ in range(STEPS_BEFORE))
                    lora_id = next(ids)
                    future = asker.load(lora_id, folder)
                    steps = []
                    while not future.done():
                        steps.append(one_step(bench.engine))
                    steps += [one_step(bench.engine) for _ in range(STEPS_AFTER)]
                    seconds, outcome = future.result()
                    assert outcome.state == "ready", outcome
                    times.usable.append(1e3 * seconds)
                    times.longest.append(max(steps))
                    bench.engine.collective_rpc("manylora_forget", args=(lora_id,))
                rows.append(row("manylora", source, rank, times))
                print("LOAD", json.dumps(rows[-1]), flush=True)
    return rows


def check(bench: Any, tier: Tier, agent: Agent) -> None:
    """The same weights, loaded by the worker itself and through the agent, answer alike."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    [path] = bench.engine.collective_rpc("manylora_listen", args=(str(agent.run_dir),))
    folder, asker = tier.version(16), Asker(path)
    future = asker.load(9_000, folder)
    _, outcome = future.result(60)
    assert (outcome.state, outcome.source) == ("ready", "folder"), outcome
    answers = []
    for adapter in (bench.adapter(1, 16), LoRARequest("other", 9_000, str(folder))):
        name = f"check-{len(answers)}"
        sampling = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, detokenize=False)
        prompt = {"prompt_token_ids": list(range(100, 150))}
        bench.engine.add_request(name, prompt, sampling, lora_request=adapter)
        while bench.engine.has_unfinished_requests():
            for output in bench.engine.step():
                if output.finished:
                    answers.append(list(output.outputs[0].token_ids))
    # Random weights change this model's answers little: that adapters differ from the base is gpu_parity.py's to show.
    assert answers[0] == answers[1], answers
    bench.engine.collective_rpc("manylora_forget", args=(9_000,))
    print("CHECK the agent's and the worker's own packing answer alike", flush=True)


def stock_loads(bench: Any, ranks: Sequence[int]) -> list[dict[str, Any]]:
    """The same with stock vLLM, whose steps load: from files in the page cache, and from its cache in host memory."""
    rows: list[dict[str, Any]] = []
    number = 1000
    for rank in ranks:
        for source in ("page-cache", "host"):
            times = Times()
            with running_streams(bench, adapters=False):
                for _ in range(REPEATS):
                    number += 1
                    adapter = bench.adapter(number, rank)
                    if source == "host":  # loaded once, then its slot goes to others
                        bench.engine.add_lora(adapter)
                        for other in range(bench.slots):
                            bench.engine.add_lora(bench.adapter(2000 + other, 8))
                    times.quiet.extend(one_step(bench.engine) for _ in range(STEPS_BEFORE))
                    started = time.perf_counter()
                    bench.add(adapter, 8, 1)
                    steps = [one_step(bench.engine)]
                    times.usable.append(1e3 * (time.perf_counter() - started))
                    steps += [one_step(bench.engine) for _ in range(STEPS_AFTER)]
                    times.longest.append(max(steps))
            rows.append(row("stock", source, rank, times))
            print("LOAD", json.dumps(rows[-1]), flush=True)
    return rows


@contextlib.contextmanager
def running_streams(bench: Any, *, adapters: bool = True) -> Iterator[None]:
    """32 streams that outlast the block; half of them of adapters in memory, where there are any."""
    first = bench._sent + 1
    for number in range(STREAMS):
        bench.add(
            bench.adapter(1 + number, 8) if adapters and number % 2 and bench.has_adapters else None,
            16,
            LONG_STREAM_TOKENS,
        )
    for _ in range(20):
        one_step(bench.engine)
    yield
    bench.engine.abort_request([str(number) for number in range(first, bench._sent + 1)])
    bench.drain()


# ---- many adapters over little memory ----


class Crowd:
    """The API server's account over this process's engine; requests wait for their adapter's lease, then join."""

    def __init__(self, bench: Any, tier: Tier, agent: Agent, budget_bytes: int) -> None:
        from manylora.engine.residency import Residency
        from manylora.engine.worker_calls import WorkerMemory

        self.bench, self.calls = bench, queue.SimpleQueue[Any]()
        self.leave: dict[str, asyncio.Event] = {}
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        outer = self

        class Engine:
            async def collective_rpc(self, method: str, timeout: float | None, args: tuple[Any, ...]) -> list[Any]:  # noqa: ASYNC109
                future = asyncio.get_running_loop().create_future()
                outer.calls.put((method, args, future, asyncio.get_running_loop()))
                return list(await future)

        class Memory(WorkerMemory):
            async def budget_bytes(self) -> int:
                return budget_bytes

        class Silent:
            def __getattr__(self, name: str) -> Any:
                return lambda *args: None

        workers = Memory(Engine(), run_dir=agent.run_dir, timeout_s=60)
        self.account = Residency(
            workers, places=1024, wait_s=120, observer=Silent(), published=lambda resident, present: None
        )
        agent.start(CROWD_HOST_MEMORY)
        with ThreadPoolExecutor(8) as pool:
            self.folders = list(pool.map(tier.version, bench.mixed_ranks(CROWD_ADAPTERS)))

    def run(self) -> dict[str, Any]:
        """Every adapter's requests at once; tokens a second over all, after rounds that stage all and pin memory."""
        for _ in range(2):
            began = time.perf_counter()
            self._round(16)
            print(f"round of 16 tokens: {time.perf_counter() - began:.1f} s", flush=True)
        time.sleep(8)
        started = time.perf_counter()
        steps = self._round(128)
        seconds = time.perf_counter() - started
        return {
            "tokens_per_s": round(CROWD_STREAMS * 128 / seconds),
            "median_step_ms": round(statistics.median(steps), 2),
            "longest_step_ms": round(max(steps), 1),
            "seconds": round(seconds, 2),
        }

    def _round(self, tokens: int) -> list[float]:
        loop = self.loop
        done = asyncio.run_coroutine_threadsafe(self._all(tokens), loop)
        steps: list[float] = []
        while not done.done():
            while not self.calls.empty():
                self._call(*self.calls.get())
            if self.bench.engine.has_unfinished_requests():
                started = time.perf_counter()
                outputs = self.bench.engine.step()
                steps.append(1e3 * (time.perf_counter() - started))
                for output in outputs:
                    if output.finished:
                        loop.call_soon_threadsafe(self.leave.pop(output.request_id).set)
            else:
                time.sleep(0.0005)
        done.result()
        return steps

    def _call(self, method: str, args: tuple[Any, ...], future: Any, loop: Any) -> None:
        if method == "add":
            self.bench.add(*args[1:])
            self.leave[str(self.bench._sent)] = args[0]
            return
        result = self.bench.engine.collective_rpc(method, args=args)
        loop.call_soon_threadsafe(future.set_result, result)

    async def _all(self, tokens: int) -> None:
        await asyncio.gather(*(self._one(number % CROWD_ADAPTERS, tokens) for number in range(CROWD_STREAMS)))

    async def _one(self, number: int, tokens: int) -> None:
        from vllm.lora.request import LoRARequest

        folder = self.folders[number]
        name = f"bench/a{number}@v1-{folder.name[:16]}"
        async with self.account.lease(name, lambda: folder) as resident:
            ended = asyncio.Event()
            request = LoRARequest(name, resident.lora_id, str(folder))
            self.calls.put(("add", (ended, request, 128, tokens), None, None))
            await ended.wait()
