"""Whether vLLM with manylora on a GPU gives each adapter's own probabilities, judged by transformers and PEFT.

    python bench/gpu_parity.py references ZOO references.json     # on any machine with PEFT, minutes
    python bench/gpu_parity.py measure ZOO references.json        # on the GPU host

ZOO is the tests' model zoo (built by `make test`, under `.pytest_cache/d/model-zoo`): a tiny Llama and adapters of
every kind. The engine is `vllm serve` as `manylora serve` starts it, without a gateway. It is asked for the
log-probability of every token of the reference texts, adapter by adapter and then all mixed, with fewer device slots
than adapters. The result is JSON: for each adapter the mean and the largest difference from PEFT's float32, and, to
judge them by, the smallest mean difference that any adapter shows when the base model answers in its place.
"""

# Commands and URLs are this file's own.
# ruff: noqa: S603

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from manylora.engine.launch import command
from manylora.peft_config import CONFIG_FILE, WEIGHTS_FILE, adapter_digest, canonical_config

BASE = "base"
GROUPS = ("short", "medium", "long")
START_LIMIT_S = 300.0
CONCURRENT = 16
RESULT = Path(__file__).parent / "results" / "h200-parity.json"
ENGINE_FLAGS = (
    "--max-model-len", "512", "--max-loras", "4", "--max-cpu-loras", "8", "--gpu-memory-utilization", "0.2",
    "--no-enable-prefix-caching",
)  # fmt: skip

Text = dict[str, Any]
"""`adapter`, `ids` and, from the second token on, `logprobs`."""


# ---- references


def references(zoo: Path) -> list[Text]:
    """Every prompt with every model's own greedy answer, and the log-probabilities that PEFT gives its tokens."""
    import copy

    import torch
    from peft import PeftModel
    from transformers import LlamaForCausalLM

    base = LlamaForCausalLM.from_pretrained(zoo / "tiny-llama", dtype=torch.float32).eval()
    prompts = json.loads((zoo / "references.json").read_text())["prompts"]
    prompts = [prompt for prompt in prompts if prompt["group"] in GROUPS]
    adapters = {name for prompt in prompts for name in prompt["answers"]} - {BASE}
    models = {name: PeftModel.from_pretrained(copy.deepcopy(base), zoo / "adapters" / name).eval() for name in adapters}
    texts: list[Text] = []
    with torch.inference_mode():
        for prompt in prompts:
            for name, answer in prompt["answers"].items():
                ids = prompt["token_ids"] + answer
                scores = (models.get(name) or base)(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
                logprobs = [float(scores[at - 1, ids[at]]) for at in range(1, len(ids))]
                texts.append({"adapter": name, "ids": ids, "logprobs": logprobs})
    return texts


# ---- measurement


def fill_disk_tier(zoo: Path, tier: Path) -> dict[str, str]:
    """Put every adapter where the engine looks for it; the names under which the engine finds them."""
    names = {BASE: BASE}
    for folder in sorted((zoo / "adapters").iterdir()):
        config = canonical_config(json.loads((folder / CONFIG_FILE).read_text()))
        tensors = (folder / WEIGHTS_FILE).read_bytes()
        digest = adapter_digest(config, [tensors])
        target = tier / digest
        target.mkdir(parents=True)
        (target / CONFIG_FILE).write_bytes(config)
        (target / WEIGHTS_FILE).write_bytes(tensors)
        names[folder.name] = f"zoo/{folder.name}@v1-{digest[:16]}"
    return names


@contextlib.contextmanager
def engine(
    zoo: Path, tier: Path, socket: Path, vllm_flags: Sequence[str], log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    flags = [*ENGINE_FLAGS, *vllm_flags]
    start = command(str(zoo / "tiny-llama"), socket=socket, disk_tier=tier, served_model_name=BASE, vllm_args=flags)
    with log.open("wb") as out:
        process = subprocess.Popen(start.argv, env=dict(start.env), stdout=out, stderr=out, start_new_session=True)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


async def wait_ready(session: aiohttp.ClientSession, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(aiohttp.ClientError):
            async with session.get("http://engine/health") as response:
                if response.status == 200:
                    return
        await asyncio.sleep(0.5)
    raise NotReady


class NotReady(Exception):
    """The engine ended, or took too long to start."""


async def logprobs(session: aiohttp.ClientSession, model: str, ids: Sequence[int]) -> list[float]:
    body = {"model": model, "prompt": ids, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
    async with session.post("http://engine/v1/completions", json=body) as response:
        answer = await response.json()
        if response.status != 200:
            raise SystemExit(f"{model}: {response.status} {answer}")
    found = answer["choices"][0]["prompt_logprobs"]
    return [found[at][str(ids[at])]["logprob"] for at in range(1, len(ids))]


async def measure(socket: Path, names: dict[str, str], texts: Sequence[Text], start: Any) -> dict[str, Any]:
    connector = aiohttp.UnixConnector(str(socket), limit=CONCURRENT)
    async with aiohttp.ClientSession(connector=connector) as session:
        await start(session)

        async def differences(text: Text, name: str) -> tuple[str, list[float]]:
            found = await logprobs(session, names[name], text["ids"])
            return text["adapter"], [abs(a - b) for a, b in zip(found, text["logprobs"], strict=True)]

        alone = [await differences(text, text["adapter"]) for text in texts]
        turns = sorted(texts, key=lambda text: hash(tuple(text["ids"])))
        mixed = await asyncio.gather(*(differences(text, text["adapter"]) for text in turns))
        wrong = [await differences(text, BASE) for text in texts if text["adapter"] != BASE]
    return {
        "alone": by_adapter(alone),
        "mixed": by_adapter(mixed),
        "smallest_mean_of_base_in_place": min(figures["mean"] for figures in by_adapter(wrong).values()),
    }


def by_adapter(differences: Sequence[tuple[str, list[float]]]) -> dict[str, dict[str, float]]:
    joined: dict[str, list[float]] = {}
    for name, values in differences:
        joined.setdefault(name, []).extend(values)
    return {
        name: {"mean": round(sum(values) / len(values), 5), "max": round(max(values), 4)}
        for name, values in sorted(joined.items())
    }


def machine() -> dict[str, str]:
    import torch
    import vllm

    return {"gpu": torch.cuda.get_device_name(), "vllm": vllm.__version__, "torch": torch.__version__}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("step", choices=("references", "measure"))
    parser.add_argument("zoo", type=Path)
    parser.add_argument("references", type=Path)
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--dtype", default="float16")
    args, more = parser.parse_known_args(argv)
    if args.step == "references":
        args.references.write_text(json.dumps(references(args.zoo)))
        return 0
    texts = json.loads(args.references.read_text())
    with tempfile.TemporaryDirectory(prefix="ml-") as folder:
        root = Path(folder)
        names = fill_disk_tier(args.zoo, root / "disk")
        socket, log = root / "engine.sock", args.output.with_suffix(".log")
        with engine(args.zoo, root / "disk", socket, ["--dtype", args.dtype, *more], log) as process:
            try:
                result = asyncio.run(measure(socket, names, texts, lambda session: wait_ready(session, process)))
            except NotReady:
                raise SystemExit(f"the engine did not start:\n{log.read_text(errors='replace')[-3000:]}") from None
    result = {**machine(), "dtype": args.dtype, "texts": len(texts), **result}
    args.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
