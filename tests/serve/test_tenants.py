import pytest
import torch

from moetta.serve import Settings
from moetta.serve.refusal import Refusal
from moetta.serve.tenant import DEFAULT, tenant_name
from moetta.serve.tenants import Tenants
from serve.small_service import builder


def made(tmp_path, method="tent", **settings):
    return Tenants(builder(method), Settings(**{"state": tmp_path, **settings}))


def learn(tenant, seed=0):
    images = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(seed))
    tenant.answering(images)
    tenant.unsaved += 1


def state(tenant):
    return tenant.adapter.state_dict()


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


@pytest.mark.parametrize("name", ["a", "A.b_c-9", "x" * 64])
def test_names(name):
    assert tenant_name(name) == name


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a b", "x" * 65, "ä", "-a", "a\n"])
def test_other_names_are_refused(name):
    with pytest.raises(Refusal) as refused:
        tenant_name(name)
    assert refused.value.status == 422


def test_no_name_is_the_default():
    assert tenant_name(None) == DEFAULT


def test_tenants_do_not_touch_each_other(tmp_path):
    tenants = made(tmp_path)
    one, other = tenants.get("one"), tenants.get("other")
    before = state(other)
    for seed in range(3):
        learn(one, seed)
    assert same(state(other), before)
    assert not same(state(one), before)


def test_the_backbone_is_shared(tmp_path):
    tenants = made(tmp_path)
    one, other = tenants.get("one").adapter, tenants.get("other").adapter
    names = dict(one.network.named_parameters())
    shared = [
        name
        for name, parameter in other.network.named_parameters()
        if parameter.data_ptr() == names[name].data_ptr()
    ]
    assert set(names) - set(shared) == set(one.trained)


def test_the_least_recently_used_goes_to_disk_and_comes_back_whole(tmp_path):
    tenants = made(tmp_path, tenants_in_memory=2)
    learn(tenants.get("a"), 1)
    learned = state(tenants.get("a"))
    learn(tenants.get("b"), 2)
    tenants.get("a")
    tenants.get("c")  # b is the oldest now
    assert [t.name for t in tenants] == ["a", "c"]
    tenants.get("b")
    assert [t.name for t in tenants] == ["c", "b"]
    assert tenants.known == 4  # with the default
    assert same(state(tenants.get("a")), learned)
    assert tenants.get("a").adapter.steps == 1


def test_everything_is_there_after_a_restart(tmp_path):
    tenants = made(tmp_path)
    learn(tenants.get("a"), 1)
    learned = state(tenants.get("a"))
    assert tenants.close()
    again = made(tmp_path)
    assert again.known == 2
    assert same(state(again.get("a")), learned)


def test_another_configuration_has_states_of_its_own(tmp_path, caplog):
    tenants = made(tmp_path)
    learn(tenants.get("a"), 1)
    learned = state(tenants.get("a"))
    tenants.close()
    other = made(tmp_path, method="sar")
    assert "there is state of others: tent-" in caplog.text
    assert other.get("a").adapter.steps == 0
    other.close()
    assert same(state(made(tmp_path).get("a")), learned)


def test_too_many_are_refused(tmp_path):
    tenants = made(tmp_path, max_tenants=2)
    tenants.get("a")
    with pytest.raises(Refusal) as refused:
        tenants.get("b")
    assert refused.value.status == 429
    tenants.get("a")


def test_nothing_is_lost_if_the_disk_is_full(tmp_path, monkeypatch):
    counted = []
    tenants = Tenants(builder(), Settings(state=tmp_path, tenants_in_memory=1), counted.append)
    a = tenants.get("a")
    learn(a)

    def full(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(a.answering, "save", full)
    with pytest.raises(Refusal) as refused:
        tenants.get("b")
    assert refused.value.status == 503
    assert tenants.get("a") is a
    assert not tenants.close()
    assert counted == [False, False]
    monkeypatch.undo()


def test_snapshots_are_written_when_enough_was_learnt(tmp_path):
    tenants = made(tmp_path, snapshot_every=3)
    tenant = tenants.get("a")
    for expected in ([], [], [1], [1], [1], [2, 1]):
        learn(tenant)
        tenants.save_if_due(tenant)
        if tenant.saving is not None:
            tenant.saving.result()
        assert tenant.snapshots.numbers == expected


def test_without_a_folder_nothing_is_written(tmp_path):
    tenants = made(tmp_path, state=None, tenants_in_memory=1)
    learn(tenants.get("a"))
    tenants.get("b")
    assert tenants.get("a").adapter.steps == 0
    assert list(tmp_path.iterdir()) == []
