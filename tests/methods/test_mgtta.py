from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import moetta
from helpers.cells import one_cell, random_mgg, vit_b
from helpers.models import FAMILIES, Block, call, images, small_vit
from helpers.vit_features import features
from moetta.methods import mgtta
from moetta.methods.mgtta import MGTTA, load_mgg, pretrain
from moetta.nn.mgg import MGG


@pytest.fixture
def mgg(tmp_path: Path) -> str:
    """A generator in which every number matters."""
    path = tmp_path / "mgg.safetensors"
    random_mgg(7).save(path)
    return str(path)


class Reference:
    """MGTTA, one scalar at a time."""

    def __init__(self, model: nn.Module, generator: MGG, source: Tensor, lr: float) -> None:
        self.vit = copy.deepcopy(model).requires_grad_(False)
        self.lr, self.p, self.n = lr, generator.state_dict(), 0
        with torch.no_grad():
            phi, _ = features(self.vit, source)
        self.mean, self.std = phi.mean(0), phi.std(0, unbiased=True)
        norms = [m for m in self.vit.modules() if isinstance(m, nn.LayerNorm)]
        self.params = [p.requires_grad_() for m in norms for p in (m.weight, m.bias)]
        count = sum(p.numel() for p in self.params)
        self.m, self.v = [0.0] * count, [0.0] * count
        self.cells = [(self.p["W1"][0], self.p["b1"][0, 0]) for _ in range(count)]

    def step(self, x: Tensor) -> Tensor:
        phi, z = features(self.vit, x)
        loss = -(z.softmax(1) * z.log_softmax(1)).sum(1).mean()
        if len(x) > 1:
            mu, s = phi.mean(0), phi.std(0, unbiased=True)
            loss = loss + 0.4 / 64 * (((s - self.std) ** 2).sum() + ((mu - self.mean) ** 2).sum())
        grads = torch.autograd.grad(loss, self.params)
        self.n += 1
        i = 0
        for parameter, grad in zip(self.params, grads, strict=True):
            for j in range(parameter.numel()):
                g = grad[j].item()
                self.m[i] = 0.9 * self.m[i] + 0.1 * g
                self.v[i] = 0.99 * self.v[i] + 0.01 * g * g
                m = self.m[i] / (1 - 0.9 ** (self.n + 1))
                v = self.v[i] / (1 - 0.99 ** (self.n + 1))
                x2 = torch.tensor([m / (v**0.5 + 1e-8), g / (v**0.5 + 1e-8)])
                u, *self.cells[i] = one_cell(self.p, x2, *self.cells[i])
                parameter.data[j] -= self.lr * u
                i += 1
        return z.detach()


def test_steps_are_what_the_definition_says(mgg: str):
    model = small_vit(depth=3, classes=7)
    source = images(40, 100)
    adapter = moetta.adapt(model, "mgtta", source=source, mgg=mgg, lr=0.01)
    reference = Reference(model, load_mgg(mgg), source, 0.01)
    torch.testing.assert_close(adapter.running["source_mean"], reference.mean)
    torch.testing.assert_close(adapter.running["source_std"], reference.std)
    for seed, size in enumerate((6, 6, 1, 4)):
        x = images(size, seed)
        torch.testing.assert_close(adapter(x), reference.step(x), rtol=1e-3, atol=1e-3)
    values = torch.cat([p.detach() for p in reference.params])
    found = torch.cat([p.detach() for p in adapter.trained.values()])
    torch.testing.assert_close(found, values, rtol=0, atol=2e-4)
    assert (found - torch.cat([model.get_parameter(n) for n in adapter.trained])).abs().max() > 0.02
    weights = torch.stack([w for w, _ in reference.cells])
    torch.testing.assert_close(adapter.running["fast_weight"], weights, rtol=0, atol=2e-3)


def test_vit_b_has_the_papers_sizes():
    adapter = moetta.adapt(vit_b(), "mgtta", source=images(2, side=32))
    assert isinstance(adapter, MGTTA)
    assert adapter.activated_parameters == 2_803_200
    assert len(adapter.running["source_mean"]) == 9_216
    names = [norm.name for norm in adapter.features.layers]
    assert names == [f"blocks.{i}.norm1" for i in range(1, 12)] + ["norm"]


@pytest.mark.parametrize(
    ("name", "last", "dims"),
    [
        ("timm_convnext", "head.norm", 8 + 16 + 16 + 16),
        ("tv_convnext", "classifier.0", 16 + 16),
        ("hf_convnext", "convnext.layernorm", 8 + 16 + 16 + 16),
        ("timm_swin", "norm", 8 + 16 + 16 + 16),
        ("timm_resnet", "layer4.0.bn2", 8 + 16 + 16 + 16),
        ("timm_resnet_gn", "layer4.0.bn2", 8 + 16 + 16 + 16),
        ("hf_bert", "bert.encoder.layer.1.output.LayerNorm", 16 + 16),
    ],
)
def test_other_families_are_heard_too(name: str, last: str, dims: int):
    family = FAMILIES[name]
    batch = family.batch(8)
    adapter = moetta.adapt(
        family.model(), "mgtta", source=[batch if isinstance(batch, dict) else batch[0]]
    )
    assert isinstance(adapter, MGTTA)
    assert adapter.features.layers[-1].name == last
    assert len(adapter.running["source_mean"]) == dims
    call(adapter, family.batch(4, 1))
    assert adapter.last is not None
    assert adapter.last.losses["moments"] > 0


def test_source_moments_do_not_depend_on_the_batches(tmp_path: Path):
    model, source = small_vit(), images(10, 3)
    whole = moetta.adapt(model, "mgtta", source=source)
    parts = moetta.adapt(model, "mgtta", source=[(part, None) for part in source.split(3)])
    for key in ("source_mean", "source_std"):
        torch.testing.assert_close(whole.running[key], parts.running[key], rtol=1e-5, atol=1e-6)
    whole.save_source(tmp_path / "source.safetensors")
    again = moetta.adapt(model, "mgtta", source=tmp_path / "source.safetensors")
    assert torch.equal(again.running["source_std"], whole.running["source_std"])
    with pytest.raises(ValueError, match="other source weights"):
        moetta.adapt(small_vit(seed=1), "mgtta", source=tmp_path / "source.safetensors")


def test_source_images_are_needed():
    with pytest.raises(ValueError, match="pass source=images"):
        moetta.adapt(small_vit(), "mgtta")
    with pytest.raises(ValueError, match="at least two source images"):
        moetta.adapt(small_vit(), "mgtta", source=images(1))


def test_one_sample_and_identical_samples_leave_all_finite():
    adapter = moetta.adapt(small_vit(), "mgtta", source=images(8), lr=0.01)
    for batch in (images(1), images(1).expand(4, -1, -1, -1), torch.zeros(3, 3, 16, 16)):
        assert torch.isfinite(adapter(batch)).all()
        assert adapter.last is not None
        assert adapter.last.skipped is None
        assert ("moments" in adapter.last.losses) == (len(batch) > 1)
    assert all(torch.isfinite(t).all() for t in adapter.state_dict().values())


def test_a_step_that_is_not_finite_is_not_taken():
    model = small_vit()
    adapter = moetta.adapt(model, "mgtta", source=images(8))
    adapter.running["source_mean"] = torch.full_like(adapter.running["source_mean"], 1e30)
    before = adapter.state_dict()
    adapter(images(4))
    assert adapter.last is not None
    assert adapter.last.skipped == "non-finite loss or gradient"
    after = adapter.state_dict()
    assert all(torch.equal(before[k], after[k]) for k in before if k[:5] in ("param", "runni"))


def test_an_update_that_is_not_finite_is_not_taken():
    adapter = moetta.adapt(small_vit(), "mgtta", source=images(8))
    adapter.running["m"][0] = torch.inf
    before = adapter.state_dict()
    adapter(images(4))
    assert adapter.last is not None
    assert (adapter.last.skipped, adapter.last.backwards) == ("non-finite update", 0)
    after = adapter.state_dict()
    assert all(torch.equal(before[k], after[k]) for k in before if k[:5] in ("param", "runni"))


class Depth(nn.Module):
    """Runs as many of its three blocks as the image has patches along a side."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 8, 8), nn.Linear(8, 5)
        self.blocks = nn.ModuleList(Block(8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.stem(x).flatten(2).transpose(1, 2)
        for block in self.blocks[: x.shape[-1] // 8]:
            tokens = block(tokens)
        return self.head(tokens.mean(1))


def test_other_layers_than_the_source_images_used_are_refused():
    adapter = moetta.adapt(Depth(), "mgtta", source=images(8, side=24))
    before = adapter.state_dict()
    with pytest.raises(ValueError, match="8 features, the source images gave 16; use inputs of"):
        adapter(images(4, side=16))
    with pytest.raises(ValueError, match="none of the model's norm layers ran"):
        adapter(images(4, side=8))
    after = adapter.state_dict()
    assert all(torch.equal(before[k], after[k]) for k in before)


def test_permuting_a_batch_permutes_the_answers():
    order = torch.tensor([3, 1, 0, 2])
    a, b = (moetta.adapt(small_vit(), "mgtta", source=images(8), lr=1e-3) for _ in range(2))
    for seed in range(3):
        x = images(4, seed)
        torch.testing.assert_close(a(x)[order], b(x[order]), rtol=1e-3, atol=1e-3)


def test_save_load_and_reset_go_on_bit_for_bit(tmp_path: Path, mgg: str):
    settings = {"lr": 0.01, "mgg": mgg, "source": images(8)}
    adapter = moetta.adapt(small_vit(), "mgtta", **settings)
    first = [adapter(images(4, seed)) for seed in range(3)]
    adapter.save(tmp_path / "state.safetensors")
    second = [adapter(images(4, seed)) for seed in range(3, 6)]
    settings["mgg"] = str(tmp_path / "other.safetensors")
    random_mgg(8).save(settings["mgg"])  # the state brings its own generator
    fresh = moetta.adapt(small_vit(), "mgtta", **settings)
    assert not torch.equal(fresh(images(4)), fresh(images(4)))
    fresh.load(tmp_path / "state.safetensors")
    for seed, expected in zip(range(3, 6), second, strict=True):
        assert torch.equal(fresh(images(4, seed)), expected)
    adapter.reset()
    for seed, expected in enumerate(first):
        assert torch.equal(adapter(images(4, seed)), expected)


def test_gradient_checkpointing_changes_nothing():
    plain, checkpointed = small_vit(), small_vit()
    checkpointed.set_grad_checkpointing(True)
    a, b = (moetta.adapt(m, "mgtta", source=images(8), lr=0.01) for m in (plain, checkpointed))
    for seed in range(3):
        torch.testing.assert_close(a(images(4, seed)), b(images(4, seed)))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"lr": 0}, "lr"),
        ({"moments": -1}, "moments"),
        ({"moment_divisor": 0}, "moment_divisor"),
        ({"beta1": 1.0}, "below 1"),
    ],
)
def test_bad_settings_are_refused(wrong: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        moetta.adapt(small_vit(), "mgtta", source=images(4), **wrong)


def test_a_missing_generator_is_named(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"none\.safetensors"):
        moetta.adapt(small_vit(), "mgtta", source=images(4), mgg=str(tmp_path / "none.safetensors"))


# --- pretraining ------------------------------------------------------------------------------


def straight_pretraining(
    model: nn.Module, x: Tensor, source: Tensor, epochs: int, seed: int
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """The recipe with the graph kept by autograd from one batch to the next."""
    vit = copy.deepcopy(model).requires_grad_(False)
    with torch.no_grad():
        phi, _ = features(vit, source)
    mean, std = phi.mean(0), phi.std(0)
    norms = [m for m in vit.modules() if isinstance(m, nn.LayerNorm)]
    slots = [(m, key) for m in norms for key in ("weight", "bias")]
    theta = torch.cat([getattr(m, key).detach() for m, key in slots])
    mgg = MGG(seed)
    adam = torch.optim.Adam(mgg.parameters(), lr=1e-2)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    starts = []
    for _ in range(epochs):
        theta = theta.detach().requires_grad_()
        m = v = torch.zeros_like(theta)
        W, b = mgg.start(len(theta))
        for n, batch in enumerate(x[order].split(2), 1):
            pieces = theta.split([getattr(mod, key).numel() for mod, key in slots])
            names = [n for n, p in vit.named_parameters() if "norm" in n]
            z_phi = torch.func.functional_call(
                _Both(vit), {f"vit.{k}": p for k, p in zip(names, pieces, strict=True)}, (batch,)
            )
            phi, z = z_phi
            loss = -(z.softmax(1) * z.log_softmax(1)).sum(1).mean()
            loss = loss + 0.4 / 64 * (
                ((phi.std(0) - std) ** 2).sum() + ((phi.mean(0) - mean) ** 2).sum()
            )
            adam.zero_grad(set_to_none=True)
            theta.retain_grad()
            loss.backward()
            assert theta.grad is not None
            g = theta.grad.detach()
            if n > 1:
                adam.step()
            starts.append(mgg.b1.detach().clone())
            m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g**2
            root = (v / (1 - 0.99 ** (n + 1))).sqrt() + 1e-8
            u, W, b = mgg(torch.stack([m / (1 - 0.9 ** (n + 1)) / root, g / root], 1), W, b)
            theta = theta.detach() - 1e-4 * u
            W, b = W.detach(), b.detach()
    return mgg.state_dict(), starts


class _Both(nn.Module):
    def __init__(self, vit: nn.Module) -> None:
        super().__init__()
        self.vit = vit

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return features(self.vit, x)


def test_pretraining_follows_the_recipe():
    model, x, source = small_vit(), images(8, 1), images(16, 2)
    trained = pretrain(model, x, source=source, epochs=2, seed=5)
    expected, starts = straight_pretraining(model, x, source, 2, 5)
    # The fast weights' start learns once an epoch, at its second batch: an Adam step of 0.01.
    assert not starts[0].any()
    torch.testing.assert_close(starts[1].abs(), torch.full_like(starts[1], 0.01), rtol=0.05, atol=0)
    assert torch.equal(starts[3], starts[1])
    for key, value in trained.state_dict().items():
        torch.testing.assert_close(value, expected[key], rtol=1e-3, atol=2e-4, msg=key)


def test_pretraining_keeps_the_best_by_validation():
    model, x, source = small_vit(), images(8, 1), images(16, 2)
    seen: list[tuple[int, float, float | None]] = []
    validation = [(images(12, s), torch.randint(0, 5, (12,))) for s in (3, 4)]

    def run(epochs: int) -> MGG:
        def on_epoch(*row: object) -> None:
            seen.append(row)  # type: ignore[arg-type]

        return pretrain(
            model, x, source=source, validation=validation, epochs=epochs, on_epoch=on_epoch
        )

    best = run(4)
    accuracies = [row[2] for row in seen]
    assert [row[0] for row in seen] == [0, 1, 2, 3]
    assert all(a is not None and 0 <= a <= 1 for a in accuracies)
    stop = accuracies.index(max(accuracies)) + 1  # type: ignore[type-var]
    again = pretrain(model, x, source=source, epochs=stop)
    # Validating does not disturb the training.
    assert all(
        torch.equal(a, b) for a, b in zip(best.parameters(), again.parameters(), strict=True)
    )


def test_pretraining_leaves_the_model_alone_and_saves_a_usable_generator(tmp_path: Path):
    model = small_vit()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    trained = mgtta.pretrain(model, images(6), source=images(8), epochs=1)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    trained.save(tmp_path / "own.safetensors")
    adapter = moetta.adapt(model, "mgtta", source=images(8), mgg=str(tmp_path / "own.safetensors"))
    assert torch.isfinite(adapter(images(4))).all()


def test_pretraining_refuses_what_it_cannot_use():
    with pytest.raises(ValueError, match="non-empty tensor"):
        pretrain(small_vit(), torch.empty(0, 3, 16, 16), source=images(8))
    with pytest.raises(ValueError, match="epochs must be above 0"):
        pretrain(small_vit(), images(4), source=images(8), epochs=0)
    with pytest.raises(ValueError, match="pass source=images"):
        pretrain(small_vit(), images(4), source=None)
