from __future__ import annotations

from collections.abc import Iterator

import pytest

from tools.chromium import Browser, Page, browser
from tools.draw_console import served_fleet


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    # A name of another site that resolves to this machine, as an attacker's DNS server would have it.
    with browser(tmp_path_factory.mktemp("chromium"), "--host-resolver-rules=MAP *.example 127.0.0.1") as started:
        yield started


@pytest.fixture
def chromium_page(chromium: Browser) -> Iterator[Page]:
    page = chromium.page()
    yield page
    page.close()


@pytest.fixture
def page(chromium_page: Page) -> Iterator[Page]:
    """One that must cause no error, exception or violation of the content security policy."""
    yield chromium_page
    # A console without captures and profiles says so; the browser notes that answer as an error.
    assert not [one for one in chromium_page.problems() if "status of 501" not in one]


@pytest.fixture(scope="session")
def fleet() -> Iterator[str]:
    """The address of a console with seven runs."""
    with served_fleet() as url:
        yield url
