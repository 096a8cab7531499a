"""The Prefect UI renders a campaign's parameters as a form: enums, nested models, unions by kind."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from prefect.client.orchestration import get_client

from tests.flows.test_deploy import put

if TYPE_CHECKING:
    from selenium.webdriver.chrome.webdriver import WebDriver

pytestmark = [pytest.mark.ui, pytest.mark.timeout(600)]
SECTIONS = ("Models", "Prompts", "Reward", "Algorithm", "Sampling", "Optimizer", "Checkpoint")
CHOICES = ("FileData", "PythonData", "ReasoningGymData", "GrpoConfig", "PpoConfig", "RemaxConfig")


def test_the_run_form_shows_sections_choices_and_descriptions(server: str, browser: WebDriver) -> None:
    from selenium.webdriver.support.wait import WebDriverWait

    put()
    with get_client(sync_client=True) as client:
        deployment = client.read_deployment_by_name("campaign/campaign").id
    browser.get(f"{server}/deployments/deployment/{deployment}/run")
    WebDriverWait(browser, 120).until(lambda browser: "Checkpoint" in browser.page_source)
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", browser.page_source))
    for name in (*SECTIONS, *CHOICES):
        assert name in text, f"the form has no {name}"
    assert "The policy to train." in text
    assert "Number of steps." in text
