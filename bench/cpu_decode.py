"""Decode on the CPU engine with the demo's model and six adapters: stock vLLM and manylora, in the same run.

    python bench/cpu_decode.py [--rounds 3] [--models DIR]

Each engine runs in a process of its own, in turn, and answers 8 streams at a time: of the base model, of one adapter,
of six. They have ranks 16, 32, 64, 8, 16, 32, all seven linears and random weights: speed does not depend on the
values. The result is JSON in bench/results/cpu-decode.json, with the ratio of the output tokens a second.
"""

# The commands are this file's own.
# ruff: noqa: S603

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULT = Path(__file__).parent / "results" / "cpu-decode.json"
RANKS = (16, 32, 64, 8, 16, 32)
STREAMS, TOKENS_IN, TOKENS_OUT = 8, 8, 48
ENGINES = ("stock", "manylora")


def make_adapters(model: Path, folder: Path) -> list[Path]:
    import torch
    from safetensors.torch import save_file

    config = json.loads((model / "config.json").read_text())
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    linears = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (hidden, kv),
        "self_attn.v_proj": (hidden, kv),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (hidden, wide),
        "mlp.up_proj": (hidden, wide),
        "mlp.down_proj": (wide, hidden),
    }
    folders = []
    for number, rank in enumerate(RANKS):
        tensors = {}
        for layer in range(config["num_hidden_layers"]):
            for name, (fan_in, fan_out) in linears.items():
                prefix = f"base_model.model.model.layers.{layer}.{name}"
                tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, fan_in) * 0.01
                tensors[f"{prefix}.lora_B.weight"] = torch.randn(fan_out, rank) * 0.01
        folders.append(folder / f"adapter-{number}")
        folders[-1].mkdir()
        save_file(tensors, folders[-1] / "adapter_model.safetensors")
        peft = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "bias": "none"}
        peft["target_modules"] = [name.split(".")[1] for name in linears]
        (folders[-1] / "adapter_config.json").write_text(json.dumps(peft))
    return folders


def measure(engine: str, model: Path, folders: Sequence[Path], rounds: int) -> list[dict[str, Any]]:
    """Rows of one engine, in this process; the environment is set."""
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    llm = LLM(
        model=str(model),
        dtype="float32",
        max_model_len=256,
        max_num_seqs=STREAMS,
        enforce_eager=True,
        enable_prefix_caching=False,
        enable_lora=True,
        max_loras=len(RANKS),
        max_cpu_loras=len(RANKS),
        max_lora_rank=max(RANKS),
        seed=0,
    )
    adapters = [LoRARequest(folder.name, 1 + at, str(folder)) for at, folder in enumerate(folders)]
    sampling = SamplingParams(max_tokens=TOKENS_OUT, temperature=0.0, ignore_eos=True)
    prompts = [{"prompt_token_ids": list(range(100 + stream, 100 + stream + TOKENS_IN))} for stream in range(STREAMS)]
    rows = []
    for count in (0, 1, len(adapters)):
        requests = [adapters[stream % count] for stream in range(STREAMS)] if count else None
        rates = []
        for _ in range(rounds + 1):
            started = time.perf_counter()
            llm.generate(prompts, sampling, lora_request=requests, use_tqdm=False)
            rates.append(STREAMS * TOKENS_OUT / (time.perf_counter() - started))
        rate = round(statistics.median(rates[1:]), 1)  # the first loads what is not loaded
        rows.append({"engine": engine, "adapters": count, "streams": STREAMS, "output_tokens_per_s": rate})
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", type=Path, default=Path.home() / ".manylora" / "models")
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--engine", choices=ENGINES, help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.engine:
        with tempfile.TemporaryDirectory(prefix="manylora-bench-") as folder:
            folders = make_adapters(args.model, Path(folder))
            print("ROWS", json.dumps(measure(args.engine, args.model, folders, args.rounds)))
        return 0
    from manylora.demo import base_model

    model = base_model.ensure(args.models)
    rows: list[dict[str, Any]] = []
    for engine in ENGINES:
        env = {
            **os.environ,
            "VLLM_PLUGINS": "manylora" if engine == "manylora" else "none",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, __file__, "--engine", engine, "--model", str(model), "--rounds", str(args.rounds)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        found = [line for line in done.stdout.splitlines() if line.startswith("ROWS ")]
        if not found:
            raise SystemExit(f"{engine} ended with {done.returncode}:\n{done.stderr[-3000:]}")
        rows += json.loads(found[-1].removeprefix("ROWS "))
    rates = {(row["engine"], row["adapters"]): row["output_tokens_per_s"] for row in rows}
    most = max(row["adapters"] for row in rows)
    result = {
        "what": f"{base_model.NAME} in float32 on the CPU, {STREAMS} streams of {TOKENS_OUT} tokens",
        "machine": {"cpus": os.cpu_count(), "python": platform.python_version(), "system": platform.machine()},
        "rows": rows,
        "ratio_of_all_adapters": round(rates["manylora", most] / rates["stock", most], 2),
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
