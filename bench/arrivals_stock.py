"""What stock vLLM's streams feel while new adapters arrive: the same world as tests/e2e/test_tiers.py, on a CPU.

    python bench/arrivals_stock.py [--seconds 60]

Eight streams on four adapters of the tests' tiny Llama; for a minute, every 200 ms, a new adapter is loaded by
`/v1/load_lora_adapter` and asked. Prints the 99th percentile of the streams' gaps without and with arrivals, as
tests/e2e/test_tiers.py does for manylora; its figures go to bench/results/cpu-arrivals.json with --manylora JSON.
"""

# The commands are this file's own.
# ruff: noqa: S603

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "e2e"))

from harness import recipes  # noqa: E402
from harness.crowd import variant  # noqa: E402
from harness.stack import _free_port  # noqa: E402
from harness.token_watch import TokenWatch  # noqa: E402
from harness.zoo import Zoo, open_zoo  # noqa: E402

RESULT = Path(__file__).parent / "results" / "cpu-arrivals.json"
HOT = ("r4", "r32", "rslora", "all-linear")
STREAMS, STREAM_TOKENS, ARRIVAL_S = 8, 1990, 0.2
SLOTS = 12


def start(zoo: Zoo, port: int) -> subprocess.Popen[bytes]:
    env = {
        **os.environ,
        "VLLM_PLUGINS": "none",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    flags = ["--model", str(zoo.base_path), "--served-model-name", recipes.BASE_NAME, "--port", str(port)]
    flags += ["--max-model-len", str(recipes.MAX_POSITION), "--max-num-seqs", "16", "--enforce-eager"]
    flags += ["--enable-lora", "--max-loras", str(SLOTS), "--max-cpu-loras", str(SLOTS), "--max-lora-rank", "64"]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *flags, "--dtype", "float32"]
    log = (Path(tempfile.gettempdir()) / "stock-vllm.log").open("wb")
    server = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
    while True:
        assert server.poll() is None, "stock vLLM ended while it was starting"
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200:
                return server
        except httpx.TransportError:
            pass
        time.sleep(0.5)


def body(zoo: Zoo, model: str, tokens: int, *, stream: bool) -> dict[str, Any]:
    prompt = list(zoo.group("short")[0].token_ids)
    fields = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return {**fields, "stream": stream}


async def measure(zoo: Zoo, port: int, seconds: float, folder: Path) -> dict[str, float]:
    url = f"http://127.0.0.1:{port}"
    quiet, among, waits = [], [], []
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:

        async def load(name: str, path: Path) -> None:
            reply = await client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path)})
            assert reply.status_code == 200, reply.text

        async def arrive(number: int) -> None:
            recipe = recipes.FLEET[number % len(recipes.FLEET)].name
            path = variant(zoo, recipe, number, folder)
            began = time.monotonic()
            await load(f"arrival-{number}", path)
            reply = await client.post("/v1/completions", json=body(zoo, f"arrival-{number}", 10, stream=False))
            assert reply.status_code == 200, reply.text
            waits.append(time.monotonic() - began)
            await client.post("/v1/unload_lora_adapter", json={"lora_name": f"arrival-{number}"})

        for name in HOT:
            await load(name, zoo.adapter(name))
        bodies = [body(zoo, HOT[number % len(HOT)], STREAM_TOKENS, stream=True) for number in range(STREAMS)]
        arrived, spent = 0, 0.0
        while spent < seconds:
            async with TokenWatch(SimpleNamespace(port=port, key="-"), bodies) as watch:  # type: ignore[arg-type]
                await watch.more(30)
                began = time.monotonic()
                await watch.more(STREAM_TOKENS // 3)
                middle = time.monotonic()
                tasks: list[asyncio.Task[None]] = []
                while (
                    min(map(len, watch.arrivals)) < STREAM_TOKENS - 200 and time.monotonic() - middle < seconds - spent
                ):
                    await asyncio.sleep(max(0.0, middle + len(tasks) * ARRIVAL_S - time.monotonic()))
                    tasks.append(asyncio.create_task(arrive(arrived)))
                    arrived += 1
                ended = time.monotonic()
                spent += ended - middle
                await asyncio.gather(*tasks)
                quiet += watch.gaps(began, middle)
                among += watch.gaps(middle, ended)
    p99_quiet, p99 = (statistics.quantiles(gaps, n=100)[98] for gaps in (quiet, among))
    return {
        "arrivals": arrived,
        "p99_gap_quiet_ms": round(1e3 * p99_quiet, 2),
        "p99_gap_ms": round(1e3 * p99, 2),
        "ratio": round(p99 / p99_quiet, 2),
        "median_gap_ms": round(1e3 * statistics.median(quiet), 2),
        "longest_gap_ms": round(1e3 * max(among), 1),
        "median_wait_ms": round(1e3 * statistics.median(waits), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--manylora", type=json.loads, help="what tests/e2e/test_tiers.py printed, to keep beside it")
    parser.add_argument("--output", type=Path, default=RESULT)
    args = parser.parse_args()
    zoo, port = open_zoo(ROOT / ".pytest_cache" / "d" / "model-zoo"), _free_port()
    server = start(zoo, port)
    try:
        with tempfile.TemporaryDirectory(dir=zoo.root.parent.parent) as folder:
            stock = asyncio.run(measure(zoo, port, args.seconds, Path(folder)))
    finally:
        os.killpg(server.pid, signal.SIGKILL)
    result = {"processor": platform.processor() or platform.machine(), "stock": stock, "manylora": args.manylora}
    args.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
