"""Decode and prefill with many adapters on one GPU: the base model, stock vLLM and vLLM with manylora.

    python bench/decode.py adapters ROOT                       # a Llama-3.1-8B shape and adapters of rank 8 to 64
    python bench/decode.py tuned ROOT                          # kernel configs for stock vLLM, tuned by hand
    python bench/decode.py run ROOT --engine stock             # or: stock-tuned, manylora; adds rows to the result
    python bench/decode.py run ROOT --engine stock --loads     # loads beside running streams too (bench/loads.py)

Weights are random: speed does not depend on their values. The engine runs in this process, so that a step is timed as
its user feels it: 128 tokens in and 128 out for every stream, adapters of ranks 8, 16, 32, 64 in turn. Rows of engine
"base" are requests without an adapter, with LoRA enabled. The result is JSON in bench/results/h200-decode.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import loads

RESULT = Path(__file__).parent / "results" / "h200-decode.json"
LOADS_RESULT = RESULT.with_name("h200-loads.json")
ADAPTER_MEMORY = "22GiB"
FEW_GRAPHS = (1, 8, 32, 64, 96, 128, 160, 192, 224, 256)
CROWD_BYTES = 11 << 30
"""What stock vLLM takes for 32 slots of rank 64."""
HIDDEN, INTERMEDIATE, LAYERS, KV, VOCABULARY = 4096, 14336, 32, 1024, 128256
RANKS = (8, 16, 32, 64)
LINEARS = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN, KV),
    "self_attn.v_proj": (HIDDEN, KV),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (HIDDEN, INTERMEDIATE),
    "mlp.up_proj": (HIDDEN, INTERMEDIATE),
    "mlp.down_proj": (INTERMEDIATE, HIDDEN),
}
STREAMS = (1, 32, 256)
ADAPTERS = (1, 8, 32, 128)
STOCK_SLOTS = 32
TOKENS_IN, TOKENS_OUT = 128, 128
PREFILL_TOKENS, PREFILL_ADAPTERS, PREFILL_ROUNDS = 8192, 8, 7


def make_adapters(root: Path) -> None:
    import torch
    from safetensors.torch import save_file

    model = root / "model"
    model.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HIDDEN // 128,
        "num_key_value_heads": KV // 128,
        "head_dim": 128,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (model / "config.json").write_text(json.dumps(config))
    for rank in RANKS:
        folder = root / f"rank{rank}"
        folder.mkdir(exist_ok=True)
        tensors = {}
        for layer in range(LAYERS):
            for name, (fan_in, fan_out) in LINEARS.items():
                prefix = f"base_model.model.model.layers.{layer}.{name}"
                for part, shape in (("lora_A", (rank, fan_in)), ("lora_B", (fan_out, rank))):
                    noise = torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
                    tensors[f"{prefix}.{part}.weight"] = (noise * 0.01).cpu()
        save_file(tensors, folder / "adapter_model.safetensors")
        peft = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": "llama-3.1-8b-shape",
            "r": rank,
            "lora_alpha": 2 * rank,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": [name.split(".")[1] for name in LINEARS],
        }
        (folder / "adapter_config.json").write_text(json.dumps(peft))


def write_tuned(folder: Path) -> None:
    """Configs for stock vLLM's kernels on an H200: more splits and larger tiles than its defaults."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens = [2**i for i in range(14)]
    common = {"num_warps": 4, "num_ctas": 1, "max_nreg": None}

    def shrink(m: int, k: int) -> dict[str, Any]:
        few = m <= 256
        split = (8 if k <= HIDDEN else 16) if few else 2
        sizes = {"block_m": 16, "block_n": 16 if few else 32, "block_k": 256 if few else 64}
        return {**sizes, "group_size_m": 8, "num_stages": 3, "split_k": split, **common}

    def expand(m: int) -> dict[str, Any]:
        few = m <= 256
        return {"block_m": 16 if few else 64, "block_n": 128, "block_k": 64 if few else 32, "num_stages": 2, **common}

    slots, rank = str(STOCK_SLOTS), str(max(RANKS))
    slices = ("1", "2", "3")
    shrinks = {
        s: {str(m): {str(k): {rank: shrink(m, k)} for k in (HIDDEN, INTERMEDIATE)} for m in tokens} for s in slices
    }
    widths = (KV, HIDDEN, INTERMEDIATE)
    expands = {s: {str(m): {rank: {str(n): expand(m) for n in widths}} for m in tokens} for s in slices}
    (folder / "NVIDIA_H200_SHRINK.json").write_text(json.dumps({slots: shrinks}))
    for add_inputs in ("TRUE", "FALSE"):
        (folder / f"NVIDIA_H200_EXPAND_{add_inputs}.json").write_text(json.dumps({slots: expands}))


class Bench:
    """One engine and the clock."""

    def __init__(self, root: Path, engine: str, graphs: Sequence[int] | None = None) -> None:
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        self.root, self.name = root, engine
        self.slots = 1024 if engine == "manylora" else STOCK_SLOTS
        arguments: dict[str, Any] = {
            "model": str(root / "model"),
            "load_format": "dummy",
            "dtype": "bfloat16",
            "max_model_len": 2048,
            "skip_tokenizer_init": True,
            "gpu_memory_utilization": 0.6,
            "max_num_seqs": 256,
            "max_num_batched_tokens": PREFILL_TOKENS,
            "enable_prefix_caching": False,
            "disable_log_stats": True,
            "seed": 0,
            "enable_lora": True,
            "max_loras": self.slots,
            "max_cpu_loras": max(self.slots, 160),
            "max_lora_rank": max(RANKS),
        }
        if graphs is not None:
            arguments["compilation_config"] = {"cudagraph_capture_sizes": list(graphs)}
        if engine == "manylora":
            arguments["worker_extension_cls"] = "manylora.engine.worker.AdapterWorker"
        self.engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        self._random = random.Random(0)  # noqa: S311 - any tokens will do
        self._sent = 0
        self.rows: list[dict[str, Any]] = []
        self.notes: dict[str, Any] = {}
        self.has_adapters = False

    @staticmethod
    def mixed_ranks(count: int) -> list[int]:
        """Ranks of so many adapters. The first is 16, as in the rows with one adapter."""
        return [RANKS[(1 + number) % 4] for number in range(count)]

    def adapter(self, number: int, rank: int) -> Any:
        from vllm.lora.request import LoRARequest

        return LoRARequest(f"a{number}", number, str(self.root / f"rank{rank}"))

    def add(self, adapter: Any, tokens_in: int = TOKENS_IN, tokens_out: int = TOKENS_OUT) -> None:
        from vllm import SamplingParams

        self._sent += 1
        prompt = {"prompt_token_ids": [self._random.randrange(10, 120000) for _ in range(tokens_in)]}
        sampling = SamplingParams(max_tokens=tokens_out, temperature=0.0, ignore_eos=True, detokenize=False)
        self.engine.add_request(str(self._sent), prompt, sampling, lora_request=adapter)

    def drain(self) -> list[float]:
        """Run until nothing is left; each step's milliseconds."""
        steps = []
        while self.engine.has_unfinished_requests():
            started = time.perf_counter()
            self.engine.step()
            steps.append(1e3 * (time.perf_counter() - started))
        return steps

    def decode(self, adapters: Sequence[Any], streams: int) -> None:
        for number in range(streams):
            self.add(adapters[number % len(adapters)] if adapters else None)
        started = time.perf_counter()
        steps = self.drain()
        seconds = time.perf_counter() - started
        in_use = min(len(adapters), streams)
        self._row("decode", in_use, streams, steps, streams * TOKENS_OUT / seconds)

    def prefill(self, adapters: Sequence[Any]) -> None:
        """Steps that read 8 192 tokens of prompts, and nothing else."""
        steps = []
        for _ in range(PREFILL_ROUNDS):
            for number in range(PREFILL_ADAPTERS):
                adapter = adapters[number % len(adapters)] if adapters else None
                self.add(adapter, PREFILL_TOKENS // PREFILL_ADAPTERS, 1)
            steps.append(max(self.drain()))
        self._row("prefill", len(adapters), PREFILL_ADAPTERS, steps, 0.0)

    def _row(self, phase: str, adapters: int, streams: int, steps: list[float], rate: float) -> None:
        row = {
            "engine": self.name if adapters else "base",
            "beside": self.name,
            "phase": phase,
            "streams": streams,
            "adapters": adapters,
            "lora_ranks": sorted(set(self.mixed_ranks(adapters))),
            "median_step_ms": round(statistics.median(steps), 3),
            "p99_step_ms": round(statistics.quantiles(steps, n=100)[98], 2) if len(steps) > 1 else None,
            "longest_step_ms": round(max(steps), 1),
            "output_tokens_per_s": round(rate),
        }
        self.rows.append(row)
        print("ROW", json.dumps(row), flush=True)

    def warm_up(self) -> None:
        """Load 32 adapters, decode with them, and read prompts with and without adapters in turn."""
        mixed = [self.adapter(1 + i, rank) for i, rank in enumerate(self.mixed_ranks(STOCK_SLOTS))]
        for adapter in mixed:
            self.engine.add_lora(adapter)
        self.has_adapters = True
        for number in range(64):
            self.add(mixed[number % 32] if number % 2 else None, TOKENS_IN, 16)
        self.drain()
        for _ in range(2):
            self.prefill(())
            self.prefill(mixed[:PREFILL_ADAPTERS])

    def run(self, streams: Sequence[int], counts: Sequence[int]) -> None:
        import torch

        mixed = [self.adapter(1 + i, rank) for i, rank in enumerate(self.mixed_ranks(max(counts)))]
        for _ in range(2):
            for _ in range(32):
                self.add(None, TOKENS_IN, 16)
            self.drain()
        for count in streams:
            self.decode((), count)
        self.prefill(())
        free, _ = torch.cuda.mem_get_info()
        loads = {}
        for place, adapter in enumerate(mixed[: min(32, self.slots)]):
            started = time.perf_counter()
            self.engine.add_lora(adapter)
            torch.cuda.synchronize()
            loads.setdefault(self.mixed_ranks(32)[place], []).append(1e3 * (time.perf_counter() - started))
        self.has_adapters = True
        self.notes["load_ms"] = {rank: round(statistics.median(times), 1) for rank, times in loads.items()}
        self.notes["free_bytes_before_and_after_32_adapters"] = [free, torch.cuda.mem_get_info()[0]]
        manager = self.engine.model_executor.driver_worker.model_runner.lora_manager
        store = getattr(manager, "store", None)
        if store is not None:
            self.notes["bytes_of_32_adapters"] = store.used_bytes
        if self.name == "manylora":  # all of them fit; stock vLLM loads what its slots do not hold within the steps
            for adapter in mixed[STOCK_SLOTS:]:
                self.engine.add_lora(adapter)
        for _ in range(2):
            for number in range(64):
                self.add(mixed[number % 32], TOKENS_IN, 16)
            self.drain()
        for count in counts:
            for stream_count in streams:
                if stream_count >= count or count == min(counts):
                    self.decode(mixed[:count], stream_count)
        self.prefill(mixed[:PREFILL_ADAPTERS])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("command", choices=("adapters", "tuned", "run"))
    parser.add_argument("root", type=Path)
    parser.add_argument("--engine", choices=("stock", "stock-tuned", "manylora"), default="manylora")
    parser.add_argument("--streams", type=int, nargs="+", default=STREAMS)
    parser.add_argument("--adapters", type=int, nargs="+", default=ADAPTERS)
    parser.add_argument("--loads", action="store_true", help="measure loads as well")
    parser.add_argument("--loads-only", action="store_true", help="measure loads, prompts, and nothing else")
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--loads-output", type=Path, default=LOADS_RESULT)
    args = parser.parse_args(argv)
    args.loads = args.loads or args.loads_only
    if args.command == "adapters":
        make_adapters(args.root)
        return 0
    if args.command == "tuned":
        write_tuned(args.root / "tuned")
        return 0
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_LOGGING_LEVEL="WARNING",
        VLLM_NO_USAGE_STATS="1",
        HF_HUB_OFFLINE="1",
        TRANSFORMERS_OFFLINE="1",
        # A name that no plugin has leaves vLLM as it is.
        VLLM_PLUGINS="manylora" if args.engine == "manylora" else "none",
    )
    if args.engine == "stock-tuned":
        os.environ["VLLM_TUNED_CONFIG_FOLDER"] = str(args.root / "tuned")
    import torch
    import vllm

    import manylora

    with contextlib.ExitStack() as stack:
        agent = tier = None
        if args.engine == "manylora":
            os.environ["MANYLORA_ENGINE_ADAPTER_MEMORY"] = ADAPTER_MEMORY
            if args.loads:
                tier = loads.Tier(args.root)
                agent = loads.Agent(tier)
                agent.start()
                stack.callback(agent.end)
                os.environ["MANYLORA_ENGINE_AGENT_SOCKET"] = str(agent.socket)
        bench = Bench(args.root, args.engine, FEW_GRAPHS if args.loads_only else None)
        if args.loads_only:
            bench.warm_up()
        else:
            bench.run(args.streams, args.adapters)
        if not args.loads_only:
            _write(
                args.output, args.engine, bench, torch.cuda.get_device_name(), vllm.__version__, manylora.__version__
            )
        if args.loads:
            _write_loads(args.loads_output, bench, tier, agent)
    print("NOTES", json.dumps(bench.notes), flush=True)
    return 0


def _write(output: Path, engine: str, bench: Bench, *versions: str) -> None:
    result = json.loads(output.read_text()) if output.exists() else {"rows": [], "notes": {}}
    kept = [row for row in result["rows"] if row["beside"] != engine]
    named = dict(zip(("gpu", "vllm", "manylora"), versions, strict=True))
    result = {**named, "rows": kept + bench.rows, "notes": {**result["notes"], engine: bench.notes}}
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=2) + "\n")


def _write_loads(output: Path, bench: Bench, tier: loads.Tier | None, agent: loads.Agent | None) -> None:
    result = json.loads(output.read_text()) if output.exists() else {"rows": [], "crowd": {}}
    result["rows"] = [row for row in result["rows"] if row["engine"] != bench.name]
    if tier is None or agent is None:
        result["rows"] += loads.stock_loads(bench, RANKS)
    else:
        loads.check(bench, tier, agent)
        result["rows"] += loads.manylora_loads(bench, tier, agent, RANKS)
        output.write_text(json.dumps(result, indent=2) + "\n")
        for number in bench.engine.list_loras():
            bench.engine.remove_lora(number)
        result["crowd"][bench.name] = loads.Crowd(bench, tier, agent, CROWD_BYTES).run()
        print("CROWD", json.dumps(result["crowd"]), flush=True)
    output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # threads of the engine and its loads would keep the process
