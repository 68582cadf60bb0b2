"""The command line: status, explain, diff, verify, audit, run."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import json
import os
import sys
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

import click
from packaging.version import InvalidVersion, Version
from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

import zerofix
from zerofix import _patcher as patcher
from zerofix.audit import Hit
from zerofix.audit import audit as find_hits
from zerofix.config import ConfigError, read
from zerofix.fix import Fix
from zerofix.gate import State, known_releases
from zerofix.launch import environment
from zerofix.ops import origin
from zerofix.patches import CATALOGUE
from zerofix.report import UNMET, FixStatus
from zerofix.settings import suggest, toggle
from zerofix.verify import Verdict
from zerofix.verify import verify as run_reproductions

FIXES = {fix.name: fix for fix in CATALOGUE}
COLOURS = {State.APPLIED: "green", State.FIXED_UPSTREAM: "cyan", State.NOT_AFFECTED: "cyan"}


NO_DEEPSPEED = "DeepSpeed is not installed in this environment: there is nothing to repair."


class FixName(click.ParamType):  # type: ignore[type-arg]
    """The name of a fix."""

    name = "fix"

    def convert(self, value: Any, param: Any, ctx: Any) -> Fix:
        if value not in FIXES:
            self.fail(f"no fix is called {value!r}.{suggest(value, FIXES)}", param, ctx)
        return FIXES[value]

    def shell_complete(self, ctx: Any, param: Any, incomplete: str) -> list[Any]:
        from click.shell_completion import CompletionItem

        return [CompletionItem(name) for name in FIXES if name.startswith(incomplete)]


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(zerofix.__version__, prog_name="zerofix")
def main() -> None:
    """Repairs a stock DeepSpeed in memory: `import zerofix`."""


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def status(as_json: bool) -> None:
    """What zerofix does to the installed DeepSpeed.

    The exit code is 0 when no wanted fix is missing.
    """
    deepspeed = import_deepspeed()
    import torch

    report = zerofix.status()
    place = {
        "deepspeed_path": str(deepspeed.__path__[0]),
        "torch": torch.__version__,
        "accelerator": deepspeed.accelerator.get_accelerator()._name,
        "cpu_adam": origin("cpu_adam"),
    }
    if as_json:
        data = report.as_dict() | place
        for fix, fix_data in zip(report.fixes, data["fixes"], strict=True):
            fix_data["links"] = fix.links
        click.echo(json.dumps(data, indent=2))
    else:
        console = Console()
        console.print(f"zerofix    {report.version}", highlight=False)
        console.print(
            f"DeepSpeed  {report.deepspeed}  ({place['deepspeed_path']})", highlight=False
        )
        console.print(f"torch      {place['torch']}", highlight=False)
        console.print(f"device     {place['accelerator']}", highlight=False)
        console.print(f"CPUAdam    {place['cpu_adam']}", highlight=False)
        given = ", ".join(f"{k}={v}" for k, v in report.settings.items())
        console.print(
            f"settings   {given + ' (environment)' if given else 'none set'}\n", highlight=False
        )
        for fix in report.fixes:
            print_fix(console, fix)
    sys.exit(0 if report.ok else 1)


def print_fix(console: Console, fix: FixStatus) -> None:
    colour = "red" if fix.state in UNMET else COLOURS.get(fix.state, "yellow")
    console.print(
        f"[bold]{fix.name}[/]  [{colour}]{fix.state.value}[/]  {fix.title}", highlight=False
    )
    lines = [fix.reason, *fix.modes, *fix.targets, *fix.links]
    lines += [f"not reached: {path} overrides it" for path in fix.not_reached]
    for line in lines:
        console.print(f"    {line}", highlight=False, soft_wrap=True, markup=False)


@main.command()
@click.argument("fix", type=FixName())
def explain(fix: Fix) -> None:
    """The defect, its cause, and where it was repaired."""
    since = fix.introduced or "the oldest supported release"
    until = f"before {fix.fixed}" if fix.fixed else "no release has it right"
    rows = {
        "symptom": fix.symptom,
        "cause": fix.cause,
        "limits": fix.limits or "none known",
        "here": "\n".join(fix.modes()) if fix.modes else "",
        "releases": f"from {since} on, {until}",
        "upstream": "\n".join(zerofix.status()[fix.name].links),
        "changes": "\n".join(f"{t.path} ({type(t.change).__name__.lower()})" for t in fix.targets),
        "toggle": f"{toggle(fix.name)}=0 turns it off, =force applies it to unknown code",
    }
    console = Console()
    console.print(f"[bold]{fix.name}[/]: {fix.title}\n", highlight=False)
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(overflow="fold")
    for name, text in rows.items():
        if text:
            table.add_row(name, text)
    console.print(table)


@main.command()
@click.argument("fix", type=FixName(), required=False)
def diff(fix: Fix | None) -> None:
    """The installed source against what runs now."""
    from zerofix.diff import unified_diff

    import_deepspeed()
    places = []
    for path in dict.fromkeys(t.path for each in CATALOGUE for t in each.targets):
        changes = patcher.changes(path)
        chosen = {name: changes[name] for name in changes if fix is None or name == fix.name}
        site = patcher.site(path)
        if site is not None and chosen:
            places.append((site, chosen))
    if not places:
        what = (
            f"{fix.name} is {zerofix.status()[fix.name].state.value}" if fix else "no fix applied"
        )
        click.echo(f"Nothing is changed: {what}.", err=True)
        return
    text = unified_diff(places)
    console = Console()
    if console.is_terminal:
        console.print(Syntax(text, "diff", background_color="default", word_wrap=True))
    else:
        click.echo(text, nl=False)


@main.command()
@click.argument("fixes", nargs=-1, type=FixName(), metavar="[FIX]...")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def verify(fixes: tuple[Fix, ...], as_json: bool) -> None:
    """Run each fix's reproduction, on stock DeepSpeed and with zerofix.

    Uses CUDA where there is one. The exit code is 0 when all that this release needs is repaired.
    """
    if importlib.util.find_spec("deepspeed") is None:
        stop(NO_DEEPSPEED)
    names = [fix.name for fix in fixes or CATALOGUE]
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    results = []
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(names[0], total=len(names))
        for result in run_reproductions(names):
            results.append(result)
            following = names[len(results) : len(results) + 1]
            progress.update(task, advance=1, description=following[0] if following else "")
    if as_json:
        text = json.dumps([asdict(result) for result in results], indent=2)
        # JSON has no infinity, and reads this as one.
        click.echo(text.replace(": Infinity", ": 1e999"))
    else:
        print_results(Console(), results)
    sys.exit(0 if all(r.ok for r in results) else 1)


def print_results(console: Console, results: list[Verdict]) -> None:
    version = next((r.deepspeed for r in results if r.deepspeed), "")
    table = Table(title=f"DeepSpeed {version}", title_justify="left")
    table.add_column("fix", no_wrap=True)
    for heading in ("stock", "zerofix", "tolerance"):
        table.add_column(heading, justify="right")
    table.add_column("verdict")
    for r in results:
        verdict = f"[{'green' if r.ok else 'red'}]{r.verdict}[/]"
        if r.state != State.APPLIED.value:
            verdict += f" ({r.state})"
        table.add_row(r.fix, number(r.stock), number(r.patched), f"{r.tolerance:.0e}", verdict)
    console.print(table)
    for r in results:
        console.print(f"{r.fix}: {r.measures}", highlight=False)
    for r in results:
        if r.detail:
            click.echo(f"{r.fix}: {r.detail}", err=True)


def number(error: float | None) -> str:
    return "crash" if error is None else f"{error:.1e}"


@main.command()
@click.argument("config", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--deepspeed", metavar="VERSION", help="By default the installed one.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def audit(config: Path, deepspeed: str | None, as_json: bool) -> None:
    """Which defects a training meets, from DeepSpeed's version and its configuration.

    DeepSpeed need not be installed. The exit code is 1 where a defect is met, 3 where one may be,
    and 2 for what is no configuration.
    """
    releases = known_releases()
    try:
        version = Version(deepspeed or metadata.version("deepspeed"))
    except metadata.PackageNotFoundError:
        raise click.UsageError(
            "DeepSpeed is not installed here: say which with --deepspeed."
        ) from None
    except InvalidVersion:
        raise click.UsageError(f"{deepspeed!r} is not a version of DeepSpeed.") from None
    if Version(version.base_version) < Version(releases[0]):
        raise click.UsageError(f"zerofix knows DeepSpeed from {releases[0]} on.")
    try:
        hits = find_hits(read(config, version))
    except ConfigError as error:
        raise click.UsageError(str(error)) from None
    if as_json:
        known = version <= Version(releases[-1])
        head = {"config": str(config), "deepspeed": str(version), "known": known}
        click.echo(json.dumps(head | {"defects": [hit.as_dict() for hit in hits]}, indent=2))
    else:
        print_hits(config, version, hits)
    sys.exit((1 if hits[0].certain else 3) if hits else 0)


def print_hits(config: Path, version: Version, hits: list[Hit]) -> None:
    newest = known_releases()[-1]
    console = Console()
    console.print(f"{config} on DeepSpeed {version}: {len(hits)} defects\n", highlight=False)
    if version > Version(newest):
        console.print(f"Judged as {newest}, the newest release that is known.\n", highlight=False)
    for hit in hits:
        colour, verb = ("red", "is met") if hit.certain else ("yellow", "may be met")
        title = f"[bold]{hit.fix.name}[/]  [{colour}]{verb}[/]  ({hit.since}, {hit.until})"
        console.print(title, highlight=False)
        fixed = f", or DeepSpeed {hit.fix.fixed}" if hit.fix.fixed else ""
        for line in (*hit.when, hit.fix.symptom, f"repaired by: import zerofix{fixed}"):
            console.print(Padding(Text(line), (0, 0, 0, 4), expand=False))
    if hits:
        console.print("\nimport zerofix before deepspeed.initialize, or start the training with")
        console.print(
            "`zerofix run -- COMMAND`. `zerofix explain FIX` tells more.", highlight=False
        )


@main.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- COMMAND...")
def run(command: tuple[str, ...]) -> NoReturn:
    """Run a program with zerofix in every Python that it starts.

    No line of the program changes: `zerofix run -- deepspeed train.py ...`, or torchrun,
    accelerate launch, python. The command takes the place of zerofix: signals and the exit code
    are its own.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(command[0], command, environment(os.environ))
    except FileNotFoundError:
        click.echo(f"zerofix run: there is no program {command[0]}", err=True)
        sys.exit(127)
    except OSError as error:
        hint = f" (python {command[0]}?)" if command[0].endswith(".py") else ""
        click.echo(f"zerofix run: {command[0]}: {error.strerror}{hint}", err=True)
        sys.exit(126)


def import_deepspeed() -> Any:
    """DeepSpeed with every module that a fix changes, or a clear end."""
    noise = io.StringIO()
    try:
        with contextlib.redirect_stdout(noise), contextlib.redirect_stderr(noise):
            deepspeed = importlib.import_module("deepspeed")
            for module in {target.module for fix in CATALOGUE for target in fix.targets}:
                with contextlib.suppress(ModuleNotFoundError):  # not in this release
                    importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name == "deepspeed":
            stop(NO_DEEPSPEED)
        stop(f"DeepSpeed cannot be imported: {error}\n{noise.getvalue()}")
    except Exception as error:
        stop(f"DeepSpeed cannot be imported: {type(error).__name__}: {error}\n{noise.getvalue()}")
    return deepspeed


def stop(message: str) -> NoReturn:
    click.echo(message, err=True)
    sys.exit(1)
