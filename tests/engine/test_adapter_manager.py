"""What the worker refuses to load, on plain stand-ins for vLLM's records."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")


@pytest.fixture
def check_size() -> Any:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from manylora.engine.adapter_manager import _check_size
    return _check_size


def adapter(a: float, b: float, scaling: float = 2.0) -> Any:
    weights = SimpleNamespace(lora_a=torch.full((8, 4), a), lora_b=torch.full((6, 8), b), scaling=scaling)
    return SimpleNamespace(loras={"model.layers.0.self_attn.q_proj": weights})


@pytest.mark.parametrize(("a", "b"), [(0.3, 0.1), (30.0, 20.0), (0.0, 0.0)])
def test_trained_weights_pass(check_size: Any, a: float, b: float) -> None:
    check_size(adapter(a, b))


@pytest.mark.parametrize(
    ("a", "b", "scaling"), [(3e38, 3e38, 1.0), (1e3, 1e3, 1.0), (1.0, 1.0, 1e6), (float("nan"), 1.0, 1.0)]
)
def test_weights_that_overflow_are_refused_by_module(check_size: Any, a: float, b: float, scaling: float) -> None:
    from manylora.errors import InvalidAdapter

    with pytest.raises(InvalidAdapter, match=r"layers\.0\.self_attn\.q_proj: its weights"):
        check_size(adapter(a, b, scaling))
