"""The command line: one file for each command; heavy imports happen inside the command that needs them."""

import sys
from pathlib import Path
from typing import Annotated, Literal

try:
    from cyclopts import App, CycloptsError, Parameter
    from rich.console import Console
except ImportError as error:  # the core needs neither
    from linformers.extras import install

    sys.exit(f"the command line needs more packages ({error.name} is missing): {install('cli')}")

from linformers.cli.bench import app as bench
from linformers.cli.classify import classify
from linformers.cli.compare import compare
from linformers.cli.config import Options
from linformers.cli.embed import embed
from linformers.cli.evaluate import evaluate
from linformers.cli.export import export
from linformers.cli.fill_mask import fill_mask
from linformers.cli.generate import generate
from linformers.cli.heads import heads
from linformers.cli.linearize import linearize
from linformers.cli.plot import plot
from linformers.cli.prepare import prepare
from linformers.cli.quiet import quiet
from linformers.cli.report import report
from linformers.cli.selftest import selftest
from linformers.cli.spectrum import spectrum
from linformers.cli.train import train
from linformers.extras import needed

app = App(
    name="linformers",
    help="Linformer: attention whose cost grows linearly with the sequence.",
    suppress_keyboard_interrupt=False,
)
app.command(bench)
app.command(linearize)
app.command(export)
app.command(prepare)
app.command(train)
app.command(evaluate)
app.command(generate)
app.command(fill_mask)
app.command(classify)
app.command(embed)
app.command(compare)
app.command(heads)
app.command(plot)
app.command(report)
app.command(spectrum)
app.command(selftest)
app.register_install_completion_command(help="Install completion for the shell in use, or for --shell.")


@app.command(name="--show-completion")
def show_completion(shell: Literal["bash", "zsh", "fish"] = "bash") -> None:
    """Print the completion script of a shell."""
    print(app.generate_completion(prog_name="linformers", shell=shell))


@app.meta.default
def launch(
    *tokens: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    config: Annotated[
        Path | None, Parameter(help="Options from a TOML or YAML file; those on the command line take precedence.")
    ] = None,
    debug: Annotated[bool, Parameter(negative="", help="Show the traceback of an error.")] = False,
) -> int:
    """Run one command, and return its exit code: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    console = Console(stderr=True)
    try:
        app.config = () if config is None else (Options(app, config),)
        with needed(f"linformers {' '.join(tokens[:1])}"):
            app(tokens, exit_on_error=False, print_error=True, result_action="return_value")
    except CycloptsError:
        return 2
    except KeyboardInterrupt as error:
        console.print(str(error) or "interrupted", markup=False, highlight=False, soft_wrap=True)
        return 130
    except (ValueError, OSError, ImportError) as error:
        if debug:
            raise
        console.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    return 0


def main() -> None:
    """The ``linformers`` command."""
    quiet()
    sys.exit(app.meta(result_action="return_value"))
