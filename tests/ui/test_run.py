"""A person starts a run from the form and looks at it while it runs: graph, live plots, its own page."""

from __future__ import annotations

import io
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from prefect.client.orchestration import get_client

from nereus.config import CampaignConfig
from nereus.flows.deployments import scheduled
from nereus.flows.live import artifact_key
from tests.flows.test_deploy import post, put, runs_of, wait_for
from tests.flows.test_stops import ENDED, busyness
from tests.prefect_server import free_port

if TYPE_CHECKING:
    from selenium.webdriver.chrome.webdriver import WebDriver

pytestmark = [pytest.mark.ui, pytest.mark.timeout(1500)]
COUNT = Path(__file__).resolve().parents[2] / "examples" / "count"
STEPS, LOOK_BEFORE, MOVE_BEFORE = 10, 8, 4
MOVED = {
    "actor_training": {"tp": 1, "dp": 2, "gpus": [0, 1]},
    "actor_generation": {"tp": 2, "gpus": [2, 3]},
}
PICTURES_DRAWN = "return [...document.images].filter(i => i.complete && i.naturalWidth > 100).map(i => i.alt)"


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example's model, which counts a little."""
    folder = tmp_path_factory.mktemp("count") / "model"
    subprocess.run([sys.executable, COUNT / "make_model.py", "--output", folder], check=True, timeout=600)
    return folder


@pytest.fixture
def config(model_folder: Path, tmp_path: Path) -> CampaignConfig:
    """The example campaign with a transition in its course, a page, and a stop to look at it."""
    arguments = {"marker": str(tmp_path / "reached"), "stage": "generate", "step": LOOK_BEFORE}
    prompts = Path(__file__).with_name("waiting_prompts.py")
    return CampaignConfig.model_validate(
        {
            "name": "count",
            "output": str(tmp_path / "runs"),
            "seed": 2,
            "steps": STEPS + 20,  # the form is told otherwise
            "models": {"actor": str(model_folder)},
            "prompts": {
                "source": {"kind": "python", "function": f"{prompts}:prompts", "arguments": arguments}
            },
            "reward": {"kind": "python", "function": f"{COUNT / 'reward.py'}:reward"},
            "algorithm": {"kind": "grpo"},
            "batch": {"prompts": 4, "samples": 8, "micro_batch_rows": 16},
            "sampling": {"max_new_tokens": 48},
            "optimizer": {"learning_rate": 3e-4, "beta2": 0.95},
            "plan": {
                "actor_training": {"tp": 2, "gpus": [0, 1]},
                "actor_generation": {"dp": 2, "gpus": [2, 3]},
            },
            "changes": [{"before_step": MOVE_BEFORE, "plan": MOVED}],
            "cluster": {"gpus": 4, "device": "cpu"},
            "dashboard": {"port": free_port()},
            "tracking": "full",
        }
    )


class Looker:
    """Waits for what a page should show."""

    def __init__(self, browser: WebDriver) -> None:
        self.browser = browser

    def until(self, condition: Callable[[WebDriver], Any], what: str) -> Any:
        """What the condition gives once it is true."""
        from selenium.webdriver.support.wait import WebDriverWait

        return WebDriverWait(self.browser, 60 * busyness()).until(condition, what)

    def element(self, path: str) -> Any:
        """The first element that can be seen, by its XPath."""
        from selenium.webdriver.common.by import By
        from selenium.webdriver.support import expected_conditions

        return self.until(expected_conditions.visibility_of_element_located((By.XPATH, path)), path)

    def text(self, words: str) -> None:
        """Wait until the page shows the words."""
        self.until(lambda browser: words in browser.execute_script("return document.body.innerText"), words)

    def field(self, label: str) -> Any:
        """The field of the run form with that label."""
        named = f"//span[contains(@class, 'schema-form-property__label')][normalize-space(.)={label!r}]"
        box = "ancestor::*[contains(concat(' ', @class, ' '), ' schema-form-property ')][1]"
        return self.element(f"{named}/{box}//input")

    def pictures(self, least: int) -> list[str]:
        """Wait until the browser has drawn so many pictures; their titles."""
        found: list[str] = self.until(
            lambda browser: len(got := browser.execute_script(PICTURES_DRAWN)) >= least and got,
            f"{least} pictures",
        )
        return found

    def graph(self) -> Any:
        """Wait until the canvas of the run's graph has been drawn upon."""
        canvas = self.element("//canvas")
        self.until(lambda _: num_colours(canvas.screenshot_as_png) > 8, "a graph that is drawn")
        time.sleep(2)  # it moves into its place
        return canvas


def num_colours(png: bytes) -> int:
    """Colours of a picture: an empty canvas has one or two, text and bars have many shades."""
    from PIL import Image

    found = Image.open(io.BytesIO(png)).convert("RGB").getcolors(1 << 24)
    return len(found or ())


def wait_for_file(path: Path, run: str) -> None:
    end = time.monotonic() + 240 * busyness()
    while not path.exists():
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(run).state  # type: ignore[arg-type]
        assert state is None or state.name not in ENDED, state
        assert time.monotonic() < end, f"no {path.name}"
        time.sleep(1)


def artifact(key: str, text: str = "") -> str:
    """The newest artifact of that key, once the server has it with the text."""
    wanted = {"artifacts": {"key": {"any_": [key]}}, "sort": "CREATED_DESC", "limit": 1}
    end = time.monotonic() + 60 * busyness()
    while not (found := post("/artifacts/filter", wanted)) or text not in found[0]["data"]:
        assert time.monotonic() < end, f"no artifact {key} with {text!r}"
        time.sleep(1)
    return str(found[0]["id"])


def test_a_run_started_from_the_form_shows_its_transition_its_live_plots_and_its_page(
    server: str,
    browser: WebDriver,
    worker: Callable[[], subprocess.Popen[bytes]],
    config: CampaignConfig,
    tmp_path: Path,
    keep_picture: Callable[[str], None],
) -> None:
    from selenium.webdriver.common.keys import Keys

    put(scheduled(config, cron=None, interval_s=None, max_steps=None))
    with get_client(sync_client=True) as client:
        deployment = client.read_deployment_by_name("campaign/count").id
    look = Looker(browser)
    worker()

    browser.get(f"{server}/deployments/deployment/{deployment}/run")
    steps = look.field("Steps (Optional)")
    assert steps.get_attribute("value") == str(config.steps), "the form shows the deployed values"
    steps.send_keys(Keys.CONTROL, "a")
    steps.send_keys(str(STEPS))
    keep_picture("ui-form")
    look.element("//form//button[@type='submit']").click()
    look.until(lambda _: runs_of(deployment, "Scheduled", "Late", "Pending", "Running"), "a run")
    run = runs_of(deployment, "Scheduled", "Late", "Pending", "Running")[0]
    assert run["parameters"]["config"]["steps"] == STEPS, "the run has what was typed"

    wait_for_file(tmp_path / "reached", run["id"])
    browser.get(f"{server}/runs/flow-run/{run['id']}")
    look.text("step 0: reward")
    look.graph()
    keep_picture("ui-run")
    moved = run_named(f"transition before step {MOVE_BEFORE}")
    browser.get(f"{server}/runs/flow-run/{moved}")
    look.graph()
    keep_picture("ui-transition")
    browser.get(f"{server}/artifacts/artifact/{artifact('transition')}")
    assert look.pictures(1) == ["operations"]
    look.text("Split")
    keep_picture("ui-transition-artifact")

    done = f"{LOOK_BEFORE} of {STEPS} steps"
    browser.get(f"{server}/artifacts/artifact/{artifact(artifact_key(config.name), done)}")
    titles = look.pictures(5)
    assert any(title.startswith("Reward") for title in titles)
    look.text(done)
    keep_picture("ui-live")

    assert config.dashboard is not None
    browser.get(f"http://127.0.0.1:{config.dashboard.port}/")
    look.element("//h1[contains(., 'count')]")
    look.text("Course of the run")
    assert len(browser.find_elements("css selector", "figure svg")) >= 6
    keep_picture("dashboard")

    Path(f"{tmp_path / 'reached'}.seen").touch()
    assert wait_for(run["id"], ENDED, limit_s=120 * busyness()) == "Completed"


def run_named(name: str) -> str:
    """The flow run of that name."""
    found: str = post("/flow_runs/filter", {"flow_runs": {"name": {"any_": [name]}}})[0]["id"]
    return found
