"""Photographs pages of the built site, to look at before a release.

    python -m tools.screenshots docs/_build/html/v0.2 FOLDER [index.html guides/axes.html ...]

Each page gives four pictures: of a screen and of a phone, in the light and the dark theme. It needs
``chromium``.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import itertools
import subprocess
import threading
from pathlib import Path

# Those with the most pictures, tables and wide lines.
PAGES = (
    *("index", "start", "gallery", "comparison", "faq", "benchmarks/step", "benchmarks/memory"),
    *("migrate/from-deepspeed", "guides/axes", "notebooks/01_stages", "notebooks/07_loops"),
    "api/recipes",
)
WIDTHS = {"screen": 1400, "phone": 390}
SCHEMES = {"dark": 0, "light": 1}  # Blink's numbers
# A window has no width below 500, so a phone is a frame in a page of its own.
FRAME = "<body style='margin:0'><iframe src='/{page}' width={width} height={height} frameborder=0>"


class Site(http.server.SimpleHTTPRequestHandler):
    """Serves a folder, and a page in a frame at ``/frame/WIDTH/HEIGHT/PAGE``."""

    def do_GET(self) -> None:
        if not self.path.startswith("/frame/"):
            super().do_GET()
            return
        width, height, page = self.path.removeprefix("/frame/").split("/", 2)
        body = FRAME.format(page=page, width=width, height=height).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Say nothing."""


def photograph(address: str, picture: Path, width: int, height: int, scheme: int) -> None:
    """Write a picture of the page at an address."""
    command = ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += [f"--screenshot={picture}", f"--window-size={max(width, 500)},{height}"]
    command += [f"--blink-settings=preferredColorScheme={scheme}", "--virtual-time-budget=4000"]
    subprocess.run([*command, address], check=True, capture_output=True, timeout=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("site", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("pages", nargs="*", default=[f"{name}.html" for name in PAGES])
    parser.add_argument("--height", type=int, default=6000, help="pixels from the top of a page")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    handler = functools.partial(Site, directory=str(options.site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for page, width, scheme in itertools.product(options.pages, WIDTHS, SCHEMES):
            name = f"{page.removesuffix('.html').replace('/', '-')}-{width}-{scheme}.png"
            size = (WIDTHS[width], options.height)
            address = f"http://127.0.0.1:{server.server_port}/frame/{size[0]}/{size[1]}/{page}"
            photograph(address, options.folder / name, *size, SCHEMES[scheme])
            print(options.folder / name, flush=True)
        server.shutdown()


if __name__ == "__main__":
    main()
