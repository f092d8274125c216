"""The site builds without a warning, and asks nobody for anything when it is read."""

from __future__ import annotations

import doctest
import hashlib
import importlib.util
import itertools
import json
import os
import posixpath
import re
import struct
import subprocess
import sys
from collections import Counter
from importlib import import_module
from pathlib import Path

import pytest

import sparseconv

ROOT = Path(__file__).parents[2]
#: characters that a line of code has room for on a page of 1,300 pixels
WIDEST = 104


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings_handlers.python")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def test_pages_load_nothing_from_elsewhere(site):
    for page in site.rglob("*.html"):
        sources = re.findall(r"<(?:script|img|link|iframe)[^>]+(?:src|href)=[\"']?([^\"'> ]+)", page.read_text())
        assert [s for s in sources if s.startswith(("http:", "https:", "//"))] == [], page


@pytest.mark.parametrize("module", ["", *sparseconv.MODULES])
def test_public_names_are_in_the_reference(site, module):
    """Each has a heading and words of its own: mkdocstrings leaves out what it finds no docstring of."""
    found = "".join(page.read_text() for page in (site / "api").glob("*.html"))
    headings = set(re.findall(r'<h\d id="([\w.]+)" class="doc', found))
    names = {heading.rpartition(".")[2] for heading in headings}
    room = import_module(f"sparseconv.{module}".rstrip("."))
    assert [name for name in room.__all__ if name not in names] == []


@pytest.mark.parametrize("library", ["spconv.pytorch", "minkowski", "torchsparse", "torchsparse.nn", "fvdb"])
def test_names_of_other_libraries_are_found(site, library):
    """By the site's search, whose index holds whole words."""
    pages = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    words = set(re.findall(r"\w+", " ".join(f"{page['title']} {page['text']}" for page in pages)))
    names = import_module(f"sparseconv.interop.{library}").__all__
    assert [name for name in names if name not in words] == []


def test_examples_in_docstrings_are_code(site):
    for page in (site / "api").glob("*.html"):
        assert "<blockquote>" not in page.read_text(), page


def test_the_reference_shows_no_markup_and_one_result_a_function(site):
    for page in (site / "api").glob("*.html"):
        text = page.read_text()
        article = text[text.index("<article") :]
        assert "```" not in article, page
        assert ":func:" not in article, page
        assert "# doctest:" not in article, page
        for results in re.findall(r"Returns:</span></p>\s*<ul>(.*?)</ul>", article, re.DOTALL):
            assert results.count("<li") == 1, (page, results[:300])


def test_every_type_leads_to_where_it_is_described(site):
    """In signatures and descriptions; a name in lower case is a value."""
    for page in (site / "api").glob("*.html"):
        text = page.read_text()
        article = text[text.index("<article") :]
        unlinked = {name for name in re.findall(r'<span title="([\w.]+)">', article) if re.search(r"[a-z]$", name)}
        assert {name for name in unlinked if name.rpartition(".")[2][0].isupper()} == set(), page
        assert 'title="torch.Tensor"' not in article or "https://docs.pytorch.org/docs/stable/tensors.html" in article


def test_what_is_printed_scrolls_only_where_it_has_columns(site):
    text = (site / "how-it-works.html").read_text()
    blocks = re.findall(r'<div class="language-text([^"]*)highlight">(.*?)</div>', text, re.DOTALL)
    columns = [body for kind, body in blocks if "columns" in kind]
    assert 0 < len(columns) < len(blocks)
    assert all("tensor(" in body for body in columns)
    assert all('class="line"' in body for _, body in blocks)


def pages(site):
    """The text of each page, without that of the bar and the menu."""
    for path in sorted(site.rglob("*.html")):
        text = path.read_text()
        yield path.relative_to(site).as_posix(), text[text.index("<article") :] if "<article" in text else text


def test_links_and_pictures_lead_somewhere(site):
    anchors = {}
    for path in site.rglob("*.html"):
        anchors[path.relative_to(site).as_posix()] = set(re.findall(r'\bid="?([^" >]+)', path.read_text()))
    lost = []
    for page, text in pages(site):
        for target in re.findall(r'(?:href|src)="([^"]+)"', text):
            if "://" in target or target.startswith(("mailto:", "/")):
                continue
            path, _, anchor = target.partition("#")
            there = posixpath.normpath(posixpath.join(posixpath.dirname(page), path)) if path else page
            there = there if there != "." else "index.html"
            if not (site / there).exists() or (anchor and there in anchors and anchor not in anchors[there]):
                lost.append((page, target))
    assert lost == []


def test_every_page_has_a_title_and_a_description_of_its_own(site):
    titles, descriptions = Counter(), Counter()
    for path in site.rglob("*.html"):
        text = path.read_text()
        titles.update(re.findall(r"<title>([^<]*)</title>", text))
        (words,) = re.findall(r'<meta name="description" content="([^"]*)"', text)
        assert 0 < len(words) <= 160, path
        if "api" not in path.parts:
            descriptions.update([words])
        assert f'<meta property="og:description" content="{words}"' in text, path
    assert [title for title, count in titles.items() if count > 1] == []
    assert [words for words, count in descriptions.items() if count > 1] == []


def test_headings_go_down_by_one_and_say_different_things(site):
    for page, text in pages(site):
        found = re.findall(r"<h([1-6])[^>]*>(.*?)</h\1>", text, re.DOTALL)
        levels = [int(level) for level, _ in found]
        assert levels[:1] == [1], page
        assert levels.count(1) == 1, page
        assert all(after <= before + 1 for before, after in itertools.pairwise(levels)), page
        if not page.startswith("api/"):
            words = [re.sub(r"<[^>]*>", "", words) for _, words in found]
            assert [word for word, count in Counter(words).items() if count > 1] == [], page


def test_pictures_are_described_and_lead_to_their_full_size(site):
    small = []
    for page, text in pages(site):
        for tag in re.findall(r"<img [^>]*>", text):
            (alt,), (source,) = re.findall(r'alt="([^"]*)"', tag), re.findall(r'src="([^"]*)"', tag)
            assert alt.strip(), (page, source)
            assert f'<a href="{source}">' in text, (page, source)
            data = (site / posixpath.normpath(posixpath.join(posixpath.dirname(page), source))).read_bytes()
            assert len(data) < 400_000, (page, source)
            if data.startswith(b"\x89PNG") and struct.unpack(">I", data[16:20])[0] < 360:
                small.append(source)
    assert small == []


def test_code_fits_a_page():
    """Outputs keep their columns, and changes of files theirs."""
    long = []
    for path in [ROOT / "README.md", ROOT / "examples" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", path.read_text(), re.DOTALL | re.MULTILINE):
            if language not in ("text", "diff"):
                long += [(path.name, line) for line in block.splitlines() if len(line) > WIDEST]
    assert long == []


def test_outputs_do_not_look_like_code(site):
    text = (site / "how-it-works.html").read_text()
    assert 'class="language-python highlight"' in text
    assert 'class="language-text highlight"' in text
    assert "language-text" in (site / "stylesheets" / "wide.css").read_text()


def test_notebooks_and_recipes_are_pages(site):
    for path in (ROOT / "notebooks").glob("[0-9]*.ipynb"):
        page = (site / "notebooks" / f"{path.stem}.html").read_text()
        assert 'class="language-text highlight"' in page
        assert f'src="{path.stem}_1.png"' in page
    assert (site / "examples" / "results" / "scannet.png").read_bytes() == (
        ROOT / "examples" / "results" / "scannet.png"
    ).read_bytes()


def test_the_page_of_what_is_not_found_leads_on(site):
    page = (site / "404.html").read_text()
    assert "index.html" in page[page.index("<article") :]


def test_the_search_puts_users_pages_first(site):
    index = (site / "search" / "search_index.json").read_text()
    assert "MinkowskiConvolution" in index
    assert "SubMConv3d" in index
    assert '"boost":0.05' in index.replace(" ", "")


def test_pictures_of_results_show_the_committed_ones():
    """A picture says of which file it was drawn, and the hash of the file's text then."""
    for name in re.findall(r"\(pictures/(\w+\.png)\)", (ROOT / "docs" / "benchmarks.md").read_text()):
        data = (ROOT / "docs" / "pictures" / name).read_bytes()
        at = data.index(b"tEXtSource\0")
        (length,) = struct.unpack(">I", data[at - 4 : at])
        file, stated = data[at + 11 : at + 4 + length].decode().split()
        now = hashlib.sha256((ROOT / "benchmarks" / "results" / file).read_bytes()).hexdigest()
        assert now.startswith(stated), f"{name}: python -m benchmarks plot benchmarks/results/{file}"


@pytest.mark.parametrize("name", ["site_pages", "docstring_examples"])
def test_hooks_do_what_their_examples_say(name):
    pytest.importorskip("mkdocs")
    pytest.importorskip("griffe")
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    assert doctest.testmod(hook) == (0, len([t for t in doctest.DocTestFinder().find(hook) for _ in t.examples]))


def test_links_that_leave_the_pages_name_a_file_or_lead_to_the_repository(monkeypatch):
    pytest.importorskip("mkdocs")
    spec = importlib.util.spec_from_file_location("site_pages", ROOT / "docs" / "site_pages.py")
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    monkeypatch.delenv("SPARSECONV_REPOSITORY", raising=False)
    text = "a ([results](../oldest.txt)), [its notebook](../notebooks/7_from_spconv.ipynb), [p](../docs/nn.md#norms)"
    kept = "a (results: `oldest.txt`), [its notebook](notebooks/7_from_spconv.md), [p](nn.md#norms)"
    assert hook.linked(text, "index.md") == kept
    assert hook.linked("[how](../docs/export.md)", "examples/index.md") == "[how](../export.md)"
    assert (
        hook.linked("`x[0](y)` ![p](a.png) [b](https://e.org)", "nn.md") == "`x[0](y)` ![p](a.png) [b](https://e.org)"
    )
    with pytest.raises(FileNotFoundError, match="no_such"):
        hook.linked("[a](../no_such.py)", "index.md")
    monkeypatch.setenv("SPARSECONV_REPOSITORY", "owner/name")
    assert hook.linked("([a](../oldest.txt))", "nn.md") == "([a](https://github.com/owner/name/blob/main/oldest.txt))"
