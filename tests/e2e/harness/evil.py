"""Folders that must never become adapters, each made from a good one. Knows what is wrong, not who refuses it."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
Header = dict[str, Any]


def truncated(folder: Path) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[: len(data) - 100])


def header_cut_off(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:40])


def empty_file(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(b"")


def header_claims_exabytes(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((1 << 60).to_bytes(8, "little") + (folder / WEIGHTS).read_bytes()[8:])


def tensors_beyond_the_file(folder: Path) -> None:
    def lie(header: Header) -> None:
        name = next(iter(header))
        begin, _ = header[name]["data_offsets"]
        header[name] = {"dtype": "F32", "shape": [8, 1 << 40], "data_offsets": [begin, begin + (8 << 42)]}

    rewrite_header(folder, lie)


def tensors_overlap(folder: Path) -> None:
    def lie(header: Header) -> None:
        first, second = sorted(header, key=lambda name: header[name]["data_offsets"])[:2]
        header[second]["data_offsets"] = header[first]["data_offsets"]
        header[second]["shape"] = header[first]["shape"]

    rewrite_header(folder, lie)


def shapes_transposed(folder: Path) -> None:
    def lie(header: Header) -> None:
        for tensor in header.values():
            tensor["shape"].reverse()

    rewrite_header(folder, lie)


def unknown_modules(folder: Path) -> None:
    """Prefixes of another architecture: such a file must not load and act as the base model."""

    def lie(header: Header) -> None:
        for name in list(header):
            header[name.replace("self_attn", "attention")] = header.pop(name)

    rewrite_header(folder, lie)


def not_a_number(folder: Path) -> None:
    data = bytearray((folder / WEIGHTS).read_bytes())
    data[-4:] = b"\x00\x00\xc0\x7f"
    (folder / WEIGHTS).write_bytes(data)


def header_not_json(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((6).to_bytes(8, "little") + b"{nope}")


def pickle_only(folder: Path) -> None:
    """PEFT's old format, which runs code when it is read."""
    (folder / WEIGHTS).unlink()
    (folder / "adapter_model.bin").write_bytes(pickle.dumps(_Bomb(folder / "exploded")))


def pickle_named_safetensors(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(pickle.dumps(_Bomb(folder / "exploded")))


def config_missing(folder: Path) -> None:
    (folder / CONFIG).unlink()


def config_of_dora(folder: Path) -> None:
    change_config(folder, use_dora=True)


def config_lies_about_rank(folder: Path) -> None:
    change_config(folder, r=64, rank_pattern={})


def weights_are_a_link(folder: Path) -> None:
    """A link out of the folder would publish any file that the server may read."""
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).symlink_to("/etc/passwd")


class _Bomb:
    """Leaves a file behind if anything ever unpickles it."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        return open, (str(self.target), "w")


EVIL: tuple[Callable[[Path], None], ...] = (
    truncated,
    header_cut_off,
    empty_file,
    header_claims_exabytes,
    tensors_beyond_the_file,
    tensors_overlap,
    shapes_transposed,
    unknown_modules,
    not_a_number,
    header_not_json,
    pickle_only,
    pickle_named_safetensors,
    config_missing,
    config_of_dora,
    config_lies_about_rank,
    weights_are_a_link,
)


def spoiled_copy(good: Path, folder: Path, spoil: Callable[[Path], None]) -> Path:
    """A copy of `good` at `folder`, spoiled."""
    shutil.copytree(good, folder)
    spoil(folder)
    return folder


def rewrite_header(folder: Path, lie: Callable[[Header], None]) -> None:
    """Change the safetensors header of `folder` and leave the tensors' bytes as they are."""
    data = (folder / WEIGHTS).read_bytes()
    size = int.from_bytes(data[:8], "little")
    header: Header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    lie(header)
    text = json.dumps(header).encode()
    (folder / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])


def change_config(folder: Path, **fields: object) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**config, **fields}))
