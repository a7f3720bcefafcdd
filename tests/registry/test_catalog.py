from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from manylora.adapter import AdapterName
from manylora.errors import Conflict, CorruptBlob, InvalidAdapter, InvalidInput, InvalidName, NotFound, Unavailable
from manylora.registry import blobs as blobs_module
from manylora.registry import publishing
from manylora.registry.base_model import BaseModel
from manylora.registry.catalog import Catalog
from manylora.registry.peft_format import read_peft_folder
from manylora.registry.records import Published, VersionState
from manylora.settings import Settings

Make = Callable[..., Path]
OTHER = AdapterName("globex", "sql")


@pytest.fixture
def push(catalog: Catalog, make: Make, support: AdapterName) -> Callable[..., Published]:
    """`push(fill, …)` publishes content number `fill` as acme/support."""

    def run(fill: int = 1, name: AdapterName = support, **options: Any) -> Published:
        return catalog.publish(make(fill=fill), name, base_model="tiny-base", actor="me", **options)

    return run


Push = Callable[..., Published]

# --- publishing -------------------------------------------------------------------------------------------------------


def test_the_first_version_becomes_live_and_later_ones_wait(push: Push, catalog: Catalog, support: AdapterName) -> None:
    first, second = push(1), push(2)
    assert (first.version.ref.number, first.created, first.became_live) == (1, True, True)
    assert (second.version.ref.number, second.created, second.became_live) == (2, True, False)
    third = push(3, promote=True)
    assert third.became_live
    assert catalog.adapter(support).aliases == {"live": 3}
    assert [version.ref.number for version in catalog.versions(support)] == [1, 2, 3]


def test_a_first_version_may_be_kept_back(push: Push, catalog: Catalog, support: AdapterName) -> None:
    assert not push(1, promote=False).became_live
    assert catalog.adapter(support).aliases == {}
    assert catalog.visible("acme") == []
    assert push(2).became_live


def test_what_a_version_says(push: Push, make: Make) -> None:
    version = push(1, metadata={"run": "42"}).version
    adapter = read_peft_folder(make(fill=1), max_bytes=1 << 20)
    assert str(version.ref) == "acme/support@v1"
    assert (version.base_model, version.lora_rank, version.created_by) == ("tiny-base", 4, "me")
    assert version.size_bytes == adapter.size_bytes
    assert version.state is VersionState.READY
    assert version.metadata == {"run": "42"}
    assert version.created_at.utcoffset() is not None


def test_the_same_content_again_is_the_same_version(push: Push, catalog: Catalog, support: AdapterName) -> None:
    first, _, again = push(1), push(2), push(1)
    assert again.version == first.version
    assert not again.created
    assert not again.became_live
    assert push(2, promote=True).became_live
    assert not push(2, promote=True).became_live
    assert catalog.adapter(support).aliases == {"live": 2}


def test_the_same_content_under_two_adapters_is_one_blob(push: Push, settings: Settings) -> None:
    one, other = push(1), push(1, OTHER)
    assert other.created
    assert one.version.digest == other.version.digest
    assert one.version.ref.engine_name != other.version.ref.engine_name
    assert len(list((settings.home / "blobs" / "adapters").iterdir())) == 1


def test_who_and_what_must_exist(push: Push, catalog: Catalog, make: Make, support: AdapterName) -> None:
    with pytest.raises(NotFound, match="tenant 'initech'"):
        push(1, AdapterName("initech", "x"))
    with pytest.raises(NotFound, match="base model 'absent'"):
        catalog.publish(make(), support, base_model="absent", actor="me")
    assert catalog.adapters() == []


def test_warnings_need_force(catalog: Catalog, make: Make, support: AdapterName) -> None:
    folder = make(base_model_name_or_path="org/other", novel_field=1)
    with pytest.raises(InvalidAdapter, match="trained on 'org/other'") as caught:
        catalog.publish(folder, support, base_model="tiny-base", actor="me")
    assert "novel_field" in caught.value.message
    assert "--force" in caught.value.hint
    published = catalog.publish(folder, support, base_model="tiny-base", actor="me", force=True)
    assert len(published.warnings) == 2


def test_refusals_leave_nothing(catalog: Catalog, make: Make, support: AdapterName, settings: Settings) -> None:
    seq = catalog.change_seq()
    poisoned = make()
    weights = poisoned / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + struct.pack("<f", float("nan")))
    for folder in (poisoned, make(use_dora=True), make(modules={"x.y": (4, 4)}), Path("/absent")):
        with pytest.raises(InvalidAdapter):
            catalog.publish(folder, support, base_model="tiny-base", actor="me", force=True)
    assert catalog.adapters() == []
    assert catalog.change_seq() == seq
    assert not (settings.home / "blobs" / "adapters").exists()


@pytest.mark.parametrize(
    "metadata", [{"": "x"}, {"k" * 200: "x"}, {"k": "v" * 5000}, {"k": 1}, {str(i): "x" for i in range(99)}]
)
def test_metadata_is_bounded(push: Push, metadata: Any) -> None:
    with pytest.raises(InvalidInput, match="metadata"):
        push(1, metadata=metadata)


def test_a_size_limit(settings: Settings, catalog: Catalog, make: Make, support: AdapterName) -> None:
    with Catalog.open(replace(settings, max_adapter_bytes=1024)) as small, pytest.raises(InvalidAdapter, match="1024"):
        small.publish(make(), support, base_model="tiny-base", actor="me")


def test_progress_is_told(push: Push) -> None:
    told: list[tuple[int, int]] = []
    version = push(1, progress=lambda done, total: told.append((done, total))).version
    assert told[-1][0] == told[-1][1] > 0
    assert told[-1][0] <= version.size_bytes
    push(1, progress=lambda done, total: told.append((done, total)))
    assert told[-1][0] == told[-1][1]


def test_digests_that_share_their_start_are_refused(
    push: Push, monkeypatch: pytest.MonkeyPatch, settings: Settings
) -> None:
    first = push(1).version.digest
    forged = first[:16] + "0" * 48
    monkeypatch.setattr(publishing, "digest", lambda *_: forged)
    with pytest.raises(Conflict, match=first[:16]):
        push(2)
    assert len(list((settings.home / "blobs" / "adapters").iterdir())) == 1


def test_a_file_that_changes_during_the_push(
    catalog: Catalog, make: Make, support: AdapterName, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make()
    weights = folder / "adapter_model.safetensors"
    real = publishing.digest

    def digest_then_change(config: bytes, path: Path) -> str:
        found = real(config, path)
        weights.write_bytes(weights.read_bytes()[:-4] + struct.pack("<f", 9.0))
        return found

    monkeypatch.setattr(publishing, "digest", digest_then_change)
    with pytest.raises(InvalidAdapter, match="changed while it was read"):
        catalog.publish(folder, support, base_model="tiny-base", actor="me")
    monkeypatch.setattr(publishing, "stamp", lambda path: read_peft_folder(folder, max_bytes=1 << 20).weights_stamp)
    with pytest.raises(InvalidAdapter, match="changed while it was read"):
        catalog.publish(folder, support, base_model="tiny-base", actor="me")
    assert catalog.adapters() == []


def test_a_full_store(push: Push, catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError("No space left on device (os error 28)")

    with monkeypatch.context() as patched:
        patched.setattr(blobs_module.obstore, "put", full)
        with pytest.raises(Unavailable, match="No space left") as caught:
            push(1)
    assert "free some space" in caught.value.hint
    assert catalog.adapters() == []
    assert push(1).created


def test_a_base_model_cannot_change_under_its_adapters(catalog: Catalog, base: BaseModel, push: Push) -> None:
    other = replace(base, modules={**base.modules, "lm_head": (48, 16)})
    catalog.register_base_model(other, actor="me")
    catalog.register_base_model(base, actor="me")
    push(1)
    with pytest.raises(Conflict, match="other layers or shapes"):
        catalog.register_base_model(other, actor="me")
    seq = catalog.change_seq()
    catalog.register_base_model(base, actor="me")
    assert catalog.change_seq() == seq
    catalog.register_base_model(replace(base, revision="abc", aliases=("nick",)), actor="me")
    assert catalog.base_model("tiny-base").revision == "abc"
    assert catalog.base_models()[0].aliases == ("nick",)
    with pytest.raises(NotFound, match="not registered"):
        catalog.base_model("x" * 10_000)


def test_an_adapter_and_a_base_model_never_share_a_name(
    catalog: Catalog, base: BaseModel, make: Callable[..., Path]
) -> None:
    """The base model would answer in the adapter's place."""
    catalog.register_base_model(replace(base, name="smol"), actor="me")
    catalog.register_base_model(replace(base, name="acme/large"), actor="me")
    for taken in ("acme/smol", "acme/large"):
        with pytest.raises(Conflict, match="has the name of this adapter"):
            catalog.publish(make(), AdapterName.parse(taken), base_model=base.name, actor="me")
    catalog.publish(make(), AdapterName.parse("acme/support"), base_model=base.name, actor="me")
    for name in ("support", "acme/support"):
        with pytest.raises(Conflict, match="adapter acme/support has the name of this base model"):
            catalog.register_base_model(replace(base, name=name), actor="me")
    catalog.register_base_model(replace(base, name="other/support"), actor="me")


# --- aliases ----------------------------------------------------------------------------------------------------------


def test_promote_and_roll_back(push: Push, catalog: Catalog, support: AdapterName) -> None:
    for fill in (1, 2, 3):
        push(fill)
    catalog.promote(support, 2, actor="me")
    catalog.promote(support, 3, actor="me")
    catalog.promote(support, 3, actor="me")
    assert catalog.rollback(support, actor="me") == 2
    assert catalog.rollback(support, actor="me") == 1
    with pytest.raises(Conflict, match="no earlier live version"):
        catalog.rollback(support, actor="me")
    history = catalog.alias_history(support, "live")
    assert [(change.action, change.number, change.previous) for change in history] == [
        ("set", 1, None),
        ("set", 2, 1),
        ("set", 3, 2),
        ("rollback", 2, 3),
        ("rollback", 1, 2),
    ]


def test_a_canary(push: Push, catalog: Catalog, support: AdapterName) -> None:
    push(1), push(2)
    catalog.set_canary(support, 2, 0.05, actor="me")
    assert catalog.adapter(support).aliases == {"live": 1, "canary": 2}
    assert catalog.adapter(support).canary_weight == 0.05
    catalog.set_canary(support, None, 0.0, actor="me")
    assert catalog.adapter(support).aliases == {"live": 1}
    catalog.set_canary(support, 2, 1.0, actor="me")
    catalog.promote(support, 2, actor="me")
    info = catalog.adapter(support)
    assert (info.aliases, info.canary_weight, info.live) == ({"live": 2}, 0.0, 2)
    for weight in (-0.1, 1.1, float("nan"), float("inf")):
        with pytest.raises(InvalidInput, match="share of traffic"):
            catalog.set_canary(support, 2, weight, actor="me")
    with pytest.raises(NotFound, match="no version 9"):
        catalog.set_canary(support, 9, 0.1, actor="me")


def test_aliases_of_ones_own(push: Push, catalog: Catalog, support: AdapterName) -> None:
    push(1), push(2)
    catalog.set_alias(support, "stable", 1, actor="me")
    catalog.set_alias(support, "live", 2, actor="me")
    assert catalog.adapter(support).aliases == {"live": 2, "stable": 1}
    catalog.set_canary(support, 1, 0.5, actor="me")
    catalog.remove_alias(support, "canary", actor="me")
    catalog.remove_alias(support, "stable", actor="me")
    assert catalog.adapter(support).aliases == {"live": 2}
    with pytest.raises(NotFound, match="no alias 'stable'"):
        catalog.remove_alias(support, "stable", actor="me")
    with pytest.raises(Conflict, match="needs its alias live"):
        catalog.remove_alias(support, "live", actor="me")
    with pytest.raises(InvalidInput, match="share of traffic"):
        catalog.set_alias(support, "canary", 1, actor="me")
    for name in ("v1", "V", "../x", "", "a" * 64):
        with pytest.raises(InvalidName):
            catalog.set_alias(support, name, 1, actor="me")


# --- retiring ---------------------------------------------------------------------------------------------------------


def test_retiring_a_version(push: Push, catalog: Catalog, support: AdapterName) -> None:
    push(1), push(2)
    with pytest.raises(Conflict, match="pointed at by live"):
        catalog.retire_version(support, 1, actor="me")
    catalog.promote(support, 2, actor="me")
    catalog.retire_version(support, 1, actor="me")
    catalog.retire_version(support, 1, actor="me")
    assert catalog.version(support, 1).state is VersionState.RETIRED
    for call in (catalog.promote, lambda *a, **k: catalog.set_alias(a[0], "x", a[1], **k)):
        with pytest.raises(Conflict, match="is retired"):
            call(support, 1, actor="me")
    with pytest.raises(Conflict, match="no earlier"):
        catalog.rollback(support, actor="me")
    again = push(1)
    assert (again.created, again.version.ref.number) == (True, 3)


def test_removing_an_adapter(push: Push, catalog: Catalog, support: AdapterName) -> None:
    push(1), push(2)
    push(1, OTHER)
    catalog.set_canary(support, 2, 0.5, actor="me")
    catalog.remove(support, actor="me")
    assert [info.name for info in catalog.adapters()] == [OTHER]
    for call in (catalog.versions, catalog.adapter, lambda name: catalog.version(name, 1)):
        with pytest.raises(NotFound):
            call(support)
    with pytest.raises(NotFound):
        catalog.remove(support, actor="me")
    back = push(1)
    assert (back.version.ref.number, back.created, back.became_live) == (3, True, True)
    assert catalog.adapter(support).canary_weight == 0.0
    with pytest.raises(Conflict, match="no earlier"):
        catalog.rollback(support, actor="me")
    assert [version.state for version in catalog.versions(support)] == ["retired", "retired", "ready"]


def test_listing(push: Push, catalog: Catalog, support: AdapterName) -> None:
    push(1), push(2)
    push(1, OTHER)
    infos = catalog.adapters()
    assert [(info.name, info.versions, info.base_model) for info in infos] == [
        (support, 2, "tiny-base"),
        (OTHER, 1, "tiny-base"),
    ]
    assert [info.name for info in catalog.adapters("globex")] == [OTHER]
    assert catalog.adapters("nobody") == []
    with pytest.raises(NotFound, match="no version 7"):
        catalog.version(support, 7)


# --- bytes ------------------------------------------------------------------------------------------------------------


def test_download(push: Push, catalog: Catalog, make: Make, tmp_path: Path) -> None:
    digest = push(1).version.digest
    into = tmp_path / "into"
    into.mkdir()
    catalog.download(digest, into)
    weights = (into / "adapter_model.safetensors").read_bytes()
    assert weights == (make(fill=1) / "adapter_model.safetensors").read_bytes()
    assert read_peft_folder(into, max_bytes=1 << 20).lora_rank == 4
    assert set(catalog.blob_files(digest)) == {"adapter_config.json", "adapter_model.safetensors"}
    with pytest.raises(InvalidName):
        catalog.download("../" + digest, into)
    with pytest.raises(CorruptBlob, match="missing"):
        catalog.download("0" * 64, into)


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
def test_verify_reports_every_fault_and_goes_on(
    push: Push, catalog: Catalog, settings: Settings, support: AdapterName, file: str, tmp_path: Path
) -> None:
    digests = [push(fill).version.digest for fill in (1, 2, 3)]
    push(1, OTHER)
    assert all(result.ok for result in catalog.verify())
    stored = [settings.home / "blobs" / "adapters" / digest / file for digest in digests]
    stored[0].write_bytes(stored[0].read_bytes()[:-1] + b"\x7f")
    stored[1].unlink()
    results = list(catalog.verify())
    assert [result.ok for result in results] == [False, False, True, False]
    assert "have the digest" in results[0].problem
    assert "missing" in results[1].problem
    assert [result.ok for result in catalog.verify(OTHER)] == [False]
    with pytest.raises(CorruptBlob):
        catalog.download(digests[0], tmp_path)
    with pytest.raises(NotFound):
        list(catalog.verify(AdapterName("acme", "absent")))
    stored[0].unlink()
    assert not push(1).created
    assert not push(2).created
    assert all(result.ok for result in catalog.verify())


# --- audit ------------------------------------------------------------------------------------------------------------


def test_every_change_is_on_record(push: Push, catalog: Catalog, support: AdapterName) -> None:
    push(1), push(2)
    catalog.promote(support, 2, actor="tom\n")
    catalog.remove(support, actor="x" * 500)
    entries = catalog.audit()
    assert [entry.action for entry in entries[:5]] == [
        "adapter.remove",
        "version.promote",
        "version.publish",
        "version.promote",
        "version.publish",
    ]
    assert entries[1].actor == "tom\\n"
    assert len(entries[0].actor) <= 200
    assert entries[2].detail["digest"]
    assert len(catalog.audit(limit=2)) == 2
