"""Checks the models of repositories without serving them: configurations, files, backends, versions,
ensembles, labels, warm-up data and initial states. Nothing is run and no weights are read.

Prints every problem as FILE:LINE: FIELD: MESSAGE. Exit status: 0 when there are no errors (there may be
warnings), 1 when there are, 2 when nothing could be checked (no such folder, a wrong flag).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from pathlib import Path

from neptrio import flags
from neptrio.terminal import counted

HELP = "check a model repository without serving it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `neptrio check`."""
    parser.add_argument("repository", nargs="+", type=flags.repository, help="a folder of models, or a URL")
    parser.add_argument("--model", action="append", default=[], help="check only this model; may be repeated")
    parser.add_argument("--strict", action="store_true", help="warnings count as errors")
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON")
    parser.add_argument("--backend-directory", type=Path, help="folder of backends")
    parser.add_argument(
        "--backend-config", type=flags.backend_setting, action="append", default=[],
        metavar="NAME,KEY=VALUE", help="as the server's flag",
    )  # fmt: skip
    parser.add_argument("--model-name", type=flags.model_name, default="", help="as the server's flag")
    parser.add_argument("--model-config-name", default="", help="as the server's flag")
    parser.add_argument(
        "--disable-auto-complete-config", type=flags.boolean, nargs="?", const=True, default=False,
        help="as the server's flag",
    )  # fmt: skip
    parser.add_argument(
        "--follow-external-links", type=flags.boolean, nargs="?", const=True, default=False,
        help="as the server's flag",
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Checks the models and prints the problems; returns the exit status of the module's text."""
    from neptrio.config.misplaced import no_models
    from neptrio.config.problem import ERROR, WARNING, Problem
    from neptrio.errors import TritonError, Unavailable
    from neptrio.repository.check import Checker
    from neptrio.repository.repositories import Repositories
    from neptrio.settings import Settings

    backends: dict[str, dict[str, str]] = {}
    for backend, key, value in options.backend_config:
        backends.setdefault(backend, {})[key] = value
    try:
        settings = Settings(
            model_repository=tuple(options.repository),
            backend_directory=options.backend_directory,
            backend_config=backends,
            model_name=options.model_name,
            model_config_name=options.model_config_name,
            disable_auto_complete_config=options.disable_auto_complete_config,
            follow_external_links=options.follow_external_links,
        )
        with contextlib.closing(Repositories(settings)) as repositories:
            repositories.refresh()
            if repositories.problems:
                raise Unavailable("; ".join(repositories.problems))
            checker = Checker(settings, here=False, repositories=repositories)
            models = [checker.model(name) for name in options.model] if options.model else checker.all()
            shown = repositories.shown
            loose = {} if options.model else repositories.loose()
    except (TritonError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    problems = [problem for model in models for problem in model.problems]
    beside = [Problem(hint, place, severity=WARNING) for place, hints in loose.items() for hint in hints]
    problems += beside
    errors = sum(problem.severity == ERROR for problem in problems)
    warnings = len(problems) - errors
    bad = bool(errors or (options.strict and warnings))
    if options.json:
        outcome = {
            "ok": not bad, "errors": errors, "warnings": warnings,
            "models": [model.as_dict() for model in models],
            "repositories": [problem.as_dict() for problem in beside],
        }  # fmt: skip
        print(shown(json.dumps(outcome, indent=2)))
        return int(bad)
    for problem in beside:
        print(shown(f"{problem.severity}: {problem}"))
    for model in models:
        for problem in model.problems:
            print(shown(f"{problem.severity}: {model.name}: {problem}"))
    if not models:
        print(shown(no_models(options.repository)))
    good = sum(model.ok for model in models)
    found = f"{good} without errors; {counted(errors, 'error')}, {counted(warnings, 'warning')}"
    print(f"{counted(len(models), 'model')}: {found}")
    return int(bad)
