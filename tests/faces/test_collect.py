"""What one pass keeps, against the same counted one by one."""

from itertools import pairwise

import pytest
import torch

from sparselens.faces.collect import BANDS, BINS, LOWEST, Collector, half_octave

CPU = torch.device("cpu")


def activations(sequences=14, tokens=9, n_features=5, seed=0):
    """About a third active, sizes over several octaves, growing with the text so that bands have to move."""
    generator = torch.Generator().manual_seed(seed)
    shape = (sequences, tokens, n_features)
    size = torch.rand(shape, generator=generator) * 4 ** (4 * torch.rand(shape, generator=generator) - 2)
    size = size * (1 + torch.arange(sequences))[:, None, None]
    size[:, :, -1] = 0  # one that never fires
    return size * (torch.rand(shape, generator=generator) < 0.35)


def collected(a, batch=3, contexts=4, samples=2, **options):
    made = Collector(1, a.shape[-1], contexts, samples, 2, 1, CPU, **options)
    for first in range(0, len(a), batch):
        made.add(0, a[first : first + batch], first)
    return made


def test_counts_and_histogram():
    a = activations()
    kept = collected(a).layers[0]
    for f in range(a.shape[-1]):
        values = a[..., f][a[..., f] > 0]
        assert int(kept.fires[f]) == len(values)
        assert float(kept.total[f]) == pytest.approx(float(values.double().sum()))
        assert float(kept.peak[f]) == (float(values.max()) if len(values) else 0)
        edges = [2 ** ((i + LOWEST) / 2) for i in range(BINS + 1)]
        counted = [int(((values >= lo) & (values < hi)).sum()) for lo, hi in pairwise(edges)]
        assert kept.histogram[f].tolist() == counted


def test_the_histogram_ends_where_activations_may_go_on():
    a = torch.tensor([2.0**-30, 2.0**-12, 2.0**19.5, 2.0**19.4, 2.0**30]).view(1, -1, 1)
    counted = collected(a).layers[0].histogram[0]
    assert counted[[0, BINS - 2, BINS - 1]].tolist() == [2, 1, 2] and int(counted.sum()) == 5


@pytest.mark.parametrize("batch", [1, 3, 14])
def test_top_contexts_are_the_strongest_of_each_sequence(batch):
    check_top_contexts(activations(), batch)


def test_weak_features_have_contexts_too():
    check_top_contexts(activations() * 1e-3, 3)


def check_top_contexts(a, batch):
    kept = collected(a, batch).layers[0]
    for f in range(a.shape[-1]):
        peaks = [(float(row[:, f].max()), i) for i, row in enumerate(a) if float(row[:, f].max()) > 0]
        wanted = sorted(peaks, reverse=True)[:4]
        n = len(wanted)
        assert kept.top_value[f, :n].tolist() == [value for value, _ in wanted]
        assert kept.top_sequence[f].tolist() == [i for _, i in wanted] + [-1] * (4 - n)
        for slot, (value, sequence) in enumerate(wanted):
            position = int(kept.top_position[f, slot])
            assert float(a[sequence, position, f]) == value
            for offset, found in zip((-2, -1, 0, 1), kept.top_window[f, slot].tolist(), strict=True):
                inside = 0 <= position + offset < a.shape[1]
                true = float(a[sequence, position + offset, f]) if inside else 0.0
                assert found == pytest.approx(true, rel=1e-3, abs=1e-7)


def test_samples_stand_in_their_bands_and_are_true():
    a = activations(sequences=40)
    kept = collected(a, samples=3).layers[0]
    assert int((kept.low_sequence[:-1] >= 0).sum()) > 30 and bool((kept.low_sequence[-1] < 0).all())
    for f in range(a.shape[-1]):
        top = half_octave(kept.peak[f : f + 1])
        for slot in (kept.low_sequence[f] >= 0).nonzero()[:, 0].tolist():
            place = int(kept.low_sequence[f, slot]), int(kept.low_position[f, slot])
            value = kept.low_value[f, slot]
            assert float(a[(*place, f)]) == float(value) == pytest.approx(float(kept.low_window[f, slot, 2]), rel=1e-3)
            band = int((top - half_octave(value[None])).clamp(0, BANDS - 1))
            assert band == slot // 3, "a sample of another band"


def test_a_band_is_sampled_evenly():
    """Early and late activations of one band are as likely to be kept."""
    a = torch.full((60, 1, 1), 1.0)
    first = [int(collected(a, batch=7, samples=1, seed=seed).layers[0].low_sequence[0, 0]) for seed in range(300)]
    late = sum(i >= 30 for i in first)
    assert 110 < late < 190 and len(set(first)) > 50


@pytest.mark.parametrize("samples", [1, 3])
def test_samples_are_those_of_a_pass_that_knew_the_largest_from_the_start(samples):
    """When the largest grows, what was kept moves down; what falls out below stays in the lowest band."""
    a = activations(sequences=40)
    a[-1, 0, 0] = 1000 * a[..., 0].max()  # all that one had shown before is now low
    found, wanted = (Collector(1, a.shape[-1], 4, samples, 2, 1, CPU) for _ in range(2))
    wanted.layers[0].peak = a.amax((0, 1))
    for made in (found, wanted):
        for first in range(0, len(a), 3):
            made.add(0, a[first : first + 3], first)
    for name, value in wanted.tensors().items():
        if "low" in name or "lot" in name:
            filled = (wanted.layers[0].low_sequence >= 0).view(
                *wanted.layers[0].low_sequence.shape, *[1] * (value.ndim - 2)
            )
            assert torch.equal(value * filled, found.tensors()[name] * filled), name
    assert torch.equal(found.layers[0].low_sequence, wanted.layers[0].low_sequence)
    assert (found.layers[0].low_sequence[0, (BANDS - 1) * samples :] >= 0).all()


@pytest.mark.parametrize(
    "octaves, kept", [(0, [0, 1, 2, 3, 4]), (1, [None, 0, 1, 2, 3]), (2, [None, None, 0, 1, 2]), (9, [None] * 4 + [0])]
)
def test_bands_move_down_by_half_octaves(octaves, kept):
    """The lots say which of several stays in the lowest band: here always the uppermost."""
    made = Collector(1, 1, 1, 1, 2, 1, CPU)
    one = made.layers[0]
    one.peak, one.lot = torch.tensor([1.0]), torch.tensor([[0.9, 0.8, 0.7, 0.6, 0.5]])
    one.low_sequence = torch.arange(10, 15, dtype=torch.int32)[None]
    made._move_bands(one, torch.tensor([1.01 * 2 ** (octaves / 2)]))
    assert one.low_sequence[0].tolist() == [-1 if band is None else 10 + band for band in kept]
    assert one.lot[0].tolist() == pytest.approx([-1 if band is None else 0.9 - band / 10 for band in kept])


@pytest.mark.parametrize("octaves", [1, 2, 3])
def test_a_sample_moves_once(octaves):
    """Into its own new band, not into the lowest as well where that is empty."""
    made = Collector(1, 1, 1, 2, 2, 1, CPU)
    one = made.layers[0]
    one.peak, one.lot[0, 0], one.low_sequence[0, 0] = torch.tensor([1.0]), 0.3, 7
    made._move_bands(one, torch.tensor([1.01 * 2 ** (octaves / 2)]))
    wanted = [-1] * (2 * BANDS)
    wanted[2 * octaves] = 7
    assert one.low_sequence[0].tolist() == wanted


def test_states_can_be_put_back():
    a = activations()
    whole, half = collected(a), collected(a[:6])
    other = Collector(1, a.shape[-1], 4, 2, 2, 1, CPU)
    other.put_back(half.tensors())
    for first in range(6, len(a), 3):
        other.add(0, a[first : first + 3], first)
    for name, value in whole.tensors().items():
        assert torch.equal(value, other.tensors()[name]), name
