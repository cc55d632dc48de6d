"""The documentation for tests: pages, code blocks, and the output shown for commands."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NUMBER = r'[\d.,:e+-]*\d[\d.,:e+-]*'


@dataclass(frozen=True)
class Block:
    """A fenced block: its page, the line number of its code, its language and its text."""

    page: str
    line: int
    language: str
    code: str

    def __str__(self) -> str:
        return f'{self.page}, line {self.line}'


@dataclass(frozen=True)
class Command:
    """A console line after its ``$``, and the output that the page shows for it."""

    page: str
    line: int
    text: str
    shown: str

    def __str__(self) -> str:
        return f'{self.page}, line {self.line}: {self.text}'

    @property
    def words(self) -> list[str]:
        """The words of the command as a shell splits them, without the comment."""
        return shlex.split(self.text, comments=True)


def pages() -> list[Path]:
    """README, CONTRIBUTING and every page in ``docs/``."""
    docs = [path for path in sorted((ROOT / 'docs').rglob('*.md')) if '_build' not in path.parts]
    return [ROOT / 'README.md', ROOT / 'CONTRIBUTING.md', *docs]


def name_of(page: Path) -> str:
    """The name in the lists of these tests: ``README.md``, ``guides/first-site.md``."""
    return str(page.relative_to(ROOT / 'docs' if page.is_relative_to(ROOT / 'docs') else ROOT))


def blocks(page: Path, language: str) -> list[Block]:
    """The page's blocks in one language, in order."""
    text = page.read_text()
    return [
        Block(name_of(page), text[: found.start(1)].count('\n') + 1, language, found[1])
        for found in re.finditer(rf'^```{language}\n(.*?)^```', text, re.MULTILINE | re.DOTALL)
    ]


def all_blocks(language: str) -> list[Block]:
    return [block for page in pages() for block in blocks(page, language)]


def commands(page: Path) -> list[Command]:
    """The commands of the page's consoles, in order, continued lines joined."""
    found: list[Command] = []
    for block in blocks(page, 'console'):
        code = re.sub(r'\\\n +', '', block.code)
        for part in re.finditer(r'^\$ (.*)\n((?:(?!\$ ).*\n)*)', code, re.MULTILINE):
            found.append(
                Command(
                    block.page,
                    block.line + block.code[: block.code.find(part[1][:20])].count('\n'),
                    part[1],
                    part[2],
                )
            )
    return found


def as_shown(shown: str, said: str, *, loosely: bool) -> bool:
    """Whether output is as shown, ``...`` for any lines; ``loosely``: any numbers and width."""
    lines = [line.rstrip() for line in shown.strip('\n').splitlines()]
    pattern = '\n'.join(
        r'(?s:.*?)' if line.strip() in ('...', '…') else _pattern(line, loosely) for line in lines
    )
    return (
        re.fullmatch(pattern, '\n'.join(line.rstrip() for line in said.strip('\n').splitlines()))
        is not None
    )


def _pattern(line: str, loosely: bool) -> str:
    if not loosely:
        return re.escape(line)
    parts = re.split(rf'({NUMBER}|\s+)', line)
    return ''.join(
        NUMBER if re.fullmatch(NUMBER, part) else r'\s+' if part.isspace() else re.escape(part)
        for part in parts
        if part
    )
