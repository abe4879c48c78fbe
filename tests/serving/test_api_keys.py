"""API keys: where they come from, what is refused, and that no key leaves in a message."""

import pytest

from openrlhf_ebft.config.errors import UserError
from openrlhf_ebft.config.serving import HTTPConfig
from openrlhf_ebft.serving.api_keys import read_key_digests, require_key
from openrlhf_ebft.serving.errors import RequestError

KEYS = ("first-key-1234", "second-key-5678", "third-key-9012")


@pytest.fixture
def digests(tmp_path, monkeypatch):
    monkeypatch.setenv("TEST_RAD_KEYS", f"{KEYS[0]}, {KEYS[1]}")
    path = tmp_path / "keys"
    path.write_text(f"# keys of the team\n\n{KEYS[2]}\n")
    return read_key_digests(HTTPConfig(api_keys_env="TEST_RAD_KEYS", api_keys_file=str(path)))


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
def test_every_key_of_variable_and_file_opens(digests, key, scheme):
    require_key([f"{scheme} {key}".encode()], digests)


@pytest.mark.parametrize(
    "lines",
    [
        [],
        [b""],
        [b"Bearer"],
        [b"Bearer "],
        [b"Bearer wrong-key-1234"],
        [f"Basic {KEYS[0]}".encode()],
        [KEYS[0].encode()],
        [f"Bearer {KEYS[0]}x".encode()],
        [f"Bearer {KEYS[0][:-1]}".encode()],
        [f"Bearer {KEYS[0].upper()}".encode()],
        [f"Bearer {KEYS[0]}".encode()] * 2,
        [b"Bearer \xff\xfe"],
        [f"Bearer {KEYS[0]},{KEYS[1]}".encode()],
    ],
)
def test_everything_else_is_401_without_a_word_of_any_key(digests, lines):
    with pytest.raises(RequestError) as refused:
        require_key(lines, digests)
    assert refused.value.status == 401
    assert not any(key[:6] in str(refused.value) for key in KEYS)


def test_without_keys_everybody_enters():
    assert read_key_digests(HTTPConfig()) == ()
    require_key([], ())


@pytest.mark.parametrize("content", ["", "# only a comment\n", "short\n", "with space in it\n", "käse-schlüssel\n"])
def test_useless_key_files_are_refused_without_showing_them(tmp_path, content):
    path = tmp_path / "keys"
    path.write_text(content)
    with pytest.raises(UserError) as refused:
        read_key_digests(HTTPConfig(api_keys_file=str(path)))
    assert str(path) in str(refused.value)
    assert not content.strip() or content.strip() not in str(refused.value)


def test_missing_file_and_variable_are_named(tmp_path):
    with pytest.raises(UserError, match="no-such-file"):
        read_key_digests(HTTPConfig(api_keys_file=str(tmp_path / "no-such-file")))
    with pytest.raises(UserError, match="TEST_RAD_NO_KEYS"):
        read_key_digests(HTTPConfig(api_keys_env="TEST_RAD_NO_KEYS"))
