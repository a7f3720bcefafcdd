from __future__ import annotations

import json
import math
import re
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manylora.errors import InvalidAdapter
from manylora.peft_config import canonical_config, match_pattern
from manylora.registry.peft_config import MAX_LORA_RANK, PeftConfig, parse_config

Q = "model.layers.0.self_attn.q_proj"
UNSET_BY_DEFAULT = [
    "alora_invocation_tokens",
    "arrow_config",
    "auto_mapping",
    "corda_config",
    "eva_config",
    "exclude_modules",
    "kasa_config",
    "layer_replication",
    "layers_pattern",
    "layers_to_transform",
    "lora_ga_config",
    "megatron_config",
    "modules_to_save",
    "monteclora_config",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "velora_config",
    "revision",
]


def parse(**fields: Any) -> PeftConfig:
    return parse_config({"peft_type": "LORA", "r": 4, "lora_alpha": 8, **fields})


def test_a_plain_config() -> None:
    config = parse(base_model_name_or_path="org/base", target_modules=["q_proj"])
    assert (config.lora_rank, config.lora_alpha, config.base_model) == (4, 8.0, "org/base")
    assert config.scaling_of(Q) == 2.0
    assert config.warnings == ()


@pytest.mark.parametrize("task", [None, "CAUSAL_LM", "FEATURE_EXTRACTION"])
def test_tasks_to_which_peft_adds_nothing_but_lora(task: str | None) -> None:
    assert parse(task_type=task).warnings == ()


@pytest.mark.parametrize(
    ("task", "remedy"),
    [
        ("SEQ_CLS", "classification head"),
        ("TOKEN_CLS", "classification head"),
        ("QUESTION_ANS", "span head"),
        ("SEQ_2_SEQ_LM", "encoder-decoder"),
        ("causal_lm", "give null or one of CAUSAL_LM, FEATURE_EXTRACTION"),
        ("", "give null or one of"),
        (["SEQ_CLS"], "give null or one of"),
        (7, "give null or one of"),
    ],
)
def test_other_tasks_are_refused(task: object, remedy: str) -> None:
    with pytest.raises(InvalidAdapter, match="task_type is ") as caught:
        parse(task_type=task, modules_to_save=["score"])
    assert remedy in caught.value.hint


def test_everything_that_peft_writes_by_default_is_known() -> None:
    unset = dict.fromkeys(UNSET_BY_DEFAULT)
    config = parse(
        **unset,
        bias="none",
        ensure_weight_tying=False,
        fan_in_fan_out=False,
        inference_mode=True,
        init_lora_weights=True,
        loftq_config={},
        lora_bias=False,
        lora_dropout=0.05,
        megatron_core="megatron.core",
        peft_version="0.21.2",
        qalora_group_size=16,
        rank_pattern={},
        alpha_pattern={},
        target_modules="all-linear",
        task_type="CAUSAL_LM",
        use_dora=False,
        use_qalora=False,
        use_rslora=False,
    )
    assert config.warnings == ()


def test_rslora_scales_by_the_root_of_the_modules_own_rank() -> None:
    config = parse(use_rslora=True, rank_pattern={"q_proj": 16}, alpha_pattern={"q_proj": 32})
    assert config.scaling_of(Q) == 32 / math.sqrt(16)
    assert config.scaling_of("model.layers.0.self_attn.v_proj") == 8 / math.sqrt(4)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("peft_type", "IA3", "only LORA"),
        ("peft_type", None, "only LORA"),
        ("use_dora", True, "DoRA"),
        ("lora_bias", True, "biases inside"),
        ("bias", "all", "bias='none'"),
        ("bias", "lora_only", "bias='none'"),
        ("bias", 3, "bias='none'"),
        ("modules_to_save", ["lm_head"], "whole modules"),
        ("fan_in_fan_out", True, "transposed"),
        ("layer_replication", [[0, 4]], "repeated layers"),
        ("alora_invocation_tokens", [1], "aLoRA"),
        ("use_qalora", True, "QALoRA"),
        ("use_bdlora", {"nblocks": 2}, "BD-LoRA"),
        ("trainable_token_indices", [1], "trained token"),
        ("target_parameters", ["w"], "bare parameters"),
        ("megatron_config", {"a": 1}, "Megatron"),
        ("ensure_weight_tying", True, "tied"),
        ("init_lora_weights", "pissa", "base model's weights"),
        ("init_lora_weights", "olora", "base model's weights"),
        ("init_lora_weights", 3, "base model's weights"),
        ("r", 0, "rank"),
        ("r", -1, "rank"),
        ("r", MAX_LORA_RANK + 1, "rank"),
        ("r", 4.0, "rank"),
        ("r", True, "rank"),
        ("r", None, "rank"),
        ("r", "4", "rank"),
        ("lora_alpha", None, "alpha"),
        ("lora_alpha", 0, "alpha"),
        ("lora_alpha", -1, "alpha"),
        ("lora_alpha", 1e9, "alpha"),
        ("lora_alpha", True, "alpha"),
        ("lora_alpha", "16", "alpha"),
        ("rank_pattern", ["q_proj"], "map"),
        ("rank_pattern", {"q_proj": 0}, "rank"),
        ("rank_pattern", {"q_proj(": 4}, "regular expression"),
        ("rank_pattern", {"(a+)+": 4}, "plain module names"),
        ("rank_pattern", {"(a|aa)(a|aa)(a|aa)": 4}, "plain module names"),
        ("rank_pattern", {r"(.)\1": 4}, "plain module names"),
        ("rank_pattern", {"a?a?a?": 4}, "plain module names"),
        ("rank_pattern", {"(?=a)b": 4}, "plain module names"),
        ("rank_pattern", {"x" * 600: 4}, "plain module names"),
        ("rank_pattern", {f"a{i}*": 4 for i in range(100)}, "regular expressions"),
        ("alpha_pattern", {"q_proj": None}, "alpha"),
        ("alpha_pattern", {"q_proj": 0}, "alpha"),
        ("use_rslora", "yes", "true or false"),
        ("base_model_name_or_path", 3, "text"),
        ("revision", ["x"], "text"),
        ("target_modules", [1], "list of names"),
        ("target_modules", {"a": 1}, "list of names"),
        ("layers_to_transform", "x", "layer numbers"),
        ("layers_to_transform", [True], "layer numbers"),
        ("layers_to_transform", [-1], "layer numbers"),
    ],
)
def test_refuses(field: str, value: Any, words: str) -> None:
    with pytest.raises(InvalidAdapter, match=words) as caught:
        parse(**{field: value})
    assert field in caught.value.message
    assert caught.value.hint
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("init", [True, False, None, "gaussian", "eva", "orthogonal", "EVA"])
def test_initialisations_that_leave_the_base_alone(init: object) -> None:
    parse(init_lora_weights=init)


def test_an_unknown_field_is_a_warning_only_where_it_is_set() -> None:
    assert parse(novel=None, other=False, third=[]).warnings == ()
    (warning,) = parse(a1=1, b2="x", c3=True, d4=1).warnings
    assert "a1, b2, c3 and 1 more" in warning


@pytest.mark.parametrize(
    ("key", "module", "matches"),
    [
        ("q_proj", Q, True),
        ("self_attn.q_proj", Q, True),
        ("proj", Q, False),
        (Q, Q, True),
        ("layers.0.self_attn.q_proj", Q, True),
        ("layers.1.self_attn.q_proj", Q, False),
        (r".*\.0\.self_attn\.(q|v)_proj", Q, True),
        (r"layers\.[0-3]\.self_attn\.q_proj", Q, True),
        (r"model\.layers\.\d+\.self_attn\.q_proj", Q, True),
        (r"(?:q|k)_proj", Q, True),
        (r"\d{1,2}\.self_attn\.q_proj", Q, True),
    ],
)
def test_patterns_match_as_in_peft(key: str, module: str, matches: bool) -> None:
    config = parse(rank_pattern={key: 16})
    assert config.rank_of(module) == (16 if matches else 4)
    assert bool(re.match(rf"(.*\.)?({key})$", module)) is matches


@given(
    key=st.from_regex(r"[a-z0-9_.]{1,12}", fullmatch=True),
    module=st.from_regex(r"[a-z0-9_]{1,5}(\.[a-z0-9_]{1,5}){0,3}", fullmatch=True),
)
def test_the_short_cut_for_plain_names_changes_nothing(key: str, module: str) -> None:
    assert (match_pattern({key: 1}, module) is not None) == bool(re.match(rf"(.*\.)?({key})$", module))


@given(key=st.text(alphabet="a.*+?()[]{}|\\1^$", max_size=24))
def test_no_accepted_pattern_takes_long(key: str) -> None:
    try:
        config = parse(rank_pattern={key: 16})
    except InvalidAdapter:
        return
    begin = time.process_time()
    config.rank_of("a" * 60 + "." + "a" * 60 + "!")
    assert time.process_time() - begin < 0.5


def test_the_canonical_form_does_not_depend_on_order() -> None:
    one = {"r": 4, "target_modules": ["v_proj", "q_proj"], "peft_type": "LORA"}
    other = {"peft_type": "LORA", "target_modules": ["q_proj", "v_proj"], "r": 4}
    assert canonical_config(one) == canonical_config(other)
    assert canonical_config(one) == b'{"peft_type":"LORA","r":4,"target_modules":["q_proj","v_proj"]}'
    assert json.loads(canonical_config({"a": "ü"})) == {"a": "ü"}
