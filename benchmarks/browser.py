"""Opens pages in a headless Chromium, if one is installed: light, dark, as on a phone, printed.

python benchmarks/browser.py outputs/default/tiny/report.html ...
Writes PAGE_light.png, PAGE_dark.png, PAGE_phone.png and PAGE.pdf into --out, for a person to look
at. Ends with status 1 where a browser reports an error of a page, as a request that is refused.
"""

from __future__ import annotations

import argparse
import html
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
HEIGHT = 16000
"""Height of the pictures, in CSS pixels; a longer page is cut."""
PHONE = 390
"""Width of a phone, in CSS pixels; a browser's own window cannot be as narrow."""
DARK = "--blink-settings=preferredColorScheme=0"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("pages", nargs="*", type=Path, help="(every page in outputs/)")
    parser.add_argument("--out", type=Path, default=Path("outputs/browser"))
    parser.add_argument("--browser", help="the program (the first that is installed)")
    given = parser.parse_args()
    browser = given.browser or next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        print(f"no browser is installed, so nothing was looked at; one of {', '.join(BROWSERS)}")
        return
    names = ("report.html", "compare.html", "replay_*.html")
    pages = given.pages or sorted(page for name in names for page in Path("outputs").rglob(name))
    given.out.mkdir(parents=True, exist_ok=True)
    faults = [fault for page in pages for fault in look(browser, page, given.out)]
    print(*faults, sep="\n")
    print(f"{len(pages)} pages, {len(faults)} errors: {given.out}")
    sys.exit(bool(faults))


def look(browser: str, page: Path, out: Path) -> list[str]:
    """Take the pictures of a page; return what the browser reports of it."""
    name = "_".join(page.absolute().with_suffix("").parts[1:][-4:])
    address = page.absolute().as_uri()
    with tempfile.TemporaryDirectory() as folder:
        frame = Path(folder) / "phone.html"
        frame.write_text(
            f'<body style="margin:0"><iframe src="{html.escape(address)}" '
            f'style="width:{PHONE}px;height:{HEIGHT}px;border:0"></iframe></body>'
        )
        views = {
            "light.png": (f"--window-size=1280,{HEIGHT}", address),
            "dark.png": (f"--window-size=1280,{HEIGHT}", DARK, address),
            "phone.png": (f"--window-size=500,{HEIGHT}", frame.as_uri()),
        }
        reported = []
        for view, arguments in views.items():
            picture = f"--screenshot={out.absolute() / f'{name}_{view}'}"
            reported += opened(browser, folder, picture, *arguments)
        printed = f"--print-to-pdf={out.absolute() / f'{name}.pdf'}"
        return reported + opened(browser, folder, printed, address)


def opened(browser: str, profile: str, *arguments: str) -> list[str]:
    """Open a page without a network; return the lines of its console."""
    done = subprocess.run(
        [
            browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            "--enable-logging=stderr", "--host-resolver-rules=MAP * ~NOTFOUND",
            f"--user-data-dir={profile}", *arguments,
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return [line for line in done.stderr.splitlines() if "CONSOLE" in line]


if __name__ == "__main__":
    main()
