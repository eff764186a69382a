"""The key of authenticated records in the settings: it can not be guessed, and it is shown nowhere."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError
from test_config import TYPES, problems

from kvstore.config import IdentityConfig, describe, parse


def test_a_key_is_taken_from_the_environment_and_shown_nowhere() -> None:
    config = parse("identity: {auth_key: '${KEY}'}", TYPES, environ={"KEY": "0123456789abcdef"})
    assert config.identity.auth_key == "0123456789abcdef"
    assert describe(config)["identity"]["auth_key"] == "***"
    assert "0123456789abcdef" not in repr(config) + json.dumps(describe(config))


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("''", "a key of 0 characters can be guessed; write at least 16"),
        ("s3cr3t", "a key of 6 characters can be guessed; write at least 16"),
        ("s3cr3t-s3cr3t-s", "a key of 15 characters can be guessed"),
        ("' s3cr3t-s3cr3t-s3cr3t'", "the key begins or ends with white space"),
        ('"s3cr3t-s3cr3t-s3cr3t\\n"', "the key begins or ends with white space"),
        ("1234567890123456", "write text, in quotes"),
        ("[s3cr3t-s3cr3t-s3cr3t]", "write text, in quotes"),
    ],
)
def test_a_key_that_can_be_guessed_or_is_none_is_refused_and_not_shown(value: str, problem: str) -> None:
    (told,) = problems(f"identity: {{auth_key: {value}}}")
    assert told.startswith(f"f.yaml:1: identity.auth_key: {problem}")
    assert "s3cr3t" not in told
    assert "1234567890123456" not in told
    with pytest.raises(ValidationError) as caught:
        IdentityConfig(auth_key="s3cr3t")
    assert "s3cr3t" not in str(caught.value)
