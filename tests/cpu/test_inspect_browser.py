"""The pages in a real browser: they load, fold, filter and lead where they say."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

pytest.importorskip("cupy", reason="compiling needs CuPy and NVRTC")

from deepep_cupy.cli.main import main

BROWSER = next(
    (
        found
        for name in ("chromium", "chromium-browser", "google-chrome", "chrome")
        if (found := shutil.which(name))
    ),
    None,
)
pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="no chromium or chrome here: apt-get install chromium"
)

PROBE = """<script>
addEventListener("load", () => {
  const said = {}, shown = e => e.checkVisibility();
  const file = document.querySelector("details.file");
  const before = shown(file.querySelector(".line.m"));
  file.open = false;
  const folded = !shown(file.querySelector(".line.m"));
  file.open = true;
  said.folds = before && folded && shown(file.querySelector(".line.m"));
  said.plain = shown(document.querySelector(".line:not(.m)"));
  document.querySelector("label[for=show-all]").click();
  said.all = shown(document.querySelector(".line:not(.m)"));
  document.querySelector("label[for=show-fences]").click();
  said.fences = shown(document.querySelector(".k-fences"));
  said.others = [...document.querySelectorAll(".line:not(.k-fences)")].some(shown);
  document.querySelector("label[for=show-all]").click();
  const links = [...document.querySelectorAll("a[href^='#']")];
  said.lost = links.filter(a => !document.getElementById(a.getAttribute("href").slice(1))).length;
  const link = document.querySelector("p.chain a");
  link.click();
  said.target = document.querySelector(":target").id === link.getAttribute("href").slice(1);
  said.links = links.length;
  document.body.dataset.said = JSON.stringify(said);
});
</script>"""


def browse(tmp_path, page, *options):
    done = subprocess.run(
        [
            *(BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
            f"--user-data-dir={tmp_path / 'profile'}",
            *("--host-resolver-rules=MAP * ~NOTFOUND", *options, page.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    path = tmp_path_factory.mktemp("pages") / "barrier.html"
    assert main(["kernels", "show", "barrier", "--html", str(path)]) == 0
    return path


def test_folding_filters_and_links_work(page, tmp_path):
    probed = tmp_path / "probed.html"
    probed.write_text(page.read_text() + PROBE)
    dom = browse(tmp_path, probed, "--dump-dom")
    said = re.search(r'<body data-said="([^"]*)"', dom)
    assert said, dom[-2000:]
    found = said[1].replace("&quot;", '"')
    for wanted in (
        *('"folds":true', '"plain":false', '"all":true', '"fences":true', '"others":false'),
        *('"lost":0', '"target":true'),
    ):
        assert wanted in found, found


def test_the_page_works_without_a_script(page, tmp_path):
    dom = browse(tmp_path, page, "--dump-dom")
    assert "fence.acq_rel.sys" in dom
    assert "<script" not in dom


def test_a_picture_of_the_page_is_no_blank_sheet(page, tmp_path):
    picture = tmp_path / "page.png"
    browse(tmp_path, page, f"--screenshot={picture}", "--window-size=1400,1200")
    data = picture.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert len(data) > 50_000
