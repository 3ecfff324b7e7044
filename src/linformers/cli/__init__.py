"""The command line: one file a command; heavy imports happen inside the command that needs them."""

import sys
from typing import Annotated, Literal

try:
    from cyclopts import App, CycloptsError, Parameter
    from rich.console import Console
except ImportError as error:  # the core needs neither
    sys.exit(f"the command line needs more packages ({error.name} is missing): pip install 'linformers[cli]'")

from linformers.cli.bench import app as bench
from linformers.cli.linearize import linearize
from linformers.cli.spectrum import spectrum

app = App(
    name="linformers",
    help="Linformer: attention whose cost grows linearly with the sequence.",
    suppress_keyboard_interrupt=False,
)
app.command(bench)
app.command(linearize)
app.command(spectrum)
app.register_install_completion_command(help="Install completion for the shell in use, or for --shell.")


@app.command(name="--show-completion")
def show_completion(shell: Literal["bash", "zsh", "fish"] = "bash") -> None:
    """Print the completion script of a shell, to copy it or to change it."""
    print(app.generate_completion(prog_name="linformers", shell=shell))


@app.meta.default
def launch(
    *tokens: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    debug: Annotated[bool, Parameter(negative="", help="Show the traceback of an error.")] = False,
) -> int:
    """Run one command, and turn its end into an exit code: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    console = Console(stderr=True)
    try:
        app(tokens, exit_on_error=False, print_error=True, result_action="return_value")
    except CycloptsError:
        return 2
    except KeyboardInterrupt:
        console.print("interrupted")
        return 130
    except (ValueError, OSError, ImportError) as error:
        if debug:
            raise
        console.print(f"error: {error}", style="red", markup=False)
        return 1
    return 0


def main() -> None:
    """The ``linformers`` command."""
    sys.exit(app.meta(result_action="return_value"))
