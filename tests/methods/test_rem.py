from __future__ import annotations

from itertools import combinations

import pytest
import timm
import torch
import transformers
from torch import Tensor, nn

import moetta
from helpers.models import images, small_vit
from helpers.reference import Plain, entropies
from moetta.methods.rem import consistency, ranking
from moetta.nn.attention import class_attention, find_attention
from moetta.nn.blocks import find_blocks

VIEWS = [torch.tensor([[2.0, 0.0]]), torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 0.0]])]


def test_the_losses_of_the_definition() -> None:
    assert consistency(VIEWS).item() == pytest.approx(1.818759, abs=1e-5)
    assert ranking(VIEWS).item() == 0
    assert ranking(VIEWS[::-1]).item() == pytest.approx(0.655627, abs=1e-5)


def forward(model: nn.Module, x: Tensor, keep: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """timm's ViT step by step: logits, and the last block's attention of the class token."""
    t = model._pos_embed(model.patch_embed(x))  # type: ignore[operator]
    t = model.norm_pre(t)  # type: ignore[operator]
    if keep is not None:
        rows = torch.arange(len(x))[:, None]
        t = torch.cat((t[:, :1], t[rows, keep + 1]), 1)
    blocks = list(model.blocks)  # type: ignore[arg-type]
    for block in blocks[:-1]:
        t = block(t)
    normed = blocks[-1].norm1(t)
    attn = blocks[-1].attn
    b, n = normed.shape[:2]
    q, k, _ = attn.qkv(normed).view(b, n, 3, attn.num_heads, -1).permute(2, 0, 3, 1, 4)
    weights = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1).mean(1)[:, 0, 1:]
    t = model.norm(blocks[-1](t))  # type: ignore[operator]
    return model.forward_head(t), weights.detach()  # type: ignore[operator]


@pytest.mark.parametrize(("preset", "hidden"), [("paper", (0.05, 0.1)), ("released", (0.1, 0.2))])
def test_several_steps_agree_with_plain_autograd(preset: str, hidden: tuple[float, ...]) -> None:
    lr = 1e-3
    plain = Plain(small_vit().double())
    adapter = moetta.adapt(small_vit().double(), "rem", preset=preset, lr=lr)
    names = [k.removeprefix("param.") for k in adapter.state_dict() if k.startswith("param.")]
    trained = dict(zip(plain.names, plain.parameters, strict=True))
    optimizer = torch.optim.Adam([trained[name] for name in names], lr=lr)
    for seed, size in enumerate((6, 1, 4)):
        x = images(size, seed).double()
        z, attended = forward(plain.model, x)
        views = [z]
        for share in hidden:
            count = max(1, int(attended.shape[1] * (1 - share)))
            views.append(forward(plain.model, x, attended.argsort(1)[:, :count])[0])
        loss = torch.zeros(()).double()
        for a, b in combinations(views, 2):
            loss = loss - (a.detach().softmax(1) * b.log_softmax(1)).sum(1).mean()
            loss = loss + (entropies(a) - entropies(b).detach()).relu().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(adapter(x), z.detach(), rtol=1e-5, atol=1e-6)
        assert adapter.last is not None
        assert sum(adapter.last.losses.values()) == pytest.approx(loss.item(), abs=1e-5)
        assert (adapter.last.forwards, adapter.last.backwards) == (3 * size, 3 * size)
        state = adapter.state_dict()
        for name in names:
            mine = trained[name].detach()
            torch.testing.assert_close(state[f"param.{name}"], mine, rtol=1e-4, atol=1e-5)


def test_a_vit_b_keeps_176_and_156_of_its_196_patches_and_trains_18_norms() -> None:
    with torch.device("meta"):
        model = timm.create_model("vit_base_patch16_224")
    adapter = moetta.adapt(model, "rem", preset="released")
    assert len(adapter.trained) == 2 * 18
    small = timm.models.VisionTransformer(
        img_size=224, patch_size=16, embed_dim=8, depth=2, num_heads=2, num_classes=5
    )
    adapter = moetta.adapt(small, "rem", preset="released")
    seen: list[int] = []
    last = adapter.network.blocks[-1]  # type: ignore[union-attr]
    last.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[1] - 1))
    adapter(torch.randn(2, 3, 224, 224))
    assert seen == [196, 176, 156]


def test_a_hugging_face_vit_ranks_patches_by_its_own_attention() -> None:
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=4, num_attention_heads=2, intermediate_size=64,
        image_size=32, patch_size=8, num_labels=5, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.ViTForImageClassification(config).eval()
    with torch.no_grad():
        for parameter in model.vit.layers[-1].attention.parameters():
            parameter.mul_(5)  # attention that differs between patches
    x = torch.randn(3, 3, 32, 32)
    expected = model(x, output_attentions=True).attentions[-1].mean(1)[:, 0, 1:]
    blocks = find_blocks(model)
    with class_attention(model, find_attention(model, blocks[-1])) as attended:
        model(pixel_values=x)
    torch.testing.assert_close(attended[0], expected)
    adapter = moetta.adapt(model, "rem", lr=1e-2)
    before = adapter(pixel_values=x)
    assert adapter.last is not None
    assert (adapter.last.forwards, adapter.last.skipped) == (9, None)
    assert not torch.equal(adapter(pixel_values=x), before)


def test_other_backbones_are_refused_by_name() -> None:
    model = timm.create_model("test_convnext", num_classes=10)
    with pytest.raises(ValueError, match=r"rem needs a ViT with a class token.*ConvNeXt"):
        moetta.adapt(model, "rem")


@pytest.mark.parametrize("hidden", [(), (0.2, 0.1), (0.0, 0.1), (0.5, 1.0)])
def test_shares_that_do_not_rise_are_refused(hidden: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="hidden must be shares between 0 and 1, rising"):
        moetta.adapt(small_vit(), "rem", hidden=hidden)
