"""Pages of ours in a browser."""

from collections.abc import Callable, Iterator
from typing import Any


def open_page(browser: Any, url: str, ready: Callable[[Any], None], width: int, scheme: str) -> Iterator[Any]:
    """A page that is `ready`; at the end nothing must have gone wrong, and nothing but its own address been asked."""
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    wrong: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: wrong.append(message.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda asking: asked.append(asking.url))
    page.goto(url)
    ready(page)
    yield page
    assert wrong == []
    assert [one for one in asked if not one.startswith((url.partition("#")[0], "data:"))] == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "wider than the window"
    page.close()
