"""Look at the playground: pictures of every mode, wide and narrow, light and dark; axe-core; bytes; paint.

    cd web && npm ci && cd ..
    python -m tools.look_at_playground pictures --record

Needs playwright and chromium. The pictures are for eyes; --record writes the figures to benchmarks/results.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright
from tests.browser.playground_process import CHROMIUM, playing

AXE = Path(__file__).parent.parent / "web" / "node_modules" / "axe-core" / "axe.min.js"
MODES = ("sudoku", "forms", "canvas", "chat", "fill", "edit", "decide", "race", "trace")
WIDTHS, SCHEMES = (1440, 390), ("light", "dark")
SERIOUS = ("serious", "critical")
_PAINT = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
_BYTES = """[...performance.getEntriesByType('navigation'), ...performance.getEntriesByType('resource')]
  .reduce((sum, entry) => sum + entry.transferSize, 0)"""


def show(page: Page, address: str, mode: str) -> None:
    """The mode, after its button was pressed and its last step is shown."""
    page.goto(f"{address}/#{mode}")
    page.locator(f".mode-{mode}").wait_for()
    if mode == "trace":
        return
    page.locator(f".mode-{mode} button.main").first.click()
    page.locator(f".mode-{mode} .tools >> text=Export trace").first.wait_for()
    if mode == "race":
        page.locator(f".mode-{mode} .verdict").wait_for()
    token = page.locator(f".mode-{mode} .canvas .token, .mode-{mode} .place:not(.clue)").nth(1)
    token.focus()


def findings(page: Page) -> list[dict[str, Any]]:
    """What axe-core finds serious."""
    page.evaluate(AXE.read_text())
    found: dict[str, Any] = page.evaluate("axe.run(document)")
    return [
        {"id": one["id"], "impact": one["impact"], "where": [node["target"] for node in one["nodes"]][:3]}
        for one in found["violations"]
        if one["impact"] in SERIOUS
    ]


def visit(browser: Browser, address: str, out: Path, width: int, scheme: Any) -> list[dict[str, Any]]:
    # Only for axe: the page's own policy allows no script from outside.
    context = browser.new_context(
        viewport={"width": width, "height": 900},
        color_scheme=scheme,
        reduced_motion="reduce",
        bypass_csp=True,
    )
    page = context.new_page()
    found = []
    for mode in MODES:
        show(page, address, mode)
        page.screenshot(path=out / f"{mode}-{width}-{scheme}.png", full_page=width < 600)
        found += [{"mode": mode, "width": width, "scheme": scheme, **one} for one in findings(page)]
    context.close()
    return found


def measure(browser: Browser, address: str) -> dict[str, Any]:
    """A first visit with an empty cache: the median of five."""
    paints, sizes = [], []
    for _ in range(5):
        context = browser.new_context()
        page = context.new_page()
        page.goto(address)
        page.locator("nav a").first.wait_for()
        page.wait_for_function(_PAINT)
        paints.append(float(page.evaluate(_PAINT)))
        sizes.append(int(page.evaluate(_BYTES)))
        context.close()
    return {
        "first_contentful_paint_ms": sorted(paints)[2],
        "first_contentful_paint_ms_all": [round(value) for value in paints],
        "bytes_transferred": sizes[0],
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="a directory for the pictures")
    parser.add_argument("--record", action="store_true", help="write the figures to benchmarks/results")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    with playing() as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        figures = measure(browser, address)
        serious = [
            one
            for width in WIDTHS
            for scheme in SCHEMES
            for one in visit(browser, address, args.out, width, scheme)
        ]
        version = browser.version
        browser.close()
    # Without the directory of this machine.
    command = "python -m tools.look_at_playground pictures --record"
    results = {
        "command": command,
        **figures,
        "pages_checked": len(MODES) * 4,
        "serious_findings": serious,
        "chromium": version,
    }
    if args.record:
        from benchmarks import record

        record.write("playground", results)
    else:
        print(results)
    return 1 if serious else 0


if __name__ == "__main__":
    sys.exit(main())
