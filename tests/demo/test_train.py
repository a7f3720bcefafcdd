"""The parts of the training that need no PyTorch: batches and the learning rate."""

from __future__ import annotations

import itertools

from manylora.demo.train import Example, batches, schedule

EXAMPLES = [Example(tokens=(number,) * (1 + number % 7), prompt_tokens=1) for number in range(40)]


def test_batches_repeat_from_a_seed() -> None:
    assert list(batches(EXAMPLES, steps=25, size=4, seed=3)) == list(batches(EXAMPLES, steps=25, size=4, seed=3))
    assert list(batches(EXAMPLES, steps=25, size=4, seed=3)) != list(batches(EXAMPLES, steps=25, size=4, seed=4))


def test_one_round_uses_every_example_once() -> None:
    seen = list(itertools.chain.from_iterable(batches(EXAMPLES, steps=10, size=4, seed=0)))
    assert sorted(example.tokens for example in seen) == sorted(example.tokens for example in EXAMPLES)


def test_lengths_in_a_batch_are_alike() -> None:
    for batch in batches(EXAMPLES, steps=10, size=4, seed=0):
        lengths = [len(example.tokens) for example in batch]
        assert max(lengths) - min(lengths) <= 1


def test_learning_rate_rises_then_falls() -> None:
    shares = [schedule(step, 100) for step in range(100)]
    assert shares[0] == 1 / 6
    assert max(shares) == shares[5] == shares[6] == 1.0
    assert shares[6:] == sorted(shares[6:], reverse=True)
    assert 0 < shares[-1] < 0.02
