"""Checks in a browser that no page is wider than a screen: ``python docs/check_layout.py``.

Each page of ``docs/_build/html`` is opened in Chromium, as wide as a desktop and a phone. A page
must not be wider than the window, and each formula, table and block of code must fit its place or
scroll in it. Formulas that MathJax cannot read are faults too.
"""

from __future__ import annotations

import contextlib
import pathlib
import shutil
import sys
from collections.abc import Iterator

from playwright.sync_api import Page, sync_playwright

SITE = pathlib.Path(__file__).parent / "_build" / "html"
BROWSERS = ("chromium", "google-chrome", "chromium-browser")
WIDTHS = (1280, 390)  # Pixels of a desktop and of a phone.

TYPESET = "async () => { if (window.MathJax?.startup) await MathJax.startup.promise; }"
# Parts of the article that reach beyond the window without a box of their own to scroll in. The
# theme lets the whole article scroll sideways, which hides such parts from the window's own width.
FAULTS = """() => {
  const width = document.documentElement.clientWidth;
  const article = document.querySelector("article");
  const scrolls = (element) => {
    for (let e = element; e && e !== article; e = e.parentElement)
      if (["auto", "scroll"].includes(getComputedStyle(e).overflowX)) return true;
    return false;
  };
  // Formulas with an error, with a name in red that MathJax does not know, or left as they were.
  const unread = document.querySelectorAll(
    ".math:not(:has(mjx-container)), mjx-merror, mjx-mtext[style*='color: red']",
  );
  const spoken = "mjx-assistive-mml";  // Hidden text for screen readers.
  const all = article?.querySelectorAll(`*:not(${spoken}, ${spoken} *)`) ?? [];
  const wide = [...all].filter((e) => e.getBoundingClientRect().right > width + 1 && !scrolls(e));
  const text = (e) => `${e.tagName.toLowerCase()} ${e.textContent.trim().slice(0, 60)}`;
  return [
    ...[...unread].map((e) => `MathJax cannot read ${text(e)}`),
    ...wide.filter((e) => !wide.includes(e.parentElement)).map((e) => `${text(e)} is too wide`),
    ...(document.documentElement.scrollWidth > width ? ["The page scrolls sideways."] : []),
  ];
}"""


def page_faults(page: Page, path: pathlib.Path) -> Iterator[str]:
    """Yields a sentence for each fault of one file at each width."""
    page.goto(path.as_uri())
    page.evaluate(TYPESET)
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        for fault in page.evaluate(FAULTS):
            yield f"{path.relative_to(SITE)} at {width} pixels: {fault}"


@contextlib.contextmanager
def browser_page() -> Iterator[Page]:
    """Opens a page of a browser that is installed, for a site that was built."""
    browser_path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser_path is None:
        sys.exit(f"Install one of {', '.join(BROWSERS)}.")
    if not (SITE / "index.html").exists():
        sys.exit(f"{SITE} holds no built site; sphinx-build makes one.")
    with sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--disable-gpu"]
        browser = playwright.chromium.launch(executable_path=browser_path, args=arguments)
        yield browser.new_page()
        browser.close()


def main() -> str | None:
    """Returns all faults, or prints how many pages there are if there is none."""
    paths = sorted(SITE.resolve().rglob("*.html"))
    with browser_page() as page:
        faults = [fault for path in paths for fault in page_faults(page, path)]
    if faults:
        return "\n".join(faults)
    print(f"{len(paths)} pages fit {' and '.join(map(str, WIDTHS))} pixels.")
    return None


if __name__ == "__main__":
    sys.exit(main())
