"""What is read from a child's log."""

from __future__ import annotations

from pathlib import Path

import pytest

from manylora.supervisor import child_log


@pytest.mark.parametrize(
    ("line", "meaning"),
    [
        ("INFO 11-30 09:05:12 [core.py:123] Loading weights took 3 s", "Loading weights took 3 s"),
        ("(EngineCore pid=77) INFO 11-30 09:05:12 [kv_cache.py:9] GPU KV cache size: 9", "GPU KV cache size: 9"),
        ("(APIServer pid=1) WARNING 11-30 09:05:12 [a.py:1] Careful now", "Careful now"),
        ("Loading safetensors checkpoint shards:  50%", "Loading safetensors checkpoint shards:  50%"),
        ("█████   ▀▀", ""),
        ("    ^^^^^^", ""),
    ],
)
def test_meaning(line: str, meaning: str) -> None:
    assert child_log.meaning(line) == meaning


def test_the_last_meaningful_line_of_this_life(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    assert child_log.last_meaningful_line(log) == ""
    log.write_text("from an earlier life\n")
    since = log.stat().st_size
    assert child_log.last_meaningful_line(log, since=since) == ""
    with log.open("a") as file:
        file.write("\x1b[32mINFO\x1b[0m 11-30 09:05:12 [core.py:1] Loading\nshards: 1%\rshards: 70%\n---\n")
    assert child_log.last_meaningful_line(log, since=since) == "shards: 70%"


def test_the_tail_is_bounded_and_skips_earlier_lives(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_text("old\n" + "x" * 300_000 + "\n" + "".join(f"line {i}\n" for i in range(50)))
    assert child_log.tail(log, since=4) == [f"line {i}" for i in range(30, 50)]
    assert child_log.tail(log, since=log.stat().st_size) == []


def test_a_large_log_is_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_log, "_KEEP_BYTES", 10)
    log = tmp_path / "engine.log"
    for text in (b"first start, long", b"second"):
        with child_log.open_log(log) as file:
            file.write(text)
    assert (tmp_path / "engine.log.1").read_text() == "first start, long"
    assert log.read_text() == "second"
    assert log.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("ModuleNotFoundError: No module named 'vllm'", "pip install"),
        ("api_server.py: error: unrecognized arguments: --maxx 3", "vllm serve --help"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate", "--max-model-len"),
        ("OSError: [Errno 98] Address already in use", "--port"),
        ("OSError: Can't load the configuration of 'nope'.", "MODEL"),
        ("Segmentation fault", "engine.log"),
    ],
)
def test_hints(line: str, hint: str) -> None:
    assert hint in child_log.hint_for(["Traceback", line], Path("/run/engine.log"))


def test_the_cause_is_the_root_and_not_the_pointer_to_it() -> None:
    lines = [
        "(EngineCore pid=7) ERROR 11-30 09:05:12 [core.py:9] ValueError: max_model_len is too large",
        "(EngineCore pid=7) ERROR 11-30 09:05:12 [core.py:9]",
        "(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above.",
        "goodbye",
    ]
    assert child_log.cause(lines) == "ValueError: max_model_len is too large"
    assert child_log.cause(["api_server.py: error: unrecognized arguments: -x"]).endswith("arguments: -x")
    assert child_log.cause(["torch.OutOfMemoryError: CUDA out of memory"]) != ""
    assert child_log.cause(["nothing of note", "an Error: in prose"]) == ""
