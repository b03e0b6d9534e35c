"""The meta-gradient generator: a learned update rule, one tiny cell for every trained number.

Each trained number has its own cell, a linear layer (8 x 8 and a bias) that learns while it works:
before each answer it takes one gradient step towards reconstructing one view of its input from
another. Everything else is shared and fixed: 164 numbers, under the same keys in the authors'
checkpoints and ours.
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

from moetta.files import read_safetensors, write_atomically

FORMAT = "moetta-mgg"
_PREFIX = "seq_modeling_block."
_EPS = 1e-6
WIDTH = 8

_SHAPES: dict[str, tuple[int, ...]] = {
    "learnable_token_idx": (1,),
    "learnable_ttt_lr_weight": (1, 1, 2),
    "learnable_ttt_lr_bias": (1, 1),
    "ttt_norm_weight": (1, WIDTH),
    "ttt_norm_bias": (1, WIDTH),
    "W1": (1, WIDTH, WIDTH),
    "b1": (1, 1, WIDTH),
    "q_proj.weight": (WIDTH, 2),
    "k_proj.weight": (WIDTH, 2),
    "v_proj.weight": (WIDTH, 2),
    "o_proj.weight": (1, WIDTH),
    "post_norm.weight": (WIDTH,),
    "post_norm.bias": (WIDTH,),
}


class MGG(nn.Module):
    """The generator's shared numbers, under the keys of the authors' checkpoints.

    It starts at random: linear layers as in torch, W1 and the inner rate's weights N(0, 0.02),
    scales one, all else zero.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.q_proj = nn.Linear(2, WIDTH, bias=False)
        self.k_proj = nn.Linear(2, WIDTH, bias=False)
        self.v_proj = nn.Linear(2, WIDTH, bias=False)
        self.o_proj = nn.Linear(WIDTH, 1, bias=False)
        for linear in (self.q_proj, self.k_proj, self.v_proj, self.o_proj):
            bound = linear.in_features**-0.5
            nn.init.uniform_(linear.weight, -bound, bound, generator=generator)
        self.post_norm = nn.LayerNorm(WIDTH, eps=_EPS)
        self.W1 = nn.Parameter(0.02 * torch.randn(1, WIDTH, WIDTH, generator=generator))
        self.b1 = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.ttt_norm_weight = nn.Parameter(torch.ones(1, WIDTH))
        self.ttt_norm_bias = nn.Parameter(torch.zeros(1, WIDTH))
        self.learnable_ttt_lr_weight = nn.Parameter(
            0.02 * torch.randn(1, 1, 2, generator=generator)
        )
        self.learnable_ttt_lr_bias = nn.Parameter(torch.zeros(1, 1))
        self.learnable_token_idx = nn.Parameter(torch.zeros(1))

    def start(self, count: int) -> tuple[Tensor, Tensor]:
        """Fresh fast weights [count, 8, 8] and biases [count, 8]."""
        return self.W1.expand(count, -1, -1), self.b1[0].expand(count, -1)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One step of every cell.

        Args:
            x: [N, 2]: each number's averaged and current gradient, both scaled.
            weight: fast weights [N, 8, 8].
            bias: fast biases [N, 8].

        Returns:
            The direction u in (-1, 1) [N], to be stepped against, and the new fast weights.
        """
        gamma, beta = self.ttt_norm_weight, self.ttt_norm_bias
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        rate = torch.sigmoid(
            F.linear(x, self.learnable_ttt_lr_weight[0], self.learnable_ttt_lr_bias[0])
        )
        rate = rate / WIDTH * (1 + self.learnable_token_idx).clamp(min=0)
        # The gradient, by z, of |gamma h + beta - (v - k)|^2 / 2, where h is z normalised.
        z = torch.einsum("ni,nij->nj", k, weight) + bias
        var, mean = torch.var_mean(z, -1, correction=0, keepdim=True)
        scale = torch.rsqrt(var + _EPS)
        h = (z - mean) * scale
        e = (gamma * h + beta - (v - k)) * gamma
        grad = (e - e.mean(-1, keepdim=True) - h * (e * h).mean(-1, keepdim=True)) * scale
        step = rate * grad
        weight = weight - k[:, :, None] * step[:, None, :]
        bias = bias - step
        # The answer comes from the weights after that step.
        answer = torch.einsum("ni,nij->nj", q, weight) + bias
        o = q + F.layer_norm(answer, (WIDTH,), gamma[0], beta[0], _EPS)
        return torch.tanh(self.o_proj(self.post_norm(o))).squeeze(-1), weight, bias

    def save(self, path: str | PathLike[str]) -> None:
        """Write it as safetensors, atomically."""
        _write(path, self.state_dict())


def load_mgg(path: str | PathLike[str]) -> MGG:
    """Read a generator: safetensors, or the authors' ``.pth``.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it holds something else; the message says what differs.
    """
    mgg = MGG()
    mgg.load_state_dict(_read(path))
    return mgg.requires_grad_(False)


def convert(checkpoint: str | PathLike[str], out: str | PathLike[str]) -> None:
    """Turn the authors' checkpoint (``mgg_ckpt.pth``) into safetensors.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it holds something else; the message says what differs.
    """
    _write(out, _read(checkpoint))


def _read(path: str | PathLike[str]) -> dict[str, Tensor]:
    if Path(path).suffix in (".pth", ".pt"):
        tensors = _read_checkpoint(path)
    else:
        tensors, _ = read_safetensors(path)
    problems = [f"{key} is missing" for key in _SHAPES if key not in tensors]
    for key, value in tensors.items():
        if key not in _SHAPES:
            problems.append(f"{key} is unknown")
        elif tuple(value.shape) != _SHAPES[key]:
            problems.append(f"{key} has shape {tuple(value.shape)}, not {_SHAPES[key]}")
        elif not torch.isfinite(value).all():
            problems.append(f"{key} has NaN or infinite values")
    if problems:
        raise ValueError(f"{path} is not a meta-gradient generator: {'; '.join(problems[:5])}")
    return {key: value.float() for key, value in tensors.items()}


def _read_checkpoint(path: str | PathLike[str]) -> dict[str, Tensor]:
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        # weights_only reads tensors and plain containers, and runs no code from the file.
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"{path} is damaged or not a checkpoint of tensors: {error}") from error
    state = content.get("model_state_dict") if isinstance(content, dict) else None
    if not isinstance(state, dict) or not all(isinstance(v, Tensor) for v in state.values()):
        raise ValueError(f"{path} is not a meta-gradient generator: model_state_dict is missing")
    return {str(key).removeprefix(_PREFIX): value for key, value in state.items()}


def _write(path: str | PathLike[str], tensors: dict[str, Tensor]) -> None:
    data = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
    write_atomically(path, to_bytes(data, {"format": FORMAT}))
