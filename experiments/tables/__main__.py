"""Writes the tables of README.md and docs/ anew, between their marks.

python -m experiments.tables
"""

from experiments.tables.pages import filled, pages


def main() -> None:
    for page in pages():
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
