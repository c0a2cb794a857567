"""The site: every page is in its menu; pictures of `results/` have the links that they have in the repository."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """A page that the menu of mkdocs.yml does not name comes at the end of its section `Use`."""
    folder = Path(config.docs_dir)
    (use,) = [section["Use"] for section in config.nav if "Use" in section]
    pages = [str(page.relative_to(folder)) for page in sorted(folder.rglob("*.md"))]
    use += [page for page in pages if page not in str(config.nav)]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Every picture of `results/` that a page links to."""
    root = Path(config.config_file_path).parent
    for page in list(files.documentation_pages()):
        for name in re.findall(r"\]\((?:\.\./)+(results/[^)]+\.png)\)", page.content_string):
            if files.get_file_from_path(name) is None:
                files.append(File.generated(config, name, abs_src_path=str(root / name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """From the repository's `docs/` a picture is one folder further away than on the site."""
    return re.sub(r"\]\(\.\./((?:\.\./)*results/)", r"](\1", markdown)
