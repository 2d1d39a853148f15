import pytest
import torch

from sparselens.gating.reference import layer_seed, uniform


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
