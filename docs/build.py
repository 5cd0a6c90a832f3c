"""Build the site: the pages of docs/, files that they link to, keys of conf/, and docstrings."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

HOME = Path(__file__).resolve().parents[1]
DOCS, CONF, PACKAGE, SITE = HOME / "docs", HOME / "conf", HOME / "src/lightning_rlhf", HOME / "site"
NOTEBOOK = HOME / "examples/notebook.py"
FENCE = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[([^\]]*)\]\((?!\w+:)([^)#\s]+)(#[^)\s]*)?\)")
KEY = re.compile(r"( *)([\w+@.-]+):(?: +(?!#)(.*?))?(?: +# (.*))?")
DEFINED = ast.FunctionDef | ast.ClassDef


def place(path: Path) -> str:
    """Return where the site has a file or folder of the repository, as a path in its root."""
    if path.is_relative_to(CONF):
        return "keys.md"
    if path.is_relative_to(DOCS) and path != DOCS:
        return str(path.relative_to(DOCS))
    if path == NOTEBOOK:
        return "notebook.md"
    name = "README.md" if path == DOCS else f"source/{path.relative_to(HOME)}"
    return name if path.suffix in (".md", ".png") else f"{name}.md"


def shown(path: Path) -> str:
    """Return the page of a file or folder: Markdown as it is, anything else as its text, but for
    the notebook, whose cells are prose and code."""
    if path.suffix == ".md":
        return path.read_text()
    if path == NOTEBOOK:
        return "\n\n".join(map(cell, path.read_text().split("# %%")[1:])) + "\n"
    names = "\n".join(sorted(one.name for one in path.glob("[!_.]*")))
    text = names if path.is_dir() else path.read_text()
    title = f"---\nsearch: {{exclude: true}}\n---\n# {path.relative_to(HOME)}"
    return f'{title}\n\n``````{path.suffix[1:] or "text"} linenums="1"\n{text}\n``````\n'


def cell(text: str) -> str:
    """Return a cell of a notebook as Markdown; text: what follows the mark `# %%`."""
    kind, _, body = text.partition("\n")
    if "[markdown]" in kind:
        return re.sub(r"^# ?", "", body.strip(), flags=re.MULTILINE)
    return f"```python\n{body.strip()}\n```"


def staged() -> dict[str, bytes]:
    """Return the files of the site by their places, with links among each other."""
    made = {"keys": keys_page(), **api_pages()}
    pages = {f"{name}.md": text.encode() for name, text in made.items()}
    todo = [*sorted(DOCS.glob("*.md")), NOTEBOOK]
    for path in todo:  # which grows by what they link to
        parts = FENCE.split(shown(path) if path.suffix != ".png" else "")
        is_prose = path.suffix == ".md" or path == NOTEBOOK
        for number in range(0, len(parts) if is_prose else 0, 2):
            for found in LINK.finditer(parts[number]):
                target = (path.parent / found[2]).resolve()
                todo += [] if place(target) in pages or target in todo else [target]
                anchor = found[3] or anchor_of(found[1], target)
                moved = f"[{found[1]}]({os.path.relpath(place(target), Path(place(path)).parent)}"
                parts[number] = parts[number].replace(found[0], f"{moved}{anchor})")
        pages[place(path)] = "".join(parts).encode() or path.read_bytes()
    return pages


def anchor_of(name: str, path: Path) -> str:
    """Return the anchor of the definition in a file of what a link names, or of a file of conf/."""
    if path.is_file() and path.is_relative_to(CONF):
        return "#" + re.sub(r"[^\w-]", "", str(path.relative_to(CONF)))
    lines = path.read_text().splitlines() if path.suffix == ".py" else []
    rule = re.compile(rf" *(def|class) {re.escape(name.strip('`').split('.')[-1])}\b")
    return next((f"#__codelineno-0-{k}" for k, line in enumerate(lines, 1) if rule.match(line)), "")


def keys_page() -> str:
    """Return the tables of all keys of conf/: default, meaning, unit and source."""
    parts = ["# Keys\n\nEvery key with its default, and its meaning, unit and source."]
    for path in sorted(CONF.rglob("*.yaml"), key=lambda one: (one.parent != CONF, str(one))):
        parts.append(f"## {path.relative_to(CONF)}\n\n| key | default | meaning |\n|---|---|---|")
        above: list[str] = []
        for found in filter(None, map(KEY.fullmatch, path.read_text().splitlines())):
            above[len(found[1]) // 2 :] = [found[2]]
            value, text = ((part or "").replace("|", "\\|") for part in found.groups()[2:])
            if above[0] not in ("defaults", "hydra"):
                parts[-1] += f"\n| `{'.'.join(above)}` | {value and f'`{value}`'} | {text} |"
    return "\n\n".join(parts).replace("<", "&lt;")


def api_pages() -> dict[str, str]:
    """Return a page for each folder of the package, with signatures and docstrings."""
    pages: dict[str, str] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = str(path.relative_to(PACKAGE)).removesuffix(".py").replace("/", ".")
        lines, tree = path.read_text().splitlines(), ast.parse(path.read_text())
        found = [one for one in tree.body if isinstance(one, DEFINED) and one.name[0] != "_"]
        if found:
            title = f"lightning_rlhf.{name.partition('.')[0]}"
            parts = [pages.get(title, f"# {title}"), f"## {name}", ast.get_docstring(tree) or ""]
            parts += [f"### {n.name}\n\n```python\n{stub(n, lines)}\n```" for n in found]
            pages[title] = "\n\n".join(parts)
    return pages


def stub(node: ast.FunctionDef | ast.ClassDef, lines: list[str]) -> str:
    """Return the source of a function or class without the bodies of its functions."""
    first = min(one.lineno for one in [node, *node.decorator_list])
    kept = lines[first - 1 : node.body[0].lineno - 1]
    for one in node.body if isinstance(node, ast.ClassDef) else node.body[:1]:
        if isinstance(one, DEFINED):
            kept += [] if one.name[0] == "_" else stub(one, lines).splitlines()
        elif isinstance(node, ast.ClassDef) or isinstance(one, ast.Expr):
            kept += lines[one.lineno - 1 : one.end_lineno]
    return "\n".join(kept)


def main() -> None:
    """Write the pages to site/pages, and what zensical makes of them to site/html."""
    if (SITE / "mkdocs.yml").exists():  # written by an earlier call
        shutil.rmtree(SITE)
    for name, content in staged().items():
        (SITE / "pages" / name).parent.mkdir(parents=True, exist_ok=True)
        (SITE / "pages" / name).write_bytes(content)
    shutil.copy(HOME / "mkdocs.yml", SITE)
    command = [sys.executable, "-m", "zensical", "build", "--strict", "-f", SITE / "mkdocs.yml"]
    raise SystemExit(subprocess.run(command).returncode)


if __name__ == "__main__":
    main()
