import re
from pathlib import Path

import pytest
import torch
from trees import make_tree

from moetta.data import Preprocess, mixture, read_mixture

PRE = Preprocess((0.5,) * 3, (0.5,) * 3, size=(32, 32), crop_pct=1.0)
DOCS = Path(__file__).parents[2] / "docs" / "data.md"


@pytest.fixture
def folder(tmp_path):
    make_tree(tmp_path / "photos" / "day", ["cat", "dog"], images=10)
    make_tree(tmp_path / "photos" / "night", ["cat", "dog"], images=4)
    return tmp_path


def write(folder, text, name="street.toml"):
    (folder / name).write_text(text)
    return folder / name


def test_a_mixture_of_folders_with_corruptions_labels_and_limits(folder):
    path = write(
        folder,
        """
        order = "gradual"
        options = { overlap = 0.5 }
        seed = 7
        batch_size = 4
        labels = { cat = 3, dog = 8 }

        [[domain]]
        folder = "photos/day"
        limit = 6

        [[domain]]
        folder = "photos/day"
        corruption = "fog"
        severity = 2

        [[domain]]
        name = "dark"
        folder = "photos/night"
        labels = "sorted"
        """,
    )
    stream = mixture(path, preprocess=PRE)
    assert stream.counts == {"day": 6, "fog": 20, "dark": 8}
    assert (stream.name, stream.seed, stream.batch_size) == ("street", 7, 4)
    assert stream.card()["order"] == {"name": "gradual", "overlap": 0.5}
    batches = list(stream)
    labels = torch.cat([b.labels for b in batches])
    domains = torch.cat([b.domains for b in batches])
    assert labels[domains == 0].bincount(minlength=9).tolist() == [0, 0, 0, 3, 0, 0, 0, 0, 3]
    assert set(labels[domains == 2].tolist()) == {0, 1}
    assert mixture(path, preprocess=PRE, seed=8, order="mixed").card()["order"] == {"name": "mixed"}


def test_a_class_has_one_number_in_all_domains(folder):
    make_tree(folder / "photos" / "dusk", ["dog", "emu"])
    text = "".join(f"[[domain]]\nfolder = 'photos/{name}'\n" for name in ("day", "dusk"))
    for labels in ("", "labels = 'sorted'\n"):
        day, dusk = mixture(write(folder, labels + text), preprocess=PRE).domains
        assert day.labels.unique().tolist() == [0, 1]
        assert dusk.labels.tolist() == [1, 2]


def test_labels_are_found_by_the_names_unless_they_contradict_each_other(folder):
    make_tree(folder / "v2", ["7", "10"])
    make_tree(folder / "r", ["n01443537"])
    text = "[[domain]]\nfolder = 'v2'\n[[domain]]\nfolder = 'r'\n"
    v2, r = mixture(write(folder, text), preprocess=PRE).domains
    assert (v2.labels.tolist(), r.labels.tolist()) == ([10, 7], [1])
    text += "[[domain]]\nfolder = 'photos/day'\n"
    with pytest.raises(ValueError, match=r"v2: 'numbers', r: 'imagenet', day: 'sorted'.*labels ="):
        mixture(write(folder, text), preprocess=PRE)


@pytest.mark.parametrize(
    ("limit", "counts"),
    [
        ("", {"day": 12, "night": 4}),
        ("limit = 8", {"day": 6, "night": 2}),
        ("limit = 10", {"day": 8, "night": 2}),  # as many as asked for, whatever the rounding
    ],
)
def test_shares_make_the_largest_stream_in_which_no_domain_runs_out(folder, limit, counts):
    path = write(
        folder,
        f"""
        {limit}
        [[domain]]
        folder = "photos/day"
        share = 0.75
        [[domain]]
        folder = "photos/night"
        limit = 4
        share = 0.25
        """,
    )
    assert mixture(path, preprocess=PRE).counts == counts


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ordr = 'mixed'", "unknown key 'ordr'; did you mean 'order'"),
        ("[[domain]]\nfoldr = 'x'", "domain 1: unknown key 'foldr'; did you mean 'folder'"),
        ("[[domain]]\nname = 'x'", "domain 1 has no folder"),
        ("seed = 'x'", "seed has the wrong type str"),
        ("seed = true", "seed has the wrong type bool"),
        ("seed = 1", "has no domains"),
        ("domain = [1]", r"\[\[domain\]\]"),
        ("seed = ", "not a TOML file"),
        ("order = 'gradul'\n[[domain]]\nfolder = 'x'", "did you mean 'gradual'"),
        ("options = {gama = 1}\norder = 'label_shift'\n[[domain]]\nfolder = 'x'", "gamma"),
        (
            "[[domain]]\nfolder = 'x'\nshare = 1\n[[domain]]\nfolder = 'x'",
            "every domain or to none",
        ),
        ("[[domain]]\nfolder = 'x'\nshare = 0", "must be above 0"),
        ("[[domain]]\nfolder = 'photos/day'\ncorruption = 'fogg'", "fog"),
        ("[[domain]]\nfolder = 'photos/day'\nseverity = 9\ncorruption = 'fog'", "1 to 5"),
        ("[[domain]]\nfolder = 'photos/day'\nlabels = 'imagenet'", "no class for 2 of 2 folders"),
        ("[[domain]]\nfolder = 'photos/day'\n[[domain]]\nfolder = 'photos/day'", "unique.*day"),
        (
            "limit = 3\n[[domain]]\nfolder = 'photos/day'\nshare = 99\n"
            "[[domain]]\nfolder = 'photos/night'\nshare = 1",
            "less than one image",
        ),
    ],
)
def test_a_wrong_file_says_where_and_what(folder, text, says):
    with pytest.raises(ValueError, match=says):
        mixture(write(folder, text), preprocess=PRE)


def test_missing_files_and_folders_are_named(folder):
    with pytest.raises(FileNotFoundError, match=r"nothing\.toml"):
        read_mixture(folder / "nothing.toml")
    path = write(folder, "[[domain]]\nfolder = 'photos/dusk'")
    with pytest.raises(FileNotFoundError, match=r"photos/dusk.*no such folder"):
        mixture(path, preprocess=PRE)


def test_the_example_in_the_docs_works(folder):
    examples = re.findall(r"```toml\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert examples
    for name in ("day", "night"):  # the folders that the example names
        make_tree(folder / "camera" / name, ["bicycle", "bus", "car"], images=8)
    for text in examples:
        stream = mixture(write(folder, text), preprocess=PRE)
        assert sum(map(len, stream)) == stream.samples > 0
