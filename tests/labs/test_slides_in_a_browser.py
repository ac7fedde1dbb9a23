"""All slides as a browser sets them: nothing leaves its slide, and text is as large as the last row needs it."""

import html
import json
import os
import re
import shutil
import subprocess

import pytest

from common.labs import find, slides

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync"
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


@pytest.mark.skipif(not CHROMIUM or not os.environ.get("TEST_ALL"), reason="needs Chromium, TEST_ALL=1")
def test_slides_have_room_and_large_letters(tmp_path):
    measured = []
    for folder in sorted(find.ROOT.glob("step0*")):
        page = slides.write_slides(folder, tmp_path / f"{folder.name}.html")
        text = page.read_text(encoding="utf-8")
        page.write_text(re.sub(r'(?<=src=")data:image/gif[^"]+', "", text) + MEASURE, encoding="utf-8")
        words = [CHROMIUM, *FLAGS.split(), f"--user-data-dir={tmp_path}/chromium", "--dump-dom", f"file://{page}"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
        measured += json.loads(html.unescape(re.search("<pre>(.*)</pre>", done.stdout, re.DOTALL)[1]))
    assert len(measured) > 250 and all(each["end"] <= 686 for each in measured)
    assert all(size >= SMALLEST[kind] for each in measured for kind, size in each["sizes"])
    assert sum(each["filled"] < 0.45 for each in measured) < 0.04 * len(measured), "slides that are half empty"
