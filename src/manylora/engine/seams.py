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
    former_module: str = ""
    """The module's name in older releases, where it was renamed."""


SEAMS = (
    # ---- adapters: read, known, gone ----
    Seam("vllm.lora.request", "LoRARequest", (), ("lora_name", "lora_int_id", "lora_path"), "names a version to vLLM"),
    Seam(
        "vllm.lora.worker_manager",
        "LRUCacheWorkerLoRAManager",
        (),
        ("_apply_adapters", "add_adapter", "create_lora_manager", "_manager_cls"),
        "our worker manager derives from it",
    ),
    Seam(
        "vllm.lora.worker_manager",
        "WorkerLoRAManager",
        ("vllm_config", "device", "embedding_modules"),
        ("_adapter_manager", "add_dummy_lora", "remove_adapter", "lora_config"),
        "holds the model manager",
    ),
    Seam(
        "vllm.lora.worker_manager",
        "WorkerLoRAManager.add_dummy_lora",
        ("lora_request", "rank"),
        (),
        "adapters of warm-up",
    ),
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
        "create_lora_manager",
        ("lora_config", "device", "lora_manager_cls"),
        (),
        "makes a worker manager's `_manager_cls`",
    ),
    Seam(
        "vllm.lora.model_manager",
        "LoRAModelManager",
        ("model", "lora_config", "device"),
        (
            "device",
            "modules",
            "packed_modules",
            "punica_wrapper_mapping",
            "_registered_adapters",
            "_set_adapter_mapping",
            "_add_adapter",
            "add_adapter",
            "remove_adapter",
            "activate_adapter",
            "deactivate_adapter",
            "remove_all_adapters",
            "set_adapter_mapping",
            "create_dummy_lora",
        ),
        "knows adapters; ours keeps them in the store",
    ),
    Seam(
        "vllm.lora.model_manager",
        "LoRAModelManager.create_dummy_lora",
        ("lora_id", "rank", "embedding_modules"),
        (),
        "adapters of warm-up",
    ),
    Seam(
        "vllm.lora.model_manager",
        "LRUCacheLoRAModelManager",
        (),
        ("add_adapter", "activate_adapter", "pin_adapter", "_pin_lora_in_cpu_cache"),
        "our model manager derives from it",
    ),
    Seam(
        "vllm.lora.model_manager",
        "AdapterLRUCache",
        ("capacity", "deactivate_fn"),
        ("_on_remove",),
        "calls `deactivate_adapter` for each adapter that goes",
    ),
    Seam("vllm.utils.cache", "LRUCache", (), ("touch", "pin"), "the order in which adapters were used"),
    Seam(
        "vllm.lora.lora_model", "LoRAModel", ("lora_model_id", "rank", "loras"), ("id", "loras"), "an adapter in memory"
    ),
    Seam(
        "vllm.config.lora",
        "LoRAConfig",
        (),
        ("fully_sharded_loras", "lora_dtype", "max_lora_rank", "max_cpu_loras"),
        "bounds on adapters",
    ),
    # ---- layers: made for zero slots, asked for their geometry ----
    Seam("vllm.lora.model_manager", "from_layer", (), (), "a name that we replace while layers are made"),
    Seam("vllm.lora.model_manager", "from_layer_logits_processor", (), (), "same"),
    Seam("vllm.lora.utils", "from_layer", ("layer", "max_loras"), (), "makes a layer for a number of slots"),
    Seam("vllm.lora.utils", "from_layer_logits_processor", ("layer", "lm_head", "max_loras"), (), "same"),
    Seam("vllm.lora.layers.__init__", "BaseLayerWithLoRA", (), (), "exports a layer"),
    Seam("vllm.lora.layers.__init__", "LogitsProcessorWithLoRA", (), (), "same"),
    Seam("vllm.lora.layers.__init__", "VocabParallelEmbeddingWithLoRA", (), (), "same"),
    Seam(
        "vllm.lora.layers.base",
        "BaseLayerWithLoRA",
        (),
        ("punica_wrapper", "slice_lora_a", "slice_lora_b"),
        "every layer that adapters change",
    ),
    Seam("vllm.lora.layers.base", "BaseLayerWithLoRA.slice_lora_a", ("lora_a",), (), "cuts A to a rank's shard"),
    Seam("vllm.lora.layers.base", "BaseLayerWithLoRA.slice_lora_b", ("lora_b",), (), "cuts B to a rank's shard"),
    Seam(
        "vllm.lora.layers.base_linear",
        "BaseLinearLayerWithLoRA",
        ("base_layer",),
        ("base_layer", "tp_size", "n_slices", "output_slices", "lora_a_stacked", "lora_b_stacked"),
        "geometry of a linear layer",
    ),
    Seam(
        "vllm.lora.layers.column_parallel_linear",
        "MergedColumnParallelLinearWithLoRA",
        (),
        ("n_slices", "output_slices", "lora_a_stacked", "lora_b_stacked"),
        "geometry of a layer in slices",
    ),
    Seam("vllm.model_executor.layers.linear", "MergedColumnParallelLinear", (), ("output_sizes",), "widths of slices"),
    Seam(
        "vllm.model_executor.layers.linear",
        "QKVParallelLinear",
        (),
        ("total_num_heads", "total_num_kv_heads", "head_size"),
        "same",
    ),
    Seam("vllm.model_executor.layers.linear", "LinearBase", (), ("input_size", "output_size"), "sizes over all ranks"),
    Seam(
        "vllm.model_executor.models.utils",
        "WeightsMapper",
        (),
        (
            "orig_to_new_renaming",
            "orig_to_new_regex",
            "orig_to_new_substr",
            "orig_to_new_stacked",
            "orig_to_new_prefix",
            "orig_to_new_suffix",
            "_map_name",
        ),
        "how a model renames a checkpoint's modules",
    ),
    Seam(
        "vllm.lora.layers.logits_processor",
        "LogitsProcessorWithLoRA",
        (),
        ("lora_a_stacked", "lora_b_stacked"),
        "geometry of a head",
    ),
    Seam(
        "vllm.lora.layers.vocab_parallel_embedding",
        "VocabParallelEmbeddingWithLoRA",
        (),
        ("base_layer", "lora_a_stacked", "lora_b_stacked", "forward"),
        "geometry of an embedding, whose `forward` is ours",
        former_module="vllm.lora.layers.vocal_parallel_embedding",
    ),
    # ---- a step's computation ----
    Seam(
        "vllm.lora.punica_wrapper.punica_selector", "get_punica_wrapper", (), (), "makes a platform's wrapper by name"
    ),
    Seam("vllm.platforms.cuda", "CudaPlatformBase.get_punica_wrapper", (), (), "gives the next one's name"),
    Seam("vllm.lora.punica_wrapper.punica_gpu", "PunicaWrapperGPU", (), (), "the GPU path that we replace"),
    Seam("vllm.platforms.cpu", "CpuPlatform.get_punica_wrapper", (), (), "gives the next one's name"),
    Seam("vllm.lora.punica_wrapper.punica_cpu", "PunicaWrapperCPU", (), (), "the CPU path that we replace"),
    Seam(
        "vllm.lora.punica_wrapper.punica_base",
        "PunicaWrapperBase",
        ("max_num_batched_tokens", "max_batches", "device"),
        (
            "update_metadata",
            "add_lora_linear",
            "add_lora_embedding",
            "add_lora_logits",
            "add_shrink",
            "add_expand",
        ),
        "our wrappers derive from it",
    ),
    Seam(
        "vllm.lora.punica_wrapper.punica_base",
        "PunicaWrapperBase.update_metadata",
        ("mapping", "lora_index_to_id", "max_loras", "vocab_size"),
        (),
        "gives a step's mapping to a wrapper",
    ),
    Seam(
        "vllm.lora.punica_wrapper.punica_base",
        "PunicaWrapperBase.add_lora_linear",
        ("y", "x", "lora_a_stacked", "lora_b_stacked", "scale", "output_slices"),
        (),
        "what a linear layer calls",
    ),
    Seam(
        "vllm.lora.punica_wrapper.punica_base",
        "PunicaWrapperBase.add_lora_logits",
        ("y", "x", "lora_a_stacked", "lora_b_stacked", "scale"),
        (),
        "what a head calls",
    ),
    Seam(
        "vllm.lora.layers.utils",
        "LoRAMapping",
        (),
        ("index_mapping", "prompt_mapping"),
        "the adapter of each token and of each sampled row",
    ),
    # ---- the API server and its calls ----
    Seam(
        "vllm.entrypoints.openai.models.serving",
        "OpenAIServingModels",
        ("engine_client", "base_model_paths"),
        ("lora_requests",),
        "the adapters that the API server accepts as model names",
    ),
    Seam(
        "vllm.v1.engine.async_llm",
        "AsyncLLM.collective_rpc",
        ("method", "timeout", "args", "kwargs"),
        (),
        "calls workers",
    ),
    Seam(
        "vllm.distributed.device_communicators.shm_broadcast",
        "sched_yield",
        (),
        (),
        "how a process waits for another",
    ),
    # ---- other tenants' safety ----
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
)


def problems(seams: tuple[Seam, ...], source_of: Callable[[str], str | None]) -> Iterator[str]:
    """Yield a line for every seam that the release does not have in the expected shape.

    `source_of(module)` gives the module's source text, or None where the release has no such module.
    """
    trees: dict[str, ast.Module | None] = {}

    def tree_of(module: str) -> ast.Module | None:
        if module not in trees:
            source = source_of(module)
            trees[module] = None if source is None else ast.parse(source)
        return trees[module]

    for seam in seams:
        tree = tree_of(seam.module)
        if tree is None and seam.former_module:
            tree = tree_of(seam.former_module)
        if tree is None:
            yield f"{seam.module} does not exist ({seam.why})"
        else:
            yield from _problems_of(seam, tree)


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
