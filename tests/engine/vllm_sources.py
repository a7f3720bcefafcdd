"""The Python files of vLLM releases that cannot run here, taken out of their wheels and kept in `.cache/`.

`python tests/engine/vllm_sources.py 0.26.0` fetches one by hand.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from importlib import util
from pathlib import Path

CACHE = Path(__file__).parents[2] / ".cache" / "vllm-sources"
PLATFORMS = ("manylinux_2_35_x86_64", "manylinux_2_31_x86_64", "manylinux_2_28_x86_64", "manylinux1_x86_64")


def source_reader(version: str) -> Callable[[str], str | None]:
    """`seams.problems`'s reader for a release: the installed one, or one whose wheel is fetched on first use."""
    root = _installed_root() if version == "installed" else _fetched_root(version)

    def read(module: str) -> str | None:
        path = root.joinpath(*module.split(".")).with_suffix(".py")
        return path.read_text() if path.is_file() else None

    return read


def _installed_root() -> Path:
    spec = util.find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]).parent


def _fetched_root(version: str) -> Path:
    root = CACHE / version
    if not root.is_dir():
        with tempfile.TemporaryDirectory() as download:
            _fill(root, _download(version, Path(download)))
    return root


def _download(version: str, into: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--dest", str(into), "--python-version", "3.12", "--implementation", "cp", "--abi", "abi3"]
    command += [part for platform in PLATFORMS for part in ("--platform", platform)]
    subprocess.run([*command, f"vllm=={version}"], check=True)
    return next(into.glob("vllm-*.whl"))


def _fill(root: Path, wheel: Path) -> None:
    """Extract the Python files, and nothing else, under a name that appears when it is complete."""
    partial = root.with_name(f".{root.name}.partial")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(partial, [name for name in archive.namelist() if name.endswith(".py")])
    partial.rename(root)


if __name__ == "__main__":
    for requested in sys.argv[1:]:
        print(_fetched_root(requested))
