from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import moetta
from helpers.models import images, small_vit
from moetta.methods.gain import ClassMeansHead, GAINConfig, follow


def two_classes() -> ClassMeansHead:
    """One feature, class rows +1 and -1, nothing seen yet."""
    linear = nn.Linear(1, 2, bias=False)
    with torch.no_grad():
        linear.weight.copy_(torch.tensor([[1.0], [-1.0]]))
    head = ClassMeansHead(linear, GAINConfig(normalise=False))
    for name, value in head.nothing_seen().items():
        setattr(head, name, value)
    return head


def test_the_worked_example() -> None:
    head, phi = two_classes(), torch.tensor([[0.5]])
    source = torch.tensor([[0.6, 0.4]]).log()
    sure, unsure = head.believed().proposals(phi)
    assert sure.exp()[0, 0].item() == pytest.approx(0.731059, abs=1e-5)
    assert unsure.exp()[0, 0].item() == pytest.approx(0.679179, abs=1e-5)
    gain = (unsure.exp() * (sure - source)).sum().item()
    assert gain == pytest.approx(0.006824, abs=1e-5)
    share = follow(source, sure, unsure)
    assert share.item() == pytest.approx(0.579503, abs=1e-4)
    answer = (source + share[:, None] * (sure - source)).log_softmax(-1)
    assert answer.exp()[0, 0].item() == pytest.approx(0.679179, abs=1e-4)
    for name, value in head.counted(phi, source, answer).items():
        setattr(head, name, value)
    believed = head.believed()
    assert believed.means.flatten().tolist() == pytest.approx([0.940204, -0.909557], abs=1e-4)
    assert believed.log_prior.exp().tolist() == pytest.approx([0.465113, 0.534887], abs=1e-4)


def test_no_gain_follows_nothing_and_a_sure_gain_goes_all_the_way() -> None:
    source, sure = torch.tensor([[0.6, 0.4]]).log(), torch.tensor([[0.9, 0.1]]).log()
    assert follow(source, sure, source).item() == 0  # nothing expected beyond the source's own
    assert follow(source, sure, sure).item() == 1


def straight(z: Tensor, phi: Tensor, rows: Tensor, state: dict[str, Tensor], first: bool) -> Tensor:
    """One batch of the definition in float64, sample by sample; changes the state."""
    k0, classes = 3.0, len(rows)
    s = z.double().softmax(1)
    n = state["n"]
    kap, khat = k0 + n, k0 + state["claims"]
    m = (k0 * rows + state["U"]) / (k0 + n)[:, None]
    some = n > 0
    nu = (n[some] - state["Q"][some] / n[some]).sum()
    scatter = (state["V"][some] - state["U"][some] ** 2 / n[some, None]).sum(0)
    v = (k0 + scatter) / (k0 + nu)
    pi = kap / khat**2
    pi = pi / pi.sum()
    answers = []
    for i in range(len(s)):
        p = s[i]
        if not first:
            d = ((phi[i] - m) ** 2 / v).sum(1)
            hat = (pi.log() - d / 2).softmax(0)
            hh = 1 + 1 / kap
            bar = (pi.log() - rows.shape[1] / 2 * hh.log() - d / (2 * hh)).softmax(0)
            xi = hat.log() - s[i].log()
            target = float(bar @ xi)
            low, high = 0.0, 1.0
            for _ in range(60):
                lam = (low + high) / 2
                p = (s[i].log() + lam * xi).softmax(0)
                low, high = (lam, high) if float(p @ xi) < target else (low, lam)
            if target <= float(s[i] @ xi):
                p = s[i]
            elif target >= float(hat @ xi):
                p = hat
        answers.append(p)
    assert classes == z.shape[1]
    p = torch.stack(answers)
    w = s.gather(1, p.argmax(1, keepdim=True)) * p
    state["n"] = n + w.sum(0)
    state["claims"] = state["claims"] + p.sum(0)
    state["U"] = state["U"] + w.T @ phi
    state["V"] = state["V"] + w.T @ phi**2
    state["Q"] = state["Q"] + (w**2).sum(0)
    return p


@pytest.mark.parametrize("normalise", [True, False])
def test_several_batches_agree_with_the_definition(normalise: bool) -> None:
    plain = small_vit().eval()
    heard: list[Tensor] = []
    assert isinstance(plain.head, nn.Linear)
    plain.head.register_forward_pre_hook(lambda _, inputs: heard.append(inputs[0].detach()))

    def unit(vectors: Tensor) -> Tensor:
        return vectors / vectors.norm(dim=1, keepdim=True) if normalise else vectors

    rows = unit(plain.head.weight.detach().double())
    zero, wide = torch.zeros(len(rows)).double(), torch.zeros_like(rows)
    state = {"n": zero, "claims": zero, "U": wide, "V": wide, "Q": zero}
    adapter = moetta.adapt(small_vit(), "gain", normalise=normalise)
    for seed, size in enumerate((8, 8, 1, 5)):
        x = images(size, seed)
        with torch.no_grad():
            z = plain(x)
        expected = straight(z, unit(heard[-1].double()), rows, state, first=seed == 0)
        torch.testing.assert_close(adapter(x).exp().double(), expected, rtol=1e-3, atol=1e-4)
        assert adapter.last is not None
        assert (adapter.last.forwards, adapter.last.backwards) == (size, 0)
    torch.testing.assert_close(
        adapter.state_dict()["running.mass"].double(), state["n"], rtol=1e-3, atol=1e-4
    )


def test_a_class_that_is_never_predicted_does_no_harm() -> None:
    model = small_vit()
    assert isinstance(model.head, nn.Linear)
    with torch.no_grad():
        model.head.bias[0] = -1e4
    adapter = moetta.adapt(model, "gain")
    for seed in range(3):
        answer = adapter(images(4, seed))
        assert not answer.isnan().any()
    assert math.isfinite(float(adapter.state_dict()["running.mass"].sum()))
