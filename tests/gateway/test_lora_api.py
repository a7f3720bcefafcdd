"""vLLM's management routes: who may use them, which paths they read, and what they do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_world import ADMIN_KEY, KEY, World

from manylora.errors import ManyloraError
from manylora.gateway.lora_api import allowed_folder


@pytest.fixture
def root(world: World) -> Path:
    return world.settings.adapter_roots[0]


def folder_in(root: Path, name: str = "a", config: str = "{}") -> Path:
    folder = root / name
    folder.mkdir()
    (folder / "adapter_config.json").write_text(config)
    (folder / "adapter_model.safetensors").write_bytes(b"")
    return folder


def load(world: World, name: str, path: Path | str, key: str = ADMIN_KEY, **fields: Any) -> httpx.Response:
    return world.post("/v1/load_lora_adapter", key, json={"lora_name": name, "lora_path": str(path), **fields})


def unload(world: World, name: str, key: str = ADMIN_KEY, **fields: Any) -> httpx.Response:
    return world.post("/v1/unload_lora_adapter", key, json={"lora_name": name, **fields})


def test_load_serve_replace_unload(world: World, root: Path) -> None:
    answer = load(world, "fresh", folder_in(root))
    assert answer.status_code == 200
    assert answer.text == "Success: LoRA adapter 'fresh' added successfully."
    assert world.chat("fresh").headers["x-manylora-version"] == "acme/fresh@v1"
    other = folder_in(root, "b", '{"r": 2}')
    again = load(world, "acme/fresh", other)
    assert again.status_code == 400 and "load_inplace" in again.json()["error"]["message"]
    assert load(world, "acme/fresh", other, load_inplace=True).status_code == 200
    assert world.chat("fresh").headers["x-manylora-version"] == "acme/fresh@v2"
    gone = unload(world, "fresh")
    assert gone.status_code == 200 and gone.text == "Success: LoRA adapter 'fresh' removed successfully."
    assert [name.partition("-")[0] for name in world.engine.evicted] == ["acme/fresh@v1", "acme/fresh@v2"]
    assert world.chat("fresh").status_code == 404
    assert unload(world, "fresh").status_code == 404
    assert load(world, "fresh", other).status_code == 200
    assert world.chat("fresh").headers["x-manylora-version"] == "acme/fresh@v3"


def test_an_admin_key_is_needed(world: World, root: Path) -> None:
    for answer in (load(world, "x", folder_in(root), KEY), unload(world, "support", KEY)):
        assert answer.status_code == 403 and answer.json()["error"]["code"] == "permission_denied"
    assert world.chat("support").status_code == 200 and "publish" not in world.catalog.calls


def test_paths_outside_the_roots(world: World, root: Path, tmp_path: Path) -> None:
    outside = folder_in(tmp_path, "outside")
    (root / "link").symlink_to(outside)
    inside = folder_in(root, "files")
    (inside / "adapter_model.safetensors").unlink()
    (inside / "adapter_model.safetensors").symlink_to(outside / "adapter_model.safetensors")
    loop = root / "loop"
    loop.symlink_to(loop)
    relative, absent = f"{root}/../outside", tmp_path / "absent"
    for path in (outside, relative, root / "link", inside, absent, "/etc", "outside", ".", "", "\0", "x" * 9000, loop):
        answer = load(world, "x", path)
        assert answer.status_code in (400, 403), path
        assert str(tmp_path) not in answer.text
    assert load(world, "x", root / "absent").status_code == 404
    assert "publish" not in world.catalog.calls


def test_links_that_stay_inside_are_followed(world: World, root: Path) -> None:
    (root / "link").symlink_to(folder_in(root))
    assert load(world, "x", root / "link").status_code == 200


def test_without_roots_every_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ManyloraError, match="outside"):
        allowed_folder(str(tmp_path), ())


def test_what_cannot_be_honoured_is_refused(world: World, root: Path) -> None:
    folder = folder_in(root)
    for answer in (
        load(world, "x", folder, is_3d_lora_weight=True),
        load(world, "x", folder, pinned=True),
        load(world, "../x", folder),
        load(world, "UPPER", folder),
        load(world, "Tiny-Base", folder),
        load(world, "", folder),
        load(world, "x", root),
        unload(world, "support", lora_int_id=3),
        unload(world, "Tiny-Base"),
        world.post("/v1/load_lora_adapter", ADMIN_KEY, content=b'{"lora_name":"a","lora_name":"b","lora_path":"/"}'),
        world.post("/v1/load_lora_adapter", ADMIN_KEY, content=b"[]"),
        world.post("/v1/load_lora_adapter", ADMIN_KEY, json={"lora_name": 1, "lora_path": "/"}),
        world.post("/v1/unload_lora_adapter", ADMIN_KEY, json={}),
    ):
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["type"] == "invalid_request_error"
    assert world.chat("support").status_code == 200


def test_an_unload_succeeds_though_the_engine_cannot_be_asked(world: World) -> None:
    async def fail(*args: object) -> bool:
        from manylora.gateway.problems import engine_unavailable

        raise engine_unavailable()

    from manylora.gateway.engine_client import EngineClient

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineClient, "evict", fail)
        assert unload(world, "support").status_code == 200
    assert world.chat("support").status_code == 404
