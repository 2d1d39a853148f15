"""The noise of the gates: bit by bit as written down, and as independent draws would be."""

import pytest
import torch

from sparselens.gating.reference import later_seed, layer_seed, signed, uniform

WORD = 0xFFFFFFFF


def mix(x: int) -> int:
    x = (x ^ x >> 16) * 0x7FEB352D & WORD
    x = (x ^ x >> 15) * 0x846CA68B & WORD
    return x ^ x >> 16


def draw(seed: int, row: int, query: int, key: int) -> float:
    """One number by the formulas of the specification, in Python's own integers. row: batch * n_heads + head."""
    word = mix(mix(seed + 0x9E3779B9 * row & WORD) + query & WORD)
    bits = (word | 1) * mix(key + 0x68E31DA4 & WORD) + mix(word + 0x9E3779B9 & WORD) & WORD
    return ((bits >> 9) + 0.5) / 2**23


@pytest.mark.parametrize("seed", [0, 12345, 2**31, 2**32 - 1])
def test_bit_by_bit(seed):
    found = uniform(seed, 2, 3, 4, 6, "cpu")
    wanted = [
        [[[draw(seed, 3 * b + h, q, k) for k in range(6)] for q in range(2, 6)] for h in range(3)] for b in (0, 1)
    ]
    assert torch.equal(found, torch.tensor(wanted, dtype=torch.float64).float())
    assert torch.equal(uniform(later_seed(seed, 1, 3), 1, 3, 4, 6, "cpu"), found[1:]), "a batch in parts"
    for layer in range(8):  # splitmix64 of seed and layer; of eight, some have every bit that a mask could lose
        z = (seed * 0x9E3779B97F4A7C15 + layer * 0xD1B54A32D192ED03 + 0x9E3779B97F4A7C15) % 2**64
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        assert layer_seed(seed, layer) == (z ^ z >> 31) % 2**32
    assert [signed(word) for word in (2**31 - 1, 2**31, 2**32 - 1, 2**32)] == [2**31 - 1, -(2**31), -1, 0]


def test_uniform_moments_and_independence():
    """Mean, variance, neighbours, 2 x 2 rectangles, heads and seeds: all as independent draws would give."""
    u = uniform(7, 4, 4, 512, 512, "cpu").double()
    centred = (u - 0.5) * 12**0.5
    deviation = u.numel() ** -0.5
    assert u.min() >= 0 and u.max() < 1
    statistics = {
        "mean": centred.mean(),
        "variance": (centred**2 - 1).mean() / 0.9,  # the variance of a uniform's square is 0.8
        "next key": (centred[..., 1:] * centred[..., :-1]).mean(),
        "next query": (centred[..., 1:, :] * centred[..., :-1, :]).mean(),
        "diagonal": (centred[..., 1:, 1:] * centred[..., :-1, :-1]).mean(),
        "rectangle": (
            centred[..., 1:, 1:] * centred[..., :-1, :-1] * centred[..., 1:, :-1] * centred[..., :-1, 1:]
        ).mean(),
        "next head": (centred[:, 1:] * centred[:, :-1]).mean(),
        "next batch": (centred[1:] * centred[:-1]).mean(),
        "next seed": (centred * (uniform(8, 4, 4, 512, 512, "cpu").double() - 0.5) * 12**0.5).mean(),
    }
    far = {name: value.item() / deviation for name, value in statistics.items() if abs(value) > 5 * deviation}
    assert not far, f"standard deviations away from independence: {far}"


def test_uniform_fills_the_interval_evenly():
    counts = torch.histc(uniform(3, 2, 2, 256, 256, "cpu"), bins=64, min=0, max=1)
    expected = counts.sum() / 64
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < 63 + 5 * (2 * 63) ** 0.5


@pytest.mark.parametrize("queries", [1, 5, 16])
def test_a_pair_keeps_its_draw_when_only_the_last_queries_are_computed(queries):
    full = uniform(11, 2, 3, 16, 16, "cpu")
    assert torch.equal(uniform(11, 2, 3, queries, 16, "cpu"), full[:, :, 16 - queries :])


def test_layers_and_seeds_draw_differently():
    seeds = {layer_seed(seed, layer) for seed in range(50) for layer in range(50)}
    assert len(seeds) == 2500
