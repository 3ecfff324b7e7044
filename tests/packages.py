"""Build the wheel and the sdist, install each in a clean environment, and import every front with and without its extra; ``make packages``.

The packages that they need are not installed again: the environments see those of the project's environment after their own. It needs an index for
the build backend. What an extra lacks is hidden.
"""

import json
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
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
    done = subprocess.run(
        [*map(str, words)], capture_output=True, text=True, env={"KERAS_BACKEND": "torch", "PATH": "/usr/bin:/bin"}
    )
    if done.returncode:
        sys.exit(f"{' '.join(map(str, words))}\n{done.stdout}{done.stderr}")
    return done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""


def main() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["name"]
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
            for entry, extra in ENTRIES.items():
                for hidden in ([], [extra[1]]) if extra else ([],):
                    said = run(place / "bin" / "python", "-c", CHECK, json.dumps(hidden), entry)
                    expected = f"{version}[{extra[0]}]" if hidden else f"imported from {site}"
                    if expected not in said and not (hidden and f"[{extra[0]}]" in said and "pip install" in said):
                        sys.exit(f"{file.name}: {entry} without {hidden}: {said}")
            print(f"{file.name}: {len(ENTRIES)} entries, with and without their extras")


if __name__ == "__main__":
    main()
