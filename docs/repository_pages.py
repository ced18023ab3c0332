"""Hooks of mkdocs: CONTRIBUTING.md is a page of the site, links out of ``docs/`` get a target, roles become code.

On GitHub the pages link to files of the repository, ``../configs/accelerate`` for instance. The site has a page for
CONTRIBUTING.md and the start page for README.md; of any other such link the text stays. A link to a
section of the README that is a paragraph of its own becomes that section. Docstrings have roles and
literal blocks of reStructuredText (``:class:`Name```, ``Example::``), which Markdown does not know.
"""

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = {"CONTRIBUTING.md": "contributing.md", "README.md": "index.md"}
LINK = re.compile(r"\[([^\]]+)\]\(\.\./([^)#]+)(#[^)]*)?\)")

SECTION = re.compile(r"(?<=\n\n)\[[^\]]+\]\(\.\./README\.md#([^)]+)\)(?=\n\n)")
ROLE = re.compile(r":(?:mod|class|func|meth|attr|data):<code>(?:[\w.]*~)?([\w.]+)</code>")


def on_files(files: Any, config: Any) -> Any:
    """Add CONTRIBUTING.md; its links to ``docs/`` are links to neighbours there."""
    from mkdocs.structure.files import File

    text = (ROOT / "CONTRIBUTING.md").read_text().replace("](docs/", "](")
    files.append(File.generated(config, PAGES["CONTRIBUTING.md"], content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Redirect links to files outside ``docs/``."""
    return LINK.sub(_redirected, SECTION.sub(_section, markdown))


def _section(found: re.Match[str]) -> str:
    """The section of the README that a paragraph links to, without its heading."""
    sections = re.split(r"^## (.+)\n", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    heading = found[1].replace("-", " ")
    [text] = [text for name, text in zip(sections[1::2], sections[2::2], strict=True) if name.lower() == heading]
    return text.strip()


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Remove what is left of reStructuredText, and make failures targets of links, ``failures.html#501``."""
    if page.file.src_path == "failures.md":
        html = re.sub(r"<td>(\d+)</td>", r'<td id="\1">\1</td>', html)
    return ROLE.sub(r"<code>\1</code>", html).replace("::</p>", ":</p>")


def _redirected(found: re.Match[str]) -> str:
    text, target, anchor = found.groups("")
    if target not in PAGES:
        return text
    return f"[{text}]({PAGES[target]}{anchor if target == 'CONTRIBUTING.md' else ''})"
