"""A Prefect server with its UI, and Chromium without a window; pictures go to $NEREUS_SCREENSHOTS, if set."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.flows.test_deploy import worker  # noqa: F401
from tests.prefect_server import own_server, talking_to

if TYPE_CHECKING:
    from selenium.webdriver.chrome.webdriver import WebDriver

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--disable-sync",
    "--enable-unsafe-swiftshader",  # the UI draws graphs by WebGL
    "--hide-scrollbars",
    "--window-size=1280,860",
)
NUM_COLOURS = 128  # of a picture: pages have few, and the file is a quarter as large


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a server that shows its UI; this process talks to it."""
    with own_server(tmp_path_factory.mktemp("prefect"), ui=True) as url, talking_to(url):
        yield url


@pytest.fixture(scope="session")
def browser() -> Iterator[WebDriver]:
    """Chromium, driven by the driver of its own package: nothing is downloaded."""
    pytest.importorskip("selenium", reason="needs the ui extra")
    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if program is None or driver is None:
        pytest.skip("needs chromium and chromedriver in PATH")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = program
    for flag in FLAGS:
        options.add_argument(flag)
    opened = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=driver))
    opened.set_page_load_timeout(600)
    yield opened
    opened.quit()


@pytest.fixture
def keep_picture(browser: WebDriver) -> Callable[[str], None]:
    """Keeps what the browser shows as `<name>.png`, where pictures are asked for."""
    folder = os.environ.get("NEREUS_SCREENSHOTS")

    def keep(name: str) -> None:
        if folder is None:
            return
        from PIL import Image

        picture = Image.open(io.BytesIO(browser.get_screenshot_as_png())).convert("RGB")
        Path(folder).mkdir(parents=True, exist_ok=True)
        picture.quantize(NUM_COLOURS).save(Path(folder, f"{name}.png"), optimize=True)

    return keep
