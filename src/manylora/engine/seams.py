"""The shape of every vLLM seam that manylora stands on, as data, and the check of one vLLM against it.

The same list is checked in two ways: at start, on the imported modules of the vLLM that runs; and by the contract
tests, on the source files of every tested release, without importing them. A release fits when each name exists, takes
the named parameters, and each attribute is set or used in the body of the class.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass

TESTED_VERSIONS = ("0.26", "0.32", "0.33")
"""Releases (major.minor) whose seams are checked by the contract tests; see docs/vllm-versions.md for what ran on
which."""


@dataclass(frozen=True, slots=True)
class Seam:
    """One class, function or module-level name of vLLM."""

    module: str
    name: str
    """Dotted name within the module; a bare name may be imported there rather than defined."""
    parameters: tuple[str, ...] = ()
    """Parameters that the function (or the class's `__init__`) must accept by name, or in this order where
    positional."""
    attributes: tuple[str, ...] = ()
    """Attributes that the class's body must assign or define."""
    why: str = ""


SEAMS = (
    Seam("vllm.lora.request", "LoRARequest", (), ("lora_name", "lora_int_id", "lora_path"), "names a version to vLLM"),
    Seam(
        "vllm.lora.worker_manager",
        "LRUCacheWorkerLoRAManager",
        (),
        ("_apply_adapters", "add_adapter", "create_lora_manager"),
        "our worker manager derives from it",
    ),
    Seam(
        "vllm.lora.worker_manager",
        "WorkerLoRAManager",
        ("vllm_config", "device", "embedding_modules"),
        ("_load_adapter", "_adapter_manager", "remove_adapter", "list_adapters", "lora_config"),
        "reads an adapter's files into a LoRAModel",
    ),
    Seam("vllm.lora.worker_manager", "WorkerLoRAManager._load_adapter", ("lora_request",), (), "same"),
    Seam(
        "vllm.v1.worker.lora_model_runner_mixin",
        "LRUCacheWorkerLoRAManager",
        (),
        (),
        "the name we put ours in place of",
    ),
    Seam(
        "vllm.v1.worker.lora_model_runner_mixin",
        "LoRAModelRunnerMixin",
        (),
        ("lora_manager", "set_active_loras"),
        "gives the model runner its manager",
    ),
    Seam(
        "vllm.lora.model_manager",
        "LoRAModelManager",
        ("model", "lora_config", "device"),
        (
            "modules",
            "packed_modules",
            "lora_index_to_id",
            "lora_slots",
            "_registered_adapters",
            "_active_adapters",
            "punica_wrapper_mapping",
            "_last_mapping",
            "_last_slot_layout",
            "_create_merged_loras_inplace",
            "add_adapter",
            "remove_adapter",
            "activate_adapter",
        ),
        "holds adapters in host memory and in device slots",
    ),
    Seam(
        "vllm.lora.lora_model", "LoRAModel", ("lora_model_id", "rank", "loras"), ("id", "loras"), "an adapter in memory"
    ),
    Seam(
        "vllm.lora.lora_weights",
        "LoRALayerWeights",
        ("module_name", "rank", "lora_alpha", "lora_a", "lora_b", "scaling"),
        ("scaling", "lora_a", "lora_b"),
        "one module's weights and scale",
    ),
    Seam(
        "vllm.lora.punica_wrapper.punica_cpu",
        "PunicaWrapperCPU",
        ("max_num_batched_tokens", "max_batches", "device"),
        ("add_lora_linear", "add_lora_embedding", "add_lora_logits", "add_shrink", "add_expand"),
        "the CPU path that we replace",
    ),
    Seam(
        "vllm.lora.punica_wrapper.punica_base",
        "PunicaWrapperBase",
        ("max_num_batched_tokens", "max_batches", "device"),
        ("update_metadata", "token_lora_indices", "sampler_indices", "_update_base_metadata"),
        "token → slot indices of a step",
    ),
    Seam(
        "vllm.entrypoints.openai.models.serving",
        "OpenAIServingModels",
        ("engine_client", "base_model_paths"),
        ("lora_requests",),
        "the adapters that the API server accepts as model names",
    ),
    Seam(
        "vllm.distributed.device_communicators.shm_broadcast",
        "sched_yield",
        (),
        (),
        "how a process waits for another",
    ),
    Seam(
        "vllm.v1.kv_cache_interface",
        "KVCacheConfig",
        (),
        ("needs_kv_cache_zeroing",),
        "whether a KV cache block is zeroed for its next request",
    ),
    Seam("vllm.v1.worker.gpu_model_runner", "GPUModelRunner._zero_block_ids", ("block_ids",), (), "zeroes them"),
    Seam("vllm.v1.worker.cpu_model_runner", "CPUModelRunner._zero_block_ids", ("block_ids",), (), "same"),
    Seam("vllm.v1.worker.gpu_model_runner", "CachedRequestState", (), (), "the name we put ours in place of"),
    Seam(
        "vllm.v1.worker.gpu_input_batch",
        "CachedRequestState",
        (),
        ("generator", "__post_init__"),
        "a request with its random numbers",
    ),
    Seam(
        "vllm.v1.engine.async_llm",
        "AsyncLLM.collective_rpc",
        ("method", "timeout", "args", "kwargs"),
        (),
        "calls workers",
    ),
)


def problems(seams: tuple[Seam, ...], source_of: Callable[[str], str | None]) -> Iterator[str]:
    """Yield a line for every seam that the release does not have in the expected shape.

    `source_of(module)` gives the module's source text, or None where the release has no such module.
    """
    for seam in seams:
        source = source_of(seam.module)
        if source is None:
            yield f"{seam.module} does not exist ({seam.why})"
            continue
        yield from _problems_of(seam, ast.parse(source))


def _problems_of(seam: Seam, tree: ast.Module) -> Iterator[str]:
    where = f"{seam.module}.{seam.name}"
    node = _find(tree, seam.name.split("."))
    if node is None:
        yield f"{where} does not exist ({seam.why})"
        return
    missing = [name for name in seam.parameters if name not in _parameters(node)]
    if missing:
        yield f"{where} no longer takes {', '.join(missing)} ({seam.why})"
    absent = [name for name in seam.attributes if name not in _attributes(node)]
    if absent:
        yield f"{where} no longer has {', '.join(absent)} ({seam.why})"


def _find(scope: ast.AST, path: list[str]) -> ast.AST | None:
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == path[0]:
            return node if len(path) == 1 else _find(node, path[1:])
        if isinstance(node, ast.ImportFrom) and len(path) == 1 and path[0] in {a.asname or a.name for a in node.names}:
            return node
    return None


def _parameters(node: ast.AST) -> set[str]:
    if isinstance(node, ast.ClassDef):
        init = _find(node, ["__init__"])
        return set() if init is None else _parameters(init)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return {arg.arg for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}
    return set()


def _attributes(node: ast.AST) -> set[str]:
    found = set()
    for child in ast.walk(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(child.name)
        elif isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Store):
            found.add(child.attr)
        elif isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name):
            found.add(child.target.id)
        elif isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Attribute):
            found.add(child.target.attr)
    return found
