"""Creates the environment that a command needs, then becomes that command.

    python3 tools/setup_env.py [--torch REQUIREMENT] -- COMMAND [ARGUMENT ...]

The environment is a folder in the checkout: ``.venv`` for the default torch, ``.venv-newest`` for
``--torch torch``, ``.venv-2.15.0`` for ``--torch torch==2.15.0``. It is made once, and again after
a change of setup.py, of the Python, or of the checkout's path.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_TORCH = "torch==2.13.0"
STAMP = "fusion_passes.stamp"
IMPORTED = "import torch._dynamo.compiled_autograd, torch._inductor.compile_fx, torch.nn.parallel"


def main() -> NoReturn:
    """Set up, and replace this process; on an error, print it and exit."""
    parser = argparse.ArgumentParser(
        usage="%(prog)s [--torch REQUIREMENT] -- COMMAND [ARGUMENT ...]"
    )
    words = f"torch, for the newest that setup.py allows, or torch==VERSION ({DEFAULT_TORCH})"
    parser.add_argument("--torch", default="", help=words)
    parser.add_argument("command", nargs="+", help="what to run in the environment")
    options = parser.parse_args()
    if sys.version_info < (3, 10):  # noqa: UP036  An older one would say that there is no torch.
        sys.exit(
            f"setup: Python must be 3.10 or newer, but {sys.executable} is "
            f"{platform.python_version()}. Choose another: make PYTHON=python3.11 ..."
        )
    # make passes an empty one.
    requirement = options.torch or DEFAULT_TORCH
    environment = ROOT / folder_name(requirement)
    try:
        ensure(environment, requirement)
    except subprocess.CalledProcessError:
        sys.exit(f"setup: {environment.name} could not be made; why stands above.")
    become(environment, options.command)


def folder_name(requirement: str) -> str:
    """Folder of the environment for this torch in the checkout."""
    if requirement == DEFAULT_TORCH:
        return ".venv"
    return ".venv-" + requirement.replace("torch==", "").replace("torch", "newest")


def ensure(environment: Path, requirement: str) -> None:
    """Create the environment anew, or do nothing if it is up to date.

    Raises:
        subprocess.CalledProcessError: venv or pip failed, and printed the reason.
    """
    stamp = environment / STAMP
    decisive = "\0".join([requirement, sys.version, sys.executable, str(ROOT), ""])
    wanted = hashlib.sha256(decisive.encode() + (ROOT / "setup.py").read_bytes()).hexdigest()
    if stamp.exists() and stamp.read_text() == wanted:
        return
    sys.stderr.write(
        f"setup: preparing {environment.name} with {requirement}. The first time downloads torch "
        "and takes minutes.\n"
    )
    if stamp.exists():
        stamp.unlink()
    subprocess.check_call([sys.executable, "-m", "venv", "--clear", str(environment)])
    python = str(environment / "bin" / "python")
    # pip does not compile the 12,600 files, which saves 20 s of a core: a fifth of them is imported
    # at all. A single process imports, and so compiles, these below. Several processes that start
    # at once would each compile all of them.
    command = [python, "-m", "pip", "install", "--disable-pip-version-check", "--no-compile"]
    command += [requirement, "--editable", f"{ROOT}[dev]"]
    if not sys.stderr.isatty():
        command.append("--quiet")
    subprocess.check_call(command)
    # If torch cannot be imported, the user's command reports it.
    subprocess.call([python, "-c", IMPORTED], stderr=subprocess.DEVNULL, env=keeping_bytecode())
    stamp.write_text(wanted)


def keeping_bytecode() -> dict[str, str]:
    """This process's environment, with bytecode caching.

    Without it, each process would compile all modules again, unlike processes of users.
    """
    variables = dict(os.environ)
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    return variables


def become(environment: Path, command: list[str]) -> NoReturn:
    """Replace this process by the command, so that signals and exit code are the command's."""
    variables = keeping_bytecode()
    variables["VIRTUAL_ENV"] = str(environment)
    variables.pop("PYTHONHOME", None)
    variables["PATH"] = os.pathsep.join([str(environment / "bin"), variables.get("PATH", "")])
    sys.stdout.flush()
    os.execvpe(command[0], command, variables)


if __name__ == "__main__":
    main()
