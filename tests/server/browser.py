"""Headless Chromium for tests of the page, and what they do with it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait
from tests.server.running import PATIENCE

T = TypeVar("T")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")


class Browser:
    """One window with the page in it."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, url: str, *, width: int = 1280, height: int = 800, dark: bool = False) -> None:
        """Load a page anew in a viewport of this size."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
        self.driver.get(url)
        self.wait(lambda: self.text("model") != "")

    def wait(self, condition: Callable[[], T]) -> T:
        """What ``condition`` returns once that is true; fails where it never is."""
        return WebDriverWait(self.driver, PATIENCE, 0.02).until(lambda _: condition())

    def script(self, code: str, *args: Any) -> Any:
        """What a piece of JavaScript returns."""
        return self.driver.execute_script(code, *args)

    def find(self, selector: str) -> WebElement:
        """The first element that a CSS selector fits."""
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list[WebElement]:
        """All elements that it fits."""
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def text(self, element_id: str) -> str:
        """An element's text, shown or not, whatever has become of the element since."""
        found: str = self.script(
            "return document.getElementById(arguments[0])?.textContent.trim() ?? ''", element_id
        )
        return found

    def set(self, **fields: object) -> None:
        """Fill in settings by their names."""
        for name, value in fields.items():
            field = self.find(f"#knobs [name={name}]")
            field.clear()
            field.send_keys(str(value))

    def send(self, message: str) -> None:
        """Type a message, and send it with Enter."""
        self.find("#message").send_keys(message, Keys.ENTER)

    def ask(self, message: str) -> WebElement:
        """Send a message and wait for the end of its answer, which is returned."""
        count = len(self.all(".answer"))
        self.send(message)
        self.wait(lambda: len(self.all(".answer:not(.streaming)")) > count)
        return self.all(".answer")[-1]

    def replay(self, answer: WebElement) -> str:
        """Press an answer's button and wait for the verdict."""
        answer.find_element(By.CSS_SELECTOR, ".replay").click()
        self.wait(lambda: not self.find("#send").get_property("hidden"))
        return answer.find_element(By.CSS_SELECTOR, ".verdict").text

    def complaints(self) -> list[str]:
        """What the browser's console holds since the last time: refused loads, broken policies, errors."""
        entries = self.driver.execute("getLog", {"type": "browser"})["value"]
        return [entry["message"] for entry in entries]


def facts(answer: WebElement) -> dict[str, str]:
    """What is said beneath an answer."""
    pairs = answer.find_elements(By.CSS_SELECTOR, ".facts div")
    return {
        pair.find_element(By.TAG_NAME, "dt").text: pair.find_element(By.TAG_NAME, "dd").text for pair in pairs
    }


def text_of(answer: WebElement) -> str:
    """An answer's text, white space and all."""
    text = answer.find_element(By.CSS_SELECTOR, ".text").get_property("textContent")
    assert isinstance(text, str)
    return text


@contextmanager
def chromium(profile: Path) -> Iterator[Browser]:
    """A browser without a display; needs :data:`CHROMIUM` and :data:`DRIVER`."""
    assert CHROMIUM is not None
    assert DRIVER is not None
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in (
        "--headless=new",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        f"--user-data-dir={profile}",
    ):
        options.add_argument(argument)
    if os.geteuid() == 0:
        options.add_argument("--no-sandbox")  # Chromium has none for root
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    try:
        yield Browser(driver)
    finally:
        driver.quit()
