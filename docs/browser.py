"""Opens pages of the site and of reports in Chromium, in both themes: ``python docs/browser.py SITE``.

A page fails if a script or a file in it does, if one of its drawings is empty, or if the themes look alike. Screenshots
are in ``SITE/screenshots``. The browser is Qt's (``PyQt6-WebEngine``), without a window.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from PyQt6.QtCore import QEventLoop, QTimer, QUrl
from PyQt6.QtWebEngineCore import QWebEnginePage
from PyQt6.QtWebEngineWidgets import QWebEngineView
from PyQt6.QtWidgets import QApplication

# Pages, and the least number of drawings on them.
PAGES = {
    "index": 1,
    "idle": 3,
    "does-not-fit": 1,
    "pipeline": 1,
    "sharding": 1,
    "reference": 0,
    "reports/plan": 2,
    "reports/timeline": 1,
    "reports/memory": 0,
}
THEMES = {"light": 1, "dark": 0}  # Chromium's numbers
SIZE = (1280, 1600)
SETTLED_MS = 1500  # until fonts and pictures are there

# Pictures of another theme are hidden, and not looked at.
LOOK = """(() => {
  const shown = element => element.getClientRects().length > 0;
  const marks = 'rect, path, line, circle, polyline, polygon';
  const isEmpty = drawing => drawing.tagName === 'IMG'
    ? !drawing.complete || drawing.naturalWidth === 0
    : !drawing.querySelector(marks) || drawing.getBBox().width === 0;
  const drawings = [...document.querySelectorAll('article img, svg[role=img]')].filter(shown);
  const name = drawing => drawing.src || drawing.getAttribute('aria-label');
  return {
    drawings: drawings.length,
    empty: drawings.filter(isEmpty).map(name),
    background: getComputedStyle(document.body).backgroundColor,
  };
})()"""


class View(NamedTuple):
    """A page as the browser shows it."""

    errors: list[str]
    drawings: int
    empty: list[str]
    background: str


class _Page(QWebEnginePage):
    """Keeps what the console says of errors."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[str] = []

    def javaScriptConsoleMessage(
        self, level: QWebEnginePage.JavaScriptConsoleMessageLevel, message: str | None, line: int, source: str | None
    ) -> None:
        """Called by Qt."""
        if level == QWebEnginePage.JavaScriptConsoleMessageLevel.ErrorMessageLevel:
            self.errors.append(f"{source}:{line}: {message}")


def view(path: Path, picture: Path) -> View:
    """Open the page ``path`` in the current theme, and save a screenshot as ``picture``."""
    window, page, loop, found = QWebEngineView(), _Page(), QEventLoop(), {}

    def take(result: dict[str, object]) -> None:
        found.update(result)
        loop.quit()

    def loaded(succeeded: bool) -> None:
        if not succeeded:
            page.errors.append(f"{path} did not load")
        QTimer.singleShot(SETTLED_MS, lambda: page.runJavaScript(LOOK, take))

    window.setPage(page)
    window.resize(*SIZE)
    page.loadFinished.connect(loaded)
    page.load(QUrl.fromLocalFile(str(path.resolve())))
    window.show()
    loop.exec()
    window.grab().save(str(picture))
    window.setPage(None)
    return View(page.errors, **found)


def views_in(theme: str, site: Path) -> dict[str, View]:
    """All pages of ``site`` in a theme, which Chromium takes when it starts: in a process of its own."""
    flags = f"--disable-gpu --blink-settings=preferredColorScheme={THEMES[theme]}"
    environ = {"QT_QPA_PLATFORM": "offscreen", "QTWEBENGINE_CHROMIUM_FLAGS": flags, **os.environ}
    if os.geteuid() == 0:  # Chromium has no sandbox for root
        environ["QTWEBENGINE_DISABLE_SANDBOX"] = "1"
    command = [sys.executable, __file__, str(site), theme]
    text = subprocess.run(command, env=environ, check=True, capture_output=True, text=True, timeout=300).stdout
    return {name: View(*values) for name, values in json.loads(text).items()}


def problems(site: Path) -> Iterator[str]:
    """Problems of the pages of ``site``, as sentences."""
    seen_in = {theme: views_in(theme, site) for theme in THEMES}
    for name, least in PAGES.items():
        views = {theme: seen[name] for theme, seen in seen_in.items()}
        for theme, seen in views.items():
            yield from (f"{name}, {theme}: {error}" for error in seen.errors)
            yield from (f"{name}, {theme}: the drawing {drawing!r} is empty" for drawing in seen.empty)
            if seen.drawings < least:
                yield f"{name}, {theme}: {seen.drawings} drawings instead of {least}"
        if len({seen.background for seen in views.values()}) < len(THEMES):
            yield f"{name}: light and dark have one background, {views['light'].background}"


def show_all(site: Path, theme: str) -> None:
    """Open all pages, in the theme of this process, and print what the browser shows as JSON."""
    application = QApplication(sys.argv)
    pictures = site / "screenshots"
    print(
        json.dumps(
            {name: view(site / f"{name}.html", pictures / f"{name.replace('/', '-')}-{theme}.png") for name in PAGES}
        )
    )
    application.quit()


def main(site: Path) -> int:
    """Look at the pages of ``site``; return the exit code."""
    (site / "screenshots").mkdir(exist_ok=True)
    found = list(problems(site))
    print(*found, f"{len(PAGES)} pages in {len(THEMES)} themes: {len(found)} problems", sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    if len(sys.argv) > 2:
        show_all(Path(sys.argv[1]), sys.argv[2])
    else:
        sys.exit(main(Path(sys.argv[1])))
