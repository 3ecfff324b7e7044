"""Build the wheel and the sdist, install each in a clean environment, and import every front with and without its extra; ``make packages``.

For each of the two, the packages that they need are not installed again: the environment sees those of the project's own, after its own, and what an
extra lacks is hidden. There mypy also checks a small program against the installed files. Then the wheel goes into an environment with nothing
else, and its extras follow one by one, as pip resolves them: each front names its extra before, and works after. It needs an index.
"""

import json
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
ENTRIES = {
    "import linformers": (),
    "import linformers.hf": ("hf", "transformers"),
    "import linformers.linearize.encoders": ("hf", "transformers"),
    "from linformers.training import train": ("train", "transformers"),
    "import linformers.keras": ("keras", "keras"),
    "from linformers.export import need; need('onnx')": ("export", "onnx"),
    "import linformers.cli": ("cli", "cyclopts"),
}
ENVIRONMENT = {"KERAS_BACKEND": "torch", "PATH": "/usr/bin:/bin"}  # nothing that leads to other packages
ORDER = ("cli", "keras", "export", "hf", "train")
CHECK = """
import json, sys
sys.modules.update(dict.fromkeys(json.loads(sys.argv[1])))
try:
    exec(sys.argv[2])
    import linformers
    print("imported from", linformers.__file__)
except (ImportError, SystemExit) as error:
    print(error)
"""


def run(*words: object) -> str:
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, env=ENVIRONMENT)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, words))}\n{done.stdout}{done.stderr}")
    return done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""


def check(python: Path, site: Path, entry: str, extra: tuple[str, ...], *, absent: bool, hidden: bool = False) -> None:
    """Import one front; where its extra is absent, or hidden, the error names the line that installs it."""
    said = run(python, "-c", CHECK, json.dumps([extra[1]] if hidden else []), entry)
    if absent:
        right = f"[{extra[0]}]" in said and "pip install" in said
    else:
        right = f"imported from {site}" in said
    if not right:
        sys.exit(f"{entry}, {'without' if absent else 'with'} {extra}: {said}")


def typed(python: Path, folder: Path) -> None:
    """A program of a user passes ``mypy --strict`` with the installed package, and a mistake in it is found."""
    from test_public import USER

    program = folder / "program.py"
    for text, expected in (
        (USER, "Success"),
        (USER.replace("Linformer(512,", "Linformer('512',"), "error: Argument 1"),
    ):
        program.write_text(text, encoding="utf-8")
        command = [python, "-m", "mypy", "--strict", "--cache-dir", folder / "cache", program.name]
        done = subprocess.run([*map(str, command)], cwd=folder, capture_output=True, text=True, env=ENVIRONMENT)
        if expected not in done.stdout:
            sys.exit(f"mypy, instead of {expected}: {done.stdout}{done.stderr}")


def alone(wheel: Path, folder: Path) -> None:
    """The wheel with what pip installs for it, and for one extra after the other."""
    run(sys.executable, "-m", "venv", folder)
    python = folder / "bin" / "python"
    site = next((folder / "lib").glob("python*/site-packages"))
    here: set[str] = set()
    for extra in (None, *ORDER):
        wanted = f"{wheel}[{extra}]" if extra else wheel
        run(python, "-m", "pip", "--quiet", "install", "--constraint", ROOT / "constraints.txt", wanted)
        here |= {extra} if extra else set()
        here |= {"hf"} if extra == "train" else set()
        there = {names[1] for names in ENTRIES.values() if names and names[0] in here}
        for entry, names in ENTRIES.items():
            absent = bool(names) and names[0] not in here
            if not absent or names[1] not in there:  # hf brings what train is recognised by
                check(python, site, entry, names, absent=absent)
    print(f"{wheel.name}: alone, and with {', '.join(ORDER)}")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        made = Path(folder)
        run(*pip, "install", "--target", made / "tools", "--constraint", ROOT / "constraints.txt", "hatchling")
        build = f"import os, sys; sys.path.insert(0, {str(made / 'tools')!r}); os.chdir({str(ROOT)!r}); import hatchling.build as b; "
        for name in ("wheel", "sdist"):
            run(sys.executable, "-c", f"{build} print(b.build_{name}({str(made)!r}))")
        for file in sorted([*made.glob("*.whl"), *made.glob("*.tar.gz")]):
            place = made / f"of-{file.suffix[1:]}"
            run(sys.executable, "-m", "venv", place)
            run(
                *pip,
                "--python",
                place / "bin" / "python",
                "install",
                "--no-deps",
                "--constraint",
                ROOT / "constraints.txt",
                file,
            )
            site = next((place / "lib").glob("python*/site-packages"))
            (site / "others.pth").write_text(sysconfig.get_path("purelib"))
            python = place / "bin" / "python"
            for entry, extra in ENTRIES.items():
                check(python, site, entry, extra, absent=False)
                if extra:
                    check(python, site, entry, extra, absent=True, hidden=True)
            typed(python, place)
            print(f"{file.name}: {len(ENTRIES)} entries, with and without their extras; typed")
        alone(next(made.glob("*.whl")), made / "alone")


if __name__ == "__main__":
    main()
