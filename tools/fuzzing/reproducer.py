"""Writes a script that shows one case and needs nothing but torch and fusion_passes.

The script is made of this package's own source: the blocks of the case, and what builds, trains
and compares them. Definitions that are not reached from there are left out.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fuzzing.case import Case, to_json

HERE = Path(__file__).parent
MODULES = (
    "blocks/base.py",
    "blocks/layers.py",
    "blocks/parameters.py",
    "blocks/program.py",
    "case.py",
    "models.py",
    "record.py",
    "../../testing/threads.py",
    "training.py",
    "comparing.py",
)
ROOTS = ("Case", "Loop", "Part", "differences", "StageError", "from_json", "tolerance_of", "train")

HEAD = '''"""Trains one model with eager DDP and under ddp_fusion, and shows where they differ.

    torchrun --nproc-per-node {ranks} {name}
"""

from __future__ import annotations
'''

MAIN = '''

CASE = """
{case}
"""


def main() -> None:
    """Train twice on this rank, and print what differs."""
    dist.init_process_group("gloo")
    case = from_json(CASE)
    try:
        expected = [train(case, "eager")]
    except StageError as error:
        print(f"rank {{dist.get_rank()}}: eager DDP raised: {{error.__cause__!r}}", flush=True)
        expected = []
    actual = [train(case, "fused")]
    print(*actual[0].warnings, sep="\\n")
    found = differences(actual, expected, tolerance_of(case)) if expected else ["no error"]
    for line in found or ["no difference"]:
        print(line.replace("rank 0", f"rank {{dist.get_rank()}}", 1), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
'''


@dataclass(frozen=True)
class Definition:
    """A function, class or value of a module's top level.

    Attributes:
        text: its source.
        names: that it uses.
        is_block: whether it makes a block.
    """

    text: str
    names: frozenset[str]

    @property
    def is_block(self) -> bool:
        return self.text.startswith("@block")


def write_script(case: Case, path: Path) -> None:
    """Write a script that shows a case on ranks that ``torchrun`` starts."""
    definitions, imports = _read()
    wanted = {name for part in case.parts for name in part.blocks}.union(ROOTS)
    kept: set[str] = set()
    while wanted:
        kept |= wanted
        used = {name for item in wanted for name in definitions[item].names}
        # Other blocks are reached by name only where a local variable is called like one.
        wanted = {name for name in used & definitions.keys() if not definitions[name].is_block}
        wanted -= kept
    main = MAIN.format(case=to_json(case, indent=1))
    texts = [definition.text for name, definition in definitions.items() if name in kept]
    names = {name for item in kept for name in definitions[item].names} | _names(ast.parse(main))
    head = HEAD.format(ranks=case.ranks, name=path.name)
    lines = [line for line, bound in imports.items() if bound & names]
    path.write_text("\n".join([head, *sorted(lines), ""]) + "\n\n\n".join(["", *texts]) + main)


def _read() -> tuple[dict[str, Definition], dict[str, set[str]]]:
    """All definitions by name, and the imports, each with the names that it binds."""
    definitions: dict[str, Definition] = {}
    imports: dict[str, set[str]] = {}
    for module in MODULES:
        text = (HERE / module).read_text()
        for node in ast.parse(text).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                imports |= dict(_imported(node))
            for name in _defined(node):
                if name in definitions:
                    raise ValueError(f"{module} defines {name}, as another module does. Rename it.")
                source = ast.unparse(_without_docstrings(node))
                definitions[name] = Definition(source, frozenset(_names(node)))
    return definitions, imports


def _without_docstrings(node: ast.stmt) -> ast.stmt:
    for item in ast.walk(node):
        if isinstance(item, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(item):
            item.body = item.body[1:] or [ast.Pass()]
    return node


def _imported(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, set[str]]]:
    """One line for each name; none for what the script defines."""
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
        ("fuzzing", "testing.threads", "__future")
    ):
        return
    for alias in node.names:
        one = (
            ast.ImportFrom(node.module, [alias], 0)
            if isinstance(node, ast.ImportFrom)
            else ast.Import([alias])
        )
        yield ast.unparse(one), {alias.asname or alias.name.partition(".")[0]}


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [node.target.id]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return []


def _names(node: ast.AST) -> set[str]:
    """Names that are used in code, annotations included."""
    return {item.id for item in ast.walk(node) if isinstance(item, ast.Name)}
