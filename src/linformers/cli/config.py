"""``--config``: options from a TOML or YAML file."""

from pathlib import Path
from typing import Any

from cyclopts import App, CycloptsError
from cyclopts.argument import ArgumentCollection
from cyclopts.config import ConfigFromFile, Dict, Toml, Yaml

from linformers.extras import require
from linformers.training.options import option


def option_name(name: str) -> str:
    """The name of an option, without dashes in front, from that of a setting."""
    return option(name).removeprefix("--")


class Options:
    """The options of a file, for the command that is run.

    Keys are names of options: at the top level for any command, or in a table with the name of a command, which takes precedence; options
    on the command line take precedence over both. A key that is no option of the command is an error, and so is a table that is no command.

    Args:
        app: all commands.
        path: ``*.toml``, ``*.yaml`` or ``*.yml``.

    Raises:
        ValueError: for another kind of file.
        MissingPackageError: for a YAML file without PyYAML.
        OSError: if it is not there.
    """

    def __init__(self, app: App, path: Path) -> None:
        kinds: dict[str, Any] = {".toml": Toml, ".yaml": Yaml, ".yml": Yaml}
        if path.suffix not in kinds:
            raise ValueError(f"--config takes a .toml, .yaml or .yml file, got {path}")
        if not path.is_file():
            raise OSError(f"--config {path}: there is no such file")
        if kinds[path.suffix] is Yaml:
            require(f"--config {path}", "cli", "yaml")  # cyclopts imports it when it reads the file
        self.app, self.path = app, path
        self.file: ConfigFromFile = kinds[path.suffix](path, must_exist=True)

    def __call__(self, app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        """Pass the options of the file for these commands to cyclopts."""
        found: dict[str, Any] = {}
        level: Any = self.file.config
        place, group = str(self.path), self.app
        for name in (*commands, None):
            if not isinstance(level, dict):
                raise CycloptsError(msg=f"{place} must be a table of options, got {level!r}")
            known = sorted(key for key in group if not key.startswith("-"))
            for key, value in level.items():
                if not isinstance(value, dict):
                    found[str(key).replace("_", "-")] = value
                elif key not in known:
                    raise CycloptsError(msg=f"{place}: [{key}] is not a command; the commands are {', '.join(known)}")
            if name is not None:
                level, place, group = level.get(name, {}), f"{place} [{name}]", group[name]
        Dict(data=found, use_commands_as_keys=False, source=str(self.path))(app, commands, arguments)
