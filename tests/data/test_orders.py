from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moetta.data import Bursts, Continual, Gradual, LabelShift, Mixed
from moetta.data.orders import ORDERS, make_order, stratified

sizes = st.lists(st.integers(1, 60), min_size=1, max_size=6)
seeds = st.integers(0, 2**32)


def samples(sizes, classes=4):
    domains = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    return domains, torch.arange(len(domains)) * 7 % classes


@given(sizes, seeds, st.sampled_from(list(ORDERS)))
@settings(max_examples=80, deadline=None)
def test_every_order_is_a_permutation_fixed_by_its_seed(sizes, seed, name):
    domains, labels = samples(sizes)
    drawn = make_order(name)(domains, labels, seed)
    assert drawn.sort().values.equal(torch.arange(len(domains)))
    torch.rand(3)  # the global generator has no say
    assert drawn.equal(make_order(name)(domains, labels, seed))


@pytest.mark.parametrize("name", ORDERS)
def test_another_seed_gives_another_order_and_the_global_generator_is_left_alone(name):
    domains, labels = samples([40, 40, 40])
    before = torch.get_rng_state()
    a, b = (make_order(name)(domains, labels, seed) for seed in (1, 2))
    assert not a.equal(b)
    assert torch.get_rng_state().equal(before)


def test_mixed_is_one_uniform_permutation_from_its_own_generator():
    domains, labels = samples([500, 500])
    expected = torch.randperm(1000, generator=torch.Generator().manual_seed(42))
    assert Mixed()(domains, labels, 42).equal(expected)


@given(sizes, seeds)
@settings(max_examples=30, deadline=None)
def test_continual_shows_one_domain_after_another(sizes, seed):
    domains, labels = samples(sizes)
    assert domains[Continual()(domains, labels, seed)].equal(domains)
    assert domains[Gradual(overlap=0)(domains, labels, seed)].equal(domains)


def test_gradual_fades_each_domain_linearly_into_the_next():
    n = 20_000
    domains, labels = samples([n, n, n])
    shown = domains[Gradual(overlap=1)(domains, labels, 0)]
    # Half-way through a domain it is alone; on the border both have one half.
    for at, first, share in [(n, 0, 0.5), (2 * n, 1, 0.5), (3 * n // 2, 1, 1.0)]:
        window = shown[at - 500 : at + 500]
        assert (window == first).float().mean() == pytest.approx(share, abs=0.06)
    quarter = shown[5 * n // 4 - 500 : 5 * n // 4 + 500]  # a quarter of the way past the border
    assert (quarter == 1).float().mean() == pytest.approx(0.75, abs=0.06)
    assert (quarter == 2).sum() == 0
    share = [(shown[i : i + 2000] == 0).float().mean() for i in range(0, 30_000, 2000)]
    assert all(a >= b - 0.05 for a, b in pairwise(share))


def class_imbalance(gamma, window=200):
    domains, labels = samples([5000, 5000], classes=10)
    shown = labels[LabelShift(gamma=gamma)(domains, labels, 3)]
    parts = shown.split(window)
    return sum(p.bincount(minlength=10).max().item() / len(p) for p in parts) / len(parts)


def test_label_shift_grows_as_gamma_falls_and_vanishes_as_it_rises():
    strong, weak, none = (class_imbalance(g) for g in (0.01, 1.0, 1e6))
    assert strong > 0.5 > weak > none
    assert none < 0.16  # the largest of 10 even classes among 200 samples


def test_label_shift_mixes_domains():
    domains, labels = samples([5000, 5000], classes=10)
    shown = domains[LabelShift(gamma=0.1)(domains, labels, 3)]
    assert all(0.3 < w.float().mean() < 0.7 for w in shown.split(500))


def longest_run(shown):
    changes = (shown[1:] != shown[:-1]).nonzero().squeeze(1) + 1
    edges = torch.cat([torch.tensor([0]), changes, torch.tensor([len(shown)])])
    return edges.diff()


def test_bursts_are_runs_of_one_domain_in_a_mixed_stream():
    domains, labels = samples([1000] * 5)
    runs = longest_run(domains[Bursts(length=100, share=0.4)(domains, labels, 0)])
    long = runs[runs >= 100]
    # 20 runs, fewer where two of one domain happen to touch.
    assert 17 <= len(long) <= 20
    assert 2000 <= long.sum() < 2200
    assert longest_run(domains[Bursts(share=0)(domains, labels, 0)]).max() < 15


@given(sizes, seeds, st.data())
@settings(max_examples=100, deadline=None)
def test_stratified_subset_keeps_every_proportion_within_one(sizes, seed, data):
    domains, labels = samples(sizes)
    n = len(domains)
    limit = data.draw(st.integers(1, n))
    chosen = stratified(domains, labels, limit, seed)
    assert len(chosen) == limit == len(chosen.unique())
    both = domains * 4 + labels
    for strata in (domains, both):
        whole = strata.bincount().double() * limit / n
        part = strata[chosen].bincount(minlength=len(whole)).double()
        assert ((part - whole).abs() < 1 + 1e-9).all()


def test_stratified_subset_is_drawn_by_the_seed_and_reaches_every_sample():
    domains, labels = samples([30, 30])
    draws = [stratified(domains, labels, 6, seed) for seed in range(200)]
    assert draws[0].equal(stratified(domains, labels, 6, 0))
    counts = torch.cat(draws).bincount(minlength=60).float()
    assert counts.min() > 5  # 20 expected
    assert counts.max() < 45
    with pytest.raises(ValueError, match="at least 1"):
        stratified(domains, labels, 0, 0)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: make_order("gradul"), "gradual"),
        (lambda: make_order("gradual", speed=1), "overlap"),
        (lambda: Gradual(overlap=2), "between 0 and 1"),
        (lambda: LabelShift(gamma=0), "above 0, got 0"),
        (lambda: LabelShift(slots=-1), "slots"),
        (lambda: Bursts(length=0), "at least 1"),
        (lambda: Bursts(share=1.5), "between 0 and 1"),
    ],
)
def test_wrong_orders_are_refused(make, says):
    with pytest.raises(ValueError, match=says):
        make()
