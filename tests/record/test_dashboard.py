"""The page of a running run: fresh when something is, closed to strangers, and it answers nothing else."""

from __future__ import annotations

import urllib.error
import urllib.request
from pathlib import Path

import pytest

from nereus.record import dashboard
from nereus.record.dashboard import served
from nereus.record.metrics import METRICS_FILE


def get(link: str, **headers: str) -> tuple[int, str]:
    request = urllib.request.Request(link, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_the_page_is_made_anew_only_when_a_record_grew(tmp_path: Path) -> None:
    made: list[int] = []

    def render() -> str:
        made.append(1)
        return f"<html>{len(made)}</html>"

    with served(tmp_path, render, host="127.0.0.1", port=0) as link:
        assert "<html>1" in get(link)[1]
        assert "<html>1" in get(link)[1]
        (tmp_path / METRICS_FILE).write_text("{}\n")
        status, text = get(link)
        assert (status, "<html>2" in text, "location.reload" in text) == (200, True, True)
        assert get(link + METRICS_FILE) == (200, "{}\n")


@pytest.mark.parametrize("path", ["../secret", "secret", "%2e%2e/secret", "model/config.json"])
def test_nothing_but_the_records_is_served(tmp_path: Path, path: str) -> None:
    (tmp_path / "secret").write_text("x")
    with served(tmp_path, lambda: "<html></html>", host="127.0.0.1", port=0) as link:
        assert get(link + path)[0] == 404


def test_a_name_of_another_site_is_refused_on_the_loopback(tmp_path: Path) -> None:
    with served(tmp_path, lambda: "<html></html>", host="127.0.0.1", port=0) as link:
        assert get(link, Host="evil.example:80")[0] == 403
        assert get(link, Host="localhost:80")[0] == 200


def test_off_the_loopback_only_the_link_with_its_token_opens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dashboard, "_is_loopback", lambda host: False)
    with served(tmp_path, lambda: "<html>open</html>", host="127.0.0.1", port=0) as link:
        bare, _, token = link.partition("?token=")
        assert len(token) >= 24
        assert get(bare)[0] == 403
        assert get(bare + "?token=wrong")[0] == 403
        assert get(link)[0] == 200
        assert get(bare, Cookie=f"nereus-token={token}")[0] == 200


def test_the_port_is_free_again_afterwards(tmp_path: Path) -> None:
    with served(tmp_path, lambda: "", host="127.0.0.1", port=0) as link:
        port = int(link.rsplit(":", 1)[1].rstrip("/"))
    with served(tmp_path, lambda: "", host="127.0.0.1", port=port) as again:
        assert str(port) in again
