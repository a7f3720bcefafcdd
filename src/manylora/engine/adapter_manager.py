"""The worker's side of an adapter's life: read, checked and packed beside the step loop, placed between two steps.

    prepare    (loader thread)  disk → host tensors: digest, ranks, shapes and names checked; fused and packed
    register   (step thread)    into the store, whole; from then on a step may use it
    forget     (step thread)    out of it

vLLM's own manager reads from disk and copies into slots in whichever order a step's set iterates. Something of the kind
remains only as the last resort for adapters that came by another way than `manylora.engine.http` (the offline `LLM`
class, say).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manylora.adapter import DIGEST_HEX_CHARS
from manylora.engine import vllm_internals as vllm_seam
from manylora.errors import CorruptBlob, InvalidAdapter, ManyloraError
from manylora.kernels.pool import PoolFull
from manylora.kernels.stores import AdapterStore, Packed
from manylora.peft_config import CONFIG_FILE, WEIGHTS_FILE, LoraScaling, adapter_digest

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class PreparedAdapter:
    """An adapter that is read and checked, in the form that the worker's store takes."""

    lora: vllm_seam.LoRAModel
    """What vLLM knows it by; without its weights."""
    packed: Packed
    modules: int
    unknown: tuple[str, ...]
    """Modules that this worker does not have: with pipeline parallelism another one must have them, else they would
    silently be left out."""


class AdapterManager(vllm_seam.LRUCacheWorkerLoRAManager):
    """vLLM's worker manager with loading taken out of the step, over an adapter store."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.in_step_loads = 0

    @property
    def store(self) -> AdapterStore:
        """Where this worker's adapters are."""
        store: AdapterStore = vllm_seam.pooled(self).store
        return store

    def prepare(self, request: vllm_seam.LoRARequest) -> PreparedAdapter:
        """Read an adapter's folder; safe beside a running step. Raises a `ManyloraError` that names what is wrong."""
        folder = Path(request.lora_path)
        config = verify_folder(folder)
        lora = vllm_seam.read_adapter(self, request)
        _apply_patterns(lora, config)
        unknown = self._check_fit(lora)
        _check_size(lora)
        vllm_seam.fuse(self, lora)
        packed, modules = vllm_seam.pooled(self).pack(lora), len(lora.loras)
        lora.loras.clear()
        return PreparedAdapter(lora, packed, modules, unknown)

    def _check_fit(self, lora: vllm_seam.LoRAModel) -> tuple[str, ...]:
        """Check every matrix against the layer that takes it, and its rank against the engine's bound."""
        limits = vllm_seam.module_limits(self)
        for name, weights in lora.loras.items():
            if isinstance(weights.lora_a, list):
                continue
            if weights.lora_a is None or weights.lora_b is None:
                raise InvalidAdapter(f"module {name} has only one of lora_A and lora_B")
            _check_rank(name, weights, vllm_seam.max_lora_rank(self))
            in_features, out_features = limits.get(name, (0, 0))
            if in_features and weights.lora_a.shape[-1] != in_features:
                raise InvalidAdapter(f"{name}.lora_A has {weights.lora_a.shape[-1]} columns, the layer {in_features}")
            if out_features and weights.lora_b.shape[0] != out_features:
                raise InvalidAdapter(f"{name}.lora_B has {weights.lora_b.shape[0]} rows, the layer {out_features}")
        return tuple(name for name in lora.loras if name not in limits)

    def register(self, prepared: PreparedAdapter) -> None:
        """Take a prepared adapter into the store, between two steps. Raises `PoolFull`; nothing has changed then."""
        vllm_seam.pooled(self).place(prepared.lora, prepared.packed)

    def add_adapter(self, lora_request: vllm_seam.LoRARequest) -> bool:
        """vLLM's entry: load and register if unknown. Evicts nothing, so that no running batch loses an adapter."""
        if vllm_seam.is_registered(self, lora_request.lora_int_id):
            return True
        prepared = self.prepare(lora_request)
        if len(prepared.unknown) == prepared.modules:
            raise InvalidAdapter(f"no module of adapter '{lora_request.lora_name}' exists in this model")
        self.register(prepared)
        return True

    def add_dummy_lora(self, lora_request: vllm_seam.LoRARequest, rank: int) -> bool:
        """vLLM's entry for warm-up: kernels are compiled and captured for any adapter by one that changes nothing."""
        return vllm_seam.add_weightless(self, lora_request.lora_int_id)

    def _apply_adapters(self, lora_requests: Iterable[vllm_seam.LoRARequest]) -> None:
        """See to it that a step's adapters are there. Those that came by `register` are; nothing is to do."""
        needed = {request.lora_int_id: request for request in lora_requests if request}
        for lora_id, request in needed.items():
            if vllm_seam.is_registered(self, lora_id):
                vllm_seam.touch(self, lora_id)
                continue
            self.in_step_loads += 1
            self._load_in_step(request, keep=set(needed))

    def _load_in_step(self, request: vllm_seam.LoRARequest, keep: set[int]) -> None:
        """Load an adapter while a step waits, at the cost of the least recently used ones that the step can spare."""
        while True:
            try:
                self.add_adapter(request)
                return
            except PoolFull:
                spare = [lora_id for lora_id in vllm_seam.registered_ids(self) if lora_id not in keep]
                if not spare:
                    raise
                self.forget(spare[0])

    def forget(self, lora_id: int) -> int:
        """Drop an adapter; returns the bytes freed (0 if it was not there)."""
        before = self.store.used_bytes
        self.remove_adapter(lora_id)
        return before - self.store.used_bytes

    def active(self) -> list[int]:
        """Ids of the adapters in the store."""
        return vllm_seam.registered_ids(self)


def verify_folder(folder: Path) -> dict[str, Any]:
    """Return the adapter's config, after hashing both files where the folder is named by a digest.

    Raises `CorruptBlob` when the bytes are not those of the name, `InvalidAdapter` when there is nothing to read.
    """
    try:
        raw = (folder / CONFIG_FILE).read_bytes()
        if len(folder.name) == DIGEST_HEX_CHARS and adapter_digest(raw, _chunks(folder / WEIGHTS_FILE)) != folder.name:
            raise CorruptBlob(f"the files of adapter {folder.name[:16]} no longer match their digest")
        config = json.loads(raw)
    except (OSError, ValueError) as error:
        raise InvalidAdapter(f"adapter {folder.name[:16]} cannot be read: {_cause(error)}") from error
    if not isinstance(config, dict):
        raise InvalidAdapter(f"adapter {folder.name[:16]}: {CONFIG_FILE} is not a JSON object")
    return config


def _chunks(path: Path) -> Iterable[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            yield chunk


def _cause(error: Exception) -> str:
    return error.strerror or type(error).__name__ if isinstance(error, OSError) else str(error)


def _check_rank(name: str, weights: Any, max_lora_rank: int) -> None:
    rank = int(weights.lora_a.shape[0])
    if rank != weights.lora_b.shape[-1]:
        raise InvalidAdapter(f"{name}: lora_A has rank {rank}, lora_B {weights.lora_b.shape[-1]}")
    if rank > max_lora_rank:
        raise InvalidAdapter(
            f"{name} has rank {rank}, this engine takes up to {max_lora_rank}", "start it with a larger --max-lora-rank"
        )


MAX_DELTA = 1e4
"""Bound on any entry of a module's ``scale · B · A``. Trained ones stay below 1; from about 1e19 on activations
overflow."""


def _check_size(lora: vllm_seam.LoRAModel) -> None:
    """Refuse weights whose product could overflow: such an adapter can answer nothing.

    Whatever overflows all the same harms its own answers only; see `vllm_internals.zero_new_kv_blocks`.
    """
    for name, weights in lora.loras.items():
        if isinstance(weights.lora_a, list):
            continue
        largest_a, largest_b = float(weights.lora_a.abs().amax()), float(weights.lora_b.abs().amax())
        bound = abs(weights.scaling) * weights.lora_a.shape[0] * largest_a * largest_b
        if not bound <= MAX_DELTA:
            raise InvalidAdapter(f"{name}: its weights change the layer by up to {bound:.1e}, which overflows")


def _apply_patterns(lora: vllm_seam.LoRAModel, config: dict[str, Any]) -> None:
    """Give modules their own scale on a vLLM that ignores `rank_pattern` and `alpha_pattern` (0.26)."""
    if vllm_seam.reads_patterns() or not (config.get("rank_pattern") or config.get("alpha_pattern")):
        return
    scaling = LoraScaling.from_checked(config)
    for name, weights in lora.loras.items():
        weights.scaling = scaling.scaling_of(name)


def reason(error: Exception, folder: str) -> str:
    """What to tell a caller about a failed load: our own errors in full, others by type and first line, never the
    path."""
    text = str(error) if isinstance(error, ManyloraError) else f"{type(error).__name__}: {error}"
    return text.replace(folder, "the adapter").split("\n", 1)[0][:500]
