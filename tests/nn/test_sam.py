from __future__ import annotations

import pytest
import torch
from torch import nn

from moetta.nn.sam import perturbed


def test_the_step_is_rho_long_in_the_joint_direction() -> None:
    parameters = [nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(2, 2))]
    grads = [torch.randn(3), torch.randn(2, 2)]
    start = [p.detach().clone() for p in parameters]
    norm = torch.cat([g.flatten() for g in grads]).norm()
    with perturbed(parameters, grads, 0.05):
        moves = [p.detach() - s for p, s in zip(parameters, start, strict=True)]
        for move, grad in zip(moves, grads, strict=True):
            torch.testing.assert_close(move, 0.05 * grad / norm, atol=1e-6, rtol=1e-4)
        length = torch.cat([m.flatten() for m in moves]).norm()
        assert length.item() == pytest.approx(0.05, rel=1e-4)
    assert all(torch.equal(p, s) for p, s in zip(parameters, start, strict=True))


def test_a_failure_within_restores_too() -> None:
    parameter = nn.Parameter(torch.randn(3))
    start = parameter.detach().clone()
    with pytest.raises(KeyError), perturbed([parameter], [torch.ones(3)], 1.0):
        raise KeyError
    assert torch.equal(parameter, start)


def test_a_zero_gradient_moves_nothing() -> None:
    parameter = nn.Parameter(torch.randn(3))
    start = parameter.detach().clone()
    with perturbed([parameter], [torch.zeros(3)], 0.05):
        assert torch.equal(parameter, start)
