import pytest

from moetta.serve import Settings


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_batch": 0}, "max_batch must be above 0, got 0"),
        ({"queue_timeout": -1.0}, "queue_timeout must be above 0"),
        ({"max_wait_ms": -1.0}, "max_wait_ms must be at least 0"),
        ({"max_images": 9, "max_queue": 8}, "max_images must be at most max_queue=8"),
        ({"admin_token": "short"}, "the admin token must be 8 or more"),
        ({"admin_token": ""}, "the admin token must be 8 or more"),
        ({"api_keys": ("long enough", "kürzel-with-umlaut")}, "an API key must be"),
    ],
)
def test_refuses_what_cannot_work(change, words):
    with pytest.raises(ValueError, match=words):
        Settings(**change)


def test_is_closed_by_default():
    settings = Settings()
    assert settings.host == "127.0.0.1"
    assert settings.admin_token is None
    assert settings.hosts == {"127.0.0.1", "localhost", "::1"}
    assert Settings(host="0.0.0.0").hosts is None
    assert "example.org" in (Settings(allowed_hosts=("example.org",)).hosts or ())


def test_derived_bounds():
    assert Settings(max_batch=10).pressure == 20
    assert Settings(max_batch=10, learn_queue=0).pressure == 0
    assert Settings(max_queue=100).tenant_share == 100
