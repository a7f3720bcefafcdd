"""The frame around the acts: what is missing is said at once, and the exit code is the verdict's."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import socket
from pathlib import Path

import pytest
from rich.console import Console

from manylora.demo import asks, base_model, run
from manylora.demo.asks import Check
from manylora.demo.client import Answer
from manylora.demo.reference import ReferenceAnswer
from manylora.demo.run import _cancelled_by_sigterm, _Play, _settings
from manylora.demo.server import ServerEnded
from manylora.demo.transcript import Transcript
from manylora.errors import NotFound, Unavailable
from manylora.registry.catalog import Catalog


def play(home: Path, adapters: Path) -> tuple[_Play, io.StringIO]:
    file = io.StringIO()
    return _Play(Transcript(Console(file=file, width=200)), home, home / "models", adapters, (), keep=False), file


def test_a_missing_package_is_named_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run.launch, "require_engine", lambda: "0.32.0")
    monkeypatch.setattr(run.importlib.util, "find_spec", lambda name: None if name == "peft" else object())
    with pytest.raises(Unavailable, match="needs the package peft"):
        run.run(keep=False, home=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_adapters_come_from_the_source_tree() -> None:
    assert run.find_adapters().parts[-2:] == ("examples", "adapters")


def test_absent_adapters_are_not_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(run, "__file__", str(tmp_path / "a" / "b" / "c" / "run.py"))
    with pytest.raises(NotFound, match="not installed"):
        run.find_adapters()


def test_another_port_where_the_usual_one_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind((run.HOST, 0))
        taken.listen()
        monkeypatch.setattr(run, "PREFERRED_PORT", taken.getsockname()[1])
        settings = _settings(tmp_path)
        assert settings.port not in (0, taken.getsockname()[1])
    assert settings.home == tmp_path and settings.host == run.HOST


def test_the_registry_is_filled(tmp_path: Path) -> None:
    base = tmp_path / base_model.FOLDER
    base.mkdir()
    config = '{"architectures": ["LlamaForCausalLM"], "head_dim": 64, "hidden_size": 576, "intermediate_size": 1536,'
    config += '"model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3,'
    (base / "config.json").write_text(config + '"tie_word_embeddings": true, "vocab_size": 49152}')
    the_play, file = play(tmp_path, run.find_adapters())
    with Catalog.open(_settings(tmp_path)) as catalog:
        key = the_play._fill(catalog, base)
        principal = catalog.authenticate(key)
        assert principal is not None and principal.tenant == asks.TENANT and not principal.is_admin
        assert {info.name.name: info.live for info in catalog.adapters()} == dict.fromkeys(asks.FIRST_FIVE, 1)
    assert "pushed acme/json@v1: rank 16, 1.05 MB" in file.getvalue()


@pytest.mark.parametrize(("token", "status", "part"), [(5, 0, "1 of 1 answers"), (6, 1, "0 of 1 answers")])
def test_the_verdict_is_the_exit_code(tmp_path: Path, token: int, status: int, part: str) -> None:
    check = Check.of([ReferenceAnswer((5,), "five") for _ in asks.reference_asks(tmp_path)])
    check.same(asks.LONG, Answer("?", [token], [0.1]), end_token=2)
    the_play, file = play(tmp_path, tmp_path)
    assert the_play._verdict(check) == status
    assert part in file.getvalue()
    assert ("differs from the base model" in file.getvalue()) == bool(status)


def test_sigterm_ends_the_play_in_order() -> None:
    ended = []

    async def playing() -> None:
        with _cancelled_by_sigterm():
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                await asyncio.sleep(10)
            finally:
                ended.append("cleaned up")

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(playing())
    assert ended == ["cleaned up"]


def test_a_failed_start_shows_its_lines_and_keeps_its_logs(tmp_path: Path) -> None:
    folder, home = tmp_path / "run-of-the-demo", tmp_path / "home"
    (folder / "run").mkdir(parents=True)
    (folder / "serve.log").write_text("s")
    (folder / "run" / "engine.log").write_text("e")
    the_play, file = play(folder, tmp_path)
    ended = ServerEnded("it ended", f"the whole log is in {folder / 'run' / 'engine.log'}", ["  one [x]", "two"])
    told = run._told(the_play.out, ended, folder, home)
    assert file.getvalue() == "  one [x]\n  two\n"
    assert (told.message, told.hint) == ("it ended", f"the whole log is in {home / 'demo-logs' / 'engine.log'}")
    assert (home / "demo-logs" / "engine.log").read_text() == "e"
    other = run._told(the_play.out, ServerEnded("it ended", "do this", []), folder, home)
    assert other.hint == f"do this; its logs are kept in {home / 'demo-logs'}"
