"""What of the environment reaches a reward process."""

from __future__ import annotations

from nereus.rewards.environment import without_secrets


def test_names_that_look_like_secrets_are_left_out_in_any_case() -> None:
    given = {"PATH": "p", "HF_TOKEN": "1", "aws_secret_access_key": "2", "Db_Password": "3", "HOME": "h"}
    assert without_secrets(given) == {"PATH": "p", "HOME": "h"}
