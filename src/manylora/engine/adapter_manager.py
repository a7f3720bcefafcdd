"""The worker's side of an adapter's life: read and checked beside the step loop, registered between steps, activated in
one.

    prepare    (loader thread)  disk → host tensors: digest, ranks, shapes and names checked; fused; nothing shared
    touched register   (step thread)    the prepared adapter becomes known to vLLM: a dictionary entry
    activate   (step thread)    host → device slot: at once where one is free, else when a step first needs it
    forget     (step thread)    both copies dropped

vLLM's own manager reads from disk and activates in whichever order a step's set iterates; that remains only as the last
resort for adapters that came by another way than `manylora.engine.http` (the offline `LLM` class, say).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from manylora.adapter import DIGEST_HEX_CHARS
from manylora.engine import vllm_internals as vllm_seam
from manylora.errors import CorruptBlob, InvalidAdapter, ManyloraError
from manylora.peft_config import CONFIG_FILE, WEIGHTS_FILE, LoraScaling, adapter_digest

_CHUNK_BYTES = 1 << 20


class AdapterManager(vllm_seam.LRUCacheWorkerLoRAManager):
    """vLLM's worker manager with loading taken out of the step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.device_evictions = 0
        self.in_step_loads = 0

    def prepare(self, request: vllm_seam.LoRARequest) -> tuple[vllm_seam.LoRAModel, tuple[str, ...]]:
        """Read an adapter's folder into fused host tensors; safe beside a running step.

        Returns the adapter and the names of its modules that this worker does not have: with pipeline parallelism
        another worker must have them, else they would silently be left out. Raises a `ManyloraError` that names what is
        wrong.
        """
        folder = Path(request.lora_path)
        config = verify_folder(folder)
        lora = vllm_seam.read_adapter(self, request)
        _apply_patterns(lora, config)
        unknown = self._check_fit(lora)
        _check_size(lora)
        vllm_seam.fuse(self, lora)
        return lora, unknown

    def _check_fit(self, lora: vllm_seam.LoRAModel) -> tuple[str, ...]:
        """Check every matrix against the layer that takes it; a copy into a slot would cut or pad it without a word."""
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

    def register(self, lora: vllm_seam.LoRAModel) -> None:
        """Make a prepared adapter known, and bring it to the device at once where a slot is free.

        Between two steps that delays nobody by more than the copy, and the adapter's first step is spared it.
        """
        vllm_seam.register(self, lora)
        if len(vllm_seam.active_ids(self)) < vllm_seam.device_slots(self):
            self._activate(lora.id)

    def add_adapter(self, lora_request: vllm_seam.LoRARequest) -> bool:
        """vLLM's entry: load and register if unknown. Evicts nothing, so that no running batch loses a slot."""
        if lora_request.lora_int_id in vllm_seam.registered_ids(self):
            return True
        lora, unknown = self.prepare(lora_request)
        if len(unknown) == len(lora.loras):
            raise InvalidAdapter(f"no module of adapter '{lora_request.lora_name}' exists in this model")
        self.register(lora)
        return True

    def _apply_adapters(self, lora_requests: Iterable[vllm_seam.LoRARequest]) -> None:
        """Bring a step's adapters into device slots. Those already there are marked first, so that none of them is
        evicted."""
        needed = {request.lora_int_id: request for request in lora_requests if request}
        if len(needed) > vllm_seam.device_slots(self):
            raise RuntimeError(f"a step needs {len(needed)} adapters, there are {vllm_seam.device_slots(self)} slots")
        active = set(vllm_seam.active_ids(self))
        for lora_id in needed.keys() & active:
            vllm_seam.touch_active(self, lora_id)
        for lora_id in needed.keys() - active:
            if lora_id not in vllm_seam.registered_ids(self):
                self.in_step_loads += 1
                self.add_adapter(needed[lora_id])
            self._activate(lora_id)

    def _activate(self, lora_id: int) -> None:
        before = set(vllm_seam.active_ids(self))
        vllm_seam.activate(self, lora_id)
        self.device_evictions += len(before - set(vllm_seam.active_ids(self)))
        vllm_seam.forget_batch_mapping(self)
        self._announce_ranks()

    def _announce_ranks(self) -> None:
        """Tell the computation each slot's rank, so that it works at exact rank."""
        ranks = [largest_rank(vllm_seam.registered(self, i)) if i else 0 for i in vllm_seam.slot_table(self)]
        for wrapper in vllm_seam.cpu_wrappers(self):
            if hasattr(wrapper, "set_slot_ranks"):
                wrapper.set_slot_ranks(ranks)

    def forget(self, lora_id: int) -> int:
        """Drop both copies; returns the bytes of host memory freed (0 if it was not there)."""
        lora = vllm_seam.registered(self, lora_id)
        freed = 0 if lora is None else host_bytes(lora)
        if lora_id in vllm_seam.active_ids(self):
            vllm_seam.forget_batch_mapping(self)
        self.remove_adapter(lora_id)
        return freed

    def active(self) -> list[int]:
        """Ids of the adapters in device slots."""
        return vllm_seam.active_ids(self)


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


def _matrices(lora: vllm_seam.LoRAModel) -> Iterable[Any]:
    for weights in lora.loras.values():
        for matrix in (weights.lora_a, weights.lora_b):
            yield from (part for part in (matrix if isinstance(matrix, list) else [matrix]) if part is not None)


def host_bytes(lora: vllm_seam.LoRAModel) -> int:
    """Bytes of the host copy of an adapter."""
    return sum(matrix.numel() * matrix.element_size() for matrix in _matrices(lora))


def largest_rank(lora: vllm_seam.LoRAModel | None) -> int:
    """Largest rank over the modules of a fused adapter; 0 for none."""
    if lora is None:
        return 0
    ranks = [0]
    for weights in lora.loras.values():
        parts = weights.lora_a if isinstance(weights.lora_a, list) else [weights.lora_a]
        ranks += [int(part.shape[0]) for part in parts if part is not None]
    return max(ranks)


def reason(error: Exception, folder: str) -> str:
    """What to tell a caller about a failed load: our own errors in full, others by type and first line, never the
    path."""
    text = str(error) if isinstance(error, ManyloraError) else f"{type(error).__name__}: {error}"
    return text.replace(folder, "the adapter").split("\n", 1)[0][:500]
