"""All slides as a browser sets them: nothing leaves its slide, and text is as large as the last row needs it."""

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from common.labs import find, slides

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync"
FLAGS += " --virtual-time-budget=2000"
SMALLEST = {"P": 24, "TABLE": 22, "FIGCAPTION": 22, "PRE": 16.5}  # pixels of letters, on slides of 720
MEASURE = """<script>
const seen = [...slides].map((slide, at) => {
  show(at);
  const shown = [...slide.children].filter((each) => each.tagName !== "ASIDE");
  const end = Math.max(...shown.map((each) => each.getBoundingClientRect().bottom));
  const scale = slide.getBoundingClientRect().height / 720, top = slide.getBoundingClientRect().top;
  const sizes = [...slide.querySelectorAll("p:not(.where), pre, table, figcaption")].filter((e) => !e.closest("aside"))
    .map((each) => [each.tagName, parseFloat(getComputedStyle(each).fontSize)]);
  const filled = shown.reduce((sum, each) => sum + each.offsetHeight, 0) / 664;
  return { end: (end - top) / scale, sizes, filled };
});
document.body.innerHTML = "<pre>" + JSON.stringify(seen) + "</pre>";
</script>"""

JUMP = """<script>
const seen = [];
function type(keys) {
  for (const key of keys) document.dispatchEvent(new KeyboardEvent("keydown", { key }));
  seen.push([now + 1, count.textContent]);
}
type(["1", "2"]);
postMessage({ key: "" }, "*");  // as a window of notes asks, between two keys
setTimeout(() => {
  type(["Enter"]);
  type(["ArrowLeft"]);
  type(["2", "f", "Enter"]);
  type(["9", "9", "9", "Enter"]);
  location.hash = "#7";
  setTimeout(() => {
    seen.push([now + 1, location.hash]);
    document.body.innerHTML = "<pre>" + JSON.stringify(seen) + "</pre>";
  }, 100);
}, 100);
</script>"""
needs_browser = pytest.mark.skipif(not CHROMIUM or not os.environ.get("TEST_ALL"), reason="needs Chromium, TEST_ALL=1")


def seen_in_browser(folder: Path, tmp_path: Path, script: str) -> list:
    """What a script at the end of a lesson's slides writes as JSON."""
    page = slides.write_slides(folder, tmp_path / f"{folder.name}.html")
    text = page.read_text(encoding="utf-8")
    page.write_text(re.sub(r'(?<=src=")data:image/gif[^"]+', "", text) + script, encoding="utf-8")
    words = [CHROMIUM, *FLAGS.split(), f"--user-data-dir={tmp_path}/chromium", "--dump-dom", f"file://{page}"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    return json.loads(html.unescape(re.search("<pre>(.*)</pre>", done.stdout, re.DOTALL)[1]))


@needs_browser
def test_slides_have_room_and_large_letters(tmp_path):
    measured = []
    for folder in sorted(find.ROOT.glob("step0*")):
        measured += seen_in_browser(folder, tmp_path, MEASURE)
    assert len(measured) > 250 and all(each["end"] <= 686 for each in measured)
    assert all(size >= SMALLEST[kind] for each in measured for kind, size in each["sizes"])
    assert sum(each["filled"] < 0.45 for each in measured) < 0.04 * len(measured), "slides that are half empty"


@needs_browser
def test_a_number_goes_to_its_slide(tmp_path):
    seen = seen_in_browser(find.ROOT / "step05_pipeline", tmp_path, JUMP)
    last = seen[4][0]
    of = [f"{number} / {last}" for number in (12, 11, 11, last)]
    assert seen == [[1, "Enter: to 12"], [12, of[0]], [11, of[1]], [11, of[2]], [last, of[3]], [7, "#7"]]
