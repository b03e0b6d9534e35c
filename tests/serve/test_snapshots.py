import pytest

from moetta.serve.snapshots import Snapshots


def write(text):
    return lambda path: path.write_text(text)


class Loaded:
    text = None

    def __call__(self, path):
        self.text = path.read_text()


def test_the_latest_comes_back_and_only_the_last_few_stay(tmp_path):
    snapshots = Snapshots(tmp_path / "s", keep=3)
    numbers = [snapshots.save(write(f"state {i}")).number for i in range(5)]
    assert numbers == [1, 2, 3, 4, 5]
    assert snapshots.numbers == [5, 4, 3]
    assert [s.number for s in snapshots.found()] == [5, 4, 3]
    loaded = Loaded()
    assert snapshots.restore(loaded).number == 5
    assert loaded.text == "state 4"
    assert snapshots.restore(loaded, number=4).number == 4
    assert loaded.text == "state 3"
    assert snapshots.restore(loaded, number=1) is None


def test_what_a_killed_process_left_unfinished_is_removed(tmp_path):
    snapshots = Snapshots(tmp_path, keep=3)
    first = snapshots.save(write("state 0"))
    (tmp_path / ".new.safetensors").write_text("half of sta")
    (tmp_path / "..new.safetensors.abc.tmp").write_text("ha")
    assert snapshots.restore(Loaded()) == first
    second = snapshots.save(write("state 1"))
    assert sorted(tmp_path.iterdir()) == [first.path, second.path]


def test_a_damaged_one_is_passed_over(tmp_path, caplog):
    snapshots = Snapshots(tmp_path, keep=3)
    for i in range(3):
        snapshots.save(write(f"state {i}"))
    latest, second, _ = snapshots.found()
    latest.path.write_text("state 2 ")  # one byte too many
    second.path.write_text("")
    loaded = Loaded()
    assert snapshots.restore(loaded).number == 1
    assert loaded.text == "state 0"
    assert caplog.text.count("is damaged") == 2


def test_one_that_cannot_be_loaded_is_passed_over(tmp_path):
    snapshots = Snapshots(tmp_path, keep=2)
    snapshots.save(write("good"))
    snapshots.save(write("bad"))
    loaded = Loaded()

    def load(path):
        if path.read_text() == "bad":
            raise ValueError("made for another model")
        loaded(path)

    assert snapshots.restore(load).number == 1


def test_a_failed_write_leaves_the_others_and_no_litter(tmp_path):
    snapshots = Snapshots(tmp_path, keep=1)
    snapshots.save(write("good"))

    def full(path):
        path.write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        snapshots.save(full)
    assert [path.name[:8] for path in tmp_path.iterdir()] == ["00000001"]
    loaded = Loaded()
    snapshots.restore(loaded)
    assert loaded.text == "good"


def test_nothing_saved_is_nothing_restored(tmp_path):
    assert Snapshots(tmp_path / "none", keep=1).restore(Loaded()) is None
