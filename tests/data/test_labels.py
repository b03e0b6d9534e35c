import json

import pytest
import torch

from moetta.data import Domain, imagenet_synsets, label_map, logit_mask


def test_synsets_are_timms():
    wnids = imagenet_synsets()
    assert len(wnids) == 1000
    assert list(wnids) == sorted(wnids)
    assert wnids[0] == "n01440764"
    r, a = imagenet_synsets("r"), imagenet_synsets("a")
    assert len(set(r)) == len(set(a)) == 200
    assert set(r) | set(a) <= set(wnids)
    assert len(set(r) & set(a)) == 86


def test_label_maps_by_name(tmp_path):
    assert label_map("sorted", ["b", "a"]) == {"b": 1, "a": 0}
    assert label_map("numbers", ["10", "2"]) == {"10": 10, "2": 2}
    assert label_map("imagenet", ["n01443537", "n01440764"]) == {"n01443537": 1, "n01440764": 0}
    assert label_map({"cat": 3, "dog": 5, "cow": 6}, ["dog", "cat"]) == {"dog": 5, "cat": 3}
    assert label_map("auto", ["n01443537"]) == {"n01443537": 1}
    assert label_map("auto", ["10", "2"]) == {"10": 10, "2": 2}
    assert label_map("auto", ["10", "n01443537"]) == {"10": 0, "n01443537": 1}
    assert label_map("auto", ["b", "a"]) == {"b": 1, "a": 0}
    (tmp_path / "m.json").write_text(json.dumps({"cat": 3}))
    (tmp_path / "m.toml").write_text("cat = 4")
    assert label_map("m.json", ["cat"], base=tmp_path) == {"cat": 3}
    assert label_map(tmp_path / "m.toml", ["cat"]) == {"cat": 4}


@pytest.mark.parametrize(
    ("labels", "says"),
    [
        ("imagenet", "no class for 1 of 2 folders: dogs"),
        ("numbers", "no class for 2"),
        ({"n01440764": 0}, "dogs.*it knows n01440764"),
        ({"n01440764": 0, "dogs": "1"}, "dogs = '1'"),
        ({"n01440764": 0, "dogs": -1}, "integers of at least 0, got dogs"),
        ({"n01440764": 0, "dogs": True}, "integers of at least 0, got dogs"),
        ("imgenet", '"imagenet"'),
        ("bad.json", "cannot be read"),
        ("list.json", "one table"),
    ],
)
def test_a_label_map_that_does_not_fit_says_why(tmp_path, labels, says):
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(ValueError, match=says):
        label_map(labels, ["n01440764", "dogs"], base=tmp_path)


def test_a_missing_label_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.toml"):
        label_map("none.toml", ["a"], base=tmp_path)


def test_the_mask_leaves_each_domain_its_own_classes():
    images = torch.zeros(2, 3, 32, 32, dtype=torch.uint8)
    few = Domain("few", images, torch.tensor([1, 3]), classes=(1, 3))
    full = Domain("all", images, torch.tensor([0, 4]))
    mask = logit_mask([full, few], 5)
    assert mask.tolist() == [[True] * 5, [False, True, False, True, False]]
    logits = torch.tensor([[9.0, 1, 0, 2, 0], [9.0, 1, 0, 2, 0]])
    masked = logits.masked_fill(~mask[torch.tensor([0, 1])], float("-inf"))
    assert masked.argmax(1).tolist() == [0, 3]
    with pytest.raises(ValueError, match="only 3 logits"):
        logit_mask([few], 3)
