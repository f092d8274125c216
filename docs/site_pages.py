"""For mkdocs: notebooks and recipes become pages, links follow them, and pages read well on a narrow screen."""

from __future__ import annotations

import base64
import builtins
import json
import os
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
#: files of the repository outside of docs/ that are pages of the site
SHOWN = {"examples/README.md": "examples/index.md", "notebooks/README.md": "notebooks/index.md"} | {
    f"notebooks/{path.name}": f"notebooks/{path.stem}.md" for path in (ROOT / "notebooks").glob("[0-9]*.ipynb")
}
SOURCES = {page: source for source, page in SHOWN.items()}
#: how much the search thinks of pages that are not the first to read
SEARCHED = {"decisions": 0.05, "benchmarks": 0.3, "notebooks": 0.5}
UNITS = r"[kMG]|[nmu]?s|[MG]i?B|TB|m?m|%|x"


def on_config(config: Any) -> Any:
    """Other versions are offered where there are some: mike builds those. The header links to the repository."""
    if "mike" not in config.plugins:
        config.extra.pop("version", None)
    if repository := os.environ.get("SPARSECONV_REPOSITORY"):
        config.repo_url, config.repo_name = f"https://github.com/{repository}", repository
    return config


def on_files(files: Files, *, config: Any) -> Files:
    """Adds the pages of `SHOWN` and their pictures."""
    for source, page in SHOWN.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        pictures: dict[str, bytes] = {}
        if source.endswith(".ipynb"):
            text, pictures = from_notebook(json.loads(text), Path(source).stem)
        for link in re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)", text):
            if link not in pictures:
                pictures[link] = (ROOT / source).parent.joinpath(link).read_bytes()
        files.append(File.generated(config, page, content=text))
        for path, data in pictures.items():
            files.append(File.generated(config, posixpath.join(posixpath.dirname(page), path), content=data))
    return files


def from_notebook(notebook: dict[str, Any], stem: str) -> tuple[str, dict[str, bytes]]:
    """A notebook as Markdown, and its pictures by name."""
    parts, pictures, heading = [], {}, stem
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            heading = ([*re.findall(r"^#+ (.*)", source, re.MULTILINE), heading])[0]
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "image/png" in data:
                path = f"{stem}_{len(pictures) + 1}.png"
                pictures[path] = base64.b64decode(data["image/png"])
                parts.append(f"![{heading.replace('`', '')}]({path})")
            elif text := "".join(output.get("text", data.get("text/plain", ""))).rstrip():
                if parts[-1].startswith("```text\n"):  # a cell's lines came in several pieces
                    text = parts.pop().removeprefix("```text\n").removesuffix("```") + text
                parts.append(f"```text\n{text}\n```")
    return "\n\n".join(parts), pictures


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Links that leave docs/ lead to a page of the site, or name a file. Describes the page for search engines.

    Raises:
        FileNotFoundError: a link names a file that is not in the repository.
    """
    here = page.file.src_uri
    if repository := os.environ.get("SPARSECONV_REPOSITORY"):
        markdown = markdown.replace("<address of this repository>", f"https://github.com/{repository}")
    page.meta.setdefault("description", description(markdown))
    for beginning, boost in SEARCHED.items():
        if here.startswith(beginning):
            page.meta.setdefault("search", {"boost": boost})
    blocks = re.split(r"(^```.*?^```$)", markdown, flags=re.DOTALL | re.MULTILINE)
    return "".join(part if part.startswith("```") else kept_together(linked(part, here)) for part in blocks)


def linked(text: str, here: str) -> str:
    """The text of the page at `here`, with its links to the repository as the site has them."""
    source = SOURCES.get(here, f"docs/{here}")

    def link(match: re.Match[str]) -> str:
        if match[0].startswith("`"):
            return match[0]
        opened, words, target, anchor = match.groups()
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        page = SHOWN.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
        if page is not None:
            return f"{opened}[{words}]({posixpath.relpath(page, posixpath.dirname(here) or '.')}{anchor})"
        if not (ROOT / path).exists():
            raise FileNotFoundError(f"{source} links to {target}, which is not in the repository")
        if repository := os.environ.get("SPARSECONV_REPOSITORY"):
            return f"{opened}[{words}](https://github.com/{repository}/blob/main/{path}{anchor})"
        if words.strip("`") in (path, posixpath.basename(path)):
            return f"{opened}`{path}`"
        return f"{opened}{words}: `{path}`" if opened else f"{words} (`{path}`)"

    return re.sub(r"`[^`]*`|(\(?)(?<!!)\[([^\]]+)\]\((?![a-z]+:|#)([^)\s#]+)(#[^)\s]*|)\)", link, text)


def kept_together(text: str) -> str:
    """Numbers stay on the line of their unit, and in tables on the line of the stroke behind them.

    >>> kept_together("| 256 k | `2 k` | 1.3 / 2 |")
    '| 256&nbsp;k | `2 k` | 1.3&nbsp;/ 2 |'
    >>> kept_together("79 k voxels")
    '79&nbsp;k voxels'
    """
    units = rf"(`[^`]*`|\]\([^)]*\))|(?<=\d) (?=(?:{UNITS})(?![\w/]))|(?<=\bC) (?=\d)"
    inside = re.compile(rf"{units}|(?<=\d) (?=/ \d)")
    return "\n".join(
        line if line.startswith("#") else re.sub(inside if line.startswith("|") else units, _joined, line)
        for line in text.split("\n")
    )


def _joined(match: re.Match[str]) -> str:
    return match[1] or "&nbsp;"


def description(markdown: str) -> str:
    """The first paragraph of a page in plain words, at most 160 characters; empty where there is none.

    >>> description("# Memory\\n\\nWhat is **held**: [maps](a.md) and `x`.\\n\\nMore.")
    'What is held: maps and x.'
    """
    for block in re.sub(r"^```.*?^```$|^#[^\n]*$", "\n", markdown, flags=re.DOTALL | re.MULTILINE).split("\n\n"):
        if re.match(r"\s*(?:[|>!<:]|[-*] |\d+\. |$)", block):
            continue
        words = re.sub(r"\]\([^)]*\)|[\[`*]|\]", "", " ".join(block.split()))
        return words if len(words) <= 160 else words[:159].rpartition(" ")[0].rstrip(",:;") + "…"
    return ""


def on_page_content(html: str, **_: Any) -> str:
    """Long lines of code go on under their own beginning, in tables after a sign. A picture leads to its full size."""
    html = re.sub(r'<div class="language-text highlight">.*?</div>', _printed, html, flags=re.DOTALL)
    html = re.sub(r'<span id="[^"]*__span-[\d-]+">(?:<a [^>]*></a>)?([^\n]*)', _line, html)
    html = re.sub(r"<td.*?</td>", lambda cell: re.sub(r"<code>[^<]*", _breakable, cell[0]), html, flags=re.DOTALL)
    html = re.sub(r"(?<!</span>)(?<=<code>)[^<\s]{35,}(?=</code>)", _breakable, html)
    html = re.sub(r">[^<]*(?:\d|--?[a-z]|-&gt;)[^<]*", _whole, html)
    return re.sub(r'(<img alt="[^"]*" src="([^"]+)" ?/?>)(?!</a>)', r'<a href="\2">\1</a>', html)


#: where types of Python are described
PYTHON = dict.fromkeys(("int", "float", "bool", "object", "type"), "functions") | dict.fromkeys(
    ("str", "bytes", "tuple", "list", "dict", "set", "range", "slice"), "stdtypes"
)
#: and those of PyTorch that have no page of their own
TORCH = {
    "torch.Tensor": "tensors",
    "torch.Size": "size",
    "torch.export.ExportedProgram": "export/api_reference",
    "torch.optim.Optimizer": "optim",
} | dict.fromkeys(("torch.device", "torch.dtype"), "tensor_attributes")


def on_post_page(output: str, *, page: Any, **_: Any) -> str:
    """Types that are not the library's own lead to where they are described; bases that no page describes go."""

    def link(match: re.Match[str]) -> str:
        address = described(match[1])
        if address and "://" not in address:
            address = posixpath.relpath(address, posixpath.dirname(page.file.src_uri) or ".")
        return f'<a class="autorefs" href="{address}" title="{match[1]}">{match[2]}</a>' if address else match[0]

    def bases(match: re.Match[str]) -> str:
        described = [base for base in re.findall(r"<code>.*?</code>", match[2]) if "href" in base]
        return f"{match[1]}Bases: {', '.join(described)}</p>" if described else ""

    output = re.sub(r'<span title="([\w.]+)">([^<]*)</span>', link, output)
    return re.sub(r'(<p class="doc doc-class-bases">)\s*Bases: (.*?)</p>', bases, output, flags=re.DOTALL)


def described(name: str) -> str:
    """Where a type of Python, PyTorch, NumPy, Matplotlib or jaxtyping is described; empty for others.

    >>> described("collections.abc.Sequence")
    'https://docs.python.org/3/library/collections.abc.html#collections.abc.Sequence'
    >>> described("torch.nn.Module")
    'https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html'
    """
    module, _, last = name.rpartition(".")
    top = name.partition(".")[0]
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, BaseException):
        return f"https://docs.python.org/3/library/exceptions.html#{name}"
    if place := PYTHON.get(name) or (module if top in sys.stdlib_module_names else ""):
        return f"https://docs.python.org/3/library/{place}.html#{name}"
    if top == "torch":
        if module == "torch" and last.islower() and name not in TORCH:  # torch.float32
            return "https://docs.pytorch.org/docs/stable/tensor_attributes.html#torch.dtype"
        if name in TORCH or module.startswith("torch.distributed"):
            return f"https://docs.pytorch.org/docs/stable/{TORCH.get(name, 'distributed')}.html#{name}"
        return f"https://docs.pytorch.org/docs/stable/generated/{name}.html"
    if top == "numpy":
        place = {"numpy.generic": "arrays.scalars", "numpy.typing.NDArray": "typing"}.get(name, f"generated/{name}")
        return f"https://numpy.org/doc/stable/reference/{place}.html#{name}"
    if top in ("matplotlib", "mpl_toolkits"):
        return f"https://matplotlib.org/stable/api/_as_gen/{name}.html"
    return "api/shapes.html" if top == "jaxtyping" else ""


def _line(match: re.Match[str]) -> str:
    """A line of code, which may go on after a bracket."""
    words = re.sub(r"<[^>]*>", "", match[1])
    code = re.sub(r'(?<=\()(</span>)(?!<span class="p">\))', r"\1<wbr>", match[1])
    return f'<span class="line" style="--indent:{len(words) - len(words.lstrip(" "))}ch">{code}'


def _printed(match: re.Match[str]) -> str:
    """What was printed goes on under its own beginning too, unless it has columns."""
    words = re.sub(r"<[^>]*>", "", match[0]).strip()
    if "\n" in words and re.search(r"\S {2,}(?!#)\S", words):
        return match[0].replace("language-text", "language-text columns", 1)
    return re.sub(r"(<pre><span></span><code>)(?!<span id=)(.*?)\n?(</code>)", _numbered, match[0], flags=re.DOTALL)


def _numbered(match: re.Match[str]) -> str:
    lines = (f'<span id="__span-0-0">{line}\n</span>' for line in match[2].split("\n"))
    return match[1] + "".join(lines) + match[3]


def _breakable(match: re.Match[str]) -> str:
    """After a sign, and within long names before a capital."""
    text = re.sub(r"(?<=[(.,=_/])(?=[^\s.)])", "<wbr>", match[0])
    return re.sub(r"\w{20,}", lambda name: re.sub(r"(?<=[a-z])(?=[A-Z])", "<wbr>", name[0]), text)


def _whole(match: re.Match[str]) -> str:
    """Options, small numbers and arrows are not broken at their hyphen."""
    return re.sub(
        r"(?<![\w-])--?[a-z][\w-]*|\d[\d.]*e-\d+|-&gt;", lambda part: f'<span class="whole">{part[0]}</span>', match[0]
    )
