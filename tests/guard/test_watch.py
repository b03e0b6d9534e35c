"""From sampled logits to alarms."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moetta.guard.watch import Watch

CLASSES = 10


def traffic(generator: torch.Generator, size: int = 16) -> Tensor:
    """Logits of a model with about three quarters confidence, every class alike."""
    logits = torch.randn(size, CLASSES, generator=generator)
    labels = torch.randint(CLASSES, (size,), generator=generator)
    logits[torch.arange(size), labels] += 4
    return logits


def first_alarm(shift: Tensor, noise: float = 0.0, looks: int = 1000) -> tuple[int, str | None]:
    generator = torch.Generator().manual_seed(3)
    watch = Watch(16, 0.005, 10_000)
    for number in range(looks):
        source = traffic(generator)
        adapted = 1.3 * source + shift + noise * torch.randn(source.shape, generator=generator)
        if name := watch.add(source, adapted):
            return number, name
    return looks, None


def test_an_equal_model_is_never_suspected():
    assert first_alarm(torch.zeros(CLASSES)) == (1000, None)


def test_unbiased_changes_are_not_trouble():
    assert first_alarm(torch.zeros(CLASSES), noise=1.0)[1] is None


def test_one_class_that_draws_predictions_is_found():
    bias = torch.zeros(CLASSES)
    bias[3] = 3.0
    number, name = first_alarm(bias)
    assert name == "concentration"
    assert number < 100


def test_a_collapse_is_found_within_a_few_looks():
    bias = torch.zeros(CLASSES)
    bias[3] = 50.0
    number, name = first_alarm(bias)
    assert name in ("concentration", "overruling")
    assert number < 8


def test_a_model_that_answers_at_random_is_found():
    """Its predictions are diverse and sure, but have nothing to do with the images."""
    generator = torch.Generator().manual_seed(4)
    watch = Watch(16, 0.005, 10_000)
    names = [watch.add(traffic(generator), traffic(generator)) for _ in range(100)]
    assert names.index("overruling") < 6
    assert watch.levels["disagreement"] > 1


def test_copies_of_one_image_hide_nothing():
    """Half of the traffic is one image that both models are sure of; the rest is overruled."""
    poison = 30 * torch.eye(CLASSES)[:1]
    trust = []
    for half in (traffic, lambda generator, size: poison.expand(size, -1)):
        generator = torch.Generator().manual_seed(5)
        watch = Watch(16, 0.005, 10_000)
        for _ in range(6):
            source, other = traffic(generator, 8), traffic(generator, 8)
            rest = half(generator, 8)
            # Logits of copies may differ in their last digits.
            shaken = rest + 1e-6 * torch.randn(rest.shape, generator=generator)
            watch.add(torch.cat((source, rest)), torch.cat((other, shaken)))
        assert watch.levels["overruling"] > 0
        assert watch.overruled is not None
        trust.append(watch.overruled.value)
    usual, poisoned = trust
    assert poisoned < usual + 0.15  # 0.04 and 0.08; 0.28 if every copy counts


def test_what_is_overruled_decides_not_how_often():
    """Both adapted models change one prediction in four: doubtful ones, or any."""
    generator = torch.Generator().manual_seed(9)
    for doubtful in (True, False):
        watch, names = Watch(16, 0.005, 10_000), set()
        for _ in range(300):
            source = traffic(generator)
            confidence = source.softmax(-1).amax(-1)
            order = confidence.argsort() if doubtful else torch.arange(16)
            adapted = source.clone()
            for row in order[:4].tolist():
                first, second = source[row].topk(2).indices
                adapted[row, second] = source[row, first] + 1
            names.add(watch.add(source, adapted))
        assert ("overruling" in names) != doubtful


def test_a_model_that_forgets_all_it_knew_is_found():
    generator = torch.Generator().manual_seed(5)
    names = {}
    for scale in (0.8, 0.2):
        watch = Watch(16, 0.005, 10_000)
        names[scale] = set()
        for _ in range(40):
            source = traffic(generator)
            names[scale].add(watch.add(source, scale * source))
    assert names == {0.8: {None}, 0.2: {None, "entropy"}}


def test_a_burst_of_one_class_is_not_trouble():
    """Both models see it, so it cancels."""
    generator = torch.Generator().manual_seed(6)
    watch = Watch(16, 0.005, 10_000)
    for number in range(400):
        source = traffic(generator)
        if number >= 100:
            source[:, 7] += 8
        assert watch.add(source, 1.2 * source) is None


def test_small_samples_are_pooled_into_looks():
    generator = torch.Generator().manual_seed(7)
    logits = traffic(generator, 40)
    one_by_one, watch = Watch(16, 0.005, 10_000), Watch(16, 0.005, 10_000)
    for row in logits:
        one_by_one.add(row[None], row[None])
    for start in (0, 16, 32):
        watch.add(logits[start : start + 16], logits[start : start + 16])
    assert one_by_one.looks == watch.looks == 2
    assert len(one_by_one.pending) == 8
    assert one_by_one.state().keys() == watch.state().keys()
    for key, value in one_by_one.state().items():
        torch.testing.assert_close(value, watch.state()[key], rtol=0, atol=0)


def test_clearing_keeps_what_is_known_of_the_traffic():
    generator = torch.Generator().manual_seed(8)
    watch = Watch(16, 0.005, 10_000)
    for _ in range(30):
        source = traffic(generator)
        watch.add(source, source + torch.eye(CLASSES)[0] * 9)
    assert not watch.calm
    watch.clear()
    assert watch.calm
    assert watch.looks == 0
    counts = watch.frequencies.counts
    torch.testing.assert_close(counts[0], counts[1])
    assert counts[0].sum() > 0


def test_the_end_of_a_burst_is_seen_at_once():
    """A model that has come to answer with one class only is right during a burst of that class."""
    generator = torch.Generator().manual_seed(10)
    watch = Watch(16, 0.005, 10_000)
    always = torch.zeros(16, CLASSES)
    always[:, 7] = 9
    for _ in range(100):
        source = traffic(generator)
        source[:, 7] += 30
        assert watch.add(source, always) is None
    assert watch.trust == 1
    watch.add(traffic(generator), always)
    assert watch.trust < 0.6
    names = [watch.add(traffic(generator), always) for _ in range(8)]
    assert set(names) & {"concentration", "overruling", "disagreement"}


def confusion(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A source model that takes half of the classes for class 0, and one that knows them all."""
    right = traffic(generator)
    answers = right.argmax(-1)
    taken = (answers >= 5).nonzero()[:, 0]
    source = right.clone()
    source[taken, 0], source[taken, answers[taken]] = right[taken, answers[taken]], right[taken, 0]
    source[taken] *= 0.7  # with some doubt, but less than in a tie
    return source, right


def test_winning_classes_back_is_no_trouble():
    """Answers are overruled that the source model is rather sure of, and diversity is gained."""
    generator = torch.Generator().manual_seed(11)
    watch = Watch(16, 0.005, 10_000)
    for _ in range(200):
        assert watch.add(*confusion(generator)) is None
    assert watch.undoes_confusion
    assert watch.overruled.value < 0.5
    assert watch.trust == 0.5


def test_losing_classes_is_trouble():
    """The same two models, with their parts exchanged."""
    generator = torch.Generator().manual_seed(11)
    watch = Watch(16, 0.005, 10_000)
    names = [watch.add(*reversed(confusion(generator))) for _ in range(8)]
    assert set(names) & {"concentration", "overruling"}
    assert not watch.undoes_confusion


def test_diverse_answers_at_random_are_found_beside_a_confused_source_model():
    generator = torch.Generator().manual_seed(12)
    watch = Watch(16, 0.005, 10_000)
    names = [watch.add(confusion(generator)[0], traffic(generator)) for _ in range(40)]
    assert watch.undoes_confusion
    assert set(names) & {"overruling", "disagreement"}


def narrow_looks(adapt: Callable[[Tensor], Tensor], looks: int = 400) -> set[str | None]:
    """Images of class 3: half of them surely recognised, the others taken for any class."""
    generator = torch.Generator().manual_seed(6)
    watch, names = Watch(16, 0.005, 10_000), set()
    for number in range(looks):
        source = torch.randn(16, CLASSES, generator=generator)
        source[:8, 3] += 6
        names.add(watch.add(source, adapt(source) if number > 20 else source))
    assert watch.narrow
    return names


def test_in_narrow_traffic_more_classes_are_no_excuse():
    """Elsewhere they are evidence for the adapted model, and it may overrule more."""
    generator = torch.Generator().manual_seed(6)
    for few, excused in ((True, False), (False, True)):
        watch = Watch(16, 0.005, 10_000)
        for _ in range(30):
            source = torch.randn(16, CLASSES, generator=generator)
            source[range(8), 3 if few else torch.randint(CLASSES, (8,), generator=generator)] += 8
            adapted = source.clone()
            if few:
                adapted[:, 3] -= 4
            else:
                source[8:, :2] += 2  # in doubt, it drives all into two classes
            watch.add(source, adapted)
        assert watch.undoes_confusion == excused


def test_in_narrow_traffic_it_is_trouble_to_see_more_classes():
    def less_sure_of_three(source: Tensor) -> Tensor:
        adapted = source.clone()
        adapted[:, 3] -= 4
        return adapted

    assert narrow_looks(less_sure_of_three) - {None} <= {"spread", "overruling"}
    assert "spread" in narrow_looks(less_sure_of_three)
