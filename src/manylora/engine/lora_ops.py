"""The operators through which a model's layers reach the LoRA computation.

torch.compile and CUDA graphs see one opaque operator that changes its first argument; which adapters a step has, and
how they are computed, is decided behind it. A layer names its module by a tensor of one number rather than by the
number, so that equal layers make equal graphs, which are compiled once.
"""

from __future__ import annotations

from typing import Protocol

import torch


class LoRAPath(Protocol):
    """A way to compute; one for each wrapper that vLLM makes."""

    def add_linear(self, y: torch.Tensor, x: torch.Tensor, number: int) -> None:
        """``y += B A x`` for the step's tokens, in place."""

    def add_embedding(self, y: torch.Tensor, ids: torch.Tensor, number: int) -> None:
        """``y += B A[:, ids]`` for the step's tokens, in place."""


_paths: list[LoRAPath] = []


def register_path(path: LoRAPath) -> int:
    """Make a path known for the life of the process; its number."""
    _paths.append(path)
    return len(_paths) - 1


def marker(number: int) -> torch.Tensor:
    """The tensor that names a module to the operators; on the CPU, where reading it waits for nobody."""
    return torch.tensor([number], dtype=torch.int64, device="cpu")


def _add_lora(y: torch.Tensor, x: torch.Tensor, module: torch.Tensor, path: int) -> None:
    _paths[path].add_linear(y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1]), int(module))


def _add_lora_embedding(y: torch.Tensor, ids: torch.Tensor, module: torch.Tensor, path: int) -> None:
    _paths[path].add_embedding(y.view(-1, y.shape[-1]), ids.view(-1), int(module))


def _nothing(y: torch.Tensor, x: torch.Tensor, module: torch.Tensor, path: int) -> None:
    """Shapes do not change."""


_library = torch.library.Library("manylora", "DEF")  # kept: the operators live as long as it does
for _name, _function in (("add_lora", _add_lora), ("add_lora_embedding", _add_lora_embedding)):
    _library.define(f"{_name}(Tensor(a!) y, Tensor x, Tensor module, int path) -> ()")
    _library.impl(_name, _function, "CPU")
    _library.impl(_name, _function, "CUDA")
    torch.library.register_fake(f"manylora::{_name}", _nothing, lib=_library)

add_lora = torch.ops.manylora.add_lora
add_lora_embedding = torch.ops.manylora.add_lora_embedding
