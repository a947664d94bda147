"""The file of API keys."""

import asyncio
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.api.errors import RequestError
from jaxserve.server.auth.access import Authenticator
from jaxserve.server.auth.keys import Key, Limits, parse, text_of
from jaxserve.settings.schema import ConfigError, ServerConfig
from tests.examples import examples
from tests.server.keyed import TWO, bearer, sha


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "is empty"),
        ("[]", "line 1: the file must be a mapping"),
        ("keys: 3", "line 1: keys must be a list"),
        ("{}", "line 1: keys must be a list"),
        ("key: []", "line 1: the file has no field 'key'"),
        ("keys:\n  - 3", "line 2: a key must be a mapping"),
        ("keys:\n  - name: a", "line 2: a key has no sha256"),
        ("keys:\n- sha256: " + "0" * 64, "line 2: a key has no name"),
        (
            "keys:\n- name: a\n  sha256: the-key-itself",
            "line 3: a: sha256 must be 64 hexadecimal digits",
        ),
        ("keys:\n- name: 'a b'\n  sha256: " + "0" * 64, "line 2: 'a b' is not a name"),
        (
            "keys:\n- name: a\n  tennant: b",
            "line 3: a key has no field 'tennant'; known are admin, limits, name",
        ),
        ("keys:\n- name: a\n  name: b", "line 3: name is given more than once"),
        (
            f"keys:\n- {{name: a, sha256: {sha('a')}, admin: yes}}",
            "line 2: admin must be true or false",
        ),
        (
            f"keys:\n- name: a\n  sha256: {sha('a')}\n  limits: {{concurency: 3}}",
            "line 4: limits has no field 'concurency'",
        ),
        (
            f"keys:\n- name: a\n  sha256: {sha('a')}\n  limits: {{concurrency: 0}}",
            "line 4: concurrency must be a whole number from 1",
        ),
        (
            f"keys:\n- name: a\n  sha256: {sha('a')}\n  limits: {{concurrency: -1.5}}",
            "line 4: concurrency must be",
        ),
        (
            f"keys:\n- {{name: a, sha256: {sha('a')}}}\n- {{name: a, sha256: {sha('b')}}}",
            "line 3: a: its name or its key is given more than once",
        ),
        (
            f"keys:\n- {{name: a, sha256: {sha('a')}}}\n- {{name: b, sha256: {sha('a')}}}",
            "line 3: b: its name or its key is given more than once",
        ),
        ("keys: [", "line 1: is not YAML"),
        ("[" * 10**5, "not YAML"),
        ("keys: []\n---\nkeys: []", "not YAML"),
        ("\0", "not YAML"),
        ("keys: !!python/object/apply:os.system ['ls']", "line 1: a key must be a mapping"),
    ],
)
def test_mistakes_in_the_file_are_named_with_their_line(key_file, text, message):
    file = key_file(text)
    with pytest.raises(ConfigError) as error:
        Authenticator(ServerConfig(api_keys=file))
    assert str(error.value).startswith(f"api_keys: {file}") and message in str(error.value)


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o620, 0o644])
def test_a_file_that_others_can_read_or_write_is_refused(key_file, mode):
    with pytest.raises(ConfigError, match="chmod 600"):
        Authenticator(ServerConfig(api_keys=key_file(TWO, mode)))


def test_a_group_may_read_the_file(key_file):
    Authenticator(ServerConfig(api_keys=key_file(TWO, 0o440)))


def test_a_file_of_another_user_is_refused(key_file, give_away):
    give_away(file := key_file(TWO))
    with pytest.raises(ConfigError, match="another user"):
        Authenticator(ServerConfig(api_keys=file))


def test_a_file_that_is_missing_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"api_keys: .*No such file"):
        Authenticator(ServerConfig(api_keys=str(tmp_path / "no.yaml")))


names = st.text("abcXYZ019._-", min_size=1, max_size=64)
counts = st.none() | st.integers(1, 10**12)
keys = st.builds(
    Key,
    names,
    st.binary(min_size=32, max_size=32),
    names,
    st.booleans(),
    st.builds(Limits, counts, counts, counts),
)


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(keys, max_size=6, unique_by=(lambda key: key.name, lambda key: key.sha256)))
def test_what_is_written_is_read_back(written):
    assert parse(text_of(written), "f") == written


@settings(max_examples=examples(300), deadline=None)
@given(
    st.text(max_size=80)
    | st.lists(
        st.sampled_from(
            [
                "keys",
                ":",
                " ",
                "\n",
                "- ",
                "name",
                "sha256",
                sha("a"),
                "limits",
                "{",
                "}",
                "[",
                "]",
                ",",
                "&a ",
                "*a",
                "!!int ",
                "|",
                "%YAML 1.1\n",
                "true",
                "concurrency",
                "9" * 20,
                "'",
                '"',
                "#",
                "? ",
                "<<",
            ]
        ),
        max_size=25,
    ).map("".join)
)
def test_any_text_is_keys_or_a_config_error(text):
    try:
        parse(text, "f")
    except ConfigError as error:
        assert str(error).startswith("api_keys: f")


def test_thousands_of_new_keys_are_read_while_the_event_loop_does_its_work(key_file, access):
    many = [Key(f"k{number}", bytes.fromhex(sha(f"key-{number}")), "t") for number in range(2000)]
    key_file(text_of(many))

    async def main():
        reading = asyncio.create_task(access.refresh())
        turns = 0
        while not reading.done():
            await asyncio.sleep(0.001)
            turns += 1
        assert turns > 10

    asyncio.run(main())
    assert access.authenticate(bearer("key-1999")).name == "k1999"


def test_a_change_of_the_file_is_seen_and_a_broken_one_changes_nothing(key_file, access, caplog):
    assert access.authenticate(bearer("a-key"))
    key_file(TWO + f"  - {{name: new, sha256: {sha('n-key')}}}\n")
    asyncio.run(access.refresh())
    assert access.authenticate(bearer("n-key")).tenant == "new"
    key_file(TWO.replace(sha("a-key"), sha("z-key")))
    asyncio.run(access.refresh())
    for key, known in (("z-key", True), ("a-key", False), ("n-key", False)):
        if known:
            access.authenticate(bearer(key))
        else:
            with pytest.raises(RequestError):
                access.authenticate(bearer(key))
    file = Path(key_file("keys: ["))
    asyncio.run(access.refresh())
    file.unlink()
    asyncio.run(access.refresh())
    asyncio.run(access.refresh())
    assert access.authenticate(bearer("z-key"))
    errors = [record.message for record in caplog.records if record.levelname == "ERROR"]
    assert len(errors) == 2 and "not YAML" in errors[0] and "No such file" in errors[1]
