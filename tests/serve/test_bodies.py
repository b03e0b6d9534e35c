import base64
import json

import pytest

from moetta.serve.bodies import Buffers, split
from moetta.serve.refusal import Refusal


def form(*parts: bytes, boundary: bytes = b"XX") -> bytes:
    out = b""
    for part in parts:
        out += b"--" + boundary + b"\r\n"
        out += b'Content-Disposition: form-data; name="image"; filename="a.png"\r\n\r\n'
        out += part + b"\r\n"
    return out + b"--" + boundary + b"--\r\n"


@pytest.mark.parametrize("kind", ["image/png", "IMAGE/JPEG", "image/webp; q=1"])
def test_a_raw_body_is_one_image(kind):
    assert split(b"abc", kind, 1) == [b"abc"]


def test_json_is_a_list_of_images_and_a_bad_one_fails_alone():
    body = json.dumps([base64.b64encode(b"one").decode(), "!!", 7]).encode()
    good, *bad = split(body, "application/json; charset=utf-8", 3)
    assert good == b"one"
    assert [refusal.status for refusal in bad] == [422, 422]


def test_multipart_parts_are_images_whole_and_in_order():
    parts = (b"one", b"\r\n--X\r\n", bytes(range(256)) * 5000)
    assert split(form(*parts), "multipart/form-data; boundary=XX", 3) == list(parts)


@pytest.mark.parametrize(
    ("body", "kind", "status"),
    [
        (b"x", "", 415),
        (b"x", "text/plain", 415),
        (b"x", "image/gif", 415),
        (b"x", "application/x-www-form-urlencoded", 415),
        (b"{", "application/json", 422),
        (b"\xff\xfe", "application/json", 422),
        (b"[]", "application/json", 422),
        (b'{"images": []}', "application/json", 422),
        (b"[" * 100_000, "application/json", 422),
        (b'["", "", "", ""]', "application/json", 413),
        (form(b"1", b"2", b"3", b"4"), "multipart/form-data; boundary=XX", 413),
        (form(b"1"), "multipart/form-data", 422),
        (form(b"1")[:-10], "multipart/form-data; boundary=XX", 422),
        (b"", "multipart/form-data; boundary=XX", 422),
        (b"nothing of the kind", "multipart/form-data; boundary=XX", 422),
    ],
)
def test_bad_bodies_are_refused_with_a_reason(body, kind, status):
    with pytest.raises(Refusal) as refused:
        split(body, kind, 3)
    assert refused.value.status == status
    assert len(refused.value.reason) > 10
    assert ("the content type is missing" in refused.value.reason) is (kind == "")


def test_uploads_share_one_budget_and_give_it_back():
    buffers = Buffers(10)
    with buffers.hold() as one:
        one.add(6)
        with buffers.hold() as two:
            two.add(4)
            with pytest.raises(Refusal) as refused:
                two.add(1)
        assert refused.value.status == 503
        assert refused.value.retry_after == 1
        assert buffers.held == 6
    assert buffers.held == 0
