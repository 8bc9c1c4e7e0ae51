"""Links for the site: what a page names outside of docs/ is put beside the pages, as plain text.

On the forge those links lead to the files of the repository; the site has no address of a
repository to lead to.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#\s]+)(#[^)\s]*)?\)")
_FENCE = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)
_BESIDE = "files"


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """The page with links that lead somewhere in the site."""
    docs = Path(config["docs_dir"])
    root = docs.parent
    here = (docs / page.file.src_uri).parent

    def replaced(match: re.Match[str]) -> str:
        text, address, anchor = match[1], match[2], match[3] or ""
        if "://" in address or address.startswith("mailto:"):
            return match[0]
        target = (here / address).resolve()
        if target.is_dir():
            return str(text)  # a folder is no page
        inside = target.is_relative_to(docs) and target.suffix != ".py"
        if inside or not target.is_file():
            return match[0]
        if target == root / "README.md":
            return f"[{text}](index.md{anchor})"
        name = f"{_BESIDE}/{target.relative_to(root)}"
        if not name.endswith((".json", ".py", ".txt")):
            name += ".txt"  # a page of Markdown would be one without a place in the menu
        if files.get_file_from_path(name) is None:
            files.append(File.generated(config, name, abs_src_path=str(target)))
        return f"[{text}]({name})"

    parts, end = [], 0
    for fence in _FENCE.finditer(markdown):
        parts += [_LINK.sub(replaced, markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, _LINK.sub(replaced, markdown[end:])])
