"""Source images: in any form, computed once, kept in a file."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader, TensorDataset
from transformers import BatchEncoding, BatchFeature

import moetta
from helpers.models import FAMILIES, images, small_vit
from helpers.trials import assert_same
from moetta.core.source_images import batches

NEED = [name for name, method in moetta.list_methods().items() if method.needs_source]


def sizes(*arguments: object, **settings: object) -> list[int]:
    return [len(batch) for batch in batches(*arguments, **settings)]


def test_a_tensor_is_cut_into_batches_up_to_the_limit() -> None:
    assert sizes(images(10), 4) == [4, 4, 2]
    assert sizes(images(10), 4, limit=6) == [4, 2]
    assert sizes(images(10), 4, limit=8) == [4, 4]
    # The paper's: 2,000 images in batches of 64.
    paper = sizes(torch.zeros(2100, 1), 64, limit=2000)
    assert (len(paper), paper[-1]) == (32, 16)


def test_an_endless_source_is_read_to_the_limit_only() -> None:
    def endless():
        while True:
            yield images(4)

    assert sizes(endless(), 64, limit=10) == [4, 4, 2]


@pytest.mark.parametrize(
    "item",
    [
        images(4),
        (images(4), torch.zeros(4)),
        [images(4), torch.zeros(4)],
        {"pixel_values": images(4), "labels": torch.zeros(4)},
        SimpleNamespace(images=images(4)),
    ],
    ids=["tensor", "pair", "list", "dict", "batch"],
)
def test_batches_in_any_packing(item: object) -> None:
    (batch,) = batches([item], 64)
    assert_same(batch.main, images(4))
    assert "labels" not in batch.kwargs


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ([], "source is empty"),
        (torch.empty(0, 3, 16, 16), "empty"),
        (["a.png"], "not str"),
        ([images(2).byte()], "uint8"),
        ([images(2) / 0], "NaN or infinite"),
    ],
)
def test_what_is_no_source_is_refused(source: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(batches(source, 4))


@pytest.mark.parametrize("method", NEED)
def test_forms_of_the_same_source_agree(method: str) -> None:
    x, model = images(12), small_vit()
    sizes = {"eata": "fisher_batch", "mgtta": "source_batch"}
    loader = DataLoader(TensorDataset(x, torch.zeros(12)), batch_size=4)
    states = [
        moetta.adapt(model, method, source=source, **{sizes[method]: 4}).state_dict()
        for source in (x, list(x.split(4)), loader)
    ]
    for other in states[1:]:
        assert_same(states[0], other)


@pytest.mark.parametrize("method", NEED)
def test_what_was_computed_is_kept_in_a_file(method: str, tmp_path: Path) -> None:
    model, path = small_vit(), tmp_path / "source.safetensors"
    adapter = moetta.adapt(model, method, source=images(12))
    adapter(images(4))
    adapter.save_source(path)
    again = moetta.adapt(model, method, source=path)
    adapter.reset()
    assert_same(adapter.state_dict(), again.state_dict())
    assert_same(adapter(images(4)), again(images(4)))
    with pytest.raises(ValueError, match="other source weights"):
        moetta.adapt(small_vit(seed=1), method, source=str(path))
    with pytest.raises(FileNotFoundError, match="there is no file"):
        moetta.adapt(model, method, source=tmp_path / "missing")
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match="damaged"):
        moetta.adapt(model, method, source=path)
    path.write_bytes(whole)
    tensors = load_file(path)
    save_file(tensors, path)
    with pytest.raises(ValueError, match=f"not written by {method}'s save_source"):
        moetta.adapt(model, method, source=path)
    other = moetta.adapt(model, "tent")
    other.save(path)
    with pytest.raises(ValueError, match=f"not written by {method}'s save_source"):
        moetta.adapt(model, method, source=path)
    with pytest.raises(ValueError, match="tent adapter computed nothing from source images"):
        other.save_source(path)


def test_text_may_be_a_source_too() -> None:
    family = FAMILIES["hf_bert"]
    source = [{**family.batch(4, seed), "labels": torch.zeros(4)} for seed in range(2)]
    adapter = moetta.adapt(family.shared(), "eata", source=source)
    assert all(adapter.running[name].abs().sum() > 0 for name in adapter.from_source)


@pytest.mark.parametrize("kind", [BatchEncoding, BatchFeature])
def test_what_tokenisers_and_processors_give_may_be_a_source(kind: type) -> None:
    x = images(6)
    whole = kind({"pixel_values": x, "labels": torch.zeros(6)})
    cut = list(batches(whole, 4, limit=5))
    assert [len(batch) for batch in cut] == [4, 1]
    assert [set(batch.kwargs) for batch in cut] == [{"pixel_values"}] * 2
    assert_same(torch.cat([batch.main for batch in cut]), x[:5])
    (batch,) = batches([whole], 4)
    assert_same(batch.main, x)
