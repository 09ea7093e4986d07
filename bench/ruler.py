"""The ruler of a trial: base and edit must measure losses with the same code."""

import ast
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from bench.variants import Variant
from formats.code_hashes import code_hash
from formats.metrics import STANDARD_METRICS
from runtime.errors import UserError

RULER = {  # functions that measure, by file
    "evaluation.py": ("validate", "run_evaluation", "score_hellaswag"),
    "dataloader.py": ("validation_batches",),
    "hellaswag.py": ("evaluate_hellaswag",),
    "generation.py": ("score_tokens",),
    "model.py": ("cross_entropy",),
}

SETTINGS = ("val_tokens", "hellaswag_data")  # what is measured


def check_ruler(metric: str, base: Variant, edits: Sequence[Variant]) -> None:
    """Raise UserError if an edit changes how a metric of the stock trainer is measured.

    An edit may change it for a metric that the stock trainer does not log.
    """
    expected = ruler(base.code)
    for edit in edits if metric in STANDARD_METRICS else ():
        found = ruler(edit.code)
        names = sorted(n for n in expected | found if expected.get(n) != found.get(n))
        if names := names or [n for n in SETTINGS if base.settings.get(n) != edit.settings.get(n)]:
            changes = f"{edit.name} changes how --metric {metric} is measured ({', '.join(names)})"
            fix = "undo the change, or pass it as a patch to --base, so that both versions have it"
            raise UserError(f"{changes}: {fix}")


def ruler(folder: Path) -> dict[str, str]:
    """Return a hash of each function of `RULER`, and of all in its file that it uses."""
    found = dict[str, str]()
    for file, roots in RULER.items():
        code, due = definitions(folder / file), [*roots]
        for name in due:  # which grows
            found[f"{name} in {file}"] = code_hash(code[name].encode())
            used = {getattr(node, "id", "") for node in ast.walk(ast.parse(code[name]))}
            due += used & code.keys() - {*due}
    return found


def definitions(path: Path) -> dict[str, str]:
    """Return the code of the statements that bind each name of a module; "" for other names."""
    code = defaultdict[str, str](str)
    try:
        statements = ast.parse(path.read_bytes()).body
    except SyntaxError as error:
        raise UserError(f"{path.name} of {path.parent.name} is not valid: {error}") from None
    for statement in statements:
        is_named = hasattr(statement, "name")  # a function or a class binds only its name
        for node in [statement] if is_named else ast.walk(statement):
            name = (
                getattr(node, "asname", "") or getattr(node, "name", "") or getattr(node, "id", "")
            )
            if isinstance(node, ast.alias):
                code[name] += f"_ = {getattr(statement, 'module', ''), node.name}\n"
            elif name and not isinstance(getattr(node, "ctx", None), ast.Load):
                code[name] += f"{ast.unparse(statement)}\n"
    return code
