"""The worker's side of an adapter's life: prepared and placed beside the step loop, dropped between two steps.

    prepare    (loader threads)  the packed form: from the node's agent, or made here from the folder
    place      (loader threads)  into the store; from then on a step may use it
    forget     (step thread)     out of it

vLLM's own manager reads from disk and copies into slots in whichever order a step's set iterates. Something of the kind
remains only as the last resort for adapters that came by another way than `manylora.engine.http` (the offline `LLM`
class, say).
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from manylora.adapter import DIGEST_HEX_CHARS
from manylora.engine import vllm_internals as vllm_seam
from manylora.engine.agent_client import AgentClient
from manylora.errors import InvalidAdapter, ManyloraError, Unavailable
from manylora.kernels.pool import PoolFull
from manylora.kernels.stores import AdapterStore, Packed
from manylora.staging.folder import read_folder
from manylora.staging.layout import EXACT, EngineLayout
from manylora.staging.packed_form import copy_block, pack_weights, packed_bytes, view_packed

log = logging.getLogger(__name__)

HERE = "worker"
"""The source of an adapter that the worker itself read and packed."""


@dataclass(slots=True)
class PreparedAdapter:
    """An adapter in the form that the store takes; `close` it once it is placed or of no use any more."""

    packed: Packed
    modules: int
    unknown: tuple[str, ...]
    """Modules that this worker does not have: with pipeline parallelism another one must have them, else they would
    silently be left out."""
    source: str
    held: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    """What keeps the packed form where it is."""

    def close(self) -> None:
        """Let go of the packed form. Raises `CorruptBlob` if it had become another's meanwhile."""
        self.held.close()


@dataclass(frozen=True, slots=True)
class Measured:
    """What is known of an adapter before it has a place."""

    nbytes: int
    unknown: tuple[str, ...]
    source: str


class AdapterManager(vllm_seam.LRUCacheWorkerLoRAManager):
    """vLLM's worker manager with loading taken out of the step, over an adapter store."""

    agent_socket: Path | None = None
    """Where the node's agent listens; None: this worker packs for itself."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.in_step_loads = 0
        self._agent: AgentClient | None = None
        # vLLM's list of known adapters is changed by loader threads too.
        self._known = threading.Lock()
        self._starting = threading.Lock()

    @property
    def store(self) -> AdapterStore:
        """Where this worker's adapters are."""
        store: AdapterStore = vllm_seam.pooled(self).store
        return store

    @property
    def layout(self) -> EngineLayout:
        """What adapters are packed for."""
        layout: EngineLayout = vllm_seam.pooled(self).layout
        return layout

    # ---- beside the steps ----

    def agent(self) -> AgentClient | None:
        """This worker's connections to the node's agent, where there is one that can pack for this model."""
        if self.agent_socket is None or vllm_seam.pooled(self).rename is not None:
            return None
        with self._starting:
            if self._agent is None:
                self._agent = AgentClient(self.agent_socket, self.layout, self.store.pin)
            return self._agent

    def meet_agent(self) -> None:
        """Connect to the agent before the first load does; an agent that is late is met by that load."""
        try:
            agent = self.agent()
            if agent is not None:
                agent.warm()
        except ManyloraError as error:
            log.warning("%s", error)

    def prepare(self, folder: Path) -> PreparedAdapter:
        """Get an adapter's packed form. Raises a `ManyloraError` that names what is wrong."""
        agent = self.agent()
        if agent is None or len(folder.name) != DIGEST_HEX_CHARS:
            return self._prepare_here(folder)
        try:
            return self._staged(agent, folder.name)
        except Unavailable as error:
            # No agent, or one without room: better a load that costs this worker some time than none.
            log.warning("adapter %s is packed here: %s", folder.name[:16], error)
            return self._prepare_here(folder)

    def measure(self, folder: Path) -> Measured:
        """How large an adapter will be; its packed form is in host memory afterwards, where there is an agent.

        Raises as `prepare` does.
        """
        agent = self.agent()
        if agent is not None and len(folder.name) == DIGEST_HEX_CHARS:
            try:
                with agent.staged(folder.name) as staged:
                    return Measured(packed_bytes(staged.header), staged.header.unknown, staged.source)
            except Unavailable as error:
                log.warning("adapter %s is measured here: %s", folder.name[:16], error)
        prepared = self._prepare_here(folder)
        return Measured(prepared.packed.nbytes, prepared.unknown, prepared.source)

    def _staged(self, agent: AgentClient, digest: str) -> PreparedAdapter:
        with contextlib.ExitStack() as stack:
            staged = stack.enter_context(agent.staged(digest))
            header, block = staged.header, staged.block
            if self.layout.form == EXACT:
                # What steps compute with stays put, whatever the agent does with its memory.
                block = copy_block(block)
                stack.close()
            packed = view_packed(block, header)
            return PreparedAdapter(packed, header.changed_modules, header.unknown, staged.source, stack.pop_all())

    def _prepare_here(self, folder: Path) -> PreparedAdapter:
        read = read_folder(folder, self.layout, vllm_seam.pooled(self).rename)
        packed = pack_weights(self.layout, read.weights)
        return PreparedAdapter(packed, read.modules, read.unknown, HERE)

    def place(self, lora_id: int, prepared: PreparedAdapter) -> None:
        """Take a prepared adapter into the store and make it known. Raises `PoolFull`; nothing has changed then."""
        self.store.place(lora_id, prepared.packed)
        try:
            prepared.close()
        except BaseException:
            self.store.remove(lora_id)
            raise
        with self._known:
            vllm_seam.pooled(self).know(lora_id)

    # ---- between two steps ----

    def add_adapter(self, lora_request: vllm_seam.LoRARequest) -> bool:
        """vLLM's entry: load and place if unknown. Evicts nothing, so that no running batch loses an adapter."""
        if vllm_seam.is_registered(self, lora_request.lora_int_id):
            return True
        prepared = self._prepare_here(Path(lora_request.lora_path))
        if len(prepared.unknown) == prepared.modules:
            raise InvalidAdapter(f"no module of adapter '{lora_request.lora_name}' exists in this model")
        self.place(lora_request.lora_int_id, prepared)
        return True

    def add_dummy_lora(self, lora_request: vllm_seam.LoRARequest, rank: int) -> bool:
        """vLLM's entry for warm-up: kernels are compiled and captured for any adapter by one that changes nothing."""
        return vllm_seam.add_weightless(self, lora_request.lora_int_id)

    def _apply_adapters(self, lora_requests: Iterable[vllm_seam.LoRARequest]) -> None:
        """See to it that a step's adapters are there. Those that came by `place` are; nothing is to do."""
        needed = {request.lora_int_id: request for request in lora_requests if request}
        for lora_id, request in needed.items():
            with self._known:
                known = vllm_seam.is_registered(self, lora_id)
                if known:
                    vllm_seam.touch(self, lora_id)
            if not known:
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
        with self._known:
            self.remove_adapter(lora_id)
        return before - self.store.used_bytes

    def active(self) -> list[int]:
        """Ids of the adapters in the store."""
        with self._known:
            return vllm_seam.registered_ids(self)


def reason(error: Exception, folder: str) -> str:
    """What to tell a caller about a failed load: our own errors in full, others by type and first line, never the
    path."""
    text = str(error) if isinstance(error, ManyloraError) else f"{type(error).__name__}: {error}"
    return text.replace(folder, "the adapter").split("\n", 1)[0][:500]
